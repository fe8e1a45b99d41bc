//! The index: the slot of a flow's states, in tagged cache lines that readers read without a lock while writers
//! change them.
//!
//! What: a line holds ten entries, each a 16-bit tag of the flow's hash and a slot. A flow may be in two lines (Azar
//! et al. 1994, "Balanced Allocations"): in the first one unless it is crowded, or else in the emptier of both. If
//! both are full, a stash of a few lines after all others takes the entry. A flow has one entry. Its states under
//! several names form a list that begins there, the newest first.
//!
//! The first line counts the entries of its flows that are elsewhere. While it counts none, a lookup that misses there is
//! over: most lookups of flows without an entry read one line.
//!
//! Growth and shrinking make another index with another secret ([`Index::start_migration`]), and the lines migrate one by one.
//! From then on, a writer migrates the lines of its flow first and works in the new index. A new index that fills up before the
//! migration ends gets a next one: the indices form a chain, in which entries only move forward.
//!
//! Invariants.
//! 1. A thread that changes an entry of a flow holds the locks of both of the flow's lines, and of the stash if it
//!    was ever used. So a flow has at most one entry, and of several threads that insert it at once one does.
//! 2. An entry keeps its position until it is removed. A migrated entry is in the new index before it is removed from
//!    the old.
//! 3. The state is written before its slot number, and the slot number before the tag.
//!    The count of a first line is raised before the entry's tag is stored elsewhere, and lowered after it was removed. Only
//!    a migration removes entries without lowering it: the count is then too high.
//! 4. A reader checks the key in the slot that it finds. A slot is not used for another flow before every worker has
//!    announced a quiescent state ([`crate::state::concurrent::epoch`]).
//!
//! Races. A reader looks at the flow's first line, its count, its second line, the stash, and then at the next index if there is
//! one: without lock, fence or second look. What it may miss:
//! - An entry is added while it reads. If its load of the tag comes before the store, the lookup came before the
//!   entry. If after, the slot number and the state are visible (3; acquire and release).
//! - The count is zero when it reads it. Then no entry was elsewhere at that moment (3): the lookup took place then, unless
//!   the flow had an entry in the first line, which the reader missed because it was added after its look there.
//! - An entry is removed while it reads. If it reads the tag first, it finds a state whose slot is not reused yet
//!   (4), as if the lookup had come a moment earlier. If not, it finds nothing.
//! - An entry is removed and added again elsewhere while it reads, so that it sees neither. Between its first and its
//!   last look there was a moment in which the flow had no entry (1): the lookup took place then.
//! - The entry migrates. If the reader reads the old line first, it finds the entry there. If it reads the line after
//!   the entry was removed, the entry was in the new index before (2). The reader, which sees the line's mark or the
//!   missing tag, also sees the earlier stores: the next index exists, and has the entry.
//! - The tag is from one entry, the slot number from its successor at the same position: the key differs (4).

use std::sync::{Arc, OnceLock};

use crate::state::concurrent::sync::{Apart, AtomicU64, Ordering};
use crate::state::table::hash::Secret;
use crate::state::table::index_line::{
    ELSEWHERE, ENTRIES, MIGRATED, find, hint, is_elsewhere, lock, set_slot, set_tag, slot, tag, unlock, used,
};
use crate::state::table::key::Key;
use crate::state::table::memory::{Line, Lines, Pages};

/// Bursts that leave the migration to a thread that prefaults memory, per call of that thread.
#[cfg(not(any(loom, test)))]
const MAX_WAITS: u64 = 1 << 20;
#[cfg(any(loom, test))]
const MAX_WAITS: u64 = 8;

/// The number of entries from which a first line is crowded.
const CROWDED: u32 = 7;

/// Lines of the stash.
#[cfg(not(loom))]
const STASH: usize = 2;
#[cfg(loom)]
const STASH: usize = 1;

/// The index. See the module's documentation.
#[derive(Debug)]
pub(crate) struct Index {
    lines: Lines,
    /// Lines without the stash, as a power of two.
    bits: u32,
    /// The shift that makes a line number of a hash.
    shift: u32,
    secret: Secret,
    /// 1 once the stash was used.
    stashed: AtomicU64,
    /// Lines that were prefaulted.
    prefaulted: AtomicU64,
    /// Bursts that waited since the last call of [`Index::prefault`].
    waits: Apart<AtomicU64>,
    /// 1 if there is a next index; the lines that migrated to it; and the next line to migrate.
    has_next: AtomicU64,
    migrated: Apart<AtomicU64>,
    next_line: Apart<AtomicU64>,
    next: OnceLock<Arc<Index>>,
    /// Waits for a lock whose holder was preempted.
    preempted: AtomicU64,
}

/// A flow's hash and the number of its first line.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Probe {
    hash: u64,
    first: u32,
}

impl Probe {
    #[inline(always)]
    fn tag(self) -> u16 {
        // 0 means no tag.
        ((self.hash >> 24) as u16).max(1)
    }
}

/// The table of an index.
pub(crate) trait Table<const N: usize> {
    /// The key in a slot.
    fn key(&self, slot: u32) -> Key<N>;

    /// Starts a migration from `full` to a larger index.
    fn replace(&self, full: &Index);
}

/// The result of a call that migrates lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Migration {
    /// There are lines left.
    Partial,
    /// All lines are in the next index.
    Complete,
}

impl Index {
    /// An empty index of 2^`bits` lines.
    pub(crate) fn new(bits: u32, secret: Secret, pages: Pages) -> Self {
        Self {
            lines: Lines::zeroed((1 << bits) + STASH, pages),
            bits,
            shift: u64::BITS - bits,
            secret,
            stashed: AtomicU64::new(0),
            prefaulted: AtomicU64::new(0),
            waits: Apart(AtomicU64::new(0)),
            has_next: AtomicU64::new(0),
            migrated: Apart(AtomicU64::new(0)),
            next_line: Apart(AtomicU64::new(0)),
            next: OnceLock::new(),
            preempted: AtomicU64::new(0),
        }
    }

    pub(crate) fn bits(&self) -> u32 {
        self.bits
    }

    /// The number of entries without the stash.
    pub(crate) fn capacity(&self) -> u64 {
        (ENTRIES as u64) << self.bits
    }

    /// Bytes of its lines.
    pub(crate) fn bytes(&self) -> u64 {
        self.lines.len() as u64 * size_of::<Line>() as u64
    }

    /// How often a writer waited for a lock whose holder was preempted.
    pub(crate) fn preempted(&self) -> u64 {
        // Relaxed: a count.
        self.preempted.load(Ordering::Relaxed)
    }

    /// Returns true if the stash was ever used.
    pub(crate) fn stashed(&self) -> bool {
        // Relaxed: it only decides when a larger index is made.
        self.stashed.load(Ordering::Relaxed) != 0
    }

    /// Prefaults the memory of `max` more lines. Returns true if more remain.
    pub(crate) fn prefault(&self, max: u64) -> bool {
        let all = self.lines.len() as u64;
        // Relaxed, here and below: prefaulting a line twice, or migrating too early, does no harm.
        if self.prefaulted.load(Ordering::Relaxed) < all {
            let from = self.prefaulted.fetch_add(max, Ordering::Relaxed);
            self.waits.store(0, Ordering::Relaxed);
            self.lines.prefault(from.min(all) as usize..from.saturating_add(max).min(all) as usize);
        }
        !self.is_prefaulted()
    }

    /// Returns true if all its memory was prefaulted.
    pub(crate) fn is_prefaulted(&self) -> bool {
        self.prefaulted.load(Ordering::Relaxed) >= self.lines.len() as u64
    }

    /// The number of lines that migrated to the next index.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn migrated(&self) -> u64 {
        self.migrated.load(Ordering::Relaxed)
    }

    /// Returns true if a burst is to wait because another thread is prefaulting this index. The number of waits per
    /// call of that thread is bounded, in case the thread has stopped.
    pub(crate) fn waits_for_prefault(&self) -> bool {
        let begun = self.prefaulted.load(Ordering::Relaxed) > 0 && !self.is_prefaulted();
        begun && self.waits.fetch_add(1, Ordering::Relaxed) < MAX_WAITS
    }

    #[inline]
    pub(crate) fn probe<const N: usize>(&self, key: &Key<N>) -> Probe {
        let hash = self.secret.hash(&key.0);
        Probe { hash, first: (hash >> self.shift) as u32 }
    }

    /// The numbers of the flow's lines.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn lines_of(&self, probe: Probe) -> [u32; 2] {
        [probe.first, self.second(probe)]
    }

    /// The number of the flow's second line, which differs from the first.
    #[inline]
    fn second(&self, Probe { hash, first }: Probe) -> u32 {
        let second = hash as u32 & ((1 << self.bits) - 1);
        if second == first { first ^ 1 } else { second }
    }

    #[inline]
    pub(crate) fn prefetch(&self, probe: Probe) {
        self.lines.line(probe.first as usize).prefetch();
    }

    /// A slot that the flow's first line has for its tag.
    #[inline]
    pub(crate) fn hint(&self, probe: Probe) -> Option<u32> {
        hint(self.lines.line(probe.first as usize), probe.tag())
    }

    #[inline]
    pub(crate) fn prefetch_second(&self, probe: Probe) {
        self.lines.line(self.second(probe) as usize).prefetch();
    }

    /// As [`Index::hint`], in the second line.
    #[inline]
    pub(crate) fn hint_second(&self, probe: Probe) -> Option<u32> {
        hint(self.lines.line(self.second(probe) as usize), probe.tag())
    }

    /// Returns true if entries of flows with the same first line are in other lines. To be called after a look at the first line.
    #[inline(always)]
    pub(crate) fn may_be_elsewhere(&self, probe: Probe) -> bool {
        is_elsewhere(self.lines.line(probe.first as usize))
    }

    /// The slot of the flow's entry. `is` checks the key in a slot.
    #[inline]
    pub(crate) fn find(&self, probe: Probe, is: impl Fn(u32) -> bool) -> Option<u32> {
        let tag = probe.tag();
        let first = self.lines.line(probe.first as usize);
        if let Some((_, slot)) = find(first, tag, &is) {
            return Some(slot);
        }
        if !is_elsewhere(first) {
            return None;
        }
        if let Some((_, slot)) = find(self.lines.line(self.second(probe) as usize), tag, &is) {
            return Some(slot);
        }
        // Relaxed: the mark was stored before any entry of the stash that this thread must find.
        if self.stashed.load(Ordering::Relaxed) == 0 {
            return None;
        }
        self.stash().find_map(|line| find(self.lines.line(line), tag, &is)).map(|(_, slot)| slot)
    }

    /// The next index, if the lines migrate. To be called after [`Index::find`].
    #[inline]
    pub(crate) fn next(&self) -> Option<&Arc<Index>> {
        // Acquire: pairs with the release of start_migration(). The next index is visible as a whole.
        if self.has_next.load(Ordering::Acquire) == 0 { None } else { self.next.get() }
    }

    /// Makes `next` the index that the lines migrate to. Returns false if there is one already.
    pub(crate) fn start_migration(&self, next: Arc<Index>) -> bool {
        let begun = self.next.set(next).is_ok();
        if begun {
            // Release: pairs with the acquire of next().
            self.has_next.store(1, Ordering::Release);
        }
        begun
    }

    /// This index, the next one, and so on.
    pub(crate) fn chain(&self) -> impl Iterator<Item = &Index> {
        std::iter::successors(Some(self), |index| index.next().map(|next| &**next))
    }

    /// The index without a next one.
    pub(crate) fn last(&self) -> &Index {
        self.chain().last().unwrap_or(self)
    }

    /// Migrates up to `lines` lines.
    pub(crate) fn migrate_some<const N: usize>(&self, lines: u64, table: &impl Table<N>) -> Migration {
        let Some(next) = self.next() else { return Migration::Partial };
        // Relaxed: it distributes the lines; each line has a lock.
        let all = self.lines.len() as u64;
        if self.next_line.load(Ordering::Relaxed) < all {
            let from = self.next_line.fetch_add(lines, Ordering::Relaxed);
            for line in from..from.saturating_add(lines).min(all) {
                self.migrate_line(line as usize, next, table);
            }
        }
        // Acquire: pairs with the release of migrate_line(). A thread that sees all lines migrated need not read this
        // index again.
        if self.migrated.load(Ordering::Acquire) == all { Migration::Complete } else { Migration::Partial }
    }

    /// Prefetches what the next [`Index::migrate_some`] of `lines` lines reads first; `prefetch` prefetches the key in a
    /// slot. Also prefetches the lines of the call after that. In vain if another thread migrates these lines first.
    pub(crate) fn prefetch_migration(&self, lines: u64, prefetch: impl Fn(u32)) {
        // Relaxed: a hint.
        let from = self.next_line.load(Ordering::Relaxed) as usize;
        for at in from..from.saturating_add(lines as usize) {
            let Some(line) = self.lines.get(at) else { return };
            for entry in 0..ENTRIES {
                if tag(line, entry) != 0 {
                    prefetch(slot(line, entry));
                }
            }
            if let Some(line) = self.lines.get(at + lines as usize) {
                line.prefetch();
            }
        }
    }

    /// Migrates the flow's lines and the stash.
    pub(crate) fn migrate_flow<const N: usize>(&self, probe: Probe, table: &impl Table<N>) {
        if let Some(next) = self.next() {
            for line in [probe.first as usize, self.second(probe) as usize].into_iter().chain(self.stash()) {
                self.migrate_line(line, next, table);
            }
        }
    }

    /// Runs `work` with the flow's lines locked, in the index of the chain that they have migrated to.
    pub(crate) fn with_flow<'a, const N: usize, T>(
        &'a self,
        key: &Key<N>,
        table: &impl Table<N>,
        work: impl FnOnce(LockedFlow<'a>) -> T,
    ) -> T {
        let mut index = self;
        loop {
            let probe = index.probe(key);
            if index.next().is_none()
                && let Some(flow) = index.lock(probe)
            {
                return work(flow);
            }
            index.migrate_flow(probe, table);
            if let Some(next) = index.next() {
                index = next;
            }
        }
    }

    /// Locks the flow's lines. Returns `None` if one of them has migrated: call [`Index::migrate_flow`] and use the
    /// next index.
    pub(crate) fn lock(&self, probe: Probe) -> Option<LockedFlow<'_>> {
        let (first, second) = (probe.first, self.second(probe));
        let (low, high) = (first.min(second), first.max(second));
        let mut locked = LockedFlow { index: self, probe, held: [0; 2 + STASH], count: 0 };
        for line in [low, high] {
            locked.hold(line as usize)?;
        }
        // Relaxed: a thread that used the stash for this flow held the same locks.
        if self.stashed.load(Ordering::Relaxed) != 0 {
            locked.hold_stash()?;
        }
        Some(locked)
    }

    /// The numbers of the stash's lines, after all others: locks are taken in ascending order.
    fn stash(&self) -> std::ops::Range<usize> {
        self.lines.len() - STASH..self.lines.len()
    }

    fn migrate_line<const N: usize>(&self, at: usize, next: &Index, table: &impl Table<N>) {
        let line = self.lines.line(at);
        // Acquire: pairs with the release of unlock(). A thread that finds the line migrated finds its entries in the
        // next index.
        if line.word(0).load(Ordering::Acquire) & MIGRATED != 0 {
            return;
        }
        if lock(line, &self.preempted) & MIGRATED != 0 {
            unlock(line, 0);
            return;
        }
        // Prefetch the target lines of all entries before the first is needed.
        let moving: [Option<(u32, Key<N>)>; ENTRIES] = std::array::from_fn(|entry| {
            let slot = (tag(line, entry) != 0).then(|| slot(line, entry))?;
            let key = table.key(slot);
            let probe = next.probe(&key);
            next.prefetch(probe);
            next.prefetch_second(probe);
            Some((slot, key))
        });
        for (entry, (slot, key)) in moving.into_iter().enumerate().filter_map(|(at, is)| Some((at, is?))) {
            // The next index nearly always has room: twice the capacity, another secret, or few entries. It has none if threads
            // were preempted while others inserted states, or if the secret is known.
            while let Err(full) = next.with_flow(&key, table, |mut flow| flow.add(slot)) {
                table.replace(full);
            }
            set_tag(line, entry, 0);
        }
        unlock(line, MIGRATED);
        // Release: pairs with the acquire of migrate_some().
        self.migrated.fetch_add(1, Ordering::Release);
    }
}

/// The locked lines of one flow. Dropping it unlocks them.
pub(crate) struct LockedFlow<'a> {
    index: &'a Index,
    probe: Probe,
    held: [usize; 2 + STASH],
    count: usize,
}

/// The position of an entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position {
    line: usize,
    entry: usize,
}

impl<'a> LockedFlow<'a> {
    /// The position and the slot of the flow's entry.
    pub(crate) fn find(&self, is: impl Fn(u32) -> bool) -> Option<(Position, u32)> {
        self.held[..self.count].iter().find_map(|&line| {
            let (entry, slot) = find(self.index.lines.line(line), self.probe.tag(), &is)?;
            Some((Position { line, entry }, slot))
        })
    }

    /// Adds the entry of a flow that has none. Returns the index if it has no room.
    pub(crate) fn add(&mut self, slot: u32) -> Result<(), &'a Index> {
        let [first, second] = [self.probe.first, self.index.second(self.probe)].map(|line| line as usize);
        let used = |line| used(self.index.lines.line(line));
        let line = match used(first) {
            few if few < CROWDED => first,
            many if many <= used(second) => first,
            _ => second,
        };
        if self.add_to(line, slot) {
            return Ok(());
        }
        if self.count == 2 && self.hold_stash().is_none() {
            return Err(self.index);
        }
        // Relaxed: the release that publishes the entry comes later.
        self.index.stashed.store(1, Ordering::Relaxed);
        if self.index.stash().any(|line| self.add_to(line, slot)) { Ok(()) } else { Err(self.index) }
    }

    /// Replaces the slot of the flow's entry.
    pub(crate) fn replace(&self, place: Position, slot: u32) {
        set_slot(self.index.lines.line(place.line), place.entry, slot);
    }

    /// Removes the entry.
    pub(crate) fn remove(&self, place: Position) {
        set_tag(self.index.lines.line(place.line), place.entry, 0);
        if place.line != self.probe.first as usize {
            self.count_elsewhere(|word| word - ELSEWHERE);
        }
    }

    /// Changes the count of the first line.
    fn count_elsewhere(&self, change: impl Fn(u64) -> u64) {
        let word = self.index.lines.line(self.probe.first as usize).word(0);
        // Relaxed: only the holder of the lock writes it.
        let now = word.load(Ordering::Relaxed);
        // Release: pairs with the acquire of is_elsewhere().
        word.store(change(now), Ordering::Release);
    }

    fn add_to(&self, at: usize, slot: u32) -> bool {
        let line = self.index.lines.line(at);
        let Some(entry) = (0..ENTRIES).find(|&entry| tag(line, entry) == 0) else { return false };
        if at != self.probe.first as usize {
            // There are fewer slots than the count has numbers.
            self.count_elsewhere(|word| word + ELSEWHERE);
        }
        set_slot(line, entry, slot);
        set_tag(line, entry, self.probe.tag());
        true
    }

    fn hold(&mut self, line: usize) -> Option<()> {
        let word = lock(self.index.lines.line(line), &self.index.preempted);
        self.held[self.count] = line;
        self.count += 1;
        (word & MIGRATED == 0).then_some(())
    }

    fn hold_stash(&mut self) -> Option<()> {
        self.index.stash().try_for_each(|line| self.hold(line))
    }
}

impl Drop for LockedFlow<'_> {
    fn drop(&mut self) {
        for &line in &self.held[..self.count] {
            unlock(self.index.lines.line(line), 0);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
