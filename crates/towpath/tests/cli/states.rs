//! The states of TCP connections in real captures, compared with Wireshark's results.
//!
//! The captures are not part of the project: see `towpath_testenv::shared`.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use towpath_gate::state::{Ends, Install, Lookup, Name, RuleId, Segment, Settings, States, Tracking};
use towpath_port::{Burst, Port, Received, pcap};
use towpath_wire::{self as wire, Fragment, Packet, Time, proto, tunnel};

/// Why connections of a capture differ from Wireshark's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The TCP header is split over two fragments: Wireshark reads it after reassembly.
    SplitHeader,
    /// Wireshark counts the TCP header that an ICMP error quotes.
    Quote,
    /// IPv6 in IPv4, whose TCP Wireshark ascribes to the outer addresses.
    Outer,
    /// A length field is wrong: the gate or Wireshark rejects the packet.
    Lie,
    /// The ports are used again after a close: the state has what was seen of the last connection.
    Reused,
}

/// The captures with a difference, and in how many connections.
const DIFFERENCES: &[(&str, Kind, usize)] = &[
    ("frag/suriv__bug-6887-defrag-ipv4-tcp-syn__frag-ip-tcp-syn.pcap", Kind::SplitHeader, 1),
    ("frag/suriv__bug-6887-defrag-ppp-ipv4-tcp-syn__frag-ppp-ip-tcp-syn.pcap", Kind::SplitHeader, 1),
    ("frag/suriv__ipv6-malformed-fragments-22__frag-22.pcap", Kind::Quote, 1),
    ("frag/zeek__fragmented-syn.pcap", Kind::SplitHeader, 1),
    ("ipv6-ext/suriv__bug-4571-04__ipv6_over_ipv4.pcap", Kind::Outer, 1),
    ("jumbo/tcpdump__gso-ipv4-vxlan-ipv6.pcap", Kind::Outer, 1),
    ("scan-flood/suriv__ipv6-kill-router-gateway__kill_router6.pcap", Kind::Quote, 2),
    ("tcp-state/arkime__tcp-reassembly-synthetic.pcap", Kind::Reused, 1),
    ("tcp-state/deepflow__xiangdao-retrans.pcap", Kind::Lie, 1),
    ("tcp-state/suriv__tcp-session-decode-malformed-ipv4__input.pcap", Kind::Lie, 1),
    ("tcp-state/zeek__reassembly.pcap", Kind::Lie, 1),
];

/// Why strict tracking rejects segments of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Misfit {
    /// The capture has only a part of the connection: one direction, or not all segments.
    Gap,
    /// The capture has them in another order than they were sent.
    Order,
    /// Segments that do not belong to the connection: forged, or sent by a host that has forgotten it.
    Stray,
}

/// The captures with such segments, and their number.
const MISFITS: &[(&str, Misfit, usize)] = &[
    ("app/kafka/arkime__kafka.pcap", Misfit::Gap, 1),
    ("app/ldap/zeek__gap-data-missing.pcapng", Misfit::Gap, 10),
    ("app/mqtt/suriv__mqtt-events-unintroduced__input.pcap", Misfit::Gap, 3),
    ("manyflows/zeek__ssh.client-side-half-duplex.pcap", Misfit::Gap, 816),
    ("tcp-state/arkime__arkime_synthetic.pcap", Misfit::Stray, 1),
    ("tcp-state/arkime__tcp-reassembly-synthetic.pcap", Misfit::Stray, 2),
    ("tcp-state/deepflow__client-keep-alive.pcap", Misfit::Gap, 6),
    ("tcp-state/deepflow__handshake-error.pcap", Misfit::Order, 3),
    ("tcp-state/suriv__http-async-cli__input.pcap", Misfit::Gap, 7),
    ("tcp-state/suriv__tcp-session-ipv6-stream-out-of-window__input.pcap", Misfit::Stray, 1),
    ("tcp-state/tcpdump__tfo-5c1fa7f9ae91.pcap", Misfit::Gap, 1),
    ("tcp-state/zeek__1000-requests-one-dropped-response.pcap.gz", Misfit::Gap, 1),
    ("tcp-state/zeek__fin_retransmission.pcap", Misfit::Stray, 1),
    ("tcp-state/zeek__reassembly.pcap", Misfit::Gap, 3),
    ("tcp-state/zeek__rst-inject-rae.pcap", Misfit::Stray, 1),
    ("tcp-state/zeek__syn-then-stuff-then-rst.pcap", Misfit::Stray, 1),
    ("vlan-encap/zeek__mixed-vlan-mpls.pcap", Misfit::Gap, 10),
];

/// Packets, and seen flags (FIN 1, SYN 2, RST 4), of the side that sent first and of the other.
type Connection = ([u64; 2], [u32; 2]);

#[towpath_testenv::needs(shared)]
#[test]
fn connections_are_what_wireshark_says() {
    let captures = captures();
    let truth = captures.join("truth/tcpstate");
    let (mut connections, mut different) = (0, BTreeMap::new());
    for path in files(&truth) {
        let name = path.strip_prefix(&truth).unwrap().to_str().unwrap();
        let name = name.strip_suffix(".tsv").expect("a truth file").to_owned();
        let mut states = States::new(Settings::default(), 1);
        // The time does not advance, so that no state expires.
        let now = Time::from_secs(1);
        for_each_segment(&captures.join(&name), |packet, _| {
            let flow = packet.flow().expect("TCP is IP");
            let install = Install::default();
            states.install(&flow, Name::DEFAULT, &packet.segment(), RuleId(1), &install, now).expect("room");
        });
        let seen: BTreeMap<_, Connection> = states
            .list(now)
            .map(|listed| {
                let (src, dst) = match listed.flow.ends {
                    Ends::V4(src, dst) => (IpAddr::V4(src), IpAddr::V4(dst)),
                    Ends::V6(src, dst, _) => (IpAddr::V6(src), IpAddr::V6(dst)),
                };
                let ends =
                    (SocketAddr::new(src, listed.flow.src_port), SocketAddr::new(dst, listed.flow.dst_port));
                (ends, (listed.packets, [listed.tcp_seen & 7, listed.tcp_seen >> 8 & 7]))
            })
            .collect();
        for (ends, connection) in read_truth(&path) {
            connections += 1;
            if seen.get(&ends) != Some(&connection) {
                println!("{name}: {} > {}: {connection:?}, seen {:?}", ends.0, ends.1, seen.get(&ends));
                *different.entry(name.clone()).or_insert(0) += 1;
            }
        }
    }
    assert!(connections > 500, "{connections}");
    let explained = DIFFERENCES.iter().map(|&(name, _, count)| (name.to_owned(), count)).collect();
    assert_eq!(different, explained);
}

#[towpath_testenv::needs(shared)]
#[test]
fn strict_tracking_takes_real_connections() {
    let captures = captures();
    let (mut segments, mut misfits) = (0, BTreeMap::new());
    let directories = fs::read_dir(&captures).expect("captures").map(|entry| entry.expect("an entry").path());
    for path in
        directories.filter(|path| path.is_dir() && !path.ends_with("truth")).flat_map(|path| files(&path))
    {
        let mut states = States::new(Settings::default(), 1);
        let mut now = Time::default();
        let install = Install { tracking: Tracking::Strict, ..Install::default() };
        for_each_segment(&path, |packet, time| {
            now = now.max(time);
            let (flow, segment): (_, Segment) = (packet.flow().expect("TCP is IP"), packet.segment());
            let before = states.counters().unfit;
            let hit = states.lookup(&flow, Lookup::Any, &segment, now);
            if hit.is_some() {
                segments += 1;
            } else if states.counters().unfit > before {
                let name = path.strip_prefix(&captures).unwrap().to_str().unwrap().to_owned();
                *misfits.entry(name).or_insert(0) += 1;
            } else {
                // Only those that begin with a SYN are taken up.
                let made = states.install(&flow, Name::DEFAULT, &segment, RuleId(1), &install, now);
                segments += usize::from(made.is_ok());
            }
        });
    }
    assert!(segments > 10_000, "{segments}");
    let explained = MISFITS.iter().map(|&(name, _, count)| (name.to_owned(), count)).collect();
    assert_eq!(misfits, explained);
}

fn captures() -> PathBuf {
    Path::new(towpath_testenv::shared!()).join("captures")
}

/// All files below a directory, in order.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files.extend(self::files(&path));
        } else {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// The connections of a truth file; several of one port pair are taken together.
fn read_truth(path: &Path) -> BTreeMap<(SocketAddr, SocketAddr), Connection> {
    let mut connections: BTreeMap<_, Connection> = BTreeMap::new();
    let text = fs::read_to_string(path).expect("a truth file");
    for line in text.lines().filter(|line| line.starts_with(|first: char| first.is_ascii_digit())) {
        let columns: Vec<_> = line.split('\t').collect();
        let address = |column: usize| {
            let (address, port) = columns[column].rsplit_once(':').expect("an address and a port");
            SocketAddr::new(address.parse().expect("an address"), port.parse().expect("a port"))
        };
        let packets = |column: usize| columns[column].parse::<u64>().expect("a number");
        let flags = |column: usize| {
            columns[column].chars().map(|flag| match flag {
                'F' => 1,
                'S' => 2,
                'R' => 4,
                _ => 0,
            })
        };
        let (ends, back) = ((address(1), address(2)), (address(2), address(1)));
        let (ends, first, second) = if connections.contains_key(&back) { (back, 1, 0) } else { (ends, 0, 1) };
        let connection = connections.entry(ends).or_default();
        connection.0[first] += packets(7);
        connection.0[second] += packets(8);
        connection.1[first] |= flags(11).sum::<u32>();
        connection.1[second] |= flags(12).sum::<u32>();
    }
    connections
}

/// Every TCP segment of a capture that has its header, also in tunnels, and its time.
fn for_each_segment(path: &Path, mut segment: impl FnMut(&Packet<'_>, Time)) {
    // Some files are damaged: the readable packets count.
    let Ok(mut port) = pcap::Reader::open(path) else { return };
    let mut burst = Burst::new(256);
    while !matches!(port.receive(&mut burst), Err(_) | Ok(Received::End)) {
        for frame in burst.iter() {
            let mut next = wire::parse(frame.link, frame.bytes, frame.wire_len).ok();
            while let Some(packet) = next {
                if packet.proto == proto::TCP && packet.fragment != Fragment::Later {
                    segment(&packet, Time::from_nanos(frame.time_ns));
                    break;
                }
                next = tunnel::inner(&packet).ok().flatten();
            }
        }
    }
}
