//! Explains the walk of one packet, rule by rule: which rule matched or why not, which states were found or would
//! be created, and the verdict. Changes nothing: no counter, no state, no log.

use std::fmt;

use super::evaluate::{Next, flow_of};
use super::gate::Gate;
use super::insn::all_hold;
use super::program::{CompiledAction, Program};
use super::step::{DropReason, Step};
use super::walk::{Dir, LookupCache, Walk};
use crate::rules::option::{FieldTest, Term, Test};
use crate::rules::table::Value;
use crate::rules::{block_text, protocol};
use crate::state::{Direction, Foreseen, Listed, Lookup, Name, Refused, RuleId, Segment};
use towpath_wire::{Addresses, Fragment, Packet, Time};

/// The walk of one packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The rules in the order of evaluation.
    pub steps: Vec<ExplainedRule>,
    /// The result of the walk. Assumes that a pipe passes the packet and that `prob` matches.
    pub verdict: Step,
}

/// A rule that was evaluated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExplainedRule {
    /// Rule number.
    pub number: u32,
    /// Set.
    pub set: u8,
    /// Text of the rule.
    pub text: String,
    /// The rule looks up a state first.
    pub looks_up: bool,
    /// Result of the evaluation.
    pub outcome: RuleOutcome,
}

/// Result of evaluating one rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleOutcome {
    /// The set of the rule is disabled.
    Disabled,
    /// A test did not match.
    Failed {
        /// The test.
        test: String,
        /// The value that the packet has instead; empty if it has no short form.
        packet: String,
    },
    /// The rule looked up a state and found none. For keep-state and limit the body decided after that.
    NoState {
        /// Flow name, with the colon.
        name: String,
    },
    /// A state was found; the rule that created it runs.
    State {
        /// The state, in the format of `ipfw -d list`.
        state: String,
        /// The packet is an ICMP error that quotes a packet of the state's flow.
        related: bool,
        /// Number of the rule that created the state.
        parent: u32,
        /// Result of that rule's action.
        lead: ActionOutcome,
    },
    /// The state that the packet itself made at an earlier rule, or in its walk with direction in, was found.
    OwnState {
        /// Flow name, with the colon.
        name: String,
        /// Number of the rule that made the state.
        parent: u32,
        /// Result of that rule's action.
        lead: ActionOutcome,
    },
    /// The packet does not fit the strict state of its flow, which therefore does not match, and neither do the tests of
    /// the rule.
    Unfit {
        /// The state, in the format of `ipfw -d list`.
        state: String,
        /// Number of the rule that created the state.
        parent: u32,
    },
    /// All tests matched, but the packet does not fit the strict state of its flow: it is dropped.
    Invalid {
        /// Flow name, with the colon, of the state.
        name: String,
    },
    /// All tests matched, but the state of the rule cannot be created: the packet is dropped.
    Refused {
        /// Flow name, with the colon, of the state.
        name: String,
        /// Why it cannot be created.
        reason: Refused,
    },
    /// All tests matched and the action ran.
    Matched {
        /// Flow name, with the colon, of the state that would be created.
        makes_state: Option<String>,
        /// Result of the action.
        lead: ActionOutcome,
    },
    /// All tests matched. A state would be created; later packets run the action (`defer-action`).
    Deferred {
        /// Flow name, with the colon.
        makes_state: String,
    },
    /// All tests matched, but a frame that is not IP cannot have a state: it is dropped.
    CannotMakeState,
}

/// Result of an action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ActionOutcome {
    /// Continues at the rule with this number.
    On(u32),
    /// Ends the walk.
    End(Step),
    /// Goes to an inspector, which is assumed to pass the packet; then continues at the rule with this number.
    Through(Step, u32),
}

/// Limit on the number of steps: some rulesets loop for a long time.
const MAX_STEPS: usize = 100_000;

impl Gate {
    /// Explains the walk that the packet would take now.
    ///
    /// States are looked up without changing them. A state that cannot be created (a limit, a full table) is foreseen; what
    /// the engine's threads do at the same time is not.
    pub fn explain(&self, walk: &Walk, packet: &Packet<'_>, now: Time) -> Explanation {
        self.explain_walk(&mut walk.clone(), &mut Foreseen::default(), packet, now)
    }

    /// As [`Gate::explain`], and advances the walk: after [`Walk::leave`], it is that of the outgoing packet. The walks of one
    /// packet share `states`, the states that they would make: a later walk finds those of an earlier one.
    pub fn explain_walk(
        &self,
        walk: &mut Walk,
        states: &mut Foreseen,
        packet: &Packet<'_>,
        now: Time,
    ) -> Explanation {
        walk.enter_zone(self.ports());
        let mut steps = Vec::new();
        if walk.stopped.is_none()
            && let Some(reason) = self.generation().early_drop(packet)
        {
            return Explanation { steps, verdict: Step::Drop(reason) };
        }
        let mut at = self.generation().resume(walk);
        loop {
            let (outcome, next) = self.explain_rule(at, walk, states, packet, now);
            if let Some((_, rule)) = self.rules.get(at) {
                let looks_up = self.walker.generation.program.rules[at].lookup.is_some();
                let (number, set) = (rule.number, rule.set);
                steps.push(ExplainedRule { number, set, text: rule.to_string(), looks_up, outcome });
            }
            match next {
                Next::Stop(verdict) => return Explanation { steps, verdict },
                Next::Rule(_) if steps.len() >= MAX_STEPS => {
                    return Explanation { steps, verdict: Step::Drop(DropReason::Loop) };
                }
                Next::Rule(position) => at = position,
            }
        }
    }

    /// Evaluates one rule in the order of [`super::Walker`] and describes the result.
    fn explain_rule(
        &self,
        at: usize,
        walk: &mut Walk,
        states: &mut Foreseen,
        packet: &Packet<'_>,
        now: Time,
    ) -> (RuleOutcome, Next) {
        let compiled = &self.generation().program.rules[at];
        let on = Next::Rule(self.generation().program.next(at));
        if !compiled.enabled {
            return (RuleOutcome::Disabled, on);
        }
        let mut unfit = None;
        if let Some(lookup) = compiled.lookup.filter(|lookup| walk.cache.needs(*lookup)) {
            walk.cache = match lookup {
                Lookup::Any => LookupCache::Any,
                Lookup::Named(name) => LookupCache::Named(name),
            };
            if let Some((position, name)) = self.peek_own(lookup, walk, states, packet) {
                if !walk.jump() {
                    return (RuleOutcome::NoState { name }, Next::Stop(Step::Drop(DropReason::Loop)));
                }
                walk.answers = None;
                let parent = self.generation().program.rules[position].number;
                let (lead, next) = self.explain_action(position, walk, packet, None);
                return (RuleOutcome::OwnState { name, parent, lead }, next);
            }
            if let Some(FoundState { state, position, forward, related, fits }) =
                self.peek(lookup, walk, packet, now)
            {
                let parent = self.generation().program.rules[position].number;
                let name = self.flow_name(state.name);
                let line = state.line(parent, |_| name).to_string();
                if fits {
                    walk.answers = (!forward).then_some(state.rule);
                    let (lead, next) = self.explain_action(position, walk, packet, None);
                    return (RuleOutcome::State { state: line, related, parent, lead }, next);
                }
                unfit = Some(RuleOutcome::Unfit { state: line, parent });
            }
        }
        if matches!(compiled.action, CompiledAction::CheckState) {
            let name = match compiled.lookup {
                Some(Lookup::Named(name)) => format!(":{}", self.flow_name(name)),
                _ => ":any".to_owned(),
            };
            return (unfit.unwrap_or(RuleOutcome::NoState { name }), on);
        }
        let mut tablearg = None;
        if let Some(failed) = self.failing_block(at, walk, packet, &mut tablearg) {
            let next = if at == self.generation().program.default {
                Next::Stop(Step::Drop(DropReason::Deny))
            } else {
                on
            };
            let failed =
                || RuleOutcome::Failed { test: block_text(failed), packet: seen(failed, packet, walk) };
            return (unfit.unwrap_or_else(failed), next);
        }
        let makes_state =
            compiled.install.as_ref().map(|installs| format!(":{}", self.flow_name(installs.name)));
        if makes_state.is_some() && packet.addresses == Addresses::None {
            return (RuleOutcome::CannotMakeState, Next::Stop(Step::Drop(DropReason::NotIp)));
        }
        if let (Some(installs), Some(flow)) = (&compiled.install, flow_of(packet, walk))
            && let Some((_, _, false)) =
                self.states().peek_packet(&flow, Lookup::Named(installs.name), &packet.segment(), now)
        {
            let name = format!(":{}", self.flow_name(installs.name));
            return (RuleOutcome::Invalid { name }, self.refuse(at, walk, Refused::Invalid));
        }
        if let (Some((name, install)), Some(flow)) =
            (compiled.install_of(walk, tablearg), flow_of(packet, walk))
            && let Err(reason) =
                self.states().foresee(states, (&flow, name), &packet.segment(), compiled.id, &install, now)
        {
            let name = format!(":{}", self.flow_name(name));
            return (RuleOutcome::Refused { name, reason }, self.refuse(at, walk, reason));
        }
        match makes_state {
            Some(makes_state) if compiled.defer => (RuleOutcome::Deferred { makes_state }, on),
            makes_state => {
                let (lead, next) = self.explain_action(at, walk, packet, tablearg);
                (RuleOutcome::Matched { makes_state, lead }, next)
            }
        }
    }

    /// The end of a packet whose state was refused.
    fn refuse(&self, at: usize, walk: &mut Walk, reason: Refused) -> Next {
        self.generation().stop(at, walk, Step::Drop(DropReason::NoState(reason)))
    }

    fn explain_action(
        &self,
        at: usize,
        walk: &mut Walk,
        packet: &Packet<'_>,
        tablearg: Option<Value>,
    ) -> (ActionOutcome, Next) {
        self.generation().tag(at, walk, tablearg);
        match self.generation().act(at, walk, packet, tablearg) {
            Next::Rule(position) => {
                (ActionOutcome::On(self.generation().program.rules[position].number), Next::Rule(position))
            }
            Next::Stop(step @ (Step::Tee(_) | Step::Divert(_) | Step::Reassemble)) => {
                let position = self.generation().program.next(at);
                (
                    ActionOutcome::Through(step, self.generation().program.rules[position].number),
                    Next::Rule(position),
                )
            }
            Next::Stop(step) => (ActionOutcome::End(step), Next::Stop(step)),
        }
    }

    /// Returns the first block of the body that does not match.
    fn failing_block(
        &self,
        at: usize,
        walk: &Walk,
        packet: &Packet<'_>,
        tablearg: &mut Option<Value>,
    ) -> Option<&[Term]> {
        let context = self.generation().context(packet);
        let (_, rule) = self.rules.get(at)?;
        let names = self.resolver(self.ports());
        let mut found = None;
        let failing = rule.body.blocks().find(|block| {
            let insns = Program::of_block(block, &names);
            !all_hold(&insns, &context, walk, rule.number, &mut found)
        });
        *tablearg = found.copied();
        failing
    }

    /// The position of the rule whose state, which this packet would have made, the lookup finds; and its flow name.
    fn peek_own(
        &self,
        lookup: Lookup,
        walk: &Walk,
        states: &Foreseen,
        packet: &Packet<'_>,
    ) -> Option<(usize, String)> {
        let (rule, name): (RuleId, Name) = states.find(&flow_of(packet, walk)?, lookup)?;
        let position = self.generation().program.position_of(rule)?;
        Some((position, format!(":{}", self.flow_name(name))))
    }

    /// Looks up a state without changing it.
    fn peek(&self, lookup: Lookup, walk: &Walk, packet: &Packet<'_>, now: Time) -> Option<FoundState> {
        let flow = flow_of(packet, walk)?;
        let fragment = match packet.fragment {
            Fragment::Later => self.generation().fragment_of(packet),
            _ => None,
        };
        let of_fragment = fragment.and_then(|id| self.states().peek_fragment(&flow, id, lookup, now));
        let found = of_fragment.or_else(|| self.states().peek_packet(&flow, lookup, &packet.segment(), now));
        if let Some((state, direction, fits)) = found {
            let position = self.generation().program.position_of(state.rule)?;
            let forward = direction == Direction::Forward;
            return Some(FoundState { state, position, forward, related: false, fits });
        }
        let quoted = self.generation().quoted_flow(packet, walk)?;
        let (state, against, _) =
            self.states().peek_packet(&quoted.flow, lookup, &Segment::default(), now)?;
        let position = self.generation().program.position_of(state.rule)?;
        // The error travels in the direction opposite to the packet that it quotes.
        let forward = against == Direction::Reverse;
        Some(FoundState { state, position, forward, related: true, fits: true })
    }
}

/// The state of a packet.
struct FoundState {
    state: Listed,
    /// Position of the rule that created it.
    position: usize,
    /// The packet has the direction of the state's first packet.
    forward: bool,
    related: bool,
    /// The packet fits the window of a strict state.
    fits: bool,
}

/// Describes the value that a packet has for a block that did not match.
fn seen(block: &[Term], p: &Packet<'_>, walk: &Walk) -> String {
    if p.addresses == Addresses::None {
        return format!("not IP, ethertype 0x{:04x}", p.ethertype);
    }
    let (src, dst) = match p.addresses {
        Addresses::V4(src, dst) => (src.to_string(), dst.to_string()),
        Addresses::V6(src, dst) => (src.to_string(), dst.to_string()),
        Addresses::None => return String::new(),
    };
    let [term] = block else { return String::new() };
    match &term.test {
        Test::Proto(_) | Test::Ip4 | Test::Ip6 | Test::Field(FieldTest::IpVersion(_)) => {
            let family = if matches!(p.addresses, Addresses::V4(..)) { "IPv4" } else { "IPv6" };
            match protocol::name(p.proto) {
                Some(name) => format!("{name} over {family}"),
                None => format!("protocol {} over {family}", p.proto),
            }
        }
        Test::Src(_) => format!("from {src}"),
        Test::Dst(_) => format!("to {dst}"),
        Test::SrcPort(_) | Test::DstPort(_) if p.fragment == Fragment::Later => {
            "a later fragment, without ports".into()
        }
        Test::SrcPort(_) => format!("from port {}", p.src_port),
        Test::DstPort(_) => format!("to port {}", p.dst_port),
        Test::In | Test::Out => if walk.dir == Dir::In { "in" } else { "out" }.to_owned(),
        Test::Setup | Test::Established | Test::Field(FieldTest::TcpFlags(_)) => {
            format!("TCP flags 0x{:02x}", p.tcp_flags)
        }
        Test::Field(FieldTest::IcmpTypes(_) | FieldTest::Icmp6Types(_)) => format!("type {}", p.icmp_type),
        Test::Field(FieldTest::IpTtl(_)) => format!("time to live {}", p.ttl()),
        Test::Field(FieldTest::IpLen(_)) => format!("length {}", p.ip_len),
        Test::Mark { .. } => format!("mark {:#x}", walk.mark),
        Test::Connmark { .. } => {
            walk.connmark.map_or("no connection mark".to_owned(), |mark| format!("connmark {mark:#x}"))
        }
        Test::Tagged(_) => format!("tags {:?}", walk.tags()),
        _ => String::new(),
    }
}

impl fmt::Display for RuleOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disabled => f.write_str("set disabled"),
            Self::Failed { test, packet } if packet.is_empty() => write!(f, "no match: {test}"),
            Self::Failed { test, packet } => write!(f, "no match: {test} (packet: {packet})"),
            Self::NoState { name } => write!(f, "no state {name}"),
            Self::State { state, related: false, parent, lead } => {
                write!(f, "state of rule {parent} found ({state}): {lead}")
            }
            Self::State { state, related: true, parent, lead } => {
                write!(f, "ICMP error for the state of rule {parent} ({state}): {lead}")
            }
            Self::OwnState { name, parent, lead } => {
                write!(f, "this packet's state {name} of rule {parent} found: {lead}")
            }
            Self::Refused { name, reason } => {
                write!(f, "match, but the state {name} cannot be created ({reason}): drop")
            }
            Self::Matched { makes_state: Some(name), lead } => {
                write!(f, "match, creates state {name}: {lead}")
            }
            Self::Matched { makes_state: None, lead } => write!(f, "match: {lead}"),
            Self::Deferred { makes_state } => {
                write!(f, "match, creates state {makes_state}, action deferred")
            }
            Self::Unfit { state, parent } => {
                write!(f, "the packet does not fit the state of rule {parent} ({state})")
            }
            Self::Invalid { name } => write!(f, "match, but the packet does not fit the state {name}: drop"),
            Self::CannotMakeState => {
                f.write_str("match, but a frame that is not IP cannot have a state: drop")
            }
        }
    }
}

impl fmt::Display for ActionOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::On(number) => write!(f, "continue at rule {number}"),
            Self::End(step) => write!(f, "{step}"),
            Self::Through(step, number) => write!(f, "{step}, then continue at rule {number}"),
        }
    }
}
