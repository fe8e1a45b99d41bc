//! Doubly linked lists of slots, the links beside the slots and not in them.
//!
//! Each slot is in at most one list of a `Chains`. A list is its [`Head`], kept by whoever owns the list.

/// No slot.
pub(super) const NONE: u32 = u32::MAX;

/// The beginning of a list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head(u32);

impl Head {
    pub(super) const EMPTY: Self = Self(NONE);

    #[inline]
    pub(super) fn first(self) -> Option<u32> {
        (self.0 != NONE).then_some(self.0)
    }
}

#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
}

/// The links of any number of lists over one set of slots.
#[derive(Clone, Debug, Default)]
pub(super) struct Chains(Vec<Link>);

impl Chains {
    /// Puts `slot`, which is in no list, before the first of `head`.
    #[inline]
    pub(super) fn push(&mut self, head: &mut Head, slot: u32) {
        let at = slot as usize;
        if at >= self.0.len() {
            self.0.resize(at + 1, Link { prev: NONE, next: NONE });
        }
        self.0[at] = Link { prev: NONE, next: head.0 };
        if let Some(old) = head.first() {
            self.0[old as usize].prev = slot;
        }
        head.0 = slot;
    }

    /// Takes `slot` out of the list of `head`, in which it is.
    #[inline]
    pub(super) fn take(&mut self, head: &mut Head, slot: u32) {
        let Link { prev, next } = self.0[slot as usize];
        if prev == NONE {
            head.0 = next;
        } else {
            self.0[prev as usize].next = next;
        }
        if next != NONE {
            self.0[next as usize].prev = prev;
        }
    }

    /// The slot after `slot`.
    #[inline]
    pub(super) fn next(&self, slot: u32) -> Option<u32> {
        let next = self.0[slot as usize].next;
        (next != NONE).then_some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(chains: &Chains, head: Head) -> Vec<u32> {
        std::iter::successors(head.first(), |&slot| chains.next(slot)).collect()
    }

    #[test]
    fn takes_from_front_middle_and_back() {
        let mut chains = Chains::default();
        for (gone, left) in [(3, vec![2, 1]), (2, vec![3, 1]), (1, vec![3, 2])] {
            let mut head = Head::EMPTY;
            [1, 2, 3].into_iter().for_each(|slot| chains.push(&mut head, slot));
            chains.take(&mut head, gone);
            assert_eq!(list(&chains, head), left);
        }
    }

    #[test]
    fn lists_are_apart() {
        let (mut chains, mut one, mut other) = (Chains::default(), Head::EMPTY, Head::EMPTY);
        chains.push(&mut one, 0);
        chains.push(&mut other, 5);
        chains.push(&mut one, 9);
        assert_eq!((list(&chains, one), list(&chains, other)), (vec![9, 0], vec![5]));
        chains.take(&mut other, 5);
        assert_eq!(other.first(), None);
    }
}
