//! `nfq_get_*`: the attributes of a packet. Numbers are in host byte order; 0 stands for an attribute that the packet does not have.

use std::ffi::{c_char, c_int, c_uchar, c_void};
use std::mem::MaybeUninit;

use rustix::io::Errno;

use crate::data::{Attributes, nfqa};
use crate::ffi::guard;
use crate::nfnl;

type Packet<'a> = Option<&'a Attributes<'a>>;

/// A number of 32 bits.
fn number(packet: Packet<'_>, kind: u16) -> Option<u32> {
    packet?.get(kind)?.first_chunk().map(|bytes| u32::from_be_bytes(*bytes))
}

/// A pointer to a structure of `size` bytes in the program's buffer; NULL if the packet does not have it.
fn structure(packet: Packet<'_>, kind: u16, size: usize) -> *mut c_void {
    let value = packet.and_then(|packet| packet.get(kind)).filter(|value| value.len() >= size);
    value.map_or(std::ptr::null_mut(), |value| value.as_ptr().cast_mut().cast())
}

/// `struct nfqnl_msg_packet_hdr`: id, EtherType, hook.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_get_msg_packet_hdr(packet: Packet<'_>) -> *mut c_void {
    structure(packet, nfqa::PACKET_HDR, 7)
}

/// The packet's mark.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_get_nfmark(packet: Packet<'_>) -> u32 {
    number(packet, nfqa::MARK).unwrap_or(0)
}

/// The time at which the engine received the packet. EAGAIN if the packet has none.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_get_timestamp(
    packet: Packet<'_>,
    time: Option<&mut MaybeUninit<libc::timeval>>,
) -> c_int {
    guard(|| {
        let time = time.ok_or(Errno::INVAL)?;
        let value = packet.and_then(|packet| packet.get(nfqa::TIMESTAMP)).ok_or(Errno::AGAIN)?;
        let (seconds, rest) = value.split_first_chunk().ok_or(Errno::AGAIN)?;
        let microseconds = rest.first_chunk().ok_or(Errno::AGAIN)?;
        time.write(libc::timeval {
            tv_sec: i64::from_be_bytes(*seconds),
            tv_usec: i64::from_be_bytes(*microseconds),
        });
        Ok(0)
    })
}

/// Index of the interface that received the packet.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_get_indev(packet: Packet<'_>) -> u32 {
    number(packet, nfqa::IFINDEX_INDEV).unwrap_or(0)
}

/// Index of the bridge's port that received the packet.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_get_physindev(packet: Packet<'_>) -> u32 {
    number(packet, nfqa::IFINDEX_PHYSINDEV).unwrap_or(0)
}

/// Index of the interface by which the packet leaves.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_get_outdev(packet: Packet<'_>) -> u32 {
    number(packet, nfqa::IFINDEX_OUTDEV).unwrap_or(0)
}

/// Index of the bridge's port by which the packet leaves.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_get_physoutdev(packet: Packet<'_>) -> u32 {
    number(packet, nfqa::IFINDEX_PHYSOUTDEV).unwrap_or(0)
}

/// `NFQA_SKB_` bits. An engine's queue has none.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_get_skbinfo(packet: Packet<'_>) -> u32 {
    number(packet, nfqa::SKB_INFO).unwrap_or(0)
}

/// Copies the user id of the socket. Returns 1, or 0 if the packet has none.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_get_uid(packet: Packet<'_>, uid: Option<&mut MaybeUninit<u32>>) -> c_int {
    copy(packet, nfqa::UID, uid)
}

/// Copies the group id of the socket. Returns 1, or 0 if the packet has none.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_get_gid(packet: Packet<'_>, gid: Option<&mut MaybeUninit<u32>>) -> c_int {
    copy(packet, nfqa::GID, gid)
}

fn copy(packet: Packet<'_>, kind: u16, into: Option<&mut MaybeUninit<u32>>) -> c_int {
    let (Some(value), Some(into)) = (number(packet, kind), into) else { return 0 };
    into.write(value);
    1
}

/// Points `context` to the security context. Returns its length, or -1 if the packet has none.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_get_secctx(packet: Packet<'_>, context: Option<&mut *mut c_uchar>) -> c_int {
    bytes(packet, nfqa::SECCTX, context)
}

/// Points `payload` to the packet from its IP header on. Returns its length, or -1 if the message has none.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_get_payload(packet: Packet<'_>, payload: Option<&mut *mut c_uchar>) -> c_int {
    bytes(packet, nfqa::PAYLOAD, payload)
}

fn bytes(packet: Packet<'_>, kind: u16, into: Option<&mut *mut c_uchar>) -> c_int {
    let (Some(value), Some(into)) = (packet.and_then(|packet| packet.get(kind)), into) else { return -1 };
    // The program's buffer, which the program may change.
    *into = value.as_ptr().cast_mut();
    c_int::try_from(value.len()).unwrap_or(-1)
}

/// `struct nfqnl_msg_packet_hw`: the Ethernet source address. NULL if the packet has none.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_get_packet_hw(packet: Packet<'_>) -> *mut c_void {
    structure(packet, nfqa::HWADDR, 12)
}

/// Writes the name of the ingress interface from a table of libnfnetlink.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_get_indev_name(table: *mut c_void, packet: Packet<'_>, name: *mut c_char) -> c_int {
    name_of(table, nfq_get_indev(packet), name)
}

/// Writes the name of the bridge's ingress port.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_get_physindev_name(table: *mut c_void, packet: Packet<'_>, name: *mut c_char) -> c_int {
    name_of(table, nfq_get_physindev(packet), name)
}

/// Writes the name of the egress interface.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_get_outdev_name(table: *mut c_void, packet: Packet<'_>, name: *mut c_char) -> c_int {
    name_of(table, nfq_get_outdev(packet), name)
}

/// Writes the name of the bridge's egress port.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_get_physoutdev_name(
    table: *mut c_void,
    packet: Packet<'_>,
    name: *mut c_char,
) -> c_int {
    name_of(table, nfq_get_physoutdev(packet), name)
}

/// ENODEV for an index of 0.
fn name_of(table: *mut c_void, index: u32, name: *mut c_char) -> c_int {
    guard(|| if index == 0 { Err(Errno::NODEV) } else { nfnl::name_of(table, index, name) })
}
