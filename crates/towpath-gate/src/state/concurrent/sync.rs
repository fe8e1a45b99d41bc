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

/// Turns of [`wait`] that only spin: longer than a writer that runs holds a lock.
pub(crate) const SPINS: u32 = 128;
/// Turns that spin or yield the CPU, in case both threads share it.
#[cfg(not(loom))]
const YIELDS: u32 = SPINS + 16;

/// Waits a moment for another writer. If that was preempted, yields the CPU, and then sleeps 50 us at a time: a thread with a
/// higher priority that only yields would keep the writer from the CPU.
#[cfg(not(loom))]
#[inline]
pub(crate) fn wait(turns: &mut u32) {
    *turns = turns.saturating_add(1);
    match *turns {
        ..SPINS => std::hint::spin_loop(),
        SPINS..YIELDS => std::thread::yield_now(),
        _ => std::thread::sleep(std::time::Duration::from_micros(50)),
    }
}

#[cfg(loom)]
pub(crate) fn wait(_: &mut u32) {
    loom::thread::yield_now();
}
