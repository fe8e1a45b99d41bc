//! Runs: messages of one read that the worker which read them does itself.
//!
//! What: a worker that reads a socket and finds a few short messages gets all of them at once ([`Mux::handle_read_by`]), without
//! the queue between. They are one thing to the core, whatever their number: it counts how many are done, from the front, and
//! what was answered goes out as one piece. When somebody else is to have some of them, the run is unrolled
//! ([`Mux::unroll`]): from then on they are messages like others, held by that worker, and can be handed back.
//!
//! Invariant: a run is given only when no message waits, order is nobody's concern, and all of it takes less time than
//! another worker is worth waking for.

use bytes::Bytes;

#[cfg(feature = "io")]
use super::message::View;
use super::message::{Message, Ticket};
use super::psock::{self, Outgoing};
use super::receive::Found;
use super::worker::{self, InHand};
use super::{Mux, Order};
use crate::Time;

/// Fewer messages go through the queue.
const LEAST: usize = 4;

/// Messages that one worker has, in order; see [`Mux::handle_read_by`].
#[derive(Clone, Debug)]
pub struct Run {
    psock: psock::Id,
    /// The number of the first message of the read.
    number: u64,
    bytes: Bytes,
    found: std::sync::Arc<[Found]>,
    /// The next one that is to be begun.
    next: usize,
    received: Time,
    /// Bytes that each is counted with, and the first besides.
    share: usize,
    rest: usize,
}

/// The same, as the core has it.
#[derive(Debug)]
pub(super) struct Held {
    run: Run,
    done: usize,
}

impl Run {
    /// How many of its messages are not begun.
    pub fn len(&self) -> usize {
        self.found.len() - self.next
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

    /// The names of those that are not begun.
    pub fn rest(&self) -> impl Iterator<Item = Ticket> {
        let (psock, number) = (self.psock, self.number);
        (self.next..self.found.len()).map(move |at| Ticket { psock, number: number + at as u64 })
    }

    /// The name of the one at this place.
    pub(crate) const fn ticket(&self, at: usize) -> Ticket {
        Ticket { psock: self.psock, number: self.number + at as u64 }
    }

    /// The one at this place, where it lies.
    #[cfg(feature = "io")]
    pub(crate) fn view(&self, at: usize) -> Option<View<'_>> {
        let found = self.found.get(at)?;
        let Found { skip, trim, mark, hash, .. } = *found;
        let bytes = self.bytes.get(found.range())?;
        Some(View { ticket: self.ticket(at), bytes, skip, trim, mark, hash, received: self.received })
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
        let found = self.found.get(at)?;
        let Found { skip, trim, mark, hash, .. } = *found;
        Some(Message {
            ticket: self.ticket(at),
            bytes: self.bytes.slice(found.range()),
            skip,
            trim,
            mark,
            hash,
            received: self.received,
            charge: self.charge(at..at + 1),
            deaths: 0,
        })
    }

    /// Bytes that these are counted with.
    fn charge(&self, range: std::ops::Range<usize>) -> usize {
        range.len() * self.share + if range.start == 0 && !range.is_empty() { self.rest } else { 0 }
    }
}

impl Held {
    /// Those that are not done.
    pub(super) fn left(&self) -> usize {
        self.run.found.len() - self.done
    }
}

impl Mux {
    /// As [`Mux::handle_read`], by a worker that has nothing: it may get the messages that were read as a run, to do them at
    /// once.
    pub fn handle_read_by(
        &mut self,
        id: psock::Id,
        buffer: Vec<u8>,
        by: worker::Id,
        now: Time,
    ) -> Option<Run> {
        self.reader = Some(by);
        self.handle_read(id, buffer, now);
        self.reader = None;
        self.run.take()
    }

    /// The first of these that are not done are, `done` more of them; and this answers them, in pieces of so many replies
    /// each.
    pub fn handle_run(
        &mut self,
        id: worker::Id,
        done: usize,
        replies: impl IntoIterator<Item = (Bytes, u32)>,
        now: Time,
    ) {
        self.now = self.now.max(now);
        let Some(worker) = self.workers.get_mut(id) else { return };
        let Some(held) = &mut worker.run else { return };
        let psock = held.run.psock;
        let done = done.min(held.left());
        let charge = held.run.charge(held.done..held.done + done);
        held.done += done;
        worker.finished += done as u64;
        if held.left() == 0 {
            worker.run = None;
        }
        self.deferring = true;
        for (bytes, messages) in replies {
            self.reply_run(id, psock, bytes, messages);
        }
        self.deferring = false;
        self.totals.in_hand -= done;
        self.totals.done += done as u64;
        if let Some(psock) = self.psocks.get_mut(psock) {
            psock.in_hand -= done;
            psock.stats.unreserved += u64::from(psock.in_hand == 0 && done > 0);
            psock.outstanding -= done;
            psock.memory -= charge;
            self.message_bytes -= charge;
            if psock.outstanding == 0 {
                psock.active = self.now;
            }
        }
        self.recount(charge, 0);
        self.settle_deferred();
        self.settle(psock);
        self.check_left(id);
    }

    fn reply_run(&mut self, id: worker::Id, to: psock::Id, bytes: Bytes, messages: u32) {
        if self.psocks.get(to).is_none_or(psock::Psock::is_dead) {
            self.totals.unsent += u64::from(messages);
            return;
        }
        if let Some(worker) = self.workers.get_mut(id) {
            worker.count_sent(messages, bytes.len());
        }
        self.queue_out(to, Outgoing::new(bytes, messages));
    }

    /// What is not done of a worker's run are messages like others from now on, which it holds.
    pub fn unroll(&mut self, id: worker::Id) {
        let Some(worker) = self.workers.get_mut(id) else { return };
        let Some(Held { run, done }) = worker.run.take() else { return };
        for message in (done..run.found.len()).filter_map(|at| run.message(at)) {
            worker.in_hand_bytes += message.bytes.len();
            worker.in_hand.push_back(InHand { message, answered: false });
        }
    }

    /// Whether the worker that read these may have them as a run.
    pub(super) fn may_run(&self, count: usize, bytes: usize) -> Option<worker::Id> {
        let id = self.reader?;
        let worker = self.workers.get(id)?;
        let free = worker.enabled && worker.in_hand.is_empty() && worker.run.is_none() && self.run.is_none();
        let alone = self.config.order == Order::None && self.ready.is_empty();
        let short = self.typical > 0 && !self.is_long(count) && bytes <= self.config.worker_bytes;
        (free && alone && short && count >= LEAST && self.config.batch > 1).then_some(id)
    }

    /// Gives them to it.
    pub(super) fn give_run(
        &mut self,
        by: worker::Id,
        id: psock::Id,
        bytes: Bytes,
        memory: usize,
        found: &[Found],
    ) {
        let count = found.len();
        let (share, rest) = (memory / count + size_of::<Message>(), memory % count);
        let Some(psock) = self.psocks.get_mut(id) else { return };
        let number = psock.next;
        let run =
            Run { psock: id, number, found: found.into(), next: 0, received: self.now, share, rest, bytes };
        let charge = run.charge(0..count);
        let length = run.bytes.len() as u64;
        psock.next += count as u64;
        psock.stats.rx_msgs += count as u64;
        psock.stats.rx_bytes += length;
        psock.stats.reserved += u64::from(psock.in_hand == 0);
        psock.outstanding += count;
        psock.in_hand += count;
        psock.memory += charge;
        self.message_bytes += charge;
        self.totals.received += count as u64;
        self.totals.in_hand += count;
        self.queue_wait.saturating_record_n(0, count as u64);
        self.set_activity(by, worker::Activity::Awake);
        if let Some(worker) = self.workers.get_mut(by) {
            worker.since = self.now;
            worker.stats.rx_msgs += count as u64;
            worker.stats.rx_bytes += length;
            worker.run = Some(Held { run: run.clone(), done: 0 });
        }
        self.run = Some(run);
        self.recount(0, charge);
    }
}
