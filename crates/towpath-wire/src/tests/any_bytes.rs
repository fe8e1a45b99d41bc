//! Random bytes and damaged packets: the parser does not panic, and every offset that it returns is inside the frame.

use proptest::prelude::*;

use super::*;

proptest! {
    /// Random bytes.
    #[test]
    fn any_bytes(
        link in prop::sample::select(&LinkType::CANONICAL),
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        more in 0u32..200,
    ) {
        look(link, &bytes, bytes.len() as u32 + more);
    }

    /// Packets with random changes, so that the parser reaches the inner headers.
    #[test]
    fn nearly_packets(
        row in prop::sample::select(&[
            "MACS 8100 0001 0800 4600 0036 1234 4000 3f06 0000 ADDR4 94040000 TCP 020405b4 0402 0101",
            "MACS 86dd 60000000 0030 00 40 ADDR6 3c00010400000000 2b00010400000000 2c00000000000000 1100000000000000 UDP 0000000000000000",
            "MACS 86dd 60000000 0028 33 40 ADDR6 0601 0000 00000000 00000000 TCP 0000000000000000",
        ]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        kept in any::<prop::sample::Index>(),
        whole in any::<bool>(),
    ) {
        let mut bytes = frame(row);
        let wire_len = bytes.len() as u32;
        for (index, value) in changes {
            *index.get_mut(&mut bytes) = value;
        }
        if !whole {
            bytes.truncate(kept.index(bytes.len()));
        }
        look(LinkType::ETHERNET, &bytes, wire_len);
        look(LinkType::ETHERNET, &bytes, 0);
    }
}

/// Parses and calls every accessor.
fn look(link: LinkType, bytes: &[u8], wire_len: u32) {
    let Ok(packet) = parse(link, bytes, wire_len) else { return };
    assert!(packet.network <= bytes.len());
    assert!(packet.transport <= bytes.len());
    assert!(packet.transport + packet.transport_len <= bytes.len());
    assert!(packet.ip_len <= packet.wire_len);
    assert_eq!(packet.addresses == Addresses::None, packet.ip_len == 0);
    if let Addresses::V4(..) | Addresses::V6(..) = packet.addresses {
        assert!(packet.network < packet.transport);
    }
    assert!(packet.payload().len() <= bytes.len());
    assert!(packet.tcp_data_len().unwrap_or(0) <= packet.ip_len);
    let _ = (packet.macs(), packet.tos(), packet.ttl(), packet.ip_id(), packet.ipoff_flags());
    let _ = (packet.flow_label(), packet.tcp_mss(), packet.icmp_echo_id(), packet.flow(), packet.segment());
    let _ = (packet.ip_options().count(), packet.tcp_options().count());

    let mut edited = bytes.to_vec();
    edit::set_dscp(&mut edited, packet.network, 46);
    edit::clamp_mss(&mut edited, packet.transport, packet.transport_len, 1200);
}
