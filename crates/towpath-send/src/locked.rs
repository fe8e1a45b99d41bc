//! Account of locked memory: the memory that the kernel lets one user pin, shared by all senders of a process.
//!
//! mm_account_pinned_pages (net/core/skbuff.c) charges each zero-copy call `(len >> 12) + 2` pages to the user until its number
//! completes, against RLIMIT_MEMLOCK; CAP_IPC_LOCK is exempt. Other processes of the user share that account, and user space
//! cannot read it. This account is therefore an estimate, and ENOBUFS is authoritative.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The memory that this process may pin, shared by its senders.
#[derive(Debug)]
pub struct LockedMemory {
    limit: u64,
    /// Relaxed everywhere: the counter orders no other memory access.
    used: AtomicU64,
}

impl LockedMemory {
    /// An account with a limit of `limit` bytes.
    pub const fn new(limit: u64) -> Self {
        Self { limit, used: AtomicU64::new(0) }
    }

    /// Three quarters of `rlimit` (RLIMIT_MEMLOCK in bytes); `None` is unlimited.
    pub const fn of_rlimit(rlimit: Option<u64>) -> Self {
        match rlimit {
            Some(bytes) => Self::new(bytes / 4 * 3),
            None => Self::new(u64::MAX),
        }
    }

    /// Limit in bytes.
    pub const fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes charged at present; 0 without a limit.
    pub fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// Longest call that fits now.
    pub(crate) fn room(&self) -> u64 {
        self.limit.saturating_sub(self.used()).saturating_sub(charge(0))
    }

    /// Charges a call that the kernel accepted. Two threads may both have seen the same room; the limit of three quarters leaves
    /// a reserve for this, and the kernel's account decides.
    pub(crate) fn take(&self, charge: u64) {
        // Without a limit no account is kept.
        if self.limit != u64::MAX {
            self.used.fetch_add(charge, Relaxed);
        }
    }

    /// Credits charges.
    pub(crate) fn give_back(&self, charge: u64) {
        if self.limit != u64::MAX && charge > 0 {
            self.used.fetch_sub(charge, Relaxed);
        }
    }
}

/// The kernel's charge for a call of `len` bytes.
pub(crate) const fn charge(len: u64) -> u64 {
    ((len >> 12) + 2) << 12
}

/// Upper bound of the charge for `calls` calls of `bytes` in total.
pub(crate) const fn charges(calls: u64, bytes: u64) -> u64 {
    bytes + calls * charge(0)
}

#[cfg(test)]
mod tests {
    use super::{LockedMemory, charge};

    #[test]
    fn a_call_that_fits_the_room_fits_the_limit() {
        let locked = LockedMemory::of_rlimit(Some(256 << 10));
        assert_eq!(locked.limit(), 192 << 10);
        locked.take(charge(100_000));
        assert_eq!(locked.used(), 26 << 12);
        locked.take(charge(locked.room()));
        assert!(locked.used() <= locked.limit());
        assert_eq!(locked.room(), 0);
        locked.give_back(charge(100_000));
        assert_eq!(locked.room(), 24 << 12, "whole pages, and two for the next call");
        assert_eq!(LockedMemory::of_rlimit(None).limit(), u64::MAX);
    }
}
