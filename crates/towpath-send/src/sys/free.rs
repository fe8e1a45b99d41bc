//! Which parts of an area are free: a list whose links stand in an array of their own.
//!
//! Anybody gives, and one takes. Who gives puts a part in front of the list, with a compare-and-exchange. Who takes has a chain
//! of his own, and when that is empty he swaps the whole list out and turns it round: parts are never taken from the shared list one by one, so
//! that a head that is the same is the same list (no ABA), and taking costs one atomic operation for many parts.
//!
//! What always holds: an index is in the list, in the chain, or out; `take` gives it to one owner, who gives it once.
//!
//! References: R. K. Treiber, "Systems Programming: Coping with Parallelism", IBM RJ 5118, 1986.

#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering};

/// The end of a list.
const END: u32 = u32::MAX;

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

    /// Takes a part back from its owner.
    pub(super) fn give(&self, index: u32) {
        let Some(next) = self.next.get(index as usize) else { return };
        // Relaxed: the exchange below says whether this was right; no link is read through it.
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            // Relaxed: published by the Release below.
            next.store(head, Ordering::Relaxed);
            // Release, for `take`: the link, and all that the owner did with the part.
            match self.head.compare_exchange_weak(head, index, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
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
        free.give(1);
        free.give(0);
        assert_eq!(free.take(&mut chain), Some(1), "the one that was given first");
        free.give(2);
        out = std::iter::from_fn(|| free.take(&mut chain)).collect();
        assert_eq!(out, [0, 2]);
        assert_eq!(free.take(&mut chain), None);
        let (none, mut chain) = Free::all(0);
        assert_eq!(none.take(&mut chain), None);
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
                    world.0.give(index);
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

    /// Access is what counts: loom watches it.
    fn touch(_: *mut u32) {}
}
