//! Doubly linked lists of slots, the links beside the slots and not in them.
//!
//! Each slot is in at most one list of a `SlotLists`. A list is its two ends, kept by whoever owns the list.

/// No slot.
pub(crate) const NONE: u32 = u32::MAX;

/// The ends of a list.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List {
    first: u32,
    last: u32,
}

impl List {
    pub(crate) const EMPTY: Self = Self { first: NONE, last: NONE };

    #[inline]
    pub(crate) fn first(self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }
}

#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
}

/// The links of any number of lists over one set of slots.
#[derive(Clone, Debug, Default)]
pub(crate) struct SlotLists(Vec<Link>);

impl SlotLists {
    /// Puts `slot`, which is in no list, at the end of `list`.
    #[inline]
    pub(crate) fn push(&mut self, list: &mut List, slot: u32) {
        let at = slot as usize;
        if at >= self.0.len() {
            self.0.resize(at + 1, Link { prev: NONE, next: NONE });
        }
        self.0[at] = Link { prev: list.last, next: NONE };
        match list.last {
            NONE => list.first = slot,
            last => self.0[last as usize].next = slot,
        }
        list.last = slot;
    }

    /// Takes `slot` out of `list`, in which it is.
    #[inline]
    pub(crate) fn take(&mut self, list: &mut List, slot: u32) {
        let Link { prev, next } = self.0[slot as usize];
        match prev {
            NONE => list.first = next,
            prev => self.0[prev as usize].next = next,
        }
        match next {
            NONE => list.last = prev,
            next => self.0[next as usize].prev = prev,
        }
    }

    /// The slot after `slot`.
    #[inline]
    pub(crate) fn next(&self, slot: u32) -> Option<u32> {
        let next = self.0[slot as usize].next;
        (next != NONE).then_some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(chains: &SlotLists, list: List) -> Vec<u32> {
        std::iter::successors(list.first(), |&slot| chains.next(slot)).collect()
    }

    #[test]
    fn takes_from_front_middle_and_back() {
        let mut chains = SlotLists::default();
        for (gone, left) in [(1, [2, 3, 4]), (2, [1, 3, 4]), (3, [1, 2, 4])] {
            let mut list = List::EMPTY;
            [1, 2, 3].into_iter().for_each(|slot| chains.push(&mut list, slot));
            chains.take(&mut list, gone);
            chains.push(&mut list, 4);
            assert_eq!(slots(&chains, list), left);
        }
    }

    #[test]
    fn lists_are_apart_and_end() {
        let (mut chains, mut one, mut other) = (SlotLists::default(), List::EMPTY, List::EMPTY);
        chains.push(&mut one, 0);
        chains.push(&mut other, 5);
        chains.push(&mut one, 9);
        assert_eq!((slots(&chains, one), slots(&chains, other)), (vec![0, 9], vec![5]));
        chains.take(&mut other, 5);
        assert_eq!(other.first(), None);
        chains.push(&mut other, 7);
        assert_eq!(slots(&chains, other), [7]);
    }
}
