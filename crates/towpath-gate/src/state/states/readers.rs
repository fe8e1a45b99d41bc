//! Readers of states that share one handle: listings, which borrow the handle and may run while it is offline.
//!
//! What: a listing reads slots, so its worker must be online meanwhile ([`crate::state::concurrent::epoch`]): otherwise a slot
//! could be reused under it, and an entry would be half of one state and half of another. The first reader of an offline handle
//! brings it online, the last one takes it offline again.
//!
//! Invariant: the readers borrow the handle, so no call that changes its epoch runs meanwhile. The stored epoch changes only
//! here, under the lock, and moves on only when the calling reader is the only one and holds no slot.

use std::sync::Mutex;

use crate::state::concurrent::epoch::{Epochs, Participant};
use crate::state::table::family::locked;

/// The readers of one handle.
#[derive(Debug, Default)]
pub(super) struct Readers(Mutex<Active>);

#[derive(Debug, Default)]
struct Active {
    readers: u32,
    /// The handle's worker with the epoch that it has because of the readers.
    worker: Option<Participant>,
}

/// One reader, until it is dropped: slots that it sees are not reused.
pub(super) struct ReadGuard<'s> {
    readers: &'s Readers,
    epochs: &'s Epochs,
    /// The handle was online before.
    online: bool,
}

impl Readers {
    /// Adds a reader of the handle of `worker`.
    pub(super) fn guard<'s>(&'s self, epochs: &'s Epochs, worker: Participant) -> ReadGuard<'s> {
        let mut active = locked(&self.0);
        if active.readers == 0 {
            let mut worker = worker;
            epochs.quiescent(&mut worker);
            active.worker = Some(worker);
        }
        active.readers += 1;
        ReadGuard { readers: self, epochs, online: worker.is_online() }
    }
}

impl ReadGuard<'_> {
    /// Announces that this reader holds no slot at the moment.
    pub(super) fn quiescent(&self) {
        let mut active = locked(&self.readers.0);
        if let (1, Some(worker)) = (active.readers, &mut active.worker) {
            self.epochs.quiescent(worker);
        }
    }
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        let mut active = locked(&self.readers.0);
        active.readers -= 1;
        if let (0, false, Some(worker)) = (active.readers, self.online, &mut active.worker) {
            self.epochs.offline(worker);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn grace_periods_wait_for_readers_of_an_offline_handle() {
        let (epochs, readers) = (Epochs::new(), Readers::default());
        let worker = epochs.register().unwrap();
        let (first, second) = (readers.guard(&epochs, worker), readers.guard(&epochs, worker));
        let epoch = epochs.start_grace_period();
        // The other one may hold a slot.
        first.quiescent();
        assert!(!epochs.grace_period_over(epoch));
        drop(second);
        assert!(!epochs.grace_period_over(epoch));
        first.quiescent();
        assert!(epochs.grace_period_over(epoch));
        let epoch = epochs.start_grace_period();
        drop(first);
        assert!(epochs.grace_period_over(epoch), "offline again");
    }

    #[test]
    fn readers_leave_an_online_handle_online() {
        let (epochs, readers) = (Epochs::new(), Readers::default());
        let mut worker = epochs.register().unwrap();
        epochs.quiescent(&mut worker);
        drop(readers.guard(&epochs, worker));
        let epoch = epochs.start_grace_period();
        assert!(!epochs.grace_period_over(epoch));
        epochs.quiescent(&mut worker);
        assert!(epochs.grace_period_over(epoch));
    }
}
