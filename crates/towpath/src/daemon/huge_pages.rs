//! Huge pages for the state table: checks whether the kernel grants them on request (madvise(2), MADV_HUGEPAGE).

use std::io;

use towpath_gate::state::Pages;

/// The kernel's policy; the word in brackets is in force (Linux, admin-guide/mm/transhuge).
const ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Selects the pages of the state table: huge pages if they are wanted and available. Logs the outcome.
pub(super) fn states(wanted: bool) -> Pages {
    if !wanted {
        return Pages::Base;
    }
    match why_none(std::fs::read_to_string(ENABLED)) {
        None => {
            tracing::info!("hugepages: the state table uses huge pages where the kernel has free ones");
            Pages::Huge
        }
        Some(why) => {
            tracing::warn!("hugepages: {why}; the state table uses normal pages");
            Pages::Base
        }
    }
}

/// Returns why huge pages are unavailable, from the contents of [`ENABLED`].
fn why_none(enabled: io::Result<String>) -> Option<String> {
    match enabled {
        Ok(words) if words.contains("[always]") || words.contains("[madvise]") => None,
        Ok(_) => Some(format!("{ENABLED} is not `madvise` or `always`; run: echo madvise > {ENABLED}")),
        Err(error) => Some(format!("the kernel has no transparent huge pages ({ENABLED}: {error})")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_huge_pages_have_a_reason() {
        let rows = [
            (Ok("always [madvise] never"), None),
            (Ok("[always] madvise never"), None),
            (Ok("always madvise [never]"), Some("is not `madvise`")),
            (Ok(""), Some("is not `madvise`")),
            (Err(io::ErrorKind::NotFound), Some("no transparent huge pages")),
        ];
        for (enabled, expected) in rows {
            let why = why_none(enabled.map(str::to_owned).map_err(io::Error::from));
            assert_eq!(why.is_some(), expected.is_some(), "{enabled:?}: {why:?}");
            assert!(why.unwrap_or_default().contains(expected.unwrap_or_default()), "{enabled:?}");
        }
        assert_eq!(states(false), Pages::Base);
    }
}
