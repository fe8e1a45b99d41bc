//! The first SYN of a flow is dropped, its repetition is not: who floods with made-up sources does not repeat
//! (`dyn_first_syn`).
//!
//! What: a table of marks, each the tag of a flow and the time of its SYN, in the place that the flow's hash says. There is no
//! chain: of two flows in one place the later one is remembered. Whoever is forgotten repeats once more.
//!
//! RFC 6298, 2.1: a SYN is repeated after a second; 5.7: then after two, and so on.

use std::sync::OnceLock;

use crate::state::concurrent::sync::{AtomicU64, Ordering};
use towpath_wire::Time;

/// Places, 8 MiB: among a hundred thousand made-up SYNs in a second nine of ten real ones are remembered.
#[cfg(not(loom))]
const PLACES: usize = 1 << 20;
#[cfg(loom)]
const PLACES: usize = 1;

/// Milliseconds within which a second SYN is no repetition but a part of the same flood, and after which it is a first
/// one again.
const SOON: u32 = 200;
const LATE: u32 = 60_000;

/// The marks; there is memory for them when the first SYN comes.
#[derive(Debug, Default)]
pub(crate) struct FirstSynTable(OnceLock<Box<[AtomicU64]>>);

impl FirstSynTable {
    /// Whether the SYN of the flow with this hash is a repetition. If not, it is remembered.
    pub(crate) fn is_repeated(&self, hash: u64, now: Time) -> bool {
        let places = self.0.get_or_init(|| (0..PLACES).map(|_| AtomicU64::new(0)).collect());
        let place = &places[hash as usize % PLACES];
        let (tag, millis) = (hash >> 32 | 1, (now.as_nanos() / 1_000_000) as u32);
        // Relaxed: the word is all that there is.
        let before = place.load(Ordering::Relaxed);
        let age = millis.wrapping_sub(before as u32);
        match before >> 32 == tag {
            true if age < SOON => false,
            true if age < LATE => true,
            _ => {
                place.store(tag << 32 | u64::from(millis), Ordering::Relaxed);
                false
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_repetition_comes_neither_at_once_nor_much_later() {
        let syns = FirstSynTable::default();
        let at = |millis: u64| Time::from_nanos(5_000_000_000_000 + millis * 1_000_000);
        let rows = [(0, false), (100, false), (1000, true), (3000, true), (70_000, false), (71_000, true)];
        for (millis, repeated) in rows {
            assert_eq!(syns.is_repeated(0xdead_beef_0000_0007, at(millis)), repeated, "{millis} ms");
        }
        // Another flow in the same place.
        assert!(!syns.is_repeated(0xfeed_0000_0000_0007, at(72_000)));
        assert!(!syns.is_repeated(0xdead_beef_0000_0007, at(73_000)));
    }
}
