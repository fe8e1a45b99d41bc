//! Upper-layer headers: ports, TCP fields, ICMP type and code.

use super::{Frame, Malformed, Next, Upper, be16, proto};
use crate::Fragment;

/// Parses the upper-layer header at `next`. Later fragments have none.
pub(super) fn parse(frame: Frame<'_>, next: &Next) -> Result<Upper, Malformed> {
    if next.fragment == Fragment::Later {
        return Ok(Upper::default());
    }
    match next.proto {
        proto::TCP => tcp(frame, next),
        proto::UDP => udp(frame, next),
        proto::ICMP | proto::ICMP6 => icmp(frame, next),
        proto::UDPLITE => udp_lite(frame, next),
        // The SCTP common header (RFC 9260, 3.1), and DCCP's short generic header (RFC 4340, 5.1).
        proto::SCTP | proto::DCCP => ports(frame, next, 12),
        _ => Ok(Upper::default()),
    }
}

/// Parses a complete and consistent TCP or UDP header at `next`; `None` for anything else.
///
/// The result equals that of [`parse`]. Most packets take this path, which keeps the fields in registers.
#[inline(always)]
pub(super) fn whole(frame: Frame<'_>, next: &Next) -> Option<Upper> {
    let room = next.end - next.at;
    match (next.proto, next.fragment) {
        (proto::TCP, Fragment::Whole) => {
            let header: &[u8; 20] = frame.header(next.at, next.end, Malformed::UpperCut).ok()?;
            let data_offset = usize::from(header[12] >> 4) * 4;
            (20..=room).contains(&data_offset).then(|| Upper {
                src_port: be16([header[0], header[1]]),
                dst_port: be16([header[2], header[3]]),
                tcp_seq: u32::from_be_bytes([header[4], header[5], header[6], header[7]]),
                tcp_ack: u32::from_be_bytes([header[8], header[9], header[10], header[11]]),
                tcp_flags: header[13],
                tcp_window: be16([header[14], header[15]]),
                ..Upper::default()
            })
        }
        (proto::UDP, Fragment::Whole) => {
            let header: &[u8; 8] = frame.header(next.at, next.end, Malformed::UpperCut).ok()?;
            let length = usize::from(be16([header[4], header[5]]));
            (8..=room).contains(&length).then(|| Upper {
                src_port: be16([header[0], header[1]]),
                dst_port: be16([header[2], header[3]]),
                ..Upper::default()
            })
        }
        _ => None,
    }
}

/// Parses a TCP header that may be cut off by the capture. Missing fields are zero.
fn tcp(frame: Frame<'_>, next: &Next) -> Result<Upper, Malformed> {
    let at = next.at;
    let be32 = |bytes: &[u8; 4]| u32::from_be_bytes(*bytes);
    let upper = Upper {
        tcp_seq: frame.bytes(at + 4).map_or(0, be32),
        tcp_ack: frame.bytes(at + 8).map_or(0, be32),
        tcp_flags: frame.bytes::<1>(at + 13).map_or(0, |flags| flags[0]),
        tcp_window: frame.bytes(at + 14).map_or(0, |window| be16(*window)),
        ..ports(frame, next, 20)?
    };
    match frame.bytes::<1>(at + 12).map(|offset| usize::from(offset[0] >> 4) * 4) {
        Some(offset) if offset < 20 || offset > next.end - at => Err(Malformed::TcpDataOffset),
        _ => Ok(upper),
    }
}

fn udp(frame: Frame<'_>, next: &Next) -> Result<Upper, Malformed> {
    let upper = ports(frame, next, 8)?;
    let Some(length) = frame.bytes(next.at + 4).map(|length| usize::from(be16(*length))) else {
        return Ok(upper);
    };
    let room = next.end - next.at;
    let fits = match next.fragment {
        // The length covers the whole datagram, which may end in another fragment.
        Fragment::First => length >= 8,
        // "the UDP Length field is set to zero" in a jumbogram (RFC 2675, section 4).
        _ if length == 0 => room > usize::from(u16::MAX),
        _ => (8..=room).contains(&length),
    };
    if fits { Ok(upper) } else { Err(Malformed::UdpLength) }
}

fn udp_lite(frame: Frame<'_>, next: &Next) -> Result<Upper, Malformed> {
    let upper = ports(frame, next, 8)?;
    let Some(coverage) = frame.bytes(next.at + 4).map(|coverage| usize::from(be16(*coverage))) else {
        return Ok(upper);
    };
    let beyond = next.fragment == Fragment::Whole && coverage > next.end - next.at;
    if (1..8).contains(&coverage) || beyond {
        return Err(Malformed::UdpLiteCoverage);
    }
    Ok(upper)
}

/// ICMP and ICMPv6 begin with type, code, checksum (RFC 792; RFC 4443, 2.1).
fn icmp(frame: Frame<'_>, next: &Next) -> Result<Upper, Malformed> {
    if next.at + 4 > next.end {
        return Err(Malformed::UpperCut);
    }
    let [icmp_type, icmp_code] = *frame.bytes(next.at).ok_or(Malformed::CaptureCut)?;
    Ok(Upper { icmp_type, icmp_code, ..Upper::default() })
}

/// Source and destination port at the start of a header of `length` bytes.
fn ports(frame: Frame<'_>, next: &Next, length: usize) -> Result<Upper, Malformed> {
    if next.at + length > next.end {
        return Err(Malformed::UpperCut);
    }
    let [s0, s1, d0, d1] = *frame.bytes(next.at).ok_or(Malformed::CaptureCut)?;
    Ok(Upper { src_port: be16([s0, s1]), dst_port: be16([d0, d1]), ..Upper::default() })
}
