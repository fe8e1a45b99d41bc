//! Checksums computed anew, for a packet whose bytes were put together by somebody who may not have done it: an
//! inspector that changed a payload, or a reply that the engine makes.
//!
//! The Internet checksum is RFC 1071's; the pseudo-headers are those of RFC 9293 (3.1), RFC 768 and RFC 8200 (8.1).

use super::{be16, proto};
use crate::{Addresses, Fragment, Link, Packet};

/// Puts the right checksums into a frame: IPv4 header, TCP, UDP, ICMP, ICMPv6.
///
/// A UDP datagram over IPv4 without a checksum (0) keeps none. `wire_len` is as for [`super::parse`].
///
/// Returns whether every checksum of the packet is right now. It is false for a frame that is not IP or malformed, one
/// whose upper layer is not all there (a fragment, a capture that was cut short), one whose last receiver is not known (a
/// routing header of an unknown type), and for protocols with checksums that are not computed here (UDP-Lite, SCTP, DCCP);
/// an IPv4 header is still put right.
///
/// # Examples
///
/// ```
/// use towpath_wire::{Link, checksum};
///
/// // An ICMP echo request without its checksums.
/// let mut frame = [
///     0x45, 0, 0, 28, 0, 0, 0, 0, 64, 1, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2, // IPv4
///     8, 0, 0, 0, 0, 1, 0, 1, // ICMP
/// ];
/// assert!(checksum::fill(Link::Ip, &mut frame, 28));
/// assert_eq!(frame[22..24], [0xf7, 0xfd]);
/// ```
pub fn fill(link: Link, frame: &mut [u8], wire_len: u32) -> bool {
    let Ok(packet) = super::parse(link, frame, wire_len) else { return false };
    let Packet { addresses, network, proto, fragment, transport, transport_len, ip_len, .. } = packet;
    let v6 = match addresses {
        Addresses::None => return false,
        Addresses::V4(..) => {
            fill_ip4(frame, network);
            false
        }
        Addresses::V6(..) => true,
    };
    let end = transport + transport_len;
    if fragment != Fragment::Whole || end < network + ip_len as usize {
        return false;
    }
    let Some(at) = place(proto, v6) else { return false };
    let ends =
        if v6 { ends6(&frame[..end], network, transport) } else { ends4(&frame[..transport], network) };
    let Some((from, to)) = ends else { return false };
    let width = if v6 { 16 } else { 4 };
    let pseudo = sum(&frame[from..from + width]) + sum(&frame[to..to + width]);
    // UDP has a length of its own (RFC 768), and options may follow (RFC 9868).
    let transport_len = match frame[transport..end] {
        [_, _, _, _, high, low, ..] if proto == proto::UDP && be16([high, low]) >= 8 => {
            transport_len.min(be16([high, low]).into())
        }
        _ => transport_len,
    };
    let segment = &mut frame[transport..transport + transport_len];
    let Some(field) = segment.get(at..at + 2) else { return false };
    if proto == proto::UDP && !v6 && field == [0, 0] {
        return true;
    }
    segment[at..at + 2].fill(0);
    let pseudo = if proto == proto::ICMP { 0 } else { pseudo + transport_len as u64 + u64::from(proto) };
    let checksum = match !fold(pseudo + sum(segment)) {
        // "If the computed checksum is zero, it is transmitted as all ones" (RFC 768).
        0 if proto == proto::UDP => 0xffff,
        checksum => checksum,
    };
    segment[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
    true
}

/// Where the pseudo header's addresses are, source and destination, of the IPv4 packet at `network` whose header ends where `frame` does.
///
/// The destination is the last receiver's: with a source route that is not used up, the route's last (RFC 791, 3.1). `None` when
/// the options do not say.
fn ends4(frame: &[u8], network: usize) -> Option<(usize, usize)> {
    let mut at = network + 20;
    while let Some(&kind) = frame.get(at)
        && kind != 0
    {
        let len = if kind == 1 { 1 } else { usize::from(*frame.get(at + 1)?) };
        let option = frame.get(at..at + len).filter(|option| !option.is_empty())?;
        // Loose and strict source route: type, length, a pointer from 1 to the next address, addresses.
        if let [131 | 137, _, pointer, _, _, _, _, ..] = option
            && usize::from(*pointer) < len
        {
            return Some((network + 12, at + len - 4));
        }
        at += len;
    }
    Some((network + 12, network + 16))
}

/// The same of an IPv6 packet whose upper layer begins at `transport`: its first sender's, and its last receiver's.
///
/// "At the originating node, that address will be in the last element of the Routing header; at the recipient(s), that address
/// will be in the Destination Address field of the IPv6 header" (RFC 8200, 8.1). `None` for routing headers of unknown types.
fn ends6(frame: &[u8], network: usize, transport: usize) -> Option<(usize, usize)> {
    let (mut from, mut to) = (network + 8, network + 24);
    let (mut next, mut at) = (*frame.get(network + 6)?, network + 40);
    while at < transport {
        let units = usize::from(*frame.get(at + 1)?);
        let len = match next {
            proto::FRAG => 8,
            // In units of four bytes, two of them less (RFC 4302, 2.2).
            proto::AH => (units + 2) * 4,
            _ => (units + 1) * 8,
        };
        let header = frame.get(at..at + len)?;
        match (next, header[2], header[3]) {
            (proto::ROUTE, _, 0) => {}
            // In the order that they are gone to (RFC 2460, 4.4; RFC 6275, 6.4).
            (proto::ROUTE, 0 | 2, _) if len >= 24 => to = at + (len - 8) / 16 * 16 - 8,
            // "The Segment List is encoded starting from the last segment" (RFC 8754, 2).
            (proto::ROUTE, 4, _) if len >= 24 => to = at + 8,
            (proto::ROUTE, ..) => return None,
            (proto::DSTOPT, ..) => from = home(header).map_or(from, |home| at + home),
            _ => {}
        }
        (next, at) = (header[0], at + len);
    }
    Some((from, to))
}

/// Where in these destination options the home address is: "the home address is used as the source" of a checksum (RFC 6275).
fn home(header: &[u8]) -> Option<usize> {
    let mut at = 2;
    loop {
        at += match header.get(at..)? {
            // Pad1, and others with a length.
            [0, ..] => 1,
            [0xc9, 16, address @ ..] if address.len() >= 16 => return Some(at + 2),
            [_, len, ..] => 2 + usize::from(*len),
            _ => return None,
        };
    }
}

/// Where the checksum is in an upper layer's header.
fn place(proto: u8, v6: bool) -> Option<usize> {
    match (proto, v6) {
        (proto::TCP, _) => Some(16),
        (proto::UDP, _) => Some(6),
        (proto::ICMP, false) | (proto::ICMP6, true) => Some(2),
        _ => None,
    }
}

/// Computes and stores the checksum of the IPv4 header at `network`.
///
/// # Panics
///
/// Panics if the frame does not contain the whole header.
pub fn fill_ip4(frame: &mut [u8], network: usize) {
    // The parser has seen the whole header.
    let len = usize::from(frame[network] & 0x0f) * 4;
    let header = &mut frame[network..network + len];
    header[10..12].fill(0);
    let checksum = !fold(sum(header));
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
}

/// The sum of the 16-bit words, an odd byte at the end padded with zero.
fn sum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<2>();
    let whole: u64 = words.iter().map(|word| u64::from(be16(*word))).sum();
    whole + rest.first().map_or(0, |last| u64::from(*last) << 8)
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;
    use proptest::prelude::*;

    use super::*;

    /// A packet with right checksums, made by somebody else.
    fn packet(kind: u8, payload: &[u8]) -> Vec<u8> {
        let v4 = || PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [192, 0, 2, 9], 64);
        let v6 = || PacketBuilder::ethernet2([2; 6], [4; 6]).ipv6([7; 16], [8; 16], 64);
        let mut out = Vec::new();
        let written = match kind % 6 {
            0 => v4().tcp(1, 2, 3, 4).write(&mut out, payload),
            1 => v4().udp(1, 2).write(&mut out, payload),
            2 => v4().icmpv4_echo_request(5, 6).write(&mut out, payload),
            3 => v6().tcp(1, 2, 3, 4).write(&mut out, payload),
            4 => v6().udp(1, 2).write(&mut out, payload),
            _ => v6().icmpv6_echo_request(5, 6).write(&mut out, payload),
        };
        written.unwrap();
        out
    }

    proptest! {
        #[test]
        fn agrees_with_another_writer(kind: u8, payload in proptest::collection::vec(any::<u8>(), 0..200), noise: u16) {
            let right = packet(kind, &payload);
            let parsed = crate::parse(Link::Ethernet, &right, 0).unwrap();
            let v6 = matches!(parsed.addresses, Addresses::V6(..));
            let at = parsed.transport + place(parsed.proto, v6).unwrap();
            let mut frame = right.clone();
            // Never 0: a UDP datagram would be one without a checksum.
            frame[at..at + 2].copy_from_slice(&(noise | 1).to_be_bytes());
            if !v6 {
                frame[24..26].copy_from_slice(&noise.to_be_bytes());
            }
            prop_assert!(fill(Link::Ethernet, &mut frame, 0));
            prop_assert_eq!(frame, right);
        }

        #[test]
        fn any_bytes_are_safe(mut frame in proptest::collection::vec(any::<u8>(), 0..120), wire_len in 0u32..200) {
            fill(Link::Ip, &mut frame, wire_len);
        }
    }

    /// IPv6 with these headers between it and a UDP datagram.
    fn six(first: u8, headers: &[u8], udp: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x60, 0, 0, 0, 0, (headers.len() + udp.len()) as u8, first, 64];
        bytes.extend([[1; 16], [2; 16]].concat());
        [bytes, headers.to_vec(), udp.to_vec()].concat()
    }

    fn filled(mut bytes: Vec<u8>) -> (bool, Vec<u8>) {
        let len = bytes.len() as u32;
        (fill(Link::Ip, &mut bytes, len), bytes)
    }

    /// The pseudo header has the first sender and the last receiver, which need not be in the IP header.
    #[test]
    fn who_is_in_the_pseudo_header() {
        const UDP: u8 = proto::UDP;
        let udp = [0, 7, 0, 9, 0, 12, 0xab, 0xcd, b'b', b'y', b't', b'e'];
        let with = |from: [u8; 16], to: [u8; 16]| {
            let mut plain = six(UDP, &[], &udp);
            plain[8..24].copy_from_slice(&from);
            plain[24..40].copy_from_slice(&to);
            Some(filled(plain).1[40..].to_vec())
        };
        let (one, two, away) = ([1; 16], [2; 16], [9; 16]);
        let routing = |kind: u8, left: u8, addresses: &[[u8; 16]]| {
            [&[UDP, (addresses.len() * 2) as u8, kind, left, 0, 0, 0, 0][..], &addresses.concat()].concat()
        };
        let home = [&[UDP, 2, 1, 2, 0, 0, 0xc9, 16][..], &away].concat();
        #[rustfmt::skip]
        let rows = [
            ("none",               UDP,           vec![],                         with(one, two)),
            ("type 0",             proto::ROUTE,  routing(0, 1, &[two, away]),    with(one, away)),
            ("type 0, arrived",    proto::ROUTE,  routing(0, 0, &[away, away]),   with(one, two)),
            ("type 2",             proto::ROUTE,  routing(2, 1, &[away]),         with(one, away)),
            ("segments",           proto::ROUTE,  routing(4, 1, &[away, two]),    with(one, away)),
            ("segments, arrived",  proto::ROUTE,  routing(4, 0, &[two, away]),    with(one, two)),
            ("compressed",         proto::ROUTE,  routing(3, 1, &[away]),         None),
            ("a home address",     proto::DSTOPT, home,                           with(away, two)),
            ("an atomic fragment", proto::FRAG,   vec![UDP, 0, 0, 0, 0, 0, 0, 1], with(one, two)),
        ];
        for (name, first, headers, expected) in rows {
            let (right, bytes) = filled(six(first, &headers, &udp));
            let upper = bytes[bytes.len() - udp.len()..].to_vec();
            assert_eq!((right, upper), (expected.is_some(), expected.unwrap_or(udp.to_vec())), "{name}");
        }
        // A strict source route of IPv4 that is not used up, and one that is.
        for (pointer, to) in [(4, [9, 9, 9, 9]), (8, [2, 2, 2, 2])] {
            let ip = |to: [u8; 4], options: &[u8]| {
                let header = 20 + options.len();
                let mut bytes = vec![
                    0x40 | (header / 4) as u8,
                    0,
                    0,
                    (header + udp.len()) as u8,
                    0,
                    0,
                    0,
                    0,
                    9,
                    UDP,
                    0,
                    0,
                ];
                bytes.extend([1, 1, 1, 1]);
                bytes.extend(to);
                bytes.extend(options);
                bytes.extend(udp);
                filled(bytes).1[header..].to_vec()
            };
            assert_eq!(ip([2, 2, 2, 2], &[137, 7, pointer, 9, 9, 9, 9, 0]), ip(to, &[]));
        }
    }

    #[test]
    fn what_follows_a_datagram_in_its_packet_is_not_in_its_checksum() {
        let udp = [0, 7, 0, 9, 0, 12, 0xab, 0xcd, b'b', b'y', b't', b'e'];
        let (_, plain) = filled(six(proto::UDP, &[], &udp));
        let (right, surplus) = filled(six(proto::UDP, &[], &[&udp[..], b"more"].concat()));
        assert!(right);
        assert_eq!((&surplus[40..52], &surplus[52..]), (&plain[40..], &b"more"[..]));
    }

    #[test]
    fn what_cannot_be_right_is_said() {
        let mut no_checksum = packet(1, b"x");
        no_checksum[40..42].fill(0);
        let before = no_checksum.clone();
        assert!(fill(Link::Ethernet, &mut no_checksum, 0));
        assert_eq!(no_checksum, before, "UDP over IPv4 without a checksum keeps none");

        let whole = packet(0, b"payload");
        let mut cut = whole[..whole.len() - 3].to_vec();
        assert!(!fill(Link::Ethernet, &mut cut, whole.len() as u32), "the capture was cut short");
        assert!(!fill(Link::Ethernet, &mut [0; 60], 60), "not IP");
    }
}
