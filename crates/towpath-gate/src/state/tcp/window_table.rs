//! The TCP windows of the states with strict tracking: six words each, beside the slots of one address family.
//!
//! What: a window is larger than a word. A packet works on a copy and writes back each word that it changes by
//! compare-and-exchange. If another packet changed one of them meanwhile, it starts again with the current words. There is no
//! lock: packets of one connection do not wait for each other.
//!
//! Invariant: in an established connection every number only grows, modulo 2^32. A packet that has written back some words
//! and starts again has the same effect once more, so that concurrent packets have the effect of some serial order. While
//! the connection opens, the word that marks a side as known is written last: until then, other packets see a side that is
//! not known.
//!
//! Races: a reader loads the words that mark sides as known first (acquire), then the numbers. If it sees a side marked, the
//! numbers stored before that mark (release) are visible. If it does not, its compare-and-exchange of the word fails, and it
//! starts again.
//!
//! Words are allocated in pieces for consecutive slots, when the first state with strict tracking takes one of them. A worker
//! that reads the window of a state that is gone reads its last words: the slot is not reused before the worker's next
//! [quiescent state](crate::state::concurrent::epoch).

use std::sync::OnceLock;

use super::window::{WORDS, Window};
use crate::state::concurrent::sync::{AtomicU64, Ordering};

/// Slots of a piece, and pieces of a row, as powers of two.
#[cfg(not(loom))]
const PIECE_BITS: u32 = 12;
#[cfg(loom)]
const PIECE_BITS: u32 = 1;
const ROW_BITS: u32 = 10;
/// Rows for slot numbers of 31 bits.
const ROWS: usize = 1 << 9;

/// The words of one window, in a separate cache line. The words that mark sides as known come last.
#[derive(Debug)]
#[repr(align(64))]
struct Words([AtomicU64; WORDS]);

type Piece = Box<[Words]>;
type Row = Box<[OnceLock<Piece>]>;

/// The windows of one address family by slot.
#[derive(Debug)]
pub(crate) struct WindowTable(Box<[OnceLock<Row>]>);

impl WindowTable {
    pub(crate) fn new() -> Self {
        Self((0..ROWS).map(|_| OnceLock::new()).collect())
    }

    /// Sets the window of a slot that only the caller knows.
    pub(crate) fn insert(&self, slot: u32, window: Window) {
        let (row, piece, at) = locate(slot);
        let row = self.0[row].get_or_init(|| (0..1 << ROW_BITS).map(|_| OnceLock::new()).collect());
        let words = || Words(std::array::from_fn(|_| AtomicU64::new(0)));
        let piece = row[piece].get_or_init(|| std::iter::repeat_with(words).take(1 << PIECE_BITS).collect());
        for (word, value) in piece[at].0.iter().zip(window.words()) {
            // Relaxed: the index publishes the state.
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Applies `work` to a copy of the window and writes back what it changed, repeatedly until no other packet interferes.
    /// Returns `None` when the slot has no window.
    pub(crate) fn with<T>(&self, slot: u32, work: impl Fn(&mut Window) -> T) -> Option<T> {
        let (row, piece, at) = locate(slot);
        let words = self.0[row].get()?[piece].get()?.get(at)?;
        loop {
            let mut before = [0; WORDS];
            // From the last word, which marks a side as known. Acquire: pairs with the release below.
            for at in (0..WORDS).rev() {
                before[at] = words.0[at].load(Ordering::Acquire);
            }
            let mut window = Window::from_words(before);
            let done = work(&mut window);
            let after = window.words();
            let write = |at: usize| {
                // Release: pairs with the acquire above; the numbers of a side are visible before its mark.
                let exchange = |word: &AtomicU64| {
                    word.compare_exchange(before[at], after[at], Ordering::Release, Ordering::Relaxed)
                };
                before[at] == after[at] || exchange(&words.0[at]).is_ok()
            };
            if (0..WORDS).all(write) {
                return Some(done);
            }
        }
    }
}

/// The row, the piece within the row, and the position within the piece.
fn locate(slot: u32) -> (usize, usize, usize) {
    let piece = slot >> PIECE_BITS;
    let mask = |bits: u32| (1 << bits) - 1;
    (
        (piece >> ROW_BITS) as usize % ROWS,
        (piece & mask(ROW_BITS)) as usize,
        (slot & mask(PIECE_BITS)) as usize,
    )
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::state::{Direction, Segment};

    #[test]
    fn each_slot_has_its_window() {
        let (table, syn) = (WindowTable::new(), Segment { tcp_flags: 2, tcp_seq: 7, ..Segment::default() });
        assert_eq!(table.with(0, |_| ()), None);
        for slot in [0, 1, (1 << PIECE_BITS) - 1, 1 << 30] {
            let mut window = Window::default();
            table.insert(slot, window);
            window.segment(Direction::Forward, &syn);
            table.with(slot, |window| window.segment(Direction::Forward, &syn)).unwrap();
            assert_eq!(table.with(slot, |window| *window), Some(window), "{slot}");
        }
        assert_eq!(table.with(2, |window| *window), Some(Window::default()));
    }
}
