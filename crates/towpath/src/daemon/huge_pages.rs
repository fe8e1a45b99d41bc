//! Huge pages for the states: whether the kernel has any for those who ask for them (madvise(2), MADV_HUGEPAGE).

use std::io;

use towpath_gate::state::Pages;

/// What the kernel does with those who ask; the word in brackets is in force (Linux, admin-guide/mm/transhuge).
const ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// The pages that the states are in: huge ones when they are wanted and there are any. The log says what it came to.
pub(super) fn states(wanted: bool) -> Pages {
    if !wanted {
        return Pages::Base;
    }
    match why_none(std::fs::read_to_string(ENABLED)) {
        None => {
            log::info!("hugepages: the states are in huge pages, as far as the kernel has some free");
            Pages::Huge
        }
        Some(why) => {
            log::warn!("hugepages: {why}: the states are in ordinary pages");
            Pages::Base
        }
    }
}

/// Why there are none, from the contents of [`ENABLED`].
fn why_none(enabled: io::Result<String>) -> Option<String> {
    match enabled {
        Ok(words) if words.contains("[always]") || words.contains("[madvise]") => None,
        Ok(_) => Some(format!("{ENABLED} does not say `madvise` (write it there, as root)")),
        Err(error) => Some(format!("the kernel has no transparent huge pages ({ENABLED}: {error})")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_none_is_told_why() {
        let rows = [
            (Ok("always [madvise] never"), None),
            (Ok("[always] madvise never"), None),
            (Ok("always madvise [never]"), Some("does not say `madvise`")),
            (Ok(""), Some("does not say `madvise`")),
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
