//! Listing the states: all at once, or in parts.

use std::cmp::Ordering as Order;
use std::ops::Range;
use std::sync::Arc;

use towpath_wire::Time;

use super::readers::ReadGuard;
use super::sweep::WALK;
use super::{AddressFamily, States};
use crate::state::listing::{Cursor, Listed};
use crate::state::table::entry::MAX_PARENTS;
use crate::state::table::key::Key;
use crate::state::table::live_filter::LiveFilter;

impl States {
    /// The live parents, then the live IPv4 states, then the live IPv6 states.
    pub fn list(&self, now: Time) -> impl Iterator<Item = Listed> {
        self.dump(Cursor::default(), now).map(|(listed, _)| listed)
    }

    /// [`States::list`] in parts: each entry with the cursor that continues after it, at any later time. No state is listed
    /// twice, and no state is missed that was live throughout.
    ///
    /// While the iterator exists, slots that are unlinked are not reused before it advances or is dropped.
    pub fn dump(&self, from: Cursor, now: Time) -> impl Iterator<Item = (Listed, Cursor)> {
        // Parts before the cursor's are done, those after it begin at slot 0.
        let start = move |part: u8| match part.cmp(&from.part) {
            Order::Less => u32::MAX,
            Order::Equal => from.slot,
            Order::Greater => 0,
        };
        let after = |part| move |(slot, listed)| (listed, Cursor { part, slot: slot + 1 });
        let parents = match start(0) {
            u32::MAX => Vec::new(),
            slot => self.shared.limits.list_parents(slot, now),
        };
        let guard = Arc::new(self.read_guard());
        let v4 = self.list_from::<2>(start(1), now, &guard).map(after(1));
        let v6 = self.list_from::<6>(start(2), now, &guard).map(after(2));
        parents.into_iter().map(after(0)).chain(v4).chain(v6)
    }

    /// Returns true if a [`dump`](Self::dump) of this table may have returned the cursor, or if it is the beginning of a part.
    pub fn has_position(&self, at: Cursor) -> bool {
        let slots = match at.part {
            0 => MAX_PARENTS,
            1 => Key::<2>::family(&self.shared).slab.len(),
            2 => Key::<6>::family(&self.shared).slab.len(),
            _ => return false,
        };
        at.slot <= slots
    }

    /// Keeps the slots that a listing reads from being reused.
    pub(super) fn read_guard(&self) -> ReadGuard<'_> {
        self.readers.guard(&self.shared.epochs, self.worker)
    }

    /// The live states of a family from slot `from` on.
    pub(super) fn list_from<'s, const N: usize>(
        &'s self,
        from: u32,
        now: Time,
        guard: &Arc<ReadGuard<'s>>,
    ) -> impl Iterator<Item = (u32, Listed)> + use<'s, N>
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let live = self.slots_from::<N>(from..u32::MAX, now, guard);
        live.map(move |slot| (slot, family.listed(slot, now)))
    }

    /// The slots of a family that have a live state.
    pub(super) fn slots_from<'s, const N: usize>(
        &'s self,
        slots: Range<u32>,
        now: Time,
        guard: &Arc<ReadGuard<'s>>,
    ) -> impl Iterator<Item = u32> + use<'s, N>
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let guard = Arc::clone(guard);
        // Read again: rules may have been removed since the handle's last call.
        let removed = self.shared.rules.removed();
        let live = move |&slot: &u32| {
            if slot.is_multiple_of(WALK) {
                guard.quiescent();
            }
            family.slab.is_occupied(slot) && LiveFilter::new(now, &removed).accepts(family.entry(slot))
        };
        (slots.start..slots.end.min(family.slab.len())).filter(live)
    }
}
