//! The IPv4 header (RFC 791).

use super::{Frame, Ip, Malformed, Next, be16, proto};
use crate::{Addresses, Fragment};

/// Reserved flag ("evil bit"), as [`Packet::ipoff_flags`](crate::Packet::ipoff_flags) gives it.
pub const RF: u8 = 0x80;
/// Don't fragment.
pub const DF: u8 = 0x40;
/// More fragments.
pub const MF: u8 = 0x20;

/// Parses the IPv4 header at `at`.
#[inline(always)]
pub(super) fn parse(frame: Frame<'_>, at: usize) -> Result<Ip, Malformed> {
    let header: &[u8; 20] = frame.header(at, frame.wire_len, Malformed::Ip4Cut)?;
    let room = frame.wire_len - at;
    if header[0] >> 4 != 4 {
        return Err(Malformed::Version);
    }
    let header_len = usize::from(header[0] & 0x0f) * 4;
    if header_len < 20 || header_len > room {
        return Err(Malformed::Ip4HeaderLength);
    }
    let mut length = usize::from(be16([header[2], header[3]]));
    if length == 0 && offloaded(header[9], room) {
        length = room;
    }
    if length < header_len || length > room {
        return Err(Malformed::Ip4TotalLength);
    }
    let offset = be16([header[6], header[7]]) & 0x1fff;
    let fragment = match header[6] & MF {
        _ if offset != 0 => Fragment::Later,
        0 => Fragment::Whole,
        _ => Fragment::First,
    };
    Ok(Ip {
        len: u32::try_from(length).unwrap_or(u32::MAX),
        next: Next {
            fragment,
            fragment_offset: offset,
            ..Next::new(header[9], at + header_len, at + length)
        },
    })
}

/// The addresses of the IPv4 header at `at`. The header must have been parsed.
#[inline(always)]
pub(super) fn addresses(frame: Frame<'_>, at: usize) -> Addresses {
    match frame.bytes::<8>(at + 12) {
        Some([s0, s1, s2, s3, d0, d1, d2, d3]) => {
            Addresses::V4([*s0, *s1, *s2, *s3].into(), [*d0, *d1, *d2, *d3].into())
        }
        None => Addresses::None,
    }
}

/// Returns true if a total length of zero means "to the end of the frame": a packet captured before TSO, which leaves the
/// field zero, or a packet above 64 KiB (Linux's BIG TCP), whose length does not fit. Only the sending host sees such packets.
#[inline]
fn offloaded(protocol: u8, length: usize) -> bool {
    protocol == proto::TCP || length > usize::from(u16::MAX)
}
