//! Batches: messages of one connection that were read together.
//!
//! What: a worker that reads a socket and finds several short messages gets all of them at once as a *local*
//! batch ([`Mux::handle_read_by`]), without the queue. The core treats a local batch as one unit: it counts
//! the messages done, from the front, and sends the replies as one piece. Before other workers can take some of
//! them, [`Mux::split_local`] turns the rest into single messages, which the reading worker holds and can
//! hand back.
//!
//! Worker processes get batches, or parts of them, from the queue ([`Mux::poll_batches`]). A process may hold
//! several. A completion for some messages of a batch splits it there ([`BatchList`]).
//!
//! Invariant: a worker gets a local batch only if no message waits, [`Order::None`] is configured, and waking
//! another worker would cost more time than it saves.

use std::collections::VecDeque;

use bytes::Bytes;

use super::message::{Message, Ticket, View};
use super::psock;
use super::receive::Extent;
use super::tx_queue::Outgoing;
use super::worker::{self, InHand};
use super::{Mux, Order};
use crate::Time;
use crate::assembler::Part;

/// Minimum number of messages of a local batch.
const LEAST: usize = 4;

/// Messages of one connection, in order, that were read together.
#[derive(Clone, Debug)]
pub struct Batch {
    psock: psock::Id,
    /// Number of the first message of the read.
    number: u64,
    bytes: Bytes,
    extents: std::sync::Arc<[Extent]>,
    /// Index of the first message that is not begun.
    next: usize,
    /// Index after the last message.
    end: usize,
    received: Time,
    /// Number of workers that died while they held it. More than 0 only for a single message.
    deaths: u8,
    /// Bytes charged for each message.
    share: usize,
    /// Bytes charged for the first message in addition.
    rest: usize,
}

/// A local batch in the core's account.
#[derive(Debug)]
pub(super) struct LocalBatch {
    batch: Batch,
    done: usize,
}

/// Batches that a worker holds, in the order of delivery; each with the number of its messages that were
/// answered, from the front.
#[derive(Debug, Default)]
pub(super) struct BatchList {
    batches: VecDeque<(Batch, usize)>,
    messages: usize,
}

impl BatchList {
    /// Number of messages in all batches.
    pub(super) const fn len(&self) -> usize {
        self.messages
    }

    pub(super) fn push(&mut self, batch: Batch) {
        self.messages += batch.len();
        self.batches.push_back((batch, 0));
    }

    /// Marks up to `count` messages as answered, starting with `first`. Returns how many of them are in the
    /// same batch, or `None` if `first` is not in the list.
    pub(super) fn answered(&mut self, first: Ticket, count: usize) -> Option<usize> {
        let (at, place) = self.find(first)?;
        let (batch, answered) = &mut self.batches[at];
        let count = count.min(batch.len() - place);
        if place <= *answered {
            *answered = (*answered).max(place + count);
        } else {
            // The messages before `place` were not answered.
            let (_, answered) = self.part(at, place);
            *answered = count;
        }
        Some(count)
    }

    /// Removes up to `count` consecutive messages, starting with `first`, and returns them with whether
    /// `first` was answered. `None` if `first` is not in the list.
    pub(super) fn take(&mut self, first: Ticket, count: usize) -> Option<(Batch, bool)> {
        let (mut at, place) = self.find(first)?;
        if place > 0 {
            self.part(at, place);
            at += 1;
        }
        let (batch, answered) = &mut self.batches[at];
        let (whole, was) = (count >= batch.len(), *answered > 0);
        let taken = if whole {
            self.batches.remove(at)?.0
        } else {
            *answered = answered.saturating_sub(count);
            batch.split_to(count)
        };
        self.messages -= taken.len();
        Some((taken, was))
    }

    /// Connections of the batches.
    pub(super) fn psocks(&self) -> impl Iterator<Item = psock::Id> {
        self.batches.iter().map(|(batch, _)| batch.psock)
    }

    /// Removes and returns all batches.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = (Batch, usize)> {
        self.messages = 0;
        self.batches.drain(..)
    }

    #[cfg(test)]
    pub(super) fn tickets(&self) -> impl Iterator<Item = Ticket> {
        self.batches.iter().flat_map(|(batch, _)| batch.rest())
    }

    /// Index of the batch that has this message, and the message's place in it.
    fn find(&self, ticket: Ticket) -> Option<(usize, usize)> {
        let place = |(batch, _): &(Batch, usize)| {
            let place = ticket.number.checked_sub(batch.number + batch.next as u64)? as usize;
            (batch.psock == ticket.psock && place < batch.len()).then_some(place)
        };
        // With work done in order, the first batch has the message.
        self.batches.iter().enumerate().find_map(|(at, row)| Some((at, place(row)?)))
    }

    /// Splits a batch before this place and returns the second part.
    fn part(&mut self, at: usize, place: usize) -> &mut (Batch, usize) {
        let (batch, answered) = &mut self.batches[at];
        let first = (batch.split_to(place), (*answered).min(place));
        *answered = answered.saturating_sub(place);
        self.batches.insert(at, first);
        &mut self.batches[at + 1]
    }
}

impl Batch {
    /// Number of messages that are not begun.
    pub fn len(&self) -> usize {
        self.end - self.next
    }

    /// Returns true if all messages are begun.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The connection that the messages came from.
    pub const fn psock(&self) -> psock::Id {
        self.psock
    }

    /// Begins and returns the next message.
    pub fn begin(&mut self) -> Option<Message> {
        let at = self.advance(1).next()?;
        self.message(at)
    }

    /// Ticket of the next message.
    pub fn first(&self) -> Option<Ticket> {
        (!self.is_empty()).then(|| self.ticket(self.next))
    }

    /// Views of the messages that are not begun.
    pub fn views(&self) -> impl Iterator<Item = View<'_>> + Clone {
        self.extents[self.next..self.end].iter().zip(self.next..).map(|(found, at)| self.view_of(found, at))
    }

    /// Number of leading messages, `most` at most, of up to `each` bytes each and `bytes` bytes together.
    pub fn short(&self, most: usize, each: usize, bytes: usize) -> usize {
        let found = &self.extents[self.next..self.end];
        let from = found.first().map_or(0, |first| first.start);
        let short = |found: &&Extent| found.length <= each && found.end() - from <= bytes;
        found.iter().take(most).take_while(short).count()
    }

    /// The contiguous bytes of the next `count` messages.
    pub fn bytes(&self, count: usize) -> &[u8] {
        let places = self.next..self.next + count.min(self.len());
        let found = &self.extents[places];
        let Some((first, last)) = found.first().zip(found.last()) else { return &[] };
        &self.bytes[first.start..last.end()]
    }

    /// Begins the next `count` messages.
    pub fn skip(&mut self, count: usize) {
        self.advance(count);
    }

    /// Returns true if this is not a message but the opened event of the connection ([`Mux::report_opened`]).
    pub fn is_opened(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns true if this is the first part of a message ([`Message::more`]). It is alone in its batch.
    pub fn more(&self) -> bool {
        self.extents.first().is_some_and(|found| found.part == Part::First)
    }

    /// Number of workers that died while they held this message. 0 for a batch of several.
    pub const fn deaths(&self) -> u8 {
        self.deaths
    }

    /// Tickets of the messages that are not begun.
    pub fn rest(&self) -> impl Iterator<Item = Ticket> {
        let (psock, number) = (self.psock, self.number);
        (self.next..self.end).map(move |at| Ticket { psock, number: number + at as u64 })
    }

    /// Ticket of the message at this index.
    pub(crate) const fn ticket(&self, at: usize) -> Ticket {
        Ticket { psock: self.psock, number: self.number + at as u64 }
    }

    /// View of the message at this index.
    #[cfg(feature = "io")]
    pub(crate) fn view(&self, at: usize) -> Option<View<'_>> {
        Some(self.view_of(self.extents.get(at)?, at))
    }

    fn view_of(&self, found: &Extent, at: usize) -> View<'_> {
        let Extent { skip, trim, mark, hash, part, .. } = *found;
        let (bytes, more) = (&self.bytes[found.range()], part == Part::First);
        View { ticket: self.ticket(at), bytes, skip, trim, mark, hash, received: self.received, more }
    }

    /// Begins up to `most` messages and returns their indices.
    pub(crate) fn advance(&mut self, most: usize) -> std::ops::Range<usize> {
        let from = self.next;
        self.next += most.min(self.len());
        from..self.next
    }

    /// Marks the last `count` begun messages as not begun.
    #[cfg(feature = "io")]
    pub(crate) fn rewind(&mut self, count: usize) {
        self.next -= count;
    }

    pub(crate) fn message(&self, at: usize) -> Option<Message> {
        let found = self.extents.get(at)?;
        let Extent { skip, trim, mark, hash, part, .. } = *found;
        Some(Message {
            ticket: self.ticket(at),
            bytes: self.bytes.slice(found.range()),
            skip,
            trim,
            mark,
            hash,
            received: self.received,
            charge: self.charge(at..at + 1),
            deaths: self.deaths,
            more: part == Part::First,
        })
    }

    /// Bytes of the messages that are not begun, and the bytes charged for them.
    pub(super) fn weight(&self) -> (usize, usize) {
        (self.bytes(self.len()).len(), self.charge(self.next..self.end))
    }

    pub(super) const fn received(&self) -> Time {
        self.received
    }

    /// Number of leading messages, `most` at most, of up to `bytes` bytes together.
    pub(super) fn fitting(&self, most: usize, bytes: usize) -> usize {
        let most = most.min(self.len());
        if self.bytes(most).len() <= bytes {
            return most;
        }
        let from = self.extents[self.next].start;
        self.extents[self.next..self.next + most].partition_point(|found| found.end() - from <= bytes)
    }

    /// Splits off the next `count` messages that are not begun.
    pub(super) fn split_to(&mut self, count: usize) -> Self {
        let end = self.next + count.min(self.len());
        let first = Self { end, ..self.clone() };
        self.next = end;
        first
    }

    /// Wraps a single message. The charge stays in the core's account.
    pub(super) fn of_one(message: &Message) -> Self {
        let Message { ticket, bytes, skip, trim, mark, hash, received, deaths, more, .. } = message.clone();
        let part = if more { Part::First } else { Part::Whole };
        let found = [Extent { start: 0, length: bytes.len(), skip, trim, mark, hash, part }];
        let Ticket { psock, number } = ticket;
        let found = std::sync::Arc::new(found);
        Self { psock, number, bytes, extents: found, next: 0, end: 1, received, deaths, share: 0, rest: 0 }
    }

    /// Bytes charged for these messages.
    fn charge(&self, range: std::ops::Range<usize>) -> usize {
        range.len() * self.share + if range.start == 0 && !range.is_empty() { self.rest } else { 0 }
    }
}

impl LocalBatch {
    /// Its connection.
    pub(super) const fn psock(&self) -> psock::Id {
        self.batch.psock
    }

    /// Number of messages that are not done.
    pub(super) fn left(&self) -> usize {
        self.batch.end - self.done
    }
}

impl Mux {
    /// As [`Mux::handle_read`], by an idle worker. Returns the messages as a local batch if the worker may
    /// process them at once.
    pub fn handle_read_by(
        &mut self,
        id: psock::Id,
        buffer: Vec<u8>,
        by: worker::Id,
        now: Time,
    ) -> Option<Batch> {
        self.reads.worker = Some(by);
        self.handle_read(id, buffer, now);
        self.reads.worker = None;
        self.reads.local.take()
    }

    /// Completes the next `done` messages of the worker's local batch and sends `replies`: pieces, each with
    /// its number of replies.
    pub fn handle_local_batch(
        &mut self,
        id: worker::Id,
        done: usize,
        replies: impl IntoIterator<Item = (Bytes, u32)>,
        now: Time,
    ) {
        self.now = self.now.max(now);
        let Some(worker) = self.workers.get_mut(id) else { return };
        let Some(held) = &mut worker.local else { return };
        let psock = held.batch.psock;
        let done = done.min(held.left());
        let charge = held.batch.charge(held.done..held.done + done);
        held.done += done;
        worker.finished += done as u64;
        if held.left() == 0 {
            worker.local = None;
        }
        self.deferred.begin();
        for (bytes, messages) in replies {
            self.reply_local(id, psock, bytes, messages);
        }
        self.deferred.end();
        self.counters.totals.in_hand -= done as u64;
        self.counters.totals.done += done as u64;
        self.release(psock, done);
        if let Some(psock) = self.psocks.get_mut(psock) {
            psock.outstanding -= done;
            psock.memory -= charge;
            self.memory.remove_message(charge);
            if psock.outstanding == 0 {
                psock.active = self.now;
            }
        }
        self.recount(charge, 0);
        self.settle_deferred();
        self.settle(psock);
        self.check_left(id);
    }

    fn reply_local(&mut self, id: worker::Id, to: psock::Id, bytes: Bytes, messages: u32) {
        if !self.psocks.get(to).is_some_and(psock::Psock::accepts) {
            self.counters.totals.unsent += u64::from(messages);
            return;
        }
        if let Some(worker) = self.workers.get_mut(id) {
            worker.count_sent(messages, bytes.len());
        }
        self.queue_out(to, Outgoing::new(bytes, messages));
    }

    /// Turns the batches of a worker into single messages.
    pub(super) fn split_batches(&mut self, id: worker::Id) {
        let Some(worker) = self.workers.get_mut(id) else { return };
        for (batch, answered) in worker.batches.drain() {
            let messages = (batch.next..batch.end).filter_map(|at| batch.message(at));
            let held = messages.enumerate().map(|(at, message)| InHand { message, answered: at < answered });
            worker.in_hand.extend(held);
        }
    }

    /// Turns the rest of a worker's local batch into single messages, which the worker holds.
    pub fn split_local(&mut self, id: worker::Id) {
        let Some(worker) = self.workers.get_mut(id) else { return };
        let Some(LocalBatch { batch, done }) = worker.local.take() else { return };
        for message in (done..batch.end).filter_map(|at| batch.message(at)) {
            worker.in_hand_bytes += message.bytes.len();
            worker.in_hand.push_back(InHand { message, answered: false });
        }
    }

    /// Returns the reading worker if it may have these messages as a local batch.
    pub(super) fn local_reader(&self, psock: psock::Id, count: usize, bytes: usize) -> Option<worker::Id> {
        let id = self.reads.worker?;
        let in_hand = self.psocks.get(psock)?.in_hand;
        let worker = self.workers.get(id)?;
        let free = worker.enabled && worker.held() == 0 && self.reads.local.is_none();
        let alone = self.config.order == Order::None && self.ready.is_empty();
        let short =
            !self.service_time.is_unknown() && !self.is_long(count) && bytes <= self.config.worker_bytes;
        let share = self.in_flight.fits_one(psock, (in_hand, count), self.now);
        (free && alone && short && share && count >= LEAST && self.config.batch > 1).then_some(id)
    }

    /// Gives the messages to the reading worker as a local batch.
    pub(super) fn give_local(
        &mut self,
        by: worker::Id,
        id: psock::Id,
        bytes: Bytes,
        memory: usize,
        found: &[Extent],
    ) {
        let Some(batch) = self.receive_batch(id, bytes, memory, found) else { return };
        let (count, length) = (batch.len(), batch.bytes.len() as u64);
        let Some(psock) = self.psocks.get_mut(id) else { return };
        psock.stats.reserved += u64::from(psock.in_hand == 0);
        psock.in_hand += count;
        self.counters.totals.in_hand += count as u64;
        self.counters.queue_wait.saturating_record_n(0, count as u64);
        self.set_activity(by, worker::Activity::Awake);
        if let Some(worker) = self.workers.get_mut(by) {
            worker.since = self.now;
            worker.stats.rx_msgs += count as u64;
            worker.stats.rx_bytes += length;
            worker.local = Some(LocalBatch { batch: batch.clone(), done: 0 });
        }
        self.reads.local = Some(batch);
    }

    /// Queues the messages for any worker.
    pub(super) fn queue_batch(&mut self, id: psock::Id, bytes: Bytes, memory: usize, found: &[Extent]) {
        let Some(batch) = self.receive_batch(id, bytes, memory, found) else { return };
        self.counters.totals.queued += batch.len() as u64;
        let limit = self.in_flight.limit(id, self.now);
        let full = self.psocks.get(id).is_some_and(|psock| psock.in_hand >= limit);
        self.ready.push_batch(batch, full);
    }

    /// Counts and charges messages of a read. The caller delivers the batch.
    fn receive_batch(
        &mut self,
        id: psock::Id,
        bytes: Bytes,
        memory: usize,
        found: &[Extent],
    ) -> Option<Batch> {
        self.in_flight.active(id, self.now);
        let psock = self.psocks.get_mut(id)?;
        let count = found.len();
        let (share, rest) = (memory / count + size_of::<Message>(), memory % count);
        let (number, received) = (psock.next, self.now);
        let batch = Batch {
            psock: id,
            number,
            extents: found.into(),
            next: 0,
            end: count,
            received,
            deaths: 0,
            share,
            rest,
            bytes,
        };
        let charge = batch.charge(0..count);
        psock.next += count as u64;
        psock.stats.rx_msgs += count as u64;
        psock.stats.rx_bytes += batch.bytes.len() as u64;
        psock.outstanding += count;
        psock.memory += charge;
        self.memory.add_message(charge);
        self.counters.totals.received += count as u64;
        self.recount(0, charge);
        Some(batch)
    }
}
