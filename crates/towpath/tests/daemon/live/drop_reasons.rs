//! The drop reasons that `losses.rs` does not produce, in every place that reports losses. `refusals.rs` produces those of the kernel's
//! refusals and of a port without room.

use std::path::Path;
use std::time::Duration;

use towpath_port::netns::{Host, ip, settled, veth, within};
use towpath_ring::{Consumer, Verdict};

use super::losses::{Shown, WAN, captured, comments, datagram, is_logged, send, trace};
use super::machines::*;
use crate::support::until;

const CONFIG: &str = r#"
rules = "r.ipfw"
[port.wan]
driver = "af_packet"
address = ["10.0.1.254", "fd00:1::254"]
[port.lan]
driver = "af_packet"
address = ["10.0.2.254", "fd00:2::254"]
[control]
socket = "ctl.sock"
[[route]]
to = "10.0.2.0/24"
port = "lan"
[[route]]
to = "10.8.0.0/16"
port = "lan"
via = "10.0.2.1"
mac = "02:00:00:00:00:02"
[queue.1]
socket = "q1.sock"
deadline = 600
[settings]
dyn_parent_max = 3
dyn_source_max = 10
dyn_first_syn = 1
dyn_udp_lifetime = 3600
[engine]
log-drops = "all"
drain = 0
reorder-packets = 256
"#;

const RULES: &str = "\
pipe 1 config bw 8Kbit/s burst 100
add 100 allow layer2 mac-type arp
add 110 allow layer2 mac-type 0x88b5 keep-state
add 120 reass ip4 from any to any in
add 200 allow udp from any to any 2000 in limit src-addr 1/second
add 210 allow udp from any to any 2001 in limit dst-addr 9
add 220 allow udp from any to any 2002 in keep-state
add 230 allow tcp from any to any 2003 in keep-state strict
add 240 allow tcp from any to any 2004 in setup keep-state
add 250 call 250 udp from any to any 2005 in
add 260 call 500 udp from any to any 2007 in
add 270 pipe 1 udp from any to any 2008 in
add 280 pipe 9 udp from any to any 2009 in
add 290 fwd fd00:2::1 udp from any to any 2010 in
add 300 inspect 1 udp from any to any 2011-2016 in
add 310 call 410 udp from any to any 2006 in
add 350 allow ip from any to any
add 500 divert 1 udp from any to any 2007
add 510 return udp from any to any 2007
";

/// Each of these rules calls the next ones twice: more jumps than a packet may make, in few nested calls.
fn loops() -> String {
    let level = |level: u32| {
        let (here, next) = (400 + 10 * level, 410 + 10 * level);
        format!(
            "add {here} call {next} udp from any to any 2006\nadd {here} call {next} udp from any to any 2006\nadd {here} return udp from any to any 2006\n"
        )
    };
    let levels: String = (1..=9).map(level).collect();
    levels.replace("add 490 call 500 udp from any to any 2006\n", "")
}

/// A frame for the router with this EtherType and content.
fn frame(ethertype: u16, content: &[&[u8]]) -> Vec<u8> {
    let mut frame = WAN.to_vec();
    frame.extend([2, 0, 0, 0, 0, 1]);
    frame.extend(ethertype.to_be_bytes());
    content.iter().for_each(|part| frame.extend_from_slice(part));
    frame
}

/// An IPv4 packet for a host behind the router. Its checksum is not correct: the engine does not check it.
fn ip4(proto: u8, offset: u16, payload: &[u8]) -> Vec<u8> {
    let [a, b] = (20 + payload.len() as u16).to_be_bytes();
    let [c, d] = offset.to_be_bytes();
    let header = [0x45, 0, a, b, 0, 9, c, d, 64, proto, 0, 0, 10, 0, 1, 1, 10, 8, 0, 1];
    frame(0x0800, &[&header, payload])
}

/// A TCP segment for `port` with these flags.
fn tcp(port: u16, flags: u8) -> Vec<u8> {
    let [a, b] = port.to_be_bytes();
    let mut segment = ip4(6, 0, &[0, 9, a, b, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    // Another source than that of the other states.
    segment[29] = 50;
    segment
}

fn ip6(len: u16, next: u8, payload: &[u8]) -> Vec<u8> {
    let [a, b] = len.to_be_bytes();
    let mut header = vec![0x60, 0, 0, 0, a, b, next, 64];
    header.extend("fd00:1::1".parse::<std::net::Ipv6Addr>().unwrap().octets());
    header.extend("fd00:2::1".parse::<std::net::Ipv6Addr>().unwrap().octets());
    frame(0x86dd, &[&header, payload])
}

/// A frame for each check of the parser.
fn malformed() -> Vec<(&'static str, Vec<u8>)> {
    let mut header_length = ip4(17, 0, &[0; 8]);
    header_length[14] = 0x44;
    let options = |next: u8| [next, 0, 1, 4, 0, 0, 0, 0];
    vec![
        ("malformed_link", frame(0x9100, &[&[0, 1, 8]])),
        ("malformed_tags", frame(0x8847, &[&[0, 0, 0, 64].repeat(17), &[0; 20]])),
        ("malformed_version", frame(0x0800, &[&[0x65; 40]])),
        ("malformed_ip4", frame(0x0800, &[&[0x45; 19]])),
        ("malformed_ip4_header_length", header_length),
        ("malformed_ip6", frame(0x86dd, &[&[0x60; 39]])),
        ("malformed_ip6_payload_length", ip6(100, 17, &[0; 8])),
        ("malformed_ip6_jumbo", ip6(0, 0, &[17, 0, 0xc2, 4, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0])),
        ("malformed_ip6_extension", ip6(8, 0, &[17, 9, 1, 4, 0, 0, 0, 0])),
        ("malformed_ip6_extensions", ip6(18 * 8, 60, &options(60).repeat(18))),
        ("malformed_upper", ip4(17, 0, &[0; 4])),
        ("malformed_tcp_offset", ip4(6, 0, &[0; 20])),
        ("malformed_udp_length", ip4(17, 0, &[0, 9, 0, 9, 0, 7, 0, 0])),
        ("malformed_udplite_coverage", ip4(136, 0, &[0, 9, 0, 9, 0, 7, 0, 0])),
    ]
}

/// Decides the frames that arrive in a while.
fn inspect(consumer: &mut Consumer, mut decide: impl FnMut(&mut Consumer, towpath_ring::Frame)) {
    while let Some(frame) = consumer.recv_timeout(Duration::from_millis(20)).unwrap() {
        decide(consumer, frame);
    }
    consumer.flush();
}

/// Packets that are lost when the engine ends.
fn at_the_end() -> Vec<Vec<u8>> {
    // One half of a datagram, a packet for a neighbor that does not answer, and one that an inspector has.
    let mut half = ip4(17, 0x2000, &[1; 16]);
    half[19] = 77;
    vec![half, datagram([10, 0, 2, 88], (9, 9), 20), datagram([10, 8, 0, 1], (9, 2015), 20)]
}

fn start() -> (Host, Host, tempfile::TempDir, Engine) {
    let (left, right) = (Host::new(), Host::new());
    veth("wan", "l0");
    veth("lan", "r0");
    ip("link set wan address 02:00:00:00:00:fe");
    ip(RIGHT_MAC);
    left.take("l0", "10.0.1.1/24");
    right.take("r0", "10.0.2.1/24");
    ["wan", "lan"].into_iter().for_each(settled);
    let files = files(CONFIG, &(RULES.to_owned() + &loops()));
    let engine = Engine::start(files.path());
    (left, right, files, engine)
}

fn dropped(engine: &Engine, reason: &str) -> u64 {
    engine.json("show stats --json")["stats"]["dropped_by"][reason].as_u64().unwrap_or(0)
}

#[towpath_testenv::needs(netns)]
#[test]
fn every_other_drop_reason_is_reported_too() {
    within(|| {
        let (left, _right, files, engine) = start();
        let mut any = trace(files.path(), "any");
        let mut seen = Vec::new();
        let mut produced = |reason: &'static str| {
            until(|| dropped(&engine, reason) > 0);
            seen.push(reason);
        };
        for (reason, frame) in malformed() {
            send(&left, vec![frame]);
            produced(reason);
        }
        by_the_rules(&left, &engine, &mut produced);
        by_the_router(&left, &mut produced);
        by_the_inspector(&left, &engine, files.path(), &mut produced);

        let shown = Shown::of(&engine);
        seen.iter().for_each(|reason| shown.has(reason));
        // The inspector keeps one packet.
        let mut consumer = Consumer::attach(files.path().join("q1.sock")).unwrap();
        until(|| engine.json("show queues --json")["queues"][0]["inspectors"] == 1);
        let before = ["unresolved", "shutdown"].map(|reason| dropped(&engine, reason));
        send(&left, at_the_end());
        let held = consumer.recv().unwrap();
        assert!(held.is_some() && before == [0, 0]);
        let capture = files.path().join("any");
        let earlier = dropped(&engine, "reassembly") as usize;
        let said = engine.stop();
        assert!(any.wait().unwrap().success(), "the trace ends with the engine");
        let capture = captured(&capture);
        seen.extend(["unresolved", "shutdown"]);
        for reason in &seen {
            assert!(comments(&capture, reason) > 0, "{reason} is not in the capture");
            assert!(is_logged(&said, reason), "{reason}: {said}");
        }
        assert_eq!(comments(&capture, "reassembly"), earlier + 1, "the half of a datagram");
    });
}

fn by_the_rules(left: &Host, engine: &Engine, produced: &mut impl FnMut(&'static str)) {
    let flow = |host: u8, from: u16, port: u16| datagram([10, 8, 0, host], (from, port), 20);
    send(left, vec![frame(0x88b5, &[&[0; 50]])]);
    produced("state_not_ip");
    send(left, (1..9).map(|from| flow(1, from, 2000)).collect());
    produced("over_rate");
    send(left, (1..9).map(|host| flow(host, 9, 2001)).collect());
    produced("limits_full");
    send(left, (1..20).map(|from| flow(1, from, 2002)).collect());
    produced("over_source");
    send(left, vec![tcp(2003, 0x10)]);
    produced("state_invalid");
    send(left, vec![tcp(2004, 0x02)]);
    produced("first_syn");
    send(left, vec![ip4(6, 1, &[0; 8])]);
    produced("tiny_fragment");
    send(left, vec![ip6(8, 253, &[0; 8])]);
    produced("unknown_header");
    send(left, vec![flow(1, 9, 2005)]);
    produced("call_depth");
    send(left, vec![flow(1, 9, 2006)]);
    produced("rule_loop");
    send(left, (0..9).map(|_| flow(1, 9, 2008)).collect());
    produced("policed");
    send(left, vec![flow(1, 9, 2009)]);
    produced("no_pipe");
    send(left, vec![flow(1, 9, 2010)]);
    produced("no_table_hop");
    assert!(dropped(engine, "reassembly") == 0);
    // Two fragments that overlap.
    send(left, vec![ip4(17, 0x2000, &[1; 16]), ip4(17, 0x2001, &[2; 16])]);
    produced("reassembly");
}

fn by_the_router(left: &Host, produced: &mut impl FnMut(&'static str)) {
    send(left, vec![datagram([10, 0, 1, 254], (9, 9), 20)]);
    produced("not_served");
    let mut expired = datagram([10, 8, 0, 1], (9, 9), 20);
    expired[22] = 1;
    send(left, vec![expired]);
    produced("ttl_exceeded");
    send(left, vec![datagram([10, 0, 2, 255], (9, 9), 20)]);
    produced("no_next_hop");
    let mut broadcast = datagram([10, 8, 0, 1], (9, 9), 20);
    broadcast[..6].fill(0xff);
    send(left, vec![broadcast]);
    produced("not_ours");
}

fn by_the_inspector(left: &Host, engine: &Engine, directory: &Path, produced: &mut impl FnMut(&'static str)) {
    let mut consumer = Consumer::attach(directory.join("q1.sock")).unwrap();
    until(|| engine.json("show queues --json")["queues"][0]["inspectors"] == 1);
    let to = |port: u16| datagram([10, 8, 0, 1], (9, port), 20);
    let mut decide = |port: u16, reason: &'static str, verdict: Verdict<'static>| {
        send(left, vec![to(port)]);
        until(|| {
            inspect(&mut consumer, |consumer, frame| consumer.verdict(frame, verdict));
            dropped(engine, reason) > 0
        });
        produced(reason);
    };
    decide(2011, "inspector", Verdict::Drop);
    decide(2012, "invalid_verdict", Verdict::Queue(7));
    decide(2013, "reinject_limit", Verdict::Repeat);
    send(left, vec![to(2014)]);
    let held = consumer.recv().unwrap().unwrap();
    consumer.replace(held, &frame(0x0800, &[&[0x45; 19]])).unwrap();
    consumer.flush();
    produced("bad_replacement");
    // The call's rule is deleted while the inspector has the packet.
    send(left, vec![to(2007)]);
    let held = consumer.recv().unwrap().unwrap();
    assert!(engine.ctl("delete 260").status.success());
    consumer.verdict(held, Verdict::Pass);
    consumer.flush();
    produced("rules_changed");
    // More packets than the inspector's share.
    send(left, (0..300).map(|from| datagram([10, 8, 0, 1], (from, 2015), 20)).collect());
    produced("no_room");
}
