//! System calls that rustix lacks. The files `sys.rs` and `sys/` are the only ones of this crate with `unsafe`.
#![allow(unsafe_code)]

mod free;
mod memory;
pub(crate) mod uring;

use std::io;
use std::marker::PhantomData;
use std::mem::zeroed;
use std::net::{IpAddr, SocketAddr};
#[cfg(feature = "tokio")]
use std::os::fd::OwnedFd;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::null_mut;

use libc::{c_int, socklen_t};
#[cfg(feature = "tokio")]
use tokio::io::{Interest, unix::AsyncFd};

use crate::engine::MAX_CALLS;

pub use memory::{Pages, Region};
pub(crate) use memory::{Slot, Slots};

/// include/uapi/linux/tcp.h: TCP_ULP, TCP_INFO, the state TCP_CLOSE, and the offsets of `tcpi_rtt` (microseconds) and
/// `tcpi_bytes_acked`.
const TCP_ULP: c_int = 31;
const TCP_INFO: c_int = 11;
const TCP_CLOSE: u8 = 7;
const TCPI_RTT: usize = 68;
const TCPI_BYTES_ACKED: usize = 120;
/// include/uapi/linux/udp.h.
const UDP_SEGMENT: c_int = 103;

/// Bytes of one call: an iovec whose memory outlives the call.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Part<'a>(libc::iovec, PhantomData<&'a [u8]>);

impl<'a> Part<'a> {
    pub(crate) const NONE: Self = Self(libc::iovec { iov_base: null_mut(), iov_len: 0 }, PhantomData);

    pub(crate) fn of(bytes: &'a [u8]) -> Self {
        let iov_base = bytes.as_ptr().cast_mut().cast();
        Self(libc::iovec { iov_base, iov_len: bytes.len() }, PhantomData)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Appends `next` if it starts where this part ends, so that the kernel pins both with one iovec. Returns true if it did.
    pub(crate) fn join(&mut self, next: &Self) -> bool {
        let joins = self.0.iov_base.wrapping_byte_add(self.0.iov_len) == next.0.iov_base;
        if joins {
            self.0.iov_len += next.0.iov_len;
        }
        joins
    }
}

/// One send(2) or sendmsg(2). Never blocks, raises no signal, and never uses MSG_FASTOPEN (which the kernel copies or refuses with
/// MSG_ZEROCOPY).
pub(crate) fn send(socket: BorrowedFd<'_>, parts: &[Part<'_>], zerocopy: bool) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | if zerocopy { libc::MSG_ZEROCOPY } else { 0 };
    if let [Part(iovec, _)] = parts {
        // send(2) saves the kernel reading a msghdr and an array.
        // SAFETY: the memory is borrowed until this call returns, and is only read; the kernel pins what it reads later.
        let sent = unsafe { libc::send(socket.as_raw_fd(), iovec.iov_base, iovec.iov_len, flags) };
        return usize::try_from(sent).map_err(|_| io::Error::last_os_error());
    }
    // SAFETY: an all-zero msghdr is valid: no address, data or control.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = parts.as_ptr().cast_mut().cast();
    message.msg_iovlen = parts.len();
    // SAFETY: `Part` is an iovec (repr(transparent)) of memory that is borrowed until this call returns; the kernel pins the pages
    // that it reads later. It writes through none of the pointers.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// One sendmmsg(2). On entry `calls` has the number of parts of each call, on return the bytes accepted. Returns the number of calls
/// made. Never blocks, raises no signal. It stops after a partially accepted call, so a stream stays in order.
pub(crate) fn send_all(
    socket: BorrowedFd<'_>,
    parts: &[Part<'_>],
    calls: &mut [usize],
    zerocopy: bool,
) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | if zerocopy { libc::MSG_ZEROCOPY } else { 0 };
    // SAFETY: all-zero mmsghdrs are valid: no address, data or control.
    let mut messages: [libc::mmsghdr; MAX_CALLS] = unsafe { zeroed() };
    let count = calls.len().min(messages.len());
    let mut rest = parts;
    for (message, call) in messages.iter_mut().zip(&*calls) {
        let (own, behind) = rest.split_at(rest.len().min(*call));
        rest = behind;
        message.msg_hdr.msg_iov = own.as_ptr().cast_mut().cast();
        message.msg_hdr.msg_iovlen = own.len();
    }
    // SAFETY: as in `send`; the kernel writes the length of each message, in `messages`, which is borrowed mutably.
    let made = unsafe { libc::sendmmsg(socket.as_raw_fd(), messages.as_mut_ptr(), count as u32, flags) };
    let made = usize::try_from(made).map_err(|_| io::Error::last_os_error())?;
    for (call, message) in calls.iter_mut().zip(&messages) {
        *call = message.msg_len as usize;
    }
    Ok(made)
}

/// Control messages of one entry of the error queue. Today's kernels need at most 128 bytes.
#[repr(align(8))]
#[derive(Debug)]
pub(crate) struct Control([u8; 512]);

impl Control {
    pub(crate) const fn new() -> Self {
        Self([0; 512])
    }
}

/// Returns the control messages of one entry of the error queue, or `None` if the queue is empty. Never blocks.
///
/// # Errors
/// InvalidData: the control messages were truncated, and a notification is lost.
pub(crate) fn recv_error<'a>(
    socket: BorrowedFd<'_>,
    control: &'a mut Control,
) -> io::Result<Option<&'a [u8]>> {
    // SAFETY: an all-zero msghdr is valid: no address, data or control.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len();
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: the kernel writes at most `msg_controllen` bytes into `control`, which is borrowed mutably until it returns.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, flags) };
    if got < 0 {
        let error = io::Error::last_os_error();
        return match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
            _ => Err(error),
        };
    }
    if message.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(Some(&control.0[..message.msg_controllen.min(control.0.len())]))
}

/// Sets SO_ZEROCOPY and reads it back: a kernel or socket that ignores the option would never notify.
pub(crate) fn arm(socket: BorrowedFd<'_>) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1)?;
    let mut value = [0; 4];
    get(socket, libc::SOL_SOCKET, libc::SO_ZEROCOPY, &mut value)?;
    if c_int::from_ne_bytes(value) == 0 {
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok(())
}

/// Sets UDP_SEGMENT: each call is cut into datagrams of `bytes` bytes; 0 is off.
pub(crate) fn segment(socket: BorrowedFd<'_>, bytes: u16) -> io::Result<()> {
    set(socket, libc::IPPROTO_UDP, UDP_SEGMENT, bytes.into())
}

/// The value of UDP_SEGMENT; 0 is off. `None` if the socket is not UDP.
pub(crate) fn segment_size(socket: BorrowedFd<'_>) -> Option<u16> {
    let mut value = [0; 4];
    get(socket, libc::IPPROTO_UDP, UDP_SEGMENT, &mut value).ok()?;
    u16::try_from(c_int::from_ne_bytes(value)).ok()
}

/// Returns true if the TCP socket has an upper-layer protocol (kTLS).
pub(crate) fn has_ulp(socket: BorrowedFd<'_>) -> bool {
    let mut name = [0; 16];
    matches!(get(socket, libc::IPPROTO_TCP, TCP_ULP, &mut name), Ok(len) if len > 0 && name[0] != 0)
}

/// The round-trip time of a TCP connection in microseconds.
pub(crate) fn rtt(socket: BorrowedFd<'_>) -> Option<u32> {
    let mut info = [0; 128];
    let len = get(socket, libc::IPPROTO_TCP, TCP_INFO, &mut info).ok()?;
    Some(u32::from_ne_bytes(*info[..len].get(TCPI_RTT..)?.first_chunk()?))
}

/// Bytes that the peer of a TCP connection has acknowledged.
pub(crate) fn acked(socket: BorrowedFd<'_>) -> Option<u64> {
    let mut info = [0; 128];
    let len = get(socket, libc::IPPROTO_TCP, TCP_INFO, &mut info).ok()?;
    Some(u64::from_ne_bytes(*info[..len].get(TCPI_BYTES_ACKED..)?.first_chunk()?))
}

/// Returns true if a TCP connection has ended on both sides or was reset (TCP_CLOSE, net/tcp_states.h).
pub(crate) fn is_over(socket: BorrowedFd<'_>) -> bool {
    let mut info = [0; 8];
    // tcpi_state is the first byte.
    get(socket, libc::IPPROTO_TCP, TCP_INFO, &mut info).is_ok_and(|len| len > 0 && info[0] == TCP_CLOSE)
}

/// Bytes in the socket's send queue: unsent, or sent and unacknowledged (SIOCOUTQ, tcp(7)).
pub(crate) fn queued(socket: BorrowedFd<'_>) -> Option<u64> {
    let mut bytes: c_int = 0;
    // SAFETY: the kernel writes one int into `bytes`, which lives until the call returns.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    u64::try_from(bytes).ok().filter(|_| done == 0)
}

fn set(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    let len = size_of::<c_int>() as socklen_t;
    // SAFETY: the kernel reads `len` bytes of `value`, which lives until the call returns.
    let done = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), len) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Reads an option; returns the length of its value.
fn get(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: &mut [u8]) -> io::Result<usize> {
    let mut len = value.len() as socklen_t;
    // SAFETY: the kernel writes at most `len` bytes into `value`, and the length.
    let done =
        unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, value.as_mut_ptr().cast(), &mut len) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok((len as usize).min(value.len())) }
}

/// Returns true if the peer of a connected socket is this machine, judged by the addresses.
pub(crate) fn is_local(socket: BorrowedFd<'_>) -> bool {
    let address = |any| Some(SocketAddr::try_from(any?).ok()?.ip().to_canonical());
    let peer: Option<IpAddr> = address(rustix::net::getpeername(socket).ok().flatten());
    let own = address(rustix::net::getsockname(socket).ok());
    peer.is_some_and(|peer| peer.is_loopback() || Some(peer) == own)
}

/// Registers a descriptor with tokio's reactor for reading.
#[cfg(feature = "tokio")]
pub(crate) fn reactor(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd refers to the same open descriptor until it is dropped.
    let registered = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
    Ok(registered?)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::time::Duration;

    use super::*;
    use crate::{CopyMode, Options, SendError, Sender, Unarmed};

    #[towpath_testenv::needs(ktls)]
    #[test]
    fn ktls_sockets_are_sent_plain() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut peer = listener.accept().unwrap().0;
        assert!(!has_ulp(stream.as_fd()));
        let name = b"tls";
        // SAFETY: the kernel reads three bytes of `name`, which lives until the call returns.
        let done = unsafe {
            let value = name.as_ptr().cast();
            libc::setsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, TCP_ULP, value, name.len() as socklen_t)
        };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
        assert!(has_ulp(stream.as_fd()));
        let zerocopy = Options { choice: CopyMode::Zerocopy, ..Options::default() };
        let refused = Sender::new(stream.try_clone().unwrap(), zerocopy);
        assert!(matches!(refused, Err(SendError::NotSupported { why: Unarmed::KernelTls })), "{refused:?}");
        let mut sender = Sender::new(stream, Options::default()).unwrap();
        assert_eq!(sender.unarmed(), Some(Unarmed::KernelTls));
        // Without keys, kTLS passes data through unchanged.
        sender.send(vec![7; 100_000]).unwrap();
        let mut got = vec![0; 100_000];
        peer.read_exact(&mut got).unwrap();
        assert!(got.iter().all(|byte| *byte == 7));
        let closed = sender.close(Duration::from_secs(60)).unwrap();
        assert_eq!(
            (closed.finished, closed.counters.numbers, closed.counters.plain_bytes()),
            (true, 0, 100_000)
        );
    }
}
