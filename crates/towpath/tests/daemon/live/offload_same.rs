//! The same traffic through engines with and without flow offload: the same frames arrive, and rules and states count the same.

use std::collections::HashSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use towpath_gate::PacketSpec;
use towpath_port::af_packet::{self, Socket};
use towpath_port::netns::{ip, within};
use towpath_port::{Burst, Frame, LinkType, Port, Received, pcap};
use towpath_wire::Addresses;

use super::machines::*;
use super::offload::offload;
use crate::support::until;

/// ICMP packets mark the end of a batch: they always take the path through the engine.
const RULES: &str = "\
add 40 allow icmp from 192.0.2.1 to 192.0.2.2
add 50 allow layer2 mac-type arp
add 60 count ip from any to any frag
add 100 check-state
add 200 allow tcp from any to any setup keep-state
add 300 allow udp from any to any keep-state
add 400 allow icmp from any to any
";
/// Rules of a reload, before and after the lookup of the state.
const MORE: &str = "add 70 count tcp from any to any\nadd 80 skipto 90 udp from any to any\nadd 250 count ip from any to any\n";

/// No state ends by time, except of connections that both sides have closed: they end after at most [`CLOSED`] seconds.
const LIFETIMES: &str = "[settings]\ndyn_keepalive = 0\ndyn_syn_lifetime = 250\ndyn_udp_lifetime = 250\n\
                         dyn_fin_lifetime = 250\ndyn_rst_lifetime = 250\ndyn_short_lifetime = 250\n";
const CLOSED: u64 = 4;
/// Directories of captures, and the frames of each file.
const CAPTURES: [&str; 4] = ["frag", "tcp-state", "udp-dns", "vlan-encap"];
const FRAMES: usize = 80;
const LONGEST: usize = 1514;

/// A frame, and whether it comes from the left machine.
type Sent = (bool, Vec<u8>);

/// Frames with a name for messages. Before those that `reload`, the engine gets further rules.
struct Traffic {
    name: PathBuf,
    reload: bool,
    frames: Vec<Sent>,
}

/// The rules of the engines, and those that a reload adds.
#[derive(Clone, Copy)]
struct Rules {
    first: &'static str,
    more: &'static str,
}

/// What an engine did.
struct Outcome {
    /// The frames that arrived, of each part of the traffic.
    arrived: Vec<Vec<Sent>>,
    rules: Vec<Value>,
    states: Vec<Value>,
    /// Packets that the kernel forwarded or dropped.
    decided: u64,
}

/// The addresses of an IP packet, the smaller one first, and whether that is its source.
fn ends(frame: &[u8]) -> Option<([IpAddr; 2], bool)> {
    let packet = towpath_wire::parse(LinkType::ETHERNET, frame, frame.len() as u32).ok()?;
    let [src, dst]: [IpAddr; 2] = match packet.addresses {
        Addresses::V4(src, dst) => [src.into(), dst.into()],
        Addresses::V6(src, dst) => [src.into(), dst.into()],
        _ => return None,
    };
    Some(if src <= dst { ([src, dst], true) } else { ([dst, src], false) })
}

fn hosts(frame: &[u8]) -> Option<[IpAddr; 2]> {
    ends(frame).map(|(hosts, _)| hosts)
}

/// The Ethernet frames of a capture. The smaller address of an IP packet is on the left.
fn frames(capture: &Path) -> Vec<Sent> {
    let Ok(mut reader) = pcap::Reader::open(capture) else { return Vec::new() };
    let (mut burst, mut frames) = (Burst::new(64), Vec::new());
    while frames.len() < FRAMES
        && reader.receive(&mut burst).is_ok_and(|received| received == Received::Frames)
    {
        for frame in
            burst.iter().filter(|frame| frame.link == LinkType::ETHERNET && frame.bytes.len() <= LONGEST)
        {
            let left = ends(frame.bytes).is_none_or(|(_, left)| left);
            frames.push((left, frame.bytes.to_vec()));
        }
    }
    frames.truncate(FRAMES);
    frames
}

fn files_of(directory: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// The interfaces of both machines.
struct Ends {
    left: Socket,
    right: Socket,
    marker: Vec<u8>,
}

impl Ends {
    /// Sends frames of one direction and returns those that arrive before the marker behind them.
    fn pass(&mut self, left: bool, frames: &[Sent]) -> Vec<Sent> {
        let (from, to) =
            if left { (&mut self.left, &mut self.right) } else { (&mut self.right, &mut self.left) };
        let bytes = frames.iter().map(|(_, bytes)| bytes).chain([&self.marker]);
        let mut bytes = bytes.map(|bytes| Frame::new(bytes, LinkType::ETHERNET));
        assert_eq!(from.send(&mut bytes).unwrap(), frames.len() + 1);
        let (mut burst, mut arrived, begun) = (Burst::new(64), Vec::new(), Instant::now());
        loop {
            while to.receive(&mut burst).unwrap() == Received::Frames {
                for frame in burst.iter() {
                    if frame.bytes == self.marker {
                        return arrived;
                    }
                    arrived.push((left, frame.bytes.to_vec()));
                }
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "the marker does not arrive");
            // Yield the processor to those that move the frames.
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// Adds rules to the file, and waits until the engine has them.
fn reload(engine: &Engine, directory: &Path, Rules { first, more }: Rules) {
    std::fs::write(directory.join("r.ipfw"), format!("{first}{more}")).unwrap();
    engine.signal(Signal::HUP);
    let has = |rules: &Value| rules.as_array().unwrap().iter().any(|rule| rule["number"] == 250);
    until(|| has(&engine.json("show rules --json")["rules"]));
}

/// The traffic through an engine with this configuration.
fn through(config: &str, rules: Rules, traffic: &[Traffic]) -> Outcome {
    let (left, right) = machines();
    // Without addresses, the machines answer nothing.
    left.run(|| ip("addr flush dev l0"));
    right.run(|| ip("addr flush dev r0"));
    let marker = PacketSpec::parse("icmp 192.0.2.1 > 192.0.2.2").unwrap().frame;
    let mut ends = Ends {
        left: left.run(|| Socket::open(af_packet::Config::new("l0")).unwrap()),
        right: right.run(|| Socket::open(af_packet::Config::new("r0")).unwrap()),
        marker,
    };
    let files = files(config, rules.first);
    let engine = Engine::start(files.path());
    let mut arrived = Vec::new();
    for part in traffic {
        if part.reload {
            reload(&engine, files.path(), rules);
        }
        let mut of_part = Vec::new();
        for batch in part.frames.chunk_by(|(one, _), (other, _)| one == other) {
            of_part.extend(ends.pass(batch[0].0, batch));
            // Time for entries; without offload, the result is the same.
            std::thread::sleep(Duration::from_millis(1));
        }
        // The kernel's packets may overtake those that the engine has.
        of_part.sort();
        arrived.push(of_part);
    }
    let counters =
        ["forwarded_packets", "dropped_packets"].into_iter().filter(|_| config.contains("[offload]"));
    let decided = counters.map(|name| offload(&engine, name)).sum();
    let rows = |what: &str, keys: &[&str]| {
        let shown = engine.json(&format!("show {what} --json"));
        let lasts = |row: &&Value| row["expire"].as_u64().is_none_or(|seconds| seconds > CLOSED);
        let row = |row: &Value| keys.iter().map(|key| row[*key].clone()).collect::<Value>();
        let mut rows: Vec<_> = shown[what].as_array().unwrap().iter().filter(lasts).map(row).collect();
        rows.sort_by_key(Value::to_string);
        rows
    };
    let rules = rows("rules", &["number", "packets", "bytes"]);
    let states =
        rows("states", &["proto", "src", "src_port", "dst", "dst_port", "packets", "bytes", "kind", "rule"]);
    engine.stop();
    Outcome { arrived, rules, states, decided }
}

/// Returns what differs.
fn differences(one: &[Value], other: &[Value]) -> Vec<(bool, Value)> {
    let only = |here: &[Value], there: &[Value], first| {
        let rows = here.iter().filter(|row| !there.contains(row));
        rows.map(|row| (first, row.clone())).collect::<Vec<_>>()
    };
    [only(one, other, true), only(other, one, false)].concat()
}

/// Passes the traffic through both engines and compares. At least `least` packets must not come to the engine with offload.
fn pass_as_without_offload(bridge: &str, rules: Rules, traffic: &[Traffic], least: u64) {
    let mut outcomes = Vec::new();
    for config in ["", "[offload]\nrules = \"all\"\nafter = 1\ndeny = true\n"] {
        let config = format!("{bridge}{LIFETIMES}{config}");
        within(|| outcomes.push(through(&config, rules, traffic)));
    }
    let Ok([without, with]) = <[_; 2]>::try_from(outcomes) else { unreachable!("two configurations") };
    assert!(with.decided > least, "{}", with.decided);
    for (part, (one, other)) in traffic.iter().zip(without.arrived.iter().zip(&with.arrived)) {
        let missing: Vec<_> = one.iter().filter(|frame| !other.contains(frame)).collect();
        assert!(
            one == other,
            "{}: {} and {} frames, missing {missing:x?}",
            part.name.display(),
            one.len(),
            other.len()
        );
    }
    let (rules, states) =
        (differences(&without.rules, &with.rules), differences(&without.states, &with.states));
    assert!(rules.is_empty() && states.is_empty(), "rules {rules:#?}, states {states:#?}");
}

#[towpath_testenv::needs(netns, tcx, shared)]
#[test]
fn captures_pass_as_without_offload() {
    let directory = Path::new(towpath_testenv::shared!()).join("captures");
    let files = CAPTURES.iter().flat_map(|name| files_of(&directory.join(name)));
    let mut traffic: Vec<_> =
        files.map(|name| Traffic { frames: frames(&name), name, reload: false }).collect();
    // The state of a closed connection may have expired when another file has packets of the same hosts.
    let mut known = HashSet::new();
    traffic.retain(|part| {
        let hosts: HashSet<_> = part.frames.iter().filter_map(|(_, frame)| hosts(frame)).collect();
        let is_new = known.is_disjoint(&hosts);
        known.extend(hosts);
        is_new
    });
    pass_as_without_offload(BRIDGE, Rules { first: RULES, more: MORE }, &traffic, 100);
}

/// Numbers that are the same in each run (xorshift64, Marsaglia 2003).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// A frame of a flow of the left machine or back to it.
fn frame(proto: &str, port: u64, left: bool, fields: &str) -> Sent {
    let (from, to) = (format!("10.0.0.1:{port}"), "10.0.0.2:80");
    let ends = if left { format!("{from} > {to}") } else { format!("{to} > {from}") };
    (left, PacketSpec::parse(&format!("{proto} {ends} {fields}")).unwrap().frame)
}

/// One TCP connection, or two with the same ports: retransmissions, options, segments without ACK, and an end by FIN, by RST, or none.
fn connection(numbers: &mut Numbers, port: u64) -> Vec<Sent> {
    let mut sent = Vec::new();
    for _ in 0..=numbers.below(2) {
        let mut seq = [1000 + 100_000 * numbers.below(9), 5000];
        let mut push = |left: bool, seq: [u64; 2], fields: &str| {
            let [own, other] = if left { seq } else { [seq[1], seq[0]] };
            sent.push(frame("tcp", port, left, &format!("seq {own} ackno {other} {fields}")));
        };
        for _ in 0..=numbers.below(2) {
            push(true, [seq[0] - 1, 0], "syn mss 1460");
        }
        for _ in 0..=numbers.below(2) {
            push(false, [seq[0], seq[1] - 1], "syn ack");
        }
        push(true, seq, "ack");
        for _ in 0..6 + numbers.below(20) {
            let (left, len) = (numbers.below(2) == 0, 1 + numbers.below(900));
            let fields = match numbers.below(12) {
                0 => format!("ack len {len} ipopt rr"),
                1 => format!("psh len {len}"),
                2 => "ack len 0".to_owned(),
                3 => format!("ack psh urg len {len} tcpopt ts"),
                _ => format!("ack len {len}"),
            };
            // A segment may be sent again.
            for _ in 0..=u64::from(numbers.below(4) == 0) {
                push(left, seq, &fields);
            }
            seq[usize::from(!left)] += if fields.contains("len 0") { 0 } else { len };
            push(!left, seq, "ack");
        }
        let first = numbers.below(2) == 0;
        match numbers.below(4) {
            0 => push(first, seq, "rst ack"),
            1 => push(first, seq, "fin ack"),
            2 => {
                push(first, seq, "fin ack");
                push(!first, seq, "ack");
                push(!first, seq, "fin ack");
                push(first, seq, "ack");
            }
            _ => {}
        }
    }
    sent
}

/// Datagrams in both directions, some in fragments or without bytes.
fn datagrams(numbers: &mut Numbers, port: u64) -> Vec<Sent> {
    let mut sent = Vec::new();
    for id in 1..10 + numbers.below(20) {
        let left = numbers.below(3) > 0;
        match numbers.below(8) {
            0 => {
                sent.push(frame("udp", port, left, &format!("id {id} mf len 24")));
                sent.push(frame("udp", port, left, &format!("id {id} offset 4 len 16")));
            }
            1 => sent.push(frame("udp", port, left, "len 0")),
            _ => sent.push(frame("udp", port, left, &format!("len {}", numbers.below(1200)))),
        }
    }
    sent
}

/// Flows side by side: each keeps its order. The engine gets further rules in the middle.
fn generated() -> Vec<Traffic> {
    let numbers = &mut Numbers(0x9e37_79b9_7f4a_7c15);
    let mut flows: Vec<_> = (0..40)
        .map(|flow| {
            let frames =
                if flow % 4 < 3 { connection(numbers, 2000 + flow) } else { datagrams(numbers, 2000 + flow) };
            std::collections::VecDeque::from(frames)
        })
        .collect();
    let mut frames = Vec::new();
    // Few flows at a time, so that packets of a flow are close to each other.
    while !flows.is_empty() {
        let at = numbers.below(flows.len().min(5) as u64) as usize;
        let some = 1 + numbers.below(6) as usize;
        let len = flows[at].len();
        frames.extend(flows[at].drain(..some.min(len)));
        if flows[at].is_empty() {
            flows.remove(at);
        }
    }
    let rest = frames.split_off(frames.len() / 2);
    let part = |name: &str, reload, frames| Traffic { name: name.into(), reload, frames };
    vec![part("before the reload", false, frames), part("after the reload", true, rest)]
}

#[towpath_testenv::needs(netns, tcx)]
#[test]
fn generated_traffic_passes_as_without_offload() {
    pass_as_without_offload(BRIDGE, Rules { first: RULES, more: MORE }, &generated(), 200);
}

/// Two tables of sources, which overlap, one of destinations, networks, rules of one protocol or family, a rule with other addresses for each
/// protocol, and rules that all packets match before.
const DENY: &str = "\
table bad create type addr
table bad add 10.0.1.0/24
table bad add 10.0.2.3
table worse create type addr
table worse add 10.0.2.0/25
table worse add 10.0.1.5
table worse add 2001:db8::/64
table unused create type addr
table unused add 10.0.9.8/31
add 40 allow icmp from 192.0.2.1 to 192.0.2.2
add 50 allow layer2 mac-type arp
add 60 count ip from any to any in recv wan
add 62 count tcp from any to any
add 64 deny udp from 10.0.3.0/26,10.0.1.3 to any in
add 66 deny ip from any to any { src-ip 10.0.0.3 or proto udp } { src-ip 10.0.0.4 or proto tcp }
add 70 deny ip from table(bad) to any in
add 75 deny tcp from any to table(unused) in recv wan
add 80 deny ip from table(worse) to any in recv wan
add 85 deny ip6 from any to 2001:db8:1::2 in recv wan
add 90 count tcp from any to any setup
add 100 check-state
add 200 allow udp from any to any keep-state
add 300 allow ip from any to any
";
/// A longer prefix of one table is in the other one, and a rule counts what the second one denied before.
const DENY_MORE: &str = "table bad add 10.0.2.64/26\ntable unused add 2001:db8:1::1\nadd 65 count ip from any to any in\nadd 250 count ip from any to any\n";

/// Packets of many sources to four destinations: segments with all kinds of flags, datagrams, fragments, options, ICMP.
fn packets_of_sources(numbers: &mut Numbers, count: usize) -> Vec<Sent> {
    let packet = |numbers: &mut Numbers| {
        let port = 1000 + numbers.below(4);
        let (from, to) = match numbers.below(8) {
            0 => (format!("[2001:db8::{:x}]", 1 + numbers.below(3)), ["[2001:db8:1::1]", "[2001:db8:1::2]"]),
            1 => (format!("[2001:db8:0:{:x}::1]", numbers.below(2)), ["[2001:db8:1::1]", "[2001:db8:1::2]"]),
            _ => (
                format!("10.0.{}.{}", numbers.below(4), numbers.below(8) * 16 + 3 + numbers.below(3)),
                ["10.0.9.10", "10.0.9.9"],
            ),
        };
        let to = to[usize::from(numbers.below(3) == 0)];
        let (six, ends) = (from.starts_with('['), format!("{from}:{port} > {to}:80"));
        let len = numbers.below(1200);
        let words = match numbers.below(10) {
            0 => format!("tcp {ends} syn"),
            1 => format!("tcp {ends} rst"),
            2 => format!("tcp {ends} fin ack"),
            3 if !six => format!("udp {ends} len {len} ipopt rr"),
            4 if !six => format!("udp {ends} id {} mf len 24", 1 + len),
            5 if !six => format!("icmp {from} > {to}"),
            6 | 7 => format!("tcp {ends} ack len {len}"),
            _ => format!("udp {ends} len {len}"),
        };
        PacketSpec::parse(&words).unwrap_or_else(|error| panic!("{words}: {error}")).frame
    };
    (0..count).map(|_| (numbers.below(4) > 0, packet(numbers))).collect()
}

fn denies_as_without_offload(bridge: &str) {
    let numbers = &mut Numbers(0x2545_f491_4f6c_dd1d);
    let part = |name: &str, reload, frames| Traffic { name: name.into(), reload, frames };
    let traffic = [
        part("before the reload", false, packets_of_sources(numbers, 600)),
        part("after the reload", true, packets_of_sources(numbers, 600)),
    ];
    pass_as_without_offload(bridge, Rules { first: DENY, more: DENY_MORE }, &traffic, 200);
}

#[towpath_testenv::needs(netns, tcx)]
#[test]
fn addresses_are_denied_as_without_offload() {
    denies_as_without_offload(BRIDGE);
}

#[towpath_testenv::needs(netns, xdp)]
#[test]
fn addresses_are_denied_as_without_offload_on_xdp() {
    denies_as_without_offload(&BRIDGE.replace("af_packet", "af_xdp"));
}
