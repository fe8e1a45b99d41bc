//! Table values, by column.

use std::collections::HashMap;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A column of a table's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Column {
    /// All numeric columns at once, as one 32-bit number; or an address.
    Legacy,
    /// Rule number for skipto and call.
    Skipto,
    /// Pipe.
    Pipe,
    /// Code point.
    Dscp,
    /// Tag.
    Tag,
    /// Queue of divert, tee and inspect.
    Divert,
    /// Limit of states.
    Limit,
    /// IPv4 next hop.
    Ipv4,
    /// IPv6 next hop.
    Ipv6,
    /// Mark.
    Mark,
}

/// Column names for `valtype`.
pub(crate) const COLUMNS: &[(&str, Column)] = &[
    ("legacy", Column::Legacy),
    ("skipto", Column::Skipto),
    ("pipe", Column::Pipe),
    ("dscp", Column::Dscp),
    ("tag", Column::Tag),
    ("divert", Column::Divert),
    ("limit", Column::Limit),
    ("ipv4", Column::Ipv4),
    ("ipv6", Column::Ipv6),
    ("mark", Column::Mark),
];

/// A value: the meaning of `tablearg` for each use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Value {
    /// The number that `table(name,value)` compares, and that a legacy table lists.
    pub number: u32,
    /// For skipto and call.
    pub skipto: u32,
    /// For pipe.
    pub pipe: u32,
    /// For setdscp.
    pub dscp: u32,
    /// For tag, untag and tagged.
    pub tag: u32,
    /// For divert, tee and inspect.
    pub divert: u32,
    /// For limit.
    pub limit: u32,
    /// For mark and setmark.
    pub mark: u32,
    /// For fwd of IPv4 packets.
    pub ipv4: Option<Ipv4Addr>,
    /// For fwd of IPv6 packets.
    pub ipv6: Option<Ipv6Addr>,
}

impl Value {
    /// Creates the value of a legacy table: one number for all uses.
    pub const fn legacy(number: u32) -> Self {
        Self {
            number,
            skipto: number,
            pipe: number,
            dscp: number,
            tag: number,
            divert: number,
            limit: number,
            mark: number,
            ipv4: if number == 0 { None } else { Some(Ipv4Addr::from_bits(number)) },
            ipv6: None,
        }
    }

    /// Sets one numeric column.
    pub(crate) fn set(&mut self, column: Column, number: u32) {
        match column {
            Column::Legacy => *self = Self { ipv6: self.ipv6, ..Self::legacy(number) },
            Column::Skipto => self.skipto = number,
            Column::Pipe => self.pipe = number,
            Column::Dscp => self.dscp = number,
            Column::Tag => {
                self.tag = number;
                self.number = number;
            }
            Column::Divert => self.divert = number,
            Column::Limit => self.limit = number,
            Column::Mark => self.mark = number,
            // 0.0.0.0 is not a next hop.
            Column::Ipv4 => self.ipv4 = if number == 0 { None } else { Some(Ipv4Addr::from_bits(number)) },
            Column::Ipv6 => {}
        }
    }
}

pub(super) fn column_name(column: Column) -> &'static str {
    COLUMNS.iter().find(|(_, c)| *c == column).map_or("legacy", |(name, _)| name)
}

/// Shares equal values between the entries of a table and its clones. Only changes use it, never a lookup.
///
/// At most [`SHARED_MAX`] values are known at a time: a further one is stored once per entry.
#[derive(Clone, Debug, Default)]
pub(super) struct SharedValues(Arc<Mutex<Known>>);

#[derive(Debug, Default)]
struct Known {
    values: HashMap<Value, Weak<Value>>,
    /// New values since those without an entry were discarded, and the number that was kept then.
    new: usize,
    kept: usize,
}

/// Maximum number of known values.
const SHARED_MAX: usize = 1 << 16;

impl SharedValues {
    /// Returns the value, shared with the entries that have an equal one.
    pub(super) fn share(&self, value: Value) -> Arc<Value> {
        // The map is consistent at every step, even after a panic.
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shared) = known.values.get(&value).and_then(Weak::upgrade) {
            return shared;
        }
        known.new += 1;
        if known.new > known.kept.max(64) {
            known.values.retain(|_, value| value.strong_count() > 0);
            (known.new, known.kept) = (0, known.values.len());
        }
        let shared = Arc::new(value);
        if known.values.len() < SHARED_MAX {
            known.values.insert(value, Arc::downgrade(&shared));
        }
        shared
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_are_shared_and_the_number_of_known_ones_is_bounded() {
        let shared = SharedValues::default();
        let (one, same) = (shared.share(Value::legacy(1)), shared.share(Value::legacy(1)));
        assert!(Arc::ptr_eq(&one, &same) && !Arc::ptr_eq(&one, &shared.share(Value::legacy(2))));
        // Values without an entry are discarded.
        (0..10_000).for_each(|number| drop(shared.share(Value::legacy(number))));
        let known = || shared.0.lock().unwrap().values.len();
        assert!(known() <= 200, "{}", known());
        assert!(Arc::ptr_eq(&one, &shared.share(Value::legacy(1))));
        let all: Vec<_> =
            (0..2 * SHARED_MAX as u32).map(|number| shared.share(Value::legacy(number))).collect();
        assert_eq!((known(), all.len()), (SHARED_MAX, 2 * SHARED_MAX));
    }
}
