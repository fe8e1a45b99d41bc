//! Checksums computed anew, for a packet whose bytes were put together by somebody who may not have done it: an
//! inspector that changed a payload, or a reply that the engine makes.
//!
//! The Internet checksum is RFC 1071's; the pseudo-headers are those of RFC 9293 (3.1), RFC 768 and RFC 8200 (8.1).

use super::{be16, proto};
use crate::packet::{Addresses, Fragment, Link, Packet};

/// Puts the right checksums into a frame: IPv4 header, TCP, UDP, ICMP, ICMPv6.
///
/// A UDP datagram over IPv4 without a checksum (0) keeps none. `wire_len` is as for [`super::parse`].
///
/// Returns whether every checksum of the packet is right now. It is false for a frame that is not IP or malformed, one
/// whose upper layer is not all there (a fragment, a capture that was cut short), and for protocols with checksums that
/// are not computed here (UDP-Lite, SCTP, DCCP); an IPv4 header is still put right.
///
/// # Examples
///
/// ```
/// use towpath_gate::packet::Link;
/// use towpath_gate::wire::checksum;
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
    let pseudo = match addresses {
        Addresses::None => return false,
        Addresses::V4(src, dst) => {
            fill_ip4(frame, network);
            sum(&src.octets()) + sum(&dst.octets())
        }
        Addresses::V6(src, dst) => sum(&src.octets()) + sum(&dst.octets()),
    };
    let end = transport + transport_len;
    if fragment != Fragment::Whole || end < network + ip_len as usize {
        return false;
    }
    let v6 = matches!(addresses, Addresses::V6(..));
    let Some(at) = place(proto, v6) else { return false };
    let segment = &mut frame[transport..end];
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

/// Where the checksum is in an upper layer's header.
fn place(proto: u8, v6: bool) -> Option<usize> {
    match (proto, v6) {
        (proto::TCP, _) => Some(16),
        (proto::UDP, _) => Some(6),
        (proto::ICMP, false) | (proto::ICMP6, true) => Some(2),
        _ => None,
    }
}

/// Puts the right checksum into the IPv4 header at `network`, which must be whole.
pub(crate) fn fill_ip4(frame: &mut [u8], network: usize) {
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
            let parsed = crate::wire::parse(Link::Ethernet, &right, 0).unwrap();
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
