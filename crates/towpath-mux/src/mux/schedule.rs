//! The scheduler: which worker gets which message.
//!
//! What: messages that any worker may take wait in one queue, oldest first ([`super::ready`]). A free worker
//! takes from its front, so that no message waits behind a busy worker. [`Order::Sticky`] has one more queue
//! per worker. [`Order::Serial`] and [`Order::Key`] put a message into the queue when the one before it is
//! done.
//!
//! A turn is one message, or as many as take no longer than waking another worker; ten times as many while no
//! other worker is idle. If a message takes longer than estimated, its worker is asked to hand back the rest
//! ([`Event::Recall`]).
//!
//! Races: none, the mux belongs to one thread at a time. A woken and an awake worker may both ask for the
//! same message; the first one gets it. A woken worker that does not ask, because its thread is busy, is
//! waited for up to [`Config::patience`](super::Config::patience). Then the next one is woken.

use std::collections::VecDeque;
use std::time::Duration;

use hdrhistogram::Histogram;

use super::batch::Batch;
use super::event::Event;
use super::message::{Message, Ticket};
use super::opened::Opened;
use super::ready::Entry;
use super::worker::{self, Activity, Worker};
use super::{Mux, Order};
use crate::Time;

impl Mux {
    /// Adds a worker that may hold up to `credit` messages (KCM's SIOCKCMCLONE). The worker counts as awake:
    /// it must ask for messages.
    pub fn clone_worker(&mut self, credit: usize, now: Time) -> worker::Id {
        self.now = self.now.max(now);
        let id = self.workers.insert(Worker::new(credit.max(1), now));
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
        let Some(most) = self.begin_turn(id, most, others, now) else { return 0 };
        let (now, mut given, mut waits) = (self.now, 0, Waits::default());
        let Some(worker) = self.workers.get_mut(id) else { return 0 };
        while worker.takes_more(most, &self.config) {
            let Some(message) = worker.pinned.pop_front().or_else(|| self.ready.pop_front()) else { break };
            waits.push(&mut self.counters.queue_wait, now.since(message.received), 1);
            out.push(message.clone());
            if let Some(psock) = self.psocks.get_mut(message.ticket.psock) {
                psock.hold(1);
                if message.is_opened() {
                    psock.opened = Opened::By(id);
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
        let Some(most) = self.begin_turn(id, most, true, now) else { return 0 };
        let (now, mut given, mut waits) = (self.now, 0, Waits::default());
        let Some(worker) = self.workers.get_mut(id) else { return 0 };
        while worker.takes_more(most, &self.config) {
            let room = self.config.worker_bytes.saturating_sub(worker.in_hand_bytes);
            let pinned = worker.pinned.pop_front().map(Entry::Message);
            let Some(waiting) = pinned.or_else(|| self.ready.pop_batch(most - worker.held(), room)) else {
                break;
            };
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
            waits.push(&mut self.counters.queue_wait, now.since(batch.received()), batch.len() as u64);
            if let Some(psock) = self.psocks.get_mut(batch.psock()) {
                psock.hold(batch.len());
                if batch.is_opened() {
                    psock.opened = Opened::By(id);
                }
            }
            given += batch.len();
            out.push(batch);
        }
        waits.end(&mut self.counters.queue_wait);
        self.end_poll(id, given);
        given
    }

    /// A worker asks for messages. Returns how many it may hold. `others`: the caller gives other workers
    /// their share at the same time.
    fn begin_turn(&mut self, id: worker::Id, most: usize, others: bool, now: Time) -> Option<usize> {
        self.now = self.now.max(now);
        self.end_turn(id);
        let share = self.share(id, others);
        let worker = self.workers.get_mut(id)?;
        if worker.in_hand.is_empty() && worker.batches.len() == 0 {
            worker.since = self.now;
        }
        Some(worker.credit.min(share).min(most))
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
        let Some(held) = worker.take(ticket) else { return false };
        worker.finished += 1;
        self.counters.totals.in_hand -= 1;
        self.counters.totals.done += 1;
        self.unhold(ticket);
        self.finish(&held.message);
        self.check_left(id);
        true
    }

    /// The worker has done `count` consecutive messages of a connection, starting with `first`. Returns how
    /// many of them it held.
    pub fn done_batch(&mut self, id: worker::Id, (first, count): (Ticket, u32), now: Time) -> u32 {
        let tickets = (0..u64::from(count)).map(|at| Ticket { number: first.number + at, ..first });
        if self.config.order != Order::None {
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
        if let Some(psock) = self.psocks.get_mut(first.psock) {
            psock.in_hand -= done;
            psock.stats.unreserved += u64::from(psock.in_hand == 0);
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
            worker.stats.handed_back += 1;
            self.counters.totals.handed_back += 1;
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
        if disable {
            self.unpin(id, false);
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
        let close = self.close_all_of(id);
        self.unpin(id, close);
        self.check_left(id);
    }

    /// The worker died. Messages that it had not answered go to other workers, or are returned by
    /// [`Event::Undone`] after [`Config::redeliver`](super::Config::redeliver) deaths.
    pub fn handle_worker_died(&mut self, id: worker::Id, now: Time) {
        self.now = self.now.max(now);
        let Some(worker) = self.workers.get_mut(id) else { return };
        worker.enabled = false;
        let close = self.close_all_of(id);
        self.unpin(id, close);
        self.split_local(id);
        self.split_batches(id);
        let Some(worker) = self.workers.remove(id) else { return };
        self.counters.workers.add(&worker.stats);
        let mut again = Vec::new();
        for held in worker.in_hand {
            let mut message = held.message;
            message.deaths += 1;
            if held.answered {
                self.counters.totals.in_hand -= 1;
                self.counters.totals.done += 1;
                self.unhold(message.ticket);
                self.finish(&message);
            } else if close {
                self.counters.totals.in_hand -= 1;
                self.counters.totals.undone += 1;
                self.unhold(message.ticket);
                self.finish(&message);
            } else if message.deaths > self.config.redeliver {
                self.counters.totals.in_hand -= 1;
                self.counters.totals.undone += 1;
                self.unhold(message.ticket);
                if message.is_opened()
                    && let Some(psock) = self.psocks.get_mut(message.ticket.psock)
                {
                    psock.opened = Opened::No;
                }
                self.finish(&message);
                self.events.push_back(Event::Undone(message));
            } else {
                self.counters.totals.redelivered += 1;
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

    /// Returns true if a message waits for a worker or is with one.
    pub const fn has_work(&self) -> bool {
        self.counters.totals.queued + self.counters.totals.in_hand > 0
    }

    /// Number of messages of a connection that are not done.
    #[cfg(feature = "io")]
    pub(crate) fn outstanding(&self, id: super::psock::Id) -> usize {
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
            Order::None | Order::Replies => self.ready.push_back(message),
            Order::Key if message.hash == 0 => self.ready.push_back(message),
            Order::Key => {
                if let Some(message) = self.keys.enter(message) {
                    self.ready.push_back(message);
                }
            }
            Order::Serial => {
                let Some(psock) = self.psocks.get_mut(message.ticket.psock) else { return };
                if psock.busy {
                    psock.pending.push_back(message);
                } else {
                    psock.busy = true;
                    self.ready.push_back(message);
                }
            }
            Order::Sticky => {
                let id = message.ticket.psock;
                let Some(psock) = self.psocks.get_mut(id) else { return };
                psock.pending.push_back(message);
                self.pin(id);
            }
        }
    }

    /// [`Order::Sticky`]: moves the messages queued at a connection to its worker. Chooses a new worker if no
    /// worker holds messages of the connection.
    pub(super) fn pin(&mut self, id: super::psock::Id) {
        let Some(psock) = self.psocks.get(id) else { return };
        let bound =
            psock.bound.filter(|&worker| self.workers.get(worker).is_some_and(|worker| worker.enabled));
        let worker = match bound {
            Some(worker) => worker,
            None if psock.in_hand > 0 => return,
            None => match self.workers.least_busy() {
                Some(worker) => worker,
                None => return,
            },
        };
        self.open_for(id, worker);
        let (Some(psock), Some(other)) = (self.psocks.get_mut(id), self.workers.get_mut(worker)) else {
            return;
        };
        psock.bound = Some(worker);
        if psock.pending.is_empty() {
            return;
        }
        other.pinned.append(&mut psock.pending);
        if other.activity == Activity::Idle {
            self.events.push_back(Event::Wake(worker));
            self.set_activity(worker, Activity::Woken);
        }
    }

    /// [`Order::Sticky`]: assigns connections that waited for a worker.
    fn pin_all(&mut self) {
        if self.config.order != Order::Sticky {
            return;
        }
        let waiting = self.psocks.iter().filter(|(_, psock)| !psock.pending.is_empty());
        for id in waiting.map(|(id, _)| id).collect::<Vec<_>>() {
            self.pin(id);
        }
    }

    /// Takes back the messages queued for this worker, or gives them up.
    fn unpin(&mut self, id: worker::Id, give_up: bool) {
        let Some(worker) = self.workers.get_mut(id) else { return };
        let back = std::mem::take(&mut worker.pinned);
        if give_up {
            return back.iter().for_each(|message| self.give_up_queued(message));
        }
        worker.stats.handed_back += back.len() as u64;
        self.counters.totals.handed_back += back.len() as u64;
        self.requeue(back.into());
    }

    /// Requeues messages that a worker held, oldest first.
    fn return_to_queue(&mut self, id: worker::Id, mut back: Vec<Message>) {
        for message in &mut back {
            self.unhold(message.ticket);
            self.reopen(message);
        }
        self.counters.totals.in_hand -= back.len() as u64;
        self.counters.totals.queued += back.len() as u64;
        if self.config.order != Order::Sticky || !self.workers.get(id).is_some_and(|worker| worker.enabled) {
            return self.requeue(back);
        }
        // They stay with the worker, unless their connection was moved meanwhile.
        let bound = |message: &Message| self.psocks.get(message.ticket.psock).and_then(|psock| psock.bound);
        let (own, others) = back.into_iter().partition(|message| bound(message) == Some(id));
        self.requeue(others);
        let own: Vec<Message> = own;
        if let Some(worker) = self.workers.get_mut(id) {
            own.into_iter().rev().for_each(|message| put_back(&mut worker.pinned, message));
        }
    }

    /// Requeues messages that were ready, before all others.
    fn requeue(&mut self, back: Vec<Message>) {
        if self.config.order != Order::Sticky {
            for message in back.into_iter().rev() {
                self.ready.push_front(message);
            }
            return;
        }
        let psocks: Vec<_> = back.iter().map(|message| message.ticket.psock).collect();
        for message in back.into_iter().rev() {
            if let Some(psock) = self.psocks.get_mut(message.ticket.psock) {
                psock.bound = None;
                put_back(&mut psock.pending, message);
            }
        }
        for psock in psocks {
            self.pin(psock);
        }
    }

    /// A message is not with a worker any more.
    pub(super) fn unhold(&mut self, ticket: Ticket) {
        let Some(psock) = self.psocks.get_mut(ticket.psock) else { return };
        psock.in_hand -= 1;
        psock.stats.unreserved += u64::from(psock.in_hand == 0);
    }

    /// A message is done. The next message in its order becomes ready.
    pub(super) fn finish(&mut self, message: &Message) {
        let ticket = message.ticket;
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
                Some(next) => self.ready.push_back(next),
                None => psock.busy = false,
            },
            Order::Sticky => {
                if !psock.pending.is_empty() {
                    self.pin(ticket.psock);
                }
            }
            Order::Key => {
                if let Some(next) = self.keys.next(message.hash) {
                    self.ready.push_back(next);
                }
            }
        }
        self.recount(message.charge, 0);
        self.settle(ticket.psock);
    }

    /// Removes a leaving worker that holds no messages.
    pub(super) fn check_left(&mut self, id: worker::Id) {
        let Some(worker) = self.workers.get(id) else { return };
        if worker.leaving && worker.held() == 0 {
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

/// [`Order::Sticky`]: inserts a message before the waiting ones, but after earlier messages of its
/// connection. Those were put back sooner if the worker was in the middle of its messages. The opened event is the first.
fn put_back(waiting: &mut VecDeque<Message>, message: Message) {
    let Ticket { psock, number } = message.ticket;
    let earlier = |other: &Message| {
        other.ticket.psock == psock
            && !message.is_opened()
            && (other.ticket.number < number || other.is_opened())
    };
    let before = waiting.iter().rposition(earlier);
    waiting.insert(before.map_or(0, |before| before + 1), message);
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
