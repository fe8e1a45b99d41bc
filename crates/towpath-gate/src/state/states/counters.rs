//! What happened to states, and how full the table is.

use super::States;
use crate::state::concurrent::sync::Ordering;
use crate::state::concurrent::worker_counters::Counter;
use crate::state::{EventKind, StateEvent};

/// What happened to states since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// States made: those held, expired, removed and evicted.
    pub created: u64,
    /// The most states held at once.
    pub peak: usize,
    /// States collected because their time was over.
    pub expired: u64,
    /// States removed with their rule.
    pub removed: u64,
    /// States evicted to make room (`dyn_evict`).
    pub evicted: u64,
    /// How often the states have come to 9/10 of `dyn_max`, having been below 8/10.
    pub nearly_full: u64,
    /// ICMP errors that were about a state.
    pub related: u64,
    /// Installs refused with [`Refused::Full`](crate::state::Refused::Full).
    pub full: u64,
    /// Installs refused with [`Refused::OverLimit`](crate::state::Refused::OverLimit).
    pub over_limit: u64,
    /// Installs refused with [`Refused::OverRate`](crate::state::Refused::OverRate).
    pub over_rate: u64,
    /// Installs refused with [`Refused::ParentsFull`](crate::state::Refused::ParentsFull).
    pub parents_full: u64,
    /// Installs refused with [`Refused::OverSource`](crate::state::Refused::OverSource).
    pub over_source: u64,
    /// Installs refused with [`Refused::Invalid`](crate::state::Refused::Invalid).
    pub invalid: u64,
    /// Lookups that did not have the state of their flow, as the packet does not fit into its connection (strict tracking).
    pub unfit: u64,
    /// Installs refused with [`Refused::FirstSyn`](crate::state::Refused::FirstSyn).
    pub first_syn: u64,
}

/// How full the table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gauge {
    /// States held.
    pub states: usize,
    /// Of these, how many were never replied to, or have not heard the reply yet (half-open TCP and SCTP): under a flood, most.
    pub unreplied: usize,
    /// Slots of states that are gone, which count until every worker is known to have let go of them.
    pub waiting: usize,
    /// `dyn_max`.
    pub states_max: usize,
    /// Parents held.
    pub parents: usize,
    /// `dyn_parent_max`.
    pub parents_max: usize,
    /// The states have come to 9/10 of `dyn_max` and have not fallen below 8/10 since.
    pub nearly_full: bool,
}

impl States {
    /// `dyn_count`: states held, those included that have expired and were not collected yet.
    #[inline]
    pub fn len(&self) -> usize {
        (self.shared.v4.len() + self.shared.v6.len()) as usize
    }

    /// Whether there are no states.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `dyn_parent_count`: parents held.
    pub fn parents(&self) -> usize {
        self.shared.parents_held.load(Ordering::Relaxed) as usize
    }

    /// States made since the beginning.
    pub fn created(&self) -> u64 {
        self.shared.tallies.sum(Counter::Created)
    }

    /// The most states held at once.
    pub fn peak(&self) -> usize {
        self.shared.peak.load(Ordering::Relaxed) as usize
    }

    /// Slots that were ever in use, of both families: what a round of [`States::keepalives`] looks at.
    pub fn slots(&self) -> usize {
        self.shared.v4.slab.len() as usize + self.shared.v6.slab.len() as usize
    }

    /// `curr_max_length`: the most states of one flow, under different names, that have stood beside each other.
    pub fn curr_max_length(&self) -> usize {
        self.shared.v4.longest().max(self.shared.v6.longest())
    }

    /// What happened since the beginning, to all workers.
    pub fn counters(&self) -> Counters {
        let sum = |event| self.shared.tallies.sum(event);
        Counters {
            created: sum(Counter::Created),
            peak: self.peak(),
            expired: sum(Counter::Expired),
            removed: sum(Counter::Removed),
            evicted: sum(Counter::Evicted),
            nearly_full: sum(Counter::NearlyFull),
            related: sum(Counter::Related),
            full: sum(Counter::Full),
            over_limit: sum(Counter::OverLimit),
            over_rate: sum(Counter::OverRate),
            parents_full: sum(Counter::ParentsFull),
            over_source: sum(Counter::OverSource),
            invalid: sum(Counter::Invalid),
            unfit: sum(Counter::Unfit),
            first_syn: sum(Counter::FirstSyn),
        }
    }

    /// How full the table is.
    pub fn gauge(&self) -> Gauge {
        Gauge {
            states: self.len(),
            unreplied: self.unreplied(),
            waiting: self.waiting() as usize,
            states_max: self.settings.dyn_max as usize,
            parents: self.parents(),
            parents_max: self.settings.dyn_parent_max as usize,
            nearly_full: self.is_nearly_full(),
        }
    }

    pub(super) fn is_nearly_full(&self) -> bool {
        // Relaxed: it is as true a moment later.
        self.shared.nearly_full.load(Ordering::Relaxed) != 0
    }

    /// States that were never replied to.
    pub(super) fn unreplied(&self) -> usize {
        let sum = |event| self.shared.tallies.sum(event);
        let replied = sum(Counter::Replied).saturating_sub(sum(Counter::RepliedGone)) as usize;
        self.len().saturating_sub(replied)
    }

    pub(super) fn gauge_moved(&self) {
        let (states, max) = (self.len() as u64, u64::from(self.settings.dyn_max));
        // Relaxed: whoever changes it counts the change.
        let before = self.shared.nearly_full.load(Ordering::Relaxed);
        let full = u64::from(states * 10 >= max * if before != 0 { 8 } else { 9 });
        if full != before {
            let turned = self.shared.nearly_full.swap(full, Ordering::Relaxed) != full;
            self.count_many(Counter::NearlyFull, u64::from(turned && full != 0));
            if turned && self.shared.events.is_on() {
                let what = if full != 0 { EventKind::NearlyFull } else { EventKind::NoLongerFull };
                self.shared.events.tell(self.worker, StateEvent { at: self.now, what, state: None });
            }
        }
    }

    #[inline]
    pub(super) fn count(&self, event: Counter) {
        self.count_many(event, 1);
    }

    pub(super) fn count_many(&self, event: Counter, times: u64) {
        self.shared.tallies.count(self.worker, event, times);
    }
}
