#![allow(unsafe_code)]
//! System calls without a safe wrapper: SO_RCVLOWAT, TCP_NOTSENT_LOWAT, SIOCOUTQ, SO_PASSRIGHTS, recvmsg(2) with descriptors,
//! options and records of kernel TLS, and registration of a descriptor with tokio.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

/// Maximum number of descriptors in one message (include/net/scm.h).
const SCM_MAX_FD: usize = 253;
/// Words of the control buffer: a header of 16 bytes and the descriptors (cmsg(3)).
const CONTROL: usize = 2 + SCM_MAX_FD.div_ceil(2);

/// Refuses descriptors on a Unix socket: the peer's sendmsg(2) fails with EPERM. Sockets that a listener accepts inherit
/// it. No effect before Linux 6.16.
pub(super) fn refuse_descriptors(fd: BorrowedFd<'_>) {
    /// include/uapi/asm-generic/socket.h; neither libc nor rustix has it.
    const SO_PASSRIGHTS: c_int = 83;
    set_int(fd, libc::SOL_SOCKET, SO_PASSRIGHTS, 0);
}

/// What recvmsg(2) has returned.
#[derive(Debug, Default)]
pub(super) struct Received {
    pub(super) bytes: usize,
    /// The descriptors that arrived.
    pub(super) fds: Vec<OwnedFd>,
    /// The peer passed descriptors, including those that did not fit (MSG_CTRUNC).
    pub(super) passed: bool,
    /// The type of the record (RFC 8446, 5.1), of a socket with kernel TLS.
    #[cfg_attr(not(feature = "tls"), allow(dead_code))]
    pub(super) record: Option<u8>,
}

/// TLS_SET_RECORD_TYPE and TLS_GET_RECORD_TYPE (linux/tls.h).
#[cfg(feature = "tls")]
const SET_RECORD_TYPE: c_int = 1;
const GET_RECORD_TYPE: c_int = 2;

/// Receives into the spare capacity of `buffer`, like read(2).
pub(super) fn receive(fd: BorrowedFd<'_>, buffer: &mut Vec<u8>) -> Result<Received, Errno> {
    let received = receive_at(fd, buffer.spare_capacity_mut())?;
    let len = buffer.len();
    // SAFETY: recvmsg(2) has written this number of bytes after `len`, and no more than the spare capacity.
    unsafe { buffer.set_len(len + received.bytes) };
    Ok(received)
}

/// As [`receive`], over the bytes of `buffer`.
#[cfg(feature = "tls")]
pub(super) fn receive_slice(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<Received, Errno> {
    let (start, len) = (buffer.as_mut_ptr().cast::<MaybeUninit<u8>>(), buffer.len());
    // SAFETY: the same bytes, which `buffer` lends to this function alone. `receive_at` writes initialized bytes only.
    receive_at(fd, unsafe { std::slice::from_raw_parts_mut(start, len) })
}

/// Receives into `space`. The bytes at its beginning, as many as returned, are initialized.
fn receive_at(fd: BorrowedFd<'_>, space: &mut [MaybeUninit<u8>]) -> Result<Received, Errno> {
    let mut iov = libc::iovec { iov_base: space.as_mut_ptr().cast(), iov_len: space.len() };
    // Words, for the alignment of cmsghdr.
    let mut control = [0u64; CONTROL];
    // SAFETY: msghdr consists of integers and pointers, for which zero is valid.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut iov;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = size_of_val(&control) as _;
    // SAFETY: the borrow keeps the descriptor open. The header refers to one iovec for `space`, and to the control buffer, with their sizes; all live during the call, and this function alone owns them (recvmsg(2)).
    let got = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) };
    let Ok(got) = usize::try_from(got) else {
        return Err(last_error());
    };
    let (mut fds, mut record) = (Vec::new(), None);
    // SAFETY: the header and its control buffer are those that recvmsg(2) has filled; `msg_controllen` is the filled part.
    let mut part = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    while !part.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return null or a complete header inside of the control buffer.
        let head = unsafe { part.read() };
        let bytes = head.cmsg_len as usize;
        if (head.cmsg_level, head.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: as above; the data begins after the header.
            let data = unsafe { libc::CMSG_DATA(part) }.cast::<c_int>();
            // SAFETY: computes a length only.
            let head = unsafe { libc::CMSG_LEN(0) } as usize;
            for at in 0..bytes.saturating_sub(head) / size_of::<c_int>() {
                // SAFETY: the kernel wrote this number of descriptors after the header.
                let descriptor = unsafe { data.add(at) };
                // SAFETY: as above.
                let descriptor = unsafe { descriptor.read_unaligned() };
                // SAFETY: it is open and belongs to this process alone: recvmsg(2) has just made it.
                fds.push(unsafe { OwnedFd::from_raw_fd(descriptor) });
            }
        }
        if (head.cmsg_level, head.cmsg_type) == (libc::SOL_TLS, GET_RECORD_TYPE) {
            // SAFETY: as above; the data begins after the header.
            let data = unsafe { libc::CMSG_DATA(part) };
            // SAFETY: the kernel wrote one byte there.
            record = Some(unsafe { data.read() });
        }
        // SAFETY: as for CMSG_FIRSTHDR; `part` is a header of this control buffer.
        part = unsafe { libc::CMSG_NXTHDR(&raw const header, part) };
    }
    let passed = !fds.is_empty() || header.msg_flags & libc::MSG_CTRUNC != 0;
    Ok(Received { bytes: got, fds, passed, record })
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Sets SO_RCVLOWAT: poll(2) reports a TCP socket as readable from `bytes` bytes on (socket(7)). Other sockets are readable with
/// one byte.
pub(super) fn set_rcvlowat(fd: BorrowedFd<'_>, bytes: usize) {
    set_int(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, c_int::try_from(bytes).unwrap_or(c_int::MAX));
}

/// Sets TCP_NOTSENT_LOWAT: the socket takes no more while it has `bytes` bytes that were not sent to the peer yet (tcp(7)). No effect on
/// other sockets.
pub(super) fn set_notsent_lowat(fd: BorrowedFd<'_>, bytes: c_int) {
    set_int(fd, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, bytes);
}

/// Sets a socket option to these bytes (setsockopt(2)).
#[cfg(feature = "tls")]
pub(super) fn set_bytes(fd: BorrowedFd<'_>, level: c_int, option: c_int, value: &[u8]) -> Result<(), Errno> {
    let length = value.len() as libc::socklen_t;
    // SAFETY: the borrow keeps the descriptor open. The pointer refers to `length` bytes, which the kernel only reads during the call.
    let said = unsafe { libc::setsockopt(fd.as_raw_fd(), level, option, value.as_ptr().cast(), length) };
    if said == 0 { Ok(()) } else { Err(last_error()) }
}

/// A control message with one byte: `struct cmsghdr` and its data (cmsg(3)), padded as CMSG_SPACE does.
#[cfg(feature = "tls")]
#[repr(C)]
struct RecordControl {
    len: usize,
    level: c_int,
    option: c_int,
    kind: u8,
}

/// Sends one record of a type other than data, on a socket with kernel TLS.
#[cfg(feature = "tls")]
pub(super) fn send_record(fd: BorrowedFd<'_>, kind: u8, bytes: &[u8]) -> Result<(), Errno> {
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = RecordControl {
        len: size_of::<usize>() + 2 * size_of::<c_int>() + 1,
        level: libc::SOL_TLS,
        option: SET_RECORD_TYPE,
        kind,
    };
    // SAFETY: msghdr consists of integers and pointers, for which zero is valid.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut iov;
    header.msg_iovlen = 1;
    header.msg_control = (&raw mut control).cast();
    header.msg_controllen = size_of::<RecordControl>() as _;
    // SAFETY: the header refers to `bytes`, which the kernel only reads, and to the control buffer, with their sizes; all live during
    // the call (sendmsg(2)).
    let sent = unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL) };
    if sent < 0 { Err(last_error()) } else { Ok(()) }
}

/// Sets a socket option that is an int. Fails silently: the callers' options are hints.
fn set_int(fd: BorrowedFd<'_>, level: c_int, option: c_int, value: c_int) {
    let (pointer, length) = ((&raw const value).cast(), size_of::<c_int>() as libc::socklen_t);
    // SAFETY: the borrow keeps the descriptor open. `pointer` refers to an int, `length` is its size, and the
    // kernel only reads it during the call (setsockopt(2)).
    let _ = unsafe { libc::setsockopt(fd.as_raw_fd(), level, option, pointer, length) };
}

/// Number of bytes written that the peer has not acknowledged (tcp(7), SIOCOUTQ; includes a sent FIN) or not
/// read (unix(7)). 0 if the kernel does not report it.
pub(super) fn unacknowledged(fd: BorrowedFd<'_>) -> usize {
    try_unacknowledged(fd).unwrap_or(0)
}

/// As [`unacknowledged`]; `None` if the kernel does not report it.
pub(super) fn try_unacknowledged(fd: BorrowedFd<'_>) -> Option<usize> {
    let mut bytes: c_int = 0;
    // SAFETY: the borrow keeps the descriptor open. The pointer refers to an int that this request writes and
    // that this function owns (linux/sockios.h: SIOCOUTQ is TIOCOUTQ).
    let said = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if said == 0 { usize::try_from(bytes).ok() } else { None }
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
