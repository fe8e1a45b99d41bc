//! `struct towpath_metric`: counters by name, from the tables of the crates that count.

use std::ffi::{c_char, c_int};

use towpath_metrics::{Kind, Metric as Row, Metrics};

use crate::error::Failure;
use crate::ffi::Room;

/// `struct towpath_metric`. Texts end with a NUL byte.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Metric {
    /// The table.
    pub group: [c_char; 32],
    /// The counter's name in its table.
    pub name: [c_char; 32],
    /// The unit; empty for events.
    pub unit: [c_char; 16],
    /// One or two sentences.
    pub help: [c_char; 240],
    /// The value.
    pub value: u64,
    /// `TOWPATH_COUNTER` or `TOWPATH_GAUGE`.
    pub kind: u32,
    /// 0.
    pub reserved: u32,
}

/// `TOWPATH_COUNTER`.
pub(crate) const COUNTER: u32 = 0;
/// `TOWPATH_GAUGE`.
pub(crate) const GAUGE: u32 = 1;

/// Writes the first `max` metrics of the tables and returns the number of all.
pub(crate) fn write(tables: &[&dyn Metrics], room: &mut Room<Metric>, max: usize) -> Result<c_int, Failure> {
    let room = room.get(max)?;
    let rows = tables.iter().flat_map(|table| table.each());
    for (into, (row, value)) in room.iter_mut().zip(rows.clone()) {
        into.write(Metric::of(row, value));
    }
    Ok(rows.count() as c_int)
}

impl Metric {
    fn of(row: &Row, value: u64) -> Self {
        Self {
            group: text(row.group),
            name: text(row.name),
            unit: text(row.unit.word()),
            help: text(row.help),
            value,
            kind: match row.kind {
                Kind::Counter => COUNTER,
                // No table has histograms, which have no single value.
                Kind::Gauge | Kind::Histogram => GAUGE,
            },
            reserved: 0,
        }
    }
}

/// Copies a text; one that is too long is cut.
pub(crate) fn text<const N: usize>(from: &str) -> [c_char; N] {
    let mut text = [0; N];
    for (into, byte) in text[..N - 1].iter_mut().zip(from.bytes()) {
        *into = byte as c_char;
    }
    text
}

#[cfg(test)]
mod tests {
    use towpath_mux::{io, mux};
    use towpath_ring::ConsumerStats;

    use super::*;

    #[test]
    fn no_text_is_cut() {
        let tables = [
            mux::Totals::TABLE,
            mux::psock::Stats::TABLE,
            io::AcceptStats::TABLE,
            towpath_send::Counters::TABLE,
            ConsumerStats::TABLE,
        ];
        for row in tables.concat() {
            let Metric { group, name, unit, help, .. } = Metric::of(&row, 0);
            for (text, from) in
                [(&group[..], row.group), (&name, row.name), (&unit, row.unit.word()), (&help, row.help)]
            {
                let length = text.iter().position(|byte| *byte == 0);
                assert_eq!(length, Some(from.len()), "{from}");
                assert!(from.is_ascii(), "{from}");
            }
        }
    }
}
