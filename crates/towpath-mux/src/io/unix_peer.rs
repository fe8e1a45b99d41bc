//! Receiving from a Unix socket, whose peer may pass descriptors (`closer.rs`).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::net::AddressFamily;
use rustix::net::sockopt::{socket_domain, socket_peercred};

use super::sys::Received;
use super::{closer, sys};

/// The peer of a Unix socket.
#[derive(Debug)]
pub(super) struct UnixPeer {
    /// Its user id.
    user: u32,
    /// It has passed descriptors.
    passed: OnceLock<()>,
}

impl UnixPeer {
    /// The peer of `fd`, which refuses descriptors from now on. `None` if this is not a Unix socket.
    pub(super) fn of(fd: &OwnedFd) -> Option<Self> {
        if socket_domain(fd) != Ok(AddressFamily::UNIX) {
            return None;
        }
        sys::refuse_descriptors(fd.as_fd());
        let user = socket_peercred(fd).map_or(u32::MAX, |peer| peer.uid.as_raw());
        Some(Self { user, passed: OnceLock::new() })
    }

    /// Receives into the spare capacity of `buffer`, like read(2). Descriptors are closed elsewhere.
    ///
    /// A read that returns less than its space may leave bytes in the socket: it ends after bytes that carried descriptors
    /// (unix(7)).
    ///
    /// # Errors
    ///
    /// EPERM for the second message with descriptors: a passed descriptor occupies a slot of this process until it is closed.
    pub(super) fn receive(&self, fd: &OwnedFd, buffer: &mut Vec<u8>) -> Result<usize, Errno> {
        let before = buffer.len();
        let Received { bytes, fds, passed, .. } = sys::receive(fd.as_fd(), buffer)?;
        let taken = self.take(fds, passed);
        if taken.is_err() {
            buffer.truncate(before);
        }
        taken.map(|()| bytes)
    }

    /// As [`receive`](Self::receive), over the bytes of `buffer`.
    #[cfg(feature = "tls")]
    pub(super) fn receive_slice(&self, fd: &OwnedFd, buffer: &mut [u8]) -> Result<usize, Errno> {
        let Received { bytes, fds, passed, .. } = sys::receive_slice(fd.as_fd(), buffer)?;
        self.take(fds, passed).map(|()| bytes)
    }

    fn take(&self, fds: Vec<OwnedFd>, passed: bool) -> Result<(), Errno> {
        closer::close(self.user, fds);
        if passed && self.passed.set(()).is_err() { Err(Errno::PERM) } else { Ok(()) }
    }

    /// Closes the socket elsewhere: it may have unread descriptors.
    pub(super) fn close(&self, fd: Option<OwnedFd>) {
        closer::close(self.user, fd.into_iter().collect());
    }
}
