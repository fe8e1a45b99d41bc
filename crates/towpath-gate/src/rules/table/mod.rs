//! Lookup tables: keys of five types, values with columns.
//!
//! Addresses, Ethernet addresses and numbers are stored in longest-prefix tries, other keys in hash tables. Both are
//! persistent: a clone of a table costs a few references, and a change of one entry beside clones copies one path,
//! at any size. Equal values are stored once.

mod difference;
mod hashed;
mod interval_index;
mod key;
mod listing;
mod trie;
mod value;

pub use self::difference::Difference;
pub use self::key::{FlowFields, FlowKey, Key, Kind};
pub use self::listing::Listing;
pub(crate) use self::value::COLUMNS;
pub use self::value::{Column, Value};

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use self::hashed::Hashed;
use self::interval_index::{IntervalIndex, Prefix};
use self::trie::{Bits, PrefixTrie};
use self::value::{SharedValues, column_name};

/// Why an entry was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The key exists.
    Exists,
    /// The table has reached its limit.
    Full,
    /// The key does not have the type of the table.
    WrongType,
    /// The table is locked.
    Locked,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exists => "the entry already exists",
            Self::Full => "the table is full",
            Self::WrongType => "the key is not of the table's type",
            Self::Locked => "the table is locked",
        })
    }
}

impl std::error::Error for Refused {}

/// A table. A clone costs as much as a few pointers, whatever the number of entries.
#[derive(Clone)]
pub struct Table {
    kind: Kind,
    columns: Vec<Column>,
    limit: Option<usize>,
    locked: bool,
    entries: Entries,
    values: SharedValues,
}

#[derive(Clone)]
enum Entries {
    Addr(Box<Prefixes>),
    Iface(Hashed<Box<str>, Arc<Value>>),
    /// Numbers are prefixes of 32 bits.
    Number(PrefixTrie<u32, Arc<Value>>),
    Flow(Hashed<FlowKey, Arc<Value>>),
    Mac(PrefixTrie<u64, Arc<Value>>),
}

#[derive(Clone, Default)]
struct Prefixes {
    v4: PrefixTrie<u32, Arc<Value>>,
    v6: PrefixTrie<u128, Arc<Value>>,
    /// Number of IPv6 prefixes with more than 64 bits.
    long6: usize,
    /// Interval indexes of the tries, for large tables.
    fast4: Option<IntervalIndex>,
    fast6: Option<IntervalIndex>,
}

/// Tables with fewer prefixes per family use only the trie.
const MANY_PREFIXES: usize = 16_384;

impl Prefixes {
    fn put4(&mut self, addr: u32, len: u8, value: Arc<Value>) {
        change(&mut self.fast4, (u128::from(addr) << 96, len));
        self.v4.insert(addr, len, value);
    }

    fn put6(&mut self, addr: u128, len: u8, value: Arc<Value>) {
        change(&mut self.fast6, (addr, len));
        let old = self.v6.insert(addr, len, value);
        self.long6 += usize::from(old.is_none() && len > 64);
    }

    fn delete4(&mut self, addr: u32, len: u8) -> bool {
        let old = self.v4.remove(addr, len);
        if old.is_some() {
            change(&mut self.fast4, (u128::from(addr) << 96, len));
        }
        old.is_some()
    }

    fn delete6(&mut self, addr: u128, len: u8) -> bool {
        let old = self.v6.remove(addr, len);
        if old.is_some() {
            change(&mut self.fast6, (addr, len));
            self.long6 -= usize::from(len > 64);
        }
        old.is_some()
    }

    #[inline]
    fn lookup4(&self, ip: u32) -> Option<&Value> {
        match &self.fast4 {
            Some(fast) if fast.knows(u128::from(ip) << 96) => fast.get(u128::from(ip) << 96),
            _ => self.v4.lookup(ip).map(|value| &**value),
        }
    }

    #[inline]
    fn lookup6(&self, ip: u128) -> Option<&Value> {
        match &self.fast6 {
            Some(fast) if fast.knows(ip) => fast.get(ip),
            _ => self.v6.lookup(ip).map(|value| &**value),
        }
    }

    fn settle(&mut self) {
        if self.fast4.is_none() && self.v4.len() >= MANY_PREFIXES {
            let prefixes = self.v4.iter().map(|(addr, len, value)| ((u128::from(addr) << 96, len), value));
            self.fast4 = Some(IntervalIndex::new(prefixes, self.v4.len(), false));
        }
        if self.fast6.is_none() && self.v6.len() >= MANY_PREFIXES {
            let prefixes = self.v6.iter().map(|(addr, len, value)| ((addr, len), value));
            self.fast6 = Some(IntervalIndex::new(prefixes, self.v6.len(), self.long6 > 0));
        }
    }
}

/// Records a changed prefix in the interval index. Drops the index after too many changes.
fn change(fast: &mut Option<IntervalIndex>, prefix: Prefix) {
    if fast.as_mut().is_some_and(|fast| !fast.change(prefix)) {
        *fast = None;
    }
}

impl Entries {
    fn new(kind: Kind) -> Self {
        match kind {
            Kind::Addr => Self::Addr(Box::default()),
            Kind::Iface => Self::Iface(Hashed::default()),
            Kind::Number => Self::Number(PrefixTrie::default()),
            Kind::Flow(_) => Self::Flow(Hashed::default()),
            Kind::Mac => Self::Mac(PrefixTrie::default()),
        }
    }

    /// Returns true if both are the same entries, not only equal ones.
    fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Addr(own), Self::Addr(other)) => own.v4.is(&other.v4) && own.v6.is(&other.v6),
            (Self::Iface(own), Self::Iface(other)) => own.is(other),
            (Self::Number(own), Self::Number(other)) => own.is(other),
            (Self::Flow(own), Self::Flow(other)) => own.is(other),
            (Self::Mac(own), Self::Mac(other)) => own.is(other),
            _ => false,
        }
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("kind", &self.kind).field("entries", &self.len()).finish()
    }
}

impl Default for Table {
    /// The table that a rule or entry creates implicitly: addresses, legacy values.
    fn default() -> Self {
        Self::new(Kind::Addr, vec![Column::Legacy])
    }
}

impl Table {
    /// Creates an empty table.
    pub fn new(kind: Kind, columns: Vec<Column>) -> Self {
        let (entries, values) = (Entries::new(kind), SharedValues::default());
        Self { kind, columns, limit: None, locked: false, entries, values }
    }

    /// Type of the keys.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Columns of the values.
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// Maximum number of entries, if limited.
    pub fn limit(&self) -> Option<usize> {
        self.limit
    }

    /// Sets the limit; `None` removes it.
    pub fn set_limit(&mut self, limit: Option<usize>) {
        self.limit = limit;
    }

    /// Locks or unlocks the table against changes.
    pub fn set_locked(&mut self, locked: bool) {
        self.locked = locked;
    }

    /// Returns true if both have the same type, columns, limit and entries.
    pub(crate) fn same_as(&self, other: &Self) -> bool {
        let shape = |table: &Self| (table.kind, table.limit, table.locked, table.len());
        if shape(self) != shape(other) || self.columns != other.columns {
            return false;
        }
        self.entries.is(&other.entries)
            || self.list().iter().all(|(key, value)| matches!(other.get(key), Ok(Some(v)) if v == value))
    }

    /// Returns true if the table is locked against changes.
    pub fn is_locked(&self) -> bool {
        self.locked
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        match &self.entries {
            Entries::Addr(all) => all.v4.len() + all.v6.len(),
            Entries::Iface(map) => map.len(),
            Entries::Number(map) => map.len(),
            Entries::Flow(map) => map.len(),
            Entries::Mac(map) => map.len(),
        }
    }

    /// Returns true if the table has no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds an entry.
    ///
    /// # Errors
    /// Returns [`Refused`] without changing the table.
    pub fn add(&mut self, key: &Key, value: Value) -> Result<(), Refused> {
        if self.locked {
            return Err(Refused::Locked);
        }
        if self.get(key)?.is_some() {
            return Err(Refused::Exists);
        }
        if self.limit.is_some_and(|limit| self.len() >= limit) {
            return Err(Refused::Full);
        }
        self.put(key, value);
        Ok(())
    }

    /// Adds an entry or replaces its value.
    ///
    /// # Errors
    /// Returns [`Refused`] without changing the table.
    pub fn replace(&mut self, key: &Key, value: Value) -> Result<(), Refused> {
        if self.locked {
            return Err(Refused::Locked);
        }
        if self.get(key)?.is_none() && self.limit.is_some_and(|limit| self.len() >= limit) {
            return Err(Refused::Full);
        }
        self.put(key, value);
        Ok(())
    }

    /// Sets one numeric column of an existing entry, also in a locked table.
    pub(crate) fn set_number(&mut self, key: &Key, column: Column, number: u32) {
        let Ok(Some(value)) = self.get(key) else { return };
        let mut value = *value;
        value.set(column, number);
        // As in parsing, `number` is the tag column, or the first column without a tag column.
        if self.columns.first() == Some(&column) && !self.columns.contains(&Column::Tag) {
            value.number = number;
        }
        self.put(key, value);
    }

    fn put(&mut self, key: &Key, value: Value) {
        let value = self.values.share(value);
        match (&mut self.entries, key) {
            (Entries::Addr(all), Key::Net4(addr, len)) => all.put4(*addr, *len, value),
            (Entries::Addr(all), Key::Net6(addr, len)) => all.put6(*addr, *len, value),
            (Entries::Iface(map), Key::Iface(name)) => map.insert(name.clone(), value),
            (Entries::Number(map), Key::Number(key)) => drop(map.insert(*key, 32, value)),
            (Entries::Flow(map), Key::Flow(key)) => map.insert(*key, value),
            (Entries::Mac(map), Key::Mac(bits, len)) => drop(map.insert(*bits, *len, value)),
            // `get` has rejected all other combinations.
            _ => {}
        }
    }

    /// Builds the interval index of a table with many prefixes. [`super::Ruleset::parse`] and
    /// [`super::Ruleset::load_table`] call it last. Takes about half a second per million prefixes. The index is used
    /// until more than a sixteenth of the prefixes have changed.
    pub fn settle(&mut self) {
        if let Entries::Addr(all) = &mut self.entries {
            all.settle();
        }
    }

    /// Deletes an entry. Returns false if it does not exist.
    ///
    /// # Errors
    /// Returns [`Refused::Locked`] or [`Refused::WrongType`].
    pub fn delete(&mut self, key: &Key) -> Result<bool, Refused> {
        if self.locked {
            return Err(Refused::Locked);
        }
        Ok(match (&mut self.entries, key) {
            (Entries::Addr(all), Key::Net4(addr, len)) => all.delete4(*addr, *len),
            (Entries::Addr(all), Key::Net6(addr, len)) => all.delete6(*addr, *len),
            (Entries::Iface(map), Key::Iface(name)) => map.remove(name).is_some(),
            (Entries::Number(map), Key::Number(key)) => map.remove(*key, 32).is_some(),
            (Entries::Flow(map), Key::Flow(key)) => map.remove(key).is_some(),
            (Entries::Mac(map), Key::Mac(bits, len)) => map.remove(*bits, *len).is_some(),
            _ => return Err(Refused::WrongType),
        })
    }

    /// Deletes all entries.
    pub fn flush(&mut self) {
        (self.entries, self.values) = (Entries::new(self.kind), SharedValues::default());
    }

    /// Returns the value of exactly this key.
    ///
    /// # Errors
    /// Returns [`Refused::WrongType`].
    pub fn get(&self, key: &Key) -> Result<Option<&Value>, Refused> {
        let value = match (&self.entries, key) {
            (Entries::Addr(all), Key::Net4(addr, len)) => all.v4.get(*addr, *len),
            (Entries::Addr(all), Key::Net6(addr, len)) => all.v6.get(*addr, *len),
            (Entries::Iface(map), Key::Iface(name)) => map.get(name),
            (Entries::Number(map), Key::Number(key)) => map.get(*key, 32),
            (Entries::Flow(map), Key::Flow(key)) => map.get(key),
            (Entries::Mac(map), Key::Mac(bits, len)) => map.get(*bits, *len),
            _ => return Err(Refused::WrongType),
        };
        Ok(value.map(|value| &**value))
    }

    /// Returns the value of the longest prefix that contains an address.
    #[inline]
    pub fn lookup_ip(&self, ip: IpAddr) -> Option<&Value> {
        let Entries::Addr(all) = &self.entries else { return None };
        match ip {
            IpAddr::V4(ip) => all.lookup4(ip.to_bits()),
            IpAddr::V6(ip) => all.lookup6(ip.to_bits()),
        }
    }

    /// Returns the value of a number.
    #[inline]
    pub fn lookup_number(&self, number: u32) -> Option<&Value> {
        let Entries::Number(map) = &self.entries else { return None };
        map.lookup(number).map(|value| &**value)
    }

    /// Returns the value of a port name.
    pub fn lookup_iface(&self, name: &str) -> Option<&Value> {
        let Entries::Iface(map) = &self.entries else { return None };
        map.get(name).map(|value| &**value)
    }

    /// Returns the value of a flow. Fields that the table does not use must be empty.
    pub fn lookup_flow(&self, key: &FlowKey) -> Option<&Value> {
        let Entries::Flow(map) = &self.entries else { return None };
        map.get(key).map(|value| &**value)
    }

    /// Returns the value of the longest prefix that contains an Ethernet address.
    pub fn lookup_mac(&self, mac: [u8; 6]) -> Option<&Value> {
        let Entries::Mac(map) = &self.entries else { return None };
        let bits = mac.iter().fold(0u64, |bits, octet| bits << 8 | u64::from(*octet)) << 16;
        map.lookup(bits).map(|value| &**value)
    }

    /// Returns all entries in the order of their keys.
    pub fn list(&self) -> Vec<(Key, Value)> {
        Listing::new(self).iter_from(0).collect()
    }

    /// Returns the entry for a key: for addresses and Ethernet addresses, the one with the longest prefix that
    /// contains it.
    ///
    /// # Errors
    /// Returns [`Refused::WrongType`].
    pub fn longest(&self, key: &Key) -> Result<Option<(Key, Value)>, Refused> {
        Ok(match (&self.entries, key) {
            (Entries::Addr(all), Key::Net4(addr, len)) => {
                let found = all.v4.longest(*addr, *len);
                found.map(|(len, value)| (Key::Net4(addr.first(len), len), **value))
            }
            (Entries::Addr(all), Key::Net6(addr, len)) => {
                let found = all.v6.longest(*addr, *len);
                found.map(|(len, value)| (Key::Net6(addr.first(len), len), **value))
            }
            (Entries::Mac(map), Key::Mac(bits, len)) => {
                let found = map.longest(*bits, *len);
                found.map(|(len, value)| (Key::Mac(bits.first(len), len), **value))
            }
            _ => self.get(key)?.map(|value| (key.clone(), *value)),
        })
    }
}

impl Table {
    /// Writes the rule file commands that create this table.
    pub(crate) fn write_commands(&self, name: &str, text: &mut String) {
        use fmt::Write;
        let _ = write!(text, "table {name} create type {} valtype {}", self.kind, self.column_names());
        if let Some(limit) = self.limit {
            let _ = write!(text, " limit {limit}");
        }
        text.push('\n');
        for (key, value) in Listing::new(self).iter_from(0) {
            let (key, value) = (self.show_key(&key), self.show_value(&value));
            let _ = writeln!(text, "table {name} add {key} {value}");
        }
        if self.locked {
            let _ = writeln!(text, "table {name} lock");
        }
    }

    fn column_names(&self) -> String {
        self.columns.iter().map(|column| column_name(*column)).collect::<Vec<_>>().join(",")
    }

    /// The type, and the columns if they are not the implicit one.
    pub(crate) fn type_text(&self) -> String {
        match self.columns[..] {
            [Column::Legacy] => self.kind.to_string(),
            _ => format!("{} valtype {}", self.kind, self.column_names()),
        }
    }

    /// Formats a key like `table NAME list`. A flow has exactly the fields of the table.
    pub fn show_key(&self, key: &Key) -> String {
        let (Kind::Flow(fields), Key::Flow(flow)) = (self.kind, key) else { return key.to_string() };
        let ip = |ip: Option<IpAddr>| ip.map(|ip| ip.to_string()).unwrap_or_default();
        let all = [
            (fields.src_ip, ip(flow.src_ip)),
            (fields.proto, flow.proto.to_string()),
            (fields.src_port, flow.src_port.to_string()),
            (fields.dst_ip, ip(flow.dst_ip)),
            (fields.dst_port, flow.dst_port.to_string()),
        ];
        all.into_iter().filter(|(there, _)| *there).map(|(_, text)| text).collect::<Vec<_>>().join(",")
    }

    /// Formats a value like `table NAME list`.
    pub fn show_value(&self, value: &Value) -> String {
        let show = |column: &Column| match column {
            Column::Legacy => match (value.number, value.ipv6) {
                (0, Some(ip)) => ip.to_string(),
                (number, _) => number.to_string(),
            },
            Column::Skipto => value.skipto.to_string(),
            Column::Pipe => value.pipe.to_string(),
            Column::Dscp => value.dscp.to_string(),
            Column::Tag => value.tag.to_string(),
            Column::Divert => value.divert.to_string(),
            Column::Limit => value.limit.to_string(),
            Column::Mark => format!("{:#x}", value.mark),
            Column::Ipv4 => value.ipv4.unwrap_or(Ipv4Addr::UNSPECIFIED).to_string(),
            Column::Ipv6 => value.ipv6.unwrap_or(Ipv6Addr::UNSPECIFIED).to_string(),
        };
        self.columns.iter().map(show).collect::<Vec<_>>().join(",")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_longest_prefix_wins() {
        let mut table = Table::default();
        let net = |a: [u8; 4], len| Key::Net4(u32::from_be_bytes(a), len);
        table.add(&net([0, 0, 0, 0], 0), Value::legacy(1)).unwrap();
        table.add(&net([10, 0, 0, 0], 8), Value::legacy(2)).unwrap();
        table.add(&net([10, 1, 0, 0], 16), Value::legacy(3)).unwrap();
        let number = |table: &Table, ip: &str| table.lookup_ip(ip.parse().unwrap()).map(|v| v.number);
        assert_eq!(number(&table, "10.1.2.3"), Some(3));
        assert_eq!(number(&table, "10.2.2.3"), Some(2));
        assert_eq!(number(&table, "11.2.2.3"), Some(1));
        assert_eq!(number(&table, "::1"), None);
        assert_eq!(table.delete(&net([10, 1, 0, 0], 16)), Ok(true));
        assert_eq!(number(&table, "10.1.2.3"), Some(2));
        assert_eq!(table.add(&net([10, 0, 0, 0], 8), Value::legacy(9)), Err(Refused::Exists));
        assert_eq!(table.add(&Key::Number(1), Value::legacy(9)), Err(Refused::WrongType));
        table.set_limit(Some(2));
        assert_eq!(table.add(&net([12, 0, 0, 0], 8), Value::legacy(9)), Err(Refused::Full));
    }

    /// A table with interval indexes returns the same results as one without, also after changes.
    #[test]
    fn large_and_small_tables_agree() {
        let mut state = 1u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let (mut fast, mut plain) = (Table::default(), Table::default());
        let mut key = || {
            let (bits, six) = (random(1 << 22), random(2) == 0);
            let len = 8 + random(25) as u8;
            let net = (bits as u32) << 10 & u32::MAX << (32 - len);
            if six {
                Key::Net6(u128::from(net) << 96 | 0x2000 << 112, len * 2 + 3)
            } else {
                Key::Net4(net, len)
            }
        };
        let ip = |key: &Key| match key {
            Key::Net4(addr, _) => IpAddr::V4((*addr | 0x155).into()),
            Key::Net6(addr, _) => IpAddr::V6((*addr | 0x155).into()),
            _ => unreachable!("addresses only"),
        };
        for value in 0..90_000 {
            let key = key();
            assert_eq!(fast.add(&key, Value::legacy(value % 99)), plain.add(&key, Value::legacy(value % 99)));
        }
        fast.settle();
        let Entries::Addr(all) = &fast.entries else { panic!("addresses") };
        assert!(all.fast4.is_some() && all.fast6.is_some(), "{} {}", all.v4.len(), all.v6.len());
        for round in 0..20_000 {
            let changed = key();
            match round % 3 {
                0 => assert_eq!(fast.delete(&changed), plain.delete(&changed)),
                1 => assert_eq!(
                    fast.replace(&changed, Value::legacy(round)),
                    plain.replace(&changed, Value::legacy(round))
                ),
                _ => {}
            }
            for asked in [ip(&changed), ip(&key())] {
                assert_eq!(fast.lookup_ip(asked), plain.lookup_ip(asked), "{asked}");
            }
        }
    }

    #[test]
    fn values_are_reference_counted() {
        let mut table = Table::new(Kind::Number, vec![Column::Legacy]);
        let values = |table: &Table| {
            let Entries::Number(map) = &table.entries else { panic!("numbers") };
            let all: std::collections::HashSet<_> =
                map.iter().map(|(_, _, value)| Arc::as_ptr(value)).collect();
            all.len()
        };
        for key in 0..100 {
            table.add(&Key::Number(key), Value::legacy(key % 2)).unwrap();
        }
        assert_eq!(values(&table), 2);
        let zero = Arc::downgrade(&table.values.share(Value::legacy(0)));
        assert_eq!(zero.strong_count(), 50);
        for key in 0..100 {
            table.replace(&Key::Number(key), Value::legacy(1)).unwrap();
        }
        assert_eq!((values(&table), zero.strong_count()), (1, 0));
        (0..100).for_each(|key| assert_eq!(table.delete(&Key::Number(key)), Ok(true)));
        assert_eq!(values(&table), 0);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Add(u16, u32),
        Replace(u16, u32),
        Delete(u16),
        Flush,
        Lock(bool),
        /// Keeps a clone, which later changes must not affect.
        Clone,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            8 => (any::<u16>(), 0u32..4).prop_map(|(key, value)| Op::Add(key, value)),
            4 => (any::<u16>(), 0u32..4).prop_map(|(key, value)| Op::Replace(key, value)),
            6 => any::<u16>().prop_map(Op::Delete),
            1 => Just(Op::Flush),
            1 => any::<bool>().prop_map(Op::Lock),
            2 => Just(Op::Clone),
        ]
    }

    /// The key with this number. There are few, so that operations meet.
    fn key(kind: Kind, n: u16) -> Key {
        let n = n % 64;
        let len = [0, 8, 15, 24, 31, 32][usize::from(n) % 6];
        let four = (u32::from(n).rotate_right(9) ^ 0x0a00_0000) & u32::MAX.checked_shl(32 - len).unwrap_or(0);
        match kind {
            Kind::Addr if n.is_multiple_of(2) => Key::Net4(four, len as u8),
            Kind::Addr => Key::Net6(u128::from(four) << 40, len as u8 + 56),
            Kind::Iface => Key::Iface(format!("em{n}").into()),
            Kind::Number => Key::Number(four),
            Kind::Flow(_) => Key::Flow(FlowKey { proto: 6, dst_port: n, ..FlowKey::default() }),
            Kind::Mac => Key::Mac(u64::from(four) << 32, len as u8),
        }
    }

    proptest! {
        /// Every kind of table beside a plain list of entries; clones stay as they were.
        #[test]
        fn tables_agree_with_a_model(
            kind in 0usize..5,
            limit in proptest::option::of(1usize..20),
            ops in proptest::collection::vec(op(), 0..150),
        ) {
            let kinds = [Kind::Addr, Kind::Iface, Kind::Number, Kind::Flow(FlowFields::ALL), Kind::Mac];
            let kind = kinds[kind];
            let mut table = Table::new(kind, vec![Column::Legacy]);
            table.set_limit(limit);
            let (mut model, mut locked) = (HashMap::new(), false);
            let mut clones = Vec::new();
            for op in ops {
                match op {
                    Op::Add(n, value) | Op::Replace(n, value) => {
                        let key = key(kind, n);
                        let again = matches!(op, Op::Replace(..));
                        let wanted = match model.contains_key(&key) {
                            _ if locked => Err(Refused::Locked),
                            true if !again => Err(Refused::Exists),
                            false if limit.is_some_and(|limit| model.len() >= limit) => Err(Refused::Full),
                            _ => Ok(()),
                        };
                        let value = Value::legacy(value);
                        let got = if again { table.replace(&key, value) } else { table.add(&key, value) };
                        prop_assert_eq!(got, wanted);
                        if got.is_ok() {
                            model.insert(key, value);
                        }
                    }
                    Op::Delete(_) if locked => prop_assert_eq!(table.delete(&key(kind, 0)), Err(Refused::Locked)),
                    Op::Delete(n) => {
                        let key = key(kind, n);
                        prop_assert_eq!(table.delete(&key), Ok(model.remove(&key).is_some()));
                    }
                    Op::Flush => {
                        table.flush();
                        model.clear();
                    }
                    Op::Lock(lock) => {
                        locked = lock;
                        table.set_locked(lock);
                    }
                    Op::Clone => clones.push((table.clone(), model.clone())),
                }
            }
            clones.push((table, model));
            for (table, model) in &clones {
                prop_assert_eq!(table.len(), model.len());
                let list = table.list();
                prop_assert_eq!(&list.iter().cloned().collect::<HashMap<_, _>>(), model);
                let listing = Listing::new(table);
                for from in 0..=list.len() {
                    prop_assert!(listing.iter_from(from).eq(list[from..].iter().cloned()));
                }
                for n in 0..64 {
                    let key = key(kind, n);
                    prop_assert_eq!(table.get(&key), Ok(model.get(&key)));
                }
                prop_assert!(clones.iter().all(|(other, entries)| other.same_as(table)
                    == (entries == model && other.is_locked() == table.is_locked())));
            }
        }
    }
}
