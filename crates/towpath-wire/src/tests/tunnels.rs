//! Tables of tunnels in hexadecimal, with the layers that the parser finds.

use super::*;

/// The layers inside the outer packet, separated by `|`. `malformed: ...` is the last one.
fn layers(link: LinkType, frame: &[u8]) -> String {
    let mut layer = parse(link, frame, 0).expect("the outer packet is well-formed");
    let mut said = Vec::new();
    loop {
        match tunnel::inner(&layer) {
            Ok(Some(inner)) => {
                assert!(inner.network <= inner.frame.len());
                assert!(inner.transport + inner.transport_len <= inner.frame.len());
                assert!(inner.frame.len() <= inner.wire_len as usize);
                said.push(brief(&inner));
                layer = inner;
            }
            Ok(None) => break said.join(" | "),
            Err(malformed) => break format!("{} malformed: {malformed}", said.join(" | ")),
        }
    }
}

/// `IP4` and `IP6` of the pieces, as they are found at the start of a frame, after an Ethernet header and after a tag.
const IN4: &str = "v4 17 192.0.2.1:4242 > 198.51.100.2:53 len=28 up=8@20";
const IN6: &str = "v6 17 2001:db8::1.4242 > 2001:db8::2.53 len=48 up=8@40";
const IN4_ETHERNET: &str = "v4 17 192.0.2.1:4242 > 198.51.100.2:53 len=28 up=8@34";
const IN4_TAG: &str = "v4 17 192.0.2.1:4242 > 198.51.100.2:53 len=28 up=8@24 vlan=7";

/// Tunnels in IPv4: protocol, payload, layers.
const IN_IP: &[(&str, &str, &str)] = &[
    ("04", "IP4", IN4),
    ("29", "IP6", IN6),
    ("61", "3000 MACS 0800 IP4", IN4_ETHERNET),
    ("8f", "MACS 0800 IP4", IN4_ETHERNET),
    ("89", "00010140 IP4", IN4),
    // AH: the payload is part of the same packet.
    (
        "33",
        "1104 0000 00000100 00000001 000000000000000000000000 UDP",
        "v4 17 192.0.2.1:4242 > 198.51.100.2:53 len=52 up=8@44",
    ),
    ("33", "11ff 0000 00000100 00000001", " malformed: upper-layer header cut off"),
    // GRE: plain, checksum, key, sequence number, all of them; then the protocols that it can carry.
    ("2f", "0000 0800 IP4", IN4),
    ("2f", "8000 0800 00000000 IP4", IN4),
    ("2f", "2000 86dd 00000001 IP6", IN6),
    ("2f", "1000 0800 00000001 IP4", IN4),
    ("2f", "b000 0800 00000000 00000001 00000002 IP4", IN4),
    ("2f", "0000 6558 MACS 0800 IP4", IN4_ETHERNET),
    (
        "2f",
        "2000 6558 00000001 MACS 8100 0007 0800 IP4",
        "v4 17 192.0.2.1:4242 > 198.51.100.2:53 len=28 up=8@38 vlan=7",
    ),
    ("2f", "0000 8847 00010040 00020140 IP6", IN6),
    ("2f", "0000 8100 0007 0800 IP4", IN4_TAG),
    ("2f", "3001 880b 001c0001 00000001 ff03 0021 IP4", IN4),
    ("2f", "3081 880b 001c0001 00000001 00000002 21 IP4", IN4),
    ("2f", "0000 88be MACS 0800 IP4", IN4_ETHERNET),
    ("2f", "1000 88be 00000001 1000000000000000 MACS 0800 IP4", IN4_ETHERNET),
    ("2f", "1000 22eb 00000001 200000000000000000000000 MACS 0800 IP4", IN4_ETHERNET),
    ("2f", "1000 22eb 00000001 200000000000000000000001 0000000000000000 MACS 0800 IP4", IN4_ETHERNET),
    // 802.11, to an access point.
    (
        "2f",
        "0000 8240 0801 0000 020000000001 MACS 0000 aaaa03 000000 0800 IP4",
        "v4 17 192.0.2.1:4242 > 198.51.100.2:53 len=28 up=8@52",
    ),
    // Source routes, later versions, and unknown protocols.
    ("2f", "4000 0800 00000000 IP4", ""),
    ("2f", "0002 0800 IP4", ""),
    ("2f", "0000 9999 IP4", ""),
    ("2f", "0000", ""),
    // A tunnel in a tunnel.
    (
        "04",
        "4500 0030 0000 0000 4004 0000 ADDR4 IP4",
        "v4 4 192.0.2.1:0 > 198.51.100.2:0 len=48 up=28@20 | v4 17 192.0.2.1:4242 > 198.51.100.2:53 len=28 up=8@20",
    ),
    (
        "04",
        "4500 001d 0000 0000 4011 0000 ADDR4 UDP",
        " malformed: IPv4 total length too short or beyond the frame",
    ),
    ("04", "", " malformed: link header cut off"),
    ("06", "1092 0050 00000001 00000000 5002 faf0 0000 0000 IP4", ""),
    ("32", "IP4", ""),
];

#[test]
fn in_ip() {
    for (protocol, payload, expected) in IN_IP {
        assert_eq!(layers(LinkType::RAW, &over_ip4(protocol, payload)), *expected, "{protocol} {payload}");
    }
}

fn over_ip4(protocol: &str, payload: &str) -> Vec<u8> {
    let length = 20 + frame(payload).len();
    frame(&format!("4500 {length:04x} 0000 0000 40 {protocol} 0000 ADDR4 {payload}"))
}

/// Tunnels in UDP: destination port, payload, layers.
const IN_UDP: &[(u16, &str, &str)] = &[
    (4789, "0800000000000100 MACS 0800 IP4", IN4_ETHERNET),
    (4789, "0000000000000100 MACS 0800 IP4", ""),
    (4790, "0c00000100000100 IP4", IN4),
    (4790, "0c00000300000100 MACS 0800 IP4", IN4_ETHERNET),
    // Geneve without and with an option.
    (6081, "0000 6558 00000100 MACS 0800 IP4", IN4_ETHERNET),
    (6081, "0200 0800 00000100 0000000100000000 IP4", IN4),
    (6081, "4000 0800 00000100 IP4", ""),
    // GTP-U: plain; with a sequence number; with two extension headers; another message.
    (2152, "30ff 001c 00000001 IP4", IN4),
    (2152, "32ff 0020 00000001 0001 00 00 IP6", IN6),
    (2152, "34ff 0028 00000001 0000 00 85 0100 0085 0100 0000 IP4", IN4),
    (2152, "3001 001c 00000001 IP4", ""),
    (2152, "34ff 0028 00000001 0000 00 85 0000 0000 IP4", ""),
    // Teredo: plain; with authentication and origin headers; a bubble (a packet without payload).
    (3544, "IP6", IN6),
    (3544, "0001 0000 0000000000000000 00 0000 1092 c0000201 IP6", IN6),
    (3544, "00", ""),
    // L2TP: data with length and sequence; with an offset; control.
    (1701, "4802 0030 0001 0001 0001 0000 ff03 0021 IP4", IN4),
    (1701, "0202 0001 0001 0002 ffff 0021 IP4", IN4),
    (1701, "c802 000c 0001 0000 0000 0000", ""),
    (53, "0800000000000100 MACS 0800 IP4", ""),
];

#[test]
fn in_udp() {
    for (port, payload, expected) in IN_UDP {
        assert_eq!(layers(LinkType::RAW, &over_udp(*port, payload)), *expected, "{port} {payload}");
    }
}

fn over_udp(port: u16, payload: &str) -> Vec<u8> {
    let length = 8 + frame(payload).len();
    over_ip4("11", &format!("c000 {port:04x} {length:04x} 0000 {payload}"))
}

/// Tunnels directly over Ethernet.
const IN_ETHERNET: &[(&str, &str)] = &[
    // The checksum is wrong.
    ("MACS 8847 00010140 IP4", IN4),
    // IP of both versions is the outer packet, as in a PPPoE session.
    ("MACS 8848 00010040 00020140 IP6", ""),
    // A pseudowire with its control word.
    ("MACS 8847 00010140 00000000 MACS 0800 IP4", IN4_ETHERNET),
    ("MACS 8847 00010140 f0", ""),
    ("MACS 8847 00010040", ""),
    ("MACS 8864 1100 0001 001e 0021 IP4", ""),
    ("MACS 8100 0005 8864 1100 0001 0032 0057 IP6", ""),
    ("MACS 8864 1109 0001 001e 0021 IP4", ""),
    ("MACS 8864 1100 0001 0006 c021 01010004", ""),
    ("MACS 88e7 00000001 MACS 0800 IP4", IN4_ETHERNET),
    ("MACS 8926 00000000 8100 0007 0800 IP4", IN4_TAG),
    ("MACS 893f 000000000000 8100 0007 0800 IP4", IN4_TAG),
    ("MACS 894f 0006 0101 000001ff 00000000000000000000000000000000 IP4", IN4),
    ("MACS 0806 0001080006040001", ""),
    ("MACS 0800 IP4", ""),
];

#[test]
fn in_ethernet() {
    for (row, expected) in IN_ETHERNET {
        assert_eq!(layers(LinkType::ETHERNET, &frame(row)), *expected, "{row}");
    }
}

#[test]
fn fragments_carry_nothing() {
    let mut fragment = over_ip4("04", "IP4");
    fragment[6] = 0x20;
    assert_eq!(layers(LinkType::RAW, &fragment), "");
}

/// Every row, cut at every length, once as a short frame and once as a short capture.
#[test]
fn cut_anywhere() {
    let in_ip = IN_IP.iter().map(|(protocol, payload, _)| (LinkType::RAW, over_ip4(protocol, payload)));
    let in_udp = IN_UDP.iter().map(|(port, payload, _)| (LinkType::RAW, over_udp(*port, payload)));
    let in_ethernet = IN_ETHERNET.iter().map(|(row, _)| (LinkType::ETHERNET, frame(row)));
    for (link, whole) in in_ip.chain(in_udp).chain(in_ethernet) {
        for kept in 0..=whole.len() {
            for wire_len in [kept, whole.len()] {
                let Ok(outer) = parse(link, &whole[..kept], wire_len as u32) else { continue };
                if let Ok(Some(inner)) = tunnel::inner(&outer) {
                    assert!(inner.frame.len() <= kept && inner.wire_len as usize <= wire_len);
                    let _ = (tunnel::inner(&inner), inner.payload());
                }
            }
        }
    }
}
