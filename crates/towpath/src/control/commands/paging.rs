//! Listings in pages. Each page fits into one answer.
//!
//! Each answer has `next`, the `from` of the next page. A page of rules or of table entries begins at an index. For tables, the client
//! repeats the `version` of the first page, and the server keeps the listing of this version for a while. For rules, the client starts
//! again if `version` has changed since the first page. Either way no row is missing or listed twice.

use serde_json::Value;

use super::super::client::Failure;
use crate::exit;

/// Rows of one page.
pub(super) const PAGE: usize = 1000;

/// Bytes of text of one page.
const PAGE_BYTES: usize = 256 << 10;

/// Maximum number of times that a client starts a listing.
const TRIES: usize = 100;

/// Returns the rows of the page that begins at `from`, and the beginning of the next page.
pub(super) fn page<T>(rows: Vec<T>, from: u64, bytes: impl Fn(&T) -> usize) -> (Vec<T>, Option<u64>) {
    let total = rows.len() as u64;
    let from = from.min(total);
    page_of(rows.into_iter().skip(from as usize), from, total, bytes)
}

/// As [`page`], of rows that begin at `from`; `total` is the number of all rows.
pub(super) fn page_of<T>(
    rows: impl Iterator<Item = T>,
    from: u64,
    total: u64,
    bytes: impl Fn(&T) -> usize,
) -> (Vec<T>, Option<u64>) {
    let mut room = PAGE_BYTES;
    let fits = |row: &T| {
        let fits = room > 0;
        room = room.saturating_sub(bytes(row));
        fits
    };
    let rows: Vec<T> = rows.take(PAGE).take_while(fits).collect();
    let next = from + rows.len() as u64;
    (rows, (next < total).then_some(next))
}

/// Requests all pages and returns their rows, which are in the member `key` of each answer. Without `version` in the answers, rows may
/// appear and disappear between pages; the cursor `next` skips no row that exists during the whole listing.
pub(super) fn all(
    mut ask: impl FnMut(u64) -> Result<Value, Failure>,
    key: &str,
) -> Result<Vec<Value>, Failure> {
    for _ in 0..TRIES {
        let (mut rows, mut from, mut version) = (Vec::new(), Some(0), None);
        while let Some(page) = from {
            let mut answer = ask(page)?;
            let current = answer["version"].take();
            if version.get_or_insert_with(|| current.clone()) != &current {
                break;
            }
            from = answer["next"].as_u64();
            if let Value::Array(page) = answer[key].take() {
                rows.extend(page);
            }
        }
        if from.is_none() {
            return Ok(rows);
        }
    }
    Err(Failure::new(exit::FAILED, "the rules or tables change faster than they can be listed; try again"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pages_are_complete() {
        let (mut from, mut got) = (0, Vec::new());
        loop {
            let (rows, next) = page((0..2500).collect::<Vec<u32>>(), from, |_| 1000);
            assert!(rows.len() <= PAGE_BYTES / 1000 + 1);
            got.extend(rows);
            match next {
                Some(next) => from = next,
                None => break,
            }
        }
        assert!(got.into_iter().eq(0..2500));
        assert_eq!(page(vec![1], 7, |_| 1), (vec![], None));
        // A row longer than a page has a page of its own.
        assert_eq!(page(vec![1, 2], 0, |_| PAGE_BYTES), (vec![1], Some(1)));
    }

    #[test]
    fn a_listing_starts_again_after_a_change() {
        // A row is its version and its index. There are three rows, one per page.
        let listing = |changes: &[usize]| {
            let mut asked = 0;
            let ask = |from: u64| {
                asked += 1;
                let version = changes.iter().filter(|at| **at < asked).count();
                let next = (from < 2).then_some(from + 1);
                Ok(json!({ "rows": [[version, from]], "next": next, "version": version }))
            };
            all(ask, "rows")
        };
        let rows: [(&[usize], u64); 4] = [(&[], 0), (&[1], 1), (&[2, 3], 2), (&[2, 5, 6], 3)];
        for (changes, version) in rows {
            let all = listing(changes).unwrap_or_else(|_| panic!("{changes:?}"));
            assert_eq!(json!(all), json!([[version, 0], [version, 1], [version, 2]]), "{changes:?}");
        }
        assert!(listing(&(0..1000).collect::<Vec<_>>()).is_err());
    }
}
