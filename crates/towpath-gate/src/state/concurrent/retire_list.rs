//! Retired slots: unlinked, and not yet free because another worker may still read them.

use std::sync::Mutex;

use super::epoch::{Epochs, Participant};
use super::sync::{AtomicU64, Ordering};
use crate::state::table::family::locked;
use crate::state::table::slab::{Slab, SlotList};
use crate::state::table::slot_cache::SlotCache;

/// The retired slots of one worker and one address family: an open list, which grows, and a closed list, which waits for
/// its [grace period](super::epoch).
#[derive(Debug, Default)]
pub(crate) struct RetireList {
    open: Option<SlotList>,
    closed: Option<(u64, SlotList)>,
}

impl RetireList {
    /// Adds an unlinked slot.
    pub(crate) fn push<const N: usize>(&mut self, slab: &Slab<N>, slot: u32) {
        self.open = Some(match self.open {
            None => SlotList { first: slot, last: slot, slots: 1 },
            Some(list) => {
                slab.set_link(slot, list.first + 1);
                SlotList { first: slot, slots: list.slots + 1, ..list }
            }
        });
    }

    /// The number of slots in both lists.
    pub(crate) fn len(&self) -> u64 {
        let closed = self.closed.map(|(_, list)| list);
        [self.open, closed].into_iter().flatten().map(|list| list.slots).sum()
    }

    /// Frees the slots whose grace period is over and returns their number. The worker must hold no slot.
    pub(crate) fn free<const N: usize>(
        &mut self,
        (slab, cache): (&Slab<N>, &mut SlotCache),
        epochs: &Epochs,
        worker: &mut Participant,
    ) -> u64 {
        let mut freed = 0;
        loop {
            if self.closed.is_none() {
                let Some(list) = self.open.take() else { return freed };
                self.closed = Some((epochs.start_grace_period(), list));
            }
            epochs.quiescent(worker);
            let Some((_, list)) = self.closed.take_if(|(epoch, _)| epochs.grace_period_over(*epoch)) else {
                return freed;
            };
            cache.free(slab, list);
            freed += list.slots;
        }
    }

    /// Takes over the lists of another worker. The caller has synchronized with that worker.
    pub(crate) fn adopt<const N: usize>(&mut self, slab: &Slab<N>, other: RetireList) {
        let RetireList { open, mut closed } = other;
        if self.closed.is_none() {
            self.closed = closed.take();
        }
        // A closed list may wait for a second grace period: late, but correct.
        for list in [open, closed.map(|(_, list)| list)].into_iter().flatten() {
            self.open = Some(match self.open {
                None => list,
                Some(own) => {
                    slab.set_link(list.last, own.first + 1);
                    SlotList { first: list.first, last: own.last, slots: list.slots + own.slots }
                }
            });
        }
    }
}

/// The retired slots of workers that are gone or offline, IPv4 and IPv6, for the next worker that frees slots.
#[derive(Debug, Default)]
pub(crate) struct AbandonedSlots {
    lists: Mutex<(RetireList, RetireList)>,
    any: AtomicU64,
}

impl AbandonedSlots {
    /// Takes the lists of a worker that will not free them itself.
    pub(crate) fn put(&self, (v4, v6): (&Slab<2>, &Slab<6>), lists: (RetireList, RetireList)) {
        let mut all = locked(&self.lists);
        all.0.adopt(v4, lists.0);
        all.1.adopt(v6, lists.1);
        // Relaxed: a hint; the mutex publishes the lists.
        self.any.store(1, Ordering::Relaxed);
    }

    /// Gives all lists to the caller. Without any, the cost is one load.
    #[inline]
    pub(crate) fn take(&self) -> Option<(RetireList, RetireList)> {
        // Relaxed: a worker that sees the hint late takes the lists late.
        if self.any.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut all = locked(&self.lists);
        self.any.store(0, Ordering::Relaxed);
        Some(std::mem::take(&mut *all))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::state::table::memory::Pages;

    #[test]
    fn slots_are_free_after_their_grace_period() {
        let (slab, epochs) = (Slab::<2>::new(Pages::Base), Epochs::new());
        let (mut owner, mut reader) = (epochs.register().unwrap(), epochs.register().unwrap());
        epochs.quiescent(&mut reader);
        let (mut retired, mut cache) = (RetireList::default(), SlotCache::default());
        for _ in 0..3 {
            retired.push(&slab, slab.alloc_one().unwrap());
        }
        assert_eq!((retired.free((&slab, &mut cache), &epochs, &mut owner), retired.len()), (0, 3));
        epochs.quiescent(&mut reader);
        assert_eq!((retired.free((&slab, &mut cache), &epochs, &mut owner), retired.len()), (3, 0));
    }

    #[test]
    fn abandoned_slots_are_freed_by_another_worker() {
        let (v4, v6, epochs) = (Slab::<2>::new(Pages::Base), Slab::<6>::new(Pages::Base), Epochs::new());
        let (mut gone, mut other) = (RetireList::default(), RetireList::default());
        let abandoned = AbandonedSlots::default();
        assert!(abandoned.take().is_none());
        (0..2).for_each(|_| gone.push(&v4, v4.alloc_one().unwrap()));
        other.push(&v4, v4.alloc_one().unwrap());
        abandoned.put((&v4, &v6), (gone, RetireList::default()));
        let (lists, _) = abandoned.take().unwrap();
        other.adopt(&v4, lists);
        assert_eq!((other.len(), abandoned.take().is_none()), (3, true));
        let mut cache = SlotCache::default();
        assert_eq!(other.free((&v4, &mut cache), &epochs, &mut epochs.register().unwrap()), 3);
        let mut again: Vec<u32> = (0..3).map(|_| cache.alloc(&v4).unwrap()).collect();
        again.sort_unstable();
        assert_eq!(again, [0, 1, 2]);
    }
}
