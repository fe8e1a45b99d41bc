//! Conversations and malformed frames of real captures, compared with Wireshark's results.
//!
//! The captures are not part of the project: see `towpath_testenv::shared`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use towpath_engine::conversations::Conversations;
use towpath_port::{Burst, Port, Received, pcap};
use towpath_wire::{self as wire, Fragment, Malformed, proto};

/// Why a count differs from Wireshark's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A length field is wrong: the gate rejects the packet, Wireshark continues and counts it.
    Lie,
    /// The upper-layer header is split over two fragments: malformed for the gate, read after reassembly by Wireshark.
    SplitHeader,
    /// A datagram that is never complete: it counts here with its first fragment, and not in Wireshark.
    Unreassembled,
    /// IPv6 with a payload length of zero (BIG TCP), in which Wireshark 4.0 sees no upper layer.
    BigTcp,
    /// Wireshark's SNMP dissector opens a conversation with any port, so that question and answer count apart.
    Wildcard,
    /// The TCP options are truncated by the capture: Wireshark does not count the packet.
    CutOptions,
}

const DIFFERENCES: &[(&str, Kind)] = &[
    ("frag/suriv__bug-6887-defrag-ipv4-tcp-syn__frag-ip-tcp-syn.pcap", Kind::SplitHeader),
    ("frag/suriv__bug-6887-defrag-ppp-ipv4-tcp-syn__frag-ppp-ip-tcp-syn.pcap", Kind::SplitHeader),
    ("frag/zeek__fragmented-2.pcap", Kind::Unreassembled),
    ("frag/zeek__fragmented-syn.pcap", Kind::SplitHeader),
    ("ipv6-ext/tcpdump__ipv6_invalid_length_2.pcap", Kind::Lie),
    ("ipv6-ext/zeek__ipv6-reassembly-state-leak.pcap", Kind::Lie),
    ("jumbo/tcpdump__bigtcp-ipv6-geneve-ipv4.pcap", Kind::BigTcp),
    ("jumbo/tcpdump__bigtcp-ipv6-geneve-ipv6.pcap", Kind::BigTcp),
    ("jumbo/tcpdump__bigtcp-ipv6-vxlan-ipv6.pcap", Kind::BigTcp),
    ("jumbo/tcpdump__bigtcp-ipv6.pcap", Kind::BigTcp),
    ("tcp-state/deepflow__xiangdao-retrans.pcap", Kind::Lie),
    ("udp-dns/zeek__snmpv1_get_short.pcap", Kind::Wildcard),
    ("udp-dns/zeek__snmpv1_set.pcap", Kind::Wildcard),
    ("udp-dns/zeek__snmpv2_get.pcap", Kind::Wildcard),
    ("udp-dns/zeek__snmpv2_get_next.pcap", Kind::Wildcard),
    ("vlan-encap/zeek__vntag_vlan_sandwich_clean.pcap", Kind::CutOptions),
];

/// The malformed frames of all captures, those in corrupt/ included.
const MALFORMED: &[(&str, Malformed, usize)] = &[
    // Frames without captured bytes: 36 have wire length 0, one has wire length 262,144.
    ("app/bgp/tcpdump__bgp_vpn_rt-oobr.pcap", Malformed::LinkCut, 36),
    ("app/bgp/tcpdump__bgp_vpn_rt-oobr.pcap", Malformed::CaptureCut, 1),
    ("corrupt/suriv__bug-6875-01__fuzz.pcap", Malformed::TcpDataOffset, 1),
    ("corrupt/suriv__ipv4-truncated__truncated.pcap", Malformed::Ip4TotalLength, 1),
    ("corrupt/tcpdump__babel_update_oobr.pcap", Malformed::UdpLength, 14),
    ("corrupt/tcpdump__bad-ipv4-version-pgm-heapoverflow.pcap", Malformed::Version, 1),
    ("corrupt/tcpdump__hoobr_rt6_print.pcap", Malformed::Version, 2),
    ("corrupt/tcpdump__hoobr_rt6_print.pcap", Malformed::CaptureCut, 1),
    ("corrupt/tcpdump__ipv4_invalid_hdr_length.pcap", Malformed::Ip4HeaderLength, 1),
    ("corrupt/tcpdump__ipv4_invalid_total_length_2.pcap", Malformed::Ip4TotalLength, 1),
    ("corrupt/zeek__ip-discarder-truncated-tcp-oob.pcapng", Malformed::CaptureCut, 1),
    ("corrupt/zeek__mpls-6in6-broken.pcap.gz", Malformed::TooManyTags, 13),
    ("corrupt/zeek__mpls-6in6-broken.pcap.gz", Malformed::Version, 22),
    ("corrupt/zeek__trunc-hdr.pcap", Malformed::CaptureCut, 1),
    // First fragments that end inside the TCP header.
    ("frag/suriv__bug-6887-defrag-ipv4-tcp-syn__frag-ip-tcp-syn.pcap", Malformed::UpperCut, 1),
    ("frag/suriv__bug-6887-defrag-ppp-ipv4-tcp-syn__frag-ppp-ip-tcp-syn.pcap", Malformed::UpperCut, 1),
    ("frag/zeek__fragmented-syn.pcap", Malformed::TcpDataOffset, 1),
    // One byte of ICMPv6.
    ("frag/suriv__ipv6-malformed-fragments-28__frag-28.pcap", Malformed::UpperCut, 1),
    ("frag/zeek__ip-bogus-header-len.pcap", Malformed::Ip4TotalLength, 1),
    ("icmp/tcpdump__icmp-cksum-oobr-2.pcap", Malformed::Ip4TotalLength, 1),
    ("icmp/tcpdump__icmp-cksum-oobr-4.pcapng", Malformed::Ip4TotalLength, 1),
    ("icmp/tcpdump__icmp_inft_name_length_zero.pcap", Malformed::Ip4TotalLength, 1),
    ("ipv6-ext/tcpdump__ipv6_frag6_negative_len.pcap", Malformed::Ip6ExtensionCut, 1),
    ("ipv6-ext/tcpdump__ipv6_invalid_length_2.pcap", Malformed::Ip6PayloadLength, 1),
    // Destination options of 40 bytes in a payload of 36.
    ("ipv6-ext/zeek__ipv6-mobility-dst-opts.pcap", Malformed::Ip6ExtensionCut, 1),
    // A first fragment whose UDP length is zero.
    ("ipv6-ext/zeek__ipv6-reassembly-state-leak.pcap", Malformed::UdpLength, 1),
    ("tcp-state/arkime__arkime_synthetic.pcap", Malformed::UdpLength, 1),
    // Packets that were truncated before capture, without a change of the length in the IP header.
    ("tcp-state/deepflow__xiangdao-retrans.pcap", Malformed::Ip4TotalLength, 13),
    ("tcp-state/zeek__reassembly.pcap", Malformed::Ip4TotalLength, 5),
];

/// The captures with a truth, and whether they are well-formed.
fn captures() -> (PathBuf, Vec<(String, bool)>) {
    let captures = Path::new(towpath_testenv::shared!()).join("captures");
    let inventory = fs::read_to_string(captures.join("INVENTORY.tsv")).expect("an inventory");
    let mut lines = inventory.lines().map(|line| line.split('\t').collect::<Vec<_>>());
    let names = lines.next().expect("a header line");
    let column = |name: &str| names.iter().position(|column| *column == name).expect("the column");
    let (file, rc) = (column("file"), column("tshark_rc"));
    let files = lines.map(|row| (row[file].to_owned(), row[rc] == "0" && !row[file].starts_with("corrupt/")));
    let files = files.collect();
    (captures, files)
}

/// TCP and UDP conversations in a truth file: the lines with an arrow, under each heading.
fn truth(captures: &Path, file: &str) -> (u64, u64) {
    let path = captures.join("truth/conv").join(format!("{file}.txt"));
    let text = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let (mut tcp, mut udp, mut in_tcp) = (0, 0, false);
    for line in String::from_utf8_lossy(&text).lines() {
        match line {
            "TCP Conversations" => in_tcp = true,
            "UDP Conversations" => in_tcp = false,
            _ if !line.contains("<->") => {}
            _ if in_tcp => tcp += 1,
            _ => udp += 1,
        }
    }
    (tcp, udp)
}

/// Results of the replay of a capture.
#[derive(Default)]
struct Seen {
    conversations: Conversations,
    malformed: BTreeMap<Malformed, usize>,
    fragments: bool,
    above_64_kib: bool,
    snmp: bool,
    cut: bool,
}

impl Seen {
    /// Returns true if the capture has the property that `kind` describes.
    fn shows(&self, kind: Kind) -> bool {
        let any = |reasons: &[Malformed]| reasons.iter().any(|reason| self.malformed.contains_key(reason));
        match kind {
            Kind::Lie => any(&[Malformed::Ip4TotalLength, Malformed::Ip6PayloadLength, Malformed::UdpLength]),
            Kind::SplitHeader => any(&[Malformed::UpperCut, Malformed::TcpDataOffset]),
            Kind::Unreassembled => self.fragments,
            Kind::BigTcp => self.above_64_kib,
            Kind::Wildcard => self.snmp,
            Kind::CutOptions => self.cut,
        }
    }
}

fn replay(path: &Path) -> Seen {
    let mut seen = Seen::default();
    // Some files are damaged: the readable packets count.
    let Ok(mut port) = pcap::Reader::open(path) else { return seen };
    let mut burst = Burst::new(256);
    while !matches!(port.receive(&mut burst), Err(_) | Ok(Received::End)) {
        for frame in burst.iter() {
            let packet = match wire::parse(frame.link, frame.bytes, frame.wire_len) {
                Ok(packet) => packet,
                Err(reason) => {
                    *seen.malformed.entry(reason).or_default() += 1;
                    continue;
                }
            };
            seen.conversations.observe(&packet);
            seen.fragments |= packet.fragment != Fragment::Whole;
            seen.above_64_kib |= packet.ip_len > u32::from(u16::MAX);
            seen.snmp |= packet.proto == proto::UDP && packet.dst_port == 161;
            seen.cut |= packet.frame.len() < packet.wire_len as usize;
        }
    }
    seen
}

#[towpath_testenv::needs(shared)]
#[test]
fn agree_with_wireshark_or_say_why() {
    let (captures, files) = captures();
    let (mut all, mut agreed, mut wrong) = (0, 0, Vec::new());
    for (file, _) in files.iter().filter(|(_, well_formed)| *well_formed) {
        let expected = truth(&captures, file);
        let seen = replay(&captures.join(file));
        let counted = (seen.conversations.tcp(), seen.conversations.udp());
        let explained = DIFFERENCES.iter().find(|(name, _)| name == file).map(|(_, kind)| *kind);
        all += 1;
        agreed += usize::from(counted == expected);
        match explained {
            None if counted != expected => {
                wrong.push(format!("{file}: (tcp, udp) is {counted:?}, in Wireshark {expected:?}"));
            }
            Some(kind) if counted == expected => {
                wrong.push(format!("{file}: agrees now, {kind:?} explains nothing"));
            }
            Some(kind) if !seen.shows(kind) => wrong.push(format!("{file}: shows no {kind:?}")),
            _ => {}
        }
    }
    println!("{agreed} of {all} captures agree");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(agreed * 100 >= all * 95, "only {agreed} of {all} captures agree");
}

#[towpath_testenv::needs(shared)]
#[test]
fn malformed_frames_are_the_known_ones() {
    let (captures, files) = captures();
    let mut found = Vec::new();
    for (file, _) in &files {
        let seen = replay(&captures.join(file));
        found.extend(seen.malformed.iter().map(|(reason, frames)| (file.as_str(), *reason, *frames)));
    }
    let differ = |these: &[(&str, Malformed, usize)], those: &[(&str, Malformed, usize)]| {
        these.iter().filter(|row| !those.contains(row)).map(|row| format!("{row:?}\n")).collect::<String>()
    };
    let (new, gone) = (differ(&found, MALFORMED), differ(MALFORMED, &found));
    assert!(new.is_empty() && gone.is_empty(), "new:\n{new}gone:\n{gone}");
}
