#![allow(unsafe_code)]
//! System calls without a safe wrapper: SO_RCVLOWAT, SIOCOUTQ, and registration of a descriptor with tokio.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Makes a TCP socket ready at `bytes` bytes (socket(7), tcp(7)). Other sockets stay ready at one byte.
pub(super) fn set_rcvlowat(fd: BorrowedFd<'_>, bytes: usize) {
    let value = c_int::try_from(bytes).unwrap_or(c_int::MAX);
    let length = size_of::<c_int>() as libc::socklen_t;
    let pointer = (&raw const value).cast();
    // SAFETY: the borrow keeps the descriptor open. `pointer` refers to an int, `length` is its size, and the
    // kernel only reads it during the call (setsockopt(2)).
    let _ = unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, pointer, length) };
}

/// Number of bytes written that the peer has not acknowledged (tcp(7), SIOCOUTQ; includes a sent FIN) or not
/// read (unix(7)). 0 if the kernel does not report it.
pub(super) fn unacknowledged(fd: BorrowedFd<'_>) -> usize {
    let mut bytes: c_int = 0;
    // SAFETY: the borrow keeps the descriptor open. The pointer refers to an int that this request writes and
    // that this function owns (linux/sockios.h: SIOCOUTQ is TIOCOUTQ).
    let said = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if said == 0 { usize::try_from(bytes).unwrap_or(0) } else { 0 }
}

/// Registers a descriptor with the tokio runtime, for reading.
///
/// # Errors
///
/// Fails if the runtime cannot watch it.
#[cfg(feature = "tokio")]
pub(super) fn watch(
    fd: std::os::fd::OwnedFd,
) -> std::io::Result<tokio::io::unix::AsyncFd<std::os::fd::OwnedFd>> {
    use tokio::io::Interest;
    use tokio::io::unix::AsyncFd;
    // SAFETY: an OwnedFd is open until it is dropped, and the AsyncFd owns it.
    let registered = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
    registered.map_err(Into::into)
}
