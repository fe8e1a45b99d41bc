//! The guarantees to workers and clients if a worker dies: one table for `towpath mux --help` and for the book.

/// A row: the values of an option, and the cells of the two columns.
struct Row {
    values: &'static [&'static str],
    cells: [&'static str; 2],
}

const fn row(values: &'static [&'static str], cells: [&'static str; 2]) -> Row {
    Row { values, cells }
}

/// Guarantees by `--redeliver`.
const REDELIVER_HEAD: [&str; 2] = ["a message that a worker had begun when it died", "guarantee"];
const REDELIVER: [Row; 3] = [
    row(&["--redeliver 0"], ["is given up, with all messages of its frame that were begun", "at most once"]),
    row(
        &["--redeliver N"],
        ["is given again up to N times, then given up", "at least once, until N workers died with it"],
    ),
    row(
        &["body=stream"],
        ["is given up if it came in parts, with any `--redeliver`; its connection ends", "at most once"],
    ),
];

/// Effects on the connection of such a message, by `--order`.
const ORDER_HEAD: [&str; 2] = ["while a message is given again", "when its worker ends"];
const ORDER: [Row; 4] = [
    row(&["none", "key"], ["others are processed; those with the same key wait", "the connection stays"]),
    row(&["replies"], ["others are processed, and their answers wait", "the connection stays"]),
    row(&["serial"], ["the connection waits", "the connection stays"]),
    row(&["sticky"], ["the connection waits", "see `--on-worker-end`"]),
];

/// The paragraph after the help of `towpath mux`.
pub fn help() -> String {
    let mut text = String::from(
        "Delivery:\n  A message is done when its worker released it. An answered message is never given again; one that no \
         worker has begun is given to another worker.\n",
    );
    for row in &REDELIVER {
        let [then, guarantee] = row.cells;
        let then = then.replace('`', "");
        text += &format!("\n  {}: {guarantee}\n      {} {then}\n", row.values.join(", "), REDELIVER_HEAD[0]);
    }
    for row in &ORDER {
        text += &format!("\n  --order {}:\n", row.values.join(", "));
        for (case, cell) in ORDER_HEAD.iter().zip(row.cells) {
            text += &format!("      {case}: {}\n", cell.replace('`', ""));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(first: &str, head: [&str; 2], rows: &[Row]) -> String {
        let mut text = format!("| {first}{} | {} |\n|---|---|---|\n", head[0], head[1]);
        for row in rows {
            let values: Vec<String> = row.values.iter().map(|value| format!("`{value}`")).collect();
            text += &format!("| {} | {} | {} |\n", values.join(", "), row.cells[0], row.cells[1]);
        }
        text
    }

    /// Puts the tables into the documentation with `TOWPATH_WRITE_DOCS=1`; compares them otherwise.
    #[test]
    fn the_documentation_has_the_tables() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/src/reference/mux.md");
        let text = std::fs::read_to_string(path).expect("the page");
        let mut expected = text.clone();
        for table in [table("| ", REDELIVER_HEAD, &REDELIVER), table("order | ", ORDER_HEAD, &ORDER)] {
            let head = table.lines().next().expect("a head");
            let start = expected.find(head).unwrap_or_else(|| panic!("mux.md has no line {head:?}"));
            let end = start + expected[start..].find("\n\n").expect("the end of the table") + 1;
            expected.replace_range(start..end, &table);
        }
        if std::env::var_os("TOWPATH_WRITE_DOCS").is_some() {
            std::fs::write(path, expected).expect("it is writable");
            return;
        }
        assert!(expected == text, "mux.md differs: run this test once with TOWPATH_WRITE_DOCS=1");
    }
}
