//! Generated packets, parsed by this crate and by etherparse.

use etherparse::{NetSlice, PacketBuilder, SlicedPacket, TransportSlice};
use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
struct Story {
    src: [u8; 16],
    dst: [u8; 16],
    v6: bool,
    tags: u8,
    vlan: u16,
    ttl: u8,
    upper: u8,
    ports: (u16, u16),
    seq: u32,
    ack: u32,
    window: u16,
    flags: u8,
    payload: Vec<u8>,
    padding: usize,
}

fn stories() -> impl Strategy<Value = Story> {
    let network = (any::<[u8; 16]>(), any::<[u8; 16]>(), any::<bool>(), 0u8..3, 0u16..4096, any::<u8>());
    let upper = (0u8..4, any::<(u16, u16)>(), any::<u32>(), any::<u32>(), any::<u16>(), any::<u8>());
    let payload = (prop::collection::vec(any::<u8>(), 0..64), 0usize..20);
    (network, upper, payload).prop_map(|(network, upper, payload)| Story {
        src: network.0,
        dst: network.1,
        v6: network.2,
        tags: network.3,
        vlan: network.4,
        ttl: network.5,
        upper: upper.0,
        ports: upper.1,
        seq: upper.2,
        ack: upper.3,
        window: upper.4,
        flags: upper.5,
        payload: payload.0,
        padding: payload.1,
    })
}

impl Story {
    fn frame(&self) -> Vec<u8> {
        let four = |bytes: [u8; 16]| [bytes[0], bytes[1], bytes[2], bytes[3]];
        let vlan = self.vlan.try_into().expect("12 bits");
        let inner_vlan = (self.vlan ^ 1).try_into().expect("12 bits");
        let link = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
        let builder = match (self.tags, self.v6) {
            (0, false) => link.ipv4(four(self.src), four(self.dst), self.ttl),
            (0, true) => link.ipv6(self.src, self.dst, self.ttl),
            (1, false) => link.single_vlan(vlan).ipv4(four(self.src), four(self.dst), self.ttl),
            (1, true) => link.single_vlan(vlan).ipv6(self.src, self.dst, self.ttl),
            (_, false) => link.double_vlan(vlan, inner_vlan).ipv4(four(self.src), four(self.dst), self.ttl),
            (_, true) => link.double_vlan(vlan, inner_vlan).ipv6(self.src, self.dst, self.ttl),
        };
        let mut frame = Vec::new();
        let written = match self.upper {
            0 => {
                let mut tcp = builder.tcp(self.ports.0, self.ports.1, self.seq, self.window);
                tcp = if self.flags & 0x01 != 0 { tcp.fin() } else { tcp };
                tcp = if self.flags & 0x02 != 0 { tcp.syn() } else { tcp };
                tcp = if self.flags & 0x04 != 0 { tcp.rst() } else { tcp };
                tcp = if self.flags & 0x08 != 0 { tcp.psh() } else { tcp };
                tcp = if self.flags & 0x10 != 0 { tcp.ack(self.ack) } else { tcp };
                tcp.write(&mut frame, &self.payload)
            }
            1 => builder.udp(self.ports.0, self.ports.1).write(&mut frame, &self.payload),
            2 => builder.icmpv4_echo_request(self.ports.0, 1).write(&mut frame, &self.payload),
            _ => builder.icmpv6_echo_reply(self.ports.0, 1).write(&mut frame, &self.payload),
        };
        // ICMPv6 over IPv4 cannot be written: no checksum for it.
        if written.is_err() {
            frame.clear();
        }
        frame.resize(frame.len() + self.padding, 0);
        frame
    }
}

proptest! {
    #[test]
    fn agree(story in stories()) {
        let frame = story.frame();
        prop_assume!(frame.len() > 60);
        let other = SlicedPacket::from_ethernet(&frame).expect("etherparse reads what it wrote");
        let packet = packet_of(LinkType::ETHERNET, &frame);

        match other.net {
            Some(NetSlice::Ipv4(ip)) => {
                let header = ip.header();
                let addresses = Addresses::V4(header.source_addr(), header.destination_addr());
                prop_assert_eq!(packet.addresses, addresses);
                prop_assert_eq!(packet.ip_len, u32::from(header.total_len()));
                prop_assert_eq!(packet.ttl(), header.ttl());
                prop_assert_eq!(packet.proto, header.protocol().0);
            }
            Some(NetSlice::Ipv6(ip)) => {
                let header = ip.header();
                let addresses = Addresses::V6(header.source_addr(), header.destination_addr());
                prop_assert_eq!(packet.addresses, addresses);
                prop_assert_eq!(packet.ip_len, u32::from(header.payload_length()) + 40);
                prop_assert_eq!(packet.ttl(), header.hop_limit());
                prop_assert_eq!(packet.proto, header.next_header().0);
            }
            _ => prop_assert!(false, "not IP to etherparse"),
        }
        prop_assert_eq!(packet.vlan, (story.tags > 0).then_some(story.vlan));
        match other.transport {
            Some(TransportSlice::Tcp(tcp)) => {
                prop_assert_eq!((packet.src_port, packet.dst_port), (tcp.source_port(), tcp.destination_port()));
                prop_assert_eq!(packet.tcp_seq, tcp.sequence_number());
                prop_assert_eq!(packet.tcp_ack, tcp.acknowledgment_number());
                prop_assert_eq!(packet.tcp_window, tcp.window_size());
                prop_assert_eq!(packet.tcp_flags, tcp.header_slice()[13]);
                prop_assert_eq!(packet.payload(), tcp.payload());
                prop_assert_eq!(packet.tcp_data_len(), Some(tcp.payload().len() as u32));
            }
            Some(TransportSlice::Udp(udp)) => {
                prop_assert_eq!((packet.src_port, packet.dst_port), (udp.source_port(), udp.destination_port()));
                prop_assert_eq!(packet.payload(), udp.payload());
            }
            Some(TransportSlice::Icmpv4(icmp)) => {
                prop_assert_eq!((packet.icmp_type, packet.icmp_code), (icmp.type_u8(), icmp.code_u8()));
                prop_assert_eq!(packet.icmp_echo_id(), Some(story.ports.0));
                prop_assert_eq!(packet.payload(), icmp.payload());
            }
            Some(TransportSlice::Icmpv6(icmp)) => {
                prop_assert_eq!((packet.icmp_type, packet.icmp_code), (icmp.type_u8(), icmp.code_u8()));
                prop_assert_eq!(packet.icmp_echo_id(), Some(story.ports.0));
            }
            Some(TransportSlice::Igmp(_)) | None => {}
        }
    }
}
