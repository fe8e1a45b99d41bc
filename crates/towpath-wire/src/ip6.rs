//! The IPv6 header and its extension headers (RFC 8200), up to the upper layer.

use super::{Frame, Ip, Malformed, Next, be16, ext6, proto};
use crate::{Addresses, Fragment};

/// Length of the fixed header.
const HEADER_LEN: usize = 40;
/// Limit on extension headers per packet. RFC 8504, section 5.3 permits a limit; RFC 8200 defines a use for at most seven.
const MAX_EXTENSIONS: usize = 16;
/// More fragments, in the second half of the fragment header.
pub(super) const FRAGMENT_MORE: u16 = 0x0001;
/// Reserved bits of the same word.
pub(super) const FRAGMENT_RESERVED: u16 = 0x0006;
/// Jumbo payload option (RFC 2675, section 2).
const OPTION_JUMBO: u8 = 0xc2;

/// Parses the IPv6 header at `at` and its extension headers.
#[inline(always)]
pub(super) fn parse(frame: Frame<'_>, at: usize) -> Result<Ip, Malformed> {
    let header: &[u8; HEADER_LEN] = frame.header(at, frame.wire_len, Malformed::Ip6Cut)?;
    if header[0] >> 4 != 6 {
        return Err(Malformed::Version);
    }
    let next = header[6];
    let at = at + HEADER_LEN;
    let room = frame.wire_len - at;
    let payload = payload_length(frame, at, be16([header[4], header[5]]), next)?;
    if payload > room {
        return Err(Malformed::Ip6PayloadLength);
    }
    let mut next = Next::new(next, at, at + payload);
    // TCP and UDP directly after the header: no extension headers.
    if !matches!(next.proto, proto::TCP | proto::UDP) {
        next = walk(frame, next)?;
    }
    Ok(Ip { len: u32::try_from(payload + HEADER_LEN).unwrap_or(u32::MAX), next })
}

/// The addresses of the IPv6 header at `at`. The header must have been parsed.
#[inline(always)]
pub(super) fn addresses(frame: Frame<'_>, at: usize) -> Addresses {
    match (frame.bytes::<16>(at + 8), frame.bytes::<16>(at + 24)) {
        (Some(src), Some(dst)) => Addresses::V6((*src).into(), (*dst).into()),
        _ => Addresses::None,
    }
}

/// Parses extension headers up to the upper layer.
fn walk(frame: Frame<'_>, mut header: Next) -> Result<Next, Malformed> {
    for extensions in 0.. {
        if !is_extension(header.proto) || header.fragment == Fragment::Later {
            break;
        }
        if extensions == MAX_EXTENSIONS {
            return Err(Malformed::Ip6TooManyExtensions);
        }
        match extension(frame, &mut header)? {
            Walk::On { next, length } => {
                header.proto = next;
                header.at += length;
            }
            Walk::Upper => break,
        }
    }
    header.ext6 |= match header.proto {
        proto::ESP => ext6::ESP,
        // Unassigned, experiments and testing (RFC 3692), reserved.
        147..=255 if header.fragment != Fragment::Later => ext6::UNKNOWN,
        _ => 0,
    };
    Ok(header)
}

/// The next step after an extension header.
enum Walk {
    /// Continue with the header of type `next`, `length` bytes further.
    On { next: u8, length: usize },
    /// Stop: the header is itself an upper-layer header.
    Upper,
}

fn is_extension(next: u8) -> bool {
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

/// Parses one extension header.
fn extension(frame: Frame<'_>, header: &mut Next) -> Result<Walk, Malformed> {
    let (kind, at) = (header.proto, header.at);
    // Every extension header has at least eight bytes: next header, length or reserved, and six bytes of data.
    let first: &[u8; 8] = frame.header(at, header.end, Malformed::Ip6ExtensionCut)?;
    let length = extension_length(kind, first[1]);
    if length > header.end - at {
        return Err(Malformed::Ip6ExtensionCut);
    }
    match kind {
        proto::HOPOPT => header.ext6 |= ext6::HOPOPT,
        proto::DSTOPT => header.ext6 |= ext6::DSTOPT,
        proto::AH => header.ext6 |= ext6::AH,
        proto::ROUTE => {
            header.ext6 |= ext6::ROUTE
                | match first[2] {
                    0 => ext6::RTHDR0,
                    2 => ext6::RTHDR2,
                    // Nimrod, RPL, segment routing, compact routing: assigned, without an ext6 bit.
                    1 | 3..=6 => 0,
                    _ => ext6::UNKNOWN,
                };
        }
        proto::FRAG => fragment(header, be16([first[2], first[3]])),
        // "The Payload Proto field [of the mobility header] ... set to IPPROTO_NONE (59 decimal)" (RFC 6275, 6.1.1), and
        // likewise HIP (RFC 7401, 5.1) and shim6 control messages (RFC 5533, 5.3): then the header is the message.
        _ if first[0] == proto::NONE => return Ok(Walk::Upper),
        _ => {}
    }
    Ok(Walk::On { next: first[0], length })
}

/// Length in bytes of an extension header of type `kind` whose second byte is `field`.
fn extension_length(kind: u8, field: u8) -> usize {
    match kind {
        proto::FRAG => 8,
        // In units of four bytes, minus two (RFC 4302, 2.2).
        proto::AH => (usize::from(field) + 2) * 4,
        // In units of eight bytes, the first not counted.
        _ => (usize::from(field) + 1) * 8,
    }
}

/// Parses the offset and flags of a fragment header. With several fragment headers, the strictest reading applies.
fn fragment(header: &mut Next, field: u16) {
    header.ext6 |= ext6::FRAG;
    let offset = field >> 3;
    if offset != 0 {
        header.fragment = Fragment::Later;
        header.fragment_offset = offset;
    } else if field & FRAGMENT_MORE != 0 {
        header.fragment = Fragment::First;
    }
}

/// Length of the payload after the fixed header, at `at`. `field` is the payload length field.
#[inline]
fn payload_length(frame: Frame<'_>, at: usize, field: u16, next: u8) -> Result<usize, Malformed> {
    if field != 0 {
        return Ok(usize::from(field));
    }
    let room = frame.wire_len - at;
    match next {
        proto::HOPOPT => length_with_options(frame, at),
        // As with IPv4: captured before TSO, or BIG TCP without its jumbo option.
        _ if next == proto::TCP || room > usize::from(u16::MAX) => Ok(room),
        _ => Ok(0),
    }
}

/// Length of the payload if the field is zero and hop-by-hop options are at `at`.
#[cold]
fn length_with_options(frame: Frame<'_>, at: usize) -> Result<usize, Malformed> {
    if let Some(length) = jumbo_length(frame, at)? {
        return Ok(length);
    }
    // A segment captured before TSO may also have options.
    let upper = walk(frame, Next::new(proto::HOPOPT, at, frame.wire_len))?;
    match upper.proto {
        proto::TCP if upper.fragment == Fragment::Whole => Ok(frame.wire_len - at),
        // "Payload Length = 0 and Next Header = Hop-by-Hop Options and Jumbo Payload option not present" is an error
        // there (RFC 2675, section 3).
        _ => Err(Malformed::Ip6Jumbo),
    }
}

/// The length in the jumbo payload option of the hop-by-hop options at `at`; `None` without the option.
fn jumbo_length(frame: Frame<'_>, at: usize) -> Result<Option<usize>, Malformed> {
    let end = frame.wire_len;
    let first: &[u8; 2] = frame.header(at, end, Malformed::Ip6ExtensionCut)?;
    let options_end = at + extension_length(proto::HOPOPT, first[1]);
    let captured = options_end.min(frame.bytes.len());
    let mut option = at + 2;
    while option < captured {
        match frame.bytes(option) {
            Some([0, _]) => option += 1,
            Some([OPTION_JUMBO, 4]) => {
                let length: &[u8; 4] = frame.header(option + 2, end, Malformed::Ip6Jumbo)?;
                let length = u32::from_be_bytes(*length);
                // "must be greater than 65,535" (RFC 2675, section 2).
                return match usize::try_from(length) {
                    Ok(bytes) if length > u32::from(u16::MAX) && bytes <= end - at => Ok(Some(bytes)),
                    _ => Err(Malformed::Ip6Jumbo),
                };
            }
            Some([_, length]) => option += 2 + usize::from(*length),
            None => break,
        }
    }
    // The option may be in the part that was not captured.
    if captured < options_end.min(end) { Err(Malformed::CaptureCut) } else { Ok(None) }
}
