//! Packet classes: address family, kind of upper layer, direction. Each rule has a bit mask of the classes that it
//! can match. One bit test rules out most rules for a packet.

use super::insn::{ACK, Insn, Op, RST, SYN};
use super::walk::Dir;
use crate::rules::option::Scope;
use towpath_wire::{Addresses, Packet, proto};

/// Number of classes.
pub(crate) const CLASSES: usize = 30;
/// Classes of one direction: not IP, seven kinds of IPv4, seven kinds of IPv6.
const PER_DIR: u32 = 15;
/// Sets the same pattern in both directions.
const BOTH: u32 = 1 | 1 << PER_DIR;
/// All classes.
pub(crate) const ALL: u32 = (1 << CLASSES) - 1;

const NOT_IP: u32 = BOTH;
/// Kinds: TCP (four combinations of setup and established), UDP, ICMP of the family, other.
const TCP: u32 = 0b000_1111;
const SETUP: u32 = 0b000_1010;
const ESTABLISHED: u32 = 0b000_1100;
const UDP: u32 = 0b001_0000;
const ICMP: u32 = 0b010_0000;
const OTHER: u32 = 0b100_0000;
const KINDS: u32 = 0b111_1111;

const fn v4(kinds: u32) -> u32 {
    (kinds << 1) * BOTH
}

const fn v6(kinds: u32) -> u32 {
    (kinds << 8) * BOTH
}

const fn ip(kinds: u32) -> u32 {
    v4(kinds) | v6(kinds)
}

/// All classes of IPv4 packets.
pub(crate) const V4: u32 = v4(KINDS);
/// All classes of IPv6 packets.
pub(crate) const V6: u32 = v6(KINDS);

/// Returns the class of a packet, below [`CLASSES`].
#[inline]
pub(crate) fn of(packet: &Packet<'_>, dir: Dir) -> usize {
    let (family, icmp) = match packet.addresses {
        Addresses::None => (0, 0),
        Addresses::V4(..) => (1, proto::ICMP),
        Addresses::V6(..) => (8, proto::ICMP6),
    };
    let kind = match packet.proto {
        _ if family == 0 => 0,
        proto::TCP => {
            let setup = packet.tcp_flags & (SYN | ACK) == SYN;
            let established = packet.tcp_flags & (RST | ACK) != 0;
            usize::from(setup) | usize::from(established) << 1
        }
        proto::UDP => 4,
        number if number == icmp => 5,
        _ => 6,
    };
    let dir = if dir == Dir::In { 0 } else { PER_DIR as usize };
    dir + family + kind
}

/// Returns the classes that the instructions of a rule can match.
pub(crate) fn accepted(insns: &[Insn]) -> u32 {
    let mut all = ALL;
    let mut block = 0;
    for insn in insns {
        block |= of_insn(insn).0;
        if !insn.or {
            all &= block;
            block = 0;
        }
    }
    all
}

/// Returns the classes for which the class alone decides the block: each instruction matches all or none of the
/// packets of the class, or one instruction matches all of them.
pub(crate) fn decided(block: &[Insn]) -> u32 {
    let (mut open, mut sure) = (0, 0);
    for insn in block {
        let (may, must) = of_insn(insn);
        open |= may & !must;
        sure |= must;
    }
    ALL & !(open & !sure)
}

/// [`classes`] with `not` and the IP requirement applied.
fn of_insn(insn: &Insn) -> (u32, u32) {
    let (may, must) = match (classes(&insn.op), insn.not) {
        (both, false) => both,
        ((may, must), true) => (ALL & !must, ALL & !may),
    };
    if insn.ip { (may & !NOT_IP, must & !NOT_IP) } else { (may, must) }
}

/// Returns the classes that an instruction may match, and the classes of which it matches every packet.
fn classes(op: &Op) -> (u32, u32) {
    let exact = |classes| (classes, classes);
    match op {
        Op::True => exact(ALL),
        Op::Ip4 => exact(V4),
        Op::Ip6 => exact(V6),
        Op::Proto(proto::TCP) => exact(ip(TCP)),
        Op::Proto(proto::UDP) => exact(ip(UDP)),
        Op::Proto(proto::ICMP) => (v4(ICMP) | v6(OTHER), v4(ICMP)),
        Op::Proto(proto::ICMP6) => (v6(ICMP) | v4(OTHER), v6(ICMP)),
        Op::Proto(_) => (ip(OTHER), 0),
        Op::Src4(_) | Op::Dst4(_) | Op::SrcSet(_) | Op::DstSet(_) => (V4, 0),
        Op::Src6(_) | Op::Dst6(_) | Op::SrcMe6 | Op::DstMe6 => (V6, 0),
        Op::SrcPort(..) | Op::DstPort(..) | Op::SrcPorts(_) | Op::DstPorts(_) => (ip(TCP | UDP | OTHER), 0),
        Op::In => exact(ALL & ((1 << PER_DIR) - 1)),
        Op::Out => exact(ALL & !((1 << PER_DIR) - 1)),
        Op::Established => exact(ip(ESTABLISHED)),
        Op::Setup => exact(ip(SETUP)),
        Op::Field(test) => match test.scope() {
            Scope::Any | Scope::Ip => (ALL, 0),
            Scope::Ip4 => (V4, 0),
            Scope::Ip6 => (V6, 0),
            Scope::Tcp => (ip(TCP), 0),
            Scope::Icmp => (v4(ICMP) | v6(OTHER), 0),
            Scope::Icmp6 => (v6(ICMP) | v4(OTHER), 0),
        },
        _ => (ALL, 0),
    }
}
