//! The rules of a file while it is read: added, deleted, and moved between sets.
//!
//! What: a command costs what it changes and no look at the rules, however many there are. Rules that one command may take
//! together share a unit (one number, one set when they were added); units are in groups, groups in bins, and each set has
//! a bin. So a number is deleted or moved by its units, and a set is moved, swapped or deleted by its groups.
//!
//! Invariant: what is gone (a unit, or its group) never comes back, and units only ever grow together: each is cleared
//! away, or joined with another, once.
//!
//! References: union-find with path halving (Tarjan and van Leeuwen 1984).

use std::collections::BTreeMap;

use super::order;
use crate::rules::{RESERVED_SET, Rule};

/// Sets are 0 to 31.
const SETS: usize = 32;

#[derive(Default)]
pub(super) struct RuleList {
    /// Each with its unit, as that was when the rule was added.
    rules: Vec<(Rule, u32)>,
    units: Vec<Unit>,
    /// The units of each number; some of them may be gone.
    by_number: BTreeMap<u32, Vec<u32>>,
    groups: Vec<Group>,
    /// The groups of each bin; new rules go into the last one.
    bins: [Vec<u32>; SETS],
    /// Which bin each set has.
    bin_of_set: Sets,
}

struct Group {
    /// Whether its rules are there.
    there: bool,
    bin: u8,
}

struct Sets([u8; SETS]);

impl Default for Sets {
    fn default() -> Self {
        Self(std::array::from_fn(|set| set as u8))
    }
}

struct Unit {
    /// The unit that this one has joined, or its own index.
    joined: u32,
    /// `None` when it is deleted.
    group: Option<u32>,
}

impl RuleList {
    pub(super) fn add(&mut self, rule: Rule) {
        let group = self.group_of(rule.set);
        let units = self.by_number.entry(rule.number).or_default();
        let unit = match units.last() {
            Some(last) if self.units[*last as usize].group == Some(group) => *last,
            _ => {
                let unit = self.units.len() as u32;
                self.units.push(Unit { joined: unit, group: Some(group) });
                units.push(unit);
                unit
            }
        };
        self.rules.push((rule, unit));
    }

    /// How many rules were added, those among them that are deleted again.
    pub(super) fn added(&self) -> u32 {
        self.rules.len() as u32
    }

    /// Whether the rule that was added behind so many others is there still.
    pub(super) fn has(&mut self, added: u32) -> bool {
        let Some(&(_, unit)) = self.rules.get(added as usize) else { return false };
        let unit = self.joined(unit);
        self.units[unit as usize].group.is_some_and(|group| self.groups[group as usize].there)
    }

    /// The highest number in use; 0 when there is no rule.
    pub(super) fn last_number(&mut self) -> u32 {
        while let Some(mut entry) = self.by_number.last_entry() {
            while let Some(unit) = entry.get().last() {
                if self.units[*unit as usize].group.is_some_and(|group| self.groups[group as usize].there) {
                    return *entry.key();
                }
                entry.get_mut().pop();
            }
            entry.remove();
        }
        0
    }

    /// Deletes the rules with these numbers. Whether there were any.
    pub(super) fn delete(&mut self, lo: u32, hi: u32) -> bool {
        let mut any = false;
        while let Some((&number, _)) = (lo <= hi).then(|| self.by_number.range(lo..=hi).next()).flatten() {
            for unit in self.by_number.remove(&number).unwrap_or_default() {
                let group = self.units[unit as usize].group.take();
                any |= group.is_some_and(|group| self.groups[group as usize].there);
            }
        }
        any
    }

    /// Deletes the rules of one number that are in this set. Whether there were any.
    pub(super) fn delete_in_set(&mut self, number: u32, set: u8) -> bool {
        let bin = self.bin_of_set.0[usize::from(set)];
        let Self { units, groups, by_number, .. } = self;
        let Some(list) = by_number.get_mut(&number) else { return false };
        let mut any = false;
        // What stays is one unit for each bin at most, so that the next command has no long list to look at.
        let mut first_of = [None; SETS];
        list.retain(|&unit| {
            let Some(group) = units[unit as usize].group else { return false };
            let Group { there, bin: its } = groups[group as usize];
            if !there {
                return false;
            }
            if its == bin {
                units[unit as usize].group = None;
                any = true;
                return false;
            }
            let first = *first_of[usize::from(its)].get_or_insert(unit);
            units[unit as usize].joined = first;
            first == unit
        });
        any
    }

    pub(super) fn delete_set(&mut self, set: u8) {
        for group in std::mem::take(self.bin(set)) {
            self.groups[group as usize].there = false;
        }
    }

    fn bin(&mut self, set: u8) -> &mut Vec<u32> {
        &mut self.bins[usize::from(self.bin_of_set.0[usize::from(set)])]
    }

    /// Deletes all rules but those of set 31.
    pub(super) fn flush(&mut self) {
        (0..RESERVED_SET).for_each(|set| self.delete_set(set));
    }

    pub(super) fn move_set(&mut self, from: u8, to: u8) {
        if from == to {
            return;
        }
        // The shorter list joins the longer one, so that a group is moved a few times at most.
        if self.bin(from).len() > self.bin(to).len() {
            self.swap_sets(from, to);
        }
        let mut moved = std::mem::take(self.bin(from));
        let bin = self.bin_of_set.0[usize::from(to)];
        moved.iter().for_each(|group| self.groups[*group as usize].bin = bin);
        self.bin(to).append(&mut moved);
    }

    pub(super) fn swap_sets(&mut self, a: u8, b: u8) {
        self.bin_of_set.0.swap(usize::from(a), usize::from(b));
    }

    /// Moves the rules of one number.
    pub(super) fn move_rule(&mut self, number: u32, to: u8) {
        let group = self.group_of(to);
        let Self { units, groups, by_number, .. } = self;
        let Some(list) = by_number.get_mut(&number) else { return };
        list.retain(|unit| units[*unit as usize].group.is_some_and(|group| groups[group as usize].there));
        let Some(&first) = list.first() else { return };
        for unit in list.drain(1..) {
            units[unit as usize].joined = first;
        }
        units[first as usize].group = Some(group);
    }

    /// The rules that are there, in order, each in the set that it ended in; and what that order is by: the number, and how
    /// many were added before.
    pub(super) fn finish(mut self) -> (Vec<Rule>, Vec<(u64, u32)>) {
        let mut set_of = vec![None; self.groups.len()];
        for (set, bin) in self.bin_of_set.0.iter().enumerate() {
            self.bins[usize::from(*bin)].iter().for_each(|group| set_of[*group as usize] = Some(set as u8));
        }
        let mut rules = Vec::with_capacity(self.rules.len() + 1);
        let mut places = Vec::with_capacity(self.rules.len());
        for ((rule, unit), added) in std::mem::take(&mut self.rules).into_iter().zip(0u32..) {
            let unit = self.joined(unit);
            let group = self.units[unit as usize].group;
            if let Some(set) = group.and_then(|group| set_of[group as usize]) {
                places.push((order(rule.number), added));
                rules.push(Rule { set, ..rule });
            }
        }
        rules.sort_by_key(|rule| order(rule.number));
        places.sort_unstable();
        (rules, places)
    }

    /// The unit that a unit is in now.
    fn joined(&mut self, mut unit: u32) -> u32 {
        loop {
            let next = self.units[unit as usize].joined;
            if next == unit {
                return unit;
            }
            self.units[unit as usize].joined = self.units[next as usize].joined;
            unit = next;
        }
    }

    /// The group that rules of this set go into.
    fn group_of(&mut self, set: u8) -> u32 {
        if let Some(group) = self.bin(set).last() {
            return *group;
        }
        let group = self.groups.len() as u32;
        self.groups.push(Group { there: true, bin: self.bin_of_set.0[usize::from(set)] });
        self.bin(set).push(group);
        group
    }
}
