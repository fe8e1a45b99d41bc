//! Presets and reassembly on captures of real traffic, compared with Wireshark's dissectors.
//!
//! The captures are not part of the project: see `towpath_testenv::shared`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use towpath::streams::{Chunk, Limits, Streams};
use towpath_mux::Time;
use towpath_mux::assembler::{self, Assembler, Event};
use towpath_mux::framing::{Framing, State};
use towpath_port::{Burst, Port, Received, pcap};
use towpath_wire as wire;

/// One direction of a capture: its bytes up to the first gap.
#[derive(Clone, Debug, Default)]
struct Bytes {
    data: Vec<u8>,
    gap: bool,
    midstream: bool,
}

/// Stream number, source, destination.
type Key = (u64, String, String);

fn shared() -> PathBuf {
    PathBuf::from(towpath_testenv::shared!())
}

fn reassemble(capture: &Path) -> BTreeMap<Key, Bytes> {
    let mut port = pcap::Reader::open(capture).expect("a capture");
    let mut burst = Burst::new(64);
    let mut streams = Streams::new(Limits::default());
    let mut ways: BTreeMap<Key, Bytes> = BTreeMap::new();
    let mut take = |way: &towpath::streams::Way, chunk: Chunk<'_>| {
        let bytes = ways.entry((way.stream, way.src.to_string(), way.dst.to_string())).or_default();
        bytes.midstream = way.midstream;
        match chunk {
            Chunk::Data(data) if !bytes.gap => bytes.data.extend_from_slice(data),
            Chunk::Data(_) | Chunk::End(_) => {}
            Chunk::Gap(_) => bytes.gap = true,
        }
    };
    while port.receive(&mut burst).expect("readable") != Received::End {
        for frame in burst.iter() {
            if let Ok(packet) = wire::parse(frame.link, frame.bytes, frame.wire_len) {
                streams.handle_packet(&packet, &mut take);
            }
        }
    }
    streams.handle_end(&mut take);
    ways
}

/// Wireshark's view of a direction.
#[derive(Debug, Default)]
struct Truth {
    payload: usize,
    full: bool,
    protocol: String,
    /// The length of every message is known.
    whole: bool,
    lengths: Vec<usize>,
}

fn truth(path: &Path) -> BTreeMap<Key, Truth> {
    let mut ways: BTreeMap<Key, Truth> = BTreeMap::new();
    for line in std::fs::read_to_string(path).expect("readable").lines() {
        if let Some(line) = line.strip_prefix("# stream ") {
            let words: Vec<&str> = line.split(' ').collect();
            let key = (words[0].parse().expect("a number"), address(words[1]), address(words[3]));
            let payload = words[4].strip_prefix("tcp_payload=").expect("payload").parse().expect("a number");
            let way = Truth { payload, full: line.ends_with("FULL"), whole: true, ..Truth::default() };
            ways.insert(key, way);
            continue;
        }
        let columns: Vec<&str> = line.split('\t').collect();
        let (Some(Ok(stream)), [_, _, src, dst, protocol, bytes, field, ..]) =
            (columns.get(1).map(|column| column.parse()), columns.as_slice())
        else {
            continue;
        };
        let bytes: usize = bytes.parse().expect("a number");
        let field = field.parse::<usize>().ok();
        let length = match (*protocol, field) {
            ("tpkt", Some(field)) => field,
            ("websocket", Some(field)) => bytes + field,
            ("rpc", Some(field)) => field + 4,
            ("iec60870_104", Some(field)) => field + 2,
            _ => bytes,
        };
        if let Some(way) = ways.get_mut(&(stream, address(src), address(dst))) {
            way.protocol = (*protocol).to_owned();
            way.whole &= *protocol != "tpkt" || field.is_some();
            way.lengths.push(length);
        }
    }
    ways
}

/// `::1:80` as `[::1]:80`.
fn address(written: &str) -> String {
    let (host, port) = written.rsplit_once(':').expect("address and port");
    if host.contains(':') { format!("[{host}]:{port}") } else { written.to_owned() }
}

fn preset(protocol: &str, src: &str, dst: &str) -> Option<&'static str> {
    Some(match protocol {
        "amqp" => "amqp091",
        "bgp" => "bgp",
        "cql" => "cassandra4",
        "dnp3" => "dnp3",
        "dns" => "dns-tcp",
        "doip" => "doip",
        "http2" => "http2-frame",
        "iec60870_104" => "iec104",
        "kafka" => "kafka",
        "kerberos" => "kerberos-tcp",
        "ldap" => "ldap",
        "mbtcp" => "modbus-tcp",
        "memcache" => "memcached-binary",
        "mongo" => "mongodb",
        "mqtt" => "mqtt",
        "mysql" => "mysql-packet",
        "nbss" => "nbss",
        "opcua" => "opcua",
        "openflow_v1" => "openflow",
        "openwire" => "openwire",
        "pgsql" => {
            let port = |address: &str| address.rsplit(':').next().and_then(|port| port.parse::<u16>().ok());
            if port(src) < port(dst) { "postgres-backend" } else { "postgres-frontend" }
        }
        "resp" => "resp",
        "rpc" => "onc-rpc",
        "synphasor" => "synphasor",
        "thrift" => "thrift-framed",
        "tls" => "tls-record",
        "tpkt" => "tpkt",
        "websocket" => "websocket",
        _ => return None,
    })
}

/// Lengths of the messages and the final event, fed in pieces of these sizes and the rest.
fn frame(preset: &str, bytes: &Bytes, sizes: impl IntoIterator<Item = usize>) -> (Vec<usize>, String) {
    let framing = Framing::preset(preset).expect("a preset");
    let state = State { midstream: bytes.midstream, ..State::default() };
    let mut assembler = Assembler::with_state(framing, assembler::Limits::default(), state);
    let (mut lengths, mut end) = (Vec::new(), String::new());
    let mut drain = |assembler: &mut Assembler| {
        while let Some(event) = assembler.poll(Time::default()) {
            match event {
                Event::Message(message) => lengths.push(message.bytes.len()),
                Event::Failed(failure) => end = format!("at byte {}: {}", failure.offset, failure.cause),
                Event::GiveBack { offset, .. } => end = format!("given back at {offset}"),
                Event::End { inside, .. } => end = format!("end, {inside} inside"),
            }
        }
    };
    let mut rest = bytes.data.as_slice();
    let mut sizes = sizes.into_iter();
    while !rest.is_empty() && !assembler.is_over() {
        let (piece, behind) = rest.split_at(sizes.next().unwrap_or(rest.len()).min(rest.len()));
        assembler.handle_bytes(piece);
        drain(&mut assembler);
        rest = behind;
    }
    assembler.handle_end();
    drain(&mut assembler);
    (lengths, end)
}

fn captures(shared: &Path) -> Vec<(String, PathBuf, PathBuf)> {
    let mut captures = Vec::new();
    let truths = shared.join("captures/truth/pdu");
    let mut folders = vec![truths.clone()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(&truths).expect("within").display().to_string();
            let name = name.trim_end_matches(".tsv").to_owned();
            let capture = shared.join("captures").join(&name);
            if capture.is_file() {
                captures.push((name, capture, path));
            }
        }
    }
    captures.sort();
    captures
}

/// Preset, test of the first bytes of a direction that is not framed, and reason.
type Other = (&'static str, fn(&[u8]) -> bool, &'static str);

/// Directions marked FULL that are not streams of the preset's messages, by their first bytes, with the
/// reason.
const OTHERS: &[Other] = &[
    (
        "thrift-framed",
        |bytes| bytes.starts_with(&[0x80, 0x01]),
        "Thrift without the framed transport: only a parser of all its values knows where a message ends",
    ),
    ("memcached-binary", |bytes| bytes[0].is_ascii_alphabetic(), "memcached's text protocol"),
];

/// Wireshark's RESP dissector counts everything in a segment as one PDU, including a stray LF after a reply:
/// each of its boundaries must be one of ours.
fn same_boundaries(preset: &str, ours: &[usize], theirs: &[usize]) -> bool {
    let ends = |lengths: &[usize]| -> Vec<usize> {
        let sums = lengths.iter().scan(0, |sum, length| {
            *sum += length;
            Some(*sum)
        });
        sums.collect()
    };
    let (mine, wireshark) = (ends(ours), ends(theirs));
    preset == "resp" && mine.last() == wireshark.last() && wireshark.iter().all(|end| mine.contains(end))
}

#[towpath_testenv::needs(shared)]
#[test]
fn full_directions_are_framed_exactly() {
    let shared = shared();
    let (mut exact, mut joined, mut others, mut without, mut wrong) = (0, 0, 0, 0, Vec::new());
    for (name, capture, truth_file) in captures(&shared) {
        let ways = reassemble(&capture);
        for (key, truth) in truth(&truth_file) {
            let summed = truth.lengths.iter().sum::<usize>() == truth.payload && truth.whole;
            if truth.payload == 0 || !truth.full && !summed {
                continue;
            }
            let Some(preset) = preset(&truth.protocol, &key.1, &key.2) else {
                println!("{name} {key:?}: no preset for {:?}", truth.protocol);
                without += 1;
                continue;
            };
            let Some(bytes) = ways.get(&key) else {
                wrong.push(format!("{name} {key:?}: no such direction"));
                continue;
            };
            let (lengths, end) = frame(preset, bytes, [bytes.data.len()]);
            if lengths == truth.lengths {
                exact += 1;
            } else if same_boundaries(preset, &lengths, &truth.lengths) {
                joined += 1;
            } else if OTHERS.iter().any(|(other, begins, _)| *other == preset && begins(&bytes.data)) {
                others += 1;
            } else {
                let show =
                    |lengths: &[usize]| format!("{} {:?}", lengths.len(), &lengths[..lengths.len().min(12)]);
                let (ours, theirs) = (show(&lengths), show(&truth.lengths));
                let (data, payload, gap) = (bytes.data.len(), truth.payload, bytes.gap);
                wrong.push(format!(
                    "{name} {key:?} {preset}: {ours}, expected {theirs}, then {end}; {data} of {payload} bytes, gap {gap}",
                ));
            }
        }
    }
    println!(
        "{exact} exact, {joined} at the same boundaries, {others} other protocols, {without} without a preset"
    );
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// The result does not depend on segmentation: short streams split at each byte, other streams at some, and the
/// longest stream split in 10,000 ways.
#[towpath_testenv::needs(shared)]
#[test]
fn segmentation_changes_nothing() {
    let shared = shared();
    let mut random = Random(0x7077_6174);
    let mut longest: Option<(&'static str, Bytes)> = None;
    for (name, capture, truth_file) in captures(&shared) {
        let ways = reassemble(&capture);
        for (key, truth) in truth(&truth_file) {
            let (Some(preset), Some(bytes)) = (preset(&truth.protocol, &key.1, &key.2), ways.get(&key))
            else {
                continue;
            };
            let whole = frame(preset, bytes, [bytes.data.len()]);
            let cuts = if bytes.data.len() <= 512 { bytes.data.len() } else { 16 };
            for cut in 0..=cuts {
                let cut = if cuts == 16 { random.below(bytes.data.len()) } else { cut };
                assert_eq!(frame(preset, bytes, [cut]), whole, "{name} {key:?} cut at {cut}");
            }
            for _ in 0..4 {
                let segmented = frame(preset, bytes, std::iter::repeat_with(|| 1 + random.below(100)));
                assert_eq!(segmented, whole, "{name} {key:?}");
            }
            if longest.as_ref().is_none_or(|(_, longest)| longest.data.len() < bytes.data.len())
                && whole.0.len() > 100
            {
                longest = Some((preset, bytes.clone()));
            }
        }
    }
    let (preset, bytes) = longest.expect("a long direction");
    let whole = frame(preset, &bytes, [bytes.data.len()]);
    for _ in 0..10_000 {
        let most = 1 << (1 + random.below(13));
        assert_eq!(
            frame(preset, &bytes, std::iter::repeat_with(|| 1 + random.below(most))),
            whole,
            "{preset}"
        );
    }
}

/// Streams have Wireshark's numbers, in all captures with known numbers.
#[towpath_testenv::needs(shared)]
#[test]
fn streams_are_numbered_as_wireshark_does() {
    let shared = shared();
    let mut wrong = Vec::new();
    for (name, capture, truth_file) in captures(&shared) {
        let ways = reassemble(&capture);
        for (key, truth) in truth(&truth_file) {
            if truth.payload > 0 && !ways.contains_key(&key) {
                wrong.push(format!("{name} {key:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// The preset that Wireshark's dissector names is the best guess.
#[towpath_testenv::needs(shared)]
#[test]
fn guesses() {
    use towpath::streams::guess::{self, Sample};

    let shared = shared();
    let (mut right, mut missed) = (0, Vec::new());
    for (name, capture, truth_file) in captures(&shared) {
        let ways = reassemble(&capture);
        let truth = truth(&truth_file);
        for (key, of) in truth.iter().filter(|(_, of)| of.full && of.payload > 0) {
            let Some(expected) = preset(&of.protocol, &key.1, &key.2) else { continue };
            let back = (key.0, key.2.clone(), key.1.clone());
            let mut samples = [Sample::default(), Sample::default()];
            let port = |address: &str| address.rsplit(':').next().and_then(|port| port.parse::<u16>().ok());
            let client = usize::from(port(&key.1) < port(&key.2));
            for (side, key) in [(client, key), (1 - client, &back)] {
                if let Some(bytes) = ways.get(key) {
                    samples[side].extend(&bytes.data, bytes.midstream);
                    samples[side].close(!bytes.gap);
                }
            }
            if ways.get(key).is_some_and(|bytes| {
                OTHERS.iter().any(|(other, begins, _)| *other == expected && begins(&bytes.data))
            }) {
                continue;
            }
            let guesses = guess::guess(&samples);
            match guesses.first() {
                Some(best) if best.request == expected || best.reply == expected => right += 1,
                best => missed.push(format!(
                    "{name} {key:?} {expected}: {best:?}, not {:?}",
                    guesses.iter().find(|guess| guess.request == expected || guess.reply == expected)
                )),
            }
        }
    }
    println!("{right} guessed, {} missed:\n{}", missed.len(), missed.join("\n"));
    assert!(right >= 20 * missed.len(), "{} of {} missed", missed.len(), right + missed.len());
}

/// Reproducible numbers (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ mixed >> 31) % bound.max(1) as u64) as usize
    }
}
