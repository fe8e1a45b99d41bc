//! The change journal: a bounded ring of the table's changes, which any number of readers read, each with its own cursor.
//!
//! What: changes have positions, which count up. The content of a position is in the slot `position % SLOTS`. A worker takes the
//! next position, writes the content, and publishes it by the slot's state. A reader copies the content of its position and
//! checks afterwards that the slot still has it. A writer never waits for a reader: a reader that is slower than [`SLOTS`] changes
//! finds a later position in the slot, continues at a recent one, and learns how many changes it has missed.
//!
//! Cost: without a reader, one load for each change. With readers, one addition to a shared word and one cache line pair. No lock,
//! no allocation, and no loop except for writers that are a whole round apart. In the first round, the system allocates a page for each 32
//! changes. (The counts of a state with more than 2^36 bytes are
//! read under the lock of the [wide counters](super::table::wide_counters).)
//!
//! Invariant: at most one writer is in a slot. The content of a slot in the state (p, 0) is that of position p.
//!
//! Races, all between positions of the same slot, which are [`SLOTS`] apart:
//! - A writer finds an earlier writer in the slot, one that was preempted for a whole round. It marks its own position as lost and
//!   writes nothing. The earlier writer clears only its own mark when it leaves. A reader of the lost position counts one lost
//!   change.
//! - A writer finds a later position: it was preempted between taking its position and this load. It writes nothing. Readers of its
//!   position find the later one, too, and count a gap.
//! - A writer enters while a reader copies. The state changes before the content does (release fence after the exchange, acquire
//!   fence before the second load of the state), so the reader sees that the state has changed and drops the copy (Boehm 2012,
//!   "Can Seqlocks Get Along With Programming Language Memory Models?").
//!
//! Order: a change that happens before another has the smaller position, because the positions are taken from one word by
//! read-modify-writes. All changes of one slot of the table are ordered in this way, except that a packet of another worker may
//! record an update of a state that was just unlinked. It sees that the slot is empty ([`Journal::push`]) and records nothing.

use std::sync::{Arc, OnceLock};

use super::concurrent::sync::{Apart, AtomicU64, Ordering, fence};
use super::events::StateEvent;
use super::table::memory::{self, Line, Lines, Pages};

/// The number of changes in the ring (8 MiB, allocated by the system as they are used). A reader that is further behind misses
/// changes.
#[cfg(not(loom))]
const SLOTS: usize = 1 << 16;
#[cfg(loom)]
const SLOTS: usize = 2;

/// Changes that a reader skips beyond those that were overwritten, so that the writers do not catch up with it at once.
const MARGIN: u64 = SLOTS as u64 / 8;

/// Lines of a slot: a pair, of which the first word is the slot's state.
const SLOT_LINES: usize = 2;

/// Words of one change.
pub(crate) const WORDS: usize = SLOT_LINES * memory::WORDS - 1;

/// In the low bits of a slot's state, below the position: a writer is in the slot.
const WRITING: u64 = 1;
/// The position was not written, because a writer of an earlier one was in the slot.
const LOST: u64 = 2;
const POSITION: u32 = 2;

/// The state and the content of a slot.
struct Slot<'a>([&'a Line; SLOT_LINES]);

impl<'a> Slot<'a> {
    #[inline(always)]
    fn of(lines: &'a Lines, position: u64) -> Self {
        let first = position as usize % SLOTS * SLOT_LINES;
        Self([lines.line(first), lines.line(first + 1)])
    }

    #[inline(always)]
    fn state(&self) -> &'a AtomicU64 {
        self.0[0].word(0)
    }

    /// The word `at` of the content.
    #[inline(always)]
    fn word(&self, at: usize) -> &'a AtomicU64 {
        self.0[(at + 1) / memory::WORDS].word((at + 1) % memory::WORDS)
    }
}

/// The journal of one table, with contents of `W` words.
#[derive(Debug)]
pub(crate) struct Journal<const W: usize> {
    /// The number of readers, and of those that read how states begin.
    readers: AtomicU64,
    readers_of_beginnings: AtomicU64,
    /// Allocated for the first reader.
    slots: OnceLock<Lines>,
    /// The next position. The first one is [`SLOTS`]: at first, each slot has the position 0, which is before it.
    next: Apart<AtomicU64>,
}

/// The result of reading a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read<const W: usize> {
    Content([u64; W]),
    /// This many changes are missing, because the reader or a writer was too slow.
    Lost(u64),
    /// There is no change yet.
    Empty,
}

impl<const W: usize> Journal<W> {
    pub(crate) fn new() -> Self {
        const { assert!(W <= WORDS, "a slot has room for the content") };
        let next = Apart(AtomicU64::new(SLOTS as u64));
        let [readers, readers_of_beginnings] = [AtomicU64::new(0), AtomicU64::new(0)];
        Self { readers, readers_of_beginnings, slots: OnceLock::new(), next }
    }

    /// Returns true if there is a reader.
    #[inline]
    pub(crate) fn is_enabled(&self) -> bool {
        // Relaxed, here and below: a worker that sees a new reader late leaves out a change that is as old as the reader.
        self.readers.load(Ordering::Relaxed) != 0
    }

    /// Returns true if there is a reader of how states begin.
    #[inline]
    pub(crate) fn has_beginnings(&self) -> bool {
        self.readers_of_beginnings.load(Ordering::Relaxed) != 0
    }

    /// Records a change. `content` is called after the change has its position.
    pub(crate) fn push(&self, content: impl FnOnce() -> [u64; W]) {
        let Some(slots) = self.slots.get() else { return };
        // AcqRel: orders the changes of one slot of the table. A worker that takes a later position than the one that unlinked a
        // state sees that it is unlinked.
        let position = self.next.fetch_add(1, Ordering::AcqRel);
        let slot = Slot::of(slots, position);
        // Acquire, here and below: pairs with the release of the writer before, whose content this one overwrites.
        let mut before = slot.state().load(Ordering::Acquire);
        loop {
            if before >> POSITION >= position {
                return;
            }
            let lost = if before & WRITING != 0 { LOST } else { 0 };
            let state = position << POSITION | lost | WRITING;
            match slot.state().compare_exchange(before, state, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                Err(now) => before = now,
            }
        }
        if before & WRITING != 0 {
            return;
        }
        // A reader that sees one of the words below sees the state above.
        fence(Ordering::Release);
        for (at, value) in content().into_iter().enumerate() {
            // Relaxed: the fences and the state order it.
            slot.word(at).store(value, Ordering::Relaxed);
        }
        // Release: pairs with the acquire of read(). If a later position was lost meanwhile, its mark stays.
        slot.state().fetch_and(!WRITING, Ordering::Release);
    }

    /// Reads the change at `at`, and advances it.
    pub(crate) fn read(&self, at: &mut u64) -> Read<W> {
        let Some(slots) = self.slots.get() else { return Read::Empty };
        let slot = Slot::of(slots, *at);
        // Acquire: pairs with the release of push().
        let state = slot.state().load(Ordering::Acquire);
        let position = state >> POSITION;
        if position < *at || state == *at << POSITION | WRITING {
            return Read::Empty;
        }
        if position == *at && state & LOST != 0 {
            *at += 1;
            return Read::Lost(1);
        }
        if position == *at {
            let content = std::array::from_fn(|at| slot.word(at).load(Ordering::Relaxed));
            // Pairs with the fence of push(): if a word is that of a later position, so is the state.
            fence(Ordering::Acquire);
            if slot.state().load(Ordering::Relaxed) == state {
                *at += 1;
                return Read::Content(content);
            }
        }
        // Relaxed: the value may be slightly old. The next read then finds another gap.
        let oldest = self.next.load(Ordering::Relaxed).saturating_sub(SLOTS as u64) + MARGIN;
        let missed = oldest.saturating_sub(*at).max(1);
        *at += missed;
        Read::Lost(missed)
    }

    pub(crate) fn attach(&self, changes: Changes) -> u64 {
        self.slots.get_or_init(|| Lines::zeroed(SLOTS * SLOT_LINES, Pages::Base));
        if changes == Changes::All {
            self.readers_of_beginnings.fetch_add(1, Ordering::SeqCst);
        }
        // SeqCst, also above: before the table is read next. On processors that delay the store, a worker may still miss it for some
        // nanoseconds.
        self.readers.fetch_add(1, Ordering::SeqCst);
        self.next.load(Ordering::SeqCst)
    }

    fn detach(&self, changes: Changes) {
        // Relaxed: see is_enabled().
        self.readers.fetch_sub(1, Ordering::Relaxed);
        if changes == Changes::All {
            self.readers_of_beginnings.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// What [`JournalReader::read`] returns.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(
    clippy::large_enum_variant,
    reason = "matched where it is returned; a box would be allocated for each change"
)]
pub enum JournalRead {
    /// The next change.
    Change(StateEvent),
    /// This many changes are missing here: the reader was too far behind.
    Gap(u64),
    /// There is no further change yet.
    End,
}

/// The changes that a reader needs. What no reader needs is not recorded, which costs the workers less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changes {
    /// All changes.
    All,
    /// [`Created`](super::EventKind::Created) and [`Restored`](super::EventKind::Restored) may be missing: the first change of a state is its first reply, or its end.
    AfterBeginning,
}

/// A reader of the change journal, with its cursor. While one exists, the workers record their changes.
#[derive(Debug)]
pub struct JournalReader {
    journal: Arc<Journal<WORDS>>,
    changes: Changes,
    at: u64,
}

impl JournalReader {
    pub(crate) fn new(journal: &Arc<Journal<WORDS>>, changes: Changes) -> Self {
        Self { at: journal.attach(changes), changes, journal: Arc::clone(journal) }
    }

    /// Reads the next change. A change that a worker is still writing is not returned yet.
    pub fn read(&mut self) -> JournalRead {
        loop {
            return match self.journal.read(&mut self.at) {
                Read::Content(words) => match StateEvent::unpack(&words) {
                    Some(event) => JournalRead::Change(event),
                    None => continue,
                },
                Read::Lost(changes) => JournalRead::Gap(changes),
                Read::Empty => JournalRead::End,
            };
        }
    }

    /// The number of changes from the cursor to the end.
    pub fn behind(&self) -> u64 {
        // Relaxed: a hint.
        self.journal.next.load(Ordering::Relaxed).saturating_sub(self.at)
    }
}

impl Drop for JournalReader {
    fn drop(&mut self) {
        self.journal.detach(self.changes);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    fn content(value: u64) -> [u64; WORDS] {
        std::array::from_fn(|at| value * WORDS as u64 + at as u64)
    }

    #[derive(Clone, Debug)]
    enum Op {
        Push(u32),
        Read(usize, u32),
    }

    fn op() -> impl Strategy<Value = Op> {
        let much = prop_oneof![6 => 0..50_u32, 1 => 0..SLOTS as u32 * 3];
        prop_oneof![
            much.clone().prop_map(Op::Push),
            (0..2_usize, much).prop_map(|(reader, changes)| Op::Read(reader, changes)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// The model keeps all changes. A reader gets them in order; it misses some only if it is more than the ring's length behind,
        /// and then knows how many.
        #[test]
        fn readers_get_every_change_or_the_size_of_the_gap(ops in prop::collection::vec(op(), 1..40)) {
            let journal = Journal::<WORDS>::new();
            let mut readers = [journal.attach(Changes::All), journal.attach(Changes::All)];
            let first = readers[0];
            let mut all = VecDeque::new();
            for op in ops {
                match op {
                    Op::Push(changes) => for _ in 0..changes {
                        let value = all.len() as u64;
                        journal.push(|| content(value));
                        all.push_back(value);
                    },
                    Op::Read(reader, changes) => for _ in 0..changes {
                        let at = &mut readers[reader];
                        let (before, behind) = ((*at - first) as usize, all.len() as u64 - (*at - first));
                        match journal.read(at) {
                            Read::Content(words) => prop_assert_eq!(words, content(all[before])),
                            Read::Empty => prop_assert_eq!(before, all.len()),
                            Read::Lost(missed) => {
                                prop_assert!(behind > SLOTS as u64, "{} behind", behind);
                                prop_assert_eq!(missed, behind - SLOTS as u64 + MARGIN);
                            }
                        }
                    },
                }
            }
        }
    }

    /// A writer that stays in a slot for a whole round costs the later position, not the reader's progress.
    #[test]
    fn a_writer_that_is_a_round_late_loses_one_change() {
        let journal = Journal::<WORDS>::new();
        let mut at = journal.attach(Changes::All);
        journal.push(|| {
            // In this call, the first writer is in its slot.
            for value in 1..=SLOTS as u64 {
                journal.push(|| content(value));
            }
            content(0)
        });
        // The first position is gone, and the position a round later was lost. The others are there.
        let mut found = Vec::new();
        let mut lost = 0;
        loop {
            match journal.read(&mut at) {
                Read::Content(words) => found.push(words),
                Read::Lost(changes) => lost += changes,
                Read::Empty => break,
            }
        }
        assert_eq!(lost, MARGIN + 2);
        assert_eq!(found.len() as u64 + lost, SLOTS as u64 + 1);
        assert_eq!(found.last(), Some(&content(SLOTS as u64 - 1)));
        journal.push(|| content(7));
        assert_eq!(journal.read(&mut at), Read::Content(content(7)));
    }

    #[test]
    fn a_reader_under_writers_gets_whole_changes() {
        let journal = Arc::new(Journal::<WORDS>::new());
        let mut at = journal.attach(Changes::All);
        const CHANGES: u64 = 3 * SLOTS as u64;
        let mut counted = 0;
        std::thread::scope(|scope| {
            for writer in 0..2 {
                let journal = &journal;
                scope.spawn(move || (0..CHANGES).for_each(|n| journal.push(|| content(2 * n + writer))));
            }
            let mut last = [None; 2];
            while counted < 2 * CHANGES {
                match journal.read(&mut at) {
                    Read::Content(words) => {
                        let value = words[0] / WORDS as u64;
                        assert_eq!(words, content(value));
                        let last = &mut last[value as usize % 2];
                        assert!(*last < Some(value), "the changes of a writer are in order");
                        *last = Some(value);
                        counted += 1;
                    }
                    Read::Lost(changes) => counted += changes,
                    Read::Empty => std::thread::yield_now(),
                }
            }
        });
        assert_eq!((counted, journal.read(&mut at)), (2 * CHANGES, Read::Empty));
    }

    #[test]
    fn without_a_reader_nothing_is_recorded() {
        let journal = Arc::new(Journal::<WORDS>::new());
        assert!(!journal.is_enabled());
        let reader = JournalReader::new(&journal, Changes::AfterBeginning);
        assert!(journal.is_enabled() && !journal.has_beginnings());
        let other = JournalReader::new(&journal, Changes::All);
        assert!(journal.is_enabled() && journal.has_beginnings());
        drop(other);
        assert!(journal.is_enabled() && !journal.has_beginnings());
        drop(reader);
        assert!(!journal.is_enabled());
    }
}
