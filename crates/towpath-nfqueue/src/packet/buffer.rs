//! Packet buffers: `struct pkt_buff`, which is opaque to C.

use std::ffi::{c_int, c_uint};
use std::ptr;

use rustix::io::Errno;

use crate::errno;
use crate::memory::Bytes;

const AF_INET: c_int = 2;
const AF_BRIDGE: c_int = 7;
const AF_INET6: c_int = 10;
/// Bytes of an Ethernet header (ETH_HLEN).
const ETHERNET: usize = 14;

/// A packet with room behind it.
///
/// Invariant: `start + len <= bytes.len()`. C writes into the bytes between two calls.
#[derive(Debug)]
pub struct PacketBuffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
    /// Offsets in `bytes`.
    mac: Option<usize>,
    network: Option<usize>,
    transport: Option<usize>,
    mangled: bool,
}

impl PacketBuffer {
    fn new(family: c_int, packet: &Bytes, len: usize, extra: usize) -> Result<Box<Self>, Errno> {
        let mut bytes = Vec::new();
        let size = len.checked_add(extra).ok_or(Errno::NOMEM)?;
        bytes.try_reserve_exact(size).map_err(|_| Errno::NOMEM)?;
        bytes.resize(size, 0);
        packet.copy_to(&mut bytes[..len]);
        let (mac, network) = match family {
            AF_INET | AF_INET6 => (None, Some(0)),
            AF_BRIDGE => match bytes[..len].get(12..ETHERNET) {
                Some([0x08, 0x00] | [0x86, 0xdd]) => (Some(0), Some(ETHERNET)),
                _ => return Err(Errno::PROTONOSUPPORT),
            },
            _ => (None, None),
        };
        Ok(Box::new(Self { bytes, start: 0, len, mac, network, transport: None, mangled: false }))
    }

    fn tailroom(&self) -> usize {
        self.bytes.len() - self.start - self.len
    }

    /// Offset of the network header.
    pub(super) fn network(&self) -> Option<usize> {
        self.network
    }

    /// Offset of the transport header.
    pub(super) fn transport(&self) -> Option<usize> {
        self.transport
    }

    pub(super) fn set_transport(&mut self, at: usize) {
        self.transport = Some(at);
    }

    /// The packet from `at` to its end.
    pub(super) fn tail(&self, at: usize) -> &[u8] {
        self.bytes[..self.start + self.len].get(at..).unwrap_or_default()
    }

    /// As [`tail`](Self::tail).
    pub(super) fn tail_mut(&mut self, at: usize) -> &mut [u8] {
        self.bytes[..self.start + self.len].get_mut(at..).unwrap_or_default()
    }

    /// The address of an offset for C.
    pub(super) fn pointer(&mut self, at: Option<usize>) -> *mut u8 {
        // The offset of a header is at most the length of the buffer.
        at.and_then(|at| self.bytes.get_mut(at..)).map_or(ptr::null_mut(), <[u8]>::as_mut_ptr)
    }

    /// Replaces `old_len` bytes at `at`. Returns false, without a change, if they are not in the packet or the room does not suffice.
    pub(super) fn replace(&mut self, at: usize, old_len: usize, new: &Bytes, new_len: usize) -> bool {
        let tail = self.start + self.len;
        let Some(old_end) = at.checked_add(old_len).filter(|&end| at >= self.start && end <= tail) else {
            return false;
        };
        if new_len.saturating_sub(old_len) > self.tailroom() {
            return false;
        }
        self.bytes.copy_within(old_end..tail, at + new_len);
        new.copy_to(&mut self.bytes[at..at + new_len]);
        self.len = self.len - old_len + new_len;
        self.mangled = true;
        true
    }
}

/// Allocates a buffer with a copy of a packet. Errors: ENOMEM; EPROTONOSUPPORT for AF_BRIDGE without an IPv4 or IPv6 packet.
// SAFETY: no other function has this name. This applies to all exported functions of this crate.
#[unsafe(no_mangle)]
pub extern "C" fn pktb_alloc(
    family: c_int,
    data: Bytes,
    len: usize,
    extra: usize,
) -> Option<Box<PacketBuffer>> {
    PacketBuffer::new(family, &data, len, extra).map_err(errno::set).ok()
}

/// Frees a buffer.
#[unsafe(no_mangle)]
pub extern "C" fn pktb_free(buffer: Option<Box<PacketBuffer>>) {
    drop(buffer);
}

/// The packet.
#[unsafe(no_mangle)]
pub extern "C" fn pktb_data(buffer: Option<&mut PacketBuffer>) -> *mut u8 {
    buffer.map_or(ptr::null_mut(), |buffer| buffer.pointer(Some(buffer.start)))
}

/// Length of the packet.
#[unsafe(no_mangle)]
pub extern "C" fn pktb_len(buffer: Option<&PacketBuffer>) -> u32 {
    buffer.map_or(0, |buffer| buffer.len as u32)
}

/// Moves the start of the packet backwards.
#[unsafe(no_mangle)]
pub extern "C" fn pktb_push(buffer: Option<&mut PacketBuffer>, len: c_uint) {
    let len = len as usize;
    if let Some(buffer) = buffer.filter(|buffer| len <= buffer.start) {
        buffer.start -= len;
        buffer.len += len;
    }
}

/// Moves the start of the packet forwards.
#[unsafe(no_mangle)]
pub extern "C" fn pktb_pull(buffer: Option<&mut PacketBuffer>, len: c_uint) {
    let len = len as usize;
    if let Some(buffer) = buffer.filter(|buffer| len <= buffer.len) {
        buffer.start += len;
        buffer.len -= len;
    }
}

/// Adds bytes to the end of the packet.
#[unsafe(no_mangle)]
pub extern "C" fn pktb_put(buffer: Option<&mut PacketBuffer>, len: c_uint) {
    let len = len as usize;
    if let Some(buffer) = buffer.filter(|buffer| len <= buffer.tailroom()) {
        buffer.len += len;
    }
}

/// Sets the length of the packet.
#[unsafe(no_mangle)]
pub extern "C" fn pktb_trim(buffer: Option<&mut PacketBuffer>, len: c_uint) {
    let len = len as usize;
    if let Some(buffer) = buffer.filter(|buffer| len <= buffer.len + buffer.tailroom()) {
        buffer.len = len;
    }
}

/// Room behind the packet.
#[unsafe(no_mangle)]
pub extern "C" fn pktb_tailroom(buffer: Option<&PacketBuffer>) -> c_uint {
    buffer.map_or(0, |buffer| buffer.tailroom() as c_uint)
}

/// The Ethernet header; NULL except for AF_BRIDGE.
#[unsafe(no_mangle)]
pub extern "C" fn pktb_mac_header(buffer: Option<&mut PacketBuffer>) -> *mut u8 {
    buffer.map_or(ptr::null_mut(), |buffer| buffer.pointer(buffer.mac))
}

/// The IP header; NULL for families other than AF_INET, AF_INET6 and AF_BRIDGE.
#[unsafe(no_mangle)]
pub extern "C" fn pktb_network_header(buffer: Option<&mut PacketBuffer>) -> *mut u8 {
    buffer.map_or(ptr::null_mut(), |buffer| buffer.pointer(buffer.network))
}

/// The transport header; NULL until a function has set it.
#[unsafe(no_mangle)]
pub extern "C" fn pktb_transport_header(buffer: Option<&mut PacketBuffer>) -> *mut u8 {
    buffer.map_or(ptr::null_mut(), |buffer| buffer.pointer(buffer.transport))
}

/// Replaces bytes at the network header's offset plus `dataoff` plus `match_offset`. No checksum is updated. Returns 1, or 0 on failure.
#[unsafe(no_mangle)]
pub extern "C" fn pktb_mangle(
    buffer: Option<&mut PacketBuffer>,
    dataoff: c_int,
    match_offset: c_uint,
    match_len: c_uint,
    rep_buffer: Bytes,
    rep_len: c_uint,
) -> c_int {
    let replaced = buffer.and_then(|buffer| {
        let at =
            buffer.network()?.checked_add_signed(dataoff as isize)?.checked_add(match_offset as usize)?;
        Some(buffer.replace(at, match_len as usize, &rep_buffer, rep_len as usize))
    });
    replaced.unwrap_or(false).into()
}

/// Whether a function has replaced bytes.
#[unsafe(no_mangle)]
pub extern "C" fn pktb_mangled(buffer: Option<&PacketBuffer>) -> bool {
    buffer.is_some_and(|buffer| buffer.mangled)
}
