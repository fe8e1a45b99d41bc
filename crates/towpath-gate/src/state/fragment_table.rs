//! Ports of fragmented datagrams: a later fragment has none, and finds its state by those of the first.
//!
//! What: virtual reassembly. Nothing is kept but one word for a datagram: a tag, the time, and the ports that its first
//! fragment had, in the place that the hash of its addresses, protocol and identification says (RFC 791, 3.2; RFC 8200,
//! 4.5). A datagram in the same place takes it over. Only first fragments of flows with a state are remembered, so a flood
//! of others takes nobody's place.
//!
//! Bounded: 65,536 datagrams, 32 to 40 s (RFC 791's and FreeBSD's `net.inet.ip.fragttl` of 30 s, rounded up). A later
//! fragment that comes before the first has no ports, as without this: it is not held, for there is no bound on those whose
//! first never comes. The tag has 16 bits behind 16 of the place, and the
//! hash a secret: what is taken for another datagram's is one in 2^31. Times come again after six days, when a datagram of
//! which nobody took the place is known once more.

use std::sync::OnceLock;

use crate::state::concurrent::sync::{AtomicU64, Ordering};
use towpath_wire::Time;

#[cfg(not(loom))]
const PLACES: usize = 1 << 16;
#[cfg(loom)]
const PLACES: usize = 1;

/// Times are in units of 8 s, 16 bits of them.
const UNIT: u64 = 8_000_000_000;
const UNITS: u64 = 0xffff;
/// So many units later a datagram is forgotten.
const LATE: u64 = 4;

/// The datagrams; there is memory for them when the first comes.
#[derive(Debug, Default)]
pub(crate) struct FragmentTable(OnceLock<Box<[AtomicU64]>>);

impl FragmentTable {
    /// Remembers the ports of the datagram with this hash.
    pub(crate) fn note(&self, hash: u64, (src, dst): (u16, u16), now: Time) {
        let places = self.0.get_or_init(|| (0..PLACES).map(|_| AtomicU64::new(0)).collect());
        let word = tag(hash) | unit(now) << 32 | u64::from(src) << 16 | u64::from(dst);
        // Relaxed: the word is all that there is.
        places[hash as usize % PLACES].store(word, Ordering::Relaxed);
    }

    /// The ports of that datagram.
    pub(crate) fn find(&self, hash: u64, now: Time) -> Option<(u16, u16)> {
        let word = self.0.get()?[hash as usize % PLACES].load(Ordering::Relaxed);
        let age = unit(now).wrapping_sub(word >> 32 & UNITS) & UNITS;
        let same = word != 0 && word >> 48 << 48 == tag(hash) && age <= LATE;
        same.then_some(((word >> 16) as u16, word as u16))
    }
}

/// The upper 16 bits, never zero.
fn tag(hash: u64) -> u64 {
    (hash >> 48 | 1) << 48
}

fn unit(now: Time) -> u64 {
    (now.as_nanos() / UNIT) & UNITS
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn ports_are_known_for_a_while() {
        let fragments = FragmentTable::default();
        let hash = 0x1234_5678_9abc_def0;
        assert_eq!(fragments.find(hash, Time::from_secs(8)), None);
        fragments.note(hash, (4000, 53), Time::from_secs(8));
        // Behind the last, time goes round.
        let rows = [
            (8, true),
            (40, true),
            (48, false),
            (2000, false),
            (2056, false),
            (8 << 16, false),
            (8 + (8 << 16), true),
        ];
        for (seconds, known) in rows {
            let found = fragments.find(hash, Time::from_secs(seconds));
            assert_eq!(found, known.then_some((4000, 53)), "{seconds}");
        }
        // Another datagram in the same place.
        assert_eq!(fragments.find(hash ^ 1 << 63, Time::from_secs(8)), None);
        fragments.note(hash ^ 1 << 63, (1, 2), Time::from_secs(8));
        assert_eq!(fragments.find(hash, Time::from_secs(8)), None);
    }
}
