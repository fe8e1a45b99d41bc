//! Opened events: a worker learns of a connection before its first message.
//!
//! What: the event is a message without bytes, before all others of its connection. Framings return no messages without bytes. The
//! scheduler gives it to one worker, in the order of the mux, and again if that worker dies with it. The worker may answer it, for
//! protocols in which the server speaks first. If the connection is reset before, no worker gets the event (`discard.rs`).
//!
//! Invariant: at most one opened event of a connection exists. If the worker that has it or had it ends, the connection gets another
//! one, whose mark is 1 if anything was received or sent before. It gets none after an event that was given up
//! ([`Config::redeliver`](super::Config)).
//!
//! [`Event::Removed`](super::Event::Removed) reports that no worker will get a message of the connection any more.

use bytes::Bytes;

use super::message::{Message, Ticket};
use super::psock::{self, Psock};
use super::{Mux, Order, worker};
use crate::Time;

/// State of a connection's opened event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opened {
    /// There is none.
    No,
    /// It waits for a worker.
    Queued,
    /// This worker has it or has done it.
    By(worker::Id),
}

impl Message {
    /// Returns true if this is not a message but the opened event of the connection ([`Mux::report_opened`]).
    pub fn is_opened(&self) -> bool {
        self.bytes.is_empty() && !self.more
    }

    /// Orders the messages of a connection: the opened event is the first.
    pub(super) fn place(&self) -> (bool, u64) {
        (!self.is_opened(), self.ticket.number)
    }
}

impl Psock {
    /// Adds a message after those that wait for an earlier one, or the opened event before them.
    pub(super) fn wait(&mut self, message: Message) {
        match message.is_opened() {
            true => self.pending.push_front(message),
            false => self.pending.push_back(message),
        }
    }

    /// Returns true if anything was received or sent, here or in another process.
    pub(super) fn is_used(&self) -> bool {
        self.resumed || self.stats.rx_msgs > 0 || self.stats.tx_bytes > 0 || self.tx.bytes > 0
    }

    /// Mark of its opened event: 1 if anything was received or sent.
    fn mark(&self) -> u32 {
        u32::from(self.is_used())
    }
}

impl Mux {
    /// Gives workers an opened event of each connection, also of those that are attached.
    pub fn report_opened(&mut self, now: Time) {
        self.now = self.now.max(now);
        if std::mem::replace(&mut self.reports_opened, true) {
            return;
        }
        for id in self.psocks.keys().collect::<Vec<_>>() {
            self.open(id);
        }
    }

    /// Queues the opened event of a connection.
    pub(super) fn open(&mut self, id: psock::Id) {
        if !self.psocks.get(id).is_some_and(Psock::accepts) {
            return;
        }
        if let Some(message) = self.opened_event(id) {
            self.place(message);
        }
    }

    /// [`Order::Sticky`]: the connection is bound to this worker. Queues an opened event if another worker had the last one.
    pub(super) fn open_for(&mut self, id: psock::Id, worker: worker::Id) {
        let known = |opened| matches!(opened, Opened::By(other) if other != worker);
        if self.reports_opened
            && self.psocks.get(id).is_some_and(|psock| known(psock.opened))
            && let Some(message) = self.opened_event(id)
            && let Some(psock) = self.psocks.get_mut(id)
        {
            psock.wait(message);
        }
    }

    /// The opened event of a connection, which the caller queues.
    fn opened_event(&mut self, id: psock::Id) -> Option<Message> {
        let psock = self.psocks.get_mut(id)?;
        psock.opened = Opened::Queued;
        let ticket = Ticket { psock: id, number: psock.next };
        psock.next += 1;
        psock.outstanding += 1;
        if self.config.order == Order::Replies {
            psock.answers.push_back(psock::Answer::default());
        }
        self.counters.totals.opened += 1;
        self.counters.totals.queued += 1;
        let (bytes, mark, received) = (Bytes::new(), psock.mark(), self.now);
        Some(Message {
            ticket,
            bytes,
            skip: 0,
            trim: 0,
            mark,
            hash: 0,
            received,
            charge: 0,
            deaths: 0,
            more: false,
        })
    }

    /// An opened event waits again: its worker gave it back or died.
    pub(super) fn reopen(&mut self, message: &mut Message) {
        if message.is_opened()
            && let Some(psock) = self.psocks.get_mut(message.ticket.psock)
        {
            psock.opened = Opened::Queued;
            message.mark = psock.mark();
        }
    }

    /// The worker has gone: other workers get new opened events of the connections whose event it had.
    pub(super) fn reopen_all(&mut self, worker: worker::Id) {
        if !self.reports_opened {
            return;
        }
        let open = self.psocks.iter().filter(|(_, psock)| psock.opened == Opened::By(worker));
        for id in open.map(|(id, _)| id).collect::<Vec<_>>() {
            self.open(id);
        }
    }
}
