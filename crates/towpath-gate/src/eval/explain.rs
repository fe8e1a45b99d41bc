//! One packet through the rules, step by step, as data: which rule matched or why not, which states were found or would
//! be made, and the verdict. Nothing is changed: no counter, no state, no log.

use std::fmt;

use super::Gate;
use super::evaluate::{Next, flow_of};
use super::insn::all_hold;
use super::program::{CompiledAction, Program};
use super::walk::{Dir, DropReason, LookupCache, Step, Walk};
use crate::rules::option::{Term, Test};
use crate::rules::table::Value;
use crate::rules::{block_text, protocol};
use crate::state::{Flow, Kind, Listed, Lookup};
use towpath_wire::{Addresses, Fragment, Packet, Time, proto};

/// What became of a packet, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The rules in the order in which they were tried.
    pub steps: Vec<ExplainedRule>,
    /// Where the walk ended. A pipe is taken to let the packet pass, and `prob` to come true.
    pub verdict: Step,
}

/// One rule that was tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExplainedRule {
    /// Its number.
    pub number: u32,
    /// Its set.
    pub set: u8,
    /// Its text.
    pub text: String,
    /// Whether a state is looked up for it.
    pub looks_up: bool,
    /// What trying it came to.
    pub outcome: RuleOutcome,
}

/// What trying a rule came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleOutcome {
    /// Its set is disabled.
    Disabled,
    /// A test did not hold.
    Failed {
        /// The test.
        test: String,
        /// What the packet has in its place; empty when there is no short way to say it.
        packet: String,
    },
    /// A state was looked up, and there is none. (check-state; for keep-state the body decided then.)
    NoState {
        /// Flow name with its colon.
        name: String,
    },
    /// A state was found: the rule that made it runs.
    State {
        /// The state, as `ipfw -d list` shows it.
        state: String,
        /// The packet is an ICMP error about a packet of the state's flow.
        related: bool,
        /// Number of the rule that made it.
        parent: u32,
        /// What that rule's action did.
        lead: ActionOutcome,
    },
    /// Everything held and the action ran.
    Matched {
        /// A state that would be made, by its flow name with its colon.
        makes_state: Option<String>,
        /// What the action did.
        lead: ActionOutcome,
    },
    /// Everything held; a state would be made, and the action is left to later packets (defer-action).
    Deferred {
        /// Flow name with its colon.
        makes_state: String,
    },
    /// Everything held, but a state cannot be made of a frame that is not IP: it is dropped.
    CannotMakeState,
}

/// Where an action led.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ActionOutcome {
    /// On with the rule of this number.
    On(u32),
    /// Out of the rules.
    End(Step),
    /// To an inspector, whose pass is taken for granted here; then on with the rule of this number.
    Through(Step, u32),
}

/// Most rules that are listed: rules can be written that go round for long.
const MAX_STEPS: usize = 100_000;

impl Gate {
    /// Explains what would become of a packet now.
    ///
    /// States are looked up without being touched: that one cannot be made (a limit, a full table), that a segment is
    /// outside of a strict state's window, and which of several names' states is the newest, only [`Gate::walk`] knows.
    pub fn explain(&self, walk: &Walk, packet: &Packet<'_>, now: Time) -> Explanation {
        let mut walk = *walk;
        let mut steps = Vec::new();
        if walk.stopped.is_none()
            && let Some(reason) = self.live().refuse_unseen(packet)
        {
            return Explanation { steps, verdict: Step::Drop(reason) };
        }
        let mut at = self.live().resume(&walk);
        loop {
            let (outcome, next) = self.explain_rule(at, &mut walk, packet, now);
            if let Some((_, rule)) = self.rules.get(at) {
                let looks_up = self.walker.live.program.rules[at].probe.is_some();
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

    /// Tries one rule, in the order of [`super::Walker`], and says how that went.
    fn explain_rule(
        &self,
        at: usize,
        walk: &mut Walk,
        packet: &Packet<'_>,
        now: Time,
    ) -> (RuleOutcome, Next) {
        let ready = &self.live().program.rules[at];
        let on = Next::Rule(self.live().program.next(at));
        if !ready.enabled {
            return (RuleOutcome::Disabled, on);
        }
        if let Some(lookup) = ready.probe.filter(|lookup| walk.memo.needs(*lookup)) {
            walk.memo = match lookup {
                Lookup::Any => LookupCache::Any,
                Lookup::Named(name) => LookupCache::Named(name),
            };
            if let Some(Peek { state, position, forward, related }) = self.peek(lookup, walk, packet, now) {
                walk.answers = (!forward).then_some(state.rule);
                let parent = self.live().program.rules[position].number;
                let (lead, next) = self.explain_action(position, walk, packet, None);
                let name = self.flow_name(state.name);
                let state = state.line(parent, |_| name).to_string();
                return (RuleOutcome::State { state, related, parent, lead }, next);
            }
        }
        if matches!(ready.act, CompiledAction::CheckState) {
            let name = match ready.probe {
                Some(Lookup::Named(name)) => format!(":{}", self.flow_name(name)),
                _ => ":any".to_owned(),
            };
            return (RuleOutcome::NoState { name }, on);
        }
        let mut tablearg = None;
        if let Some(failed) = self.failing_block(at, walk, packet, &mut tablearg) {
            let next =
                if at == self.live().program.default { Next::Stop(Step::Drop(DropReason::Deny)) } else { on };
            return (
                RuleOutcome::Failed { test: block_text(failed), packet: seen(failed, packet, walk) },
                next,
            );
        }
        let makes_state =
            ready.install.as_ref().map(|installs| format!(":{}", self.flow_name(installs.name)));
        if makes_state.is_some() && packet.addresses == Addresses::None {
            return (RuleOutcome::CannotMakeState, Next::Stop(Step::Drop(DropReason::NotIp)));
        }
        match makes_state {
            Some(makes_state) if ready.defer => (RuleOutcome::Deferred { makes_state }, on),
            makes_state => {
                let (lead, next) = self.explain_action(at, walk, packet, tablearg);
                (RuleOutcome::Matched { makes_state, lead }, next)
            }
        }
    }

    fn explain_action(
        &self,
        at: usize,
        walk: &mut Walk,
        packet: &Packet<'_>,
        tablearg: Option<Value>,
    ) -> (ActionOutcome, Next) {
        self.live().tag(at, walk, tablearg);
        match self.live().act(at, walk, packet, tablearg) {
            Next::Rule(position) => {
                (ActionOutcome::On(self.live().program.rules[position].number), Next::Rule(position))
            }
            Next::Stop(step @ (Step::Tee(_) | Step::Divert(_) | Step::Reassemble)) => {
                let position = self.live().program.next(at);
                (
                    ActionOutcome::Through(step, self.live().program.rules[position].number),
                    Next::Rule(position),
                )
            }
            Next::Stop(step) => (ActionOutcome::End(step), Next::Stop(step)),
        }
    }

    /// The first block of a rule's body that does not hold.
    fn failing_block(
        &self,
        at: usize,
        walk: &Walk,
        packet: &Packet<'_>,
        tablearg: &mut Option<Value>,
    ) -> Option<&[Term]> {
        let sight = self.live().sight(packet);
        let (_, rule) = self.rules.get(at)?;
        let names = self.resolver(self.ports());
        let mut found = None;
        let failing = rule.body.blocks().find(|block| {
            let insns = Program::of_block(block, &names);
            !all_hold(&insns, &sight, walk, rule.number, &mut found)
        });
        *tablearg = found.copied();
        failing
    }

    /// Looks a state up without touching it: through the list, which is slow and changes nothing.
    fn peek(&self, lookup: Lookup, walk: &Walk, packet: &Packet<'_>, now: Time) -> Option<Peek> {
        let flow = flow_of(packet, walk)?;
        if let Some((state, forward, position)) = self.peek_flow(lookup, flow, now) {
            return Some(Peek { state, position, forward, related: false });
        }
        let quoted = self.live().quoted_by(packet, walk)?;
        // The error goes against the packet that it quotes.
        let (state, against, position) = self.peek_flow(lookup, quoted.flow, now)?;
        Some(Peek { state, position, forward: !against, related: true })
    }

    /// The state of a flow, whether the flow goes its way, and where its rule is.
    fn peek_flow(&self, lookup: Lookup, mut flow: Flow, now: Time) -> Option<(Listed, bool, usize)> {
        if matches!(flow.proto, proto::ICMP | proto::ICMP6) && !self.states().settings().dyn_icmp_id {
            (flow.src_port, flow.dst_port) = (0, 0);
        }
        let reversed = flow.reversed();
        let found = self.states().list(now).find(|state| {
            let named = lookup == Lookup::Any || lookup == Lookup::Named(state.name);
            named
                && !matches!(state.kind, Kind::Parent { .. })
                && (state.flow == flow || state.flow == reversed)
        })?;
        let position = self.live().program.position_of(found.rule)?;
        let forward = found.flow == flow;
        Some((found, forward, position))
    }
}

/// A state that a packet would find.
struct Peek {
    state: Listed,
    /// Where its rule is.
    position: usize,
    /// The packet goes the way of the state's first one.
    forward: bool,
    related: bool,
}

/// What a packet has where a block did not hold.
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
        Test::Proto(_) | Test::Ip4 | Test::Ip6 | Test::IpVersion(_) => {
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
        Test::Setup | Test::Established | Test::TcpFlags(_) => format!("TCP flags 0x{:02x}", p.tcp_flags),
        Test::IcmpTypes(_) | Test::Icmp6Types(_) => format!("type {}", p.icmp_type),
        Test::IpTtl(_) => format!("time to live {}", p.ttl()),
        Test::IpLen(_) => format!("length {}", p.ip_len),
        Test::Mark { .. } => format!("mark {:#x}", walk.mark),
        Test::Tagged(_) => format!("tags {:?}", walk.tags()),
        _ => String::new(),
    }
}

impl fmt::Display for RuleOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disabled => f.write_str("its set is disabled"),
            Self::Failed { test, packet } if packet.is_empty() => write!(f, "no match: {test}"),
            Self::Failed { test, packet } => write!(f, "no match: {test} (the packet: {packet})"),
            Self::NoState { name } => write!(f, "no state {name}"),
            Self::State { state, related: false, parent, lead } => {
                write!(f, "state of rule {parent} found ({state}): {lead}")
            }
            Self::State { state, related: true, parent, lead } => {
                write!(f, "error about the state of rule {parent} ({state}): {lead}")
            }
            Self::Matched { makes_state: Some(name), lead } => {
                write!(f, "match, makes a state {name}: {lead}")
            }
            Self::Matched { makes_state: None, lead } => write!(f, "match: {lead}"),
            Self::Deferred { makes_state } => {
                write!(f, "match, makes a state {makes_state}, action deferred")
            }
            Self::CannotMakeState => f.write_str("match, but a frame that is not IP has no state: dropped"),
        }
    }
}

impl fmt::Display for ActionOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::On(number) => write!(f, "on to rule {number}"),
            Self::End(step) => write!(f, "{step}"),
            Self::Through(step, number) => write!(f, "{step}, then on to rule {number}"),
        }
    }
}
