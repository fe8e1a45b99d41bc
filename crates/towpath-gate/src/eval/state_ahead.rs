//! The states that the rest of a walk can create.
//!
//! While an inspector has a packet, the next packet of the flow is evaluated, unless it may need a state that the first one creates after
//! its verdict. The rules after the packet's position, the packet's class and the states of its flow decide whether there is such a state.
//! Other tests of the rules are assumed to match.

use towpath_wire::{Packet, Time};

use super::class::{self, CLASSES};
use super::evaluate::flow_of;
use super::insn::Insn;
use super::program::CompiledRule;
use super::walk::{Dir, Walk};
use super::walker::Walker;
use crate::state::{Lookup, Name};

/// The rules that create states of one name.
#[derive(Debug)]
pub(super) struct CreatingRules {
    name: Name,
    /// Per class: one past the position of the last rule that accepts it; 0 without one.
    ends: [u32; CLASSES],
}

impl CreatingRules {
    pub(super) fn all<'i>(
        rules: &[CompiledRule],
        insns_of: impl Fn(&CompiledRule) -> &'i [Insn],
    ) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for (end, rule) in (1..).zip(rules) {
            let Some(name) = rule.install.as_deref().filter(|_| rule.enabled).map(|install| install.name)
            else {
                continue;
            };
            let at = all.iter().position(|rules| rules.name == name).unwrap_or_else(|| {
                all.push(Self { name, ends: [0; CLASSES] });
                all.len() - 1
            });
            let accepted = class::accepted(insns_of(rule));
            let ends = all[at].ends.iter_mut().enumerate();
            ends.filter(|(class, _)| accepted >> class & 1 == 1).for_each(|(_, last)| *last = end);
        }
        all
    }
}

impl Walker {
    /// Returns true if the rest of a packet's walk can create a state that its flow does not have. `ahead`: the directions of the rest. In
    /// the walk's own direction it begins after the position, in the other one at the first rule.
    ///
    /// The verdict `repeat` and replacements of the packet are not considered.
    pub fn may_create_state(
        &mut self,
        walk: &Walk,
        packet: &Packet<'_>,
        ahead: impl Iterator<Item = Dir> + Clone,
        now: Time,
    ) -> bool {
        self.catch_up();
        let Self { generation, states, .. } = self;
        let creating = &generation.program.creating;
        if creating.is_empty() {
            return false;
        }
        let Some(flow) = flow_of(packet, walk) else { return false };
        // Inside a `call`, `return` leads back to an earlier position.
        let position = if walk.depth == 0 { generation.resume(walk) } else { 0 };
        let reached = |rules: &CreatingRules, from: usize| {
            let in_direction = |dir| {
                let from = if dir == walk.dir { from } else { 0 };
                rules.ends[class::of(packet, dir)] as usize > from
            };
            ahead.clone().any(in_direction)
        };
        let mut has_state = false;
        let mut anywhere = false;
        for rules in creating.iter().filter(|rules| reached(rules, 0)) {
            if states.peek(&flow, Lookup::Named(rules.name), now).is_some() {
                has_state = true;
            } else if reached(rules, position) {
                return true;
            } else {
                anywhere = true;
            }
        }
        // A lookup that finds a state continues at the rule that created it.
        has_state && anywhere
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::Ruleset;
    use crate::{Gate, PacketSpec, Ports, Step, state};
    use towpath_wire::{self as wire, LinkType};

    /// Walks a packet up to its inspector. Returns whether the rest in these directions may create a state.
    fn may_create(rules: &str, earlier: &[&str], words: &str, ahead: &[Dir]) -> bool {
        let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
        let mut gate = Gate::new(ruleset, Ports::new(), state::Settings::default(), 1);
        let mut walker = gate.walker().unwrap();
        let now = Time::from_secs(1);
        let mut walk_of = |words: &str| {
            let spec = PacketSpec::parse(words).unwrap();
            let packet = wire::parse(LinkType::ETHERNET, &spec.frame, spec.frame.len() as u32).unwrap();
            let mut walk = Walk::new(Dir::In, None, None);
            let step = walker.walk(&mut walk, &packet, now);
            (step, walker.may_create_state(&walk, &packet, ahead.iter().copied(), now))
        };
        for words in earlier {
            assert_eq!(walk_of(words).0, Step::Pass);
        }
        let (step, may) = walk_of(words);
        assert!(matches!(step, Step::Divert(_)), "{step:?}");
        may
    }

    #[test]
    fn rules_after_the_position_create_states_that_the_flow_does_not_have() {
        let udp = "udp 10.0.0.1:4000 > 10.0.0.2:53";
        let keep = "add allow udp from any to any 53 keep-state";
        for (rules, expected) in [
            (format!("add divert 1 udp from any to any\n{keep}"), true),
            // The rule is before the position, or not for UDP.
            (
                format!("add skipto 300 udp from any to any\n{keep}\nadd 300 divert 1 udp from any to any"),
                false,
            ),
            ("add divert 1 udp from any to any\nadd allow tcp from any to any keep-state".to_owned(), false),
            // `return` leads back to it.
            (
                format!(
                    "add 100 call 300 udp from any to any\nadd 200 {}\nadd 300 divert 1 udp from any to any",
                    &keep[4..]
                ),
                true,
            ),
        ] {
            assert_eq!(may_create(&rules, &[], udp, &[Dir::In]), expected, "{rules}");
        }
        let rules = format!("{keep} in\nadd divert 1 udp from any to any");
        let reply = "udp 10.0.0.2:53 > 10.0.0.1:4001";
        assert!(!may_create(&rules, &[], reply, &[Dir::In]));
        assert!(!may_create(&rules, &[], reply, &[Dir::Out]), "the rule is for packets that come in");
        assert!(may_create(
            "add divert 1 udp from any to any in\nadd allow udp from any to any keep-state",
            &[],
            reply,
            &[Dir::Out]
        ));
    }

    #[test]
    fn a_flow_that_has_the_state_does_not_wait_for_it() {
        let rules = "add 100 divert 1 udp from any to any iplen 50-100\n\
                     add 200 allow udp from any to any 53 keep-state :a";
        let short = "udp 10.0.0.1:4000 > 10.0.0.2:53 len 9";
        let long = "udp 10.0.0.1:4000 > 10.0.0.2:53 len 40";
        assert!(may_create(rules, &[], long, &[Dir::In]));
        assert!(!may_create(rules, &[short], long, &[Dir::In]));
        // Another name is another state.
        let rules = format!("{rules}\nadd 300 count udp from any to any keep-state :b");
        assert!(may_create(&rules, &[short], long, &[Dir::In]));
    }
}
