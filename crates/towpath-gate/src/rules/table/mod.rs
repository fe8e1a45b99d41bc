//! Lookup tables: keys of five types, values with columns.
//!
//! Addresses and Ethernet addresses are stored in longest-prefix tries, other keys in hash tables. Equal values
//! are stored once: an entry holds the 32-bit number of its value.

mod interval_index;
mod key;
mod value;

pub use self::key::{FlowFields, FlowKey, Key, Kind};
pub(crate) use self::value::COLUMNS;
pub use self::value::{Column, Value};

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use prefix_trie::PrefixMap;

use self::interval_index::{IntervalIndex, Prefix};
use self::value::{Values, column_name};

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

/// A table.
#[derive(Clone)]
pub struct Table {
    kind: Kind,
    columns: Vec<Column>,
    limit: Option<usize>,
    locked: bool,
    entries: Entries,
    values: Values,
}

#[derive(Clone)]
enum Entries {
    Addr(Box<Prefixes>),
    Iface(HashMap<Box<str>, u32>),
    Number(HashMap<u32, u32>),
    Flow(HashMap<FlowKey, u32>),
    Mac(Box<PrefixMap<(u64, u8), u32>>),
}

#[derive(Clone, Default)]
struct Prefixes {
    v4: PrefixMap<(u32, u8), u32>,
    v6: PrefixMap<(u128, u8), u32>,
    /// Number of IPv6 prefixes with more than 64 bits.
    long6: usize,
    /// Interval indexes of the tries, for large tables.
    fast4: Option<Box<IntervalIndex>>,
    fast6: Option<Box<IntervalIndex>>,
}

/// Tables with fewer prefixes per family use only the trie.
const MANY_PREFIXES: usize = 16_384;

impl Prefixes {
    fn put4(&mut self, addr: u32, len: u8, number: u32) -> Option<u32> {
        change(&mut self.fast4, (u128::from(addr) << 96, len));
        self.v4.insert((addr, len), number)
    }

    fn put6(&mut self, addr: u128, len: u8, number: u32) -> Option<u32> {
        change(&mut self.fast6, (addr, len));
        let old = self.v6.insert((addr, len), number);
        self.long6 += usize::from(old.is_none() && len > 64);
        old
    }

    fn delete4(&mut self, addr: u32, len: u8) -> Option<u32> {
        change(&mut self.fast4, (u128::from(addr) << 96, len));
        self.v4.remove(&(addr, len))
    }

    fn delete6(&mut self, addr: u128, len: u8) -> Option<u32> {
        change(&mut self.fast6, (addr, len));
        let old = self.v6.remove(&(addr, len));
        self.long6 -= usize::from(old.is_some() && len > 64);
        old
    }

    #[inline]
    fn lookup4(&self, ip: u32) -> Option<u32> {
        match &self.fast4 {
            Some(fast) if fast.knows(u128::from(ip) << 96) => fast.get(u128::from(ip) << 96),
            _ => self.v4.get_lpm(&(ip, 32)).map(|(_, number)| *number),
        }
    }

    #[inline]
    fn lookup6(&self, ip: u128) -> Option<u32> {
        match &self.fast6 {
            Some(fast) if fast.knows(ip) => fast.get(ip),
            _ => self.v6.get_lpm(&(ip, 128)).map(|(_, number)| *number),
        }
    }

    fn settle(&mut self) {
        if self.fast4.is_none() && self.v4.len() >= MANY_PREFIXES {
            let prefixes =
                self.v4.iter().map(|((addr, len), number)| ((u128::from(addr) << 96, len), *number));
            self.fast4 = Some(Box::new(IntervalIndex::new(prefixes, self.v4.len(), false)));
        }
        if self.fast6.is_none() && self.v6.len() >= MANY_PREFIXES {
            let prefixes = self.v6.iter().map(|(prefix, number)| (prefix, *number));
            self.fast6 = Some(Box::new(IntervalIndex::new(prefixes, self.v6.len(), self.long6 > 0)));
        }
    }
}

/// Records a changed prefix in the interval index. Drops the index after too many changes.
fn change(fast: &mut Option<Box<IntervalIndex>>, prefix: Prefix) {
    if fast.as_mut().is_some_and(|fast| !fast.change(prefix)) {
        *fast = None;
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
        let entries = match kind {
            Kind::Addr => Entries::Addr(Box::default()),
            Kind::Iface => Entries::Iface(HashMap::new()),
            Kind::Number => Entries::Number(HashMap::new()),
            Kind::Flow(_) => Entries::Flow(HashMap::new()),
            Kind::Mac => Entries::Mac(Box::default()),
        };
        Self { kind, columns, limit: None, locked: false, entries, values: Values::default() }
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
        self.list().iter().all(|(key, value)| matches!(other.get(key), Ok(Some(v)) if v == value))
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
        let number = self.values.take(value);
        let old = match (&mut self.entries, key) {
            (Entries::Addr(all), Key::Net4(addr, len)) => all.put4(*addr, *len, number),
            (Entries::Addr(all), Key::Net6(addr, len)) => all.put6(*addr, *len, number),
            (Entries::Iface(map), Key::Iface(name)) => map.insert(name.clone(), number),
            (Entries::Number(map), Key::Number(key)) => map.insert(*key, number),
            (Entries::Flow(map), Key::Flow(key)) => map.insert(*key, number),
            (Entries::Mac(map), Key::Mac(bits, len)) => map.insert((*bits, *len), number),
            // `get` has rejected all other combinations.
            _ => Some(number),
        };
        if let Some(old) = old {
            self.values.give_back(old);
        }
    }

    /// Builds the interval index of a table with many prefixes. [`super::Ruleset::parse`] calls it last. Takes
    /// about one second per million prefixes. Lookups stay fast until more than a sixteenth of the prefixes have
    /// changed.
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
        let old = match (&mut self.entries, key) {
            (Entries::Addr(all), Key::Net4(addr, len)) => all.delete4(*addr, *len),
            (Entries::Addr(all), Key::Net6(addr, len)) => all.delete6(*addr, *len),
            (Entries::Iface(map), Key::Iface(name)) => map.remove(name),
            (Entries::Number(map), Key::Number(key)) => map.remove(key),
            (Entries::Flow(map), Key::Flow(key)) => map.remove(key),
            (Entries::Mac(map), Key::Mac(bits, len)) => map.remove(&(*bits, *len)),
            _ => return Err(Refused::WrongType),
        };
        if let Some(old) = old {
            self.values.give_back(old);
        }
        Ok(old.is_some())
    }

    /// Deletes all entries.
    pub fn flush(&mut self) {
        let fresh = Self::new(self.kind, Vec::new());
        self.entries = fresh.entries;
        self.values = fresh.values;
    }

    /// Returns the value of exactly this key.
    ///
    /// # Errors
    /// Returns [`Refused::WrongType`].
    pub fn get(&self, key: &Key) -> Result<Option<&Value>, Refused> {
        let number = match (&self.entries, key) {
            (Entries::Addr(all), Key::Net4(addr, len)) => all.v4.get(&(*addr, *len)),
            (Entries::Addr(all), Key::Net6(addr, len)) => all.v6.get(&(*addr, *len)),
            (Entries::Iface(map), Key::Iface(name)) => map.get(name),
            (Entries::Number(map), Key::Number(key)) => map.get(key),
            (Entries::Flow(map), Key::Flow(key)) => map.get(key),
            (Entries::Mac(map), Key::Mac(bits, len)) => map.get(&(*bits, *len)),
            _ => return Err(Refused::WrongType),
        };
        Ok(number.map(|number| self.values.get(*number)))
    }

    /// Returns the value of the longest prefix that contains an address.
    #[inline]
    pub fn lookup_ip(&self, ip: IpAddr) -> Option<&Value> {
        let Entries::Addr(all) = &self.entries else { return None };
        let number = match ip {
            IpAddr::V4(ip) => all.lookup4(ip.to_bits())?,
            IpAddr::V6(ip) => all.lookup6(ip.to_bits())?,
        };
        Some(self.values.get(number))
    }

    /// Returns the value of a number.
    #[inline]
    pub fn lookup_number(&self, number: u32) -> Option<&Value> {
        let Entries::Number(map) = &self.entries else { return None };
        map.get(&number).map(|number| self.values.get(*number))
    }

    /// Returns the value of a port name.
    pub fn lookup_iface(&self, name: &str) -> Option<&Value> {
        let Entries::Iface(map) = &self.entries else { return None };
        map.get(name).map(|number| self.values.get(*number))
    }

    /// Returns the value of a flow. Fields that the table does not use must be empty.
    pub fn lookup_flow(&self, key: &FlowKey) -> Option<&Value> {
        let Entries::Flow(map) = &self.entries else { return None };
        map.get(key).map(|number| self.values.get(*number))
    }

    /// Returns the value of the longest prefix that contains an Ethernet address.
    pub fn lookup_mac(&self, mac: [u8; 6]) -> Option<&Value> {
        let Entries::Mac(map) = &self.entries else { return None };
        let bits = mac.iter().fold(0u64, |bits, octet| bits << 8 | u64::from(*octet)) << 16;
        map.get_lpm(&(bits, 48)).map(|(_, number)| self.values.get(*number))
    }

    /// Returns all entries in the order of their keys.
    pub fn list(&self) -> Vec<(Key, Value)> {
        let value = |number: &u32| *self.values.get(*number);
        match &self.entries {
            Entries::Addr(all) => {
                let four = all.v4.iter().map(|((addr, len), n)| (Key::Net4(addr, len), value(n)));
                let six = all.v6.iter().map(|((addr, len), n)| (Key::Net6(addr, len), value(n)));
                four.chain(six).collect()
            }
            Entries::Iface(map) => {
                let mut all: Vec<_> = map.iter().collect();
                all.sort_unstable();
                all.into_iter().map(|(name, n)| (Key::Iface(name.clone()), value(n))).collect()
            }
            Entries::Number(map) => {
                let mut all: Vec<_> = map.iter().map(|(k, n)| (*k, value(n))).collect();
                all.sort_unstable_by_key(|(key, _)| *key);
                all.into_iter().map(|(key, value)| (Key::Number(key), value)).collect()
            }
            Entries::Flow(map) => {
                let mut all: Vec<_> = map.iter().collect();
                all.sort_unstable();
                all.into_iter().map(|(key, n)| (Key::Flow(*key), value(n))).collect()
            }
            Entries::Mac(map) => map.iter().map(|((bits, len), n)| (Key::Mac(bits, len), value(n))).collect(),
        }
    }
}

impl Table {
    /// Writes the rule file commands that create this table.
    pub(crate) fn write_commands(&self, name: &str, text: &mut String) {
        use fmt::Write;
        let columns: Vec<_> = self.columns.iter().map(|c| column_name(*c)).collect();
        let _ = write!(text, "table {name} create type {} valtype {}", self.kind, columns.join(","));
        if let Some(limit) = self.limit {
            let _ = write!(text, " limit {limit}");
        }
        text.push('\n');
        for (key, value) in self.list() {
            let (key, value) = (self.show_key(&key), self.show_value(&value));
            let _ = writeln!(text, "table {name} add {key} {value}");
        }
        if self.locked {
            let _ = writeln!(text, "table {name} lock");
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
        for key in 0..100 {
            table.add(&Key::Number(key), Value::legacy(key % 2)).unwrap();
        }
        assert_eq!(table.values.numbers.len(), 2);
        for key in 0..100 {
            table.replace(&Key::Number(key), Value::legacy(1)).unwrap();
        }
        assert_eq!(table.values.numbers.len(), 1);
        (0..100).for_each(|key| assert_eq!(table.delete(&Key::Number(key)), Ok(true)));
        assert_eq!(table.values.numbers.len(), 0);
        assert_eq!(table.values.slots.len(), 2);
    }
}
