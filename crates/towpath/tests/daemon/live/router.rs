//! A router between the two machines.

use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;

use towpath_port::netns::{Host, ip, settled, veth, within};

use super::machines::*;
use crate::support::until;

#[towpath_testenv::needs(netns, tun)]
#[test]
fn a_router_takes_a_hop_from_every_packet() {
    within(|| {
        let config = "rules = \"r.ipfw\"\n[port.wan]\ndriver = \"tun\"\n[port.lan]\ndriver = \"tun\"\noffload = true\n\
                      [control]\nsocket = \"ctl.sock\"\n[[route]]\nto = \"10.0.0.1\"\nport = \"wan\"\n\
                      [[route]]\nto = \"10.0.0.2\"\nport = \"lan\"\n";
        let rules = "add 100 count ip from any to any in recv wan ipttl 64\nadd 200 allow ip from any to any out keep-state\n\
                     add 300 allow ip from any to any\n";
        let files = files(config, rules);
        let engine = Engine::start(files.path());
        let (left, right) = (Host::new(), Host::new());
        left.take("wan", &format!("{LEFT}/24"));
        right.take("lan", &format!("{RIGHT}/24"));
        arrived(transfer(&left, &right, 9001));
        let rules = engine.json("show rules --json");
        assert!(rules["rules"][0]["packets"].as_u64() > Some(0), "{rules}");
        assert!(rules["rules"][1]["packets"].as_u64() > Some(0), "{rules}");
        engine.stop();
    });
}

/// Gives a machine an IPv6 address and a default route.
fn six(host: &Host, device: &'static str, number: usize) {
    host.run(move || {
        std::fs::write(format!("/proc/sys/net/ipv6/conf/{device}/disable_ipv6"), "0").unwrap();
        ip(&format!("addr add 2001:db8:{number}::1/64 dev {device} nodad"));
        ip(&format!("route add default via 2001:db8:{number}::fe dev {device}"));
    });
}

/// Both machines send to each other over a connection to this address of the right machine.
fn exchange(left: &Host, right: &Host, place: &'static str) {
    let (ready, listens) = mpsc::channel();
    let server = right.start(move || {
        let listener = TcpListener::bind(place).unwrap();
        ready.send(()).unwrap();
        both_ways(listener.accept().unwrap().0, 2)
    });
    listens.recv().unwrap();
    let client = left.start(move || both_ways(TcpStream::connect(place).unwrap(), 1));
    arrived((client, server));
}

/// Two machines of IPv6 with a router between them that they find by its neighbor advertisements.
#[towpath_testenv::needs(netns, ipv6)]
#[test]
fn a_router_is_found_by_its_neighbors() {
    within(|| {
        let (left, right) = (Host::new(), Host::new());
        veth("wan", "l0");
        veth("lan", "r0");
        let config = "rules = \"r.ipfw\"\n[port.wan]\ndriver = \"af_packet\"\naddress = \"2001:db8:1::fe\"\n\
                      [port.lan]\ndriver = \"af_packet\"\naddress = \"2001:db8:2::fe\"\n\
                      [control]\nsocket = \"ctl.sock\"\n\
                      [[route]]\nto = \"2001:db8:1::/64\"\nport = \"wan\"\nmac = \"02:00:00:00:00:01\"\n\
                      [[route]]\nto = \"2001:db8:2::/64\"\nport = \"lan\"\nmac = \"02:00:00:00:00:02\"\n";
        for (host, device, number) in [(&left, "l0", 1), (&right, "r0", 2)] {
            ip(&format!("link set {device} address 02:00:00:00:00:0{number}"));
            host.take(device, &format!("10.0.{number}.1/24"));
            six(host, device, number);
        }
        let files = files(
            config,
            "add 100 allow icmp6 from any to any icmp6types 135,136\nadd 200 allow tcp from any to any\n",
        );
        let engine = Engine::start(files.path());
        exchange(&left, &right, "[2001:db8:2::1]:9001");
        engine.stop();
    });
}

/// Makes a machine announce an MSS for packets of 1500 bytes, which exceed its MTU, so that its peers send such packets.
const ADVERTISES: &str = "advmss 1460";
const ADVERTISES_6: &str = "advmss 1440";

/// A router from a link of 1500 bytes to one of 1400: longer packets are segmented or fragmented, or their sender gets an ICMP error.
#[towpath_testenv::needs(netns, ipv6)]
#[test]
fn packets_above_the_mtu_are_segmented_fragmented_or_answered() {
    // Segments of the sending host's size, and large segments; ports that forward large segments unchanged, and ports that do not.
    for (setting, offload) in
        [("gso_max_segs 1", false), ("gso_max_segs 65535", false), ("gso_max_segs 65535", true)]
    {
        within(|| {
            let (left, right) = (Host::new(), Host::new());
            veth("wan", "l0");
            veth("lan", "r0");
            for (host, device, number) in [(&left, "l0", 1), (&right, "r0", 2)] {
                host.take(device, &format!("10.0.{number}.1/24"));
                host.run(move || ip(&format!("route add default via 10.0.{number}.254")));
                six(host, device, number);
                host.run(move || ip(&format!("link set {device} {setting}")));
            }
            ip("link set lan mtu 1400");
            right.run(move || {
                ip("link set r0 mtu 1400");
                ip(&format!("route replace default via 10.0.2.254 {ADVERTISES}"));
                ip(&format!("-6 route replace default via 2001:db8:2::fe dev r0 {ADVERTISES_6}"));
            });
            let config = ASKS
                .replace("driver = \"af_packet\"", &format!("driver = \"af_packet\"\noffload = {offload}"));
            let rules = "add 100 allow layer2 mac-type arp\nadd 110 allow icmp6 from any to any icmp6types 135,136\n\
                         add 200 allow ip from any to any\n";
            let files = files(&config, rules);
            ["wan", "lan"].into_iter().for_each(settled);
            let engine = Engine::start(files.path());
            exchange(&left, &right, "10.0.2.1:9001");
            // Fragments of 1500 bytes without Don't Fragment.
            let socket = right.run(|| std::net::UdpSocket::bind("10.0.2.1:9").unwrap());
            let mut got = [0; 9001];
            socket.set_read_timeout(Some(std::time::Duration::from_secs(1))).unwrap();
            // Repeated: the ring of an engine that has waited long for a processor has no room.
            until(|| {
                left.run(|| {
                    std::net::UdpSocket::bind("0.0.0.0:0")
                        .unwrap()
                        .send_to(&bytes(5)[..9000], "10.0.2.1:9")
                        .unwrap()
                });
                socket.recv(&mut got).is_ok_and(|len| len == 9000)
            });
            assert!(got[..9000] == bytes(5)[..9000]);
            exchange(&left, &right, "[2001:db8:2::1]:9001");
            let lan = || {
                let ports = engine.json("show ports --json");
                let ports = ports["ports"].as_array().unwrap();
                ports.iter().find(|port| port["name"] == "lan").unwrap()["lost"].as_array().unwrap().clone()
            };
            if setting == "gso_max_segs 1" {
                until(|| lan().iter().any(|lost| lost[0] == "too_long" && lost[1].as_u64() > Some(0)));
            }
            let expected = ["too_long", "other_host", "rx_full"];
            let others: Vec<_> =
                lan().into_iter().filter(|lost| !expected.iter().any(|reason| lost[0] == *reason)).collect();
            assert!(others.is_empty(), "{others:?}");
            engine.stop();
        });
    }
}

/// A router without configured Ethernet addresses. Hosts of wan send to hosts of lan, and to networks beyond these.
const ASKS: &str = r#"
rules = "r.ipfw"
[port.wan]
driver = "af_packet"
address = ["10.0.1.254", "2001:db8:1::fe"]
[port.lan]
driver = "af_packet"
address = ["10.0.2.254", "2001:db8:2::fe"]
[control]
socket = "ctl.sock"
[[route]]
to = "10.0.1.0/24"
port = "wan"
[[route]]
to = "10.0.2.0/24"
port = "lan"
[[route]]
to = "10.9.0.0/16"
port = "lan"
via = "10.0.2.1"
[[route]]
to = "2001:db8:1::/64"
port = "wan"
[[route]]
to = "2001:db8:2::/64"
port = "lan"
"#;

/// An unsolicited ARP reply with a wrong Ethernet address for 10.0.2.1.
const LIE: [u8; 36] = [
    8, 6, 0, 1, 8, 0, 6, 4, 0, 2, 2, 0xbb, 0, 0, 0, 0xbb, 10, 0, 2, 1, 0, 0, 0, 0, 0, 0, 10, 0, 2, 254, 0, 0,
    0, 0, 0, 0,
];

#[towpath_testenv::needs(netns, ipv6)]
#[test]
fn a_router_finds_its_neighbors() {
    for threads in [1, 2] {
        within(|| {
            let (left, right) = (Host::new(), Host::new());
            veth("wan", "l0");
            veth("lan", "r0");
            ip("link set lan address 02:00:00:00:00:fe");
            for (host, device, number) in [(&left, "l0", 1), (&right, "r0", 2)] {
                host.take(device, &format!("10.0.{number}.1/24"));
                host.run(move || ip(&format!("route add default via 10.0.{number}.254")));
                six(host, device, number);
            }
            right.run(|| ip("addr add 10.9.0.1/32 dev lo"));
            // The engine resolves the neighbors of a link again after the link was down.
            ["wan", "lan"].into_iter().for_each(settled);
            let rules = "add 100 allow layer2 mac-type arp\nadd 110 allow icmp6 from any to any icmp6types 135,136\n\
                         add 200 allow ip from any to any\n";
            let files = files(&format!("{ASKS}[engine]\nthreads = {threads}\n"), rules);
            let engine = Engine::start(files.path());
            // The first packets wait until the neighbor is found: nothing is lost.
            exchange(&left, &right, "10.0.2.1:9001");
            exchange(&left, &right, "10.9.0.1:9002");
            exchange(&left, &right, "[2001:db8:2::1]:9001");
            let port = |name: &str| {
                let ports = engine.json("show ports --json");
                ports["ports"].as_array().unwrap().iter().find(|port| port["name"] == name).unwrap().clone()
            };
            let lost = |reason: &str| {
                let port = port("lan");
                let lost = port["lost"].as_array().unwrap().iter().find(|lost| lost[0] == reason);
                lost.map_or(0, |lost| lost[1].as_u64().unwrap())
            };
            let state = |address: &str| {
                let port = port("lan");
                let found =
                    port["neighbors"].as_array()?.iter().find(|row| row["address"] == address)?.clone();
                Some((found["state"].as_str()?.to_owned(), found["mac"].as_str().map(str::to_owned)))
            };
            let is =
                |state: Option<(String, Option<String>)>, word: &str| state.is_some_and(|(is, _)| is == word);
            until(|| is(state("10.0.2.1"), "REACHABLE"));
            let known = state("10.0.2.1").unwrap().1.unwrap();
            until(|| is(state("2001:db8:2::1"), "REACHABLE"));
            assert_eq!(
                (state("10.9.0.1"), lost("unresolved")),
                (None, 0),
                "hosts behind a next hop are not resolved"
            );
            // Unsolicited replies are ignored.
            right.run(|| {
                use towpath_port::{Frame, LinkType, Port, af_packet};
                let mut lie = vec![2, 0, 0, 0, 0, 0xfe, 2, 0xbb, 0, 0, 0, 0xbb];
                lie.extend(LIE);
                lie[32..38].copy_from_slice(&[2, 0, 0, 0, 0, 0xfe]);
                let mut socket = af_packet::Socket::open(af_packet::Config::new("r0")).unwrap();
                socket.send(&mut std::iter::once(Frame::new(&lie, LinkType::ETHERNET))).unwrap();
                socket.flush().unwrap();
            });
            until(|| lost("unsolicited") > 0);
            assert_eq!(state("10.0.2.1").unwrap().1.unwrap(), known);
            exchange(&left, &right, "10.0.2.1:9003");
            // A missing neighbor is requested, and the packets that wait for it are dropped and counted.
            left.run(|| {
                let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
                (0..200).for_each(|_| drop(socket.send_to(b"hello", "10.0.2.77:9")));
            });
            until(|| is(state("10.0.2.77"), "FAILED"));
            until(|| lost("unresolved") == 200);
            let shown = || String::from_utf8(engine.ctl("show ports").stdout).unwrap();
            // A datagram that arrives after the failure starts another resolution.
            until(|| shown().contains("10.0.2.77 dev lan FAILED\n"));
            let shown = shown();
            assert!(shown.contains(&format!("10.0.2.1 dev lan lladdr {known} ")), "{shown}");
            engine.stop();
        });
    }
}

/// An echo request from the left host (RFC 792).
fn echo_request(to: [u8; 4], number: u16) -> Vec<u8> {
    use towpath_port::LinkType;
    let mut frame = vec![2, 0, 0, 0, 0, 0xfe, 2, 0, 0, 0, 0, 1, 8, 0];
    frame.extend([0x45, 0, 0, 32, 0, 0, 0, 0, 64, 1, 0, 0, 10, 0, 1, 1]);
    frame.extend(to);
    frame.extend([8, 0, 0, 0, 0, 7, (number >> 8) as u8, number as u8, 1, 2, 3, 4]);
    let wire_len = frame.len() as u32;
    towpath_wire::checksum::fill(LinkType::ETHERNET, &mut frame, wire_len);
    frame
}

/// ping(8) and traceroute(8) of Linux, to a router and through it.
#[towpath_testenv::needs(netns, ipv6, "ping", "traceroute")]
#[test]
fn a_router_answers_ping_and_is_a_hop_of_traceroute() {
    within(|| {
        let (left, right) = (Host::new(), Host::new());
        veth("wan", "l0");
        veth("lan", "r0");
        ip("link set wan address 02:00:00:00:00:fe");
        for (host, device, number) in [(&left, "l0", 1), (&right, "r0", 2)] {
            host.take(device, &format!("10.0.{number}.1/24"));
            host.run(move || ip(&format!("route add default via 10.0.{number}.254")));
            six(host, device, number);
        }
        ["wan", "lan"].into_iter().for_each(settled);
        let rules = "add 100 allow layer2 mac-type arp\nadd 110 allow icmp6 from any to any icmp6types 135,136\n\
                     add 120 reass ip from any to any in\nadd 150 unreach port udp from any to me\n\
                     add 200 allow ip from any to any\n";
        // 50 replies at once, then ten per second.
        let files = files(&ASKS.replace("[port.wan]", "[port.wan]\necho = 10"), rules);
        let engine = Engine::start(files.path());
        let says = |words: &str| {
            let words = words.to_owned();
            left.run(move || {
                let mut words = words.split(' ');
                let program = words.next().unwrap();
                let output = std::process::Command::new(program).args(words).output().unwrap();
                format!(
                    "{}{}",
                    String::from_utf8_lossy(&output.stdout),
                    String::from_utf8_lossy(&output.stderr)
                )
            })
        };
        // The address of the link, that of the other link, and both with a hop limit of 1; a request in fragments. Three requests at
        // once (-l), and a minute for the replies: after the last request, ping(8) waits no longer than its interval or twice the
        // longest round trip once it has one reply.
        for words in [
            "ping -n -c 3 -l 3 10.0.1.254",
            "ping -n -c 3 -l 3 -t 1 10.0.2.254",
            "ping -n -c 3 -l 3 -s 1472 -M do 10.0.1.254",
            "ping -n -c 3 -l 3 -s 5000 10.0.1.254",
            "ping -n -c 3 -l 3 2001:db8:1::fe",
            "ping -n -c 3 -l 3 -t 1 2001:db8:2::fe",
            "ping -n -c 3 -l 3 10.0.2.1",
        ] {
            let said = says(&format!("{words} -i 60"));
            assert!(said.contains("3 packets transmitted, 3 received, 0% packet loss"), "{words}: {said}");
            assert!(!said.contains("DUP") && !said.contains("wrong"), "{words}: {said}");
        }
        for (words, hops) in [
            ("traceroute -n -q 1 -N 1 -w 30 -m 4 10.0.2.1", &["10.0.1.254", "10.0.2.1"][..]),
            ("traceroute -n -I -q 1 -N 1 -w 30 -m 4 10.0.2.1", &["10.0.1.254", "10.0.2.1"]),
            ("traceroute -6 -n -q 1 -N 1 -w 30 -m 4 2001:db8:2::1", &["2001:db8:1::fe", "2001:db8:2::1"]),
            // The router itself: rule 150 answers.
            ("traceroute -n -q 1 -N 1 -w 30 -m 4 10.0.2.254", &["10.0.1.254"]),
        ] {
            let said = says(words);
            let seen: Vec<&str> =
                said.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1)).collect();
            assert_eq!(seen, hops, "{words}: {said}");
        }
        let events = |name: &str| {
            let ports = engine.json("show ports --json");
            let port = ports["ports"].as_array().unwrap().iter().find(|port| port["name"] == "wan").unwrap();
            let lost = port["lost"].as_array().unwrap().iter().find(|lost| lost[0] == name);
            lost.map_or(0, |lost| lost[1].as_u64().unwrap())
        };
        until(|| events("echo_replies") == 18);
        // TCP to the router: no answer, and a reason.
        assert!(left.run(|| {
            TcpStream::connect_timeout(&([10, 0, 1, 254], 22).into(), std::time::Duration::from_millis(100))
                .is_err()
        }));
        let stats = || engine.json("show stats --json");
        until(|| stats()["stats"]["dropped_by"]["not_served"].as_u64() > Some(0));
        // The router has not asked for its own addresses.
        let ports = engine.json("show ports --json").to_string();
        assert!(!ports.contains("10.0.1.254") && !ports.contains("10.0.2.254"), "{ports}");
        // A flood, a wrong checksum, and a group as the source.
        left.run(|| {
            use towpath_port::{Frame, LinkType, Port, af_packet};
            let requests: Vec<_> = (0..500).map(|number| echo_request([10, 0, 1, 254], number)).collect();
            let mut bad = requests[..2].to_vec();
            bad[0][36] ^= 1;
            bad[1][6] = 1;
            let mut socket = af_packet::Socket::open(af_packet::Config::new("l0")).unwrap();
            for frames in [bad, requests] {
                socket.send(&mut frames.iter().map(|frame| Frame::new(frame, LinkType::ETHERNET))).unwrap();
                socket.flush().unwrap();
            }
        });
        until(|| events("echo_replies") + events("echo_limited") + events("echo_invalid") == 18 + 502);
        assert_eq!(events("echo_invalid"), 2);
        assert!(events("echo_limited") > 0 && events("echo_replies") > 18);
        engine.stop();
    });
}
