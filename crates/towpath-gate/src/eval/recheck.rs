//! Re-check of states after a reload: each state goes to the rule that would create it now, or is removed.

use std::sync::Arc;
use std::time::Duration;

use towpath_wire::Time;

use super::creating_rule::{Creation, FirstPacket};
use super::gate::{DEFAULT_DYNAMIC_RULE, Gate};
use crate::rules::Rule;
use crate::state::{Cursor, HandedOver, Install, Kind, Listed, Name, RuleId};

/// States per step of a re-check, which takes a few milliseconds.
const RECHECK_STATES: usize = 4096;

/// Number of checks whether all walkers have adopted the current rules. A walker adopts them between two bursts; only one that
/// does not run takes longer.
const WALKER_WAITS: usize = 500;
/// Time between two checks.
const WALKER_WAIT: Duration = Duration::from_micros(100);

/// TCP's SYN in the forward half of ipfw's state word.
const SYN_SEEN: u32 = 0x02;

/// Result of one step of a re-check ([`Gate::recheck_step`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecheckStep {
    /// States that were checked.
    pub checked: usize,
    /// States that now belong to another rule.
    pub handed: usize,
    /// States that were removed.
    pub dropped: usize,
    /// Start of the next step; `None` after the last state.
    pub next: Option<Cursor>,
}

/// The effect of a re-check on a state.
pub(super) enum Recheck {
    /// It stays with its rule.
    Stays,
    /// It goes to another rule, under that rule's flow name.
    HandOver(RuleId, Name, Install),
    /// No rule would create it.
    Remove,
}

impl Gate {
    /// Re-checks all states. Returns the numbers of states that were handed over and removed.
    pub(super) fn recheck(&mut self, now: Time) -> (usize, usize) {
        let (mut handed, mut dropped, mut from) = (0, 0, Some(Cursor::default()));
        while let Some(cursor) = from {
            let step = self.recheck_step(cursor, now);
            handed += step.handed;
            dropped += step.dropped;
            from = step.next;
        }
        (handed, dropped + self.finish_recheck())
    }

    /// Re-checks states from `from` on: hands each to the rule that would create it now ([`Gate::creating_rule`]), and
    /// removes those that no rule would create. Takes a few milliseconds.
    ///
    /// After [`Gate::reload`] with [`StatePolicy::RecheckLater`](super::StatePolicy::RecheckLater), start with the
    /// default cursor, continue until `next` is `None`, then call [`Gate::finish_recheck`]. Each state that exists
    /// throughout is checked exactly once; a state that is created meanwhile may be checked. If the rules change
    /// between steps, the remaining states are checked against the new rules; orphans of that change stay.
    pub fn recheck_step(&mut self, from: Cursor, now: Time) -> RecheckStep {
        self.maintain(|gate| {
            gate.let_walkers_catch_up();
            let mut decided = Vec::new();
            let mut step = RecheckStep::default();
            for (seen, (state, cursor)) in (1..).zip(gate.states().dump(from, now)) {
                if !matches!(state.kind, Kind::Parent { .. }) {
                    step.checked += 1;
                    if !gate.orphans.contains(&state.rule) {
                        let recheck = gate.recheck_of(&state, gate.rule_of(state.rule));
                        if !matches!(recheck, Recheck::Stays) {
                            decided.push((state.flow, state.name, state.rule, recheck));
                        }
                    }
                }
                if seen == RECHECK_STATES {
                    step.next = Some(cursor);
                    break;
                }
            }
            // If another rule has created a new state for the flow since then, that state stays.
            for (flow, name, rule, recheck) in decided {
                let states = gate.states_mut();
                let handed = match &recheck {
                    Recheck::HandOver(to, new_name, install) => {
                        states.hand_over(&flow, (rule, name), (*to, *new_name, install), now)
                    }
                    // A state of that flow and name exists: this one has no further use.
                    _ => HandedOver::Exists,
                };
                match handed {
                    HandedOver::Done => step.handed += 1,
                    HandedOver::Exists => {
                        step.dropped += usize::from(states.remove_of(&flow, name, rule, now))
                    }
                    HandedOver::Gone => {}
                }
            }
            step
        })
    }

    /// Ends a re-check whose steps have covered all states: removes the states that a walker has created by a deleted
    /// rule meanwhile. Returns their number.
    pub fn finish_recheck(&mut self) -> usize {
        self.maintain(|gate| {
            gate.rechecking = false;
            if !gate.generation().left_names.is_empty() {
                gate.change(|generation| generation.left_names = Arc::default());
            }
            let Self { hidden, orphans, walker, .. } = gate;
            let mut deleted: Vec<RuleId> = hidden.iter().map(|(id, _)| *id).collect();
            deleted.retain(|id| *id != DEFAULT_DYNAMIC_RULE && !orphans.contains(id));
            deleted.sort_unstable();
            walker.states.remove_where(|id| deleted.binary_search(&id).is_ok())
        })
    }

    /// Decides what becomes of a state that `rule` created.
    pub(super) fn recheck_of(&self, state: &Listed, rule: Option<&Rule>) -> Recheck {
        let first = FirstPacket {
            flow: state.flow,
            name: state.name,
            origin: state.origin,
            syn: state.tcp_seen & SYN_SEEN != 0 && !state.picked_up,
            rule: rule.map(|rule| (state.rule, rule)),
        };
        let Some(creation) = self.creation(&first) else { return Recheck::Remove };
        let creating = &self.generation().program.rules[creation.at];
        match &creating.install {
            Some(install) if (creating.id, install.name) != (state.rule, state.name) => {
                let Creation { timeout, .. } = creation;
                Recheck::HandOver(creating.id, install.name, Install { timeout, ..install.install })
            }
            _ => Recheck::Stays,
        }
    }

    /// Returns a rule, current or deleted; `None` for the default dynamic rule, which creates no states.
    pub(super) fn rule_of(&self, id: RuleId) -> Option<&Rule> {
        let at = self.generation().program.position_of(id).filter(|_| id != DEFAULT_DYNAMIC_RULE)?;
        let hidden = || self.hidden.iter().find(|(hidden, _)| *hidden == id);
        self.rules.get(at).or_else(hidden).map(|(_, rule)| rule)
    }

    /// Waits for walkers that use earlier rules, at most for a bounded time: they do not know the rules that states are
    /// handed to, and evaluate packets of such states like packets without a state.
    fn let_walkers_catch_up(&self) {
        let version = self.shared.current.version();
        for _ in 0..WALKER_WAITS {
            if self.shared.slots.all_reached(version) {
                return;
            }
            std::thread::sleep(WALKER_WAIT);
        }
    }
}
