//! The atomics of the states. Everything imports them from here, so that loom can replace them.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};

/// A frequently written value in separate cache lines: writes do not disturb the readers of its neighbours. Two lines,
/// because processors prefetch pairs.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Apart<T>(pub(crate) T);

impl<T> std::ops::Deref for Apart<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.0
    }
}

/// Waits a moment for another writer. After 128 turns it yields, in case both threads share a CPU.
#[cfg(not(loom))]
#[inline]
pub(crate) fn wait(turns: &mut u32) {
    *turns += 1;
    if *turns < 128 {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

#[cfg(loom)]
pub(crate) fn wait(_: &mut u32) {
    loom::thread::yield_now();
}
