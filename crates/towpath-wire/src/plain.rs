//! A fast parser for plain packets. It returns only the fields that dynamic states need.

use super::{Frame, be16, proto};
use crate::LinkType;
use crate::{Ends, Flow, Segment};

/// SYN (RFC 9293, 3.1).
const SYN: u8 = 0x02;

/// Parses a plain packet into its [`Packet::flow`](crate::Packet::flow) and [`Packet::segment`](crate::Packet::segment), in half
/// the instructions of [`parse`](crate::parse).
///
/// Most packets are plain: Ethernet without tags, IPv4 without options or IPv6 without extension headers, TCP or UDP, not a
/// fragment, not a SYN (its options matter), captured to the end of the headers, well-formed. `None` means that the
/// packet is not plain; use [`parse`](crate::parse).
///
/// ```
/// use towpath_wire::{self as wire, LinkType};
///
/// let mut frame = [0; 42];
/// frame[12..14].copy_from_slice(&[0x08, 0x00]);
/// frame[14..24].copy_from_slice(&[0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17]);
/// frame[34..40].copy_from_slice(&[0, 53, 0x10, 0x92, 0, 8]);
/// let (flow, segment) = wire::plain(LinkType::ETHERNET, &frame, 42).expect("plain");
/// assert_eq!((flow.src_port, flow.dst_port, segment.bytes), (53, 4242, 28));
///
/// frame[20] = 0x20; // the first of several fragments
/// assert_eq!(wire::plain(LinkType::ETHERNET, &frame, 42), None);
/// ```
#[inline(always)]
pub fn plain(link: LinkType, frame: &[u8], wire_len: u32) -> Option<(Flow, Segment)> {
    // One length check per header covers all of its fields.
    let frame = Frame::new(frame, wire_len);
    match (link, frame.bytes::<ETHERNET>(0)?) {
        (LinkType::ETHERNET, [.., 0x08, 0x00]) => plain4(frame),
        (LinkType::ETHERNET, [.., 0x86, 0xdd]) => plain6(frame),
        _ => None,
    }
}

const ETHERNET: usize = 14;
const IP4: usize = 20;
const IP6: usize = 40;

#[inline(always)]
fn plain4(frame: Frame<'_>) -> Option<(Flow, Segment)> {
    let header: &[u8; IP4] = frame.bytes(ETHERNET)?;
    let length = usize::from(be16([header[2], header[3]]));
    // More fragments, or an offset.
    let fragment = be16([header[6], header[7]]) & 0x3fff != 0;
    if header[0] != 0x45 || fragment || length > frame.wire_len - ETHERNET {
        return None;
    }
    let [.., s0, s1, s2, s3, d0, d1, d2, d3] = *header;
    let ends = Ends::V4([s0, s1, s2, s3].into(), [d0, d1, d2, d3].into());
    upper::<IP4>(frame, ends, header[9], length)
}

#[inline(always)]
fn plain6(frame: Frame<'_>) -> Option<(Flow, Segment)> {
    let header: &[u8; IP6] = frame.bytes(ETHERNET)?;
    let payload = usize::from(be16([header[4], header[5]]));
    let room = frame.wire_len.checked_sub(ETHERNET + IP6)?;
    if header[0] >> 4 != 6 || payload == 0 || payload > room {
        return None;
    }
    let (src, dst): (&[u8; 16], &[u8; 16]) = (frame.bytes(ETHERNET + 8)?, frame.bytes(ETHERNET + 24)?);
    upper::<IP6>(frame, Ends::V6((*src).into(), (*dst).into(), 0), header[6], payload + IP6)
}

/// Parses the upper layer after an IP header of `IP` bytes. The packet has `length` bytes.
#[inline(always)]
fn upper<const IP: usize>(frame: Frame<'_>, ends: Ends, proto: u8, length: usize) -> Option<(Flow, Segment)> {
    let at = ETHERNET + IP;
    let room = length.checked_sub(IP)?;
    let header: &[u8; 8] = frame.bytes(at)?;
    let [s0, s1, d0, d1, l0, l1, ..] = *header;
    let flow = Flow { ends, proto, src_port: be16([s0, s1]), dst_port: be16([d0, d1]), zone: 0 };
    let segment = Segment { bytes: length as u32, ..Segment::default() };
    match proto {
        proto::UDP => {
            let length = usize::from(be16([l0, l1]));
            (8..=room).contains(&length).then_some((flow, segment))
        }
        proto::TCP => {
            let header: &[u8; 20] = frame.bytes(at)?;
            let be32 =
                |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
            let (header_len, tcp_flags) = (usize::from(header[12] >> 4) * 4, header[13]);
            if !(20..=room).contains(&header_len) || tcp_flags & SYN != 0 {
                return None;
            }
            let tcp_window = be16([header[14], header[15]]);
            let (tcp_seq, tcp_ack, tcp_len) = (be32(4), be32(8), (room - header_len) as u32);
            Some((flow, Segment { tcp_flags, tcp_ack, tcp_seq, tcp_len, tcp_window, ..segment }))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse;
    use proptest::prelude::*;

    /// A well-formed packet with a few bytes changed.
    fn frames() -> impl Strategy<Value = (Vec<u8>, u32)> {
        let change = (0usize..80, any::<u8>());
        let right = (any::<bool>(), any::<bool>(), proptest::collection::vec(any::<u8>(), 60));
        (right, proptest::collection::vec(change, 0..3), 0usize..100, 0u32..20).prop_map(
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
                    // With and without options, sometimes longer than the packet.
                    frame[at + 12] = 0x50 + (noise[0] & 3) * 0x10;
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
                // Most frames are captured whole, the rest are truncated anywhere.
                frame.truncate(if cut < 60 { frame.len() } else { frame.len() * (100 - cut) / 40 });
                (frame, len)
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]
        /// `plain` agrees with `parse`.
        #[test]
        fn plain_agrees_with_parse((frame, wire_len) in frames()) {
            let parsed = parse(LinkType::ETHERNET, &frame, wire_len);
            let plain = plain(LinkType::ETHERNET, &frame, wire_len);
            if let Some((flow, segment)) = plain {
                let packet = parsed.unwrap();
                prop_assert_eq!(packet.flow(), Some(flow));
                prop_assert_eq!(packet.segment(), segment);
            } else if let Ok(packet) = parsed {
                // Every plain packet is recognised.
                let bare = packet.transport == packet.network + if packet.ethertype == 0x86dd { 40 } else { 20 };
                let simple = packet.vlan.is_none() && packet.fragment == crate::Fragment::Whole && bare
                    && matches!(packet.ethertype, 0x0800 | 0x86dd);
                let header = if packet.proto == 6 { 20 } else { 8 };
                let captured = frame.len() >= packet.transport + header;
                let whole = captured && packet.transport_len >= header;
                let known = packet.proto == 17 && wire_len < 65_000 || packet.proto == 6 && packet.tcp_flags & SYN == 0;
                // A length of 0 means a jumbogram, or a segment captured before TSO.
                let length = frame.get(if packet.ethertype == 0x0800 { 16..18 } else { 18..20 }) != Some(&[0, 0][..]);
                prop_assert!(!(simple && whole && known && length), "{packet:?}");
            }
        }
    }
}
