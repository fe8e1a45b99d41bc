//! Accessors of a parsed packet.

use super::*;

#[test]
fn views() {
    let bytes = frame(
        "MACS 0800 4664 0036 1234 4000 3f06 0000 ADDR4 94040000 \
         1092 0050 00000001 00000002 7018 faf0 0000 0000 0204 05b4 01 01 04 02 ffff",
    );
    let packet = packet_of(LinkType::ETHERNET, &bytes);
    assert_eq!(packet.macs(), Some(Macs { dst: [2, 0, 0, 0, 0, 2], src: [2, 0, 0, 0, 0, 1] }));
    assert_eq!((packet.tos(), packet.ttl(), packet.ip_id()), (0x64, 63, Some(0x1234)));
    assert_eq!(packet.ipoff_flags(), DF);
    assert_eq!(packet.ip_options().map(|option| option.kind).collect::<Vec<_>>(), [0x94]);
    assert_eq!(packet.tcp_options().map(|option| option.kind).collect::<Vec<_>>(), [2, 4]);
    assert_eq!(packet.tcp_mss(), Some(1460));
    assert_eq!(packet.tcp_data_len(), Some(2));
    assert_eq!(packet.payload(), [0xff, 0xff]);
    assert_eq!((packet.flow_label(), packet.icmp_echo_id()), (None, None));
    assert_eq!(packet.segment().bytes, 54);
    let flow = packet.flow().expect("IP");
    assert_eq!((flow.proto, flow.src_port, flow.dst_port), (6, 4242, 80));

    let bytes = frame("6b9abcde 0010 2c 3f ADDR6 1100 0009 00000007 ffffffffffffffff");
    let packet = packet_of(LinkType::RAW, &bytes);
    assert_eq!((packet.tos(), packet.ttl(), packet.flow_label()), (0xb9, 63, Some(0xabcde)));
    assert_eq!((packet.ipoff_flags(), packet.ip_id(), packet.macs()), (MF, None, None));
    assert_eq!(packet.payload(), [0xff; 8]);
    assert_eq!(packet.ip_options().count() + packet.tcp_options().count(), 0);

    let bytes = frame("4500 001c 0000 0000 4001 0000 ADDR4 0800 0000 beef 0001");
    assert_eq!(packet_of(LinkType::RAW, &bytes).icmp_echo_id(), Some(0xbeef));
    let bytes = frame("4500 001c 0000 0000 4001 0000 ADDR4 0301 0000 beef 0001");
    assert_eq!(packet_of(LinkType::RAW, &bytes).icmp_echo_id(), None);

    let bytes = frame("MACS 0806 0001");
    let packet = packet_of(LinkType::ETHERNET, &bytes);
    assert_eq!((packet.tos(), packet.ttl(), packet.flow(), packet.payload()), (0, 0, None, &[0u8, 1][..]));
}

/// "Reserved. 2-bit reserved field. [...] ignored on reception" (RFC 8200, 4.5): it is not a part of the identification.
#[test]
fn identifications_of_fragments() {
    let rows = [
        ("60000000 0010 2c 40 ADDR6 1100 0001 00000007 1092 0035 0400 0000", Some(7)),
        ("60000000 0010 2c 40 ADDR6 1100 0007 00000007 1092 0035 0400 0000", Some(7)),
        ("60000000 0010 2c 40 ADDR6 1100 000f 00000007 ffffffffffffffff", Some(7)),
        ("60000000 0010 2c 40 ADDR6 1100 0006 00000007 UDP", None),
        // The last header before the data is another one.
        ("60000000 0018 2c 40 ADDR6 3c00 0001 00000007 1100010400000000 1092 0035 0400 0000", None),
        ("4500 001c 1234 2000 4011 0000 ADDR4 1092 0035 0400 0000", Some(0x1234)),
        ("IP4", None),
    ];
    for (row, expected) in rows {
        assert_eq!(packet_of(LinkType::RAW, &frame(row)).fragment_id(), expected, "{row}");
    }
}

#[test]
fn payloads() {
    let rows = [
        ("4500 0020 0000 0000 4011 0000 ADDR4 1092 0035 000a 0000 aabb cccc", "aabb"),
        ("4500 001e 0000 0000 4088 0000 ADDR4 UDP aabb", "aabb"),
        ("4500 001e 0000 0000 4001 0000 ADDR4 0800 0000 0000 0000 aabb", "aabb"),
        ("4500 0022 0000 0000 4084 0000 ADDR4 1092 0050 00000000 00000000 aabb", "aabb"),
        ("4500 0022 0000 0000 4021 0000 ADDR4 1092 0050 03000000 00000000 aabb", "aabb"),
        ("4500 0026 0000 0000 4021 0000 ADDR4 1092 0050 04000000 00000000 00000000 aabb", "aabb"),
        ("4500 0016 0000 0000 4059 0000 ADDR4 aabb", "aabb"),
        ("4500 0016 0000 0000 4059 0000 ADDR4 aabb cccc", "aabb"),
    ];
    for (row, expected) in rows {
        let bytes = frame(row);
        assert_eq!(packet_of(LinkType::RAW, &bytes).payload(), frame(expected), "{row}");
    }
}

#[test]
fn options_end_where_they_lie() {
    let kinds = |hex: &str| Options::new(&frame(hex)).map(|option| option.kind).collect::<Vec<_>>();
    assert_eq!(kinds("01 01 01"), []);
    assert_eq!(kinds("0204 05b4 00 0204 05b4"), [2]);
    assert_eq!(kinds("0204 05b4 0301"), [2]);
    assert_eq!(kinds("0204 05b4 0300"), [2]);
    assert_eq!(kinds("0204 05b4 0304 00"), [2]);
    assert_eq!(kinds("08"), []);
}
