//! The first SYN of a flow is dropped and its repetition accepted: a flood from forged sources does not repeat
//! (`dyn_first_syn`).
//!
//! What: a table of marks, indexed by the flow's hash. A mark is a tag of the flow and the time of its SYN. Of two
//! flows with the same position, the later one is remembered; the other must repeat its SYN once more.
//!
//! References: RFC 6298, 2.1: a SYN is repeated after one second; 5.5: then after two, and so on.

use std::sync::OnceLock;

use crate::state::concurrent::sync::{AtomicU64, Ordering};
use towpath_wire::Time;

/// Marks: 8 MiB. With 100,000 forged SYNs per second, nine of ten real ones are remembered.
#[cfg(not(loom))]
const PLACES: usize = 1 << 20;
#[cfg(loom)]
const PLACES: usize = 1;

/// A second SYN within `SOON` milliseconds belongs to the same flood. After `LATE` milliseconds it is a first SYN
/// again.
const SOON: u32 = 200;
const LATE: u32 = 60_000;

/// The marks. They are allocated when the first SYN comes.
#[derive(Debug, Default)]
pub(crate) struct FirstSynTable(OnceLock<Box<[AtomicU64]>>);

impl FirstSynTable {
    /// Returns true if the SYN of the flow with this hash is a repetition. Remembers it otherwise.
    pub(crate) fn is_repeated(&self, hash: u64, now: Time) -> bool {
        let places = self.0.get_or_init(|| (0..PLACES).map(|_| AtomicU64::new(0)).collect());
        let place = &places[hash as usize % PLACES];
        let repeated = repeats(place, hash, now);
        if repeated.is_none() {
            // Relaxed, here and in repeats(): the word publishes nothing else. Of two flows that store at once, one is
            // forgotten.
            place.store(mark(hash, now), Ordering::Relaxed);
        }
        repeated == Some(true)
    }

    /// As [`FirstSynTable::is_repeated`], and remembers nothing.
    pub(crate) fn would_be_repeated(&self, hash: u64, now: Time) -> bool {
        let place = self.0.get().map(|places| &places[hash as usize % PLACES]);
        place.is_some_and(|place| repeats(place, hash, now) == Some(true))
    }
}

/// Whether the SYN repeats the one that is remembered at its place late enough; `None` if it is a first one.
fn repeats(place: &AtomicU64, hash: u64, now: Time) -> Option<bool> {
    let (before, mark) = (place.load(Ordering::Relaxed), mark(hash, now));
    let age = (mark as u32).wrapping_sub(before as u32);
    (before >> 32 == mark >> 32 && age < LATE).then_some(age >= SOON)
}

/// The tag of the flow, and the time in ms.
fn mark(hash: u64, now: Time) -> u64 {
    (hash >> 32 | 1) << 32 | u64::from((now.as_nanos() / 1_000_000) as u32)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_repetition_is_neither_too_soon_nor_too_late() {
        let syns = FirstSynTable::default();
        let at = |millis: u64| Time::from_nanos(5_000_000_000_000 + millis * 1_000_000);
        let rows = [(0, false), (100, false), (1000, true), (3000, true), (70_000, false), (71_000, true)];
        for (millis, repeated) in rows {
            for _ in 0..2 {
                let foreseen = syns.would_be_repeated(0xdead_beef_0000_0007, at(millis));
                assert_eq!(foreseen, repeated, "{millis} ms");
            }
            assert_eq!(syns.is_repeated(0xdead_beef_0000_0007, at(millis)), repeated, "{millis} ms");
        }
        // Another flow with the same position.
        assert!(!syns.is_repeated(0xfeed_0000_0000_0007, at(72_000)));
        assert!(!syns.is_repeated(0xdead_beef_0000_0007, at(73_000)));
    }
}
