//! `nfq_nlmsg_*`: netlink messages in the program's buffer.
//!
//! The functions that put an attribute write behind the message, whose length is in its header. The program's buffer has room for them, as
//! with libmnl. Padding between attributes is not written. Results are those of version 1.0.5, except for an attribute that ends up to
//! three bytes behind its message (not parsed) and for a packet of more than 65,531 bytes (not appended): that version accesses memory
//! outside of the message.

use std::ffi::{c_char, c_int};
use std::ptr;

use rustix::io::Errno;

use crate::data::{HEADER, attributes, nfqa};
use crate::errno;
use crate::memory::Bytes;

/// Bytes of `struct nlmsghdr` (linux/netlink.h): length (32 bits), type and flags (16 bits each), sequence number, port id.
const NLMSGHDR: usize = 16;
/// Bytes of `struct nlmsghdr` and `struct nfgenmsg` (linux/netfilter/nfnetlink.h): family, version, resource id in network byte order.
const HEADERS: usize = NLMSGHDR + 4;
/// NFNL_SUBSYS_QUEUE of linux/netfilter/nfnetlink.h.
const SUBSYSTEM: u16 = 3;
/// NLM_F_REQUEST of linux/netlink.h.
const REQUEST: u16 = 1;

/// NFQA_CFG_CMD, _PARAMS and _QUEUE_MAXLEN of linux/netfilter/nfnetlink_queue.h.
const CFG_CMD: u16 = 1;
const CFG_PARAMS: u16 = 2;
const CFG_QUEUE_MAXLEN: u16 = 3;

/// NFQA_MAX of version 1.0.5: the program's array of attributes has one element more.
const PARSED_MAX: u16 = nfqa::SECCTX;

/// A message with its headers, or NULL.
#[derive(Debug)]
#[repr(transparent)]
pub struct Message(*mut u8);

impl Message {
    /// Bytes of the message; 0 for NULL.
    fn len(&self) -> usize {
        if self.0.is_null() {
            return 0;
        }
        // SAFETY: not NULL; C guarantees the headers.
        u32::from_ne_bytes(unsafe { self.0.cast::<[u8; 4]>().read() }) as usize
    }

    /// The attributes. Empty for NULL, and for a message without headers.
    fn attributes(&self) -> &[u8] {
        let Some(len) = self.len().checked_sub(HEADERS) else { return &[] };
        // SAFETY: C guarantees as many bytes as the header states.
        let start = unsafe { self.0.add(HEADERS) };
        // SAFETY: as before; nothing else accesses them during the call.
        unsafe { std::slice::from_raw_parts(start, len) }
    }

    /// Appends an attribute. Nothing happens for NULL, and if its length does not fit into the attribute's header.
    fn put(&mut self, kind: u16, len: usize, write: impl FnOnce(&mut [u8])) {
        let Ok(attribute_len) = u16::try_from(len + HEADER) else { return };
        let at = self.len().next_multiple_of(4);
        if self.0.is_null() {
            return;
        }
        // SAFETY: not NULL; C guarantees room behind the message.
        let start = unsafe { self.0.add(at) };
        // SAFETY: C guarantees room for the attribute, without other accesses during the call.
        let attribute = unsafe { std::slice::from_raw_parts_mut(start, HEADER + len) };
        attribute[..2].copy_from_slice(&attribute_len.to_ne_bytes());
        attribute[2..HEADER].copy_from_slice(&kind.to_ne_bytes());
        write(&mut attribute[HEADER..]);
        let message_len = (at + (HEADER + len).next_multiple_of(4)) as u32;
        // SAFETY: as in `len`.
        unsafe { self.0.cast::<[u8; 4]>().write(message_len.to_ne_bytes()) };
    }

    fn put_bytes(&mut self, kind: u16, value: &[u8]) {
        self.put(kind, value.len(), |bytes| bytes.copy_from_slice(value));
    }
}

/// Writes the headers of a message for a queue at the start of `buf` and returns the message, which has no attributes.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_nlmsg_put(buf: Option<&mut [u8; HEADERS]>, kind: c_int, queue_num: u32) -> *mut u8 {
    let Some(buf) = buf else { return ptr::null_mut() };
    buf.fill(0);
    buf[..4].copy_from_slice(&(HEADERS as u32).to_ne_bytes());
    buf[4..6].copy_from_slice(&(SUBSYSTEM << 8 | kind as u16).to_ne_bytes());
    buf[6..8].copy_from_slice(&REQUEST.to_ne_bytes());
    buf[18..].copy_from_slice(&(queue_num as u16).to_be_bytes());
    buf.as_mut_ptr()
}

/// Appends a verdict on the packet with this id.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_nlmsg_verdict_put(mut nlh: Message, id: c_int, verdict: c_int) {
    let [a, b, c, d] = verdict.to_be_bytes();
    let [e, f, g, h] = id.to_be_bytes();
    nlh.put_bytes(nfqa::VERDICT_HDR, &[a, b, c, d, e, f, g, h]);
}

/// Appends the packet's new mark.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_nlmsg_verdict_put_mark(mut nlh: Message, mark: u32) {
    nlh.put_bytes(nfqa::MARK, &mark.to_be_bytes());
}

/// Appends the packet's new bytes; none, if there are more than 65,531.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_nlmsg_verdict_put_pkt(mut nlh: Message, pkt: Bytes, pktlen: u32) {
    nlh.put(nfqa::PAYLOAD, pktlen as usize, |bytes| pkt.copy_to(bytes));
}

/// Appends a command: NFQNL_CFG_CMD_*.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_nlmsg_cfg_put_cmd(mut nlh: Message, pf: u16, cmd: u8) {
    let [high, low] = pf.to_be_bytes();
    nlh.put_bytes(CFG_CMD, &[cmd, 0, high, low]);
}

/// Appends the copy mode: NFQNL_COPY_*, and the number of bytes to copy.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_nlmsg_cfg_put_params(mut nlh: Message, mode: u8, range: c_int) {
    let [a, b, c, d] = range.to_be_bytes();
    nlh.put_bytes(CFG_PARAMS, &[a, b, c, d, mode]);
}

/// Appends the maximum length of the queue.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_nlmsg_cfg_put_qmaxlen(mut nlh: Message, qmaxlen: u32) {
    nlh.put_bytes(CFG_QUEUE_MAXLEN, &qmaxlen.to_be_bytes());
}

/// The length that version 1.0.5 requires of an attribute's value; `None`: any.
fn required_len(kind: u16) -> Option<usize> {
    match kind {
        nfqa::PACKET_HDR => Some(7),
        nfqa::TIMESTAMP => Some(16),
        nfqa::HWADDR => Some(12),
        nfqa::UNSPEC | nfqa::VERDICT_HDR | nfqa::PAYLOAD | nfqa::CT | nfqa::EXP => None,
        _ => Some(4),
    }
}

/// The program's array of `struct nlattr *`, indexed by type.
#[derive(Debug)]
#[repr(transparent)]
pub struct Table(*mut *const c_char);

impl Table {
    fn set(&mut self, kind: u16, attribute: *const u8) {
        // SAFETY: C guarantees NFQA_MAX + 1 elements; `kind` is at most NFQA_MAX.
        let element = unsafe { self.0.add(usize::from(kind)) };
        // SAFETY: as before.
        unsafe { element.write(attribute.cast()) };
    }
}

/// Sets the elements of `attr` to the message's attributes. Attributes of unknown types are skipped, and errno is EOPNOTSUPP.
/// Returns 1 (MNL_CB_OK), or -1 (MNL_CB_ERROR) with ERANGE at an attribute whose length does not fit its type, EINVAL for NULL.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_nlmsg_parse(nlh: Message, mut attr: Table) -> c_int {
    if nlh.0.is_null() || attr.0.is_null() {
        errno::set(Errno::INVAL);
        return -1;
    }
    let bytes = nlh.attributes();
    for attribute in attributes(bytes) {
        if attribute.kind > PARSED_MAX {
            errno::set(Errno::OPNOTSUPP);
            continue;
        }
        if required_len(attribute.kind).is_some_and(|len| len != attribute.value.len()) {
            errno::set(Errno::RANGE);
            return -1;
        }
        attr.set(attribute.kind, bytes[attribute.at..].as_ptr());
    }
    1
}
