//! Presets and reassembly against real traffic, as Wireshark's dissectors saw it.
//!
//! The captures stand beside the checkout (`shared`, or where TOWPATH_SHARED says); without them the tests say so and pass.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use towpath::streams::{Chunk, Limits, Streams};
use towpath_gate::packet::Link;
use towpath_gate::wire;
use towpath_mux::Time;
use towpath_mux::assembler::{self, Assembler, Event};
use towpath_mux::framing::{Framing, State};
use towpath_port::{Burst, Header, Port, Received, pcap};

/// One direction as the capture gives it: its bytes up to the first gap, and what is known about it.
#[derive(Clone, Debug, Default)]
struct Bytes {
    data: Vec<u8>,
    gap: bool,
    midstream: bool,
}

/// Stream number, source, destination.
type Key = (u64, String, String);

fn shared() -> Option<PathBuf> {
    let path = match std::env::var_os("TOWPATH_SHARED") {
        Some(path) => PathBuf::from(path),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared"),
    };
    if path.join("captures/truth/pdu").is_dir() {
        return Some(path);
    }
    println!("skipped: no shared captures");
    None
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
            let link = match frame.link.header() {
                Header::Ethernet => Link::Ethernet,
                Header::Ip => Link::Ip,
                Header::Null => Link::Null,
                Header::Sll => Link::Sll,
                Header::Sll2 => Link::Sll2,
                Header::Other => Link::Other,
            };
            if let Ok(packet) = wire::parse(link, frame.bytes, frame.wire_len) {
                streams.handle_packet(&packet, &mut take);
            }
        }
    }
    streams.handle_end(&mut take);
    ways
}

/// What Wireshark says about one direction.
#[derive(Debug, Default)]
struct Truth {
    payload: usize,
    full: bool,
    protocol: String,
    lengths: Vec<usize>,
}

fn truth(path: &Path) -> BTreeMap<Key, Truth> {
    let mut ways: BTreeMap<Key, Truth> = BTreeMap::new();
    for line in std::fs::read_to_string(path).expect("readable").lines() {
        if let Some(line) = line.strip_prefix("# stream ") {
            let words: Vec<&str> = line.split(' ').collect();
            let key = (words[0].parse().expect("a number"), address(words[1]), address(words[3]));
            let payload = words[4].strip_prefix("tcp_payload=").expect("payload").parse().expect("a number");
            let way = Truth { payload, full: line.ends_with("FULL"), ..Truth::default() };
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

fn frame(preset: &str, bytes: &Bytes) -> (Vec<usize>, String) {
    let framing = Framing::preset(preset).expect("a preset");
    let state = State { midstream: bytes.midstream, ..State::default() };
    let mut assembler = Assembler::with_state(framing, assembler::Limits::default(), state);
    assembler.handle_bytes(&bytes.data);
    assembler.handle_end();
    let (mut lengths, mut end) = (Vec::new(), String::new());
    while let Some(event) = assembler.poll(Time::default()) {
        match event {
            Event::Message(message) => lengths.push(message.bytes.len()),
            Event::Failed(failure) => end = failure.to_string(),
            Event::GiveBack { offset, .. } => end = format!("given back at {offset}"),
            Event::End { inside, .. } => end = format!("end, {inside} inside"),
        }
    }
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

#[test]
fn full_directions_are_framed_exactly() {
    let Some(shared) = shared() else { return };
    let (mut exact, mut wrong) = (0, Vec::new());
    for (name, capture, truth_file) in captures(&shared) {
        let ways = reassemble(&capture);
        for (key, truth) in truth(&truth_file) {
            let summed = truth.lengths.iter().sum::<usize>() == truth.payload && truth.payload > 0;
            if !truth.full && !summed {
                continue;
            }
            let Some(preset) = preset(&truth.protocol, &key.1, &key.2) else {
                println!("{name} {key:?}: no preset for {:?}", truth.protocol);
                continue;
            };
            let Some(bytes) = ways.get(&key) else {
                wrong.push(format!("{name} {key:?}: no such direction"));
                continue;
            };
            let (lengths, end) = frame(preset, bytes);
            if lengths == truth.lengths {
                exact += 1;
            } else {
                let show = |lengths: &[usize]| format!("{} {:?}", lengths.len(), &lengths[..lengths.len().min(12)]);
                wrong.push(format!(
                    "{name} {key:?} {preset}: {} expected {}, then {end}; {} of {} bytes, gap {}",
                    show(&lengths), show(&truth.lengths), bytes.data.len(), truth.payload, bytes.gap,
                ));
            }
        }
    }
    println!("{exact} directions exact");
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
