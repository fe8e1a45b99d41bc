//! What the kernel's maps have of the tables, and the changes that lead to other tables.
//!
//! What: after a change, the networks that a table has gained or lost ([`Table::difference`]) are compared with what the maps have, and so are
//! the entries within each of them: the kernel finds only the longest entry of an address, so an entry has the bits of all networks around it.
//! The number of steps is proportional to the changed networks and the entries within them, whatever the size of the tables.
//!
//! Bounds: a call of [`Contents::advance`] does the steps that it may do, and returns at most one entry for each. A change that comes meanwhile
//! waits until the one before is complete, so there are never more than two.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::Bound;
use std::sync::Arc;

use towpath_gate::rules::table::{Difference, Key, Table};
use towpath_port::offload::deny::Net;
use towpath_wire::End;

/// The addresses of a rule, and which address of a packet is compared with them.
pub(in super::super) type AddressList = (End, Arc<Table>);
/// Tables of the past. The last reference to a large table takes long to drop: drop them without a lock.
pub(in super::super) type Retired = Vec<AddressList>;

/// Entries to be removed and written, in this order.
#[derive(Debug, Default)]
pub(super) struct Changes {
    pub(super) remove: Vec<Net>,
    pub(super) write: Vec<(Net, u32)>,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// The entries, with the bits of the tables that contain all of their addresses. In order, so that the entries within a network follow it.
    nets: BTreeMap<Net, u32>,
    /// The tables, by bit, that the entries have after the change.
    tables: Vec<AddressList>,
    /// The tables before the change.
    before: Vec<AddressList>,
    /// Of the change: what the tables have lost and gained. The last one comes first.
    differences: Vec<(End, Difference)>,
    /// A changed network, and the last entry within it that was compared.
    within: Option<(Net, Net)>,
    /// Changes could not be carried out: all entries are removed before the next change.
    failed: bool,
    retired: Retired,
}

impl Contents {
    /// The number of entries.
    pub(super) fn len(&self) -> usize {
        self.nets.len()
    }

    /// Returns true if the entries are those of these tables.
    pub(super) fn has(&self, tables: &[AddressList]) -> bool {
        let is_complete = self.differences.is_empty() && self.within.is_none() && !self.failed;
        is_complete && self.tables.len() == tables.len() && self.tables.iter().zip(tables).all(are_same)
    }

    /// Does up to `steps` steps towards these tables, counts them down, and returns the changes of the maps.
    pub(super) fn advance(&mut self, tables: &[AddressList], steps: &mut usize) -> Changes {
        let mut changes = Changes::default();
        while *steps > 0 {
            *steps -= 1;
            if self.failed {
                match self.nets.pop_first() {
                    Some((net, _)) => changes.remove.push(net),
                    None => self.failed = false,
                }
            } else if let Some((outer, last)) = self.within.take() {
                let mut behind = self.nets.range((Bound::Excluded(last), Bound::Unbounded));
                if let Some((net, _)) = behind.next().filter(|(net, _)| outer.contains(net)) {
                    let net = *net;
                    self.within = Some((outer, net));
                    self.compare(net, &mut changes);
                }
            } else if let Some((end, difference)) = self.differences.last_mut() {
                match difference.next() {
                    Some(key) => {
                        if let Some(net) = key.as_ref().and_then(|key| net(*end, key)) {
                            self.within = Some((net, net));
                            self.compare(net, &mut changes);
                        }
                    }
                    None => {
                        self.differences.pop();
                        if self.differences.is_empty() {
                            self.retired.append(&mut self.before);
                        }
                    }
                }
            } else if self.has(tables) || !changes.write.is_empty() {
                // The next change may remove an entry that this one writes.
                break;
            } else {
                self.begin(tables);
            }
        }
        changes
    }

    /// Begins the change to these tables.
    fn begin(&mut self, tables: &[AddressList]) {
        self.retired.append(&mut self.before);
        self.before = std::mem::replace(&mut self.tables, tables.to_vec());
        // What is lost comes first, so that there is room for the rest.
        let mut differences = missing(&self.tables, &self.before);
        differences.extend(missing(&self.before, &self.tables));
        self.differences = differences;
    }

    /// Compares an entry with the tables.
    fn compare(&mut self, net: Net, changes: &mut Changes) {
        match bits(&self.tables, &net) {
            None => {
                if self.nets.remove(&net).is_some() {
                    changes.remove.push(net);
                }
            }
            Some(bits) => {
                if self.nets.insert(net, bits) != Some(bits) {
                    changes.write.push((net, bits));
                }
            }
        }
    }

    /// Changes were not carried out, or a part of them was.
    pub(super) fn fail(&mut self, changes: Changes) {
        // They may still be there, as may those that were to be written.
        self.nets.extend(changes.remove.into_iter().map(|net| (net, 0)));
        (self.differences, self.within, self.failed) = (Vec::new(), None, true);
        self.retired.append(&mut self.before);
        self.retired.append(&mut self.tables);
    }

    /// These tables are not wanted any more.
    pub(super) fn retire(&mut self, tables: Vec<AddressList>) {
        self.retired.extend(tables);
    }

    pub(super) fn take_retired(&mut self) -> Retired {
        std::mem::take(&mut self.retired)
    }
}

fn are_same((one, other): (&AddressList, &AddressList)) -> bool {
    one.0 == other.0 && Arc::ptr_eq(&one.1, &other.1)
}

/// What the tables have and the others, by bit, do not have.
fn missing(tables: &[AddressList], others: &[AddressList]) -> Vec<(End, Difference)> {
    let empty = Table::default();
    let differs = |(bit, listed): &(usize, &AddressList)| {
        !others.get(*bit).is_some_and(|other| are_same((listed, other)))
    };
    let found = tables.iter().enumerate().filter(differs).map(|(bit, (end, table))| {
        let other = others.get(bit).filter(|(same, _)| end == same).map_or(&empty, |(_, other)| &**other);
        (*end, table.difference(other))
    });
    found.collect()
}

/// The bits of the tables that contain all addresses of a network, if one of them has it as an entry.
fn bits(tables: &[AddressList], net: &Net) -> Option<u32> {
    let key = match net.prefix() {
        (IpAddr::V4(address), len) => Key::Net4(address.to_bits(), len),
        (IpAddr::V6(address), len) => Key::Net6(address.to_bits(), len),
    };
    let (mut bits, mut is_entry) = (0, false);
    for (bit, (end, table)) in tables.iter().enumerate() {
        if *end == net.end()
            && let Ok(Some((around, _))) = table.longest(&key)
        {
            bits |= 1 << bit;
            is_entry |= around == key;
        }
    }
    is_entry.then_some(bits)
}

fn net(end: End, key: &Key) -> Option<Net> {
    match *key {
        Key::Net4(address, len) => Some(Net::new(end, IpAddr::V4(address.into()), len)),
        Key::Net6(address, len) => Some(Net::new(end, IpAddr::V6(address.into()), len)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use towpath_gate::rules::table::Value;

    use super::*;

    fn add(table: &mut Table, (address, len): (&str, u8)) {
        let key = match address.parse().unwrap() {
            IpAddr::V4(ip) => Key::Net4(ip.to_bits(), len),
            IpAddr::V6(ip) => Key::Net6(ip.to_bits(), len),
        };
        table.add(&key, Value::legacy(0)).unwrap();
    }

    fn table(end: End, networks: &[(&str, u8)]) -> AddressList {
        let mut table = Table::default();
        networks.iter().for_each(|network| add(&mut table, *network));
        (end, Arc::new(table))
    }

    /// Does all steps, at most `most` at a time, and applies the changes to `map`. Returns the number of steps and of changes.
    fn finish(
        contents: &mut Contents,
        map: &mut BTreeMap<Net, u32>,
        tables: &[AddressList],
        most: usize,
    ) -> [usize; 2] {
        let mut done = [0; 2];
        while !contents.has(tables) {
            let mut steps = most;
            let changes = contents.advance(tables, &mut steps);
            assert!(changes.remove.len() + changes.write.len() <= most);
            done[0] += most - steps;
            done[1] += changes.remove.len() + changes.write.len();
            apply(map, changes);
        }
        assert!(contents.nets == *map);
        done
    }

    fn apply(map: &mut BTreeMap<Net, u32>, changes: Changes) {
        for net in changes.remove {
            assert!(map.remove(&net).is_some());
        }
        map.extend(changes.write);
    }

    /// The entries of the tables, by comparing each with all.
    fn expected(tables: &[AddressList]) -> BTreeMap<Net, u32> {
        let list =
            |(end, table): &AddressList| table.list().iter().filter_map(|(key, _)| net(*end, key)).collect();
        let lists: Vec<Vec<Net>> = tables.iter().map(list).collect();
        let all: BTreeSet<Net> = lists.iter().flatten().copied().collect();
        let bits = |net: &Net| {
            let around =
                lists.iter().enumerate().filter(|(_, list)| list.iter().any(|outer| outer.contains(net)));
            around.map(|(bit, _)| 1 << bit).sum()
        };
        all.into_iter().map(|net| (net, bits(&net))).collect()
    }

    #[test]
    fn the_longest_entry_has_the_rules_of_all_that_contain_it() {
        let tables = [
            table(End::Source, &[("10.0.0.0", 8), ("10.1.2.3", 32), ("2001:db8::", 32)]),
            table(End::Source, &[("10.1.0.0", 16), ("10.0.0.0", 8), ("192.0.2.1", 32)]),
            table(End::Source, &[("0.0.0.0", 0), ("2001:db8::7", 128)]),
            table(End::Destination, &[("10.0.0.0", 9), ("10.1.2.3", 32)]),
        ];
        let net = |address: &str, len| Net::new(End::Source, address.parse().unwrap(), len);
        let all = [
            (Net::new(End::Destination, [10, 0, 0, 0].into(), 9), 0b1000),
            (Net::new(End::Destination, [10, 1, 2, 3].into(), 32), 0b1000),
            (net("0.0.0.0", 0), 0b100),
            (net("10.0.0.0", 8), 0b111),
            (net("10.1.0.0", 16), 0b111),
            (net("10.1.2.3", 32), 0b111),
            (net("192.0.2.1", 32), 0b110),
            (net("2001:db8::", 32), 0b001),
            (net("2001:db8::7", 128), 0b101),
        ];
        let (mut contents, mut map) = (Contents::default(), BTreeMap::new());
        finish(&mut contents, &mut map, &tables, 1000);
        assert_eq!(map, BTreeMap::from(all));
        assert_eq!(expected(&tables), map);
    }

    /// The steps for a change of a table with many entries are those of the change.
    #[test]
    fn the_steps_are_proportional_to_the_change() {
        let addresses = |count: u32| {
            let mut table = Table::default();
            for at in 0..count {
                table.add(&Key::Net4((10 << 24) + at * 0xa7, 32), Value::legacy(0)).unwrap();
                table.add(&Key::Net6(u128::from(at) << 40 | 0x2001 << 112, 128), Value::legacy(0)).unwrap();
            }
            table
        };
        for count in [100, 50_000] {
            let (mut contents, mut map) = (Contents::default(), BTreeMap::new());
            let (one, two) = (addresses(count), addresses(10));
            let listed = |end, table: &Table| (end, Arc::new(table.clone()));
            let tables = |one: &Table, two: &Table| [listed(End::Source, one), listed(End::Source, two)];
            let first = tables(&one, &two);
            let [steps, changes] = finish(&mut contents, &mut map, &first, 4096);
            assert!(changes == 2 * count as usize && steps > changes, "{steps} {changes}");
            let mut changed = one.clone();
            // Of 8 or 32 nodes on the path, each with up to 31 places, before and after the change.
            let paths = [(("10.200.0.1", 32), 2 * 8 * 32), (("2001:db8::1", 128), 2 * 32 * 32)];
            for (address, most) in paths {
                let before = tables(&changed, &two);
                finish(&mut contents, &mut map, &before, 4096);
                add(&mut changed, address);
                let after = [listed(End::Source, &changed), before[1].clone()];
                for (tables, len) in [(&after, map.len() + 1), (&before, map.len()), (&after, map.len() + 1)]
                {
                    let [steps, changes] = finish(&mut contents, &mut map, tables, 4096);
                    assert!(changes == 1 && steps <= most + 8, "{count}: {steps} steps for {address:?}");
                    assert_eq!(map.len(), len);
                }
            }
            // A network changes what is within it, and nothing else.
            let mut small = two.clone();
            add(&mut small, ("10.0.0.0", 24));
            let base = tables(&changed, &two);
            finish(&mut contents, &mut map, &base, 4096);
            let around = Net::new(End::Source, [10, 0, 0, 0].into(), 24);
            let within = map.keys().filter(|net| around.contains(net)).count();
            let [steps, changes] =
                finish(&mut contents, &mut map, &[base[0].clone(), listed(End::Source, &small)], 4096);
            assert!(
                within > 0 && changes <= within + 1 && steps <= 2 * 8 * 32 + within + 8,
                "{steps} {changes}"
            );
            // No tables: all entries are removed, in bounded parts.
            let [_, changes] = finish(&mut contents, &mut map, &[], 4096);
            assert!(map.is_empty() && changes > 2 * count as usize);
            assert!(!contents.take_retired().is_empty() && contents.take_retired().is_empty());
        }
    }

    /// Without success, all that may be in the maps is removed before the next tables.
    #[test]
    fn after_a_failure_the_maps_are_written_anew() {
        let (mut contents, mut map) = (Contents::default(), BTreeMap::new());
        let one = [table(End::Source, &[("10.0.0.1", 32), ("10.0.0.2", 32)])];
        let two = [table(End::Source, &[("10.0.0.2", 32), ("10.0.0.3", 32), ("10.0.0.4", 32)])];
        finish(&mut contents, &mut map, &one, 1000);
        let mut steps = 1000;
        let changes = contents.advance(&two, &mut steps);
        assert_eq!((changes.remove.len(), changes.write.len()), (1, 2));
        // Part of them was carried out.
        map.insert(changes.write[0].0, changes.write[0].1);
        contents.fail(changes);
        assert!(!contents.has(&one) && !contents.has(&two) && !contents.has(&[]));
        let mut steps = 1000;
        let changes = contents.advance(&two, &mut steps);
        assert!(map.keys().all(|net| changes.remove.contains(net)));
        map.retain(|net, _| !changes.remove.contains(net));
        map.extend(changes.write);
        finish(&mut contents, &mut map, &two, 1000);
        assert_eq!(map, expected(&two));
    }

    /// Nested networks of both families.
    fn key(n: u16) -> Key {
        let len = [0, 8, 12, 24, 31, 32][usize::from(n) % 6];
        let four =
            (u32::from(n % 32).rotate_right(13) ^ 0x0a00_0000) & u32::MAX.checked_shl(32 - len).unwrap_or(0);
        if n.is_multiple_of(3) {
            Key::Net6(u128::from(four) << 96, len as u8)
        } else {
            Key::Net4(four, len as u8)
        }
    }

    proptest! {
        /// Changes come one after the other, also before the one before is complete.
        #[test]
        fn the_entries_are_those_of_the_last_tables(
            changes in proptest::collection::vec((0_usize..4, any::<u16>(), any::<bool>(), 0_usize..60), 0..60),
        ) {
            let (mut contents, mut map) = (Contents::default(), BTreeMap::new());
            let mut tables: Vec<AddressList> = Vec::new();
            for (bit, n, gain, mut steps) in changes {
                if bit < tables.len() {
                    let table = Arc::make_mut(&mut tables[bit].1);
                    if gain {
                        table.replace(&key(n), Value::legacy(0)).unwrap();
                    } else {
                        table.delete(&key(n)).unwrap();
                    }
                } else if gain {
                    let end = if n.is_multiple_of(2) { End::Source } else { End::Destination };
                    tables.push((end, Arc::default()));
                } else if !tables.is_empty() {
                    tables.remove(usize::from(n) % tables.len());
                }
                apply(&mut map, contents.advance(&tables, &mut steps));
                prop_assert!(contents.nets == map);
            }
            finish(&mut contents, &mut map, &tables, 7);
            prop_assert_eq!(map, expected(&tables));
        }
    }
}
