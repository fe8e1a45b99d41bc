//! A line of the index: its layout, its lock and its entries. [`index`](super::index) has the invariants.

use crate::state::concurrent::sync::{AtomicU64, Ordering, SPINS, wait};
use crate::state::table::memory::{Line, WORDS, equal_tags};

/// Entries per line.
pub(crate) const ENTRIES: usize = 10;

/// In word 0, beside two tags: the line is locked.
pub(super) const LOCKED: u64 = 1;
/// In word 0: the line's entries are in the next index.
pub(super) const MIGRATED: u64 = 2;
/// In word 0, the bits from this one up to the tags: the number of entries of the line's flows in other lines.
pub(super) const ELSEWHERE: u64 = 4;
/// The part of word 0 before the tags.
pub(super) const CONTROL: u64 = 0xffff_ffff;

/// The tags are the 16-bit fields 2 to 11 of the first three words. The slot numbers are the halves of the last five
/// words.
pub(super) const TAGS_IN_WORD: usize = 4;
pub(super) const FIRST_TAG: usize = 2;
pub(super) const TAG_WORDS: usize = 3;

/// Locks a line. Returns its word 0 as it was. Counts in `preempted` if the lock was not free after [`SPINS`] turns.
pub(super) fn lock(line: &Line, preempted: &AtomicU64) -> u64 {
    let word = line.word(0);
    let mut turns = 0;
    loop {
        let now = word.load(Ordering::Relaxed);
        // Acquire: pairs with the release of unlock(). The line is visible as the last writer left it.
        if now & LOCKED == 0
            && word.compare_exchange_weak(now, now | LOCKED, Ordering::Acquire, Ordering::Relaxed).is_ok()
        {
            return now;
        }
        wait(&mut turns);
        if turns == SPINS {
            // Relaxed: a count.
            preempted.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Unlocks a line and sets `marks`.
pub(super) fn unlock(line: &Line, marks: u64) {
    let word = line.word(0);
    // Relaxed: only the holder of the lock writes it.
    let now = word.load(Ordering::Relaxed);
    // Release: pairs with the acquire of lock(), and of readers of the marks.
    word.store(now & !LOCKED | marks, Ordering::Release);
}

/// Returns true if the line counts entries in other lines.
#[inline(always)]
pub(super) fn is_elsewhere(line: &Line) -> bool {
    // Acquire: pairs with the release of unlock() and count_elsewhere(). A reader that sees a count lowered, or a line migrated,
    // sees what came before it.
    line.word(0).load(Ordering::Acquire) & CONTROL >= ELSEWHERE
}

/// The entry with this tag whose slot `is` accepts, and the slot.
#[inline(always)]
pub(super) fn find(line: &Line, tag: u16, is: impl Fn(u32) -> bool) -> Option<(usize, u32)> {
    for at in 0..TAG_WORDS {
        let mut matches = matching_in_word(line, at, tag);
        while matches != 0 {
            let entry = at * TAGS_IN_WORD + matches.trailing_zeros() as usize / 16 - FIRST_TAG;
            let slot = slot(line, entry);
            if is(slot) {
                return Some((entry, slot));
            }
            matches &= matches - 1;
        }
    }
    None
}

/// The slot of some entry with this tag. Branch-free in the word that holds the tag, which is unpredictable.
#[inline(always)]
pub(super) fn hint(line: &Line, tag: u16) -> Option<u32> {
    let matches = matching_tags(line, tag);
    if matches == 0 {
        return None;
    }
    Some(slot(line, matches.trailing_zeros() as usize - FIRST_TAG))
}

/// The positions of `tag` in all words, a bit each.
#[inline(always)]
pub(super) fn matching_tags(line: &Line, tag: u16) -> u32 {
    // Acquire: as in matching_in_word().
    let words: [u64; TAG_WORDS] = std::array::from_fn(|at| line.word(at).load(Ordering::Acquire));
    // The first fields of word 0 are not tags.
    equal_tags(words, tag) & !((1 << FIRST_TAG) - 1)
}

/// The positions of `tag` in word `at`: the top bit of each field that equals it.
#[inline(always)]
pub(super) fn matching_in_word(line: &Line, at: usize, tag: u16) -> u64 {
    const LOW: u64 = 0x7fff_7fff_7fff_7fff;
    const EVERY: u64 = 0x0001_0001_0001_0001;
    // Acquire: pairs with the release of set_tag(). The entry's slot number is visible.
    let word = line.word(at).load(Ordering::Acquire);
    let differ = word ^ (u64::from(tag) * EVERY);
    // A field's top bit is set, by carry or by itself, unless the field is zero. No carry leaves its field.
    let zero = !(((differ & LOW) + LOW) | differ) & !LOW;
    // The first fields of word 0 are not tags.
    if at == 0 { zero & !0xffff_ffff } else { zero }
}

#[inline(always)]
pub(super) fn slot(line: &Line, entry: usize) -> u32 {
    // Acquire: pairs with the release of set_slot(). The state in the slot is visible as a whole.
    let word = line.word(TAG_WORDS + entry / 2).load(Ordering::Acquire);
    (word >> (entry % 2 * 32)) as u32
}

/// The caller holds the line's lock.
pub(super) fn set_slot(line: &Line, entry: usize, slot: u32) {
    let (word, shift) = (line.word(TAG_WORDS + entry / 2), entry % 2 * 32);
    let now = word.load(Ordering::Relaxed);
    // Release: pairs with the acquire of slot().
    word.store(now & !(0xffff_ffff << shift) | u64::from(slot) << shift, Ordering::Release);
}

pub(super) fn tag(line: &Line, entry: usize) -> u16 {
    let at = entry + FIRST_TAG;
    (line.word(at / TAGS_IN_WORD).load(Ordering::Relaxed) >> (at % TAGS_IN_WORD * 16)) as u16
}

/// The caller holds the line's lock.
pub(super) fn set_tag(line: &Line, entry: usize, tag: u16) {
    let at = entry + FIRST_TAG;
    let (word, shift) = (line.word(at / TAGS_IN_WORD), at % TAGS_IN_WORD * 16);
    let now = word.load(Ordering::Relaxed);
    // Release: pairs with the acquire of matching_in_word() and matching_tags().
    word.store(now & !(0xffff << shift) | u64::from(tag) << shift, Ordering::Release);
}

/// The number of used entries in the line.
pub(super) fn used(line: &Line) -> u32 {
    (0..ENTRIES).map(|entry| u32::from(tag(line, entry) != 0)).sum()
}

const _: () = assert!(FIRST_TAG + ENTRIES == TAG_WORDS * TAGS_IN_WORD && TAG_WORDS + ENTRIES / 2 == WORDS);
const _: () = assert!(CONTROL == (1 << (FIRST_TAG * 16)) - 1 && LOCKED < MIGRATED && MIGRATED < ELSEWHERE);
