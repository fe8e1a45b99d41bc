//! Packets of the states in the first slots, counted by each worker in memory of its own.
//!
//! What: a count in a state is one addition that no other thread can come between, which takes as long as all the rest of
//! a packet's way when everything is in the cache. So, as long as states are few (they are in the first slots then), each
//! worker counts in words that it alone writes, in the form of [`crate::state::table::entry`]'s; who asks adds up all workers'. States
//! in later slots are counted in their own words: their memory is far away, and that takes longer than the addition.
//!
//! Invariant: a word is written by its worker, while the slot's state can be found; and by whoever makes a state in the
//! slot, who has it alone. The slot was free: so every worker has said since that it knows no slots, and what it had
//! written is seen ([`crate::state::concurrent::epoch`]). The new state is found by way of the index, and with it the words as its header
//! left them.

use std::sync::{Arc, OnceLock};

use crate::state::concurrent::epoch::MAX_WORKERS;
use crate::state::concurrent::sync::Ordering;
use crate::state::table::memory::{Lines, Pages, WORDS};

/// Slots whose packets are counted here: 256 KiB for each worker, of which it has what it uses.
#[cfg(not(loom))]
const SLOTS: u32 = 1 << 14;
#[cfg(loom)]
const SLOTS: u32 = 4;

/// Slots of a line: each has a word for each direction.
const IN_LINE: usize = WORDS / 2;

/// The counts of all workers for the slots of one family.
#[derive(Debug)]
pub(crate) struct SlotCounters([OnceLock<Arc<Lines>>; MAX_WORKERS]);

/// The counts of one worker.
#[derive(Debug)]
pub(crate) struct LocalSlotCounters(Arc<Lines>);

impl SlotCounters {
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| OnceLock::new()))
    }

    /// The worker's words: new ones, or those of whoever had its place.
    pub(crate) fn join(&self, worker: usize) -> LocalSlotCounters {
        let new = || Arc::new(Lines::zeroed(SLOTS as usize / IN_LINE, Pages::Base));
        LocalSlotCounters(Arc::clone(self.0[worker].get_or_init(new)))
    }

    /// What each worker has counted.
    pub(crate) fn counted(&self, slot: u32, direction: usize) -> impl Iterator<Item = u64> {
        let workers = if slot < SLOTS { &self.0[..] } else { &[] };
        workers.iter().filter_map(OnceLock::get).map(move |lines| {
            lines.line(slot as usize / IN_LINE).word(place(slot, direction)).load(Ordering::Relaxed)
        })
    }

    /// Sets the slot's words of all workers to zero, for a state that is about to be made in it. There have never been more
    /// than so many workers at a time, as far as the caller sees: who has come since has counted nothing in this slot.
    pub(crate) fn clear(&self, slot: u32, workers: usize) {
        if slot >= SLOTS {
            return;
        }
        for lines in self.0.iter().take(workers).filter_map(OnceLock::get) {
            let line = lines.line(slot as usize / IN_LINE);
            for word in [0, 1].map(|direction| line.word(place(slot, direction))) {
                // Most are: then the worker's line is left alone.
                if word.load(Ordering::Relaxed) != 0 {
                    word.store(0, Ordering::Relaxed);
                }
            }
        }
    }
}

impl LocalSlotCounters {
    /// Adds to the worker's word, by the worker itself. The sum, or `None` when packets of this slot are not counted
    /// here.
    #[inline(always)]
    pub(crate) fn add(&self, slot: u32, direction: usize, more: u64) -> Option<u64> {
        let word = self.0.get(slot as usize / IN_LINE)?.word(place(slot, direction));
        // Relaxed, and no read-modify-write: nobody else writes here.
        let sum = word.load(Ordering::Relaxed).wrapping_add(more);
        word.store(sum, Ordering::Relaxed);
        Some(sum)
    }

    /// Takes what the worker itself has counted.
    pub(crate) fn take(&self, slot: u32, direction: usize) -> u64 {
        let Some(line) = self.0.get(slot as usize / IN_LINE) else { return 0 };
        let word = line.word(place(slot, direction));
        let counted = word.load(Ordering::Relaxed);
        word.store(0, Ordering::Relaxed);
        counted
    }
}

#[inline(always)]
fn place(slot: u32, direction: usize) -> usize {
    slot as usize % IN_LINE * 2 + direction
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_worker_counts_apart_until_the_slot_is_made_anew() {
        let slot_counters = SlotCounters::new();
        let workers = [slot_counters.join(0), slot_counters.join(1)];
        for slot in [0, 1, 5, SLOTS - 1] {
            assert_eq!(workers[0].add(slot, 0, 5), Some(5));
            assert_eq!(workers[0].add(slot, 0, 1), Some(6));
            assert_eq!(workers[1].add(slot, 0, 7), Some(7));
            assert_eq!(workers[1].add(slot, 1, 9), Some(9));
            assert_eq!(slot_counters.counted(slot, 0).collect::<Vec<_>>(), [6, 7]);
            assert_eq!(slot_counters.counted(slot, 1).sum::<u64>(), 9);
            assert_eq!((workers[1].take(slot, 0), slot_counters.counted(slot, 0).sum::<u64>()), (7, 6));
        }
        slot_counters.clear(5, 2);
        assert_eq!(
            (slot_counters.counted(5, 0).sum::<u64>(), slot_counters.counted(5, 1).sum::<u64>()),
            (0, 0)
        );
        // Whoever has a place after another has its counts too.
        assert_eq!(
            (slot_counters.join(0).add(1, 0, 1), slot_counters.counted(1, 0).sum::<u64>()),
            (Some(7), 7)
        );
        assert_eq!((workers[0].add(SLOTS, 0, 1), workers[0].take(SLOTS, 0)), (None, 0));
        assert_eq!(slot_counters.counted(SLOTS, 0).count(), 0);
    }
}
