#![allow(unsafe_code)]
//! The calls that no safe interface has: SO_RCVLOWAT, SIOCOUTQ, and waiting for a descriptor under tokio.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Has a TCP socket be ready for epoll when so many bytes are there (socket(7), tcp(7)). A socket that cannot is ready for any byte.
pub(super) fn set_rcvlowat(fd: BorrowedFd<'_>, bytes: usize) {
    let value = c_int::try_from(bytes).unwrap_or(c_int::MAX);
    let length = size_of::<c_int>() as libc::socklen_t;
    let pointer = (&raw const value).cast();
    // SAFETY: the descriptor is open as long as it is borrowed, and `pointer` is to an int, which is as long as is said and which
    // the kernel only reads during the call (setsockopt(2)).
    let _ = unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, pointer, length) };
}

/// Bytes that were written and that the peer has not acknowledged (tcp(7), SIOCOUTQ), or not read (unix(7)); with TCP's end of the
/// stream, once that was said. None where the system does not say.
pub(super) fn unacknowledged(fd: BorrowedFd<'_>) -> usize {
    let mut bytes: c_int = 0;
    // SAFETY: the descriptor is open as long as it is borrowed, and the pointer is to an int, which is what this request writes and
    // nobody else has during the call (linux/sockios.h: SIOCOUTQ is TIOCOUTQ).
    let said = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if said == 0 { usize::try_from(bytes).unwrap_or(0) } else { 0 }
}

/// Has the runtime wait for this descriptor to be readable.
///
/// # Errors
///
/// When the runtime cannot watch it.
#[cfg(feature = "tokio")]
pub(super) fn watch(
    fd: std::os::fd::OwnedFd,
) -> std::io::Result<tokio::io::unix::AsyncFd<std::os::fd::OwnedFd>> {
    use tokio::io::Interest;
    use tokio::io::unix::AsyncFd;
    // SAFETY: an OwnedFd is one open descriptor for as long as it lives, and the AsyncFd owns it from here on.
    let registered = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
    registered.map_err(Into::into)
}
