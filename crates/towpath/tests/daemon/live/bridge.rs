//! A bridge: inspectors, reloads, interfaces, threads, and `towpath ctl`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use towpath_port::netns::{Host, ip, veth, within};

use super::machines::*;
use crate::support::until;

#[towpath_testenv::needs(netns)]
#[test]
fn tcp_goes_through_the_bridge_and_its_inspectors() {
    within(|| {
        let (left, right) = machines();
        let queue = "[queue.1]\ncommand = \"towpath inspect --queue 1 --match nothing-like-this --verdict drop\"\n\
                     workers = 2\noverload = \"block\"\ndeadline = 600\n";
        let files = files(&format!("{BRIDGE}{queue}"), RULES);
        let engine = Engine::start(files.path());
        arrived(transfer(&left, &right, 9001));
        arrived(transfer(&left, &right, 9000));
        let queues = engine.json("show queues --json");
        let queue = &queues["queues"][0];
        // Large segments: one packet contains up to 64 KiB.
        assert!(queue["passed"].as_u64() > Some(64) && queue["lost"] == 0, "{queues}");
        let stats = engine.json("show stats --json");
        assert!(!stats.to_string().contains("malformed"), "{stats}");
        assert!(stats["stats"]["states"]["created"].as_u64() > Some(0), "{stats}");
        let ports = engine.json("show ports --json");
        assert_eq!((&ports["ports"][0]["name"], &ports["ports"][0]["state"]), (&"wan".into(), &"up".into()));
        // Hosts on the right may not open connections.
        assert!(right.run(|| {
            let refused = TcpStream::connect_timeout(&(LEFT, 9).into(), Duration::from_millis(300));
            refused.unwrap_err().kind() == std::io::ErrorKind::TimedOut
        }));
        let said = engine.stop();
        assert!(said.contains("capabilities kept: none"), "{said}");
    });
}

/// Datagrams that are longer than the MTU, and that `reass` completes, cross the bridge in fragments. Their state is in the zone
/// of the ports.
#[towpath_testenv::needs(netns)]
#[test]
fn reassembled_datagrams_cross_the_bridge() {
    within(|| {
        let (left, right) = machines();
        let zones = BRIDGE
            .replace("[port.wan]", "[port.wan]\nzone = 3")
            .replace("[port.lan]", "[port.lan]\nzone = 3");
        let rules = "add allow layer2 mac-type arp\nadd reass ip from any to any in\nadd allow udp from any to any 9 keep-state\n";
        let files = files(&zones, rules);
        let engine = Engine::start(files.path());
        let server = right.run(|| UdpSocket::bind((RIGHT, 9)).unwrap());
        let client = left.run(|| UdpSocket::bind((LEFT, 5000)).unwrap());
        for socket in [&server, &client] {
            socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        }
        let mut buffer = vec![0; 1 << 16];
        for len in [100, 4_000, 60_000] {
            let data: Vec<u8> = (0..len).map(|at| (at / 3) as u8).collect();
            client.send_to(&data, (RIGHT, 9)).unwrap();
            let (received, from) = server.recv_from(&mut buffer).unwrap();
            assert!(buffer[..received] == data, "{len}");
            server.send_to(&data, from).unwrap();
            let (received, _) = client.recv_from(&mut buffer).unwrap();
            assert!(buffer[..received] == data, "{len}, back");
        }
        let states = engine.json("show states --json");
        assert_eq!(
            (&states["states"][0]["zone"], &states["states"][1]),
            (&3.into(), &Value::Null),
            "{states}"
        );
        engine.stop();
    });
}

/// Number of reloads under traffic.
const RELOADS: usize = 1000;

#[towpath_testenv::needs(netns)]
#[test]
fn rules_are_reloaded_under_traffic() {
    within(|| {
        let (left, right) = machines();
        let files = files(BRIDGE, RULES);
        let mut engine = Engine::start(files.path());
        let echo = Echo::start(&left, &right, 9001);
        for n in 0..RELOADS {
            // Other rules are added, deleted and changed. The rules that pass the packets, and their states, stay.
            let other =
                ["count ip from any to any", "deny udp from any to any", "allow icmp from any to any"];
            let rules = format!("add {} {}\n{RULES}add 1000 {}\n", 10 + n % 7, other[n % 3], other[n % 2]);
            std::fs::write(files.path().join("r.ipfw"), rules).unwrap();
            engine.signal(Signal::HUP);
            engine.log.line("reloaded: ");
        }
        echo.goes_on();
        assert_eq!(engine.json("show stats --json")["stats"]["dropped"], 0);
        assert_eq!(engine.json("show rules --json")["rules"][0]["number"], 10 + (RELOADS - 1) % 7);
        echo.end();
        // A configuration that cannot be loaded is refused with the reason, and the engine continues with the old one.
        std::fs::write(files.path().join("r.ipfw"), "add alow ip from any to any\n").unwrap();
        engine.signal(Signal::HUP);
        engine.log.line("not reloaded: ");
        let config = BRIDGE.replace("[port.lan]", "[port.lan]\ninterface = \"other\"");
        std::fs::write(files.path().join("t.toml"), config).unwrap();
        engine.signal(Signal::HUP);
        assert!(
            engine
                .log
                .line("not reloaded: ")
                .ends_with("[port.lan] cannot change at run time: restart the engine")
        );
        arrived(transfer(&left, &right, 9001));
        engine.signal(Signal::TERM);
        assert!(engine.child.wait().unwrap().success());
    });
}

#[towpath_testenv::needs(netns)]
#[test]
fn an_engine_that_was_killed_is_started_again_under_traffic() {
    within(|| {
        let (left, right) = machines();
        let files = files(BRIDGE, "add allow ip from any to any\n");
        let mut engine = Engine::start(files.path());
        let echo = Echo::start(&left, &right, 9001);
        for _ in 0..3 {
            echo.goes_on();
            engine.child.kill().unwrap();
            engine.child.wait().unwrap();
            engine = Engine::start(files.path());
            echo.goes_on();
        }
        echo.end();
        engine.stop();
    });
}

#[towpath_testenv::needs(netns)]
#[test]
fn an_interface_that_went_away_is_taken_up_again() {
    within(|| {
        let (left, right) = machines();
        let files = files(BRIDGE, RULES);
        let engine = Engine::start(files.path());
        let state = |name: &str| {
            let ports = engine.json("show ports --json");
            let ports = ports["ports"].as_array().unwrap().clone();
            let port = ports.iter().find(|port| port["name"] == name).unwrap();
            port["state"].as_str().unwrap().to_owned()
        };
        ip("link set lan down");
        until(|| state("lan") == "down");
        ip("link set lan up");
        until(|| state("lan") == "up");
        arrived(transfer(&left, &right, 9001));
        ip("link del lan");
        until(|| state("lan") == "gone");
        veth("lan", "r0");
        ip(RIGHT_MAC);
        right.take("r0", &format!("{RIGHT}/24"));
        until(|| state("lan") == "up");
        arrived(transfer(&left, &right, 9001));
        engine.stop();
    });
}

/// The engine makes the TUN device of a machine again when it was deleted. It carries packets while it has another name, and after it
/// was moved to the engine's namespace and back.
#[towpath_testenv::needs(netns, tun)]
#[test]
fn a_tun_device_that_went_away_is_taken_up_again() {
    within(|| {
        let files = files(&BRIDGE.replace("\"af_packet\"", "\"tun\""), RULES);
        let engine = Engine::start(files.path());
        let (left, right) = (Host::new(), Host::new());
        let take_left = || left.take("wan", &format!("{LEFT}/24"));
        take_left();
        right.take("lan", &format!("{RIGHT}/24"));
        let up = || {
            until(|| {
                let ports = engine.json("show ports --json");
                ports["ports"].as_array().unwrap().iter().all(|port| port["state"] == "up")
            });
            arrived(transfer(&left, &right, 9001));
        };
        up();
        for _ in 0..2 {
            left.run(|| ip("link del wan"));
            until(|| has("wan"));
            take_left();
            up();
            left.run(|| {
                ip("link set wan down");
                ip("link set wan name other");
                ip("link set other up");
            });
            up();
            left.run(|| {
                ip("link set other down");
                ip("link set other name wan");
            });
            let home = rustix::thread::gettid().as_raw_nonzero();
            left.run(move || ip(&format!("link set wan netns {home}")));
            take_left();
            up();
        }
        let said = engine.stop();
        assert_eq!(said.matches("wan: its interface was gone and is opened again").count(), 2, "{said}");
    });
}

/// Whether this thread's network namespace has the interface.
fn has(interface: &str) -> bool {
    let text = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    text.lines().any(|line| line.trim().strip_prefix(interface).is_some_and(|rest| rest.starts_with(':')))
}

/// Maximum number of inspectors at a time.
const INSPECTORS: usize = 24;

#[towpath_testenv::needs(netns)]
#[test]
fn inspectors_come_and_go_under_traffic() {
    within(|| {
        let (left, right) = machines();
        let queue = "[queue.1]\nsocket = \"q1.sock\"\ndefault = \"pass\"\noverload = \"pass\"\n";
        let files = files(&format!("unserved = \"pass\"\n{BRIDGE}{queue}"), RULES);
        let engine = Engine::start(files.path());
        let socket = files.path().join("q1.sock");
        let echo = Echo::start(&left, &right, 9000);
        let attached = || engine.json("show queues --json")["queues"][0]["inspectors"].as_u64();
        let mut inspectors: Vec<Child> = Vec::new();
        let (mut most, mut random) = (0, 1_u32);
        for _ in 0..20 {
            // Numerical Recipes' generator: reproducible pseudo-random numbers.
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let (come, at) = (random >> 29, (random >> 8) as usize);
            for _ in 0..(come as usize).min(INSPECTORS - inspectors.len()) {
                let inspector = Command::new(env!("CARGO_BIN_EXE_towpath"))
                    .args(["inspect", "--queue", "1", "--match", "nothing-like-this", "--verdict", "drop"])
                    .env("TOWPATH_SOCKET", &socket)
                    .spawn();
                inspectors.push(inspector.unwrap());
            }
            let wanted = inspectors.len() as u64;
            most = most.max(wanted);
            until(|| attached() == Some(wanted));
            echo.goes_on();
            let leave = at % (come as usize + 1).min(inspectors.len() + 1);
            for _ in 0..leave {
                let mut inspector = inspectors.swap_remove(at % inspectors.len());
                inspector.kill().unwrap();
                inspector.wait().unwrap();
            }
            let wanted = inspectors.len() as u64;
            until(|| attached() == Some(wanted));
            echo.goes_on();
        }
        assert_eq!(most, INSPECTORS as u64);
        for mut inspector in inspectors {
            inspector.kill().unwrap();
            inspector.wait().unwrap();
        }
        until(|| attached() == Some(0));
        echo.goes_on();
        assert_eq!(engine.json("show stats --json")["stats"]["dropped"], 0);
        echo.end();
        engine.stop();
    });
}

#[towpath_testenv::needs(netns)]
#[test]
fn several_threads_share_one_gate() {
    within(|| {
        let (left, right) = machines();
        let more = "[engine]\nthreads = 2\n[queue.1]\ncommand = \"towpath inspect --queue 1 --match nothing-like-this --verdict drop\"\n\
                    overload = \"block\"\ndeadline = 600\n";
        let files = files(&format!("{BRIDGE}{more}"), RULES);
        let engine = Engine::start(files.path());
        for round in 0..4 {
            arrived(transfer(&left, &right, 9001 + round));
            arrived(transfer(&left, &right, 9000));
        }
        let stats = engine.json("show stats --json");
        assert!(stats["stats"]["states"]["created"].as_u64() >= Some(4), "{stats}");
        let queues = engine.json("show queues --json");
        assert_eq!(
            (&queues["queues"][0]["inspectors"], &queues["queues"][0]["lost"]),
            (&1.into(), &0.into()),
            "{queues}"
        );
        until(|| engine.json("show rings --json")["rings"].as_array().unwrap().len() == 2);
        engine.stop();
    });
}

#[towpath_testenv::needs(netns)]
#[test]
fn flows_are_traced_and_states_are_dumped() {
    within(|| {
        let (left, right) = machines();
        let files = files(&format!("{BRIDGE}[engine]\nthreads = 2\n"), RULES);
        let engine = Engine::start(files.path());
        let follow = |more: &[&str], name: &str| {
            let capture = files.path().join(name);
            let child = Command::new(env!("CARGO_BIN_EXE_towpath"))
                .args(["ctl", "--socket", files.path().join("ctl.sock").to_str().unwrap(), "trace", "--out"])
                .arg(&capture)
                .args(more)
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            // The trace runs when it has written its file.
            until(|| std::fs::metadata(&capture).is_ok_and(|file| file.len() > 0));
            (child, capture)
        };
        // Several connections, which the threads share. They stay open, because a state expires one second after the end of its
        // connection.
        let (flow, flow_capture) = follow(&["--flow", "tcp 10.0.0.2:9002", "--count", "20"], "flow");
        let (denied, denied_capture) = follow(&["--rule", "65535", "--count", "1"], "denied");
        let talk = |port| {
            let listener = right.run(move || TcpListener::bind((RIGHT, port)).unwrap());
            let mut client = left.run(move || TcpStream::connect((RIGHT, port)).unwrap());
            let mut server = listener.accept().unwrap().0;
            for said in 0..20 {
                let mut heard = [0];
                client.write_all(&[said]).unwrap();
                server.read_exact(&mut heard).unwrap();
                server.write_all(&heard).unwrap();
                client.read_exact(&mut heard).unwrap();
                assert_eq!(heard, [said]);
            }
            (client, server)
        };
        let open = [9001, 9002, 9003].map(talk);
        assert!(
            right.run(|| TcpStream::connect_timeout(&(LEFT, 9).into(), Duration::from_millis(300)).is_err())
        );
        for child in [flow, denied] {
            let output = child.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success() && said.contains(" traced, 0 left out"), "{said}");
        }
        let text = |capture: &Path| String::from_utf8_lossy(&std::fs::read(capture).unwrap()).into_owned();
        let flow = text(&flow_capture);
        assert_eq!(flow.matches("rule 400: pass, out by ").count(), 20);
        assert_eq!(text(&denied_capture).matches("rule 65535: drop").count(), 1);
        for (capture, expected) in [(flow_capture, 20), (denied_capture, 1)] {
            use towpath_port::{Burst, Port, Received, pcap};
            let (mut reader, mut burst, mut frames) =
                (pcap::Reader::open(capture).unwrap(), Burst::new(64), 0);
            while reader.receive(&mut burst).unwrap() == Received::Frames {
                frames += burst.len();
            }
            assert_eq!(frames, expected);
        }
        let lines = |words: &str| {
            let output = engine.ctl(words);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        };
        let flows = |text: &str| text.lines().filter(|line| line.contains(" 10.0.0.1 ")).count();
        let dump = lines("dump states");
        assert_eq!(flows(&dump), 3, "{dump}");
        assert_eq!(flows(&lines("show states")), 3);
        let page: Value = serde_json::from_str(lines("dump states --json").lines().next().unwrap()).unwrap();
        assert_eq!(
            (page["states"].as_array().map(Vec::len), &page["next"]),
            (Some(3), &Value::Null),
            "{page}"
        );
        // A cursor after all IPv4 states.
        assert_eq!(lines("dump states --from 8589934592"), "");
        // Behind the slots of the IPv6 states, behind the last part, and a number whose low bits are the beginning.
        for cursor in ["12884901887", "12884901888", "1099511627776"] {
            let output = engine.ctl(&format!("dump states --from {cursor}"));
            let error = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{error}");
            assert_eq!(error, format!("towpath: --from {cursor} is beyond the last state\n"));
        }
        drop(open);
        engine.stop();
    });
}
