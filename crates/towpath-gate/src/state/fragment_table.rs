//! Ports of fragmented datagrams. A later fragment has none, and finds its state by those of the first.
//!
//! What: virtual reassembly. The table has one word per datagram: a tag, the time, and the ports of its first
//! fragment. The hash of addresses, protocol and identification (RFC 791, 3.2; RFC 8200, 4.5) is the position. A
//! datagram at the same position replaces it. Only first fragments of flows with a state are recorded, so that a
//! flood of others replaces nothing.
//!
//! Bounded: 65,536 datagrams, for 32 to 40 s (30 s in RFC 791 and FreeBSD's `net.inet.ip.fragttl`, rounded up). A
//! later fragment that comes before the first has no ports. It is not held, because the number of datagrams whose
//! first fragment never comes is not bounded. The tag has 16 bits beside the 16 bits of the position, and the hash is
//! keyed: a fragment gets the ports of another datagram with probability 2^-31. Times repeat after six days; a
//! datagram that was not replaced by then is known once more.

use std::sync::OnceLock;

use crate::state::concurrent::sync::{AtomicU64, Ordering};
use towpath_wire::Time;

#[cfg(not(loom))]
const PLACES: usize = 1 << 16;
#[cfg(loom)]
const PLACES: usize = 1;

/// Times are in units of 8 s, modulo 2^16.
const UNIT: u64 = 8_000_000_000;
const UNITS: u64 = 0xffff;
/// A datagram is forgotten after this many units.
const LATE: u64 = 4;

/// The datagrams. They are allocated when the first one comes.
#[derive(Debug, Default)]
pub(crate) struct FragmentTable(OnceLock<Box<[AtomicU64]>>);

impl FragmentTable {
    /// Records the ports of the datagram with this hash.
    pub(crate) fn note(&self, hash: u64, (src, dst): (u16, u16), now: Time) {
        let places = self.0.get_or_init(|| (0..PLACES).map(|_| AtomicU64::new(0)).collect());
        let word = tag(hash) | unit(now) << 32 | u64::from(src) << 16 | u64::from(dst);
        // Relaxed, here and below: the word publishes nothing else.
        places[hash as usize % PLACES].store(word, Ordering::Relaxed);
    }

    /// The ports of the datagram with this hash.
    pub(crate) fn find(&self, hash: u64, now: Time) -> Option<(u16, u16)> {
        // Relaxed: as in note().
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
    fn ports_are_known_for_32_to_40_seconds() {
        let fragments = FragmentTable::default();
        let hash = 0x1234_5678_9abc_def0;
        assert_eq!(fragments.find(hash, Time::from_secs(8)), None);
        fragments.note(hash, (4000, 53), Time::from_secs(8));
        // At the end, time wraps around.
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
        // Another datagram at the same position.
        assert_eq!(fragments.find(hash ^ 1 << 63, Time::from_secs(8)), None);
        fragments.note(hash ^ 1 << 63, (1, 2), Time::from_secs(8));
        assert_eq!(fragments.find(hash, Time::from_secs(8)), None);
    }
}
