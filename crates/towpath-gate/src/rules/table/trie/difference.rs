//! The prefixes of a trie that another trie does not have, in steps.

use std::sync::Arc;

use super::{Bits, Child, Frame, Node, Place, PrefixTrie, STRIDE, rank};

/// The prefixes of a trie that another trie does not have. Values are not compared.
///
/// Each item is one step, which looks at one place of a node; most steps find no prefix. Nodes that both tries share are not entered. A
/// change of a clone copies the nodes of one path, so the number of steps is proportional to the number of changed prefixes.
pub(in super::super) struct Difference<K, V> {
    other: PrefixTrie<K, V>,
    stack: Vec<Level<K, V>>,
}

struct Level<K, V> {
    node: Arc<Node<K, V>>,
    /// The node of the other trie at the same bits.
    beside: Option<Arc<Node<K, V>>>,
    /// As in [`Frame`].
    at: usize,
    base: K,
    depth: u8,
}

impl<K: Bits, V> Difference<K, V> {
    pub(in super::super) fn new(own: &PrefixTrie<K, V>, other: &PrefixTrie<K, V>) -> Self {
        let mut difference = Self { other: PrefixTrie { root: Arc::clone(&other.root) }, stack: Vec::new() };
        difference.enter(&own.root, Some(&other.root), (K::ZERO, 0));
        difference
    }

    fn enter(&mut self, node: &Arc<Node<K, V>>, beside: Option<&Arc<Node<K, V>>>, (base, depth): (K, u8)) {
        if !beside.is_some_and(|beside| Arc::ptr_eq(node, beside)) {
            let (node, beside) = (Arc::clone(node), beside.cloned());
            self.stack.push(Level { node, beside, at: 0, base, depth });
        }
    }
}

impl<K: Bits, V: Clone> Iterator for Difference<K, V> {
    type Item = Option<(K, u8)>;

    fn next(&mut self) -> Option<Self::Item> {
        let Self { other, stack } = self;
        let Level { node, beside, at, base, depth } = stack.last_mut()?;
        let mut frame = Frame { node, at: *at, base: *base, depth: *depth };
        let found = frame.next();
        *at = frame.at;
        match found {
            None => drop(stack.pop()),
            Some((Place::Entry(key, len, _), _)) => {
                return Some(other.get(key, len).is_none().then_some((key, len)));
            }
            Some((Place::Node(below), _)) => {
                let bits = below.base.bits(*depth, STRIDE);
                let beside = beside.as_ref().and_then(|node| node.below(bits)).cloned();
                let (node, at) = (Arc::clone(below.node), (below.base, below.depth));
                self.enter(&node, beside.as_ref(), at);
            }
        }
        Some(None)
    }
}

impl<K, V> Node<K, V> {
    /// The child node for these bits.
    fn below(&self, bits: usize) -> Option<&Arc<Self>> {
        if self.below >> bits & 1 == 0 {
            return None;
        }
        match &self.children[rank(self.below, bits)] {
            Child::Node(node) => Some(node),
            Child::Leaf(..) => None,
        }
    }
}
