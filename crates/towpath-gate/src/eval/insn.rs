//! Instructions: the tests of a rule in a form that is ready to compare. The word is ipfw's (`ipfw_insn`).

use std::net::IpAddr;
use std::sync::Arc;

use super::port::{PortId, Ports};
use super::routes::Routes;
use super::walk::{Dir, Walk};
use crate::rules::address::{Net4, Net6, Set4};
use crate::rules::option::{FieldTest, LookupKey, LookupMask, Scope, Subject};
use crate::rules::ports::Ranges;
use crate::rules::table::{FlowFields, FlowKey, Kind, Table, Value};
use towpath_wire::{Addresses, Fragment, LinkType, Packet, proto};

/// One instruction. Instructions joined by `or` form a block. A block matches if one of its instructions matches.
#[derive(Debug)]
pub(crate) struct Insn {
    pub(crate) op: Op,
    pub(crate) not: bool,
    /// The next instruction belongs to the same block.
    pub(crate) or: bool,
    /// The block never matches a frame that is not IP.
    pub(crate) ip: bool,
}

/// The comparison.
#[derive(Debug)]
pub(crate) enum Op {
    True,
    Ip4,
    Ip6,
    Proto(u8),
    Src4(Net4),
    Dst4(Net4),
    Src6(Box<Net6>),
    Dst6(Box<Net6>),
    SrcSet(Box<Set4>),
    DstSet(Box<Set4>),
    SrcMe,
    DstMe,
    SrcMe6,
    DstMe6,
    SrcTable(TableCheck),
    DstTable(TableCheck),
    SrcPort(u16, u16),
    DstPort(u16, u16),
    SrcPorts(Box<Ranges>),
    DstPorts(Box<Ranges>),
    In,
    Out,
    /// A bit set of ports.
    Recv(Box<[u64]>),
    Xmit(Box<[u64]>),
    Via(Box<[u64]>),
    RecvTable(TableCheck),
    XmitTable(TableCheck),
    ViaTable(TableCheck),
    Established,
    Setup,
    Layer2,
    /// Fields of the packet: the options in the table of [`FieldTest`].
    Field(Box<FieldTest>),
    Lookup(Box<(LookupKey, Option<LookupMask>, u32)>),
    Flow(TableCheck),
    Tagged(Box<Ranges>),
    TaggedTablearg,
    Mark(u32, u32),
    MarkTablearg(u32),
    Connmark(u32, u32),
    VerRevPath,
    VerSrcReach,
    AntiSpoof,
    Bpf(Box<towpath_bpf::Program>),
    /// One of several: a negated list inside an or-block.
    AnyOf(Box<[Op]>),
}

/// A table, and the value that the entry must have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TableCheck {
    pub(crate) table: u32,
    pub(crate) value: Option<u32>,
}

/// Everything that an instruction may read besides the walk.
pub(crate) struct MatchContext<'g, 'p> {
    pub(crate) packet: &'p Packet<'p>,
    pub(crate) tables: &'g [Arc<Table>],
    pub(crate) ports: &'g Ports,
    pub(crate) routes: &'g Routes,
}

/// Returns true if all blocks match. Sets `tablearg` to the value of the last table entry that matched.
#[inline]
pub(crate) fn all_hold<'g>(
    insns: &[Insn],
    context: &MatchContext<'g, '_>,
    walk: &Walk,
    number: u32,
    tablearg: &mut Option<&'g Value>,
) -> bool {
    first_that_fails(insns, context, walk, number, tablearg).is_none()
}

/// Returns the first instruction of the first block that does not match.
#[inline]
pub(crate) fn first_that_fails<'g>(
    insns: &[Insn],
    context: &MatchContext<'g, '_>,
    walk: &Walk,
    number: u32,
    tablearg: &mut Option<&'g Value>,
) -> Option<usize> {
    let mut block = 0;
    let mut at = 0;
    while let Some(insn) = insns.get(at) {
        let here = !insn.ip || context.packet.addresses != Addresses::None;
        if here && insn.op.holds(context, walk, number, tablearg) != insn.not {
            while insns[at].or {
                at += 1;
            }
            block = at + 1;
        } else if !insn.or {
            return Some(block);
        }
        at += 1;
    }
    None
}

impl Op {
    #[inline]
    pub(super) fn holds<'g>(
        &self,
        context: &MatchContext<'g, '_>,
        walk: &Walk,
        number: u32,
        tablearg: &mut Option<&'g Value>,
    ) -> bool {
        let p = context.packet;
        match self {
            Self::True => true,
            Self::Ip4 => matches!(p.addresses, Addresses::V4(..)),
            Self::Ip6 => matches!(p.addresses, Addresses::V6(..)),
            Self::Proto(proto) => p.proto == *proto && p.addresses != Addresses::None,
            Self::Src4(net) => matches!(p.addresses, Addresses::V4(src, _) if net.contains(src.to_bits())),
            Self::Dst4(net) => matches!(p.addresses, Addresses::V4(_, dst) if net.contains(dst.to_bits())),
            Self::Src6(net) => matches!(p.addresses, Addresses::V6(src, _) if net.contains(src.to_bits())),
            Self::Dst6(net) => matches!(p.addresses, Addresses::V6(_, dst) if net.contains(dst.to_bits())),
            Self::SrcSet(set) => matches!(p.addresses, Addresses::V4(src, _) if set.contains(src.to_bits())),
            Self::DstSet(set) => matches!(p.addresses, Addresses::V4(_, dst) if set.contains(dst.to_bits())),
            Self::SrcPort(lo, hi) => has_ports(p) && (*lo..=*hi).contains(&p.src_port),
            Self::DstPort(lo, hi) => has_ports(p) && (*lo..=*hi).contains(&p.dst_port),
            Self::In => walk.dir == Dir::In,
            Self::Out => walk.dir == Dir::Out,
            Self::Established => p.proto == proto::TCP && p.tcp_flags & (RST | ACK) != 0,
            Self::Setup => p.proto == proto::TCP && p.tcp_flags & (SYN | ACK) == SYN,
            _ => self.holds_rarely(context, walk, number, tablearg),
        }
    }

    /// The less frequent cases of [`Self::holds`], out of line.
    fn holds_rarely<'g>(
        &self,
        context: &MatchContext<'g, '_>,
        walk: &Walk,
        number: u32,
        tablearg: &mut Option<&'g Value>,
    ) -> bool {
        let p = context.packet;
        match self {
            Self::SrcMe => src(p).is_some_and(|ip| is_me(context.ports, ip)),
            Self::DstMe => dst(p).is_some_and(|ip| is_me(context.ports, ip)),
            Self::SrcMe6 => src(p).is_some_and(|ip| ip.is_ipv6() && is_me(context.ports, ip)),
            Self::DstMe6 => dst(p).is_some_and(|ip| ip.is_ipv6() && is_me(context.ports, ip)),
            Self::SrcTable(check) => check.matches(context, tablearg, |t| t.lookup_ip(src(p)?)),
            Self::DstTable(check) => check.matches(context, tablearg, |t| t.lookup_ip(dst(p)?)),
            Self::SrcPorts(ports) => has_ports(p) && ports.contains(p.src_port),
            Self::DstPorts(ports) => has_ports(p) && ports.contains(p.dst_port),
            Self::Recv(ports) => in_set(ports, walk.recv),
            Self::Xmit(ports) => in_set(ports, walk.xmit),
            Self::Via(ports) => in_set(ports, walk.xmit.or(walk.recv)),
            Self::RecvTable(check) => check.names(context, tablearg, walk.recv),
            Self::XmitTable(check) => check.names(context, tablearg, walk.xmit),
            Self::ViaTable(check) => check.names(context, tablearg, walk.xmit.or(walk.recv)),
            Self::Layer2 => p.link == LinkType::ETHERNET,
            Self::Field(test) => test.matches(&Subject { packet: p, dscp: walk.edits.dscp }),
            Self::Lookup(lookup) => {
                let (key, mask, table) = &**lookup;
                let check = TableCheck { table: *table, value: None };
                check.matches(context, tablearg, |t| look_up(t, *key, *mask, p, walk, number))
            }
            Self::Flow(check) => check.matches(context, tablearg, |t| {
                let Kind::Flow(fields) = t.kind() else { return None };
                t.lookup_flow(&flow_key(p, fields)?)
            }),
            Self::Tagged(tags) => walk.tags().iter().any(|tag| tags.contains(*tag)),
            Self::TaggedTablearg => {
                tablearg.is_some_and(|value| walk.tags().iter().any(|tag| u32::from(*tag) == value.tag))
            }
            Self::Mark(mark, mask) => walk.mark & mask == *mark,
            Self::MarkTablearg(mask) => tablearg.is_some_and(|value| walk.mark & mask == value.mark & mask),
            Self::Connmark(value, mask) => walk.connmark.is_some_and(|mark| mark & mask == *value),
            Self::VerRevPath => walk.xmit.is_some() || reverse_path(context, walk, p),
            Self::VerSrcReach => {
                walk.xmit.is_some()
                    || from_link_local(p)
                    || src(p).and_then(|ip| context.routes.lookup(ip)).is_some_and(|(_, len)| len > 0)
            }
            Self::AntiSpoof => {
                let connected = |ip| context.routes.lookup(ip).is_some_and(|(route, _)| route.connected);
                let local = walk.xmit.is_none() && src(p).is_some_and(connected);
                !local || reverse_path(context, walk, p)
            }
            Self::Bpf(program) => bpf(program, p),
            Self::AnyOf(ops) => ops.iter().any(|op| op.holds(context, walk, number, tablearg)),
            // `holds` decides the frequent cases.
            _ => false,
        }
    }

    /// Returns true if the test applies to IP packets only. A frame that is not IP never matches such a test, not
    /// even with `not`.
    pub(crate) fn needs_ip(&self) -> bool {
        !matches!(
            self,
            Self::True
                | Self::In
                | Self::Out
                | Self::Recv(_)
                | Self::Xmit(_)
                | Self::Via(_)
                | Self::RecvTable(_)
                | Self::XmitTable(_)
                | Self::ViaTable(_)
                | Self::Layer2
                | Self::Tagged(_)
                | Self::TaggedTablearg
                | Self::Mark(..)
                | Self::MarkTablearg(_)
                | Self::Connmark(..)
                | Self::Bpf(_)
        ) && !matches!(self, Self::Field(test) if test.scope() == Scope::Any)
            && !matches!(self, Self::Lookup(lookup) if matches!(
                lookup.0,
                LookupKey::DstMac | LookupKey::SrcMac | LookupKey::Mark | LookupKey::RuleNum
            ))
    }
}

pub(crate) const SYN: u8 = 0x02;
pub(crate) const RST: u8 = 0x04;
pub(crate) const ACK: u8 = 0x10;

impl TableCheck {
    fn matches<'g>(
        self,
        context: &MatchContext<'g, '_>,
        tablearg: &mut Option<&'g Value>,
        look: impl FnOnce(&'g Table) -> Option<&'g Value>,
    ) -> bool {
        let table = context.tables.get(self.table as usize);
        let Some(value) = table.and_then(|table| look(table)) else { return false };
        if self.value.is_some_and(|wanted| wanted != value.number) {
            return false;
        }
        *tablearg = Some(value);
        true
    }

    fn names<'g>(
        self,
        context: &MatchContext<'g, '_>,
        tablearg: &mut Option<&'g Value>,
        port: Option<PortId>,
    ) -> bool {
        let Some(name) = port.and_then(|port| context.ports.name(port)) else { return false };
        self.matches(context, tablearg, |table| table.lookup_iface(name))
    }
}

fn src(p: &Packet<'_>) -> Option<IpAddr> {
    match p.addresses {
        Addresses::None => None,
        Addresses::V4(src, _) => Some(src.into()),
        Addresses::V6(src, _) => Some(src.into()),
    }
}

fn dst(p: &Packet<'_>) -> Option<IpAddr> {
    match p.addresses {
        Addresses::None => None,
        Addresses::V4(_, dst) => Some(dst.into()),
        Addresses::V6(_, dst) => Some(dst.into()),
    }
}

pub(super) fn is_me(ports: &Ports, ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ports.is_me4(ip.to_bits()),
        IpAddr::V6(ip) => ports.is_me6(ip.to_bits()),
    }
}

/// The packet contains the upper-layer header.
#[inline]
fn upper(p: &Packet<'_>) -> bool {
    p.fragment != Fragment::Later
}

/// ipfw compares ports of TCP, UDP, UDP-Lite and SCTP; here also of DCCP. Later fragments have no ports.
#[inline]
fn has_ports(p: &Packet<'_>) -> bool {
    upper(p) && matches!(p.proto, proto::TCP | proto::UDP | proto::UDPLITE | proto::SCTP | proto::DCCP)
}

pub(super) fn in_set(ports: &[u64], port: Option<PortId>) -> bool {
    port.is_some_and(|PortId(id)| {
        ports.get(usize::from(id) / 64).is_some_and(|bits| bits >> (id % 64) & 1 == 1)
    })
}

/// The type of service byte, with the code point of an earlier `setdscp`.
fn tos(p: &Packet<'_>, walk: &Walk) -> u8 {
    match walk.edits.dscp {
        Some(dscp) => dscp << 2 | p.tos() & 3,
        None => p.tos(),
    }
}

/// Instruction limit of one run. A classic program only jumps forward, so that a program of maximum size ends
/// within it.
const BPF_FUEL: u64 = 2 * towpath_bpf::MAX_CLASSIC_INSTRUCTIONS as u64;

/// Returns true if the program's result for the frame is not 0.
fn bpf(program: &towpath_bpf::Program, p: &Packet<'_>) -> bool {
    let mut context = towpath_bpf::Context::default();
    let mut fuel = BPF_FUEL;
    program.run(p.frame, &mut context, &mut fuel).is_ok_and(|result| result != 0)
}

/// Returns true if the packet was received on the port through which the route to its source leaves.
fn reverse_path(context: &MatchContext<'_, '_>, walk: &Walk, p: &Packet<'_>) -> bool {
    if from_link_local(p) {
        return true;
    }
    let route = src(p).and_then(|ip| context.routes.lookup(ip));
    route.is_some_and(|(route, _)| Some(route.port) == walk.recv)
}

/// Link-local sources belong to every port and are in no route table; ipfw's reverse path tests accept them.
fn from_link_local(p: &Packet<'_>) -> bool {
    matches!(p.addresses, Addresses::V6(src, _) if src.is_unicast_link_local())
}

fn look_up<'t>(
    table: &'t Table,
    key: LookupKey,
    mask: Option<LookupMask>,
    p: &Packet<'_>,
    walk: &Walk,
    rule: u32,
) -> Option<&'t Value> {
    let masked = |ip: IpAddr| match (ip, mask) {
        (IpAddr::V4(ip), Some(LookupMask::Number(mask))) => IpAddr::V4((ip.to_bits() & mask).into()),
        (IpAddr::V6(ip), Some(LookupMask::V6(mask))) => IpAddr::V6((ip.to_bits() & mask).into()),
        (ip, _) => ip,
    };
    let number = |number: u32| match mask {
        Some(LookupMask::Number(mask)) => number & mask,
        _ => number,
    };
    let mac = |mac: [u8; 6]| match mask {
        Some(LookupMask::Mac(mask)) => std::array::from_fn(|i| mac[i] & mask[i]),
        _ => mac,
    };
    match key {
        LookupKey::SrcIp => table.lookup_ip(masked(src(p)?)),
        LookupKey::DstIp => table.lookup_ip(masked(dst(p)?)),
        LookupKey::SrcPort if has_ports(p) => table.lookup_number(number(p.src_port.into())),
        LookupKey::DstPort if has_ports(p) => table.lookup_number(number(p.dst_port.into())),
        LookupKey::SrcPort | LookupKey::DstPort => None,
        LookupKey::SrcMac => table.lookup_mac(mac(p.macs()?.src)),
        LookupKey::DstMac => table.lookup_mac(mac(p.macs()?.dst)),
        LookupKey::Dscp => table.lookup_number(number((tos(p, walk) >> 2).into())),
        LookupKey::Mark => table.lookup_number(number(walk.mark)),
        LookupKey::RuleNum => table.lookup_number(number(rule)),
    }
}

fn flow_key(p: &Packet<'_>, fields: FlowFields) -> Option<FlowKey> {
    Some(FlowKey {
        src_ip: if fields.src_ip { Some(src(p)?) } else { None },
        proto: if fields.proto { p.proto } else { 0 },
        src_port: if fields.src_port { p.src_port } else { 0 },
        dst_ip: if fields.dst_ip { Some(dst(p)?) } else { None },
        dst_port: if fields.dst_port { p.dst_port } else { 0 },
    })
}
