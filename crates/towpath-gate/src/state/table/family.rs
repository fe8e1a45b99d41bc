//! The states of one address family: their slots, the index that finds them, and the list of the states of one flow.
//!
//! What: the index has one entry per flow. It leads to the flow's newest state; each state leads to the flow's next older one,
//! which has another name. Most flows have one state.
//!
//! Invariant: a thread links or unlinks a state only while it holds the locks of the state's flow ([`super::index`]). Threads
//! that insert the same state at once insert one, and threads that unlink it at once unlink it once.
//!
//! Races: readers follow a flow's list without a lock.
//! - Insert: the new state is completely written, and leads to the rest of the list, before it becomes the first. A reader
//!   finds the list with it or without it.
//! - Unlink: an unlinked state still leads to the rest of the list, and its slot is not reused before the reader's next
//!   [quiescent state](crate::state::concurrent::epoch). A reader that is at it finds the rest.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use towpath_wire::Time;

use super::count::unpack_count;
use super::entry::{Entry, LIMITED, ORPHANED, WIDE_COUNTS};
use super::growing_index::{GrowingIndex, MIGRATE_LINES};
use super::index::{Index, LockedFlow, Probe, Table};
use super::key::{FlowKey, Key};
use super::live_filter::LiveFilter;
use super::memory::{Line, Pages};
use super::scan_cursor::{EvictCursor, SweepCursor};
use super::shrink::{Progress, Shrink};
use super::slab::Slab;
use super::slot_counters::SlotCounters;
use super::wide_counters::{Counts, WideCounters};
use crate::state::concurrent::sync::{AtomicU64, Ordering};
use crate::state::tcp::window_table::WindowTable;
use crate::state::{Direction, Kind, Listed, Lookup, Name};

/// Nanoseconds of a tick, as a power of two (0.27 s): the granularity of the hint when a state may have expired.
const TICK_BITS: u32 = 28;

/// The states of one address family.
#[derive(Debug)]
pub(crate) struct Family<const N: usize> {
    pub(crate) slab: Slab<N>,
    pub(crate) index: GrowingIndex,
    pub(crate) slot_counters: SlotCounters,
    pub(crate) wide_counters: WideCounters,
    pub(crate) shrink: Shrink,
    /// The windows of states with strict tracking.
    pub(crate) windows: WindowTable,
    pub(crate) sweep: SweepCursor,
    pub(crate) evict: EvictCursor,
    /// The longest list of one flow's states so far.
    longest: AtomicU64,
}

/// The result of [`Family::insert`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InsertResult {
    /// The state was linked.
    Inserted {
        /// The slot of the flow's previous state of that name, which had expired or was removed.
        replaced: Option<u32>,
    },
    /// This slot has a live state of the same flow and name.
    Exists(u32),
}

impl<const N: usize> Table<N> for Family<N> {
    fn key(&self, slot: u32) -> Key<N> {
        self.entry(slot).key()
    }

    fn replace(&self, full: &Index) {
        self.index.replace(full);
    }
}

impl<const N: usize> Family<N> {
    pub(crate) fn new(seed: u64, pages: Pages) -> Self {
        Self {
            slab: Slab::new(pages),
            index: GrowingIndex::new(seed, pages),
            slot_counters: SlotCounters::new(),
            wide_counters: WideCounters::default(),
            shrink: Shrink::default(),
            windows: WindowTable::new(),
            sweep: SweepCursor::new(),
            evict: EvictCursor::new(),
            longest: AtomicU64::new(0),
        }
    }

    #[inline]
    pub(crate) fn entry(&self, slot: u32) -> Entry<'_, N> {
        Entry(self.slab.words(slot))
    }

    /// The state in `slot`, or `None` if there is no such slot.
    #[inline(always)]
    pub(crate) fn try_entry(&self, slot: u32) -> Option<Entry<'_, N>> {
        self.slab.try_words(slot).map(Entry)
    }

    /// The largest number of states that one flow had at the same time.
    pub(crate) fn longest(&self) -> usize {
        // Relaxed: a statistic.
        self.longest.load(Ordering::Relaxed) as usize
    }

    /// The slot of the flow's live state.
    #[inline(never)]
    pub(crate) fn find(
        &self,
        index: &Index,
        probe: Probe,
        key: &Key<N>,
        lookup: Lookup,
        live: LiveFilter<'_>,
    ) -> Option<u32> {
        match index.find(probe, |slot| self.entry(slot).has_key(key)) {
            Some(first) => self.choose(first, lookup, live),
            None => self.find_migrated(index.next()?, key, lookup, live),
        }
    }

    /// Returns true if `entry` is the flow's state that `lookup` asks for. The flow's newest state nearly always is.
    #[inline(always)]
    pub(crate) fn matches(entry: Entry<'_, N>, key: &Key<N>, lookup: Lookup, live: LiveFilter<'_>) -> bool {
        entry.has_key(key)
            && live.accepts(entry)
            && match lookup {
                Lookup::Any => true,
                Lookup::Named(name) => entry.header().is_named(name),
            }
    }

    /// As [`Family::find`], in the index that the flows migrate to.
    #[cold]
    fn find_migrated(
        &self,
        mut index: &Index,
        key: &Key<N>,
        lookup: Lookup,
        live: LiveFilter<'_>,
    ) -> Option<u32> {
        loop {
            match index.find(index.probe(key), |slot| self.entry(slot).has_key(key)) {
                Some(first) => return self.choose(first, lookup, live),
                None => index = index.next()?,
            }
        }
    }

    /// The slot of the flow's state under `name`, live or not.
    pub(crate) fn find_any(&self, index: &Index, key: &Key<N>, name: Name) -> Option<u32> {
        let mut index = index;
        loop {
            match index.find(index.probe(key), |slot| self.entry(slot).has_key(key)) {
                Some(first) => return self.search(first, |slot| self.entry(slot).header().is_named(name)).0,
                None => index = index.next()?,
            }
        }
    }

    /// The slot of the live state that `lookup` asks for, in the list that begins at `first`.
    #[inline(always)]
    fn choose(&self, first: u32, lookup: Lookup, live: LiveFilter<'_>) -> Option<u32> {
        let mut slot = first;
        loop {
            let entry = self.entry(slot);
            match lookup {
                Lookup::Named(name) if entry.header().is_named(name) => {
                    return live.accepts(entry).then_some(slot);
                }
                Lookup::Any if live.accepts(entry) => return Some(slot),
                _ => slot = self.slab.sibling(slot)?,
            }
        }
    }

    /// Links the state in `slot`, which is written and known to the caller only.
    pub(crate) fn insert(
        &self,
        index: &Index,
        key: &Key<N>,
        name: Name,
        slot: u32,
        live: LiveFilter<'_>,
    ) -> InsertResult {
        loop {
            match self.try_insert(index, key, name, slot, live) {
                Ok(result) => return result,
                Err(full) => self.index.replace(full),
            }
        }
    }

    /// As [`Family::insert`]. Returns the index that is to be replaced if it has no room.
    fn try_insert<'a>(
        &self,
        index: &'a Index,
        key: &Key<N>,
        name: Name,
        slot: u32,
        live: LiveFilter<'_>,
    ) -> Result<InsertResult, &'a Index> {
        let expires = tick(self.entry(slot).expires(live.now));
        self.with_flow(index, key, |mut flow| {
            let Some((place, first)) = flow.find(|slot| self.entry(slot).has_key(key)) else {
                self.slab.set_sibling(slot, None);
                // A sweep may see the slot before it is linked, and then finds nothing to unlink.
                self.slab.set_occupied(slot, expires);
                if let Err(full) = flow.add(slot) {
                    self.slab.set_link(slot, 0);
                    return Err(full);
                }
                self.record_longest(1);
                return Ok(InsertResult::Inserted { replaced: None });
            };
            let is_named = |slot| self.entry(slot).header().is_named(name);
            let (same, before, states) = self.search(first, is_named);
            if let Some(same) = same
                && live.accepts(self.entry(same))
            {
                return Ok(InsertResult::Exists(same));
            }
            let rest = if same == Some(first) { self.slab.sibling(first) } else { Some(first) };
            self.slab.set_sibling(slot, rest);
            self.slab.set_occupied(slot, expires);
            flow.replace(place, slot);
            if let (Some(same), Some(before)) = (same, before) {
                self.slab.set_sibling(before, self.slab.sibling(same));
            }
            if let Some(same) = same {
                self.slab.set_link(same, 0);
            }
            self.record_longest(states + u64::from(same.is_none()));
            Ok(InsertResult::Inserted { replaced: same })
        })
    }

    /// Records that a flow has this many states.
    fn record_longest(&self, states: u64) {
        // Relaxed: a statistic. The load keeps the line shared while there is no longer list.
        if states > self.longest.load(Ordering::Relaxed) {
            self.longest.fetch_max(states, Ordering::Relaxed);
        }
    }

    /// Unlinks the state in `slot` if `still` accepts it. Returns false if it does not, or another thread was first.
    pub(crate) fn unlink(&self, index: &Index, slot: u32, still: impl Fn(Entry<'_, N>) -> bool) -> bool {
        let key = self.entry(slot).key();
        self.with_flow(index, &key, |flow| {
            if !self.slab.is_occupied(slot) || !still(self.entry(slot)) {
                return false;
            }
            // As a precaution, a slot without an entry is given back, too.
            if let Some((place, first)) = flow.find(|slot| self.entry(slot).has_key(&key))
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
        })
    }

    /// Calls `work` with the state in `slot`, if the slot has a state of this flow, and with a function that makes a name
    /// free: it returns false if another live state of the flow has the name, and unlinks one that is not live. Meanwhile no
    /// other thread links or unlinks states of the flow. Returns the result, and the slot of the state that was unlinked.
    pub(crate) fn with_linked<T>(
        &self,
        index: &Index,
        slot: u32,
        key: &Key<N>,
        live: LiveFilter<'_>,
        work: impl FnOnce(Entry<'_, N>, &mut dyn FnMut(Name) -> bool) -> T,
    ) -> (Option<T>, Option<u32>) {
        let mut unlinked = None;
        let result = self.with_flow(index, key, |flow| {
            let entry = self.entry(slot);
            if !self.slab.is_occupied(slot) || !entry.has_key(key) {
                return None;
            }
            let mut make_free = |name: Name| {
                let Some((place, first)) = flow.find(|slot| self.entry(slot).has_key(key)) else {
                    return true;
                };
                let is = |at: u32| at != slot && self.entry(at).header().is_named(name);
                let (Some(other), before, _) = self.search(first, is) else { return true };
                if live.accepts(self.entry(other)) {
                    return false;
                }
                match (before, self.slab.sibling(other)) {
                    (Some(before), next) => self.slab.set_sibling(before, next),
                    (None, Some(next)) => flow.replace(place, next),
                    // Not so: the flow has the state in `slot` too.
                    (None, None) => flow.remove(place),
                }
                self.slab.set_link(other, 0);
                unlinked = Some(other);
                true
            };
            Some(work(entry, &mut make_free))
        });
        (result, unlinked)
    }

    /// Searches a flow's list: the first slot that `is` accepts, the slot before it, and the length of the list.
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

    fn with_flow<'a, T>(&self, index: &'a Index, key: &Key<N>, work: impl FnOnce(LockedFlow<'a>) -> T) -> T {
        index.with_flow(key, self, work)
    }

    /// Migrates `lines` lines of the index, if it migrates. Returns true when `index` is empty and
    /// [`GrowingIndex::current`] is another one.
    #[inline]
    pub(crate) fn migrate(&self, index: &Arc<Index>, lines: u64) -> bool {
        index.next().is_some_and(|next| self.migrate_to(index, next, lines))
    }

    /// As [`Family::migrate`], after a burst: does nothing while another thread prefaults the next index, so that no packet
    /// waits for a page fault. Each install migrates a line in any case.
    #[inline]
    pub(crate) fn migrate_behind(&self, index: &Arc<Index>) -> bool {
        let next = index.next().filter(|_| !index.last().waits_for_prefault());
        next.is_some_and(|next| self.migrate_to(index, next, MIGRATE_LINES))
    }

    fn migrate_to(&self, index: &Arc<Index>, next: &Arc<Index>, lines: u64) -> bool {
        let prefetch = |slot| {
            if let Some(entry) = self.try_entry(slot) {
                entry.prefetch_key();
            }
        };
        self.index.migrate((index, next), lines, self, prefetch)
    }

    /// Allocates and prefaults some of the memory that more than `states` states will need. Returns true if more remains.
    pub(crate) fn prepare(&self, states: u64) -> bool {
        /// Lines and slots that one call prefaults: 256 KiB of each.
        const PREFAULT: u32 = 4096;
        let slots = (states / 4).clamp(PREFAULT.into(), 1 << 20) as u32;
        self.slab.prefault(slots, PREFAULT)
            | self.shrink.prefault(&self.slab, states, slots, PREFAULT)
            | self.index.prepare(states, PREFAULT.into())
    }

    /// Gives back some of the memory that `states` states do not need.
    pub(crate) fn shrink(&self, states: u64) -> Progress {
        match (self.shrink.step(&self.slab, states), self.index.shrink(states)) {
            (Progress::Done, true) => Progress::More,
            (progress, _) => progress,
        }
    }

    /// Bytes of memory of `states` states and of what is prepared for more: slots and indices.
    pub(crate) fn bytes(&self, states: u64) -> u64 {
        const META: u64 = 8;
        let slots = self.shrink.resident(&self.slab, states) + self.slab.prefaulted();
        slots * Slab::<N>::LINES as u64 * size_of::<Line>() as u64
            + u64::from(self.slab.len()) * META
            + self.index.bytes()
    }

    /// The next `count` slots for the sweep: a range, and the rest from slot 0 on.
    #[inline]
    pub(crate) fn next_sweep(&self, count: u32) -> [Range<u32>; 2] {
        let ranges = self.sweep.next(self.slab.len(), count);
        // The next call needs these lines soon.
        self.slab.prefetch_meta(ranges[0].end, count.min(self.slab.len()));
        ranges
    }

    /// Returns true if the state in `slot` may have expired at `now`, without reading the state.
    #[inline]
    pub(crate) fn may_have_expired(&self, slot: u32, now: Time) -> bool {
        self.slab.due_tick(slot).is_some_and(|at| !super::slab::tick_before(tick(now), at))
    }

    /// Examines up to 64 of the first `slots`. Returns a bit for each slot with a state that may have expired, or with any state
    /// (`all`), the first slot in bit 0; and the number of examined slots.
    #[inline]
    pub(crate) fn due_mask(&self, slots: &Range<u32>, now: Time, all: bool) -> (u64, u32) {
        let tick = if all { None } else { Some(tick(now)) };
        self.slab.due_mask(slots.start, slots.end - slots.start, tick)
    }

    /// Schedules the state in `slot` for its current expiry.
    pub(crate) fn reschedule(&self, slot: u32, now: Time) {
        if let Some(before) = self.slab.due_tick(slot) {
            self.slab.reschedule(slot, before, tick(self.entry(slot).expires(now)));
        }
    }

    /// Schedules the state in `slot` for `expires` if it was scheduled for later.
    #[cold]
    pub(crate) fn schedule_sooner(&self, slot: u32, expires: Time) {
        self.slab.lower_tick(slot, tick(expires));
    }

    /// Packets and bytes of the state in `slot`, from all places that count them.
    #[inline]
    pub(crate) fn counts(&self, slot: u32) -> Counts {
        let entry = self.entry(slot);
        let mut counts = [entry.counts(Direction::Forward), entry.counts(Direction::Reverse)];
        if entry.header().has(WIDE_COUNTS)
            && let Some(wide) = self.wide_counters.get(slot)
        {
            counts = [0, 1].map(|at| add(counts[at], wide[at]));
        }
        for counted in self.slot_counters.counted(slot) {
            for (count, more) in counts.iter_mut().zip(counted) {
                *count = add(*count, unpack_count(more));
            }
        }
        counts
    }

    /// The state in `slot` as listings show it.
    #[inline]
    pub(crate) fn listed(&self, slot: u32, now: Time) -> Listed
    where
        Key<N>: FlowKey,
    {
        const TCP: u8 = 6;
        let entry = self.entry(slot);
        let (header, tcp) = (entry.header(), entry.tcp());
        let flow = entry.key().flow(header.forward());
        let counts = self.counts(slot);
        Listed {
            kind: if header.has(LIMITED) { Kind::Limit } else { Kind::State },
            rule: header.rule(),
            name: header.name(),
            orphaned: header.has(ORPHANED),
            flow,
            packets: counts.map(|[packets, _]| packets),
            bytes: counts.map(|[_, bytes]| bytes),
            remaining: entry.expires(now).since(now),
            tcp_seen: if flow.proto == TCP { tcp.word() } else { 0 },
            picked_up: flow.proto == TCP && tcp.is_picked_up(),
            tcp_ack: tcp.ack,
            origin: entry.origin(),
        }
    }
}

fn add(a: [u64; 2], b: [u64; 2]) -> [u64; 2] {
    [a[0] + b[0], a[1] + b[1]]
}

/// Locks the mutex, also after a panic in another thread: what these mutexes guard is consistent at every step.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The tick of a time, modulo 2^31.
#[inline]
fn tick(time: Time) -> u32 {
    (time.as_nanos() >> TICK_BITS) as u32 & (u32::MAX >> 1)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::state::limits::rule_counts::RemovedRules;
    use crate::state::table::entry::{BurstTime, NewEntry, PacketInfo};
    use crate::state::table::key::Side;
    use crate::state::{Origin, RuleId, Segment, Settings};

    const NOW: Time = Time::from_secs(100);

    const INSERTED: InsertResult = InsertResult::Inserted { replaced: None };

    /// Inserts a state for flow `n`.
    fn insert(family: &Family<2>, n: u64) -> InsertResult {
        let (key, slot) = (Key([n, 7]), family.slab.alloc_one().unwrap());
        let new = NewEntry {
            key,
            side: Side::Low,
            rule: RuleId(1),
            name: Name::DEFAULT,
            generation: 0,
            flags: 0,
            parent: u32::MAX,
            lifetime: None,
            every_packet: false,
            established: false,
            origin: Origin::UNRECORDED,
        };
        let (segment, settings) = (Segment::default(), Settings::default());
        let packet =
            PacketInfo { proto: 17, bytes: 1, segment: &segment, at: BurstTime::new(NOW, &settings) };
        family.entry(slot).init(&new, packet, &settings);
        let live = LiveFilter::new(NOW, RemovedRules::NONE);
        family.insert(&family.index.current(), &key, Name::DEFAULT, slot, live)
    }

    #[test]
    fn a_state_without_an_index_entry_gives_its_slot_back() {
        let family = Family::<2>::new(1, Pages::Base);
        let index = family.index.current();
        (0..3).for_each(|n| assert_eq!(insert(&family, n), INSERTED));
        let slot = family.find_any(&index, &Key([1, 7]), Name::DEFAULT).unwrap();
        family.with_flow(&index, &Key([1, 7]), |flow| {
            let (place, _) = flow.find(|at| at == slot).unwrap();
            flow.remove(place);
        });
        assert_eq!(family.find_any(&index, &Key([1, 7]), Name::DEFAULT), None);
        // Beside another state of the same flow, and alone.
        assert_eq!(insert(&family, 1), INSERTED);
        assert!(!family.unlink(&index, slot, |_| false));
        assert!(family.unlink(&index, slot, |_| true));
        assert!(!family.unlink(&index, slot, |_| true));
        assert!((0..3).all(|n| family.find_any(&index, &Key([n, 7]), Name::DEFAULT).is_some()));
    }

    /// A peer that knows the secret can fill the lines of one flow. The next secret makes that knowledge worthless.
    #[test]
    fn flows_that_crowd_their_lines_get_another_secret() {
        let family = Family::<2>::new(1, Pages::Base);
        let index = family.index.current();
        let probe = |n: u64| index.probe(&Key([n, 7]));
        let lines = index.lines_of(probe(0));
        let crowd: Vec<u64> = (0..).filter(|&n| index.lines_of(probe(n)) == lines).take(25).collect();
        for &n in &crowd {
            assert_eq!(insert(&family, n), INSERTED);
        }
        assert!(index.stashed());
        family.index.grow(25);
        let next = index.next().expect("it grows");
        assert!(next.prefault(1) && next.waits_for_prefault());
        assert!(!family.migrate_behind(&index) && index.migrated() == 0, "another thread prefaults");
        // That thread has stopped.
        while index.migrated() == 0 {
            assert!(!family.migrate_behind(&index));
        }
        while next.prefault(1) {}
        assert!(!family.migrate_behind(&index) && index.migrated() == 2 * MIGRATE_LINES);
        while !family.migrate(&index, MIGRATE_LINES) {}
        let next = family.index.current();
        assert_eq!((next.bits(), next.stashed()), (index.bits(), false));
        for &n in &crowd {
            let (key, live) = (Key([n, 7]), LiveFilter::new(NOW, RemovedRules::NONE));
            assert!(family.find(&next, next.probe(&key), &key, Lookup::Any, live).is_some(), "{n}");
        }
        let other: std::collections::HashSet<_> =
            crowd.iter().map(|&n| next.lines_of(next.probe(&Key([n, 7])))).collect();
        assert!(other.len() > 20, "{}", other.len());
    }
}
