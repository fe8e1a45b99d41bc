//! The IPv4 header (RFC 791).

use super::{Malformed, be16, header, proto, upper, wire_end};
use crate::packet::{Addresses, Fragment, Packet};

/// Reserved flag ("evil bit"), as [`Packet::ipoff_flags`] gives it.
pub const RF: u8 = 0x80;
/// Don't fragment.
pub const DF: u8 = 0x40;
/// More fragments.
pub const MF: u8 = 0x20;

/// Fills in everything from `addresses` on.
#[inline]
pub(super) fn parse(packet: &mut Packet<'_>) -> Result<(), Malformed> {
    let at = packet.network;
    let end = wire_end(packet);
    let header: &[u8; 20] = header(packet.frame, at, end, Malformed::Ip4Cut)?;
    if header[0] >> 4 != 4 {
        return Err(Malformed::Version);
    }
    let header_len = usize::from(header[0] & 0x0f) * 4;
    if header_len < 20 || header_len > end - at {
        return Err(Malformed::Ip4HeaderLength);
    }
    let mut length = usize::from(be16([header[2], header[3]]));
    if length == 0 && offloaded(header[9], end - at) {
        length = end - at;
    }
    if length < header_len || length > end - at {
        return Err(Malformed::Ip4TotalLength);
    }
    let offset = be16([header[6], header[7]]);
    packet.fragment_offset = offset & 0x1fff;
    packet.fragment = if packet.fragment_offset != 0 {
        Fragment::Later
    } else if header[6] & MF != 0 {
        Fragment::First
    } else {
        Fragment::Whole
    };
    packet.addresses = Addresses::V4(
        [header[12], header[13], header[14], header[15]].into(),
        [header[16], header[17], header[18], header[19]].into(),
    );
    packet.proto = header[9];
    packet.ip_len = u32::try_from(length).unwrap_or(u32::MAX);
    upper::parse(packet, at + header_len, at + length)
}

/// Whether a total length of zero stands for "as long as the frame": a packet that was captured before the network card
/// divided it (TSO, which leaves the field zero), or one above 64 KiB (Linux's BIG TCP, where the field cannot say it).
/// Both are only seen on the host that sends them.
#[inline]
fn offloaded(protocol: u8, length: usize) -> bool {
    protocol == proto::TCP || length > usize::from(u16::MAX)
}
