//! What happened, counted by each worker on lines of its own, and added up when somebody asks.

use super::epoch::WORKERS;
use super::sync::{AtomicU64, Ordering};

/// What is counted.
#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
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

const EVENTS: usize = Event::RepliedGone as usize + 1;

/// The counts of one worker.
#[derive(Debug)]
#[repr(align(128))]
struct Tally([AtomicU64; EVENTS]);

/// The counts of all workers, those included that are gone.
#[derive(Debug)]
pub(super) struct Tallies(Box<[Tally]>);

impl Tallies {
    pub(super) fn new() -> Self {
        Self((0..WORKERS).map(|_| Tally(std::array::from_fn(|_| AtomicU64::new(0)))).collect())
    }

    /// Counts events of a worker, by the worker itself.
    #[inline]
    pub(super) fn count(&self, worker: usize, event: Event, times: u64) {
        let count = &self.0[worker].0[event as usize];
        // Relaxed, and no read-modify-write: nobody else writes here.
        count.store(count.load(Ordering::Relaxed) + times, Ordering::Relaxed);
    }

    /// How often it happened.
    pub(super) fn sum(&self, event: Event) -> u64 {
        self.0.iter().map(|tally| tally.0[event as usize].load(Ordering::Relaxed)).sum()
    }
}
