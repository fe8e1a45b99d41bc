//! IPv6 headers: `nfq_ip6_*`.

use std::ffi::{c_int, c_uint};
use std::net::Ipv6Addr;
use std::ptr;

use towpath_wire::proto;

use super::buffer::{PacketBuffer, pktb_mangle};
use super::{Ip6Header, be16, printed, store_len};
use crate::memory::{Bytes, Text};

/// Bytes of the header without extension headers.
const LEN: usize = 40;

/// The IPv6 header; NULL if the packet has another version or no complete header.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_ip6_get_hdr(buffer: Option<&mut PacketBuffer>) -> *mut u8 {
    let Some(buffer) = buffer else { return ptr::null_mut() };
    let valid = buffer.network().filter(
        |&at| matches!(buffer.tail(at), packet @ [first, ..] if packet.len() >= LEN && first >> 4 == 6),
    );
    buffer.pointer(valid)
}

/// Sets the transport header to the first header of protocol `target`, which may be an extension header. Returns 1, or 0 if the packet
/// has none. A fragment other than the first has none behind its fragment header.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_ip6_set_transport_header(
    buffer: Option<&mut PacketBuffer>,
    ip6h: Ip6Header,
    target: u8,
) -> c_int {
    let set = buffer.zip(ip6h.get()).and_then(|(buffer, header)| {
        let network = buffer.network()?;
        let at = network + find(header[6], buffer.tail(network + LEN), target)? + LEN;
        buffer.set_transport(at);
        Some(())
    });
    set.is_some().into()
}

/// Offset of the first header of protocol `target` in the bytes behind the IPv6 header, whose next header is `next`.
fn find(mut next: u8, packet: &[u8], target: u8) -> Option<usize> {
    let mut at = 0;
    while next != target {
        let header = &packet[at..];
        // RFC 8200 section 4: "Length ... in 8-octet units, not including the first 8 octets". RFC 4302 section 2.2: in 4-octet units minus 2.
        let units = usize::from(*header.get(1)?);
        let len = match next {
            proto::HOPOPT | proto::ROUTE | proto::DSTOPT | proto::MOBILITY | proto::HIP | proto::SHIM6 => {
                (units + 1) * 8
            }
            // RFC 8200 section 4.5: the offset is the upper 13 bits of the third and fourth byte.
            proto::FRAG if header.len() >= 8 && be16(header, 2) & 0xfff8 == 0 => 8,
            proto::AH => (units + 2) * 4,
            _ => return None,
        };
        next = header[0];
        at += len;
        if at > packet.len() {
            return None;
        }
    }
    Some(at)
}

/// Replaces bytes, and updates the header's length. Returns 1, or 0 on failure.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_ip6_mangle(
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
    let packet = buffer.network().map(|at| buffer.tail_mut(at)).filter(|packet| packet.len() >= LEN);
    if let Some(packet) = packet {
        store_len(packet, 4, packet.len() - LEN);
    }
    1
}

/// Prints the header in the format of the iptables target LOG. Returns the length of the text, also if the buffer is shorter.
///
/// Like version 1.0.5, TC and FLOWLBL are bits of the first word in the byte order of the machine.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_ip6_snprintf(mut buf: Text, size: usize, ip6h: Ip6Header) -> c_int {
    let Some(header) = ip6h.get() else { return -1 };
    let address =
        |at: usize| Ipv6Addr::from_bits(u128::from_be_bytes(*header[at..].first_chunk().expect("40 bytes")));
    let flow = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]);
    let text = format!(
        "SRC={} DST={} LEN={} TC=0x{:X} HOPLIMIT={} FLOWLBL={} ",
        address(8),
        address(24),
        u32::from(be16(&header, 4)) + LEN as u32,
        (flow & 0x0ff0_0000) >> 20,
        header[7],
        flow & 0x000f_ffff,
    );
    buf.print(size, &text);
    printed(text.len())
}
