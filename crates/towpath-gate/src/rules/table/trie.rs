//! A persistent longest-prefix trie: a clone costs one reference, and a change copies the nodes on one path.
//!
//! A node covers four bits of the key. It holds the prefixes that end within these bits, and for each value of the
//! bits a child node, or the only prefix below it (a leaf). Both arrays are dense; bitmaps give the positions. While a
//! clone exists, a change copies at most one node per four bits, each with at most 16 children: the cost does not
//! depend on the number of prefixes. Nodes that no clone shares are changed in place.
//!
//! Invariant: below a child node there are at least two prefixes. A single one is a leaf.
//!
//! The node layout is the tree bitmap of W. Eatherton, G. Varghese and Z. Dittia, "Tree bitmap: hardware/software IP
//! lookups with incremental updates", CCR 34(2), 2004, with leaves in place of the chains below them.

mod difference;

use std::sync::Arc;

pub(super) use self::difference::Difference;

/// Bits of the key per node.
const STRIDE: u8 = 4;
/// Number of children of a node.
const CHILDREN: usize = 1 << STRIDE;

/// A key: a number whose first bits are a prefix.
pub(super) trait Bits: Copy + Eq {
    /// Number of bits.
    const WIDTH: u8;
    /// Returns the `count` bits (at most 4) that start at bit `at`. Bits after the last one are 0.
    fn bits(self, at: u8, count: u8) -> usize;
    /// Returns the number with the low bits of `bits` at bit `at`, which are `count` bits.
    fn with(self, at: u8, count: u8, bits: usize) -> Self;
    /// Returns the number without the bits after the first `len`.
    fn first(self, len: u8) -> Self;
    /// Returns true if both have the same first `len` bits.
    fn agrees(self, other: Self, len: u8) -> bool;
    const ZERO: Self;
}

macro_rules! bits {
    ($($kind:ty),*) => { $(
        impl Bits for $kind {
            const WIDTH: u8 = <$kind>::BITS as u8;
            const ZERO: Self = 0;
            #[inline]
            fn bits(self, at: u8, count: u8) -> usize {
                let ahead = self.checked_shl(at.into()).unwrap_or(0);
                ahead.checked_shr(u32::from(Self::WIDTH - count)).unwrap_or(0) as usize
            }
            #[inline]
            fn with(self, at: u8, count: u8, bits: usize) -> Self {
                let low = u32::from(Self::WIDTH - at - count);
                self | (bits as Self).checked_shl(low).unwrap_or(0)
            }
            fn first(self, len: u8) -> Self {
                self & Self::MAX.checked_shl(u32::from(Self::WIDTH - len)).unwrap_or(0)
            }
            #[inline]
            fn agrees(self, other: Self, len: u8) -> bool {
                (self ^ other).checked_shr(u32::from(Self::WIDTH - len)).unwrap_or(0) == 0
            }
        }
    )* };
}

bits!(u32, u64, u128);

/// A map from prefixes to values. Bits of a prefix after its length are ignored.
#[derive(Clone)]
pub(super) struct PrefixTrie<K, V> {
    root: Arc<Node<K, V>>,
}

#[derive(Clone)]
struct Node<K, V> {
    /// Number of prefixes in this node and below it.
    len: u32,
    /// Prefixes that end in this node. Bit `1 << length | bits`, for lengths 0 to 3 from the node's first bit on.
    ends: u16,
    /// Values of the next four bits with a child.
    below: u16,
    /// In the order of the bits in `ends`.
    values: Vec<V>,
    /// In the order of the bits in `below`.
    children: Vec<Child<K, V>>,
}

#[derive(Clone)]
enum Child<K, V> {
    Node(Arc<Node<K, V>>),
    Leaf(K, u8, V),
}

/// For each value of the next four bits, the prefixes in the node that contain it.
const AROUND: [u16; CHILDREN] = {
    let mut around = [0; CHILDREN];
    let mut bits = 0;
    while bits < CHILDREN {
        let mut end = (CHILDREN | bits) >> 1;
        while end > 0 {
            around[bits] |= 1 << end;
            end >>= 1;
        }
        bits += 1;
    }
    around
};

/// The places of a node in the order of their prefixes, shorter ones first: below 16 the bits of `ends`, from 16 on
/// the children.
const ORDER: [u8; 2 * CHILDREN - 1] = {
    let mut order = [0; 2 * CHILDREN - 1];
    let (mut at, mut place) = (0, 1usize);
    while at < order.len() {
        order[at] = place as u8;
        at += 1;
        if place < CHILDREN {
            place *= 2;
        } else {
            // The next sibling of the nearest place that is a left child.
            while place & 1 == 1 && place > 1 {
                place >>= 1;
            }
            place += 1;
        }
    }
    order
};

/// Returns the position of a bit in a dense array.
#[inline]
fn rank(map: u16, bit: usize) -> usize {
    (map & ((1 << bit) - 1)).count_ones() as usize
}

impl<K: Bits, V: Clone> Default for PrefixTrie<K, V> {
    fn default() -> Self {
        Self { root: Arc::new(Node::default()) }
    }
}

impl<K, V> Default for Node<K, V> {
    fn default() -> Self {
        Self { len: 0, ends: 0, below: 0, values: Vec::new(), children: Vec::new() }
    }
}

impl<K: Bits, V: Clone> PrefixTrie<K, V> {
    /// Number of prefixes.
    pub(super) fn len(&self) -> usize {
        self.root.len as usize
    }

    pub(super) fn is_empty(&self) -> bool {
        self.root.len == 0
    }

    /// Returns true if both are the same trie, not only equal ones.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.root, &other.root)
    }

    /// Returns the value of the longest prefix of at most `len` bits that contains `key`, and its length.
    #[inline]
    pub(super) fn longest(&self, key: K, len: u8) -> Option<(u8, &V)> {
        let mut node = &*self.root;
        let mut depth = 0;
        let mut best = None;
        loop {
            let bits = key.bits(depth, STRIDE);
            let mut around = node.ends & AROUND[bits];
            if len - depth < STRIDE {
                // Only the prefixes that are not longer than `len`.
                around &= ((1u32 << (2u32 << (len - depth))) - 1) as u16;
            }
            if around != 0 {
                let end = around.ilog2();
                best = Some((depth + end.ilog2() as u8, &node.values[rank(node.ends, end as usize)]));
            }
            if node.below >> bits & 1 == 0 || len - depth < STRIDE {
                return best;
            }
            match &node.children[rank(node.below, bits)] {
                Child::Node(below) => node = below,
                Child::Leaf(leaf, length, value) if *length <= len && leaf.agrees(key, *length) => {
                    return Some((*length, value));
                }
                Child::Leaf(..) => return best,
            }
            depth += STRIDE;
        }
    }

    /// Returns the value of the longest prefix that contains an address.
    #[inline]
    pub(super) fn lookup(&self, key: K) -> Option<&V> {
        self.longest(key, K::WIDTH).map(|(_, value)| value)
    }

    /// Returns the value of exactly this prefix.
    pub(super) fn get(&self, key: K, len: u8) -> Option<&V> {
        self.longest(key, len).filter(|(length, _)| *length == len).map(|(_, value)| value)
    }

    /// Adds a prefix or replaces its value, which is returned.
    pub(super) fn insert(&mut self, key: K, len: u8, value: V) -> Option<V> {
        Arc::make_mut(&mut self.root).insert(0, key.first(len), len, value)
    }

    /// Removes a prefix and returns its value.
    pub(super) fn remove(&mut self, key: K, len: u8) -> Option<V> {
        // Without the prefix, no node is copied.
        self.get(key, len)?;
        Arc::make_mut(&mut self.root).remove(0, key.first(len), len)
    }

    /// Iterates over the prefixes from the one at position `from` on, in order: by address, shorter ones first.
    pub(super) fn iter_from(&self, from: usize) -> Iter<'_, K, V> {
        let mut iter = Iter { stack: vec![Frame { node: &self.root, at: 0, base: K::ZERO, depth: 0 }] };
        iter.skip_entries(from);
        iter
    }

    pub(super) fn iter(&self) -> Iter<'_, K, V> {
        self.iter_from(0)
    }
}

impl<K: Bits, V: Clone> Node<K, V> {
    fn insert(&mut self, depth: u8, key: K, len: u8, value: V) -> Option<V> {
        let old = if len - depth < STRIDE {
            let end = 1 << (len - depth) | key.bits(depth, len - depth);
            let at = rank(self.ends, end);
            if self.ends >> end & 1 == 1 {
                Some(std::mem::replace(&mut self.values[at], value))
            } else {
                self.ends |= 1 << end;
                self.values.reserve_exact(1);
                self.values.insert(at, value);
                None
            }
        } else {
            let bits = key.bits(depth, STRIDE);
            let at = rank(self.below, bits);
            if self.below >> bits & 1 == 0 {
                self.below |= 1 << bits;
                self.children.reserve_exact(1);
                self.children.insert(at, Child::Leaf(key, len, value));
                None
            } else {
                self.children[at].insert(depth + STRIDE, key, len, value)
            }
        };
        self.len += u32::from(old.is_none());
        old
    }

    fn remove(&mut self, depth: u8, key: K, len: u8) -> Option<V> {
        let old = if len - depth < STRIDE {
            let end = 1 << (len - depth) | key.bits(depth, len - depth);
            if self.ends >> end & 1 == 0 {
                return None;
            }
            let at = rank(self.ends, end);
            self.ends &= !(1 << end);
            self.values.remove(at)
        } else {
            let bits = key.bits(depth, STRIDE);
            if self.below >> bits & 1 == 0 {
                return None;
            }
            let at = rank(self.below, bits);
            match &mut self.children[at] {
                Child::Leaf(leaf, length, _) if (*leaf, *length) != (key, len) => return None,
                Child::Leaf(_, _, value) => {
                    let value = value.clone();
                    self.children.remove(at);
                    self.below &= !(1 << bits);
                    value
                }
                Child::Node(below) => {
                    let node = Arc::make_mut(below);
                    let old = node.remove(depth + STRIDE, key, len)?;
                    // The path of the removed prefix leads to the node, too.
                    if let Some(leaf) = node.only(depth + STRIDE, key) {
                        self.children[at] = leaf;
                    }
                    old
                }
            }
        };
        self.len -= 1;
        Some(old)
    }

    /// Returns the only prefix, if there is one, as a leaf. `path` leads to this node.
    fn only(&self, depth: u8, path: K) -> Option<Child<K, V>> {
        if self.len != 1 {
            return None;
        }
        match (self.values.first(), self.children.first()) {
            (Some(value), _) => {
                let end = self.ends.ilog2() as usize;
                let len = end.ilog2() as u8;
                let key = path.first(depth).with(depth, len, end & !(1 << len));
                Some(Child::Leaf(key, depth + len, value.clone()))
            }
            (None, child) => child.cloned(),
        }
    }
}

impl<K: Bits, V: Clone> Child<K, V> {
    fn insert(&mut self, depth: u8, key: K, len: u8, value: V) -> Option<V> {
        match self {
            Self::Node(node) => Arc::make_mut(node).insert(depth, key, len, value),
            Self::Leaf(leaf, length, old) if (*leaf, *length) == (key, len) => {
                Some(std::mem::replace(old, value))
            }
            Self::Leaf(leaf, length, old) => {
                let mut node = Node::default();
                node.insert(depth, *leaf, *length, old.clone());
                node.insert(depth, key, len, value);
                *self = Self::Node(Arc::new(node));
                None
            }
        }
    }
}

/// An iterator over prefixes, their lengths and values.
pub(super) struct Iter<'t, K, V> {
    stack: Vec<Frame<'t, K, V>>,
}

struct Frame<'t, K, V> {
    node: &'t Arc<Node<K, V>>,
    /// Position in [`ORDER`].
    at: usize,
    /// The bits that lead to the node.
    base: K,
    depth: u8,
}

/// Content of a place of a node.
enum Place<'t, K, V> {
    Entry(K, u8, &'t V),
    Node(Frame<'t, K, V>),
}

impl<'t, K: Bits, V> Frame<'t, K, V> {
    /// Returns the next place that is not empty, with the number of its prefixes.
    fn next(&mut self) -> Option<(Place<'t, K, V>, usize)> {
        let Self { node, base, depth, .. } = *self;
        while let Some(&place) = ORDER.get(self.at) {
            self.at += 1;
            let place = usize::from(place);
            if place < CHILDREN && node.ends >> place & 1 == 1 {
                let len = place.ilog2() as u8;
                let key = base.with(depth, len, place & !(1 << len));
                let value = &node.values[rank(node.ends, place)];
                return Some((Place::Entry(key, depth + len, value), 1));
            }
            let bits = place.wrapping_sub(CHILDREN);
            if place >= CHILDREN && node.below >> bits & 1 == 1 {
                let found = match &node.children[rank(node.below, bits)] {
                    Child::Leaf(key, len, value) => Place::Entry(*key, *len, value),
                    Child::Node(below) => {
                        let base = base.with(depth, STRIDE, bits);
                        Place::Node(Frame { node: below, at: 0, base, depth: depth + STRIDE })
                    }
                };
                let count = match &found {
                    Place::Entry(..) => 1,
                    Place::Node(frame) => frame.node.len as usize,
                };
                return Some((found, count));
            }
        }
        None
    }
}

impl<K: Bits, V> Iter<'_, K, V> {
    /// Skips `count` prefixes. Nodes that are skipped completely are not visited.
    fn skip_entries(&mut self, mut count: usize) {
        while count > 0
            && let Some(frame) = self.stack.last_mut()
        {
            match frame.next() {
                None => drop(self.stack.pop()),
                Some((_, entries)) if entries <= count => count -= entries,
                Some((Place::Node(frame), _)) => self.stack.push(frame),
                // One entry is at most `count`.
                Some((Place::Entry(..), _)) => {}
            }
        }
    }
}

impl<'t, K: Bits, V> Iterator for Iter<'t, K, V> {
    type Item = (K, u8, &'t V);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.stack.last_mut()?.next() {
                None => drop(self.stack.pop()),
                Some((Place::Node(frame), _)) => self.stack.push(frame),
                Some((Place::Entry(key, len, value), _)) => return Some((key, len, value)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// A plain model: prefixes in order, lookups by trying each length.
    #[derive(Clone, Default)]
    struct Model(BTreeMap<(u32, u8), u16>);

    fn mask(key: u32, len: u8) -> u32 {
        key & u32::MAX.checked_shl(32 - u32::from(len)).unwrap_or(0)
    }

    impl Model {
        fn longest(&self, key: u32, len: u8) -> Option<(u8, &u16)> {
            (0..=len).rev().find_map(|len| Some((len, self.0.get(&(mask(key, len), len))?)))
        }
    }

    #[derive(Clone, Debug)]
    enum Op {
        Insert(u32, u8, u16),
        Remove(u32, u8),
        /// Removes the prefix at this position.
        RemoveOne(usize),
        /// Keeps the trie as it is now, and compares it at the end.
        Snapshot,
    }

    /// Keys close to each other, so that they share nodes.
    fn key() -> impl Strategy<Value = u32> {
        (0u32..64, 0u32..27).prop_map(|(bits, shift)| (bits << shift).rotate_right(5) ^ 0x0a00_0000)
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (key(), 0u8..=32, any::<u16>()).prop_map(|(key, len, value)| Op::Insert(mask(key, len), len, value)),
            1 => (key(), 0u8..=32).prop_map(|(key, len)| Op::Remove(mask(key, len), len)),
            3 => any::<usize>().prop_map(Op::RemoveOne),
            1 => Just(Op::Snapshot),
        ]
    }

    /// Checks the invariants of a node, and returns the number of its prefixes.
    fn check(node: &Node<u32, u16>) -> usize {
        assert_eq!(
            (node.values.len(), node.children.len()),
            (node.ends.count_ones() as usize, node.below.count_ones() as usize)
        );
        let below = node.children.iter().map(|child| match child {
            Child::Leaf(..) => 1,
            Child::Node(node) => {
                assert!(node.len > 1);
                check(node)
            }
        });
        let len = node.values.len() + below.sum::<usize>();
        assert_eq!(node.len as usize, len);
        len
    }

    fn compare(trie: &PrefixTrie<u32, u16>, model: &Model, asked: &[(u32, u8)]) {
        check(&trie.root);
        let all: Vec<_> = trie.iter().map(|(key, len, value)| ((key, len), *value)).collect();
        assert_eq!(all, model.0.iter().map(|(key, value)| (*key, *value)).collect::<Vec<_>>());
        for from in [0, 1, all.len() / 2, all.len(), all.len() + 1] {
            let rest: Vec<_> = trie.iter_from(from).map(|(key, len, value)| ((key, len), *value)).collect();
            assert_eq!(rest, all[from.min(all.len())..]);
        }
        let edges = model.0.keys().flat_map(|(key, len)| {
            let last = key | u32::MAX.checked_shr((*len).into()).unwrap_or(0);
            [(*key, 32), (last, 32), (last.wrapping_add(1), 32), (key.wrapping_sub(1), 32), (*key, *len)]
        });
        for (key, len) in edges.chain(asked.iter().copied()) {
            assert_eq!(trie.longest(key, len), model.longest(key, len), "{key:08x}/{len}");
            let own = mask(key, len);
            assert_eq!(trie.get(own, len), model.0.get(&(own, len)), "{own:08x}/{len}");
        }
    }

    proptest! {
        #[test]
        fn agrees_with_a_model(
            ops in proptest::collection::vec(op(), 0..120),
            asked in proptest::collection::vec((key(), 0u8..=32), 20),
        ) {
            let (mut trie, mut model) = (PrefixTrie::default(), Model::default());
            let mut snapshots = Vec::new();
            for op in ops {
                match op {
                    Op::Insert(key, len, value) => {
                        prop_assert_eq!(trie.insert(key, len, value), model.0.insert((key, len), value));
                    }
                    Op::Remove(key, len) => {
                        prop_assert_eq!(trie.remove(key, len), model.0.remove(&(key, len)));
                    }
                    Op::RemoveOne(at) if !model.0.is_empty() => {
                        let (key, len) = *model.0.keys().nth(at % model.0.len()).unwrap();
                        prop_assert_eq!(trie.remove(key, len), model.0.remove(&(key, len)));
                    }
                    Op::RemoveOne(_) => {}
                    Op::Snapshot => snapshots.push((trie.clone(), model.clone())),
                }
            }
            compare(&trie, &model, &asked);
            for (trie, model) in snapshots {
                compare(&trie, &model, &asked);
            }
        }
    }

    #[test]
    fn keys_of_all_widths_reach_their_last_bit() {
        let mut wide = PrefixTrie::default();
        for key in [0u128, 1, u128::MAX, u128::MAX - 1] {
            assert_eq!(wide.insert(key, 128, key as u8), None);
        }
        assert_eq!(wide.insert(0, 0, 9), None);
        assert_eq!(wide.lookup(u128::MAX - 1), Some(&254));
        assert_eq!(wide.lookup(2), Some(&9));
        assert_eq!(wide.remove(1, 128), Some(1));
        assert_eq!(wide.lookup(1), Some(&9));
        let mut mac = PrefixTrie::default();
        mac.insert(0x0200_0000_0000_0000u64, 24, 'm');
        assert_eq!(mac.lookup(0x0200_0012_3456_0000), Some(&'m'));
    }

    /// While a clone exists, a change copies one path only, whatever the number of prefixes.
    #[test]
    fn a_change_shares_all_nodes_but_those_of_one_path() {
        fn nodes<'t>(node: &'t Arc<Node<u32, u16>>, all: &mut Vec<&'t Arc<Node<u32, u16>>>) {
            all.push(node);
            for child in &node.children {
                if let Child::Node(node) = child {
                    nodes(node, all);
                }
            }
        }
        let mut trie = PrefixTrie::default();
        for n in 0..20_000u32 {
            trie.insert(n.wrapping_mul(0x9e37_79b9), 32, 0);
        }
        let before = trie.clone();
        trie.insert(0x1234_5678, 32, 1);
        trie.remove(0x9e37_79b9, 32);
        let (mut old, mut new) = (Vec::new(), Vec::new());
        nodes(&before.root, &mut old);
        nodes(&trie.root, &mut new);
        let old: std::collections::HashSet<_> = old.into_iter().map(Arc::as_ptr).collect();
        let own = new.iter().filter(|node| !old.contains(&Arc::as_ptr(node))).count();
        assert!((2..=16).contains(&own), "{own} of {}", new.len());
    }
}
