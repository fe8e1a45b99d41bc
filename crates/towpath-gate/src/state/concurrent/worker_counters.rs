//! Event counts of each worker in separate cache lines, summed on request.

use super::epoch::MAX_WORKERS;
use super::sync::{AtomicU64, Ordering};
use crate::state::Refused;

/// An event that the workers count. [`Counters`](crate::state::Counters) documents those that are public.
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
    /// A state was set to assured.
    Assured,
    /// An assured state was unlinked.
    AssuredGone,
    /// States that were linked, less those that were unlinked, modulo 2^64: a worker unlinks states that others made.
    Linked4,
    Linked6,
    /// By how much the worker's balance of states is below its top, since it last looked at the number of all states.
    BelowTop,
}

const COUNTERS: usize = Counter::BelowTop as usize + 1;

impl Counter {
    /// The counter of refused installs with this reason.
    pub(crate) fn of(refused: Refused) -> Self {
        match refused {
            Refused::Full => Self::Full,
            Refused::OverLimit => Self::OverLimit,
            Refused::OverRate => Self::OverRate,
            Refused::ParentsFull => Self::ParentsFull,
            Refused::OverSource => Self::OverSource,
            Refused::Invalid => Self::Invalid,
            Refused::FirstSyn => Self::FirstSyn,
        }
    }
}

/// The counts of one worker.
#[derive(Debug)]
#[repr(align(128))]
struct Block([AtomicU64; COUNTERS]);

/// The counts of all workers, including those that are gone.
#[derive(Debug)]
pub(crate) struct WorkerCounters(Box<[Block]>);

impl WorkerCounters {
    pub(crate) fn new() -> Self {
        Self((0..MAX_WORKERS).map(|_| Block(std::array::from_fn(|_| AtomicU64::new(0)))).collect())
    }

    /// Adds `events` to a count of `worker`, modulo 2^64. Only that worker may call it.
    #[inline]
    pub(crate) fn add(&self, worker: usize, counter: Counter, events: u64) {
        let count = &self.0[worker].0[counter as usize];
        // Relaxed, and no read-modify-write: the worker is the only writer.
        count.store(count.load(Ordering::Relaxed).wrapping_add(events), Ordering::Relaxed);
    }

    /// Sets a count of `worker`. Only that worker may call it.
    #[inline]
    pub(crate) fn set(&self, worker: usize, counter: Counter, value: u64) {
        // Relaxed: as above.
        self.0[worker].0[counter as usize].store(value, Ordering::Relaxed);
    }

    /// The sum over all workers.
    pub(crate) fn sum(&self, counter: Counter) -> u64 {
        // Relaxed: a count publishes nothing.
        self.sum_of(MAX_WORKERS, counter)
    }

    /// The sum over the first `workers`.
    #[inline]
    pub(crate) fn sum_of(&self, workers: usize, counter: Counter) -> u64 {
        let counts =
            self.0.iter().take(workers).map(|block| block.0[counter as usize].load(Ordering::Relaxed));
        counts.fold(0, u64::wrapping_add)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn sums_are_over_all_workers() {
        let counters = WorkerCounters::new();
        for worker in [0, 5, MAX_WORKERS - 1] {
            counters.add(worker, Counter::Created, 2);
        }
        counters.add(5, Counter::of(Refused::Full), 1);
        let sums = [Counter::Created, Counter::Full, Counter::Assured].map(|counter| counters.sum(counter));
        assert_eq!(sums, [6, 1, 0]);
    }
}
