//! The rules of a file during parsing: added, deleted, and moved between sets.
//!
//! Each command costs time in proportion to its changes, not to the number of rules. Rules that are always changed
//! together share a unit (same number, and same set when added). Units belong to groups, groups to bins, and each
//! set has a bin. A number is deleted or moved by its units; a set is moved, swapped or deleted by its groups.
//!
//! Invariant: a deleted unit or group never returns, and units only merge. Each unit is removed, or merged into
//! another, once.
//!
//! References: union-find with path halving (Tarjan and van Leeuwen 1984).

use std::collections::BTreeMap;

use super::order;
use crate::rules::{RESERVED_SET, Rule};

/// Number of sets.
const SETS: usize = 32;

#[derive(Default)]
pub(super) struct RuleList {
    /// Each rule with the unit to which it was added.
    rules: Vec<(Rule, u32)>,
    units: Vec<Unit>,
    /// The units of each number, including deleted ones.
    by_number: BTreeMap<u32, Vec<u32>>,
    groups: Vec<Group>,
    /// The groups of each bin. New rules go into the last group.
    bins: [Vec<u32>; SETS],
    /// The bin of each set.
    bin_of_set: Sets,
}

struct Group {
    /// The group has not been deleted.
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
    /// The unit into which this one was merged, or its own index.
    joined: u32,
    /// `None` if the unit is deleted.
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

    /// Number of rules added, including deleted ones.
    pub(super) fn added(&self) -> u32 {
        self.rules.len() as u32
    }

    /// Returns true if the rule that was added as number `added` still exists.
    pub(super) fn has(&mut self, added: u32) -> bool {
        let Some(&(_, unit)) = self.rules.get(added as usize) else { return false };
        let unit = self.joined(unit);
        self.units[unit as usize].group.is_some_and(|group| self.groups[group as usize].there)
    }

    /// The highest number in use; 0 without rules.
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

    /// Deletes the rules with these numbers. Returns true if there were any.
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

    /// Deletes the rules of one number in this set. Returns true if there were any.
    pub(super) fn delete_in_set(&mut self, number: u32, set: u8) -> bool {
        let bin = self.bin_of_set.0[usize::from(set)];
        let Self { units, groups, by_number, .. } = self;
        let Some(list) = by_number.get_mut(&number) else { return false };
        let mut any = false;
        // Keeps at most one unit per bin, so that the list of the next command is short.
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

    /// Deletes all rules except those of set 31.
    pub(super) fn flush(&mut self) {
        (0..RESERVED_SET).for_each(|set| self.delete_set(set));
    }

    pub(super) fn move_set(&mut self, from: u8, to: u8) {
        if from == to {
            return;
        }
        // Merges the shorter list into the longer one: a group is moved a logarithmic number of times.
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

    /// Moves the rules of one number to a set.
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

    /// Returns the remaining rules in order, each in its final set, and their sort keys: number, and how many
    /// rules were added before.
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

    /// Returns the unit into which a unit was merged.
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

    /// Returns the group for new rules of this set.
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
