//! What a client sends over the socket: doorbells, and the memories of messages that are larger than its ring.
//!
//! A descriptor is kept until the frame that it belongs to is read, and only so many of them: more are closed. A memory is
//! read, never mapped: nothing that its sender does to it can fault in this process.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::handshake::messages::{NOTICE, Notice};
use crate::shm::seq::Seq;
use crate::shm::sys::{self, Received};

/// Most messages read from a client's socket at a time.
const NOTICES: usize = 64;

#[derive(Debug)]
pub(crate) struct ControlRx {
    socket: OwnedFd,
    /// By sequence number; without its memory if this process had no descriptor left for it.
    announced: Vec<(Seq, u64, Option<OwnedFd>)>,
    descriptors_max: usize,
    oneshot_max: u64,
    invalid: u64,
    /// Memories that this process had no descriptor for.
    fd_shortages: u64,
    /// A message was not there because of that.
    short: bool,
    /// A doorbell was read since this was last set back.
    pub(crate) rung: bool,
    ended: bool,
}

impl ControlRx {
    pub(crate) fn new(socket: OwnedFd, descriptors_max: usize, oneshot_max: u64) -> Self {
        Self {
            socket,
            announced: Vec::new(),
            descriptors_max,
            oneshot_max,
            invalid: 0,
            fd_shortages: 0,
            short: false,
            rung: false,
            ended: false,
        }
    }

    /// Reads what has come; a bounded number of messages.
    pub(crate) fn listen(&mut self) {
        // A client that keeps sending could otherwise keep us here.
        for _ in 0..NOTICES {
            let mut message = [0; NOTICE];
            match sys::recv_with_fds::<1>(&self.socket, &mut message) {
                Ok(Received::Message(len, fds)) => self.handle(&message[..len], fds),
                Ok(Received::Short(len)) => self.handle_short(&message[..len]),
                Ok(Received::Nothing) => return,
                Ok(Received::End) | Err(_) => {
                    self.ended = true;
                    return;
                }
            }
        }
    }

    fn handle(&mut self, message: &[u8], fds: Vec<OwnedFd>) {
        let count = fds.len();
        match (Notice::parse(message), fds.into_iter().next()) {
            (Ok(Notice::Doorbell), None) => self.rung = true,
            // More would let a client fill our table of descriptors.
            (Ok(Notice::OneShot { seq, len }), Some(fd))
                if count == 1 && self.announced.len() < self.descriptors_max =>
            {
                self.announced.push((seq, len, Some(fd)));
            }
            // What came with it is closed here.
            _ => self.invalid += 1,
        }
    }

    /// A message whose descriptor there was no room for: that is our fault and not the client's.
    #[cold]
    fn handle_short(&mut self, message: &[u8]) {
        match Notice::parse(message) {
            Ok(Notice::OneShot { seq, len }) if self.announced.len() < self.descriptors_max => {
                self.announced.push((seq, len, None));
                self.fd_shortages += 1;
                let count = self.fd_shortages;
                if count.is_power_of_two() {
                    log::warn!(
                        "a message of {len} bytes is lost: too many files are open here for its memory ({count} so far)"
                    );
                }
            }
            _ => self.invalid += 1,
        }
    }

    /// Most descriptors that are kept.
    pub(crate) fn descriptors_max(&self) -> usize {
        self.descriptors_max
    }

    /// Messages without a meaning since this was last asked.
    pub(crate) fn take_invalid(&mut self) -> u64 {
        std::mem::take(&mut self.invalid)
    }

    /// Whether the client has closed the socket.
    pub(crate) fn is_ended(&self) -> bool {
        self.ended
    }

    /// Appends a copy of the `len` bytes that were announced for that message; false when there is no such memory, or not
    /// as it should be.
    pub(crate) fn oneshot(&mut self, which: Seq, len: u32, into: &mut Vec<u8>) -> bool {
        let Some((announced, fd)) = self.take(which) else { return false };
        let Some(fd) = fd else {
            self.short = true;
            return false;
        };
        let Ok((seals, size)) = sys::sealed(fd.as_fd()) else { return false };
        // Not sealed, it could change between a check of what it says and the use of it; without seals it may be a file
        // of any kind, whose reading blocks.
        let safe = seals.contains(sys::FROZEN) && announced == u64::from(len) && size >= announced;
        safe && announced > 0
            && announced <= self.oneshot_max
            && sys::read_exactly(&fd, len as usize, into).is_ok()
    }

    /// Whether the message that was not there is one that this process had no descriptor for, since this was last asked.
    pub(crate) fn take_short(&mut self) -> bool {
        std::mem::take(&mut self.short)
    }

    /// Closes the memory of a message that is not wanted.
    pub(crate) fn forget(&mut self, which: Seq) {
        drop(self.take(which));
    }

    /// What was announced for that message: its length and its memory.
    fn take(&mut self, which: Seq) -> Option<(u64, Option<OwnedFd>)> {
        let position =
            |announced: &[(Seq, u64, Option<OwnedFd>)]| announced.iter().position(|(w, ..)| *w == which);
        let index = position(&self.announced).or_else(|| {
            self.listen();
            position(&self.announced)
        })?;
        let (_, len, fd) = self.announced.swap_remove(index);
        Some((len, fd))
    }
}

impl AsFd for ControlRx {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
