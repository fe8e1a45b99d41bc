//! The number of slots in use, bounded by `dyn_max`.

use crate::state::concurrent::sync::{Apart, AtomicU64, Ordering};

/// The slots in use by both address families. A slot counts until it is free for reuse, not only until its state is
/// unlinked: the number of slots, and with it the memory, never exceeds `dyn_max`.
#[derive(Debug)]
pub(crate) struct Occupancy {
    used: Apart<AtomicU64>,
    peak: Apart<AtomicU64>,
    nearly_full: AtomicU64,
}

impl Occupancy {
    pub(crate) fn new() -> Self {
        Self {
            used: Apart(AtomicU64::new(0)),
            peak: Apart(AtomicU64::new(0)),
            nearly_full: AtomicU64::new(0),
        }
    }

    /// Slots in use, including retired ones.
    pub(crate) fn used(&self) -> u64 {
        // Relaxed, here and in all methods below: the counts only bound. The slab synchronizes the users of a slot.
        self.used.load(Ordering::Relaxed)
    }

    /// Reserves a slot. Returns false when `max` are in use.
    pub(crate) fn reserve(&self, max: u32) -> bool {
        let take = |used| (used < u64::from(max)).then_some(used + 1);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }

    /// Releases `slots` slots.
    pub(crate) fn release(&self, slots: u64) {
        self.used.fetch_sub(slots, Ordering::Relaxed);
    }

    /// Records the number of states.
    pub(crate) fn record_peak(&self, states: u64) {
        // Relaxed: a statistic. The load keeps the line shared while there is no new peak.
        if states > self.peak.load(Ordering::Relaxed) {
            self.peak.fetch_max(states, Ordering::Relaxed);
        }
    }

    /// The largest number of states so far.
    pub(crate) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Whether the states reached 9/10 of `dyn_max`, and have not fallen below 8/10 since.
    pub(crate) fn is_nearly_full(&self) -> bool {
        // Relaxed: callers need no order with other memory.
        self.nearly_full.load(Ordering::Relaxed) != 0
    }

    /// Re-evaluates [`Occupancy::is_nearly_full`]. Returns the new value if this call changed it; of concurrent calls one
    /// returns it.
    pub(crate) fn update_nearly_full(&self, states: u64, max: u32) -> Option<bool> {
        let before = self.nearly_full.load(Ordering::Relaxed);
        let full = u64::from(states * 10 >= u64::from(max) * if before != 0 { 8 } else { 9 });
        let changed = full != before && self.nearly_full.swap(full, Ordering::Relaxed) != full;
        changed.then_some(full != 0)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn slots_are_bounded() {
        let occupancy = Occupancy::new();
        assert_eq!([(); 3].map(|()| occupancy.reserve(2)), [true, true, false]);
        occupancy.release(1);
        assert_eq!((occupancy.used(), occupancy.reserve(1), occupancy.reserve(2)), (1, false, true));
    }

    #[test]
    fn nearly_full_has_hysteresis() {
        let occupancy = Occupancy::new();
        let rows = [(8, None), (9, Some(true)), (10, None), (8, None), (7, Some(false)), (8, None)];
        for (states, changed) in rows {
            assert_eq!(occupancy.update_nearly_full(states, 10), changed, "{states}");
        }
    }
}
