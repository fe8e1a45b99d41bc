//! A connection's socket, with TLS over it or without.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SendAncillaryBuffer, SendFlags, Shutdown, sendmsg, shutdown};

use super::admission::{Entry, Peer};
use super::sys::unacknowledged;
use super::tls::{HandshakeStep, Session};
use super::zerocopy_sender::{ZerocopySender, ZerocopySenders};
use crate::mux::{Cause, Outcome, Transmit};

/// Buffers in one sendmsg(2) (include/uapi/linux/uio.h, UIO_MAXIOV).
const IOV: usize = 1024;
/// Bytes that are dropped at once.
const DROPPED: usize = 64 << 10;

/// How far a read got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadOutcome {
    /// Nothing is left to be read; epoll says when there is.
    WouldBlock,
    /// There may be more.
    More,
    /// The peer has sent its last byte.
    Eof,
}

/// See the file's text.
#[derive(Debug)]
pub(super) struct Link {
    /// Elsewhere: it is large, and most have none.
    tls: Option<Box<Session>>,
    /// Before the descriptor: whoever admitted the peer hears of its end before the 5-tuple is free.
    entry: Option<Entry>,
    /// Another way to write, once there was something for it; none where there is none.
    zerocopy_sender: OnceLock<Option<Mutex<Box<dyn ZerocopySender>>>>,
    /// SO_ERROR as the zerocopy_sender found it, which cleared it.
    broken: OnceLock<i32>,
    /// A read of less than there was room for may leave some: it ends behind bytes that descriptors came with (unix(7)).
    unix: bool,
    /// Who is at the other end, over IP.
    address: Option<SocketAddr>,
    fd: OwnedFd,
}

impl Link {
    pub(super) fn new(fd: OwnedFd, tls: Option<Session>, entry: Option<Entry>) -> Self {
        let unix = rustix::net::sockopt::socket_domain(&fd) == Ok(AddressFamily::UNIX);
        // It may have gone already.
        let address = if unix { None } else { rustix::net::getpeername(&fd).ok().flatten() };
        let address = address.and_then(|address| address.try_into().ok());
        let (tls, zerocopy_sender, broken) = (tls.map(Box::new), OnceLock::new(), OnceLock::new());
        Self { tls, entry, zerocopy_sender, broken, unix, address, fd }
    }

    /// The socket for whoever attached it; `None` under TLS, where a descriptor is not all there is.
    pub(super) fn hand_back(&self) -> Option<OwnedFd> {
        // What a zerocopy_sender has in flight is told in the error queue, which has one reader.
        if self.tls.is_some() || matches!(self.zerocopy_sender.get(), Some(Some(_))) {
            return None;
        }
        self.fd.try_clone().ok()
    }

    /// Whether what is read of the socket is what messages are made of.
    pub(super) const fn is_plain(&self) -> bool {
        self.tls.is_none()
    }

    /// Who is at the other end, over IP.
    pub(super) const fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Who was admitted.
    pub(super) fn peer(&self) -> Option<&Peer> {
        self.entry.as_ref().map(Entry::peer)
    }

    /// Shakes hands, as far as that goes now.
    pub(super) fn advance_handshake(&self) -> HandshakeStep {
        match &self.tls {
            Some(tls) => tls.advance_handshake(&self.fd),
            None => HandshakeStep::Done,
        }
    }

    /// What the peer sent right behind the handshake, and whether it sends no more; once.
    pub(super) fn early(&self) -> (Vec<u8>, bool) {
        self.tls.as_ref().map_or((Vec::new(), false), |tls| tls.early())
    }

    /// Reads what fits behind what the buffer holds. Nothing that could be read now is no error.
    pub(super) fn read(&self, buffer: &mut Vec<u8>) -> Result<ReadOutcome, Cause> {
        if let Some(tls) = &self.tls {
            return tls.read(&self.fd, buffer);
        }
        loop {
            return match rustix::io::read(&self.fd, rustix::buffer::spare_capacity(buffer)) {
                // A zerocopy_sender was told why, and the system says no more than that it is over.
                Ok(0) => self.broken.get().map_or(Ok(ReadOutcome::Eof), |&errno| Err(Cause::Reset(errno))),
                Ok(_) if buffer.len() == buffer.capacity() => Ok(ReadOutcome::More),
                Ok(_) if self.unix => continue,
                Ok(_) | Err(Errno::AGAIN) => Ok(ReadOutcome::WouldBlock),
                Err(Errno::INTR) => Ok(ReadOutcome::More),
                Err(errno) => Err(Cause::Reset(errno.raw_os_error())),
            };
        }
    }

    /// Writes as much as the socket takes.
    pub(super) fn write(&self, transmit: &mut Transmit, zerocopy: Option<&dyn ZerocopySenders>) -> Outcome {
        if let Some(tls) = &self.tls {
            return tls.write(&self.fd, transmit);
        }
        if let Some(zerocopy) = zerocopy
            && let Some(zerocopy_sender) = self.zerocopy_sender(transmit, zerocopy)
        {
            return zerocopy_sender.lock().unwrap_or_else(PoisonError::into_inner).write(transmit);
        }
        while !transmit.is_empty() {
            let slices: Vec<_> = transmit.slices().take(IOV).map(IoSlice::new).collect();
            // As writev(2), but a peer that is gone is no signal: whoever embeds this may not ignore SIGPIPE.
            let wrote = sendmsg(&self.fd, &slices, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL);
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
    /// The zerocopy_sender of this connection, opened for the first message that is long enough.
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
        self.zerocopy_sender.get_or_init(|| zerocopy.open(self.fd.as_fd()).map(Mutex::new)).as_ref()
    }

    /// EPOLLERR: whether that was about sends of a zerocopy_sender, and nothing is wrong.
    pub(super) fn handle_error_queue(&self) -> bool {
        let Some(Some(zerocopy_sender)) = self.zerocopy_sender.get() else { return false };
        let mut zerocopy_sender = zerocopy_sender.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match zerocopy_sender.handle_error_queue() {
                Ok(true) => return true,
                // No longer than for what is in flight: nobody sends meanwhile.
                Ok(false) => {}
                Err(errno) => {
                    // The first is why.
                    let _ = self.broken.set(errno);
                    return false;
                }
            }
        }
    }

    /// Says to the peer that nothing more comes.
    pub(super) fn shut(&self) {
        if let Some(tls) = &self.tls {
            tls.close(&self.fd);
        }
        // It may have been broken meanwhile.
        let _ = shutdown(&self.fd, Shutdown::Write);
    }

    /// Reads what came and drops it. Whether the peer has sent its last byte, or the connection is gone.
    pub(super) fn discard(&self) -> bool {
        let mut dropped = vec![0; DROPPED];
        loop {
            return match rustix::io::read(&self.fd, &mut dropped[..]) {
                Ok(bytes) => bytes == 0,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {
                    // Completions of a zerocopy_sender are told there.
                    self.handle_error_queue();
                    false
                }
                Err(_) => true,
            };
        }
    }

    /// Bytes that were sent and that the peer has not got, as far as is known.
    pub(super) fn unacknowledged(&self) -> usize {
        unacknowledged(self.fd.as_fd())
    }

    /// Whether bytes have come that nobody has read.
    pub(super) fn has_unread(&self) -> bool {
        rustix::io::ioctl_fionread(&self.fd).is_ok_and(|bytes| bytes > 0)
    }

    /// The error number of a broken connection, as far as the system says it only once.
    pub(super) fn error(&self) -> Option<i32> {
        if let Some(&errno) = self.broken.get() {
            return Some(errno);
        }
        match rustix::net::sockopt::socket_error(&self.fd) {
            Ok(Ok(())) => None,
            Ok(Err(errno)) | Err(errno) => Some(errno.raw_os_error()),
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(tls) = &self.tls {
            tls.close(&self.fd);
        }
    }
}
