//! States taken out whole, and put in again: by another process, or after a restart.

use std::sync::Arc;

use super::readers::ReadGuard;
use super::{AddressFamily, States};
use crate::state::concurrent::worker_counters::Counter;
use crate::state::table::entry::{ANSWERED, REPLIED, SPILLED, STRICT, after};
use crate::state::table::family::locked;
use crate::state::table::key::{Key, Key4, Key6};
use crate::state::tcp::window::{WORDS, Window};
use crate::state::{
    Direction, Ends, EventKind, Install, Installed, Kind, Limit, Listed, Name, Refused, RuleId, Segment,
};
use towpath_wire::Time;

/// Everything that a state is, but for what it is counted by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Saved {
    pub(crate) listed: Listed,
    /// What was seen of the connection, of any protocol.
    pub(crate) seen: u64,
    pub(crate) lifetime: Option<u32>,
    pub(crate) replied: bool,
    /// The sequence windows, with strict tracking.
    pub(crate) window: Option<[u64; WORDS]>,
}

impl States {
    /// All live states, without parents.
    pub(crate) fn save(&self, now: Time) -> impl Iterator<Item = Saved> {
        let visit = Arc::new(self.visit());
        self.save_family::<2>(now, &visit).chain(self.save_family::<6>(now, &visit))
    }

    fn save_family<'s, const N: usize>(
        &'s self,
        now: Time,
        visit: &Arc<ReadGuard<'s>>,
    ) -> impl Iterator<Item = Saved> + use<'s, N>
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        self.list_from::<N>(0, now, visit).map(move |(slot, listed)| {
            let entry = family.entry(slot);
            let header = entry.header();
            let window = self.shared.windows.with(Key::<N>::V6, slot, |window| window.words());
            Saved {
                listed,
                seen: entry.seen(),
                lifetime: entry.lifetime(),
                replied: header.has(REPLIED),
                window: window.filter(|_| header.has(STRICT)),
            }
        })
    }

    /// Puts a state in, as one of `rule` and `name`. One that is there already stays what it is.
    pub(crate) fn restore(
        &mut self,
        saved: &Saved,
        rule: RuleId,
        name: Name,
        limit: Option<Limit>,
        now: Time,
    ) -> Result<Installed, Refused> {
        self.begin(now);
        // It was allowed once: it counts, and no limit keeps it out.
        let limit = limit.filter(|limit| !limit.per_second && matches!(saved.listed.kind, Kind::Limit));
        let limit = limit.map(|limit| Limit { max: u32::MAX, ..limit });
        let install = Install { limit, lifetime: saved.lifetime, ..Install::default() };
        let flow = self.keyed(&saved.listed.flow).into_owned();
        let there = match flow.ends {
            Ends::V4(src, dst) => self.is_there(&Key4::new(src, dst, &flow).0, name, now),
            Ends::V6(src, dst, zone) => self.is_there(&Key6::new(src, dst, zone, &flow).0, name, now),
        };
        if there {
            return Ok(Installed::Existing);
        }
        let made = self.make(&flow, name, &Segment::default(), rule, &install, now);
        match made {
            Ok(Installed::New) => {
                self.count(Counter::Created);
                self.made();
            }
            Err(Refused::Full) => self.count(Counter::Full),
            _ => {}
        }
        if made == Ok(Installed::New) {
            match flow.ends {
                Ends::V4(src, dst) => self.fill(&Key4::new(src, dst, &flow).0, name, saved, now),
                Ends::V6(src, dst, zone) => self.fill(&Key6::new(src, dst, zone, &flow).0, name, saved, now),
            }
        }
        made
    }

    fn is_there<const N: usize>(&self, key: &Key<N>, name: Name, now: Time) -> bool
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let slot = family.find_any(&Key::<N>::local(self).index, key, name);
        slot.is_some_and(|slot| self.living(now).has(family.entry(slot)))
    }

    fn fill<const N: usize>(&mut self, key: &Key<N>, name: Name, saved: &Saved, now: Time)
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let Some(slot) = family.find_any(&Key::<N>::local(self).index, key, name) else { return };
        let entry = family.entry(slot);
        if let Some(words) = saved.window {
            self.shared.windows.insert(Key::<N>::V6, slot, Window::from_words(words));
            entry.mark(STRICT);
        }
        let Listed { packets, bytes, remaining, tcp_ack, .. } = saved.listed;
        // In the wide place: a state that was saved may have any count.
        let [first, _] = entry.take_count(Direction::Forward);
        let wide = [packets[0], bytes[0], packets[1], bytes[1]];
        if first > 0 && wide != [0; 4] {
            locked(&self.shared.spilled).insert((Key::<N>::V6, slot), wide);
            entry.mark(SPILLED);
        }
        let end = (now + remaining).min(after(now, u32::MAX));
        entry.restore(end, saved.seen, tcp_ack);
        family.look_sooner(slot, end);
        if saved.replied && entry.mark(REPLIED) {
            self.count(Counter::Replied);
        }
        if packets[1] > 0 {
            entry.mark(ANSWERED);
        }
        self.tell::<N>(EventKind::Restored, slot);
    }
}
