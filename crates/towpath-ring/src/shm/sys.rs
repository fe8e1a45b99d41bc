//! System calls, with errors that a user can act on. Nearly all through rustix, which makes them safe.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, sockopt::Timeout,
};
use rustix::thread::MembarrierCommand;

/// Seals of memory that only its creator writes.
pub(crate) const READ_ONLY: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);
/// Seals of memory that the client writes.
pub(crate) const WRITABLE: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
/// Seals of a one-shot message: no process can write it.
pub(crate) const FROZEN: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE).union(SealFlags::SEAL);

/// Most descriptors in one message: those of a lane, and its socket.
pub(crate) const MAX_FDS: usize = 5;

/// Lets other processes make this one pass a full fence (membarrier(2), Linux 4.16).
pub(crate) fn membarrier_register() -> io::Result<()> {
    Ok(rustix::thread::membarrier(MembarrierCommand::RegisterGlobalExpedited)?)
}

#[cfg(test)]
thread_local! {
    /// Makes [`membarrier`] fail in this thread, as a seccomp(2) filter installed after the attach does.
    pub(crate) static REFUSE_MEMBARRIER: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    /// Number of [`wait`] calls in this thread.
    pub(crate) static WAITS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Makes every running thread of every registered process execute a full fence.
pub(crate) fn membarrier() -> io::Result<()> {
    #[cfg(test)]
    if REFUSE_MEMBARRIER.get() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(rustix::thread::membarrier(MembarrierCommand::GlobalExpedited)?)
}

/// CPU of the calling thread, counted from 0.
pub(crate) fn cpu() -> usize {
    rustix::thread::sched_getcpu()
}

/// Yields the CPU (sched_yield(2)).
pub(crate) fn give_way() {
    rustix::thread::sched_yield();
}

/// Creates a memfd of `bytes`, all allocated: a lack of memory is an error here and not a SIGBUS later.
pub(crate) fn memfd(name: &str, bytes: usize) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Linux 6.3 introduced MFD_NOEXEC_SEAL; older kernels return EINVAL.
    let fd = rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|_| rustix::fs::memfd_create(name, flags))?;
    allocate(&fd, bytes)?;
    Ok(fd)
}

/// Allocates `bytes`. Any signal can interrupt fallocate(2) before it did anything, even a signal without a handler.
fn allocate(fd: &OwnedFd, bytes: usize) -> io::Result<()> {
    let allocate = || rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, bytes as u64);
    Ok(rustix::io::retry_on_intr(allocate)?)
}

/// Bytes of a huge page: the smallest size of x86-64 and most other architectures.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Creates a memfd of `bytes`, a multiple of [`HUGE_PAGE`], in huge pages. Fails if the system has not enough of
/// them.
pub(crate) fn huge_memfd(name: &str, bytes: usize) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let fd = rustix::fs::memfd_create(name, flags)?;
    allocate(&fd, bytes)?;
    Ok(fd)
}

/// Creates a memfd with these bytes, sealed against every change.
pub(crate) fn frozen(mut bytes: &[u8]) -> io::Result<OwnedFd> {
    let fd = memfd("towpath-message", bytes.len())?;
    while !bytes.is_empty() {
        let written = rustix::io::retry_on_intr(|| rustix::io::write(&fd, bytes))?;
        bytes = &bytes[written..];
    }
    seal(&fd, FROZEN)?;
    Ok(fd)
}

/// Appends the first `len` bytes of `fd` to `into`.
pub(crate) fn read_exactly(fd: &OwnedFd, len: usize, into: &mut Vec<u8>) -> io::Result<()> {
    let start = into.len();
    into.resize(start + len, 0);
    let mut done = 0;
    while done < len {
        match rustix::io::pread(fd, &mut into[start + done..], done as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

pub(crate) fn seal(fd: &OwnedFd, seals: SealFlags) -> io::Result<()> {
    Ok(rustix::fs::fcntl_add_seals(fd, seals)?)
}

/// Returns the seals and the size of `fd`.
pub(crate) fn sealed(fd: BorrowedFd<'_>) -> io::Result<(SealFlags, u64)> {
    let seals = rustix::fs::fcntl_get_seals(fd)?;
    let size = u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0);
    Ok((seals, size))
}

const SOCKET: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Creates a socket at `path` that does not listen.
pub(crate) fn bound(path: &Path) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SOCKET, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Begins to listen.
pub(crate) fn listen_on(socket: &OwnedFd, backlog: i32) -> io::Result<()> {
    Ok(rustix::net::listen(socket, backlog)?)
}

/// Listens at `path`.
#[cfg(test)]
pub(crate) fn listen(path: &Path, backlog: i32) -> io::Result<OwnedFd> {
    let socket = bound(path)?;
    listen_on(&socket, backlog)?;
    Ok(socket)
}

/// Sets the mode of an open file, also of an `O_PATH` descriptor: fchmodat2(2), before Linux 6.6 through
/// `/proc/self/fd`.
pub(crate) fn chmod(file: BorrowedFd<'_>, mode: u32) -> io::Result<()> {
    let path = c"".as_ptr();
    // SAFETY: the kernel reads a terminated string, which is constant.
    #[allow(unsafe_code)]
    let done =
        unsafe { libc::syscall(libc::SYS_fchmodat2, file.as_raw_fd(), path, mode, libc::AT_EMPTY_PATH) };
    if done == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        // EPERM: a seccomp filter that is older than the system call.
        error if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
            chmod_by_proc(file, mode)
        }
        error => Err(error),
    }
}

/// chmod(2) of the link in `/proc/self/fd`, which leads to the open file itself.
fn chmod_by_proc(file: BorrowedFd<'_>, mode: u32) -> io::Result<()> {
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::chmod(link, rustix::fs::Mode::from_raw_mode(mode))?)
}

/// Accepts the next connection. `None` if none is pending.
pub(crate) fn accept(listener: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    match rustix::net::accept_with(listener, SOCKET) {
        Ok(fd) => Ok(Some(fd)),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Returns true if a process listens at `path`. Never blocks.
pub(crate) fn is_listened_on(path: &Path) -> io::Result<bool> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SOCKET, None)?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        // AGAIN: a listener with a full backlog. PROTOTYPE: a listening socket of another type.
        Ok(()) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::PROTOTYPE) => Ok(true),
        Err(rustix::io::Errno::CONNREFUSED) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Connects to `path`; the socket is non-blocking afterwards. Fails with [`io::ErrorKind::WouldBlock`] if the
/// listener's backlog stays full for `patience`.
pub(crate) fn connect(path: &Path, patience: Duration) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC, // blocking: connect(2) waits while the backlog is full
        None,
    )?;
    let (address, end) = (SocketAddrUnix::new(path)?, Instant::now() + patience);
    loop {
        // SO_SNDTIMEO limits connect(2) (socket(7)); 0 means no limit.
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        rustix::net::sockopt::set_socket_timeout(&socket, Timeout::Send, Some(left))?;
        match rustix::net::connect(&socket, &address) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    }
    rustix::io::ioctl_fionbio(&socket, true)?;
    Ok(socket)
}

/// Shuts the connection down for every descriptor of the socket.
pub(crate) fn shut(socket: &OwnedFd) {
    // An error means that it is shut down already.
    let _ = rustix::net::shutdown(socket, Shutdown::Both);
}

/// Creates two connected sockets.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SOCKET, None)?)
}

/// Returns the peer's process, user and group that the kernel recorded at connect(2). rustix refuses process id 0, which stands
/// for a process outside of this PID namespace.
pub(crate) fn peer(socket: BorrowedFd<'_>) -> io::Result<(u32, u32, u32)> {
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    let (to, room) = ((&raw mut cred).cast(), &raw mut length);
    // SAFETY: the descriptor is open while it is borrowed. `to` points to a ucred of `length` bytes, three numbers
    // for which every value is valid. The kernel writes there during the call only (getsockopt(2)).
    #[allow(unsafe_code)]
    let done = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, room) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((cred.pid.unsigned_abs(), cred.uid, cred.gid))
}

/// Permits or refuses descriptors on a Unix socket (`SO_PASSRIGHTS`, Linux 6.16). ENOPROTOOPT on older kernels.
pub(crate) fn set_passrights(socket: BorrowedFd<'_>, permitted: bool) -> io::Result<()> {
    /// include/uapi/asm-generic/socket.h; neither libc nor rustix has it.
    const SO_PASSRIGHTS: libc::c_int = 83;
    let value = libc::c_int::from(permitted);
    let (from, length) = ((&raw const value).cast(), size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the descriptor is open while it is borrowed. `from` points to an int, `length` bytes, that the kernel
    // reads during the call only (setsockopt(2)).
    #[allow(unsafe_code)]
    let done = unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, from, length) };
    if done != 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Opens the file of a memfd again (`/proc/self/fd`, proc(5)): a new open file. Never blocks: `EAGAIN` if another process
/// has a lease on the file (fcntl(2)).
pub(crate) fn reopen(fd: BorrowedFd<'_>, write: bool) -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    let access = if write { OFlags::RDWR } else { OFlags::RDONLY };
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    Ok(rustix::fs::open(path, access | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?)
}

/// Handle for the end of another process.
#[derive(Debug)]
pub(crate) enum Process {
    /// A pidfd, readable when the process ends.
    Seen(OwnedFd),
    Ended,
    /// The process is in a PID namespace that this process does not see, or the kernel has no pidfd_open(2).
    Unseen,
}

/// Opens process `pid`. Fails if this process has no descriptor or memory left.
pub(crate) fn process(pid: u32) -> io::Result<Process> {
    use rustix::io::Errno;
    let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) else {
        return Ok(Process::Unseen);
    };
    match rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
        Ok(fd) => Ok(Process::Seen(fd)),
        Err(Errno::SRCH) => Ok(Process::Ended),
        Err(e @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => Err(e.into()),
        Err(_) => Ok(Process::Unseen),
    }
}

/// A pidfd of process `pid`, or none if it cannot be opened.
pub(crate) fn pidfd(pid: u32) -> Option<OwnedFd> {
    match process(pid) {
        Ok(Process::Seen(fd)) => Some(fd),
        _ => None,
    }
}

/// Result of a non-blocking send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    Yes,
    /// The socket buffer is full.
    Full,
    /// The peer is disconnected.
    Gone,
}

/// Sends one message with descriptors. Never blocks, raises no signal.
pub(crate) fn send(socket: &OwnedFd, message: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<Sent> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match rustix::net::sendmsg(socket, &[IoSlice::new(message)], &mut control, flags) {
        Ok(_) => Ok(Sent::Yes),
        // ETOOMANYREFS: too many descriptors in flight to this peer (unix(7)).
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOBUFS | rustix::io::Errno::TOOMANYREFS) => {
            Ok(Sent::Full)
        }
        Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET | rustix::io::Errno::NOTCONN) => {
            Ok(Sent::Gone)
        }
        Err(e) => Err(e.into()),
    }
}

/// Result of a non-blocking receive.
#[derive(Debug)]
pub(crate) enum Received {
    /// A message of this many bytes, with these descriptors.
    Message(usize, Vec<OwnedFd>),
    /// A message of this many bytes. Only these descriptors of it were received, because this process has too many
    /// files open (EMFILE).
    Short(usize, Vec<OwnedFd>),
    Nothing,
    /// The peer is disconnected.
    End,
}

/// Most descriptors in one message of any peer (`SCM_MAX_FD`, include/net/scm.h). The kernel closes descriptors that
/// the control buffer has no room for in the receiving thread, which may block.
const ANY_FDS: usize = 253;

/// Receives bytes as recvmsg(2) with `flags`, with all descriptors that come with them. Returns also whether
/// descriptors were lost, because this process has too many files open (EMFILE).
fn recv_any_fds(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    flags: RecvFlags,
) -> rustix::io::Result<(usize, Vec<OwnedFd>, bool)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ANY_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let got = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(into)], &mut control, flags)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok((got.bytes, fds, got.flags.contains(ReturnFlags::CTRUNC)))
}

/// Receives bytes with their descriptors, as read(2): blocks if the socket does.
pub(crate) fn read_with_fds(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
) -> io::Result<(usize, Vec<OwnedFd>, bool)> {
    Ok(recv_any_fds(socket, into, RecvFlags::empty())?)
}

/// Receives one message with its descriptors. Never blocks.
pub(crate) fn recv_with_fds(socket: &OwnedFd, into: &mut [u8]) -> io::Result<Received> {
    let mut receive = || recv_any_fds(socket.as_fd(), into, RecvFlags::DONTWAIT);
    let mut got = receive();
    // A peer that closes without reading resets the connection. The reset is reported once, before the data that the
    // peer had sent.
    if matches!(got, Err(rustix::io::Errno::CONNRESET)) {
        got = receive();
    }
    // A closed seqpacket socket reads 0 bytes (socket(7)); this protocol sends no empty messages.
    match got {
        Ok((0, fds, _)) if fds.is_empty() => Ok(Received::End),
        Ok((bytes, fds, true)) => Ok(Received::Short(bytes, fds)),
        Ok((bytes, fds, false)) => Ok(Received::Message(bytes, fds)),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(Received::Nothing),
        Err(rustix::io::Errno::CONNRESET | rustix::io::Errno::NOTCONN) => Ok(Received::End),
        Err(e) => Err(e.into()),
    }
}

/// The error for a lack of descriptors (EMFILE).
pub(crate) fn no_descriptor() -> io::Error {
    rustix::io::Errno::MFILE.into()
}

/// Creates a descriptor set that is readable when one of its members is (epoll(7)).
pub(crate) fn watch_set() -> io::Result<OwnedFd> {
    Ok(rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC)?)
}

/// Adds `fd` to the set.
pub(crate) fn watch(set: &OwnedFd, fd: &OwnedFd) -> io::Result<()> {
    use rustix::event::epoll::{EventData, EventFlags, add};
    Ok(add(set, fd, EventData::new_u64(0), EventFlags::IN)?)
}

/// Removes `fd` from the set. Closing it is not enough while a copy of it is open.
pub(crate) fn unwatch(set: &OwnedFd, fd: &OwnedFd) -> io::Result<()> {
    Ok(rustix::event::epoll::delete(set, fd)?)
}

/// Registers a descriptor with the reactor of the current tokio runtime.
#[cfg(feature = "tokio")]
pub(crate) fn reactor(fd: OwnedFd) -> io::Result<tokio::io::unix::AsyncFd<OwnedFd>> {
    use tokio::io::{Interest, unix::AsyncFd};
    // SAFETY: an OwnedFd stays open until it is dropped, and always names the same descriptor; the AsyncFd owns it.
    #[allow(unsafe_code)]
    let registered = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
    Ok(registered?)
}

/// Waits at most `timeout` until one of `fds` is readable or hung up; returns whether one is. Returns false after a
/// signal.
pub(crate) fn wait(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<bool> {
    match wait_interruptibly(fds, timeout) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
        other => other,
    }
}

/// Like [`wait`], but fails with EINTR after a signal.
pub(crate) fn wait_interruptibly(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<bool> {
    #[cfg(test)]
    WAITS.set(WAITS.get() + 1);
    let mut set: Vec<PollFd<'_>> =
        fds.iter().map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)).collect();
    Ok(poll(&mut set, timeout.map(timespec).as_ref())? > 0)
}

/// Waits at most `timeout` until the peer has closed the socket; returns whether it has. Unread data does not
/// matter.
pub(crate) fn hung_up(socket: &OwnedFd, timeout: Duration) -> io::Result<bool> {
    let mut set = [PollFd::new(socket, PollFlags::RDHUP)];
    Ok(poll(&mut set, Some(&timespec(timeout)))? > 0)
}

fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Sends a message with `count` copies of a descriptor; returns whether the kernel took it.
    pub(crate) fn try_send_copies(socket: &OwnedFd, bytes: &[u8], fd: BorrowedFd<'_>, count: usize) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ANY_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = vec![fd; count];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).is_ok()
    }

    /// Like [`try_send_copies`], for a socket that permits descriptors.
    pub(crate) fn send_copies(socket: &OwnedFd, bytes: &[u8], fd: BorrowedFd<'_>, count: usize) {
        assert!(try_send_copies(socket, bytes, fd, count));
    }

    /// Makes a memfd of huge pages without allocating them.
    pub(crate) fn hugetlb(bytes: u64) -> OwnedFd {
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let fd = rustix::fs::memfd_create("huge", flags).unwrap();
        rustix::fs::ftruncate(&fd, bytes).unwrap();
        fd
    }
}
