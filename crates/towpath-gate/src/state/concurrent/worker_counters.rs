//! What happened, counted by each worker on lines of its own, and added up when somebody asks.

use crate::state::concurrent::epoch::MAX_WORKERS;
use crate::state::concurrent::sync::{AtomicU64, Ordering};

/// What is counted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Counter {
    Created,
    Expired,
    Removed,
    Evicted,
    NearlyFull,
    Related,
    Full,
    OverLimit,
    OverRate,
    ParentsFull,
    OverSource,
    Invalid,
    Unfit,
    FirstSyn,
    /// A state has its first reply.
    Replied,
    /// A state that had one is gone.
    RepliedGone,
}

const EVENTS: usize = Counter::RepliedGone as usize + 1;

/// The counts of one worker.
#[derive(Debug)]
#[repr(align(128))]
struct CounterBlock([AtomicU64; EVENTS]);

/// The counts of all workers, those included that are gone.
#[derive(Debug)]
pub(crate) struct WorkerCounters(Box<[CounterBlock]>);

impl WorkerCounters {
    pub(crate) fn new() -> Self {
        Self((0..MAX_WORKERS).map(|_| CounterBlock(std::array::from_fn(|_| AtomicU64::new(0)))).collect())
    }

    /// Counts events of a worker, by the worker itself.
    #[inline]
    pub(crate) fn count(&self, worker: usize, event: Counter, times: u64) {
        let count = &self.0[worker].0[event as usize];
        // Relaxed, and no read-modify-write: nobody else writes here.
        count.store(count.load(Ordering::Relaxed) + times, Ordering::Relaxed);
    }

    /// How often it happened.
    pub(crate) fn sum(&self, event: Counter) -> u64 {
        self.0.iter().map(|tally| tally.0[event as usize].load(Ordering::Relaxed)).sum()
    }
}
