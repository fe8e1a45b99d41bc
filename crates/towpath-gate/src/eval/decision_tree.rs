//! Decision tree over addresses, ports and protocol.
//!
//! Each rule is one or more boxes: a range in each of seven dimensions (source and destination address in two
//! 64-bit halves, ports, protocol). A node compares one dimension of the packet with a threshold. A leaf lists the
//! positions of the rules whose boxes overlap its region.
//!
//! Invariant: the list of a leaf is complete. A rule that matches a packet is in the list of the packet's leaf.
//! The list may contain rules that do not match; the walk evaluates each of them.
//!
//! A cut is chosen among the ends of the ranges so that both sides are small and few boxes lie on both sides. A
//! box on both sides is stored twice. The total number of copies is bounded; at the bound, leaves are not cut
//! further, which costs time and not correctness.
//!
//! References: HyperSplit (Qi et al., INFOCOM 2009). Rules are distributed over several trees by the addresses
//! that they restrict, as in EffiCuts (Vamanan et al., SIGCOMM 2010), so that narrow rules do not split a wide
//! rule.

/// Number of dimensions; see [`Key`].
pub(super) const DIMENSIONS: usize = 7;
/// Source address (upper and lower half), destination address (likewise), source port, destination port, protocol.
pub(super) type Key = [u64; DIMENSIONS];
/// A range per dimension, both ends included.
pub(super) type Area = [(u64, u64); DIMENSIONS];

/// Leaves with at most this many rules are not cut.
const LEAF: usize = 8;
/// Number of range ends that are tried per dimension and node.
const SAMPLES: usize = 24;
/// Marks a leaf in [`Node::dimension`].
const IS_LEAF: u32 = u32::MAX;

#[derive(Debug)]
struct Node {
    threshold: u64,
    /// Dimension to compare, or [`IS_LEAF`].
    dimension: u32,
    /// Index of the left child, which the right child follows; or start of the leaf's list.
    first: u32,
}

/// The tree.
#[derive(Debug, Default)]
pub(super) struct DecisionTree {
    nodes: Vec<Node>,
    /// Lists of the leaves: a length, then that many positions in ascending order.
    lists: Vec<u32>,
}

/// A box during construction.
struct Piece {
    area: Area,
    position: u32,
}

impl DecisionTree {
    /// Builds a tree from boxes, each with the position of its rule.
    pub(super) fn new(boxes: Vec<(Area, u32)>) -> Self {
        let mut tree = Self::default();
        if boxes.is_empty() {
            return tree;
        }
        let mut budget = 6 * boxes.len() + 1024;
        let pieces: Vec<Piece> = boxes.into_iter().map(|(area, position)| Piece { area, position }).collect();
        let all: Vec<u32> = (0..pieces.len() as u32).collect();
        tree.nodes.push(Node { threshold: 0, dimension: IS_LEAF, first: 0 });
        let mut open = vec![(0usize, all, [(0, u64::MAX); DIMENSIONS])];
        while let Some((node, members, region)) = open.pop() {
            let cut =
                if members.len() > LEAF && budget > 0 { best_cut(&pieces, &members, &region) } else { None };
            let Some((dimension, threshold)) = cut else {
                tree.leaf(node, &pieces, members);
                continue;
            };
            let low = |m: &&u32| pieces[**m as usize].area[dimension].0 <= threshold;
            let high = |m: &&u32| pieces[**m as usize].area[dimension].1 > threshold;
            let left: Vec<u32> = members.iter().filter(low).copied().collect();
            let right: Vec<u32> = members.iter().filter(high).copied().collect();
            budget = budget.saturating_sub(left.len() + right.len() - members.len());
            let first = tree.nodes.len() as u32;
            tree.nodes[node] = Node { threshold, dimension: dimension as u32, first };
            for _ in 0..2 {
                tree.nodes.push(Node { threshold: 0, dimension: IS_LEAF, first: 0 });
            }
            let (mut below, mut above) = (region, region);
            below[dimension].1 = threshold;
            above[dimension].0 = threshold + 1;
            open.push((first as usize, left, below));
            open.push((first as usize + 1, right, above));
        }
        tree
    }

    fn leaf(&mut self, node: usize, pieces: &[Piece], members: Vec<u32>) {
        let mut positions: Vec<u32> = members.into_iter().map(|m| pieces[m as usize].position).collect();
        positions.sort_unstable();
        positions.dedup();
        self.nodes[node].first = self.lists.len() as u32;
        self.lists.push(positions.len() as u32);
        self.lists.extend(positions);
    }

    /// Returns the bounds of the list for a packet, for [`Self::positions`].
    #[inline]
    pub(super) fn find(&self, key: &Key) -> (u32, u32) {
        let mut at = 0;
        loop {
            let Some(node) = self.nodes.get(at) else { return (0, 0) };
            if node.dimension == IS_LEAF {
                let start = node.first + 1;
                return (start, start + self.lists[node.first as usize]);
            }
            at = node.first as usize + usize::from(key[node.dimension as usize] > node.threshold);
        }
    }

    /// Returns the positions of a list that [`Self::find`] returned.
    #[inline]
    pub(super) fn positions(&self, (start, end): (u32, u32)) -> &[u32] {
        &self.lists[start as usize..end as usize]
    }
}

/// Returns the dimension and threshold that minimise the larger side, or `None` if no cut helps.
fn best_cut(pieces: &[Piece], members: &[u32], region: &Area) -> Option<(usize, u64)> {
    let step = members.len().div_ceil(SAMPLES);
    // Large nodes are estimated from a sample.
    let stride = members.len().div_ceil(1024);
    let mut best: Option<(usize, usize, u64)> = None;
    for (dimension, &(lo, hi)) in region.iter().enumerate() {
        if lo == hi {
            continue;
        }
        let mut ends: Vec<u64> = members
            .iter()
            .step_by(step)
            .flat_map(|m| {
                let (start, end) = pieces[*m as usize].area[dimension];
                [start.wrapping_sub(1), end]
            })
            .filter(|end| (lo..hi).contains(end))
            .collect();
        ends.sort_unstable();
        ends.dedup();
        for threshold in ends {
            let (mut left, mut right, mut counted) = (0, 0, 0);
            for m in members.iter().step_by(stride) {
                let (start, end) = pieces[*m as usize].area[dimension];
                left += usize::from(start <= threshold);
                right += usize::from(end > threshold);
                counted += 1;
            }
            let larger = left.max(right);
            if larger >= counted {
                continue;
            }
            // A box on both sides costs memory and saves no time.
            let score = (2 * larger + (left + right - counted)) * 1024 / counted;
            if best.is_none_or(|(least, ..)| score < least) {
                best = Some((score, dimension, threshold));
            }
        }
    }
    // A cut with little gain is not worth the copies.
    best.filter(|(score, ..)| *score < 2 * 1024 * 31 / 32)
        .map(|(_, dimension, threshold)| (dimension, threshold))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A box that contains a key is in the list of that key.
        #[test]
        fn lists_are_complete(
            seeds in proptest::collection::vec(proptest::array::uniform7((0u64..40, 0u64..40)), 1..200),
            keys in proptest::collection::vec(proptest::array::uniform7(0u64..45), 50),
        ) {
            let areas: Vec<Area> = seeds.iter().map(|dims| dims.map(|(a, b)| (a.min(b), a.max(b)))).collect();
            let boxes = areas.iter().copied().zip(0..).collect();
            let tree = DecisionTree::new(boxes);
            for key in &keys {
                let list = tree.positions(tree.find(key));
                prop_assert!(list.is_sorted());
                for (area, position) in areas.iter().zip(0u32..) {
                    let inside = area.iter().zip(key).all(|((lo, hi), k)| (lo..=hi).contains(&k));
                    prop_assert!(!inside || list.contains(&position));
                }
            }
        }
    }
}
