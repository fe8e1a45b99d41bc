//! Requests to the kernel by netlink(7), most of them rtnetlink(7), in the network namespace of the calling thread.

use std::io;
use std::os::fd::AsFd;

use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::sys;

/// linux/netlink.h.
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// Limit on the datagrams of an answer.
const DATAGRAMS_MAX: usize = 10_000;

/// Requests a dump of links or addresses, and passes the kind and the body of each message to `take`.
pub(crate) fn dump(request: u16, take: impl FnMut(u16, &[u8])) -> io::Result<()> {
    // struct ifinfomsg, the longer of the two bodies.
    exchange(request, NLM_F_DUMP, &[0; 16], take)
}

/// Requests a dump with this body.
pub(crate) fn dump_with(request: u16, body: &[u8], take: impl FnMut(u16, &[u8])) -> io::Result<()> {
    exchange(request, NLM_F_DUMP, body, take)
}

/// Requests a change. `flags` besides NLM_F_REQUEST and NLM_F_ACK.
pub(crate) fn change(request: u16, flags: u16, body: &[u8]) -> io::Result<()> {
    exchange(request, flags | NLM_F_ACK, body, |_, _| ())
}

fn exchange(request: u16, flags: u16, body: &[u8], take: impl FnMut(u16, &[u8])) -> io::Result<()> {
    exchange_on(libc::NETLINK_ROUTE, request, flags, body, take)
}

/// Requests a dump of another netlink protocol.
pub(crate) fn dump_on(
    protocol: i32,
    request: u16,
    body: &[u8],
    take: impl FnMut(u16, &[u8]),
) -> io::Result<()> {
    exchange_on(protocol, request, NLM_F_DUMP, body, take)
}

/// Requests one object of another netlink protocol.
pub(crate) fn query_on(
    protocol: i32,
    request: u16,
    body: &[u8],
    take: impl FnMut(u16, &[u8]),
) -> io::Result<()> {
    exchange_on(protocol, request, NLM_F_ACK, body, take)
}

fn exchange_on(
    protocol: i32,
    request: u16,
    flags: u16,
    body: &[u8],
    mut take: impl FnMut(u16, &[u8]),
) -> io::Result<()> {
    let socket = sys::socket(libc::AF_NETLINK, libc::SOCK_RAW, protocol)?;
    // struct nlmsghdr: length, type, flags, sequence, port.
    let mut message = vec![0; 16];
    message[..4].copy_from_slice(&(16 + body.len() as u32).to_ne_bytes());
    message[4..6].copy_from_slice(&request.to_ne_bytes());
    message[6..8].copy_from_slice(&(NLM_F_REQUEST | flags).to_ne_bytes());
    message.extend_from_slice(body);
    send(&socket, &message, SendFlags::empty())?;
    let mut buffer = vec![0; 64 << 10];
    for _ in 0..DATAGRAMS_MAX {
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(socket.as_fd(), rustix::event::PollFlags::IN)];
        let timeout = rustix::event::Timespec { tv_sec: 5, tv_nsec: 0 };
        if rustix::event::poll(&mut fds, Some(&timeout))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let (len, _) = recv(&socket, &mut buffer[..], RecvFlags::empty())?;
        let mut left = &buffer[..len.min(buffer.len())];
        while let Some(len) = word(left).map(|len| len as usize).filter(|len| (16..=left.len()).contains(len))
        {
            let kind = half(&left[4..]);
            match kind {
                NLMSG_DONE => return Ok(()),
                // The number 0 acknowledges a change.
                NLMSG_ERROR => match word(&left[16..len]).unwrap_or(0).cast_signed() {
                    0 => return Ok(()),
                    number => return Err(io::Error::from_raw_os_error(-number)),
                },
                kind => take(kind, &left[16..len]),
            }
            left = left.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        }
    }
    Err(io::ErrorKind::InvalidData.into())
}

/// Appends an attribute (struct rtattr: length, type).
pub(crate) fn put(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    body.extend_from_slice(&(4 + value.len() as u16).to_ne_bytes());
    body.extend_from_slice(&kind.to_ne_bytes());
    body.extend_from_slice(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

/// The attributes of a message, with their types.
pub(crate) fn attributes(mut left: &[u8]) -> Vec<(u16, &[u8])> {
    let mut found = Vec::new();
    while left.len() >= 4 {
        let len = usize::from(half(left));
        let Some(value) = left.get(4..len) else { break };
        // NLA_TYPE_MASK.
        found.push((half(&left[2..]) & 0x3fff, value));
        left = left.get(len.next_multiple_of(4)..).unwrap_or(&[]);
    }
    found
}

pub(crate) fn find<'a>(attributes: &[(u16, &'a [u8])], kind: u16) -> Option<&'a [u8]> {
    attributes.iter().find(|(own, _)| *own == kind).map(|(_, value)| *value)
}

pub(crate) fn half(bytes: &[u8]) -> u16 {
    bytes.first_chunk().map_or(0, |bytes| u16::from_ne_bytes(*bytes))
}

pub(crate) fn word(bytes: &[u8]) -> Option<u32> {
    bytes.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}
