//! Reload: replaces the ruleset in one step. Rules that are in both rulesets keep their counters and states.

use std::collections::HashMap;
use std::sync::Arc;

use super::gate::{DEFAULT_DYNAMIC_RULE, Gate};
use super::routes::Routes;
use super::token_bucket::TokenBucket;
use crate::rules::{Rule, Ruleset};
use crate::state::RuleId;
use towpath_wire::Time;

/// What a reload does with existing states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatePolicy {
    /// Keeps all states. States of deleted rules become orphans, which keep their action until they expire.
    Keep,
    /// Keeps a state if the new rules would create it: the first packet of its flow, evaluated with the new rules,
    /// must install it by the same rule. Removes all other states, including those of deleted rules. The next
    /// packet of such a flow is evaluated like any other.
    ///
    /// A state does not record all properties of its first packet, such as ports of the gate, TCP flags or ICMP
    /// type. It stays if any port and any packet that may start such a flow would create it. Lengths, Ethernet
    /// addresses, tags and the like are those of a plain packet. `prob` is assumed to match.
    Recheck,
    /// Like `Recheck`, but states of rules that stay are checked later, in steps ([`Gate::recheck_step`]). Packets
    /// use them until then.
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
    /// Number of rules that stay, with their counters.
    pub kept: usize,
    /// Tables that are new, deleted or changed.
    pub tables: Vec<String>,
    /// Number of states removed.
    pub states_dropped: usize,
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
        let mut diff = self.diff(ruleset, policy);
        if policy.rechecks() {
            let next = self.preview_gate(ruleset);
            let paths = next.paths();
            diff.states_dropped =
                self.states().list(now).filter(|state| next.is_stale(state, &paths)).count();
        }
        diff
    }

    /// Returns the effect without the states that a re-check removes.
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

    /// Replaces rules, tables and pipes in one step: no packet sees a mixture. A rule with the same number, set
    /// and text in both rulesets keeps its counters and states.
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
            // No rule would create an orphan.
            ids.extend(self.hidden.iter().map(|(id, _)| *id).filter(|id| *id != DEFAULT_DYNAMIC_RULE));
        }
        ids.sort_unstable();
        self.zeroed.retain(|id, _| ids.binary_search(id).is_err());
        self.prune_hidden();
        if policy == StatePolicy::Keep {
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
            (retired.rules, retired.orphan) = (ids, policy == StatePolicy::Keep);
        }
        if policy == StatePolicy::Recheck {
            dropped += self.recheck(now);
        }
        if policy != StatePolicy::Keep {
            diff.states_dropped = dropped;
        }
        diff
    }

    /// Removes or orphans the states of deleted rules. Returns their number.
    fn remove_states_of(&mut self, gone: &[RuleId], policy: StatePolicy) -> usize {
        let is_deleted = |id: RuleId| gone.binary_search(&id).is_ok();
        let states = &mut self.walker.states;
        match policy {
            StatePolicy::Keep => states.orphan_where(is_deleted),
            StatePolicy::Recheck | StatePolicy::RecheckLater | StatePolicy::Delete => {
                states.remove_where(is_deleted)
            }
            StatePolicy::Drop => states.remove_where(|_| true),
        }
    }

    /// Returns a gate with other rules. Rules that stay have the same identity as here.
    fn preview_gate(&self, ruleset: &Ruleset) -> Self {
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
        let routes = Arc::clone(&self.generation().routes);
        next.compile(|generation| generation.routes = routes);
        next
    }

    /// Maps rules (number, set, text) to their positions. Equal rules are in order.
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

/// Removes and returns the first old rule that equals `rule`.
fn take(old: &mut HashMap<(u32, u8, String), Vec<usize>>, rule: &Rule) -> Option<usize> {
    old.get_mut(&same(rule))?.pop()
}

fn line(rule: &Rule) -> String {
    format!("{:05} {rule}", rule.number)
}
