//! UDP headers: `nfq_udp_*`.

use std::ffi::{c_int, c_uint};
use std::ptr;

use towpath_wire::proto;

use super::buffer::PacketBuffer;
use super::ip4::nfq_ip_mangle;
use super::ip6::nfq_ip6_mangle;
use super::{Ip4Header, Ip6Header, UdpHeader, be16, checksum_ip4, checksum_ip6, printed, resize};
use crate::memory::{Bytes, Text};

/// Bytes of the header.
const LEN: usize = 8;
/// Offset of the length.
const LENGTH: usize = 4;
/// Offset of the checksum.
const CHECKSUM: usize = 6;

/// The UDP header; NULL if the transport header is not set or not complete.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_udp_get_hdr(buffer: Option<&mut PacketBuffer>) -> *mut u8 {
    let Some(buffer) = buffer else { return ptr::null_mut() };
    let valid = buffer.transport().filter(|&at| buffer.tail(at).len() >= LEN);
    buffer.pointer(valid)
}

/// The payload; NULL if the header's length is invalid.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_udp_get_payload(udph: UdpHeader, buffer: Option<&mut PacketBuffer>) -> *mut u8 {
    let Some((buffer, header)) = buffer.zip(udph.get()) else { return ptr::null_mut() };
    let len = usize::from(be16(&header, LENGTH));
    let valid = buffer.transport().filter(|&at| len >= LEN && len <= buffer.tail(at).len());
    buffer.pointer(valid.map(|at| at + LEN))
}

/// Length of the bytes behind the header in the packet. The length in the header does not matter.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_udp_get_payload_len(_udph: UdpHeader, buffer: Option<&PacketBuffer>) -> c_uint {
    let rest = buffer.and_then(|buffer| Some(buffer.tail(buffer.transport()?).len()));
    rest.unwrap_or(0).saturating_sub(LEN) as c_uint
}

/// Computes and stores the checksum. The packet must have the bytes that the IPv4 header states ([`nfq_ip_get_hdr`] checks this).
///
/// [`nfq_ip_get_hdr`]: super::ip4::nfq_ip_get_hdr
#[unsafe(no_mangle)]
pub extern "C" fn nfq_udp_compute_checksum_ipv4(mut udph: UdpHeader, iph: Ip4Header) {
    checksum_ip4(&mut udph, &iph, proto::UDP, CHECKSUM);
}

/// Computes and stores the checksum. The packet must have the bytes that the IPv6 header states.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_udp_compute_checksum_ipv6(mut udph: UdpHeader, ip6h: Ip6Header) {
    checksum_ip6(&mut udph, &ip6h, proto::UDP, CHECKSUM);
}

/// Replaces bytes of the payload, and updates the lengths of IPv4 and UDP and both checksums. Returns 1, or 0 on failure.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_udp_mangle_ipv4(
    buffer: Option<&mut PacketBuffer>,
    match_offset: c_uint,
    match_len: c_uint,
    rep_buffer: Bytes,
    rep_len: c_uint,
) -> c_int {
    let Some((buffer, dataoff)) = payload_offset(buffer) else { return 0 };
    let replaced = nfq_ip_mangle(Some(buffer), dataoff, match_offset, match_len, rep_buffer, rep_len);
    if replaced == 1 {
        resize_segment(buffer, match_len, rep_len);
        buffer.checksum_ip4(proto::UDP, CHECKSUM);
    }
    replaced
}

/// Replaces bytes of the payload, and updates the lengths of IPv6 and UDP and the checksum. Returns 1, or 0 on failure.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_udp_mangle_ipv6(
    buffer: Option<&mut PacketBuffer>,
    match_offset: c_uint,
    match_len: c_uint,
    rep_buffer: Bytes,
    rep_len: c_uint,
) -> c_int {
    let Some((buffer, dataoff)) = payload_offset(buffer) else { return 0 };
    let replaced = nfq_ip6_mangle(Some(buffer), dataoff, match_offset, match_len, rep_buffer, rep_len);
    if replaced == 1 {
        resize_segment(buffer, match_len, rep_len);
        buffer.checksum_ip6(proto::UDP, CHECKSUM);
    }
    replaced
}

/// Offset of the payload behind the network header.
fn payload_offset(buffer: Option<&mut PacketBuffer>) -> Option<(&mut PacketBuffer, c_uint)> {
    let buffer = buffer?;
    let at = buffer.transport()?;
    let offset = at.checked_sub(buffer.network()?)? + LEN;
    (buffer.tail(at).len() >= LEN).then_some((buffer, offset as c_uint))
}

/// Updates the length of UDP after a replacement.
fn resize_segment(buffer: &mut PacketBuffer, old: c_uint, new: c_uint) {
    let segment = buffer.transport().map(|at| buffer.tail_mut(at)).filter(|segment| segment.len() >= LEN);
    if let Some(segment) = segment {
        resize(segment, LENGTH, old, new);
    }
}

/// Prints the header in the format of the iptables target LOG. Returns the length of the text, also if the buffer is shorter.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_udp_snprintf(mut buf: Text, size: usize, udp: UdpHeader) -> c_int {
    let Some(header) = udp.get() else { return -1 };
    let text = format!("SPT={} DPT={} ", be16(&header, 0), be16(&header, 2));
    buf.print(size, &text);
    printed(text.len())
}
