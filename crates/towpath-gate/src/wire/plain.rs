//! Plain packets: what states need to know of them, and nothing else.

use super::{Frame, Ip, ip4, ip6, proto, upper};
use crate::packet::{Addresses, Link};
use crate::state::{Ends, Flow, Segment};

/// SYN (RFC 9293, 3.1).
const SYN: u8 = 0x02;

/// The flow of a plain packet, and what it contributes to its state: what [`super::parse`] would say by
/// [`Packet::flow`](crate::Packet::flow) and [`Packet::segment`](crate::Packet::segment), for a third of the time.
///
/// Plain is what nearly all packets are: Ethernet without tags, IPv4 or IPv6 without extension headers, TCP or UDP, no
/// fragment, no SYN (its options would count), captured up to the end of its headers, and well-formed. `None` says nothing
/// about a packet but that it is not plain.
///
/// ```
/// use towpath_gate::packet::Link;
/// use towpath_gate::wire;
///
/// let mut frame = [0; 42];
/// frame[12..14].copy_from_slice(&[0x08, 0x00]);
/// frame[14..24].copy_from_slice(&[0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17]);
/// frame[34..40].copy_from_slice(&[0, 53, 0x10, 0x92, 0, 8]);
/// let (flow, segment) = wire::plain(Link::Ethernet, &frame, 42).expect("plain");
/// assert_eq!((flow.src_port, flow.dst_port, segment.bytes), (53, 4242, 28));
///
/// frame[20] = 0x20; // the first of several fragments
/// assert_eq!(wire::plain(Link::Ethernet, &frame, 42), None);
/// ```
#[inline(always)]
pub fn plain(link: Link, frame: &[u8], wire_len: u32) -> Option<(Flow, Segment)> {
    const AT: usize = 14;
    let frame = Frame::new(frame, wire_len);
    match (link, frame.bytes::<AT>(0)?) {
        (Link::Ethernet, [.., 0x08, 0x00]) => {
            of(frame, ip4::parse(frame, AT).ok()?, AT, ip4::addresses(frame, AT))
        }
        (Link::Ethernet, [.., 0x86, 0xdd]) => {
            of(frame, ip6::parse(frame, AT).ok()?, AT, ip6::addresses(frame, AT))
        }
        _ => None,
    }
}

#[inline(always)]
fn of(frame: Frame<'_>, ip: Ip, network: usize, addresses: Addresses) -> Option<(Flow, Segment)> {
    let ends = match addresses {
        Addresses::V4(src, dst) => Ends::V4(src, dst),
        Addresses::V6(src, dst) => Ends::V6(src, dst, 0),
        Addresses::None => return None,
    };
    // It is so when anything lies between the headers.
    if ip.next.ext6 != 0 {
        return None;
    }
    let upper = upper::whole(frame, &ip.next)?;
    let flow =
        Flow { ends, proto: ip.next.proto, src_port: upper.src_port, dst_port: upper.dst_port, tenant: 0 };
    let mut segment = Segment { bytes: ip.len, ..Segment::default() };
    if flow.proto == proto::TCP {
        if upper.tcp_flags & SYN != 0 {
            return None;
        }
        let [offset] = *frame.bytes::<1>(ip.next.at + 12)?;
        let headers = ip.next.at - network + usize::from(offset >> 4) * 4;
        segment = Segment {
            tcp_flags: upper.tcp_flags,
            tcp_ack: upper.tcp_ack,
            tcp_seq: upper.tcp_seq,
            tcp_len: ip.len.saturating_sub(headers as u32),
            tcp_window: upper.tcp_window,
            ..segment
        };
    }
    Some((flow, segment))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::parse;
    use proptest::prelude::*;

    /// Something like a packet: one that is right, in which some bytes are not.
    fn frames() -> impl Strategy<Value = (Vec<u8>, u32)> {
        let change = (0usize..80, any::<u8>());
        let right = (any::<bool>(), any::<bool>(), proptest::collection::vec(any::<u8>(), 60));
        (right, proptest::collection::vec(change, 0..3), 0usize..20, 0u32..20).prop_map(
            |((six, tcp, noise), changes, cut, longer)| {
                let mut frame = vec![0; 14];
                let (upper, kind) = if tcp { (20, 6) } else { (8, 17) };
                let payload = 10;
                if six {
                    frame[12..14].copy_from_slice(&[0x86, 0xdd]);
                    frame.extend([0x60, 0, 0, 0, 0, upper + payload, kind, 64]);
                    frame.extend(&noise[..32]);
                } else {
                    frame[12..14].copy_from_slice(&[0x08, 0]);
                    frame.extend([0x45, 0, 0, 20 + upper + payload, 0, 0, 0, 0, 64, kind, 0, 0]);
                    frame.extend(&noise[..8]);
                }
                let at = frame.len();
                frame.extend(&noise[..usize::from(upper + payload)]);
                if tcp {
                    frame[at + 12] = 0x50 | noise[0] & 0x10;
                    frame[at + 13] &= if noise[1] & 1 == 0 { 0xfd } else { 0xff };
                } else {
                    frame[at + 4..at + 6].copy_from_slice(&[0, upper + payload]);
                }
                for (at, byte) in changes {
                    if let Some(place) = frame.get_mut(at) {
                        *place = byte;
                    }
                }
                let len = frame.len() as u32 + longer;
                frame.truncate(frame.len() - cut.saturating_sub(15));
                (frame, len)
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]
        /// What is plain is what the parser says.
        #[test]
        fn plain_is_what_parse_says((frame, wire_len) in frames()) {
            let parsed = parse(Link::Ethernet, &frame, wire_len);
            let plain = plain(Link::Ethernet, &frame, wire_len);
            if let Some((flow, segment)) = plain {
                let packet = parsed.unwrap();
                prop_assert_eq!(packet.flow(), Some(flow));
                prop_assert_eq!(packet.segment(), segment);
            } else if let Ok(packet) = parsed {
                // And nothing that is plain is missed.
                let bare = packet.transport == packet.network + if packet.ethertype == 0x86dd { 40 } else { 20 };
                let simple = packet.vlan.is_none() && packet.fragment == crate::packet::Fragment::Whole && bare
                    && matches!(packet.ethertype, 0x0800 | 0x86dd);
                let whole = packet.transport_len >= if packet.proto == 6 { 20 } else { 8 };
                let known = packet.proto == 17 && wire_len < 65_000 || packet.proto == 6 && packet.tcp_flags & SYN == 0;
                prop_assert!(!(simple && whole && known), "{packet:?}");
            }
        }
    }
}
