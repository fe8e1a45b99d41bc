//! Free slots that a worker keeps for its next states: most installs and ends touch no memory that other workers write.
//!
//! What: a worker takes slots from the [slab](super::slab) in batches, and keeps what it frees, up to a bound. So its states are
//! in lines that it has written before. [`States::idle`](crate::state::States::idle) and its end give all slots back. A slot
//! in a cache does not count toward `dyn_max`.
//!
//! Invariant: no worker holds a slot in a cache. It is in one cache or in the slab's stack.

use std::ops::Range;

use super::slab::{Allocated, Slab, SlotList};

/// Slots that are taken from the slab at once.
const BATCH: u32 = 32;

/// Slots in a cache. Those that a worker frees in two bursts fit.
pub(crate) const MOST: u64 = 128;

/// The free slots of one worker and one address family.
#[derive(Debug, Default)]
pub(crate) struct SlotCache {
    freed: Option<SlotList>,
    /// Slots that were never used.
    fresh: Range<u32>,
}

impl SlotCache {
    /// Allocates a slot. Returns `None` when there are [`MAX_SLOTS`](super::slab::MAX_SLOTS).
    #[inline]
    pub(crate) fn alloc<const N: usize>(&mut self, slab: &Slab<N>) -> Option<u32> {
        loop {
            if let Some(list) = &mut self.freed {
                let slot = list.first;
                list.slots -= 1;
                match slab.link(slot).filter(|_| list.slots > 0) {
                    Some(next) => list.first = next,
                    None => self.freed = None,
                }
                return Some(slot);
            }
            if let Some(slot) = self.fresh.next() {
                return Some(slot);
            }
            match slab.alloc(BATCH)? {
                Allocated::Freed(list) => self.freed = Some(list),
                Allocated::Fresh(slots) => self.fresh = slots,
            }
        }
    }

    /// Takes the slots of a list that no worker holds, or frees them in the slab if the cache has enough.
    pub(crate) fn free<const N: usize>(&mut self, slab: &Slab<N>, list: SlotList) {
        match self.freed {
            None if list.slots <= MOST => self.freed = Some(list),
            Some(own) if list.slots + own.slots <= MOST => {
                slab.set_link(list.last, own.first + 1);
                self.freed = Some(SlotList { last: own.last, slots: list.slots + own.slots, ..list });
            }
            _ => slab.free(list),
        }
    }

    /// Gives all slots back to the slab.
    pub(crate) fn give_back<const N: usize>(&mut self, slab: &Slab<N>) {
        for slot in std::mem::take(&mut self.fresh).rev() {
            slab.free(SlotList { first: slot, last: slot, slots: 1 });
        }
        if let Some(list) = self.freed.take() {
            slab.free(list);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::state::table::memory::Pages;

    #[test]
    fn slots_are_taken_and_given_back_in_batches() {
        let (slab, mut one, mut other) =
            (Slab::<2>::new(Pages::Base), SlotCache::default(), SlotCache::default());
        // Few in a small table.
        let slots: Vec<u32> = (0..1000).map(|_| one.alloc(&slab).unwrap()).collect();
        assert_eq!(slots, (0..1000).collect::<Vec<u32>>());
        assert!(slab.len() < 1000 + BATCH);
        let next = other.alloc(&slab).unwrap();
        assert_eq!(next, slab.len() - BATCH);
        assert_ne!(one.alloc(&slab), other.alloc(&slab));
        for slot in slots {
            one.free(&slab, SlotList { first: slot, last: slot, slots: 1 });
        }
        // Those that fit stay; the last one first.
        assert_eq!((one.freed.unwrap().slots, one.alloc(&slab)), (MOST, Some(127)));
        one.give_back(&slab);
        other.give_back(&slab);
        // All but the four in use.
        let len = slab.len();
        let mut all: Vec<u32> = (4..len).map(|_| one.alloc(&slab).unwrap()).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!((all.len() as u32, slab.len(), all.last() < Some(&len)), (len - 4, len, true));
    }
}
