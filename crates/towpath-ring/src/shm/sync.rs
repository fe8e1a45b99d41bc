//! All atomics of the crate, so that loom can replace them.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, compiler_fence, fence};

#[cfg(not(loom))]
pub(crate) use crate::shm::sys::membarrier;

#[cfg(loom)]
// loom has no membarrier(2): the model uses a fence on both sides.
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence, fence as compiler_fence};

/// The caller has executed its own fence.
#[cfg(loom)]
pub(crate) fn membarrier() -> std::io::Result<()> {
    Ok(())
}
