//! The system calls that rustix does not have, and memory that is mapped. The only file of this crate with `unsafe`.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::marker::PhantomData;
use std::mem::zeroed;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::slice;
use std::sync::Arc;

use libc::{c_int, socklen_t};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
#[cfg(feature = "tokio")]
use tokio::io::{Interest, unix::AsyncFd};

/// include/uapi/linux/tcp.h, TCP_ULP and TCP_INFO; the place of `tcpi_rtt`, microseconds.
const TCP_ULP: c_int = 31;
const TCP_INFO: c_int = 11;
const TCPI_RTT: usize = 68;
/// include/uapi/linux/udp.h.
const UDP_SEGMENT: c_int = 103;
/// What one huge page has; also the alignment of transparent ones (x86-64 and arm64 with pages of 4 KiB).
const HUGE: usize = 2 << 20;
const PAGE: usize = 4096;

/// Bytes of one call: an iovec whose memory lives at least as long as the call.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Part<'a>(libc::iovec, PhantomData<&'a [u8]>);

impl<'a> Part<'a> {
    pub(crate) const NONE: Self = Self(libc::iovec { iov_base: null_mut(), iov_len: 0 }, PhantomData);

    pub(crate) fn of(bytes: &'a [u8]) -> Self {
        let iov_base = bytes.as_ptr().cast_mut().cast();
        Self(libc::iovec { iov_base, iov_len: bytes.len() }, PhantomData)
    }
}

/// One send(2) or sendmsg(2). Never blocks, raises no signal, never asks for MSG_FASTOPEN (which is copied together with the flag, or
/// refused).
pub(crate) fn send(socket: BorrowedFd<'_>, parts: &[Part<'_>], zerocopy: bool) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | if zerocopy { libc::MSG_ZEROCOPY } else { 0 };
    if let [Part(iovec, _)] = parts {
        // send(2): the kernel has no msghdr and no array to read.
        // SAFETY: memory that is borrowed until this call returns, and only read; the kernel pins what it reads later.
        let sent = unsafe { libc::send(socket.as_raw_fd(), iovec.iov_base, iovec.iov_len, flags) };
        return usize::try_from(sent).map_err(|_| io::Error::last_os_error());
    }
    // SAFETY: a msghdr of zeroes is one without address, data and control.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = parts.as_ptr().cast_mut().cast();
    message.msg_iovlen = parts.len();
    // SAFETY: `Part` is an iovec (repr(transparent)) of memory that is borrowed until this call returns; what the kernel
    // reads after it, it pins itself. It writes through none of the pointers.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Control messages of one entry of the error queue. 128 bytes are enough for what the kernel puts there today.
#[repr(align(8))]
pub(crate) struct Control([u8; 512]);

impl Control {
    pub(crate) const fn new() -> Self {
        Self([0; 512])
    }
}

/// One entry of the error queue: its control messages, or none when the queue is empty. Never blocks.
///
/// # Errors
/// InvalidData: the control messages did not fit, so that a notification is lost for ever.
pub(crate) fn recv_error<'a>(
    socket: BorrowedFd<'_>,
    control: &'a mut Control,
) -> io::Result<Option<&'a [u8]>> {
    // SAFETY: a msghdr of zeroes is one without address, data and control.
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

/// SO_ZEROCOPY, set and read back: a kernel or a socket that ignores it would never notify.
pub(crate) fn arm(socket: BorrowedFd<'_>) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1)?;
    let mut value = [0; 4];
    get(socket, libc::SOL_SOCKET, libc::SO_ZEROCOPY, &mut value)?;
    if c_int::from_ne_bytes(value) == 0 {
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok(())
}

/// UDP_SEGMENT: each call's bytes become datagrams of `bytes`.
pub(crate) fn segment(socket: BorrowedFd<'_>, bytes: u16) -> io::Result<()> {
    set(socket, libc::IPPROTO_UDP, UDP_SEGMENT, bytes.into())
}

/// Whether an upper-layer protocol (kTLS) sits on this TCP socket.
pub(crate) fn has_ulp(socket: BorrowedFd<'_>) -> bool {
    let mut name = [0; 16];
    matches!(get(socket, libc::IPPROTO_TCP, TCP_ULP, &mut name), Ok(len) if len > 0 && name[0] != 0)
}

/// The round-trip time of a TCP connection, microseconds.
pub(crate) fn rtt(socket: BorrowedFd<'_>) -> Option<u32> {
    let mut info = [0; 128];
    let len = get(socket, libc::IPPROTO_TCP, TCP_INFO, &mut info).ok()?;
    Some(u32::from_ne_bytes(*info[..len].get(TCPI_RTT..)?.first_chunk()?))
}

fn set(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    let len = size_of::<c_int>() as socklen_t;
    // SAFETY: the kernel reads `len` bytes of `value`, which lives until the call returns.
    let done = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), len) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The length of the option's value.
fn get(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: &mut [u8]) -> io::Result<usize> {
    let mut len = value.len() as socklen_t;
    // SAFETY: the kernel writes at most `len` bytes into `value`, and the length.
    let done =
        unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, value.as_mut_ptr().cast(), &mut len) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok((len as usize).min(value.len())) }
}

/// Whether the other end of a connected socket is this machine, as far as addresses tell.
pub(crate) fn is_local(socket: BorrowedFd<'_>) -> bool {
    let address = |any| Some(SocketAddr::try_from(any?).ok()?.ip().to_canonical());
    let peer: Option<IpAddr> = address(rustix::net::getpeername(socket).ok().flatten());
    let own = address(rustix::net::getsockname(socket).ok());
    peer.is_some_and(|peer| peer.is_loopback() || Some(peer) == own)
}

/// Registers a descriptor with tokio's reactor, for reading.
#[cfg(feature = "tokio")]
pub(crate) fn reactor(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd names one open descriptor, always the same, until it is dropped.
    let registered = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
    Ok(registered?)
}

/// The kind of pages that memory was got in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Ordinary pages.
    Ordinary,
    /// Reserved huge pages (MAP_HUGETLB).
    Huge,
    /// Ordinary memory that the kernel was asked to back by huge pages (MADV_HUGEPAGE), and may have.
    Transparent,
}

/// Mapped memory, unmapped when the last user is gone. Pages that the kernel still sends from live on.
#[derive(Debug)]
struct Mapping {
    base: NonNull<c_void>,
    len: usize,
}

// SAFETY: a mapping is plain memory and belongs to no thread; who may read and write it is said by `Slot` and `Region`.
unsafe impl Send for Mapping {}
// SAFETY: as above; `Mapping` itself gives no access.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(base: *mut c_void, len: usize) -> io::Result<Self> {
        let base = NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len })
    }

    fn anonymous(len: usize, flags: MapFlags) -> io::Result<Self> {
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let base = unsafe {
            mmap_anonymous(null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | flags)
        }?;
        Self::new(base, len)
    }

    fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: the mapping is whole, and advice about huge pages changes no contents.
        Ok(unsafe { madvise(self.base.as_ptr(), self.len, advice) }?)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped by us, and each `Slot` and `Region` in it held it by an Arc.
        let done = unsafe { munmap(self.base.as_ptr(), self.len) };
        debug_assert!(done.is_ok(), "{done:?}");
    }
}

/// A part of private memory that one owner alone reads and writes.
#[derive(Debug)]
pub(crate) struct Slot {
    mapping: Arc<Mapping>,
    offset: usize,
    len: usize,
}

impl Slot {
    /// `count` slots of `len` bytes, whole pages; huge ones where asked for and to be had.
    pub(crate) fn allocate(count: usize, len: usize, huge: bool) -> io::Result<(Vec<Self>, Pages)> {
        let len = len.max(1).next_multiple_of(PAGE);
        let total = count.checked_mul(len).filter(|total| *total > 0).ok_or(io::ErrorKind::InvalidInput)?;
        let (mapping, pages) = if huge {
            match Mapping::anonymous(total.next_multiple_of(HUGE), MapFlags::HUGETLB | MapFlags::POPULATE) {
                Ok(mapping) => (mapping, Pages::Huge),
                Err(_) => {
                    let mapping = Mapping::anonymous(total.next_multiple_of(HUGE) + HUGE, MapFlags::empty())?;
                    let pages = mapping.advise(Advice::LinuxHugepage).map(|()| Pages::Transparent);
                    (mapping, pages.unwrap_or(Pages::Ordinary))
                }
            }
        } else {
            let mapping = Mapping::anonymous(total, MapFlags::empty())?;
            // Refused only by a kernel without huge pages, where it is not needed.
            let _ = mapping.advise(Advice::LinuxNoHugepage);
            (mapping, Pages::Ordinary)
        };
        let start = match pages {
            Pages::Transparent => mapping.base.as_ptr().align_offset(HUGE),
            _ => 0,
        };
        let mapping = Arc::new(mapping);
        let slots =
            (0..count).map(|at| Self { mapping: mapping.clone(), offset: start + at * len, len }).collect();
        Ok((slots, pages))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `allocate` cuts the mapping into slots that do not overlap, none is ever copied, and this one is borrowed:
        // nobody writes. Fresh anonymous memory is zeroes.
        unsafe { slice::from_raw_parts(self.start(), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and this one is borrowed mutably: nobody else reads.
        unsafe { slice::from_raw_parts_mut(self.start(), self.len) }
    }

    fn start(&self) -> *mut u8 {
        self.mapping.base.as_ptr().cast::<u8>().wrapping_add(self.offset)
    }
}

/// Memory of others, mapped for reading: what is sent from it is opaque, and may change while it is looked at.
#[derive(Clone, Debug)]
pub struct Region(Arc<Mapping>);

impl Region {
    /// Maps the first `len` bytes of `fd` (a memfd, a file of tmpfs) for reading.
    ///
    /// # Errors
    /// What mmap(2) and fstat(2) say; InvalidInput when `fd` has fewer bytes. A descriptor whose size may still shrink should
    /// be sealed (F_SEAL_SHRINK): sending from what is gone is an error (EFAULT), looking at it is SIGBUS.
    pub fn map(fd: &OwnedFd, len: usize) -> io::Result<Self> {
        let size = u64::try_from(rustix::fs::fstat(fd.as_fd())?.st_size).unwrap_or(0);
        if len == 0 || size < len as u64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("a region of {len} bytes, of a descriptor that has {size}"),
            ));
        }
        // SAFETY: a new mapping, at an address of the kernel's choice, for reading.
        let base = unsafe { mmap(null_mut(), len, ProtFlags::READ, MapFlags::SHARED, fd, 0) }?;
        Ok(Self(Arc::new(Mapping::new(base, len)?)))
    }

    /// Bytes that it has.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Never: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Bytes to send; none when they are not all in it.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Option<Part<'_>> {
        offset.checked_add(len).filter(|end| *end <= self.0.len)?;
        let iov_base = self.0.base.as_ptr().wrapping_byte_add(offset);
        Some(Part(libc::iovec { iov_base, iov_len: len }, PhantomData))
    }

    /// Copies bytes out, as they are at that moment, one by one.
    pub(crate) fn copy_out(&self, offset: usize, into: &mut [u8]) {
        let Some(part) = self.part(offset, into.len()) else { return };
        for (at, byte) in into.iter_mut().enumerate() {
            let from = part.0.iov_base.cast::<u8>().wrapping_add(at);
            // SAFETY: `part` checked that it is inside the mapping, which is readable. Volatile: another process may write it.
            *byte = unsafe { from.read_volatile() };
        }
    }
}
