//! The rules before the first that looks a state up, and which plain packets none of them is about.
//!
//! What: where every rule before a check-state (or keep-state) says nothing about a packet, its walk begins with that lookup,
//! and [`super::burst`] may do it without a walk. What is known of a plain packet ([`towpath_wire::plain`]) is less than a
//! packet: its flow, what it contributes to its state, and the port that it came in by. A test that asks for anything else is
//! taken for one that may hold, and then the packet walks.
//!
//! Invariant: a rule that certainly says nothing about a packet changes nothing when it is tried: it counts nothing, draws
//! no random number, and looks no state up.

use std::net::IpAddr;

use super::generation::Generation;
use super::insn::{ACK, Insn, Op, RST, in_set, is_me};
use super::port::PortId;
use super::program::{CompiledRule, Program};
use crate::state::{Ends, Flow, Lookup, Segment};
use towpath_wire::proto;

/// With more rules before it than that, the index of a walk finds out sooner.
const MOST: usize = 8;

/// EtherTypes of IPv4 (RFC 894) and IPv6 (RFC 2464, 3).
const ETHERTYPE_IP: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;

/// See the module's text.
#[derive(Debug)]
pub(super) struct StatelessPrefix {
    /// What the first rule that looks a state up looks for.
    pub(super) lookup: Lookup,
    /// Positions of the rules before it that are enabled.
    before: Box<[usize]>,
}

/// A plain packet that has come in.
pub(super) struct PlainPacket {
    pub(super) flow: Flow,
    pub(super) segment: Segment,
    pub(super) recv: Option<PortId>,
}

impl StatelessPrefix {
    /// Of `rules`, if packets may begin with a lookup at all.
    pub(super) fn new<'i>(
        rules: &[CompiledRule],
        insns_of: impl Fn(&CompiledRule) -> &'i [Insn],
    ) -> Option<Self> {
        let first = rules.iter().position(|rule| rule.enabled && rule.probe.is_some())?;
        let lookup = rules[first].probe.filter(|_| rules[first].prob == 0)?;
        let ahead = (0..first).filter(|&at| rules[at].enabled && !is_never_for_ip(insns_of(&rules[at])));
        let before: Box<[usize]> = ahead.collect();
        (before.len() <= MOST).then_some(Self { lookup, before })
    }

    /// Whether none of the rules before it is about any packet.
    #[inline]
    pub(super) fn is_first(&self) -> bool {
        self.before.is_empty()
    }

    /// Whether none of the rules before it is about this packet, for sure.
    #[inline(never)]
    pub(super) fn is_for(&self, live: &Generation, plain: &PlainPacket) -> bool {
        let Program { rules, .. } = &*live.program;
        self.before.iter().all(|&at| fails(live.program.insns_of(&rules[at]), live, plain))
    }
}

/// Whether the rule asks for an Ethernet type that no IP packet has, as the one does that lets ARP through.
fn is_never_for_ip(insns: &[Insn]) -> bool {
    let never = |insn: &Insn| {
        let Op::MacType(types) = &insn.op else { return false };
        !insn.not && !types.contains(ETHERTYPE_IP) && !types.contains(ETHERTYPE_IPV6)
    };
    let alone = |at: usize| !insns[at].or && (at == 0 || !insns[at - 1].or);
    (0..insns.len()).any(|at| alone(at) && never(&insns[at]))
}

/// Whether some block does not hold, for sure.
fn fails(insns: &[Insn], live: &Generation, plain: &PlainPacket) -> bool {
    let mut none_holds = true;
    for insn in insns {
        none_holds &= holds(&insn.op, live, plain) == Some(insn.not);
        if !insn.or {
            if none_holds {
                return true;
            }
            none_holds = true;
        }
    }
    false
}

/// Whether the test holds, as [`Op`] says it of the packet on its way in; `None` when that is not known.
fn holds(op: &Op, live: &Generation, PlainPacket { flow, segment, recv }: &PlainPacket) -> Option<bool> {
    let (src4, dst4, src6, dst6) = match flow.ends {
        Ends::V4(src, dst) => (Some(src.to_bits()), Some(dst.to_bits()), None, None),
        Ends::V6(src, dst, _) => (None, None, Some(src.to_bits()), Some(dst.to_bits())),
    };
    let (src, dst): (IpAddr, IpAddr) = match flow.ends {
        Ends::V4(src, dst) => (src.into(), dst.into()),
        Ends::V6(src, dst, _) => (src.into(), dst.into()),
    };
    let tcp = flow.proto == proto::TCP;
    Some(match op {
        Op::True | Op::In => true,
        // PlainPacket packets are in Ethernet frames.
        Op::Layer2 => true,
        Op::MacType(types) => types.contains(if src4.is_some() { ETHERTYPE_IP } else { ETHERTYPE_IPV6 }),
        // They have come in, and are neither fragments nor SYNs; tags and marks are of rules.
        Op::Out | Op::Setup | Op::Tagged(_) | Op::IcmpTypes(_) | Op::Icmp6Types(_) => false,
        Op::Mark(mark, _) => *mark == 0,
        Op::Ip4 => src4.is_some(),
        Op::Ip6 => src6.is_some(),
        Op::IpVersion(version) => *version == if src4.is_some() { 4 } else { 6 },
        Op::Proto(proto) => flow.proto == *proto,
        Op::Src4(net) => src4.is_some_and(|ip| net.contains(ip)),
        Op::Dst4(net) => dst4.is_some_and(|ip| net.contains(ip)),
        Op::Src6(net) => src6.is_some_and(|ip| net.contains(ip)),
        Op::Dst6(net) => dst6.is_some_and(|ip| net.contains(ip)),
        Op::SrcSet(set) => src4.is_some_and(|ip| set.contains(ip)),
        Op::DstSet(set) => dst4.is_some_and(|ip| set.contains(ip)),
        Op::SrcMe => is_me(&live.ports, src),
        Op::DstMe => is_me(&live.ports, dst),
        Op::SrcMe6 => src.is_ipv6() && is_me(&live.ports, src),
        Op::DstMe6 => dst.is_ipv6() && is_me(&live.ports, dst),
        Op::SrcPort(lo, hi) => (*lo..=*hi).contains(&flow.src_port),
        Op::DstPort(lo, hi) => (*lo..=*hi).contains(&flow.dst_port),
        Op::SrcPorts(ports) => ports.contains(flow.src_port),
        Op::DstPorts(ports) => ports.contains(flow.dst_port),
        Op::Recv(ports) | Op::Via(ports) => in_set(ports, *recv),
        Op::Xmit(ports) => in_set(ports, None),
        Op::Established => tcp && segment.tcp_flags & (RST | ACK) != 0,
        Op::TcpFlags(flags) => tcp && flags.holds(segment.tcp_flags),
        _ => return None,
    })
}
