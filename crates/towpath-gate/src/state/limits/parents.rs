//! Parents: what `limit` counts in.

use crate::state::limits::slot_list::NONE;
use crate::state::limits::table::{Body, Record, Table};
use crate::state::listing::{Kind, Listed};
use crate::state::table::hash::Secret;
use crate::state::table::key::{self, ParentKey};
use crate::state::{Flow, LimitMask, Name, RuleId};
use towpath_wire::Time;

/// How many states there are of one rule and masked flow. Its entry's expiry is `dyn_short_lifetime` after its last
/// use; it stays as long as it counts anything.
#[derive(Clone, Debug)]
struct Parent {
    flow: Flow,
    count: u32,
    /// Its rule's states were removed, and it waits for those that it counts to be taken out.
    gone: bool,
    /// When as many may be made at once again as in a second: for limits by the second.
    full_at: Time,
}

impl Body for Parent {
    fn held(&self) -> bool {
        self.count > 0
    }
}

/// What a new state looks for a parent by.
pub(crate) struct Wanted {
    flow: Flow,
    key: ParentKey,
    hash: u64,
    name: Name,
    rule: RuleId,
}

/// The parents.
#[derive(Clone, Debug)]
pub(crate) struct Parents {
    table: Table<7, Parent>,
}

impl Parents {
    pub(crate) fn new() -> Self {
        Self { table: Table::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    pub(crate) fn wanted(secret: &Secret, flow: &Flow, mask: LimitMask, name: Name, rule: RuleId) -> Wanted {
        let flow = key::masked(flow, mask);
        let key = ParentKey::of_parent(&flow, rule);
        Wanted { flow, key, hash: secret.hash(&key.0), name, rule }
    }

    /// The parent, if it is there, and whether it is past its time and there only because of what it counts.
    pub(crate) fn find(&self, wanted: &Wanted, now: Time) -> Option<(u32, bool)> {
        let slot = self.table.find(wanted.hash, &wanted.key, wanted.name)?;
        Some((slot, self.table.get(slot).expire <= now))
    }

    /// Uses a parent: it lives until `expire` at least.
    pub(crate) fn touch(&mut self, slot: u32, expire: Time, now: Time) {
        // A rule that installs is not gone.
        self.table.get_mut(slot).orphaned = false;
        self.table.get_mut(slot).body.gone = false;
        self.table.set_expire(slot, expire, now);
    }

    pub(crate) fn insert(&mut self, secret: &Secret, wanted: Wanted, expire: Time, now: Time) -> u32 {
        let Wanted { flow, key, hash, name, rule } = wanted;
        let body = Parent { flow, count: 0, gone: false, full_at: Time::default() };
        self.table.insert(secret, hash, Record { key, name, rule, orphaned: false, expire, body }, now)
    }

    pub(crate) fn count(&self, slot: u32) -> u32 {
        self.table.get(slot).body.count
    }

    /// Whether one more may be made in this second, of `most`. (The bucket of [`crate::eval`]'s pipes, for states.)
    pub(crate) fn take(&mut self, slot: u32, most: u32, now: Time) -> bool {
        const SECOND: u64 = 1_000_000_000;
        let parent = &mut self.table.get_mut(slot).body;
        let end = parent.full_at.max(now).as_nanos().saturating_add(SECOND / u64::from(most.max(1)));
        let takes = most > 0 && end - now.as_nanos() <= SECOND;
        if takes {
            parent.full_at = Time::from_nanos(end);
        }
        takes
    }

    /// One more state.
    pub(crate) fn add(&mut self, slot: u32) {
        if slot != NONE {
            self.table.get_mut(slot).body.count += 1;
        }
    }

    /// One state less.
    pub(crate) fn subtract(&mut self, slot: u32, now: Time) {
        if slot == NONE {
            return;
        }
        let body = &mut self.table.get_mut(slot).body;
        body.count -= 1;
        if body.count == 0 {
            self.table.release(slot, now);
        }
    }

    /// Collects parents that count nothing and whose time is over.
    pub(crate) fn collect(&mut self, secret: &Secret, now: Time, budget: &mut usize) {
        while let Some(slot) = self.table.due(now, budget) {
            self.table.remove(secret, slot);
        }
    }

    /// Those included whose time was over just now.
    pub(crate) fn collect_all(&mut self, secret: &Secret, now: Time, budget: &mut usize) {
        self.collect(secret, now, budget);
        while let Some(slot) = self.table.just_due(now, budget) {
            self.table.remove(secret, slot);
        }
    }

    /// Removes the parents of the rules that `gone` names, whose states are gone by now; one that still counts some goes
    /// when they have been taken out.
    pub(crate) fn remove_where(&mut self, secret: &Secret, gone: impl FnMut(RuleId) -> bool) {
        for rule in self.table.rules_where(gone) {
            for slot in self.table.all_of(rule) {
                if self.count(slot) == 0 {
                    self.table.remove(secret, slot);
                } else {
                    self.table.get_mut(slot).expire = Time::default();
                    self.table.get_mut(slot).body.gone = true;
                }
            }
        }
    }

    pub(crate) fn orphan_where(&mut self, gone: impl FnMut(RuleId) -> bool) {
        for rule in self.table.rules_where(gone) {
            self.table.orphan(rule);
        }
    }

    pub(crate) fn list_from(&self, slot: u32, now: Time) -> impl Iterator<Item = (u32, Listed)> {
        let there = self.table.live_from(slot, now).filter(|(_, entry)| !entry.body.gone);
        there.map(move |(slot, entry)| {
            let kind = Kind::Parent { count: entry.body.count };
            (slot, Listed::new(entry, entry.body.flow, kind, now))
        })
    }
}
