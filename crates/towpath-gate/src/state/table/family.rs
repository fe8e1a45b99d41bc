//! The states of one address family: slots, the index that finds them, and the list of the states of one flow.
//!
//! What: the index has one entry for a flow. It leads to the state that was made last, and that to the one before it,
//! under another name. Most flows have one state.
//!
//! Invariant: whoever links or unlinks a state holds the locks of its flow ([`crate::state::table::index`]). So threads that make the
//! same state at once make one, and those that unlink it unlink it once. A reader follows the list meanwhile: a new state
//! is whole and linked to the rest before it becomes the first; one that is unlinked still leads to the rest.
//!
//! Growth: when three quarters of the entries are used, an index of twice the lines is made, and the flows move, some
//! with every call that may ([`Family::move_some`]) and those of a flow that is written first. When the stash is used
//! although there is room, the secret may be known to somebody: the flows move to an index of the same size with another
//! one.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::state::concurrent::sync::{Apart, AtomicU64, Ordering};
use crate::state::table::entry::{Entry, LiveFilter};
use crate::state::table::hash::Secret;
use crate::state::table::index::{Index, Locked, Moved, Probe};
use crate::state::table::key::Key;
use crate::state::table::memory::Pages;
use crate::state::table::slab::Slab;
use crate::state::table::slot_counters::SlotCounters;
use crate::state::{Lookup, Name};
use towpath_wire::Time;

/// Lines of the first index, as a power of two.
#[cfg(not(loom))]
const FIRST_BITS: u32 = 6;
#[cfg(loom)]
const FIRST_BITS: u32 = 1;

/// Lines that move to the next index with a call in a packet's time, an install's or that behind a burst.
///
/// Growth is over in time with one line for each install alone: it begins when 7.5 entries of each of the `n` lines are
/// used, and it is time for the next when as many of the `2n` are. So there are 7.5n installs for n lines.
pub(crate) const MOVE: u64 = 1;

/// The same with a call outside the packets' time.
pub(crate) const MOVE_MANY: u64 = 128;

/// Nanoseconds of a tick, as a power of two: how exactly it is known beforehand which states may have ended.
const TICK_BITS: u32 = 28;

/// The states of one family.
#[derive(Debug)]
pub(crate) struct Family<const N: usize> {
    pub(crate) slab: Slab<N>,
    pub(crate) slot_counters: SlotCounters,
    /// The index to begin with.
    current: Mutex<Arc<Index>>,
    /// The next index, made and touched ahead of its use.
    spare: Mutex<Option<Arc<Index>>>,
    /// The index that flows moved away from last, for a thread without packets to give back: that takes the system a while.
    old: Mutex<Option<Arc<Index>>>,
    seed: AtomicU64,
    longest: AtomicU64,
    /// Where whoever collects, and whoever evicts, goes on.
    hand: Apart<AtomicU64>,
    evicting: Apart<AtomicU64>,
    pages: Pages,
    /// States that are linked.
    live: Apart<AtomicU64>,
}

/// What became of a state that was to be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InsertResult {
    /// It is there; a state that had ended, or was gone, made room for it.
    Made {
        /// The slot of the latter.
        instead_of: Option<u32>,
    },
    /// A live state of the same flow and name is in this slot.
    Exists(u32),
    /// The index has no room.
    Full,
}

impl<const N: usize> Family<N> {
    pub(crate) fn new(seed: u64, pages: Pages) -> Self {
        Self {
            slab: Slab::new(pages),
            slot_counters: SlotCounters::new(),
            current: Mutex::new(Arc::new(Index::new(FIRST_BITS, Secret::new(seed), pages))),
            spare: Mutex::new(None),
            old: Mutex::new(None),
            seed: AtomicU64::new(seed),
            longest: AtomicU64::new(0),
            hand: Apart(AtomicU64::new(0)),
            evicting: Apart(AtomicU64::new(0)),
            pages,
            live: Apart(AtomicU64::new(0)),
        }
    }

    /// The index to begin with, for a worker to keep until there is another one.
    pub(crate) fn index(&self) -> Arc<Index> {
        Arc::clone(&locked(&self.current))
    }

    #[inline]
    pub(crate) fn entry(&self, slot: u32) -> Entry<'_, N> {
        Entry(self.slab.words(slot))
    }

    /// The state in a slot that may be none.
    #[inline(always)]
    pub(crate) fn try_entry(&self, slot: u32) -> Option<Entry<'_, N>> {
        self.slab.words_at(slot).map(Entry)
    }

    /// States that are linked, those included that have ended and were not collected.
    #[inline]
    pub(crate) fn len(&self) -> u64 {
        // Relaxed, here and where it changes: the count of slots is what bounds the states.
        self.live.load(Ordering::Relaxed)
    }

    /// The most states of one flow that have stood beside each other.
    pub(crate) fn longest(&self) -> usize {
        self.longest.load(Ordering::Relaxed) as usize
    }

    /// The slot of a live state of the flow.
    #[inline(never)]
    pub(crate) fn find(
        &self,
        index: &Index,
        probe: Probe,
        key: &Key<N>,
        lookup: Lookup,
        living: LiveFilter<'_>,
    ) -> Option<u32> {
        match index.find(probe, |slot| self.entry(slot).is(key)) {
            Some(first) => self.choose(first, lookup, living),
            None => self.find_moved(index.next()?, key, lookup, living),
        }
    }

    /// Whether this is the flow's state that is wanted, as the first one that the index has nearly always is.
    #[inline(always)]
    pub(crate) fn is_it(entry: Entry<'_, N>, key: &Key<N>, lookup: Lookup, living: LiveFilter<'_>) -> bool {
        entry.is(key)
            && living.has(entry)
            && match lookup {
                Lookup::Any => true,
                Lookup::Named(name) => entry.header().is_named(name),
            }
    }

    /// The same in the next index, if the flows are moving.
    #[cold]
    fn find_moved(
        &self,
        mut index: &Index,
        key: &Key<N>,
        lookup: Lookup,
        living: LiveFilter<'_>,
    ) -> Option<u32> {
        loop {
            match index.find(index.probe(key), |slot| self.entry(slot).is(key)) {
                Some(first) => return self.choose(first, lookup, living),
                None => index = index.next()?,
            }
        }
    }

    /// The slot of the flow's state under `name`, over or not.
    pub(crate) fn find_any(&self, index: &Index, key: &Key<N>, name: Name) -> Option<u32> {
        let mut index = index;
        loop {
            match index.find(index.probe(key), |slot| self.entry(slot).is(key)) {
                Some(first) => return self.search(first, |slot| self.entry(slot).header().is_named(name)).0,
                None => index = index.next()?,
            }
        }
    }

    /// Of the states of one flow the one that is wanted, if it is live.
    #[inline(always)]
    pub(crate) fn choose(&self, first: u32, lookup: Lookup, living: LiveFilter<'_>) -> Option<u32> {
        let mut slot = first;
        loop {
            let entry = self.entry(slot);
            match lookup {
                Lookup::Named(name) if entry.header().is_named(name) => {
                    return living.has(entry).then_some(slot);
                }
                Lookup::Any if living.has(entry) => return Some(slot),
                _ => slot = self.slab.sibling(slot)?,
            }
        }
    }

    /// Links the state in `slot`, which is written and known to the caller alone.
    pub(crate) fn publish(
        &self,
        index: &Index,
        key: &Key<N>,
        name: Name,
        slot: u32,
        living: LiveFilter<'_>,
    ) -> InsertResult {
        let now = living.now;
        let published = self.with_flow(index, key, |mut flow| {
            let Some((place, first)) = flow.find(|slot| self.entry(slot).is(key)) else {
                self.slab.set_sibling(slot, None);
                // Whoever collects may see it before it is linked, and finds nothing to unlink then.
                self.slab.occupy(slot, tick(self.entry(slot).end(now)));
                if !flow.add(slot) {
                    self.slab.set_link(slot, 0);
                    return InsertResult::Full;
                }
                self.longest.fetch_max(1, Ordering::Relaxed);
                return InsertResult::Made { instead_of: None };
            };
            let is_it = |slot| self.entry(slot).header().is_named(name);
            let (same, before, states) = self.search(first, is_it);
            if let Some(same) = same
                && living.has(self.entry(same))
            {
                return InsertResult::Exists(same);
            }
            let rest = if same == Some(first) { self.slab.sibling(first) } else { Some(first) };
            self.slab.set_sibling(slot, rest);
            self.slab.occupy(slot, tick(self.entry(slot).end(now)));
            flow.replace(place, slot);
            if let (Some(same), Some(before)) = (same, before) {
                self.slab.set_sibling(before, self.slab.sibling(same));
            }
            if let Some(same) = same {
                self.slab.set_link(same, 0);
            }
            let states = states + u64::from(same.is_none());
            // Relaxed: a number for people.
            self.longest.fetch_max(states, Ordering::Relaxed);
            InsertResult::Made { instead_of: same }
        });
        if published == (InsertResult::Made { instead_of: None }) {
            self.live.fetch_add(1, Ordering::Relaxed);
        }
        published
    }

    /// Unlinks the state in `slot` if `still` says so of it. False when it does not, or somebody else did.
    pub(crate) fn unlink(&self, index: &Index, slot: u32, still: impl Fn(Entry<'_, N>) -> bool) -> bool {
        let key = self.entry(slot).key();
        let unlinked = self.with_flow(index, &key, |flow| {
            // Somebody else did. Or its entry found no room when the lines moved: whoever links a state holds these locks
            // until it is found, so one that is not gives at least its slot back.
            if self.slab.tick(slot).is_none() || !still(self.entry(slot)) {
                return false;
            }
            if let Some((place, first)) = flow.find(|slot| self.entry(slot).is(&key))
                && let (Some(_), before, _) = self.search(first, |at| at == slot)
            {
                match (before, self.slab.sibling(slot)) {
                    (Some(before), next) => self.slab.set_sibling(before, next),
                    (None, Some(next)) => flow.replace(place, next),
                    (None, None) => flow.remove(place),
                }
            }
            self.slab.set_link(slot, 0);
            true
        });
        if unlinked {
            self.live.fetch_sub(1, Ordering::Relaxed);
        }
        unlinked
    }

    /// The first slot of a flow's list that `is` it, the one before it, and how many there are.
    fn search(&self, first: u32, is: impl Fn(u32) -> bool) -> (Option<u32>, Option<u32>, u64) {
        let (mut found, mut before, mut states) = (None, None, 0);
        let mut at = Some(first);
        while let Some(slot) = at {
            states += 1;
            if found.is_none() {
                if is(slot) {
                    found = Some(slot);
                } else {
                    before = Some(slot);
                }
            }
            at = self.slab.sibling(slot);
        }
        (found, if found.is_some() { before } else { None }, states)
    }

    /// Does something with the flow's lines locked, in the index where they are.
    fn with_flow<T>(&self, index: &Index, key: &Key<N>, work: impl FnOnce(Locked<'_>) -> T) -> T {
        let mut index = index;
        loop {
            let probe = index.probe(key);
            if index.next().is_none()
                && let Some(flow) = index.lock(probe)
            {
                return work(flow);
            }
            index.move_flow(probe, |slot| self.entry(slot).key());
            if let Some(next) = index.next() {
                index = next;
            }
        }
    }

    /// Lets flows of so many lines move on, if they are moving. True when `index` is done with: [`Family::index`] is another
    /// one.
    #[inline]
    pub(crate) fn move_some(&self, index: &Arc<Index>, lines: u64) -> bool {
        index.next().is_some_and(|next| self.move_to(next, index, lines))
    }

    /// The same behind a burst: a packet is not to wait for memory that somebody is just making. (Each install moves its line all the same,
    /// so growth is over in time without him.)
    #[inline]
    pub(crate) fn move_behind(&self, index: &Arc<Index>) -> bool {
        index.next().is_some_and(|next| !next.waits_for_memory() && self.move_to(next, index, MOVE))
    }

    #[cold]
    fn move_to(&self, next: &Arc<Index>, index: &Arc<Index>, lines: u64) -> bool {
        if index.move_some(lines, |slot| self.entry(slot).key()) == Moved::Some {
            // The next call is soon, and waits for nothing then but for the lines that the entries go to.
            index.fetch_lines(lines.min(MOVE), |slot| {
                if let Some(entry) = self.try_entry(slot) {
                    entry.prefetch_key();
                }
            });
            return false;
        }
        let mut current = locked(&self.current);
        let old = Arc::ptr_eq(&current, index).then(|| std::mem::replace(&mut *current, Arc::clone(next)));
        drop(current);
        if old.is_some() {
            let before = std::mem::replace(&mut *locked(&self.old), old);
            drop(before);
        }
        true
    }

    /// Begins to grow, or to change the secret, when it is time to.
    #[cold]
    pub(crate) fn grow(&self) {
        let states = self.len();
        let current = locked(&self.current);
        if current.next().is_some() {
            return;
        }
        let (room, stashed) = (current.room(), current.stashed());
        let bits = match stashed {
            _ if states * 4 > room * 3 => current.bits() + 1,
            true => current.bits() + u32::from(states * 2 > room),
            false => return,
        };
        let mut spare = locked(&self.spare);
        let is_it = |spare: &mut Arc<Index>| spare.bits() == bits;
        // Somebody is about to have it ready: a little more fits.
        let soon = spare.as_mut().is_some_and(|spare| is_it(spare) && !spare.is_prepared());
        if soon && !stashed && states * 8 <= room * 7 {
            return;
        }
        current.begin(spare.take_if(is_it).unwrap_or_else(|| Arc::new(self.make_index(bits))));
    }

    /// Gives memory back that nobody reads any more.
    pub(crate) fn release(&self) {
        let old = locked(&self.old).take_if(|old| Arc::strong_count(old) == 1);
        // Nobody waits for the lock meanwhile.
        drop(old);
    }

    /// Makes and touches memory that is going to be needed when there are more states, some of it. Whether there is more
    /// to do.
    pub(crate) fn prepare(&self) -> bool {
        /// Lines, and slots, that are touched with one call: 256 KiB of each.
        const TOUCH: u32 = 4096;
        let states = self.len();
        let more = self.slab.prepare((states / 4).clamp(TOUCH.into(), 1 << 20) as u32, TOUCH);
        let current = self.index();
        // Flows that move already go to lines that may not be there.
        if let Some(next) = current.next() {
            return next.prepare(TOUCH.into()) | more;
        }
        if states * 2 <= current.room() {
            return more;
        }
        // Nobody waits for the lock while memory is touched.
        let spare = {
            let (mut spare, bits) = (locked(&self.spare), current.bits() + 1);
            spare.take_if(|spare| spare.bits() < bits);
            Arc::clone(spare.get_or_insert_with(|| Arc::new(self.make_index(bits))))
        };
        spare.prepare(TOUCH.into()) | more
    }

    /// The next `count` slots for whoever collects, no more than there are, and then those of the round's beginning. Behind the last
    /// one it begins anew: were the hand a count, taken modulo how many there are, it could keep pace with a table that grows and
    /// never come to the first ones.
    #[inline]
    pub(crate) fn next_slots(&self, count: u32) -> [Range<u32>; 2] {
        let len = self.slab.len();
        if len == 0 {
            return [0..0, 0..0];
        }
        let (all, count) = (u64::from(len), u64::from(count.min(len)));
        let from = |hand| if hand < all { hand } else { 0 };
        // Relaxed: who looks at which slots first does not matter.
        let on = |hand| Some(from(hand) + count);
        let hand = match self.hand.fetch_update(Ordering::Relaxed, Ordering::Relaxed, on) {
            Ok(hand) | Err(hand) => from(hand) as u32,
        };
        let count = count as u32;
        let here = count.min(len - hand);
        // The next call is soon.
        self.slab.fetch_beside(hand + here, count);
        [hand..hand + here, 0..count - here]
    }

    /// The next `count` slots for whoever evicts, no more than there are.
    pub(crate) fn next_candidates(&self, count: u32) -> impl Iterator<Item = u32> + use<N> {
        // Relaxed: as above.
        self.slots(self.evicting.load(Ordering::Relaxed), count)
    }

    /// Whoever evicts next begins after `slot`.
    pub(crate) fn candidates_after(&self, slot: u32) {
        self.evicting.store(u64::from(slot) + 1, Ordering::Relaxed);
    }

    /// The slots from one on, round all of them once at most.
    fn slots(&self, from: u64, count: u32) -> impl Iterator<Item = u32> + use<N> {
        let len = self.slab.len();
        let from = if len == 0 { 0 } else { (from % u64::from(len)) as u32 };
        (0..count.min(len)).map(move |n| if n < len - from { from + n } else { n - (len - from) })
    }

    /// Whether the state in `slot` may have ended, without a look at it.
    #[inline]
    pub(crate) fn may_be_over(&self, slot: u32, now: Time) -> bool {
        self.slab.tick(slot).is_some_and(|at| !crate::state::table::slab::tick_before(tick(now), at))
    }

    /// The first of these slots, 64 at most, that hold states which may have ended, or that hold any (`all`): a bit each, from
    /// the lowest; and how many slots these are.
    #[inline]
    pub(crate) fn looked_at(&self, slots: &Range<u32>, now: Time, all: bool) -> (u64, u32) {
        let tick = if all { None } else { Some(tick(now)) };
        self.slab.looked_at(slots.start, slots.end - slots.start, tick)
    }

    /// Has the state in `slot` looked at again when it ends.
    pub(crate) fn look_later(&self, slot: u32, now: Time) {
        if let Some(before) = self.slab.tick(slot) {
            self.slab.reschedule(slot, before, tick(self.entry(slot).end(now)));
        }
    }

    /// Has the state in `slot` looked at no later than `end`.
    #[cold]
    pub(crate) fn look_sooner(&self, slot: u32, end: Time) {
        self.slab.hasten(slot, tick(end));
    }

    fn make_index(&self, bits: u32) -> Index {
        // Relaxed: each index has a number of its own, and with it a secret.
        let seed = self.seed.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        Index::new(bits, Secret::new(seed ^ 0x6a09_e667_f3bc_c908), self.pages)
    }
}

/// The lock's contents, whoever panicked with it: what is kept under these locks is whole at every step.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The tick of a time, modulo 2^31.
#[inline]
pub(crate) fn tick(time: Time) -> u32 {
    (time.as_nanos() >> TICK_BITS) as u32 & (u32::MAX >> 1)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::state::limits::rule_counts::RemovedRules;
    use crate::state::table::entry::{BurstTime, NewEntry, PacketInfo};
    use crate::state::table::key::Side;
    use crate::state::{RuleId, Segment, Settings};

    const NOW: Time = Time::from_secs(100);

    /// Makes the state of flow `n`.
    fn publish(family: &Family<2>, n: u64) -> InsertResult {
        let (key, slot) = (Key([n, 7]), family.slab.take().unwrap());
        let template = NewEntry {
            key,
            side: Side::Low,
            rule: RuleId(1),
            name: Name::DEFAULT,
            era: 0,
            marks: 0,
            parent: u32::MAX,
            lifetime: None,
            established: false,
        };
        let (segment, settings) = (Segment::default(), Settings::default());
        let packet =
            PacketInfo { proto: 17, bytes: 1, segment: &segment, at: BurstTime::new(NOW, &settings) };
        family.entry(slot).write(&template, packet, &settings);
        family.publish(
            &family.index(),
            &key,
            Name::DEFAULT,
            slot,
            LiveFilter::new(NOW, &RemovedRules::default()),
        )
    }

    /// No line has room for it when the flows move, however unlikely that is.
    #[test]
    fn a_state_without_an_entry_gives_its_slot_back() {
        let family = Family::<2>::new(1, Pages::Base);
        let index = family.index();
        (0..3).for_each(|n| assert_eq!(publish(&family, n), InsertResult::Made { instead_of: None }));
        let slot = family.find_any(&index, &Key([1, 7]), Name::DEFAULT).unwrap();
        family.with_flow(&index, &Key([1, 7]), |flow| {
            let (place, _) = flow.find(|at| at == slot).unwrap();
            flow.remove(place);
        });
        assert_eq!(family.find_any(&index, &Key([1, 7]), Name::DEFAULT), None);
        // Beside another state of the same flow, and by itself.
        assert_eq!(publish(&family, 1), InsertResult::Made { instead_of: None });
        assert!(!family.unlink(&index, slot, |_| false));
        assert!(family.unlink(&index, slot, |_| true));
        assert!(!family.unlink(&index, slot, |_| true));
        assert!((0..3).all(|n| family.find_any(&index, &Key([n, 7]), Name::DEFAULT).is_some()));
        assert_eq!(family.len(), 3);
    }

    /// Who knows the secret can fill a flow's lines. Then there is another secret, and what was known is worth nothing.
    #[test]
    fn flows_that_crowd_their_lines_get_another_secret() {
        let family = Family::<2>::new(1, Pages::Base);
        let index = family.index();
        let probe = |n: u64| index.probe(&Key([n, 7]));
        let lines = index.places(probe(0));
        let crowd: Vec<u64> = (0..).filter(|&n| index.places(probe(n)) == lines).take(25).collect();
        for &n in &crowd {
            assert_eq!(publish(&family, n), InsertResult::Made { instead_of: None });
        }
        assert!(index.stashed());
        family.grow();
        let next = index.next().expect("it grows");
        assert!(next.prepare(1) && next.waits_for_memory());
        assert!(!family.move_behind(&index) && index.moved() == 0, "somebody is at it");
        // Who began has stopped.
        while index.moved() == 0 {
            assert!(!family.move_behind(&index));
        }
        while next.prepare(1) {}
        assert!(!family.move_behind(&index) && index.moved() == 2 * MOVE);
        while !family.move_some(&index, MOVE) {}
        let next = family.index();
        assert_eq!((next.bits(), next.stashed()), (index.bits(), false));
        for &n in &crowd {
            let (key, gone) = (Key([n, 7]), RemovedRules::default());
            let found = family.find(&next, next.probe(&key), &key, Lookup::Any, LiveFilter::new(NOW, &gone));
            assert!(found.is_some(), "{n}");
        }
        let other: std::collections::HashSet<_> =
            crowd.iter().map(|&n| next.places(next.probe(&Key([n, 7])))).collect();
        assert!(other.len() > 20, "{}", other.len());
    }
}
