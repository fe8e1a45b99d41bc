//! How many messages a worker on another machine has at a time, so that the round trip to it is not lost.
//!
//! A worker of this machine gets one long message at a time: a message that waits at a worker cannot go to another one. A remote worker
//! with one message is idle during each round trip. So it also gets the messages that it completes during one. If a message takes
//! [`LONG`] round trips or more, the loss is small and the time that one would wait behind it is long: then it gets one. So a message waits at a
//! worker for at most `LONG + 1` round trips, as far as messages take equally long.
//!
//! The time per message is that between two completions, and after idle times that from the message to its completion, less a round trip.

use std::time::Duration;

/// Round trips from which a message is long: a worker that has one at a time loses at most a fifth.
const LONG: u64 = 4;

/// What is known of a worker. Times are nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ahead {
    /// 0: unknown, or a worker of this machine.
    round_trip: u64,
    /// Mean time per message; 0: unknown.
    work: u64,
    /// Its last completion, or its first message after it was idle.
    since: u64,
    was_idle: bool,
}

impl Ahead {
    pub(super) fn set_round_trip(&mut self, trip: Duration) {
        self.round_trip = u64::try_from(trip.as_nanos()).unwrap_or(u64::MAX);
    }

    /// It was idle and has a message.
    pub(super) const fn begin(&mut self, now: u64) {
        (self.since, self.was_idle) = (now, true);
    }

    /// It has completed this number of messages.
    pub(super) fn complete(&mut self, count: usize, now: u64) {
        let Some(count) = std::num::NonZeroU64::new(count as u64) else { return };
        let trip = if self.was_idle { self.round_trip } else { 0 };
        let each = (now.saturating_sub(self.since).saturating_sub(trip) / count).max(1);
        self.work = if self.work == 0 { each } else { (self.work - self.work / 8 + each / 8).max(1) };
        (self.since, self.was_idle) = (now, false);
    }

    /// Number of messages that it may have at a time, at least 1.
    pub(super) fn messages(&self) -> usize {
        match self.work {
            0 => 1,
            work if work >= self.round_trip.saturating_mul(LONG) => 1,
            work => 1 + usize::try_from(self.round_trip.div_ceil(work)).unwrap_or(usize::MAX - 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_has_the_messages_of_a_round_trip() {
        // Rows: round trip and time per message in microseconds, messages.
        let rows = [
            (0, 500, 1),
            (300, 2000, 1),
            (300, 1200, 1),
            (300, 1199, 2),
            (300, 500, 2),
            (300, 300, 2),
            (300, 100, 4),
            (20_000, 500, 41),
        ];
        for (trip, work, expected) in rows {
            let mut ahead = Ahead::default();
            ahead.set_round_trip(Duration::from_micros(trip));
            assert_eq!(ahead.messages(), 1, "nothing is known");
            let (trip, work) = (trip * 1000, work * 1000);
            // One at a time, and then without idle times: both give the time per message.
            let mut now = 5;
            for _ in 0..20 {
                ahead.begin(now);
                now += trip + work;
                ahead.complete(1, now);
                now += 1_000_000;
            }
            assert_eq!(ahead.messages(), expected, "{trip} {work}");
            ahead.begin(now);
            now += trip + work;
            ahead.complete(1, now);
            for count in [1, 2, 3, 1, 1] {
                now += work * count as u64;
                ahead.complete(count, now);
            }
            assert_eq!(ahead.messages(), expected, "{trip} {work}");
        }
    }
}
