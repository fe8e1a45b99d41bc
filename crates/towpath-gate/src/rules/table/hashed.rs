//! A persistent hash table: the hashes of the keys in a [`PrefixTrie`].
//!
//! A key whose hash is taken has the next free number, as in linear probing. A lookup stops at the first free one.
//! The hash is secret ([`RandomState`]), so that the authors of keys cannot make many of them share a hash.

use std::borrow::Borrow;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hash};

use super::trie::PrefixTrie;

/// Bits of a hash.
const LEN: u8 = 64;

/// A map from keys to values. A clone costs a reference, and a change copies the nodes on one path.
#[derive(Clone)]
pub(super) struct Hashed<K, V, S = RandomState> {
    entries: PrefixTrie<u64, (K, V)>,
    hasher: S,
}

impl<K: Clone + Eq + Hash, V: Clone, S: BuildHasher + Default> Default for Hashed<K, V, S> {
    fn default() -> Self {
        Self { entries: PrefixTrie::default(), hasher: S::default() }
    }
}

impl<K: Clone + Eq + Hash, V: Clone, S: BuildHasher> Hashed<K, V, S> {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if both are the same table, not only equal ones.
    pub(super) fn is(&self, other: &Self) -> bool {
        self.entries.is(&other.entries)
    }

    /// Returns the place of a key, or the place where it would be.
    fn place<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> (u64, Option<&V>)
    where
        K: Borrow<Q>,
    {
        let mut at = self.hasher.hash_one(key);
        loop {
            match self.entries.lookup(at) {
                None => return (at, None),
                Some((other, value)) if key == other.borrow() => return (at, Some(value)),
                Some(_) => at = at.wrapping_add(1),
            }
        }
    }

    #[inline]
    pub(super) fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.place(key).1
    }

    /// Adds a key or replaces its value.
    pub(super) fn insert(&mut self, key: K, value: V) {
        let at = self.place(&key).0;
        self.entries.insert(at, LEN, (key, value));
    }

    /// Removes a key and returns its value.
    pub(super) fn remove(&mut self, key: &K) -> Option<V> {
        let at = self.place(key).0;
        let (_, value) = self.entries.remove(at, LEN)?;
        // Inserts the keys of the following occupied numbers again, so that displaced keys move closer to their hashes.
        let mut next = at.wrapping_add(1);
        while let Some((key, value)) = self.entries.remove(next, LEN) {
            self.insert(key, value);
            next = next.wrapping_add(1);
        }
        Some(value)
    }

    /// Iterates over the entries in no particular order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.entries.iter().map(|(_, _, (key, value))| (key, value))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::hash::{BuildHasherDefault, Hasher};

    use proptest::prelude::*;

    use super::*;

    /// Many keys share a hash, and hashes are close to each other, also across the largest one.
    #[derive(Clone, Default)]
    struct Weak(u64);

    impl Hasher for Weak {
        fn finish(&self) -> u64 {
            self.0.wrapping_sub(3)
        }

        fn write(&mut self, bytes: &[u8]) {
            self.0 = u64::from(bytes[0] % 5);
        }
    }

    proptest! {
        #[test]
        fn agrees_with_a_model(
            ops in proptest::collection::vec((0u8..40, any::<Option<u16>>(), 0u8..10), 0..150),
        ) {
            let mut table = Hashed::<u8, u16, BuildHasherDefault<Weak>>::default();
            let mut model = HashMap::new();
            let mut snapshots = Vec::new();
            for (key, value, keep) in ops {
                match value {
                    Some(value) => {
                        table.insert(key, value);
                        model.insert(key, value);
                    }
                    None => prop_assert_eq!(table.remove(&key), model.remove(&key)),
                }
                if keep == 0 {
                    snapshots.push((table.clone(), model.clone()));
                }
            }
            snapshots.push((table, model));
            for (table, model) in snapshots {
                prop_assert_eq!(table.len(), model.len());
                prop_assert_eq!(&table.iter().map(|(key, value)| (*key, *value)).collect::<HashMap<_, _>>(), &model);
                for key in 0u8..40 {
                    prop_assert_eq!(table.get(&key), model.get(&key));
                }
            }
        }
    }
}
