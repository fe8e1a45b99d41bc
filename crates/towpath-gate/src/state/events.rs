//! What happens to states, for those who watch: a bounded queue for each worker, and a count of what found no room.
//!
//! Only making and taking away states is told, so packets of states that are there cost nothing. While nobody watches, it
//! costs one look at a word.

use std::collections::VecDeque;
use std::sync::Mutex;

use crate::state::Listed;
use crate::state::concurrent::epoch::MAX_WORKERS;
use crate::state::concurrent::sync::{AtomicU64, Ordering};
use crate::state::table::family::locked;
use towpath_wire::Time;

/// What happened to a state, or to all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// A state was made.
    Created,
    /// It was made as the copy of one that was saved; the event before says that it was made.
    Restored,
    /// One was collected because its time was over.
    Expired,
    /// One was removed, by itself or with its rule.
    Removed,
    /// One was evicted to make room.
    Evicted,
    /// The states have come to 9/10 of `dyn_max`.
    NearlyFull,
    /// They have fallen below 8/10 again.
    NoLongerFull,
}

impl EventKind {
    /// The event in a word, for logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Restored => "restored",
            Self::Expired => "expired",
            Self::Removed => "removed",
            Self::Evicted => "evicted",
            Self::NearlyFull => "nearly full",
            Self::NoLongerFull => "no longer full",
        }
    }
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateEvent {
    /// The time that the worker was given.
    pub at: Time,
    /// What happened.
    pub kind: EventKind,
    /// The state as it was then; `None` for what happens to all.
    pub state: Option<Listed>,
}

/// The queues.
#[derive(Debug)]
pub(crate) struct EventQueues {
    /// The most events that wait at each worker; 0 while nobody watches.
    max: AtomicU64,
    queues: Box<[Mutex<VecDeque<StateEvent>>]>,
    lost: AtomicU64,
}

impl EventQueues {
    pub(crate) fn new() -> Self {
        let queues = (0..MAX_WORKERS).map(|_| Mutex::default()).collect();
        Self { max: AtomicU64::new(0), queues, lost: AtomicU64::new(0) }
    }

    pub(crate) fn set_max(&self, max: usize) {
        // Relaxed: whoever sees it late tells a little more, or less.
        self.max.store(max as u64, Ordering::Relaxed);
        if max == 0 {
            self.queues.iter().for_each(|queue| *locked(queue) = VecDeque::new());
        }
    }

    #[inline]
    pub(crate) fn is_enabled(&self) -> bool {
        self.max.load(Ordering::Relaxed) != 0
    }

    /// Tells what happened at a worker.
    pub(crate) fn push(&self, worker: usize, event: StateEvent) {
        let max = self.max.load(Ordering::Relaxed) as usize;
        let mut queue = locked(&self.queues[worker]);
        if queue.len() < max {
            queue.push_back(event);
        } else {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// What was told since the last time, in the order of its times.
    pub(crate) fn take(&self) -> Vec<StateEvent> {
        let mut events = Vec::new();
        for queue in &self.queues {
            // The queue's owner waits for no more than this exchange.
            let told = std::mem::take(&mut *locked(queue));
            events.extend(told);
        }
        events.sort_by_key(|event| event.at);
        events
    }

    pub(crate) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}
