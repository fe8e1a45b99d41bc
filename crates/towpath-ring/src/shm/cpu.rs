//! Detects whether both sides of a lane run on the same CPU. Then spinning is useless: the other side runs only if
//! this side yields.
//!
//! Each side reports its CPU from time to time. The report is a hint: with a wrong one, a side sleeps instead of
//! spinning, or the reverse.

use crate::shm::abi;
use crate::shm::region::Words;
use crate::shm::sync::Ordering;
use crate::shm::sys;

/// Reports the CPU of the calling thread.
pub(crate) fn tell(own: &Words) {
    let (word, here) = (own.word(abi::CPU), here());
    // Relaxed, both: a hint that orders nothing. The other side reads the line often, so the word is written only
    // when it changes.
    if word.load(Ordering::Relaxed) != here {
        word.store(here, Ordering::Relaxed);
    }
}

/// Returns true if the other side last reported the CPU of the calling thread.
pub(crate) fn is_shared(theirs: &Words) -> bool {
    // Relaxed: see `tell`.
    theirs.word(abi::CPU).load(Ordering::Relaxed) == here()
}

/// CPU of the calling thread, counted from 1; 0 means not reported.
fn here() -> u64 {
    sys::cpu() as u64 + 1
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::{is_shared, tell};
    use crate::shm::abi;
    use crate::shm::region::{Access, Words};
    use crate::shm::sys;

    #[test]
    fn a_side_without_a_report_is_on_another_cpu() {
        let bytes = (abi::CPU + 1) * 8;
        let memory = sys::memfd("cpu", bytes).unwrap();
        let theirs = Words::map(memory.as_fd(), bytes, Access::Own).unwrap();
        assert!(!is_shared(&theirs));
        // The thread stays pinned until it ends.
        let mut set = rustix::thread::CpuSet::new();
        set.set(sys::cpu());
        rustix::thread::sched_setaffinity(None, &set).unwrap();
        tell(&theirs);
        assert!(is_shared(&theirs));
    }
}
