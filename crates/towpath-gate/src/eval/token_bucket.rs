//! Policers: token buckets. A bucket stores the time at which it would be full again.
//!
//! The time is one word, changed by compare-and-exchange: the rate holds for all walkers together.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::rules::Pipe;
use towpath_wire::Time;

/// Minimum default burst: two full Ethernet frames.
const MIN_BURST: u64 = 3028;

/// A token bucket.
#[derive(Debug)]
pub(super) struct TokenBucket {
    rate: u64,
    burst: u64,
    /// Time at which the bucket is full again, in nanoseconds.
    full_at: AtomicU64,
}

impl TokenBucket {
    pub(super) fn new(pipe: Pipe) -> Self {
        // Default burst: the traffic of 50 ms.
        let burst = if pipe.burst == 0 { (pipe.rate / 8 / 20).max(MIN_BURST) } else { pipe.burst };
        Self { rate: pipe.rate, burst, full_at: AtomicU64::new(0) }
    }

    /// Returns true if the bucket has the rate and burst of `pipe`.
    pub(super) fn has_config(&self, pipe: Pipe) -> bool {
        let other = Self::new(pipe);
        (self.rate, self.burst) == (other.rate, other.burst)
    }

    /// Takes tokens for `bytes`. Returns false if the packet exceeds the rate.
    pub(super) fn take(&self, bytes: u64, now: Time) -> bool {
        if self.rate == 0 {
            return true;
        }
        let nanos = |bytes: u64| (u128::from(bytes) * 8_000_000_000 / u128::from(self.rate)) as u64;
        let later = |full_at: u64| {
            let end = full_at.max(now.as_nanos()).saturating_add(nanos(bytes));
            (end - now.as_nanos() <= nanos(self.burst.max(bytes))).then_some(end)
        };
        // Relaxed: the word guards no other data.
        self.full_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_and_burst_are_enforced() {
        let bucket = TokenBucket::new(Pipe { rate: 8_000_000, burst: 10_000 });
        let second = 1_000_000_000u64;
        let at_once = (0..100).filter(|_| bucket.take(1000, Time::from_nanos(5 * second))).count();
        assert_eq!(at_once, 10);
        // 1 MB/s: one packet of 1000 bytes per millisecond.
        let passed = (1..=1000u64)
            .flat_map(|ms| [ms, ms])
            .filter(|ms| bucket.take(1000, Time::from_nanos(5 * second + ms * 1_000_000)))
            .count();
        assert_eq!(passed, 1000);
    }
}
