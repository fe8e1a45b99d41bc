//! Reload: replaces the ruleset in one step. Rules that are in both rulesets keep their counters and states.

use std::sync::Arc;

use super::gate::Gate;
use super::kept_rules::{Kept, kept_rules};
use super::recheck::Recheck;
use super::routes::Routes;
use super::token_bucket::TokenBucket;
use crate::rules::{Rule, Ruleset};
use crate::state::{Kind, RuleId};
use towpath_wire::Time;

/// The effect of a reload on existing states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatePolicy {
    /// Keeps all states. States of deleted rules become orphans, which keep their action until they expire.
    Keep,
    /// Evaluates the first packet of each state with the new rules ([`Gate::creating_rule`]). The rule that would
    /// create the state now owns it from then on; if no rule would, the state is removed, and the next packet of its
    /// flow is evaluated like any other. This includes orphans.
    ///
    /// `prob` of the rule that created the state is assumed to match.
    Recheck,
    /// Like `Recheck`, but in steps ([`Gate::recheck_step`]). Until its turn comes, a state keeps its rule, also a
    /// deleted one.
    RecheckLater,
    /// Removes the states of deleted rules, as ipfw does when rules are deleted. Keeps all others.
    Delete,
    /// Removes all states.
    Drop,
}

/// The effect of a reload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Diff {
    /// New rules, as `number text`.
    pub added: Vec<String>,
    /// Deleted rules.
    pub removed: Vec<String>,
    /// Rules that stay, in a different order relative to other rules. With their new numbers.
    pub moved: Vec<String>,
    /// Number of rules that stay, with their counters. Includes the moved ones.
    pub kept: usize,
    /// Number of rules that stay and have another number.
    pub renumbered: usize,
    /// Tables that are new, deleted or changed.
    pub tables: Vec<String>,
    /// Number of states removed.
    pub states_dropped: usize,
    /// Number of states that another rule owns now.
    pub states_handed: usize,
    /// Number of states that stay without a rule.
    pub states_orphaned: usize,
}

impl StatePolicy {
    fn rechecks(self) -> bool {
        matches!(self, Self::Recheck | Self::RecheckLater)
    }
}

impl Gate {
    /// Returns the effect that [`Gate::reload`] would have. With [`StatePolicy::Recheck`] this costs as much as
    /// the re-check itself, plus a copy of the new tables.
    pub fn preview(&self, ruleset: &Ruleset, policy: StatePolicy, now: Time) -> Diff {
        let kept = self.kept(ruleset);
        let mut diff = self.diff(ruleset, &kept, policy);
        if policy.rechecks() {
            let next = self.preview_gate(ruleset, &kept);
            for state in self.states().list(now).filter(|state| !matches!(state.kind, Kind::Parent { .. })) {
                match next.recheck_of(&state, self.rule_of(state.rule)) {
                    Recheck::Stays => {}
                    Recheck::HandOver(..) => diff.states_handed += 1,
                    Recheck::Remove => diff.states_dropped += 1,
                }
            }
        }
        diff
    }

    fn kept(&self, ruleset: &Ruleset) -> Vec<Kept> {
        kept_rules(self.rules.iter().map(|(_, rule)| rule), ruleset.rules().iter())
    }

    /// Returns the effect without that of a re-check.
    fn diff(&self, ruleset: &Ruleset, kept: &[Kept], policy: StatePolicy) -> Diff {
        let mut stays = vec![false; self.rules.len()];
        let mut diff = Diff { tables: self.changed_tables(ruleset), ..Diff::default() };
        for (rule, kept) in ruleset.rules().iter().zip(kept) {
            if let Some(old) = kept.old() {
                stays[old] = true;
                diff.kept += 1;
                diff.renumbered += usize::from(self.rules[old].1.number != rule.number);
            }
            match kept {
                Kept::New => diff.added.push(line(rule)),
                Kept::Moved(_) => diff.moved.push(line(rule)),
                Kept::Same(_) => {}
            }
        }
        let gone = || self.rules.iter().zip(&stays).filter(|(_, stays)| !**stays).map(|(rule, _)| rule);
        diff.removed = gone().map(|(_, rule)| line(rule)).collect();
        let without_rule = || gone().map(|(id, _)| self.states().count_of(*id)).sum();
        match policy {
            StatePolicy::Keep => diff.states_orphaned = without_rule(),
            StatePolicy::Delete => diff.states_dropped = without_rule(),
            StatePolicy::Recheck | StatePolicy::RecheckLater => {}
            StatePolicy::Drop => diff.states_dropped = self.states().len(),
        }
        diff
    }

    /// Replaces rules, tables and pipes in one step: no packet sees a mixture. A rule with the same set and
    /// text in both rulesets keeps its counters and states, whatever its number: rules are compared in order, and moved
    /// rules are found too.
    ///
    /// Walkers use the new rules from their next packet, or in bursts from their next
    /// [`prefetch`](super::Walker::prefetch). A state that a walker still creates by a deleted rule is removed
    /// too, at the latest by the following [`Gate::expire`]. [`StatePolicy::Drop`] may also remove a state that a
    /// walker creates by the new rules during the reload.
    pub fn reload(&mut self, ruleset: Ruleset, policy: StatePolicy, now: Time) -> Diff {
        self.reload_with_routes(ruleset, None, policy, now)
    }

    /// Like [`Gate::reload`], and also replaces the routes if there are any. No packet sees new rules with old
    /// routes.
    pub fn reload_with_routes(
        &mut self,
        ruleset: Ruleset,
        routes: Option<Routes>,
        policy: StatePolicy,
        now: Time,
    ) -> Diff {
        self.maintain(|gate| gate.take_rules(ruleset, routes, policy, now))
    }

    fn take_rules(
        &mut self,
        ruleset: Ruleset,
        routes: Option<Routes>,
        policy: StatePolicy,
        now: Time,
    ) -> Diff {
        let kept = self.kept(&ruleset);
        let mut diff = self.diff(&ruleset, &kept, policy);
        let Ruleset { rules, tables, pipes, disabled_sets } = ruleset;
        let old_rules = std::mem::take(&mut self.rules);
        let mut stays = vec![false; old_rules.len()];
        for (rule, kept) in rules.into_iter().zip(kept) {
            let id = match kept.old() {
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
        ids.sort_unstable();
        self.zeroed.retain(|id, _| ids.binary_search(id).is_err());
        self.prune_hidden();
        match policy {
            StatePolicy::Keep => self.orphans.extend(&ids),
            // Orphans of earlier reloads are checked, too.
            StatePolicy::Recheck | StatePolicy::RecheckLater => {
                self.orphans.clear();
                self.rechecking = true;
            }
            // No state is left to check.
            StatePolicy::Drop => self.rechecking = false,
            StatePolicy::Delete => {}
        }
        if policy == StatePolicy::Keep || policy.rechecks() {
            // Walkers may still create states by rules that have no states yet.
            let single = self.shared.slots.is_single();
            let states = &self.walker.states;
            self.hidden.extend(gone.into_iter().filter(|(id, _)| !single || states.count_of(*id) > 0));
        }
        self.disabled_sets = disabled_sets;
        let tables = self.name_tables(tables);
        let old_pipes = Arc::clone(&self.generation().pipes);
        let bucket = |(number, pipe)| {
            let same = old_pipes.get(&number).filter(|bucket| bucket.has_config(pipe));
            (number, same.cloned().unwrap_or_else(|| Arc::new(TokenBucket::new(pipe))))
        };
        let pipes = Arc::new(pipes.into_iter().map(bucket).collect());
        self.compile(|generation| {
            (generation.tables, generation.pipes) = (tables, pipes);
            if let Some(routes) = routes {
                generation.routes = Arc::new(routes);
            }
        });
        let mut dropped = self.remove_states_of(&ids, policy);
        if let Some(retired) = self.retired.last_mut() {
            (retired.rules, retired.late_states) = (ids, policy);
        }
        if policy == StatePolicy::Recheck {
            let (handed, removed) = self.recheck(now);
            dropped += removed;
            diff.states_handed = handed;
        }
        if policy != StatePolicy::Keep {
            diff.states_dropped = dropped;
        }
        diff
    }

    /// Removes or orphans the states of deleted rules. Returns the number of removed states.
    fn remove_states_of(&mut self, gone: &[RuleId], policy: StatePolicy) -> usize {
        let is_deleted = |id: RuleId| gone.binary_search(&id).is_ok();
        let states = &mut self.walker.states;
        match policy {
            StatePolicy::Keep => states.orphan_where(is_deleted),
            StatePolicy::Recheck | StatePolicy::RecheckLater => 0,
            StatePolicy::Delete => states.remove_where(is_deleted),
            StatePolicy::Drop => states.remove_where(|_| true),
        }
    }

    /// Returns a gate with other rules. Rules that stay have the same identity as here.
    fn preview_gate(&self, ruleset: &Ruleset, kept: &[Kept]) -> Self {
        let mut next = Self::new(ruleset.clone(), self.ports().clone(), self.states().settings().clone(), 0);
        next.next_id = self.next_id;
        for ((id, _), kept) in next.rules.iter_mut().zip(kept) {
            *id = match kept.old() {
                Some(at) => self.rules[at].0,
                None => RuleId(next.next_id),
            };
            next.next_id += 1;
        }
        next.flow_names = self.flow_names.clone();
        let routes = Arc::clone(&self.generation().routes);
        next.compile(|generation| generation.routes = routes);
        next
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

fn line(rule: &Rule) -> String {
    format!("{:05} {rule}", rule.number)
}
