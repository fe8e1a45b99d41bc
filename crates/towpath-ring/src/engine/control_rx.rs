//! Messages that a client sends over the socket: doorbells, and the memfds of one-shot messages.
//!
//! A descriptor is kept until its frame is read. The number of kept descriptors is limited; further ones are closed.
//! A memfd is read with pread(2), never mapped: no action of its sender can fault this process.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::handshake::messages::{NOTICE, Notice};
use crate::shm::seq::Seq;
use crate::shm::sys::{self, Received};

/// Messages read from the socket at a time.
const NOTICES: usize = 64;

#[derive(Debug)]
pub(crate) struct ControlRx {
    socket: OwnedFd,
    /// One-shot messages by sequence number, with their length and memfd. The memfd is missing if this process had
    /// no free descriptor.
    announced: Vec<(Seq, u64, Option<OwnedFd>)>,
    descriptors_max: usize,
    oneshot_max: u64,
    invalid: u64,
    /// Memfds lost because this process had no free descriptor.
    fd_shortages: u64,
    /// The last one-shot message was missing for that reason.
    short: bool,
    /// A doorbell was read since this was reset.
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

    /// Reads pending messages, a bounded number.
    pub(crate) fn listen(&mut self) {
        // A client that keeps sending could otherwise keep the engine here.
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
            // More descriptors would let a client fill the engine's descriptor table.
            (Ok(Notice::OneShot { seq, len }), Some(fd))
                if count == 1 && self.announced.len() < self.descriptors_max =>
            {
                self.announced.push((seq, len, Some(fd)));
            }
            // Descriptors of an invalid message are closed here.
            _ => self.invalid += 1,
        }
    }

    /// Handles a message whose descriptor was lost for lack of a free one. That is not a violation by the client.
    #[cold]
    fn handle_short(&mut self, message: &[u8]) {
        match Notice::parse(message) {
            Ok(Notice::OneShot { seq, len }) if self.announced.len() < self.descriptors_max => {
                self.announced.push((seq, len, None));
                self.fd_shortages += 1;
                let count = self.fd_shortages;
                if count.is_power_of_two() {
                    log::warn!(
                        "lost a message of {len} bytes: this process has too many open files to receive its memfd ({count} so far)"
                    );
                }
            }
            _ => self.invalid += 1,
        }
    }

    /// Largest number of descriptors kept.
    pub(crate) fn descriptors_max(&self) -> usize {
        self.descriptors_max
    }

    /// Invalid messages since the last call.
    pub(crate) fn take_invalid(&mut self) -> u64 {
        std::mem::take(&mut self.invalid)
    }

    /// Returns true if the client has closed the socket.
    pub(crate) fn is_ended(&self) -> bool {
        self.ended
    }

    /// Appends the `len` bytes announced for message `which`. Returns false if the memfd is missing or not as
    /// announced.
    pub(crate) fn oneshot(&mut self, which: Seq, len: u32, into: &mut Vec<u8>) -> bool {
        let Some((announced, fd)) = self.take(which) else { return false };
        let Some(fd) = fd else {
            self.short = true;
            return false;
        };
        let Ok((seals, size)) = sys::sealed(fd.as_fd()) else { return false };
        // Without the seals, the content could change between a check and its use, or the file could be of a kind
        // whose reading blocks.
        let safe = seals.contains(sys::FROZEN) && announced == u64::from(len) && size >= announced;
        safe && announced > 0
            && announced <= self.oneshot_max
            && sys::read_exactly(&fd, len as usize, into).is_ok()
    }

    /// Returns true if a one-shot message was missing, since the last call, because this process had no free
    /// descriptor.
    pub(crate) fn take_short(&mut self) -> bool {
        std::mem::take(&mut self.short)
    }

    /// Closes the memfd of a message that is discarded.
    pub(crate) fn forget(&mut self, which: Seq) {
        drop(self.take(which));
    }

    /// Removes the announced length and memfd of message `which`.
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
