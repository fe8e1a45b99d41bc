//! The load of an engine thread. The thread counts in a thread-local cell and reads it in a query, so nothing is shared.

use std::cell::Cell;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use towpath_metrics::metrics;

metrics! {
    /// Load of an engine thread. Its busy share is the increase of `busy` in a second.
    pub struct ThreadStats in "thread" {
        /// Time in which the thread processed packets and messages. The rest is polling and sleep.
        pub busy: counter nanoseconds,
        /// Time in which the thread slept.
        pub asleep: counter nanoseconds,
        /// Times that the thread slept.
        pub sleeps: counter events,
        /// CPU time of the thread.
        pub cpu: counter nanoseconds,
    }
}

thread_local! {
    static THIS: Cell<ThreadStats> = const { Cell::new(ThreadStats { busy: 0, asleep: 0, sleeps: 0, cpu: 0 }) };
}

/// The load of the calling thread.
pub(crate) fn this() -> ThreadStats {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    ThreadStats { cpu: time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64, ..THIS.get() }
}

/// Divides the time of the calling thread into work, polling and sleep.
#[derive(Debug)]
pub(crate) struct LoadClock {
    last: Instant,
}

impl LoadClock {
    pub(crate) fn new(now: Instant) -> Self {
        Self { last: now }
    }

    /// Assigns the time since the last call to work if `worked` is set, and to polling otherwise.
    pub(crate) fn tick(&mut self, now: Instant, worked: bool) {
        let since = std::mem::replace(&mut self.last, now);
        if worked {
            change(|stats| stats.busy += nanoseconds(now - since));
        }
    }

    /// Assigns the time since the last [`tick`](Self::tick) to sleep.
    pub(crate) fn slept(&mut self, now: Instant) {
        let since = std::mem::replace(&mut self.last, now);
        change(|stats| {
            stats.asleep += nanoseconds(now - since);
            stats.sleeps += 1;
        });
    }
}

fn change(change: impl FnOnce(&mut ThreadStats)) {
    let mut stats = THIS.get();
    change(&mut stats);
    THIS.set(stats);
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_work_polling_or_sleep() {
        let begin = Instant::now();
        let at = |nanoseconds| begin + Duration::from_nanos(nanoseconds);
        let mut clock = LoadClock::new(begin);
        clock.tick(at(10), true);
        clock.tick(at(15), false);
        clock.slept(at(115));
        clock.tick(at(118), true);
        let stats = this();
        assert_eq!((stats.busy, stats.asleep, stats.sleeps), (13, 100, 1));
        assert!(stats.cpu > 0);
    }
}
