//! The table behind parents: entries by key, by rule, and by expiry.
//!
//! What: entries sit in a slab, where they stay for life; an index of tags finds a slot by the key's hash; a chain
//! per rule finds a rule's entries without walking the table; a timer wheel finds those that are due.
//!
//! Invariant: every slot of the slab is exactly once in the index, in its rule's chain and in the wheel. An entry
//! whose time is over stays until it is collected, and counts as long, but nobody is shown it: every search takes
//! `now`.
//!
//! One thread at a time, by `&mut`; the index grows by rehashing at once. The states themselves are in [`crate::state::table::family`].

use std::time::Duration;

use hashbrown::{HashMap, HashTable};
use slab::Slab;

use crate::state::limits::slot_list::{List, SlotLists};
use crate::state::limits::timer_wheel::TimerWheel;
use crate::state::table::hash::Secret;
use crate::state::table::key::Key;
use crate::state::{Name, RuleId};
use towpath_wire::Time;

/// How long a held entry is not looked at: whoever lets go of it says so ([`Table::release`]).
const HELD: Duration = Duration::from_secs(10);

/// What is kept in a table besides the key.
pub(crate) trait Body {
    /// Whether the entry stays although its time is over.
    fn held(&self) -> bool;
}

/// One entry.
#[derive(Clone, Debug)]
pub(crate) struct Record<const N: usize, B> {
    pub(crate) key: Key<N>,
    pub(crate) name: Name,
    pub(crate) rule: RuleId,
    /// The rule is gone, the entry was kept.
    pub(crate) orphaned: bool,
    pub(crate) expire: Time,
    pub(crate) body: B,
}

impl<const N: usize, B: Body> Record<N, B> {
    /// Whether the entry is there for anybody who looks at `now`.
    #[inline]
    pub(crate) fn live(&self, now: Time) -> bool {
        self.expire > now || self.body.held()
    }
}

/// The entries of one rule.
#[derive(Clone, Copy, Debug)]
struct OfRule {
    list: List,
    count: usize,
}

/// A table of entries with keys of `N` words.
#[derive(Clone, Debug)]
pub(crate) struct Table<const N: usize, B> {
    entries: Slab<Record<N, B>>,
    index: HashTable<u32>,
    wheel: TimerWheel,
    rules: HashMap<RuleId, OfRule>,
    of_rule: SlotLists,
}

impl<const N: usize, B: Body> Table<N, B> {
    pub(crate) fn new() -> Self {
        Self {
            entries: Slab::new(),
            index: HashTable::new(),
            wheel: TimerWheel::new(),
            rules: HashMap::new(),
            of_rule: SlotLists::default(),
        }
    }

    /// Entries held, those included whose time is over and that were not collected yet.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The slot of an entry of `key` with `name`, over or not.
    #[inline]
    pub(crate) fn find(&self, hash: u64, key: &Key<N>, name: Name) -> Option<u32> {
        let is = |&slot: &u32| {
            let entry = &self.entries[slot as usize];
            entry.key == *key && entry.name == name
        };
        self.index.find(hash, is).copied()
    }

    #[inline]
    pub(crate) fn get(&self, slot: u32) -> &Record<N, B> {
        &self.entries[slot as usize]
    }

    /// The entry, for its body to change; [`Table::set_expire`] changes its expiry.
    #[inline]
    pub(crate) fn get_mut(&mut self, slot: u32) -> &mut Record<N, B> {
        &mut self.entries[slot as usize]
    }

    /// Gives the entry a new end.
    #[inline]
    pub(crate) fn set_expire(&mut self, slot: u32, expire: Time, now: Time) {
        let entry = &mut self.entries[slot as usize];
        let sooner = expire < entry.expire;
        entry.expire = expire;
        if sooner {
            self.wheel.hasten(slot, expire, now);
        }
    }

    /// To be called when the entry's body is no longer held.
    pub(crate) fn release(&mut self, slot: u32, now: Time) {
        let expire = self.entries[slot as usize].expire.max(now);
        self.wheel.hasten(slot, expire, now);
    }

    /// Adds an entry; no other has its key and name.
    pub(crate) fn insert(&mut self, secret: &Secret, hash: u64, entry: Record<N, B>, now: Time) -> u32 {
        let (rule, expire) = (entry.rule, entry.expire);
        let slot = self.entries.insert(entry) as u32;
        let entries = &self.entries;
        self.index.insert_unique(hash, slot, |&slot| secret.hash(&entries[slot as usize].key.0));
        let of_rule = self.rules.entry(rule).or_insert(OfRule { list: List::EMPTY, count: 0 });
        self.of_rule.push(&mut of_rule.list, slot);
        of_rule.count += 1;
        self.wheel.file(slot, expire, now);
        slot
    }

    /// Takes an entry out.
    pub(crate) fn remove(&mut self, secret: &Secret, slot: u32) -> Record<N, B> {
        let entry = self.entries.remove(slot as usize);
        let hash = secret.hash(&entry.key.0);
        if let Ok(found) = self.index.find_entry(hash, |&at| at == slot) {
            found.remove();
        }
        self.wheel.take(slot);
        if let Some(of_rule) = self.rules.get_mut(&entry.rule) {
            self.of_rule.take(&mut of_rule.list, slot);
            of_rule.count -= 1;
            if of_rule.count == 0 {
                self.rules.remove(&entry.rule);
            }
        }
        entry
    }

    /// The next entry whose time is over, for the caller to remove. Every entry looked at takes one off `budget`.
    pub(crate) fn due(&mut self, now: Time, budget: &mut usize) -> Option<u32> {
        while let Some(slot) = self.wheel.next(now, budget) {
            let entry = &self.entries[slot as usize];
            if !entry.live(now) {
                return Some(slot);
            }
            let expire = if entry.body.held() { entry.expire.max(now + HELD) } else { entry.expire };
            self.wheel.take(slot);
            self.wheel.file(slot, expire, now);
        }
        None
    }

    /// Like [`Table::due`] after it, for the entries whose time was over less than a tick ago.
    pub(crate) fn just_due(&self, now: Time, budget: &mut usize) -> Option<u32> {
        let mut current =
            self.wheel.current().take_while(|_| std::mem::replace(budget, budget.saturating_sub(1)) > 0);
        current.find(|&slot| !self.entries[slot as usize].live(now))
    }

    /// The rules that have entries and that `gone` names.
    pub(crate) fn rules_where(&self, mut gone: impl FnMut(RuleId) -> bool) -> Vec<RuleId> {
        self.rules.keys().copied().filter(|&rule| gone(rule)).collect()
    }

    /// Some entry of `rule`, if it has any.
    pub(crate) fn any_of(&self, rule: RuleId) -> Option<u32> {
        self.rules.get(&rule)?.list.first()
    }

    /// The entries of `rule`.
    pub(crate) fn all_of(&self, rule: RuleId) -> Vec<u32> {
        std::iter::successors(self.any_of(rule), |&slot| self.of_rule.next(slot)).collect()
    }

    /// Marks the entries of `rule` as orphaned; how many were not before.
    pub(crate) fn orphan(&mut self, rule: RuleId) -> usize {
        let mut at = self.any_of(rule);
        let mut orphaned = 0;
        while let Some(slot) = at {
            let entry = &mut self.entries[slot as usize];
            orphaned += usize::from(!entry.orphaned);
            entry.orphaned = true;
            at = self.of_rule.next(slot);
        }
        orphaned
    }

    /// The live entries from `slot` on, in the order of their slots. An entry keeps its slot for life.
    pub(crate) fn live_from(&self, slot: u32, now: Time) -> impl Iterator<Item = (u32, &Record<N, B>)> {
        let slots = slot..self.entries.capacity() as u32;
        let entries = slots.filter_map(|slot| Some((slot, self.entries.get(slot as usize)?)));
        entries.filter(move |(_, entry)| entry.live(now))
    }
}
