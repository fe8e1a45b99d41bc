//! Doubly linked lists of slots. The links are stored next to the slots.
//!
//! Each slot is in at most one list of a [`SlotLists`]. The owner of a list keeps its two ends.

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
    /// Appends `slot`, which is in no list.
    #[inline]
    pub(crate) fn push_back(&mut self, list: &mut List, slot: u32) {
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

    /// Removes `slot`, which is in `list`.
    #[inline]
    pub(crate) fn remove(&mut self, list: &mut List, slot: u32) {
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

    fn slots(lists: &SlotLists, list: List) -> Vec<u32> {
        std::iter::successors(list.first(), |&slot| lists.next(slot)).collect()
    }

    #[test]
    fn removes_from_front_middle_and_back() {
        let mut lists = SlotLists::default();
        for (gone, left) in [(1, [2, 3, 4]), (2, [1, 3, 4]), (3, [1, 2, 4])] {
            let mut list = List::EMPTY;
            [1, 2, 3].into_iter().for_each(|slot| lists.push_back(&mut list, slot));
            lists.remove(&mut list, gone);
            lists.push_back(&mut list, 4);
            assert_eq!(slots(&lists, list), left);
        }
    }

    #[test]
    fn lists_are_independent() {
        let (mut lists, mut one, mut other) = (SlotLists::default(), List::EMPTY, List::EMPTY);
        lists.push_back(&mut one, 0);
        lists.push_back(&mut other, 5);
        lists.push_back(&mut one, 9);
        assert_eq!((slots(&lists, one), slots(&lists, other)), (vec![0, 9], vec![5]));
        lists.remove(&mut other, 5);
        assert_eq!(other.first(), None);
        lists.push_back(&mut other, 7);
        assert_eq!(slots(&lists, other), [7]);
    }
}
