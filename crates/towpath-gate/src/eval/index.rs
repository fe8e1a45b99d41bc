//! The rule index: finds the next rule that may match a packet.
//!
//! From a position, the next candidate is the first of
//! - the next *wide* rule that accepts the packet's class; a wide rule restricts neither addresses nor ports;
//! - the next rule in the packet's list of each tree ([`super::decision_tree`]), which hold all other rules;
//! - the next rule that looks up a state, while a lookup can still return something new.
//!
//! A [`Prefilter`] rules out most candidates: class, IPv4 addresses and ports in 32 bytes, without a branch per
//! instruction.
//!
//! Invariant: the index finds every rule that the linear walk would run, in the same order. The tests compare both
//! walks.

use super::class::{self, CLASSES};
use super::decision_tree::{Area, DIMENSIONS, DecisionTree, Key};
use super::insn::{Insn, Op};
use super::program::CompiledRule;
use super::walk::{Dir, LookupCache};
use crate::state::Lookup;
use towpath_wire::{Addresses, Packet};

/// Rulesets of at most this size use no trees.
const MAX_LINEAR: usize = 24;
/// Maximum number of boxes of one rule. Lists that would need more are covered by one range from their first to
/// their last element.
const MAX_BOXES: usize = 32;
/// Trees per family: rules that restrict both addresses, only the source, only the destination, only ports.
const TREES: usize = 4;
/// No further rule.
const NONE: u32 = u32::MAX;

/// The fields of one packet that the index compares, and its lists.
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

/// A rule that may match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) position: usize,
    /// The body of the rule matches for certain: its instructions need no evaluation.
    pub(super) certain: bool,
}

/// The index.
#[derive(Debug, Default)]
pub(super) struct Index {
    /// Per class and position: the next wide rule that accepts the class.
    wide: Vec<Vec<u32>>,
    v4: [DecisionTree; TREES],
    v6: [DecisionTree; TREES],
    has_trees: bool,
    prefilter: Vec<Prefilter>,
    /// Per position: the next rule that looks up a state.
    lookup: Vec<u32>,
    /// The state that each rule looks up.
    lookups: Vec<Option<Lookup>>,
    /// For each rule that looks up a state: the next rule that looks up another name.
    other_lookup: Vec<u32>,
}

impl Index {
    pub(super) fn new<'i>(rules: &[CompiledRule], insns_of: impl Fn(&CompiledRule) -> &'i [Insn]) -> Self {
        let mut index = Self::default();
        let mut boxes: [[Vec<(Area, u32)>; TREES]; 2] = Default::default();
        let mut wide = vec![0u32; rules.len()];
        index.prefilter = rules.iter().map(|rule| Prefilter::new(insns_of(rule))).collect();
        for (position, rule) in rules.iter().enumerate() {
            let only_probe = matches!(rule.action, super::program::CompiledAction::CheckState);
            if !rule.enabled || only_probe {
                continue;
            }
            let insns = insns_of(rule);
            let accepted = class::accepted(insns);
            wide[position] = accepted;
            if rules.len() <= MAX_LINEAR {
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
        index.lookups = rules.iter().map(|rule| rule.lookup.filter(|_| rule.enabled)).collect();
        index.lookup = next_where(&index.lookups, Option::is_some);
        index.other_lookup = vec![NONE; rules.len()];
        for position in (0..rules.len()).rev() {
            let following = index.lookup[position + 1];
            index.other_lookup[position] = match index.lookups.get(following as usize) {
                Some(lookup) if *lookup == index.lookups[position] => index.other_lookup[following as usize],
                _ => following,
            };
        }
        index
    }

    /// Returns the key of a packet. Its lists are still missing.
    #[inline]
    pub(super) fn packet_key(&self, packet: &Packet<'_>, dir: Dir) -> PacketKey {
        let class = class::of(packet, dir);
        let mut key = PacketKey {
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
            Addresses::None => return key,
            Addresses::V4(src, dst) => (key.src, key.dst) = (src.to_bits(), dst.to_bits()),
            Addresses::V6(..) => key.six = true,
        }
        key
    }

    /// Finds the lists of the packet. Deferred until needed, because most packets have a state.
    fn fill(&self, packet: &Packet<'_>, key: &mut PacketKey) {
        key.filled = true;
        let ports = [u64::from(packet.src_port), packet.dst_port.into(), packet.proto.into()];
        let (point, trees): (Key, _) = match packet.addresses {
            Addresses::None => return,
            Addresses::V4(src, dst) => {
                ([0, src.to_bits().into(), 0, dst.to_bits().into(), ports[0], ports[1], ports[2]], &self.v4)
            }
            Addresses::V6(src, dst) => {
                let (src, dst) = (halves(src.to_bits()), halves(dst.to_bits()));
                ([src.0, src.1, dst.0, dst.1, ports[0], ports[1], ports[2]], &self.v6)
            }
        };
        for (list, tree) in key.lists.iter_mut().zip(trees) {
            *list = tree.find(&point);
        }
    }

    /// Returns the first rule at or after `at` that may match; the default rule at the latest.
    #[inline]
    pub(super) fn next(
        &self,
        at: usize,
        key: &mut PacketKey,
        packet: &Packet<'_>,
        cache: LookupCache,
    ) -> Candidate {
        let mut next = self.next_lookup(at, cache);
        let mut certain = false;
        if next as usize == at {
            return Candidate { position: at, certain };
        }
        if !key.filled {
            self.fill(packet, key);
        }
        let key = &*key;
        if self.has_trees {
            let trees = if key.six { &self.v6 } else { &self.v4 };
            for (tree, list) in trees.iter().zip(key.lists) {
                let positions = tree.positions(list);
                let start = positions.partition_point(|p| (*p as usize) < at);
                for position in &positions[start..] {
                    if *position >= next {
                        break;
                    }
                    let prefilter = &self.prefilter[*position as usize];
                    if prefilter.may_match(key) {
                        (next, certain) = (*position, prefilter.is_decisive(key));
                        break;
                    }
                }
            }
        }
        let wide = &self.wide[key.class];
        let mut position = wide[at];
        while position < next {
            let prefilter = &self.prefilter[position as usize];
            if prefilter.may_match(key) {
                (next, certain) = (position, prefilter.is_decisive(key));
                break;
            }
            position = wide[position as usize + 1];
        }
        Candidate { position: next as usize, certain }
    }

    /// Returns true if the rule at this position looks up a state and the lookup can return something new.
    #[inline]
    pub(super) fn looks_up_at(&self, at: usize, cache: LookupCache) -> bool {
        self.next_lookup(at, cache) as usize == at
    }

    #[inline]
    fn next_lookup(&self, at: usize, cache: LookupCache) -> u32 {
        let first = self.lookup[at];
        match cache {
            LookupCache::Any => NONE,
            LookupCache::Empty => first,
            LookupCache::Named(last) => match self.lookups.get(first as usize) {
                Some(lookup) if *lookup == Some(Lookup::Named(last)) => self.other_lookup[first as usize],
                _ => first,
            },
        }
    }
}

/// A quick test that rules out most rules. The addresses are those of IPv4.
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
    /// Classes for which the prefilter is exact.
    decided: u32,
}

impl Prefilter {
    fn new(insns: &[Insn]) -> Self {
        let mut prefilter = Self {
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
                let decided = prefilter.narrow(&insns[start..=at]);
                prefilter.decided &= decided;
                start = at + 1;
            }
        }
        prefilter
    }

    /// Adds one block. Returns the classes for which no test of the block remains.
    fn narrow(&mut self, block: &[Insn]) -> u32 {
        // A packet without ports has port 0: a range that starts above 0 is exact.
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

    /// Returns false if the rule cannot match the packet.
    #[inline]
    fn may_match(&self, key: &PacketKey) -> bool {
        let class = self.accepted >> key.class & 1 == 1;
        let src = key.src & self.src_mask == self.src;
        let dst = key.dst & self.dst_mask == self.dst;
        let src_port = (key.src_port >= self.src_ports.0) & (key.src_port <= self.src_ports.1);
        let dst_port = (key.dst_port >= self.dst_ports.0) & (key.dst_port <= self.dst_ports.1);
        // One branch for all five conditions.
        class & src & dst & src_port & dst_port
    }

    #[inline]
    fn is_decisive(&self, key: &PacketKey) -> bool {
        self.decided >> key.class & 1 == 1
    }
}

/// Returns, for each position and one past the last, the next position whose element satisfies `fits`.
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

/// Returns the tree for a rule; `None` if the rule is wide.
fn tree_of(areas: &[Area], six: bool) -> Option<usize> {
    let address = |at: usize| {
        areas.iter().all(|area| {
            let ((hi_lo, hi_hi), (lo_lo, lo_hi)) = (area[at], area[at + 1]);
            // A prefix of at least 12 bits of an IPv4 address, or 32 bits of an IPv6 address.
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

/// Returns boxes that contain every packet of one family that the instructions match.
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

/// Returns the boxes of one block; `None` if the block restricts nothing.
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

/// Returns the boxes of one instruction: an empty list if it cannot match the family, `None` if it restricts
/// nothing.
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

/// The smallest box around two addresses. With a non-contiguous mask it contains more than the net.
fn area6(dimension: usize, lo: u128, hi: u128) -> Area {
    let (lo, hi) = (halves(lo), halves(hi));
    let mut area = WHOLE;
    area[dimension] = (lo.0, hi.0);
    area[dimension + 1] = (lo.1, hi.1);
    area
}

/// Returns the intersections of two lists of boxes, at most [`MAX_BOXES`]. Beyond that the hull of the second list
/// replaces it.
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
