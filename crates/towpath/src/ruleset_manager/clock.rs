//! The clock of an engine's states.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use towpath_wire::Time;

/// The clock of an engine's states: the last time that the engine set.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    now: Arc<AtomicU64>,
    /// Time since 1970 at which the clock is 0, in nanoseconds. 0 in a replay, whose clock is the capture's time.
    zero: Arc<AtomicU64>,
}

impl Clock {
    /// Sets the time. Several threads may call this; the clock never goes back.
    pub fn set(&self, now: Time) {
        // Relaxed, both: a slightly old time is acceptable, and the value does not guard other data.
        if self.now.load(Ordering::Relaxed) < now.as_nanos() {
            self.now.fetch_max(now.as_nanos(), Ordering::Relaxed);
        }
    }

    /// Returns the time that the engine set last.
    pub fn now(&self) -> Time {
        // Relaxed: see `set`.
        Time::from_nanos(self.now.load(Ordering::Relaxed))
    }

    /// Sets the time since 1970 at which the clock is 0.
    pub fn set_zero(&self, zero: Duration) {
        // Relaxed: a number alone.
        self.zero.store(u64::try_from(zero.as_nanos()).unwrap_or(0), Ordering::Relaxed);
    }

    /// Returns a time of this clock as time since 1970.
    pub fn wall(&self, time: Time) -> Time {
        // Relaxed: see `set_zero`.
        Time::from_nanos(time.as_nanos().saturating_add(self.zero.load(Ordering::Relaxed)))
    }
}
