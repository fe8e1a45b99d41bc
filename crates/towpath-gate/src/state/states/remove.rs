//! Removing states: by rule, by flow, and what follows when a state is unlinked.

use towpath_wire::Time;

use super::sweep::WALK;
use super::{AddressFamily, Shared, States};
use crate::state::concurrent::sync::Ordering;
use crate::state::concurrent::worker_counters::Counter;
use crate::state::events::EventKind;
use crate::state::table::entry::{ASSURED, CAPPED, Entry, LIMITED, ORPHANED, WIDE_COUNTS};
use crate::state::table::key::{FlowKey, Key, with_key};
use crate::state::{Flow, Lookup, Name, RuleId};

impl States {
    /// Removes the states of every rule that `removed` accepts, and their parents. Returns the number of states, including
    /// those that had expired.
    ///
    /// The work is proportional to the number of rules. From each worker's next call on, no packet matches these states and no
    /// listing shows them. Their slots are collected like those of expired states. States that such a rule makes afterwards
    /// stay.
    pub fn remove_where(&mut self, mut removed: impl FnMut(RuleId) -> bool) -> usize {
        self.quiescent();
        if self.shared.rules.generations_exhausted() {
            // Relaxed: a time that another worker was given, at least as late as its states' last packets by TIME_STEP.
            let latest = self.shared.time.load(Ordering::Relaxed);
            self.sweep_all(Time::from_nanos(self.now.as_nanos().max(latest)));
            self.prune_removed();
        }
        let states = self.shared.rules.remove_where(&mut removed);
        if states > 0 {
            self.publish();
        }
        self.shared.limits.remove_parents(removed);
        states as usize
    }

    /// Removes the state of a flow (in either direction) under `name`. Returns true if it was live.
    pub fn remove(&mut self, flow: &Flow, name: Name, now: Time) -> bool {
        self.remove_named(flow, name, None, now)
    }

    /// As [`States::remove`], if `rule` made the state.
    pub(crate) fn remove_of(&mut self, flow: &Flow, name: Name, rule: RuleId, now: Time) -> bool {
        self.remove_named(flow, name, Some(rule), now)
    }

    fn remove_named(&mut self, flow: &Flow, name: Name, rule: Option<RuleId>, now: Time) -> bool {
        self.begin(now);
        let flow = &*self.key_flow(flow);
        let removed = with_key!(flow, |key, _side| self.remove_key(&key, name, rule, now));
        self.count_many(Counter::Removed, removed.is_some().into());
        self.update_nearly_full();
        removed == Some(true)
    }

    /// Removes the states of a flow (in either direction) under all names. Returns the number of live ones.
    pub fn remove_flow(&mut self, flow: &Flow, now: Time) -> usize {
        self.begin(now);
        let flow = &*self.key_flow(flow);
        let removed = with_key!(flow, |key, _side| self.remove_all_names(&key, now));
        self.count_many(Counter::Removed, removed as u64);
        self.update_nearly_full();
        removed
    }

    /// Marks the states of every rule that `deleted` accepts as orphaned: they outlive their rule (`dyn_keep_states`). Returns
    /// their number. Their parents stay while they count one of them.
    pub fn orphan_where(&mut self, mut deleted: impl FnMut(RuleId) -> bool) -> usize {
        self.quiescent();
        let rules = self.shared.rules.with_states(&mut deleted);
        self.shared.limits.orphan_parents(deleted);
        self.orphan::<2>(&rules) + self.orphan::<6>(&rules)
    }

    /// Marks the states of these rules, which are sorted, as orphaned. Returns the number that were not.
    fn orphan<const N: usize>(&mut self, rules: &[RuleId]) -> usize
    where
        Key<N>: AddressFamily<N>,
    {
        if rules.is_empty() {
            return 0;
        }
        let mut marked = 0;
        for slot in 0..Key::<N>::family(&self.shared).slab.len() {
            if slot % WALK == 0 {
                self.quiescent();
            }
            let family = Key::<N>::family(&self.shared);
            if !family.slab.is_occupied(slot) {
                continue;
            }
            let entry = family.entry(slot);
            let header = entry.header();
            if rules.binary_search(&header.rule()).is_ok() && !self.removed.contains(header) {
                marked += usize::from(entry.set_flag(ORPHANED));
            }
        }
        marked
    }

    /// Unlinks the state in `slot`, if there is one and `still` accepts it. Returns true if this call unlinked it.
    pub(super) fn remove_if<const N: usize>(
        &mut self,
        slot: u32,
        now: Time,
        kind: EventKind,
        still: impl Fn(Entry<'_, N>) -> bool,
    ) -> bool
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let unlinked =
            family.slab.is_occupied(slot) && family.unlink(&Key::<N>::local(self).index, slot, still);
        if unlinked {
            self.release::<N>(slot, now, kind);
        }
        unlinked
    }

    /// Removes the state of this name, live or not, if `rule` made it or is `None`. Returns whether the removed state was live.
    fn remove_key<const N: usize>(
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
        let live = self.live(now).accepts(family.entry(slot));
        // Another worker may have removed it, and the slot may have another state.
        let still = |entry: Entry<'_, N>| {
            let header = entry.header();
            entry.has_key(key) && header.name() == name && rule.is_none_or(|rule| header.rule() == rule)
        };
        self.remove_if::<N>(slot, now, EventKind::Removed, still).then_some(live)
    }

    /// Removes the flow's live states. Returns their number.
    fn remove_all_names<const N: usize>(&mut self, key: &Key<N>, now: Time) -> usize
    where
        Key<N>: AddressFamily<N>,
    {
        let mut removed = 0;
        loop {
            let family = Key::<N>::family(&self.shared);
            let index = &Key::<N>::local(self).index;
            let Some(slot) = family.find(index, index.probe(key), key, Lookup::Any, self.live(now)) else {
                return removed;
            };
            // Another worker may have removed it, and the slot may have another flow's state.
            let still = |entry: Entry<'_, N>| entry.has_key(key);
            removed += usize::from(self.remove_if::<N>(slot, now, EventKind::Removed, still));
        }
    }

    /// Releases a state that was unlinked because it had expired, or its rule's states were removed.
    pub(super) fn release_ended<const N: usize>(&mut self, slot: u32, now: Time)
    where
        Key<N>: AddressFamily<N>,
    {
        let removed = self.removed.contains(Key::<N>::family(&self.shared).entry(slot).header());
        let (kind, counter) = match removed {
            true => (EventKind::Removed, Counter::Removed),
            false => (EventKind::Expired, Counter::Expired),
        };
        self.release::<N>(slot, now, kind);
        self.count(counter);
        self.update_nearly_full();
    }

    /// Releases what an unlinked state held: its counts in its rule, parent and source, and its slot.
    fn release<const N: usize>(&mut self, slot: u32, now: Time, kind: EventKind)
    where
        Key<N>: AddressFamily<N>,
    {
        // No prefetched packet may pass by this state.
        self.hint_version += 1;
        let family = Key::<N>::family(&self.shared);
        let entry = family.entry(slot);
        self.record::<N>(kind, slot);
        // A worker with a late reply finds the flag set and does not count the state as assured.
        if !entry.set_flag(ASSURED) {
            self.count(Counter::AssuredGone);
        }
        let header = entry.header();
        let shared = &*self.shared;
        self.rule_counts.subtract(&shared.rules, header.rule(), header.generation());
        if header.has(LIMITED) {
            shared.limits.release_parent(entry.parent(), now);
        }
        if header.has(CAPPED) {
            shared.limits.release_source(&entry.key().flow(header.forward()));
        }
        if header.has(WIDE_COUNTS) {
            family.wide_counters.remove(slot);
        }
        Key::<N>::pick(&mut self.v4, &mut self.v6).retired.push(&family.slab, slot);
        self.count_many(Key::<N>::LINKED, 1_u64.wrapping_neg());
        self.balance.now -= 1;
        self.changed();
    }

    /// Leaves the slots that this worker has retired to the next worker that frees slots.
    pub(super) fn abandon_retired(&mut self) {
        if self.retired() == 0 {
            return;
        }
        let Shared { abandoned, v4, v6, .. } = &*self.shared;
        let lists = (std::mem::take(&mut self.v4.retired), std::mem::take(&mut self.v6.retired));
        abandoned.put((&v4.slab, &v6.slab), lists);
    }

    /// The number of slots that this worker has retired and not freed.
    pub(super) fn retired(&self) -> u64 {
        self.v4.retired.len() + self.v6.retired.len()
    }

    /// Frees the retired slots whose grace period is over. Returns their number. The worker must hold no slot.
    pub(super) fn free(&mut self) -> u64 {
        let Self { shared, worker, v4, v6, settings, .. } = self;
        if let Some(lists) = shared.abandoned.take() {
            v4.retired.adopt(&shared.v4.slab, lists.0);
            v6.retired.adopt(&shared.v6.slab, lists.1);
        }
        let freed = v4.retired.free((&shared.v4.slab, &mut v4.free), &shared.epochs, worker)
            + v6.retired.free((&shared.v6.slab, &mut v6.free), &shared.epochs, worker);
        if freed > 0 {
            shared.occupancy.release(worker.id(), freed, settings.dyn_max);
        }
        freed
    }
}
