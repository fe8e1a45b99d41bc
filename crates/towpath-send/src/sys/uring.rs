//! io_uring back end: IORING_OP_SEND_ZC and IORING_OP_SENDMSG_ZC (Linux 6.1; the copied flag, 6.2).
//!
//! A request has two completions. The first has the result, and IORING_CQE_F_MORE if the second one follows. The second one,
//! IORING_CQE_F_NOTIF, states that the kernel no longer reads the memory. Each accepted request gets the next number ([`Requests`]), as
//! a call with MSG_ZEROCOPY does, so the engine is the same for both. The notifications of several requests are not merged and may be out of
//! order. They arrive after a reset, too, and close(2) of the ring does not wait for them.
//!
//! Requests have MSG_DONTWAIT: the kernel executes them during the submission and never hands them to a worker thread, so the memory
//! of the msghdr is read before `send` returns.

use std::io;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use io_uring::register::Restriction;
use io_uring::{IoUring, Probe, cqueue, opcode, squeue, types};

use super::Part;
use crate::requests::Requests;

/// include/uapi/linux/io_uring.h.
const IORING_SEND_ZC_REPORT_USAGE: u16 = 1 << 3;
const IORING_NOTIF_USAGE_ZC_COPIED: u32 = 1 << 31;
/// Requests are submitted one at a time.
const ENTRIES: u32 = 4;
/// Limit on outstanding notifications, and the size of the completion queue.
pub(crate) const MAX_NUMBERS: usize = 1024;
const COMPLETIONS: u32 = 2 * MAX_NUMBERS as u32;

/// The completions of one socket.
pub(crate) struct Uring {
    ring: IoUring,
    requests: Requests,
    /// The kernel refused a request, which is still in the submission queue. Nothing is submitted any more.
    broken: bool,
}

impl Uring {
    /// Creates a ring, if the kernel has the operations and permits their use (ENOSYS, seccomp, kernel.io_uring_disabled).
    ///
    /// The ring accepts the two operations of this file and no registration (IORING_REGISTER_RESTRICTIONS): it cannot open files or
    /// sockets, which a seccomp filter would not see.
    pub(crate) fn open() -> Option<Self> {
        let mut builder = IoUring::builder();
        let ring =
            builder.setup_r_disabled().setup_coop_taskrun().setup_cqsize(COMPLETIONS).build(ENTRIES).ok()?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe).ok()?;
        let supported =
            [opcode::SendZc::CODE, opcode::SendMsgZc::CODE].iter().all(|code| probe.is_supported(*code));
        if !supported {
            return None;
        }
        let mut allowed = [opcode::SendZc::CODE, opcode::SendMsgZc::CODE].map(Restriction::sqe_op);
        ring.submitter().register_restrictions(&mut allowed).ok()?;
        ring.submitter().register_enable_rings().ok()?;
        Some(Self { ring, requests: Requests::new(0), broken: false })
    }

    /// Sends without a copy. Never blocks and raises no signal. Returns the number of bytes accepted.
    ///
    /// # Errors
    /// Those of sendmsg(2) with MSG_ZEROCOPY; the limit on locked memory is ENOBUFS. EOPNOTSUPP if the ring does not work.
    pub(crate) fn send(&mut self, socket: BorrowedFd<'_>, parts: &[Part<'_>]) -> io::Result<usize> {
        if self.broken {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let (fd, flags) = (types::Fd(socket.as_raw_fd()), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        let id = self.requests.begin();
        // SAFETY: an all-zero msghdr is valid: no address, data or control. It lives until `submit` has returned.
        let mut message: libc::msghdr = unsafe { zeroed() };
        let entry = match parts {
            [Part(iovec, _)] if u32::try_from(iovec.iov_len).is_ok() => {
                opcode::SendZc::new(fd, iovec.iov_base.cast_const().cast(), iovec.iov_len as u32)
                    .flags(flags)
                    .zc_flags(IORING_SEND_ZC_REPORT_USAGE)
                    .build()
            }
            _ => {
                message.msg_iov = parts.as_ptr().cast_mut().cast();
                message.msg_iovlen = parts.len();
                opcode::SendMsgZc::new(fd, &raw const message)
                    .flags(flags as u32)
                    .ioprio(IORING_SEND_ZC_REPORT_USAGE)
                    .build()
            }
        };
        let (result, more) = self.submit(&entry.user_data(id), id)?;
        self.requests.handle_result(id, result, more).map_err(|errno| {
            io::Error::from_raw_os_error(if errno == libc::ENOMEM { libc::ENOBUFS } else { errno })
        })
    }

    /// Executes one request. Returns its result, and whether a notification follows.
    fn submit(&mut self, entry: &squeue::Entry, id: u64) -> io::Result<(i32, bool)> {
        // SAFETY: what the entry refers to is borrowed until this function has returned, and the kernel has read it by then. The
        // buffers are read until their notification; the engine keeps them (see `send` in `sys.rs` for the other back end).
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.map_err(|_| io::Error::from_raw_os_error(libc::EOPNOTSUPP))?;
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                // EBUSY: completions overflowed; they are taken below.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EBUSY)) => {}
                Err(_) => {
                    self.broken = true;
                    return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
                }
            }
            if let Some(result) = self.reap(Some(id)) {
                return Ok(result);
            }
        }
    }

    /// Takes all completions from the ring. Returns that of the request `id`.
    fn reap(&mut self, id: Option<u64>) -> Option<(i32, bool)> {
        let mut found = None;
        for entry in self.ring.completion() {
            if !cqueue::notif(entry.flags()) {
                if id == Some(entry.user_data()) {
                    found = Some((entry.result(), cqueue::more(entry.flags())));
                }
            } else {
                let copied = entry.result() as u32 & IORING_NOTIF_USAGE_ZC_COPIED != 0;
                self.requests.handle_notification(entry.user_data(), copied);
            }
        }
        found
    }

    /// Returns a completed number, and whether the kernel copied.
    pub(crate) fn completed(&mut self) -> Option<(u32, bool)> {
        self.requests.poll_completed().or_else(|| {
            self.reap(None);
            self.requests.poll_completed()
        })
    }
}

impl AsFd for Uring {
    /// Readable when the ring has completions.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring owns its descriptor, and the borrow keeps the ring.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").field("requests", &self.requests).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes io_uring_setup(2) fail in this thread, as seccomp profiles of containers do.
    fn refuse_io_uring() {
        let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
        let equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        let ret = (libc::BPF_RET | libc::BPF_K) as u16;
        let errno = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
        let row = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
        // The offset of `nr` in struct seccomp_data is 0.
        let mut program = [
            row(load, 0, 0, 0),
            row(equal, 0, 1, libc::SYS_io_uring_setup as u32),
            row(ret, 0, 0, errno),
            row(ret, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        // SAFETY: takes integers only.
        assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
        // SAFETY: the kernel reads the program, which lives until the call returns.
        let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) };
        assert_eq!(set, 0, "{}", io::Error::last_os_error());
    }

    #[test]
    fn a_ring_accepts_only_its_operations() {
        // The kernel may have no io_uring: then the other back end is used.
        let Some(mut uring) = Uring::open() else { return };
        let id = uring.requests.begin();
        let (result, _) = uring.submit(&opcode::Nop::new().build().user_data(id), id).unwrap();
        assert_eq!(result, -libc::EACCES);
        assert!(uring.ring.submitter().register_files(&[0]).is_err());
    }

    #[test]
    fn a_refused_ring_falls_back() {
        use crate::{BackEnd, Options, Sender};
        std::thread::spawn(|| {
            refuse_io_uring();
            assert!(Uring::open().is_none());
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let options = Options { back_end: BackEnd::IoUring, ..Options::default() };
            let mut sender = Sender::new(stream, options).unwrap();
            assert_eq!(sender.back_end(), BackEnd::MsgZerocopy);
            sender.send(vec![1; 100]).unwrap();
            assert_eq!(std::io::Read::read(&mut listener.accept().unwrap().0, &mut [0; 200]).unwrap(), 100);
        })
        .join()
        .unwrap();
    }
}
