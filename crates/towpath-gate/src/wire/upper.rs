//! Upper-layer headers: ports, TCP's fields, ICMP type and code.

use super::{Malformed, be16, bytes, proto};
use crate::packet::{Addresses, Fragment, Packet};

/// Fills in `transport`, `transport_len` and the upper-layer fields. The upper layer begins at `at`, and its packet ended at
/// `end` on the wire (`at <= end`).
#[inline]
pub(super) fn parse(packet: &mut Packet<'_>, at: usize, end: usize) -> Result<(), Malformed> {
    let captured = end.min(packet.frame.len());
    packet.transport = at.min(packet.frame.len());
    packet.transport_len = captured.saturating_sub(packet.transport);
    if packet.fragment == Fragment::Later {
        return Ok(());
    }
    match packet.proto {
        proto::TCP => tcp(packet, at, end),
        proto::UDP => udp(packet, at, end),
        proto::ICMP | proto::ICMP6 => icmp(packet, at, end),
        proto::UDPLITE => udp_lite(packet, at, end),
        // The SCTP common header (RFC 9260, 3.1), and DCCP's short generic header (RFC 4340, 5.1).
        proto::SCTP | proto::DCCP => ports(packet, at, end, 12),
        _ => Ok(()),
    }
}

#[inline]
fn tcp(packet: &mut Packet<'_>, at: usize, end: usize) -> Result<(), Malformed> {
    let Some(header) = whole::<20>(packet, at, end) else { return tcp_cut(packet, at, end) };
    let data_offset = usize::from(header[12] >> 4) * 4;
    if data_offset < 20 || data_offset > end - at {
        return Err(Malformed::TcpDataOffset);
    }
    packet.src_port = be16([header[0], header[1]]);
    packet.dst_port = be16([header[2], header[3]]);
    packet.tcp_seq = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
    packet.tcp_ack = u32::from_be_bytes([header[8], header[9], header[10], header[11]]);
    packet.tcp_flags = header[13];
    packet.tcp_window = be16([header[14], header[15]]);
    Ok(())
}

/// A TCP header that is not whole: cut off on the wire, or by the capture. In the latter case what is there counts.
#[cold]
fn tcp_cut(packet: &mut Packet<'_>, at: usize, end: usize) -> Result<(), Malformed> {
    ports(packet, at, end, 20)?;
    let be32 = |bytes: &[u8; 4]| u32::from_be_bytes(*bytes);
    packet.tcp_seq = bytes(packet.frame, at + 4).map_or(0, be32);
    packet.tcp_ack = bytes(packet.frame, at + 8).map_or(0, be32);
    packet.tcp_flags = bytes::<1>(packet.frame, at + 13).map_or(0, |flags| flags[0]);
    packet.tcp_window = bytes(packet.frame, at + 14).map_or(0, |window| be16(*window));
    match bytes::<1>(packet.frame, at + 12).map(|offset| usize::from(offset[0] >> 4) * 4) {
        Some(offset) if offset < 20 || offset > end - at => Err(Malformed::TcpDataOffset),
        _ => Ok(()),
    }
}

#[inline]
fn udp(packet: &mut Packet<'_>, at: usize, end: usize) -> Result<(), Malformed> {
    ports(packet, at, end, 8)?;
    let Some(length) = bytes(packet.frame, at + 4).map(|length| usize::from(be16(*length))) else {
        return Ok(());
    };
    let room = end - at;
    let fits = match packet.fragment {
        // The length is that of the whole datagram, which may end in another fragment.
        Fragment::First => length >= 8,
        // "the UDP Length field is set to zero" in a jumbogram (RFC 2675, section 4).
        _ if length == 0 => room > usize::from(u16::MAX) && matches!(packet.addresses, Addresses::V6(..)),
        _ => (8..=room).contains(&length),
    };
    if fits { Ok(()) } else { Err(Malformed::UdpLength) }
}

fn udp_lite(packet: &mut Packet<'_>, at: usize, end: usize) -> Result<(), Malformed> {
    ports(packet, at, end, 8)?;
    let Some(coverage) = bytes(packet.frame, at + 4).map(|coverage| usize::from(be16(*coverage))) else {
        return Ok(());
    };
    let beyond = packet.fragment == Fragment::Whole && coverage > end - at;
    if (1..8).contains(&coverage) || beyond {
        return Err(Malformed::UdpLiteCoverage);
    }
    Ok(())
}

/// ICMP and ICMPv6 begin alike: type, code, checksum (RFC 792; RFC 4443, 2.1).
fn icmp(packet: &mut Packet<'_>, at: usize, end: usize) -> Result<(), Malformed> {
    if at + 4 > end {
        return Err(Malformed::UpperCut);
    }
    let [kind, code] = *bytes::<2>(packet.frame, at).ok_or(Malformed::CaptureCut)?;
    packet.icmp_type = kind;
    packet.icmp_code = code;
    Ok(())
}

/// Source and destination port at the start of a header of `length` bytes.
#[inline]
fn ports(packet: &mut Packet<'_>, at: usize, end: usize, length: usize) -> Result<(), Malformed> {
    if at + length > end {
        return Err(Malformed::UpperCut);
    }
    let [src @ .., dst0, dst1] = *bytes::<4>(packet.frame, at).ok_or(Malformed::CaptureCut)?;
    packet.src_port = be16(src);
    packet.dst_port = be16([dst0, dst1]);
    Ok(())
}

/// The header when it is whole, on the wire and in the capture.
#[inline]
fn whole<'a, const N: usize>(packet: &Packet<'a>, at: usize, end: usize) -> Option<&'a [u8; N]> {
    if at + N > end {
        return None;
    }
    bytes(packet.frame, at)
}
