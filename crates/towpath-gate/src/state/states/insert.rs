//! Inserting states: all bounds are reserved first, then the state is written and linked.

use towpath_wire::Time;

use super::sweep::RECLAIM;
use super::{AddressFamily, LookupResult, States, TCP};
use crate::state::events::EventKind;
use crate::state::limits::slot_list::NONE;
use crate::state::limits::{Limited, Reservation};
use crate::state::table::entry::{BurstTime, CAPPED, LIMITED, NewEntry, PacketInfo, STRICT};
use crate::state::table::family::InsertResult;
use crate::state::table::key::{Key, Side, with_key};
use crate::state::table::slab::SlotList;
use crate::state::tcp::window::Window;
use crate::state::tcp::{RST, SYN, begins};
use crate::state::{Direction, Flow, Install, Name, Refused, RuleId, Segment, Tracking};

impl States {
    /// Inserts a state for a flow without a live one of that name. Returns its slot, or `None` if another worker has inserted one
    /// meanwhile, which then has the packet.
    pub(super) fn insert(
        &mut self,
        flow: &Flow,
        name: Name,
        segment: &Segment,
        rule: RuleId,
        install: &Install,
        now: Time,
    ) -> Result<Option<u32>, Refused> {
        if install.tracking == Tracking::Strict && flow.proto == TCP && !begins(segment.tcp_flags) {
            return Err(Refused::Invalid);
        }
        if self.is_full() {
            self.reclaim(now);
        }
        let parent = match install.limit {
            Some(limit) => self.reserve_parent(&Limited { flow, name, rule, limit }, now)?,
            None => NONE,
        };
        let mut reservation = Reservation { parent, source: false };
        let reserved = self.reserve_source(flow, now).and_then(|source| {
            reservation.source = source;
            self.reserve_slot(now)
        });
        if let Err(refused) = reserved {
            self.shared.limits.release(&reservation, flow, now);
            return Err(refused);
        }
        let time = BurstTime::new(now, &self.settings);
        let packet = PacketInfo { proto: flow.proto, bytes: segment.bytes, segment, at: time };
        let inserted =
            with_key!(flow, |key, side| self.link(key, side, name, rule, install, &reservation, packet));
        if !matches!(inserted, Ok(Some(_))) {
            self.shared.occupancy.release(self.worker.id(), 1, self.settings.dyn_max);
            self.shared.limits.release(&reservation, flow, now);
        }
        inserted
    }

    #[expect(clippy::too_many_arguments, reason = "everything that a state consists of, once")]
    fn link<const N: usize>(
        &mut self,
        key: Key<N>,
        side: Side,
        name: Name,
        rule: RuleId,
        install: &Install,
        reservation: &Reservation,
        packet: PacketInfo<'_>,
    ) -> Result<Option<u32>, Refused>
    where
        Key<N>: AddressFamily<N>,
    {
        let shared = &*self.shared;
        let family = Key::<N>::family(shared);
        let slot =
            Key::<N>::pick(&mut self.v4, &mut self.v6).free.alloc(&family.slab).ok_or(Refused::Full)?;
        let tcp = packet.proto == TCP;
        let strict = tcp && install.tracking == Tracking::Strict;
        let loose = tcp && install.tracking == Tracking::Loose;
        let flag = |flag, on| if on { flag } else { 0 };
        let parent = reservation.parent;
        let flags = flag(CAPPED, reservation.source) | flag(LIMITED, parent != NONE) | flag(STRICT, strict);
        let established = loose && packet.segment.tcp_flags & (SYN | RST) == 0;
        let (lifetime, every_packet) = install.own_lifetime();
        // Before the state is linked: its unlinking must not be counted first.
        let generation = self.rule_counts.add(&shared.rules, rule);
        let new = NewEntry {
            key,
            side,
            rule,
            name,
            generation,
            flags,
            parent,
            lifetime,
            every_packet,
            established,
            origin: install.origin,
        };
        family.slot_counters.clear(slot);
        if self.settings.dyn_adaptive && self.is_nearly_full() {
            family.entry(slot).init(&new, packet, &self.settings.when_nearly_full());
        } else {
            family.entry(slot).init(&new, packet, &self.settings);
        }
        if strict {
            let mut window = Window::default();
            window.segment(Direction::Forward, packet.segment);
            family.windows.insert(slot, window);
        }
        let live = self.live(packet.at.now);
        let inserted = family.insert(&Key::<N>::local(self).index, &key, name, slot, live);
        let other = match inserted {
            InsertResult::Inserted { replaced } => {
                self.count(Key::<N>::LINKED);
                if let Some(old) = replaced {
                    self.release_ended::<N>(old, packet.at.now);
                }
                if Key::<N>::family(&self.shared).slab.sibling(slot).is_some() {
                    // The flow has a new first state.
                    self.hint_version += 1;
                }
                self.record::<N>(EventKind::Created, slot);
                return Ok(Some(slot));
            }
            InsertResult::Exists(other) => other,
        };
        self.rule_counts.subtract(&shared.rules, rule, generation);
        let unused = SlotList { first: slot, last: slot, slots: 1 };
        Key::<N>::pick(&mut self.v4, &mut self.v6).free.free(&family.slab, unused);
        match self.hit(family.entry(other), other, side, packet) {
            LookupResult::Invalid => Err(Refused::Invalid),
            _ => Ok(None),
        }
    }

    /// Counts a state in its parent. Returns the parent's slot.
    fn reserve_parent(&mut self, install: &Limited<'_>, now: Time) -> Result<u32, Refused> {
        let first = match self.shared.limits.reserve_parent(install, &self.settings, false, now) {
            Ok(parent) => return Ok(parent),
            // Collecting states does not help.
            Err(Refused::OverRate) => return Err(Refused::OverRate),
            Err(refused) => refused,
        };
        // Expired states and parents may count that were not collected yet.
        self.reclaim_for_limit(now);
        self.shared.limits.collect_parents_for(install, first, now, RECLAIM as usize);
        match self.shared.limits.reserve_parent(install, &self.settings, true, now) {
            // With a lifetime of 0, the parent that was at its limit is collected by now, and there is no room for another.
            Err(Refused::ParentsFull) => Err(first),
            result => result,
        }
    }

    /// Counts a state for its source, if `dyn_source_max` is set. Returns true if it is counted.
    fn reserve_source(&mut self, flow: &Flow, now: Time) -> Result<bool, Refused> {
        let max = self.settings.dyn_source_max;
        if max == 0 {
            return Ok(false);
        }
        if self.shared.limits.reserve_source(flow, max) {
            return Ok(true);
        }
        self.reclaim_for_limit(now);
        if self.shared.limits.reserve_source(flow, max) { Ok(true) } else { Err(Refused::OverSource) }
    }

    fn is_full(&self) -> bool {
        self.shared.occupancy.is_full(self.workers(), self.settings.dyn_max)
    }
}
