//! The sequence windows of the states with strict tracking: six words for each, beside the slots.
//!
//! What: a window is more than a word. A packet works on a copy and puts back the words that it changes, each by compare
//! and exchange; when one of them was changed meanwhile, it begins again with what is there now. No lock: one packet of
//! a connection does not wait for another.
//!
//! Invariant: in an established connection every word only ever grows, each number in it modulo 2^32, so a packet that
//! has put back some words and begins again does the same once more, and what two packets do at once is what they would
//! do one after the other. While a connection opens, what makes a side known is put back last: until then others see a
//! side that was not heard of.
//!
//! The words come in pieces for as many slots as follow each other, made when the first state with strict tracking is in
//! one of them. Whoever looks at the window of a state that is gone sees the old one or that of nobody: the slot is not
//! used again before that ([`crate::state::concurrent::epoch`]).

use std::sync::OnceLock;

use crate::state::concurrent::sync::{AtomicU64, Ordering};
use crate::state::tcp::window::{WORDS, Window};

/// Slots of a piece, and pieces of a row, as powers of two.
#[cfg(not(loom))]
const PIECE_BITS: u32 = 12;
#[cfg(loom)]
const PIECE_BITS: u32 = 1;
const ROW_BITS: u32 = 10;
/// Rows for slots of 31 bits.
const ROWS: usize = 1 << 9;

/// The words of one window, with what makes a side known last; of a cache line so that two never share one.
#[derive(Debug)]
#[repr(align(64))]
struct Words([AtomicU64; WORDS]);

type Piece = Box<[Words]>;
type Row = Box<[OnceLock<Piece>]>;

/// The windows of one family by slot.
#[derive(Debug)]
struct Rows(Box<[OnceLock<Row>]>);

/// The windows of both families.
#[derive(Debug)]
pub(crate) struct WindowTable([Rows; 2]);

impl WindowTable {
    pub(crate) fn new() -> Self {
        let rows = || Rows((0..ROWS).map(|_| OnceLock::new()).collect());
        Self([rows(), rows()])
    }

    /// Sets the window of a state that only the caller knows.
    pub(crate) fn insert(&self, v6: bool, slot: u32, window: Window) {
        let words = self.0[usize::from(v6)].make(slot);
        for (word, value) in words.0.iter().zip(window.words()) {
            // Relaxed: the index publishes the state.
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Does something with a window, perhaps several times, until it is done as if nobody else had been there. `None`
    /// when there is none.
    pub(crate) fn with<T>(&self, v6: bool, slot: u32, work: impl Fn(&mut Window) -> T) -> Option<T> {
        let words = self.0[usize::from(v6)].get(slot)?;
        loop {
            let mut before = [0; WORDS];
            // The words that make sides known are read first. Acquire: pairs with the release below.
            for at in (0..WORDS).rev() {
                before[at] = words.0[at].load(Ordering::Acquire);
            }
            let mut window = Window::from_words(before);
            let done = work(&mut window);
            let after = window.words();
            let put = |at: usize| {
                // Release: pairs with the acquire above, so that who sees a side known sees its numbers.
                let exchange = |word: &AtomicU64| {
                    word.compare_exchange(before[at], after[at], Ordering::Release, Ordering::Relaxed)
                };
                before[at] == after[at] || exchange(&words.0[at]).is_ok()
            };
            if (0..WORDS).all(put) {
                return Some(done);
            }
        }
    }
}

impl Rows {
    fn get(&self, slot: u32) -> Option<&Words> {
        let (row, piece, at) = locate(slot);
        self.0[row].get()?[piece].get()?.get(at)
    }

    fn make(&self, slot: u32) -> &Words {
        let (row, piece, at) = locate(slot);
        let row = self.0[row].get_or_init(|| (0..1 << ROW_BITS).map(|_| OnceLock::new()).collect());
        let words = || Words(std::array::from_fn(|_| AtomicU64::new(0)));
        &row[piece].get_or_init(|| std::iter::repeat_with(words).take(1 << PIECE_BITS).collect())[at]
    }
}

fn locate(slot: u32) -> (usize, usize, usize) {
    let piece = slot >> PIECE_BITS;
    let mask = |bits: u32| (1 << bits) - 1;
    (
        (piece >> ROW_BITS) as usize % ROWS,
        (piece & mask(ROW_BITS)) as usize,
        (slot & mask(PIECE_BITS)) as usize,
    )
}
