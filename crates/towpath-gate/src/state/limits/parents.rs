//! Parents: the counters of `limit`. A parent counts the states of one rule, flow name and masked flow.
//!
//! What: parents are in a slab, where each keeps its slot for life. A hash index finds a slot by key and name, a list per
//! rule finds the parents of a rule, and a timer wheel finds those that may have expired.
//!
//! Invariant: each slot is once in the index, once in its rule's list and once in the wheel. An expired parent stays until it
//! is collected, and counts toward `dyn_parent_max`; searches take `now` and do not show it.
//!
//! One thread at a time, by `&mut`. The states themselves are in [`crate::state::table`].

use std::time::Duration;

use hashbrown::{HashMap, HashTable};
use slab::Slab;
use towpath_wire::Time;

use super::slot_list::{List, NONE, SlotLists};
use super::timer_wheel::TimerWheel;
use crate::state::table::hash::Secret;
use crate::state::table::key::{self, ParentKey};
use crate::state::{Flow, Kind, LimitMask, Listed, Name, Origin, RuleId};

/// How long the wheel leaves a parent with states alone: [`Parents::subtract`] of its last state schedules it.
const IN_USE: Duration = Duration::from_secs(10);

/// One parent.
#[derive(Clone, Debug)]
struct Parent {
    key: ParentKey,
    name: Name,
    rule: RuleId,
    /// The rule was deleted and its states were kept.
    orphaned: bool,
    /// `dyn_short_lifetime` after the last use. A parent that counts a state stays in any case.
    expires: Time,
    flow: Flow,
    /// States counted.
    count: u32,
    /// The rule's states were removed: the parent goes with the last state that it counts.
    removed: bool,
    /// For a limit per second: when the bucket of new states is full again.
    full_at: Time,
}

impl Parent {
    fn is_live(&self, now: Time) -> bool {
        self.expires > now || self.count > 0
    }

    /// When the bucket of new states is full again after `taken` of `max` per second; `None` if it has fewer.
    fn full_after(&self, max: u32, taken: u32, now: Time) -> Option<Time> {
        const SECOND: u64 = 1_000_000_000;
        let each = SECOND / u64::from(max.max(1));
        let end = self.full_at.max(now).as_nanos().saturating_add(each.saturating_mul(taken.into()));
        (max > 0 && end - now.as_nanos() <= SECOND).then_some(Time::from_nanos(end))
    }
}

/// The key of a parent.
pub(crate) struct ParentId {
    flow: Flow,
    key: ParentKey,
    hash: u64,
    name: Name,
    rule: RuleId,
}

impl ParentId {
    pub(crate) fn new(secret: &Secret, flow: &Flow, mask: LimitMask, name: Name, rule: RuleId) -> Self {
        let flow = key::masked(flow, mask);
        let key = ParentKey::of_parent(&flow, rule);
        Self { flow, key, hash: secret.hash(&key.0), name, rule }
    }

    /// Returns true if both identify the same parent.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.key == other.key && self.name == other.name
    }

    /// A number below `shards`, a power of two, by the parent's key.
    pub(crate) fn shard(&self, shards: usize) -> usize {
        // The hash table uses the lowest bits and the highest ones.
        (self.hash >> 32) as usize & (shards - 1)
    }
}

/// The parents of one rule.
#[derive(Clone, Copy, Debug)]
struct OfRule {
    list: List,
    count: usize,
}

/// The parents.
#[derive(Clone, Debug)]
pub(crate) struct Parents {
    secret: Secret,
    slots: Slab<Parent>,
    index: HashTable<u32>,
    wheel: TimerWheel,
    rules: HashMap<RuleId, OfRule>,
    lists: SlotLists,
}

impl Parents {
    pub(crate) fn new(secret: Secret) -> Self {
        Self {
            secret,
            slots: Slab::new(),
            index: HashTable::new(),
            wheel: TimerWheel::new(),
            rules: HashMap::new(),
            lists: SlotLists::default(),
        }
    }

    /// The number of parents, including those that have expired and were not collected yet.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    #[cfg(test)]
    fn id(&self, flow: &Flow, mask: LimitMask, name: Name, rule: RuleId) -> ParentId {
        ParentId::new(&self.secret, flow, mask, name, rule)
    }

    /// The parent's slot, and whether its time is over and only its states keep it.
    pub(crate) fn find(&self, id: &ParentId, now: Time) -> Option<(u32, bool)> {
        let is = |&slot: &u32| {
            let parent = &self.slots[slot as usize];
            parent.key == id.key && parent.name == id.name
        };
        let slot = *self.index.find(id.hash, is)?;
        Some((slot, self.slots[slot as usize].expires <= now))
    }

    /// Uses a parent for an install: it lives until `expires` at least.
    pub(crate) fn touch(&mut self, slot: u32, expires: Time, now: Time) {
        let parent = &mut self.slots[slot as usize];
        // A rule that installs a state exists.
        (parent.orphaned, parent.removed) = (false, false);
        let sooner = expires < parent.expires;
        parent.expires = expires;
        if sooner {
            self.wheel.reschedule_earlier(slot, expires, now);
        }
    }

    /// Adds a parent. No other has the same key and name.
    pub(crate) fn insert(&mut self, id: ParentId, expires: Time, now: Time) -> u32 {
        let ParentId { flow, key, hash, name, rule } = id;
        let (orphaned, removed, count, full_at) = (false, false, 0, Time::default());
        let parent = Parent { key, name, rule, orphaned, expires, flow, count, removed, full_at };
        let slot = self.slots.insert(parent) as u32;
        let (slots, secret) = (&self.slots, &self.secret);
        self.index.insert_unique(hash, slot, |&slot| secret.hash(&slots[slot as usize].key.0));
        let of_rule = self.rules.entry(rule).or_insert(OfRule { list: List::EMPTY, count: 0 });
        self.lists.push_back(&mut of_rule.list, slot);
        of_rule.count += 1;
        self.wheel.insert(slot, expires, now);
        slot
    }

    fn remove(&mut self, slot: u32) {
        let parent = self.slots.remove(slot as usize);
        if let Ok(found) = self.index.find_entry(self.secret.hash(&parent.key.0), |&at| at == slot) {
            found.remove();
        }
        self.wheel.remove(slot);
        if let Some(of_rule) = self.rules.get_mut(&parent.rule) {
            self.lists.remove(&mut of_rule.list, slot);
            of_rule.count -= 1;
            if of_rule.count == 0 {
                self.rules.remove(&parent.rule);
            }
        }
    }

    /// The number of states that the parent counts.
    pub(crate) fn count(&self, slot: u32) -> u32 {
        self.slots[slot as usize].count
    }

    /// Takes one of `max` states per second. Returns false when the bucket is empty. It is the token bucket of the
    /// rules' pipes, for states.
    pub(crate) fn take_per_second(&mut self, slot: u32, max: u32, now: Time) -> bool {
        let parent = &mut self.slots[slot as usize];
        let full_at = parent.full_after(max, 1, now);
        parent.full_at = full_at.unwrap_or(parent.full_at);
        full_at.is_some()
    }

    /// Returns true if one more of `max` states per second can be taken after `taken` others.
    pub(crate) fn has_per_second(&self, slot: u32, max: u32, taken: u32, now: Time) -> bool {
        self.slots[slot as usize].full_after(max, taken.saturating_add(1), now).is_some()
    }

    /// Counts one more state.
    pub(crate) fn add(&mut self, slot: u32) {
        self.slots[slot as usize].count += 1;
    }

    /// Counts one state less. Does nothing for [`NONE`].
    pub(crate) fn subtract(&mut self, slot: u32, now: Time) {
        if slot == NONE {
            return;
        }
        let parent = &mut self.slots[slot as usize];
        parent.count -= 1;
        if parent.count == 0 {
            self.wheel.reschedule_earlier(slot, parent.expires.max(now), now);
        }
    }

    /// The number of expired parents that count no state, if each counts `less` states less.
    pub(crate) fn ended(&self, now: Time, less: impl Fn(u32) -> u32) -> usize {
        let is = |(slot, parent): &(usize, &Parent)| {
            parent.expires <= now && parent.count.saturating_sub(less(*slot as u32)) == 0
        };
        self.slots.iter().filter(is).count()
    }

    /// Collects expired parents that count no state. Each parent examined takes one off `budget`.
    pub(crate) fn collect(&mut self, now: Time, budget: &mut usize) {
        while let Some(slot) = self.wheel.next(now, budget) {
            let parent = &self.slots[slot as usize];
            if !parent.is_live(now) {
                self.remove(slot);
                continue;
            }
            let expires = if parent.count > 0 { parent.expires.max(now + IN_USE) } else { parent.expires };
            self.wheel.remove(slot);
            self.wheel.insert(slot, expires, now);
        }
    }

    /// As [`Parents::collect`], including the parents that expired less than a tick ago.
    pub(crate) fn collect_all(&mut self, now: Time, budget: &mut usize) {
        self.collect(now, budget);
        loop {
            let mut current =
                self.wheel.current().take_while(|_| std::mem::replace(budget, budget.saturating_sub(1)) > 0);
            let expired = current.find(|&slot| !self.slots[slot as usize].is_live(now));
            drop(current);
            let Some(slot) = expired else { return };
            self.remove(slot);
        }
    }

    /// Removes the parents of the rules that `removed` accepts, after the states of these rules were removed. A parent that
    /// still counts states goes when they have been unlinked.
    pub(crate) fn remove_where(&mut self, removed: impl FnMut(RuleId) -> bool) {
        for slot in self.of_rules(removed) {
            if self.count(slot) == 0 {
                self.remove(slot);
            } else {
                let parent = &mut self.slots[slot as usize];
                (parent.expires, parent.removed) = (Time::default(), true);
            }
        }
    }

    /// Marks the parents of the rules that `deleted` accepts as orphaned.
    pub(crate) fn orphan_where(&mut self, deleted: impl FnMut(RuleId) -> bool) {
        for slot in self.of_rules(deleted) {
            self.slots[slot as usize].orphaned = true;
        }
    }

    /// The parents of the rules that `wanted` accepts.
    fn of_rules(&self, mut wanted: impl FnMut(RuleId) -> bool) -> Vec<u32> {
        let lists = self.rules.iter().filter(|(rule, _)| wanted(**rule)).map(|(_, of_rule)| of_rule.list);
        let slots = |list: List| std::iter::successors(list.first(), |&slot| self.lists.next(slot));
        lists.flat_map(slots).collect()
    }

    /// The live parents from `slot` on, in the order of their slots.
    pub(crate) fn list_from(&self, slot: u32, now: Time) -> impl Iterator<Item = (u32, Listed)> {
        let slots = slot..self.slots.capacity() as u32;
        let parents = slots.filter_map(|slot| Some((slot, self.slots.get(slot as usize)?)));
        let live = parents.filter(move |(_, parent)| parent.is_live(now) && !parent.removed);
        live.map(move |(slot, parent)| {
            let listed = Listed {
                kind: Kind::Parent { count: parent.count },
                rule: parent.rule,
                name: parent.name,
                orphaned: parent.orphaned,
                flow: parent.flow,
                packets: [0; 2],
                bytes: [0; 2],
                remaining: parent.expires.since(now),
                tcp_seen: 0,
                picked_up: false,
                tcp_ack: [0; 2],
                origin: Origin::UNRECORDED,
            };
            (slot, listed)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::state::Ends;

    const START: Time = Time::from_secs(1000);

    fn insert(parents: &mut Parents, n: u32, rule: u32, expires: Time) -> u32 {
        let ends = Ends::V4(Ipv4Addr::from(n), [192, 0, 2, 1].into());
        let flow = Flow { ends, proto: 17, src_port: 1, dst_port: 2, zone: 0 };
        let id = parents.id(&flow, LimitMask::SRC_ADDR, Name::DEFAULT, RuleId(rule));
        assert_eq!(parents.find(&id, START), None);
        let slot = parents.insert(id, expires, START);
        let id = parents.id(&flow, LimitMask::SRC_ADDR, Name::DEFAULT, RuleId(rule));
        assert_eq!(parents.find(&id, START), Some((slot, expires <= START)));
        slot
    }

    #[test]
    fn parents_expire_when_they_count_nothing() {
        let mut parents = Parents::new(Secret::new(1));
        let slots = [1, 2, 3].map(|n| insert(&mut parents, n, 1, START + Duration::from_secs(5)));
        parents.add(slots[1]);
        let all = |parents: &mut Parents, seconds| {
            parents.collect_all(START + Duration::from_secs(seconds), &mut usize::MAX.clone());
            parents.len()
        };
        assert_eq!((all(&mut parents, 4), all(&mut parents, 5)), (3, 1));
        parents.subtract(slots[1], START + Duration::from_secs(6));
        assert_eq!(all(&mut parents, 6), 0);
        assert!(parents.rules.is_empty() && parents.index.is_empty());
    }

    #[test]
    fn removed_rules_lose_their_parents_and_others_keep_them() {
        let mut parents = Parents::new(Secret::new(1));
        let late = START + Duration::from_secs(60);
        let slots: Vec<u32> = (0..6).map(|n| insert(&mut parents, n, n % 2, late)).collect();
        parents.add(slots[1]);
        parents.remove_where(|rule| rule == RuleId(1));
        let listed: Vec<_> = parents.list_from(0, START).map(|(_, listed)| listed.rule.0).collect();
        assert_eq!((listed, parents.len()), (vec![0; 3], 4));
        parents.subtract(slots[1], START);
        parents.collect_all(START + Duration::from_secs(1), &mut usize::MAX.clone());
        assert_eq!(parents.len(), 3);
        parents.orphan_where(|rule| rule == RuleId(0));
        assert!(parents.list_from(0, START).all(|(_, listed)| listed.orphaned));
        parents.touch(slots[0], late, START);
        assert_eq!(parents.list_from(0, START).filter(|(_, listed)| listed.orphaned).count(), 2);
    }
}
