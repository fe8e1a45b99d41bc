//! Runs: messages of one read that the worker which read them does itself.
//!
//! What: a worker that reads a socket and finds a few short messages gets all of them at once ([`Mux::handle_read_by`]), without
//! the queue between. They are one thing to the core, whatever their number: it counts how many are done, from the front, and
//! what was answered goes out as one piece. When somebody else is to have some of them, the batch is unrolled
//! ([`Mux::split_local`]): from then on they are messages like others, held by that worker, and can be handed back.
//!
//! Who takes messages for workers that are elsewhere gets them as runs too, or parts of runs ([`Mux::poll_batches`]): a worker may
//! hold several of those, and what is said about some of a batch's messages parts it there ([`BatchList`]).
//!
//! Invariant: a batch is given to who reads it only when no message waits, order is nobody's concern, and all of it takes less time than
//! another worker is worth waking for.

use std::collections::VecDeque;

use bytes::Bytes;

use super::message::{Message, Ticket, View};
use super::psock;
use super::receive::Extent;
use super::tx_queue::Outgoing;
use super::worker::{self, InHand};
use super::{Mux, Order};
use crate::Time;

/// Fewer messages go through the queue.
const LEAST: usize = 4;

/// Messages that one worker has, in order; see [`Mux::handle_read_by`].
#[derive(Clone, Debug)]
pub struct Batch {
    psock: psock::Id,
    /// The number of the first message of the read.
    number: u64,
    bytes: Bytes,
    extents: std::sync::Arc<[Extent]>,
    /// The next one that is to be begun, and behind the last one.
    next: usize,
    end: usize,
    received: Time,
    /// How many workers died with the only one.
    deaths: u8,
    /// Bytes that each is counted with, and the first besides.
    share: usize,
    rest: usize,
}

/// The same, as the core has it.
#[derive(Debug)]
pub(super) struct LocalBatch {
    batch: Batch,
    done: usize,
}

/// Runs that a worker holds, or parts of runs, in the order in which they were given; each with how many of its messages were
/// answered, from the first on.
#[derive(Debug, Default)]
pub(super) struct BatchList {
    batches: VecDeque<(Batch, usize)>,
    messages: usize,
}

impl BatchList {
    /// Messages in them.
    pub(super) const fn len(&self) -> usize {
        self.messages
    }

    pub(super) fn push(&mut self, batch: Batch) {
        self.messages += batch.len();
        self.batches.push_back((batch, 0));
    }

    /// Something was answered to this message, and to some behind it: to how many of those `count` it was. None when it is not here.
    pub(super) fn answered(&mut self, first: Ticket, count: usize) -> Option<usize> {
        let (at, place) = self.find(first)?;
        let (batch, answered) = &mut self.batches[at];
        let count = count.min(batch.len() - place);
        if place <= *answered {
            *answered = (*answered).max(place + count);
        } else {
            // Those between were not.
            let (_, answered) = self.part(at, place);
            *answered = count;
        }
        Some(count)
    }

    /// This message and some behind it are done: those of the `count` that stand here together, and whether something was answered to
    /// the first. None when it is not here.
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

    /// All of them.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = (Batch, usize)> {
        self.messages = 0;
        self.batches.drain(..)
    }

    /// Which of them has this message, and as which of those that it has.
    fn find(&self, ticket: Ticket) -> Option<(usize, usize)> {
        let place = |(batch, _): &(Batch, usize)| {
            let place = ticket.number.checked_sub(batch.number + batch.next as u64)? as usize;
            (batch.psock == ticket.psock && place < batch.len()).then_some(place)
        };
        // What is done in order is found at once.
        self.batches.iter().enumerate().find_map(|(at, row)| Some((at, place(row)?)))
    }

    /// Parts a row before this place: the part behind it.
    fn part(&mut self, at: usize, place: usize) -> &mut (Batch, usize) {
        let (batch, answered) = &mut self.batches[at];
        let first = (batch.split_to(place), (*answered).min(place));
        *answered = answered.saturating_sub(place);
        self.batches.insert(at, first);
        &mut self.batches[at + 1]
    }
}

impl Batch {
    /// How many of its messages are not begun.
    pub fn len(&self) -> usize {
        self.end - self.next
    }

    /// Whether all are begun.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where its messages came from.
    pub const fn psock(&self) -> psock::Id {
        self.psock
    }

    /// The next message, which is thereby begun.
    pub fn begin(&mut self) -> Option<Message> {
        let at = self.advance(1).next()?;
        self.message(at)
    }

    /// The name of the next message.
    pub fn first(&self) -> Option<Ticket> {
        (!self.is_empty()).then(|| self.ticket(self.next))
    }

    /// Those that are not begun, where they lie.
    pub fn views(&self) -> impl Iterator<Item = View<'_>> + Clone {
        self.extents[self.next..self.end].iter().zip(self.next..).map(|(found, at)| self.view_of(found, at))
    }

    /// How many of those that are not begun, from the first on and `most` at most, have `each` bytes at most, and so many together.
    pub fn short(&self, most: usize, each: usize, bytes: usize) -> usize {
        let found = &self.extents[self.next..self.end];
        let from = found.first().map_or(0, |first| first.start);
        let short = |found: &&Extent| found.length <= each && found.end() - from <= bytes;
        found.iter().take(most).take_while(short).count()
    }

    /// The next so many messages, one behind the other, where they lie.
    pub fn bytes(&self, count: usize) -> &[u8] {
        let places = self.next..self.next + count.min(self.len());
        let found = &self.extents[places];
        let Some((first, last)) = found.first().zip(found.last()) else { return &[] };
        &self.bytes[first.start..last.end()]
    }

    /// The next so many messages are begun.
    pub fn skip(&mut self, count: usize) {
        self.advance(count);
    }

    /// How many workers died with it, if it is one message; no batch of several has been with any.
    pub const fn deaths(&self) -> u8 {
        self.deaths
    }

    /// The names of those that are not begun.
    pub fn rest(&self) -> impl Iterator<Item = Ticket> {
        let (psock, number) = (self.psock, self.number);
        (self.next..self.end).map(move |at| Ticket { psock, number: number + at as u64 })
    }

    /// The name of the one at this place.
    pub(crate) const fn ticket(&self, at: usize) -> Ticket {
        Ticket { psock: self.psock, number: self.number + at as u64 }
    }

    /// The one at this place, where it lies.
    #[cfg(feature = "io")]
    pub(crate) fn view(&self, at: usize) -> Option<View<'_>> {
        Some(self.view_of(self.extents.get(at)?, at))
    }

    fn view_of(&self, found: &Extent, at: usize) -> View<'_> {
        let Extent { skip, trim, mark, hash, .. } = *found;
        let bytes = &self.bytes[found.range()];
        View { ticket: self.ticket(at), bytes, skip, trim, mark, hash, received: self.received }
    }

    /// The places of the next ones, at most so many, which are thereby begun.
    pub(crate) fn advance(&mut self, most: usize) -> std::ops::Range<usize> {
        let from = self.next;
        self.next += most.min(self.len());
        from..self.next
    }

    /// So many of those that were begun last are not.
    #[cfg(feature = "io")]
    pub(crate) fn rewind(&mut self, count: usize) {
        self.next -= count;
    }

    pub(crate) fn message(&self, at: usize) -> Option<Message> {
        let found = self.extents.get(at)?;
        let Extent { skip, trim, mark, hash, .. } = *found;
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
        })
    }

    /// Bytes of those that are not begun, and what they are counted with.
    pub(super) fn weight(&self) -> (usize, usize) {
        (self.bytes(self.len()).len(), self.charge(self.next..self.end))
    }

    pub(super) const fn received(&self) -> Time {
        self.received
    }

    /// How many of those that are not begun, from the first on, are at most so many messages and bytes.
    pub(super) fn fitting(&self, most: usize, bytes: usize) -> usize {
        let most = most.min(self.len());
        if self.bytes(most).len() <= bytes {
            return most;
        }
        let from = self.extents[self.next].start;
        self.extents[self.next..self.next + most].partition_point(|found| found.end() - from <= bytes)
    }

    /// The next so many that are not begun, by themselves; this has the others.
    pub(super) fn split_to(&mut self, count: usize) -> Self {
        let end = self.next + count.min(self.len());
        let first = Self { end, ..self.clone() };
        self.next = end;
        first
    }

    /// A message that waited by itself, as a batch of one. What it is counted with is the core's to know.
    pub(super) fn of_one(message: &Message) -> Self {
        let Message { ticket, bytes, skip, trim, mark, hash, received, deaths, .. } = message.clone();
        let found = [Extent { start: 0, length: bytes.len(), skip, trim, mark, hash }];
        let Ticket { psock, number } = ticket;
        let found = std::sync::Arc::new(found);
        Self { psock, number, bytes, extents: found, next: 0, end: 1, received, deaths, share: 0, rest: 0 }
    }

    /// Bytes that these are counted with.
    fn charge(&self, range: std::ops::Range<usize>) -> usize {
        range.len() * self.share + if range.start == 0 && !range.is_empty() { self.rest } else { 0 }
    }
}

impl LocalBatch {
    /// Those that are not done.
    pub(super) fn left(&self) -> usize {
        self.batch.end - self.done
    }
}

impl Mux {
    /// As [`Mux::handle_read`], by a worker that has nothing: it may get the messages that were read as a batch, to do them at
    /// once.
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

    /// The first of these that are not done are, `done` more of them; and this answers them, in pieces of so many replies
    /// each.
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
        if let Some(psock) = self.psocks.get_mut(psock) {
            psock.in_hand -= done;
            psock.stats.unreserved += u64::from(psock.in_hand == 0 && done > 0);
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
        if self.psocks.get(to).is_none_or(psock::Psock::is_dead) {
            self.counters.totals.unsent += u64::from(messages);
            return;
        }
        if let Some(worker) = self.workers.get_mut(id) {
            worker.count_sent(messages, bytes.len());
        }
        self.queue_out(to, Outgoing::new(bytes, messages));
    }

    /// What a worker got as rows are messages like others from now on.
    pub(super) fn split_batches(&mut self, id: worker::Id) {
        let Some(worker) = self.workers.get_mut(id) else { return };
        for (batch, answered) in worker.batches.drain() {
            let messages = (batch.next..batch.end).filter_map(|at| batch.message(at));
            let held = messages.enumerate().map(|(at, message)| InHand { message, answered: at < answered });
            worker.in_hand.extend(held);
        }
    }

    /// What is not done of a worker's batch are messages like others from now on, which it holds.
    pub fn split_local(&mut self, id: worker::Id) {
        let Some(worker) = self.workers.get_mut(id) else { return };
        let Some(LocalBatch { batch, done }) = worker.local.take() else { return };
        for message in (done..batch.end).filter_map(|at| batch.message(at)) {
            worker.in_hand_bytes += message.bytes.len();
            worker.in_hand.push_back(InHand { message, answered: false });
        }
    }

    /// Whether the worker that read these may have them as a batch.
    pub(super) fn local_reader(&self, count: usize, bytes: usize) -> Option<worker::Id> {
        let id = self.reads.worker?;
        let worker = self.workers.get(id)?;
        let free = worker.enabled && worker.held() == 0 && self.reads.local.is_none();
        let alone = self.config.order == Order::None && self.ready.is_empty();
        let short =
            !self.service_time.is_unknown() && !self.is_long(count) && bytes <= self.config.worker_bytes;
        (free && alone && short && count >= LEAST && self.config.batch > 1).then_some(id)
    }

    /// Gives them to it.
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

    /// They wait for a worker, whichever.
    pub(super) fn queue_batch(&mut self, id: psock::Id, bytes: Bytes, memory: usize, found: &[Extent]) {
        let Some(batch) = self.receive_batch(id, bytes, memory, found) else { return };
        self.counters.totals.queued += batch.len() as u64;
        self.ready.push_batch(batch);
    }

    /// Messages of a read have come, which somebody has from now on.
    fn receive_batch(
        &mut self,
        id: psock::Id,
        bytes: Bytes,
        memory: usize,
        found: &[Extent],
    ) -> Option<Batch> {
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
