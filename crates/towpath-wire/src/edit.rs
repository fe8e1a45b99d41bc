//! Changes of header fields in place. Checksums are updated incrementally (RFC 1624): a wrong checksum stays wrong.
//!
//! Offsets are those of a [`Packet`](crate::Packet) parsed from the same frame.

use super::view::{OPTION_END, OPTION_NOP, TCP_OPTION_MSS};
use super::{be16, bytes};

/// Sets the DSCP of the IP header at `network`: the upper six bits of the type of service or traffic class. ECN is unchanged.
///
/// Returns false and changes nothing if the frame does not contain the whole IP header.
///
/// # Examples
///
/// ```
/// use towpath_wire::edit;
///
/// let mut frame = [0x45, 0x02, 0, 20, 0, 0, 0, 0, 64, 59, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2];
/// assert!(edit::set_dscp(&mut frame, 0, 46));
/// assert_eq!(frame[1], 46 << 2 | 0x02);
/// ```
pub fn set_dscp(frame: &mut [u8], network: usize, dscp: u8) -> bool {
    let Some(header) = frame.get_mut(network..) else { return false };
    let dscp = dscp & 0x3f;
    match header.first().map(|first| first >> 4) {
        Some(4) if header.len() >= 20 => {
            let old = [header[0], header[1]];
            header[1] = dscp << 2 | header[1] & 0x03;
            let new = [header[0], header[1]];
            let checksum = update(be16([header[10], header[11]]), be16(old), be16(new));
            header[10..12].copy_from_slice(&checksum.to_be_bytes());
            true
        }
        // The traffic class spans two bytes. IPv6 has no header checksum.
        Some(6) if header.len() >= 40 => {
            header[0] = 0x60 | dscp >> 2;
            header[1] = (dscp & 0x03) << 6 | header[1] & 0x3f;
            true
        }
        _ => false,
    }
}

/// Lowers the maximum segment size option of the TCP header at `transport` to `mss` bytes.
///
/// `transport_len` is the number of captured bytes of the segment. Returns false and changes nothing if the option is absent or
/// not above `mss`.
pub fn clamp_mss(frame: &mut [u8], transport: usize, transport_len: usize, mss: u16) -> bool {
    let end = transport.saturating_add(transport_len).min(frame.len());
    let Some(segment) = frame.get_mut(transport..end) else { return false };
    let Some(at) = mss_value(segment) else { return false };
    let old = be16([segment[at], segment[at + 1]]);
    if old <= mss {
        return false;
    }
    segment[at..at + 2].copy_from_slice(&mss.to_be_bytes());
    // At an odd offset the value spans two 16-bit words of the sum, which sees it with its bytes swapped.
    let (old, new) = if at % 2 == 0 { (old, mss) } else { (old.swap_bytes(), mss.swap_bytes()) };
    let checksum = update(be16([segment[16], segment[17]]), old, new);
    segment[16..18].copy_from_slice(&checksum.to_be_bytes());
    true
}

/// Offset of the value of the maximum segment size option in a TCP segment.
fn mss_value(segment: &[u8]) -> Option<usize> {
    let header_len = usize::from(segment.get(12)? >> 4) * 4;
    let header = segment.get(..header_len.min(segment.len()))?;
    let mut at = 20;
    loop {
        match bytes::<2>(header, at) {
            Some([OPTION_NOP, _]) => at += 1,
            Some([TCP_OPTION_MSS, 4]) => return (at + 4 <= header.len()).then_some(at + 2),
            None | Some([OPTION_END, _] | [_, 0 | 1]) => return None,
            Some([_, length]) => at += usize::from(*length),
        }
    }
}

/// The checksum after a 16-bit word changed from `old` to `new`: HC' = ~(~HC + ~m + m') (RFC 1624, equation 3).
fn update(checksum: u16, old: u16, new: u16) -> u16 {
    let sum = u32::from(!checksum) + u32::from(!old) + u32::from(new);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    // Two folds suffice for three 16-bit terms.
    !(sum as u16)
}
