//! Generic segmentation offload in software: segments a frame that stands for several packets.
//!
//! Each segment gets a copy of the headers and at most `gso.size` bytes of payload. TCP sequence numbers are advanced; FIN and
//! PSH stay with the last segment, CWR with the first. Each UDP segment is a datagram. For both, lengths, the IPv4 identification
//! (incremented per segment) and all checksums are recomputed.
//!
//! Invariant: the concatenated payloads of the segments are the frame's payload.
//!
//! References: Linux net/ipv4/tcp_offload.c (tcp_gso_segment), RFC 9293, RFC 3168 section 6.1.2.

use std::ops::Range;

use crate::transport::Transport;
use crate::{Checksum, Gso, GsoKind, LinkType, Offload, checksum};

/// TCP flags that only the last segment has: FIN and PSH.
const LAST_ONLY: u8 = 0x01 | 0x08;
/// TCP flags that only the first segment has: CWR.
const FIRST_ONLY: u8 = 0x80;

/// Segments `frame` according to `offload.gso`. Appends the segments to `out` and their ranges in `out` to `ranges`.
///
/// Returns false and appends nothing if the frame does not match `offload.gso`: not a complete TCP or UDP packet, no payload,
/// or the packet to segment is inside a tunnel.
///
/// ```
/// use towpath_wire::{Checksum, Gso, GsoKind, LinkType, Offload, gso};
///
/// // An IPv4 packet with a UDP header and 25 bytes of payload, to be sent as datagrams of 10 bytes.
/// let mut frame = vec![0x45, 0, 0, 53, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
/// frame.extend([0, 7, 0, 8, 0, 33, 0, 0]);
/// frame.extend(0..25);
/// let udp = Gso { kind: GsoKind::Udp, size: 10, ecn: false };
/// let offload = Offload { checksum: Checksum::Unverified, gso: Some(udp) };
///
/// let (mut out, mut ranges) = (Vec::new(), Vec::new());
/// assert!(gso::segment(LinkType::RAW, &frame, offload, &mut out, &mut ranges));
/// assert_eq!(ranges.iter().map(|range| range.len()).collect::<Vec<_>>(), [38, 38, 33]);
/// ```
pub fn segment(
    link: LinkType,
    frame: &[u8],
    offload: Offload,
    out: &mut Vec<u8>,
    ranges: &mut Vec<Range<usize>>,
) -> bool {
    let Some((transport, gso)) = Transport::parse(link, frame).zip(offload.gso) else { return false };
    // In a tunnel, the inner packet is the one to segment.
    if let Checksum::Partial { start, .. } = offload.checksum
        && usize::from(start) != transport.start
    {
        return false;
    }
    let Some(payload) = payload(&transport, gso, frame) else { return false };
    let header = &frame[..payload];
    let chunks = frame[payload..transport.end].chunks(gso.size.max(1).into());
    let last = chunks.len().saturating_sub(1);
    for (index, chunk) in chunks.enumerate() {
        let start = out.len();
        out.extend_from_slice(header);
        out.extend_from_slice(chunk);
        let piece = &mut out[start..];
        let end = piece.len();
        let transport = Transport { end, ..transport };
        fill_lengths(&transport, piece, index);
        match gso.kind {
            GsoKind::Udp => fill_udp(&transport, piece),
            GsoKind::Tcp4 | GsoKind::Tcp6 => {
                fill_tcp(&transport, piece, index * usize::from(gso.size), index == 0, index == last)
            }
        }
        ranges.push(start..start + end);
    }
    true
}

/// Length of the longest segment of `frame` in bytes, link header included; the frame's length if it is not to be segmented.
pub fn max_segment_len(link: LinkType, frame: &[u8], offload: Offload) -> usize {
    let len = frame.len();
    let Some(gso) = offload.gso else { return len };
    header_len(link, frame, offload, gso).map_or(len, |header| len.min(header + usize::from(gso.size)))
}

/// Returns true if [`segment`] cuts `frame` into several segments.
pub fn is_segmented(link: LinkType, frame: &[u8], offload: Offload) -> bool {
    max_segment_len(link, frame, offload) < frame.len()
}

/// Reduces the segment size of TCP so that no segment is longer than `max` bytes, link header included.
///
/// TCP may be segmented anywhere. UDP datagrams must keep their size; their metadata is returned unchanged.
pub fn limit(link: LinkType, frame: &[u8], mut offload: Offload, max: usize) -> Offload {
    let Some(gso) = offload.gso.filter(|gso| gso.kind != GsoKind::Udp) else { return offload };
    let room = header_len(link, frame, offload, gso).and_then(|header| max.checked_sub(header)).unwrap_or(0);
    if (1..usize::from(gso.size)).contains(&room) {
        offload.gso = Some(Gso { size: room as u16, ..gso });
    }
    offload
}

/// Length of the headers in front of the payload, link header included.
fn header_len(link: LinkType, frame: &[u8], offload: Offload, gso: Gso) -> Option<usize> {
    // In a tunnel `start` is the inner transport header.
    if let Checksum::Partial { start, .. } = offload.checksum {
        let start = usize::from(start);
        return match gso.kind {
            GsoKind::Udp => Some(start + 8),
            _ => frame.get(start + 12).map(|offset| start + usize::from(offset >> 4) * 4),
        };
    }
    payload(&Transport::parse(link, frame)?, gso, frame)
}

/// Infers how to segment a TCP packet that is longer than `mtu`, for media that do not report it (AF_XDP, NFQUEUE).
///
/// Returns `None` for other packets. UDP cannot be inferred: the boundaries of the datagrams are unknown.
pub fn infer(link: LinkType, frame: &[u8], mtu: usize) -> Option<Gso> {
    let transport = Transport::parse(link, frame).filter(|transport| !transport.fragment)?;
    if transport.end - transport.network <= mtu {
        return None;
    }
    let kind = match (transport.is_tcp(), transport.v6) {
        (true, false) => GsoKind::Tcp4,
        (true, true) => GsoKind::Tcp6,
        (false, _) => return None,
    };
    let gso = Gso { kind, size: 1, ecn: false };
    let size = mtu.checked_sub(payload(&transport, gso, frame)? - transport.network)?;
    let size = u16::try_from(size).ok().filter(|size| *size > 0)?;
    Some(Gso { size, ..gso })
}

/// Returns true if `frame` is an unfragmented UDP packet longer than `mtu`: probably several datagrams of an unknown size.
pub fn is_unsegmented_udp(link: LinkType, frame: &[u8], mtu: usize) -> bool {
    Transport::parse(link, frame).is_some_and(|transport| {
        transport.is_udp() && !transport.fragment && transport.end - transport.network > mtu
    })
}

/// Offset of the payload; `None` if the packet is not of the kind or has no payload.
fn payload(transport: &Transport, gso: Gso, frame: &[u8]) -> Option<usize> {
    let kind = match gso.kind {
        GsoKind::Tcp4 => transport.is_tcp() && !transport.v6,
        GsoKind::Tcp6 => transport.is_tcp() && transport.v6,
        GsoKind::Udp => transport.is_udp(),
    };
    let header = match gso.kind {
        GsoKind::Udp => 8,
        _ => usize::from(frame.get(transport.start + 12)? >> 4) * 4,
    };
    let least = if gso.kind == GsoKind::Udp { 8 } else { 20 };
    let payload = transport.start + header;
    let complete = !transport.fragment && transport.addresses.is_some();
    (kind && complete && header >= least && payload < transport.end).then_some(payload)
}

fn fill_lengths(transport: &Transport, piece: &mut [u8], index: usize) {
    let ip = transport.network;
    if transport.v6 {
        let len = (transport.end - ip - 40) as u16;
        piece[ip + 4..ip + 6].copy_from_slice(&len.to_be_bytes());
        return;
    }
    let len = (transport.end - ip) as u16;
    let id = u16::from_be_bytes([piece[ip + 4], piece[ip + 5]]).wrapping_add(index as u16);
    piece[ip + 2..ip + 4].copy_from_slice(&len.to_be_bytes());
    piece[ip + 4..ip + 6].copy_from_slice(&id.to_be_bytes());
    transport.fill_ip4(piece);
}

fn fill_tcp(transport: &Transport, piece: &mut [u8], offset: usize, first: bool, last: bool) {
    let at = transport.start;
    let seq = &mut piece[at + 4..at + 8];
    let next = u32::from_be_bytes([seq[0], seq[1], seq[2], seq[3]]).wrapping_add(offset as u32);
    seq.copy_from_slice(&next.to_be_bytes());
    if !last {
        piece[at + 13] &= !LAST_ONLY;
    }
    if !first {
        piece[at + 13] &= !FIRST_ONLY;
    }
    fill_checksum(transport, piece, 16);
}

fn fill_udp(transport: &Transport, piece: &mut [u8]) {
    let at = transport.start;
    let len = (transport.end - at) as u16;
    piece[at + 4..at + 6].copy_from_slice(&len.to_be_bytes());
    fill_checksum(transport, piece, 6);
}

fn fill_checksum(transport: &Transport, piece: &mut [u8], offset: usize) {
    let field = transport.start + offset;
    let pseudo = transport.pseudo(piece);
    piece[field..field + 2].copy_from_slice(&pseudo.to_be_bytes());
    checksum::finish(piece, transport.start, offset);
}

#[cfg(test)]
mod tests {
    use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};
    use proptest::prelude::*;

    use super::*;

    fn tcp_frame(six: bool, payload: &[u8]) -> Vec<u8> {
        let eth = PacketBuilder::ethernet2([2; 6], [4; 6]);
        let ip = match six {
            false => eth.ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64),
            true => eth.ipv6([1; 16], [2; 16], 64),
        };
        let tcp = ip.tcp(1000, 80, 0xffff_fff0, 500).ack(7).psh().fin().cwr();
        let tcp = tcp.options(&[etherparse::TcpOptionElement::Timestamp(1, 2)]).unwrap();
        let mut bytes = Vec::new();
        tcp.write(&mut bytes, payload).unwrap();
        bytes
    }

    fn offload(kind: GsoKind, size: u16, ecn: bool) -> Offload {
        Offload { gso: Some(Gso { kind, size, ecn }), ..Offload::default() }
    }

    fn pieces(bytes: &[u8], kind: GsoKind, size: u16) -> Vec<Vec<u8>> {
        let (mut out, mut ranges) = (Vec::new(), Vec::new());
        assert!(segment(LinkType::ETHERNET, bytes, offload(kind, size, false), &mut out, &mut ranges));
        ranges.into_iter().map(|range| out[range].to_vec()).collect()
    }

    fn assert_checksums(bytes: &[u8]) {
        let transport = Transport::parse(LinkType::ETHERNET, bytes).expect("an IP packet");
        assert_eq!(transport.end, bytes.len(), "length fields");
        if !transport.v6 {
            assert_eq!(checksum::sum(&bytes[transport.network..transport.start], 0), 0xffff, "IPv4 header");
        }
        assert_eq!(checksum::sum(&bytes[transport.start..], transport.pseudo(bytes)), 0xffff, "transport");
    }

    proptest! {
        #[test]
        fn tcp_segments_concatenate_to_the_frame(payload in prop::collection::vec(any::<u8>(), 1..5000), six: bool, size in 1_u16..1500) {
            let kind = if six { GsoKind::Tcp6 } else { GsoKind::Tcp4 };
            let pieces = pieces(&tcp_frame(six, &payload), kind, size);
            let mut whole = Vec::new();
            for (index, piece) in pieces.iter().enumerate() {
                assert_checksums(piece);
                let sliced = SlicedPacket::from_ethernet(piece).unwrap();
                let Some(TransportSlice::Tcp(tcp)) = sliced.transport else { panic!("TCP") };
                assert_eq!(tcp.sequence_number(), 0xffff_fff0_u32.wrapping_add(whole.len() as u32));
                assert_eq!((tcp.cwr(), tcp.fin(), tcp.psh(), tcp.ack()),
                    (index == 0, index + 1 == pieces.len(), index + 1 == pieces.len(), true));
                whole.extend_from_slice(tcp.payload());
            }
            prop_assert_eq!(whole, payload);
        }

        #[test]
        fn udp_segments_concatenate_to_the_frame(payload in prop::collection::vec(any::<u8>(), 1..5000), size in 1_u16..1500) {
            let mut bytes = Vec::new();
            let udp = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).udp(1, 2);
            udp.write(&mut bytes, &payload).unwrap();
            let mut whole = Vec::new();
            for piece in pieces(&bytes, GsoKind::Udp, size) {
                assert_checksums(&piece);
                whole.extend_from_slice(&piece[42..]);
            }
            prop_assert_eq!(whole, payload);
        }

        #[test]
        fn random_bytes_do_not_panic(mut bytes: Vec<u8>, six: bool, size: u16, udp: bool) {
            if let Some(first) = bytes.first_mut() {
                *first = if six { 0x60 } else { 0x45 };
            }
            let kind = if udp { GsoKind::Udp } else if six { GsoKind::Tcp6 } else { GsoKind::Tcp4 };
            segment(LinkType::RAW, &bytes, offload(kind, size, false), &mut Vec::new(), &mut Vec::new());
            infer(LinkType::RAW, &bytes, size.into());
        }
    }

    #[test]
    fn inferred_segments_fit_the_mtu() {
        let bytes = tcp_frame(false, &[1; 4000]);
        let gso = infer(LinkType::ETHERNET, &bytes, 1500).expect("too long for the MTU");
        assert_eq!(gso, Gso { kind: GsoKind::Tcp4, size: 1500 - 20 - 32, ecn: false });
        assert!(pieces(&bytes, gso.kind, gso.size).iter().all(|piece| piece.len() <= 1514));
        assert_eq!(infer(LinkType::ETHERNET, &bytes, 9000), None);
    }

    #[test]
    fn limit_reduces_tcp_segments_only() {
        let (bytes, link) = (tcp_frame(false, &[1; 4000]), LinkType::ETHERNET);
        let none = Offload::default();
        assert_eq!(
            (max_segment_len(link, &bytes, none), limit(link, &bytes, none, 1414)),
            (bytes.len(), none)
        );
        for checksum in [Checksum::Unverified, Checksum::Partial { start: 34, offset: 16 }] {
            let tcp = Offload { checksum, ..offload(GsoKind::Tcp4, 1448, true) };
            assert_eq!(max_segment_len(link, &bytes, tcp), 1514);
            let shorter = Offload { checksum, ..offload(GsoKind::Tcp4, 1348, true) };
            assert_eq!(limit(link, &bytes, tcp, 1414), shorter);
            assert_eq!((limit(link, &bytes, tcp, 1514), limit(link, &bytes, tcp, 66)), (tcp, tcp));
        }
        let udp = offload(GsoKind::Udp, 1448, false);
        assert_eq!(limit(link, &bytes, udp, 1414), udp);
    }

    #[test]
    fn inner_packets_are_not_segmented_at_the_outer_header() {
        let mut bytes = Vec::new();
        let udp =
            PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).udp(1, 4789);
        udp.write(&mut bytes, &[7; 4000]).unwrap();
        for (start, segments) in [(34, true), (84, false)] {
            let checksum = Checksum::Partial { start, offset: 6 };
            let offload = Offload { checksum, ..offload(GsoKind::Udp, 1200, false) };
            let (mut out, mut ranges) = (Vec::new(), Vec::new());
            assert_eq!(
                segment(LinkType::ETHERNET, &bytes, offload, &mut out, &mut ranges),
                segments,
                "{start}"
            );
        }
    }

    #[test]
    fn udp_datagrams_are_not_inferred() {
        let mut bytes = Vec::new();
        let udp = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).udp(1, 2);
        udp.write(&mut bytes, &[7; 4000]).unwrap();
        let link = LinkType::ETHERNET;
        assert_eq!(infer(link, &bytes, 1500), None);
        assert!(is_unsegmented_udp(link, &bytes, 1500) && !is_unsegmented_udp(link, &bytes, 4028));
        assert!(!is_unsegmented_udp(link, &tcp_frame(false, &[1; 4000]), 1500));
    }
}
