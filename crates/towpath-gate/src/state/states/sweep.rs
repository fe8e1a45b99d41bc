//! The sweep: unlinking states that have expired, and those whose rule's states were removed.
//!
//! What: the calls of all workers together scan all slots, some with each call. The tick beside a slot says whether its state
//! may have expired. While there are removed rules, the rule of each state is checked too.

use std::ops::Range;
use std::sync::Arc;

use towpath_wire::Time;

use super::{AddressFamily, Shared, States};
use crate::state::table::key::Key;
use crate::state::table::live_filter::LiveFilter;

/// Slots of each address family that an install sweeps to find room.
pub(super) const RECLAIM: u32 = 512;

/// Slots after which a long walk announces a quiescent state.
pub(super) const WALK: u32 = 4096;

/// Slots examined for each state that [`States::expire`] may look at: most need no look at the state.
const SLOTS_PER_STATE: usize = 4;

/// Nanoseconds in which sweeps for room that found nothing are not repeated, as a power of two (0.27 s).
const BACKOFF_BITS: u32 = 28;

/// Number of slots swept for room without success since the last success, within one period of 0.27 s.
///
/// A worker that has swept all slots without success does not start again in the same period: refusing a flood costs less than
/// admitting it.
#[derive(Debug, Default)]
pub(super) struct ReclaimBackoff {
    period: u64,
    in_vain: u32,
}

impl ReclaimBackoff {
    /// Returns true if a sweep of a table with `slots` slots may find room. A table that one call sweeps completely is swept
    /// each time.
    fn permits(&mut self, slots: u32, now: Time) -> bool {
        let period = now.as_nanos() >> BACKOFF_BITS;
        if period != self.period {
            *self = Self { period, in_vain: 0 };
        }
        self.in_vain < slots || slots <= RECLAIM
    }

    fn swept(&mut self, found: bool) {
        self.in_vain = if found { 0 } else { self.in_vain.saturating_add(RECLAIM) };
    }
}

impl States {
    /// Collects expired states, looking at up to `budget` states. Call it once per burst. The calls of all workers together
    /// scan all states.
    pub fn expire(&mut self, now: Time, mut budget: usize) {
        self.begin(now);
        if self.removed.is_empty() {
            let slots = u32::try_from(budget.saturating_mul(SLOTS_PER_STATE)).unwrap_or(u32::MAX);
            self.sweep::<2>(slots, now, &mut budget);
            self.sweep::<6>(slots, now, &mut budget);
        } else {
            // Every slot may need a check. Each family gets half of the budget, so that all its slots are checked.
            let half = budget.div_ceil(2);
            let slots = u32::try_from(half).unwrap_or(u32::MAX);
            self.sweep::<2>(slots, now, &mut half.clone());
            self.sweep::<6>(slots, now, &mut half.clone());
            self.prune_removed();
        }
        self.shared.limits.try_collect_parents(now, &mut budget, &mut self.parents_turn);
        let Shared { v4, v6, .. } = &*self.shared;
        if v4.migrate_behind(&self.v4.index) | v6.migrate_behind(&self.v6.index) {
            self.publish();
        }
        self.free();
    }

    /// Collects all expired states and parents in one call. For reports and tests.
    pub fn expire_all(&mut self, now: Time) {
        self.begin(now);
        self.sweep_all(now);
        self.prune_removed();
        self.free();
        self.shared.limits.collect_parents(now, &mut usize::MAX.clone());
    }

    /// Collects expired states to make room.
    pub(super) fn reclaim(&mut self, now: Time) {
        let slots = self.shared.v4.slab.len().saturating_add(self.shared.v6.slab.len());
        if self.backoff.permits(slots, now) || !self.removed.is_empty() {
            let before = self.retired();
            self.sweep::<2>(RECLAIM, now, &mut usize::MAX.clone());
            self.sweep::<6>(RECLAIM, now, &mut usize::MAX.clone());
            self.backoff.swept(self.retired() > before);
        }
        self.free();
    }

    /// As [`States::reclaim`], for an install over a limit. Stale states count until they are unlinked. In a large table some
    /// installs are refused for that reason, because a packet does not wait for a sweep of all slots; each of them sweeps some
    /// more.
    pub(super) fn reclaim_for_limit(&mut self, now: Time) {
        self.reclaim(now);
        self.prune_removed();
    }

    /// Sweeps all slots.
    pub(super) fn sweep_all(&mut self, now: Time) {
        self.sweep_family::<2>(now);
        self.sweep_family::<6>(now);
    }

    fn sweep_family<const N: usize>(&mut self, now: Time)
    where
        Key<N>: AddressFamily<N>,
    {
        let len = Key::<N>::family(&self.shared).slab.len();
        for from in (0..len).step_by(WALK as usize) {
            self.quiescent();
            self.sweep_slots::<N>(from..len.min(from + WALK), now, &mut usize::MAX.clone());
        }
    }

    /// Sweeps the next `slots` slots of a family, looking at up to `budget` states.
    fn sweep<const N: usize>(&mut self, slots: u32, now: Time, budget: &mut usize)
    where
        Key<N>: AddressFamily<N>,
    {
        for slots in Key::<N>::family(&self.shared).next_sweep(slots) {
            self.sweep_slots::<N>(slots, now, budget);
        }
    }

    #[inline]
    fn sweep_slots<const N: usize>(&mut self, mut slots: Range<u32>, now: Time, budget: &mut usize)
    where
        Key<N>: AddressFamily<N>,
    {
        while !slots.is_empty() && *budget > 0 {
            let all = !self.removed.is_empty();
            let (mut due, examined) = Key::<N>::family(&self.shared).due_mask(&slots, now, all);
            while due != 0 && *budget > 0 {
                self.collect::<N>(slots.start + due.trailing_zeros(), now, budget);
                due &= due - 1;
            }
            slots.start += examined;
        }
    }

    /// Unlinks the state in `slot` if it has expired or is stale.
    #[cold]
    fn collect<const N: usize>(&mut self, slot: u32, now: Time, budget: &mut usize)
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let may_have_expired = family.may_have_expired(slot, now);
        if !may_have_expired && (self.removed.is_empty() || !family.slab.is_occupied(slot)) {
            return;
        }
        *budget = budget.saturating_sub(1);
        if self.live(now).accepts(family.entry(slot)) {
            if may_have_expired {
                family.reschedule(slot, now);
            }
            return;
        }
        let removed = Arc::clone(&self.removed);
        let live = LiveFilter::new(now, &removed);
        if family.unlink(&Key::<N>::local(self).index, slot, |entry| !live.accepts(entry)) {
            self.release_ended::<N>(slot, now);
        }
    }

    /// Forgets the removed rules whose states are all unlinked, once all that this worker knows are.
    #[cold]
    pub(super) fn prune_removed(&mut self) {
        if self.removed.is_empty() || !self.removed.all_unlinked() {
            return;
        }
        self.shared.rules.prune_removed();
        self.publish();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_in_vain_is_not_repeated_within_a_period() {
        let mut backoff = ReclaimBackoff::default();
        let now = |period: u64| Time::from_nanos(period << BACKOFF_BITS);
        let slots = 3 * RECLAIM;
        for call in 0..4 {
            assert_eq!(backoff.permits(slots, now(7)), call < 3, "{call}");
            backoff.swept(false);
        }
        assert!(backoff.permits(RECLAIM, now(7)), "a small table");
        assert!(backoff.permits(slots, now(8)));
        (0..3).for_each(|_| backoff.swept(false));
        assert!(!backoff.permits(slots, now(8)));
        backoff.swept(true);
        assert!(backoff.permits(slots, now(8)));
    }
}
