//! Which rule may matter next: the walk need not try the others.
//!
//! For a packet at a position, the next rule that may do something is the least of
//! - the next *wide* rule that accepts the packet's class: wide rules narrow down neither addresses nor ports;
//! - the next rule in the packet's list of each tree ([`super::decision_tree`]), where the other rules are;
//! - the next rule that looks a state up, as long as a lookup can still tell something new.
//!
//! Of these candidates most are put aside by a look at their [`Prefilter`]: class, IPv4 addresses and ports in 32 bytes,
//! without a jump per instruction.
//!
//! Every rule that the straight walk would run is found, in the same order; the tests compare the two walks.

use super::class::{self, CLASSES};
use super::decision_tree::{Area, DIMENSIONS, DecisionTree, Key};
use super::insn::{Insn, Op};
use super::program::CompiledRule;
use super::walk::{Dir, LookupCache};
use crate::state::Lookup;
use towpath_wire::{Addresses, Packet};

/// With so few rules their classes decide alone.
const FEW: usize = 24;
/// Most boxes of one rule; lists that would give more are taken as one range from their first to their last element.
const MAX_BOXES: usize = 32;
/// Trees per family: both addresses narrow, source only, destination only, ports only.
const TREES: usize = 4;
/// Nothing comes any more.
const NONE: u32 = u32::MAX;

/// The lists of one packet.
#[derive(Clone, Copy, Debug)]
pub(super) struct PacketKey {
    class: usize,
    six: bool,
    filled: bool,
    lists: [(u32, u32); TREES],
    src: u32,
    dst: u32,
    src_port: u16,
    dst_port: u16,
}

/// A rule that may matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) position: usize,
    /// The rule's body holds for sure: its instructions need not be looked at.
    pub(super) holds: bool,
}

/// What [`Index::next`] looks at.
#[derive(Debug, Default)]
pub(super) struct Index {
    /// Per class, for every position: the next wide rule that accepts the class.
    wide: Vec<Vec<u32>>,
    v4: [DecisionTree; TREES],
    v6: [DecisionTree; TREES],
    has_trees: bool,
    quick: Vec<Prefilter>,
    /// For every position: the next rule that looks a state up.
    probe: Vec<u32>,
    /// What it looks up.
    lookups: Vec<Option<Lookup>>,
    /// For a rule that looks a state up: the next one that looks another name up.
    other_probe: Vec<u32>,
}

impl Index {
    pub(super) fn new<'i>(rules: &[CompiledRule], insns_of: impl Fn(&CompiledRule) -> &'i [Insn]) -> Self {
        let mut index = Self::default();
        let mut boxes: [[Vec<(Area, u32)>; TREES]; 2] = Default::default();
        let mut wide = vec![0u32; rules.len()];
        index.quick = rules.iter().map(|rule| Prefilter::new(insns_of(rule))).collect();
        for (position, rule) in rules.iter().enumerate() {
            let only_probe = matches!(rule.act, super::program::CompiledAction::CheckState);
            if !rule.enabled || only_probe {
                continue;
            }
            let insns = insns_of(rule);
            let accepted = class::accepted(insns);
            wide[position] = accepted;
            if rules.len() <= FEW {
                continue;
            }
            for (six, classes) in [(false, class::V4), (true, class::V6)] {
                if accepted & classes == 0 {
                    continue;
                }
                let areas = areas(insns, six);
                if let Some(tree) = tree_of(&areas, six) {
                    wide[position] &= !classes;
                    boxes[usize::from(six)][tree]
                        .extend(areas.into_iter().map(|area| (area, position as u32)));
                }
            }
        }
        let [four, six] = boxes;
        index.has_trees = four.iter().chain(&six).any(|boxes| !boxes.is_empty());
        index.v4 = four.map(DecisionTree::new);
        index.v6 = six.map(DecisionTree::new);
        index.wide =
            (0..CLASSES).map(|class| next_where(&wide, |accepted| accepted >> class & 1 == 1)).collect();
        index.lookups = rules.iter().map(|rule| rule.probe.filter(|_| rule.enabled)).collect();
        index.probe = next_where(&index.lookups, Option::is_some);
        index.other_probe = vec![NONE; rules.len()];
        for position in (0..rules.len()).rev() {
            let following = index.probe[position + 1];
            index.other_probe[position] = match index.lookups.get(following as usize) {
                Some(lookup) if *lookup == index.lookups[position] => index.other_probe[following as usize],
                _ => following,
            };
        }
        index
    }

    /// What is known of a packet before its first rule.
    #[inline]
    pub(super) fn lanes(&self, packet: &Packet<'_>, dir: Dir) -> PacketKey {
        let class = class::of(packet, dir);
        let mut lanes = PacketKey {
            class,
            six: false,
            filled: !self.has_trees,
            lists: [(0, 0); TREES],
            src: 0,
            dst: 0,
            src_port: packet.src_port,
            dst_port: packet.dst_port,
        };
        match packet.addresses {
            Addresses::None => return lanes,
            Addresses::V4(src, dst) => (lanes.src, lanes.dst) = (src.to_bits(), dst.to_bits()),
            Addresses::V6(..) => lanes.six = true,
        }
        lanes
    }

    /// Finds the packet's lists; not before they are needed, for most packets have a state.
    fn fill(&self, packet: &Packet<'_>, lanes: &mut PacketKey) {
        lanes.filled = true;
        let ports = [u64::from(packet.src_port), packet.dst_port.into(), packet.proto.into()];
        let (key, trees): (Key, _) = match packet.addresses {
            Addresses::None => return,
            Addresses::V4(src, dst) => {
                ([0, src.to_bits().into(), 0, dst.to_bits().into(), ports[0], ports[1], ports[2]], &self.v4)
            }
            Addresses::V6(src, dst) => {
                let (src, dst) = (halves(src.to_bits()), halves(dst.to_bits()));
                ([src.0, src.1, dst.0, dst.1, ports[0], ports[1], ports[2]], &self.v6)
            }
        };
        for (list, tree) in lanes.lists.iter_mut().zip(trees) {
            *list = tree.find(&key);
        }
    }

    /// The first rule from `at` on that may matter; the default rule at the latest.
    #[inline]
    pub(super) fn next(
        &self,
        at: usize,
        lanes: &mut PacketKey,
        packet: &Packet<'_>,
        memo: LookupCache,
    ) -> Candidate {
        let mut next = self.next_probe(at, memo);
        let mut holds = false;
        if next as usize == at {
            return Candidate { position: at, holds };
        }
        if !lanes.filled {
            self.fill(packet, lanes);
        }
        let lanes = &*lanes;
        if self.has_trees {
            let trees = if lanes.six { &self.v6 } else { &self.v4 };
            for (tree, list) in trees.iter().zip(lanes.lists) {
                let positions = tree.positions(list);
                let start = positions.partition_point(|p| (*p as usize) < at);
                for position in &positions[start..] {
                    if *position >= next {
                        break;
                    }
                    let quick = &self.quick[*position as usize];
                    if quick.lets(lanes) {
                        (next, holds) = (*position, quick.decides(lanes));
                        break;
                    }
                }
            }
        }
        let wide = &self.wide[lanes.class];
        let mut position = wide[at];
        while position < next {
            let quick = &self.quick[position as usize];
            if quick.lets(lanes) {
                (next, holds) = (position, quick.decides(lanes));
                break;
            }
            position = wide[position as usize + 1];
        }
        Candidate { position: next as usize, holds }
    }

    /// Whether the rule at this position looks a state up, as long as that can tell something new: then it is the next.
    #[inline]
    pub(super) fn probes_at(&self, at: usize, memo: LookupCache) -> bool {
        self.next_probe(at, memo) as usize == at
    }

    #[inline]
    fn next_probe(&self, at: usize, memo: LookupCache) -> u32 {
        let first = self.probe[at];
        match memo {
            LookupCache::Any => NONE,
            LookupCache::Unknown => first,
            LookupCache::Named(last) => match self.lookups.get(first as usize) {
                Some(lookup) if *lookup == Some(Lookup::Named(last)) => self.other_probe[first as usize],
                _ => first,
            },
        }
    }
}

/// What most rules can be put aside by, for IPv4 and IPv6; addresses for IPv4 only.
#[derive(Clone, Copy, Debug)]
struct Prefilter {
    src: u32,
    src_mask: u32,
    dst: u32,
    dst_mask: u32,
    src_ports: (u16, u16),
    dst_ports: (u16, u16),
    /// Classes that the rule can match.
    accepted: u32,
    /// Classes for which this is all that there is to say.
    decided: u32,
}

impl Prefilter {
    fn new(insns: &[Insn]) -> Self {
        let mut quick = Self {
            src: 0,
            src_mask: 0,
            dst: 0,
            dst_mask: 0,
            src_ports: (0, u16::MAX),
            dst_ports: (0, u16::MAX),
            accepted: class::accepted(insns),
            decided: class::ALL,
        };
        let mut start = 0;
        for (at, insn) in insns.iter().enumerate() {
            if !insn.or {
                let decided = quick.narrow(&insns[start..=at]);
                quick.decided &= decided;
                start = at + 1;
            }
        }
        quick
    }

    /// Takes one block in; gives the classes for which nothing of it is left to test.
    fn narrow(&mut self, block: &[Insn]) -> u32 {
        // Without a port a packet has port 0: a range that begins later says it all.
        let ports = |(lo, _): (u16, u16)| if lo > 0 { !0 } else { 0 };
        let whole = (0, u16::MAX);
        match block {
            [Insn { op: Op::Src4(net), not: false, .. }] if self.src_mask == 0 => {
                (self.src, self.src_mask) = (net.addr, net.mask);
                !0
            }
            [Insn { op: Op::Dst4(net), not: false, .. }] if self.dst_mask == 0 => {
                (self.dst, self.dst_mask) = (net.addr, net.mask);
                !0
            }
            [Insn { op: Op::SrcPort(lo, hi), not: false, .. }] if self.src_ports == whole => {
                self.src_ports = (*lo, *hi);
                ports(self.src_ports)
            }
            [Insn { op: Op::DstPort(lo, hi), not: false, .. }] if self.dst_ports == whole => {
                self.dst_ports = (*lo, *hi);
                ports(self.dst_ports)
            }
            _ => class::decided(block),
        }
    }

    /// False when the rule cannot match the packet.
    #[inline]
    fn lets(&self, lanes: &PacketKey) -> bool {
        let class = self.accepted >> lanes.class & 1 == 1;
        let src = lanes.src & self.src_mask == self.src;
        let dst = lanes.dst & self.dst_mask == self.dst;
        let src_port = (lanes.src_port >= self.src_ports.0) & (lanes.src_port <= self.src_ports.1);
        let dst_port = (lanes.dst_port >= self.dst_ports.0) & (lanes.dst_port <= self.dst_ports.1);
        // One jump for all five.
        class & src & dst & src_port & dst_port
    }

    #[inline]
    fn decides(&self, lanes: &PacketKey) -> bool {
        self.decided >> lanes.class & 1 == 1
    }
}

/// For every position (and one behind the last): the next one whose element fits.
fn next_where<T>(elements: &[T], fits: impl Fn(&T) -> bool) -> Vec<u32> {
    let mut next = vec![NONE; elements.len() + 1];
    for position in (0..elements.len()).rev() {
        next[position] = if fits(&elements[position]) { position as u32 } else { next[position + 1] };
    }
    next
}

fn halves(bits: u128) -> (u64, u64) {
    ((bits >> 64) as u64, bits as u64)
}

/// Which tree a rule belongs into; `None` when it narrows nothing down.
fn tree_of(areas: &[Area], six: bool) -> Option<usize> {
    let address = |at: usize| {
        areas.iter().all(|area| {
            let ((hi_lo, hi_hi), (lo_lo, lo_hi)) = (area[at], area[at + 1]);
            // At least half the bits of an IPv4 address, or a quarter of those of an IPv6 address.
            if six { hi_hi - hi_lo < 1 << 32 } else { lo_hi - lo_lo < 1 << 20 }
        })
    };
    let port = |at: usize| areas.iter().all(|area| area[at].1 - area[at].0 < 4096);
    match (address(0), address(2)) {
        (true, true) => Some(0),
        (true, false) => Some(1),
        (false, true) => Some(2),
        (false, false) if port(4) || port(5) => Some(3),
        (false, false) => None,
    }
}

const WHOLE: Area = [(0, u64::MAX); DIMENSIONS];

/// Boxes that hold every packet of one family that the instructions match.
fn areas(insns: &[Insn], six: bool) -> Vec<Area> {
    let mut areas = vec![WHOLE];
    let mut start = 0;
    for (at, insn) in insns.iter().enumerate() {
        if insn.or {
            continue;
        }
        if let Some(block) = block_areas(&insns[start..=at], six) {
            areas = product(&areas, block);
        }
        start = at + 1;
    }
    areas
}

/// The boxes of one block; `None` when it narrows nothing down.
fn block_areas(block: &[Insn], six: bool) -> Option<Vec<Area>> {
    let mut areas = Vec::new();
    for insn in block {
        if insn.not {
            return None;
        }
        areas.extend(op_areas(&insn.op, six)?);
    }
    Some(areas)
}

/// The boxes of one instruction: none at all when it cannot match the family, `None` when it narrows nothing down.
fn op_areas(op: &Op, six: bool) -> Option<Vec<Area>> {
    let one = |dimension: usize, range: (u64, u64)| {
        let mut area = WHOLE;
        area[dimension] = range;
        Some(vec![area])
    };
    let ports = |dimension: usize, ranges: &crate::rules::ports::Ranges| {
        Some(
            ranges
                .0
                .iter()
                .flat_map(|(lo, hi)| one(dimension, ((*lo).into(), (*hi).into())))
                .flatten()
                .collect(),
        )
    };
    match op {
        Op::Src4(net) if !six => one(1, (net.addr.into(), (net.addr | !net.mask).into())),
        Op::Dst4(net) if !six => one(3, (net.addr.into(), (net.addr | !net.mask).into())),
        Op::SrcSet(set) if !six => one(1, (set.base.into(), (set.base | 0xff).into())),
        Op::DstSet(set) if !six => one(3, (set.base.into(), (set.base | 0xff).into())),
        Op::Src6(net) if six => Some(vec![area6(0, net.addr, net.addr | !net.mask)]),
        Op::Dst6(net) if six => Some(vec![area6(2, net.addr, net.addr | !net.mask)]),
        Op::Src4(_) | Op::Dst4(_) | Op::SrcSet(_) | Op::DstSet(_) => Some(Vec::new()),
        Op::Src6(_) | Op::Dst6(_) => Some(Vec::new()),
        Op::SrcPort(lo, hi) => one(4, ((*lo).into(), (*hi).into())),
        Op::DstPort(lo, hi) => one(5, ((*lo).into(), (*hi).into())),
        Op::SrcPorts(ranges) => ports(4, ranges),
        Op::DstPorts(ranges) => ports(5, ranges),
        Op::Proto(number) => one(6, ((*number).into(), (*number).into())),
        _ => None,
    }
}

/// The least box of two addresses; with a gapped mask it holds more than the net.
fn area6(dimension: usize, lo: u128, hi: u128) -> Area {
    let (lo, hi) = (halves(lo), halves(hi));
    let mut area = WHOLE;
    area[dimension] = (lo.0, hi.0);
    area[dimension + 1] = (lo.1, hi.1);
    area
}

/// What lies in a box of each; at most [`MAX_BOXES`], or the hull of the second list stands for it.
fn product(areas: &[Area], mut block: Vec<Area>) -> Vec<Area> {
    if areas.len() * block.len() > MAX_BOXES && block.len() > 1 {
        let hull = |a: Area, b: &Area| std::array::from_fn(|d| (a[d].0.min(b[d].0), a[d].1.max(b[d].1)));
        block = vec![block[1..].iter().fold(block[0], hull)];
    }
    let both =
        |a: &Area, b: &Area| -> Area { std::array::from_fn(|d| (a[d].0.max(b[d].0), a[d].1.min(b[d].1))) };
    let meets = |area: &Area| area.iter().all(|(lo, hi)| lo <= hi);
    areas.iter().flat_map(|a| block.iter().map(|b| both(a, b))).filter(meets).collect()
}
