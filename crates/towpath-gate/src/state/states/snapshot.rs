//! Saving states, and restoring them in another process or after a restart.

use std::ops::Range;
use std::sync::Arc;

use towpath_wire::Time;

use super::readers::ReadGuard;
use super::shared::Shared;
use super::{AddressFamily, States};
use crate::state::concurrent::worker_counters::Counter;
use crate::state::events::EventKind;
use crate::state::table::entry::{ASSURED, SEEN_REPLY, STRICT, after};
use crate::state::table::key::{Key, with_key};
use crate::state::tcp::window::{WORDS, Window};
use crate::state::{
    Cursor, Direction, Ends, Install, Installed, Kind, Limit, Listed, Name, Refused, RuleId, Segment,
};

/// A state without what counts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Saved {
    /// The slot, with the address family in the lowest bit. No other state has it until this one has ended.
    pub(crate) id: u32,
    pub(crate) listed: Listed,
    /// The phase of the connection, in the form of the state's protocol.
    pub(crate) seen: u64,
    pub(crate) lifetime: Option<u32>,
    /// Every packet sets the lifetime (`state-timeout`).
    pub(crate) every_packet: bool,
    pub(crate) replied: bool,
    /// The TCP windows, with strict tracking.
    pub(crate) window: Option<[u64; WORDS]>,
}

impl States {
    /// The live states in the next `slots` slots from `from` on, without parents, and the cursor that continues (`None` at the
    /// end). States that exist throughout all calls are in one of them.
    pub(crate) fn save_part(&self, from: Cursor, slots: u32, now: Time) -> (Vec<Saved>, Option<Cursor>) {
        let Shared { v4, v6, .. } = &*self.shared;
        let guard = Arc::new(self.read_guard());
        let end = from.slot.saturating_add(slots);
        let (saved, len) = match from.part {
            0 => return (Vec::new(), Some(Cursor { part: 1, slot: 0 })),
            1 => (self.save_slots::<2>(from.slot..end, now, &guard), v4.slab.len()),
            _ => (self.save_slots::<6>(from.slot..end, now, &guard), v6.slab.len()),
        };
        let next = match from.part {
            part if end < len => Some(Cursor { part, slot: end }),
            1 => Some(Cursor { part: 2, slot: 0 }),
            _ => None,
        };
        (saved, next)
    }

    fn save_slots<'s, const N: usize>(
        &'s self,
        slots: Range<u32>,
        now: Time,
        guard: &Arc<ReadGuard<'s>>,
    ) -> Vec<Saved>
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let saved = |slot| {
            let window = family.windows.with(slot, |window| window.words());
            let strict = family.entry(slot).header().has(STRICT);
            Saved { window: window.filter(|_| strict), ..self.saved::<N>(slot, now) }
        };
        self.slots_from::<N>(slots, now, guard).map(saved).collect()
    }

    /// The state in `slot`, without its TCP windows.
    #[inline]
    pub(super) fn saved<const N: usize>(&self, slot: u32, now: Time) -> Saved
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let entry = family.entry(slot);
        Saved {
            id: slot << 1 | u32::from(Key::<N>::V6),
            listed: family.listed(slot, now),
            seen: entry.seen(),
            lifetime: entry.lifetime(),
            every_packet: entry.every_packet(),
            replied: entry.header().has(ASSURED),
            window: None,
        }
    }

    /// Inserts a saved state, as one of `rule` and `name`. A live state of the same flow and name stays as it is.
    pub(crate) fn restore(
        &mut self,
        saved: &Saved,
        rule: RuleId,
        name: Name,
        limit: Option<Limit>,
        now: Time,
    ) -> Result<Installed, Refused> {
        self.begin(now);
        let flow = &*self.key_flow(&saved.listed.flow);
        if with_key!(flow, |key, _side| self.has_live(&key, name, now)) {
            return Ok(Installed::Existing);
        }
        match self.insert_saved(saved, rule, name, limit, now)? {
            Some(_) => Ok(Installed::New),
            None => Ok(Installed::Existing),
        }
    }

    /// Inserts a saved state of a flow without a live one of that name. Returns its slot, or `None` if another worker has inserted one
    /// meanwhile.
    pub(super) fn insert_saved(
        &mut self,
        saved: &Saved,
        rule: RuleId,
        name: Name,
        limit: Option<Limit>,
        now: Time,
    ) -> Result<Option<u32>, Refused> {
        // The state was admitted once: its parent counts it, and the limit does not refuse it.
        let limit = limit.filter(|limit| !limit.per_second && matches!(saved.listed.kind, Kind::Limit));
        let limit = limit.map(|limit| Limit { max: u32::MAX, ..limit });
        let [lifetime, timeout] = match saved.every_packet {
            false => [saved.lifetime, None],
            true => [None, saved.lifetime],
        };
        let origin = saved.listed.origin;
        let install = Install { limit, lifetime, timeout, origin, ..Install::default() };
        let flow = &*self.key_flow(&saved.listed.flow);
        let inserted = self.insert(flow, name, &Segment::default(), rule, &install, now);
        match inserted {
            Ok(Some(slot)) => {
                self.inserted();
                match flow.ends {
                    Ends::V4(..) => self.fill::<2>(slot, saved, now),
                    Ends::V6(..) => self.fill::<6>(slot, saved, now),
                }
            }
            Err(Refused::Full) => self.count(Counter::Full),
            _ => {}
        }
        inserted
    }

    fn has_live<const N: usize>(&self, key: &Key<N>, name: Name, now: Time) -> bool
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let slot = family.find_any(&Key::<N>::local(self).index, key, name);
        slot.is_some_and(|slot| self.live(now).accepts(family.entry(slot)))
    }

    /// Gives the inserted state the contents of the saved one.
    fn fill<const N: usize>(&self, slot: u32, saved: &Saved, now: Time)
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let entry = family.entry(slot);
        if let Some(words) = saved.window {
            family.windows.insert(slot, Window::from_words(words));
            entry.set_flag(STRICT);
        }
        let Listed { packets, bytes, remaining, tcp_ack, .. } = saved.listed;
        // The insertion has counted a packet.
        let [first, _] = entry.take_counts(Direction::Forward);
        if first > 0 {
            self.add_counts(entry, slot, [[packets[0], bytes[0]], [packets[1], bytes[1]]]);
        }
        let expires = (now + remaining).min(after(now, u32::MAX));
        entry.restore(expires, saved.seen, tcp_ack);
        family.schedule_sooner(slot, expires);
        if saved.replied && entry.set_flag(ASSURED) {
            self.count(Counter::Assured);
        }
        if packets[1] > 0 {
            entry.set_flag(SEEN_REPLY);
        }
        self.record::<N>(EventKind::Restored, slot);
    }
}
