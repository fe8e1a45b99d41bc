//! A timer wheel: which slots are due, without looking at those that are not.
//!
//! What: time is cut into ticks of 2^28 ns (0.27 s); slot lists for the next 2048 ticks (9 minutes). A slot is filed
//! under the tick of its expiry, or the last tick of the wheel when that is farther away. A state that is refreshed
//! is not filed anew: when its old tick is over it comes out, is seen to live on, and is filed again. So a refresh
//! costs nothing here, and each state is looked at about once per lifetime.
//!
//! Invariant: a filed slot's tick is never after the tick of its expiry (whoever shortens a life calls
//! [`Wheel::hasten`]), and `at` never passes a tick whose list is not empty. So a slot whose tick is over is out at
//! the latest when `at` has caught up with now.
//!
//! Reference: Varghese and Lauck 1987, "Hashed and Hierarchical Timing Wheels", scheme 6.

use super::chain::{Chains, Head};
use crate::Time;

const TICK_BITS: u32 = 28;
const TICKS: u64 = 2048;

/// A timer wheel over slots.
#[derive(Clone, Debug)]
pub(super) struct Wheel {
    /// The first tick whose list may hold something.
    at: u64,
    filed: usize,
    lists: Box<[Head; TICKS as usize]>,
    chains: Chains,
    /// The tick that each slot is filed under.
    ticks: Vec<u64>,
}

impl Wheel {
    pub(super) fn new() -> Self {
        Self {
            at: 0,
            filed: 0,
            lists: Box::new([Head::EMPTY; TICKS as usize]),
            chains: Chains::default(),
            ticks: Vec::new(),
        }
    }

    /// Files `slot`, which is not filed.
    #[inline]
    pub(super) fn file(&mut self, slot: u32, expire: Time, now: Time) {
        if self.filed == 0 {
            self.at = tick(now);
        }
        let tick = tick(expire).clamp(self.at, self.at + TICKS - 1);
        let at = slot as usize;
        if at >= self.ticks.len() {
            self.ticks.resize(at + 1, 0);
        }
        self.ticks[at] = tick;
        self.chains.push(&mut self.lists[(tick % TICKS) as usize], slot);
        self.filed += 1;
    }

    /// Takes `slot`, which is filed, out.
    #[inline]
    pub(super) fn take(&mut self, slot: u32) {
        let tick = self.ticks[slot as usize];
        self.chains.take(&mut self.lists[(tick % TICKS) as usize], slot);
        self.filed -= 1;
    }

    /// Files `slot`, which is filed, anew if `expire` is before its tick.
    pub(super) fn hasten(&mut self, slot: u32, expire: Time, now: Time) {
        if tick(expire) < self.ticks[slot as usize] {
            self.take(slot);
            self.file(slot, expire, now);
        }
    }

    /// A slot whose tick is over: it may be due. It stays filed; the caller takes it out or files it anew, with an
    /// expiry after now. Each tick passed or slot returned takes one off `budget`; `None` when there is nothing more
    /// or the budget is spent.
    pub(super) fn next(&mut self, now: Time, budget: &mut usize) -> Option<u32> {
        if self.filed == 0 {
            return None;
        }
        let now = tick(now);
        // After a jump in time each list needs to be seen only once.
        self.at = self.at.max(now.saturating_sub(TICKS - 1));
        while self.at < now && *budget > 0 {
            *budget -= 1;
            match self.lists[(self.at % TICKS) as usize].first() {
                None => self.at += 1,
                slot => return slot,
            }
        }
        None
    }

    /// The slots filed under the tick that has begun and is not over, some of which may be due.
    pub(super) fn current(&self) -> impl Iterator<Item = u32> + '_ {
        let first = self.lists[(self.at % TICKS) as usize].first();
        std::iter::successors(first, |&slot| self.chains.next(slot))
    }
}

#[inline]
fn tick(time: Time) -> u64 {
    time.as_nanos() >> TICK_BITS
}
