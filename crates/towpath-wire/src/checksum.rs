//! Internet checksums: compute, update after a change, complete a partial one, detect a partial one.
//!
//! The sum is the ones' complement sum of 16-bit words (RFC 1071). Pseudo headers are those of RFC 9293 (3.1), RFC 768 and
//! RFC 8200 (8.1). A *partial* checksum holds the sum of the pseudo header only: a local host or a tunnel left the rest to
//! its network card (`CHECKSUM_PARTIAL` of linux/skbuff.h).
//!
//! Invariant: no function writes outside checksum fields, and a frame that is too short for its description is unchanged.
//!
//! References: RFC 1071, RFC 1624 (incremental update), RFC 768 (a UDP checksum of 0 means none), RFC 8200 section 8.1.

pub use crate::ones_complement::{fill_ip4, sum, update};
use crate::transport::Transport;
use crate::{Checksum, Fragment, LinkType, Offload, proto};

/// Computes and stores the checksums of a captured frame: IPv4 header, TCP, UDP, ICMP, ICMPv6.
///
/// A UDP checksum of 0 over IPv4 stays 0 (RFC 768: no checksum). `wire_len` is as for [`parse`](crate::parse).
///
/// Returns true if every checksum of the packet is correct. Returns false for
/// - a frame that is not IP or malformed;
/// - a packet with an incomplete upper layer (a fragment, a capture that was cut short);
/// - a packet whose last receiver is unknown (a routing header of an unknown type);
/// - protocols whose checksums are not supported (UDP-Lite, SCTP, DCCP).
///
/// The IPv4 header checksum is filled in even then.
///
/// # Examples
///
/// ```
/// use towpath_wire::{LinkType, checksum};
///
/// // An ICMP echo request without its checksums.
/// let mut frame = [
///     0x45, 0, 0, 28, 0, 0, 0, 0, 64, 1, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2, // IPv4
///     8, 0, 0, 0, 0, 1, 0, 1, // ICMP
/// ];
/// assert!(checksum::fill(LinkType::RAW, &mut frame, 28));
/// assert_eq!(frame[22..24], [0xf7, 0xfd]);
/// ```
pub fn fill(link: LinkType, frame: &mut [u8], wire_len: u32) -> bool {
    let Ok(packet) = crate::parse(link, frame, wire_len) else { return false };
    let (addresses, network, whole) = (packet.addresses, packet.network, packet.fragment == Fragment::Whole);
    let transport = Transport::of(&packet).filter(|_| whole);
    if let crate::Addresses::V4(..) = addresses {
        fill_ip4(frame, network);
    }
    let Some(transport) = transport else { return false };
    let Some(offset) = transport.checksum_offset() else { return false };
    let field = transport.start + offset;
    let covered = transport.covered(frame);
    if field + 2 > covered {
        return false;
    }
    if transport.is_udp() && !transport.v6 && frame[field..field + 2] == [0, 0] {
        return true;
    }
    let pseudo = transport.pseudo(frame);
    frame[field..field + 2].fill(0);
    let checksum = match !sum(&frame[transport.start..covered], pseudo) {
        // "If the computed checksum is zero, it is transmitted as all ones" (RFC 768).
        0 if transport.proto == proto::UDP => 0xffff,
        checksum => checksum,
    };
    frame[field..field + 2].copy_from_slice(&checksum.to_be_bytes());
    true
}

/// Completes a [`Checksum::Partial`]: sums `frame` from `start` and stores the complement at `start + offset`.
///
/// Returns true if the field lies inside the frame. The frame is unchanged otherwise.
///
/// ```
/// use towpath_wire::checksum;
///
/// // A transport header of 8 bytes. Its checksum field, at 6, holds the sum of the pseudo header, 0x0102.
/// let mut frame = [0x12, 0x34, 0x00, 0x50, 0x00, 0x08, 0x01, 0x02];
/// assert!(checksum::finish(&mut frame, 0, 6));
/// assert_eq!(checksum::sum(&frame, 0x0102), 0xffff); // the receiver's check
/// ```
pub fn finish(frame: &mut [u8], start: usize, offset: usize) -> bool {
    let Some(covered) = frame.get(start..) else { return false };
    if covered.len() < offset.saturating_add(2) {
        return false;
    }
    // RFC 768: "If the computed checksum is zero, it is transmitted as all ones". For other protocols the two are equal.
    let value = match !sum(covered, 0) {
        0 => 0xffff,
        value => value,
    };
    let at = start + offset;
    frame[at..at + 2].copy_from_slice(&value.to_be_bytes());
    true
}

/// Completes a partial checksum of a frame that is not to be segmented. Returns the remaining work.
pub fn complete(frame: &mut [u8], offload: Offload) -> Offload {
    match offload.checksum {
        Checksum::Partial { start, offset } if offload.gso.is_none() => {
            finish(frame, start.into(), offset.into());
            Offload::default()
        }
        _ => offload,
    }
}

/// Recomputes the checksums of a complete frame whose bytes were changed: the IPv4 header's, and that of TCP, UDP, ICMP and
/// ICMPv6 in an unfragmented packet.
///
/// A UDP checksum of 0 over IPv4 stays 0 (RFC 768), and a checksum whose last receiver is unknown (a routing header of an
/// unknown type) is unchanged. Returns the remaining work: none, or [`Checksum::Partial`] for a frame that is still to
/// be segmented. A frame that is not IP or malformed is unchanged.
pub fn renew(link: LinkType, frame: &mut [u8], mut offload: Offload) -> Offload {
    let Some(transport) = Transport::parse(link, frame) else { return offload };
    transport.fill_ip4(frame);
    // The checksum of an inner packet comes first: the outer checksum covers it.
    if let Checksum::Partial { start, offset } = offload.checksum
        && usize::from(start) != transport.start
    {
        if offload.gso.is_some() {
            return offload;
        }
        finish(&mut frame[..transport.end], start.into(), offset.into());
        offload = Offload::default();
    }
    let Some(offset) = transport.checksum_offset().filter(|_| !transport.fragment) else {
        return Offload { checksum: Checksum::Unverified, ..offload };
    };
    let field = transport.start + offset;
    if field + 2 > transport.end {
        return Offload { checksum: Checksum::Unverified, ..offload };
    }
    let partial = matches!(offload.checksum, Checksum::Partial { .. });
    if transport.is_udp() && !transport.v6 && frame[field..field + 2] == [0, 0] && !partial {
        return offload;
    }
    let pseudo = transport.pseudo(frame);
    frame[field..field + 2].copy_from_slice(&pseudo.to_be_bytes());
    if offload.gso.is_some() {
        let checksum = Checksum::Partial { start: transport.start as u16, offset: offset as u16 };
        return Offload { checksum, ..offload };
    }
    let covered = transport.covered(frame);
    finish(&mut frame[..covered], transport.start, offset);
    Offload::default()
}

/// Detects a partial TCP or UDP checksum, for media that do not report it (AF_XDP).
///
/// A checksum is partial if its field holds exactly the sum of the pseudo header, and is not correct by chance. Tunnels are
/// searched, up to four packets deep.
pub fn detect(link: LinkType, frame: &[u8]) -> Checksum {
    let Some((transport, offset)) = find_partial(link, frame) else { return Checksum::Unverified };
    let covered = &frame[transport.start..transport.covered(frame)];
    if sum(covered, transport.pseudo(frame)) == 0xffff {
        return Checksum::Unverified;
    }
    partial(&transport, offset)
}

/// Locates the partial checksum of a frame that has one, for media that report its existence only (NFQUEUE).
///
/// Completing a checksum that is correct by chance does not change it.
pub fn locate(link: LinkType, frame: &[u8]) -> Checksum {
    find_partial(link, frame).map_or(Checksum::Unverified, |(transport, offset)| partial(&transport, offset))
}

fn partial(transport: &Transport, offset: usize) -> Checksum {
    let start = u16::try_from(transport.start);
    start.map_or(Checksum::Unverified, |start| Checksum::Partial { start, offset: offset as u16 })
}

/// The outermost packet whose checksum field holds the sum of its pseudo header, and the offset of the field.
fn find_partial(link: LinkType, frame: &[u8]) -> Option<(Transport, usize)> {
    Transport::nested(link, frame).find_map(|transport| {
        let offset = transport.checksum_offset().filter(|_| transport.is_tcp() || transport.is_udp())?;
        let field = transport.start + offset;
        let value = u16::from_be_bytes(*frame.get(field..transport.end)?.first_chunk()?);
        let pseudo = transport.pseudo(frame);
        (value == pseudo && value != 0 && !transport.fragment).then_some((transport, offset))
    })
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;
    use proptest::prelude::*;

    use super::*;

    /// RFC 1071 literally: one word after the other.
    fn slow(bytes: &[u8]) -> u16 {
        let mut total = 0_u32;
        for pair in bytes.chunks(2) {
            total += u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
            total = (total & 0xffff) + (total >> 16);
        }
        total as u16
    }

    /// A packet with correct checksums from another implementation.
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
        fn sum_agrees_with_rfc_1071(bytes: Vec<u8>) {
            prop_assert_eq!(sum(&bytes, 0), slow(&bytes));
        }

        #[test]
        fn update_agrees_with_a_new_sum(
            mut bytes in prop::collection::vec(any::<u8>(), 8..100),
            new: [u8; 4],
        ) {
            let before = !sum(&bytes, 0);
            let updated = update(before, &bytes[2..6], &new);
            bytes[2..6].copy_from_slice(&new);
            // Ones' complement has two zeroes.
            let zero = |value: u16| if value == 0xffff { 0 } else { value };
            prop_assert_eq!(zero(updated), zero(!sum(&bytes, 0)));
        }

        #[test]
        fn finish_rejects_fields_outside_the_frame(mut bytes: Vec<u8>, start: u16, offset: u16) {
            let inside = usize::from(start) + usize::from(offset) + 2 <= bytes.len();
            prop_assert_eq!(finish(&mut bytes, start.into(), offset.into()), inside);
        }

        #[test]
        fn fill_and_renew_agree_with_etherparse(kind: u8, payload in proptest::collection::vec(any::<u8>(), 0..200), noise: u16) {
            let right = packet(kind, &payload);
            let parsed = Transport::parse(LinkType::ETHERNET, &right).unwrap();
            let at = parsed.start + parsed.checksum_offset().unwrap();
            let mut frame = right.clone();
            // Not 0, which means no checksum in UDP.
            frame[at..at + 2].copy_from_slice(&(noise | 1).to_be_bytes());
            if !parsed.v6 {
                frame[24..26].copy_from_slice(&noise.to_be_bytes());
            }
            let mut renewed = frame.clone();
            prop_assert!(fill(LinkType::ETHERNET, &mut frame, 0));
            prop_assert_eq!(&frame, &right);
            prop_assert_eq!(renew(LinkType::ETHERNET, &mut renewed, Offload::default()), Offload::default());
            prop_assert_eq!(renewed, right);
        }

        #[test]
        fn random_bytes_do_not_panic(mut frame in proptest::collection::vec(any::<u8>(), 0..120), wire_len in 0u32..200) {
            fill(LinkType::RAW, &mut frame, wire_len);
        }
    }

    /// An Ethernet frame in a UDP datagram to `port` without a checksum, after the tunnel header `header`.
    fn tunnelled(port: u16, header: &[u8], inner: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let udp =
            PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).udp(999, port);
        udp.write(&mut bytes, &[header, inner].concat()).unwrap();
        bytes[40..42].fill(0);
        bytes
    }

    /// A host with a tunnel leaves the inner checksum to its network card.
    #[test]
    fn partial_checksums_inside_tunnels() {
        let mut right = Vec::new();
        let tcp = PacketBuilder::ethernet2([2; 6], [4; 6])
            .ipv4([10, 9, 0, 1], [10, 9, 0, 2], 64)
            .tcp(1, 80, 7, 500);
        tcp.write(&mut right, b"hello").unwrap();
        let mut inner = right.clone();
        let pseudo = Transport::parse(LinkType::ETHERNET, &inner).unwrap().pseudo(&inner);
        inner[50..52].copy_from_slice(&pseudo.to_be_bytes());
        let gre = {
            let mut bytes = tunnelled(0, &[], &[]);
            bytes.truncate(34);
            // A key; IPv4.
            bytes.extend([&[0x20, 0, 8, 0, 0, 0, 0, 1][..], &inner[14..]].concat());
            (bytes[17], bytes[23]) = ((bytes.len() - 14) as u8, 47);
            renew(LinkType::ETHERNET, &mut bytes, Offload::default());
            bytes
        };
        let rows = [
            ("none", 0, inner.clone()),
            ("vxlan on Linux's old port", 50, tunnelled(8472, &[8, 0, 0, 0, 0, 0, 1, 0], &inner)),
            ("vxlan", 50, tunnelled(4789, &[8, 0, 0, 0, 0, 0, 1, 0], &inner)),
            ("geneve", 54, tunnelled(6081, &[1, 0, 0x65, 0x58, 0, 0, 1, 0, 1, 2, 3, 0], &inner)),
            ("gre", 28, gre),
        ];
        for (name, deeper, mut bytes) in rows {
            let found = (detect(LinkType::ETHERNET, &bytes), locate(LinkType::ETHERNET, &bytes));
            let expected = Checksum::Partial { start: 34 + deeper, offset: 16 };
            assert_eq!(found, (expected, expected), "{name}");
            let offload = Offload { checksum: expected, gso: None };
            let mut renewed = bytes.clone();
            assert_eq!(complete(&mut bytes, offload), Offload::default());
            assert_eq!(bytes[bytes.len() - right.len() + 14..], right[14..], "{name}");
            assert_eq!(renew(LinkType::ETHERNET, &mut renewed, offload), Offload::default());
            assert_eq!(renewed, bytes, "{name}: outer headers");
            assert_eq!(detect(LinkType::ETHERNET, &bytes), Checksum::Unverified, "{name}");
        }
        // A checksum that is neither partial nor correct is left alone.
        inner[50] ^= 1;
        let neither = tunnelled(4789, &[8, 0, 0, 0, 0, 0, 1, 0], &inner);
        assert_eq!(locate(LinkType::ETHERNET, &neither), Checksum::Unverified);
    }

    /// An IPv6 packet: extension headers, then a UDP datagram. `first` is the type of the first header.
    fn six(first: u8, headers: &[u8], udp: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x60, 0, 0, 0, 0, (headers.len() + udp.len()) as u8, first, 64];
        bytes.extend([[1; 16], [2; 16]].concat());
        [bytes, headers.to_vec(), udp.to_vec()].concat()
    }

    fn filled(mut bytes: Vec<u8>) -> (bool, Vec<u8>) {
        let len = bytes.len() as u32;
        (fill(LinkType::RAW, &mut bytes, len), bytes)
    }

    /// The pseudo header has the first sender and the last receiver.
    #[test]
    fn addresses_of_the_pseudo_header() {
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
            ("unknown",            proto::ROUTE,  routing(7, 1, &[away]),         None),
            ("a first fragment",   proto::FRAG,   vec![UDP, 0, 0, 1, 0, 0, 0, 1], None),
            ("an atomic fragment", proto::FRAG,   vec![UDP, 0, 0, 0, 0, 0, 0, 1], with(one, two)),
        ];
        for (name, first, headers, expected) in rows {
            let (right, bytes) = filled(six(first, &headers, &udp));
            let mut renewed = six(first, &headers, &udp);
            renew(LinkType::RAW, &mut renewed, Offload::default());
            assert_eq!(renewed, bytes, "{name}: fill and renew agree");
            let upper = bytes[bytes.len() - udp.len()..].to_vec();
            assert_eq!((right, upper), (expected.is_some(), expected.unwrap_or(udp.to_vec())), "{name}");
        }
        // A strict source route of IPv4 with addresses left, and one without.
        for (pointer, to) in [(4, [9, 9, 9, 9]), (8, [2, 2, 2, 2])] {
            let ip = |to: [u8; 4], options: &[u8]| {
                let header = 20 + options.len();
                let mut bytes = [
                    &[0x40 | (header / 4) as u8, 0, 0, (header + udp.len()) as u8][..],
                    &[0, 0, 0, 0, 9, UDP, 0, 0],
                ]
                .concat();
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
    fn bytes_after_the_udp_length_are_not_covered() {
        let udp = [0, 7, 0, 9, 0, 12, 0xab, 0xcd, b'b', b'y', b't', b'e'];
        let (_, plain) = filled(six(proto::UDP, &[], &udp));
        let (right, surplus) = filled(six(proto::UDP, &[], &[&udp[..], b"more"].concat()));
        assert!(right);
        assert_eq!((&surplus[40..52], &surplus[52..]), (&plain[40..], &b"more"[..]));
    }

    #[test]
    fn fill_returns_false_for_incomplete_packets() {
        let mut no_checksum = packet(1, b"x");
        no_checksum[40..42].fill(0);
        let before = no_checksum.clone();
        assert!(fill(LinkType::ETHERNET, &mut no_checksum, 0));
        assert_eq!(no_checksum, before, "a UDP checksum of 0 stays 0");

        let whole = packet(0, b"payload");
        let mut cut = whole[..whole.len() - 3].to_vec();
        assert!(!fill(LinkType::ETHERNET, &mut cut, whole.len() as u32), "the capture was cut short");
        assert!(!fill(LinkType::ETHERNET, &mut [0; 60], 60), "not IP");

        // An IPv4 header of 60 bytes of which 20 were captured.
        let mut options = [0x4f, 0, 0, 80, 0, 0, 0, 0, 9, 99, 0xab, 0xcd, 1, 1, 1, 1, 2, 2, 2, 2];
        let before = options;
        assert!(!fill(LinkType::RAW, &mut options, 80));
        assert_eq!(options, before);
    }

    #[test]
    fn example_of_rfc_1071() {
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(sum(&bytes, 0), 0xddf2);
    }
}
