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

use crate::region::Words;
use crate::sync::{Ordering, fence};

/// Our own "I sleep" word.
#[derive(Debug)]
pub(crate) struct Sleeper {
    word: usize,
    sleeps: u64,
}

impl Sleeper {
    pub(crate) fn new(word: usize) -> Self {
        Self { word, sleeps: 0 }
    }

    /// Says that we are about to sleep. The caller must look for work once more before it does.
    pub(crate) fn arm(&mut self, own: &Words) {
        self.sleeps += 1;
        // Relaxed: ordered by the fence.
        own.word(self.word).store(self.sleeps, Ordering::Relaxed);
        // SeqCst: pairs with the fence in Ringer::should_ring; see the head of this file.
        fence(Ordering::SeqCst);
    }

    /// Says that we are awake.
    pub(crate) fn disarm(&self, own: &Words) {
        // Relaxed: seen late it costs one doorbell.
        own.word(self.word).store(0, Ordering::Relaxed);
    }
}

/// Our view of the other side's word.
#[derive(Debug)]
pub(crate) struct Ringer {
    word: usize,
    answered: u64,
}

impl Ringer {
    pub(crate) fn new(word: usize) -> Self {
        Self { word, answered: 0 }
    }

    /// Whether the other side sleeps and nobody has rung for this sleep yet. Called after work was published.
    pub(crate) fn should_ring(&mut self, theirs: &Words) -> bool {
        // SeqCst: pairs with the fence in Sleeper::arm.
        fence(Ordering::SeqCst);
        // Relaxed: ordered by the fence.
        let sleep = theirs.word(self.word).load(Ordering::Relaxed);
        let ring = sleep != 0 && sleep != self.answered;
        if ring {
            self.answered = sleep;
        }
        ring
    }
}
