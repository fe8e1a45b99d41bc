//! Retired generations: kept until no walker uses them.

use std::collections::HashSet;

use super::gate::{DEFAULT_DYNAMIC_RULE, Gate};
use super::generation::Generation;
use super::program::Program;
use super::reload::StatePolicy;
use crate::state::RuleId;

/// A replaced generation that a walker may still use.
pub(super) struct RetiredGeneration {
    pub(super) version: u64,
    /// Kept alive so that no walker frees it between two packets.
    pub(super) generation: Option<Generation>,
    /// Deleted rules, in order, by which a walker may still create states.
    pub(super) rules: Vec<RuleId>,
    /// The policy for states that these rules still create.
    pub(super) late_states: StatePolicy,
}

impl RetiredGeneration {
    pub(super) fn new(version: u64, generation: Generation) -> Self {
        Self { version, generation: Some(generation), rules: Vec::new(), late_states: StatePolicy::Delete }
    }

    /// The rules that a walker may still use.
    pub(super) fn program(&self) -> Option<&Program> {
        self.generation.as_ref().map(|generation| &*generation.program)
    }
}

impl Gate {
    /// Frees generations that no walker uses, and handles the states that were created meanwhile.
    pub(super) fn reclaim_retired(&mut self) {
        let Self { shared, walker, retired, rechecking, .. } = self;
        let before = retired.len();
        shared.current.discard_previous();
        retired.retain_mut(|retired| {
            if !shared.slots.is_used(retired.version) {
                retired.generation = None;
            }
            // A re-check in progress decides.
            let rechecks = *rechecking && retired.late_states == StatePolicy::RecheckLater;
            if shared.slots.all_reached(retired.version + 1) && !rechecks {
                let rules = std::mem::take(&mut retired.rules);
                let is_deleted = |id: RuleId| rules.binary_search(&id).is_ok();
                match retired.late_states {
                    _ if rules.is_empty() => 0,
                    StatePolicy::Keep => walker.states.orphan_where(is_deleted),
                    _ => walker.states.remove_where(is_deleted),
                };
            }
            retired.generation.is_some() || !retired.rules.is_empty()
        });
        if retired.len() == before {
            return;
        }
        let ids: HashSet<RuleId> = self.rules.iter().chain(&self.hidden).map(|(id, _)| *id).collect();
        self.shared.slots.retain(|id| ids.contains(&id));
    }

    /// Frees deleted rules that have no states left.
    pub(super) fn prune_hidden(&mut self) {
        let Self { hidden, orphans, walker, retired, .. } = self;
        hidden.retain(|(id, _)| {
            let late = || retired.iter().any(|retired| retired.rules.binary_search(id).is_ok());
            *id == DEFAULT_DYNAMIC_RULE || walker.states.count_of(*id) > 0 || late()
        });
        orphans.retain(|orphan| hidden.iter().any(|(id, _)| id == orphan));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::Ports;
    use crate::rules::Ruleset;
    use crate::state::Settings;
    use towpath_wire::Time;

    /// A reload that removes all states ends the re-check of an earlier one: nothing waits for its end.
    #[test]
    fn a_drop_ends_a_recheck() {
        let ruleset = |text| Ruleset::parse("t", text).ruleset.unwrap();
        let mut gate = Gate::new(
            ruleset("add allow udp from any to any keep-state"),
            Ports::new(),
            Settings::default(),
            1,
        );
        let mut walker = gate.walker().unwrap();
        gate.reload(ruleset("add deny udp from any to any"), StatePolicy::RecheckLater, Time::from_secs(1));
        gate.reload(ruleset("add deny tcp from any to any"), StatePolicy::Drop, Time::from_secs(1));
        walker.expire(Time::from_secs(1), 0);
        gate.expire(Time::from_secs(1), 0);
        assert!(gate.retired.is_empty());
        gate.prune_hidden();
        let hidden: Vec<_> = gate.hidden.iter().map(|(id, _)| *id).collect();
        assert_eq!(hidden, [DEFAULT_DYNAMIC_RULE]);
    }
}
