//! What a mux counts, and what of it a person is shown.

use hdrhistogram::Histogram;

use super::psock::{self, Psock, Status};
use super::{Mux, worker};

/// The longest time that the histograms tell from longer ones: an hour, in nanoseconds.
const LONGEST: u64 = 3_600_000_000_000;

/// What a mux counted. `received = done + undone + queued + in_hand`, always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Whole messages that arrived.
    pub received: u64,
    /// Messages that workers have done.
    pub done: u64,
    /// Messages that were given up because workers died with them.
    pub undone: u64,
    /// Messages that wait for a worker.
    pub queued: usize,
    /// Messages that workers hold.
    pub in_hand: usize,
    /// How often a message went from one worker to another because the first handed it back, left or was disabled.
    pub handed_back: u64,
    /// How often one did because the first died.
    pub redelivered: u64,
    /// Messages that were sent, all of them.
    pub tx_msgs: u64,
    /// Bytes that were sent.
    pub tx_bytes: u64,
    /// Messages that were to be sent on a connection that ended, and went to another one.
    pub tx_retries: u64,
    /// Answers that were not sent, or not all of them, because their connection ended, before they were made or after.
    pub unsent: u64,
    /// Connections that were attached.
    pub attach: u64,
    /// Connections that ended.
    pub unattach: u64,
    /// Connections that were taken back while they had messages in the mux.
    pub unattach_rsvd: u64,
    /// Connections that were reset, or on which a read, a write or TLS failed.
    pub resets: u64,
    /// Those that the peer closed inside a message.
    pub inside: u64,
    /// Those whose bytes are no message.
    pub malformed: u64,
    /// Connections that ended because they were idle for too long.
    pub idle: u64,
    /// Those whose peers took nothing of what was sent for too long.
    pub send_timeouts: u64,
    /// Those for which more was to be sent than may wait.
    pub send_full: u64,
    /// Those that were not drained in time.
    pub drain_timeouts: u64,
    /// The counters of connections that have gone.
    pub psocks: psock::Stats,
    /// The counters of workers that have gone.
    pub workers: worker::Stats,
}

/// One worker as it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerRow {
    /// Which.
    pub id: worker::Id,
    /// Its counters.
    pub stats: worker::Stats,
    /// Messages that wait for it only, and those that it holds.
    pub queued: usize,
    /// See `queued`.
    pub in_hand: usize,
    /// Whether it waits for messages.
    pub rx_wait: bool,
    /// Whether it gets none, because it is disabled or leaves.
    pub disabled: bool,
}

/// One connection as it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PsockRow {
    /// Which.
    pub id: psock::Id,
    /// Its counters.
    pub stats: psock::Stats,
    /// Messages that are queued or with workers, and the bytes that they and what is not whole take.
    pub recv_queue: usize,
    /// See `recv_queue`.
    pub recv_bytes: usize,
    /// Bytes that wait to be sent.
    pub send_bytes: usize,
    /// Its state.
    pub status: Status,
}

/// A mux as it stands, for `ctl show mux` in KCM's columns.
#[derive(Clone, Debug)]
pub struct Show {
    /// What it counted.
    pub totals: Totals,
    /// All connections' counters, of those that are and those that were.
    pub psock_totals: psock::Stats,
    /// All that it holds, in bytes.
    pub bytes: usize,
    /// Whether that is too much, so that nothing is read.
    pub full: bool,
    /// Workers.
    pub workers: Vec<WorkerRow>,
    /// Connections.
    pub psocks: Vec<PsockRow>,
}

impl worker::Stats {
    pub(super) fn add(&mut self, other: &Self) {
        let Self { rx_msgs, rx_bytes, tx_msgs, tx_bytes, handed_back } = other;
        self.rx_msgs += rx_msgs;
        self.rx_bytes += rx_bytes;
        self.tx_msgs += tx_msgs;
        self.tx_bytes += tx_bytes;
        self.handed_back += handed_back;
    }
}

impl Mux {
    /// What it counted.
    pub const fn totals(&self) -> &Totals {
        &self.totals
    }

    /// All that it holds, in bytes: messages, unfinished ones, answers.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// How long messages waited for a worker, in nanoseconds.
    pub const fn queue_wait(&self) -> &Histogram<u64> {
        &self.queue_wait
    }

    /// How long workers had messages, in nanoseconds; of several in one turn, their mean.
    pub const fn service_time(&self) -> &Histogram<u64> {
        &self.service_time
    }

    /// A connection's state; `None` when it has gone.
    pub fn status(&self, id: psock::Id) -> Option<Status> {
        Some(self.psocks.get(id)?.status())
    }

    /// Everything as it stands.
    pub fn show(&self) -> Show {
        let mut psock_totals = self.totals.psocks;
        for psock in self.psocks.values() {
            psock_totals.add(&psock.stats);
        }
        let workers = self.workers.iter().map(|(id, worker)| WorkerRow {
            id,
            stats: worker.stats,
            queued: worker.pinned.len(),
            in_hand: worker.held(),
            rx_wait: worker.activity == worker::Activity::Idle,
            disabled: !worker.enabled,
        });
        let psocks = self.psocks.iter().map(|(id, psock)| PsockRow {
            id,
            stats: psock.stats,
            recv_queue: psock.outstanding,
            recv_bytes: psock.memory + psock.buffered,
            send_bytes: psock.send_bytes,
            status: psock.status(),
        });
        Show {
            totals: self.totals,
            psock_totals,
            bytes: self.bytes,
            full: self.full,
            workers: workers.collect(),
            psocks: psocks.collect(),
        }
    }

    /// Counts everything again, and compares. For tests.
    ///
    /// # Errors
    ///
    /// What does not fit.
    pub fn check(&self) -> Result<(), String> {
        let totals = &self.totals;
        let pending = self.psocks.values().map(|psock| psock.pending.len()).sum::<usize>();
        let queue = self.keys.values().map(|queue| queue.pending.len()).sum::<usize>();
        let pinned = self.workers.values().map(|worker| worker.pinned.len()).sum::<usize>();
        let in_hand = self.workers.values().map(worker::Worker::held).sum::<usize>();
        let outstanding = self.psocks.values().map(|psock| psock.outstanding).sum::<usize>();
        let held = |psock: &Psock| psock.memory + psock.buffered + psock.send_bytes;
        let rows = [
            ("queued", totals.queued, self.ready.len() + pending + queue + pinned),
            ("in hand", totals.in_hand, in_hand),
            ("outstanding", totals.queued + totals.in_hand, outstanding),
            ("bytes", self.bytes, self.psocks.values().map(held).sum()),
            ("bytes of messages", self.message_bytes, self.psocks.values().map(|psock| psock.memory).sum()),
            (
                "received",
                totals.received as usize,
                totals.done as usize + totals.undone as usize + totals.queued + totals.in_hand,
            ),
            ("awake", self.awake, self.count(worker::Activity::Awake)),
            ("woken", self.woken, self.count(worker::Activity::Woken)),
            ("idle", self.idle.len(), self.count(worker::Activity::Idle)),
        ];
        for (what, counted, real) in rows {
            if counted != real {
                return Err(format!("{what}: counted {counted}, there are {real}"));
            }
        }
        for (id, psock) in &self.psocks {
            let waits = psock.send.iter().map(|out| out.bytes.len()).sum::<usize>() - psock.left
                + psock
                    .answers
                    .iter()
                    .flat_map(|answer| &answer.replies)
                    .map(|(bytes, _)| bytes.len())
                    .sum::<usize>();
            if !psock.sending && waits != psock.send_bytes {
                return Err(format!("{id:?}: counted {} bytes to send, there are {waits}", psock.send_bytes));
            }
        }
        Ok(())
    }

    fn count(&self, activity: worker::Activity) -> usize {
        self.workers.values().filter(|worker| worker.activity == activity).count()
    }
}

/// Of times in nanoseconds, in two digits.
pub(super) fn histogram() -> Histogram<u64> {
    Histogram::new_with_max(LONGEST, 2).expect("two digits up to an hour are possible")
}

#[cfg(test)]
const _: () = assert!(size_of::<super::Message>() <= 104, "what a message costs besides its bytes");
#[cfg(test)]
const _: () = assert!(size_of::<Psock>() <= 1024, "what an idle connection costs");
