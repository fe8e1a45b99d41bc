//! Packet counts of the first slots, in memory of each worker.
//!
//! What: a count in the state's own word takes an atomic addition, which costs as much as the rest of a packet's path
//! when everything is cached. As long as there are few states, they are in the first slots. For these, each worker
//! counts in words that it alone writes, in the form of [`crate::state::table::entry`]'s counts; listings add the
//! counts of all workers up. States in later slots are counted in their own words: their memory is not cached, which
//! costs more than the addition.
//!
//! Invariant: a word is written by its worker while the slot's state can be found, and by the worker that inserts a
//! state in the slot. The slot was free before: every worker has announced a quiescent state since it could find the
//! last state, and what it wrote is visible ([`crate::state::concurrent::epoch`]). A worker finds the new state by
//! way of the index, and with it the words as the inserting worker left them.

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};

use crate::state::concurrent::epoch::MAX_WORKERS;
use crate::state::concurrent::sync::Ordering;
use crate::state::table::memory::{Lines, Pages, WORDS};

/// Slots that are counted here: 256 KiB per worker, allocated by the system as they are used.
#[cfg(not(loom))]
const SLOTS: u32 = 1 << 14;
#[cfg(loom)]
const SLOTS: u32 = 4;

/// Slots per line: a slot has a word for each direction.
const IN_LINE: usize = WORDS / 2;

/// The counts of all workers for the slots of one address family.
#[derive(Debug)]
pub(crate) struct SlotCounters {
    workers: [OnceLock<Arc<Lines>>; MAX_WORKERS],
    /// No worker at this position or after it has ever counted. Relaxed everywhere: a worker sets it before it counts, so what makes
    /// the counts visible (see the invariant) makes it visible, too.
    end: AtomicUsize,
}

/// The counts of one worker.
#[derive(Debug)]
pub(crate) struct LocalSlotCounters(Arc<Lines>);

impl SlotCounters {
    pub(crate) fn new() -> Self {
        Self { workers: std::array::from_fn(|_| OnceLock::new()), end: AtomicUsize::new(0) }
    }

    /// The words of a worker. A worker that gets the number of a former one continues its counts.
    pub(crate) fn of_worker(&self, worker: usize) -> LocalSlotCounters {
        let new = || Arc::new(Lines::zeroed(SLOTS as usize / IN_LINE, Pages::Base));
        self.end.fetch_max(worker + 1, Ordering::Relaxed);
        LocalSlotCounters(Arc::clone(self.workers[worker].get_or_init(new)))
    }

    /// The words of the workers that count the slot here.
    fn lines(&self, slot: u32) -> impl Iterator<Item = &Arc<Lines>> {
        let end = if slot < SLOTS { self.end.load(Ordering::Relaxed) } else { 0 };
        self.workers[..end].iter().filter_map(OnceLock::get)
    }

    /// The counts of each worker, forward and reverse.
    #[inline]
    pub(crate) fn counted(&self, slot: u32) -> impl Iterator<Item = [u64; 2]> {
        self.lines(slot).map(move |lines| {
            let line = lines.line(slot as usize / IN_LINE);
            // Relaxed: a count publishes nothing.
            [0, 1].map(|direction| line.word(word_of(slot, direction)).load(Ordering::Relaxed))
        })
    }

    /// Sets the slot's words to zero, for a state that is about to be inserted. Workers that register meanwhile have counted nothing in
    /// this slot.
    pub(crate) fn clear(&self, slot: u32) {
        for lines in self.lines(slot) {
            let line = lines.line(slot as usize / IN_LINE);
            for word in [0, 1].map(|direction| line.word(word_of(slot, direction))) {
                // Most are zero: the worker's cache line is left alone. Relaxed: the index publishes the new state.
                if word.load(Ordering::Relaxed) != 0 {
                    word.store(0, Ordering::Relaxed);
                }
            }
        }
    }
}

impl LocalSlotCounters {
    /// Adds to the worker's word. Only that worker may call it. Returns the sum, or `None` if the slot is not counted
    /// here.
    #[inline(always)]
    pub(crate) fn add(&self, slot: u32, direction: usize, more: u64) -> Option<u64> {
        let word = self.0.get(slot as usize / IN_LINE)?.word(word_of(slot, direction));
        // Relaxed, and no read-modify-write: the worker is the only writer.
        let sum = word.load(Ordering::Relaxed).wrapping_add(more);
        word.store(sum, Ordering::Relaxed);
        Some(sum)
    }

    /// Takes the counts of this worker.
    pub(crate) fn take(&self, slot: u32, direction: usize) -> u64 {
        let Some(line) = self.0.get(slot as usize / IN_LINE) else { return 0 };
        let word = line.word(word_of(slot, direction));
        // Relaxed: as in add().
        let counted = word.load(Ordering::Relaxed);
        word.store(0, Ordering::Relaxed);
        counted
    }
}

#[inline(always)]
fn word_of(slot: u32, direction: usize) -> usize {
    slot as usize % IN_LINE * 2 + direction
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_worker_counts_separately_until_the_slot_is_cleared() {
        let slot_counters = SlotCounters::new();
        let workers = [slot_counters.of_worker(0), slot_counters.of_worker(1)];
        for slot in [0, 1, 5, SLOTS - 1] {
            assert_eq!(workers[0].add(slot, 0, 5), Some(5));
            assert_eq!(workers[0].add(slot, 0, 1), Some(6));
            assert_eq!(workers[1].add(slot, 0, 7), Some(7));
            assert_eq!(workers[1].add(slot, 1, 9), Some(9));
            assert_eq!(slot_counters.counted(slot).collect::<Vec<_>>(), [[6, 0], [7, 9]]);
            assert_eq!(workers[1].take(slot, 0), 7);
            assert_eq!(slot_counters.counted(slot).collect::<Vec<_>>(), [[6, 0], [0, 9]]);
        }
        slot_counters.clear(5);
        assert_eq!(slot_counters.counted(5).collect::<Vec<_>>(), [[0; 2]; 2]);
        // A worker with the number of a former one continues its counts.
        assert_eq!(slot_counters.of_worker(0).add(1, 0, 1), Some(7));
        assert_eq!(slot_counters.counted(1).collect::<Vec<_>>(), [[7, 0], [0, 9]]);
        assert_eq!((workers[0].add(SLOTS, 0, 1), workers[0].take(SLOTS, 0)), (None, 0));
        assert_eq!(slot_counters.counted(SLOTS).count(), 0);
    }
}
