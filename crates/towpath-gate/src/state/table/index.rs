//! Which slot a flow's states are in: tagged cache lines, read without a lock while they change.
//!
//! What: a line holds ten entries, a tag of 16 bits of the flow's hash and a slot each. A flow has two lines that it may
//! be in (Azar et al. 1994, "Balanced Allocations"): the first, as long as that is not crowded, or else the emptier one
//! of both; if both are full, a stash of a few lines behind all others takes it. An entry is a flow; its states under
//! several names are a list behind it, the newest first.
//!
//! Growth makes another index with another secret ([`Index::begin`]), and the lines move there one by one. From then
//! on a writer moves the lines of its flow first, and works in the new index.
//!
//! Invariants.
//! 1. Whoever changes entries of a flow holds the locks of both of the flow's lines, and of the stash when it was ever
//!    used. So a flow has at most one entry, and several threads that make it make it once.
//! 2. An entry keeps its place until it is taken out. A moved entry is in the new index before it is out of the old.
//! 3. A slot is written before its tag, and the state in the slot before either.
//! 4. Who finds a slot checks the key in it. A slot is used for another flow only after every worker has said that it
//!    knows no slots any more ([`crate::state::concurrent::epoch`]).
//!
//! Races. A reader looks at the flow's first line, its second, the stash, then at the next index if there is one: no lock,
//! no fence, no second look. What it may miss:
//! - An entry is made while it reads. Either its tag load comes before the tag's store, and the lookup was before the
//!   entry; or after it, and the slot and the state are there (3, acquire and release).
//! - An entry is taken out while it reads. Either it reads the tag first, and finds a state that nobody uses for another
//!   flow yet (4), as if it had come a moment earlier; or it does not.
//! - An entry is taken out and made again elsewhere while it reads, so that it sees neither. Then there was a moment in
//!   between, after the first look and before the last, in which the flow had no entry (1): the lookup was then.
//! - The entry moves. If the old line is read first, it is found there. If the line is read after the entry was taken
//!   out, then the entry was in the new index before that (2), and the reader, which sees the mark of the line or the
//!   missing tag, sees what was stored before it: that there is a next index, and the entry in it.
//! - A tag is from one entry and the slot from the next in the same place: the key tells (4).

use std::sync::{Arc, OnceLock};

use crate::state::concurrent::sync::{Apart, AtomicU64, Ordering, wait};
use crate::state::table::hash::Secret;
use crate::state::table::key::Key;
use crate::state::table::memory::{Line, Lines, Pages, WORDS, same_lanes};

/// BurstBuffers that leave moving to whoever touches memory, from one touch to the next.
#[cfg(not(any(loom, test)))]
const PATIENCE: u64 = 1 << 20;
#[cfg(any(loom, test))]
const PATIENCE: u64 = 8;

/// Entries of a line.
pub(crate) const ENTRIES: usize = 10;

/// In word 0, beside two tags: somebody changes the line.
const LOCKED: u64 = 1;
/// The line's entries are in the next index.
const MOVED: u64 = 2;
const CONTROL: u64 = LOCKED | MOVED;

/// Tags are lanes 2 to 11 of the first three words; slots are halves of the last five.
const LANES: usize = 4;
const FIRST_LANE: usize = 2;
const TAG_WORDS: usize = 3;

/// A first line with so many entries is crowded.
const CROWDED: u32 = 7;

/// Lines of the stash.
#[cfg(not(loom))]
const STASH: usize = 2;
#[cfg(loom)]
const STASH: usize = 1;

/// The index.
#[derive(Debug)]
pub(crate) struct Index {
    lines: Lines,
    /// Lines without the stash, as a power of two.
    bits: u32,
    /// What a hash is shifted by to be a line.
    shift: u32,
    secret: Secret,
    /// Whether the stash was ever used.
    stashed: AtomicU64,
    /// Lines whose memory was touched ahead of use.
    touched: AtomicU64,
    /// How often a burst has waited since.
    waited: Apart<AtomicU64>,
    /// Whether there is a next one; the lines that were moved there, and the next that somebody is to move.
    begun: AtomicU64,
    moved: Apart<AtomicU64>,
    to_move: Apart<AtomicU64>,
    next: OnceLock<Arc<Index>>,
}

/// Where a flow is looked for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Probe {
    hash: u64,
    first: u32,
}

impl Probe {
    #[inline(always)]
    fn tag(self) -> u16 {
        // 0 is no tag.
        ((self.hash >> 24) as u16).max(1)
    }
}

/// What became of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moved {
    /// There are lines left.
    Some,
    /// All lines are in the next index.
    All,
}

impl Index {
    /// An index of 2^`bits` lines, empty.
    pub(crate) fn new(bits: u32, secret: Secret, pages: Pages) -> Self {
        Self {
            lines: Lines::zeroed((1 << bits) + STASH, pages),
            bits,
            shift: u64::BITS - bits,
            secret,
            stashed: AtomicU64::new(0),
            touched: AtomicU64::new(0),
            waited: Apart(AtomicU64::new(0)),
            begun: AtomicU64::new(0),
            moved: Apart(AtomicU64::new(0)),
            to_move: Apart(AtomicU64::new(0)),
            next: OnceLock::new(),
        }
    }

    pub(crate) fn bits(&self) -> u32 {
        self.bits
    }

    /// Entries that there is room for without the stash.
    pub(crate) fn room(&self) -> u64 {
        (ENTRIES as u64) << self.bits
    }

    /// Whether some flow found no room in its lines.
    pub(crate) fn stashed(&self) -> bool {
        // Relaxed: it only decides how early a larger index is made.
        self.stashed.load(Ordering::Relaxed) != 0
    }

    /// Touches the memory of `most` more lines. Whether there is more to touch.
    pub(crate) fn prepare(&self, most: u64) -> bool {
        let all = self.lines.len() as u64;
        // Relaxed, here and below: whoever touches what was touched, or begins too early, loses nothing.
        if self.touched.load(Ordering::Relaxed) < all {
            let from = self.touched.fetch_add(most, Ordering::Relaxed);
            self.waited.store(0, Ordering::Relaxed);
            self.lines.touch(from.min(all) as usize..from.saturating_add(most).min(all) as usize);
        }
        !self.is_prepared()
    }

    /// Whether all its memory was touched.
    pub(crate) fn is_prepared(&self) -> bool {
        self.touched.load(Ordering::Relaxed) >= self.lines.len() as u64
    }

    /// Lines that have moved to the next index.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    /// Has a burst wait, if somebody has begun to touch its memory and is not done. It waits so often and no more, from one touch to
    /// the next: who began may have stopped.
    pub(crate) fn waits_for_memory(&self) -> bool {
        let begun = self.touched.load(Ordering::Relaxed) > 0 && !self.is_prepared();
        begun && self.waited.fetch_add(1, Ordering::Relaxed) < PATIENCE
    }

    #[inline]
    pub(crate) fn probe<const N: usize>(&self, key: &Key<N>) -> Probe {
        let hash = self.secret.hash(&key.0);
        Probe { hash, first: (hash >> self.shift) as u32 }
    }

    /// The lines that the flow may be in.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn places(&self, probe: Probe) -> [u32; 2] {
        [probe.first, self.second(probe)]
    }

    /// The flow's second line, which is another one.
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
    pub(crate) fn guess(&self, probe: Probe) -> Option<u32> {
        guess(self.lines.line(probe.first as usize), probe.tag())
    }

    #[inline]
    pub(crate) fn prefetch_second(&self, probe: Probe) {
        self.lines.line(self.second(probe) as usize).prefetch();
    }

    /// The same as [`Index::guess`] in the second line.
    #[inline]
    pub(crate) fn guess_second(&self, probe: Probe) -> Option<u32> {
        guess(self.lines.line(self.second(probe) as usize), probe.tag())
    }

    /// The slot of the flow's entry, the one that `is` knows by its key.
    #[inline]
    pub(crate) fn find(&self, probe: Probe, is: impl Fn(u32) -> bool) -> Option<u32> {
        let tag = probe.tag();
        let found = find(self.lines.line(probe.first as usize), tag, &is)
            .or_else(|| find(self.lines.line(self.second(probe) as usize), tag, &is));
        if found.is_some() {
            return found.map(|(_, slot)| slot);
        }
        // Relaxed: an entry of the stash that this thread must find was made after the mark.
        if self.stashed.load(Ordering::Relaxed) == 0 {
            return None;
        }
        self.stash().find_map(|line| find(self.lines.line(line), tag, &is)).map(|(_, slot)| slot)
    }

    /// The next index, when the lines move there. To be asked after [`Index::find`].
    #[inline]
    pub(crate) fn next(&self) -> Option<&Arc<Index>> {
        // Acquire: pairs with the release of begin(), so that the next index is whole.
        if self.begun.load(Ordering::Acquire) == 0 { None } else { self.next.get() }
    }

    /// Makes `next` the index that the lines move to. False when there is one already.
    pub(crate) fn begin(&self, next: Arc<Index>) -> bool {
        let begun = self.next.set(next).is_ok();
        if begun {
            // Release: pairs with the acquire of next().
            self.begun.store(1, Ordering::Release);
        }
        begun
    }

    /// Moves some lines to the next index; `key` gives the key in a slot.
    pub(crate) fn move_some<const N: usize>(&self, lines: u64, key: impl Fn(u32) -> Key<N>) -> Moved {
        let Some(next) = self.next() else { return Moved::Some };
        // Relaxed: who moves which line; the lines have locks.
        let all = self.lines.len() as u64;
        if self.to_move.load(Ordering::Relaxed) < all {
            let from = self.to_move.fetch_add(lines, Ordering::Relaxed);
            for line in from..from.saturating_add(lines).min(all) {
                self.move_line(line as usize, next, &key);
            }
        }
        // Acquire: pairs with the release in move_line(): who sees all lines moved need not look here again.
        if self.moved.load(Ordering::Acquire) == all { Moved::All } else { Moved::Some }
    }

    /// Has what the next [`Index::move_some`] of so many lines begins with on its way to the cache: `fetch` is for the slots of
    /// entries. The lines of the one after it are asked for too, so that they are here when this is called next. Others
    /// that move lines may come first; then it was for nothing.
    pub(crate) fn fetch_lines(&self, lines: u64, fetch: impl Fn(u32)) {
        // Relaxed: a guess.
        let from = self.to_move.load(Ordering::Relaxed) as usize;
        for at in from..from.saturating_add(lines as usize) {
            let Some(line) = self.lines.get(at) else { return };
            for entry in 0..ENTRIES {
                if tag(line, entry) != 0 {
                    fetch(slot(line, entry));
                }
            }
            if let Some(line) = self.lines.get(at + lines as usize) {
                line.prefetch();
            }
        }
    }

    /// Moves the lines that the flow may be in.
    pub(crate) fn move_flow<const N: usize>(&self, probe: Probe, key: impl Fn(u32) -> Key<N>) {
        if let Some(next) = self.next() {
            for line in [probe.first as usize, self.second(probe) as usize].into_iter().chain(self.stash()) {
                self.move_line(line, next, &key);
            }
        }
    }

    /// Locks the flow's lines. `None` when one of them has moved: [`Index::move_flow`], and then the next index.
    pub(crate) fn lock(&self, probe: Probe) -> Option<Locked<'_>> {
        let (first, second) = (probe.first, self.second(probe));
        let (low, high) = (first.min(second), first.max(second));
        let mut locked = Locked { index: self, probe, held: [0; 2 + STASH], count: 0 };
        for line in [low, high] {
            locked.hold(line as usize)?;
        }
        // Relaxed: who marked the stash for this flow held the same locks.
        if self.stashed.load(Ordering::Relaxed) != 0 {
            locked.hold_stash()?;
        }
        Some(locked)
    }

    /// Numbers of the stash's lines, which are behind all others: locks are taken in this order.
    fn stash(&self) -> std::ops::Range<usize> {
        self.lines.len() - STASH..self.lines.len()
    }

    fn move_line<const N: usize>(&self, at: usize, next: &Index, key: &impl Fn(u32) -> Key<N>) {
        let line = self.lines.line(at);
        // Acquire: pairs with the unlocking release; who finds the line moved finds its entries in the next index.
        if line.word(0).load(Ordering::Acquire) & MOVED != 0 {
            return;
        }
        if lock(line) & MOVED != 0 {
            unlock(line, 0);
            return;
        }
        // Where the entries go is on its way to the cache for all of them before it is needed for the first.
        let moving: [Option<(u32, Probe)>; ENTRIES] = std::array::from_fn(|entry| {
            let slot = (tag(line, entry) != 0).then(|| slot(line, entry))?;
            let probe = next.probe(&key(slot));
            next.prefetch(probe);
            next.prefetch_second(probe);
            Some((slot, probe))
        });
        for (entry, (slot, probe)) in moving.into_iter().enumerate().filter_map(|(at, is)| Some((at, is?))) {
            // No line of the next index moves on before all lines here have moved.
            if let Some(mut locked) = next.lock(probe) {
                // It has twice the room, or as much and another secret, and a stash. Were there none, the state would be found by
                // no packet, and taken out when it has ended ([`Family::unlink`](crate::state::table::family::Family::unlink)).
                let added = locked.add(slot);
                debug_assert!(added, "no room in the next index");
            }
            set_tag(line, entry, 0);
        }
        unlock(line, MOVED);
        // Release: pairs with the acquire of move_some().
        self.moved.fetch_add(1, Ordering::Release);
    }
}

/// The locked lines of one flow; dropped, they are unlocked.
pub(crate) struct Locked<'a> {
    index: &'a Index,
    probe: Probe,
    held: [usize; 2 + STASH],
    count: usize,
}

/// Where an entry is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    line: usize,
    entry: usize,
}

impl Locked<'_> {
    /// The flow's entry.
    pub(crate) fn find(&self, is: impl Fn(u32) -> bool) -> Option<(Place, u32)> {
        self.held[..self.count].iter().find_map(|&line| {
            let (entry, slot) = find(self.index.lines.line(line), self.probe.tag(), &is)?;
            Some((Place { line, entry }, slot))
        })
    }

    /// Adds the flow's entry, which is not there. False when there is no room.
    pub(crate) fn add(&mut self, slot: u32) -> bool {
        let [first, second] = [self.probe.first, self.index.second(self.probe)].map(|line| line as usize);
        let used = |line| used(self.index.lines.line(line));
        let line = match used(first) {
            few if few < CROWDED => first,
            many if many <= used(second) => first,
            _ => second,
        };
        if self.add_to(line, slot) {
            return true;
        }
        if self.count == 2 && self.hold_stash().is_none() {
            return false;
        }
        // Relaxed: the entry is published after it, by a release.
        self.index.stashed.store(1, Ordering::Relaxed);
        self.index.stash().any(|line| self.add_to(line, slot))
    }

    /// Puts another slot of the same flow into the entry.
    pub(crate) fn replace(&self, place: Place, slot: u32) {
        set_slot(self.index.lines.line(place.line), place.entry, slot);
    }

    /// Takes the entry out.
    pub(crate) fn remove(&self, place: Place) {
        set_tag(self.index.lines.line(place.line), place.entry, 0);
    }

    fn add_to(&self, line: usize, slot: u32) -> bool {
        let line = self.index.lines.line(line);
        let Some(entry) = (0..ENTRIES).find(|&entry| tag(line, entry) == 0) else { return false };
        set_slot(line, entry, slot);
        set_tag(line, entry, self.probe.tag());
        true
    }

    fn hold(&mut self, line: usize) -> Option<()> {
        let word = lock(self.index.lines.line(line));
        self.held[self.count] = line;
        self.count += 1;
        (word & MOVED == 0).then_some(())
    }

    fn hold_stash(&mut self) -> Option<()> {
        self.index.stash().try_for_each(|line| self.hold(line))
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        for &line in &self.held[..self.count] {
            unlock(self.index.lines.line(line), 0);
        }
    }
}

/// Locks a line; its word 0 as it was.
fn lock(line: &Line) -> u64 {
    let word = line.word(0);
    let mut turns = 0;
    loop {
        let now = word.load(Ordering::Relaxed);
        // Acquire: pairs with the release of unlock(), so that the line is seen as the last writer left it.
        if now & LOCKED == 0
            && word.compare_exchange_weak(now, now | LOCKED, Ordering::Acquire, Ordering::Relaxed).is_ok()
        {
            return now;
        }
        wait(&mut turns);
    }
}

/// Unlocks a line, with more marks.
fn unlock(line: &Line, marks: u64) {
    let word = line.word(0);
    // Relaxed: only the holder of the lock writes to it.
    let now = word.load(Ordering::Relaxed);
    // Release: pairs with the acquire of lock(), and of readers that look at the marks.
    word.store(now & !LOCKED | marks, Ordering::Release);
}

/// The entry and the slot in it, of those with this tag, that `is` knows.
#[inline(always)]
fn find(line: &Line, tag: u16, is: impl Fn(u32) -> bool) -> Option<(usize, u32)> {
    for at in 0..TAG_WORDS {
        let mut lanes = lanes_with(line, at, tag);
        while lanes != 0 {
            let entry = at * LANES + lanes.trailing_zeros() as usize / 16 - FIRST_LANE;
            let slot = slot(line, entry);
            if is(slot) {
                return Some((entry, slot));
            }
            lanes &= lanes - 1;
        }
    }
    None
}

/// The slot of some entry with this tag. In which of the words it is cannot be predicted, so nothing depends on that.
#[inline(always)]
fn guess(line: &Line, tag: u16) -> Option<u32> {
    let lanes = all_lanes_with(line, tag);
    if lanes == 0 {
        return None;
    }
    Some(slot(line, lanes.trailing_zeros() as usize - FIRST_LANE))
}

/// The lanes of all words that hold exactly `tag`, a bit each.
#[inline(always)]
fn all_lanes_with(line: &Line, tag: u16) -> u32 {
    // Acquire: as in lanes_with().
    let words: [u64; TAG_WORDS] = std::array::from_fn(|at| line.word(at).load(Ordering::Acquire));
    // Word 0 begins with what is no tag.
    same_lanes(words, tag) & !((1 << FIRST_LANE) - 1)
}

/// The top bits of the lanes of word `at` that hold exactly `tag`.
#[inline(always)]
fn lanes_with(line: &Line, at: usize, tag: u16) -> u64 {
    const LOW: u64 = 0x7fff_7fff_7fff_7fff;
    const EVERY: u64 = 0x0001_0001_0001_0001;
    // Acquire: pairs with the release of set_tag(), so that the entry's slot is there.
    let word = line.word(at).load(Ordering::Acquire);
    let differ = word ^ (u64::from(tag) * EVERY);
    // A lane's top bit is set by carry or by itself unless the lane is zero; no carry leaves its lane.
    let zero = !(((differ & LOW) + LOW) | differ) & !LOW;
    // Word 0 begins with what is no tag.
    if at == 0 { zero & !0xffff_ffff } else { zero }
}

#[inline(always)]
fn slot(line: &Line, entry: usize) -> u32 {
    // Acquire: pairs with the release of set_slot(): the state in the slot is whole.
    let word = line.word(TAG_WORDS + entry / 2).load(Ordering::Acquire);
    (word >> (entry % 2 * 32)) as u32
}

/// Under the line's lock.
fn set_slot(line: &Line, entry: usize, slot: u32) {
    let (word, shift) = (line.word(TAG_WORDS + entry / 2), entry % 2 * 32);
    let now = word.load(Ordering::Relaxed);
    // Release: pairs with the acquire of slot().
    word.store(now & !(0xffff_ffff << shift) | u64::from(slot) << shift, Ordering::Release);
}

fn tag(line: &Line, entry: usize) -> u16 {
    let lane = entry + FIRST_LANE;
    (line.word(lane / LANES).load(Ordering::Relaxed) >> (lane % LANES * 16)) as u16
}

/// Under the line's lock.
fn set_tag(line: &Line, entry: usize, tag: u16) {
    let lane = entry + FIRST_LANE;
    let (word, shift) = (line.word(lane / LANES), lane % LANES * 16);
    let now = word.load(Ordering::Relaxed);
    // Release: pairs with the acquire of lanes_with().
    word.store(now & !(0xffff << shift) | u64::from(tag) << shift, Ordering::Release);
}

/// How many entries of the line are used.
fn used(line: &Line) -> u32 {
    (0..ENTRIES).map(|entry| u32::from(tag(line, entry) != 0)).sum()
}

const _: () = assert!(FIRST_LANE + ENTRIES == TAG_WORDS * LANES && TAG_WORDS + ENTRIES / 2 == WORDS);
const _: () = assert!(CONTROL < 1 << (FIRST_LANE * 16));

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn index(bits: u32, seed: u64) -> Index {
        Index::new(bits, Secret::new(seed), Pages::Base)
    }

    /// Keys are their slots here.
    fn key(slot: u32) -> Key<2> {
        Key([u64::from(slot), 7])
    }

    fn add(index: &Index, slot: u32) -> bool {
        index.lock(index.probe(&key(slot))).unwrap().add(slot)
    }

    fn found(index: &Index, slot: u32) -> Option<u32> {
        index.find(index.probe(&key(slot)), |at| at == slot)
    }

    #[test]
    fn what_is_added_is_found_until_it_is_removed() {
        let index = index(4, 1);
        (0..100).for_each(|slot| assert!(add(&index, slot)));
        for slot in 0..100 {
            assert_eq!(found(&index, slot), Some(slot));
            let locked = index.lock(index.probe(&key(slot))).unwrap();
            let (place, _) = locked.find(|at| at == slot).unwrap();
            locked.remove(place);
            drop(locked);
            assert_eq!(found(&index, slot), None);
        }
    }

    #[test]
    fn lanes_are_exact() {
        // Tags that differ from the one looked for in one bit, in every lane and beside it.
        let lines = Lines::zeroed(1, Pages::Base);
        let line = lines.line(0);
        for wanted in 0..ENTRIES {
            (0..ENTRIES)
                .for_each(|entry| set_tag(line, entry, if entry == wanted { 0x8001 } else { 0x8000 }));
            let entries: Vec<usize> = (0..ENTRIES)
                .filter(|&entry| find(line, 0x8001, |_| true).map(|(at, _)| at) == Some(entry))
                .collect();
            assert_eq!(entries, [wanted]);
            set_tag(line, wanted, 0);
            assert_eq!(find(line, 0x8001, |_| true), None);
        }
    }

    #[test]
    fn two_choices_fill_lines_well() {
        for seed in 0..4 {
            let index = index(12, seed);
            let fits = (0..).take_while(|&slot| add(&index, slot) && !index.stashed()).count();
            let load = fits as f64 / index.room() as f64;
            assert!(load > 0.75, "the stash is used at {load}");
        }
    }

    #[test]
    fn regular_keys_fill_lines_as_well() {
        for shift in [0, 8, 16, 32, 48] {
            let (index, mut count) = (index(10, 5), 0_u32);
            let key = |n: u32| Key([u64::from(n) << shift, 7]);
            while index.lock(index.probe(&key(count))).unwrap().add(count) && !index.stashed() {
                count += 1;
            }
            let load = f64::from(count) / index.room() as f64;
            assert!(load > 0.7, "shift {shift}: the stash is used at {load}");
        }
    }

    #[test]
    fn moving_keeps_every_entry() {
        let old = index(6, 1);
        (0..500).for_each(|slot| assert!(add(&old, slot)));
        let next = Arc::new(index(7, 2));
        assert!(old.begin(Arc::clone(&next)));
        assert!(!old.begin(Arc::new(index(7, 3))));
        let lookup = |slot| found(&old, slot).or_else(|| found(old.next()?, slot));
        // A flow's own lines first, as a writer does.
        old.move_flow(old.probe(&key(3)), key);
        assert!(old.lock(old.probe(&key(3))).is_none());
        assert_eq!(found(&next, 3), Some(3));
        let mut rounds = 0;
        while old.move_some(5, key) == Moved::Some {
            (0..500).for_each(|slot| assert_eq!(lookup(slot), Some(slot)));
            rounds += 1;
        }
        assert!(rounds >= 10, "{rounds}");
        (0..500).for_each(|slot| assert_eq!(found(&next, slot), Some(slot)));
    }

    #[test]
    fn the_stash_takes_what_finds_no_room() {
        let index = index(1, 1);
        let added = (0..100).take_while(|&slot| add(&index, slot)).count();
        assert_eq!(added, ENTRIES * (2 + STASH));
        (0..added as u32).for_each(|slot| assert_eq!(found(&index, slot), Some(slot)));
        let next = Arc::new(Index::new(2, Secret::new(9), Pages::Base));
        index.begin(Arc::clone(&next));
        while index.move_some(1, key) == Moved::Some {}
        (0..added as u32).for_each(|slot| assert_eq!(found(&next, slot), Some(slot)));
    }
}
