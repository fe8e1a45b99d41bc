//! Which parts of an area are free: a list whose links stand in an array of their own.
//!
//! Anybody gives, and one takes. Who gives puts a part in front of the list, with a compare-and-exchange. Who takes has a chain
//! of his own, and when that is empty he swaps the whole list out and turns it round: parts are never taken from the shared list one by one, so
//! that a head that is the same is the same list (no ABA), and taking costs one atomic operation for many parts.
//!
//! What always holds: an index is in the list, in the chain, or out; `take` gives it to one owner, who gives it once.
//!
//! Who takes ends the list (`close`): he is told how many parts are free then, and each owner of one that is out is told when he
//! gives it. If his exchange is first, his part is counted; if the closing one is first, he sees it and keeps the part. So whatever each
//! part has with it (a reference to the area) is given back once.
//!
//! References: R. K. Treiber, "Systems Programming: Coping with Parallelism", IBM RJ 5118, 1986.

#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering};

/// The end of a list.
const END: u32 = u32::MAX;
/// In place of the part that was given last: there is no list any more. Parts have lower numbers.
const CLOSED: u32 = END - 1;
/// Most parts of a list.
pub(super) const MOST: u32 = CLOSED;

#[derive(Debug)]
pub(super) struct Free {
    /// The part that was given last.
    head: AtomicU32,
    /// Of each part that is in the list or in the chain, the one behind it.
    next: Box<[AtomicU32]>,
}

/// The chain of the one who takes.
#[derive(Debug)]
pub(super) struct Taken(u32);

impl Free {
    /// `count` parts, all free. There is one chain for each list.
    pub(super) fn all(count: u32) -> (Self, Taken) {
        let next = (1..=count).map(|next| AtomicU32::new(if next < count { next } else { END })).collect();
        (Self { head: AtomicU32::new(END), next }, Taken(if count > 0 { 0 } else { END }))
    }

    /// A free part; none when all are out.
    #[inline]
    pub(super) fn take(&self, chain: &mut Taken) -> Option<u32> {
        if chain.0 == END {
            // Acquire, with the Release of each `give`: their exchanges follow on each other, so that the last one's value stands
            // for all of them. What the owners did with the parts, and their links, is before this.
            let mut at = self.head.swap(END, Ordering::Acquire);
            // The other way round: those that were given first come first, so that parts that lie side by side go on doing so, and
            // the kernel is told of them as one.
            while let Some(link) = self.next.get(at as usize) {
                // Relaxed: see below; nobody else has these parts.
                let next = link.load(Ordering::Relaxed);
                link.store(chain.0, Ordering::Relaxed);
                (chain.0, at) = (at, next);
            }
        }
        let index = chain.0;
        // Relaxed: a link is written before its part is given, which the exchange above has seen.
        chain.0 = self.next.get(index as usize)?.load(Ordering::Relaxed);
        Some(index)
    }

    /// Where part `index` is given to; none for one that there is not.
    #[inline]
    pub(super) fn place(&self, index: u32) -> Option<Place<'_>> {
        Some(Place { head: &self.head, next: self.next.get(index as usize)?, index })
    }

    /// Ends the list, and says how many parts are free: no more will be.
    pub(super) fn close(&self, chain: &mut Taken) -> u32 {
        // Acquire: as in `take`, for the links. Who finds CLOSED needs nothing that was done before this.
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

/// The place of one part in the list. It has nothing but the two atomics: once the part is given, another thread may free whatever they
/// lie in, while the giving has not returned yet.
pub(super) struct Place<'a> {
    head: &'a AtomicU32,
    next: &'a AtomicU32,
    index: u32,
}

impl Place<'_> {
    /// Takes the part back from its owner. Whether there is a list to take it.
    #[inline]
    pub(super) fn give(self) -> bool {
        // Relaxed: the exchange below says whether this was right; no link is read through it.
        let mut head = self.head.load(Ordering::Relaxed);
        while head != CLOSED {
            // Relaxed: published by the Release below.
            self.next.store(head, Ordering::Relaxed);
            // Release, for `take` and `close`: the link, and all that the owner did with the part.
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
    fn each_part_is_out_once() {
        let (free, mut chain) = Free::all(3);
        let mut out: Vec<_> = std::iter::from_fn(|| free.take(&mut chain)).collect();
        assert_eq!(out, [0, 1, 2]);
        let give = |index| free.place(index).expect("there is such a part").give();
        assert!(give(1) && give(0));
        assert_eq!(free.take(&mut chain), Some(1), "the one that was given first");
        assert!(give(2));
        out = std::iter::from_fn(|| free.take(&mut chain)).collect();
        assert_eq!(out, [0, 2]);
        assert_eq!(free.take(&mut chain), None);
        assert!(give(2) && give(1));
        assert_eq!(free.take(&mut chain), Some(2));
        assert_eq!(free.close(&mut chain), 1);
        assert!(!give(0) && !give(2), "there is no list any more");
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

    /// Two threads give while the third takes; a part is written by each owner, which loom finds out when two have it, or
    /// when what one wrote is not before what the next reads.
    #[test]
    fn a_part_has_one_owner() {
        loom::model(|| {
            let (free, mut chain) = Free::all(2);
            let world = Arc::new((free, [UnsafeCell::new(0), UnsafeCell::new(0)]));
            let mut givers = Vec::new();
            for _ in 0..2 {
                let index = world.0.take(&mut chain).expect("two are free");
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

    /// Two threads give while the third ends the list: each part is counted, or its owner is told.
    #[test]
    fn a_part_is_counted_or_kept() {
        loom::model(|| {
            let (free, mut chain) = Free::all(3);
            let free = Arc::new(free);
            let mut givers = Vec::new();
            for _ in 0..2 {
                let index = free.take(&mut chain).expect("three are free");
                let free = free.clone();
                givers.push(thread::spawn(move || free.place(index).is_some_and(Place::give)));
            }
            let counted = free.close(&mut chain);
            let given =
                givers.into_iter().filter_map(|giver| giver.join().ok()).filter(|given| *given).count();
            assert_eq!(counted as usize, 1 + given);
        });
    }

    /// Access is what counts: loom watches it.
    fn touch(_: *mut u32) {}
}
