//! `af_packet` ports and the kernel's network stack: a packet has one path.

use std::collections::HashMap;
use std::net::UdpSocket;
use std::process::Command;

use rustix::process::Signal;
use towpath_port::netns::{Host, bound, ip, settled, veth, within};

use super::machines::*;
use crate::support::until;

const CONTROL: &str = "[control]\nsocket = \"ctl.sock\"\n";

/// The engine's machine routes between `wan` and `lan` like the engine: the kernel has addresses, and forwards.
fn routers(exclusive: &str) -> (Host, Host, String) {
    let (left, right) = (Host::new(), Host::new());
    veth("wan", "l0");
    veth("lan", "r0");
    ip("link set wan address 02:00:00:00:00:0a");
    ip("link set lan address 02:00:00:00:00:0b");
    ip("addr add 10.1.0.254/24 dev wan");
    ip("addr add 10.2.0.254/24 dev lan");
    ip("link set r0 address 02:00:00:00:00:02");
    std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
    ip("neigh add 10.2.0.1 lladdr 02:00:00:00:00:02 dev lan");
    left.take("l0", "10.1.0.1/24");
    right.take("r0", "10.2.0.1/24");
    ["wan", "lan"].into_iter().for_each(settled);
    left.run(|| {
        ip("neigh add 10.1.0.254 lladdr 02:00:00:00:00:0a dev l0");
        ip("route add default via 10.1.0.254");
    });
    let config = format!(
        "rules = \"r.ipfw\"\n[port.wan]\ndriver = \"af_packet\"\n{exclusive}[port.lan]\ndriver = \"af_packet\"\n{exclusive}\
         [[route]]\nto = \"10.1.0.0/24\"\nport = \"wan\"\nmac = \"02:00:00:00:00:01\"\n\
         [[route]]\nto = \"10.2.0.0/24\"\nport = \"lan\"\nmac = \"02:00:00:00:00:02\"\n{CONTROL}"
    );
    (left, right, config)
}

const ROUTED: &str = "add 100 deny udp from any to any 9\nadd 200 allow ip from any to any\n";

/// Sends three denied and three allowed packets. Returns how many of each arrive, on this many paths at least.
fn arrivals(left: &Host, right: &Host, paths: usize) -> (usize, usize) {
    let sockets = right.run(|| {
        [9, 10].map(|port| {
            let socket = bound(|| UdpSocket::bind(("10.2.0.1", port)));
            socket.set_nonblocking(true).unwrap();
            socket
        })
    });
    let send = |port: u16, text: &str| {
        let text = text.to_owned();
        left.run(move || {
            UdpSocket::bind("10.1.0.1:0").unwrap().send_to(text.as_bytes(), ("10.2.0.1", port)).unwrap();
        });
    };
    for _ in 0..3 {
        send(9, "denied");
        send(10, "allowed");
    }
    let (mut count, mut ends, mut number) = ([0, 0], HashMap::<Vec<u8>, usize>::new(), 0);
    // The last packets are allowed. When one of them has arrived on each path, everything before it has; twenty are sent, so that packets
    // on another path arrive too.
    until(|| {
        send(10, &format!("end {number}"));
        number += 1;
        for (count, socket) in count.iter_mut().zip(&sockets) {
            let mut bytes = [0; 16];
            while let Ok(len) = socket.recv(&mut bytes) {
                match &bytes[..len] {
                    end if end.starts_with(b"end") => *ends.entry(end.to_vec()).or_default() += 1,
                    _ => *count += 1,
                }
            }
        }
        ends.len() >= 20 && ends.values().any(|arrived| *arrived >= paths)
    });
    (count[0], count[1])
}

/// The first defect: with addresses and ip_forward, the kernel forwarded everything too.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn a_packet_has_one_path() {
    for (exclusive, paths, expected) in
        [("exclusive = false\n", 2, (3, 6)), ("exclusive = true\n", 1, (0, 3))]
    {
        within(|| {
            let (left, right, config) = routers(exclusive);
            let files = files(&config, ROUTED);
            let engine = Engine::start(files.path());
            assert_eq!(arrivals(&left, &right, paths), expected, "{exclusive}");
            let said = engine.stop();
            let warned = said.contains("the kernel processes the packets of `wan` too, denied ones included");
            assert_eq!(warned, expected.0 > 0, "{said}");
            let forwards = said.contains("it forwards (net.ipv4.ip_forward = 1)");
            assert_eq!(forwards, expected.0 > 0, "{said}");
        });
    }
}

/// The engine does not take the interface of an operator's session without being told to.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn an_interface_with_an_address_needs_a_decision() {
    within(|| {
        let (left, _right, config) = routers("");
        let refused = files(&config, ROUTED);
        let said = Engine::try_start(refused.path()).err().unwrap();
        for line in [
            "wan: the kernel has the address 10.1.0.254",
            "host = [\"arp\"",
            "exclusive = true",
            "exclusive = false",
        ] {
            assert!(said.contains(line), "{line}: {said}");
        }
        let check = Command::new(env!("CARGO_BIN_EXE_towpath"))
            .args(["run", "--check"])
            .arg(refused.path().join("t.toml"))
            .output()
            .unwrap();
        let warned = String::from_utf8_lossy(&check.stderr).into_owned();
        assert!(warned.contains("t.toml:2:1: `wan`: the kernel has the address 10.1.0.254"), "{warned}");

        let host = "host = [\"arp\", \"icmp\", \"tcp from any to me 22\"]\n";
        let config =
            config.replacen("driver = \"af_packet\"\n", &format!("driver = \"af_packet\"\n{host}"), 1);
        let config = config.replacen("[port.lan]\n", "[port.lan]\nexclusive = true\n", 1);
        let files = files(&config, "add 100 deny ip from any to any\n");
        let engine = Engine::start(files.path());
        let session = std::net::TcpListener::bind("10.1.0.254:22").unwrap();
        left.run(|| drop(std::net::TcpStream::connect("10.1.0.254:22").unwrap()));
        drop(session);
        engine.stop();
    });
}

/// After kill -9, an open port gives the packets back to the kernel; a closed one keeps them from it until the next engine.
#[towpath_testenv::needs(netns, tcx, bpffs)]
#[test]
fn a_killed_engine_leaves_its_ports_open_or_closed() {
    for closed in [false, true] {
        within(|| {
            let fail = if closed { "fail = \"closed\"\n" } else { "" };
            let (left, right, config) = routers(&format!("exclusive = true\n{fail}"));
            let files = files(&config, ROUTED);
            let mut engine = Engine::start(files.path());
            assert_eq!(arrivals(&left, &right, 1), (0, 3));
            engine.signal(Signal::KILL);
            engine.child.wait().unwrap();
            if !closed {
                // The kernel forwards, without the rules, once the launcher has ended too.
                until(|| arrivals(&left, &right, 1) == (3, 3));
                return;
            }
            let socket = right.run(|| bound(|| UdpSocket::bind("10.2.0.1:9")));
            socket.set_nonblocking(true).unwrap();
            for _ in 0..20 {
                left.run(|| UdpSocket::bind("10.1.0.1:0").unwrap().send_to(b"x", "10.2.0.1:9").unwrap());
            }
            assert!(socket.recv(&mut [0; 8]).is_err(), "the interface stays closed");
            drop(socket);
            let engine = Engine::start(files.path());
            assert_eq!(arrivals(&left, &right, 1), (0, 3));
            engine.stop();
            std::fs::write(files.path().join("t.toml"), config.replace(fail, "")).unwrap();
            Engine::start(files.path()).stop();
            // An engine with open ports removes the programs.
            until(|| arrivals(&left, &right, 1) == (3, 3));
        });
    }
}

#[towpath_testenv::needs(netns)]
#[test]
fn a_second_engine_on_a_port_is_refused() {
    within(|| {
        let _machines = machines();
        let files_of = || files(BRIDGE, RULES);
        let (first, second) = (files_of(), files_of());
        let engine = Engine::start(first.path());
        let said = Engine::try_start(second.path()).err().unwrap();
        let expected = format!("the engine with process id {} has `wan`", engine.child.id());
        assert!(said.contains(&expected), "{said}");
        engine.stop();
        Engine::start(second.path()).stop();
    });
}

/// The kernel would route a packet from `wan` to the TUN device, where the engine receives it a second time.
#[towpath_testenv::needs(netns, tcx, tun)]
#[test]
fn tun_and_af_packet_in_one_namespace_do_not_duplicate() {
    for (exclusive, expected) in [("exclusive = false\n", 2), ("exclusive = true\n", 1)] {
        within(|| {
            let left = Host::new();
            veth("wan", "l0");
            ip("link set wan address 02:00:00:00:00:0a");
            ip("addr add 10.1.0.254/24 dev wan");
            std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
            left.take("l0", "10.1.0.1/24");
            settled("wan");
            left.run(|| {
                ip("neigh add 10.1.0.254 lladdr 02:00:00:00:00:0a dev l0");
                ip("route add default via 10.1.0.254");
            });
            let config = format!(
                "rules = \"r.ipfw\"\nmonitor = [\"wan\", \"t0\"]\n[port.wan]\ndriver = \"af_packet\"\n{exclusive}\
                 [port.t0]\ndriver = \"tun\"\n{CONTROL}"
            );
            let files = files(
                &config,
                "add 100 count udp from any to any 9\nadd 110 count udp from any to any 10\nadd 200 allow ip from any to any\n",
            );
            let engine = Engine::start(files.path());
            ip("addr add 10.9.0.1/32 dev t0");
            ip("route add 10.2.0.0/24 dev t0");
            let send = |port: u16| {
                left.run(move || {
                    UdpSocket::bind("10.1.0.1:0").unwrap().send_to(b"x", ("10.2.0.1", port)).unwrap()
                });
            };
            let counted = |rule: u64| {
                let rules = engine.json("show rules --json");
                let rules = rules["rules"].as_array().unwrap();
                let rule = rules.iter().find(|own| own["number"] == rule).unwrap();
                rule["packets"].as_u64().unwrap()
            };
            send(9);
            // Later packets of both paths: the first has arrived.
            until(|| {
                send(10);
                counted(110) >= 20 && counted(100) >= expected
            });
            assert_eq!(counted(100), expected, "{exclusive}");
            engine.stop();
        });
    }
}
