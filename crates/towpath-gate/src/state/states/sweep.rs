//! Taking states away: those that have ended, and those of rules that are gone.
//!
//! What: whoever collects goes round all slots, some with each call. Which states may have ended is told by the slots' ticks;
//! while there are states of rules that are gone, each state is asked for its rule.

use std::ops::Range;
use std::sync::Arc;

use super::{AddressFamily, Shared, States};
use crate::state::concurrent::sync::Ordering;
use crate::state::concurrent::worker_counters::Counter;
use crate::state::table::entry::{CAPPED, Entry, LIMITED, LiveFilter, REPLIED, SPILLED};
use crate::state::table::family::{locked, tick};
use crate::state::table::key::{FlowKey, Key};
use crate::state::{EventKind, Lookup, Name, RuleId};
use towpath_wire::Time;

/// At how many slots of each family an install may look to find room that ended states take up.
pub(super) const RECLAIM: u32 = 512;

/// Slots after which a long walk says that it knows none.
pub(super) const WALK: u32 = 4096;

impl States {
    /// Collects states that have ended to make room. Whoever has gone round all slots in vain does not begin again before the
    /// next tick, in which others may end: a flood that is refused costs less than what is let in.
    pub(super) fn reclaim(&mut self, now: Time) {
        let (tick, all) = (tick(now), self.shared.v4.slab.len().saturating_add(self.shared.v6.slab.len()));
        let (of_tick, vain) = self.vain;
        let vain = if of_tick == tick { vain } else { 0 };
        // A table that one look sees whole is looked at each time.
        if vain < all || all <= RECLAIM || !self.gone.is_empty() {
            let before = self.unlinked();
            self.sweep::<2>(Some(RECLAIM), now, &mut usize::MAX.clone());
            self.sweep::<6>(Some(RECLAIM), now, &mut usize::MAX.clone());
            let found = self.unlinked() > before;
            self.vain = (tick, if found { 0 } else { vain.saturating_add(RECLAIM) });
        }
        self.free();
    }

    /// Collects ended states of a family, looking at so many slots, or at all, and at `budget` states.
    pub(super) fn sweep<const N: usize>(&mut self, slots: Option<u32>, now: Time, budget: &mut usize)
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        match slots {
            Some(slots) => {
                for slots in family.next_slots(slots) {
                    self.sweep_slots::<N>(slots, now, budget);
                }
            }
            None => {
                let len = family.slab.len();
                for from in (0..len).step_by(WALK as usize) {
                    self.stamp();
                    self.sweep_slots::<N>(from..len.min(from + WALK), now, budget);
                }
            }
        }
    }

    /// The same with these slots.
    #[inline]
    fn sweep_slots<const N: usize>(&mut self, mut slots: Range<u32>, now: Time, budget: &mut usize)
    where
        Key<N>: AddressFamily<N>,
    {
        while !slots.is_empty() && *budget > 0 {
            let all = !self.gone.is_empty();
            let (mut found, looked) = Key::<N>::family(&self.shared).looked_at(&slots, now, all);
            while found != 0 && *budget > 0 {
                self.look_at::<N>(slots.start + found.trailing_zeros(), now, budget);
                found &= found - 1;
            }
            slots.start += looked;
        }
    }

    /// Collects the state in `slot` if it has ended, or is gone.
    #[cold]
    fn look_at<const N: usize>(&mut self, slot: u32, now: Time, budget: &mut usize)
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let may_be_over = family.may_be_over(slot, now);
        if !may_be_over && (self.gone.is_empty() || family.slab.tick(slot).is_none()) {
            return;
        }
        *budget = budget.saturating_sub(1);
        if self.living(now).has(family.entry(slot)) {
            if may_be_over {
                family.look_later(slot, now);
            }
            return;
        }
        let gone = Arc::clone(&self.gone);
        let living = LiveFilter::new(now, &gone);
        if family.unlink(&Key::<N>::local(self).index, slot, |entry| !living.has(entry)) {
            self.ended::<N>(slot, now);
        }
    }

    /// Takes a state that was unlinked, as it had ended or was gone, out of all that counts it.
    pub(super) fn ended<const N: usize>(&mut self, slot: u32, now: Time)
    where
        Key<N>: AddressFamily<N>,
    {
        let is_gone = self.gone.has(Key::<N>::family(&self.shared).entry(slot).header());
        let (why, event) = if is_gone {
            (EventKind::Removed, Counter::Removed)
        } else {
            (EventKind::Expired, Counter::Expired)
        };
        self.gone::<N>(slot, now, why);
        self.count(event);
        self.gauge_moved();
    }

    /// [`States::reclaim`] for who is over a limit. What is gone counts until it is taken out: in a large table some are refused
    /// for that, as a packet waits for no look at every slot; each of them has some more slots looked at.
    pub(super) fn reclaim_counts(&mut self, now: Time) {
        self.reclaim(now);
        self.forget_gone();
    }

    /// Forgets rules all of whose states are taken out, when all of those are that this worker knows.
    #[cold]
    pub(super) fn forget_gone(&mut self) {
        if self.gone.is_empty() || !self.gone.is_over() {
            return;
        }
        let mut gone = locked(&self.shared.gone);
        Arc::make_mut(&mut gone).prune();
        drop(gone);
        // Release: pairs with the acquire in stamp().
        self.shared.news.fetch_add(1, Ordering::Release);
        self.catch_up();
    }

    /// Unlinks the state in `slot`, if there is one and `still` says so of it.
    pub(super) fn remove_if<const N: usize>(
        &mut self,
        slot: u32,
        now: Time,
        why: EventKind,
        still: impl Fn(Entry<'_, N>) -> bool,
    ) -> bool
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let unlinked =
            family.slab.tick(slot).is_some() && family.unlink(&Key::<N>::local(self).index, slot, still);
        if unlinked {
            self.gone::<N>(slot, now, why);
        }
        unlinked
    }

    /// Removes one state, live or not, if it is of `rule` or nobody asks for that; `None` when there is none, else whether it was
    /// live.
    pub(super) fn remove_one<const N: usize>(
        &mut self,
        key: &Key<N>,
        name: Name,
        rule: Option<RuleId>,
        now: Time,
    ) -> Option<bool>
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let slot = family.find_any(&Key::<N>::local(self).index, key, name)?;
        let live = self.living(now).has(family.entry(slot));
        // Another thread may have taken it away, and the slot may be another state's by now.
        let still = |entry: Entry<'_, N>| {
            let header = entry.header();
            entry.is(key) && header.name() == name && rule.is_none_or(|rule| header.rule() == rule)
        };
        self.remove_if::<N>(slot, now, EventKind::Removed, still).then_some(live)
    }

    /// Removes the live states of a flow, of every name; how many.
    pub(super) fn remove_named_or_not<const N: usize>(&mut self, key: &Key<N>, now: Time) -> usize
    where
        Key<N>: AddressFamily<N>,
    {
        let mut removed = 0;
        loop {
            let family = Key::<N>::family(&self.shared);
            let index = &Key::<N>::local(self).index;
            let Some(slot) = family.find(index, index.probe(key), key, Lookup::Any, self.living(now)) else {
                return removed;
            };
            // Another thread may have taken it away, and the slot may be another flow's by now.
            removed += usize::from(self.remove_if::<N>(slot, now, EventKind::Removed, |entry| entry.is(key)));
        }
    }

    /// Marks every state of these rules; how many were not marked.
    pub(super) fn mark_rules<const N: usize>(&mut self, rules: &[RuleId], mark: u64) -> usize
    where
        Key<N>: AddressFamily<N>,
    {
        let mut marked = 0;
        if rules.is_empty() {
            return marked;
        }
        for slot in 0..Key::<N>::family(&self.shared).slab.len() {
            if slot % WALK == 0 {
                self.stamp();
            }
            let family = Key::<N>::family(&self.shared);
            if family.slab.tick(slot).is_none() {
                continue;
            }
            let entry = family.entry(slot);
            let header = entry.header();
            if rules.binary_search(&header.rule()).is_ok() && !self.gone.has(header) {
                marked += usize::from(entry.mark(mark));
            }
        }
        marked
    }

    /// Takes a state that is unlinked out of all that counts it.
    pub(super) fn gone<const N: usize>(&mut self, slot: u32, now: Time, why: EventKind)
    where
        Key<N>: AddressFamily<N>,
    {
        // No packet that is fetched already passes by this state.
        self.turns += 1;
        let shared = Arc::clone(&self.shared);
        let entry = Key::<N>::family(&shared).entry(slot);
        self.tell::<N>(why, slot);
        // Who replies now, too late, finds the mark set.
        if !entry.mark(REPLIED) {
            self.count(Counter::RepliedGone);
        }
        let header = entry.header();
        self.recent.subtract(&shared.rules, header.rule(), header.era());
        if header.has(LIMITED) {
            self.with_parents(|parents, _| parents.subtract(entry.parent(), now));
        }
        if header.has(CAPPED) {
            locked(&shared.sources).subtract(&shared.secret, &entry.key().flow(header.forward()));
        }
        if header.has(SPILLED) {
            locked(&shared.spilled).remove(&(Key::<N>::V6, slot));
        }
        Key::<N>::retired(self).add(&Key::<N>::family(&shared).slab, slot);
    }

    /// Leaves what this worker has unlinked to whoever frees next.
    pub(super) fn set_adrift(&mut self) {
        if self.unlinked() == 0 {
            return;
        }
        let Shared { adrift, is_adrift, v4, v6, .. } = &*self.shared;
        let mut adrift = locked(adrift);
        adrift.0.adopt(&v4.slab, std::mem::take(&mut self.v4.retired));
        adrift.1.adopt(&v6.slab, std::mem::take(&mut self.v6.retired));
        // Relaxed: see free(); what is adrift is under the lock.
        is_adrift.store(1, Ordering::Relaxed);
    }

    /// Slots that this worker has unlinked and could not free yet.
    pub(super) fn unlinked(&self) -> u64 {
        self.v4.retired.len() + self.v6.retired.len()
    }

    /// Frees slots that nobody knows any more; how many. The worker knows none.
    pub(super) fn free(&mut self) -> u64 {
        let Self { shared, worker, seen, v4, v6, .. } = self;
        // Relaxed: whoever sees it late frees it later.
        if shared.is_adrift.load(Ordering::Relaxed) != 0 {
            let mut adrift = locked(&shared.adrift);
            v4.retired.adopt(&shared.v4.slab, std::mem::take(&mut adrift.0));
            v6.retired.adopt(&shared.v6.slab, std::mem::take(&mut adrift.1));
            shared.is_adrift.store(0, Ordering::Relaxed);
        }
        let freed = v4.retired.free(&shared.v4.slab, &shared.epochs, *worker, seen)
            + v6.retired.free(&shared.v6.slab, &shared.epochs, *worker, seen);
        if freed > 0 {
            // Relaxed: see take_room().
            shared.held.fetch_sub(freed, Ordering::Relaxed);
        }
        freed
    }
}
