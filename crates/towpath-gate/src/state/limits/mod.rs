//! Bounds on the number of states: in total, per rule (`limit`), per source address, and for the first SYN of a flow.
//!
//! Parents and sources are in shards by the hash of their keys, each with a lock. All states that one parent or source counts
//! are in one shard, so the limits are exact. The number of parents is one counter, changed when a parent is made or collected:
//! `dyn_parent_max` is exact, too.

pub(crate) mod first_syn;
pub(crate) mod occupancy;
pub(crate) mod parents;
pub(crate) mod rule_counts;
pub(crate) mod slot_list;
pub(crate) mod sources;
mod timer_wheel;

use std::sync::Mutex;

use hashbrown::HashMap;
use towpath_wire::Time;

use self::parents::{ParentId, Parents};
use self::slot_list::NONE;
use self::sources::{SourceId, Sources};
use super::concurrent::sync::{Apart, AtomicU64, Ordering};
use super::table::entry::{MAX_PARENTS, after};
use super::table::family::locked;
use super::table::hash::Secret;
use super::{Flow, Limit, Listed, Name, Refused, RuleId, Settings};

/// Shards of the parents and of the sources.
const SHARDS: usize = 64;

/// Slots of a shard: the slot of a parent is its slot in the shard, plus this number for each shard before it.
const PER_SHARD: u32 = MAX_PARENTS / SHARDS as u32;

/// Budget of a collection per shard that it looks at.
const BUDGET_PER_SHARD: usize = 16;

/// The counters of `limit` and `dyn_source_max`, shared by all workers.
#[derive(Debug)]
pub(crate) struct Limits {
    secret: Secret,
    /// `None` until the shard's first parent is made: the timers of a shard take 16 KiB.
    parents: [Apart<Mutex<Option<Parents>>>; SHARDS],
    /// The number of parents.
    parents_len: AtomicU64,
    sources: [Apart<Mutex<Sources>>; SHARDS],
}

/// An install with a `limit`.
#[derive(Clone, Copy)]
pub(crate) struct Limited<'a> {
    pub(crate) flow: &'a Flow,
    pub(crate) name: Name,
    pub(crate) rule: RuleId,
    pub(crate) limit: Limit,
}

/// The number of states that the parents in these slots would count less.
pub(crate) type Released = HashMap<u32, u32>;

/// The reservations of a state that is about to be inserted, besides its slot.
pub(crate) struct Reservation {
    /// The parent that counts the state, or [`NONE`].
    pub(crate) parent: u32,
    /// The state's source counts it.
    pub(crate) source: bool,
}

impl Limits {
    pub(crate) fn new(secret: &Secret) -> Self {
        Self {
            secret: secret.clone(),
            parents: std::array::from_fn(|_| Apart(Mutex::new(None))),
            parents_len: AtomicU64::new(0),
            sources: std::array::from_fn(|_| Apart(Mutex::new(Sources::new(secret.clone())))),
        }
    }

    /// The number of parents.
    pub(crate) fn parents_len(&self) -> usize {
        // Relaxed: a statistic.
        self.parents_len.load(Ordering::Relaxed) as usize
    }

    /// Counts a state in its parent, which is made if needed. Returns the parent's slot, or [`NONE`] for a limit per second,
    /// which counts no states.
    ///
    /// An expired parent that only its states keep counts as absent until `reclaimed`: expired states were collected first.
    pub(crate) fn reserve_parent(
        &self,
        install: &Limited<'_>,
        settings: &Settings,
        reclaimed: bool,
        now: Time,
    ) -> Result<u32, Refused> {
        let limit = install.limit;
        // A limit per second must remember one second.
        let least = if limit.per_second { 1 } else { 0 };
        let expires = after(now, settings.dyn_short_lifetime.max(least));
        let id = self.id(install);
        let shard = id.shard(SHARDS);
        let mut parents = locked(&self.parents[shard]);
        let parents = parents.get_or_insert_with(|| Parents::new(self.secret.clone()));
        let max = settings.dyn_parent_max.min(MAX_PARENTS);
        let slot = match parents.find(&id, now) {
            Some((_, true)) if !reclaimed && self.parents_len() >= max as usize => {
                return Err(Refused::ParentsFull);
            }
            Some((slot, _)) => {
                parents.touch(slot, expires, now);
                slot
            }
            None if parents.len() < PER_SHARD as usize && self.count_parent(max) => {
                parents.insert(id, expires, now)
            }
            None => return Err(Refused::ParentsFull),
        };
        if limit.per_second {
            let takes = parents.take_per_second(slot, limit.max, now);
            return if takes { Ok(NONE) } else { Err(Refused::OverRate) };
        }
        if parents.count(slot) >= limit.max {
            return Err(Refused::OverLimit);
        }
        parents.add(slot);
        Ok(shard as u32 * PER_SHARD + slot)
    }

    /// The result that [`Limits::reserve_parent`] would have after `others`. `released`: expired states and parents were collected
    /// first, and the parents in these slots count as many states less.
    pub(crate) fn foresee_parent(
        &self,
        install: &Limited<'_>,
        others: &[Limited<'_>],
        settings: &Settings,
        released: Option<&Released>,
        now: Time,
    ) -> Result<(), Refused> {
        let limit = install.limit;
        let id = self.id(install);
        let taken = others.iter().filter(|other| self.id(other).is_same(&id)).count() as u32;
        let max = settings.dyn_parent_max.min(MAX_PARENTS) as usize;
        let shard = id.shard(SHARDS);
        let less = |shard: usize, slot| {
            let slot = shard as u32 * PER_SHARD + slot;
            released.and_then(|released| released.get(&slot)).copied().unwrap_or_default()
        };
        let (mut ended, mut ended_here) = (0, 0);
        if released.is_some() {
            for (at, parents) in self.parents.iter().enumerate() {
                let here =
                    locked(parents).as_ref().map_or(0, |parents| parents.ended(now, |slot| less(at, slot)));
                ended += here;
                ended_here += if at == shard { here } else { 0 };
            }
        }
        let len = self.parents_len().saturating_sub(ended);
        let parents = locked(&self.parents[shard]);
        let parents = parents.as_ref();
        let found = parents.and_then(|parents| Some((parents, parents.find(&id, now)?)));
        let in_shard = parents.map_or(0, Parents::len).saturating_sub(ended_here);
        let has_room = len < max && in_shard < PER_SHARD as usize;
        let (count, second) = match found {
            Some((parents, (slot, expired))) => {
                let count = parents.count(slot).saturating_sub(less(shard, slot));
                let is_ended = released.is_some() && expired && count == 0;
                if is_ended && !has_room || expired && released.is_none() && len >= max {
                    return Err(Refused::ParentsFull);
                }
                (count, !limit.per_second || parents.has_per_second(slot, limit.max, taken, now))
            }
            None if taken > 0 || has_room => (0, taken < limit.max),
            None => return Err(Refused::ParentsFull),
        };
        match limit.per_second {
            true if second => Ok(()),
            true => Err(Refused::OverRate),
            false if count + taken < limit.max => Ok(()),
            false => Err(Refused::OverLimit),
        }
    }

    fn id(&self, install: &Limited<'_>) -> ParentId {
        let Limited { flow, name, rule, limit } = *install;
        // A shared count is identified by its own name, not by that of the states.
        ParentId::new(&self.secret, flow, limit.mask, limit.shared.unwrap_or(name), limit.owner(rule))
    }

    /// Counts one more parent. Returns false when there are `max`.
    fn count_parent(&self, max: u32) -> bool {
        let more = |len| (len < u64::from(max)).then_some(len + 1);
        // Relaxed: a bound. The locks guard the parents.
        self.parents_len.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Counts one state less in a parent.
    pub(crate) fn release_parent(&self, slot: u32, now: Time) {
        if let Some(parents) = &mut *locked(&self.parents[(slot / PER_SHARD) as usize]) {
            parents.subtract(slot % PER_SHARD, now);
        }
    }

    /// Counts a state for its source. Returns false when the source has `max`.
    pub(crate) fn reserve_source(&self, flow: &Flow, max: u32) -> bool {
        let source = SourceId::new(&self.secret, flow);
        locked(self.sources_of(source)).add(source, max)
    }

    /// Counts one state less for its source.
    pub(crate) fn release_source(&self, flow: &Flow) {
        let source = SourceId::new(&self.secret, flow);
        locked(self.sources_of(source)).subtract(source);
    }

    /// The number of states that a source counts.
    pub(crate) fn count_source(&self, source: SourceId) -> u32 {
        locked(self.sources_of(source)).count(source)
    }

    fn sources_of(&self, source: SourceId) -> &Mutex<Sources> {
        &self.sources[source.shard(SHARDS)]
    }

    /// Gives back what a state had reserved that was not inserted.
    pub(crate) fn release(&self, reservation: &Reservation, flow: &Flow, now: Time) {
        if reservation.parent != NONE {
            self.release_parent(reservation.parent, now);
        }
        if reservation.source {
            self.release_source(flow);
        }
    }

    /// Collects expired parents of some shards, from the one with the number `turn` on, which is advanced. Skips shards that
    /// another worker has locked: packets do not wait for them.
    pub(crate) fn try_collect_parents(&self, now: Time, budget: &mut usize, turn: &mut usize) {
        if self.parents_len() == 0 {
            return;
        }
        for _ in 0..(*budget / BUDGET_PER_SHARD).clamp(1, SHARDS) {
            if *budget == 0 {
                return;
            }
            let shard = *turn % SHARDS;
            *turn = shard + 1;
            if let Ok(mut parents) = self.parents[shard].try_lock() {
                self.change(&mut parents, |parents| parents.collect(now, budget));
            }
        }
    }

    /// Collects expired parents, including those that expired less than a tick ago.
    pub(crate) fn collect_parents(&self, now: Time, budget: &mut usize) {
        self.with_parents(|parents| parents.collect_all(now, budget));
    }

    /// Collects expired parents that may keep an install from getting its own.
    pub(crate) fn collect_parents_for(
        &self,
        install: &Limited<'_>,
        refused: Refused,
        now: Time,
        mut budget: usize,
    ) {
        if refused == Refused::ParentsFull {
            return self.collect_parents(now, &mut budget);
        }
        let shard = self.id(install).shard(SHARDS);
        self.change(&mut locked(&self.parents[shard]), |parents| parents.collect_all(now, &mut budget));
    }

    /// Removes the parents of the rules that `removed` accepts.
    pub(crate) fn remove_parents(&self, mut removed: impl FnMut(RuleId) -> bool) {
        self.with_parents(|parents| parents.remove_where(&mut removed));
    }

    /// Marks the parents of the rules that `deleted` accepts as orphaned.
    pub(crate) fn orphan_parents(&self, mut deleted: impl FnMut(RuleId) -> bool) {
        self.with_parents(|parents| parents.orphan_where(&mut deleted));
    }

    /// The live parents from `slot` on.
    pub(crate) fn list_parents(&self, slot: u32, now: Time) -> Vec<(u32, Listed)> {
        let (first, mut from) = (slot / PER_SHARD, slot % PER_SHARD);
        let mut listed = Vec::new();
        for (shard, parents) in (0..).zip(&self.parents).skip(first as usize) {
            if let Some(parents) = &*locked(parents) {
                let parents = parents.list_from(from, now);
                listed.extend(parents.map(|(slot, parent)| (shard * PER_SHARD + slot, parent)));
            }
            from = 0;
        }
        listed
    }

    /// Works on the parents of all shards, one after the other.
    fn with_parents(&self, mut work: impl FnMut(&mut Parents)) {
        self.parents.iter().for_each(|parents| self.change(&mut locked(parents), &mut work));
    }

    /// Works on the parents of a shard, and counts those that it removes.
    fn change(&self, parents: &mut Option<Parents>, work: impl FnOnce(&mut Parents)) {
        let Some(parents) = parents else { return };
        let before = parents.len();
        work(parents);
        // Relaxed: as in count_parent().
        self.parents_len.fetch_sub((before - parents.len()) as u64, Ordering::Relaxed);
    }
}

const _: () = assert!(SHARDS.is_power_of_two() && PER_SHARD as usize * SHARDS <= MAX_PARENTS as usize);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::state::{Ends, LimitMask};

    const NOW: Time = Time::from_secs(1000);

    fn flow(src: u8) -> Flow {
        let ends = Ends::V4([10, 0, 0, src].into(), [192, 0, 2, 1].into());
        Flow { ends, proto: 17, src_port: 1, dst_port: 53, zone: 0 }
    }

    #[test]
    fn a_parent_counts_up_to_its_limit_and_what_is_released() {
        let (limits, settings) = (Limits::new(&Secret::new(1)), Settings::default());
        let flow = flow(1);
        let limit = Limit::new(LimitMask::SRC_ADDR, 2);
        let install = Limited { flow: &flow, name: Name::DEFAULT, rule: RuleId(1), limit };
        let reserve = || limits.reserve_parent(&install, &settings, false, NOW);
        let (first, second) = (reserve().unwrap(), reserve().unwrap());
        assert_eq!((first, reserve()), (second, Err(Refused::OverLimit)));
        limits.release(&Reservation { parent: first, source: false }, &flow, NOW);
        assert_eq!((reserve(), limits.parents_len()), (Ok(first), 1));
    }

    #[test]
    fn the_number_of_parents_is_bounded() {
        let settings = Settings { dyn_parent_max: 1, ..Settings::default() };
        let limits = Limits::new(&Secret::new(1));
        let reserve = |flow: &Flow| {
            let limit = Limit { per_second: true, ..Limit::new(LimitMask::SRC_ADDR, 1) };
            let install = Limited { flow, name: Name::DEFAULT, rule: RuleId(1), limit };
            limits.reserve_parent(&install, &settings, false, NOW)
        };
        let rows = [(1, Ok(NONE)), (1, Err(Refused::OverRate)), (2, Err(Refused::ParentsFull))];
        for (src, result) in rows {
            assert_eq!(reserve(&flow(src)), result, "{src}");
        }
    }

    /// Parents of all shards are found, listed in order from any slot, and collected.
    #[test]
    fn the_shards_together_have_all_parents() {
        let settings = Settings { dyn_parent_max: 1000, ..Settings::default() };
        let limits = Limits::new(&Secret::new(1));
        let reserve = |n: u32| {
            let ends = Ends::V4(n.into(), [192, 0, 2, 1].into());
            let flow = Flow { ends, proto: 17, src_port: 1, dst_port: 53, zone: 0 };
            let limit = Limit::new(LimitMask::SRC_ADDR, 1);
            let install = Limited { flow: &flow, name: Name::DEFAULT, rule: RuleId(n % 2), limit };
            limits.reserve_parent(&install, &settings, false, NOW)
        };
        let mut slots: Vec<u32> = (0..1000).map(|n| reserve(n).unwrap()).collect();
        assert_eq!((reserve(1000), reserve(5)), (Err(Refused::ParentsFull), Err(Refused::OverLimit)));
        slots.sort_unstable();
        let listed =
            |from| limits.list_parents(from, NOW).into_iter().map(|(slot, _)| slot).collect::<Vec<_>>();
        assert_eq!(listed(0), slots);
        assert_eq!(listed(slots[499] + 1), slots[500..]);
        assert!(listed(slots[999] + 1).is_empty() && listed(u32::MAX - 1).is_empty());
        slots.iter().for_each(|&slot| limits.release_parent(slot, NOW));
        limits.remove_parents(|rule| rule == RuleId(1));
        assert_eq!((limits.parents_len(), listed(0).len()), (500, 500));
        // Calls with a small budget take the shards in turn.
        let late = NOW + std::time::Duration::from_secs(3600);
        let mut turn = 0;
        for _ in 0..20 * SHARDS {
            limits.try_collect_parents(late, &mut 32, &mut turn);
        }
        assert_eq!(limits.parents_len(), 0);
    }

    #[test]
    fn a_source_counts_up_to_its_maximum_and_what_is_released() {
        let limits = Limits::new(&Secret::new(1));
        let reserve = || limits.reserve_source(&flow(1), 1);
        assert_eq!([reserve(), reserve(), limits.reserve_source(&flow(2), 1)], [true, false, true]);
        limits.release(&Reservation { parent: NONE, source: true }, &flow(1), NOW);
        assert!(reserve());
    }
}
