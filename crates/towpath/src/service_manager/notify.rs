//! sd_notify(3): tells a service manager the state of this process.
//!
//! The protocol is one datagram. A manager that does not read loses messages: no thread waits for it.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, sendmsg_addr, socket_with,
};
use rustix::time::{ClockId, clock_gettime};

/// The state after a reload, whether it was applied or not.
pub const RELOADED: &str = "READY=1";

/// Sends `state` (`READY=1`, `MAINPID=4711`, one per line) to the socket in NOTIFY_SOCKET. Does nothing without this variable.
pub fn notify(state: &str) {
    notify_with(state, None);
}

/// Tells the manager that a reload begins. [`RELOADED`] follows.
pub fn reloading() {
    let now = clock_gettime(ClockId::Monotonic);
    let micros = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
    notify(&format!("RELOADING=1\nMONOTONIC_USEC={micros}\nSTATUS=reloading"));
}

/// As [`notify`], with a descriptor.
pub(super) fn notify_with(state: &str, descriptor: Option<BorrowedFd<'_>>) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET").filter(|path| !path.is_empty()) else { return };
    let address = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name),
        path => SocketAddrUnix::new(path),
    };
    let sent = address.map_err(io::Error::from).and_then(|address| send(&address, state, descriptor));
    if let Err(error) = sent {
        tracing::warn!(
            "the service manager was not notified ({}): {error}",
            state.lines().next().unwrap_or(state)
        );
    }
}

fn send(address: &SocketAddrUnix, state: &str, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<_> = descriptor.into_iter().collect();
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    sendmsg_addr(&socket, address, &[IoSlice::new(state.as_bytes())], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}
