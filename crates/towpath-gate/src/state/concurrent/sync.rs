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

/// Waits a moment for another writer of the index. If the writer was preempted, yields the CPU, and then sleeps 50 us at a time:
/// a waiting thread of a higher priority that only yields would keep the writer from the CPU.
///
/// Holders. Only threads that share the table hold a lock of it: workers that link, unlink or migrate states, and the threads
/// that re-check, delete and sweep states. The locks are in private memory, so no client, inspector or other process can
/// hold one. A lookup takes no lock and never waits here.
///
/// Bound. A holder calls no system function, allocates nothing and takes no mutex. It visits the lines of one flow, the states of
/// this flow (one per state name of the rules) or, in a migration, the 10 entries of a line and the lines of each in the next
/// index. One exception: if the next index has no room, which takes a thread that was preempted in the middle of a decision, the
/// holder allocates another one, and migrates the lines of each entry to it first. Locks are taken in ascending order, those of the next
/// index last, so that a waiting thread waits for a chain of at most
/// all other threads, whose last one does not wait. Each holds its locks for microseconds of CPU time.
///
/// The wait is longer only while the kernel does not run a thread of this chain: another thread has its CPU, or it has a page fault
/// in memory that was not prefaulted. A process without `CAP_SYS_NICE` has no higher priority than the engine unless its limits
/// permit it (`RLIMIT_NICE`, `RLIMIT_RTPRIO`: sched(7)). It delays a holder by its share of the CPU only, as any
/// other thread of the engine. A sender of packets does not choose the line of a flow (the hash is secret) and adds no state names: it
/// causes more holds, not longer ones. Each wait of this kind counts in
/// [`Counters::preempted`](crate::state::Counters::preempted).
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
