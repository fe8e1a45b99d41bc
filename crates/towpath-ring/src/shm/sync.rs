//! Every atomic of the crate comes from here, so that loom can replace them.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, compiler_fence, fence};

#[cfg(not(loom))]
pub(crate) use crate::shm::sys::membarrier;

// loom has no fence that another thread passes for us: a fence on both sides is what it comes to.
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence, fence as compiler_fence};

/// The caller's own fence stands before it.
#[cfg(loom)]
pub(crate) fn membarrier() -> std::io::Result<()> {
    Ok(())
}
