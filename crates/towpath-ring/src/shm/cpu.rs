//! Whether both sides of a lane run on one CPU: then neither gets anything by looking again, only by letting the other run.
//!
//! Each side says now and then where it runs. It is a hint: who believes a wrong one sleeps where it would have looked a
//! little longer, or the other way round.

use crate::shm::abi;
use crate::shm::region::Words;
use crate::shm::sync::Ordering;
use crate::shm::sys;

/// Says where the calling thread runs.
pub(crate) fn tell(own: &Words) {
    let (word, here) = (own.word(abi::CPU), here());
    // Relaxed, both: a hint, which orders nothing. The other side reads the line often, so it is written only when it changes.
    if word.load(Ordering::Relaxed) != here {
        word.store(here, Ordering::Relaxed);
    }
}

/// Whether the other side was last seen where the calling thread runs.
pub(crate) fn is_shared(theirs: &Words) -> bool {
    // Relaxed: see above.
    theirs.word(abi::CPU).load(Ordering::Relaxed) == here()
}

/// The CPU of the calling thread, from 1: 0 is a side that has not said it.
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
    fn who_has_said_nothing_is_elsewhere() {
        let bytes = (abi::CPU + 1) * 8;
        let memory = sys::memfd("cpu", bytes).unwrap();
        let theirs = Words::map(memory.as_fd(), bytes, Access::Own).unwrap();
        assert!(!is_shared(&theirs));
        // Pinned for as long as the test's thread lives.
        let mut set = rustix::thread::CpuSet::new();
        set.set(sys::cpu());
        rustix::thread::sched_setaffinity(None, &set).unwrap();
        tell(&theirs);
        assert!(is_shared(&theirs));
    }
}
