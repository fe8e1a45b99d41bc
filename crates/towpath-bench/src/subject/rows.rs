//! Selection and measurement of a subject's rows.

use anyhow::{Result, bail};
use rustix::process::geteuid;

use crate::metric::{Metric, Report};
use crate::peer::Skipped;

/// A row, which yields one or several metrics.
pub(crate) trait Row {
    fn name(&self) -> &str;
}

/// Returns the rows whose names contain `only`. Fails with a list of all names if there are none.
pub(crate) fn chosen<R: Row>(mut rows: Vec<R>, only: Option<&str>) -> Result<Vec<R>> {
    let Some(part) = only else { return Ok(rows) };
    let names = names(&rows);
    rows.retain(|row| row.name().contains(part));
    if rows.is_empty() {
        bail!("no metric's name contains {part:?}; available: {}", names.join(", "));
    }
    Ok(rows)
}

/// Returns the names of the rows.
pub(crate) fn names<R: Row>(rows: &[R]) -> Vec<String> {
    rows.iter().map(|row| row.name().to_owned()).collect()
}

/// Fails unless the user is root: the rows make network namespaces.
pub(crate) fn need_root() -> Result<()> {
    if !geteuid().is_root() {
        bail!("making network namespaces needs root");
    }
    Ok(())
}

/// Measures and prints the rows. Returns true if every measured metric meets its target.
pub(crate) fn measure<R: Row>(
    rows: &[R],
    json: bool,
    mut measure: impl FnMut(&R) -> Result<Metric>,
) -> Result<bool> {
    let (mut report, mut good) = (Report::new(json), true);
    for row in rows {
        match measure(row) {
            Ok(metric) => report.push(metric),
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
    fn rows_are_selected_by_substring() {
        let all = || vec!["64 B", "1500 B", "parked"];
        assert_eq!(chosen(all(), None).unwrap(), all());
        assert_eq!(chosen(all(), Some(" B")).unwrap(), ["64 B", "1500 B"]);
        let error = chosen(all(), Some("none")).unwrap_err().to_string();
        assert!(error.contains("1500 B, parked"), "{error}");
    }
}
