//! The number of slots in use, bounded by `dyn_max`.
//!
//! What: a worker reserves a batch at a time while there is much room, and takes single slots from its own reserve. So most
//! installs and ends change no number that other workers read. With little room, each slot is reserved alone.
//!
//! Invariant: the slots in use and the reserves of all workers together are at most `granted`, which never rises above
//! `dyn_max`. An install that finds no room takes back the reserves of all workers: none is refused while there is room.

use crate::state::concurrent::epoch::MAX_WORKERS;
use crate::state::concurrent::sync::{Apart, AtomicU64, Ordering};

/// Slots that a worker reserves at once.
const BATCH: u64 = 32;

/// The largest reserve of a worker.
const MOST: u64 = 128;

/// With less room than this, slots are reserved one by one.
const LITTLE_ROOM: u64 = MOST * MAX_WORKERS as u64;

/// The slots in use by both address families. A slot counts until it is free for reuse, not only until its state is
/// unlinked: the number of slots, and with it the memory, never exceeds `dyn_max` by more than the workers'
/// [caches](crate::state::table::slot_cache) have.
#[derive(Debug)]
pub(crate) struct Occupancy {
    /// Slots in use and in reserve.
    granted: Apart<AtomicU64>,
    /// The reserve of each worker.
    reserves: Box<[Apart<AtomicU64>]>,
    peak: Apart<AtomicU64>,
    nearly_full: AtomicU64,
}

impl Occupancy {
    pub(crate) fn new() -> Self {
        Self {
            granted: Apart(AtomicU64::new(0)),
            reserves: (0..MAX_WORKERS).map(|_| Apart(AtomicU64::new(0))).collect(),
            peak: Apart(AtomicU64::new(0)),
            nearly_full: AtomicU64::new(0),
        }
    }

    /// Slots in use, including retired ones, when the first `workers` workers may have reserves.
    pub(crate) fn used(&self, workers: usize) -> u64 {
        // Relaxed, here and in all methods below: the counts only bound. The slab synchronizes the users of a slot.
        let reserves = self.reserves.iter().take(workers).map(|reserve| reserve.load(Ordering::Relaxed));
        // While workers change them, the reserves may seem larger for a moment.
        self.granted.load(Ordering::Relaxed).saturating_sub(reserves.sum())
    }

    /// Slots in use and in reserve.
    #[inline]
    pub(crate) fn granted(&self) -> u64 {
        self.granted.load(Ordering::Relaxed)
    }

    /// Returns true if `max` slots are in use.
    #[inline]
    pub(crate) fn is_full(&self, workers: usize, max: u32) -> bool {
        self.granted.load(Ordering::Relaxed) >= max.into() && self.used(workers) >= max.into()
    }

    /// Reserves a slot for `worker`, which is one of the first `workers`. Returns false when `max` are in use.
    #[inline]
    pub(crate) fn reserve(&self, (worker, workers): (usize, usize), max: u32) -> bool {
        // `dyn_max` may have been lowered.
        let in_bounds = self.granted.load(Ordering::Relaxed) <= max.into();
        let less = |reserve: u64| reserve.checked_sub(1);
        let own = &self.reserves[worker];
        in_bounds && own.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
            || self.grant((worker, workers), max.into())
    }

    #[cold]
    fn grant(&self, (worker, workers): (usize, usize), max: u64) -> bool {
        loop {
            let mut batch = 0;
            let more = |granted| {
                let room = max.checked_sub(granted)?;
                batch = if room >= LITTLE_ROOM { BATCH } else { room.min(1) };
                (batch > 0).then_some(granted + batch)
            };
            if self.granted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok() {
                if batch > 1 {
                    self.reserves[worker].fetch_add(batch - 1, Ordering::Relaxed);
                }
                return true;
            }
            if !self.take_back(workers) {
                return false;
            }
        }
    }

    /// Takes back all reserves. Returns false if there are none.
    fn take_back(&self, workers: usize) -> bool {
        let mut sum = 0;
        for reserve in self.reserves.iter().take(workers) {
            // The load keeps the line shared.
            if reserve.load(Ordering::Relaxed) > 0 {
                sum += reserve.swap(0, Ordering::Relaxed);
            }
        }
        self.granted.fetch_sub(sum, Ordering::Relaxed);
        sum > 0
    }

    /// Releases `slots` slots that `worker` has freed.
    pub(crate) fn release(&self, worker: usize, slots: u64, max: u32) {
        let own = &self.reserves[worker];
        let little_room = self.granted.load(Ordering::Relaxed) + LITTLE_ROOM > max.into();
        if little_room || own.load(Ordering::Relaxed) + slots > MOST {
            self.granted.fetch_sub(slots, Ordering::Relaxed);
        } else {
            own.fetch_add(slots, Ordering::Relaxed);
        }
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
    /// returns it. `states` returns the number of states.
    #[inline]
    pub(crate) fn update_nearly_full(&self, states: impl FnOnce() -> u64, max: u32) -> Option<bool> {
        let before = self.nearly_full.load(Ordering::Relaxed);
        // There are at most as many states as slots in use.
        if before == 0 && self.granted.load(Ordering::Relaxed) * 10 < u64::from(max) * 9 {
            return None;
        }
        self.change_nearly_full(before, states(), max)
    }

    #[cold]
    fn change_nearly_full(&self, before: u64, states: u64, max: u32) -> Option<bool> {
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
        let reserve = || occupancy.reserve((0, 1), 2);
        assert_eq!([reserve(), reserve(), reserve()], [true, true, false]);
        occupancy.release(0, 1, 2);
        assert_eq!((occupancy.used(1), occupancy.reserve((0, 1), 1), reserve()), (1, false, true));
    }

    /// The bound is exact although workers have reserves, also if it is lowered.
    #[test]
    fn reserves_are_taken_back_when_there_is_no_room() {
        let (occupancy, max) = (Occupancy::new(), 20_000);
        let reserve = |worker, max| occupancy.reserve((worker, 3), max);
        assert!(reserve(0, max) && reserve(1, max) && reserve(2, max));
        assert_eq!((occupancy.used(3), occupancy.granted.load(Ordering::Relaxed)), (3, 3 * BATCH));
        assert!(!occupancy.is_full(3, 4) && occupancy.is_full(3, 3));
        // Worker 2 has no more calls.
        let taken = (3..max + 10).filter(|n| reserve(*n as usize % 2, max)).count();
        assert_eq!((taken, occupancy.used(3)), (max as usize - 3, max.into()));
        occupancy.release(1, 1000, max);
        assert!(!reserve(0, max - 1000) && reserve(0, max - 999) && !occupancy.is_full(3, max));
        occupancy.release(1, 19_001, max);
        assert_eq!(occupancy.granted.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_reserve_is_bounded() {
        let (occupancy, max) = (Occupancy::new(), 60_000);
        assert!((0..150).all(|_| occupancy.reserve((0, 2), max)));
        (0..3).for_each(|_| occupancy.release(1, 50, max));
        assert_eq!((occupancy.reserves[1].load(Ordering::Relaxed), occupancy.used(2)), (100, 0));
    }

    #[test]
    fn nearly_full_has_hysteresis() {
        let occupancy = Occupancy::new();
        let rows = [(8, None), (9, Some(true)), (10, None), (8, None), (7, Some(false)), (8, None)];
        for (states, changed) in rows {
            while occupancy.used(1) < states {
                assert!(occupancy.reserve((0, 1), 10));
            }
            assert_eq!(occupancy.update_nearly_full(|| states, 10), changed, "{states}");
        }
    }
}
