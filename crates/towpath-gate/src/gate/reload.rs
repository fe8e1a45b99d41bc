//! Another rule file in one step: what stays the same keeps its counters and states, and the caller says what becomes of
//! the states of the rules that go.

use std::collections::HashMap;

use super::insn::{Sight, all_hold};
use super::pipe::Bucket;
use super::program::Act;
use super::run::Next;
use super::walk::{Dir, Memo, Step, Walk};
use super::written::first_packets;
use super::{COMPANION, Counter, Gate};
use crate::packet::{Link, Packet};
use crate::rules::option::Test;
use crate::rules::{Rule, Ruleset};
use crate::state::{Kind, Listed, RuleId, States};
use crate::{Time, wire};

/// With so many ports at most, every pair of them is tried as a packet's way in and out.
const MAX_CROSSED: usize = 16;

/// What becomes of states at a reload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatePolicy {
    /// All stay. Those of rules that are gone are orphans: they keep their old action until they expire.
    Keep,
    /// Each state is taken through the new rules as the first packet of its flow would go, and stays when that makes it
    /// anew, by the same rule. States of rules that are gone go. The next packet of a flow without its state meets the
    /// rules as any other does.
    ///
    /// A state does not remember all of its first packet: by which ports it went, TCP flags, ICMP type. It stays when
    /// some port, and some packet that may begin such a flow, would make it. Lengths, Ethernet addresses, tags and the
    /// like are those of a plain packet, and `prob` comes true.
    Recheck,
    /// All go.
    Drop,
}

/// What a reload changes, or would change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Diff {
    /// Rules that are new, as `number text`.
    pub added: Vec<String>,
    /// Rules that are gone.
    pub removed: Vec<String>,
    /// How many rules stay, with their counters.
    pub kept: usize,
    /// Tables that are new, gone, or have other entries.
    pub tables: Vec<String>,
    /// States that go.
    pub states_dropped: usize,
    /// States that stay without a rule.
    pub states_orphaned: usize,
}

impl Gate {
    /// What [`Gate::reload`] would change. [`StatePolicy::Recheck`] costs what the re-check itself costs, and a copy of
    /// the new tables.
    pub fn preview(&self, ruleset: &Ruleset, policy: StatePolicy, now: Time) -> Diff {
        let mut diff = self.diff(ruleset, policy);
        if policy == StatePolicy::Recheck {
            diff.states_dropped = self.successor(ruleset).stale(&self.states, now).len();
        }
        diff
    }

    /// What changes but for the states that a re-check drops.
    fn diff(&self, ruleset: &Ruleset, policy: StatePolicy) -> Diff {
        let mut old = self.by_text();
        let mut diff = Diff { tables: self.changed_tables(ruleset), ..Diff::default() };
        for rule in ruleset.rules() {
            match take(&mut old, rule) {
                Some(_) => diff.kept += 1,
                None => diff.added.push(line(rule)),
            }
        }
        let gone: Vec<usize> = {
            let mut gone: Vec<usize> = old.into_values().flatten().collect();
            gone.sort_unstable();
            gone
        };
        diff.removed = gone.iter().map(|at| line(&self.rules[*at].1)).collect();
        let without_rule: usize = gone.iter().map(|at| self.states.count_of(self.rules[*at].0)).sum();
        match policy {
            StatePolicy::Keep => diff.states_orphaned = without_rule,
            StatePolicy::Recheck => diff.states_dropped = without_rule,
            StatePolicy::Drop => diff.states_dropped = self.states.len(),
        }
        diff
    }

    /// Takes other rules, tables and pipes in one step: no packet sees anything in between. A rule that is in both files
    /// with the same number, set and text stays what it is.
    pub fn reload(&mut self, ruleset: Ruleset, policy: StatePolicy, now: Time) -> Diff {
        let mut diff = self.diff(&ruleset, policy);
        let mut old = self.by_text();
        let before = self.states.len();
        let Ruleset { rules, tables, pipes, disabled_sets } = ruleset;
        let old_rules = std::mem::take(&mut self.rules);
        let old_counters = std::mem::take(&mut self.counters);
        let mut stays = vec![false; old_rules.len()];
        for rule in rules {
            let (id, counter) = match take(&mut old, &rule) {
                Some(at) => {
                    stays[at] = true;
                    (old_rules[at].0, old_counters[at])
                }
                None => (self.new_id(), Counter::default()),
            };
            self.rules.push((id, rule));
            self.counters.push(counter);
        }
        let gone: Vec<(RuleId, Rule)> =
            old_rules.into_iter().zip(stays).filter(|(_, stays)| !stays).map(|(pair, _)| pair).collect();
        self.let_states_go(gone, policy);
        self.counters.resize(self.rules.len() + self.hidden.len(), Counter::default());
        self.disabled_sets = disabled_sets;
        self.table_names.clear();
        self.tables.clear();
        for (name, table) in tables {
            self.table_names.insert(name, self.tables.len() as u32);
            self.tables.push(table);
        }
        let old_pipes = std::mem::take(&mut self.pipes);
        self.pipes = pipes
            .into_iter()
            .map(|(number, pipe)| {
                let same = old_pipes.get(&number).filter(|bucket| bucket.is(pipe));
                (number, same.copied().unwrap_or_else(|| Bucket::new(pipe)))
            })
            .collect();
        self.compile();
        if policy == StatePolicy::Recheck {
            self.recheck(now);
        }
        if policy != StatePolicy::Keep {
            diff.states_dropped = before - self.states.len();
        }
        diff
    }

    /// Removes or orphans the states of rules that are gone; rules that states still have stay, hidden.
    fn let_states_go(&mut self, gone: Vec<(RuleId, Rule)>, policy: StatePolicy) {
        let mut ids: Vec<RuleId> = gone.iter().map(|(id, _)| *id).collect();
        ids.sort_unstable();
        let is_gone = |id: RuleId| ids.binary_search(&id).is_ok();
        match policy {
            StatePolicy::Keep => {
                self.states.orphan_where(is_gone);
                self.hidden.extend(gone);
            }
            StatePolicy::Recheck => drop(self.states.remove_where(is_gone)),
            StatePolicy::Drop => drop(self.states.remove_where(|_| true)),
        }
        let states = &self.states;
        self.hidden.retain(|(id, _)| *id == COMPANION || states.count_of(*id) > 0);
    }

    /// Drops the states that the rules as they are now would not make.
    fn recheck(&mut self, now: Time) {
        for state in self.stale(&self.states, now) {
            self.states.remove(&state.flow, state.name, now);
        }
    }

    /// A gate with other rules, in which rules that stay have the identity that they have here.
    fn successor(&self, ruleset: &Ruleset) -> Self {
        let mut next = Self::new(ruleset.clone(), self.ports.clone(), self.states.settings().clone(), 0);
        let mut old = self.by_text();
        next.next_id = self.next_id;
        for (id, rule) in &mut next.rules {
            *id = match take(&mut old, rule) {
                Some(at) => self.rules[at].0,
                None => RuleId(next.next_id),
            };
            next.next_id += 1;
        }
        next.flow_names.clone_from(&self.flow_names);
        next.names.clone_from(&self.names);
        next.routes = self.routes.clone();
        next.compile();
        next
    }

    /// The states that these rules would not make.
    fn stale(&self, states: &States, now: Time) -> Vec<Listed> {
        let ways = self.ways();
        let makes = |state: &Listed| match self.maker(state, &ways) {
            // What came from outside stays as long as anything here would make it.
            Some(_) if state.rule == COMPANION => true,
            maker => maker == Some(state.rule),
        };
        let state = |state: &Listed| !matches!(state.kind, Kind::Parent { .. });
        states.list(now).filter(state).filter(|state| !makes(state)).collect()
    }

    /// The ways that a packet may have come, as far as the rules can tell them apart.
    fn ways(&self) -> Vec<Walk> {
        let tests_ports = |rule: &Rule| {
            rule.body.blocks().flatten().any(|term| {
                let reverse = matches!(term.test, Test::VerRevPath | Test::VerSrcReach | Test::AntiSpoof);
                reverse || matches!(term.test, Test::Recv(_) | Test::Xmit(_) | Test::Via(_))
            })
        };
        let mut ways = vec![Walk::new(Dir::In, None, None), Walk::new(Dir::Out, None, None)];
        if !self.rules.iter().any(|(_, rule)| tests_ports(rule)) {
            return ways;
        }
        ways.extend(self.ports.ids().map(|port| Walk::new(Dir::In, Some(port), None)));
        ways.extend(self.ports.ids().map(|port| Walk::new(Dir::Out, None, Some(port))));
        if self.ports.len() <= MAX_CROSSED {
            let pairs = self.ports.ids().flat_map(|recv| self.ports.ids().map(move |xmit| (recv, xmit)));
            ways.extend(pairs.map(|(recv, xmit)| Walk::new(Dir::Out, Some(recv), Some(xmit))));
        }
        ways
    }

    /// The rule that would make this state now: its own, if some way and some first packet lead there.
    fn maker(&self, state: &Listed, ways: &[Walk]) -> Option<RuleId> {
        let mut other = None;
        for frame in first_packets(&state.flow) {
            let Ok(packet) = wire::parse(Link::Ethernet, &frame, frame.len() as u32) else { continue };
            for way in ways {
                let mut walk = way.with_tenant(state.flow.tenant);
                // No states: the rules alone are asked.
                walk.memo = Memo::Any;
                match self.maker_for(walk, &packet, state) {
                    Some(rule) if rule == state.rule => return Some(rule),
                    rule => other = other.or(rule),
                }
            }
        }
        other
    }

    fn maker_for(&self, mut walk: Walk, packet: &Packet<'_>, state: &Listed) -> Option<RuleId> {
        let mut lanes = self.program.index.lanes(packet, walk.dir);
        let mut at = 0;
        // As many steps as there are rules, and jumps: the walk itself is bounded by its jumps.
        loop {
            let found = self.program.index.next(at, &mut lanes, packet, Memo::Any);
            at = found.position;
            let ready = self.program.rules.get(at)?;
            let mut tablearg = None;
            let sight = Sight { packet, tables: &self.tables, ports: &self.ports, routes: &self.routes };
            let insns = self.program.insns_of(ready);
            let holds = all_hold(insns, &sight, &walk, ready.number, &mut tablearg);
            if !holds || matches!(ready.act, Act::CheckState) {
                if at == self.program.default {
                    return None;
                }
                at = self.program.next(at);
                continue;
            }
            if ready.install.as_ref().is_some_and(|installs| installs.name == state.name) {
                return Some(ready.id);
            }
            let tablearg = tablearg.copied();
            self.tag(at, &mut walk, tablearg);
            match self.act(at, &mut walk, packet, tablearg) {
                Next::Rule(position) => at = position,
                Next::Stop(Step::Tee(_) | Step::Divert(_) | Step::Reassemble) => at = self.program.next(at),
                Next::Stop(_) => return None,
            }
        }
    }

    /// Positions of the rules by what makes them the same: number, set, text. Equal rules stand in order.
    fn by_text(&self) -> HashMap<(u32, u8, String), Vec<usize>> {
        let mut all: HashMap<_, Vec<usize>> = HashMap::new();
        for (at, (_, rule)) in self.rules.iter().enumerate().rev() {
            all.entry(same(rule)).or_default().push(at);
        }
        all
    }

    fn changed_tables(&self, ruleset: &Ruleset) -> Vec<String> {
        let mut changed = Vec::new();
        for (name, table) in ruleset.tables() {
            let same = self.table(name).is_some_and(|old| old.same_as(table));
            if !same {
                changed.push(name.to_owned());
            }
        }
        let gone = self.table_names.keys().filter(|name| !ruleset.tables.contains_key(*name));
        changed.extend(gone.map(|name| name.to_string()));
        changed.sort_unstable();
        changed
    }
}

fn same(rule: &Rule) -> (u32, u8, String) {
    (rule.number, rule.set, rule.to_string())
}

/// Takes the first old rule that is the same as `rule`.
fn take(old: &mut HashMap<(u32, u8, String), Vec<usize>>, rule: &Rule) -> Option<usize> {
    old.get_mut(&same(rule))?.pop()
}

fn line(rule: &Rule) -> String {
    format!("{:05} {rule}", rule.number)
}
