//! The socket of a connection, with or without TLS.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, Shutdown, sendmsg, shutdown, sockopt};

use super::admission::{Entry, Peer};
use super::connection_info::{self, ConnectionInfo};
use super::hand_over::Resume;
use super::sys::{try_unacknowledged, unacknowledged};
use super::tls::{HandshakeStep, Session};
use super::unix_peer::UnixPeer;
use super::zerocopy_sender::{ZerocopySender, ZerocopySenders};
use crate::mux::{self, Cause, Outcome, Transmit};

/// Maximum number of buffers for sendmsg(2) (include/uapi/linux/uio.h, UIO_MAXIOV).
const IOV: usize = 1024;
/// Size of the buffer for data to discard.
const DROPPED: usize = 64 << 10;

/// Result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadOutcome {
    /// No data is left; epoll reports new data.
    WouldBlock,
    /// There may be more.
    More,
    /// End of the stream.
    Eof,
}

/// See the documentation of this module.
#[derive(Debug)]
pub(super) struct Link {
    /// Boxed: large, and absent in most connections.
    tls: Option<Box<Session>>,
    /// Dropped before the descriptor: the admission policy learns of the end before the 5-tuple is free.
    entry: Option<Entry>,
    /// Zero-copy sender, opened for the first long message; `None` if the socket does not support it.
    zerocopy_sender: OnceLock<Option<Mutex<Box<dyn ZerocopySender>>>>,
    /// The zero-copy sender does not use the socket any more, or another process used one. Relaxed: no other memory depends on it.
    copies: AtomicBool,
    /// SO_ERROR, which the zero-copy sender has read and cleared.
    broken: OnceLock<i32>,
    /// The peer of a Unix socket.
    unix: Option<UnixPeer>,
    /// Address of the peer, over IP.
    address: Option<SocketAddr>,
    /// Address of the listener that accepted it.
    listener: Option<Arc<str>>,
    /// `None` only during the drop.
    fd: Option<OwnedFd>,
}

impl Link {
    pub(super) fn new(fd: OwnedFd, tls: Option<Session>, entry: Option<Entry>) -> Self {
        let unix = UnixPeer::of(&fd);
        // The peer may have gone.
        let address = if unix.is_some() { None } else { rustix::net::getpeername(&fd).ok().flatten() };
        let address = address.and_then(|address| address.try_into().ok());
        let (tls, zerocopy_sender, broken) = (tls.map(Box::new), OnceLock::new(), OnceLock::new());
        let copies = AtomicBool::new(false);
        Self { tls, entry, zerocopy_sender, copies, broken, unix, address, listener: None, fd: Some(fd) }
    }

    /// Sets the address of the listener that accepted it.
    pub(super) fn accepted_by(mut self, listener: Option<Arc<str>>) -> Self {
        self.listener = listener;
        self
    }

    /// With `copies`, another process has sent from this socket without a copy: this one does not.
    pub(super) fn copying(mut self, copies: bool) -> Self {
        *self.copies.get_mut() = copies;
        self
    }

    fn fd(&self) -> &OwnedFd {
        self.fd.as_ref().expect("the descriptor is present until the drop")
    }

    /// The socket to give back. Returns the link under TLS, whose session cannot be given back, and with a zero-copy sender.
    pub(super) fn hand_back(link: Arc<Self>) -> Result<OwnedFd, Arc<Self>> {
        // Completions of the zero-copy sender arrive in the error queue, which has one reader.
        let sends = matches!(link.zerocopy_sender.get(), Some(Some(_))) && !link.copies.load(Relaxed);
        if link.tls.is_some() || sends {
            return Err(link);
        }
        match Arc::try_unwrap(link) {
            Ok(mut link) => Ok(link.fd.take().expect("the descriptor is present until the drop")),
            // A writer still holds it.
            Err(link) => link.fd().try_clone().map_err(|_| link),
        }
    }

    /// The data with which another process continues this connection, besides the socket.
    pub(super) fn resume(&self, core: mux::Resume) -> Resume {
        let listener = self.listener.as_deref().unwrap_or_default().to_owned();
        Resume { core, listener, copies: self.copies.load(Relaxed) }
    }

    /// Sends copies from here on. Returns true if the zero-copy sender has no send in flight and does not use the socket any more, or
    /// if there is none.
    pub(super) fn release_zerocopy(&self) -> bool {
        let Some(sender) = self.zerocopy_sender.get_or_init(|| None) else { return true };
        if !self.copies.load(Relaxed) && sender.lock().unwrap_or_else(PoisonError::into_inner).release() {
            self.copies.store(true, Relaxed);
        }
        self.copies.load(Relaxed)
    }

    /// Returns true without TLS: the socket's bytes are the bytes of the messages.
    pub(super) const fn is_plain(&self) -> bool {
        self.tls.is_none()
    }

    /// Address of the peer, over IP.
    pub(super) const fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// The admitted peer.
    pub(super) fn peer(&self) -> Option<&Peer> {
        self.entry.as_ref().map(Entry::peer)
    }

    /// Continues the handshake as far as the socket allows.
    pub(super) fn advance_handshake(&self) -> HandshakeStep {
        match &self.tls {
            Some(tls) => tls.advance_handshake(self.fd(), self.unix.as_ref()),
            None => HandshakeStep::Done,
        }
    }

    /// Returns, once, the bytes that the peer sent after the handshake, and true at the end of its stream.
    pub(super) fn early(&self) -> (Vec<u8>, bool) {
        self.tls.as_ref().map_or((Vec::new(), false), |tls| tls.early())
    }

    /// Reads into the spare capacity of `buffer`. EAGAIN is not an error.
    pub(super) fn read(&self, buffer: &mut Vec<u8>) -> Result<ReadOutcome, Cause> {
        if let Some(tls) = &self.tls {
            return tls.read(self.fd(), self.unix.as_ref(), buffer);
        }
        loop {
            let read = match &self.unix {
                None => rustix::io::read(self.fd(), rustix::buffer::spare_capacity(buffer)),
                Some(peer) => peer.receive(self.fd(), buffer),
            };
            return match read {
                // The zero-copy sender has consumed the error; the kernel reports only the end.
                Ok(0) => self.broken.get().map_or(Ok(ReadOutcome::Eof), |&errno| Err(Cause::Reset(errno))),
                Ok(_) if buffer.len() == buffer.capacity() => Ok(ReadOutcome::More),
                Ok(_) if self.unix.is_some() => continue,
                Ok(_) | Err(Errno::AGAIN) => Ok(ReadOutcome::WouldBlock),
                Err(Errno::INTR) => Ok(ReadOutcome::More),
                Err(Errno::PERM) if self.unix.is_some() => Err(Cause::Descriptors),
                Err(errno) => Err(Cause::Reset(errno.raw_os_error())),
            };
        }
    }

    /// Writes as much as the socket accepts.
    pub(super) fn write(&self, transmit: &mut Transmit, zerocopy: Option<&dyn ZerocopySenders>) -> Outcome {
        if let Some(tls) = &self.tls {
            return tls.write(self.fd(), transmit);
        }
        if let Some(zerocopy) = zerocopy
            && !self.copies.load(Relaxed)
            && let Some(zerocopy_sender) = self.zerocopy_sender(transmit, zerocopy)
        {
            return zerocopy_sender.lock().unwrap_or_else(PoisonError::into_inner).write(transmit);
        }
        while !transmit.is_empty() {
            let slices: Vec<_> = transmit.slices(IOV).map(IoSlice::new).collect();
            // As writev(2), but without SIGPIPE, which the application may not ignore.
            let wrote = sendmsg(self.fd(), &slices, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL);
            drop(slices);
            match wrote {
                Ok(bytes) => transmit.advance(bytes),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Outcome::Blocked,
                Err(errno) => return Outcome::Failed(errno.raw_os_error()),
            }
        }
        Outcome::Taken
    }
}

impl Link {
    /// The zero-copy sender of this connection. Opened for the first long message.
    fn zerocopy_sender(
        &self,
        transmit: &Transmit,
        zerocopy: &dyn ZerocopySenders,
    ) -> Option<&Mutex<Box<dyn ZerocopySender>>> {
        if let Some(zerocopy_sender) = self.zerocopy_sender.get() {
            return zerocopy_sender.as_ref();
        }
        let least = zerocopy.min_bytes();
        if !transmit.has_long(least) {
            return None;
        }
        self.zerocopy_sender.get_or_init(|| zerocopy.open(self.fd().as_fd()).map(Mutex::new)).as_ref()
    }

    /// Handles EPOLLERR. Returns true if it was caused by zero-copy completions only.
    pub(super) fn handle_error_queue(&self) -> bool {
        let Some(Some(zerocopy_sender)) = self.zerocopy_sender.get() else { return false };
        if self.copies.load(Relaxed) {
            return false;
        }
        let mut zerocopy_sender = zerocopy_sender.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match zerocopy_sender.handle_error_queue() {
                Ok(true) => return true,
                // The loop ends when all sends in flight are reported, because no thread sends at the same time.
                Ok(false) => {}
                Err(errno) => {
                    // The first error is the cause.
                    let _ = self.broken.set(errno);
                    return false;
                }
            }
        }
    }

    /// Shuts down the connection for writing.
    pub(super) fn shut(&self) {
        if let Some(tls) = &self.tls {
            tls.close(self.fd());
        }
        // Fails if the connection is broken.
        let _ = shutdown(self.fd(), Shutdown::Write);
    }

    /// Reads and discards what has arrived. Returns true at the end of the stream or on an error.
    pub(super) fn discard(&self) -> bool {
        let mut dropped = Vec::with_capacity(DROPPED);
        loop {
            dropped.clear();
            let read = match &self.unix {
                None => rustix::io::read(self.fd(), rustix::buffer::spare_capacity(&mut dropped)),
                Some(peer) => peer.receive(self.fd(), &mut dropped),
            };
            return match read {
                Ok(bytes) => bytes == 0,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {
                    // Completions of the zero-copy sender may have arrived.
                    self.handle_error_queue();
                    false
                }
                Err(_) => true,
            };
        }
    }

    /// Number of bytes sent that the peer has not acknowledged. 0 if unknown.
    pub(super) fn unacknowledged(&self) -> usize {
        unacknowledged(self.fd().as_fd())
    }

    /// Number of accepted bytes that the peer has not acknowledged, and whether the connection has ended. `None` if unknown.
    /// Under TLS, and on Unix sockets, the number may be too high.
    pub(super) fn unacked(&self) -> (Option<usize>, bool) {
        let bytes = try_unacknowledged(self.fd().as_fd());
        // After the number: a Unix socket drops what its peer had not read when it reports the end.
        let over = is_hung_up(self.fd());
        (bytes.filter(|_| !(over && self.unix.is_some())), over)
    }

    /// Addresses and TLS names.
    pub(super) fn info(&self) -> ConnectionInfo {
        let peer = match self.address {
            Some(address) => address.to_string(),
            None => connection_info::peer(self.fd()),
        };
        let info = ConnectionInfo {
            peer,
            local: connection_info::local(self.fd()),
            listener: self.listener.as_deref().unwrap_or_default().to_owned(),
            tls: self.tls.is_some(),
            ..ConnectionInfo::default()
        };
        match &self.tls {
            Some(tls) => tls.names(info),
            None => info,
        }
    }

    /// Makes the close reset the connection (SO_LINGER with 0 s, socket(7)). The close does not wait.
    pub(super) fn reset(&self) {
        // Also keeps TLS from announcing the end.
        let _ = self.broken.set(Errno::CONNRESET.raw_os_error());
        let _ = sockopt::set_socket_linger(self.fd(), Some(Duration::ZERO));
    }

    /// Returns true if there are unread bytes.
    pub(super) fn has_unread(&self) -> bool {
        rustix::io::ioctl_fionread(self.fd()).is_ok_and(|bytes| bytes > 0)
    }

    /// Error number of a broken connection. The kernel reports it once.
    pub(super) fn error(&self) -> Option<i32> {
        if let Some(&errno) = self.broken.get() {
            return Some(errno);
        }
        match rustix::net::sockopt::socket_error(self.fd()) {
            Ok(Ok(())) => None,
            Ok(Err(errno)) | Err(errno) => Some(errno.raw_os_error()),
        }
    }
}

/// Returns true if poll(2) reports a hang-up or an error.
fn is_hung_up(fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::empty())];
    let polled = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    polled.is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd().as_fd()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(tls) = &self.tls
            && self.broken.get().is_none()
        {
            tls.close(self.fd());
        }
        if let Some(peer) = &self.unix {
            peer.close(self.fd.take());
        }
    }
}
