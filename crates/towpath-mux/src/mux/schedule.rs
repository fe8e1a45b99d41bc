//! The scheduler: which worker gets which message.
//!
//! What: messages that any worker may take wait in one queue per connection ([`super::ready`]). A free worker
//! takes from the connection whose turn it is, so that no message waits behind a busy worker, nor behind many
//! messages of another connection. [`Order::Sticky`] has such queues per worker (`sticky.rs`).
//! [`Order::Serial`] and [`Order::Key`] put a message into the queue when the one before it is done.
//!
//! A turn is one message, or as many as take no longer than waking another worker; ten times as many while no
//! other worker is idle. While several connections wait, each one gets at most this number at a time. If a message
//! takes longer than estimated, its worker is asked to hand back the rest ([`Event::Recall`]).
//!
//! Messages of a connection that was reset or cut are discarded unless a worker has them (`discard.rs`).
//!
//! Races: none, the mux belongs to one thread at a time. A woken and an awake worker may both ask for the
//! same message; the first one gets it. A woken worker that does not ask, because its thread is busy, is
//! waited for up to [`Config::patience`](super::Config::patience). Then the next one is woken.

use std::time::Duration;

use hdrhistogram::Histogram;

use super::batch::Batch;
use super::event::Event;
use super::message::{Message, Ticket};
use super::opened::Opened;
use super::ready::Entry;
use super::worker::{self, Activity, Worker};
use super::{Mux, Order, psock};
use crate::Time;

impl Mux {
    /// Adds a worker that may hold up to `credit` messages (KCM's SIOCKCMCLONE). The worker counts as awake:
    /// it must ask for messages.
    pub fn clone_worker(&mut self, credit: usize, now: Time) -> worker::Id {
        self.now = self.now.max(now);
        let id = self.workers.insert(Worker::new(credit.max(1), now));
        self.count_workers();
        self.pin_all();
        id
    }

    /// Appends the messages that the worker is to process now, oldest first, and returns their number. After
    /// 0 the worker is idle until [`Event::Wake`]. A worker that holds messages gets as many as complete its
    /// turn.
    pub fn poll_messages(&mut self, id: worker::Id, now: Time, out: &mut Vec<Message>) -> usize {
        self.poll(id, (usize::MAX, false), now, out)
    }

    /// As [`Mux::poll_messages`], for a caller that gives messages to all workers at the same time. The
    /// worker then holds up to `most` messages, or what it held before.
    pub fn poll_at_most(&mut self, id: worker::Id, most: usize, now: Time, out: &mut Vec<Message>) -> usize {
        self.poll(id, (most, true), now, out)
    }

    /// As [`Mux::poll_messages`], but the worker then holds up to `most` messages, or what it held before.
    #[cfg(feature = "io")]
    pub(crate) fn poll_up_to(
        &mut self,
        id: worker::Id,
        most: usize,
        now: Time,
        out: &mut Vec<Message>,
    ) -> usize {
        self.poll(id, (most, false), now, out)
    }

    fn poll(
        &mut self,
        id: worker::Id,
        (most, others): (usize, bool),
        now: Time,
        out: &mut Vec<Message>,
    ) -> usize {
        let Some((most, quantum)) = self.begin_turn(id, most, others, now) else { return 0 };
        let (now, mut given, mut waits) = (self.now, 0, Waits::default());
        let Some(worker) = self.workers.get_mut(id) else { return 0 };
        while worker.takes_more(most, &self.config) {
            let queue = if worker.pinned.is_empty() { &mut self.ready } else { &mut worker.pinned };
            let Some(turn) = queue.turn(quantum) else { break };
            let limit = self.in_flight.limit(turn, now);
            if self.psocks.get(turn).is_some_and(|psock| psock.in_hand >= limit) {
                queue.park(turn);
                continue;
            }
            let Some(message) = queue.pop_front(quantum) else { break };
            waits.push(&mut self.counters.queue_wait, now.since(message.received), 1);
            out.push(message.clone());
            if let Some(psock) = self.psocks.get_mut(message.ticket.psock) {
                if message.is_opened() {
                    psock.opened = Opened::By(id);
                }
                if psock.hold(1) >= limit {
                    queue.park(message.ticket.psock);
                }
            }
            worker.give(message);
            given += 1;
        }
        waits.end(&mut self.counters.queue_wait);
        self.end_poll(id, given);
        given
    }

    /// As [`Mux::poll_at_most`], but messages of a connection that were read together come as one batch. A
    /// single message is a batch of one. Complete batches, or parts of them, by [`Mux::reply_batch`] and
    /// [`Mux::done_batch`], or message by message. Returns the number of messages.
    pub fn poll_batches(&mut self, id: worker::Id, most: usize, now: Time, out: &mut Vec<Batch>) -> usize {
        let Some((most, quantum)) = self.begin_turn(id, most, true, now) else { return 0 };
        let (now, mut given, mut waits) = (self.now, 0, Waits::default());
        let Some(worker) = self.workers.get_mut(id) else { return 0 };
        while worker.takes_more(most, &self.config) {
            let room = self.config.worker_bytes.saturating_sub(worker.in_hand_bytes);
            let free = most - worker.held();
            let queue = if worker.pinned.is_empty() { &mut self.ready } else { &mut worker.pinned };
            let Some(psock) = queue.turn(quantum) else { break };
            let in_hand = self.psocks.get(psock).map_or(0, |psock| psock.in_hand);
            let limit = self.in_flight.limit(psock, now);
            if in_hand >= limit {
                queue.park(psock);
                continue;
            }
            let count = free.min(limit - in_hand);
            let Some(waiting) = queue.pop_batch(quantum, count, room) else { break };
            let count = waiting.len();
            if let Some(psock) = self.psocks.get_mut(psock) {
                if waiting.is_opened() {
                    psock.opened = Opened::By(id);
                }
                if psock.hold(count) >= limit {
                    queue.park(waiting.psock());
                }
            }
            let batch = match waiting {
                Entry::Message(message) => {
                    let batch = Batch::of_one(&message);
                    worker.give(message);
                    batch
                }
                Entry::Batch(batch) => {
                    worker.give_batch(batch.clone());
                    batch
                }
            };
            waits.push(&mut self.counters.queue_wait, now.since(batch.received()), count as u64);
            given += count;
            out.push(batch);
        }
        waits.end(&mut self.counters.queue_wait);
        self.end_poll(id, given);
        given
    }

    /// A worker asks for messages. Returns how many it may hold, and how many a connection may give it while others
    /// wait. `others`: the caller gives other workers their share at the same time.
    fn begin_turn(&mut self, id: worker::Id, most: usize, others: bool, now: Time) -> Option<(usize, usize)> {
        self.now = self.now.max(now);
        self.end_turn(id);
        let share = self.share(id, others);
        self.in_flight.set_turn(share);
        let worker = self.workers.get_mut(id)?;
        if worker.in_hand.is_empty() && worker.batches.len() == 0 {
            worker.since = self.now;
        }
        Some((worker.credit.min(share).min(most), share))
    }

    /// The worker was given this number of messages.
    fn end_poll(&mut self, id: worker::Id, given: usize) {
        self.counters.totals.queued -= given as u64;
        self.counters.totals.in_hand += given as u64;
        let busy = given > 0 || self.workers.get(id).is_some_and(|worker| worker.held() > 0);
        self.set_activity(id, if busy { Activity::Awake } else { Activity::Idle });
        if !busy {
            self.recall();
        }
    }

    /// The worker has done this message. Returns false if it does not hold the message.
    pub fn done(&mut self, id: worker::Id, ticket: Ticket, now: Time) -> bool {
        self.now = self.now.max(now);
        let Some(worker) = self.workers.get_mut(id) else { return false };
        let held = match worker.take(ticket) {
            Some(held) if !held.message.more => held,
            held => return self.done_stream(id, ticket, held),
        };
        worker.finished += 1;
        self.counters.totals.in_hand -= 1;
        self.counters.totals.done += 1;
        self.release(ticket.psock, 1);
        self.finish(&held.message);
        self.check_left(id);
        true
    }

    /// The worker has done `count` consecutive messages of a connection, starting with `first`. Returns how
    /// many of them it held.
    pub fn done_batch(&mut self, id: worker::Id, (first, count): (Ticket, u32), now: Time) -> u32 {
        let tickets = (0..u64::from(count)).map(|at| Ticket { number: first.number + at, ..first });
        let in_parts = self.workers.get(id).is_some_and(|worker| worker.has_stream(first));
        if self.config.order != Order::None || in_parts {
            return tickets.filter(|ticket| self.done(id, *ticket, now)).count() as u32;
        }
        self.now = self.now.max(now);
        let Some(worker) = self.workers.get_mut(id) else { return 0 };
        let (done, charge) = worker.take_batch(first, count);
        if done == 0 {
            return 0;
        }
        worker.finished += done as u64;
        self.counters.totals.in_hand -= done as u64;
        self.counters.totals.done += done as u64;
        self.release(first.psock, done);
        if let Some(psock) = self.psocks.get_mut(first.psock) {
            psock.outstanding -= done;
            psock.memory -= charge;
            self.memory.remove_message(charge);
            if psock.outstanding == 0 {
                psock.active = self.now;
            }
        }
        self.recount(charge, 0);
        self.settle(first.psock);
        self.check_left(id);
        done as u32
    }

    /// The worker hands back messages that it has not begun. Other workers get them before all newer
    /// messages.
    pub fn handle_hand_back(&mut self, id: worker::Id, tickets: &[Ticket], now: Time) {
        self.now = self.now.max(now);
        self.split_batches(id);
        let mut back = Vec::with_capacity(tickets.len());
        for &ticket in tickets {
            let Some(worker) = self.workers.get_mut(id) else { return };
            let Some(held) = worker.take(ticket) else { continue };
            if self.psocks.get(ticket.psock).is_some_and(|psock| !psock.cut) {
                worker.stats.handed_back += 1;
                self.counters.totals.handed_back += 1;
            }
            back.push(held.message);
        }
        if let Some(worker) = self.workers.get_mut(id) {
            worker.recalled = false;
        }
        self.return_to_queue(id, back);
        self.check_left(id);
    }

    /// Stops (`true`) or resumes (`false`) giving messages to a worker (KCM_RECV_DISABLE). Messages queued
    /// for it go to others.
    pub fn disable(&mut self, id: worker::Id, disable: bool, now: Time) {
        self.now = self.now.max(now);
        let Some(worker) = self.workers.get_mut(id) else { return };
        if worker.leaving || worker.enabled != disable {
            return;
        }
        worker.enabled = !disable;
        self.count_workers();
        if disable {
            self.unpin(id);
            return;
        }
        self.pin_all();
        let Some(worker) = self.workers.get(id) else { return };
        if worker.activity == Activity::Idle && !self.ready.is_empty() {
            self.events.push_back(Event::Wake(id));
            self.set_activity(id, Activity::Woken);
        }
    }

    /// Removes a worker after it has done the messages that it holds, or at `deadline`. Reports
    /// [`Event::Left`] then. The worker gets no new messages.
    pub fn leave(&mut self, id: worker::Id, deadline: Option<Time>, now: Time) {
        self.now = self.now.max(now);
        let Some(worker) = self.workers.get_mut(id) else { return };
        worker.enabled = false;
        worker.leaving = true;
        worker.deadline = deadline;
        self.count_workers();
        self.take_queued(id);
        self.check_left(id);
    }

    /// The worker died. Messages that it had not answered go to other workers, or are returned by
    /// [`Event::Undone`] after [`Config::redeliver`](super::Config::redeliver) deaths.
    pub fn handle_worker_died(&mut self, id: worker::Id, now: Time) {
        self.now = self.now.max(now);
        let Some(worker) = self.workers.get_mut(id) else { return };
        worker.enabled = false;
        self.count_workers();
        let close = self.take_queued(id);
        self.split_local(id);
        self.split_batches(id);
        let Some(worker) = self.workers.remove(id) else { return };
        self.counters.workers.add(&worker.stats);
        let mut again = Vec::new();
        for held in worker.in_hand.into_iter().chain(worker.streams.into_values()) {
            let mut message = held.message;
            message.deaths = message.deaths.saturating_add(1);
            if message.more && !(held.answered && self.is_stream_given(message.ticket)) {
                self.give_up_stream(message, close);
            } else if held.answered {
                self.counters.totals.in_hand -= 1;
                self.counters.totals.done += 1;
                self.release(message.ticket.psock, 1);
                self.finish(&message);
            } else if close {
                self.counters.totals.in_hand -= 1;
                self.counters.totals.undone += 1;
                self.release(message.ticket.psock, 1);
                self.finish(&message);
            } else if message.deaths > self.config.redeliver {
                self.counters.totals.in_hand -= 1;
                self.counters.totals.undone += 1;
                self.release(message.ticket.psock, 1);
                if message.is_opened()
                    && let Some(psock) = self.psocks.get_mut(message.ticket.psock)
                {
                    psock.opened = Opened::No;
                }
                self.finish(&message);
                self.events.push_back(Event::Undone(message));
            } else {
                self.counters.totals.redelivered += u64::from(!self.is_cut(message.ticket.psock));
                again.push(message);
            }
        }
        self.return_to_queue(id, again);
        self.reopen_all(id);
    }

    /// Number of messages that wait for a worker.
    pub fn queued(&self) -> usize {
        self.counters.totals.queued as usize
    }

    /// Counts the enabled workers. More of them may hold more messages of a connection.
    fn count_workers(&mut self) {
        self.in_flight.set_workers(self.workers.values().filter(|worker| worker.enabled).count());
        for id in self.ready.parked_connections() {
            let limit = self.in_flight.limit(id, self.now);
            if self.psocks.get(id).is_some_and(|psock| psock.in_hand < limit) {
                self.ready.unpark(id);
            }
        }
    }

    /// Number of waiting messages, without those of connections at [`Config::in_flight`](super::Config::in_flight).
    pub fn available(&self) -> usize {
        if self.config.order != Order::Sticky {
            return self.queued() - self.ready.parked();
        }
        let pinned = self.workers.values().map(|worker| worker.pinned.parked()).sum::<usize>();
        self.queued() - self.ready.parked() - pinned
    }

    /// Returns true if a message waits for a worker or is with one.
    pub const fn has_work(&self) -> bool {
        self.counters.totals.queued + self.counters.totals.in_hand > 0
    }

    /// Number of messages of a connection that are not done.
    #[cfg(feature = "io")]
    pub(crate) fn outstanding(&self, id: psock::Id) -> usize {
        self.psocks.get(id).map_or(0, |psock| psock.outstanding)
    }

    /// Number of workers that have a turn.
    #[cfg(feature = "io")]
    pub(crate) const fn working(&self) -> usize {
        self.workers.awake()
    }

    /// Returns true if a worker has a turn.
    #[cfg(feature = "io")]
    pub(crate) const fn is_worked_for(&self) -> bool {
        self.workers.awake() > 0
    }

    /// Returns true if the worker must be woken to ask for messages.
    pub fn is_idle(&self, id: worker::Id) -> bool {
        self.workers.get(id).is_some_and(|worker| worker.activity == Activity::Idle)
    }

    /// Moving average of the time per message. 0 before the first message.
    pub const fn mean_service_time(&self) -> Duration {
        Duration::from_nanos(self.service_time.ewma)
    }

    /// The same average, slow to fall: it remembers rare slow messages.
    #[cfg(any(feature = "io", test))]
    pub(crate) const fn slow_service_time(&self) -> Duration {
        Duration::from_nanos(self.service_time.ewma_slow)
    }

    /// Puts a new message into its queue.
    pub(super) fn place(&mut self, message: Message) {
        match self.config.order {
            Order::None | Order::Replies => self.make_ready(message),
            Order::Key if message.hash == 0 => self.make_ready(message),
            Order::Key => {
                if let Some(message) = self.keys.enter(message) {
                    self.make_ready(message);
                }
            }
            Order::Serial => {
                let Some(psock) = self.psocks.get_mut(message.ticket.psock) else { return };
                if psock.busy {
                    psock.wait(message);
                } else {
                    psock.busy = true;
                    self.make_ready(message);
                }
            }
            Order::Sticky => {
                let id = message.ticket.psock;
                let Some(psock) = self.psocks.get_mut(id) else { return };
                psock.wait(message);
                self.pin(id);
            }
        }
    }

    /// Requeues messages that a worker held, oldest first.
    fn return_to_queue(&mut self, id: worker::Id, mut back: Vec<Message>) {
        for message in &mut back {
            self.release(message.ticket.psock, 1);
            self.reopen(message);
        }
        self.counters.totals.in_hand -= back.len() as u64;
        self.counters.totals.queued += back.len() as u64;
        back.retain(|message| {
            let cut = self.is_cut(message.ticket.psock);
            if cut {
                self.discard_returned(message);
            }
            !cut
        });
        if self.config.order != Order::Sticky {
            // Each one before the later ones.
            return back.into_iter().rev().for_each(|message| self.ready.put_back(message));
        }
        if !self.workers.get(id).is_some_and(|worker| worker.enabled) {
            return self.rebind(back);
        }
        // They stay with the worker, unless their connection was moved meanwhile.
        let bound = |message: &Message| self.psocks.get(message.ticket.psock).and_then(|psock| psock.bound);
        let (own, others): (Vec<_>, _) = back.into_iter().partition(|message| bound(message) == Some(id));
        self.rebind(others);
        if let Some(worker) = self.workers.get_mut(id) {
            own.into_iter().rev().for_each(|message| worker.pinned.put_back(message));
        }
    }

    /// A message may be given to any worker.
    pub(super) fn make_ready(&mut self, message: Message) {
        let id = message.ticket.psock;
        let limit = self.in_flight.limit(id, self.now);
        let full = self.psocks.get(id).is_some_and(|psock| psock.in_hand >= limit);
        self.ready.push_back(message, full);
    }

    /// `count` messages of a connection are not with a worker any more.
    pub(super) fn release(&mut self, id: psock::Id, count: usize) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        psock.in_hand -= count;
        psock.stats.unreserved += u64::from(psock.in_hand == 0 && count > 0);
        if psock.in_hand < self.in_flight.limit(id, self.now) {
            self.ready.unpark(id);
            if let Some(worker) = psock.bound.and_then(|worker| self.workers.get_mut(worker)) {
                worker.pinned.unpark(id);
            }
        }
    }

    /// A message is done. The next message in its order becomes ready.
    pub(super) fn finish(&mut self, message: &Message) {
        let ticket = message.ticket;
        if message.more {
            self.drop_stream(ticket);
        }
        let Some(psock) = self.psocks.get_mut(ticket.psock) else { return };
        psock.outstanding -= 1;
        psock.memory -= message.charge;
        self.memory.remove_message(message.charge);
        if psock.outstanding == 0 {
            psock.active = self.now;
        }
        match self.config.order {
            Order::None => {}
            Order::Replies => self.answered(ticket),
            Order::Serial => match psock.pending.pop_front() {
                Some(next) => self.make_ready(next),
                None => psock.busy = false,
            },
            Order::Sticky => {
                if !psock.pending.is_empty() {
                    self.pin(ticket.psock);
                }
            }
            Order::Key => self.ready_next_of_key(message.hash),
        }
        self.recount(message.charge, 0);
        self.settle(ticket.psock);
    }

    /// Removes a leaving worker that holds no messages.
    pub(super) fn check_left(&mut self, id: worker::Id) {
        let Some(worker) = self.workers.get(id) else { return };
        if worker.leaving && worker.all() == 0 {
            self.end_turn(id);
            if let Some(worker) = self.workers.remove(id) {
                self.counters.workers.add(&worker.stats);
            }
            self.events.push_back(Event::Left(id));
            self.reopen_all(id);
        }
    }

    /// Number of messages of this turn. `others`: idle workers get their share at the same time.
    fn share(&self, id: worker::Id, others: bool) -> usize {
        // A worker with more credit gets several turns of short messages at once.
        let credit = self.workers.get(id).map_or(1, |worker| worker.credit);
        let most = self.config.batch.max(if self.config.batch > 1 { credit } else { 1 }) as u64;
        if others && self.quick_batch().is_some() {
            return most as usize;
        }
        let others_idle = !others && self.workers.has_other_idle(id);
        self.service_time.turn(others_idle, self.wake_cost(), most)
    }

    /// Records the time per message of the turn that ends.
    fn end_turn(&mut self, id: worker::Id) {
        let Some(worker) = self.workers.get_mut(id) else { return };
        if worker.finished == 0 {
            return;
        }
        let took = u64::try_from(self.now.since(worker.since).as_nanos()).unwrap_or(u64::MAX);
        let each = (took / worker.finished).max(1);
        self.counters.service_time.saturating_record_n(each, worker.finished);
        worker.finished = 0;
        worker.since = self.now;
        self.service_time.record(each);
    }
}

/// Collects equal values and records them in one step: messages of one read have waited for the same time.
#[derive(Default)]
struct Waits {
    value: u64,
    count: u64,
}

impl Waits {
    fn push(&mut self, histogram: &mut Histogram<u64>, value: Duration, count: u64) {
        let value = u64::try_from(value.as_nanos()).unwrap_or(u64::MAX);
        if value != self.value {
            self.end(histogram);
            self.value = value;
        }
        self.count += count;
    }

    fn end(&mut self, histogram: &mut Histogram<u64>) {
        if self.count > 0 {
            histogram.saturating_record_n(self.value, std::mem::take(&mut self.count));
        }
    }
}
