//! A timer wheel: which slots are due, without looking at the others.
//!
//! What: time is divided into ticks of 2^28 ns (0.27 s), and the wheel has a list of slots for each of the next 2048
//! ticks (9 minutes). A slot is in the list of its expiry's tick, or in the last one if that is farther away. An
//! entry that is refreshed stays in its list. When that tick is over, it is found to be live and is inserted again.
//! So a refresh costs nothing here, and each entry is looked at about once per lifetime.
//!
//! Invariant: the tick of a slot is never after the tick of its expiry (a caller that shortens a lifetime calls
//! [`TimerWheel::reschedule_earlier`]), and `at` never passes a tick whose list is not empty. So a slot whose tick is
//! over is returned at the latest when `at` has caught up with the current time.
//!
//! Reference: Varghese and Lauck 1987, "Hashed and Hierarchical Timing Wheels", scheme 6.

use crate::state::limits::slot_list::{List, SlotLists};
use towpath_wire::Time;

const TICK_BITS: u32 = 28;
const TICKS: u64 = 2048;
const WORDS: usize = TICKS as usize / 64;

/// A timer wheel over slots.
#[derive(Clone, Debug)]
pub(crate) struct TimerWheel {
    /// The first tick whose list may be non-empty.
    at: u64,
    len: usize,
    /// A bit for each non-empty list.
    occupied: [u64; WORDS],
    lists: Box<[List; TICKS as usize]>,
    slots: SlotLists,
    /// The tick of each slot.
    ticks: Vec<u64>,
}

impl TimerWheel {
    pub(crate) fn new() -> Self {
        Self {
            at: 0,
            len: 0,
            occupied: [0; WORDS],
            lists: Box::new([List::EMPTY; TICKS as usize]),
            slots: SlotLists::default(),
            ticks: Vec::new(),
        }
    }

    /// Inserts a slot that is not in the wheel.
    #[inline]
    pub(crate) fn insert(&mut self, slot: u32, expire: Time, now: Time) {
        if self.len == 0 {
            self.at = tick(now);
        }
        let tick = tick(expire).clamp(self.at, self.at + TICKS - 1);
        let at = slot as usize;
        if at >= self.ticks.len() {
            self.ticks.resize(at + 1, 0);
        }
        self.ticks[at] = tick;
        let list = (tick % TICKS) as usize;
        self.slots.push_back(&mut self.lists[list], slot);
        self.occupied[list / 64] |= 1 << (list % 64);
        self.len += 1;
    }

    /// Removes a slot that is in the wheel.
    #[inline]
    pub(crate) fn remove(&mut self, slot: u32) {
        let list = (self.ticks[slot as usize] % TICKS) as usize;
        self.slots.remove(&mut self.lists[list], slot);
        if self.lists[list].first().is_none() {
            self.occupied[list / 64] &= !(1 << (list % 64));
        }
        self.len -= 1;
    }

    /// Moves a slot that is in the wheel to the tick of `expire`, if that is earlier.
    pub(crate) fn reschedule_earlier(&mut self, slot: u32, expire: Time, now: Time) {
        if tick(expire) < self.ticks[slot as usize] {
            self.remove(slot);
            self.insert(slot, expire, now);
        }
    }

    /// A slot whose tick is over, which may be due. It stays in the wheel: the caller removes it, or inserts it again
    /// with an expiry after `now`. Takes one off `budget`. Returns `None` when there is no such slot or the budget is
    /// spent.
    pub(crate) fn next(&mut self, now: Time, budget: &mut usize) -> Option<u32> {
        if self.len == 0 || *budget == 0 {
            return None;
        }
        let now = tick(now);
        // After a jump in time, each list is visited once.
        self.at = self.at.max(now.saturating_sub(TICKS - 1));
        while self.at < now {
            let list = (self.at % TICKS) as usize;
            let ahead = u64::from((self.occupied[list / 64] >> (list % 64)).trailing_zeros());
            if ahead == 0 {
                *budget -= 1;
                return self.lists[list].first();
            }
            // To the next non-empty list, or to the next word of the bitmap.
            self.at = (self.at + ahead.min(64 - list as u64 % 64)).min(now);
        }
        None
    }

    /// The slots of the current tick, some of which may be due.
    pub(crate) fn current(&self) -> impl Iterator<Item = u32> + '_ {
        let first = self.lists[(self.at % TICKS) as usize].first();
        std::iter::successors(first, |&slot| self.slots.next(slot))
    }
}

#[inline]
fn tick(time: Time) -> u64 {
    time.as_nanos() >> TICK_BITS
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: u64 = 1 << TICK_BITS;

    fn at(tick: u64) -> Time {
        Time::from_nanos(tick * TICK)
    }

    /// The slots returned at `now`, all of which are due.
    fn out(wheel: &mut TimerWheel, now: Time) -> Vec<u32> {
        let mut slots = Vec::new();
        while let Some(slot) = wheel.next(now, &mut usize::MAX.clone()) {
            wheel.remove(slot);
            slots.push(slot);
        }
        slots.sort_unstable();
        slots
    }

    #[test]
    fn slots_are_due_when_their_tick_is_over() {
        for start in [0, 5, 1 << 30] {
            let mut wheel = TimerWheel::new();
            for (slot, ahead) in [(0, 0), (1, 1), (2, 63), (3, 64), (4, 2047)] {
                wheel.insert(slot, at(start + ahead), at(start));
            }
            for (ahead, slots) in
                [(0, vec![]), (1, vec![0]), (2, vec![1]), (64, vec![2]), (65, vec![3]), (2047, vec![])]
            {
                assert_eq!(out(&mut wheel, at(start + ahead)), slots, "{ahead}");
            }
            assert_eq!(out(&mut wheel, at(start + 2048)), [4]);
        }
    }

    #[test]
    fn a_jump_in_time_skips_no_slot() {
        for jump in [2047, 2048, 2049, 10_000, 1 << 34] {
            let mut wheel = TimerWheel::new();
            (0..2048).for_each(|slot| wheel.insert(slot, at(u64::from(slot)), at(0)));
            let mut slots = out(&mut wheel, at(jump));
            slots.extend(out(&mut wheel, at(jump + 1)));
            assert_eq!(slots.len(), 2048, "{jump}");
        }
    }

    #[test]
    fn slots_beyond_the_wheel_are_due_early_and_inserted_again() {
        let mut wheel = TimerWheel::new();
        wheel.insert(7, at(5000), at(0));
        let mut seen = Vec::new();
        for tick in 0..=5001 {
            while let Some(slot) = wheel.next(at(tick), &mut usize::MAX.clone()) {
                seen.push(tick);
                wheel.remove(slot);
                if tick <= 5000 {
                    wheel.insert(slot, at(5000), at(tick));
                }
            }
        }
        assert_eq!(seen, [2048, 4096, 5001]);
    }

    #[test]
    fn a_rescheduled_slot_is_due_earlier() {
        let mut wheel = TimerWheel::new();
        wheel.insert(1, at(1000), at(0));
        wheel.reschedule_earlier(1, at(10), at(0));
        wheel.reschedule_earlier(1, at(500), at(0));
        assert_eq!(out(&mut wheel, at(10)), [0; 0]);
        assert_eq!(out(&mut wheel, at(11)), [1]);
    }

    #[test]
    fn time_that_goes_back_skips_no_slot() {
        let mut wheel = TimerWheel::new();
        wheel.insert(1, at(100), at(90));
        wheel.insert(2, at(20), at(10));
        assert_eq!(out(&mut wheel, at(50)), [0; 0]);
        assert_eq!(out(&mut wheel, at(101)), [1, 2]);
    }
}
