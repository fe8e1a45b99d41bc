//! Flow offload: whether the packets of a flow that has a state can pass without an evaluation of the rules.
//!
//! What: the walk of a packet of the flow, without any effect. The caller forwards TCP segments with ACK and without SYN, FIN and RST,
//! and UDP datagrams, and no fragments; of these packets it knows the flow, the port and the direction. Each rule before the state
//! lookup must have a result that these fix, and so must the rules that the state's rule continues at. Otherwise the rule is the
//! reason why the flow is not offloaded. A rule with `inspect` or `divert` needs a verdict of an inspector for the flow.
//!
//! Invariant: while the [version](Walker::version) of rules, tables, ports and routes is the same, and the states and the verdicts exist,
//! each packet of the flow has this walk: it counts for these rules, and in these states.

use std::fmt;
use std::time::Duration;

use super::evaluate::{Next, flow_of};
use super::insn::{Insn, Op};
use super::packet_spec::first_packet;
use super::program::{CompiledAction, CompiledRule, Program};
use super::step::Step;
use super::walk::{Edits, LookupCache, Walk};
use super::walker::Walker;
use crate::rules::option::LookupKey;
use crate::rules::table::Value;
use crate::state::{Direction, Flow, Lookup, Name, RuleId, Segment, Tracking};
use towpath_wire::{Ends, Packet, Time, proto};

/// TCP flag of the packets.
const ACK: u8 = 0x10;

/// The walk of every packet of a flow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FixedWalk {
    /// The rules for which a packet counts, in order.
    pub rules: Vec<RuleId>,
    /// The states that a packet refreshes, one for each lookup that finds one.
    pub states: Vec<StateHit>,
    /// The verdicts for the flow that decide on a packet, one for each queue that a rule sends it to.
    pub verdicts: Vec<VerdictHit>,
    /// The rule of a state has `offload`.
    pub marked: bool,
    /// The last verdict drops the packet.
    pub blocked: bool,
}

/// A verdict for the flow that decides on a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerdictHit {
    /// The queue.
    pub queue: u16,
    /// The flow of the packet.
    pub flow: Flow,
}

/// What an inspector's verdict for a flow does with its packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowDecision {
    /// They pass, with these bits of the mark, of which those of the second number change.
    Pass(u32, u32),
    /// They are dropped.
    Drop,
}

/// The verdict for a flow of the inspectors of a queue. `None`: there is none that the kernel may carry out.
pub type FlowDecisions<'a> = dyn Fn(u16, &Flow) -> Option<FlowDecision> + 'a;

/// A state that a packet refreshes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateHit {
    /// The flow of the packet.
    pub flow: Flow,
    /// The state's name.
    pub name: Name,
    /// The direction of the packet in the state.
    pub direction: Direction,
}

/// The packets of an offloaded flow that the engine did not see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unseen {
    /// Their number.
    pub packets: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The last TCP acknowledgement number.
    pub ack: u32,
}

/// Why the packets of a flow are not offloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoOffload {
    /// A rule, by its number.
    Rule(u32, Obstacle),
    /// The packets of the flow have no state.
    NoState,
    /// Only TCP and UDP are offloaded.
    Protocol,
    /// An address is link-local.
    LinkLocal,
    /// A re-check of the states runs.
    Recheck,
    /// A rule, by its number, sends the packets to an inspector that has given no verdict for the flow.
    NoVerdict(u32),
}

/// What about a rule prevents offload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// A test whose result may differ from packet to packet.
    Test,
    /// `prob`.
    Prob,
    /// `log`.
    Log,
    /// An action other than `allow` and the actions that continue.
    Action,
    /// The packet changes.
    Edit,
    /// `setzone`.
    Zone,
    /// `strict` states.
    Strict,
    /// It passes the packet without a state.
    Stateless,
    /// It jumps too often.
    Jumps,
    /// It looks for a state before it is compared with the packet.
    Lookup,
    /// It makes a state.
    Install,
}

impl fmt::Display for NoOffload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule(number, obstacle) => write!(f, "rule {number} {obstacle}"),
            Self::NoState => f.write_str("its packets have no state"),
            Self::Protocol => f.write_str("only TCP and UDP are offloaded"),
            Self::LinkLocal => f.write_str("an address is link-local"),
            Self::Recheck => f.write_str("the states are being re-checked"),
            Self::NoVerdict(number) => {
                write!(f, "rule {number} sends them to an inspector that has not passed the whole flow")
            }
        }
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Test => "has a test whose result may differ from packet to packet",
            Self::Prob => "has `prob`",
            Self::Log => "has `log`",
            Self::Action => "does not only pass the packet",
            Self::Edit => "changes the packet",
            Self::Zone => "sets the zone",
            Self::Strict => "has `strict` states",
            Self::Stateless => "decides without a state",
            Self::Jumps => "is reached by too many jumps",
            Self::Lookup => "looks for a state first",
            Self::Install => "makes a state",
        })
    }
}

/// A packet of a flow as the kernel forwards it: an Ethernet frame.
pub fn flow_frame(flow: &Flow) -> Vec<u8> {
    first_packet(flow, ACK)
}

impl Walker {
    /// The version of rules, tables, ports, routes and settings that this walker uses after the next call.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Adds the walk of the packets of a flow to `fixed`. `walk` is that of a packet before its first rule; afterwards it is that of a
    /// packet that has passed, or of one that a verdict has dropped. `packet` is that of [`flow_frame`]. `decisions` are the inspectors'
    /// verdicts for flows. Changes no state and no counter.
    ///
    /// # Errors
    /// The reason why the packets must be evaluated one by one.
    pub fn fixed_walk(
        &mut self,
        walk: &mut Walk,
        packet: &Packet<'_>,
        now: Time,
        decisions: &FlowDecisions<'_>,
        fixed: &mut FixedWalk,
    ) -> Result<(), NoOffload> {
        self.catch_up();
        walk.enter_zone(&self.generation.ports);
        if !matches!(packet.proto, proto::TCP | proto::UDP) {
            return Err(NoOffload::Protocol);
        }
        let flow = flow_of(packet, walk).ok_or(NoOffload::Protocol)?;
        if let Ends::V6(src, dst, _) = flow.ends
            && (src.is_unicast_link_local() || dst.is_unicast_link_local())
        {
            return Err(NoOffload::LinkLocal);
        }
        if !self.generation.left_names.is_empty() {
            return Err(NoOffload::Recheck);
        }
        let mut key = self.generation.program.index.packet_key(packet, walk.dir);
        let (mut at, mut found_state) = (0, false);
        // Terminates: the walk is bounded by its jumps.
        loop {
            at = self.generation.program.index.next(at, &mut key, packet, walk.cache).position;
            let program = &self.generation.program;
            let rule = &program.rules[at];
            let bars = |obstacle| Err(NoOffload::Rule(rule.number, obstacle));
            let next = (at != program.default).then(|| program.next(at));
            let skipped = |next: Option<usize>| next.ok_or(NoOffload::NoState);
            if !rule.enabled {
                at = skipped(next)?;
                continue;
            }
            let mut tablearg = None;
            let mut run = None;
            if let Some(lookup) = rule.lookup.filter(|lookup| walk.cache.needs(*lookup)) {
                if rule.prob != 0 {
                    return bars(Obstacle::Prob);
                }
                walk.cache = match lookup {
                    Lookup::Any => LookupCache::Any,
                    Lookup::Named(name) => LookupCache::Named(name),
                };
                if let Some(hit) = self.states.peek(&flow, lookup, now) {
                    let position = program.position_of(hit.rule).ok_or(NoOffload::NoState)?;
                    let name = match lookup {
                        Lookup::Named(name) => name,
                        Lookup::Any => program.rules[position]
                            .install
                            .as_ref()
                            .map_or(Name::DEFAULT, |install| install.name),
                    };
                    if !walk.jump() {
                        return bars(Obstacle::Jumps);
                    }
                    walk.answers = (hit.direction == Direction::Reverse).then_some(hit.rule);
                    fixed.states.push(StateHit { flow, name, direction: hit.direction });
                    let owner = &program.rules[position];
                    fixed.marked |= owner.offload;
                    found_state = true;
                    run = Some(position);
                }
            }
            let position = match run {
                Some(position) => position,
                None if matches!(rule.action, CompiledAction::CheckState) => {
                    at = skipped(next)?;
                    continue;
                }
                None => {
                    match self.fixed_match(rule, walk, packet, &mut tablearg) {
                        Some(true) => {}
                        Some(false) => {
                            at = skipped(next)?;
                            continue;
                        }
                        None => return bars(Obstacle::Test),
                    }
                    if rule.prob != 0 {
                        return bars(Obstacle::Prob);
                    }
                    // The next packet makes a state, and the packets of the state are those of this rule.
                    if rule.install.is_some() {
                        let obstacle = obstacle(rule).map(|obstacle| NoOffload::Rule(rule.number, obstacle));
                        return Err(obstacle.unwrap_or(NoOffload::NoState));
                    }
                    at
                }
            };
            let rule = &program.rules[position];
            obstacle(rule).map_or(Ok(()), |obstacle| Err(NoOffload::Rule(rule.number, obstacle)))?;
            fixed.rules.push(rule.id);
            let number = rule.number;
            self.generation.tag(position, walk, tablearg);
            match self.generation.act(position, walk, packet, tablearg) {
                Next::Rule(position) => at = position,
                Next::Stop(Step::Pass) if found_state || !fixed.verdicts.is_empty() => {
                    return passed(walk, number);
                }
                Next::Stop(Step::Pass) => return Err(NoOffload::Rule(number, Obstacle::Stateless)),
                Next::Stop(step @ (Step::Inspect(queue) | Step::Divert(queue))) => {
                    let decision = decisions(queue, &flow).ok_or(NoOffload::NoVerdict(number))?;
                    fixed.verdicts.push(VerdictHit { queue, flow });
                    let FlowDecision::Pass(mark, mask) = decision else {
                        fixed.blocked = true;
                        return Ok(());
                    };
                    walk.set_mark(walk.mark() & !mask | mark & mask);
                    if matches!(step, Step::Inspect(_)) {
                        return passed(walk, number);
                    }
                    at = self.generation.resume(walk);
                }
                Next::Stop(_) => return Err(NoOffload::Rule(number, Obstacle::Action)),
            }
        }
    }

    /// Returns whether all packets of the flow match the rule, or none does; `None` if they may differ.
    fn fixed_match(
        &self,
        rule: &CompiledRule,
        walk: &Walk,
        packet: &Packet<'_>,
        tablearg: &mut Option<Value>,
    ) -> Option<bool> {
        let mut unknown = false;
        let insns = self.generation.program.insns_of(rule);
        for block in insns.chunk_by(|insn: &Insn, _| insn.or) {
            let mut result = Some(false);
            for insn in block {
                match self.fixed_test(&insn.op, rule.number, walk, packet, tablearg) {
                    Some(holds) if holds != insn.not => {
                        result = Some(true);
                        break;
                    }
                    Some(_) => {}
                    None => result = None,
                }
            }
            match result {
                Some(true) => {}
                // Whatever the other blocks say.
                Some(false) => return Some(false),
                None => unknown = true,
            }
        }
        (!unknown).then_some(true)
    }

    /// The result of a test for all packets of the flow; `None` if it may differ.
    fn fixed_test(
        &self,
        op: &Op,
        number: u32,
        walk: &Walk,
        packet: &Packet<'_>,
        tablearg: &mut Option<Value>,
    ) -> Option<bool> {
        let fixed = match op {
            Op::Bpf(_) => false,
            // A mark that the packet comes with belongs to the packet.
            Op::Mark(..) | Op::MarkTablearg(_) | Op::Connmark(..) => {
                !walk.recv.is_some_and(|port| self.generation.ports.has_marks(port))
            }
            Op::Field(test) => !test.scope().includes(packet) || test.is_fixed_by_flow(),
            Op::Lookup(lookup) => {
                !matches!(lookup.0, LookupKey::SrcMac | LookupKey::DstMac | LookupKey::Dscp)
            }
            Op::AnyOf(ops) => {
                let results: Vec<_> =
                    ops.iter().map(|op| self.fixed_test(op, number, walk, packet, tablearg)).collect();
                let any = results.contains(&Some(true));
                return if any || !results.contains(&None) { Some(any) } else { None };
            }
            // Of the flow, the port, the direction, tables, routes, and what earlier rules did. `established` and `setup` are known:
            // the packets have ACK, and neither SYN nor RST. They are Ethernet frames.
            Op::True
            | Op::Ip4
            | Op::Ip6
            | Op::Proto(_)
            | Op::Src4(_)
            | Op::Dst4(_)
            | Op::Src6(_)
            | Op::Dst6(_)
            | Op::SrcSet(_)
            | Op::DstSet(_)
            | Op::SrcMe
            | Op::DstMe
            | Op::SrcMe6
            | Op::DstMe6
            | Op::SrcTable(_)
            | Op::DstTable(_)
            | Op::SrcPort(..)
            | Op::DstPort(..)
            | Op::SrcPorts(_)
            | Op::DstPorts(_)
            | Op::In
            | Op::Out
            | Op::Recv(_)
            | Op::Xmit(_)
            | Op::Via(_)
            | Op::RecvTable(_)
            | Op::XmitTable(_)
            | Op::ViaTable(_)
            | Op::Established
            | Op::Setup
            | Op::Layer2
            | Op::Flow(_)
            | Op::Tagged(_)
            | Op::TaggedTablearg
            | Op::VerRevPath
            | Op::VerSrcReach
            | Op::AntiSpoof => true,
        };
        if !fixed {
            return None;
        }
        let context = self.generation.context(packet);
        let mut found = None;
        let holds = op.holds(&context, walk, number, &mut found);
        *tablearg = found.copied().or(*tablearg);
        Some(holds)
    }

    /// Counts packets of a walk that the engine did not see, and refreshes its states. Returns the time until the first of the states
    /// expires, or `None` if one has ended. Without states, there is no end.
    pub fn count_unseen(
        &mut self,
        rules: &[RuleId],
        states: &[StateHit],
        unseen: Unseen,
        now: Time,
    ) -> Option<Duration> {
        self.catch_up();
        for rule in rules {
            if let Some(at) = self.generation.program.position_of(*rule) {
                self.counts.count_many(at, unseen.packets, unseen.bytes, now);
            }
        }
        let segment = Segment { tcp_flags: ACK, tcp_ack: unseen.ack, ..Segment::default() };
        let counts = [unseen.packets, unseen.bytes];
        let mut least = Some(Duration::MAX);
        for hit in states {
            let left = self.states.count_unseen(&hit.flow, Lookup::Named(hit.name), counts, &segment, now);
            least = least.zip(left).map(|(least, left)| least.min(left));
        }
        least
    }
}

/// The rule with this number ends the walk of a packet that passes.
fn passed(walk: &Walk, number: u32) -> Result<(), NoOffload> {
    if walk.edits == Edits::default() { Ok(()) } else { Err(NoOffload::Rule(number, Obstacle::Edit)) }
}

/// What prevents offload of packets for which the rule runs.
fn obstacle(rule: &CompiledRule) -> Option<Obstacle> {
    let strict = rule.install.as_ref().is_some_and(|install| install.install.tracking == Tracking::Strict);
    match rule.action {
        _ if rule.log.is_some() => Some(Obstacle::Log),
        _ if strict => Some(Obstacle::Strict),
        CompiledAction::SetZone(_) => Some(Obstacle::Zone),
        CompiledAction::SetDscp(_) | CompiledAction::TcpSetMss(_) => Some(Obstacle::Edit),
        CompiledAction::Allow
        | CompiledAction::Count
        | CompiledAction::CheckState
        | CompiledAction::Skipto(_)
        | CompiledAction::Call(_)
        | CompiledAction::Return(_)
        | CompiledAction::SetMark(_)
        | CompiledAction::SetConnmark(_)
        | CompiledAction::Inspect(_)
        | CompiledAction::Divert(_)
        | CompiledAction::StateTimeout(_) => None,
        // Not for whole packets.
        CompiledAction::Reass => None,
        _ => Some(Obstacle::Action),
    }
}

impl Program {
    /// Returns true if a rule has `offload`.
    pub(super) fn offloads(&self) -> bool {
        self.rules.iter().any(|rule| rule.offload)
    }
}

#[cfg(test)]
mod tests {
    use towpath_wire::{self as wire, LinkType};

    use super::*;
    use crate::rules::Ruleset;
    use crate::state::Settings;
    use crate::{Dir, Gate, PacketSpec, Ports};

    fn packet_spec_frame(words: &str) -> Vec<u8> {
        PacketSpec::parse(words).unwrap().frame
    }

    const NOW: Time = Time::from_secs(9);

    /// The walk of the packets of a flow after a first packet, in the flow's direction or in the other one: the numbers of the rules, or
    /// the reason.
    fn fixed(rules: &str, reply: bool) -> Result<Vec<u32>, String> {
        fixed_with(rules, reply, &|_, _| None)
    }

    fn fixed_with(rules: &str, reply: bool, passes: &FlowDecisions<'_>) -> Result<Vec<u32>, String> {
        let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
        let mut gate = Gate::new(ruleset, Ports::new(), Settings::default(), 1);
        let first = packet_spec_frame("udp 10.0.0.1:4000 > 10.0.0.2:53");
        let packet = wire::parse(LinkType::ETHERNET, &first, first.len() as u32).unwrap();
        gate.walk(&mut Walk::new(Dir::In, None, None), &packet, NOW);
        let flow = packet.flow().unwrap();
        let frame = flow_frame(&if reply { flow.reversed() } else { flow });
        let packet = wire::parse(LinkType::ETHERNET, &frame, frame.len() as u32).unwrap();
        let mut fixed = FixedWalk::default();
        let mut walk = Walk::new(Dir::In, None, None);
        let found = gate.own_walker().fixed_walk(&mut walk, &packet, NOW, passes, &mut fixed);
        found
            .map(|()| fixed.rules.iter().map(|id| gate.rule_number(*id)).collect())
            .map_err(|why| why.to_string())
    }

    #[test]
    fn the_walk_is_fixed_or_a_rule_is_the_reason() {
        const KEEP: &str = "add 900 allow udp from any to any keep-state";
        let rows = [
            ("", Ok(vec![900])),
            ("add 100 check-state", Ok(vec![900])),
            // Counted before the lookup, and not.
            ("add 100 count udp from any to any\nadd 110 count tcp from any to any", Ok(vec![100, 900])),
            (
                "add 100 skipto 200 udp from any to any\nadd 110 deny ip from any to any iplen 9\nadd 200 count ip from any to any",
                Ok(vec![100, 200, 900]),
            ),
            ("add 100 deny ip from any to any frag", Ok(vec![900])),
            ("add 100 deny ip from any to any ipoptions rr", Ok(vec![900])),
            ("add 100 allow layer2 mac-type arp", Ok(vec![900])),
            ("add 100 deny tcp from any to any tcpflags syn,!ack", Ok(vec![900])),
            (
                "table t create type addr\ntable t add 10.0.0.0/8\nadd 100 count ip from table(t) to any",
                Ok(vec![100, 900]),
            ),
            ("add 100 deny tcp from any to any tcpflags psh", Ok(vec![900])),
            (
                "add 100 count udp from any to any iplen 1000-2000",
                Err("rule 100 has a test whose result may differ from packet to packet"),
            ),
            (
                "add 100 count ip from any to any dscp ef",
                Err("rule 100 has a test whose result may differ from packet to packet"),
            ),
            // The other test decides.
            ("add 100 count ip from 192.0.2.1 to any iplen 1000-2000", Ok(vec![900])),
            ("add 100 prob 0.5 count ip from any to any", Err("rule 100 has `prob`")),
            ("add 100 count log ip from any to any", Err("rule 100 has `log`")),
            ("add 100 setdscp ef ip from any to any", Err("rule 100 changes the packet")),
            ("add 100 setzone 3 ip from any to any", Err("rule 100 sets the zone")),
            ("add 100 tee 1 ip from any to any", Err("rule 100 does not only pass the packet")),
            ("add 100 allow ip from any to any", Err("rule 100 decides without a state")),
            (
                "add 100 setmark 7 ip from any to any\nadd 110 count ip from any to any mark 7",
                Ok(vec![100, 110, 900]),
            ),
        ];
        for (rules, expected) in rows {
            for reply in [false, true] {
                let found = fixed(&format!("{rules}\n{KEEP}"), reply);
                assert_eq!(found, expected.clone().map_err(str::to_owned), "{rules}, reply {reply}");
            }
        }
        let strict = "add 900 allow log udp from any to any keep-state";
        assert_eq!(fixed(strict, false), Err("rule 900 has `log`".to_owned()));
        let denied = Err("rule 65535 does not only pass the packet".to_owned());
        assert_eq!(fixed("add 900 allow tcp from any to any keep-state", false), denied);
        // Without its state, the next packet would make one.
        assert_eq!(
            fixed(&format!("add 100 deny ip from any to any\n{KEEP}"), false),
            Err("rule 100 does not only pass the packet".to_owned())
        );
    }

    /// A verdict for the flow passes the packets at `inspect`, and lets them continue after `divert`.
    #[test]
    fn a_verdict_for_the_flow_takes_the_inspectors_place() {
        let waits = |number| Err(NoOffload::NoVerdict(number).to_string());
        let rows = [
            // Rules, the queues whose inspector passes the flow, the numbers of the rules or the reason.
            ("add 100 inspect 1 udp from any to any", &[1][..], Ok(vec![100])),
            ("add 100 inspect 1 udp from any to any", &[], waits(100)),
            ("add 100 inspect 1 udp from any to any", &[2], waits(100)),
            ("add 100 check-state\nadd 200 inspect 1 udp from any to any keep-state", &[1], Ok(vec![200])),
            (
                "add 100 divert 1 ip from any to any\nadd 200 inspect 2 ip from any to any",
                &[1, 2],
                Ok(vec![100, 200]),
            ),
            ("add 100 divert 1 ip from any to any\nadd 200 inspect 2 ip from any to any", &[1], waits(200)),
            // After the inspector, a rule without a state decides.
            (
                "add 100 divert 1 ip from any to any\nadd 200 allow ip from any to any",
                &[1],
                Ok(vec![100, 200]),
            ),
            (
                "add 100 divert 1 ip from any to any\nadd 200 deny ip from any to any mark 7",
                &[1],
                Err("rule 200 does not only pass the packet".to_owned()),
            ),
            (
                "add 100 setdscp ef ip from any to any\nadd 200 inspect 1 ip from any to any",
                &[1],
                Err("rule 100 changes the packet".to_owned()),
            ),
            ("add 100 inspect 1 log udp from any to any", &[1], Err("rule 100 has `log`".to_owned())),
            (
                "add 100 tee 1 udp from any to any",
                &[1],
                Err("rule 100 does not only pass the packet".to_owned()),
            ),
        ];
        for (rules, queues, expected) in rows {
            for reply in [false, true] {
                let passes = |queue, _: &Flow| queues.contains(&queue).then_some(FlowDecision::Pass(7, 0xf));
                assert_eq!(fixed_with(rules, reply, &passes), expected, "{rules} {queues:?} {reply}");
            }
        }
    }

    /// A verdict that drops the flow ends the walk, with the rules up to it.
    #[test]
    fn a_verdict_that_drops_the_flow_ends_the_walk() {
        let verdict = |queue, _: &Flow| {
            [None, Some(FlowDecision::Pass(7, 0xf)), Some(FlowDecision::Drop)][usize::from(queue)]
        };
        let rows = [
            ("add 100 inspect 2 udp from any to any", Ok(vec![100])),
            (
                "add 50 count ip from any to any\nadd 100 divert 2 udp from any to any\nadd 200 allow ip from any to any",
                Ok(vec![50, 100]),
            ),
            (
                "add 100 divert 1 udp from any to any\nadd 200 inspect 2 ip from any to any mark 7",
                Ok(vec![100, 200]),
            ),
            ("add 100 check-state\nadd 200 inspect 2 udp from any to any keep-state", Ok(vec![200])),
            ("add 100 inspect 2 log udp from any to any", Err("rule 100 has `log`".to_owned())),
            (
                "add 100 count ip from any to any dscp ef\nadd 200 inspect 2 ip from any to any",
                Err("rule 100 has a test whose result may differ from packet to packet".to_owned()),
            ),
        ];
        for (rules, expected) in rows {
            for reply in [false, true] {
                assert_eq!(fixed_with(rules, reply, &verdict), expected, "{rules} {reply}");
            }
        }
    }

    /// Counts of packets that no walker saw are those of as many packets.
    #[test]
    fn unseen_packets_count_and_refresh() {
        let ruleset =
            Ruleset::parse("t", "add 100 check-state\nadd 900 allow udp from any to any keep-state")
                .ruleset
                .unwrap();
        let settings = Settings { dyn_udp_lifetime: 10, ..Settings::default() };
        let mut gate = Gate::new(ruleset, Ports::new(), settings, 1);
        let mut walker = gate.walker().unwrap();
        let frame = packet_spec_frame("udp 10.0.0.1:4000 > 10.0.0.2:53");
        let packet = wire::parse(LinkType::ETHERNET, &frame, frame.len() as u32).unwrap();
        gate.walk(&mut Walk::new(Dir::In, None, None), &packet, NOW);
        let mut fixed = FixedWalk::default();
        walker
            .fixed_walk(&mut Walk::new(Dir::In, None, None), &packet, NOW, &|_, _| None, &mut fixed)
            .unwrap();
        // More than a word of the table holds.
        let (packets, bytes) = (1 << 28, 1 << 38);
        let later = Time::from_secs(15);
        let unseen = Unseen { packets, bytes, ack: 0 };
        let left = walker.count_unseen(&fixed.rules, &fixed.states, unseen, later);
        assert_eq!(left.map(|left| left.as_secs_f64().round()), Some(10.0));
        let state = gate.states().list(later).next().unwrap();
        assert_eq!(state.packets, [packets + 1, 0]);
        assert_eq!(state.bytes[0], bytes + u64::from(packet.counted_bytes()));
        assert_eq!(state.seconds(), 10);
        let rule = &gate.show()[1];
        assert_eq!((rule.packets, rule.last), (packets + 1, Some(later)));
        assert_eq!(walker.count_unseen(&fixed.rules, &fixed.states, unseen, Time::from_secs(99)), None);
    }
}
