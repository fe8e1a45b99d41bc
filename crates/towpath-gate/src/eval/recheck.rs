//! Re-check of states after a reload: removes the states that the new rules would not create.

use towpath_wire::{self as wire, LinkType, Packet, Time};

use super::evaluate::Next;
use super::gate::{DEFAULT_DYNAMIC_RULE, Gate};
use super::insn::all_hold;
use super::packet_spec::first_packets;
use super::program::CompiledAction;
use super::step::Step;
use super::walk::{Dir, LookupCache, Walk};
use crate::rules::Rule;
use crate::rules::option::Test;
use crate::state::{Cursor, Kind, Listed, RuleId};

/// Walks per call of a re-check, which takes a few milliseconds; and the minimum number of states per call.
const RECHECK_WALKS: usize = 8192;
const RECHECK_LEAST: usize = 64;

/// With at most this many ports, every pair of receive and transmit port is tried.
const MAX_CROSSED: usize = 16;

/// Result of one step of a re-check ([`Gate::recheck_step`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecheckStep {
    /// States that were checked.
    pub checked: usize,
    /// States that were removed.
    pub dropped: usize,
    /// Start of the next step; `None` after the last state.
    pub next: Option<Cursor>,
}

impl Gate {
    /// Removes the states that the current rules would not create. Returns their number.
    pub(super) fn recheck(&mut self, now: Time) -> usize {
        let (mut dropped, mut from) = (0, Some(Cursor::default()));
        while let Some(cursor) = from {
            let step = self.recheck_step(cursor, now);
            dropped += step.dropped;
            from = step.next;
        }
        dropped
    }

    /// Re-checks states from `from` on and removes those that the current rules would not create. Takes a few
    /// milliseconds.
    ///
    /// After [`Gate::reload`] with [`StatePolicy::RecheckLater`](super::StatePolicy::RecheckLater), start with the
    /// default cursor and continue until `next` is `None`. Each state that exists throughout is checked exactly
    /// once; a state that is created meanwhile may be checked. If the rules change between steps, the remaining
    /// states are checked against the new rules; orphans of that change stay.
    pub fn recheck_step(&mut self, from: Cursor, now: Time) -> RecheckStep {
        self.maintain(|gate| {
            let paths = gate.paths();
            let most = (RECHECK_WALKS / paths.len()).max(RECHECK_LEAST);
            let (mut stale, mut step) = (Vec::new(), RecheckStep::default());
            for (seen, (state, cursor)) in (1..).zip(gate.states().dump(from, now)) {
                step.checked += usize::from(!matches!(state.kind, Kind::Parent { .. }));
                if gate.is_stale(&state, &paths) {
                    stale.push((state.flow, state.name, state.rule));
                }
                if seen == most {
                    step.next = Some(cursor);
                    break;
                }
            }
            // If another rule has created a new state for the flow since then, that state stays.
            let mut removed = |(flow, name, rule)| gate.states_mut().remove_of(&flow, name, rule, now);
            step.dropped = stale.into_iter().filter(|stale| removed(*stale)).count();
            step
        })
    }

    /// Returns true if the current rules would not create this state.
    pub(super) fn is_stale(&self, state: &Listed, paths: &[Walk]) -> bool {
        let makes = |state| match self.installing_rule(state, paths) {
            // A restored state stays if any rule would create it.
            Some(_) if state.rule == DEFAULT_DYNAMIC_RULE => true,
            installing_rule => installing_rule == Some(state.rule),
        };
        // Its rule was deleted after the re-check began: earlier orphans are already gone.
        let is_orphan =
            || state.rule != DEFAULT_DYNAMIC_RULE && self.hidden.iter().any(|(id, _)| *id == state.rule);
        !matches!(state.kind, Kind::Parent { .. }) && !makes(state) && !is_orphan()
    }

    /// Returns walks for all paths (direction, receive port, transmit port) that the rules can distinguish.
    pub(super) fn paths(&self) -> Vec<Walk> {
        let tests_ports = |rule: &Rule| {
            rule.body.blocks().flatten().any(|term| {
                let reverse = matches!(term.test, Test::VerRevPath | Test::VerSrcReach | Test::AntiSpoof);
                reverse || matches!(term.test, Test::Recv(_) | Test::Xmit(_) | Test::Via(_))
            })
        };
        let mut paths = vec![Walk::new(Dir::In, None, None), Walk::new(Dir::Out, None, None)];
        if !self.rules.iter().any(|(_, rule)| tests_ports(rule)) {
            return paths;
        }
        paths.extend(self.ports().ids().map(|port| Walk::new(Dir::In, Some(port), None)));
        paths.extend(self.ports().ids().map(|port| Walk::new(Dir::Out, None, Some(port))));
        if self.ports().len() <= MAX_CROSSED {
            let pairs = self.ports().ids().flat_map(|recv| self.ports().ids().map(move |xmit| (recv, xmit)));
            paths.extend(pairs.map(|(recv, xmit)| Walk::new(Dir::Out, Some(recv), Some(xmit))));
        }
        paths
    }

    /// Returns the rule that would create this state: its own, if any path and first packet lead there.
    fn installing_rule(&self, state: &Listed, paths: &[Walk]) -> Option<RuleId> {
        let mut other = None;
        for frame in first_packets(&state.flow) {
            let Ok(packet) = wire::parse(LinkType::ETHERNET, &frame, frame.len() as u32) else { continue };
            for path in paths {
                let mut walk = path.with_tenant(state.flow.tenant);
                // Without state lookups: only the rules decide.
                walk.cache = LookupCache::Any;
                match self.installing_rule_for(walk, &packet, state) {
                    Some(rule) if rule == state.rule => return Some(rule),
                    rule => other = other.or(rule),
                }
            }
        }
        other
    }

    fn installing_rule_for(&self, mut walk: Walk, packet: &Packet<'_>, state: &Listed) -> Option<RuleId> {
        let mut key = self.generation().program.index.packet_key(packet, walk.dir);
        let mut at = 0;
        // Terminates: the walk is bounded by its jumps.
        loop {
            let found = self.generation().program.index.next(at, &mut key, packet, LookupCache::Any);
            at = found.position;
            let compiled = self.generation().program.rules.get(at)?;
            let mut tablearg = None;
            let context = self.generation().context(packet);
            let insns = self.generation().program.insns_of(compiled);
            let holds = all_hold(insns, &context, &walk, compiled.number, &mut tablearg);
            if !holds || matches!(compiled.action, CompiledAction::CheckState) {
                if at == self.generation().program.default {
                    return None;
                }
                at = self.generation().program.next(at);
                continue;
            }
            if compiled.install.as_ref().is_some_and(|installs| installs.name == state.name) {
                return Some(compiled.id);
            }
            let tablearg = tablearg.copied();
            self.generation().tag(at, &mut walk, tablearg);
            match self.generation().act(at, &mut walk, packet, tablearg) {
                Next::Rule(position) => at = position,
                Next::Stop(Step::Tee(_) | Step::Divert(_) | Step::Reassemble) => {
                    at = self.generation().program.next(at)
                }
                Next::Stop(_) => return None,
            }
        }
    }
}
