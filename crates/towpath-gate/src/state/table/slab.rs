//! Where states are: slots that are made once and stay what they are, a state or room for one.
//!
//! What: a slot is one cache line of atomic words for IPv4, two for IPv6 (the second far from the first, so that those which
//! a lookup needs lie side by side), and a word beside it. Slots are numbered; they
//! come in chunks, each as large as all before it, so that a number says where its slot is and no slot ever moves.
//! Free slots are in a stack (Treiber 1986) whose head carries a count of pops, and before there is one, the next slot
//! that was never used is taken.
//!
//! Invariant: a slot belongs to whoever took it until its state is published in the index, and from then until it is
//! unlinked to everybody. Who unlinked it frees it when no worker can know it any more ([`crate::state::concurrent::epoch`]). Memory of a
//! chunk is never given back, so a word of a slot is always a word of a slot: who reads one too late reads nonsense and
//! not freed memory, and finds out by the key.
//!
//! Races: a pop reads the link of a slot that another pop may have taken meanwhile, which may be in use already and its
//! link nonsense: the count in the head differs then, and the exchange fails.

use std::sync::OnceLock;

use crate::state::concurrent::sync::{Apart, AtomicU64, Ordering};
use crate::state::table::memory::{Line, Lines, Pages, WORDS};

/// Slots of the first chunk, as a power of two.
#[cfg(not(loom))]
const FIRST_BITS: u32 = 12;
#[cfg(loom)]
const FIRST_BITS: u32 = 2;

/// Slots that there may be at most: a link has 31 bits.
pub(crate) const MOST: u64 = (1 << 31) - (1 << FIRST_BITS);

const CHUNKS: usize = (31 - FIRST_BITS) as usize;

/// The word beside a slot: in the low half the next state of the same flow (0: none, else slot + 1). In the high half
/// the tick in which it is to be looked at, and the mark that there is a state; or, without the mark, the link of the
/// list that the slot is in.
const OCCUPIED: u64 = 1 << 63;
const HIGH: u32 = 32;
const LOW: u64 = 0xffff_ffff;

/// Slots for keys of `N` words.
#[derive(Debug)]
pub(crate) struct Slab<const N: usize> {
    chunks: [OnceLock<Chunk>; CHUNKS],
    /// Slots ever taken.
    fresh: Apart<AtomicU64>,
    /// The stack of free slots: pops in the high half, slot + 1 in the low half.
    free: Apart<AtomicU64>,
    /// Slots whose memory was touched ahead of use.
    touched: Apart<AtomicU64>,
    pages: Pages,
}

#[derive(Debug)]
struct Chunk {
    /// The first line of each state.
    states: Lines,
    /// The second, of those that have two: apart, so that who only looks for states has the first ones side by side.
    cold: Lines,
    beside: Lines,
}

impl<const N: usize> Slab<N> {
    /// Lines of a slot.
    pub(crate) const LINES: usize = if N + 6 <= WORDS { 1 } else { 2 };

    pub(crate) fn new(pages: Pages) -> Self {
        const { assert!(N + 6 <= 2 * WORDS) };
        Self {
            chunks: std::array::from_fn(|_| OnceLock::new()),
            fresh: Apart(AtomicU64::new(0)),
            free: Apart(AtomicU64::new(0)),
            touched: Apart(AtomicU64::new(0)),
            pages,
        }
    }

    /// Takes a slot, for the caller alone. `None` when there are [`MOST`].
    pub(crate) fn take(&self) -> Option<u32> {
        // Acquire: pairs with the release of give(), so that its giver is done with the slot.
        let mut head = self.free.load(Ordering::Acquire);
        while head & LOW != 0 {
            let slot = (head & LOW) as u32 - 1;
            let next = self.beside(slot).load(Ordering::Relaxed) >> HIGH;
            let popped = (head >> HIGH).wrapping_add(1) << HIGH | next & !(OCCUPIED >> HIGH);
            match self.free.compare_exchange_weak(head, popped, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Some(slot),
                Err(now) => head = now,
            }
        }
        // Relaxed: a number that nobody else has; there is nothing in its slot yet.
        let slot = self.fresh.fetch_add(1, Ordering::Relaxed);
        if slot >= MOST {
            self.fresh.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        self.chunk(locate(slot as u32).0);
        Some(slot as u32)
    }

    /// Frees the slots of a list, whose links are set from `first` to `last`, and which nobody knows any more.
    pub(crate) fn give(&self, first: u32, last: u32) {
        let mut head = self.free.load(Ordering::Relaxed);
        loop {
            self.set_link(last, (head & LOW) as u32);
            let pushed = head & !LOW | u64::from(first + 1);
            // Release: pairs with the acquire of take().
            match self.free.compare_exchange_weak(head, pushed, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Slots that were ever in use: all that hold a state are below.
    #[inline]
    pub(crate) fn len(&self) -> u32 {
        // Relaxed: whoever must find a state in a slot has learnt of it otherwise.
        self.fresh.load(Ordering::Relaxed).min(MOST) as u32
    }

    /// The words of a slot's state.
    #[inline]
    pub(crate) fn words(&self, slot: u32) -> Words<'_, N> {
        let (chunk, at) = locate(slot);
        let Chunk { states, cold, .. } = self.chunk(chunk);
        let hot = states.line(at);
        Words { hot, cold: if Self::LINES == 1 { hot } else { cold.line(at) } }
    }

    /// The same of a slot that may be none: of what the index said while it changed.
    #[inline(always)]
    pub(crate) fn words_at(&self, slot: u32) -> Option<Words<'_, N>> {
        let (chunk, at) = locate(slot);
        let Chunk { states, cold, .. } = self.chunks.get(chunk)?.get()?;
        let hot = states.get(at)?;
        Some(Words { hot, cold: if Self::LINES == 1 { hot } else { cold.get(at)? } })
    }

    /// The slot of the next state of the same flow.
    #[inline]
    pub(crate) fn sibling(&self, slot: u32) -> Option<u32> {
        // Acquire: pairs with the release of set_sibling(), so that the state there is whole.
        ((self.beside(slot).load(Ordering::Acquire) & LOW) as u32).checked_sub(1)
    }

    /// Under the lock of the flow's lines.
    pub(crate) fn set_sibling(&self, slot: u32, sibling: Option<u32>) {
        let sibling = sibling.map_or(0, |slot| u64::from(slot) + 1);
        // Release: pairs with the acquire of sibling().
        self.change_beside(slot, |word| word & !LOW | sibling);
    }

    /// The tick in which the state is to be looked at; `None` when the slot holds no state.
    #[inline]
    pub(crate) fn tick(&self, slot: u32) -> Option<u32> {
        // Acquire: pairs with the release of occupy(), so that the state is whole.
        let word = self.beside(slot).load(Ordering::Acquire);
        (word & OCCUPIED != 0).then_some((word >> HIGH) as u32 & (u32::MAX >> 1))
    }

    /// Which of the slots from `first` on hold a state, one that is to be looked at in `tick` or before if there is one: a bit
    /// each, from the lowest, and how many slots these are, no more than `most` and 64.
    #[inline]
    pub(crate) fn looked_at(&self, first: u32, most: u32, tick: Option<u32>) -> (u64, u32) {
        let (chunk, at) = locate(first);
        let Chunk { states, beside, .. } = self.chunk(chunk);
        // Of one chunk: the next one's are elsewhere.
        let slots = (states.len() - at).min(most as usize).min(u64::BITS as usize);
        let mut found = 0;
        for slot in 0..slots {
            let at = at + slot;
            // Relaxed: a mere hint. Whoever acts on it looks again.
            let word = beside.line(at / WORDS).word(at % WORDS).load(Ordering::Relaxed);
            let is_due = tick.is_none_or(|tick| !tick_before(tick, (word >> HIGH) as u32));
            found |= u64::from(word & OCCUPIED != 0 && is_due) << slot;
        }
        (found, slots as u32)
    }

    /// Has what [`Slab::looked_at`] reads of these slots on its way to the cache, as far as they are in one chunk.
    #[inline]
    pub(crate) fn fetch_beside(&self, first: u32, count: u32) {
        let (chunk, at) = locate(first);
        let Some(Chunk { beside, .. }) = self.chunks.get(chunk).and_then(OnceLock::get) else { return };
        for line in at / WORDS..(at + count as usize).div_ceil(WORDS).min(beside.len()) {
            beside.line(line).prefetch();
        }
    }

    /// Says that the slot holds a state, which is to be looked at in `tick`.
    pub(crate) fn occupy(&self, slot: u32, tick: u32) {
        // Release: pairs with the acquire of tick().
        self.change_beside(slot, |word| OCCUPIED | u64::from(tick & (u32::MAX >> 1)) << HIGH | word & LOW);
    }

    /// Changes the tick from `before`, unless somebody else has.
    pub(crate) fn reschedule(&self, slot: u32, before: u32, tick: u32) {
        let word = self.beside(slot).load(Ordering::Relaxed);
        if word & OCCUPIED != 0 && (word >> HIGH) as u32 & (u32::MAX >> 1) == before {
            let new = OCCUPIED | u64::from(tick & (u32::MAX >> 1)) << HIGH | word & LOW;
            // Relaxed: a tick publishes nothing. When it fails, somebody has set another tick or a sibling; the state
            // is looked at once more than need be.
            let _ = self.beside(slot).compare_exchange(word, new, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Lowers the tick, if the slot holds a state.
    pub(crate) fn hasten(&self, slot: u32, tick: u32) {
        self.change_beside(slot, |word| {
            let sooner = tick & (u32::MAX >> 1);
            if word & OCCUPIED != 0 && tick_before(sooner, (word >> HIGH) as u32 & (u32::MAX >> 1)) {
                OCCUPIED | u64::from(sooner) << HIGH | word & LOW
            } else {
                word
            }
        });
    }

    /// Says that the slot's state is gone, and links the slot to another of the same list (0: none, else slot + 1). Who
    /// is still at the state finds its siblings as they were.
    pub(crate) fn set_link(&self, slot: u32, link: u32) {
        self.change_beside(slot, |word| u64::from(link) << HIGH | word & LOW);
    }

    /// Touches the memory of slots that may be needed next, up to `ahead` of those in use, and no more than `most` of
    /// them. Whether there is more to touch.
    pub(crate) fn prepare(&self, ahead: u32, most: u32) -> bool {
        let end = self.len().saturating_add(ahead).min(MOST as u32);
        let from = (self.touched.load(Ordering::Relaxed) as u32).max(self.len()).min(end);
        let to = from.saturating_add(most).min(end);
        let mut slot = from;
        while slot < to {
            let (chunk, at) = locate(slot);
            let Chunk { states, cold, beside } = self.chunk(chunk);
            let stop = states.len().min(at + (to - slot) as usize);
            states.touch(at..stop);
            cold.touch(at..stop);
            beside.touch(at / WORDS..stop.div_ceil(WORDS));
            slot += (stop - at) as u32;
        }
        // Relaxed: a number that only preparing looks at.
        self.touched.fetch_max(u64::from(to), Ordering::Relaxed);
        to < end
    }

    fn change_beside(&self, slot: u32, change: impl Fn(u64) -> u64) {
        let word = self.beside(slot);
        let mut now = word.load(Ordering::Relaxed);
        loop {
            let new = change(now);
            if new == now {
                return;
            }
            match word.compare_exchange_weak(now, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(other) => now = other,
            }
        }
    }

    #[inline]
    fn beside(&self, slot: u32) -> &AtomicU64 {
        let (chunk, at) = locate(slot);
        self.chunk(chunk).beside.line(at / WORDS).word(at % WORDS)
    }

    #[inline]
    fn chunk(&self, chunk: usize) -> &Chunk {
        match self.chunks[chunk].get() {
            Some(chunk) => chunk,
            None => self.make_chunk(chunk),
        }
    }

    #[cold]
    fn make_chunk(&self, chunk: usize) -> &Chunk {
        let slots = 1_usize << (FIRST_BITS as usize + chunk);
        self.chunks[chunk].get_or_init(|| Chunk {
            states: Lines::zeroed(slots, self.pages),
            cold: Lines::zeroed(if Self::LINES == 1 { 0 } else { slots }, self.pages),
            beside: Lines::zeroed(slots.div_ceil(WORDS), self.pages),
        })
    }
}

/// Whether tick `a` is before `b`, modulo 2^31.
#[inline]
pub(crate) fn tick_before(a: u32, b: u32) -> bool {
    a.wrapping_sub(b) & 1 << 30 != 0
}

/// The chunk of a slot, and its place there. Chunk c has 2^(FIRST_BITS + c) slots.
#[inline]
fn locate(slot: u32) -> (usize, usize) {
    // Wide, so that it is seen to be more than zero.
    let biased = u64::from(slot) + (1 << FIRST_BITS);
    let top = biased.ilog2();
    ((top - FIRST_BITS) as usize, (biased ^ 1 << top) as usize)
}

/// The words of one state. Those of the first line come first: the key, and what a lookup needs.
#[derive(Clone, Copy)]
pub(crate) struct Words<'a, const N: usize> {
    hot: &'a Line,
    cold: &'a Line,
}

impl<'a, const N: usize> Words<'a, N> {
    #[inline]
    pub(crate) fn word(self, at: usize) -> &'a AtomicU64 {
        if at < WORDS { self.hot.word(at) } else { self.cold.word(at - WORDS) }
    }

    /// Has the words of the first line on their way to the cache.
    #[inline(always)]
    pub(crate) fn prefetch_first(self) {
        self.hot.prefetch();
    }

    /// Has the words on their way to the cache.
    #[inline(always)]
    pub(crate) fn prefetch(self) {
        self.hot.prefetch();
        if Slab::<N>::LINES == 2 {
            self.cold.prefetch();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_slot_is_somewhere_else() {
        let first = 1_u32 << FIRST_BITS;
        let rows = [
            (0, (0, 0)),
            (first - 1, (0, first as usize - 1)),
            (first, (1, 0)),
            (3 * first - 1, (1, 2 * first as usize - 1)),
            (3 * first, (2, 0)),
            (MOST as u32 - 1, (CHUNKS - 1, (1 << 30) - 1)),
        ];
        for (slot, place) in rows {
            assert_eq!(locate(slot), place, "{slot}");
        }
    }

    #[test]
    fn what_is_given_is_taken_again() {
        let slab = Slab::<2>::new(Pages::Base);
        let slots: Vec<u32> = (0..5000).map(|_| slab.take().unwrap()).collect();
        assert_eq!(slots, (0..5000).collect::<Vec<u32>>());
        for pair in [[7, 9], [4999, 0]] {
            slab.set_link(pair[0], pair[1] + 1);
            slab.give(pair[0], pair[1]);
        }
        let again: Vec<u32> = (0..5).map(|_| slab.take().unwrap()).collect();
        assert_eq!(again, [4999, 0, 7, 9, 5000]);
    }

    #[test]
    fn the_word_beside_keeps_its_halves_apart() {
        let slab = Slab::<2>::new(Pages::Base);
        let slot = slab.take().unwrap();
        assert_eq!((slab.tick(slot), slab.sibling(slot)), (None, None));
        slab.set_sibling(slot, Some(3));
        slab.occupy(slot, 100);
        slab.hasten(slot, 200);
        assert_eq!((slab.tick(slot), slab.sibling(slot)), (Some(100), Some(3)));
        slab.hasten(slot, 50);
        slab.reschedule(slot, 49, 70);
        assert_eq!(slab.tick(slot), Some(50));
        slab.reschedule(slot, 50, 70);
        assert_eq!(slab.tick(slot), Some(70));
        slab.set_link(slot, 0);
        slab.hasten(slot, 1);
        assert_eq!((slab.tick(slot), slab.sibling(slot)), (None, Some(3)));
    }

    #[test]
    fn what_is_to_be_looked_at_is_found_by_its_tick_across_chunks() {
        let slab = Slab::<2>::new(Pages::Base);
        let first = 1_u32 << FIRST_BITS;
        (0..first + 100).for_each(|_| _ = slab.take().unwrap());
        let ticks = [
            (first - 70, 5),
            (first - 66, 9),
            (first - 3, 10),
            (first, 5),
            (first + 63, 10),
            (first + 64, 9),
        ];
        ticks.iter().for_each(|&(slot, tick)| slab.occupy(slot, tick));
        slab.set_sibling(first + 1, Some(7));
        for (tick, last) in [(Some(4), 4), (Some(8), 5), (Some(9), 9), (Some(10), 10), (None, 10)] {
            let (mut found, mut slot) = (Vec::new(), first - 70);
            while slot < first + 80 {
                let (bits, slots) = slab.looked_at(slot, first + 80 - slot, tick);
                assert!((1..=64).contains(&slots));
                found.extend((0..64).filter(|bit| bits >> bit & 1 != 0).map(|bit| slot + bit));
                slot += slots;
            }
            let is_due = ticks.iter().filter(|&&(_, tick)| tick <= last).map(|&(slot, _)| slot);
            assert!(found.iter().copied().eq(is_due), "{tick:?}: {found:?}");
        }
        slab.fetch_beside(first - 1, 1000);
        slab.fetch_beside(MOST as u32 - 1, 1000);
    }

    #[test]
    fn preparing_is_bounded_and_ends() {
        let slab = Slab::<6>::new(Pages::Base);
        let mut rounds = 0;
        while slab.prepare(20_000, 1000) {
            rounds += 1;
        }
        assert_eq!(rounds, 19);
        assert!(!slab.prepare(20_000, 1000));
    }
}
