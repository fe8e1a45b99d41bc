//! Internet checksums: finish an unfinished one, update one after a change, tell an unfinished one from a right one.
//!
//! What: ones' complement sums of 16-bit words (RFC 1071), over frames that a local host or a tunnel handed over before its
//! network card would have finished them.
//! Invariant: nothing outside the checksum field is written; a frame that is too short for what is said of it is left as it is.
//! References: RFC 1071, RFC 1624 (incremental update), RFC 768 (a UDP checksum of 0 means none), RFC 8200 section 8.1.

use crate::headers::{self, Headers};
use crate::{Checksum, Frame, LinkType, Offload, tunnel};

/// Finishes what [`Checksum::Partial`] describes: sums `bytes` from `start` and stores the complement at `start + offset`.
///
/// Returns whether the places lie inside the frame; it is unchanged otherwise.
///
/// ```
/// use towpath_port::checksum;
///
/// // A transport header of 8 bytes whose checksum field (at 6) holds the pseudo header's sum, 0x0102.
/// let mut frame = [0x12, 0x34, 0x00, 0x50, 0x00, 0x08, 0x01, 0x02];
/// assert!(checksum::finish(&mut frame, 0, 6));
/// assert_eq!(checksum::sum(&frame, 0x0102), 0xffff); // what a receiver checks
/// ```
pub fn finish(bytes: &mut [u8], start: usize, offset: usize) -> bool {
    let Some(covered) = bytes.get(start..) else { return false };
    if covered.len() < offset.saturating_add(2) {
        return false;
    }
    // RFC 768: "If the computed checksum is zero, it is transmitted as all ones". For the others the two mean the same.
    let value = match !sum(covered, 0) {
        0 => 0xffff,
        value => value,
    };
    let at = start + offset;
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
    true
}

/// The ones' complement sum of `bytes` as big-endian words (an odd last byte is followed by a zero), added to `initial`.
pub fn sum(bytes: &[u8], initial: u16) -> u16 {
    // Any multiple of 16 bits at a time in the machine's order gives the same sum with its bytes swapped (RFC 1071, 2.B). Eight lanes
    // of 32 bits in 64 let the compiler use vectors; 4 GiB of ones do not overflow one.
    let mut lanes = [0_u64; 8];
    let mut chunks = bytes.chunks_exact(32);
    for chunk in &mut chunks {
        for (lane, word) in lanes.iter_mut().zip(chunk.chunks_exact(4)) {
            *lane += u64::from(u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
        }
    }
    let mut total: u64 = lanes.iter().map(|lane| (lane & 0xffff_ffff) + (lane >> 32)).sum();
    let mut pairs = chunks.remainder().chunks_exact(2);
    for pair in &mut pairs {
        total += u64::from(u16::from_ne_bytes([pair[0], pair[1]]));
    }
    if let [last] = pairs.remainder() {
        total += u64::from(u16::from_ne_bytes([*last, 0]));
    }
    fold(u64::from(u16::from_be(fold(total))) + u64::from(initial))
}

/// The checksum after `old` bytes that it covers became `new`: equation 3 of RFC 1624, `HC' = ~(~HC + ~m + m')`.
///
/// Both begin at an even place of what is summed and have the same length.
///
/// # Panics
/// When the lengths differ.
pub fn update(checksum: u16, old: &[u8], new: &[u8]) -> u16 {
    assert_eq!(old.len(), new.len(), "bytes in place of as many");
    !fold(u64::from(!checksum) + u64::from(!sum(old, 0)) + u64::from(sum(new, 0)))
}

/// Finishes a frame's checksum, as far as `offload` says that it is unfinished; what is left to do after that.
pub fn complete(bytes: &mut [u8], offload: Offload) -> Offload {
    match offload.checksum {
        Checksum::Partial { start, offset } if offload.gso.is_none() => {
            finish(bytes, start.into(), offset.into());
            Offload::default()
        }
        _ => offload,
    }
}

/// Makes every checksum of a frame whose bytes were changed right again, whatever they were: the IPv4 header's, and that of TCP,
/// UDP, ICMP and ICMPv6 in a whole packet. A UDP checksum of 0 over IPv4 stays (RFC 768: none was made), and so does one of a packet
/// whose last receiver is not known (a routing header of an unknown type). Returns what is left to do: nothing, or
/// [`Checksum::Partial`] for a frame that is still to be cut.
pub fn renew(link: LinkType, bytes: &mut [u8], mut offload: Offload) -> Offload {
    let Some(headers) = headers::locate(link, bytes) else { return offload };
    headers.renew_ip(bytes);
    // That of a packet inside this one comes first: the outer checksum covers it.
    if let Checksum::Partial { start, offset } = offload.checksum
        && usize::from(start) != headers.transport
    {
        if offload.gso.is_some() {
            return offload;
        }
        finish(&mut bytes[..headers.end], start.into(), offset.into());
        offload = Offload::default();
    }
    let Some(offset) = headers.checksum_offset().filter(|_| !headers.fragment) else {
        return Offload { checksum: Checksum::Unverified, ..offload };
    };
    let field = headers.transport + offset;
    if field + 2 > headers.end {
        return Offload { checksum: Checksum::Unverified, ..offload };
    }
    let unfinished = matches!(offload.checksum, Checksum::Partial { .. });
    if headers.is_udp() && !headers.six && bytes[field..field + 2] == [0, 0] && !unfinished {
        return offload;
    }
    let pseudo = headers.pseudo(bytes);
    bytes[field..field + 2].copy_from_slice(&pseudo.to_be_bytes());
    if offload.gso.is_some() {
        let checksum = Checksum::Partial { start: headers.transport as u16, offset: offset as u16 };
        return Offload { checksum, ..offload };
    }
    let covered = headers.covered(bytes);
    finish(&mut bytes[..covered], headers.transport, offset);
    Offload::default()
}

/// Whether a TCP or UDP checksum is unfinished, for media that do not tell (AF_XDP): its field holds exactly the pseudo
/// header's sum, and it is not by chance also right. It may be that of a packet in a tunnel.
pub fn detect(frame: Frame<'_>) -> Checksum {
    let Some((headers, offset)) = held(frame) else { return Checksum::Unverified };
    let covered = &frame.bytes[headers.transport..headers.covered(frame.bytes)];
    if sum(covered, headers.pseudo(frame.bytes)) == 0xffff {
        return Checksum::Unverified;
    }
    partial(&headers, offset)
}

/// The same where the medium says that a checksum is unfinished, but not which. (If it is right by chance, finishing it changes nothing.)
pub(crate) fn unfinished(frame: Frame<'_>) -> Checksum {
    held(frame).map_or(Checksum::Unverified, |(headers, offset)| partial(&headers, offset))
}

fn partial(headers: &Headers, offset: usize) -> Checksum {
    let start = u16::try_from(headers.transport);
    start.map_or(Checksum::Unverified, |start| Checksum::Partial { start, offset: offset as u16 })
}

/// The packet whose checksum's field holds the pseudo header's sum, and where it is.
fn held(frame: Frame<'_>) -> Option<(Headers, usize)> {
    let bytes = frame.bytes;
    let mut packets = tunnel::nested(bytes, headers::locate(frame.link, bytes)?);
    packets.find_map(|headers| {
        let offset = headers.checksum_offset().filter(|_| headers.is_tcp() || headers.is_udp())?;
        let field = headers.transport + offset;
        let held = u16::from_be_bytes(*bytes.get(field..headers.end)?.first_chunk()?);
        let pseudo = headers.pseudo(bytes);
        (held == pseudo && held != 0 && !headers.fragment).then_some((headers, offset))
    })
}

fn fold(mut total: u64) -> u16 {
    while total >> 16 != 0 {
        total = (total & 0xffff) + (total >> 16);
    }
    total as u16
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;
    use proptest::prelude::*;

    use super::*;

    /// RFC 1071 as it is written: one word after the other.
    fn slow(bytes: &[u8]) -> u16 {
        let mut total = 0_u32;
        for pair in bytes.chunks(2) {
            total += u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
            total = (total & 0xffff) + (total >> 16);
        }
        total as u16
    }

    proptest! {
        #[test]
        fn sums_as_the_rfc_does(bytes: Vec<u8>) {
            prop_assert_eq!(sum(&bytes, 0), slow(&bytes));
        }

        #[test]
        fn an_updated_checksum_is_that_of_the_changed_bytes(
            mut bytes in prop::collection::vec(any::<u8>(), 8..100),
            new: [u8; 4],
        ) {
            let before = !sum(&bytes, 0);
            let updated = update(before, &bytes[2..6], &new);
            bytes[2..6].copy_from_slice(&new);
            // The two zeroes of ones' complement are one value.
            let zero = |value: u16| if value == 0xffff { 0 } else { value };
            prop_assert_eq!(zero(updated), zero(!sum(&bytes, 0)));
        }

        #[test]
        fn places_outside_the_frame_are_refused(mut bytes: Vec<u8>, start: u16, offset: u16) {
            let inside = usize::from(start) + usize::from(offset) + 2 <= bytes.len();
            prop_assert_eq!(finish(&mut bytes, start.into(), offset.into()), inside);
        }
    }

    /// An Ethernet frame in a UDP datagram without a checksum to this port, behind so many bytes of a tunnel's header.
    fn tunnelled(port: u16, header: &[u8], inner: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let udp =
            PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).udp(999, port);
        udp.write(&mut bytes, &[header, inner].concat()).unwrap();
        bytes[40..42].fill(0);
        bytes
    }

    /// A host with a tunnel leaves the inner checksum to its card.
    #[test]
    fn unfinished_checksums_are_found_inside_tunnels() {
        let mut right = Vec::new();
        let tcp = PacketBuilder::ethernet2([2; 6], [4; 6])
            .ipv4([10, 9, 0, 1], [10, 9, 0, 2], 64)
            .tcp(1, 80, 7, 500);
        tcp.write(&mut right, b"hello").unwrap();
        let mut inner = right.clone();
        let pseudo = headers::locate(LinkType::ETHERNET, &inner).unwrap().pseudo(&inner);
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
            ("vxlan", 50, tunnelled(4789, &[8, 0, 0, 0, 0, 0, 1, 0], &inner)),
            ("geneve", 54, tunnelled(6081, &[1, 0, 0x65, 0x58, 0, 0, 1, 0, 1, 2, 3, 0], &inner)),
            ("gre", 28, gre),
        ];
        for (name, deeper, mut bytes) in rows {
            let frame = Frame::new(&bytes, LinkType::ETHERNET);
            let expected = Checksum::Partial { start: 34 + deeper, offset: 16 };
            assert_eq!((detect(frame), unfinished(frame)), (expected, expected), "{name}");
            let offload = Offload { checksum: expected, gso: None };
            let mut renewed = bytes.clone();
            assert_eq!(complete(&mut bytes, offload), Offload::default());
            assert_eq!(bytes[bytes.len() - right.len() + 14..], right[14..], "{name}");
            assert_eq!(renew(LinkType::ETHERNET, &mut renewed, offload), Offload::default());
            assert_eq!(renewed, bytes, "{name}: what was around it stays");
            assert_eq!(detect(Frame::new(&bytes, LinkType::ETHERNET)), Checksum::Unverified, "{name}");
        }
        // A tunnel's datagram with a right checksum has nothing to be done, and one that is neither is nobody's to finish.
        inner[50] ^= 1;
        let neither = tunnelled(4789, &[8, 0, 0, 0, 0, 0, 1, 0], &inner);
        assert_eq!(unfinished(Frame::new(&neither, LinkType::ETHERNET)), Checksum::Unverified);
    }

    /// IPv6 with these headers between it and a UDP datagram.
    fn six(first: u8, headers: &[u8], udp: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x60, 0, 0, 0, 0, (headers.len() + udp.len()) as u8, first, 64];
        bytes.extend([[1; 16], [2; 16]].concat());
        [bytes, headers.to_vec(), udp.to_vec()].concat()
    }

    /// Who is in the pseudo header is not always in the IP header.
    #[test]
    fn the_pseudo_header_has_the_first_sender_and_the_last_receiver() {
        const UDP: u8 = 17;
        let udp = [0, 7, 0, 9, 0, 12, 0xab, 0xcd, b'b', b'y', b't', b'e'];
        let with = |from: [u8; 16], to: [u8; 16]| {
            let (mut plain, mut covered) = (six(UDP, &[], &udp), udp);
            plain[8..24].copy_from_slice(&from);
            plain[24..40].copy_from_slice(&to);
            renew(LinkType::RAW, &mut plain, Offload::default());
            covered.copy_from_slice(&plain[40..]);
            covered
        };
        let (one, two, away) = ([1; 16], [2; 16], [9; 16]);
        let routing = |kind: u8, left: u8, addresses: &[[u8; 16]]| {
            [&[UDP, (addresses.len() * 2) as u8, kind, left, 0, 0, 0, 0][..], &addresses.concat()].concat()
        };
        let home = [&[UDP, 2, 1, 2, 0, 0, 0xc9, 16][..], &away].concat();
        let plain = with(one, two);
        #[rustfmt::skip]
        let rows = [
            ("none",                 UDP, vec![],                        with(one, two)),
            ("type 0",               43,  routing(0, 1, &[two, away]),   with(one, away)),
            ("type 0, arrived",      43,  routing(0, 0, &[away, away]),  with(one, two)),
            ("type 2",               43,  routing(2, 1, &[away]),        with(one, away)),
            ("segments",             43,  routing(4, 1, &[away, two]),   with(one, away)),
            ("segments, arrived",    43,  routing(4, 0, &[two, away]),   with(one, two)),
            ("an unknown type",      43,  routing(7, 1, &[away]),        udp),
            ("a home address",       60,  home,                          with(away, two)),
            ("an atomic fragment",   44,  vec![UDP, 0, 0, 0, 0, 0, 0, 1], plain),
            ("a first fragment",     44,  vec![UDP, 0, 0, 1, 0, 0, 0, 1], udp),
        ];
        for (name, first, headers, expected) in rows {
            let mut bytes = six(first, &headers, &udp);
            renew(LinkType::RAW, &mut bytes, Offload::default());
            assert_eq!(bytes[bytes.len() - udp.len()..], expected, "{name}");
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
                renew(LinkType::RAW, &mut bytes, Offload::default());
                bytes[header..].to_vec()
            };
            assert_eq!(ip([2, 2, 2, 2], &[137, 7, pointer, 9, 9, 9, 9, 0]), ip(to, &[]));
        }
        // What follows a datagram in its packet (RFC 9868) is not in its checksum.
        let mut surplus = six(UDP, &[], &[&udp[..], b"more"].concat());
        renew(LinkType::RAW, &mut surplus, Offload::default());
        assert_eq!((&surplus[40..52], &surplus[52..]), (&plain[..], &b"more"[..]));
    }

    #[test]
    fn rfc_1071_has_an_example() {
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(sum(&bytes, 0), 0xddf2);
    }
}
