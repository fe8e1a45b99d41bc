//! The states as others see them: a list, all of it or in pieces.

use std::cmp::Ordering as Order;
use std::sync::Arc;

use super::readers::ReadGuard;
use super::sweep::WALK;
use super::{AddressFamily, States, TCP};
use crate::state::Direction;
use crate::state::listing::{Cursor, Kind, Listed};
use crate::state::table::entry::{LIMITED, LiveFilter, ORPHANED, SPILLED, unpack};
use crate::state::table::family::{Family, locked};
use crate::state::table::key::{FlowKey, Key};
use towpath_wire::Time;

impl States {
    /// What is live: parents, then IPv4 states, then IPv6 states.
    pub fn list(&self, now: Time) -> impl Iterator<Item = Listed> {
        self.dump(Cursor::default(), now).map(|(listed, _)| listed)
    }

    /// [`States::list`] in pieces: each entry with the cursor that goes on after it, at any later time and whatever
    /// happened in between. No state comes twice, and none is missed that lived throughout.
    ///
    /// The room of states that go while the iterator is there waits for it to go on, or to go.
    pub fn dump(&self, from: Cursor, now: Time) -> impl Iterator<Item = (Listed, Cursor)> {
        // Parts before the cursor's are over, those after it begin at 0.
        let start = move |part: u8| match part.cmp(&from.part) {
            Order::Less => u32::MAX,
            Order::Equal => from.slot,
            Order::Greater => 0,
        };
        let after = |part| move |(slot, listed)| (listed, Cursor { part, slot: slot + 1 });
        let parents: Vec<_> = match start(0) {
            u32::MAX => Vec::new(),
            slot => locked(&self.shared.parents).list_from(slot, now).collect(),
        };
        let visit = Arc::new(self.visit());
        let v4 = self.list_from::<2>(start(1), now, &visit).map(after(1));
        let v6 = self.list_from::<6>(start(2), now, &visit).map(after(2));
        parents.into_iter().map(after(0)).chain(v4).chain(v6)
    }

    /// The live states of a family from one slot on, while `visit` lasts.
    pub(super) fn list_from<'s, const N: usize>(
        &'s self,
        from: u32,
        now: Time,
        visit: &Arc<ReadGuard<'s>>,
    ) -> impl Iterator<Item = (u32, Listed)> + use<'s, N>
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let visit = Arc::clone(visit);
        // What is gone by now, not only what was when this handle was last called: it may have been away.
        let gone = Arc::clone(&locked(&self.shared.gone));
        let live = move |&slot: &u32| {
            if slot.is_multiple_of(WALK) {
                visit.pause();
            }
            family.slab.tick(slot).is_some() && LiveFilter::new(now, &gone).has(family.entry(slot))
        };
        (from..family.slab.len()).filter(live).map(move |slot| (slot, self.listed(family, slot, now)))
    }

    pub(super) fn listed<const N: usize>(&self, family: &Family<N>, slot: u32, now: Time) -> Listed
    where
        Key<N>: AddressFamily<N>,
    {
        let entry = family.entry(slot);
        let (header, key, tcp) = (entry.header(), entry.key(), entry.tcp());
        let flow = key.flow(header.forward());
        let mut counts = [entry.counted(Direction::Forward), entry.counted(Direction::Reverse)];
        for (at, count) in counts.iter_mut().enumerate() {
            for more in family.slot_counters.counted(slot, at).map(unpack) {
                *count = [count[0] + more[0], count[1] + more[1]];
            }
        }
        if header.has(SPILLED)
            && let Some(wide) = locked(&self.shared.spilled).get(&(Key::<N>::V6, slot))
        {
            counts = [0, 1].map(|at| [counts[at][0] + wide[2 * at], counts[at][1] + wide[2 * at + 1]]);
        }
        let is_tcp = flow.proto == TCP;
        Listed {
            kind: if header.has(LIMITED) { Kind::Limit } else { Kind::State },
            rule: header.rule(),
            name: header.name(),
            orphaned: header.has(ORPHANED),
            flow,
            packets: counts.map(|[packets, _]| packets),
            bytes: counts.map(|[_, bytes]| bytes),
            remaining: entry.end(now).since(now),
            tcp_seen: if is_tcp { tcp.seen } else { 0 },
            tcp_ack: tcp.ack,
        }
    }
}
