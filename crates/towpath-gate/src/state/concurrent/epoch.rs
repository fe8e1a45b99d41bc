//! When a slot that was taken out of the index may be used again: when no worker can still be reading it.
//!
//! What: quiescent-state-based reclamation (McKenney and Slingwine 1998; Hart et al. 2007). Every worker knows slots only
//! during one call, or one burst; between those it stamps its line with the epoch that it sees, if that has changed. Slots
//! that a worker takes out of the index go to a list of its own; when the list is closed, it gets a new epoch, and when
//! every worker has stamped that epoch or a later one, its slots are free.
//!
//! Invariant: a slot in a list is in nobody's hands once all stamps have reached the list's epoch.
//!
//! Races. The list's epoch is made, by a read-modify-write with release, after its slots were unlinked. A worker that
//! stamps it has read it, with acquire, or a later one that continues its release sequence: what it looks up from then
//! on, it looks up in an index without those slots. What it read before, it read before it stamped (release), and the
//! one who frees the slots reads the stamp (acquire) before it does. A worker that is away has no stamp, and nobody waits
//! for it. When it comes back, it stores a stamp, then there is a full fence, then it looks things up; who closes a list
//! unlinks, then there is a full fence, then it reads the stamps. If the stamp is seen, it is waited for; if not, the
//! fence of the closer came first, and the worker's lookups see the unlinking.
//!
//! A worker that stands still in the middle of a call holds up everybody's lists. Their slots count as used then: memory
//! stays bounded, and installs are refused when all slots wait.

use crate::state::concurrent::sync::{Apart, AtomicU64, Ordering, fence};

/// Workers at a time.
#[cfg(not(loom))]
pub(crate) const MAX_WORKERS: usize = 64;
#[cfg(loom)]
pub(crate) const MAX_WORKERS: usize = 2;

/// The stamp of a worker's place that nobody has.
const VACANT: u64 = 0;
/// The stamp of a worker that is away.
const AWAY: u64 = u64::MAX;

/// A stamp: whoever stamps must not disturb the others.
type Stamp = Apart<AtomicU64>;

/// The epoch and the stamps.
#[derive(Debug)]
pub(crate) struct Epochs {
    now: Stamp,
    stamps: [Stamp; MAX_WORKERS],
    /// Places that were ever taken.
    places: Stamp,
}

impl Epochs {
    pub(crate) fn new() -> Self {
        let stamp = |epoch| Apart(AtomicU64::new(epoch));
        Self { now: stamp(1), stamps: std::array::from_fn(|_| stamp(VACANT)), places: stamp(0) }
    }

    /// A place for another worker, which is away yet; `None` when all are taken.
    pub(crate) fn join(&self) -> Option<usize> {
        // AcqRel: pairs with leave(), so that what belongs to the place is seen as its last worker left it.
        let take = |stamp: &Stamp| {
            stamp.0.compare_exchange(VACANT, AWAY, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let place = self.stamps.iter().position(take)?;
        // Relaxed: come() has a fence behind it.
        self.places.0.fetch_max(place as u64 + 1, Ordering::Relaxed);
        Some(place)
    }

    /// Places that were ever taken; they are the first.
    pub(crate) fn places(&self) -> usize {
        self.places.0.load(Ordering::Relaxed) as usize
    }

    /// Gives the place up.
    pub(crate) fn leave(&self, worker: usize) {
        // Release: pairs with join().
        self.stamps[worker].0.store(VACANT, Ordering::Release);
    }

    /// The worker comes back. The epoch that it stamps.
    #[cold]
    fn come(&self, worker: usize) -> u64 {
        let epoch = self.now.0.load(Ordering::Acquire);
        self.stamps[worker].0.store(epoch, Ordering::Relaxed);
        // Pairs with the fence of passed(): see above.
        fence(Ordering::SeqCst);
        epoch
    }

    /// The worker knows no slot, and will not look any up before it comes back.
    pub(crate) fn go(&self, worker: usize) {
        // Release: pairs with the acquire of passed().
        self.stamps[worker].0.store(AWAY, Ordering::Release);
    }

    /// The worker knows no slot. `seen` is its last stamp, 0 if it was away, and becomes this one.
    #[inline]
    pub(crate) fn stamp(&self, worker: usize, seen: &mut u64) {
        // Acquire: pairs with the release of close().
        let epoch = self.now.0.load(Ordering::Acquire);
        if epoch != *seen {
            *seen = if *seen == 0 { self.come(worker) } else { self.restamp(worker, epoch) };
        }
    }

    #[cold]
    fn restamp(&self, worker: usize, epoch: u64) -> u64 {
        // Release: pairs with the acquire of passed().
        self.stamps[worker].0.store(epoch, Ordering::Release);
        epoch
    }

    /// Closes a list of slots that are unlinked: its epoch.
    pub(crate) fn close(&self) -> u64 {
        // AcqRel: pairs with the acquire of stamp() and come(); each increment continues the ones before it.
        self.now.0.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Whether every worker has stamped `epoch` or a later one, or is away.
    pub(crate) fn passed(&self, epoch: u64) -> bool {
        // Pairs with the fence of come(): see above.
        fence(Ordering::SeqCst);
        // Acquire: pairs with the release of stamp() and go().
        let has = |stamp: &Stamp| match stamp.0.load(Ordering::Acquire) {
            VACANT => true,
            seen => seen >= epoch,
        };
        self.stamps[..self.places()].iter().all(has)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_passes_when_all_have_stamped_it() {
        let epochs = Epochs::new();
        let (a, b) = (epochs.join().unwrap(), epochs.join().unwrap());
        let (mut seen_a, mut seen_b) = (0, 0);
        epochs.stamp(a, &mut seen_a);
        epochs.stamp(b, &mut seen_b);
        let epoch = epochs.close();
        assert!(!epochs.passed(epoch));
        epochs.stamp(a, &mut seen_a);
        assert!(!epochs.passed(epoch));
        epochs.stamp(b, &mut seen_b);
        assert!(epochs.passed(epoch));
        let later = epochs.close();
        epochs.stamp(a, &mut seen_a);
        epochs.go(b);
        assert!(epochs.passed(later));
        let last = epochs.close();
        assert!(!epochs.passed(last));
        epochs.leave(a);
        assert!(epochs.passed(last));
        seen_b = 0;
        epochs.stamp(b, &mut seen_b);
        assert!(epochs.passed(last) && !epochs.passed(last + 1));
        assert_eq!(epochs.join(), Some(a));
    }

    #[test]
    fn places_are_bounded() {
        let epochs = Epochs::new();
        assert_eq!(std::iter::from_fn(|| epochs.join()).count(), MAX_WORKERS);
    }
}
