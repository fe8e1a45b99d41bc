//! Evicting states when the table is full (`dyn_evict`).
//!
//! What: an install that finds no slot evicts a state that is not assured, or, if all are, the state that expires first of a
//! few. A flood of packets from forged addresses evicts its own states and costs no connection.
//!
//! The slot of an evicted state is free after its grace period ([`crate::state::concurrent::epoch`]), so each install evicts a
//! state for a later install. The number of retired slots is bounded: while a worker stalls, no slot becomes free, and evicting
//! more would empty the table for nothing.

use towpath_wire::Time;

use super::sweep::RECLAIM;
use super::{AddressFamily, States};
use crate::state::Refused;
use crate::state::concurrent::worker_counters::Counter;
use crate::state::events::EventKind;
use crate::state::table::entry::ASSURED;
use crate::state::table::key::Key;

/// Maximum number of states that one install evicts.
const MAX_EVICTIONS: usize = 64;

/// Assured states of each family that are compared to choose one.
const COMPARED: usize = 48;

/// The share of `dyn_max`, and the maximum, of slots that may be retired while states are evicted: enough for the installs
/// until these slots are free.
const RESERVE_SHARE: u64 = 16;
const RESERVE_MAX: u64 = 512;

/// A state that may be evicted. The least is evicted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    assured: bool,
    expires: Time,
    v6: bool,
    slot: u32,
}

impl States {
    /// Reserves one of the `dyn_max` slots, evicting states if that is the policy.
    pub(super) fn reserve_slot(&mut self, now: Time) -> Result<(), Refused> {
        for _ in 0..MAX_EVICTIONS {
            if self.take_slot() {
                self.evict_ahead(now);
                return Ok(());
            }
            if !self.settings.dyn_evict || self.is_overfull() || !self.evict(now) {
                break;
            }
            if self.free() == 0 {
                // The slot is free after its grace period.
                break;
            }
        }
        if self.take_slot() { Ok(()) } else { Err(Refused::Full) }
    }

    fn take_slot(&self) -> bool {
        self.shared.occupancy.reserve((self.worker.id(), self.workers()), self.settings.dyn_max)
    }

    /// Evicts a state for a later install, if slots become free only after a grace period and few are left.
    fn evict_ahead(&mut self, now: Time) {
        if self.settings.dyn_evict && self.retired() > 0 {
            let used = self.shared.occupancy.used(self.workers());
            if used + self.reserve() > u64::from(self.settings.dyn_max) {
                self.evict(now);
            }
        }
    }

    fn reserve(&self) -> u64 {
        (u64::from(self.settings.dyn_max) / RESERVE_SHARE).clamp(1, RESERVE_MAX)
    }

    /// Returns true if `dyn_max` was lowered below the number of slots in use: evicting one state makes no room.
    fn is_overfull(&self) -> bool {
        self.shared.occupancy.used(self.workers()) > u64::from(self.settings.dyn_max)
    }

    /// Evicts one state: one that is not assured, or, if all are assured, the one of a few that expires first. Returns false if
    /// no state was evicted.
    ///
    /// Evicts no assured state while there are others outside the scanned slots, or while slots are retired. Evicts nothing
    /// while [`States::reserve`] slots are retired.
    fn evict(&mut self, now: Time) -> bool {
        let waiting = self.waiting();
        if waiting >= self.reserve() {
            return false;
        }
        let candidates = [self.candidate::<2>(now, true), self.candidate::<6>(now, true)];
        let Some(first) = candidates.into_iter().flatten().min() else { return false };
        if first.assured && (waiting > 0 || self.unreplied() > 0) {
            return false;
        }
        let evicted = match first.v6 {
            false => self.remove_if::<2>(first.slot, now, EventKind::Evicted, |_| true),
            true => self.remove_if::<6>(first.slot, now, EventKind::Evicted, |_| true),
        };
        self.count_many(Counter::Evicted, evicted.into());
        evicted
    }

    /// Returns true if a state would be evicted while no slot is retired.
    pub(super) fn has_victim(&self, now: Time) -> bool {
        let candidates = [self.candidate::<2>(now, false), self.candidate::<6>(now, false)];
        let first = candidates.into_iter().flatten().min();
        first.is_some_and(|first| !first.assured || self.unreplied() == 0)
    }

    /// The first state of a family that is not assured, from where the last search ended, or else, of a few, the one that
    /// expires first. The next search begins after it if `advance`.
    fn candidate<const N: usize>(&self, now: Time, advance: bool) -> Option<Candidate>
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let mut best: Option<Candidate> = None;
        let (mut compared, mut last) = (0, None);
        for slot in family.evict.next(family.slab.len(), RECLAIM) {
            last = Some(slot);
            if !family.slab.is_occupied(slot) {
                continue;
            }
            let entry = family.entry(slot);
            let (assured, expires) = (entry.header().has(ASSURED), entry.expires(now));
            let candidate = Candidate { assured, expires, v6: Key::<N>::V6, slot };
            if !assured {
                if advance {
                    family.evict.advance_past(slot);
                }
                return Some(candidate);
            }
            compared += 1;
            if compared <= COMPARED {
                best = Some(best.map_or(candidate, |before| before.min(candidate)));
            }
        }
        // Otherwise the next search would scan the same slots.
        if let Some(last) = last.filter(|_| advance) {
            family.evict.advance_past(last);
        }
        best
    }
}
