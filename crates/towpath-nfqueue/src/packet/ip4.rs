//! IPv4 headers: `nfq_ip_*`.

use std::ffi::{c_int, c_uint};
use std::net::Ipv4Addr;
use std::ptr;

use super::buffer::{PacketBuffer, pktb_mangle};
use super::{Ip4Header, be16, ip4_header_len, printed, store_checksum, store_len};
use crate::memory::{Bytes, Text};

/// The IPv4 header; NULL if the packet has another version, no complete header, or fewer bytes than the header states.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_ip_get_hdr(buffer: Option<&mut PacketBuffer>) -> *mut u8 {
    let Some(buffer) = buffer else { return ptr::null_mut() };
    let valid = buffer.network().filter(|&at| {
        let packet = buffer.tail(at);
        packet.len() >= 20 && packet[0] >> 4 == 4 && usize::from(be16(packet, 2)) <= packet.len()
    });
    buffer.pointer(valid)
}

/// Sets the transport header behind the IPv4 header. Returns 0, or -1 if no byte of the packet is behind it.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_ip_set_transport_header(buffer: Option<&mut PacketBuffer>, iph: Ip4Header) -> c_int {
    let set = buffer.zip(iph.get()).and_then(|(buffer, header)| {
        let (network, len) = (buffer.network()?, ip4_header_len(&header));
        let valid = len < buffer.tail(network).len();
        valid.then(|| buffer.set_transport(network + len))
    });
    if set.is_some() { 0 } else { -1 }
}

/// Computes and stores the checksum of the header with its options.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_ip_set_checksum(mut iph: Ip4Header) {
    let Some(header) = iph.get() else { return };
    let len = ip4_header_len(&header);
    if let Some(header) = iph.packet(len) {
        store_checksum(header, len, 10, 0);
    }
}

/// Replaces bytes, and updates the header's length and checksum. Returns 1, or 0 on failure.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_ip_mangle(
    buffer: Option<&mut PacketBuffer>,
    dataoff: c_uint,
    match_offset: c_uint,
    match_len: c_uint,
    rep_buffer: Bytes,
    rep_len: c_uint,
) -> c_int {
    let Some(buffer) = buffer else { return 0 };
    let Ok(offset) = c_int::try_from(dataoff) else { return 0 };
    if pktb_mangle(Some(buffer), offset, match_offset, match_len, rep_buffer, rep_len) == 0 {
        return 0;
    }
    let packet = buffer.network().map(|at| buffer.tail_mut(at)).filter(|packet| packet.len() >= 20);
    if let Some(packet) = packet {
        store_len(packet, 2, packet.len());
        let len = ip4_header_len(packet);
        if len <= packet.len() {
            store_checksum(packet, len, 10, 0);
        }
    }
    1
}

/// Prints the header in the format of the iptables target LOG. Returns the length of the text, also if the buffer is shorter.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_ip_snprintf(mut buf: Text, size: usize, iph: Ip4Header) -> c_int {
    let Some(header) = iph.get() else { return -1 };
    let address = |at: usize| Ipv4Addr::new(header[at], header[at + 1], header[at + 2], header[at + 3]);
    let text = format!(
        "SRC={} DST={} LEN={} TOS=0x{:X} PREC=0x{:X} TTL={} ID={} PROTO={} ",
        address(12),
        address(16),
        be16(&header, 2),
        header[1] & 0x1e,
        header[1] & 0xe0,
        header[8],
        be16(&header, 4),
        header[9],
    );
    buf.print(size, &text);
    printed(text.len())
}
