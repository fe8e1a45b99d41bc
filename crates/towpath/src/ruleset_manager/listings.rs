//! Listings of tables that clients read in pages: each page belongs to the same moment, however often the table changes.
//!
//! A listing shares its entries with the table: it needs memory only for the entries that changed afterwards. At most [`LISTINGS`] are kept, each
//! for [`KEPT`] after its last page. A client whose listing was discarded must list again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use towpath_gate::rules::table::Listing;

/// Maximum number of listings.
const LISTINGS: usize = 8;

/// Time for which a listing is kept after its last page.
const KEPT: Duration = Duration::from_secs(60);

/// The listings, the most recently used one at the end.
#[derive(Default)]
pub(super) struct Listings(Mutex<Vec<Kept>>);

struct Kept {
    name: String,
    version: u64,
    listing: Arc<Listing>,
    used: Instant,
}

impl Listings {
    /// Returns the listing of a table at this version of the rules and tables.
    pub(super) fn find(&self, name: &str, version: u64) -> Option<Arc<Listing>> {
        let mut all = self.locked();
        let at = all.iter().position(|kept| kept.version == version && kept.name == name)?;
        let mut kept = all.remove(at);
        kept.used = Instant::now();
        let listing = Arc::clone(&kept.listing);
        all.push(kept);
        Some(listing)
    }

    /// Returns the listing, and keeps it.
    pub(super) fn keep(&self, name: &str, version: u64, make: impl FnOnce() -> Listing) -> Arc<Listing> {
        if let Some(listing) = self.find(name, version) {
            return listing;
        }
        let listing = Arc::new(make());
        let kept =
            Kept { name: name.to_owned(), version, listing: Arc::clone(&listing), used: Instant::now() };
        let mut all = self.locked();
        all.push(kept);
        if all.len() > LISTINGS {
            all.remove(0);
        }
        listing
    }

    /// Frees listings that no client reads.
    pub(super) fn expire(&self, now: Instant) {
        self.locked().retain(|kept| now.saturating_duration_since(kept.used) < KEPT);
    }

    fn locked(&self) -> MutexGuard<'_, Vec<Kept>> {
        // The list is consistent after every step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use towpath_gate::rules::table::Table;

    use super::*;

    #[test]
    fn listings_are_kept_while_they_are_read_and_their_number_is_bounded() {
        let listings = Listings::default();
        let make = || Listing::new(&Table::default());
        let first = listings.keep("a", 1, make);
        assert!(Arc::ptr_eq(&first, &listings.keep("a", 1, make)));
        assert!(listings.find("a", 2).is_none() && listings.find("b", 1).is_none());
        for version in 2..=LISTINGS as u64 {
            listings.keep("a", version, make);
        }
        // The most recently read listing stays.
        assert!(listings.find("a", 1).is_some());
        listings.keep("a", 100, make);
        assert!(listings.find("a", 1).is_some() && listings.find("a", 2).is_none());
        assert_eq!(listings.locked().len(), LISTINGS);
        listings.expire(Instant::now());
        assert_eq!(listings.locked().len(), LISTINGS);
        listings.expire(Instant::now() + KEPT);
        assert!(listings.locked().is_empty());
    }
}
