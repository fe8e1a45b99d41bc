//! The system calls that rustix does not have. With the drivers' rings the only files of this crate with `unsafe`.
#![allow(unsafe_code)]

use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;

use libc::{c_int, c_ulong, socklen_t};

/// Most messages of one call of [`send_many`].
pub(crate) const MESSAGES: usize = 64;

/// A socket, closed on exec(2), that never blocks.
pub(crate) fn socket(domain: c_int, kind: c_int, protocol: c_int) -> io::Result<OwnedFd> {
    let kind = kind | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no memory is passed.
    let fd = checked(unsafe { libc::socket(domain, kind, protocol) })?;
    // SAFETY: the kernel just made this descriptor, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Binds a packet socket to an interface (packet(7)); `protocol` in the machine's byte order.
pub(crate) fn bind_packet(fd: BorrowedFd<'_>, index: u32, protocol: u16) -> io::Result<()> {
    // SAFETY: a sockaddr_ll of zeroes is one.
    let mut address: libc::sockaddr_ll = unsafe { zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = protocol.to_be();
    address.sll_ifindex = index as i32;
    bind(fd, &address)
}

fn bind<T>(fd: BorrowedFd<'_>, address: &T) -> io::Result<()> {
    let len = size_of::<T>() as socklen_t;
    // SAFETY: the kernel reads `len` bytes of `address`, which lives until the call returns; all of them are initialised, the
    // callers' types have no padding.
    checked(unsafe { libc::bind(fd.as_raw_fd(), std::ptr::from_ref(address).cast(), len) })?;
    Ok(())
}

/// setsockopt(2) with words in the machine's byte order.
pub(crate) fn set(fd: BorrowedFd<'_>, level: c_int, name: c_int, words: &[u32]) -> io::Result<()> {
    let len = size_of_val(words) as socklen_t;
    // SAFETY: the kernel reads `len` bytes of `words`, which live until the call returns.
    checked(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, words.as_ptr().cast(), len) })?;
    Ok(())
}

/// getsockopt(2) of words in the machine's byte order; how many bytes were written.
pub(crate) fn get(fd: BorrowedFd<'_>, level: c_int, name: c_int, words: &mut [u32]) -> io::Result<usize> {
    let mut len = size_of_val(words) as socklen_t;
    let to = words.as_mut_ptr().cast();
    // SAFETY: the kernel writes at most `len` bytes to `words`, and the length.
    checked(unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, to, &mut len) })?;
    Ok(len as usize)
}

/// The error that a socket keeps for its next caller; asking takes it away.
pub(crate) fn pending_error(fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut error = [0];
    get(fd, libc::SOL_SOCKET, libc::SO_ERROR, &mut error)?;
    if error[0] == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error[0] as i32)) }
}

/// One sendmmsg(2): each message is its two parts, one behind the other. Returns how many messages were sent, at least one.
pub(crate) fn send_many(fd: BorrowedFd<'_>, messages: &[[&[u8]; 2]]) -> io::Result<usize> {
    // SAFETY: headers of zeroes are messages of nothing.
    let mut headers: [libc::mmsghdr; MESSAGES] = unsafe { zeroed() };
    let mut parts = [[libc::iovec { iov_base: null_mut(), iov_len: 0 }; 2]; MESSAGES];
    for ((header, parts), message) in headers.iter_mut().zip(&mut parts).zip(messages) {
        let first = usize::from(message[0].is_empty());
        for (part, bytes) in parts.iter_mut().zip(message) {
            part.iov_base = bytes.as_ptr().cast_mut().cast();
            part.iov_len = bytes.len();
        }
        header.msg_hdr.msg_iov = parts[first..].as_mut_ptr();
        header.msg_hdr.msg_iovlen = 2 - first;
    }
    let count = messages.len().min(MESSAGES) as u32;
    // SAFETY: each header points to its parts, each part to bytes that are borrowed until this call returns; the kernel only reads them.
    let sent = unsafe { libc::sendmmsg(fd.as_raw_fd(), headers.as_mut_ptr(), count, libc::MSG_DONTWAIT) };
    checked(sent).map(|sent| sent as usize)
}

/// What interface requests (netdevice(7)) answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Index(u32),
    Flags(i32),
    Mtu(u32),
    /// ARPHRD_ type and address.
    Hardware(u16, [u8; 6]),
}

/// One of the SIOCGIF requests about the interface `name`, in the socket's network namespace.
pub(crate) fn interface(fd: BorrowedFd<'_>, request: c_ulong, name: &str) -> io::Result<Answer> {
    let mut asked = named(name)?;
    // SAFETY: the kernel reads and writes one ifreq, which lives until the call returns.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw mut asked) })?;
    Ok(match request {
        libc::SIOCGIFINDEX => {
            // SAFETY: every member of the union is plain numbers, and this request wrote this one.
            Answer::Index(unsafe { asked.ifr_ifru.ifru_ifindex } as u32)
        }
        libc::SIOCGIFFLAGS => {
            // SAFETY: as above.
            Answer::Flags(unsafe { asked.ifr_ifru.ifru_flags }.into())
        }
        libc::SIOCGIFMTU => {
            // SAFETY: as above.
            Answer::Mtu(unsafe { asked.ifr_ifru.ifru_mtu } as u32)
        }
        _ => {
            // SAFETY: as above.
            let address = unsafe { asked.ifr_ifru.ifru_hwaddr };
            Answer::Hardware(address.sa_family, std::array::from_fn(|at| address.sa_data[at] as u8))
        }
    })
}

/// A request about `name`; InvalidInput when that cannot be an interface's.
fn named(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: an ifreq of zeroes is one without a name.
    let mut request: libc::ifreq = unsafe { zeroed() };
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains('\0') {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

/// A new network namespace for the calling thread alone.
#[cfg(any(test, feature = "test-util"))]
pub(crate) fn unshare_network() -> io::Result<()> {
    // SAFETY: CLONE_NEWNET changes which network the thread sees, and nothing about its memory or descriptors.
    checked(unsafe { libc::unshare(libc::CLONE_NEWNET) })?;
    Ok(())
}

fn checked(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
