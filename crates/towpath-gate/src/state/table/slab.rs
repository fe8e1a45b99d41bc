//! Slots: fixed memory for states. A slot is allocated once and then holds a state or is free.
//!
//! What: a slot is one cache line of atomic words for IPv4 and two for IPv6, and one word of metadata. The second
//! lines are in a separate allocation, so that the lines that a lookup needs are adjacent. Slots are numbered.
//! They come in chunks, each as large as all before it, so that the number determines the address and no slot ever
//! moves. Free slots form a stack (Treiber 1986) whose head contains a count of pops. When it is empty, the next slots
//! that were never used are taken. Workers take and free slots in batches ([`super::slot_cache`]).
//!
//! Invariant: a slot belongs to the worker that allocated it until its state is linked in the index, and to all
//! workers from then until it is unlinked. The worker that unlinked it frees it when no worker can hold it any more
//! ([`crate::state::concurrent::epoch`]). The memory of a chunk is never freed: a reader that is too late reads words
//! of another state, and notices by the key.
//!
//! Races: a pop reads the links of the top slots, which another pop may have taken meanwhile. The slots may be in use
//! and their links meaningless (ABA). The count in the head has changed in that case, and the compare-and-exchange
//! fails.

use std::ops::Range;
use std::sync::OnceLock;

use crate::state::concurrent::sync::{Apart, AtomicU64, Ordering};
use crate::state::table::memory::{Line, Lines, Pages, WORDS};

/// Slots of the first chunk, as a power of two.
#[cfg(not(loom))]
const FIRST_BITS: u32 = 12;
#[cfg(loom)]
const FIRST_BITS: u32 = 2;

/// Maximum number of slots: a link has 31 bits.
pub(crate) const MAX_SLOTS: u64 = (1 << 31) - (1 << FIRST_BITS);

const CHUNKS: usize = (31 - FIRST_BITS) as usize;

/// The metadata word of a slot. Low half: the next state of the same flow (0: none, else slot + 1). High half: the
/// tick at which the sweep must look at the state, with this bit set; or, without a state, the link of the list that
/// the slot is in.
const OCCUPIED: u64 = 1 << 63;
const HIGH: u32 = 32;
const LOW: u64 = 0xffff_ffff;

/// Slots that are linked from `first` to `last`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotList {
    pub(crate) first: u32,
    pub(crate) last: u32,
    pub(crate) slots: u64,
}

/// Slots that the caller alone has.
#[derive(Clone, Debug)]
pub(crate) enum Allocated {
    /// Slots that were used before.
    Freed(SlotList),
    /// Slots that were never used. They are not linked.
    Fresh(Range<u32>),
}

/// Slots for states with keys of `N` words.
#[derive(Debug)]
pub(crate) struct Slab<const N: usize> {
    chunks: [OnceLock<Chunk>; CHUNKS],
    /// The number of slots ever used.
    used: Apart<AtomicU64>,
    /// The stack of free slots: the count of pops in the high half, slot + 1 in the low half.
    free: Apart<AtomicU64>,
    /// The number of slots whose memory was prefaulted.
    prefaulted: Apart<AtomicU64>,
    pub(crate) pages: Pages,
}

#[derive(Debug)]
struct Chunk {
    /// The first line of each state.
    states: Lines,
    /// The second line of IPv6 states. Separate, so that the lines that lookups read are adjacent.
    cold: Lines,
    meta: Lines,
}

impl<const N: usize> Slab<N> {
    /// Lines of a slot.
    pub(crate) const LINES: usize = if N + 6 <= WORDS { 1 } else { 2 };

    pub(crate) fn new(pages: Pages) -> Self {
        const { assert!(N + 6 <= 2 * WORDS) };
        Self {
            chunks: std::array::from_fn(|_| OnceLock::new()),
            used: Apart(AtomicU64::new(0)),
            free: Apart(AtomicU64::new(0)),
            prefaulted: Apart(AtomicU64::new(0)),
            pages,
        }
    }

    /// Allocates up to `max` slots for the caller alone. Returns `None` when there are [`MAX_SLOTS`].
    pub(crate) fn alloc(&self, max: u32) -> Option<Allocated> {
        self.pop(max).map(Allocated::Freed).or_else(|| self.never_used(max).map(Allocated::Fresh))
    }

    /// Takes up to `max` free slots that were used before. Returns `None` if there are none.
    pub(crate) fn pop(&self, max: u32) -> Option<SlotList> {
        // Acquire: pairs with the release of free(). The last owner has finished with the slots.
        let mut head = self.free.load(Ordering::Acquire);
        while head & LOW != 0 {
            let first = (head & LOW) as u32 - 1;
            let mut list = SlotList { first, last: first, slots: 1 };
            let mut next = self.link(first);
            while let Some(slot) = next.filter(|_| list.slots < max.into()) {
                (list.last, list.slots) = (slot, list.slots + 1);
                next = self.link(slot);
            }
            let next = next.map_or(0, |slot| u64::from(slot) + 1);
            let popped = (head >> HIGH).wrapping_add(1) << HIGH | next;
            match self.free.compare_exchange_weak(head, popped, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Some(list),
                Err(now) => head = now,
            }
        }
        None
    }

    fn never_used(&self, max: u32) -> Option<Range<u32>> {
        // Few in a small table: it has hardly more slots than states. Relaxed: the numbers are unique, and their slots were
        // never used.
        let some = (self.used.load(Ordering::Relaxed) / 8).clamp(1, max.into());
        let first = self.used.fetch_add(some, Ordering::Relaxed);
        if first + some > MAX_SLOTS {
            self.used.fetch_sub(some, Ordering::Relaxed);
            return None;
        }
        let (first, end) = (first as u32, (first + some) as u32);
        for slot in [first, end - 1] {
            self.chunk(locate(slot).0);
        }
        Some(first..end)
    }

    /// Allocates one slot.
    #[cfg(test)]
    pub(crate) fn alloc_one(&self) -> Option<u32> {
        Some(match self.alloc(1)? {
            Allocated::Freed(list) => list.first,
            Allocated::Fresh(slots) => slots.start,
        })
    }

    /// Frees the slots of a list that no worker holds.
    pub(crate) fn free(&self, SlotList { first, last, .. }: SlotList) {
        // Relaxed: the exchange below checks it.
        let mut head = self.free.load(Ordering::Relaxed);
        loop {
            self.set_link(last, (head & LOW) as u32);
            let pushed = head & !LOW | u64::from(first + 1);
            // Release: pairs with the acquire of alloc().
            match self.free.compare_exchange_weak(head, pushed, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Makes the slots from `len` on, which the caller alone has, slots that were never used; there were `before` slots. Returns
    /// false, without effect, if another worker has taken more slots.
    pub(crate) fn truncate(&self, len: u32, before: u32) -> bool {
        // Release: pairs with no acquire. The next user of these slots gets their numbers by an addition to this one, and their
        // words are atomic: it reads none of the old ones.
        let fell =
            self.used.compare_exchange(before.into(), len.into(), Ordering::Release, Ordering::Relaxed);
        if fell.is_ok() {
            self.prefaulted.fetch_min(len.into(), Ordering::Relaxed);
        }
        fell.is_ok()
    }

    /// The number of slots that were prefaulted and never used.
    pub(crate) fn prefaulted(&self) -> u64 {
        // Relaxed: a statistic.
        self.prefaulted.load(Ordering::Relaxed).saturating_sub(self.len().into())
    }

    /// Gives the memory of slots, which the caller alone has, back to the system. With `meta`, also that of their metadata: they
    /// must then be in no list.
    pub(crate) fn release(&self, slots: Range<u32>, meta: bool) {
        let mut slot = slots.start;
        while slot < slots.end {
            let (chunk, at) = locate(slot);
            let chunk = self.chunk(chunk);
            let stop = chunk.states.len().min(at + (slots.end - slot) as usize);
            chunk.states.release(at..stop);
            if Self::LINES == 2 {
                chunk.cold.release(at..stop);
            }
            if meta {
                chunk.meta.release(at.div_ceil(WORDS)..stop / WORDS);
            }
            slot += (stop - at) as u32;
        }
    }

    /// Touches the memory of slots, so that the system allocates it now.
    pub(crate) fn fault_in(&self, slots: Range<u32>) {
        let mut slot = slots.start;
        while slot < slots.end {
            let (chunk, at) = locate(slot);
            let Chunk { states, cold, meta } = self.chunk(chunk);
            let stop = states.len().min(at + (slots.end - slot) as usize);
            states.prefault(at..stop);
            cold.prefault(at..stop);
            meta.prefault(at / WORDS..stop.div_ceil(WORDS));
            slot += (stop - at) as u32;
        }
    }

    /// The slot that follows a slot in its list. Meaningless if another worker has the slot.
    #[inline]
    pub(crate) fn link(&self, slot: u32) -> Option<u32> {
        // Relaxed: the caller owns the slot, or its exchange checks that the slot was not taken.
        let word = self.meta(slot).load(Ordering::Relaxed);
        if word & OCCUPIED != 0 { None } else { ((word >> HIGH) as u32).checked_sub(1) }
    }

    /// The number of slots ever used. All slots with a state are below it.
    #[inline]
    pub(crate) fn len(&self) -> u32 {
        // Relaxed: a worker that must find the state in a slot has acquired the slot number elsewhere.
        self.used.load(Ordering::Relaxed).min(MAX_SLOTS) as u32
    }

    /// The words of a slot.
    #[inline]
    pub(crate) fn words(&self, slot: u32) -> Words<'_, N> {
        let (chunk, at) = locate(slot);
        let Chunk { states, cold, .. } = self.chunk(chunk);
        let hot = states.line(at);
        Words { hot, cold: if Self::LINES == 1 { hot } else { cold.line(at) } }
    }

    /// As [`Slab::words`], for a slot number read while the index changed: `None` if there is no such slot.
    #[inline(always)]
    pub(crate) fn try_words(&self, slot: u32) -> Option<Words<'_, N>> {
        let (chunk, at) = locate(slot);
        let Chunk { states, cold, .. } = self.chunks.get(chunk)?.get()?;
        let hot = states.get(at)?;
        Some(Words { hot, cold: if Self::LINES == 1 { hot } else { cold.get(at)? } })
    }

    /// The slot of the next state of the same flow.
    #[inline]
    pub(crate) fn sibling(&self, slot: u32) -> Option<u32> {
        // Acquire: pairs with the release of set_sibling(). The state there is visible as a whole.
        ((self.meta(slot).load(Ordering::Acquire) & LOW) as u32).checked_sub(1)
    }

    /// The caller holds the lock of the flow's lines.
    pub(crate) fn set_sibling(&self, slot: u32, sibling: Option<u32>) {
        let sibling = sibling.map_or(0, |slot| u64::from(slot) + 1);
        // Release: pairs with the acquire of sibling().
        self.change_meta(slot, |word| word & !LOW | sibling);
    }

    /// The tick at which the sweep must look at the state, or `None` if the slot holds no state.
    #[inline]
    pub(crate) fn due_tick(&self, slot: u32) -> Option<u32> {
        // Acquire: pairs with the release of set_occupied(). The state is visible as a whole.
        let word = self.meta(slot).load(Ordering::Acquire);
        (word & OCCUPIED != 0).then_some((word >> HIGH) as u32 & (u32::MAX >> 1))
    }

    /// Returns true if the slot holds a state.
    #[inline]
    pub(crate) fn is_occupied(&self, slot: u32) -> bool {
        self.due_tick(slot).is_some()
    }

    /// Examines up to `max` slots from `first` on, 64 at most and of one chunk. Returns a bit for each slot that
    /// holds a state which is due at `tick`, or any state if `tick` is `None`; and the number of slots examined.
    #[inline]
    pub(crate) fn due_mask(&self, first: u32, max: u32, tick: Option<u32>) -> (u64, u32) {
        let (chunk, at) = locate(first);
        let Chunk { states, meta, .. } = self.chunk(chunk);
        // Slots of one chunk are adjacent.
        let slots = (states.len() - at).min(max as usize).min(u64::BITS as usize);
        let mut found = 0;
        for slot in 0..slots {
            let at = at + slot;
            // Relaxed: a hint. The caller checks it.
            let word = meta.line(at / WORDS).word(at % WORDS).load(Ordering::Relaxed);
            let is_due = tick.is_none_or(|tick| !tick_before(tick, (word >> HIGH) as u32));
            found |= u64::from(word & OCCUPIED != 0 && is_due) << slot;
        }
        (found, slots as u32)
    }

    /// Prefetches what [`Slab::due_mask`] reads of these slots, as far as they are in one chunk.
    #[inline]
    pub(crate) fn prefetch_meta(&self, first: u32, count: u32) {
        let (chunk, at) = locate(first);
        let Some(Chunk { meta, .. }) = self.chunks.get(chunk).and_then(OnceLock::get) else { return };
        for line in at / WORDS..(at + count as usize).div_ceil(WORDS).min(meta.len()) {
            meta.line(line).prefetch();
        }
    }

    /// Marks the slot as holding a state that the sweep must look at in `tick`.
    pub(crate) fn set_occupied(&self, slot: u32, tick: u32) {
        // Release: pairs with the acquire of due_tick().
        self.change_meta(slot, |word| OCCUPIED | u64::from(tick & (u32::MAX >> 1)) << HIGH | word & LOW);
    }

    /// Changes the tick, unless another worker has changed it from `before`.
    pub(crate) fn reschedule(&self, slot: u32, before: u32, tick: u32) {
        // Relaxed: the exchange below checks it.
        let word = self.meta(slot).load(Ordering::Relaxed);
        if word & OCCUPIED != 0 && (word >> HIGH) as u32 & (u32::MAX >> 1) == before {
            let new = OCCUPIED | u64::from(tick & (u32::MAX >> 1)) << HIGH | word & LOW;
            // Relaxed: a tick publishes nothing. If the exchange fails, another worker has set a tick or a sibling,
            // and the state is looked at once more than necessary.
            let _ = self.meta(slot).compare_exchange(word, new, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Lowers the tick, if the slot holds a state.
    pub(crate) fn lower_tick(&self, slot: u32, tick: u32) {
        self.change_meta(slot, |word| {
            let sooner = tick & (u32::MAX >> 1);
            if word & OCCUPIED != 0 && tick_before(sooner, (word >> HIGH) as u32 & (u32::MAX >> 1)) {
                OCCUPIED | u64::from(sooner) << HIGH | word & LOW
            } else {
                word
            }
        });
    }

    /// Marks the slot as holding no state and links it to another slot of the same list (0: none, else slot + 1). The
    /// sibling stays, for readers that are still at the state.
    pub(crate) fn set_link(&self, slot: u32, link: u32) {
        self.change_meta(slot, |word| u64::from(link) << HIGH | word & LOW);
    }

    /// Prefaults the memory of up to `max` slots, of the `ahead` slots that follow those in use. Returns true if
    /// more remain.
    pub(crate) fn prefault(&self, ahead: u32, max: u32) -> bool {
        let end = self.len().saturating_add(ahead).min(MAX_SLOTS as u32);
        // Relaxed, here and below: only this function uses the number.
        let from = (self.prefaulted.load(Ordering::Relaxed) as u32).max(self.len()).min(end);
        let to = from.saturating_add(max).min(end);
        self.fault_in(from..to);
        self.prefaulted.fetch_max(u64::from(to), Ordering::Relaxed);
        to < end
    }

    /// Changes the metadata word of a slot by compare-and-exchange: several workers change its halves.
    fn change_meta(&self, slot: u32, change: impl Fn(u64) -> u64) {
        let word = self.meta(slot);
        // Relaxed: the exchange below checks it.
        let mut now = word.load(Ordering::Relaxed);
        loop {
            let new = change(now);
            if new == now {
                return;
            }
            // Release: pairs with the acquire of sibling() and due_tick().
            match word.compare_exchange_weak(now, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(other) => now = other,
            }
        }
    }

    #[inline]
    fn meta(&self, slot: u32) -> &AtomicU64 {
        let (chunk, at) = locate(slot);
        self.chunk(chunk).meta.line(at / WORDS).word(at % WORDS)
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
            meta: Lines::zeroed(slots.div_ceil(WORDS), self.pages),
        })
    }
}

/// Returns true if tick `a` is before `b`, modulo 2^31.
#[inline]
pub(crate) fn tick_before(a: u32, b: u32) -> bool {
    a.wrapping_sub(b) & 1 << 30 != 0
}

/// The chunk of a slot, and the position within it. Chunk c has 2^(FIRST_BITS + c) slots.
#[inline]
fn locate(slot: u32) -> (usize, usize) {
    // As u64, so that the compiler sees that it is not zero.
    let biased = u64::from(slot) + (1 << FIRST_BITS);
    let top = biased.ilog2();
    ((top - FIRST_BITS) as usize, (biased ^ 1 << top) as usize)
}

/// The words of one state. The first line has the key and what a lookup needs.
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

    /// Prefetches the first line.
    #[inline(always)]
    pub(crate) fn prefetch_first(self) {
        self.hot.prefetch();
    }

    /// Prefetches all lines.
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
    fn each_slot_has_its_place() {
        let first = 1_u32 << FIRST_BITS;
        let rows = [
            (0, (0, 0)),
            (first - 1, (0, first as usize - 1)),
            (first, (1, 0)),
            (3 * first - 1, (1, 2 * first as usize - 1)),
            (3 * first, (2, 0)),
            (MAX_SLOTS as u32 - 1, (CHUNKS - 1, (1 << 30) - 1)),
        ];
        for (slot, place) in rows {
            assert_eq!(locate(slot), place, "{slot}");
        }
    }

    #[test]
    fn freed_slots_are_allocated_again() {
        let slab = Slab::<2>::new(Pages::Base);
        let slots: Vec<u32> = (0..5000).map(|_| slab.alloc_one().unwrap()).collect();
        assert_eq!(slots, (0..5000).collect::<Vec<u32>>());
        for pair in [[7, 9], [4999, 0]] {
            slab.set_link(pair[0], pair[1] + 1);
            slab.free(SlotList { first: pair[0], last: pair[1], slots: 2 });
        }
        let Some(Allocated::Freed(list)) = slab.alloc(3) else { panic!("no free slot") };
        assert_eq!((list.first, slab.link(4999), list.last, list.slots), (4999, Some(0), 7, 3));
        let again: Vec<u32> = (0..2).map(|_| slab.alloc_one().unwrap()).collect();
        assert_eq!(again, [9, 5000]);
        let Some(Allocated::Fresh(slots)) = slab.alloc(32) else { panic!("a free slot") };
        assert_eq!(slots, 5001..5033);
    }

    #[test]
    fn the_halves_of_the_metadata_are_independent() {
        let slab = Slab::<2>::new(Pages::Base);
        let slot = slab.alloc_one().unwrap();
        assert_eq!((slab.due_tick(slot), slab.sibling(slot)), (None, None));
        slab.set_sibling(slot, Some(3));
        slab.set_occupied(slot, 100);
        slab.lower_tick(slot, 200);
        assert_eq!((slab.due_tick(slot), slab.sibling(slot)), (Some(100), Some(3)));
        slab.lower_tick(slot, 50);
        slab.reschedule(slot, 49, 70);
        assert_eq!(slab.due_tick(slot), Some(50));
        slab.reschedule(slot, 50, 70);
        assert_eq!(slab.due_tick(slot), Some(70));
        slab.set_link(slot, 0);
        slab.lower_tick(slot, 1);
        assert_eq!((slab.due_tick(slot), slab.sibling(slot)), (None, Some(3)));
    }

    #[test]
    fn due_slots_are_found_across_chunks() {
        let slab = Slab::<2>::new(Pages::Base);
        let first = 1_u32 << FIRST_BITS;
        (0..first + 100).for_each(|_| _ = slab.alloc_one().unwrap());
        let ticks = [
            (first - 70, 5),
            (first - 66, 9),
            (first - 3, 10),
            (first, 5),
            (first + 63, 10),
            (first + 64, 9),
        ];
        ticks.iter().for_each(|&(slot, tick)| slab.set_occupied(slot, tick));
        slab.set_sibling(first + 1, Some(7));
        for (tick, last) in [(Some(4), 4), (Some(8), 5), (Some(9), 9), (Some(10), 10), (None, 10)] {
            let (mut found, mut slot) = (Vec::new(), first - 70);
            while slot < first + 80 {
                let (bits, slots) = slab.due_mask(slot, first + 80 - slot, tick);
                assert!((1..=64).contains(&slots));
                found.extend((0..64).filter(|bit| bits >> bit & 1 != 0).map(|bit| slot + bit));
                slot += slots;
            }
            let is_due = ticks.iter().filter(|&&(_, tick)| tick <= last).map(|&(slot, _)| slot);
            assert!(found.iter().copied().eq(is_due), "{tick:?}: {found:?}");
        }
        slab.prefetch_meta(first - 1, 1000);
        slab.prefetch_meta(MAX_SLOTS as u32 - 1, 1000);
    }

    #[test]
    fn prefaulting_is_bounded_and_ends() {
        let slab = Slab::<6>::new(Pages::Base);
        let mut rounds = 0;
        while slab.prefault(20_000, 1000) {
            rounds += 1;
        }
        assert_eq!(rounds, 19);
        assert!(!slab.prefault(20_000, 1000));
    }
}
