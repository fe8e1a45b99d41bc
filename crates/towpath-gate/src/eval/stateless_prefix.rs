//! The stateless prefix: the rules before the first one that looks up a state.
//!
//! If no rule of the prefix matches a packet, its walk starts with that lookup, and [`super::burst`] can do the
//! lookup without a walk. A plain packet ([`towpath_wire::plain`]) carries less than a parsed packet: its flow,
//! its contribution to the state, and its receive port. A test that needs anything else may match, so the packet
//! walks.
//!
//! Invariant: evaluating a rule that certainly does not match has no effect. It counts nothing, draws no random
//! number and looks up no state.

use super::generation::Generation;
use super::insn::{ACK, Insn, Op, RST, in_set, is_me};
use super::port::PortId;
use super::program::{CompiledRule, Program};
use crate::rules::option::FieldTest;
use crate::state::{Ends, Flow, Lookup, Segment};
use towpath_wire::proto;

/// With a longer prefix the index of a walk is faster.
const MAX_RULES: usize = 8;

/// EtherTypes of IPv4 (RFC 894) and IPv6 (RFC 2464 section 3).
const ETHERTYPE_IP: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;

/// The rules before the first state lookup.
#[derive(Debug)]
pub(super) struct StatelessPrefix {
    /// The lookup of the first rule that looks up a state.
    pub(super) lookup: Lookup,
    /// Positions of the enabled rules before it.
    rules: Box<[usize]>,
}

/// A plain incoming packet.
pub(super) struct PlainPacket {
    pub(super) flow: Flow,
    pub(super) segment: Segment,
    pub(super) recv: Option<PortId>,
}

impl StatelessPrefix {
    /// Returns the prefix of `rules`, if packets may start with a lookup at all.
    pub(super) fn new<'i>(
        rules: &[CompiledRule],
        insns_of: impl Fn(&CompiledRule) -> &'i [Insn],
    ) -> Option<Self> {
        let first = rules.iter().position(|rule| rule.enabled && rule.lookup.is_some())?;
        let lookup = rules[first].lookup.filter(|_| rules[first].prob == 0)?;
        let ahead = (0..first).filter(|&at| rules[at].enabled && !is_never_for_ip(insns_of(&rules[at])));
        let before: Box<[usize]> = ahead.collect();
        (before.len() <= MAX_RULES).then_some(Self { lookup, rules: before })
    }

    /// Returns true if no rule comes before the lookup.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Returns true if certainly no rule of the prefix matches the packet.
    #[inline(never)]
    pub(super) fn misses(&self, generation: &Generation, plain: &PlainPacket) -> bool {
        let Program { rules, .. } = &*generation.program;
        self.rules.iter().all(|&at| fails(generation.program.insns_of(&rules[at]), generation, plain))
    }
}

/// Returns true if the rule requires an EtherType that no IP packet has, such as a rule that allows ARP.
fn is_never_for_ip(insns: &[Insn]) -> bool {
    let never = |insn: &Insn| {
        let Op::Field(test) = &insn.op else { return false };
        let FieldTest::MacType(types) = &**test else { return false };
        !insn.not && !types.contains(ETHERTYPE_IP) && !types.contains(ETHERTYPE_IPV6)
    };
    let alone = |at: usize| !insns[at].or && (at == 0 || !insns[at - 1].or);
    (0..insns.len()).any(|at| alone(at) && never(&insns[at]))
}

/// Returns true if some block certainly does not match.
fn fails(insns: &[Insn], generation: &Generation, plain: &PlainPacket) -> bool {
    let mut none_holds = true;
    for insn in insns {
        none_holds &= holds(&insn.op, generation, plain) == Some(insn.not);
        if !insn.or {
            if none_holds {
                return true;
            }
            none_holds = true;
        }
    }
    false
}

/// Returns whether the test matches the incoming packet, as [`Op`] would decide; `None` if unknown.
fn holds(
    op: &Op,
    generation: &Generation,
    PlainPacket { flow, segment, recv }: &PlainPacket,
) -> Option<bool> {
    let (src4, dst4, src6, dst6) = match flow.ends {
        Ends::V4(src, dst) => (Some(src.to_bits()), Some(dst.to_bits()), None, None),
        Ends::V6(src, dst, _) => (None, None, Some(src.to_bits()), Some(dst.to_bits())),
    };
    let (src, dst) = flow.ends.addresses();
    let tcp = flow.proto == proto::TCP;
    Some(match op {
        Op::True | Op::In => true,
        // Plain packets are in Ethernet frames.
        Op::Layer2 => true,
        // Plain packets are incoming, and are neither fragments nor SYNs. Only rules set tags and marks.
        Op::Out | Op::Setup | Op::Tagged(_) => false,
        Op::Mark(mark, _) => *mark == 0,
        Op::Ip4 => src4.is_some(),
        Op::Ip6 => src6.is_some(),
        Op::Proto(proto) => flow.proto == *proto,
        Op::Src4(net) => src4.is_some_and(|ip| net.contains(ip)),
        Op::Dst4(net) => dst4.is_some_and(|ip| net.contains(ip)),
        Op::Src6(net) => src6.is_some_and(|ip| net.contains(ip)),
        Op::Dst6(net) => dst6.is_some_and(|ip| net.contains(ip)),
        Op::SrcSet(set) => src4.is_some_and(|ip| set.contains(ip)),
        Op::DstSet(set) => dst4.is_some_and(|ip| set.contains(ip)),
        Op::SrcMe => is_me(&generation.ports, src),
        Op::DstMe => is_me(&generation.ports, dst),
        Op::SrcMe6 => src.is_ipv6() && is_me(&generation.ports, src),
        Op::DstMe6 => dst.is_ipv6() && is_me(&generation.ports, dst),
        Op::SrcPort(lo, hi) => (*lo..=*hi).contains(&flow.src_port),
        Op::DstPort(lo, hi) => (*lo..=*hi).contains(&flow.dst_port),
        Op::SrcPorts(ports) => ports.contains(flow.src_port),
        Op::DstPorts(ports) => ports.contains(flow.dst_port),
        Op::Recv(ports) | Op::Via(ports) => in_set(ports, *recv),
        Op::Xmit(ports) => in_set(ports, None),
        Op::Established => tcp && segment.tcp_flags & (RST | ACK) != 0,
        Op::Field(test) => match &**test {
            FieldTest::MacType(types) => {
                types.contains(if src4.is_some() { ETHERTYPE_IP } else { ETHERTYPE_IPV6 })
            }
            FieldTest::IcmpTypes(_) | FieldTest::Icmp6Types(_) => false,
            FieldTest::IpVersion(version) => *version == if src4.is_some() { 4 } else { 6 },
            FieldTest::TcpFlags(flags) => tcp && flags.match_bits(segment.tcp_flags),
            _ => return None,
        },
        _ => return None,
    })
}
