//! Rows: a frame in hex, and the result of `parse`.

use super::*;

mod any_bytes;
mod edits;
mod other_reader;
mod tunnels;
mod views;

/// Pieces of frames, so that a row contains only the tested bytes. Addresses are those of RFC 5737 and RFC 3849.
const PIECES: &[(&str, &str)] = &[
    ("MACS", "020000000002 020000000001"),
    // 192.0.2.1 > 198.51.100.2
    ("ADDR4", "c0000201 c6336402"),
    // 2001:db8::1 > 2001:db8::2
    ("ADDR6", "20010db8000000000000000000000001 20010db8000000000000000000000002"),
    // 4242 > 80, SYN, seq 1, window 0xfaf0
    ("TCP", "1092 0050 00000001 00000000 5002 faf0 0000 0000"),
    // 4242 > 53, no payload
    ("UDP", "1092 0035 0008 0000"),
    ("IP4", "4500 001c 0000 0000 4011 0000 c0000201 c6336402 1092 0035 0008 0000"),
    (
        "IP6",
        "60000000 0008 11 40 20010db8000000000000000000000001 20010db8000000000000000000000002 1092 0035 0008 0000",
    ),
];

fn frame(row: &str) -> Vec<u8> {
    let mut hex = String::new();
    for word in row.split_whitespace() {
        match PIECES.iter().find(|(name, _)| *name == word) {
            Some((_, piece)) => hex.extend(piece.chars().filter(|c| !c.is_whitespace())),
            None => hex.push_str(word),
        }
    }
    let digits: Vec<u8> = hex.chars().map(|c| c.to_digit(16).expect("hex") as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// `v4 17 192.0.2.1:4242 > 198.51.100.2:53 len=28 up=8@34`, and the fields that differ from their defaults.
fn brief(packet: &Packet<'_>) -> String {
    let mut text = match packet.addresses {
        Addresses::None => format!("none type={:04x} at={}", packet.ethertype, packet.network),
        Addresses::V4(src, dst) => {
            format!("v4 {} {src}:{} > {dst}:{}", packet.proto, packet.src_port, packet.dst_port)
        }
        Addresses::V6(src, dst) => {
            format!("v6 {} {src}.{} > {dst}.{}", packet.proto, packet.src_port, packet.dst_port)
        }
    };
    if packet.addresses != Addresses::None {
        text += &format!(" len={} up={}@{}", packet.ip_len, packet.transport_len, packet.transport);
    }
    if let Some(vlan) = packet.vlan {
        text += &format!(" vlan={vlan}");
    }
    match packet.fragment {
        Fragment::Whole => {}
        Fragment::First => text += " first",
        Fragment::Later => text += &format!(" later={}", packet.fragment_offset),
    }
    if packet.proto == proto::TCP && packet.fragment != Fragment::Later {
        text += &format!(" flags={:02x} seq={} win={}", packet.tcp_flags, packet.tcp_seq, packet.tcp_window);
    }
    if [proto::ICMP, proto::ICMP6].contains(&packet.proto) {
        text += &format!(" icmp={}/{}", packet.icmp_type, packet.icmp_code);
    }
    if packet.ext6 != 0 {
        text += &format!(" ext={:x}", packet.ext6);
    }
    text
}

fn said(link: LinkType, frame: &[u8], wire_len: u32) -> String {
    match parse(link, frame, wire_len) {
        Ok(packet) => {
            assert!(packet.network <= frame.len() && packet.transport <= frame.len());
            assert!(packet.transport + packet.transport_len <= frame.len());
            brief(&packet)
        }
        Err(malformed) => format!("malformed: {malformed}"),
    }
}

fn packet_of(link: LinkType, frame: &[u8]) -> Packet<'_> {
    parse(link, frame, frame.len() as u32).expect("well-formed")
}

#[track_caller]
fn check(link: LinkType, rows: &[(&str, &str)]) {
    for (row, expected) in rows {
        let frame = frame(row);
        assert_eq!(said(link, &frame, frame.len() as u32), *expected, "{row}");
    }
}

const UDP4: &str = "v4 17 192.0.2.1:4242 > 198.51.100.2:53 len=28";
const UDP6: &str = "v6 17 2001:db8::1.4242 > 2001:db8::2.53 len=48";

#[test]
fn ip_behind_mpls_labels() {
    // Labels, payload, and the bytes before the IP header: IPv4 needs its checksum, and all of it must be there.
    let rows = [
        ("MACS 8847 00010140 IP4", Some(18)),
        ("MACS 8847 00010040 00020040 00030140 IP4", Some(26)),
        ("MACS 8100 0007 8848 00010140 IP6", Some(22)),
        ("MACS 8864 1100 0001 0022 0281 00010140 IP4", Some(26)),
        // A control word, and pseudowires whose Ethernet addresses begin like IP.
        ("MACS 8847 00010140 00000000 MACS 0800 IP4", None),
        ("MACS 8847 00010140 450000000001 MACS 0800 IP4", None),
        ("MACS 8847 00010140 60000000ffff 020000000001 0800 IP4 00000000", None),
        ("MACS 8847 00010140 IP6 ", Some(18)),
        ("MACS 8847 00010140", None),
        ("MACS 8847 00010040", None),
    ];
    for (row, network) in rows {
        let mut bytes = frame(row);
        if let Some(at) = network.filter(|at| bytes[*at] >> 4 == 4) {
            assert_eq!(
                packet_of(LinkType::ETHERNET, &bytes).addresses,
                Addresses::None,
                "wrong checksum: {row}"
            );
            checksum::fill_ip4(&mut bytes, at);
        }
        let packet = packet_of(LinkType::ETHERNET, &bytes);
        assert_eq!((packet.addresses != Addresses::None).then_some(packet.network), network, "{row}");
        assert_eq!(packet.is_encapsulated(), network.is_some(), "{row}");
        // Without its last byte, the frame contains no IP packet.
        if network.is_some() {
            let cut = &bytes[..bytes.len() - 1];
            assert_eq!(packet_of(LinkType::ETHERNET, cut).addresses, Addresses::None, "{row}");
        }
    }
    let stack =
        |labels: usize| [frame("MACS 8847"), [0, 1, 0, 64].repeat(labels), frame("00010140 IP6")].concat();
    assert!(packet_of(LinkType::ETHERNET, &stack(15)).is_encapsulated());
    assert_eq!(parse(LinkType::ETHERNET, &stack(16), 0).unwrap_err(), Malformed::TooManyTags);
}

#[test]
fn links() {
    let rows: &[(LinkType, &str, String)] = &[
        (LinkType::ETHERNET, "MACS 0800 IP4", format!("{UDP4} up=8@34")),
        (LinkType::ETHERNET, "MACS 86dd IP6", format!("{UDP6} up=8@54")),
        // Padding of the link is not part of the packet.
        (LinkType::ETHERNET, "MACS 0800 IP4 0000000000000000", format!("{UDP4} up=8@34")),
        (LinkType::ETHERNET, "MACS 8100 2005 0800 IP4", format!("{UDP4} up=8@38 vlan=5")),
        (LinkType::ETHERNET, "MACS 8100 0000 86dd IP6", format!("{UDP6} up=8@58 vlan=0")),
        (LinkType::ETHERNET, "MACS 88a8 0007 8100 2005 0800 IP4", format!("{UDP4} up=8@42 vlan=7")),
        (
            LinkType::ETHERNET,
            "MACS 9100 0fff 88a8 0001 8100 2005 0800 IP4",
            format!("{UDP4} up=8@46 vlan=4095"),
        ),
        (LinkType::ETHERNET, "MACS 0806 0001", "none type=0806 at=14".into()),
        (LinkType::ETHERNET, "MACS 8100 0009 88cc", "none type=88cc at=18 vlan=9".into()),
        (LinkType::ETHERNET, "MACS 8864 1100 0001 001e 0021 IP4", format!("{UDP4} up=8@42")),
        (LinkType::ETHERNET, "MACS 8864 1100 0001 001d 21 IP4", format!("{UDP4} up=8@41")),
        (
            LinkType::ETHERNET,
            "MACS 8100 0005 8864 1100 0001 0034 ff03 0057 IP6",
            format!("{UDP6} up=8@68 vlan=5"),
        ),
        (LinkType::ETHERNET, "MACS 8864 1100 0001 0006 c021 01010004", "none type=8864 at=14".into()),
        (LinkType::ETHERNET, "MACS 8864 1109 0001 001e 0021 IP4", "none type=8864 at=14".into()),
        (LinkType::ETHERNET, "MACS 8864 1100 0001 0004 0021 4500", "malformed: IPv4 header cut off".into()),
        (LinkType::ETHERNET, "MACS 8864 1100", "none type=8864 at=14".into()),
        // Behind MPLS labels. The checksum of the header is wrong here.
        (LinkType::ETHERNET, "MACS 8847 00010140 IP4", "none type=8847 at=14".into()),
        // 802.3: spanning tree, SNAP with IP, SNAP of another organisation, LLC with IP, SNAP with a tag.
        (LinkType::ETHERNET, "MACS 0003 424203", "none type=0000 at=14".into()),
        (LinkType::ETHERNET, "MACS 0024 aaaa03 000000 0800 IP4", format!("{UDP4} up=8@42")),
        (LinkType::ETHERNET, "MACS 0024 aaaa03 00000c 2000 00", "none type=0000 at=14".into()),
        (LinkType::ETHERNET, "MACS 001f 060603 IP4", format!("{UDP4} up=8@37")),
        (LinkType::ETHERNET, "MACS 0024 aaaa03 000000 8100 0003 0800 IP4", format!("{UDP4} up=8@46 vlan=3")),
        (LinkType::ETHERNET, "MACS 0000", "none type=0000 at=14".into()),
        (LinkType::ETHERNET, "MACS", "malformed: link header cut off".into()),
        (LinkType::ETHERNET, "MACS 8100 0001 08", "malformed: link header cut off".into()),
        (LinkType::RAW, "IP4", format!("{UDP4} up=8@20")),
        (LinkType::RAW, "IP6", format!("{UDP6} up=8@40")),
        (LinkType::RAW, "00", "malformed: wrong IP version".into()),
        (LinkType::RAW, "", "malformed: link header cut off".into()),
        (LinkType::NULL, "00000002 IP4", format!("{UDP4} up=8@24")),
        (LinkType::NULL, "02000000 IP4", format!("{UDP4} up=8@24")),
        (LinkType::NULL, "0000000a IP6", format!("{UDP6} up=8@44")),
        (LinkType::NULL, "18000000 IP6", format!("{UDP6} up=8@44")),
        (LinkType::NULL, "0000001c IP6", format!("{UDP6} up=8@44")),
        (LinkType::NULL, "1e000000 IP6", format!("{UDP6} up=8@44")),
        (LinkType::NULL, "00000007 ff", "none type=0000 at=4".into()),
        (LinkType::NULL, "000000", "malformed: link header cut off".into()),
        (LinkType::LINUX_SLL, "0000 0001 0006 020000000001 0000 0800 IP4", format!("{UDP4} up=8@36")),
        (LinkType::LINUX_SLL, "0000 0001 0006 020000000001 0000 86dd IP6", format!("{UDP6} up=8@56")),
        (
            LinkType::LINUX_SLL,
            "0000 0001 0006 020000000001 0000 8100 0005 0800 IP4",
            format!("{UDP4} up=8@40 vlan=5"),
        ),
        (LinkType::LINUX_SLL, "0000 0001 0006 020000000001 0000 0004 424203", "none type=0000 at=16".into()),
        // For a netlink device the field is a netlink family, so 0x0800 is not IP.
        (LinkType::LINUX_SLL, "0000 0338 0006 020000000001 0000 0800 IP4", "none type=0000 at=16".into()),
        (LinkType::LINUX_SLL, "0000 0001 0006 020000000001 0000 08", "malformed: link header cut off".into()),
        (
            LinkType::LINUX_SLL2,
            "0800 0000 00000002 0001 00 06 0200000000010000 IP4",
            format!("{UDP4} up=8@40"),
        ),
        (
            LinkType::LINUX_SLL2,
            "86dd 0000 00000002 0001 00 06 0200000000010000 IP6",
            format!("{UDP6} up=8@60"),
        ),
        (
            LinkType::LINUX_SLL2,
            "0800 0000 00000002 0338 00 06 0200000000010000 IP4",
            "none type=0000 at=20".into(),
        ),
        // With address and control and without, with a protocol of two bytes and of one, and Cisco's.
        (LinkType::PPP, "ff03 0021 IP4", format!("{UDP4} up=8@24")),
        (LinkType::PPP, "0021 IP4", format!("{UDP4} up=8@22")),
        (LinkType::PPP, "21 IP4", format!("{UDP4} up=8@21")),
        (LinkType::PPP, "ff03 57 IP6", format!("{UDP6} up=8@43")),
        (LinkType::PPP, "0f00 0800 IP4", format!("{UDP4} up=8@24")),
        (LinkType::PPP, "ff03 0281 00010140 IP4", "none type=8847 at=4".into()),
        (LinkType::PPP, "ff03 c021 0101", "none type=0000 at=4".into()),
        (LinkType::PPP, "ff03 00", "malformed: link header cut off".into()),
        (LinkType::PPP, "", "malformed: link header cut off".into()),
        (LinkType::PPP_ETHER, "1100 0001 001e 0021 IP4", format!("{UDP4} up=8@28")),
        (LinkType::PPP_ETHER, "1109 0000 0004 01010000", "none type=0000 at=0".into()),
        (LinkType::C_HDLC, "0f00 0800 IP4", format!("{UDP4} up=8@24")),
        (LinkType::C_HDLC, "0f00 86dd IP6", format!("{UDP6} up=8@44")),
        (LinkType::C_HDLC, "8f00 8035 00000002", "none type=8035 at=4".into()),
        // An address of two bytes and one of four; encapsulations of RFC 2427 and of Cisco.
        (LinkType::FRELAY, "1861 0800 IP4", format!("{UDP4} up=8@24")),
        (LinkType::FRELAY, "1861 03cc IP4", format!("{UDP4} up=8@24")),
        (LinkType::FRELAY, "18606061 038e IP6", format!("{UDP6} up=8@46")),
        (LinkType::FRELAY, "1861 0380 000000 0800 IP4", format!("{UDP4} up=8@29")),
        (LinkType::FRELAY, "1861 0300 80 000000 0800 IP4", format!("{UDP4} up=8@30")),
        (LinkType::FRELAY, "1861 0308 00", "none type=0000 at=2".into()),
        (LinkType::FRELAY, "18606060 6061 0800", "none type=0000 at=0".into()),
        (LinkType::FRELAY, "1861 08", "malformed: link header cut off".into()),
        (LinkType::FDDI, "50 MACS aaaa03 000000 0800 IP4", format!("{UDP4} up=8@41")),
        (LinkType::FDDI, "4f MACS 0000", "none type=0000 at=13".into()),
        // A prefix, and the packet; in both byte orders.
        (LinkType::NFLOG, "0200 002a 0600 0a00 61 00 0000 2000 0900 IP4", format!("{UDP4} up=8@36")),
        (LinkType::NFLOG, "0a00 002a 0006 000a 61 00 0000 0034 0009 IP6", format!("{UDP6} up=8@56")),
        (LinkType::NFLOG, "0200 002a 0800 1280 ffffffff 2000 0900 IP4", format!("{UDP4} up=8@36")),
        (LinkType::NFLOG, "0a00 002a 0008 8012 ffffffff 0034 0009 IP6", format!("{UDP6} up=8@56")),
        (LinkType::NFLOG, "0700 0000 0800 0900 ffffffff", "none type=0000 at=8".into()),
        (LinkType::NFLOG, "0200 0000 0800 0a00 61626300", "none type=0000 at=0".into()),
        (LinkType::NFLOG, "0200 0000 0200 0a00 61626300", "malformed: link header cut off".into()),
        (LinkType::PFLOG, "06 02 0000 6c6f 0000 IP4", format!("{UDP4} up=8@28")),
        (LinkType::PFLOG, "08 18 0000 6c6f3000 IP6", format!("{UDP6} up=8@48")),
        (LinkType::PFLOG, "08 07 0000 6c6f3000 ffff", "none type=0000 at=0".into()),
        (LinkType::PKTAP, "10000000 01000000 01000000 656e3000 MACS 0800 IP4", format!("{UDP4} up=8@50")),
        (LinkType::PKTAP, "0c000000 01000000 00000000 02000000 IP4", format!("{UDP4} up=8@36")),
        (LinkType::PKTAP, "0c000000 01000000 0c000000 IP6", format!("{UDP6} up=8@52")),
        (LinkType::PKTAP, "0c000000 01000000 69000000 ffff", "none type=0000 at=12".into()),
        (LinkType::PKTAP, "0c000000 00000000 01000000 ffff", "none type=0000 at=0".into()),
        (LinkType::PKTAP, "ff000000 01000000 01000000 ffff", "none type=0000 at=0".into()),
        // From a station, between two access points, with quality of service, and with the field after that.
        (
            LinkType::IEEE802_11,
            "0801 0000 020000000001 MACS 0000 aaaa03 000000 0800 IP4",
            format!("{UDP4} up=8@52"),
        ),
        (
            LinkType::IEEE802_11,
            "0803 0000 020000000001 MACS 0000 020000000004 aaaa03 000000 86dd IP6",
            format!("{UDP6} up=8@78"),
        ),
        (
            LinkType::IEEE802_11,
            "8801 0000 020000000001 MACS 0000 0000 aaaa03 000000 0800 IP4",
            format!("{UDP4} up=8@54"),
        ),
        (
            LinkType::IEEE802_11,
            "8881 0000 020000000001 MACS 0000 0000 00000000 aaaa03 000000 0800 IP4",
            format!("{UDP4} up=8@58"),
        ),
        // The first of an aggregate.
        (
            LinkType::IEEE802_11,
            "8802 0000 020000000001 MACS 0000 8000 MACS 0024 aaaa03 000000 0800 IP4",
            format!("{UDP4} up=8@68"),
        ),
        // A beacon, no data, encrypted, a later fragment.
        (LinkType::IEEE802_11, "8000 0000", "none type=0000 at=0".into()),
        (LinkType::IEEE802_11, "4801 0000 020000000001 MACS 0000", "none type=0000 at=0".into()),
        (LinkType::IEEE802_11, "0841 0000 020000000001 MACS 0000 aaaa03", "none type=0000 at=0".into()),
        (
            LinkType::IEEE802_11,
            "8801 0000 020000000001 MACS 0000 8000 ffff",
            "malformed: link header cut off".into(),
        ),
        (LinkType::IEEE802_11, "0801 0000 020000000001 MACS 0100 ffff", "none type=0000 at=0".into()),
        (LinkType::IEEE802_11, "0801 0000 020000000001", "malformed: link header cut off".into()),
        (
            LinkType::IEEE802_11_RADIOTAP,
            "0000 0800 00000000 0801 0000 020000000001 MACS 0000 aaaa03 000000 0800 IP4",
            format!("{UDP4} up=8@60"),
        ),
        (
            LinkType::IEEE802_11_RADIOTAP,
            "0000 1100 03000000 0000000000000000 20 8801 0000 020000000001 MACS 0000 0000 ffff aaaa03 000000 0800 IP4",
            format!("{UDP4} up=8@73"),
        ),
        (
            LinkType::IEEE802_11_RADIOTAP,
            "0000 0d00 02000080 00000000 20 8801 0000 020000000001 MACS 0000 0000 ffff aaaa03 000000 0800 IP4",
            format!("{UDP4} up=8@69"),
        ),
        (LinkType::IEEE802_11_RADIOTAP, "0000 0800 00000080", "malformed: link header cut off".into()),
        (LinkType::UNKNOWN, "4500", "none type=0000 at=0".into()),
        (LinkType::UNKNOWN, "", "none type=0000 at=0".into()),
    ];
    for (link, row, expected) in rows {
        let frame = frame(row);
        assert_eq!(said(*link, &frame, frame.len() as u32), *expected, "{link:?} {row}");
    }
}

#[test]
fn vlan_tags_are_bounded() {
    let tagged = |tags: usize| frame(&format!("MACS {} 0800 IP4", "8100 0001 ".repeat(tags)));
    assert_eq!(said(LinkType::ETHERNET, &tagged(16), 0), format!("{UDP4} up=8@98 vlan=1"));
    assert_eq!(said(LinkType::ETHERNET, &tagged(17), 0), "malformed: too many VLAN tags or MPLS labels");
}

#[test]
fn ip4() {
    check(
        LinkType::RAW,
        &[
            (
                "4500 0028 0000 4000 4006 0000 ADDR4 TCP",
                "v4 6 192.0.2.1:4242 > 198.51.100.2:80 len=40 up=20@20 flags=02 seq=1 win=64240",
            ),
            // Options: router alert.
            (
                "4600 0020 0000 0000 4011 0000 ADDR4 94040000 UDP",
                "v4 17 192.0.2.1:4242 > 198.51.100.2:53 len=32 up=8@24",
            ),
            ("4500 0014 0000 0000 4059 0000 ADDR4", "v4 89 192.0.2.1:0 > 198.51.100.2:0 len=20 up=0@20"),
            (
                "4500 0018 0000 0000 4001 0000 ADDR4 08000000",
                "v4 1 192.0.2.1:0 > 198.51.100.2:0 len=24 up=4@20 icmp=8/0",
            ),
            (
                "4500 0020 0000 0000 4084 0000 ADDR4 1092 0050 00000000 00000000",
                "v4 132 192.0.2.1:4242 > 198.51.100.2:80 len=32 up=12@20",
            ),
            (
                "4500 0020 0000 0000 4021 0000 ADDR4 1092 0050 03000000 00000000",
                "v4 33 192.0.2.1:4242 > 198.51.100.2:80 len=32 up=12@20",
            ),
            (
                "4500 001c 0000 0000 4088 0000 ADDR4 UDP",
                "v4 136 192.0.2.1:4242 > 198.51.100.2:53 len=28 up=8@20",
            ),
            // AH is the end in IPv4.
            ("4500 0016 0000 0000 4033 0000 ADDR4 0604", "v4 51 192.0.2.1:0 > 198.51.100.2:0 len=22 up=2@20"),
            // Fragments: the UDP length of the first is that of the whole datagram.
            (
                "4500 001c 0001 2000 4011 0000 ADDR4 1092 0035 0400 0000",
                "v4 17 192.0.2.1:4242 > 198.51.100.2:53 len=28 up=8@20 first",
            ),
            (
                "4500 0018 0001 2001 4011 0000 ADDR4 ffffffff",
                "v4 17 192.0.2.1:0 > 198.51.100.2:0 len=24 up=4@20 later=1",
            ),
            (
                "4500 0018 0001 0001 4006 0000 ADDR4 ffffffff",
                "v4 6 192.0.2.1:0 > 198.51.100.2:0 len=24 up=4@20 later=1",
            ),
            // Segmentation offload leaves the total length zero.
            (
                "4500 0000 0000 4000 4006 0000 ADDR4 TCP ffffff",
                "v4 6 192.0.2.1:4242 > 198.51.100.2:80 len=43 up=23@20 flags=02 seq=1 win=64240",
            ),
            (
                "4500 0000 0000 4000 4011 0000 ADDR4 UDP",
                "malformed: IPv4 total length too short or beyond the frame",
            ),
            ("4500 0014 0000 0000 4011 0000 c0000201 c63364", "malformed: IPv4 header cut off"),
            (
                "4400 001c 0000 0000 4011 0000 ADDR4 UDP",
                "malformed: IPv4 header length too short or beyond the packet",
            ),
            (
                "4f00 001c 0000 0000 4011 0000 ADDR4 UDP",
                "malformed: IPv4 header length too short or beyond the packet",
            ),
            (
                "4600 0014 0000 0000 4011 0000 ADDR4 UDP",
                "malformed: IPv4 total length too short or beyond the frame",
            ),
            (
                "4500 001d 0000 0000 4011 0000 ADDR4 UDP",
                "malformed: IPv4 total length too short or beyond the frame",
            ),
        ],
    );
    check(
        LinkType::ETHERNET,
        &[
            ("MACS 0800 IP6", "malformed: wrong IP version"),
            ("MACS 86dd IP4 000000000000000000000000", "malformed: wrong IP version"),
        ],
    );
}

#[test]
fn ip6() {
    check(
        LinkType::RAW,
        &[
            (
                "60000000 0014 06 40 ADDR6 TCP",
                "v6 6 2001:db8::1.4242 > 2001:db8::2.80 len=60 up=20@40 flags=02 seq=1 win=64240",
            ),
            (
                "60000000 0004 3a ff ADDR6 87000000",
                "v6 58 2001:db8::1.0 > 2001:db8::2.0 len=44 up=4@40 icmp=135/0",
            ),
            (
                "60000000 0010 00 40 ADDR6 11 00 050200000100 UDP",
                "v6 17 2001:db8::1.4242 > 2001:db8::2.53 len=56 up=8@48 ext=2",
            ),
            // Destination options, routing type 0, destination options again.
            (
                "60000000 0020 3c 40 ADDR6 2b00010400000000 3c00000000000000 1100010400000000 UDP",
                "v6 17 2001:db8::1.4242 > 2001:db8::2.53 len=72 up=8@64 ext=64",
            ),
            (
                "60000000 0020 2b 40 ADDR6 1102 0201 00000000 20010db8000000000000000000000003 UDP",
                "v6 17 2001:db8::1.4242 > 2001:db8::2.53 len=72 up=8@64 ext=84",
            ),
            // An unassigned routing type.
            (
                "60000000 0010 2b 40 ADDR6 1100 6300 00000000 UDP",
                "v6 17 2001:db8::1.4242 > 2001:db8::2.53 len=56 up=8@48 ext=104",
            ),
            // Fragments: atomic, first, later.
            (
                "60000000 0010 2c 40 ADDR6 1100 0000 00000007 UDP",
                "v6 17 2001:db8::1.4242 > 2001:db8::2.53 len=56 up=8@48 ext=1",
            ),
            (
                "60000000 0010 2c 40 ADDR6 1100 0001 00000007 1092 0035 0400 0000",
                "v6 17 2001:db8::1.4242 > 2001:db8::2.53 len=56 up=8@48 first ext=1",
            ),
            (
                "60000000 000c 2c 40 ADDR6 1100 0008 00000007 ffffffff",
                "v6 17 2001:db8::1.0 > 2001:db8::2.0 len=52 up=4@48 later=1 ext=1",
            ),
            // The bytes after the header of a later fragment are data, whatever its next-header field says.
            (
                "60000000 000c 2c 40 ADDR6 3c00 0008 00000007 ffffffff",
                "v6 60 2001:db8::1.0 > 2001:db8::2.0 len=52 up=4@48 later=1 ext=1",
            ),
            // AH counts words of four bytes: 4 + 2 of them.
            (
                "60000000 0020 33 40 ADDR6 1104 0000 00000100 00000001 000000000000000000000000 UDP",
                "v6 17 2001:db8::1.4242 > 2001:db8::2.53 len=72 up=8@64 ext=8",
            ),
            (
                "60000000 0004 32 40 ADDR6 00000100",
                "v6 50 2001:db8::1.0 > 2001:db8::2.0 len=44 up=4@40 ext=10",
            ),
            ("60000000 0004 3b 40 ADDR6 00000100", "v6 59 2001:db8::1.0 > 2001:db8::2.0 len=44 up=4@40"),
            // A mobility message without a next header is the upper layer; with one, it is an extension header.
            (
                "60000000 0008 87 40 ADDR6 3b00 0000 00000000",
                "v6 135 2001:db8::1.0 > 2001:db8::2.0 len=48 up=8@40",
            ),
            (
                "60000000 0010 87 40 ADDR6 1100 0000 00000000 UDP",
                "v6 17 2001:db8::1.4242 > 2001:db8::2.53 len=56 up=8@48",
            ),
            (
                "60000000 0020 8b 40 ADDR6 8c00 0000 00000000 1101 0000 00000000 0000000000000000 UDP",
                "v6 17 2001:db8::1.4242 > 2001:db8::2.53 len=72 up=8@64",
            ),
            ("60000000 0000 c8 40 ADDR6", "v6 200 2001:db8::1.0 > 2001:db8::2.0 len=40 up=0@40 ext=100"),
            ("60000000 0000 59 40 ADDR6", "v6 89 2001:db8::1.0 > 2001:db8::2.0 len=40 up=0@40"),
            ("60000000 0000 59 40 20010db8", "malformed: IPv6 header cut off"),
            ("60000000 0009 11 40 ADDR6 UDP", "malformed: IPv6 payload length beyond the frame"),
            ("60000000 0007 00 40 ADDR6 11000502000001", "malformed: IPv6 extension header cut off"),
            ("60000000 0008 3c 40 ADDR6 1101050200000100 UDP", "malformed: IPv6 extension header cut off"),
            // As with IPv4: a TCP segment that the network card is to segment, also after options.
            (
                "60000000 0000 06 40 ADDR6 TCP ffffff",
                "v6 6 2001:db8::1.4242 > 2001:db8::2.80 len=63 up=23@40 flags=02 seq=1 win=64240",
            ),
            (
                "60000000 0000 00 40 ADDR6 0600 0502 0000 0100 TCP ffffff",
                "v6 6 2001:db8::1.4242 > 2001:db8::2.80 len=71 up=23@48 flags=02 seq=1 win=64240 ext=2",
            ),
            (
                "60000000 0000 00 40 ADDR6 3c00 0502 0000 0100 0600010400000000 TCP",
                "v6 6 2001:db8::1.4242 > 2001:db8::2.80 len=76 up=20@56 flags=02 seq=1 win=64240 ext=22",
            ),
            // A packet with payload length 0 is not a jumbogram without the option, and the option must exceed 65,535.
            (
                "60000000 0000 00 40 ADDR6 1100 0104 00000000 UDP",
                "malformed: IPv6 jumbo payload option does not fit the packet",
            ),
            (
                "60000000 0000 00 40 ADDR6 1100 c204 00000010 UDP",
                "malformed: IPv6 jumbo payload option does not fit the packet",
            ),
            (
                "60000000 0000 00 40 ADDR6 1100 c204 00010010 UDP",
                "malformed: IPv6 jumbo payload option does not fit the packet",
            ),
            ("60000000 0000 11 40 ADDR6 UDP", "malformed: upper-layer header cut off"),
        ],
    );
}

#[test]
fn ip6_extensions_are_bounded() {
    let chain = |headers: usize| {
        let length = headers * 8 + 8;
        frame(&format!(
            "60000000 {length:04x} 3c 40 ADDR6 {} 1100010400000000 UDP",
            "3c00010400000000 ".repeat(headers - 1)
        ))
    };
    assert_eq!(
        said(LinkType::RAW, &chain(16), 0),
        "v6 17 2001:db8::1.4242 > 2001:db8::2.53 len=176 up=8@168 ext=20"
    );
    assert_eq!(said(LinkType::RAW, &chain(17), 0), "malformed: too many IPv6 extension headers");
}

#[test]
fn jumbograms() {
    let rows = [
        // 8 bytes of options, a UDP header whose length is zero, 70,000 bytes.
        ("60000000 0000 00 40 ADDR6 1100 c204 00011180 1092 0035 0000 0000", "len=70056 up=70008@48 ext=2"),
        // BIG TCP of Linux, without the option.
        ("60000000 0000 11 40 ADDR6 1092 0035 0000 0000", "len=70048 up=70008@40"),
    ];
    for (row, expected) in rows {
        let mut frame = frame(row);
        frame.resize(frame.len() + 70_000, 0);
        assert_eq!(
            said(LinkType::RAW, &frame, 0),
            format!("v6 17 2001:db8::1.4242 > 2001:db8::2.53 {expected}"),
            "{row}"
        );
    }
}

#[test]
fn upper_layers() {
    check(
        LinkType::RAW,
        &[
            ("4500 0027 0000 0000 4006 0000 ADDR4 TCP", "malformed: upper-layer header cut off"),
            ("4500 001b 0000 0000 4011 0000 ADDR4 UDP", "malformed: upper-layer header cut off"),
            ("4500 001b 0000 0000 4088 0000 ADDR4 UDP", "malformed: upper-layer header cut off"),
            ("4500 0017 0000 0000 4001 0000 ADDR4 080000", "malformed: upper-layer header cut off"),
            (
                "4500 001f 0000 0000 4084 0000 ADDR4 1092 0050 00000000 000000",
                "malformed: upper-layer header cut off",
            ),
            // A first fragment of eight bytes hides the flags (RFC 1858).
            (
                "4500 001c 0001 2000 4006 0000 ADDR4 1092 0050 00000001",
                "malformed: upper-layer header cut off",
            ),
            (
                "4500 0028 0000 0000 4006 0000 ADDR4 1092 0050 00000001 00000000 4002 faf0 00000000",
                "malformed: TCP data offset too short or beyond the segment",
            ),
            (
                "4500 0028 0000 0000 4006 0000 ADDR4 1092 0050 00000001 00000000 6002 faf0 00000000",
                "malformed: TCP data offset too short or beyond the segment",
            ),
            (
                "4500 001c 0000 0000 4011 0000 ADDR4 1092 0035 0007 0000",
                "malformed: UDP length too short or beyond the packet",
            ),
            (
                "4500 001c 0000 0000 4011 0000 ADDR4 1092 0035 0009 0000",
                "malformed: UDP length too short or beyond the packet",
            ),
            (
                "4500 001c 0000 0000 4011 0000 ADDR4 1092 0035 0000 0000",
                "malformed: UDP length too short or beyond the packet",
            ),
            (
                "4500 001c 0001 2000 4011 0000 ADDR4 1092 0035 0007 0000",
                "malformed: UDP length too short or beyond the packet",
            ),
            // A UDP datagram may end before its packet (draft-ietf-tsvwg-udp-options).
            (
                "4500 0020 0000 0000 4011 0000 ADDR4 UDP 00000000",
                "v4 17 192.0.2.1:4242 > 198.51.100.2:53 len=32 up=12@20",
            ),
            // UDP-Lite: a coverage of zero is all of it.
            (
                "4500 001c 0000 0000 4088 0000 ADDR4 1092 0035 0000 0000",
                "v4 136 192.0.2.1:4242 > 198.51.100.2:53 len=28 up=8@20",
            ),
            (
                "4500 001c 0000 0000 4088 0000 ADDR4 1092 0035 0007 0000",
                "malformed: UDP-Lite checksum coverage too short or beyond the packet",
            ),
            (
                "4500 001c 0000 0000 4088 0000 ADDR4 1092 0035 0009 0000",
                "malformed: UDP-Lite checksum coverage too short or beyond the packet",
            ),
        ],
    );
}

/// Results for a truncated capture: each header truncated at each length.
#[test]
fn cut_short_by_the_capture() {
    let whole = frame("MACS 0800 4500 002b 0000 4000 4006 0000 ADDR4 TCP ffffff");
    let cut = |kept: usize| said(LinkType::ETHERNET, &whole[..kept], whole.len() as u32);
    for kept in 0..38 {
        assert_eq!(cut(kept), "malformed: cut short by the capture", "{kept} bytes");
    }
    let start = "v4 6 192.0.2.1:4242 > 198.51.100.2:80 len=43";
    assert_eq!(cut(38), format!("{start} up=4@34 flags=00 seq=0 win=0"));
    assert_eq!(cut(42), format!("{start} up=8@34 flags=00 seq=1 win=0"));
    assert_eq!(cut(48), format!("{start} up=14@34 flags=02 seq=1 win=0"));
    assert_eq!(cut(50), format!("{start} up=16@34 flags=02 seq=1 win=64240"));
    assert_eq!(cut(54), format!("{start} up=20@34 flags=02 seq=1 win=64240"));
    assert_eq!(cut(57), format!("{start} up=23@34 flags=02 seq=1 win=64240"));

    // The header is cut within its options, one of which may state the packet's length (jumbo payload).
    let jumbo = frame("60000000 0000 00 40 ADDR6 1100 c204 00011180 1092 0035 0000 0000");
    for kept in 40..48 {
        assert_eq!(
            said(LinkType::RAW, &jumbo[..kept], 70_056),
            "malformed: cut short by the capture",
            "{kept}"
        );
    }

    // OSPF has no ports.
    let ospf = frame("4600 0020 0000 0000 4059 0000 ADDR4 94040000 ffffffffffffffff");
    assert_eq!(said(LinkType::RAW, &ospf[..20], 32), "v4 89 192.0.2.1:0 > 198.51.100.2:0 len=32 up=0@20");
    // A wrong field within the captured bytes is malformed.
    let lie = frame("4500 002b 0000 4000 4006 0000 ADDR4 1092 0050 00000001 00000000 40");
    assert_eq!(said(LinkType::RAW, &lie, 43), "malformed: TCP data offset too short or beyond the segment");
}

#[test]
fn every_reason_has_its_place() {
    for (place, reason) in Malformed::ALL.iter().enumerate() {
        assert_eq!(*reason as usize, place);
    }
}
