//! The entries of a table in order, from any position.

use std::sync::Arc;

use super::key::Key;
use super::value::Value;
use super::{Entries, Table};

/// The entries of a table at one moment, in the order of their keys. Later changes of the table do not affect it.
///
/// The entries are those of the table, not a copy. Tables of ports and flows have no order: their keys are sorted
/// once, which takes a copy of the keys.
///
/// ```
/// use towpath_gate::rules::table::{Key, Kind, Listing, Table, Value};
///
/// let mut table = Table::new(Kind::Number, Vec::new());
/// (0..10).for_each(|key| table.add(&Key::Number(key), Value::default()).unwrap());
/// let listing = Listing::new(&table);
/// table.flush();
/// assert_eq!(listing.len(), 10);
/// assert_eq!(listing.iter_from(9).next().unwrap().0, Key::Number(9));
/// ```
#[derive(Clone, Debug)]
pub struct Listing {
    table: Table,
    sorted: Option<Arc<[(Key, Value)]>>,
}

impl Listing {
    /// Creates the listing of a table as it is now.
    pub fn new(table: &Table) -> Self {
        let sorted = match &table.entries {
            Entries::Iface(map) => {
                let mut all: Vec<_> = map.iter().collect();
                all.sort_unstable_by_key(|(name, _)| *name);
                Some(all.into_iter().map(|(name, value)| (Key::Iface(name.clone()), **value)).collect())
            }
            Entries::Flow(map) => {
                let mut all: Vec<_> = map.iter().collect();
                all.sort_unstable_by_key(|(flow, _)| **flow);
                Some(all.into_iter().map(|(flow, value)| (Key::Flow(*flow), **value)).collect())
            }
            Entries::Addr(_) | Entries::Number(_) | Entries::Mac(_) => None,
        };
        Self { table: table.clone(), sorted }
    }

    /// The table, which formats keys and values.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Returns true if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Iterates over the entries from position `from` on. The cost of the first one does not depend on `from`.
    pub fn iter_from(&self, from: usize) -> Box<dyn Iterator<Item = (Key, Value)> + '_> {
        if let Some(sorted) = &self.sorted {
            return Box::new(sorted.iter().skip(from).cloned());
        }
        match &self.table.entries {
            Entries::Addr(all) => {
                let behind = from.saturating_sub(all.v4.len());
                let four = all.v4.iter_from(from).map(|(addr, len, value)| (Key::Net4(addr, len), **value));
                let six = all.v6.iter_from(behind).map(|(addr, len, value)| (Key::Net6(addr, len), **value));
                Box::new(four.chain(six))
            }
            Entries::Number(map) => {
                Box::new(map.iter_from(from).map(|(key, _, value)| (Key::Number(key), **value)))
            }
            Entries::Mac(map) => {
                Box::new(map.iter_from(from).map(|(bits, len, value)| (Key::Mac(bits, len), **value)))
            }
            // Sorted above.
            Entries::Iface(_) | Entries::Flow(_) => Box::new(std::iter::empty()),
        }
    }
}
