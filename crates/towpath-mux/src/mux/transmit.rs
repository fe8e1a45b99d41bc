//! Sending: replies, and messages of connected mode.

use std::collections::VecDeque;

use bytes::Bytes;

use super::body::Body;
use super::event::{Cause, Event, SendError, Undelivered};
use super::message::{Completion, Ticket};
use super::psock;
use super::tx_queue::Outgoing;
use super::{Mux, Order, Retry, unacked, worker};
use crate::Time;

/// Whole messages to write to a connection's socket, in order. The mux gives them to one writer at a time.
#[derive(Debug)]
pub struct Transmit {
    psock: psock::Id,
    queue: VecDeque<Outgoing>,
    /// Bytes of the first message that were sent.
    left: usize,
    /// Bytes sent since [`Mux::transmit`].
    sent: usize,
    /// Messages sent completely since then.
    messages: u64,
    /// [`Retry::Always`]: those of connected mode, each with the value of `sent` at its end, and their bytes together with
    /// the bytes kept before. `None` for other policies.
    kept: Option<(Vec<(usize, Outgoing)>, usize)>,
    /// Bytes that the peer had not acknowledged after the write.
    unacked: Option<usize>,
}

/// Result of writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The socket accepted everything, or the caller may try again at once.
    Taken,
    /// The socket accepts no more for now (EAGAIN).
    Blocked,
    /// Writing failed with this error number.
    Failed(i32),
}

impl Transmit {
    /// The connection to write to.
    pub const fn psock(&self) -> psock::Id {
        self.psock
    }

    /// The bytes to write, in order, for sendmsg(2): those of the first `most` entries. Copies their leased bytes.
    pub fn slices(&mut self, most: usize) -> impl Iterator<Item = &[u8]> {
        for out in self.queue.iter_mut().take(most) {
            out.bytes.copy_leased();
        }
        let left = self.left;
        self.queue
            .iter()
            .take(most)
            .enumerate()
            .map(move |(at, out)| &out.bytes.bytes()[if at == 0 { left } else { 0 }..])
    }

    /// The messages with the number of bytes of each that were sent. For a writer that keeps the bytes, or
    /// handles [`Body::Leased`].
    pub fn pieces(&self) -> impl Iterator<Item = (&Body, usize)> {
        self.queue.iter().enumerate().map(|(at, out)| (&out.bytes, if at == 0 { self.left } else { 0 }))
    }

    /// Returns true if a message has at least this number of bytes.
    pub fn has_long(&self, least: usize) -> bool {
        self.queue.iter().any(|out| out.bytes.len() >= least)
    }

    /// Marks the next `bytes` bytes as sent.
    ///
    /// # Panics
    ///
    /// Panics if there are fewer.
    pub fn advance(&mut self, bytes: usize) {
        self.sent += bytes;
        self.left += bytes;
        while let Some(first) = self.queue.front() {
            if self.left < first.bytes.len() {
                return;
            }
            self.left -= first.bytes.len();
            self.messages += u64::from(first.messages);
            let first = self.queue.pop_front();
            if let (Some((kept, bytes)), Some(out)) = (&mut self.kept, first.filter(|out| out.connected)) {
                *bytes += out.bytes.len();
                kept.push((self.sent - self.left, out));
            }
        }
        assert_eq!(self.left, 0, "more bytes were taken than there are");
    }

    /// [`Retry::Always`]: returns true if the writer is to call [`Transmit::set_unacked`] after its writes. Otherwise
    /// [`Event::Unacked`] asks later.
    pub fn wants_unacked(&self) -> bool {
        self.kept.as_ref().is_some_and(|(_, bytes)| *bytes >= unacked::BATCH)
    }

    /// [`Retry::Always`]: returns true if the mux keeps the sent messages. The writer is to call [`Transmit::set_unacked`]
    /// after an error, too.
    pub const fn keeps(&self) -> bool {
        self.kept.is_some()
    }

    /// The peer has not acknowledged the last `bytes` of all bytes that the socket has accepted until now (SIOCOUTQ).
    pub const fn set_unacked(&mut self, bytes: usize) {
        self.unacked = Some(bytes);
    }

    /// Returns true if everything was sent.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

impl Mux {
    /// Replies to a message that the worker holds, on the message's connection. A message may have several
    /// replies until it is done.
    ///
    /// # Errors
    ///
    /// Returns [`SendError::Gone`] if the worker does not hold the message, or if its connection has ended.
    /// The latter is counted as `unsent`.
    pub fn reply(
        &mut self,
        id: worker::Id,
        ticket: Ticket,
        bytes: impl Into<Bytes>,
        now: Time,
    ) -> Result<(), SendError> {
        self.reply_batch(id, (ticket, 1), 1, bytes.into(), now)
    }

    /// Replies to `count` consecutive messages of a connection, starting with `ticket`, by one piece that
    /// contains `replies` replies in the order of the messages. Use leased bytes ([`Body::Leased`]) only for
    /// a connection that no other worker sends on, because the lender may change them until they are
    /// released.
    ///
    /// # Errors
    ///
    /// As [`Mux::reply`], for the first message.
    pub fn reply_batch(
        &mut self,
        id: worker::Id,
        (ticket, count): (Ticket, u32),
        replies: u32,
        body: impl Into<Body>,
        now: Time,
    ) -> Result<(), SendError> {
        self.now = self.now.max(now);
        let mut bytes: Body = body.into();
        let worker = self.workers.get_mut(id).ok_or(SendError::Gone)?;
        if !worker.answered(ticket, count) {
            return Err(SendError::Gone);
        }
        let Some(psock) = self.psocks.get_mut(ticket.psock).filter(|psock| psock.accepts()) else {
            self.counters.totals.unsent += u64::from(replies);
            return Err(SendError::Gone);
        };
        worker.count_sent(replies, bytes.len());
        let behind = ticket.number - psock.first;
        if self.config.order == Order::Replies && behind > 0 {
            if let Some(answer) = psock.answers.get_mut(behind as usize) {
                let (before, length) = (psock.tx.bytes, bytes.len());
                psock.tx.bytes += length;
                // The time until it is sent is unbounded.
                bytes.own();
                answer.push(bytes, replies);
                self.reorder(ticket.psock, before);
                self.recount(0, length);
                self.check_send_limit(ticket.psock, before);
            }
            return Ok(());
        }
        self.queue_out(ticket.psock, Outgoing::new(bytes, replies));
        Ok(())
    }

    /// Runs `change` and updates the affected connections once afterwards.
    pub fn together<T>(&mut self, change: impl FnOnce(&mut Self) -> T) -> T {
        self.deferred.begin();
        let result = change(self);
        self.deferred.end();
        self.settle_deferred();
        result
    }

    /// Handles the completions of a worker, oldest first. Equivalent to single calls of [`Mux::reply`] and
    /// [`Mux::done`], but updates the affected connections once.
    pub fn handle_completions(
        &mut self,
        id: worker::Id,
        said: impl IntoIterator<Item = Completion>,
        now: Time,
    ) {
        self.together(|mux| {
            for said in said {
                match said {
                    // A reply to a connection that has ended is counted as unsent.
                    Completion::Reply(ticket, bytes) => drop(mux.reply(id, ticket, bytes, now)),
                    Completion::Done(ticket) => drop(mux.done(id, ticket, now)),
                }
            }
        });
    }

    /// Updates the connections deferred by [`Mux::together`].
    pub(super) fn settle_deferred(&mut self) {
        while let Some(psock) = self.deferred.pop() {
            if let Some(psock) = self.psocks.get_mut(psock) {
                psock.unsettled = false;
            }
            self.settle(psock);
        }
    }

    /// Sends a message on this connection. Does not copy the bytes of a received message.
    ///
    /// # Errors
    ///
    /// Returns [`SendError::Gone`] if the connection has ended.
    pub fn forward(&mut self, id: psock::Id, bytes: impl Into<Bytes>, now: Time) -> Result<(), SendError> {
        self.now = self.now.max(now);
        if !self.psocks.get(id).is_some_and(psock::Psock::is_open) {
            return Err(SendError::Gone);
        }
        self.queue_out(id, Outgoing::new(Body::Bytes(bytes.into()), 1));
        Ok(())
    }

    /// Connected mode: sends a message on the connection with the fewest bytes to send.
    ///
    /// # Errors
    ///
    /// Returns [`SendError::NotConnected`] if no connection is open, and [`SendError::Full`] if all
    /// connections are full.
    ///
    /// # Panics
    ///
    /// Panics if the mux is not in connected mode ([`super::Config::connected`]).
    pub fn send(&mut self, bytes: impl Into<Bytes>, now: Time) -> Result<psock::Id, SendError> {
        assert!(self.config.connected, "only a mux in connected mode chooses a connection");
        self.now = self.now.max(now);
        let (waits, id) = self.balance.least().ok_or(SendError::NotConnected)?;
        if waits >= self.config.send_bytes.high {
            self.balance.want_write_space();
            return Err(SendError::Full);
        }
        self.queue_out(id, Outgoing { connected: true, ..Outgoing::new(Body::Bytes(bytes.into()), 1) });
        Ok(id)
    }

    /// Counts a message of `bytes` bytes sent by this worker. [`Mux::forward`] and [`Mux::send`] do not know
    /// the worker.
    pub fn count_sent(&mut self, id: worker::Id, bytes: usize) {
        if let Some(worker) = self.workers.get_mut(id) {
            worker.count_sent(1, bytes);
        }
    }

    /// Returns the messages to write to this connection's socket. `None` if there are none, another writer
    /// has them, or the socket is not writable.
    pub fn transmit(&mut self, id: psock::Id) -> Option<Transmit> {
        let psock = self.psocks.get_mut(id)?;
        psock.tx.reported = false;
        if psock.tx.sending || psock.tx.blocked || psock.tx.queue.is_empty() {
            return None;
        }
        let keeps = self.config.connected && self.config.retry == Retry::Always;
        let bytes = psock.tx.unacked.bytes();
        if keeps && bytes >= self.config.unacked_bytes {
            return None;
        }
        psock.tx.sending = true;
        let queue = std::mem::take(&mut psock.tx.queue);
        Some(Transmit {
            psock: id,
            queue,
            left: std::mem::take(&mut psock.tx.sent),
            sent: 0,
            messages: 0,
            kept: keeps.then(|| (Vec::new(), bytes)),
            unacked: None,
        })
    }

    /// Takes back the messages of [`Mux::transmit`] with their progress.
    pub fn handle_transmitted(&mut self, transmit: Transmit, outcome: Outcome, now: Time) {
        self.now = self.now.max(now);
        let Transmit { psock: id, mut queue, left, sent, messages, kept, unacked } = transmit;
        let Some(psock) = self.psocks.get_mut(id) else { return };
        psock.tx.sending = false;
        psock.stats.tx_msgs += messages;
        psock.stats.tx_bytes += sent as u64;
        self.counters.totals.tx_msgs += messages;
        self.counters.totals.tx_bytes += sent as u64;
        if sent > 0 {
            psock.tx.progress = self.now;
            psock.active = self.now;
        }
        queue.append(&mut psock.tx.queue);
        psock.tx.queue = queue;
        psock.tx.sent = left;
        let kept = kept.map_or(0, |(kept, _)| psock.tx.unacked.accept(sent, kept, self.now));
        if psock.is_dead() {
            self.recount(0, kept);
            unacked.into_iter().for_each(|bytes| self.handle_unacked(id, bytes, now));
            return self.end_dead(id);
        }
        self.release_sent(id, sent, kept);
        unacked.into_iter().for_each(|bytes| self.handle_unacked(id, bytes, now));
        match outcome {
            Outcome::Failed(errno) => return self.abort(id, Cause::Reset(errno)),
            Outcome::Blocked => {
                if let Some(psock) = self.psocks.get_mut(id) {
                    psock.tx.blocked = true;
                    psock.tx.queue.iter_mut().for_each(Outgoing::own);
                }
            }
            Outcome::Taken => self.request_transmit(id),
        }
        self.settle(id);
    }

    /// The connection's socket is writable again.
    pub fn handle_writable(&mut self, id: psock::Id, now: Time) {
        self.now = self.now.max(now);
        let Some(psock) = self.psocks.get_mut(id) else { return };
        psock.tx.blocked = false;
        self.request_transmit(id);
        self.settle(id);
    }

    pub(super) fn queue_out(&mut self, id: psock::Id, mut out: Outgoing) {
        let length = out.bytes.len();
        let Some(psock) = self.psocks.get_mut(id) else { return };
        if length == 0 {
            return;
        }
        if psock.tx.blocked {
            out.own();
        }
        // Replies that wait for an earlier reply do not start the send timer: the peer cannot accept them
        // yet.
        psock.tx.start_timer(self.now);
        let before = psock.tx.bytes;
        psock.tx.bytes += length;
        psock.tx.push(out);
        self.reorder(id, before);
        self.recount(0, length);
        self.request_transmit(id);
        self.check_send_limit(id, before);
    }

    /// [`Order::Replies`]: the message is done. Sends the replies that waited for it.
    pub(super) fn answered(&mut self, ticket: Ticket) {
        let Some(psock) = self.psocks.get_mut(ticket.psock) else { return };
        let at = (ticket.number - psock.first) as usize;
        if let Some(answer) = psock.answers.get_mut(at) {
            answer.done = true;
        }
        let mut last = false;
        while let Some(answer) = psock.answers.pop_front_if(|answer| answer.done) {
            psock.first += 1;
            if answer.last {
                last = true;
                break;
            }
            // The replies to the next message are sent without waiting.
            let Some(next) = psock.answers.front_mut() else { break };
            let replies = std::mem::take(&mut next.replies);
            psock.tx.start_timer(self.now);
            let owned = |(bytes, count)| Outgoing { owned: true, ..Outgoing::new(bytes, count) };
            replies.into_iter().map(owned).for_each(|out| psock.tx.push(out));
        }
        if last {
            self.shut(ticket.psock);
        }
        self.request_transmit(ticket.psock);
    }

    pub(super) fn request_transmit(&mut self, id: psock::Id) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        if !psock.is_dead() && psock.tx.report() {
            self.events.push_back(Event::Transmit(id));
        }
    }

    /// Ends the connection if it has too much to send. A single reply may exceed the limit (`before` is 0).
    fn check_send_limit(&mut self, id: psock::Id, before: usize) {
        let Some(psock) = self.psocks.get(id) else { return };
        if before > 0 && psock.tx.bytes > self.config.send_most {
            self.abort(id, Cause::SendFull);
        } else {
            self.settle(id);
        }
    }

    /// These bytes were sent, and `kept` bytes of them are kept.
    fn release_sent(&mut self, id: psock::Id, bytes: usize, kept: usize) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        let before = psock.tx.bytes;
        psock.tx.bytes -= bytes;
        self.reorder(id, before);
        self.recount(bytes, kept);
        if self.config.connected {
            self.report_write_space();
        }
    }

    /// Connected mode: updates the connection's position in the balance.
    fn reorder(&mut self, id: psock::Id, before: usize) {
        if let Some(psock) = self.psocks.get(id) {
            self.balance.update(id, before, psock.tx.bytes);
        }
    }

    /// Reports [`Event::WriteSpace`] if it was waited for.
    pub(super) fn report_write_space(&mut self) {
        if self.balance.take_write_space(self.config.send_bytes.low) {
            self.events.push_back(Event::WriteSpace);
        }
    }

    /// Drops the send queue of a connection that ended, and returns the number of replies in it. Messages of
    /// connected mode are sent on another connection or returned.
    pub(super) fn drop_queue(&mut self, id: psock::Id) -> usize {
        let Some(psock) = self.psocks.get_mut(id) else { return 0 };
        let queue = std::mem::take(&mut psock.tx.queue);
        let left = std::mem::take(&mut psock.tx.sent);
        let mut replies = 0;
        for answer in &mut psock.answers {
            replies += answer.replies.iter().map(|(_, count)| *count as usize).sum::<usize>();
            answer.replies.clear();
        }
        let (bytes, kept) = (std::mem::take(&mut psock.tx.bytes), psock.tx.unacked.bytes());
        let unacked = psock.tx.unacked.take().map(|out| (out.bytes.len(), out));
        self.balance.remove(bytes, id);
        self.recount(bytes + kept, 0);
        let queue = queue.into_iter().enumerate().map(|(at, out)| (if at == 0 { left } else { 0 }, out));
        for (left, out) in unacked.chain(queue) {
            if !out.connected {
                replies += out.messages as usize;
                continue;
            }
            let again = match self.config.retry {
                Retry::Never => false,
                Retry::IfNoByteLeft => left == 0,
                Retry::Always => true,
            };
            match self.balance.least() {
                Some((waits, other)) if again && waits + out.bytes.len() <= self.config.send_most => {
                    self.counters.totals.tx_retries += 1;
                    self.queue_out(other, out);
                }
                _ => self
                    .events
                    .push_back(Event::Undelivered(Undelivered { bytes: out.bytes.into_bytes(), left })),
            }
        }
        self.counters.totals.unsent += replies as u64;
        if replies > 0
            && let Some(psock) = self.psocks.get_mut(id)
        {
            psock.stats.tx_aborts += 1;
        }
        replies
    }
}
