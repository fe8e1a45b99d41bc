//! Free list of the parts of an area: a linked list with its links in a separate array.
//!
//! Multiple producers, one consumer. A producer (`give`) pushes a part with a compare-and-exchange. The consumer (`take`) owns a
//! private chain; when the chain is empty, it swaps the whole list out and reverses it. Parts are never popped from the shared list
//! one by one, so there is no ABA problem, and taking costs one atomic operation per swap.
//!
//! Invariant: an index is in the list, in the chain, or taken. `take` gives it to one owner, which gives it back once.
//!
//! The consumer ends the list with `close`, which returns the number of free parts. The exchanges of `close` and `give` are ordered: a
//! part given before `close` is counted by it; a `give` after it fails, and its owner keeps the part. So the resource that each part
//! holds (a reference to the area) is released exactly once.
//!
//! References: R. K. Treiber, "Systems Programming: Coping with Parallelism", IBM RJ 5118, 1986.

#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering};

/// End of a list.
const END: u32 = u32::MAX;
/// Value of `head` after `close`. Indices of parts are smaller.
const CLOSED: u32 = END - 1;
/// Limit on the parts of a list.
pub(super) const MOST: u32 = CLOSED;

#[derive(Debug)]
pub(super) struct Free {
    /// The part that was given last.
    head: AtomicU32,
    /// The successor of each part in the list or the chain.
    next: Box<[AtomicU32]>,
}

/// The private chain of the consumer.
#[derive(Debug)]
pub(super) struct Taken(u32);

impl Free {
    /// A list of `count` free parts, with its only chain.
    pub(super) fn all(count: u32) -> (Self, Taken) {
        let next = (1..=count).map(|next| AtomicU32::new(if next < count { next } else { END })).collect();
        (Self { head: AtomicU32::new(END), next }, Taken(if count > 0 { 0 } else { END }))
    }

    /// Takes a free part. Returns `None` if all are taken.
    #[inline]
    pub(super) fn take(&self, chain: &mut Taken) -> Option<u32> {
        if chain.0 == END {
            // Acquire pairs with the Release of each `give`: the exchanges form a release sequence, so the last value synchronizes with
            // all of them. The owners' accesses to the parts, and their links, happen before this.
            let mut at = self.head.swap(END, Ordering::Acquire);
            // Reverses the list into the order of `give`, so that adjacent parts stay adjacent and the kernel gets them as one iovec.
            while let Some(link) = self.next.get(at as usize) {
                // Relaxed: see below; this thread owns these parts now.
                let next = link.load(Ordering::Relaxed);
                link.store(chain.0, Ordering::Relaxed);
                (chain.0, at) = (at, next);
            }
        }
        let index = chain.0;
        // Relaxed: a link is written before its part is given, which the exchange above observed.
        chain.0 = self.next.get(index as usize)?.load(Ordering::Relaxed);
        Some(index)
    }

    /// The handle that gives part `index` back; `None` if the index is out of range.
    #[inline]
    pub(super) fn place(&self, index: u32) -> Option<Place<'_>> {
        Some(Place { head: &self.head, next: self.next.get(index as usize)?, index })
    }

    /// Closes the list and returns the number of free parts. Later `give`s fail.
    pub(super) fn close(&self, chain: &mut Taken) -> u32 {
        // Acquire: as in `take`, for the links. A `give` that reads CLOSED needs no earlier writes.
        let given = self.head.swap(CLOSED, Ordering::Acquire);
        let mut free = 0;
        for mut at in [std::mem::replace(&mut chain.0, END), given] {
            // Relaxed: as in `take`.
            while let Some(link) = self.next.get(at as usize) {
                (free, at) = (free + 1, link.load(Ordering::Relaxed));
            }
        }
        free
    }
}

/// The handle that gives one part back. It borrows only the two atomics: once the part is given, another thread may free the memory that
/// contains them before `give` returns.
pub(super) struct Place<'a> {
    head: &'a AtomicU32,
    next: &'a AtomicU32,
    index: u32,
}

impl Place<'_> {
    /// Gives the part back. Returns false if the list is closed.
    #[inline]
    pub(super) fn give(self) -> bool {
        // Relaxed: the exchange below validates the value; no link is read through it.
        let mut head = self.head.load(Ordering::Relaxed);
        while head != CLOSED {
            // Relaxed: published by the Release below.
            self.next.store(head, Ordering::Relaxed);
            // Release, for `take` and `close`: the link, and the owner's accesses to the part.
            let put = self.head.compare_exchange_weak(head, self.index, Ordering::Release, Ordering::Relaxed);
            match put {
                Ok(_) => return true,
                Err(now) => head = now,
            }
        }
        false
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_part_is_taken_once() {
        let (free, mut chain) = Free::all(3);
        let mut out: Vec<_> = std::iter::from_fn(|| free.take(&mut chain)).collect();
        assert_eq!(out, [0, 1, 2]);
        let give = |index| free.place(index).expect("a valid index").give();
        assert!(give(1) && give(0));
        assert_eq!(free.take(&mut chain), Some(1), "parts are taken in the order of give");
        assert!(give(2));
        out = std::iter::from_fn(|| free.take(&mut chain)).collect();
        assert_eq!(out, [0, 2]);
        assert_eq!(free.take(&mut chain), None);
        assert!(give(2) && give(1));
        assert_eq!(free.take(&mut chain), Some(2));
        assert_eq!(free.close(&mut chain), 1);
        assert!(!give(0) && !give(2), "the list is closed");
        let (none, mut chain) = Free::all(0);
        assert_eq!((none.take(&mut chain), none.close(&mut chain)), (None, 0));
    }
}

/// `RUSTFLAGS="--cfg loom" cargo test --release -p towpath-send --lib interleavings`
#[cfg(all(test, loom))]
mod interleavings {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Two threads give while a third takes. Each owner writes its part, so loom reports two owners of one part, and writes that do
    /// not happen before the next owner's reads.
    #[test]
    fn a_part_has_one_owner() {
        loom::model(|| {
            let (free, mut chain) = Free::all(2);
            let world = Arc::new((free, [UnsafeCell::new(0), UnsafeCell::new(0)]));
            let mut givers = Vec::new();
            for _ in 0..2 {
                let index = world.0.take(&mut chain).expect("two free parts");
                let world = world.clone();
                givers.push(thread::spawn(move || {
                    world.1[index as usize].with_mut(touch);
                    assert!(world.0.place(index).is_some_and(Place::give));
                }));
            }
            assert_eq!(chain.0, END);
            let mut out = Vec::new();
            for _ in 0..2 {
                out.extend(world.0.take(&mut chain));
            }
            for index in &out {
                world.1[*index as usize].with_mut(touch);
            }
            for giver in givers {
                giver.join().unwrap();
            }
            out.extend(std::iter::from_fn(|| world.0.take(&mut chain)));
            out.sort_unstable();
            assert_eq!(out, [0, 1]);
        });
    }

    /// Two threads give while a third closes the list: each part is counted, or its `give` fails.
    #[test]
    fn close_counts_a_part_or_its_give_fails() {
        loom::model(|| {
            let (free, mut chain) = Free::all(3);
            let free = Arc::new(free);
            let mut givers = Vec::new();
            for _ in 0..2 {
                let index = free.take(&mut chain).expect("three free parts");
                let free = free.clone();
                givers.push(thread::spawn(move || free.place(index).is_some_and(Place::give)));
            }
            let counted = free.close(&mut chain);
            let given =
                givers.into_iter().filter_map(|giver| giver.join().ok()).filter(|given| *given).count();
            assert_eq!(counted as usize, 1 + given);
        });
    }

    /// The access itself is the check: loom tracks it.
    fn touch(_: *mut u32) {}
}
