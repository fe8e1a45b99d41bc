//! Shrinking: after a flood, the memory of free slots goes back to the system.
//!
//! What: outside the packet path, in steps of about a millisecond each, free slots are taken from the slab's stack into a set.
//! When the stack is empty, each page whose slots are all in the set is given back; some of the first slots keep their memory
//! for the next states. Then the slots go back to the stack, the lowest on top, so that new states are dense. If all slots from
//! one on are free, they become slots that were never used, and the memory of their metadata is given back, too.
//!
//! Hysteresis: it begins when an eighth of the memory is in use, and not again before the number of states or the memory has
//! changed by half.
//!
//! Invariant: a slot in the set belongs to the holder of the lock. No worker holds it: it was free.
//!
//! Races: workers that need slots meanwhile find the stack empty and take slots that were never used. The number of used slots
//! then does not fall. Readers of metadata that is given back read that the slot holds no state, before and after.

use std::sync::{Mutex, TryLockError};

use super::memory::{PAGE_LINES, Pages};
use super::slab::{Slab, SlotList};

/// Slots whose memory is not worth the effort.
const FEW: u64 = LEAST as u64;

/// Slots that one step takes or gives back.
const STEP: u32 = 4096;

/// Slots whose memory one step releases.
const RELEASE: u32 = 1 << 16;

/// The lowest slots that are never made unused: a multiple of the slots of a page of metadata.
const LEAST: u32 = 4096;

/// Shrinks one slab. See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Shrink(Mutex<State>);

/// The result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// There is nothing more to do.
    Done,
    /// There is more to do.
    More,
    /// There is more to do, and the workers are to give back the free slots that they keep.
    Begun,
}

#[derive(Debug, Default)]
struct State {
    step: Step,
    /// A bit for each slot that this has.
    set: Vec<u64>,
    /// Free slots without memory, and the first of them.
    released: u64,
    frontier: u32,
    /// The states and the slots with memory at the end of the last round.
    last: Option<(u64, u64)>,
}

#[derive(Clone, Copy, Debug, Default)]
enum Step {
    #[default]
    Idle,
    /// Takes free slots. In the last `few` steps few were free.
    Take { few: u32 },
    /// Releases the memory of slots from `at` on. The first `keep` slots of the set keep theirs.
    Release { at: u32, keep: u64 },
    /// Gives the slots below `to` back, the highest first.
    GiveBack { to: u32 },
}

impl Shrink {
    /// Does one step, if there is work for the slab of `states` states.
    pub(crate) fn step<const N: usize>(&self, slab: &Slab<N>, states: u64) -> Progress {
        let mut state = match self.0.try_lock() {
            Ok(state) => state,
            // The steps are consistent.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Progress::Done,
        };
        state.step(slab, states)
    }

    /// Faults in some of the released memory if the free slots with memory run out. Returns true if more remains.
    pub(crate) fn prefault<const N: usize>(&self, slab: &Slab<N>, states: u64, ahead: u32, max: u32) -> bool {
        let Ok(mut state) = self.0.try_lock() else { return false };
        if state.released == 0 || !matches!(state.step, Step::Idle) {
            return false;
        }
        let len = slab.len();
        let free = u64::from(len).saturating_sub(states);
        if free > state.released + u64::from(ahead) / 2 {
            return false;
        }
        let end = state.frontier.saturating_add(max).min(len);
        slab.fault_in(state.frontier.min(end)..end);
        state.frontier = end;
        state.released = if end == len { 0 } else { state.released.saturating_sub(max.into()) };
        state.released > 0
    }

    /// The number of slots with memory, of those of `states` states and the free ones.
    pub(crate) fn resident<const N: usize>(&self, slab: &Slab<N>, states: u64) -> u64 {
        let state = super::family::locked(&self.0);
        state.resident(slab.len(), states)
    }
}

impl State {
    fn resident(&self, len: u32, states: u64) -> u64 {
        let len = u64::from(len);
        // The slots with memory are used first.
        len - self.released.min(len.saturating_sub(states))
    }

    fn step<const N: usize>(&mut self, slab: &Slab<N>, states: u64) -> Progress {
        match self.step {
            Step::Idle if self.is_due(slab.len(), states) => {
                self.step = Step::Take { few: 0 };
                return Progress::Begun;
            }
            Step::Idle => return Progress::Done,
            Step::Take { few } => self.take(slab, states, few),
            Step::Release { at, keep } => self.release(slab, at, keep),
            Step::GiveBack { to } => {
                self.give_back(slab, to);
                if matches!(self.step, Step::Idle) {
                    self.last = Some((states, self.resident(slab.len(), states)));
                }
            }
        }
        if matches!(self.step, Step::Idle) { Progress::Done } else { Progress::More }
    }

    fn is_due(&self, len: u32, states: u64) -> bool {
        let resident = self.resident(len, states);
        let changed = |(states_then, then): (u64, u64)| states * 2 < states_then || resident > 2 * then;
        resident > FEW && states * 8 < resident && self.last.is_none_or(changed)
    }

    fn take<const N: usize>(&mut self, slab: &Slab<N>, states: u64, few: u32) {
        let mut taken = 0;
        while taken < STEP.into() {
            let Some(list) = slab.pop(STEP / 16) else { break };
            taken += list.slots;
            let mut next = Some(list.first);
            for _ in 0..list.slots {
                let Some(slot) = next else { break };
                next = slab.link(slot);
                self.add(slot);
            }
        }
        // Some come while workers free states, or give back what they kept.
        let few = if taken < (STEP / 4).into() { few + 1 } else { 0 };
        self.step = Step::Take { few };
        if few == 3 {
            self.released = 0;
            self.frontier = slab.len();
            self.step = Step::Release { at: 0, keep: (states / 4).max(STEP.into()) };
        }
    }

    fn add(&mut self, slot: u32) {
        let at = slot as usize / 64;
        if at >= self.set.len() {
            self.set.resize((at + 1).next_power_of_two(), 0);
        }
        self.set[at] |= 1 << (slot % 64);
    }

    /// The word of the set that has the bit of a slot.
    fn word(&self, at: u32) -> u64 {
        self.set.get(at as usize / 64).copied().unwrap_or_default()
    }

    fn release<const N: usize>(&mut self, slab: &Slab<N>, at: u32, mut keep: u64) {
        // A page of 4 KiB has the lines of 64 slots.
        let page = match slab.pages {
            Pages::Base => PAGE_LINES as u32,
            Pages::Huge => PAGE_LINES as u32 * 512,
        };
        let end = slab.len().min(self.set.len() as u32 * 64) / page * page;
        let to = end.min(at + RELEASE.max(page));
        let mut from = None;
        for first in (at..to).step_by(page as usize).chain([to]) {
            let words = (first..first + page).step_by(64).map(|at| self.word(at).count_ones());
            let free: u32 = if first < to { words.sum() } else { 0 };
            let whole = free == page && keep == 0;
            match (whole, from) {
                (true, None) => from = Some(first),
                (false, Some(begin)) => {
                    slab.release(begin..first, false);
                    self.released += u64::from(first - begin);
                    self.frontier = self.frontier.min(begin);
                    from = None;
                }
                _ => {}
            }
            keep = keep.saturating_sub(free.into());
        }
        self.step = Step::Release { at: to, keep };
        if to == end {
            self.truncate(slab);
            self.step = Step::GiveBack { to: self.set.len() as u32 * 64 };
        }
    }

    /// Makes the last slots unused if they are all free.
    fn truncate<const N: usize>(&mut self, slab: &Slab<N>) {
        let before = slab.len();
        let has = |slot: u32| self.word(slot) >> (slot % 64) & 1 != 0;
        let last = (LEAST..before).rev().find(|slot| !has(*slot)).map_or(LEAST, |slot| slot + 1);
        let len = last.next_multiple_of(LEAST);
        if len >= before {
            return;
        }
        // Before another worker can take these slots.
        slab.release(len..before, true);
        if !slab.truncate(len, before) {
            return;
        }
        for slot in len..before {
            self.set[slot as usize / 64] &= !(1 << (slot % 64));
        }
        self.released = self.released.saturating_sub(u64::from(before - len.max(self.frontier.min(before))));
        self.frontier = self.frontier.min(len);
    }

    fn give_back<const N: usize>(&mut self, slab: &Slab<N>, to: u32) {
        let from = to.saturating_sub(STEP);
        let mut list: Option<SlotList> = None;
        for slot in (from..to).rev() {
            if self.word(slot) >> (slot % 64) & 1 == 0 {
                continue;
            }
            slab.set_link(slot, list.map_or(0, |list| list.first + 1));
            list = Some(match list {
                None => SlotList { first: slot, last: slot, slots: 1 },
                Some(list) => SlotList { first: slot, slots: list.slots + 1, ..list },
            });
        }
        if let Some(list) = list {
            slab.free(list);
        }
        self.step = Step::GiveBack { to: from };
        if from == 0 {
            (self.step, self.set) = (Step::Idle, Vec::new());
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn round(shrink: &Shrink, slab: &Slab<2>, states: u64) -> usize {
        (0..).take_while(|_| shrink.step(slab, states) != Progress::Done).count()
    }

    fn free(slab: &Slab<2>, slots: impl Iterator<Item = u32>) {
        slots.for_each(|slot| slab.free(SlotList { first: slot, last: slot, slots: 1 }));
    }

    #[test]
    fn free_slots_at_the_end_become_unused() {
        let (slab, shrink) = (Slab::<2>::new(Pages::Base), Shrink::default());
        (0..100_000).for_each(|n| assert_eq!(slab.alloc_one(), Some(n)));
        assert_eq!((round(&shrink, &slab, 100_000), shrink.resident(&slab, 100_000)), (0, 100_000));
        free(&slab, (0..100_000).filter(|slot| ![3, 5000].contains(slot)));
        assert!(round(&shrink, &slab, 2) > 10);
        let resident = shrink.resident(&slab, 2);
        assert!(slab.len() == 8192 && (4096..4300).contains(&resident), "{resident}");
        assert_eq!(round(&shrink, &slab, 2), 0);
        // The lowest slots come first, and each once.
        let slots: Vec<u32> = (0..10_000).map(|_| slab.alloc_one().unwrap()).collect();
        assert_eq!(slots, (0..10_002).filter(|slot| ![3, 5000].contains(slot)).collect::<Vec<u32>>());
    }

    #[test]
    fn pages_between_states_are_released_and_come_back() {
        let (slab, shrink) = (Slab::<2>::new(Pages::Base), Shrink::default());
        (0..100_000).for_each(|_| _ = slab.alloc_one());
        let stays = |slot: &u32| slot.is_multiple_of(1000) || *slot == 99_999;
        free(&slab, (0..100_000).filter(|slot| !stays(slot)));
        assert!(round(&shrink, &slab, 101) > 10);
        let resident = shrink.resident(&slab, 101);
        assert!(slab.len() == 100_000 && (4096..20_000).contains(&resident), "{resident}");
        // Once, until something changes.
        assert_eq!(round(&shrink, &slab, 101), 0);
        // Memory is faulted in before it is needed.
        assert!(!shrink.prefault(&slab, 101, 4096, 4096));
        assert!(shrink.prefault(&slab, 95_000, 4096, 4096));
        while shrink.prefault(&slab, 95_000, 4096, 4096) {}
        let slots: Vec<u32> = (0..99_899).map(|_| slab.alloc_one().unwrap()).collect();
        assert_eq!(slots, (0..100_000).filter(|slot| !stays(slot)).collect::<Vec<u32>>());
    }

    /// Another worker takes slots that were never used while the free ones are held.
    #[test]
    fn slots_that_are_taken_meanwhile_stay() {
        let (slab, shrink) = (Slab::<2>::new(Pages::Base), Shrink::default());
        (0..50_000).for_each(|_| _ = slab.alloc_one());
        free(&slab, 0..50_000);
        let mut taken = Vec::new();
        while shrink.step(&slab, 0) != Progress::Done {
            taken.extend(slab.alloc_one());
        }
        assert!(!taken.is_empty());
        let mut all: Vec<u32> = taken.clone();
        let len = slab.len();
        all.extend((taken.len() as u32..len).map(|_| slab.alloc_one().unwrap()));
        all.sort_unstable();
        assert_eq!(all, (0..len).collect::<Vec<u32>>());
    }
}
