//! Every atomic of the states comes from here, so that loom can replace them.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};

/// What is written often, on cache lines of its own, so that who reads its neighbours is not disturbed. Two lines, as processors
/// fetch pairs.
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

/// Waits a moment for another writer; who waits long lets others run, in case they share a CPU.
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
