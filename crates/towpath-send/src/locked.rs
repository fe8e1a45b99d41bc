//! Locked memory: what the kernel lets one user pin, shared by all senders of a process.
//!
//! mm_account_pinned_pages (net/core/skbuff.c) charges each zero-copy call `(len >> 12) + 2` pages to the user, against
//! RLIMIT_MEMLOCK, until its number completes; CAP_IPC_LOCK is exempt. Other processes of the user are charged to the
//! same account, which nobody can read: so this is an estimate, and ENOBUFS is the truth.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The pages that this process may pin, shared by its senders.
#[derive(Debug)]
pub struct LockedMemory {
    limit: u64,
    /// Relaxed everywhere: a counter, which orders nothing else.
    used: AtomicU64,
}

impl LockedMemory {
    /// Lets senders pin `limit` bytes at once.
    pub const fn new(limit: u64) -> Self {
        Self { limit, used: AtomicU64::new(0) }
    }

    /// Three quarters of RLIMIT_MEMLOCK (bytes; none is no limit).
    pub const fn of_rlimit(rlimit: Option<u64>) -> Self {
        match rlimit {
            Some(bytes) => Self::new(bytes / 4 * 3),
            None => Self::new(u64::MAX),
        }
    }

    /// Bytes that may be pinned at once.
    pub const fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes that are charged now; nothing where there is no limit.
    pub fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// The longest call for which there is room now.
    pub(crate) fn room(&self) -> u64 {
        self.limit.saturating_sub(self.used()).saturating_sub(charge(0))
    }

    /// Adds a charge: a call that the kernel took. Two threads may both have seen the same room: the kernel's own account is
    /// what counts, and three quarters leave space for that.
    pub(crate) fn take(&self, charge: u64) {
        // What has no limit needs no account.
        if self.limit != u64::MAX {
            self.used.fetch_add(charge, Relaxed);
        }
    }

    /// Takes back charges.
    pub(crate) fn give_back(&self, charge: u64) {
        if self.limit != u64::MAX && charge > 0 {
            self.used.fetch_sub(charge, Relaxed);
        }
    }
}

/// What the kernel charges for a call of `len` bytes.
pub(crate) const fn charge(len: u64) -> u64 {
    ((len >> 12) + 2) << 12
}

/// What it charges at most for `calls` calls of `bytes` altogether.
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
