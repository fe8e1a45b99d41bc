//! Segmentation in software: a frame that stands for several, cut into those.
//!
//! What: each piece gets a copy of the headers and at most `gso.size` bytes of payload. TCP: sequence numbers go up, FIN and PSH stay with
//! the last piece, CWR with the first. UDP: each piece is a datagram. Both: lengths, IPv4 identification (one more for each piece)
//! and all checksums are made anew.
//! Invariant: the pieces' payloads, in order, are the frame's payload.
//! References: Linux net/ipv4/tcp_offload.c (tcp_gso_segment), RFC 9293, RFC 3168 section 6.1.2.

use std::ops::Range;

use crate::headers::{self, Headers};
use crate::{Checksum, Frame, Gso, GsoKind, checksum};

/// Tcp flags that belong to one end of the whole: FIN and PSH, CWR.
const LAST_ONLY: u8 = 0x01 | 0x08;
const FIRST_ONLY: u8 = 0x80;

/// Cuts `frame` as its `meta.offload.gso` says, appends the pieces to `into` and their places to `places`.
///
/// Returns `false` (and appends nothing) when the frame is not what it claims to be: no whole TCP or UDP packet, or nothing to cut by.
///
/// ```
/// use towpath_port::{Frame, Gso, GsoKind, LinkType, segment};
///
/// // An IPv4 packet with a UDP header and 25 bytes, for datagrams of 10.
/// let mut bytes = vec![0x45, 0, 0, 53, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
/// bytes.extend([0, 7, 0, 8, 0, 33, 0, 0]);
/// bytes.extend(0..25);
/// let mut frame = Frame::new(&bytes, LinkType::RAW);
/// frame.meta.offload.gso = Some(Gso { kind: GsoKind::Udp, size: 10, ecn: false });
///
/// let (mut pieces, mut places) = (Vec::new(), Vec::new());
/// assert!(segment::cut(frame, &mut pieces, &mut places));
/// assert_eq!(places.iter().map(|place| place.len()).collect::<Vec<_>>(), [38, 38, 33]);
/// ```
pub fn cut(frame: Frame<'_>, into: &mut Vec<u8>, places: &mut Vec<Range<usize>>) -> bool {
    let Some((headers, gso)) = headers::locate(frame.link, frame.bytes).zip(frame.meta.offload.gso) else {
        return false;
    };
    // In a tunnel it is not this packet that is to be cut, but the one in it.
    if let Checksum::Partial { start, .. } = frame.meta.offload.checksum
        && usize::from(start) != headers.transport
    {
        return false;
    }
    let Some(payload) = payload(&headers, gso, frame.bytes) else { return false };
    let header = &frame.bytes[..payload];
    let chunks = frame.bytes[payload..headers.end].chunks(gso.size.max(1).into());
    let last = chunks.len().saturating_sub(1);
    for (index, chunk) in chunks.enumerate() {
        let start = into.len();
        into.extend_from_slice(header);
        into.extend_from_slice(chunk);
        let piece = &mut into[start..];
        let end = piece.len();
        let headers = Headers { end, ..headers };
        lengths(&headers, piece, index);
        match gso.kind {
            GsoKind::Udp => datagram(&headers, piece),
            GsoKind::Tcp4 | GsoKind::Tcp6 => {
                tcp(&headers, piece, index * usize::from(gso.size), index == 0, index == last)
            }
        }
        places.push(start..start + end);
    }
    true
}

/// Bytes of the longest piece that `frame` is cut into, link header included; its own where it is not to be cut.
pub fn longest(frame: Frame<'_>) -> usize {
    let len = frame.bytes.len();
    let Some(gso) = frame.meta.offload.gso else { return len };
    header_len(frame, gso).map_or(len, |header| len.min(header + usize::from(gso.size)))
}

/// `frame` in pieces of at most `max` bytes, when it is TCP: segments may be cut anywhere, datagrams may not.
pub(crate) fn limit(mut frame: Frame<'_>, max: usize) -> Frame<'_> {
    let Some(gso) = frame.meta.offload.gso.filter(|gso| gso.kind != GsoKind::Udp) else { return frame };
    let room = header_len(frame, gso).and_then(|header| max.checked_sub(header)).unwrap_or(0);
    if (1..usize::from(gso.size)).contains(&room) {
        frame.meta.offload.gso = Some(Gso { size: room as u16, ..gso });
    }
    frame
}

/// Bytes in front of the payload that each piece begins with.
fn header_len(frame: Frame<'_>, gso: Gso) -> Option<usize> {
    // In a tunnel this is the inner transport header.
    if let Checksum::Partial { start, .. } = frame.meta.offload.checksum {
        let start = usize::from(start);
        return match gso.kind {
            GsoKind::Udp => Some(start + 8),
            _ => frame.bytes.get(start + 12).map(|offset| start + usize::from(offset >> 4) * 4),
        };
    }
    payload(&headers::locate(frame.link, frame.bytes)?, gso, frame.bytes)
}

/// How `frame` would be cut where the medium says only that it is too long: by what fits `mtu`.
///
/// TCP only, whose segments may be cut anywhere. Where one UDP datagram ends and the next begins is nobody's to guess.
pub fn guess(frame: Frame<'_>, mtu: usize) -> Option<Gso> {
    let headers = headers::locate(frame.link, frame.bytes).filter(|headers| !headers.fragment)?;
    if headers.end - headers.network <= mtu {
        return None;
    }
    let kind = match (headers.is_tcp(), headers.six) {
        (true, false) => GsoKind::Tcp4,
        (true, true) => GsoKind::Tcp6,
        (false, _) => return None,
    };
    let whole = Gso { kind, size: 1, ecn: false };
    let size = mtu.checked_sub(payload(&headers, whole, frame.bytes)? - headers.network)?;
    let size = u16::try_from(size).ok().filter(|size| *size > 0)?;
    Some(Gso { size, ..whole })
}

/// Whether `frame` is UDP that is longer than `mtu`: several datagrams, most likely, and of what length is not known.
pub(crate) fn is_uncut(frame: Frame<'_>, mtu: usize) -> bool {
    let headers = headers::locate(frame.link, frame.bytes);
    headers
        .is_some_and(|headers| headers.is_udp() && !headers.fragment && headers.end - headers.network > mtu)
}

/// Where the payload begins; `None` when the frame is not of the kind, or has none.
fn payload(headers: &Headers, gso: Gso, bytes: &[u8]) -> Option<usize> {
    let kind = match gso.kind {
        GsoKind::Tcp4 => headers.is_tcp() && !headers.six,
        GsoKind::Tcp6 => headers.is_tcp() && headers.six,
        GsoKind::Udp => headers.is_udp(),
    };
    let header = match gso.kind {
        GsoKind::Udp => 8,
        _ => usize::from(bytes.get(headers.transport + 12)? >> 4) * 4,
    };
    let least = if gso.kind == GsoKind::Udp { 8 } else { 20 };
    let payload = headers.transport + header;
    (kind && !headers.fragment && headers.ends.is_some() && header >= least && payload < headers.end)
        .then_some(payload)
}

fn lengths(headers: &Headers, piece: &mut [u8], index: usize) {
    let ip = headers.network;
    if headers.six {
        let len = (headers.end - ip - 40) as u16;
        piece[ip + 4..ip + 6].copy_from_slice(&len.to_be_bytes());
        return;
    }
    let len = (headers.end - ip) as u16;
    let id = u16::from_be_bytes([piece[ip + 4], piece[ip + 5]]).wrapping_add(index as u16);
    piece[ip + 2..ip + 4].copy_from_slice(&len.to_be_bytes());
    piece[ip + 4..ip + 6].copy_from_slice(&id.to_be_bytes());
    headers.renew_ip(piece);
}

fn tcp(headers: &Headers, piece: &mut [u8], offset: usize, first: bool, last: bool) {
    let at = headers.transport;
    let seq = &mut piece[at + 4..at + 8];
    let next = u32::from_be_bytes([seq[0], seq[1], seq[2], seq[3]]).wrapping_add(offset as u32);
    seq.copy_from_slice(&next.to_be_bytes());
    if !last {
        piece[at + 13] &= !LAST_ONLY;
    }
    if !first {
        piece[at + 13] &= !FIRST_ONLY;
    }
    transport_checksum(headers, piece, 16);
}

fn datagram(headers: &Headers, piece: &mut [u8]) {
    let at = headers.transport;
    let len = (headers.end - at) as u16;
    piece[at + 4..at + 6].copy_from_slice(&len.to_be_bytes());
    transport_checksum(headers, piece, 6);
}

fn transport_checksum(headers: &Headers, piece: &mut [u8], offset: usize) {
    let field = headers.transport + offset;
    let pseudo = headers.pseudo(piece);
    piece[field..field + 2].copy_from_slice(&pseudo.to_be_bytes());
    checksum::finish(piece, headers.transport, offset);
}

#[cfg(test)]
mod tests {
    use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};
    use proptest::prelude::*;

    use super::*;
    use crate::LinkType;

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

    fn pieces(bytes: &[u8], kind: GsoKind, size: u16) -> Vec<Vec<u8>> {
        let mut frame = Frame::new(bytes, LinkType::ETHERNET);
        frame.meta.offload.gso = Some(Gso { kind, size, ecn: false });
        let (mut into, mut places) = (Vec::new(), Vec::new());
        assert!(cut(frame, &mut into, &mut places));
        places.into_iter().map(|place| into[place].to_vec()).collect()
    }

    fn checksums_hold(bytes: &[u8]) {
        let headers = headers::locate(LinkType::ETHERNET, bytes).expect("an IP packet");
        assert_eq!(headers.end, bytes.len(), "lengths fit");
        if !headers.six {
            assert_eq!(checksum::sum(&bytes[headers.network..headers.transport], 0), 0xffff, "IPv4 header");
        }
        assert_eq!(checksum::sum(&bytes[headers.transport..], headers.pseudo(bytes)), 0xffff, "transport");
    }

    proptest! {
        #[test]
        fn tcp_pieces_are_the_frame(payload in prop::collection::vec(any::<u8>(), 1..5000), six: bool, size in 1_u16..1500) {
            let kind = if six { GsoKind::Tcp6 } else { GsoKind::Tcp4 };
            let pieces = pieces(&tcp_frame(six, &payload), kind, size);
            let mut whole = Vec::new();
            for (index, piece) in pieces.iter().enumerate() {
                checksums_hold(piece);
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
        fn udp_pieces_are_the_frame(payload in prop::collection::vec(any::<u8>(), 1..5000), size in 1_u16..1500) {
            let mut bytes = Vec::new();
            let udp = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).udp(1, 2);
            udp.write(&mut bytes, &payload).unwrap();
            let mut whole = Vec::new();
            for piece in pieces(&bytes, GsoKind::Udp, size) {
                checksums_hold(&piece);
                whole.extend_from_slice(&piece[42..]);
            }
            prop_assert_eq!(whole, payload);
        }

        #[test]
        fn nonsense_is_not_cut(mut bytes: Vec<u8>, six: bool, size: u16, udp: bool) {
            if let Some(first) = bytes.first_mut() {
                *first = if six { 0x60 } else { 0x45 };
            }
            let mut frame = Frame::new(&bytes, LinkType::RAW);
            let kind = if udp { GsoKind::Udp } else if six { GsoKind::Tcp6 } else { GsoKind::Tcp4 };
            frame.meta.offload.gso = Some(Gso { kind, size, ecn: false });
            cut(frame, &mut Vec::new(), &mut Vec::new());
            guess(frame, size.into());
        }
    }

    #[test]
    fn a_guess_makes_pieces_that_fit() {
        let bytes = tcp_frame(false, &[1; 4000]);
        let frame = Frame::new(&bytes, LinkType::ETHERNET);
        let gso = guess(frame, 1500).expect("too long for the MTU");
        assert_eq!(gso, Gso { kind: GsoKind::Tcp4, size: 1500 - 20 - 32, ecn: false });
        assert!(pieces(&bytes, gso.kind, gso.size).iter().all(|piece| piece.len() <= 1514));
        assert_eq!(guess(frame, 9000), None);
    }

    #[test]
    fn only_tcp_is_cut_by_less_than_its_sender_said() {
        let bytes = tcp_frame(false, &[1; 4000]);
        let mut frame = Frame::new(&bytes, LinkType::ETHERNET);
        assert_eq!((longest(frame), limit(frame, 1414)), (bytes.len(), frame));
        frame.meta.offload.gso = Some(Gso { kind: GsoKind::Tcp4, size: 1448, ecn: true });
        for checksum in [Checksum::Unverified, Checksum::Partial { start: 34, offset: 16 }] {
            frame.meta.offload.checksum = checksum;
            assert_eq!(longest(frame), 1514);
            let gso = Some(Gso { kind: GsoKind::Tcp4, size: 1348, ecn: true });
            assert_eq!(limit(frame, 1414).meta.offload.gso, gso);
            assert_eq!((limit(frame, 1514), limit(frame, 66)), (frame, frame));
        }
        frame.meta.offload.gso = Some(Gso { kind: GsoKind::Udp, size: 1448, ecn: false });
        assert_eq!(limit(frame, 1414), frame);
    }

    #[test]
    fn what_is_in_a_tunnel_is_not_cut_at_the_outer_header() {
        let mut bytes = Vec::new();
        let udp =
            PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).udp(1, 4789);
        udp.write(&mut bytes, &[7; 4000]).unwrap();
        let mut frame = Frame::new(&bytes, LinkType::ETHERNET);
        frame.meta.offload.gso = Some(Gso { kind: GsoKind::Udp, size: 1200, ecn: false });
        for (start, cuts) in [(34, true), (84, false)] {
            frame.meta.offload.checksum = Checksum::Partial { start, offset: 6 };
            assert_eq!(cut(frame, &mut Vec::new(), &mut Vec::new()), cuts, "{start}");
        }
    }

    #[test]
    fn nobody_guesses_where_a_datagram_ends() {
        let mut bytes = Vec::new();
        let udp = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).udp(1, 2);
        udp.write(&mut bytes, &[7; 4000]).unwrap();
        let frame = Frame::new(&bytes, LinkType::ETHERNET);
        assert_eq!((guess(frame, 1500), is_uncut(frame, 1500), is_uncut(frame, 4028)), (None, true, false));
        let tcp = tcp_frame(false, &[1; 4000]);
        assert!(!is_uncut(Frame::new(&tcp, LinkType::ETHERNET), 1500));
    }
}
