//! Sleeping without lost wake-ups.
//!
//! What: each side has a need_wakeup word, non-zero during a sleep and different for each sleep. The sleeper stores
//! it and then checks again for work. The other side publishes work and then checks the word.
//!
//! Race: between the two steps, both sides have a full fence, so
//! - if the sleeper's store is first, the other side sees it and rings the doorbell;
//! - if the publication is first, the sleeper's second check finds the work, and it does not sleep.
//!
//! Both may happen, which costs one useless doorbell; at least one happens. The ringer sends one doorbell per sleep:
//! it remembers the number that it answered, because it cannot clear the sleeper's word.
//!
//! Fences: the ringer checks after every batch, the sleeper sleeps seldom. With [`Fences::Membarrier`] the sleeper
//! therefore executes both fences: membarrier(2) with `MEMBARRIER_CMD_GLOBAL_EXPEDITED` makes every running thread
//! of every registered process execute a full fence during the call; a thread that is not running executes one when
//! it is switched. The ringer only prevents the compiler from reordering its two steps. The fence F is executed
//! somewhere among the ringer's steps:
//! - if its publication is before F, the sleeper's second check, which is after the call, finds the work;
//! - if its publication is after F, so is its check of the word, whose store was before the call: it rings.
//!
//! Space: a client sleeps until it has a frame, or space for a message. A client that wants space says so before its sleep, in another
//! word, with the same fence in between. Without that, the other side rings only for frames.
//!
//! Lanes: a client with several lanes sleeps once for all of them. It stores one number into each lane's word and
//! checks every lane after the fence. Each engine thread rings for its own lane; the threads share the answered
//! number, so that only the first one rings.
//!
//! The scheme needs a registered ringer and a sleeper that makes the call. Both announce support during the attach;
//! otherwise both use their own fence. A client that lies misses its own doorbells, or delays its own verdicts until
//! the engine polls for another reason.

use std::sync::Arc;

use crate::shm::region::Words;
use crate::shm::sync::{AtomicU64, Ordering, compiler_fence, fence, membarrier};

/// Which side executes the two fences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fences {
    /// Each side executes its own.
    Both,
    /// The sleeper executes both, with membarrier(2).
    Membarrier,
}

impl Fences {
    /// The best scheme that this process supports. Registers the process for membarrier(2).
    #[cfg(not(loom))]
    pub(crate) fn offer() -> Self {
        match crate::shm::sys::membarrier_register() {
            Ok(()) => Self::Membarrier,
            Err(e) => {
                log::debug!("membarrier(2) failed ({e}): each doorbell check costs a fence");
                Self::Both
            }
        }
    }

    /// The scheme that both sides support.
    pub(crate) fn and(self, other: Self) -> Self {
        if self == other { self } else { Self::Both }
    }
}

/// The need_wakeup word of this side.
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

    /// Announces a sleep in the memory of each lane. The caller checks again for work before it sleeps. Returns
    /// false if the system refused the fence that the other side relies on; then the caller must not sleep.
    #[must_use]
    pub(crate) fn arm<'a>(&mut self, own: impl IntoIterator<Item = &'a Words>) -> bool {
        self.sleeps += 1;
        for own in own {
            // Relaxed: ordered by the fence below.
            own.word(self.word).store(self.sleeps, Ordering::Relaxed);
        }
        self.fence()
    }

    /// The fence of a sleep, for a word that was stored after [`arm`](Self::arm). Returns false as that does.
    #[must_use]
    pub(crate) fn fence(&self) -> bool {
        // SeqCst: pairs with the fence in Ringer::should_ring, or with the one that membarrier executes on the other
        // side.
        fence(Ordering::SeqCst);
        self.fences == Fences::Both || membarrier().is_ok()
    }

    /// Ends the sleep.
    pub(crate) fn disarm<'a>(&self, own: impl IntoIterator<Item = &'a Words>) {
        for own in own {
            // Relaxed: a stale value costs one doorbell.
            own.word(self.word).store(0, Ordering::Relaxed);
        }
    }
}

/// The last sleep that was answered, shared by all ringers of one doorbell.
pub(crate) type Answered = Arc<AtomicU64>;

/// This side's view of the other side's need_wakeup word.
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

    /// Returns true if the other side sleeps and has not been woken from this sleep. Call it after work was
    /// published.
    #[inline]
    pub(crate) fn should_ring(&self, theirs: &Words) -> bool {
        self.fence();
        self.answer(theirs)
    }

    /// As [`should_ring`](Self::should_ring), after something was freed. Returns false if `unwanted`, a word of the other side, says that
    /// its sleep is not for that.
    pub(crate) fn should_ring_unless(&self, theirs: &Words, unwanted: usize) -> bool {
        self.fence();
        // Relaxed: ordered by the fence.
        theirs.word(unwanted).load(Ordering::Relaxed) != 1 && self.answer(theirs)
    }

    #[inline]
    fn fence(&self) {
        match self.fences {
            // SeqCst: pairs with the fence in Sleeper::fence.
            Fences::Both => fence(Ordering::SeqCst),
            // SeqCst, for the compiler only: Sleeper::fence makes this processor execute a fence before or after.
            Fences::Membarrier => compiler_fence(Ordering::SeqCst),
        }
    }

    #[inline]
    fn answer(&self, theirs: &Words) -> bool {
        // Relaxed: ordered by the fence.
        let sleep = theirs.word(self.word).load(Ordering::Relaxed);
        // Relaxed: a number that orders nothing. The thread that raises it rings. It only increases, so that a
        // thread that read an earlier sleep does not suppress the answer to a later one.
        sleep != 0 && self.answered.fetch_max(sleep, Ordering::Relaxed) < sleep
    }
}
