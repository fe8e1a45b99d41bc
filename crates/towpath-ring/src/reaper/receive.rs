//! Sockets on which no descriptor is expected.
//!
//! A process may pass descriptors over any Unix socket (unix(7), `SCM_RIGHTS`). read(2) and recv(2) close them in the
//! calling thread, and so does a recvmsg(2) whose control buffer is too small. Both may block.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::{PeerKey, Reaper};
use crate::shm::sys;

/// Result of [`Reaper::receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plain {
    /// Bytes received; 0 at the end of the stream.
    pub bytes: usize,
    /// The peer passed descriptors, which is a violation. They are being closed. End the connection.
    pub passed_descriptors: bool,
}

#[cfg(any(test, feature = "test-util"))]
thread_local! {
    /// Makes [`refuse_descriptors`] do nothing in this thread, as on Linux before 6.16.
    pub static ACCEPT_DESCRIPTORS: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Refuses descriptors on a Unix socket: the peer's sendmsg(2) fails with EPERM (`SO_PASSRIGHTS`, Linux 6.16).
///
/// Sockets accepted from a listener inherit the setting; call this before listen(2). On older kernels the call does
/// nothing, so [`Reaper::receive`] is necessary in any case.
///
/// # Errors
/// setsockopt(2) failed for another reason than an old kernel: the descriptor is not a Unix socket.
pub fn refuse_descriptors(socket: impl AsFd) -> io::Result<()> {
    #[cfg(any(test, feature = "test-util"))]
    if ACCEPT_DESCRIPTORS.get() {
        return Ok(());
    }
    pass_rights(socket.as_fd(), false)
}

/// Permits descriptors on a Unix socket again, after [`refuse_descriptors`] for its listener.
///
/// # Errors
/// As for [`refuse_descriptors`].
pub fn accept_descriptors(socket: impl AsFd) -> io::Result<()> {
    pass_rights(socket.as_fd(), true)
}

fn pass_rights(socket: BorrowedFd<'_>, permitted: bool) -> io::Result<()> {
    match sys::set_passrights(socket, permitted) {
        // An older kernel.
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(()),
        other => other,
    }
}

impl Reaper {
    /// Receives bytes from a Unix socket on which no descriptor is expected, like read(2). Descriptors are closed on
    /// a helper thread and counted.
    ///
    /// Blocks if the socket does. A packet socket's longer message is truncated, as by recv(2). Close the socket
    /// with [`drop_for`](Self::drop_for) too: unread messages may contain descriptors.
    ///
    /// Limit: if this process has no free descriptor (EMFILE), the kernel closes the passed descriptors in the
    /// calling thread.
    ///
    /// # Errors
    /// recvmsg(2) failed; [`io::ErrorKind::WouldBlock`] and [`io::ErrorKind::Interrupted`] as for read(2).
    pub fn receive(&self, peer: PeerKey, socket: impl AsFd, into: &mut [u8]) -> io::Result<Plain> {
        let (bytes, fds, lost) = sys::read_with_fds(socket.as_fd(), into)?;
        let passed_descriptors = lost || !fds.is_empty();
        if passed_descriptors {
            self.close_passed(peer, fds);
        }
        Ok(Plain { bytes, passed_descriptors })
    }

    /// Closes descriptors that a peer passed against the rules, and counts the message.
    #[cold]
    pub(crate) fn close_passed(&self, peer: PeerKey, fds: Vec<OwnedFd>) {
        self.count_passed_descriptors();
        if !fds.is_empty() {
            self.drop_for(peer, fds);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Write};
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;
    use crate::reaper::Limits;

    const PEER: PeerKey = PeerKey::User(1);

    #[test]
    fn bytes_come_as_from_read_and_descriptors_go_to_a_helper() {
        let reaper = Reaper::new(Limits::default());
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut buffer = [0; 16];
        let mut receive = || reaper.receive(PEER, &ours, &mut buffer);
        assert_eq!(receive().unwrap_err().kind(), ErrorKind::WouldBlock);
        (&theirs).write_all(b"plain").unwrap();
        assert_eq!(receive().unwrap(), Plain { bytes: 5, passed_descriptors: false });
        // As many as the kernel permits in one message (SCM_MAX_FD).
        let (watched, passed) = UnixStream::pair().unwrap();
        let theirs = OwnedFd::from(theirs);
        sys::tests::send_copies(&theirs, b"four", passed.as_fd(), 253);
        assert_eq!(receive().unwrap(), Plain { bytes: 4, passed_descriptors: true });
        drop(passed);
        // The last copy is closed: the other end sees it.
        let mut byte = [0];
        assert_eq!(reaper.receive(PEER, &watched, &mut byte).unwrap().bytes, 0);
        while reaper.stats().pending > 0 {
            std::thread::yield_now();
        }
        let stats = reaper.stats();
        assert_eq!((stats.passed_descriptors, stats.dropped), (1, 1));
        // Not by a drop: a child that another test has forked holds a copy until it calls execve(2).
        rustix::net::shutdown(&theirs, rustix::net::Shutdown::Both).unwrap();
        assert_eq!(receive().unwrap().bytes, 0, "the end of the stream");
    }

    #[test]
    fn a_listener_that_refuses_descriptors_and_an_old_kernel() {
        let directory = tempfile::tempdir().unwrap();
        for old in [false, true] {
            let path = directory.path().join(format!("s{old}"));
            let listener = UnixListener::bind(&path).unwrap();
            ACCEPT_DESCRIPTORS.set(old);
            refuse_descriptors(&listener).unwrap();
            ACCEPT_DESCRIPTORS.set(false);
            let client = OwnedFd::from(UnixStream::connect(&path).unwrap());
            let (server, _) = listener.accept().unwrap();
            let refused = !sys::tests::try_send_copies(&client, b"x", client.as_fd(), 1);
            let supported = sys::set_passrights(server.as_fd(), false).is_ok();
            assert_eq!(refused, supported && !old);
            accept_descriptors(&server).unwrap();
            assert!(sys::tests::try_send_copies(&client, b"x", client.as_fd(), 1));
        }
    }

    #[test]
    fn another_kind_of_socket_is_an_error() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let supported =
            UnixStream::pair().is_ok_and(|(one, _)| sys::set_passrights(one.as_fd(), false).is_ok());
        assert_eq!(refuse_descriptors(&socket).is_err(), supported);
    }
}
