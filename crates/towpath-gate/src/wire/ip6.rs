//! The IPv6 header and its extension headers (RFC 8200), walked to the upper layer.

use super::{Malformed, be16, bytes, ext6, header, proto, upper, wire_end};
use crate::packet::{Addresses, Fragment, Packet};

/// Length of the fixed header.
pub(super) const HEADER_LEN: usize = 40;
/// Extension headers looked through in one packet. RFC 8504, section 5.3 lets a node have a limit; seven is the most that
/// RFC 8200 has a use for.
const MAX_EXTENSIONS: usize = 16;
/// More fragments, in the second half of the fragment header.
pub(super) const FRAGMENT_MORE: u16 = 0x0001;
/// Jumbo payload option (RFC 2675, section 2).
const OPTION_JUMBO: u8 = 0xc2;

/// Fills in everything from `addresses` on.
#[inline]
pub(super) fn parse(packet: &mut Packet<'_>) -> Result<(), Malformed> {
    let at = packet.network;
    let end = wire_end(packet);
    let header: &[u8; HEADER_LEN] = header(packet.frame, at, end, Malformed::Ip6Cut)?;
    if header[0] >> 4 != 6 {
        return Err(Malformed::Version);
    }
    let (_, addresses) = header.split_at(8);
    let (src, dst) = addresses.split_at(16);
    let octets = |bytes: &[u8]| bytes.first_chunk::<16>().copied().unwrap_or_default();
    packet.addresses = Addresses::V6(octets(src).into(), octets(dst).into());

    let mut next = header[6];
    let mut at = at + HEADER_LEN;
    let payload = payload_length(packet, be16([header[4], header[5]]), next, end - at)?;
    if payload > end - at {
        return Err(Malformed::Ip6PayloadLength);
    }
    let end = at + payload;
    packet.ip_len = u32::try_from(payload + HEADER_LEN).unwrap_or(u32::MAX);

    for extensions in 0.. {
        if !is_extension(next) {
            break;
        }
        if extensions == MAX_EXTENSIONS {
            return Err(Malformed::Ip6TooManyExtensions);
        }
        match extension(packet, next, at, end)? {
            Walk::On { next: following, length } => {
                next = following;
                at += length;
            }
            Walk::Upper => break,
        }
        if packet.fragment == Fragment::Later {
            break;
        }
    }
    packet.ext6 |= match next {
        proto::ESP => ext6::ESP,
        // Unassigned, experiments and testing (RFC 3692), reserved.
        147..=255 if packet.fragment != Fragment::Later => ext6::UNKNOWN,
        _ => 0,
    };
    packet.proto = next;
    upper::parse(packet, at, end)
}

/// Where the walk goes from an extension header.
enum Walk {
    /// To the header of type `next`, `length` bytes further.
    On { next: u8, length: usize },
    /// It is an upper-layer header itself.
    Upper,
}

#[inline]
pub(super) fn is_extension(next: u8) -> bool {
    matches!(
        next,
        proto::HOPOPT
            | proto::ROUTE
            | proto::FRAG
            | proto::AH
            | proto::DSTOPT
            | proto::MOBILITY
            | proto::HIP
            | proto::SHIM6
    )
}

/// One extension header of type `kind`, in a packet that ended at `end` on the wire.
fn extension(packet: &mut Packet<'_>, kind: u8, at: usize, end: usize) -> Result<Walk, Malformed> {
    // Every extension header is at least eight bytes: next header, length or reserved, six of its own.
    let first: &[u8; 8] = header(packet.frame, at, end, Malformed::Ip6ExtensionCut)?;
    let length = extension_length(kind, first[1]);
    if length > end - at {
        return Err(Malformed::Ip6ExtensionCut);
    }
    match kind {
        proto::HOPOPT => packet.ext6 |= ext6::HOPOPT,
        proto::DSTOPT => packet.ext6 |= ext6::DSTOPT,
        proto::AH => packet.ext6 |= ext6::AH,
        proto::ROUTE => {
            packet.ext6 |= ext6::ROUTE
                | match first[2] {
                    0 => ext6::RTHDR0,
                    2 => ext6::RTHDR2,
                    // Nimrod, RPL, segment routing, compact routing: assigned, nothing to say about them.
                    1 | 3..=6 => 0,
                    _ => ext6::UNKNOWN,
                };
        }
        proto::FRAG => fragment(packet, be16([first[2], first[3]])),
        // "The Payload Proto field [of the mobility header] ... set to IPPROTO_NONE (59 decimal)" (RFC 6275, 6.1.1), and
        // likewise HIP (RFC 7401, 5.1) and shim6 control messages (RFC 5533, 5.3): then the header is the message.
        _ if first[0] == proto::NONE => return Ok(Walk::Upper),
        _ => {}
    }
    Ok(Walk::On { next: first[0], length })
}

/// Length in bytes of an extension header of type `kind` whose second byte is `field`.
#[inline]
pub(super) fn extension_length(kind: u8, field: u8) -> usize {
    match kind {
        proto::FRAG => 8,
        // In units of four bytes, minus two (RFC 4302, 2.2).
        proto::AH => (usize::from(field) + 2) * 4,
        // In units of eight bytes, the first not counted.
        _ => (usize::from(field) + 1) * 8,
    }
}

/// A fragment header. When there are several (nobody sends that) the strictest reading holds.
fn fragment(packet: &mut Packet<'_>, field: u16) {
    packet.ext6 |= ext6::FRAG;
    let offset = field >> 3;
    if offset != 0 {
        packet.fragment = Fragment::Later;
        packet.fragment_offset = offset;
    } else if field & FRAGMENT_MORE != 0 {
        packet.fragment = Fragment::First;
    }
}

/// Length of what follows the fixed header, from its payload length `field`; `rest` bytes followed on the wire.
#[inline]
fn payload_length(packet: &Packet<'_>, field: u16, next: u8, rest: usize) -> Result<usize, Malformed> {
    match (field, next) {
        (0, proto::HOPOPT) => jumbo_length(packet, rest),
        // As with IPv4: segmentation by the network card, or BIG TCP without its jumbo option.
        (0, _) if next == proto::TCP || rest > usize::from(u16::MAX) => Ok(rest),
        _ => Ok(usize::from(field)),
    }
}

/// The length in the jumbo payload option of the hop-by-hop options that follow the fixed header.
fn jumbo_length(packet: &Packet<'_>, rest: usize) -> Result<usize, Malformed> {
    let at = packet.network + HEADER_LEN;
    let end = at + rest;
    let first: &[u8; 2] = header(packet.frame, at, end, Malformed::Ip6ExtensionCut)?;
    let options_end = (at + extension_length(proto::HOPOPT, first[1])).min(packet.frame.len());
    let mut option = at + 2;
    while option < options_end {
        match bytes::<2>(packet.frame, option) {
            Some([0, _]) => option += 1,
            Some([OPTION_JUMBO, 4]) => {
                let length: &[u8; 4] = header(packet.frame, option + 2, end, Malformed::Ip6Jumbo)?;
                let length = u32::from_be_bytes(*length);
                // "must be greater than 65,535" (RFC 2675, section 2).
                return match usize::try_from(length) {
                    Ok(bytes) if length > u32::from(u16::MAX) && bytes <= rest => Ok(bytes),
                    _ => Err(Malformed::Ip6Jumbo),
                };
            }
            Some([_, length]) => option += 2 + usize::from(*length),
            None => break,
        }
    }
    // "Payload Length = 0 and Next Header = Hop-by-Hop Options and Jumbo Payload option not present" is an error
    // there (RFC 2675, section 3).
    Err(Malformed::Ip6Jumbo)
}
