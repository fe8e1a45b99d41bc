//! Listings that come in pages, each over a connection of its own.
//!
//! A page of rules or of a table's entries begins at an index: when these have changed since the page before, the listing begins
//! anew, so that none is missing and none comes twice.

use std::path::Path;

use towpath::control::protocol::{Answer, Request};
use towpath::control::records::State;
use towpath::report::Rule;

use super::{Connection, Failure};
use crate::args::exit;

/// How often a listing begins anew.
const TRIES: usize = 100;

/// Every rule, the default rule last.
pub(super) fn rules(socket: &Path) -> Result<Vec<Rule>, Failure> {
    pages(|from| {
        let mut engine = Connection::open(socket, Request::ShowRules { from })?;
        let Answer::Rules { rules, next, version } = engine.answer()? else {
            return Err(engine.nonsense("to show rules"));
        };
        Ok((rules, next, version))
    })
}

/// Every entry of a table: keys and values.
pub(super) fn entries(socket: &Path, name: &str) -> Result<Vec<(String, String)>, Failure> {
    pages(|from| {
        let request = Request::ShowTable { name: name.to_owned(), from };
        let mut engine = Connection::open(socket, request)?;
        let Answer::Table { entries, next, version, .. } = engine.answer()? else {
            return Err(engine.nonsense("to show a table"));
        };
        Ok((entries, next, version))
    })
}

/// Every state. Its place is its own: states come and go, and none that stays is missed.
pub(super) fn states(socket: &Path, verbose: bool) -> Result<Vec<State>, Failure> {
    let (mut all, mut from) = (Vec::new(), Some(0));
    while let Some(page) = from {
        let mut engine = Connection::open(socket, Request::ShowStates { from: page, verbose })?;
        let Answer::States { states, next } = engine.answer()? else {
            return Err(engine.nonsense("to show states"));
        };
        all.extend(states);
        from = next;
    }
    Ok(all)
}

/// The rows of all pages. A page is its rows, where the next one begins, and the version of what it is of.
fn pages<T>(
    mut ask: impl FnMut(u64) -> Result<(Vec<T>, Option<u64>, u64), Failure>,
) -> Result<Vec<T>, Failure> {
    for _ in 0..TRIES {
        let (mut all, mut from, first) = ask(0)?;
        while let Some(page) = from {
            let (rows, next, version) = ask(page)?;
            if version != first {
                break;
            }
            all.extend(rows);
            from = next;
        }
        if from.is_none() {
            return Ok(all);
        }
    }
    Err(Failure::new(exit::FAILED, "it changes faster than it can be listed; try again".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_begins_anew_when_what_it_is_of_has_changed() {
        // A row is its version and its index; there are three, a page has one.
        let listing = |changes: &[usize]| {
            let mut asked = 0;
            pages(|from| {
                asked += 1;
                let version = changes.iter().filter(|at| **at < asked).count() as u64;
                Ok((vec![(version, from)], (from < 2).then_some(from + 1), version))
            })
        };
        let rows: [(&[usize], u64); 4] = [(&[], 0), (&[1], 1), (&[2, 3], 2), (&[2, 5, 6], 3)];
        for (changes, version) in rows {
            let all = listing(changes).unwrap_or_else(|_| panic!("{changes:?}"));
            assert_eq!(all, [(version, 0), (version, 1), (version, 2)], "{changes:?}");
        }
        assert!(listing(&(0..1000).collect::<Vec<_>>()).is_err());
    }
}
