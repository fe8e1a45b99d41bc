//! Counters and the snapshot for `towpath ctl show mux`.

use hdrhistogram::Histogram;

use super::psock::{self, Psock, Status};
use super::ready::Ready;
use super::{Mux, worker};

/// Maximum of the histograms: one hour in nanoseconds.
const LONGEST: u64 = 3_600_000_000_000;

towpath_metrics::metrics! {
    /// Counters of a mux. Always: received + opened = done + undone + discarded + queued + in_hand ([`Mux::check`]).
    pub struct Totals in "mux" {
        /// Whole messages received.
        pub received: counter messages,
        /// Messages received and given to workers in parts (`body=stream`). They count once, in `received` and all other counters.
        pub streamed: counter messages,
        /// Messages in parts whose connection ended before their last part. Their workers got an empty last part.
        pub streams_cut: counter messages,
        /// Messages in parts given up because their worker ended; included in `undone`. Their connections end.
        pub streams_undone: counter messages,
        /// Opened events for workers. They count as messages in `done`, `undone`, `queued` and `in_hand`.
        pub opened: counter events,
        /// Messages that workers have done.
        pub done: counter messages,
        /// Messages given up because workers died with them.
        pub undone: counter messages,
        /// Messages discarded before a worker began them because their connection was reset.
        pub discarded_reset: counter messages as "discarded": "Messages discarded before a worker began them because nothing can be sent to their peer, by reason." (reason = "reset"),
        /// Messages discarded before a worker began them because their connection ended by a limit or a deadline.
        pub discarded_ended: counter messages as "discarded" (reason = "ended"),
        /// Opened events that no worker got because their connection had been reset or cut.
        pub discarded_opened: counter messages as "discarded" (reason = "opened"),
        /// Messages that wait for a worker.
        pub queued: gauge messages,
        /// Messages with workers.
        pub in_hand: gauge messages,
        /// Messages passed from one worker to another because the first handed them back, left or was disabled.
        pub handed_back: counter messages,
        /// Messages passed from one worker to another because the first died.
        pub redelivered: counter messages,
        /// Messages sent completely.
        pub tx_msgs: counter messages,
        /// Bytes sent.
        pub tx_bytes: counter bytes,
        /// Messages of connected mode that were sent again, on another connection, because theirs ended.
        pub tx_retries: counter messages,
        /// Replies that were not sent completely because their connection had ended.
        pub unsent: counter messages,
        /// Connections attached.
        pub attach: counter connections,
        /// Connections ended.
        pub unattach: counter connections,
        /// Connections unattached while they had messages in the mux.
        pub unattach_rsvd: counter connections,
        /// Connections that workers closed.
        pub closed: counter connections,
        /// Connections that were reset, or on which a read, a write or TLS failed.
        pub resets: counter connections as "ended": "Connections that ended abnormally, by reason." (reason = "reset"),
        /// Connections that the peer closed inside a message.
        pub inside: counter connections as "ended" (reason = "inside_message"),
        /// Connections whose bytes the framing refused.
        pub malformed: counter connections as "ended" (reason = "malformed"),
        /// Connections that ended because they were idle for too long.
        pub idle: counter connections as "ended" (reason = "idle"),
        /// Connections whose peer accepted no data for too long.
        pub send_timeouts: counter connections as "ended" (reason = "send_timeout"),
        /// Connections with more data to send than the bound allows.
        pub send_full: counter connections as "ended" (reason = "send_full"),
        /// Connections that were not drained in time.
        pub drain_timeouts: counter connections as "ended" (reason = "drain_timeout"),
        /// Connections that workers reset.
        pub worker_resets: counter connections as "ended" (reason = "worker_reset"),
        /// Connections that ended because their worker ended.
        pub worker_ended: counter connections as "ended" (reason = "worker_ended"),
    }
}

impl Totals {
    /// Messages and opened events discarded before a worker began them because their connection had ended.
    pub const fn discarded(&self) -> u64 {
        self.messages_discarded() + self.discarded_opened
    }

    /// [`Totals::discarded`] without opened events.
    pub const fn messages_discarded(&self) -> u64 {
        self.discarded_reset + self.discarded_ended
    }

    /// [`Totals::done`] without opened events. Exact when none of these waits, is with a worker or was given up.
    pub const fn messages_done(&self) -> u64 {
        self.done.saturating_sub(self.opened - self.discarded_opened)
    }
}

/// Everything that a mux counts.
#[derive(Debug)]
pub(super) struct Counters {
    pub(super) totals: Totals,
    /// Sums over the connections that have ended.
    pub(super) psocks: psock::Stats,
    /// Sums over the workers that have left.
    pub(super) workers: worker::Stats,
    /// Nanoseconds that messages waited for a worker.
    pub(super) queue_wait: Histogram<u64>,
    /// Nanoseconds that workers had messages; the mean for the messages of one turn.
    pub(super) service_time: Histogram<u64>,
}

impl Default for Counters {
    fn default() -> Self {
        let histogram =
            || Histogram::new_with_max(LONGEST, 2).expect("two digits up to an hour are valid bounds");
        Self {
            totals: Totals::default(),
            psocks: psock::Stats::default(),
            workers: worker::Stats::default(),
            queue_wait: histogram(),
            service_time: histogram(),
        }
    }
}

/// A worker in a [`Show`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerRow {
    /// The worker.
    pub id: worker::Id,
    /// Its counters.
    pub stats: worker::Stats,
    /// Number of messages queued for this worker only.
    pub queued: usize,
    /// Number of messages that it holds.
    pub in_hand: usize,
    /// The worker is idle.
    pub rx_wait: bool,
    /// The worker gets no messages, because it is disabled or leaves.
    pub disabled: bool,
}

/// A connection in a [`Show`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PsockRow {
    /// The connection.
    pub id: psock::Id,
    /// Its counters.
    pub stats: psock::Stats,
    /// Number of messages that are queued or with workers.
    pub recv_queue: usize,
    /// Bytes of these messages and of the incomplete message.
    pub recv_bytes: usize,
    /// Bytes to send.
    pub send_bytes: usize,
    /// Its state.
    pub status: Status,
}

/// Snapshot of a mux for `towpath ctl show mux`, in KCM's columns.
#[derive(Clone, Debug)]
pub struct Show {
    /// Counters of the mux.
    pub totals: Totals,
    /// Sums over all connections, including the ended ones.
    pub psock_totals: psock::Stats,
    /// All bytes that the mux holds.
    pub bytes: usize,
    /// The memory bound is reached: no connection is read.
    pub full: bool,
    /// All workers.
    pub workers: Vec<WorkerRow>,
    /// All connections.
    pub psocks: Vec<PsockRow>,
}

impl Mux {
    /// Counters of the mux.
    pub const fn totals(&self) -> &Totals {
        &self.counters.totals
    }

    /// All bytes that the mux holds: messages, incomplete messages, replies.
    pub const fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Histogram of the nanoseconds that messages waited for a worker.
    pub const fn queue_wait(&self) -> &Histogram<u64> {
        &self.counters.queue_wait
    }

    /// Histogram of the nanoseconds that workers had messages; the mean for the messages of one turn.
    pub const fn service_time(&self) -> &Histogram<u64> {
        &self.counters.service_time
    }

    /// State of a connection, `None` if it has gone.
    pub fn status(&self, id: psock::Id) -> Option<Status> {
        Some(self.psocks.get(id)?.status())
    }

    /// Returns a snapshot.
    pub fn show(&self) -> Show {
        let mut psock_totals = self.counters.psocks;
        for psock in self.psocks.values() {
            psock_totals.add(&psock.stats);
        }
        let workers = self.workers.iter().map(|(id, worker)| WorkerRow {
            id,
            stats: worker.stats,
            queued: worker.pinned.len() + worker.pinned.parked(),
            in_hand: worker.all(),
            rx_wait: worker.activity == worker::Activity::Idle,
            disabled: !worker.enabled,
        });
        let psocks = self.psocks.iter().map(|(id, psock)| PsockRow {
            id,
            stats: psock.stats,
            recv_queue: psock.outstanding,
            recv_bytes: psock.memory + psock.buffered,
            send_bytes: psock.tx.bytes,
            status: psock.status(),
        });
        Show {
            totals: self.counters.totals,
            psock_totals,
            bytes: self.memory.bytes(),
            full: self.memory.is_full(),
            workers: workers.collect(),
            psocks: psocks.collect(),
        }
    }

    /// Recomputes the counts and compares. For tests.
    ///
    /// # Errors
    ///
    /// Returns the first difference.
    pub fn check(&self) -> Result<(), String> {
        let totals = &self.counters.totals;
        let pending = self.psocks.values().map(|psock| psock.pending.len()).sum::<usize>();
        let queue = self.keys.len();
        let waiting = |ready: &Ready| ready.len() + ready.parked();
        let pinned = self.workers.values().map(|worker| waiting(&worker.pinned)).sum::<usize>();
        let in_hand = self.workers.values().map(worker::Worker::all).sum::<usize>();
        let outstanding = self.psocks.values().map(|psock| psock.outstanding).sum::<usize>();
        let held = |psock: &Psock| psock.memory + psock.buffered + psock.tx.bytes + psock.tx.unacked.bytes();
        let rows = [
            ("queued", totals.queued as usize, waiting(&self.ready) + pending + queue + pinned),
            ("in hand", totals.in_hand as usize, in_hand),
            ("outstanding", (totals.queued + totals.in_hand) as usize, outstanding),
            ("bytes", self.memory.bytes(), self.psocks.values().map(held).sum()),
            (
                "bytes of messages",
                self.memory.messages(),
                self.psocks.values().map(|psock| psock.memory).sum(),
            ),
            (
                "received",
                (totals.received + totals.opened) as usize,
                (totals.done + totals.undone + totals.discarded() + totals.queued + totals.in_hand) as usize,
            ),
        ];
        for (what, counted, real) in rows.into_iter().chain(self.workers.checks()) {
            if counted != real {
                return Err(format!("{what}: counted {counted}, there are {real}"));
            }
        }
        for (id, worker) in self.workers.iter() {
            let bound = self.psocks.values().filter(|psock| psock.bound == Some(id)).count();
            if worker.connections != bound {
                return Err(format!("{id:?}: counted {} connections, there are {bound}", worker.connections));
            }
        }
        let enabled = self.workers.values().filter(|worker| worker.enabled).count();
        if self.in_flight.workers() != enabled {
            let counted = self.in_flight.workers();
            return Err(format!("counted {counted} enabled workers, there are {enabled}"));
        }
        for (id, psock) in &self.psocks {
            let limit = self.config.in_flight;
            if limit.is_some_and(|limit| psock.in_hand > limit) {
                return Err(format!("{id:?}: {} messages are with workers", psock.in_hand));
            }
            // Without a configured limit it may grow; the next message that is done shows this.
            if psock.in_hand < limit.unwrap_or(1) && self.ready.is_parked(id) {
                return Err(format!("{id:?}: parked with {} messages with workers", psock.in_hand));
            }
            let waits = psock.tx.queue.iter().map(|out| out.bytes.len()).sum::<usize>() - psock.tx.sent
                + psock
                    .answers
                    .iter()
                    .flat_map(|answer| &answer.replies)
                    .map(|(bytes, _)| bytes.len())
                    .sum::<usize>();
            if !psock.tx.sending && waits != psock.tx.bytes {
                return Err(format!("{id:?}: counted {} bytes to send, there are {waits}", psock.tx.bytes));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
const _: () = assert!(size_of::<super::Message>() <= 104, "what a message costs besides its bytes");
#[cfg(test)]
const _: () = assert!(size_of::<Psock>() <= 1024, "what an idle connection costs");
