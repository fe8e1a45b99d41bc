//! Positions at which the workers continue their scans of a family's slots: for expired states, and for states to evict.

use std::ops::Range;

use crate::state::concurrent::sync::{Apart, AtomicU64, Ordering};

/// The position of the sweep for expired states, shared by all workers.
#[derive(Debug)]
pub(crate) struct SweepCursor(Apart<AtomicU64>);

impl SweepCursor {
    pub(crate) fn new() -> Self {
        Self(Apart(AtomicU64::new(0)))
    }

    /// The next `count` of `len` slots: a range, and the rest from slot 0 on.
    ///
    /// The cursor wraps to 0 instead of being a running count modulo `len`: modulo a growing `len` it could keep pace with the
    /// table and never return to the first slots.
    #[inline]
    pub(crate) fn next(&self, len: u32, count: u32) -> [Range<u32>; 2] {
        if len == 0 {
            return [0..0, 0..0];
        }
        let (all, count) = (u64::from(len), u64::from(count.min(len)));
        let from = |cursor| if cursor < all { cursor } else { 0 };
        // Relaxed: which worker looks at which slots does not matter.
        let advance = |cursor| Some(from(cursor) + count);
        let cursor = match self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, advance) {
            Ok(cursor) | Err(cursor) => from(cursor) as u32,
        };
        ranges(cursor, len, count as u32)
    }

    /// The slots that [`SweepCursor::next`] would return after `skip` slots, `count` of `len`. `skip + count` is at most `len`.
    pub(crate) fn peek(&self, len: u32, skip: u32, count: u32) -> [Range<u32>; 2] {
        if len == 0 {
            return [0..0, 0..0];
        }
        // Relaxed: as above.
        let cursor = self.0.load(Ordering::Relaxed);
        let cursor = if cursor < u64::from(len) { cursor } else { 0 };
        ranges(((cursor + u64::from(skip)) % u64::from(len)) as u32, len, count)
    }
}

/// `count` of `len` slots from `cursor` on: a range, and the rest from slot 0 on.
#[inline]
fn ranges(cursor: u32, len: u32, count: u32) -> [Range<u32>; 2] {
    let here = count.min(len - cursor);
    [cursor..cursor + here, 0..count - here]
}

/// The position of the search for a state to evict.
#[derive(Debug)]
pub(crate) struct EvictCursor(Apart<AtomicU64>);

impl EvictCursor {
    pub(crate) fn new() -> Self {
        Self(Apart(AtomicU64::new(0)))
    }

    /// The next `count` of `len` slots, each once at most. Does not move the cursor.
    pub(crate) fn next(&self, len: u32, count: u32) -> impl Iterator<Item = u32> + use<> {
        // Relaxed: as above.
        let cursor = self.0.load(Ordering::Relaxed);
        let from = if len == 0 { 0 } else { (cursor % u64::from(len)) as u32 };
        (0..count.min(len)).map(move |n| if n < len - from { from + n } else { n - (len - from) })
    }

    /// The next search begins after `slot`.
    pub(crate) fn advance_past(&self, slot: u32) {
        // Relaxed: as above.
        self.0.store(u64::from(slot) + 1, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_wraps_to_slot_0() {
        let cursor = SweepCursor::new();
        let rows = [
            (10, 4, [0..4, 0..0]),
            (10, 4, [4..8, 0..0]),
            (10, 4, [8..10, 0..2]),
            (10, 4, [0..4, 0..0]),
            (20, 99, [4..20, 0..4]),
            (0, 4, [0..0, 0..0]),
        ];
        for (len, count, ranges) in rows {
            assert_eq!(cursor.peek(len, 0, count.min(len)), ranges, "{count} of {len}");
            assert_eq!(cursor.next(len, count), ranges, "{count} of {len}");
        }
    }

    #[test]
    fn the_search_for_a_victim_begins_after_the_last_one() {
        let cursor = EvictCursor::new();
        let next = |len, count| cursor.next(len, count).collect::<Vec<_>>();
        assert_eq!((next(5, 3), next(0, 3)), (vec![0, 1, 2], vec![]));
        cursor.advance_past(3);
        assert_eq!(next(5, 9), [4, 0, 1, 2, 3]);
    }
}
