//! Flow offload of rules that deny an address, by a table or in the rule.

use std::net::UdpSocket;
use std::time::Duration;

use towpath_gate::PacketSpec;
use towpath_port::af_packet::{self, Socket};
use towpath_port::netns::{Host, ip, settled, veth, within};
use towpath_port::{Frame, LinkType, Port};

use super::machines::*;
use super::offload::{Flow, offload, offload_machines, rule};
use crate::support::until;

const CONFIG: &str = "[offload]\ndeny = true\n";
/// ARP is no IP packet. The replies of the right machine come by another port.
const RULES: &str = "\
table bad create type addr
add 50 allow layer2 mac-type arp
add 60 count ip from any to any in recv wan
add 100 deny ip from table(bad) to any in recv wan
add 200 allow ip from any to any in recv wan
add 210 allow ip from any to any
";

/// Changes of the table and of the rules are effective at once, and all packets count for the rules.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn sources_of_a_table_are_dropped_by_the_kernel() {
    tables_change(BRIDGE);
}

#[towpath_testenv::needs(netns, xdp, "ethtool")]
#[test]
fn sources_of_a_table_are_dropped_by_the_xdp_program() {
    tables_change(&BRIDGE.replace("af_packet", "af_xdp"));
}

#[towpath_testenv::needs(netns, xdp, "ethtool")]
#[test]
fn sources_of_a_table_are_dropped_by_the_native_xdp_program() {
    tables_change(&BRIDGE.replace("\"af_packet\"", "\"af_xdp\"\nmode = \"native\""));
}

fn tables_change(bridge: &str) {
    within(|| {
        let (left, right) = offload_machines(bridge);
        let files = files(&format!("{bridge}{CONFIG}"), RULES);
        let engine = Engine::start(files.path());
        let table =
            |words: &str| assert!(engine.ctl(&format!("table bad {words}")).status.success(), "{words}");
        let note = |words: &str| {
            let explained = engine.json(&format!("explain --json {words}"));
            explained["notes"][0].as_str().unwrap_or_else(|| panic!("{explained}")).to_owned()
        };
        const LEFT_TO_RIGHT: &str = "in wan udp 10.0.0.1:5001 > 10.0.0.2:5001";
        let flow = Flow::new(&left, &right, 5001);
        (0..10).for_each(|number| flow.exchange(number));
        // Packets that the rule has denied so far.
        let mut denied = 0;
        for (round, network) in ["10.0.0.1/32", "10.0.0.0/24", "0.0.0.0/0"].into_iter().enumerate() {
            table(&format!("add {network}"));
            let before = offload(&engine, "dropped_packets");
            // Until the kernel has the table, the engine drops them.
            until(|| {
                flow.left.send(b"denied").unwrap();
                denied += 1;
                offload(&engine, "dropped_packets") > before
            });
            until(|| rule(&engine, 100).0 == denied);
            let kernel = offload(&engine, "dropped_packets");
            (0..50).for_each(|_| assert_eq!(flow.left.send(b"denied").unwrap(), 6));
            denied += 50;
            until(|| offload(&engine, "dropped_packets") == kernel + 50);
            until(|| rule(&engine, 100).0 == denied);
            assert!(flow.is_quiet() && offload(&engine, "denied") == 1);
            let expected = "the kernel drops the packets of this source: rule 100 denies it by a table";
            assert!(note(LEFT_TO_RIGHT).contains(expected), "{}", note(LEFT_TO_RIGHT));
            // The other port does not have the rule.
            flow.right.send(b"allowed").unwrap();
            let mut buffer = [0; 16];
            assert_eq!(flow.left.recv(&mut buffer).unwrap(), 7);
            table(&format!("delete {network}"));
            let first = 100 * (1 + round as u32);
            (first..first + 20).for_each(|number| flow.exchange(number));
        }
        assert_eq!(rule(&engine, 100), (denied, denied * 34));
        // The hosts may send other packets meanwhile.
        until(|| {
            let [all, dropped, passed] = [60, 100, 200].map(|number| rule(&engine, number));
            all == (dropped.0 + passed.0, dropped.1 + passed.1)
        });
        // A rule before it may decide otherwise.
        table("add 10.0.0.1");
        assert!(engine.ctl("add 70 allow udp from any to any 5001").status.success());
        (500..520).for_each(|number| flow.exchange(number));
        let words = "in wan udp 10.0.0.1:5001 > 10.0.0.2:5002";
        let expected = "the kernel drops no packets by the rule's table, because rule 70 has a test whose result may differ";
        assert!(note(words).contains(expected), "{}", note(words));
        assert!(engine.ctl("delete 70").status.success());
        let before = offload(&engine, "dropped_packets");
        until(|| {
            flow.left.send(b"denied").unwrap();
            denied += 1;
            offload(&engine, "dropped_packets") > before
        });
        until(|| rule(&engine, 100).0 == denied);
        assert!(flow.is_quiet());
        engine.stop();
    });
}

/// Destinations, networks in a rule, and a protocol. All packets count for the rules.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn destinations_and_networks_are_dropped_by_the_kernel() {
    other_rules(BRIDGE);
}

#[towpath_testenv::needs(netns, xdp, "ethtool")]
#[test]
fn destinations_and_networks_are_dropped_by_the_xdp_program() {
    other_rules(&BRIDGE.replace("af_packet", "af_xdp"));
}

#[towpath_testenv::needs(netns, xdp, "ethtool")]
#[test]
fn destinations_and_networks_are_dropped_by_the_native_xdp_program() {
    other_rules(&BRIDGE.replace("\"af_packet\"", "\"af_xdp\"\nmode = \"native\""));
}

fn other_rules(bridge: &str) {
    const RULES: &str = "\
table to create type addr
add 50 allow layer2 mac-type arp
add 60 count udp from any to any in recv wan
add 65 deny tcp from 10.0.0.1 to any
add 70 deny ip from any to table(to) in recv wan
add 80 deny udp from 10.0.0.0/30 to any in recv wan
add 90 deny udp from any to 192.0.2.1,10.0.0.0/31 in recv lan
add 200 allow ip from any to any
";
    within(|| {
        let (left, right) = offload_machines(bridge);
        let files = files(&format!("{bridge}{CONFIG}"), RULES);
        let engine = Engine::start(files.path());
        let ctl = |words: &str| assert!(engine.ctl(words).status.success(), "{words}");
        let explain = |words: &str, expected: &str| {
            let explained = engine.json(&format!("explain --json {words}"));
            let note = explained["notes"][0].as_str().unwrap_or_else(|| panic!("{explained}"));
            assert!(note.contains(expected), "{words}: {note}");
        };
        let flow = Flow::new(&left, &right, 5001);
        // Packets from a machine: until the kernel drops them, and then 20 more, which it drops all. Returns how many.
        let denied = |from: &UdpSocket, number: u64| {
            let (mut sent, before) = (0, offload(&engine, "dropped_packets"));
            let counted = rule(&engine, number).0;
            until(|| {
                from.send(b"denied").unwrap();
                sent += 1;
                offload(&engine, "dropped_packets") > before
            });
            until(|| rule(&engine, number).0 == counted + sent);
            let before = offload(&engine, "dropped_packets");
            (0..20).for_each(|_| assert_eq!(from.send(b"denied").unwrap(), 6));
            until(|| offload(&engine, "dropped_packets") == before + 20);
            until(|| rule(&engine, number).0 == counted + sent + 20);
            assert!(flow.is_quiet());
            sent + 20
        };
        let forth = "in wan udp 10.0.0.1:5001 > 10.0.0.2:5001";
        // Rules 80 and 90 deny all of them.
        let (by_80, _) = (denied(&flow.left, 80), denied(&flow.right, 90));
        // The networks of rules 65 and 80, and both of rule 90.
        assert_eq!(offload(&engine, "denied"), 4);
        explain(forth, "the kernel drops the packets of this source: rule 80 denies it by its address");
        let back = "in lan udp 10.0.0.2:5001 > 10.0.0.1:5001";
        explain(back, "the kernel drops the packets to this destination: rule 90 denies it by its address");
        // An earlier rule.
        ctl("table to add 10.0.0.2");
        let by_70 = denied(&flow.left, 70);
        assert_eq!(offload(&engine, "denied"), 5);
        explain(forth, "the kernel drops the packets to this destination: rule 70 denies it by a table");
        [80, 90].iter().for_each(|number| ctl(&format!("delete {number}")));
        assert_eq!(denied(&flow.left, 70) + by_70, rule(&engine, 70).0);
        flow.right.send(b"allowed").unwrap();
        assert_eq!(flow.left.recv(&mut [0; 16]).unwrap(), 7);
        ctl("table to delete 10.0.0.2");
        (0..20).for_each(|number| flow.exchange(number));
        // Rule 65 is of another protocol. A rule before it may decide otherwise.
        let tcp = |port: u16| format!("in wan tcp 10.0.0.1:5001 > 10.0.0.2:{port}");
        explain(&tcp(5001), "the kernel drops the packets of this source: rule 65 denies it by its address");
        ctl("add 62 allow tcp from any to any 5001");
        let stays = "no packets by the rule's addresses, because rule 62 has a test whose result may differ";
        explain(&tcp(5002), stays);
        // Of the packets that came, the exchanged ones have passed.
        let passed = || rule(&engine, 60).0 - rule(&engine, 70).0 - by_80;
        until(|| passed() == 20);
        assert_eq!(rule(&engine, 65), (0, 0));
        engine.stop();
    });
}

/// A table of 20,000 addresses in the kernel, which is written in several steps, and changes of it.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn a_large_table_is_in_the_kernel() {
    within(|| {
        let (left, right) = machines();
        let mut rules = RULES.to_owned();
        for at in 0..20_000_u32 {
            let [_, b, c, d] = at.to_be_bytes();
            rules += &format!("table bad add 198.{}.{c}.{d}\n", 18 + b);
        }
        let files = files(&format!("{BRIDGE}{CONFIG}"), &rules);
        let engine = Engine::start(files.path());
        let flow = Flow::new(&left, &right, 5001);
        until(|| offload(&engine, "denied") == 20_000);
        (0..10).for_each(|number| flow.exchange(number));
        assert!(engine.ctl("table bad add 10.0.0.1").status.success());
        for _ in 0..20 {
            flow.left.send(b"denied").unwrap();
        }
        until(|| offload(&engine, "denied") == 20_001 && rule(&engine, 100).0 == 20);
        let before = offload(&engine, "dropped_packets");
        until(|| {
            flow.left.send(b"denied").unwrap();
            offload(&engine, "dropped_packets") > before
        });
        assert!(engine.ctl("table bad flush").status.success());
        until(|| offload(&engine, "denied") == 0);
        assert!(flow.is_quiet());
        (10..20).for_each(|number| flow.exchange(number));
        engine.stop();
    });
}

/// A router's ports do the same with the frames for their Ethernet addresses.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn a_router_drops_sources_of_a_table() {
    routed("af_packet");
}

#[towpath_testenv::needs(netns, xdp)]
#[test]
fn a_router_drops_sources_of_a_table_on_xdp() {
    routed("af_xdp");
}

fn routed(driver: &str) {
    within(|| {
        let (left, right) = (Host::new(), Host::new());
        veth("wan", "l0");
        veth("lan", "r0");
        left.take("l0", "10.1.0.1/24");
        right.take("r0", "10.2.0.1/24");
        ["wan", "lan"].into_iter().for_each(settled);
        left.run(|| ip("route add default via 10.1.0.254"));
        right.run(|| ip("route add default via 10.2.0.254"));
        let config = format!(
            "rules = \"r.ipfw\"\n[port.wan]\ndriver = \"{driver}\"\naddress = \"10.1.0.254\"\n\
             [port.lan]\ndriver = \"{driver}\"\naddress = \"10.2.0.254\"\n\
             [[route]]\nto = \"10.1.0.0/24\"\nport = \"wan\"\n[[route]]\nto = \"10.2.0.0/24\"\nport = \"lan\"\n\
             [control]\nsocket = \"ctl.sock\"\n{CONFIG}"
        );
        let files = files(&config, RULES);
        let engine = Engine::start(files.path());
        let one = left.run(|| UdpSocket::bind("10.1.0.1:5001").unwrap());
        let other = right.run(|| UdpSocket::bind("10.2.0.1:5001").unwrap());
        one.connect("10.2.0.1:5001").unwrap();
        other.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let arrives = || {
            one.send(b"allowed").unwrap();
            assert_eq!(other.recv(&mut [0; 16]).unwrap(), 7);
        };
        arrives();
        assert!(engine.ctl("table bad add 10.1.0.1").status.success());
        let mut denied = 0;
        until(|| {
            one.send(b"denied").unwrap();
            denied += 1;
            offload(&engine, "dropped_packets") > 10
        });
        until(|| rule(&engine, 100).0 == denied);
        // A frame for another Ethernet address is not the router's.
        let mut frame = PacketSpec::parse("udp 10.1.0.1:5001 > 10.2.0.1:5001").unwrap().frame;
        frame[..6].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
        let mut socket = left.run(|| Socket::open(af_packet::Config::new("l0")).unwrap());
        let dropped = offload(&engine, "dropped_packets");
        for _ in 0..20 {
            assert_eq!(socket.send(&mut [Frame::new(&frame, LinkType::ETHERNET)].into_iter()).unwrap(), 1);
        }
        one.send(b"denied").unwrap();
        until(|| rule(&engine, 100).0 > denied && offload(&engine, "dropped_packets") > dropped);
        assert_eq!(offload(&engine, "dropped_packets"), dropped + 1);
        assert!(engine.ctl("table bad delete 10.1.0.1").status.success());
        arrives();
        engine.stop();
    });
}
