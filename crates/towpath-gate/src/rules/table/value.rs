//! Table values, by column.

use std::collections::HashMap;
use std::net::{Ipv4Addr, Ipv6Addr};

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

/// Values with reference counts. Equal values are stored once.
#[derive(Clone, Debug, Default)]
pub(super) struct Values {
    pub(super) slots: Vec<(Value, u32)>,
    pub(super) numbers: HashMap<Value, u32>,
    free: Vec<u32>,
}

impl Values {
    pub(super) fn get(&self, number: u32) -> &Value {
        &self.slots[number as usize].0
    }

    /// Returns the number of `value` and adds a reference.
    pub(super) fn take(&mut self, value: Value) -> u32 {
        if let Some(number) = self.numbers.get(&value) {
            self.slots[*number as usize].1 += 1;
            return *number;
        }
        let number = match self.free.pop() {
            Some(number) => {
                self.slots[number as usize] = (value, 1);
                number
            }
            None => {
                self.slots.push((value, 1));
                self.slots.len() as u32 - 1
            }
        };
        self.numbers.insert(value, number);
        number
    }

    /// Removes a reference.
    pub(super) fn give_back(&mut self, number: u32) {
        let (value, uses) = &mut self.slots[number as usize];
        *uses -= 1;
        if *uses == 0 {
            self.numbers.remove(value);
            self.free.push(number);
        }
    }
}
