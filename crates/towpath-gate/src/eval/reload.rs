//! Another rule file in one step: what stays the same keeps its counters and states, and the caller says what becomes of
//! the states of the rules that go.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::evaluate::Next;
use super::generation::Generation;
use super::insn::all_hold;
use super::packet_spec::first_packets;
use super::port::Routes;
use super::program::{CompiledAction, Program};
use super::token_bucket::TokenBucket;
use super::walk::{Dir, LookupCache, Step, Walk};
use super::{DEFAULT_DYNAMIC_RULE, Gate};
use crate::rules::option::Test;
use crate::rules::{Rule, Ruleset};
use crate::state::{Cursor, Kind, Listed, RuleId};
use towpath_wire::{self as wire, LinkType, Packet, Time};

/// Walks of one call that re-checks states, which takes some milliseconds; and how many states it looks at at least, however many
/// ways they may have come.
const RECHECK_WALKS: usize = 8192;
const RECHECK_LEAST: usize = 64;

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
    /// The same, but for that all states of rules that stay are there at first: the caller has them looked at, some at a time
    /// ([`Gate::recheck_step`]), beside whatever else goes on. Until then their packets go by them.
    RecheckLater,
    /// Those of rules that are gone go, as when ipfw deletes rules; all others stay untouched.
    Delete,
    /// All go.
    Drop,
}

/// What was in force, as long as a walker may go by it.
pub(super) struct RetiredGeneration {
    version: u64,
    /// Kept so that it is not a walker, between two packets, that takes it to pieces.
    live: Option<Generation>,
    /// The rules that are gone, in order: a walker may still make states by them.
    rules: Vec<RuleId>,
    /// What becomes of those.
    orphan: bool,
}

impl RetiredGeneration {
    pub(super) fn new(version: u64, live: Generation) -> Self {
        Self { version, live: Some(live), rules: Vec::new(), orphan: false }
    }

    /// The rules that a walker may still go by.
    pub(super) fn program(&self) -> Option<&Program> {
        self.live.as_ref().map(|live| &*live.program)
    }
}

/// What one step of a re-check did ([`Gate::recheck_step`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rechecked {
    /// States that were looked at.
    pub looked: usize,
    /// Those of them that went.
    pub dropped: usize,
    /// Where the next step begins; none when all were looked at.
    pub next: Option<Cursor>,
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

impl StatePolicy {
    fn rechecks(self) -> bool {
        matches!(self, Self::Recheck | Self::RecheckLater)
    }
}

impl Gate {
    /// What [`Gate::reload`] would change. [`StatePolicy::Recheck`] costs what the re-check itself costs, and a copy of
    /// the new tables.
    pub fn preview(&self, ruleset: &Ruleset, policy: StatePolicy, now: Time) -> Diff {
        let mut diff = self.diff(ruleset, policy);
        if policy.rechecks() {
            let next = self.successor(ruleset);
            let ways = next.ways();
            diff.states_dropped = self.states().list(now).filter(|state| next.is_stale(state, &ways)).count();
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
        let without_rule: usize = gone.iter().map(|at| self.states().count_of(self.rules[*at].0)).sum();
        match policy {
            StatePolicy::Keep => diff.states_orphaned = without_rule,
            StatePolicy::Recheck | StatePolicy::RecheckLater | StatePolicy::Delete => {
                diff.states_dropped = without_rule;
            }
            StatePolicy::Drop => diff.states_dropped = self.states().len(),
        }
        diff
    }

    /// Takes other rules, tables and pipes in one step: no packet sees anything in between. A rule that is in both files
    /// with the same number, set and text stays what it is.
    ///
    /// Walkers go by the new rules from their next packet on, or with bursts their next burst ([`Walker::prefetch`](super::Walker::prefetch)). What one of them makes by a rule that is gone, before it has
    /// seen so, goes as well, at the latest with [`Gate::expire`] after that. [`StatePolicy::Drop`] may take a state along
    /// that a walker makes by the new rules while the old ones go.
    pub fn reload(&mut self, ruleset: Ruleset, policy: StatePolicy, now: Time) -> Diff {
        self.reload_with_routes(ruleset, None, policy, now)
    }

    /// The same with other routes, if any: no packet sees the ones without the others.
    pub fn reload_with_routes(
        &mut self,
        ruleset: Ruleset,
        routes: Option<Routes>,
        policy: StatePolicy,
        now: Time,
    ) -> Diff {
        self.beside(|gate| gate.take_rules(ruleset, routes, policy, now))
    }

    fn take_rules(
        &mut self,
        ruleset: Ruleset,
        routes: Option<Routes>,
        policy: StatePolicy,
        now: Time,
    ) -> Diff {
        let mut diff = self.diff(&ruleset, policy);
        let mut old = self.by_text();
        let Ruleset { rules, tables, pipes, disabled_sets } = ruleset;
        let old_rules = std::mem::take(&mut self.rules);
        let mut stays = vec![false; old_rules.len()];
        for rule in rules {
            let id = match take(&mut old, &rule) {
                Some(at) => {
                    stays[at] = true;
                    old_rules[at].0
                }
                None => self.new_id(),
            };
            self.rules.push((id, rule));
        }
        let gone: Vec<(RuleId, Rule)> =
            old_rules.into_iter().zip(stays).filter(|(_, stays)| !stays).map(|(pair, _)| pair).collect();
        let mut ids: Vec<RuleId> = gone.iter().map(|(id, _)| *id).collect();
        if policy.rechecks() {
            // Orphans have no rule that would make them.
            ids.extend(self.hidden.iter().map(|(id, _)| *id).filter(|id| *id != DEFAULT_DYNAMIC_RULE));
        }
        ids.sort_unstable();
        self.zeroed.retain(|id, _| ids.binary_search(id).is_err());
        self.prune_hidden();
        if policy == StatePolicy::Keep {
            // Walkers may still make states by rules without any.
            let alone = self.shared.seats.alone();
            let states = &self.walker.states;
            self.hidden.extend(gone.into_iter().filter(|(id, _)| !alone || states.count_of(*id) > 0));
        }
        self.disabled_sets = disabled_sets;
        let tables = self.name_tables(tables);
        let old_pipes = Arc::clone(&self.live().pipes);
        let bucket = |(number, pipe)| {
            let same = old_pipes.get(&number).filter(|bucket| bucket.is(pipe));
            (number, same.cloned().unwrap_or_else(|| Arc::new(TokenBucket::new(pipe))))
        };
        let pipes = Arc::new(pipes.into_iter().map(bucket).collect());
        self.compile(|live| {
            (live.tables, live.pipes) = (tables, pipes);
            if let Some(routes) = routes {
                live.routes = Arc::new(routes);
            }
        });
        let mut dropped = self.let_states_go(&ids, policy);
        if let Some(leaving) = self.leaving.last_mut() {
            (leaving.rules, leaving.orphan) = (ids, policy == StatePolicy::Keep);
        }
        if policy == StatePolicy::Recheck {
            dropped += self.recheck(now);
        }
        if policy != StatePolicy::Keep {
            diff.states_dropped = dropped;
        }
        diff
    }

    /// Removes or orphans the states of rules that are gone; how many.
    fn let_states_go(&mut self, gone: &[RuleId], policy: StatePolicy) -> usize {
        let is_gone = |id: RuleId| gone.binary_search(&id).is_ok();
        let states = &mut self.walker.states;
        match policy {
            StatePolicy::Keep => states.orphan_where(is_gone),
            StatePolicy::Recheck | StatePolicy::RecheckLater | StatePolicy::Delete => {
                states.remove_where(is_gone)
            }
            StatePolicy::Drop => states.remove_where(|_| true),
        }
    }

    /// Lets go what no walker goes by any more, with the states that were made by it meanwhile.
    pub(super) fn let_leave(&mut self) {
        let Self { shared, walker, leaving, .. } = self;
        let before = leaving.len();
        leaving.retain_mut(|leaving| {
            if !shared.seats.held(leaving.version) {
                leaving.live = None;
            }
            if shared.seats.all_have(leaving.version + 1) {
                let rules = std::mem::take(&mut leaving.rules);
                let is_gone = |id: RuleId| rules.binary_search(&id).is_ok();
                match leaving.orphan {
                    _ if rules.is_empty() => 0,
                    true => walker.states.orphan_where(is_gone),
                    false => walker.states.remove_where(is_gone),
                };
            }
            leaving.live.is_some() || !leaving.rules.is_empty()
        });
        if leaving.len() == before {
            return;
        }
        let ids: HashSet<RuleId> = self.rules.iter().chain(&self.hidden).map(|(id, _)| *id).collect();
        self.shared.seats.forget(|id| ids.contains(&id));
    }

    /// Forgets rules that no state has any more.
    fn prune_hidden(&mut self) {
        let Self { hidden, walker, leaving, .. } = self;
        hidden.retain(|(id, _)| {
            let late = || leaving.iter().any(|leaving| leaving.rules.binary_search(id).is_ok());
            *id == DEFAULT_DYNAMIC_RULE || walker.states.count_of(*id) > 0 || late()
        });
    }

    /// Drops the states that the rules as they are now would not make; how many.
    fn recheck(&mut self, now: Time) -> usize {
        let (mut dropped, mut from) = (0, Some(Cursor::default()));
        while let Some(cursor) = from {
            let step = self.recheck_step(cursor, now);
            dropped += step.dropped;
            from = step.next;
        }
        dropped
    }

    /// Takes some states through the rules as they are now, from `from` on, and drops those that they would not make. It takes some
    /// milliseconds.
    ///
    /// After a [`Gate::reload`] with [`StatePolicy::RecheckLater`] it begins at the default cursor, and is over when there is no
    /// next step. No state is looked at twice, and none that is there throughout is left out; one that is made meanwhile may be
    /// looked at too. What the rules change in between is for those that were not looked at yet; orphans that it makes stay.
    pub fn recheck_step(&mut self, from: Cursor, now: Time) -> Rechecked {
        self.beside(|gate| {
            let ways = gate.ways();
            let most = (RECHECK_WALKS / ways.len()).max(RECHECK_LEAST);
            let (mut stale, mut step) = (Vec::new(), Rechecked::default());
            for (seen, (state, cursor)) in (1..).zip(gate.states().dump(from, now)) {
                step.looked += usize::from(!matches!(state.kind, Kind::Parent { .. }));
                if gate.is_stale(&state, &ways) {
                    stale.push((state.flow, state.name, state.rule));
                }
                if seen == most {
                    step.next = Some(cursor);
                    break;
                }
            }
            // Another rule may have made the flow's state anew since it was listed: that one stays.
            let mut removed = |(flow, name, rule)| gate.states_mut().remove_of(&flow, name, rule, now);
            step.dropped = stale.into_iter().filter(|stale| removed(*stale)).count();
            step
        })
    }

    /// A gate with other rules, in which rules that stay have the identity that they have here.
    fn successor(&self, ruleset: &Ruleset) -> Self {
        let mut next = Self::new(ruleset.clone(), self.ports().clone(), self.states().settings().clone(), 0);
        let mut old = self.by_text();
        next.next_id = self.next_id;
        for (id, rule) in &mut next.rules {
            *id = match take(&mut old, rule) {
                Some(at) => self.rules[at].0,
                None => RuleId(next.next_id),
            };
            next.next_id += 1;
        }
        next.flow_names = self.flow_names.clone();
        let routes = Arc::clone(&self.live().routes);
        next.compile(|live| live.routes = routes);
        next
    }

    /// Whether it is a state that these rules would not make.
    fn is_stale(&self, state: &Listed, ways: &[Walk]) -> bool {
        let makes = |state| match self.maker(state, ways) {
            // What came from outside stays as long as anything here would make it.
            Some(_) if state.rule == DEFAULT_DYNAMIC_RULE => true,
            maker => maker == Some(state.rule),
        };
        // Of rules that went since the re-check began: those from before are gone.
        let is_orphan =
            || state.rule != DEFAULT_DYNAMIC_RULE && self.hidden.iter().any(|(id, _)| *id == state.rule);
        !matches!(state.kind, Kind::Parent { .. }) && !makes(state) && !is_orphan()
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
        ways.extend(self.ports().ids().map(|port| Walk::new(Dir::In, Some(port), None)));
        ways.extend(self.ports().ids().map(|port| Walk::new(Dir::Out, None, Some(port))));
        if self.ports().len() <= MAX_CROSSED {
            let pairs = self.ports().ids().flat_map(|recv| self.ports().ids().map(move |xmit| (recv, xmit)));
            ways.extend(pairs.map(|(recv, xmit)| Walk::new(Dir::Out, Some(recv), Some(xmit))));
        }
        ways
    }

    /// The rule that would make this state now: its own, if some way and some first packet lead there.
    fn maker(&self, state: &Listed, ways: &[Walk]) -> Option<RuleId> {
        let mut other = None;
        for frame in first_packets(&state.flow) {
            let Ok(packet) = wire::parse(LinkType::ETHERNET, &frame, frame.len() as u32) else { continue };
            for way in ways {
                let mut walk = way.with_tenant(state.flow.tenant);
                // No states: the rules alone are asked.
                walk.memo = LookupCache::Any;
                match self.maker_for(walk, &packet, state) {
                    Some(rule) if rule == state.rule => return Some(rule),
                    rule => other = other.or(rule),
                }
            }
        }
        other
    }

    fn maker_for(&self, mut walk: Walk, packet: &Packet<'_>, state: &Listed) -> Option<RuleId> {
        let mut lanes = self.live().program.index.lanes(packet, walk.dir);
        let mut at = 0;
        // As many steps as there are rules, and jumps: the walk itself is bounded by its jumps.
        loop {
            let found = self.live().program.index.next(at, &mut lanes, packet, LookupCache::Any);
            at = found.position;
            let ready = self.live().program.rules.get(at)?;
            let mut tablearg = None;
            let sight = self.live().sight(packet);
            let insns = self.live().program.insns_of(ready);
            let holds = all_hold(insns, &sight, &walk, ready.number, &mut tablearg);
            if !holds || matches!(ready.act, CompiledAction::CheckState) {
                if at == self.live().program.default {
                    return None;
                }
                at = self.live().program.next(at);
                continue;
            }
            if ready.install.as_ref().is_some_and(|installs| installs.name == state.name) {
                return Some(ready.id);
            }
            let tablearg = tablearg.copied();
            self.live().tag(at, &mut walk, tablearg);
            match self.live().act(at, &mut walk, packet, tablearg) {
                Next::Rule(position) => at = position,
                Next::Stop(Step::Tee(_) | Step::Divert(_) | Step::Reassemble) => {
                    at = self.live().program.next(at)
                }
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

pub(super) fn same(rule: &Rule) -> (u32, u8, String) {
    (rule.number, rule.set, rule.to_string())
}

/// Takes the first old rule that is the same as `rule`.
fn take(old: &mut HashMap<(u32, u8, String), Vec<usize>>, rule: &Rule) -> Option<usize> {
    old.get_mut(&same(rule))?.pop()
}

fn line(rule: &Rule) -> String {
    format!("{:05} {rule}", rule.number)
}
