//! Messages that a client sends over the socket: doorbells, and the memfds of one-shot messages.
//!
//! A descriptor is kept until its frame is read. The number of kept descriptors is limited; further ones are closed.
//! A memfd is read with pread(2), never mapped: no action of its sender can fault this process. F_GET_SEALS is the
//! first call on a descriptor: it fails for all but memfds, and never blocks. Every descriptor is closed by the reaper.
//!
//! Doorbells have a budget. An honest client rings for news (a verdict or a message), so a poll that finds news credits one
//! doorbell. In each second, [`FALSE_DOORBELLS`] doorbells without such a poll are permitted; further ones count as invalid
//! messages.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::handshake::messages::{NOTICE, Notice, is_hello};
use crate::reaper::{Reaped, Teardown};
use crate::shm::seq::Seq;
use crate::shm::sys::{self, Received};

/// Messages read from the socket at a time.
const NOTICES: usize = 64;
/// Doorbells without news that are permitted in [`DOORBELL_TIME`].
pub(crate) const FALSE_DOORBELLS: u32 = 64;
/// In nanoseconds.
const DOORBELL_TIME: u64 = 1_000_000_000;
/// Descriptors of invalid messages after which [`ControlRx::listen`] stops, until the violations were counted.
const EXCESS: usize = 64;
/// Used descriptors that are given to the reaper together.
const USED: usize = 16;

#[derive(Debug)]
pub(crate) struct ControlRx {
    socket: Reaped<OwnedFd>,
    /// One-shot messages by sequence number, with their length and memfd. The memfd is missing if this process had
    /// no free descriptor.
    announced: Vec<(Seq, u64, Option<OwnedFd>)>,
    /// Descriptors to be closed.
    used: Vec<OwnedFd>,
    /// Descriptors of invalid messages so far.
    excess: usize,
    descriptors_max: usize,
    oneshot_max: u64,
    invalid: u64,
    /// Memfds lost because this process had no free descriptor.
    fd_shortages: u64,
    /// The last one-shot message was missing for that reason.
    short: bool,
    /// A doorbell was read since this was reset.
    pub(crate) rung: bool,
    /// Doorbells in excess of the polls with news.
    false_doorbells: u32,
    /// When the budget of doorbells is renewed.
    renewal: u64,
    ended: bool,
}

impl ControlRx {
    pub(crate) fn new(socket: Reaped<OwnedFd>, descriptors_max: usize, oneshot_max: u64) -> Self {
        Self {
            socket,
            announced: Vec::new(),
            used: Vec::new(),
            excess: 0,
            descriptors_max,
            oneshot_max,
            invalid: 0,
            fd_shortages: 0,
            short: false,
            rung: false,
            false_doorbells: 0,
            renewal: 0,
            ended: false,
        }
    }

    /// Reads pending messages, a bounded number.
    pub(crate) fn listen(&mut self) {
        // A client that keeps sending could otherwise keep the engine here, or use up its descriptors.
        let end = self.excess + EXCESS;
        for _ in 0..NOTICES {
            if self.excess > end {
                return;
            }
            let mut message = [0; NOTICE];
            match sys::recv_with_fds(&self.socket, &mut message) {
                Ok(Received::Message(len, fds)) => self.handle(&message[..len], fds),
                Ok(Received::Short(len, fds)) => {
                    self.close(fds);
                    self.handle_short(&message[..len]);
                }
                Ok(Received::Nothing) => return,
                Ok(Received::End) | Err(_) => {
                    self.ended = true;
                    return;
                }
            }
        }
    }

    fn handle(&mut self, message: &[u8], mut fds: Vec<OwnedFd>) {
        // The answer to a second renewal: a successor ended between the two. It counts as a doorbell, so that its number is bounded.
        let message: &[u8] = if is_hello(message) { &Notice::Doorbell.emit() } else { message };
        let count = fds.len();
        match (Notice::parse(message), fds.pop()) {
            (Ok(Notice::Doorbell), None) => {
                self.rung = true;
                self.false_doorbells = self.false_doorbells.saturating_add(1);
                // Each doorbell costs a turn of the engine.
                self.invalid += u64::from(self.false_doorbells > FALSE_DOORBELLS);
            }
            // More descriptors would let a client fill the engine's descriptor table.
            (Ok(Notice::OneShot { seq, len }), Some(fd))
                if count == 1 && self.announced.len() < self.descriptors_max =>
            {
                self.announced.push((seq, len, Some(fd)));
            }
            (_, None) => self.invalid += 1,
            (_, Some(fd)) => {
                self.invalid += 1;
                fds.push(fd);
                self.excess += count;
                self.socket.reaper().close_passed(self.socket.peer(), fds);
            }
        }
    }

    /// Returns true if a doorbell came without news so far.
    #[inline]
    pub(crate) fn awaits_news(&self) -> bool {
        self.false_doorbells > 0
    }

    /// Notes that a poll has found news.
    #[inline]
    pub(crate) fn note_news(&mut self) {
        self.false_doorbells = self.false_doorbells.saturating_sub(1);
    }

    /// Renews the budget of doorbells when its time has come.
    pub(crate) fn renew(&mut self, now: u64) {
        if now >= self.renewal {
            self.renewal = now.saturating_add(DOORBELL_TIME);
            self.false_doorbells = 0;
        }
    }

    /// Gives used descriptors to the reaper.
    #[inline]
    pub(crate) fn close_used(&mut self) {
        if !self.used.is_empty() {
            let used = std::mem::take(&mut self.used);
            self.close(used);
        }
    }

    #[cold]
    fn close(&self, fds: Vec<OwnedFd>) {
        if !fds.is_empty() {
            self.socket.reaper().drop_for(self.socket.peer(), fds);
        }
    }

    fn retire(&mut self, fd: OwnedFd) {
        self.used.push(fd);
        if self.used.len() >= USED {
            self.close_used();
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
        let read = self.read(&fd, announced, len, into);
        self.retire(fd);
        read
    }

    fn read(&self, fd: &OwnedFd, announced: u64, len: u32, into: &mut Vec<u8>) -> bool {
        let Ok((seals, size)) = sys::sealed(fd.as_fd()) else { return false };
        // Without the seals, the content could change between a check and its use, or the file could be of a kind
        // whose reading blocks.
        let safe = seals.contains(sys::FROZEN) && announced == u64::from(len) && size >= announced;
        safe && announced > 0
            && announced <= self.oneshot_max
            && sys::read_exactly(fd, len as usize, into).is_ok()
    }

    /// Returns true if a one-shot message was missing, since the last call, because this process had no free
    /// descriptor.
    pub(crate) fn take_short(&mut self) -> bool {
        std::mem::take(&mut self.short)
    }

    /// Closes the memfd of a message that is discarded.
    pub(crate) fn forget(&mut self, which: Seq) {
        if let Some((_, Some(fd))) = self.take(which) {
            self.retire(fd);
        }
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

impl Drop for ControlRx {
    fn drop(&mut self) {
        let kept = self.announced.drain(..).filter_map(|(.., fd)| fd);
        let fds: Vec<_> = self.used.drain(..).chain(kept).collect();
        let teardown: &Teardown = self.socket.teardown();
        teardown.add(fds);
    }
}

impl AsFd for ControlRx {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
