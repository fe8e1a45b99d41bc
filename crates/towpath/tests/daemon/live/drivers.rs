//! Every driver between the two machines, and NFQUEUE.

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use towpath_port::netns::{Host, ip, veth, within};

use super::machines::*;
use crate::support::until;

/// The machines' offloads are on: large segments and partial checksums. Every driver must forward them correctly, also with an
/// inspector for all packets.
#[towpath_testenv::needs(netns, tun, xdp)]
#[test]
fn every_inline_driver_has_real_tcp() {
    through_every_inline_driver(|left, right| {
        arrived(transfer(left, right, 9001));
        arrived(transfer(left, right, 9000));
    });
}

#[towpath_testenv::needs(netns, tun, xdp, "iperf3")]
#[test]
fn every_inline_driver_has_iperf3() {
    through_every_inline_driver(|left, right| iperf3(left, right, 9000, "--bytes 32M"));
}

fn through_every_inline_driver(talk: impl Fn(&Host, &Host) + Sync) {
    let rows = [
        "driver = \"af_packet\"",
        "driver = \"af_packet\"\noffload = true",
        "driver = \"af_xdp\"",
        // The engine creates the device. It is then moved to the namespace of a machine.
        "driver = \"tap\"",
        "driver = \"tap\"\noffload = true",
        "driver = \"tun\"",
        "driver = \"tun\"\noffload = true",
    ];
    let queue = "[queue.1]\ncommand = \"towpath inspect --queue 1 --match nothing-like-this --verdict drop\"\n\
                 overload = \"block\"\ndeadline = 600\n";
    for driver in rows {
        within(|| {
            let config = BRIDGE.replace("driver = \"af_packet\"", driver);
            let files = files(&format!("{config}{queue}"), RULES);
            let devices = driver.contains("\"t");
            let hosts = (!devices).then(machines);
            let engine = Engine::try_start(files.path()).unwrap_or_else(|said| panic!("{driver}: {said}"));
            let (left, right) = hosts.unwrap_or_else(|| {
                let (left, right) = (Host::new(), Host::new());
                left.take("wan", &format!("{LEFT}/24"));
                right.take("lan", &format!("{RIGHT}/24"));
                (left, right)
            });
            talk(&left, &right);
            let stats = engine.json("show stats --json");
            assert!(!stats.to_string().contains("malformed"), "{driver}: {stats}");
            let queues = engine.json("show queues --json");
            let queue = &queues["queues"][0];
            assert!(queue["passed"].as_u64() > Some(64) && queue["lost"] == 0, "{driver}: {queues}");
            engine.stop();
        });
    }
}

/// Two machines with the kernel of this namespace as their router, which sends the packets that it forwards to queue 5.
pub(super) fn queued() -> (Host, Host) {
    let (left, right) = (Host::new(), Host::new());
    veth("wan", "l0");
    veth("lan", "r0");
    ip("addr add 10.0.1.254/24 dev wan");
    ip("addr add 10.0.2.254/24 dev lan");
    std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
    left.take("l0", "10.0.1.1/24");
    right.take("r0", &format!("{RIGHT}/32"));
    left.run(|| ip("route add default via 10.0.1.254"));
    right.run(|| {
        ip("addr add 10.0.2.1/24 dev r0");
        ip("route add default via 10.0.2.254");
    });
    ip(&format!("route add {RIGHT} dev lan"));
    let queued = ["iptables-legacy", "iptables"].iter().any(|program| {
        let words = ["-A", "FORWARD", "-j", "NFQUEUE", "--queue-num", "5"];
        Command::new(program).args(words).output().is_ok_and(|output| output.status.success())
    });
    assert!(queued, "iptables with NFQUEUE");
    (left, right)
}

/// The engine gets only the beginning of long packets. They arrive complete, also if a rule would change them.
#[towpath_testenv::needs(netns, nfqueue)]
#[test]
fn packets_that_the_kernel_truncated_are_forwarded_unchanged() {
    within(|| {
        let (left, right) = queued();
        let config = "rules = \"r.ipfw\"\n[port.kernel]\ndriver = \"nfqueue\"\nqueue = 5\ncopy-range = 128\n\
                      [control]\nsocket = \"ctl.sock\"\n";
        let rules = "add 100 setdscp ef ip from any to any\nadd 110 tcp-setmss 1200 tcp from any to any\n\
                     add 300 allow ip from any to any\n";
        let files = files(config, rules);
        let engine = Engine::start(files.path());
        arrived(transfer(&left, &right, 9001));
        let lost = || {
            let ports = engine.json("show ports --json");
            let lost = ports["ports"][0]["lost"].as_array().unwrap().clone();
            lost.iter()
                .map(|lost| (lost[0].as_str().unwrap().to_owned(), lost[1].as_u64().unwrap()))
                .collect::<Vec<_>>()
        };
        // After a pause of the engine, the kernel's queue may also have been full.
        until(|| lost().iter().any(|(reason, count)| reason == "unchanged" && *count > 0));
        engine.stop();
    });
}

#[towpath_testenv::needs(netns, nfqueue)]
#[test]
fn the_kernels_own_queue_is_decided() {
    within(|| {
        let (left, right) = queued();
        let config = "rules = \"r.ipfw\"\n[port.kernel]\ndriver = \"nfqueue\"\nqueue = 5\n[control]\nsocket = \"ctl.sock\"\n\
                      [queue.1]\ncommand = \"towpath inspect --queue 1 --match nothing-like-this --verdict drop\"\n\
                      overload = \"block\"\ndeadline = 600\n";
        let rules = "add 100 inspect 1 tcp from any to any 9000\nadd 200 deny tcp from any to any 9009\n\
                     add 210 reset tcp from any to any 9010\nadd 220 unreach port udp from any to any 9010\n\
                     add 300 allow ip from any to any\n";
        let files = files(config, rules);
        let engine = Engine::start(files.path());
        arrived(transfer(&left, &right, 9001));
        arrived(transfer(&left, &right, 9000));
        assert!(left.run(|| {
            let refused = TcpStream::connect_timeout(&(RIGHT, 9009).into(), Duration::from_millis(300));
            refused.unwrap_err().kind() == std::io::ErrorKind::TimedOut
        }));
        // A rejected packet is answered at once, by a raw socket and not by the queue.
        left.run(|| {
            let error = TcpStream::connect((RIGHT, 9010)).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{error}");
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.connect((RIGHT, 9010)).unwrap();
            socket.send(b"hello").unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let error = socket.recv(&mut [0; 8]).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{error}");
        });
        let stats = engine.json("show stats --json");
        assert!(stats["stats"]["dropped"].as_u64() > Some(0), "{stats}");
        rejected(&engine);
        engine.stop();
    });
}

/// Rules 210 and 220 have rejected the two, and no other packet. A SYN whose answer is late is repeated, also between two looks.
fn rejected(engine: &Engine) {
    until(|| {
        let rules = engine.json("show rules --json");
        let packets = |number: u64| {
            let rule = rules["rules"].as_array().unwrap().iter().find(|rule| rule["number"] == number);
            rule.unwrap()["packets"].as_u64().unwrap()
        };
        let (reset, unreach) = (packets(210), packets(220));
        let rejected = &engine.json("show stats --json")["stats"]["rejected"];
        reset > 0 && unreach > 0 && *rejected == reset + unreach
    });
}

/// The same for IPv6: a rejected packet is answered at once, by a raw socket and not by the queue.
#[towpath_testenv::needs(netns, nfqueue, ipv6)]
#[test]
fn the_kernels_own_queue_is_decided_for_ipv6_too() {
    within(|| {
        let (left, right) = (Host::new(), Host::new());
        veth("wan", "l0");
        veth("lan", "r0");
        let there =
            |file: &str, value: &str| std::fs::write(format!("/proc/sys/net/ipv6/conf/{file}"), value);
        let both = ["wan", "lan"].iter().all(|device| there(&format!("{device}/disable_ipv6"), "0").is_ok());
        assert!(both && there("all/forwarding", "1").is_ok(), "a kernel with IPv6");
        for (host, device, outside, number) in [(&left, "l0", "wan", 1), (&right, "r0", "lan", 2)] {
            ip(&format!("addr add 2001:db8:{number}::fe/64 dev {outside} nodad"));
            host.take(device, &format!("10.0.{number}.1/24"));
            host.run(move || {
                std::fs::write(format!("/proc/sys/net/ipv6/conf/{device}/disable_ipv6"), "0").unwrap();
                ip(&format!("addr add 2001:db8:{number}::1/64 dev {device} nodad"));
                ip(&format!("route add default via 2001:db8:{number}::fe dev {device}"));
            });
        }
        let queued = ["ip6tables-legacy", "ip6tables"].iter().any(|program| {
            let words = ["-A", "FORWARD", "-j", "NFQUEUE", "--queue-num", "6"];
            Command::new(program).args(words).output().is_ok_and(|output| output.status.success())
        });
        assert!(queued, "ip6tables with NFQUEUE");
        let config = "rules = \"r.ipfw\"\n[port.kernel]\ndriver = \"nfqueue\"\nqueue = 6\n\
                      [control]\nsocket = \"ctl.sock\"\n";
        let rules = "add 210 reset tcp from any to any 9010\nadd 220 unreach6 port udp from any to any 9010\n\
                     add 300 allow ip from any to any\n";
        let files = files(config, rules);
        let engine = Engine::start(files.path());
        let (ready, listens) = std::sync::mpsc::channel();
        let server = right.start(move || {
            let listener = TcpListener::bind("[2001:db8:2::1]:9001").unwrap();
            ready.send(()).unwrap();
            both_ways(listener.accept().unwrap().0, 2)
        });
        listens.recv().unwrap();
        let client = left.start(|| both_ways(TcpStream::connect("[2001:db8:2::1]:9001").unwrap(), 1));
        arrived((client, server));
        left.run(|| {
            let place = "[2001:db8:2::1]:9010";
            let error = TcpStream::connect(place).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{error}");
            let socket = UdpSocket::bind("[::]:0").unwrap();
            socket.connect(place).unwrap();
            socket.send(b"hello").unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let error = socket.recv(&mut [0; 8]).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{error}");
        });
        rejected(&engine);
        engine.stop();
    });
}

/// Frames received and frames sent by an interface in the calling thread's namespace.
fn frames(interface: &str) -> [u64; 2] {
    statistics(interface).map(|[frames, _]| frames)
}

/// More packets than the ring has room for arrive while the engine is stopped. Every packet that the kernel delivered to the port is
/// received or counted as lost, and every received packet is sent or counted.
#[towpath_testenv::needs(netns)]
#[test]
fn a_flood_is_received_or_counted() {
    within(|| {
        let (left, right) = machines();
        let files = files(BRIDGE, "add allow ip from any to any\n");
        let engine = Engine::start(files.path());
        // Both machines then know each other's Ethernet address.
        let there = right.run(|| UdpSocket::bind((RIGHT, 9)).unwrap());
        left.run(|| UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"hello", (RIGHT, 9)).unwrap());
        there.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        there.recv(&mut [0; 8]).unwrap();
        engine.signal(Signal::STOP);
        left.run(|| {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            for _ in 0..40_000 {
                // send(2) may fail with ENOBUFS; that packet was never on the wire.
                let _ = socket.send_to(&[7; 1400], (RIGHT, 9));
            }
        });
        engine.signal(Signal::CONT);
        let side = |name: &str| {
            let ports = engine.json("show ports --json");
            let port =
                ports["ports"].as_array().unwrap().iter().find(|port| port["name"] == name).unwrap().clone();
            let lost = |reason: &str| {
                let lost = port["lost"].as_array().unwrap().iter().find(|lost| lost[0] == reason);
                lost.map_or(0, |lost| lost[1].as_u64().unwrap())
            };
            let [received, sent] = ["received", "sent"].map(|what| port[what].as_u64().unwrap());
            (received, sent, lost("rx_full"), lost("tx_full") + lost("tx_refused"))
        };
        until(|| {
            let [[_, left_sent], [right_got, _]] = [left.run(|| frames("l0")), right.run(|| frames("r0"))];
            let ((received, _, lost, _), (_, sent, _, refused)) = (side("wan"), side("lan"));
            let stats = engine.json("show stats --json");
            let count = |what: &str| stats["stats"][what].as_u64().unwrap();
            let decided = count("passed") + count("dropped") + count("rejected");
            let ports = side("wan").0 + side("lan").0;
            left_sent == received + lost
                && (received, sent) == (sent + refused, right_got)
                && (ports, ports) == (count("packets"), decided)
                && lost > 0
        });
        engine.stop();
    });
}
