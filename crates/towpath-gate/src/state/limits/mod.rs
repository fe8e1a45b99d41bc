//! Bounds on the number of states: in total, per rule (`limit`), per source address, and for the first SYN of a flow.

pub(crate) mod first_syn;
pub(crate) mod occupancy;
pub(crate) mod parents;
pub(crate) mod rule_counts;
pub(crate) mod slot_list;
pub(crate) mod sources;
mod timer_wheel;

use std::sync::Mutex;

use towpath_wire::Time;

use self::parents::Parents;
use self::slot_list::NONE;
use self::sources::Sources;
use super::concurrent::sync::{AtomicU64, Ordering};
use super::table::entry::{MAX_PARENTS, after};
use super::table::family::locked;
use super::table::hash::Secret;
use super::{Flow, Limit, Listed, Name, Refused, RuleId, Settings};

/// The counters of `limit` and `dyn_source_max`, shared by all workers.
#[derive(Debug)]
pub(crate) struct Limits {
    parents: Mutex<Parents>,
    /// The number of parents, readable without the lock.
    parents_len: AtomicU64,
    sources: Mutex<Sources>,
}

/// An install with a `limit`.
#[derive(Clone, Copy)]
pub(crate) struct Limited<'a> {
    pub(crate) flow: &'a Flow,
    pub(crate) name: Name,
    pub(crate) rule: RuleId,
    pub(crate) limit: Limit,
}

/// What a state that is about to be inserted has reserved, besides its slot.
pub(crate) struct Reservation {
    /// The parent that counts the state, or [`NONE`].
    pub(crate) parent: u32,
    /// The state's source counts it.
    pub(crate) source: bool,
}

impl Limits {
    pub(crate) fn new(secret: &Secret) -> Self {
        Self {
            parents: Mutex::new(Parents::new(secret.clone())),
            parents_len: AtomicU64::new(0),
            sources: Mutex::new(Sources::new(secret.clone())),
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
        let Limited { flow, name, rule, limit } = *install;
        // A limit per second must remember one second.
        let least = if limit.per_second { 1 } else { 0 };
        let expires = after(now, settings.dyn_short_lifetime.max(least));
        self.with_parents(|parents| {
            // A shared count is identified by its own name, not by that of the states.
            let id = parents.id(flow, limit.mask, limit.shared.unwrap_or(name), limit.owner(rule));
            let full = parents.len() >= settings.dyn_parent_max.min(MAX_PARENTS) as usize;
            let slot = match parents.find(&id, now) {
                Some((_, true)) if full && !reclaimed => return Err(Refused::ParentsFull),
                Some((slot, _)) => {
                    parents.touch(slot, expires, now);
                    slot
                }
                None if full => return Err(Refused::ParentsFull),
                None => parents.insert(id, expires, now),
            };
            if limit.per_second {
                let takes = parents.take_per_second(slot, limit.max, now);
                return if takes { Ok(NONE) } else { Err(Refused::OverRate) };
            }
            if parents.count(slot) >= limit.max {
                return Err(Refused::OverLimit);
            }
            parents.add(slot);
            Ok(slot)
        })
    }

    /// Counts one state less in a parent.
    pub(crate) fn release_parent(&self, slot: u32, now: Time) {
        self.with_parents(|parents| parents.subtract(slot, now));
    }

    /// Counts a state for its source. Returns false when the source has `max`.
    pub(crate) fn reserve_source(&self, flow: &Flow, max: u32) -> bool {
        locked(&self.sources).add(flow, max)
    }

    /// Counts one state less for its source.
    pub(crate) fn release_source(&self, flow: &Flow) {
        locked(&self.sources).subtract(flow);
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

    /// Collects expired parents, unless another worker holds the lock: packets do not wait for it.
    pub(crate) fn try_collect_parents(&self, now: Time, budget: &mut usize) {
        if self.parents_len() == 0 {
            return;
        }
        let Ok(mut parents) = self.parents.try_lock() else { return };
        parents.collect(now, budget);
        // Relaxed: a statistic. The mutex guards the parents.
        self.parents_len.store(parents.len() as u64, Ordering::Relaxed);
    }

    /// Collects expired parents, including those that expired less than a tick ago.
    pub(crate) fn collect_parents(&self, now: Time, budget: &mut usize) {
        self.with_parents(|parents| parents.collect_all(now, budget));
    }

    /// Removes the parents of the rules that `removed` accepts.
    pub(crate) fn remove_parents(&self, removed: impl FnMut(RuleId) -> bool) {
        self.with_parents(|parents| parents.remove_where(removed));
    }

    /// Marks the parents of the rules that `deleted` accepts as orphaned.
    pub(crate) fn orphan_parents(&self, deleted: impl FnMut(RuleId) -> bool) {
        self.with_parents(|parents| parents.orphan_where(deleted));
    }

    /// The live parents from `slot` on.
    pub(crate) fn list_parents(&self, slot: u32, now: Time) -> Vec<(u32, Listed)> {
        locked(&self.parents).list_from(slot, now).collect()
    }

    fn with_parents<T>(&self, work: impl FnOnce(&mut Parents) -> T) -> T {
        let mut parents = locked(&self.parents);
        let done = work(&mut parents);
        // Relaxed: as above.
        self.parents_len.store(parents.len() as u64, Ordering::Relaxed);
        done
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::state::{Ends, LimitMask};

    const NOW: Time = Time::from_secs(1000);

    fn flow(src: u8) -> Flow {
        let ends = Ends::V4([10, 0, 0, src].into(), [192, 0, 2, 1].into());
        Flow { ends, proto: 17, src_port: 1, dst_port: 53, tenant: 0 }
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

    #[test]
    fn a_source_counts_up_to_its_maximum_and_what_is_released() {
        let limits = Limits::new(&Secret::new(1));
        let reserve = || limits.reserve_source(&flow(1), 1);
        assert_eq!([reserve(), reserve(), limits.reserve_source(&flow(2), 1)], [true, false, true]);
        limits.release(&Reservation { parent: NONE, source: true }, &flow(1), NOW);
        assert!(reserve());
    }
}
