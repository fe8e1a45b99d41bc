//! Events of states: a bounded queue for each worker, and a count of lost events.
//!
//! Only inserting and unlinking states makes events; packets of existing states do not. While no queue is enabled,
//! the cost is one load.

use std::collections::VecDeque;
use std::sync::Mutex;

use crate::state::Listed;
use crate::state::concurrent::epoch::MAX_WORKERS;
use crate::state::concurrent::sync::{AtomicU64, Ordering};
use crate::state::table::family::locked;
use towpath_wire::Time;

/// An event of a state, or of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// A state was inserted.
    Created,
    /// The state of the preceding `Created` event was restored from a snapshot.
    Restored,
    /// A state was collected after it expired.
    Expired,
    /// A state was removed, alone or with its rule.
    Removed,
    /// A state was evicted to make room.
    Evicted,
    /// The number of states has reached 9/10 of `dyn_max`.
    NearlyFull,
    /// The number of states has fallen below 8/10 of `dyn_max` after [`EventKind::NearlyFull`].
    NoLongerFull,
}

impl EventKind {
    /// The word for logs and `towpath ctl`.
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
    /// The time passed to the worker's call.
    pub at: Time,
    /// The event.
    pub kind: EventKind,
    /// The state at that time; `None` for events of the table.
    pub state: Option<Listed>,
}

/// The event queues of all workers.
#[derive(Debug)]
pub(crate) struct EventQueues {
    /// The maximum length of each queue; 0 while events are disabled.
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
        // Relaxed: a worker that sees it late queues some more events, or fewer.
        self.max.store(max as u64, Ordering::Relaxed);
        if max == 0 {
            self.queues.iter().for_each(|queue| *locked(queue) = VecDeque::new());
        }
    }

    #[inline]
    pub(crate) fn is_enabled(&self) -> bool {
        // Relaxed: see set_max().
        self.max.load(Ordering::Relaxed) != 0
    }

    /// Queues an event of a worker.
    pub(crate) fn push(&self, worker: usize, event: StateEvent) {
        // Relaxed: see set_max(). The mutex orders the events.
        let max = self.max.load(Ordering::Relaxed) as usize;
        let mut queue = locked(&self.queues[worker]);
        if queue.len() < max {
            queue.push_back(event);
        } else {
            // Relaxed: a statistic.
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Takes all queued events, sorted by time.
    pub(crate) fn take(&self) -> Vec<StateEvent> {
        let mut events = Vec::new();
        for queue in &self.queues {
            // The worker waits for no more than this exchange.
            let queued = std::mem::take(&mut *locked(queue));
            events.extend(queued);
        }
        events.sort_by_key(|event| event.at);
        events
    }

    pub(crate) fn lost(&self) -> u64 {
        // Relaxed: a statistic.
        self.lost.load(Ordering::Relaxed)
    }
}
