//! TCP headers: `nfq_tcp_*`.

use std::ffi::{c_int, c_uint};
use std::ptr;

use towpath_wire::proto;

use super::buffer::PacketBuffer;
use super::ip4::nfq_ip_mangle;
use super::ip6::nfq_ip6_mangle;
use super::{
    Ip4Header, Ip6Header, TcpHeader, be16, be32, checksum_ip4, checksum_ip6, printed, tcp_header_len,
};
use crate::memory::{Bytes, Text};

/// Bytes of the header without options.
const LEN: usize = 20;
/// Offset of the checksum.
const CHECKSUM: usize = 16;

/// The TCP header; NULL if the transport header is not set or not complete.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_tcp_get_hdr(buffer: Option<&mut PacketBuffer>) -> *mut u8 {
    let Some(buffer) = buffer else { return ptr::null_mut() };
    let valid = buffer.transport().filter(|&at| buffer.tail(at).len() >= LEN);
    buffer.pointer(valid)
}

/// The payload; NULL if the header's length is invalid.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_tcp_get_payload(tcph: TcpHeader, buffer: Option<&mut PacketBuffer>) -> *mut u8 {
    let Some((buffer, header)) = buffer.zip(tcph.get()) else { return ptr::null_mut() };
    let len = tcp_header_len(&header);
    let valid = buffer.transport().filter(|&at| len >= LEN && len <= buffer.tail(at).len());
    buffer.pointer(valid.map(|at| at + len))
}

/// Length of the payload; 0 if the header ends behind the packet.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_tcp_get_payload_len(tcph: TcpHeader, buffer: Option<&PacketBuffer>) -> c_uint {
    let len = buffer.zip(tcph.get()).and_then(|(buffer, header)| {
        buffer.tail(buffer.transport()?).len().checked_sub(tcp_header_len(&header))
    });
    len.unwrap_or(0) as c_uint
}

/// Computes and stores the checksum. The packet must have the bytes that the IPv4 header states ([`nfq_ip_get_hdr`] checks this).
///
/// [`nfq_ip_get_hdr`]: super::ip4::nfq_ip_get_hdr
#[unsafe(no_mangle)]
pub extern "C" fn nfq_tcp_compute_checksum_ipv4(mut tcph: TcpHeader, iph: Ip4Header) {
    checksum_ip4(&mut tcph, &iph, proto::TCP, CHECKSUM);
}

/// Computes and stores the checksum. The packet must have the bytes that the IPv6 header states.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_tcp_compute_checksum_ipv6(mut tcph: TcpHeader, ip6h: Ip6Header) {
    checksum_ip6(&mut tcph, &ip6h, proto::TCP, CHECKSUM);
}

/// Replaces bytes of the payload, and updates the IPv4 header's length and both checksums. Returns 1, or 0 on failure.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_tcp_mangle_ipv4(
    buffer: Option<&mut PacketBuffer>,
    match_offset: c_uint,
    match_len: c_uint,
    rep_buffer: Bytes,
    rep_len: c_uint,
) -> c_int {
    let Some((buffer, dataoff)) = payload_offset(buffer) else { return 0 };
    let replaced = nfq_ip_mangle(Some(buffer), dataoff, match_offset, match_len, rep_buffer, rep_len);
    if replaced == 1 {
        buffer.checksum_ip4(proto::TCP, CHECKSUM);
    }
    replaced
}

/// Replaces bytes of the payload, and updates the IPv6 header's length and the checksum. Returns 1, or 0 on failure.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_tcp_mangle_ipv6(
    buffer: Option<&mut PacketBuffer>,
    match_offset: c_uint,
    match_len: c_uint,
    rep_buffer: Bytes,
    rep_len: c_uint,
) -> c_int {
    let Some((buffer, dataoff)) = payload_offset(buffer) else { return 0 };
    let replaced = nfq_ip6_mangle(Some(buffer), dataoff, match_offset, match_len, rep_buffer, rep_len);
    if replaced == 1 {
        buffer.checksum_ip6(proto::TCP, CHECKSUM);
    }
    replaced
}

/// Offset of the payload behind the network header.
fn payload_offset(buffer: Option<&mut PacketBuffer>) -> Option<(&mut PacketBuffer, c_uint)> {
    let buffer = buffer?;
    let at = buffer.transport()?;
    let header = buffer.tail(at).first_chunk::<LEN>()?;
    let offset = at.checked_sub(buffer.network()?)? + tcp_header_len(header);
    Some((buffer, offset as c_uint))
}

/// The flags that are printed, in their order: bit of the header's byte 13, and name.
const FLAGS: [(u8, &str); 6] =
    [(0x20, "URG "), (0x10, "ACK "), (0x08, "PSH "), (0x04, "RST "), (0x02, "SYN "), (0x01, "FIN ")];

/// Prints the header in the format of the iptables target LOG.
///
/// Like version 1.0.5, it returns the length of the last part only: 4 after a flag, otherwise that of the text.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_tcp_snprintf(mut buf: Text, size: usize, tcp: TcpHeader) -> c_int {
    let Some(header) = tcp.get() else { return -1 };
    let mut text = format!(
        "SPT={} DPT={} SEQ={} ACK={} WINDOW={} RES=0x{:02x} ",
        be16(&header, 0),
        be16(&header, 2),
        be32(&header, 4),
        be32(&header, 8),
        be16(&header, 14),
        (header[12] & 0x0f) << 2,
    );
    let mut last = text.len();
    for (_, name) in FLAGS.iter().filter(|(bit, _)| header[13] & bit != 0) {
        text.push_str(name);
        last = name.len();
    }
    buf.print(size, &text);
    printed(last)
}
