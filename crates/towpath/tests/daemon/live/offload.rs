//! Flow offload: the kernel forwards the packets of decided flows, with the same result as the engine.

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use serde_json::Value;
use towpath_port::netns::{Host, ip, run, settled, veth, within};

use super::machines::*;
use super::upgrade::{self, Running, TIME};
use crate::support::until;

const OFFLOAD: &str = "[offload]\nrules = \"all\"\n";

/// Rules whose results the flow fixes. ARP is no IP packet.
const FIXED: &str = "\
add 50 allow layer2 mac-type arp
add 60 count tcp from any to any in recv wan
add 70 skipto 100 udp from any to any
add 80 count ip from any to 10.0.0.2
add 100 check-state
add 400 allow ip from any to any recv wan keep-state
";

/// The value of a counter of `show offload`.
pub(super) fn offload(engine: &Engine, name: &str) -> u64 {
    let shown = engine.json("show offload --json");
    shown["offload"][name].as_u64().unwrap_or_else(|| panic!("{name}: {shown}"))
}

/// Waits until there are `count` entries.
pub(super) fn entries(engine: &Engine, count: u64) {
    until(|| offload(engine, "entries") == count);
}

/// The packets and bytes of the rule with this number.
pub(super) fn rule(engine: &Engine, number: u64) -> (u64, u64) {
    let rules = engine.json("show rules --json");
    let rule = rules["rules"].as_array().unwrap().iter().find(|rule| rule["number"] == number);
    let count = |name: &str| rule.and_then(|rule| rule[name].as_u64()).unwrap_or_else(|| panic!("{rules}"));
    (count("packets"), count("bytes"))
}

/// The state of the flow from this port of the left machine.
fn state(engine: &Engine, port: u64) -> Value {
    let states = engine.json("show states --json");
    let mut found = states["states"].as_array().unwrap().iter().filter(|state| state["src_port"] == port);
    found.next().cloned().unwrap_or_else(|| panic!("{port}: {states}"))
}

/// The machines of [`machines`]. On veth, hosts leave checksums to the interface; XDP programs leave such frames to the engine.
pub(super) fn offload_machines(bridge: &str) -> (Host, Host) {
    let (left, right) = machines();
    complete_checksums(bridge, &left, &right);
    (left, right)
}

/// With `af_xdp` ports, the hosts complete their checksums, and native programs may redirect to them.
fn complete_checksums(config: &str, left: &Host, right: &Host) {
    if config.contains("af_xdp") {
        left.run(|| run("ethtool", "-K l0 tx off gro on"));
        right.run(|| run("ethtool", "-K r0 tx off gro on"));
    }
}

/// A UDP flow between the machines: datagrams go to and fro, and each must arrive before the next is sent.
pub(super) struct Flow {
    pub(super) left: UdpSocket,
    pub(super) right: UdpSocket,
}

impl Flow {
    pub(super) fn new(left: &Host, right: &Host, port: u16) -> Self {
        let left = left.run(move || UdpSocket::bind((LEFT, port)).unwrap());
        let right = right.run(move || UdpSocket::bind((RIGHT, port)).unwrap());
        for socket in [&left, &right] {
            socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        }
        left.connect((RIGHT, port)).unwrap();
        right.connect((LEFT, port)).unwrap();
        Self { left, right }
    }

    /// One datagram in each direction. Each arrives once.
    pub(super) fn exchange(&self, number: u32) {
        let mut buffer = [0; 64];
        for (from, to) in [(&self.left, &self.right), (&self.right, &self.left)] {
            from.send(&number.to_be_bytes()).unwrap();
            let len = to.recv(&mut buffer).unwrap();
            assert_eq!(buffer[..len], number.to_be_bytes(), "another datagram, or one twice");
        }
    }

    /// A datagram from the left to the right.
    pub(super) fn send_word(&self, word: &[u8]) {
        self.left.send(word).unwrap();
        let mut buffer = [0; 64];
        let len = self.right.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..len], word);
    }

    /// No datagram is left.
    pub(super) fn is_quiet(&self) -> bool {
        [&self.left, &self.right].into_iter().all(|socket| {
            socket.set_nonblocking(true).unwrap();
            let quiet = socket.recv(&mut [0; 64]).is_err();
            socket.set_nonblocking(false).unwrap();
            quiet
        })
    }
}

/// The same traffic through an engine with and without offload: the counters of rules and states are the same, and so is what arrives.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn the_counters_are_those_of_the_engine() {
    counters_are_equal(BRIDGE);
}

pub(super) fn counters_are_equal(bridge: &str) {
    let mut results = Vec::new();
    for config in [bridge.to_owned(), format!("{bridge}{OFFLOAD}")] {
        within(|| {
            let (left, right) = offload_machines(bridge);
            let files = files(&config, FIXED);
            let engine = Engine::start(files.path());
            let flow = Flow::new(&left, &right, 5001);
            let with = config.contains("[offload]");
            (0..4).for_each(|number| flow.exchange(number));
            if with {
                entries(&engine, 2);
            }
            (4..500).for_each(|number| flow.exchange(number));
            assert!(flow.is_quiet());
            if with {
                assert!(
                    offload(&engine, "forwarded_packets") >= 900,
                    "{}",
                    engine.json("show offload --json")
                );
            }
            let state = state(&engine, 5001);
            let counted = [60, 70, 80, 100, 400].map(|number| rule(&engine, number));
            results.push((counted, state["packets"].clone(), state["bytes"].clone()));
            // The engine's own counters are of the packets that it received.
            let stats = engine.json("show stats --json");
            let engine_packets = stats["stats"]["packets"].as_u64().unwrap();
            assert_eq!(engine_packets < 200, with, "{stats}");
            engine.stop();
        });
    }
    assert_eq!(results[0], results[1]);
    assert_eq!(results[0].0[4].0, 1000);
}

/// Much TCP, most of which the kernel forwards; the engine sees its end.
pub(super) fn bulk_is_offloaded(engine: &Engine, left: &Host, right: &Host) {
    iperf3(left, right, 9002, "--bytes 32M");
    let forwarded = offload(engine, "forwarded_bytes");
    assert!(forwarded > 8 << 20, "{}", engine.json("show offload --json"));
    // The engine saw the FINs.
    until(|| offload(engine, "entries") == 0);
    until(|| engine.json("show states --json")["states"].as_array().unwrap().is_empty());
}

/// TCP in both directions, with large segments, and its end: the state is closed as by the engine.
#[towpath_testenv::needs(netns, tcx, "iperf3")]
#[test]
fn tcp_is_offloaded_and_ends() {
    within(|| {
        let (left, right) = machines();
        let config = format!("{BRIDGE}[settings]\ndyn_fin_lifetime = 1\n{OFFLOAD}");
        let files = files(&config, FIXED);
        let engine = Engine::start(files.path());
        arrived(transfer(&left, &right, 9001));
        bulk_is_offloaded(&engine, &left, &right);
        engine.stop();
    });
}

/// A reset after much data that the engine did not see ends the state.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn a_reset_of_an_offloaded_connection_ends_its_state() {
    within(|| {
        let (left, right) = machines();
        let files = files(&format!("{BRIDGE}{OFFLOAD}"), FIXED);
        let engine = Engine::start(files.path());
        let (ready, listens) = mpsc::channel();
        let server = right.start(move || {
            let listener = TcpListener::bind((RIGHT, 9001)).unwrap();
            ready.send(()).unwrap();
            let mut stream = listener.accept().unwrap().0;
            // More bytes than a window has.
            std::io::copy(&mut std::io::Read::by_ref(&mut stream), &mut std::io::sink()).unwrap_or(0)
        });
        listens.recv().unwrap();
        let stream = left.run(|| TcpStream::connect((RIGHT, 9001)).unwrap());
        entries(&engine, 2);
        let block = vec![7; 1 << 20];
        for _ in 0..64 {
            std::io::Write::write_all(&mut &stream, &block).unwrap();
        }
        // Closed with SO_LINGER 0, the connection is reset.
        rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
        drop(stream);
        server.recv().unwrap();
        assert!(offload(&engine, "forwarded_bytes") > 32 << 20, "{}", engine.json("show offload --json"));
        // dyn_rst_lifetime is a second, dyn_ack_lifetime five minutes.
        until(|| engine.json("show states --json")["states"].as_array().unwrap().is_empty());
        engine.stop();
    });
}

/// Entries come and go while packets flow: no packet is lost, and none arrives twice.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn entries_change_under_traffic() {
    entries_change(BRIDGE);
}

pub(super) fn entries_change(bridge: &str) {
    within(|| {
        let (left, right) = offload_machines(bridge);
        let config = format!("{bridge}[settings]\ndyn_udp_lifetime = 100\n{OFFLOAD}");
        let files = files(&config, &format!("{FIXED}table t create type addr\n"));
        let engine = Engine::start(files.path());
        let flow = Flow::new(&left, &right, 5001);
        let mut number = 0;
        let mut go_on = |count: u32| {
            (number..number + count).for_each(|number| flow.exchange(number));
            number += count;
        };
        go_on(10);
        entries(&engine, 2);
        let written = offload(&engine, "offered");
        for round in 0..30 {
            // Each change of a table is another epoch; the entries are renewed.
            assert!(engine.ctl(&format!("table t add 192.0.2.{round}")).status.success());
            go_on(200);
        }
        until(|| {
            go_on(20);
            offload(&engine, "renewed") >= 2 && offload(&engine, "entries") == 2
        });
        assert_eq!(offload(&engine, "offered"), written, "they were renewed, not written again");
        let shown = engine.json("show offload --json");
        assert!(shown["offload"]["missed"]["stale"].as_u64() > Some(0), "{shown}");
        // Without its state, a flow takes the path through the engine until it has another one.
        assert!(engine.ctl("delete state udp 10.0.0.1:5001 10.0.0.2:5001").status.success());
        go_on(200);
        assert!(flow.is_quiet());
        engine.stop();
    });
}

/// New rules that deny a flow end its packets at once.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn a_rule_that_denies_ends_an_offloaded_flow() {
    denied_at_once(BRIDGE);
}

pub(super) fn denied_at_once(bridge: &str) {
    within(|| {
        let (left, right) = offload_machines(bridge);
        let files = files(&format!("{bridge}{OFFLOAD}"), FIXED);
        let engine = Engine::start(files.path());
        let flow = Flow::new(&left, &right, 5001);
        (0..10).for_each(|number| flow.exchange(number));
        entries(&engine, 2);
        (10..50).for_each(|number| flow.exchange(number));
        assert!(engine.ctl("add 10 deny udp from any to any 5001").status.success());
        // The epoch changes before the answer of the command.
        for _ in 0..20 {
            flow.left.send(b"denied").unwrap();
        }
        until(|| rule(&engine, 10).0 == 20);
        assert!(flow.is_quiet());
        assert!(engine.ctl("delete 10").status.success());
        (50..60).for_each(|number| flow.exchange(number));
        entries(&engine, 2);
        engine.stop();
    });
}

/// `explain` names the rule that keeps a flow in the engine. A trace sees every packet.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn explain_names_the_rule_that_prevents_offload() {
    within(|| {
        let (left, right) = machines();
        let rules = "add 50 allow layer2 mac-type arp\nadd 100 count udp from any to any 5002 iplen 1000-2000\nadd 200 check-state\n\
                     add 300 allow log udp from any to any 7 recv wan keep-state\n\
                     add 310 allow udp from any to any 8 recv wan keep-state\n\
                     add 400 allow udp from any to any recv wan keep-state offload\n";
        let files = files(&format!("{BRIDGE}[offload]\n"), rules);
        let engine = Engine::start(files.path());
        let flows = [8, 5001, 5002].map(|port| Flow::new(&left, &right, port));
        for flow in &flows {
            (0..10).for_each(|number| flow.exchange(number));
        }
        entries(&engine, 2);
        let note = |words: &str| {
            let explained = engine.json(&format!("explain --json {words}"));
            explained["notes"][0].as_str().unwrap_or_else(|| panic!("{explained}")).to_owned()
        };
        for (words, expected) in [
            ("in wan udp 10.0.0.1:5001 > 10.0.0.2:5001", "the kernel forwards the packets of this flow"),
            ("in lan udp 10.0.0.2:5001 > 10.0.0.1:5001", "the kernel forwards the packets of this flow"),
            ("in wan udp 10.0.0.1:5002 > 10.0.0.2:5002", "rule 100 has a test whose result may differ"),
            ("in wan udp 10.0.0.1:8 > 10.0.0.2:8", "the rule of its state has no `offload`"),
            ("in wan udp 10.0.0.1:9 > 10.0.0.2:7", "rule 300 has `log`"),
            ("in wan udp 10.0.0.1:5003 > 10.0.0.2:5003", "once it has a state with enough packets"),
            ("in wan icmp 10.0.0.1 > 10.0.0.2", "only TCP and UDP are offloaded"),
        ] {
            assert!(note(words).contains(expected), "{words}: {}", note(words));
        }
        engine.stop();
    });
}

/// While a trace runs, the engine receives every packet.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn a_trace_sees_the_packets_of_offloaded_flows() {
    within(|| {
        let (left, right) = machines();
        let files = files(&format!("{BRIDGE}{OFFLOAD}"), FIXED);
        let engine = Engine::start(files.path());
        let flow = Flow::new(&left, &right, 5001);
        (0..10).for_each(|number| flow.exchange(number));
        entries(&engine, 2);
        let mut trace = std::process::Command::new(env!("CARGO_BIN_EXE_towpath"))
            .args(["ctl", "--socket", files.path().join("ctl.sock").to_str().unwrap()])
            .args([
                "trace",
                "--rule",
                "400",
                "--count",
                "20",
                "--out",
                files.path().join("t.pcapng").to_str().unwrap(),
            ])
            .spawn()
            .unwrap();
        until(|| engine.json("show offload --json")["offload"]["paused"] == true);
        let before = offload(&engine, "forwarded_packets");
        (10..20).for_each(|number| flow.exchange(number));
        assert!(trace.wait().unwrap().success());
        until(|| engine.json("show offload --json")["offload"]["paused"] == false);
        let meanwhile = offload(&engine, "forwarded_packets") - before;
        assert_eq!(meanwhile, 0);
        (20..40).for_each(|number| flow.exchange(number));
        assert!(offload(&engine, "forwarded_packets") >= before + 40);
        engine.stop();
    });
}

/// Rules with `offload` need the table, and the table needs ports that can.
#[test]
fn a_configuration_asks_for_what_is_there() {
    let check = |config: &str, rules: &str| {
        let files = files(config, rules);
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_towpath"))
            .args(["run", "--check"])
            .arg(files.path().join("t.toml"))
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let marked = "add allow udp from any to any keep-state offload\n";
    let (passes, said) = check(BRIDGE, marked);
    assert!(!passes && said.contains("`offload` needs the table [offload]"), "{said}");
    let (passes, said) = check(&format!("{BRIDGE}[offload]\n"), marked);
    assert!(passes, "{said}");
    let (passes, said) = check(&format!("{}[offload]\n", BRIDGE.replace("af_packet", "tap")), marked);
    assert!(!passes && said.contains("no port of this configuration can offload flows"), "{said}");
    let (passes, said) = check(&format!("{BRIDGE}[offload]\nentries = 1\n"), marked);
    assert!(!passes && said.contains("entries"), "{said}");
}

/// A router: the kernel writes the Ethernet addresses, takes a hop, and keeps the checksum right. Neighbors stay known.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn routed_flows_are_rewritten() {
    routed("af_packet");
}

pub(super) fn routed(driver: &str) {
    within(|| {
        let (left, right) = (Host::new(), Host::new());
        veth("wan", "l0");
        veth("lan", "r0");
        left.take("l0", "10.1.0.1/24");
        right.take("r0", "10.2.0.1/24");
        ["wan", "lan"].into_iter().for_each(settled);
        complete_checksums(driver, &left, &right);
        left.run(|| ip("route add default via 10.1.0.254"));
        right.run(|| ip("route add default via 10.2.0.254"));
        let config = "rules = \"r.ipfw\"\n[port.wan]\ndriver = \"af_packet\"\naddress = \"10.1.0.254\"\n\
                      [port.lan]\ndriver = \"af_packet\"\naddress = \"10.2.0.254\"\n\
                      [[route]]\nto = \"10.1.0.0/24\"\nport = \"wan\"\n[[route]]\nto = \"10.2.0.0/24\"\nport = \"lan\"\n\
                      [control]\nsocket = \"ctl.sock\"\n[offload]\nrules = \"all\"\n";
        let files = files(
            &config.replace("af_packet", driver),
            "add 50 allow layer2 mac-type arp\nadd 100 check-state\nadd 200 allow udp from any to any recv wan keep-state\n",
        );
        let engine = Engine::start(files.path());
        let one = left.run(|| UdpSocket::bind("10.1.0.1:5001").unwrap());
        let other = right.run(|| UdpSocket::bind("10.2.0.1:5001").unwrap());
        one.connect("10.2.0.1:5001").unwrap();
        other.connect("10.1.0.1:5001").unwrap();
        for socket in [&one, &other] {
            socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        }
        let exchange = |number: u32| {
            for (from, to) in [(&one, &other), (&other, &one)] {
                from.send(&number.to_be_bytes()).unwrap();
                let mut buffer = [0; 8];
                // The kernel accepts only packets for its Ethernet address, with the right checksum.
                assert_eq!(to.recv(&mut buffer).unwrap(), 4);
                assert_eq!(buffer[..4], number.to_be_bytes());
            }
        };
        (0..10).for_each(exchange);
        entries(&engine, 2);
        (10..200).for_each(exchange);
        assert!(offload(&engine, "forwarded_packets") >= 300, "{}", engine.json("show offload --json"));
        // A packet whose hop limit expires is left to the engine, which answers.
        one.set_ttl(1).unwrap();
        let expired = || {
            let stats = engine.json("show stats --json");
            stats["stats"]["dropped_by"]["ttl_exceeded"].as_u64() > Some(0)
        };
        until(|| {
            let _ = one.send(b"expires");
            expired()
        });
        engine.stop();
    });
}

/// IPv6, with the neighbor discovery of the hosts.
#[towpath_testenv::needs(netns, tcx, ipv6)]
#[test]
fn ipv6_is_offloaded() {
    ipv6(BRIDGE);
}

pub(super) fn ipv6(bridge: &str) {
    within(|| {
        let (left, right) = offload_machines(bridge);
        for (host, device, number) in [(&left, "l0", 1), (&right, "r0", 2)] {
            host.run(move || {
                std::fs::write(format!("/proc/sys/net/ipv6/conf/{device}/disable_ipv6"), "0").unwrap();
                ip(&format!("addr add 2001:db8::{number}/64 dev {device} nodad"));
            });
        }
        let rules = "add 60 allow icmp6 from any to any\nadd 100 check-state\nadd 400 allow udp from any to any recv wan keep-state\n";
        let files = files(&format!("{bridge}{OFFLOAD}"), rules);
        let engine = Engine::start(files.path());
        let [one, other] = ["[2001:db8::1]:5001", "[2001:db8::2]:5001"];
        let flow = Flow {
            left: left.run(move || UdpSocket::bind(one).unwrap()),
            right: right.run(move || UdpSocket::bind(other).unwrap()),
        };
        for (socket, to) in [(&flow.left, other), (&flow.right, one)] {
            socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            socket.connect(to).unwrap();
        }
        (0..10).for_each(|number| flow.exchange(number));
        entries(&engine, 2);
        (10..60).for_each(|number| flow.exchange(number));
        assert!(flow.is_quiet());
        assert!(offload(&engine, "forwarded_packets") >= 100, "{}", engine.json("show offload --json"));
        assert_eq!(rule(&engine, 400).0, 120);
        engine.stop();
    });
}

/// The kernel forwards the flow's packets.
fn is_offloaded(engine: &Engine, flow: &Flow, numbers: &mut std::ops::RangeFrom<u32>) {
    until(|| {
        flow.exchange(numbers.next().unwrap());
        offload(engine, "entries") == 2
    });
    let before = offload(engine, "forwarded_packets");
    numbers.take(100).for_each(|number| flow.exchange(number));
    let after = offload(engine, "forwarded_packets");
    assert!(after >= before + 190, "{before} became {after}");
}

/// An upgraded engine offloads flows anew. One that fails leaves the flows of the engine before as they were.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn flows_are_offloaded_after_an_upgrade() {
    upgrades(BRIDGE);
}

pub(super) fn upgrades(bridge: &str) {
    within(|| {
        let (left, right) = offload_machines(bridge);
        let files = files("", FIXED);
        let directory = files.path();
        let towpath = env!("CARGO_BIN_EXE_towpath");
        let good = upgrade::script(directory, "good", &format!("exec {towpath} \"$@\""));
        let ends = upgrade::script(directory, "ends", "exit 3");
        let config = format!("{bridge}{OFFLOAD}[engine]\nupgrade = [\"{good}\", \"{ends}\"]\n{TIME}\n");
        std::fs::write(directory.join("t.toml"), config).unwrap();
        let mut engine = Running::start(directory);
        let (flow, mut numbers) = (Flow::new(&left, &right, 5001), 0..);
        is_offloaded(&engine.first, &flow, &mut numbers);
        assert!(!engine.first.ctl(&format!("upgrade {ends}")).status.success());
        is_offloaded(&engine.first, &flow, &mut numbers);
        // Killed when it carries packets: the engine before takes over again.
        let _ = upgrade::started(directory);
        let said = engine.first.ctl("upgrade --json");
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        kill_process(upgrade::started(directory), Signal::KILL).unwrap();
        until(|| engine.first.ctl("show stats").status.success());
        is_offloaded(&engine.first, &flow, &mut numbers);
        for _ in 0..2 {
            engine.upgrade();
            is_offloaded(&engine.first, &flow, &mut numbers);
        }
        assert!(flow.is_quiet());
        engine.stop();
    });
}
