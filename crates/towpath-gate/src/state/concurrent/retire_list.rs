//! The slots that one worker has unlinked and that others may still be reading, as two lists: one that grows, and one
//! that waits for its epoch to pass ([`crate::state::concurrent::epoch`]).

use crate::state::concurrent::epoch::Epochs;
use crate::state::table::slab::Slab;

/// A list of slots; the links are in the slab.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List {
    first: u32,
    last: u32,
    slots: u64,
}

/// A worker's lists of one family.
#[derive(Debug, Default)]
pub(crate) struct RetireList {
    open: Option<List>,
    closed: Option<(u64, List)>,
}

impl RetireList {
    /// Adds a slot that is unlinked.
    pub(crate) fn add<const N: usize>(&mut self, slab: &Slab<N>, slot: u32) {
        self.open = Some(match self.open {
            None => List { first: slot, last: slot, slots: 1 },
            Some(list) => {
                slab.set_link(slot, list.first + 1);
                List { first: slot, slots: list.slots + 1, ..list }
            }
        });
    }

    /// Slots in both lists.
    pub(crate) fn len(&self) -> u64 {
        let closed = self.closed.map(|(_, list)| list);
        [self.open, closed].into_iter().flatten().map(|list| list.slots).sum()
    }

    /// Frees what it may; how many slots. The worker, which knows none, stamps: `seen` is its last stamp.
    pub(crate) fn free<const N: usize>(
        &mut self,
        slab: &Slab<N>,
        epochs: &Epochs,
        worker: usize,
        seen: &mut u64,
    ) -> u64 {
        let mut freed = 0;
        loop {
            if self.closed.is_none() {
                let Some(list) = self.open.take() else { return freed };
                self.closed = Some((epochs.close(), list));
            }
            epochs.stamp(worker, seen);
            let Some((_, list)) = self.closed.take_if(|(epoch, _)| epochs.passed(*epoch)) else {
                return freed;
            };
            slab.give(list.first, list.last);
            freed += list.slots;
        }
    }

    /// Takes over another worker's lists. Who does so has seen all that that worker did.
    pub(crate) fn adopt<const N: usize>(&mut self, slab: &Slab<N>, other: RetireList) {
        let RetireList { open, mut closed } = other;
        if self.closed.is_none() {
            self.closed = closed.take();
        }
        // A list that waited already may wait once more: that is late, and right.
        for list in [open, closed.map(|(_, list)| list)].into_iter().flatten() {
            self.open = Some(match self.open {
                None => list,
                Some(own) => {
                    slab.set_link(list.last, own.first + 1);
                    List { first: list.first, last: own.last, slots: list.slots + own.slots }
                }
            });
        }
    }
}
