//! [`super::Retry::Always`]: messages that a socket has accepted and its peer's TCP has not acknowledged.
//!
//! Why: a reset discards the kernel's send buffer. Messages in it were accepted and never arrive.
//!
//! What: a message is kept with the position in the stream at which it ends. The caller reports how many of
//! the accepted bytes are not acknowledged (tcp(7), SIOCOUTQ); messages that end before them are dropped.
//!
//! Invariant: the acknowledged position is never ahead of the peer's. A late report keeps messages for longer
//! than necessary; they may then be sent twice, but they are never lost.

use std::collections::VecDeque;
use std::time::Duration;

use super::event::Event;
use super::tx_queue::Outgoing;
use super::{Mux, psock};
use crate::Time;

/// Interval at which the caller is asked while messages are kept.
const ASK: Duration = Duration::from_millis(50);
/// A writer asks for the unacknowledged bytes when this number of bytes is kept, so that small writes do not
/// cost a second system call.
pub(super) const BATCH: usize = 64 << 10;

/// Kept messages of a connection, oldest first.
#[derive(Debug, Default)]
pub(super) struct Unacked {
    /// Each with the position of its end.
    queue: VecDeque<(u64, Outgoing)>,
    /// Bytes in `queue`.
    bytes: usize,
    /// Number of bytes that the socket has accepted.
    accepted: u64,
    /// When to ask the caller again.
    ask: Option<Time>,
}

impl Unacked {
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) const fn ask(&self) -> Option<Time> {
        self.ask
    }

    /// The socket has accepted `sent` bytes more. `kept`: the whole messages in them, each with the position of
    /// its end from their start. Returns the bytes kept.
    pub(super) fn accept(&mut self, sent: usize, kept: Vec<(usize, Outgoing)>, now: Time) -> usize {
        let before = self.bytes;
        for (end, out) in kept {
            self.bytes += out.bytes.len();
            self.queue.push_back((self.accepted + end as u64, out));
        }
        self.accepted += sent as u64;
        if !self.queue.is_empty() {
            self.ask.get_or_insert(now + ASK);
        }
        self.bytes - before
    }

    /// The peer has acknowledged all but the last `unacked` accepted bytes. Returns the bytes released.
    fn release(&mut self, unacked: usize) -> usize {
        let (before, acked) = (self.bytes, self.accepted.saturating_sub(unacked as u64));
        while self.queue.front().is_some_and(|(end, _)| *end <= acked) {
            self.bytes -= self.queue.pop_front().map_or(0, |(_, out)| out.bytes.len());
        }
        if self.queue.is_empty() {
            self.ask = None;
        }
        before - self.bytes
    }

    /// Takes all messages.
    pub(super) fn take(&mut self) -> impl Iterator<Item = Outgoing> + use<> {
        (self.bytes, self.ask) = (0, None);
        std::mem::take(&mut self.queue).into_iter().map(|(_, out)| out)
    }
}

impl Mux {
    /// [`super::Retry::Always`]: the peer has not acknowledged the last `bytes` of the bytes that the socket
    /// has accepted (SIOCOUTQ). A number that is too high delays the release of messages. A number that is too
    /// low loses messages.
    pub fn handle_unacked(&mut self, id: psock::Id, bytes: usize, now: Time) {
        self.now = self.now.max(now);
        let Some(psock) = self.psocks.get_mut(id) else { return };
        let released = psock.tx.unacked.release(bytes);
        if released == 0 {
            return;
        }
        psock.tx.progress = self.now;
        self.recount(released, 0);
        self.request_transmit(id);
        self.settle(id);
    }

    /// Returns true if messages of this connection are kept.
    pub fn keeps(&self, id: psock::Id) -> bool {
        self.psocks.get(id).is_some_and(|psock| !psock.tx.unacked.is_empty())
    }

    /// Asks for the unacknowledged bytes of a connection that keeps messages.
    pub(super) fn ask_unacked(&mut self, id: psock::Id) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        let unacked = &mut psock.tx.unacked;
        if !unacked.is_empty() {
            unacked.ask = Some(self.now + ASK);
            // The time until they are acknowledged is unbounded.
            unacked.queue.iter_mut().for_each(|(_, out)| out.own());
            self.events.push_back(Event::Unacked(id));
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn messages_are_kept_until_their_last_byte_is_acknowledged() {
        let mut unacked = Unacked::default();
        let out = |bytes| Outgoing::new(Bytes::from_static(bytes), 1);
        let now = Time::from_secs(1);
        assert_eq!(unacked.accept(7, vec![(3, out(b"abc")), (5, out(b"de"))], now), 5);
        assert_eq!(unacked.ask(), Some(now + ASK));
        assert_eq!((unacked.release(9), unacked.release(5)), (0, 0), "more than was accepted, all but two");
        assert_eq!((unacked.release(3), unacked.bytes()), (3, 2));
        assert_eq!(unacked.accept(1, vec![(1, out(b"fgh"))], now), 3, "its start was accepted before");
        assert_eq!((unacked.release(1), unacked.release(0), unacked.ask()), (2, 3, None));
    }
}
