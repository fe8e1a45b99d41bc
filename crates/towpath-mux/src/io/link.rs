//! A connection's socket, with TLS over it or without.

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

use super::admission::{Entry, Peer};
use super::tls::{Session, Shake};
use crate::mux::{Cause, Outcome, Transmit};

/// Buffers in one writev(2) (include/uapi/linux/uio.h, UIO_MAXIOV).
const IOV: usize = 1024;

/// See the file's text.
#[derive(Debug)]
pub(super) struct Link {
    /// Elsewhere: it is large, and most have none.
    tls: Option<Box<Session>>,
    /// Before the descriptor: whoever admitted the peer hears of its end before the 5-tuple is free.
    entry: Option<Entry>,
    fd: OwnedFd,
}

impl Link {
    pub(super) fn new(fd: OwnedFd, tls: Option<Session>, entry: Option<Entry>) -> Self {
        Self { tls: tls.map(Box::new), entry, fd }
    }

    /// The socket for whoever attached it; `None` under TLS, where a descriptor is not all there is.
    pub(super) fn hand_back(&self) -> Option<OwnedFd> {
        if self.tls.is_some() {
            return None;
        }
        self.fd.try_clone().ok()
    }

    /// Who was admitted.
    pub(super) fn peer(&self) -> Option<&Peer> {
        self.entry.as_ref().map(Entry::peer)
    }

    /// Shakes hands, as far as that goes now.
    pub(super) fn shake(&self) -> Shake {
        match &self.tls {
            Some(tls) => tls.shake(&self.fd),
            None => Shake::Done { early: Vec::new(), over: false },
        }
    }

    /// Reads what fits behind what the buffer holds; whether that was the end. Nothing that could be read now is no error.
    pub(super) fn read(&self, buffer: &mut Vec<u8>) -> Result<bool, Cause> {
        if let Some(tls) = &self.tls {
            return tls.read(&self.fd, buffer);
        }
        match rustix::io::read(&self.fd, rustix::buffer::spare_capacity(buffer)) {
            Ok(came) => Ok(came == 0),
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(errno) => Err(Cause::Reset(errno.raw_os_error())),
        }
    }

    /// Writes as much as the socket takes.
    pub(super) fn write(&self, transmit: &mut Transmit) -> Outcome {
        if let Some(tls) = &self.tls {
            return tls.write(&self.fd, transmit);
        }
        while !transmit.is_empty() {
            let slices: Vec<_> = transmit.slices().take(IOV).map(IoSlice::new).collect();
            let wrote = rustix::io::writev(&self.fd, &slices);
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
