//! The rows of a subject: those that were asked for, and what came of each.

use anyhow::{Result, bail};
use rustix::process::geteuid;

use crate::bar::{Bar, Report};
use crate::peer::Skipped;

/// What gives one bar, or several.
pub(crate) trait Row {
    fn name(&self) -> &str;
}

/// Those rows whose names contain `only`; an error that lists them all when there are none.
pub(crate) fn chosen<R: Row>(mut rows: Vec<R>, only: Option<&str>) -> Result<Vec<R>> {
    let Some(part) = only else { return Ok(rows) };
    let names = names(&rows);
    rows.retain(|row| row.name().contains(part));
    if rows.is_empty() {
        bail!("no bar's name contains {part:?}; there are: {}", names.join(", "));
    }
    Ok(rows)
}

/// What the rows are called.
pub(crate) fn names<R: Row>(rows: &[R]) -> Vec<String> {
    rows.iter().map(|row| row.name().to_owned()).collect()
}

/// For rows in network namespaces.
pub(crate) fn need_root() -> Result<()> {
    if !geteuid().is_root() {
        bail!("making network namespaces needs root");
    }
    Ok(())
}

/// Measures row by row, and prints; whether every bar that could be measured holds.
pub(crate) fn measure<R: Row>(
    rows: &[R],
    json: bool,
    mut measure: impl FnMut(&R) -> Result<Bar>,
) -> Result<bool> {
    let (mut report, mut good) = (Report::new(json), true);
    for row in rows {
        match measure(row) {
            Ok(bar) => report.push(bar),
            Err(error) if error.is::<Skipped>() => eprintln!("{}: {error}", row.name()),
            Err(error) => {
                eprintln!("{}: failed: {error:#}", row.name());
                good = false;
            }
        }
    }
    Ok(report.finish()? && good)
}

#[cfg(test)]
mod tests {
    use super::{Row, chosen};

    impl Row for &str {
        fn name(&self) -> &str {
            self
        }
    }

    #[test]
    fn rows_are_chosen_by_a_part_of_their_names() {
        let all = || vec!["64 B", "1500 B", "parked"];
        assert_eq!(chosen(all(), None).unwrap(), all());
        assert_eq!(chosen(all(), Some(" B")).unwrap(), ["64 B", "1500 B"]);
        let error = chosen(all(), Some("none")).unwrap_err().to_string();
        assert!(error.contains("1500 B, parked"), "{error}");
    }
}
