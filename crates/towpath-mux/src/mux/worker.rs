//! A worker (KCM's socket): a handle through which a thread or process gets messages.

use std::collections::{BTreeMap, VecDeque};

use super::batch::{Batch, BatchList, LocalBatch};
use super::config::Config;
use super::message::{Message, Ticket};
use super::psock;
use super::ready::Ready;
use crate::Time;

slotmap::new_key_type! {
    /// Identifies a worker. Ids are not reused.
    pub struct Id;
}

/// Whether a worker will ask for messages without being woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Activity {
    /// It processes messages and asks when they are done.
    Awake,
    /// It asked and got no message.
    Idle,
    /// It was idle and has been woken.
    Woken,
    /// Overdue: it was woken and has not asked for so long that another worker is woken.
    Overdue,
}

#[derive(Debug)]
pub(super) struct Worker {
    pub(super) activity: Activity,
    /// When it was woken.
    pub(super) woken_at: Time,
    /// Number of messages that it may hold.
    pub(super) credit: usize,
    pub(super) enabled: bool,
    pub(super) leaving: bool,
    /// No connections are bound to it any more ([`super::Order::Sticky`]).
    pub(super) retiring: bool,
    /// When a leaving worker counts as dead.
    pub(super) deadline: Option<Time>,
    /// Messages for this worker only ([`super::Order::Sticky`]).
    pub(super) pinned: Ready,
    /// Number of connections bound to it ([`super::Order::Sticky`]).
    pub(super) connections: usize,
    pub(super) in_hand: VecDeque<InHand>,
    /// Messages given as batches.
    pub(super) batches: BatchList,
    /// Bytes of `in_hand` and `batches`.
    pub(super) in_hand_bytes: usize,
    /// The batch that it read itself.
    pub(super) local: Option<LocalBatch>,
    /// Messages of which it has done the first part. They do not count as held: it waits for the peer.
    pub(super) streams: BTreeMap<Ticket, InHand>,
    /// Those of which a part may be given to it, each once.
    pub(super) feed: VecDeque<Ticket>,
    /// Start of the worker's turn: the messages that one request gave it.
    pub(super) since: Time,
    /// Number of messages done in this turn, for the service time.
    pub(super) finished: u64,
    /// The messages that it has not begun were recalled.
    pub(super) recalled: bool,
    pub(super) stats: Stats,
}

/// A message that a worker holds.
#[derive(Debug)]
pub(super) struct InHand {
    pub(super) message: Message,
    /// A reply was sent: another worker must not process it again.
    pub(super) answered: bool,
}

towpath_metrics::metrics! {
    /// Counters of one worker.
    pub struct Stats in "mux_worker" {
        /// Messages given to the worker.
        pub rx_msgs: counter messages,
        /// Bytes of messages given to the worker.
        pub rx_bytes: counter bytes,
        /// Messages that the worker sent.
        pub tx_msgs: counter messages,
        /// Bytes that the worker sent.
        pub tx_bytes: counter bytes,
        /// Messages that the worker handed back, or that were taken back from it.
        pub handed_back: counter messages,
    }
}

impl Worker {
    pub(super) fn new(credit: usize, now: Time) -> Self {
        Self {
            activity: Activity::Awake,
            woken_at: now,
            credit,
            enabled: true,
            leaving: false,
            retiring: false,
            deadline: None,
            pinned: Ready::default(),
            connections: 0,
            in_hand: VecDeque::new(),
            batches: BatchList::default(),
            in_hand_bytes: 0,
            local: None,
            streams: BTreeMap::new(),
            feed: VecDeque::new(),
            since: now,
            finished: 0,
            recalled: false,
            stats: Stats::default(),
        }
    }

    /// Returns true if the worker may get more messages, with `most` as the limit of messages that it holds.
    pub(super) fn takes_more(&self, most: usize, config: &Config) -> bool {
        let held = self.in_hand.len() + self.batches.len();
        self.enabled
            && self.local.is_none()
            && held < most
            && (held == 0 || self.in_hand_bytes < config.worker_bytes)
    }

    /// Number of all messages that it has.
    pub(super) fn all(&self) -> usize {
        self.held() + self.streams.len()
    }

    /// Number of messages that it holds, without those of which it has done the first part.
    pub(super) fn held(&self) -> usize {
        self.in_hand.len() + self.batches.len() + self.local.as_ref().map_or(0, LocalBatch::left)
    }

    /// Connections of the messages that it holds.
    pub(super) fn psocks(&self) -> impl Iterator<Item = psock::Id> {
        let single = self.in_hand.iter().map(|held| held.message.ticket.psock);
        let streams = self.streams.keys().map(|ticket| ticket.psock);
        single.chain(self.batches.psocks()).chain(self.local.as_ref().map(LocalBatch::psock)).chain(streams)
    }

    /// Tickets of the messages that it holds, without those of a local batch.
    #[cfg(test)]
    pub(super) fn tickets(&self) -> impl Iterator<Item = Ticket> {
        let single = self.in_hand.iter().map(|held| held.message.ticket);
        single.chain(self.batches.tickets())
    }

    /// Counts messages that it sent. Empty messages are not counted, as for connections.
    pub(super) const fn count_sent(&mut self, messages: u32, bytes: usize) {
        if bytes > 0 {
            self.stats.tx_msgs += messages as u64;
            self.stats.tx_bytes += bytes as u64;
        }
    }

    /// Marks `count` consecutive messages as answered, starting with `first`. Returns false if the worker
    /// does not hold the first one.
    pub(super) fn answered(&mut self, first: Ticket, count: u32) -> bool {
        if let Some(held) = self.streams.get_mut(&first) {
            held.answered = true;
            return true;
        }
        let (mut next, end) = (first, first.number + u64::from(count));
        // Batches and single messages may alternate.
        while next.number < end {
            if let Some(some) = self.batches.answered(next, (end - next.number) as usize) {
                next.number += some as u64;
                continue;
            }
            // Work done in order is found in the first step.
            let Some(at) = self.in_hand.iter().position(|held| held.message.ticket == next) else { break };
            // Consecutive messages are mostly adjacent.
            for held in self.in_hand.range_mut(at..) {
                if next.number == end || held.message.ticket != next {
                    break;
                }
                held.answered = true;
                next.number += 1;
            }
        }
        next.number > first.number
    }

    pub(super) fn give(&mut self, message: Message) {
        self.in_hand_bytes += message.bytes.len();
        self.stats.rx_msgs += 1;
        self.stats.rx_bytes += message.bytes.len() as u64;
        self.in_hand.push_back(InHand { message, answered: false });
    }

    pub(super) fn give_batch(&mut self, batch: Batch) {
        let (bytes, _) = batch.weight();
        self.in_hand_bytes += bytes;
        self.stats.rx_msgs += batch.len() as u64;
        self.stats.rx_bytes += bytes as u64;
        self.batches.push(batch);
    }

    /// Removes up to `count` consecutive messages. Returns the number of messages found and the bytes charged
    /// for them.
    pub(super) fn take_batch(&mut self, first: Ticket, count: u32) -> (usize, usize) {
        let (mut done, mut charge, mut at) = (0, 0, 0);
        while at < u64::from(count) {
            let ticket = Ticket { number: first.number + at, ..first };
            let left = (u64::from(count) - at) as usize;
            let (step, found, counted) = match self.batches.take(ticket, left) {
                Some((batch, _)) => {
                    let (bytes, counted) = batch.weight();
                    self.in_hand_bytes -= bytes;
                    (batch.len(), batch.len(), counted)
                }
                None => self.take(ticket).map_or((1, 0, 0), |held| (1, 1, held.message.charge)),
            };
            (done, charge, at) = (done + found, charge + counted, at + step as u64);
        }
        (done, charge)
    }

    pub(super) fn take(&mut self, ticket: Ticket) -> Option<InHand> {
        if let Some((mut batch, answered)) = self.batches.take(ticket, 1) {
            let message = batch.begin()?;
            self.in_hand_bytes -= message.bytes.len();
            return Some(InHand { message, answered });
        }
        let held = match self.in_hand.front() {
            Some(held) if held.message.ticket == ticket => self.in_hand.pop_front()?,
            _ => {
                let at = self.in_hand.iter().position(|held| held.message.ticket == ticket)?;
                self.in_hand.remove(at)?
            }
        };
        self.in_hand_bytes -= held.message.bytes.len();
        Some(held)
    }
}
