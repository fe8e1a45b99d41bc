//! Taking states away: those that have ended, and those whose rule is gone.

use std::sync::Arc;

use super::{Own, Shared, States};
use crate::Time;
use crate::state::cell::{CAPPED, Cell, LIMITED, Maker, REPLIED, SPILLED};
use crate::state::family::locked;
use crate::state::key::{Key, Unpack};
use crate::state::sync::Ordering;
use crate::state::tally::Event;
use crate::state::{Happened, Lookup, Name, RuleId};

/// At how many slots of each family an install may look to find room that ended states take up.
pub(super) const RECLAIM: u32 = 512;

/// Slots after which a long walk says that it knows none.
pub(super) const WALK: u32 = 4096;

impl States {
    /// Collects states that have ended to make room.
    pub(super) fn reclaim(&mut self, now: Time) {
        let mut expired = self.sweep::<2>(Some(RECLAIM), now, &mut usize::MAX.clone());
        expired += self.sweep::<6>(Some(RECLAIM), now, &mut usize::MAX.clone());
        self.expired(expired);
        self.free();
    }

    /// Collects ended states of a family, looking at so many slots, or at all, and at `budget` states.
    pub(super) fn sweep<const N: usize>(&mut self, slots: Option<u32>, now: Time, budget: &mut usize) -> u64
    where
        Key<N>: Own<N>,
    {
        let mut expired = 0;
        let len = Key::<N>::family(&self.shared).slab.len();
        match slots {
            Some(slots) => {
                for slot in Key::<N>::family(&self.shared).next_slots(slots) {
                    if *budget == 0 {
                        break;
                    }
                    expired += self.look_at::<N>(slot, now, budget);
                }
            }
            None => {
                for slot in 0..len {
                    if slot % WALK == 0 {
                        self.stamp();
                    }
                    expired += self.look_at::<N>(slot, now, budget);
                }
            }
        }
        expired
    }

    /// Collects the state in `slot` if it has ended.
    #[inline]
    fn look_at<const N: usize>(&mut self, slot: u32, now: Time, budget: &mut usize) -> u64
    where
        Key<N>: Own<N>,
    {
        let family = Key::<N>::family(&self.shared);
        if !family.may_be_over(slot, now) {
            return 0;
        }
        *budget = budget.saturating_sub(1);
        if family.cell(slot).live(now) {
            family.look_later(slot, now);
            return 0;
        }
        u64::from(self.remove_if::<N>(slot, now, Happened::Expired, |cell| !cell.live(now)))
    }

    /// Unlinks the state in `slot`, if there is one and `still` says so of it.
    pub(super) fn remove_if<const N: usize>(
        &mut self,
        slot: u32,
        now: Time,
        why: Happened,
        still: impl Fn(Cell<'_, N>) -> bool,
    ) -> bool
    where
        Key<N>: Own<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let unlinked =
            family.slab.tick(slot).is_some() && family.unlink(&Key::<N>::local(self).index, slot, still);
        if unlinked {
            self.gone::<N>(slot, now, why);
        }
        unlinked
    }

    /// Removes one state, live or not; `None` when there is none, else whether it was live.
    pub(super) fn remove_one<const N: usize>(&mut self, key: &Key<N>, name: Name, now: Time) -> Option<bool>
    where
        Key<N>: Own<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let slot = family.find_any(&Key::<N>::local(self).index, key, name)?;
        let live = family.cell(slot).live(now);
        self.remove_if::<N>(slot, now, Happened::Removed, |_| true).then_some(live)
    }

    /// Removes the live states of a flow, of every name; how many.
    pub(super) fn remove_named_or_not<const N: usize>(&mut self, key: &Key<N>, now: Time) -> usize
    where
        Key<N>: Own<N>,
    {
        let mut removed = 0;
        loop {
            let family = Key::<N>::family(&self.shared);
            let index = &Key::<N>::local(self).index;
            let Some(slot) = family.find(index, index.probe(key), key, Lookup::Any, now) else {
                return removed;
            };
            // Another thread may have taken it away, and the slot may be another flow's by now.
            removed += usize::from(self.remove_if::<N>(slot, now, Happened::Removed, |cell| cell.is(key)));
        }
    }

    pub(super) fn remove_of_rule<const N: usize>(&mut self, slot: u32, maker: Maker) -> bool
    where
        Key<N>: Own<N>,
    {
        // The parents go too, so it does not matter when they were last used.
        self.remove_if::<N>(slot, Time::default(), Happened::Removed, |cell| {
            cell.maker().rule() == maker.rule()
        })
    }

    /// Does something with every state of these rules, `most` of them.
    pub(super) fn walk_rules<const N: usize>(
        &mut self,
        rules: &[RuleId],
        most: u64,
        done: &mut u64,
        mut work: impl FnMut(&mut Self, u32, Maker) -> bool,
    ) where
        Key<N>: Own<N>,
    {
        if rules.is_empty() {
            return;
        }
        for slot in 0..Key::<N>::family(&self.shared).slab.len() {
            if *done == most {
                return;
            }
            if slot % WALK == 0 {
                self.stamp();
            }
            let family = Key::<N>::family(&self.shared);
            if family.slab.tick(slot).is_none() {
                continue;
            }
            let maker = family.cell(slot).maker();
            if rules.binary_search(&maker.rule()).is_ok() {
                *done += u64::from(work(self, slot, maker));
            }
        }
    }

    /// Takes a state that is unlinked out of all that counts it.
    pub(super) fn gone<const N: usize>(&mut self, slot: u32, now: Time, why: Happened)
    where
        Key<N>: Own<N>,
    {
        // No packet that is fetched already passes by this state.
        self.turns += 1;
        let shared = Arc::clone(&self.shared);
        let cell = Key::<N>::family(&shared).cell(slot);
        self.tell::<N>(why, slot);
        // Who replies now, too late, finds the mark set.
        if !cell.mark(REPLIED) {
            self.count(Event::RepliedGone);
        }
        let maker = cell.maker();
        self.recent.subtract(&shared.rules, maker.rule());
        if maker.has(LIMITED) {
            self.with_parents(|parents, _| parents.subtract(cell.parent(), now));
        }
        if maker.has(CAPPED) {
            locked(&shared.sources).subtract(&shared.secret, &cell.key().flow(maker.forward()));
        }
        if maker.has(SPILLED) {
            locked(&shared.spilled).remove(&(Key::<N>::V6, slot));
        }
        Key::<N>::limbo(self).add(&Key::<N>::family(&shared).slab, slot);
    }

    /// Leaves what this worker has unlinked to whoever frees next.
    pub(super) fn set_adrift(&mut self) {
        if self.unlinked() == 0 {
            return;
        }
        let Shared { adrift, is_adrift, v4, v6, .. } = &*self.shared;
        let mut adrift = locked(adrift);
        adrift.0.adopt(&v4.slab, std::mem::take(&mut self.v4.limbo));
        adrift.1.adopt(&v6.slab, std::mem::take(&mut self.v6.limbo));
        // Relaxed: see free(); what is adrift is under the lock.
        is_adrift.store(1, Ordering::Relaxed);
    }

    /// Slots that this worker has unlinked and could not free yet.
    pub(super) fn unlinked(&self) -> u64 {
        self.v4.limbo.len() + self.v6.limbo.len()
    }

    /// Frees slots that nobody knows any more; how many. The worker knows none.
    pub(super) fn free(&mut self) -> u64 {
        let Self { shared, worker, seen, v4, v6, .. } = self;
        // Relaxed: whoever sees it late frees it later.
        if shared.is_adrift.load(Ordering::Relaxed) != 0 {
            let mut adrift = locked(&shared.adrift);
            v4.limbo.adopt(&shared.v4.slab, std::mem::take(&mut adrift.0));
            v6.limbo.adopt(&shared.v6.slab, std::mem::take(&mut adrift.1));
            shared.is_adrift.store(0, Ordering::Relaxed);
        }
        let freed = v4.limbo.free(&shared.v4.slab, &shared.epochs, *worker, seen)
            + v6.limbo.free(&shared.v6.slab, &shared.epochs, *worker, seen);
        if freed > 0 {
            // Relaxed: see take_room().
            shared.held.fetch_sub(freed, Ordering::Relaxed);
        }
        freed
    }
}
