//! Grace periods: when a slot that was unlinked from the index may be used again.
//!
//! What: quiescent-state-based reclamation (QSBR; McKenney and Slingwine 1998; Hart et al. 2007) in liburcu's terms. A worker
//! holds slot numbers only during one call or one burst. Between calls it is in a quiescent state: it stores the current
//! epoch in its own cache line if the epoch has changed. A worker collects the slots that it unlinks in a
//! [retire list](super::retire_list). Closing the list starts a grace period, whose number is the next epoch. The grace
//! period is over when every online worker has stored that epoch or a later one.
//!
//! Invariant: after the grace period of a list, no worker holds a slot of that list.
//!
//! Races. A read-modify-write with release increments the epoch after the slots were unlinked.
//! - A worker that stores the epoch has loaded it, or a later value of its release sequence, with acquire. Its later lookups
//!   see an index without those slots.
//! - Reads that the worker did before are ordered before its store (release). The worker that frees the slots loads the
//!   stored epochs with acquire before it frees them.
//! - An offline worker delays no grace period. When it comes online, it stores an epoch, executes a full fence, and then
//!   looks states up. [`Epochs::grace_period_over`] runs after the slots were unlinked, executes a full fence, and then loads
//!   the epochs. If it sees the worker's epoch, it waits for that worker. If it does not, its fence came first, and the
//!   lookups of the worker see that the slots are unlinked.
//!
//! A worker that stalls in the middle of a call delays all grace periods. Retired slots count toward `dyn_max`: memory stays
//! bounded, and installs are refused when all free slots are retired.

use super::sync::{Apart, AtomicU64, Ordering, fence};

/// Maximum number of workers at one time.
#[cfg(not(loom))]
pub(crate) const MAX_WORKERS: usize = 64;
#[cfg(loom)]
pub(crate) const MAX_WORKERS: usize = 2;

/// The epoch of a number without a worker.
const UNREGISTERED: u64 = 0;
/// The epoch of an offline worker.
const OFFLINE: u64 = u64::MAX;

/// An epoch in its own cache line: storing one does not disturb the readers of another.
type Epoch = Apart<AtomicU64>;

/// The current epoch, and the epoch that each worker has stored.
#[derive(Debug)]
pub(crate) struct Epochs {
    current: Epoch,
    workers: [Epoch; MAX_WORKERS],
    /// One more than the highest worker number ever assigned.
    registered: Epoch,
}

/// The registration of one worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Participant {
    id: usize,
    /// The epoch that the worker has stored, 0 while it is offline.
    seen: u64,
}

impl Participant {
    /// The worker's number, less than [`MAX_WORKERS`].
    #[inline]
    pub(crate) fn id(&self) -> usize {
        self.id
    }

    /// The epoch that the worker has stored, 0 while it is offline.
    #[inline]
    pub(crate) fn seen(&self) -> u64 {
        self.seen
    }

    /// Returns true unless the worker is offline.
    pub(crate) fn is_online(&self) -> bool {
        self.seen != 0
    }
}

impl Epochs {
    pub(crate) fn new() -> Self {
        let epoch = |epoch| Apart(AtomicU64::new(epoch));
        let workers = std::array::from_fn(|_| epoch(UNREGISTERED));
        Self { current: epoch(1), workers, registered: epoch(0) }
    }

    /// Registers a worker, which is offline at first. Returns `None` when there are [`MAX_WORKERS`].
    pub(crate) fn register(&self) -> Option<Participant> {
        // AcqRel: pairs with the release of unregister(), so that the next worker sees what belongs to the number as the last
        // worker left it.
        let take = |epoch: &Epoch| {
            epoch.compare_exchange(UNREGISTERED, OFFLINE, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let id = self.workers.iter().position(take)?;
        // Relaxed: the fence of online() follows before the first lookup.
        self.registered.fetch_max(id as u64 + 1, Ordering::Relaxed);
        Some(Participant { id, seen: 0 })
    }

    /// One more than the highest worker number ever assigned.
    pub(crate) fn registered(&self) -> usize {
        // Relaxed: callers that need a worker's number have learnt of it by an index or an epoch.
        self.registered.load(Ordering::Relaxed) as usize
    }

    /// Gives the worker's number back.
    pub(crate) fn unregister(&self, worker: Participant) {
        // Release: pairs with the compare-and-exchange of register().
        self.workers[worker.id].store(UNREGISTERED, Ordering::Release);
    }

    #[cold]
    fn online(&self, worker: &mut Participant) {
        // Acquire: pairs with the release of start_grace_period().
        worker.seen = self.current.load(Ordering::Acquire);
        // Relaxed: the fence orders it.
        self.workers[worker.id].store(worker.seen, Ordering::Relaxed);
        // Pairs with the fence of grace_period_over(): see the module's documentation.
        fence(Ordering::SeqCst);
    }

    /// Takes the worker offline: it holds no slot, and calls [`Epochs::quiescent`] before its next lookup.
    pub(crate) fn offline(&self, worker: &mut Participant) {
        // Release: pairs with the acquire of grace_period_over().
        self.workers[worker.id].store(OFFLINE, Ordering::Release);
        worker.seen = 0;
    }

    /// Announces a quiescent state: the worker holds no slot. Brings an offline worker online.
    #[inline]
    pub(crate) fn quiescent(&self, worker: &mut Participant) {
        // Acquire: pairs with the release of start_grace_period().
        let epoch = self.current.load(Ordering::Acquire);
        if epoch != worker.seen {
            self.store(worker, epoch);
        }
    }

    #[cold]
    fn store(&self, worker: &mut Participant, epoch: u64) {
        if worker.seen == 0 {
            return self.online(worker);
        }
        worker.seen = epoch;
        // Release: pairs with the acquire of grace_period_over().
        self.workers[worker.id].store(epoch, Ordering::Release);
    }

    /// Starts a grace period for slots that are unlinked. Returns its epoch.
    pub(crate) fn start_grace_period(&self) -> u64 {
        // AcqRel: pairs with the acquire of quiescent() and online(). Each increment continues the release sequence of those
        // before it.
        self.current.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Returns true if every online worker has stored `epoch` or a later one.
    pub(crate) fn grace_period_over(&self, epoch: u64) -> bool {
        // Pairs with the fence of online(): see the module's documentation.
        fence(Ordering::SeqCst);
        // Acquire: pairs with the release of store() and offline().
        let passed = |worker: &Epoch| match worker.load(Ordering::Acquire) {
            UNREGISTERED => true,
            seen => seen >= epoch,
        };
        self.workers[..self.registered()].iter().all(passed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_grace_period_is_over_when_all_online_workers_have_passed() {
        let epochs = Epochs::new();
        let (mut a, mut b) = (epochs.register().unwrap(), epochs.register().unwrap());
        epochs.quiescent(&mut a);
        epochs.quiescent(&mut b);
        let epoch = epochs.start_grace_period();
        assert!(!epochs.grace_period_over(epoch));
        epochs.quiescent(&mut a);
        assert!(!epochs.grace_period_over(epoch));
        epochs.quiescent(&mut b);
        assert!(epochs.grace_period_over(epoch));
        let later = epochs.start_grace_period();
        epochs.quiescent(&mut a);
        epochs.offline(&mut b);
        assert!(epochs.grace_period_over(later) && !b.is_online());
        let last = epochs.start_grace_period();
        assert!(!epochs.grace_period_over(last));
        epochs.unregister(a);
        assert!(epochs.grace_period_over(last));
        epochs.quiescent(&mut b);
        assert!(epochs.grace_period_over(last) && !epochs.grace_period_over(last + 1));
        assert_eq!(epochs.register().map(|worker| worker.id()), Some(a.id()));
    }

    #[test]
    fn the_number_of_workers_is_bounded() {
        let epochs = Epochs::new();
        assert_eq!(std::iter::from_fn(|| epochs.register()).count(), MAX_WORKERS);
    }
}
