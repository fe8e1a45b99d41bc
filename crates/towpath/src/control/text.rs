//! Tables and numbers as text.

use serde_json::Value;

/// Renders rows in aligned columns, right-aligned except for the last one. The first row is the header.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let widths: Vec<usize> =
        (0..columns).map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        for (column, cell) in row.iter().enumerate() {
            if column > 0 {
                text += "  ";
            }
            match column + 1 == columns {
                true => text += cell,
                false => text += &format!("{cell:>width$}", width = widths[column]),
            }
        }
        text.push('\n');
    }
    text
}

/// A header and one row for each object: each column is a title and the key of its value.
pub(crate) fn columns(spec: &[(&str, &str)], objects: &[Value]) -> Vec<Vec<String>> {
    let header = spec.iter().map(|(title, _)| (*title).to_owned()).collect();
    let row = |object: &Value| spec.iter().map(|(_, key)| cell(&object[*key])).collect();
    std::iter::once(header).chain(objects.iter().map(row)).collect()
}

/// The elements of an array; none for any other value.
pub(crate) fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A value as a cell. Null is `-`.
pub(crate) fn cell(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The counters of an object that are not zero: `3 no room, 1 too large`. `None` if all are.
pub(crate) fn nonzero<'a>(counters: impl IntoIterator<Item = (&'a String, &'a Value)>) -> Option<String> {
    let counters = counters.into_iter().filter(|(_, value)| value.as_u64().is_some_and(|value| value > 0));
    let counters: Vec<String> =
        counters.map(|(name, value)| format!("{value} {}", name.replace('_', " "))).collect();
    (!counters.is_empty()).then(|| counters.join(", "))
}

/// Nanoseconds in the unit that leaves at most four digits.
pub(crate) fn duration(nanos: u64) -> String {
    match nanos {
        0..10_000 => format!("{nanos}ns"),
        10_000..10_000_000 => format!("{}us", nanos / 1_000),
        10_000_000..10_000_000_000 => format!("{}ms", nanos / 1_000_000),
        _ => format!("{}s", nanos / 1_000_000_000),
    }
}

/// A value in nanoseconds. Null is `-`.
pub(crate) fn age(value: &Value) -> String {
    value.as_u64().map_or_else(|| "-".to_owned(), duration)
}
