//! Looks at states by a handle that may be away, and that others may be looking by at once.
//!
//! What: who lists states reads slots, so the handle's place must have a stamp meanwhile ([`crate::state::concurrent::epoch`]), or the
//! slots would be used again under the reader: an entry half of one state, half of another. The first visitor of a handle
//! that is away has it come, the last one has it go again.
//!
//! Invariant: while there is a visitor, nobody calls what changes the handle, as that takes it alone; so the stamp is only
//! changed here, under the lock, and moved on only by a visitor who is alone and knows no slot.

use super::States;
use crate::state::table::family::locked;

/// The visitors of one handle, and the stamp that it has because of them.
#[derive(Debug, Default)]
pub(super) struct Readers {
    visitors: u32,
    seen: u64,
}

/// One visitor, until it is dropped.
pub(super) struct ReadGuard<'s>(&'s States);

impl States {
    /// Sees to it that slots stay what they are.
    pub(super) fn visit(&self) -> ReadGuard<'_> {
        let mut visits = locked(&self.visits);
        if visits.visitors == 0 {
            visits.seen = self.seen;
            self.shared.epochs.stamp(self.worker, &mut visits.seen);
        }
        visits.visitors += 1;
        ReadGuard(self)
    }
}

impl ReadGuard<'_> {
    /// Says that this visitor knows no slot at the moment.
    pub(super) fn pause(&self) {
        let Self(states) = self;
        let mut visits = locked(&states.visits);
        if visits.visitors == 1 {
            states.shared.epochs.stamp(states.worker, &mut visits.seen);
        }
    }
}

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        let Self(states) = self;
        let mut visits = locked(&states.visits);
        visits.visitors -= 1;
        if visits.visitors == 0 && states.seen == 0 {
            states.shared.epochs.go(states.worker);
        }
    }
}
