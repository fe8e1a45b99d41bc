//! Making states: everything that bounds them is reserved, then the state is written and linked.

use super::sweep::RECLAIM;
use super::{AddressFamily, LookupResult, States, TCP};
use crate::state::concurrent::sync::Ordering;
use crate::state::concurrent::worker_counters::Counter;
use crate::state::limits::parents::Parents;
use crate::state::limits::slot_list::NONE;
use crate::state::limits::sources::Sources;
use crate::state::table::entry::{BurstTime, CAPPED, LIMITED, NewEntry, PacketInfo, REPLIED, STRICT, after};
use crate::state::table::family::{InsertResult, locked};
use crate::state::table::key::{Key, Key4, Key6, Side};
use crate::state::tcp::window::Window;
use crate::state::tcp::{RST, SYN};
use crate::state::{
    Direction, Ends, EventKind, Flow, Install, Installed, Limit, Name, Refused, RuleId, Segment, Tracking,
};
use std::sync::Arc;
use towpath_wire::Time;

/// How many states an install may evict, and at how many of each family it looks to choose one.
const EVICT: usize = 64;
const CANDIDATES: usize = 48;

/// The most slots that wait for other workers while states are evicted: enough for what is installed until these are seen.
/// That is a share of `dyn_max`, and no more than some bursts.
const RESERVE_SHARE: u64 = 16;
const RESERVE_MOST: u64 = 512;

/// What is reserved for a state that is to be made, besides its slot.
struct Reserved {
    parent: u32,
    capped: bool,
}

/// A state that may be evicted; the least goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    replied: bool,
    end: Time,
    v6: bool,
    slot: u32,
}

impl States {
    pub(super) fn make(
        &mut self,
        flow: &Flow,
        name: Name,
        segment: &Segment,
        rule: RuleId,
        install: &Install,
        now: Time,
    ) -> Result<Installed, Refused> {
        if install.tracking == Tracking::Strict && flow.proto == TCP && !Window::begins(segment) {
            return Err(Refused::Invalid);
        }
        if self.is_full() {
            self.reclaim(now);
        }
        let parent = match install.limit {
            Some(limit) => self.parent(flow, name, rule, limit, now)?,
            None => NONE,
        };
        let mut reserved = Reserved { parent, capped: false };
        match self.cap(flow, now) {
            Ok(capped) => reserved.capped = capped,
            Err(refused) => {
                self.give_back(&reserved, flow, now);
                return Err(refused);
            }
        }
        if let Err(refused) = self.make_room(now) {
            self.give_back(&reserved, flow, now);
            return Err(refused);
        }
        let packet = PacketInfo {
            proto: flow.proto,
            bytes: segment.bytes,
            segment,
            at: BurstTime::new(now, &self.settings),
        };
        let made = match flow.ends {
            Ends::V4(src, dst) => {
                let (key, side) = Key4::new(src, dst, flow);
                self.publish(key, side, name, rule, install, &reserved, packet)
            }
            Ends::V6(src, dst, zone) => {
                let (key, side) = Key6::new(src, dst, zone, flow);
                self.publish(key, side, name, rule, install, &reserved, packet)
            }
        };
        if made != Ok(Installed::New) {
            self.shared.held.fetch_sub(1, Ordering::Relaxed);
            self.give_back(&reserved, flow, now);
        }
        made
    }

    #[expect(clippy::too_many_arguments, reason = "all that a state is made of, once")]
    fn publish<const N: usize>(
        &mut self,
        key: Key<N>,
        side: Side,
        name: Name,
        rule: RuleId,
        install: &Install,
        reserved: &Reserved,
        packet: PacketInfo<'_>,
    ) -> Result<Installed, Refused>
    where
        Key<N>: AddressFamily<N>,
    {
        let shared = Arc::clone(&self.shared);
        let family = Key::<N>::family(&shared);
        let slot = family.slab.take().ok_or(Refused::Full)?;
        let tcp = packet.proto == TCP;
        let mark = |mark, on| if on { mark } else { 0 };
        let strict = tcp && install.tracking == Tracking::Strict;
        let marks =
            mark(CAPPED, reserved.capped) | mark(LIMITED, reserved.parent != NONE) | mark(STRICT, strict);
        let loose = tcp && install.tracking == Tracking::Loose;
        let established = loose && packet.segment.tcp_flags & (SYN | RST) == 0;
        let Install { lifetime, .. } = *install;
        let parent = reserved.parent;
        // Before it is linked: a count may not be taken away before it was there.
        let era = self.recent.add(&shared.rules, rule);
        let template = NewEntry { key, side, rule, name, era, marks, parent, lifetime, established };
        family.slot_counters.clear(slot, shared.epochs.places());
        if self.settings.dyn_adaptive && self.is_nearly_full() {
            family.entry(slot).write(&template, packet, &self.settings.of_nearly_full());
        } else {
            family.entry(slot).write(&template, packet, &self.settings);
        }
        if strict {
            let mut window = Window::default();
            window.segment(Direction::Forward, packet.segment);
            shared.windows.insert(Key::<N>::V6, slot, window);
        }
        let living = self.living(packet.at.now);
        let published = family.publish(&Key::<N>::local(self).index, &key, name, slot, living);
        if let InsertResult::Made { instead_of } = published {
            if let Some(old) = instead_of {
                self.ended::<N>(old, packet.at.now);
            }
            if family.slab.sibling(slot).is_some() {
                // It comes before a state that was the flow's first.
                self.turns += 1;
            }
            self.tell::<N>(EventKind::Created, slot);
            return Ok(Installed::New);
        }
        self.recent.subtract(&shared.rules, rule, era);
        family.slab.give(slot, slot);
        let InsertResult::Exists(other) = published else {
            family.grow();
            return Err(Refused::Full);
        };
        match self.hit(family.entry(other), other, side, packet) {
            LookupResult::Invalid => Err(Refused::Invalid),
            _ => Ok(Installed::Existing),
        }
    }

    /// The parent, which counts one more state.
    fn parent(
        &mut self,
        flow: &Flow,
        name: Name,
        rule: RuleId,
        limit: Limit,
        now: Time,
    ) -> Result<u32, Refused> {
        let first = match self.take_parent(flow, name, rule, limit, now, false) {
            Ok(parent) => return Ok(parent),
            // Time alone helps.
            Err(Refused::OverRate) => return Err(Refused::OverRate),
            Err(refused) => refused,
        };
        // What is counted, or counts, may be there only because it was not collected yet.
        self.reclaim_counts(now);
        self.with_parents(|parents, secret| parents.collect_all(secret, now, &mut (RECLAIM as usize)));
        match self.take_parent(flow, name, rule, limit, now, true) {
            // With a lifetime of 0 the parent that was over its limit is collected by now, and there is room for none.
            Err(Refused::ParentsFull) => Err(first),
            taken => taken,
        }
    }

    fn take_parent(
        &self,
        flow: &Flow,
        name: Name,
        rule: RuleId,
        limit: Limit,
        now: Time,
        reclaimed: bool,
    ) -> Result<u32, Refused> {
        // What counts by the second must be remembered for one.
        let least = if limit.per_second { 1 } else { 0 };
        let expire = after(now, self.settings.dyn_short_lifetime.max(least));
        let most = self.settings.dyn_parent_max as usize;
        self.with_parents(|parents, secret| {
            // A shared count is known by its own name, whatever its states are called.
            let wanted =
                Parents::wanted(secret, flow, limit.mask, limit.shared.unwrap_or(name), limit.owner(rule));
            let full = parents.len() >= most;
            let slot = match parents.find(&wanted, now) {
                Some((_, true)) if full && !reclaimed => return Err(Refused::ParentsFull),
                Some((slot, _)) => {
                    parents.touch(slot, expire, now);
                    slot
                }
                None if full => return Err(Refused::ParentsFull),
                None => parents.insert(secret, wanted, expire, now),
            };
            if limit.per_second {
                return if parents.take(slot, limit.max, now) { Ok(NONE) } else { Err(Refused::OverRate) };
            }
            if parents.count(slot) >= limit.max {
                return Err(Refused::OverLimit);
            }
            parents.add(slot);
            Ok(slot)
        })
    }

    /// Whether the state is counted for its source, which has one more then; an error when the source has too many.
    fn cap(&mut self, flow: &Flow, now: Time) -> Result<bool, Refused> {
        let max = self.settings.dyn_source_max;
        if max == 0 {
            return Ok(false);
        }
        let secret = &self.shared.secret;
        let take = |sources: &mut Sources| {
            let room = sources.count(secret, flow) < max;
            if room {
                sources.add(secret, flow);
            }
            room
        };
        if take(&mut locked(&self.shared.sources)) {
            return Ok(true);
        }
        self.reclaim_counts(now);
        let secret = &self.shared.secret;
        let mut sources = locked(&self.shared.sources);
        if sources.count(secret, flow) >= max {
            return Err(Refused::OverSource);
        }
        sources.add(secret, flow);
        Ok(true)
    }

    fn give_back(&self, reserved: &Reserved, flow: &Flow, now: Time) {
        if reserved.parent != NONE {
            self.with_parents(|parents, _| parents.subtract(reserved.parent, now));
        }
        if reserved.capped {
            locked(&self.shared.sources).subtract(&self.shared.secret, flow);
        }
    }

    /// Takes one of the `dyn_max` slots, and evicts states while there is none, if that is the policy.
    fn make_room(&mut self, now: Time) -> Result<(), Refused> {
        for _ in 0..EVICT {
            if self.take_room() {
                self.evict_ahead(now);
                return Ok(());
            }
            if !self.settings.dyn_evict || self.is_overfull() || !self.evict(now) {
                break;
            }
            if self.free() == 0 {
                // The room is there when the others have been seen.
                break;
            }
        }
        if self.take_room() { Ok(()) } else { Err(Refused::Full) }
    }

    /// Where room comes late, as others have to be seen first, evicts for the next installs what this one used up.
    fn evict_ahead(&mut self, now: Time) {
        if self.settings.dyn_evict && self.unlinked() > 0 {
            let held = self.shared.held.load(Ordering::Relaxed);
            if held + self.reserve() > u64::from(self.settings.dyn_max) {
                self.evict(now);
            }
        }
    }

    fn reserve(&self) -> u64 {
        (u64::from(self.settings.dyn_max) / RESERVE_SHARE).clamp(1, RESERVE_MOST)
    }

    /// Slots that are taken and in which there is no state: nearly all of them wait for other workers.
    pub(super) fn waiting(&self) -> u64 {
        self.shared.held.load(Ordering::Relaxed).saturating_sub(self.len() as u64)
    }

    fn take_room(&self) -> bool {
        let max = u64::from(self.settings.dyn_max);
        // Relaxed: a count that bounds; the slots themselves are given over elsewhere.
        let take = |held| (held < max).then_some(held + 1);
        self.shared.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }

    /// Evicts one state: one that was never replied to, or, when there is none, of those that it looks at the one that
    /// would end first. Whether there was one.
    ///
    /// None is evicted when there are such that were never replied to, but not where it looks; and none that was replied
    /// to while slots wait to become free: a flood costs no connection. Nor is any when enough of them wait: as long as one worker
    /// stands still no slot becomes free, and the table would be emptied for nothing.
    fn evict(&mut self, now: Time) -> bool {
        let waiting = self.waiting();
        if waiting >= self.reserve() {
            return false;
        }
        let candidates = [self.candidate::<2>(now), self.candidate::<6>(now)];
        let Some(first) = candidates.into_iter().flatten().min() else { return false };
        if first.replied && (waiting > 0 || self.unreplied() > 0) {
            return false;
        }
        let evicted = match first.v6 {
            false => self.remove_if::<2>(first.slot, now, EventKind::Evicted, |_| true),
            true => self.remove_if::<6>(first.slot, now, EventKind::Evicted, |_| true),
        };
        self.count_many(Counter::Evicted, evicted.into());
        evicted
    }

    /// The first state of a family that was never replied to, from where somebody looked last, or else the one of a few
    /// that would end first.
    fn candidate<const N: usize>(&self, now: Time) -> Option<Candidate>
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let mut replied: Option<Candidate> = None;
        let (mut looks, mut last) = (0, None);
        for slot in family.next_candidates(RECLAIM) {
            last = Some(slot);
            if family.slab.tick(slot).is_none() {
                continue;
            }
            let entry = family.entry(slot);
            let end = entry.end(now);
            let candidate = Candidate { replied: entry.header().has(REPLIED), end, v6: Key::<N>::V6, slot };
            if !candidate.replied {
                family.candidates_after(slot);
                return Some(candidate);
            }
            looks += 1;
            if looks <= CANDIDATES {
                replied = Some(replied.map_or(candidate, |before| before.min(candidate)));
            }
        }
        // Or the next one looked at the same, and there was never any.
        if let Some(last) = last {
            family.candidates_after(last);
        }
        replied
    }

    /// Whether there are more than `dyn_max`, as it was lowered: one that goes makes no room, so none has to.
    fn is_overfull(&self) -> bool {
        self.shared.held.load(Ordering::Relaxed) > u64::from(self.settings.dyn_max)
    }

    fn is_full(&self) -> bool {
        self.shared.held.load(Ordering::Relaxed) >= u64::from(self.settings.dyn_max)
    }
}
