//! Sleeping without missing a wake-up.
//!
//! Each side has a word that says "I sleep", non-zero and different for each sleep. The sleeper stores it and then
//! looks once more for work; the other side publishes work and then looks at the word. Between the two steps both
//! have a full fence, so
//! - if the sleeper's store is first, the other side sees it and rings the doorbell;
//! - if the publication is first, the sleeper's second look finds the work and it does not sleep.
//!
//! Both can be true, which costs a doorbell for nothing; none can not. One doorbell is rung for each sleep: the ringer
//! keeps the number that it has answered, because the word is not its to clear.
//!
//! The ringer is there for every message and the sleeper seldom, so with [`Fences::Membarrier`] the sleeper makes both
//! fences: membarrier(2), `MEMBARRIER_CMD_GLOBAL_EXPEDITED`, makes every running thread of every registered process
//! pass a full fence while the call lasts, and a thread that does not run passes one when it is switched. The ringer
//! only keeps the compiler from swapping its two steps. Its fence F lies somewhere among its steps:
//! - if its publication is before F, the sleeper, whose second look is after the call, finds the work;
//! - if its publication is after F, so is its look at the word, whose store was before the call: it rings.
//!
//! A client with several lanes sleeps once for all of them: it stores one number into each lane's word, and looks at each lane
//! after the fence. The engine's threads each ring for their own lane and charge the number that was answered, so that the
//! first of them rings and the others need not: the doorbell is one.
//!
//! It holds only for a ringer that is registered, and a sleeper that makes the call, so both say in the attach that
//! they can; else both have their fence. A client that lies about it misses its own doorbells, or delays its own
//! verdicts until the engine looks for another reason.

use std::sync::Arc;

use crate::shm::region::Words;
use crate::shm::sync::{AtomicU64, Ordering, compiler_fence, fence, membarrier};

/// Who makes the two fences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fences {
    /// Each side makes its own.
    Both,
    /// The sleeper makes them all, with membarrier(2).
    Membarrier,
}

impl Fences {
    /// The best that this process can take part in; registers it for membarrier(2).
    #[cfg(not(loom))]
    pub(crate) fn offer() -> Self {
        match crate::shm::sys::membarrier_register() {
            Ok(()) => Self::Membarrier,
            Err(e) => {
                log::debug!("membarrier(2) is refused ({e}): every doorbell check costs a fence");
                Self::Both
            }
        }
    }

    /// What two sides agree on.
    pub(crate) fn and(self, other: Self) -> Self {
        if self == other { self } else { Self::Both }
    }
}

/// Our own "I sleep" word.
#[derive(Debug)]
pub(crate) struct Sleeper {
    word: usize,
    sleeps: u64,
    fences: Fences,
}

impl Sleeper {
    pub(crate) fn new(word: usize, fences: Fences) -> Self {
        Self { word, sleeps: 0, fences }
    }

    /// Says that we are about to sleep, in each lane's memory. The caller must look for work once more before it does, and must not sleep
    /// when the answer is false: the system has refused the fence on which the other side relies.
    #[must_use]
    pub(crate) fn arm<'a>(&mut self, own: impl IntoIterator<Item = &'a Words>) -> bool {
        self.sleeps += 1;
        for own in own {
            // Relaxed: ordered by the fence.
            own.word(self.word).store(self.sleeps, Ordering::Relaxed);
        }
        // SeqCst: pairs with the fence in Ringer::should_ring, or with the one that membarrier makes the other side pass.
        fence(Ordering::SeqCst);
        self.fences == Fences::Both || membarrier().is_ok()
    }

    /// Says that we are awake.
    pub(crate) fn disarm<'a>(&self, own: impl IntoIterator<Item = &'a Words>) {
        for own in own {
            // Relaxed: seen late it costs one doorbell.
            own.word(self.word).store(0, Ordering::Relaxed);
        }
    }
}

/// The last sleep that was answered, by whoever rings the same doorbell.
pub(crate) type Answered = Arc<AtomicU64>;

/// Our view of the other side's word.
#[derive(Debug)]
pub(crate) struct Ringer {
    word: usize,
    answered: Answered,
    fences: Fences,
}

impl Ringer {
    pub(crate) fn new(word: usize, fences: Fences, answered: Answered) -> Self {
        Self { word, answered, fences }
    }

    /// Whether the other side sleeps and nobody has rung for this sleep yet. Called after work was published.
    #[inline]
    pub(crate) fn should_ring(&self, theirs: &Words) -> bool {
        match self.fences {
            // SeqCst: pairs with the fence in Sleeper::arm.
            Fences::Both => fence(Ordering::SeqCst),
            // SeqCst, for the compiler alone: Sleeper::arm makes this processor pass a fence before or after.
            Fences::Membarrier => compiler_fence(Ordering::SeqCst),
        }
        // Relaxed: ordered by the fence.
        let sleep = theirs.word(self.word).load(Ordering::Relaxed);
        // Relaxed: a number that orders nothing. Whoever raises it rings; it goes up only, so that one who has read an earlier
        // sleep does not hide the answer to a later one.
        sleep != 0 && self.answered.fetch_max(sleep, Ordering::Relaxed) < sleep
    }
}
