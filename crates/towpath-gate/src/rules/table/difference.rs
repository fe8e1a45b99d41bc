//! What a table has and another one has not, in steps.

use std::fmt;
use std::sync::Arc;

use super::key::Key;
use super::value::Value;
use super::{Entries, Table, trie};

/// The addresses and networks of a table that another table does not have: see [`Table::difference`].
///
/// Each item is one step of bounded cost; a step has a key, or none. It keeps both tables as they were, and depends on no lock.
pub struct Difference {
    v4: trie::Difference<u32, Arc<Value>>,
    v6: trie::Difference<u128, Arc<Value>>,
}

impl fmt::Debug for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Difference").finish_non_exhaustive()
    }
}

impl Table {
    /// The addresses and networks of this table that `other` does not have. Values are not compared. Tables of another type have none.
    ///
    /// If one of the tables is a clone of the other one with changes, the number of steps is proportional to the number of changes,
    /// whatever the number of entries. Otherwise each entry of this table is a step.
    ///
    /// ```
    /// use towpath_gate::rules::table::{Key, Table, Value};
    ///
    /// let mut table = Table::default();
    /// (0..100).for_each(|host| table.add(&Key::Net4(host, 32), Value::legacy(0)).unwrap());
    /// let before = table.clone();
    /// table.add(&Key::Net4(7 << 24, 8), Value::legacy(0)).unwrap();
    /// assert!(table.difference(&before).flatten().eq([Key::Net4(7 << 24, 8)]));
    /// assert_eq!(before.difference(&table).flatten().count(), 0);
    /// ```
    pub fn difference(&self, other: &Self) -> Difference {
        let prefixes = |table: &Self| match &table.entries {
            Entries::Addr(all) => (all.v4.clone(), all.v6.clone()),
            _ => Default::default(),
        };
        let ((own4, own6), (other4, other6)) = (prefixes(self), prefixes(other));
        Difference { v4: trie::Difference::new(&own4, &other4), v6: trie::Difference::new(&own6, &other6) }
    }
}

impl Iterator for Difference {
    type Item = Option<Key>;

    fn next(&mut self) -> Option<Self::Item> {
        let four = self.v4.next().map(|step| step.map(|(addr, len)| Key::Net4(addr, len)));
        four.or_else(|| self.v6.next().map(|step| step.map(|(addr, len)| Key::Net6(addr, len))))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Few keys, so that changes meet.
    fn key(n: u16) -> Key {
        let len = [0, 8, 15, 24, 31, 32][usize::from(n) % 6];
        let four =
            (u32::from(n % 64).rotate_right(9) ^ 0x0a00_0000) & u32::MAX.checked_shl(32 - len).unwrap_or(0);
        if n.is_multiple_of(2) {
            Key::Net4(four, len as u8)
        } else {
            Key::Net6(u128::from(four) << 64, len as u8 + 32)
        }
    }

    fn keys(table: &Table) -> BTreeSet<String> {
        table.list().iter().map(|(key, _)| key.to_string()).collect()
    }

    proptest! {
        /// Of a clone with changes, and of a table that was built on its own.
        #[test]
        fn the_difference_is_that_of_the_lists(
            first in proptest::collection::vec(any::<u16>(), 0..80),
            changes in proptest::collection::vec((any::<u16>(), any::<bool>()), 0..40),
        ) {
            let mut table = Table::default();
            for n in first {
                let _ = table.replace(&key(n), Value::legacy(1));
            }
            let before = table.clone();
            for (n, add) in changes {
                if add {
                    table.replace(&key(n), Value::legacy(2)).unwrap();
                } else {
                    table.delete(&key(n)).unwrap();
                }
            }
            let mut again = Table::default();
            for (key, value) in before.list() {
                again.add(&key, value).unwrap();
            }
            for (one, other) in [(&table, &before), (&before, &table), (&table, &again), (&again, &table)] {
                let found: Vec<_> = one.difference(other).flatten().map(|key| key.to_string()).collect();
                let expected: BTreeSet<_> = keys(one).difference(&keys(other)).cloned().collect();
                prop_assert_eq!(found.len(), expected.len());
                prop_assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), expected);
            }
        }
    }

    /// The steps for one changed address do not depend on the number of entries.
    #[test]
    fn one_change_takes_the_steps_of_one_path() {
        for entries in [100, 100_000] {
            let mut table = Table::default();
            for n in 0..entries {
                table.replace(&Key::Net4(n * 0x9e37, 32), Value::legacy(0)).unwrap();
                table
                    .replace(&Key::Net6(u128::from(n * 0x9e37) << 40 | 0x2001 << 112, 128), Value::legacy(0))
                    .unwrap();
            }
            let before = table.clone();
            assert_eq!(table.difference(&before).count(), 0);
            for new in [Key::Net4(0x0102_0304, 32), Key::Net6(0x2001 << 112 | 0x77, 128)] {
                table.add(&new, Value::legacy(0)).unwrap();
                // Each of up to 8 or 32 nodes has up to 31 places.
                let most = if matches!(new, Key::Net4(..)) { 8 * 32 } else { 32 * 32 };
                let [gained, lost] =
                    [table.difference(&before), before.difference(&table)].map(Iterator::count);
                assert!(gained <= most && lost <= most, "{entries} entries: {gained} and {lost} steps");
                assert!(table.delete(&new).unwrap());
                table = before.clone();
            }
        }
    }
}
