//! The rule that would create an existing state now: the evaluation of the packet that created it.
//!
//! What: a state records the flow in the direction of its first packet, the direction and the port that received the
//! packet ([`Origin`]), and whether the packet was a SYN. These fields make a packet, and the packet walks the rules
//! without state lookups, until a rule creates a state.
//!
//! A test of any other field has an unknown result. It matches only if the state's own rule has the same test (the
//! same or-block): the packet matched it when that rule created the state. `prob` of another rule never matches. Where
//! an unknown result decides only where the walk continues (skipto, call, return) or what later rules see (tag, mark,
//! DSCP), the walk that continues as if the rule had matched is tried too, and counts if it ends at the state's own rule.
//!
//! Invariant: with rules that test recorded fields only, the result is that of the first packet itself.

use towpath_wire::{self as wire, LinkType, Packet, proto};

use super::evaluate::Next;
use super::gate::Gate;
use super::index::PacketKey;
use super::insn::{Insn, Op};
use super::packet_spec::first_packet;
use super::port::PortId;
use super::program::{CompiledAction, CompiledRule, Program};
use super::step::Step;
use super::walk::{Dir, LookupCache, Walk};
use crate::rules::Rule;
use crate::rules::option::{FieldTest, LookupKey, Term, Test};
use crate::rules::table::Value;
use crate::state::{Flow, Name, Origin, RecordedPort, RuleId};

/// Maximum number of continuations that are tried after unknown results.
const MAX_BRANCHES: usize = 32;

/// TCP flags of possible first packets: a SYN, a segment of an existing connection, and a segment without either flag.
const SYN_ONLY: &[u8] = &[0x02];
const ANY_FLAGS: &[u8] = &[0x02, 0x10, 0x00];

/// The known properties of the packet that created a state ([`Gate::creating_rule`]).
#[derive(Clone, Copy, Debug)]
pub struct FirstPacket<'r> {
    /// Its flow: the state's forward direction. The zone is part of it.
    pub flow: Flow,
    /// The name of the state.
    pub name: Name,
    /// Its direction, and the port that received it, with the port numbers of this gate.
    pub origin: Origin,
    /// For TCP: the packet was a SYN. If false, its flags are unknown.
    pub syn: bool,
    /// The rule that created the state, with its identity in this gate; `None` if it is unknown.
    pub rule: Option<(RuleId, &'r Rule)>,
}

/// The rule that creates a state.
#[derive(Clone, Copy, Debug)]
pub(super) struct Creation {
    /// Its position.
    pub(super) at: usize,
    /// `state-timeout` of an earlier rule.
    pub(super) timeout: Option<u32>,
}

/// Result of the tests of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Matched {
    Yes,
    No,
    Unknown,
}

/// The evaluation of one first packet.
struct Evaluation<'e> {
    gate: &'e Gate,
    first: &'e FirstPacket<'e>,
    /// Packets that may be the first one, each with its keys in the index. Tests use the first of them.
    packets: &'e [Packet<'e>],
    /// The TCP flags of the packet are known.
    flags: bool,
    /// Position of the state's own rule, if the ruleset has it.
    own: Option<usize>,
    /// Continuations that are still to be tried.
    branches: Vec<(usize, Walk)>,
    tried: usize,
}

impl Gate {
    /// Returns the rule that would create the state of a first packet now, as far as the packet is known; `None` if no
    /// rule would.
    ///
    /// Limits, the room in the state table and `prob` of the state's own rule do not count: the state was admitted once.
    /// A rule with another flow name counts if no rule creates a state of this name. `pipe` is assumed to pass the
    /// packet, and so are inspectors of `divert` and `tee`.
    ///
    /// ```
    /// use towpath_gate::rules::Ruleset;
    /// use towpath_gate::state::{Ends, Flow, Name, Origin, Settings};
    /// use towpath_gate::{FirstPacket, Gate, Ports};
    ///
    /// let text = "add deny tcp from 10.0.0.7 to any\nadd 200 allow tcp from any to any 22 setup keep-state";
    /// let gate = Gate::new(Ruleset::parse("t", text).ruleset.unwrap(), Ports::new(), Settings::default(), 0x5eed);
    /// let first = |host: u8| FirstPacket {
    ///     flow: Flow {
    ///         ends: Ends::V4([10, 0, 0, host].into(), [192, 0, 2, 1].into()),
    ///         proto: 6,
    ///         src_port: 40_000,
    ///         dst_port: 22,
    ///         zone: 0,
    ///     },
    ///     name: Name::DEFAULT,
    ///     origin: Origin::new(false, None),
    ///     syn: true,
    ///     rule: None,
    /// };
    /// assert_eq!(gate.creating_rule(&first(1)).map(|rule| gate.rule_number(rule)), Some(200));
    /// assert_eq!(gate.creating_rule(&first(7)), None);
    /// ```
    pub fn creating_rule(&self, first: &FirstPacket<'_>) -> Option<RuleId> {
        self.creation(first).map(|creation| self.generation().program.rules[creation.at].id)
    }

    /// As [`Gate::creating_rule`], with the position of the rule.
    pub(super) fn creation(&self, first: &FirstPacket<'_>) -> Option<Creation> {
        let flags = first.flow.proto != proto::TCP || first.is_syn();
        let kinds = if flags { SYN_ONLY } else { ANY_FLAGS };
        let frames: Vec<_> = kinds.iter().map(|flags| first_packet(&first.flow, *flags)).collect();
        let parsed = frames.iter().map(|frame| wire::parse(LinkType::ETHERNET, frame, frame.len() as u32));
        let packets: Vec<Packet<'_>> = parsed.filter_map(Result::ok).collect();
        let program = &self.generation().program;
        let own = first.rule.and_then(|(id, _)| program.position_of(id)).filter(|at| *at <= program.default);
        let dir = if first.origin.outgoing() == Some(true) { Dir::Out } else { Dir::In };
        let recv = match first.origin.port() {
            RecordedPort::Port(port) => Some(PortId(port)),
            RecordedPort::None | RecordedPort::Unrecorded => None,
        };
        let mut walk = Walk::new(dir, recv, None);
        walk.zone = self.first_zone(first);
        let branches = vec![(0, walk)];
        let mut evaluation =
            Evaluation { gate: self, first, packets: &packets, flags, own, branches, tried: 0 };
        let mut result = None;
        while let Some((at, walk)) = evaluation.branches.pop() {
            let found = evaluation.follow(at, walk);
            if found.is_some_and(|found| own == Some(found.at)) {
                return found;
            }
            // The first walk is the one in which no unknown result matches.
            result.get_or_insert(found);
        }
        result.flatten()
    }

    /// The zone of the packet at its first rule: that of the port that received it. The zone of an outgoing packet may be
    /// one that a rule gave it as an incoming packet; a packet of an unknown port has the zone of its state.
    fn first_zone(&self, first: &FirstPacket<'_>) -> u16 {
        let Flow { zone, .. } = first.flow;
        let RecordedPort::Port(port) = first.origin.port() else { return zone };
        let Program { rules, .. } = &*self.generation().program;
        let sets_it = |rule: &CompiledRule| {
            rule.enabled && matches!(rule.action, CompiledAction::SetZone(set) if set == zone)
        };
        if first.origin.outgoing() == Some(true) && rules.iter().any(sets_it) {
            return zone;
        }
        self.ports().zone(PortId(port))
    }
}

impl FirstPacket<'_> {
    /// Returns true if the packet was a SYN: one was seen, and the state's own rule accepts it.
    fn is_syn(&self) -> bool {
        let is_flags = |term: &Term| {
            matches!(term.test, Test::Setup | Test::Established | Test::Field(FieldTest::TcpFlags(_)))
        };
        let holds = |term: &Term| {
            let holds = match &term.test {
                Test::Setup => true,
                Test::Field(FieldTest::TcpFlags(flags)) => flags.match_bits(SYN_ONLY[0]),
                _ => false,
            };
            holds != term.not
        };
        let mut blocks = self.rule.iter().flat_map(|(_, rule)| rule.body.blocks());
        self.syn && blocks.all(|block| !block.iter().all(is_flags) || block.iter().any(holds))
    }
}

impl Evaluation<'_> {
    /// Follows the walk from a position to the rule that creates the state.
    fn follow(&mut self, mut at: usize, mut walk: Walk) -> Option<Creation> {
        let generation = self.gate.generation();
        let program = &generation.program;
        let packet = self.packets.first()?;
        let dirs: &[Dir] = match self.first.origin.outgoing() {
            Some(_) => &[walk.dir],
            None => &[Dir::In, Dir::Out],
        };
        let keys = dirs.iter().flat_map(|dir| self.packets.iter().map(|packet| (*dir, packet)));
        let mut keys: Vec<(PacketKey, &Packet<'_>)> =
            keys.map(|(dir, packet)| (program.index.packet_key(packet, dir), packet)).collect();
        let mut other_name = None;
        // Terminates: the walk is bounded by its jumps.
        loop {
            let next = keys
                .iter_mut()
                .map(|(key, packet)| program.index.next(at, key, packet, LookupCache::Any).position);
            at = next.min()?;
            let rule = program.rules.get(at)?;
            let mut tablearg = None;
            let matched = self.matches(at, rule, &walk, packet, &mut tablearg);
            if matched == Matched::Unknown {
                self.branch(at, rule, walk, packet, tablearg);
            }
            if matched != Matched::Yes {
                if at == program.default {
                    return other_name;
                }
                at = program.next(at);
                continue;
            }
            let creation = Creation { at, timeout: walk.timeout };
            // A state of another zone is another state.
            let in_zone = walk.zone == self.first.flow.zone;
            match rule.install.as_ref().filter(|_| in_zone) {
                Some(install) if install.name == self.first.name => return Some(creation),
                Some(_) => other_name = other_name.or(Some(creation)),
                None => {}
            }
            if rule.defer {
                at = program.next(at);
                continue;
            }
            generation.tag(at, &mut walk, tablearg);
            match generation.act(at, &mut walk, packet, tablearg) {
                Next::Rule(position) => at = position,
                Next::Stop(Step::Tee(_) | Step::Divert(_) | Step::Reassemble) => at = program.next(at),
                Next::Stop(_) => return other_name,
            }
        }
    }

    /// Records the walk that continues as if this rule had matched.
    fn branch(
        &mut self,
        at: usize,
        rule: &CompiledRule,
        mut walk: Walk,
        packet: &Packet<'_>,
        tablearg: Option<Value>,
    ) {
        let leads_on = matches!(
            rule.action,
            CompiledAction::Skipto(_)
                | CompiledAction::Call(_)
                | CompiledAction::Return(_)
                | CompiledAction::SetMark(_)
                | CompiledAction::SetConnmark(_)
                | CompiledAction::SetDscp(_)
                | CompiledAction::SetZone(_)
        );
        // Another rule than the state's own cannot be the result of such a walk.
        if !(leads_on || rule.tag.is_some()) || self.own.is_none() || self.tried == MAX_BRANCHES {
            return;
        }
        let generation = self.gate.generation();
        generation.tag(at, &mut walk, tablearg);
        if let Next::Rule(position) = generation.act(at, &mut walk, packet, tablearg) {
            self.tried += 1;
            self.branches.push((position, walk));
        }
    }

    /// Compares the tests of a rule with the packet.
    fn matches(
        &self,
        at: usize,
        rule: &CompiledRule,
        walk: &Walk,
        packet: &Packet<'_>,
        tablearg: &mut Option<Value>,
    ) -> Matched {
        if !rule.enabled || matches!(rule.action, CompiledAction::CheckState) {
            return Matched::No;
        }
        let program = &self.gate.generation().program;
        let mut unknown = false;
        for block in blocks(program.insns_of(rule)) {
            match self.block(block, rule.number, walk, packet, tablearg) {
                Matched::Yes => {}
                Matched::No => return Matched::No,
                Matched::Unknown => unknown = true,
            }
        }
        if self.own == Some(at) {
            return Matched::Yes;
        }
        if rule.prob != 0 || unknown && !self.known_by_own(at, rule.number, walk, packet) {
            return Matched::Unknown;
        }
        Matched::Yes
    }

    /// Returns true if the state's own rule has each block of this rule whose result is unknown.
    fn known_by_own(&self, at: usize, number: u32, walk: &Walk, packet: &Packet<'_>) -> bool {
        let Some((_, own)) = self.first.rule else { return false };
        let Some((_, rule)) = self.gate.rules.get(at) else { return false };
        let names = self.gate.resolver(self.gate.ports());
        rule.body.blocks().all(|block| {
            own.body.blocks().any(|of_own| of_own == block)
                || blocks(&Program::of_block(block, &names))
                    .all(|insns| self.block(insns, number, walk, packet, &mut None) == Matched::Yes)
        })
    }

    fn block(
        &self,
        insns: &[Insn],
        number: u32,
        walk: &Walk,
        packet: &Packet<'_>,
        tablearg: &mut Option<Value>,
    ) -> Matched {
        let mut result = Matched::No;
        for insn in insns {
            match self.test(&insn.op, number, walk, packet, tablearg) {
                Some(holds) if holds != insn.not => return Matched::Yes,
                Some(_) => {}
                None => result = Matched::Unknown,
            }
        }
        result
    }

    /// Returns the result of one test, or `None` if it is unknown. The packet is an IP packet.
    fn test(
        &self,
        op: &Op,
        number: u32,
        walk: &Walk,
        packet: &Packet<'_>,
        tablearg: &mut Option<Value>,
    ) -> Option<bool> {
        let origin = self.first.origin;
        let (outgoing, port) = (origin.outgoing(), origin.port() != RecordedPort::Unrecorded);
        let known = match op {
            Op::In | Op::Out => outgoing.is_some(),
            Op::Recv(_) | Op::RecvTable(_) => port,
            // An incoming packet has a transmit port only if the kernel has routed it (a port with the kernel's marks). The transmit port
            // is not recorded.
            Op::Xmit(_) | Op::XmitTable(_) => {
                outgoing == Some(false) && !walk.recv.is_some_and(|port| self.gate.ports().has_marks(port))
            }
            Op::Via(_) | Op::ViaTable(_) => outgoing == Some(false) && port,
            // These tests accept every outgoing packet.
            Op::VerRevPath | Op::VerSrcReach | Op::AntiSpoof if outgoing == Some(true) => return Some(true),
            Op::VerRevPath | Op::AntiSpoof => outgoing.is_some() && port,
            Op::VerSrcReach => outgoing.is_some(),
            Op::Established | Op::Setup => self.flags,
            Op::Layer2 | Op::Bpf(_) | Op::Connmark(..) => false,
            // A mark that a rule has set is known.
            Op::Mark(..) | Op::MarkTablearg(_) => {
                walk.mark != 0 || walk.recv.is_some_and(|port| !self.gate.ports().has_marks(port))
            }
            Op::Field(test) => self.knows(test, walk, packet),
            Op::Lookup(lookup) => match lookup.0 {
                LookupKey::SrcMac | LookupKey::DstMac => false,
                LookupKey::Dscp => walk.edits.dscp.is_some(),
                _ => true,
            },
            Op::AnyOf(ops) => {
                let results: Vec<_> =
                    ops.iter().map(|op| self.test(op, number, walk, packet, tablearg)).collect();
                let any = results.contains(&Some(true));
                return if any || !results.contains(&None) { Some(any) } else { None };
            }
            _ => true,
        };
        if !known {
            return None;
        }
        let context = self.gate.generation().context(packet);
        let mut found = None;
        let holds = op.holds(&context, walk, number, &mut found);
        *tablearg = found.copied().or(*tablearg);
        Some(holds)
    }

    /// Returns true if the result of a test of a packet field is known.
    fn knows(&self, test: &FieldTest, walk: &Walk, packet: &Packet<'_>) -> bool {
        match test {
            // The test does not apply to such packets.
            _ if !test.scope().includes(packet) => true,
            FieldTest::IpVersion(_) => true,
            FieldTest::TcpFlags(_) => self.flags,
            FieldTest::Dscp(_) | FieldTest::IpPrecedence(_) => walk.edits.dscp.is_some(),
            _ => false,
        }
    }
}

/// The or-blocks of a rule.
fn blocks(insns: &[Insn]) -> impl Iterator<Item = &[Insn]> {
    insns.chunk_by(|insn, _| insn.or)
}
