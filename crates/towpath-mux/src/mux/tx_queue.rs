//! The send queue of a connection.
//!
//! Bound: an entry takes about 100 bytes in addition to its own. A worker that answers byte by byte would multiply the memory of replies that
//! wait, and the time of each write. From [`SEPARATE`] entries on, short ones are therefore joined ([`TxQueue::push`]).

use std::collections::VecDeque;

use super::body::Body;
use super::unacked::Unacked;
use crate::Time;

/// Number of entries from which on short entries are joined.
pub(super) const SEPARATE: usize = 256;

/// The send queue of a connection. One writer at a time takes it whole ([`super::Mux::transmit`]).
#[derive(Debug)]
pub(super) struct TxQueue {
    pub(super) queue: VecDeque<Outgoing>,
    /// Bytes in `queue`, with the writer, and in replies that wait for an earlier one.
    pub(super) bytes: usize,
    /// Bytes of the first entry that were sent.
    pub(super) sent: usize,
    /// A writer has the queue.
    pub(super) sending: bool,
    /// The last write was incomplete (EAGAIN).
    pub(super) blocked: bool,
    /// [`super::Event::Transmit`] was reported and the queue has not been taken since.
    pub(super) reported: bool,
    /// `bytes` is above the bound ([`super::Config::send_bytes`]).
    pub(super) full: bool,
    /// A worker closed the connection: nothing is added any more.
    pub(super) shut: bool,
    /// When the peer last accepted or acknowledged bytes, or when the queue became non-empty.
    pub(super) progress: Time,
    /// Sent messages that the peer has not acknowledged.
    pub(super) unacked: Unacked,
}

impl TxQueue {
    pub(super) fn new(now: Time) -> Self {
        Self {
            queue: VecDeque::new(),
            bytes: 0,
            sent: 0,
            sending: false,
            blocked: false,
            reported: false,
            full: false,
            shut: false,
            progress: now,
            unacked: Unacked::default(),
        }
    }

    /// Adds an entry, or its bytes to the last entry. A message of connected mode has its own entry, because another connection may carry it.
    pub(super) fn push(&mut self, out: Outgoing) {
        if self.queue.len() >= SEPARATE
            && !out.connected
            && let Some(last) = self.queue.back_mut().filter(|last| !last.connected)
            && last.bytes.append(&out.bytes)
        {
            last.messages += out.messages;
            last.owned = true;
            return;
        }
        self.queue.push_back(out);
    }

    /// Restarts the send timer if nothing waits for the peer.
    pub(super) fn start_timer(&mut self, now: Time) {
        if !self.is_pending() {
            self.progress = now;
        }
    }

    /// Returns true if bytes wait for the peer.
    pub(super) fn is_pending(&self) -> bool {
        !self.queue.is_empty() || self.sending || !self.unacked.is_empty()
    }

    /// Returns true if [`super::Event::Transmit`] is to be reported, and marks it reported.
    pub(super) fn report(&mut self) -> bool {
        let idle = !self.queue.is_empty() && !self.sending && !self.blocked;
        idle && !std::mem::replace(&mut self.reported, true)
    }
}

/// An entry of a send queue: one or more whole messages.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) bytes: Body,
    /// Number of messages in `bytes`.
    pub(super) messages: u32,
    /// Sent by [`super::Mux::send`]: another connection may carry it.
    pub(super) connected: bool,
    /// The bytes do not share memory with other messages, or are long.
    pub(super) owned: bool,
}

impl Outgoing {
    pub(super) fn new(bytes: impl Into<Body>, messages: u32) -> Self {
        Self { bytes: bytes.into(), messages, connected: false, owned: false }
    }

    /// Copies short bytes to separate memory, because they may wait for a peer without limit and would hold a larger shared buffer.
    pub(super) fn own(&mut self) {
        if !std::mem::replace(&mut self.owned, true) {
            self.bytes.own();
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn many_short_entries_are_joined() {
        const COUNT: usize = 1 << 20;
        let mut tx = TxQueue::new(Time::default());
        let byte = |at: usize| Bytes::copy_from_slice(&[at as u8]);
        for at in 0..COUNT {
            tx.push(Outgoing::new(byte(at), 1));
        }
        // Each further entry has 16 KiB.
        assert!(tx.queue.len() <= SEPARATE + COUNT / (16 << 10) + 1, "{} entries", tx.queue.len());
        let bytes: Vec<u8> = tx.queue.iter().flat_map(|out| out.bytes.bytes().to_vec()).collect();
        assert!(bytes.iter().copied().eq((0..COUNT).map(|at| at as u8)));
        assert_eq!(tx.queue.iter().map(|out| out.messages as usize).sum::<usize>(), COUNT);
    }

    #[test]
    fn messages_of_connected_mode_and_long_ones_are_not_joined() {
        let mut tx = TxQueue::new(Time::default());
        let short = || Outgoing::new(Bytes::from_static(b"ab"), 1);
        let connected = || Outgoing { connected: true, ..short() };
        let long = || Outgoing::new(Bytes::from(vec![0; 16 << 10]), 1);
        (0..SEPARATE).for_each(|_| tx.push(short()));
        // Rows: entry, and whether it is joined to the last one.
        let rows =
            [(short(), true), (connected(), false), (connected(), false), (short(), false), (short(), true)];
        for (row, (out, joined)) in rows.into_iter().chain([(long(), false), (short(), false)]).enumerate() {
            let before = tx.queue.len();
            tx.push(out);
            assert_eq!(tx.queue.len() == before, joined, "row {row}");
        }
    }

    #[test]
    fn transmit_is_reported_once_per_taking() {
        let mut tx = TxQueue::new(Time::default());
        assert!(!tx.report() && !tx.is_pending());
        tx.queue.push_back(Outgoing::new(Bytes::from_static(b"a"), 1));
        assert!(tx.report() && !tx.report() && tx.is_pending());
        tx.reported = false;
        tx.blocked = true;
        assert!(!tx.report());
    }
}
