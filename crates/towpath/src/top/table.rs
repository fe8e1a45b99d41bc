//! A table of rows with rates: sorted, filtered, as lines, and as JSON. No IO.

use std::cmp::Ordering;

use serde_json::{Map, Value};

use super::text::{clean, short, wrap};
use crate::control::text::duration;

/// Lines of one row in a list.
const ROW_LINES: usize = 3;

/// A column.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    /// Its title on the terminal.
    pub(super) title: &'static str,
    /// Its name in JSON.
    pub(super) key: &'static str,
    pub(super) kind: Kind,
}

/// The values of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Text, left-aligned.
    Text,
    /// A number, in full: an identifier.
    Id,
    /// A number.
    Count,
    /// A duration in nanoseconds.
    Nanos,
    /// Text of any length. The last column.
    Tail,
}

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Cell {
    /// There is none.
    None,
    Text(String),
    Number(u64),
    /// Per second.
    Rate(f64),
}

/// A row.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    /// The same in each sample.
    pub(super) id: String,
    pub(super) cells: Vec<Cell>,
    /// What the engine said.
    pub(super) object: Value,
}

/// A table.
#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    pub(super) columns: &'static [Column],
    pub(super) rows: Vec<Row>,
    /// Why there are no rows, or which rows are missing.
    pub(super) note: Option<String>,
}

/// The order of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sort {
    /// The index of a column; `None`: the engine's order.
    pub(super) column: Option<usize>,
    pub(super) descending: bool,
}

impl Cell {
    pub(super) fn of(value: &Value) -> Self {
        match value {
            Value::String(text) => Self::Text(text.clone()),
            value => value.as_u64().map_or(Self::None, Self::Number),
        }
    }

    pub(super) fn rate(rate: Option<f64>) -> Self {
        rate.map_or(Self::None, Self::Rate)
    }

    fn show(&self, kind: Kind) -> String {
        match self {
            Self::None => "-".to_owned(),
            Self::Text(text) => clean(text),
            Self::Number(number) if kind == Kind::Id => number.to_string(),
            Self::Number(number) if kind == Kind::Nanos => duration(*number),
            Self::Number(number) => short(*number as f64),
            Self::Rate(rate) => short(*rate),
        }
    }

    fn json(&self) -> Value {
        match self {
            Self::None => Value::Null,
            Self::Text(text) => text.as_str().into(),
            Self::Number(number) => (*number).into(),
            // Three digits are more than the interval between two samples is exact to.
            Self::Rate(rate) => ((rate * 1000.0).round() / 1000.0).into(),
        }
    }

    fn number(&self) -> Option<f64> {
        match self {
            Self::Number(number) => Some(*number as f64),
            Self::Rate(rate) => Some(*rate),
            Self::None | Self::Text(_) => None,
        }
    }

    fn compare(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Text(own), Self::Text(other)) => own.cmp(other),
            // Without a value: last in descending order.
            _ => self.number().unwrap_or(-1.0).total_cmp(&other.number().unwrap_or(-1.0)),
        }
    }
}

impl Table {
    /// Sorts the rows. Rows of equal value stay in the engine's order.
    pub(super) fn sort(&mut self, sort: Sort) {
        let Some(column) = sort.column else { return };
        self.rows.sort_by(|one, other| {
            let order = one.cells[column].compare(&other.cells[column]);
            if sort.descending { order.reverse() } else { order }
        });
    }

    /// Keeps the rows with a cell that contains `words`, in upper or lower case.
    pub(super) fn filter(&mut self, words: &str) {
        let words = words.to_lowercase();
        let contains = |(cell, column): (&Cell, &Column)| match column.kind {
            Kind::Text | Kind::Tail | Kind::Id => cell.show(column.kind).to_lowercase().contains(&words),
            Kind::Count | Kind::Nanos => false,
        };
        self.rows.retain(|row| row.cells.iter().zip(self.columns).any(contains));
    }

    /// The header, and the lines of each row, at most `width` characters wide.
    pub(super) fn lines(&self, width: usize, sort: Option<Sort>) -> (String, Vec<Vec<String>>) {
        let shown: Vec<Vec<String>> = self
            .rows
            .iter()
            .map(|row| self.columns.iter().zip(&row.cells).map(|(c, v)| v.show(c.kind)).collect())
            .collect();
        let title = |at: usize| {
            let mark = match sort {
                Some(Sort { column: Some(column), descending }) if column == at => {
                    if descending {
                        "v"
                    } else {
                        "^"
                    }
                }
                _ => "",
            };
            format!("{}{mark}", self.columns[at].title)
        };
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|at| {
                shown.iter().map(|row| row[at].chars().count()).chain([title(at).len()]).max().unwrap_or(0)
            })
            .collect();
        let cell = |at: usize, text: &str| match self.columns[at].kind {
            Kind::Text | Kind::Tail => format!("{text:<width$}", width = widths[at]),
            _ => format!("{text:>width$}", width = widths[at]),
        };
        let tail = self.columns.iter().position(|column| column.kind == Kind::Tail);
        let fixed = tail.unwrap_or(self.columns.len());
        let head = |cells: &dyn Fn(usize) -> String| {
            (0..fixed).map(|at| cell(at, &cells(at))).collect::<Vec<_>>().join(" ")
        };
        let mut header = head(&title);
        header.extend(tail.map(|at| format!(" {}", title(at))));
        let indent = head(&|_| String::new()).chars().count() + 1;
        let lines = shown.iter().map(|row| {
            let start = head(&|at| row[at].clone());
            let Some(tail) = tail else { return vec![start.trim_end().to_owned()] };
            let parts = wrap(&row[tail], width.saturating_sub(indent), ROW_LINES);
            let line = |(number, part)| match number {
                0 => format!("{start} {part}"),
                _ => format!("{:indent$}{part}", ""),
            };
            parts.into_iter().enumerate().map(line).collect()
        });
        let lines = lines.collect();
        (header, lines)
    }

    /// The table as text for people, without a bound on the width.
    pub(super) fn text(&self, title: &str) -> String {
        let mut text = format!("{title}\n");
        if !self.rows.is_empty() {
            let (header, rows) = self.lines(usize::MAX / 2, None);
            for line in std::iter::once(header).chain(rows.into_iter().flatten()) {
                text += line.trim_end();
                text.push('\n');
            }
        }
        match &self.note {
            Some(note) => text += &format!("{}\n", clean(note)),
            None if self.rows.is_empty() => text += "none\n",
            None => {}
        }
        text
    }

    /// The rows as objects.
    pub(super) fn json(&self) -> Value {
        let object = |row: &Row| -> Map<String, Value> {
            self.columns.iter().zip(&row.cells).map(|(c, cell)| (c.key.to_owned(), cell.json())).collect()
        };
        self.rows.iter().map(object).collect::<Vec<_>>().into()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const COLUMNS: &[Column] = &[
        Column { title: "pkt/s", key: "packets_per_second", kind: Kind::Count },
        Column { title: "rule", key: "rule", kind: Kind::Id },
        Column { title: "text", key: "text", kind: Kind::Tail },
    ];

    fn table() -> Table {
        let row = |rate, rule: u64, text: &str| Row {
            id: rule.to_string(),
            cells: vec![Cell::rate(rate), Cell::Number(rule), Cell::Text(text.into())],
            object: Value::Null,
        };
        let rows = vec![
            row(Some(3.0), 100, "allow udp from any to any"),
            row(None, 65535, "deny\x1b[2J"),
            row(Some(12_345.6), 200, "allow TCP"),
        ];
        Table { columns: COLUMNS, rows, note: None }
    }

    fn numbers(table: &Table) -> Vec<String> {
        table.rows.iter().map(|row| row.id.clone()).collect()
    }

    #[test]
    fn rows_are_sorted_and_filtered() {
        let mut sorted = table();
        sorted.sort(Sort { column: Some(0), descending: true });
        assert_eq!(numbers(&sorted), ["200", "100", "65535"]);
        sorted.sort(Sort { column: Some(0), descending: false });
        assert_eq!(numbers(&sorted), ["65535", "100", "200"]);
        sorted.sort(Sort { column: Some(2), descending: false });
        assert_eq!(numbers(&sorted), ["200", "100", "65535"]);
        for (words, expected) in [("tcp", vec!["200"]), ("65", vec!["65535"]), ("allow", vec!["100", "200"])]
        {
            let mut filtered = table();
            filtered.filter(words);
            assert_eq!(numbers(&filtered), expected, "{words}");
        }
    }

    #[test]
    fn lines_fit_and_hide_nothing() {
        let (header, lines) = table().lines(32, Some(Sort { column: Some(0), descending: true }));
        assert_eq!(header, "pkt/sv  rule text");
        let expected = [
            vec!["     3   100 allow udp from any", "             to any"],
            vec!["     - 65535 deny\\u{1b}[2J"],
            vec![" 12.3k   200 allow TCP"],
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn a_table_is_text_and_json() {
        let text = table().text("rules");
        assert_eq!(text.lines().count(), 5);
        assert!(
            text.starts_with("rules\npkt/s  rule text\n    3   100 allow udp from any to any\n"),
            "{text}"
        );
        assert_eq!(
            table().json()[0],
            json!({ "packets_per_second": 3.0, "rule": 100, "text": "allow udp from any to any" })
        );
        let empty = Table { columns: COLUMNS, ..Table::default() };
        assert_eq!(empty.text("rules"), "rules\nnone\n");
    }
}
