//! Memory budget of one connection: locked memory, and the kernel's records of it (optmem).
//!
//! ENOBUFS has two causes with the same errno. (a) Locked memory, per user: see [`LockedMemory`]. (b) Option memory, per
//! socket: each group of calls is an skb of about 576 bytes, charged to the socket until its notification is read;
//! net.core.optmem_max limits it. On TCP a group takes unsent calls until it has 512 KiB, so the number of groups is an
//! estimate; each datagram is one group.
//!
//! The send buffer needs no budget: data in flight is charged to it (sk_wmem_queued), copied or not.
//!
//! Both budgets are halved at ENOBUFS and doubled after ten seconds without one. Without room the send is plain, which is always
//! possible: progress never depends on completions.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::Ahead;
use crate::locked::{self, LockedMemory};
use towpath_wire::Time;

/// Charge of one group: sizeof(struct sk_buff) and its head, sock_omalloc (net/core/sock.c), rounded.
const GROUP_COST: u64 = 576;
/// Bytes per group on TCP: byte_limit of `msg_zerocopy_realloc` (net/core/skbuff.c).
const GROUP_BYTES: u64 = 512 << 10;
/// Lower bound of a halved budget.
const LEAST: u64 = 64 << 10;
/// Time without ENOBUFS after which a halved budget is doubled.
const QUIET: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Budget {
    locked: Arc<LockedMemory>,
    /// Configured limits on bytes and groups, and the limits after ENOBUFS.
    ceiling: Limits,
    limits: Limits,
    /// True if calls share groups.
    stream: bool,
    bytes: u64,
    calls: u64,
    quiet_since: Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limits {
    bytes: u64,
    groups: u64,
}

/// Completed calls, to be credited together.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Freed {
    calls: u64,
    bytes: u64,
    /// The kernel's charge for these calls.
    charge: u64,
}

impl Freed {
    pub(crate) fn add(&mut self, bytes: u64) {
        self.calls += 1;
        self.bytes += bytes;
        self.charge += locked::charge(bytes);
    }
}

impl Budget {
    pub(crate) fn new(locked: Arc<LockedMemory>, bytes: u64, optmem: u64, stream: bool) -> Self {
        let groups = (optmem / 4 * 3 / GROUP_COST).max(1);
        let ceiling = Limits { bytes: bytes.min(locked.limit()).max(LEAST), groups };
        Self { locked, ceiling, limits: ceiling, stream, bytes: 0, calls: 0, quiet_since: Time::default() }
    }

    /// Limit on pinned bytes at present.
    pub(crate) fn limit(&self) -> u64 {
        self.limits.bytes
    }

    /// Length of the longest call that fits now, after the calls in `ahead`.
    pub(crate) fn room(&mut self, ahead: Ahead, now: Time) -> u64 {
        if self.limits != self.ceiling && now.since(self.quiet_since) >= QUIET {
            self.quiet_since = now;
            self.limits.bytes = self.limits.bytes.saturating_mul(2).min(self.ceiling.bytes);
            self.limits.groups = (self.limits.groups * 2).min(self.ceiling.groups);
        }
        let (bytes, calls) = (self.bytes + ahead.bytes, self.calls + ahead.calls as u64);
        let by_groups = if self.stream {
            (self.limits.groups * GROUP_BYTES).saturating_sub(bytes)
        } else if calls < self.limits.groups {
            u64::MAX
        } else {
            0
        };
        let locked = self.locked.room().saturating_sub(locked::charges(ahead.calls as u64, ahead.bytes));
        self.limits.bytes.saturating_sub(bytes).min(by_groups).min(locked)
    }

    pub(crate) fn take(&mut self, bytes: u64) {
        self.locked.take(locked::charge(bytes));
        self.bytes += bytes;
        self.calls += 1;
    }

    pub(crate) fn give_back(&mut self, freed: Freed) {
        self.locked.give_back(freed.charge);
        self.bytes -= freed.bytes;
        self.calls -= freed.calls;
    }

    /// Halves the budget: the kernel returned ENOBUFS although the error queue had been read.
    pub(crate) fn halve(&mut self, now: Time) {
        self.quiet_since = now;
        self.limits.bytes = (self.limits.bytes / 2).max(LEAST.min(self.ceiling.bytes));
        self.limits.groups = (self.limits.groups / 2).max(1);
    }

    /// Credits all outstanding calls: their frames go into quarantine. The kernel still charges the user for them, but the
    /// connection no longer does.
    pub(crate) fn abandon(&mut self, calls: impl Iterator<Item = u64>) {
        let mut freed = Freed::default();
        calls.for_each(|bytes| freed.add(bytes));
        self.give_back(freed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(locked: u64, optmem: u64, stream: bool) -> Budget {
        Budget::new(Arc::new(LockedMemory::new(locked)), 8 << 20, optmem, stream)
    }

    #[test]
    fn the_smallest_limit_applies() {
        let now = Time::default();
        // 16 pages; the call itself is charged two of them.
        assert_eq!(budget(64 << 10, 1 << 20, true).room(Ahead::default(), now), 56 << 10);
        assert_eq!(budget(1 << 40, 1500, true).room(Ahead::default(), now), 512 << 10);
        assert_eq!(budget(1 << 40, 1 << 20, true).room(Ahead::default(), now), 8 << 20);
        let mut datagrams = budget(1 << 40, 1500, false);
        datagrams.take(100);
        assert_eq!(datagrams.room(Ahead::default(), now), 0, "one group of 576 bytes");
        let mut freed = Freed::default();
        freed.add(100);
        datagrams.give_back(freed);
        assert_eq!(datagrams.room(Ahead::default(), now), 8 << 20);
    }

    #[test]
    fn budgets_halve_at_enobufs_and_double_when_quiet() {
        let mut budget = budget(1 << 40, 1 << 20, true);
        let mut now = Time::default();
        for _ in 0..40 {
            budget.halve(now);
        }
        assert_eq!((budget.limit(), budget.room(Ahead::default(), now)), (LEAST, LEAST));
        for _ in 0..11 {
            now = now + QUIET;
            budget.room(Ahead::default(), now);
        }
        assert_eq!(budget.limit(), 8 << 20);
        assert_eq!(budget.limits, budget.ceiling);
    }

    #[test]
    fn connections_share_locked_memory() {
        let locked = Arc::new(LockedMemory::new(1 << 20));
        let mut budgets = [(); 2].map(|()| Budget::new(locked.clone(), 8 << 20, 1 << 20, true));
        budgets[0].take(1000 << 10);
        assert!(budgets[1].room(Ahead::default(), Time::default()) < 24 << 10);
        budgets[0].abandon([1000 << 10].into_iter());
        assert_eq!(locked.used(), 0);
    }
}
