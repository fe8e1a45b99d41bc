//! The engine's clocks: wall-clock time for deadlines, and the time of the dynamic states.
//!
//! States of a live engine expire by the wall clock, those of a replay by the time stamps of the captures. The time of the states
//! never goes back.

use std::time::Duration;

use towpath_wire::Time;

/// Interval between collections of expired states, by the clock of the states.
const EXPIRE_EVERY: Duration = Duration::from_millis(1);
/// Number of states that one collection examines.
const EXPIRE_BUDGET: usize = 256;

/// Maximum number of states that one collection examines after a sleep: about 1 ms of work.
const EXPIRE_MAX: usize = 8192;

#[derive(Debug, Default)]
pub(crate) struct Clock {
    live: bool,
    /// Wall-clock time in nanoseconds.
    pub(crate) wall: u64,
    /// Time of the states.
    pub(crate) now: Time,
    /// Time of the states at each packet of the burst, for a replay.
    times: Vec<Time>,
    expire_at: Time,
    /// Time of the first packet.
    started: Option<Time>,
}

impl Clock {
    pub(crate) fn new(live: bool) -> Self {
        Self { live, ..Self::default() }
    }

    /// Sets the wall-clock time, and the time of the states of a live engine.
    pub(crate) fn set_wall(&mut self, wall: u64) {
        self.wall = wall;
        if self.live {
            self.now = self.now.max(Time::from_nanos(wall));
        }
    }

    /// Sets the time of the states at each packet of the next burst of a replay.
    pub(crate) fn set_times(&mut self, times: &[Time]) {
        self.times.clear();
        self.times.extend_from_slice(times);
    }

    pub(crate) fn clear_times(&mut self) {
        self.times.clear();
    }

    /// Advances the time of the states of a replay to the packet at `index` of the burst, captured at `stamp` nanoseconds.
    #[inline]
    pub(crate) fn packet(&mut self, index: usize, stamp: u64) {
        if !self.live {
            let time = self.times.get(index).copied().unwrap_or(Time::from_nanos(stamp));
            self.now = self.now.max(time);
        }
        self.started.get_or_insert(self.now);
    }

    /// Returns how many states to examine for expiry, if a collection is due. After a sleep the number is larger.
    pub(crate) fn expire_budget(&mut self) -> Option<usize> {
        if self.now < self.expire_at {
            return None;
        }
        let late = self.now.as_nanos() - self.expire_at.as_nanos();
        let turns = 1 + late / EXPIRE_EVERY.as_nanos() as u64;
        self.expire_at = self.now + EXPIRE_EVERY;
        let budget = usize::try_from(turns).map_or(EXPIRE_MAX, |turns| turns.saturating_mul(EXPIRE_BUDGET));
        Some(budget.min(EXPIRE_MAX))
    }

    /// Time from the first packet to now, on the clock of the states.
    pub(crate) fn span(&self) -> Duration {
        self.started.map_or(Duration::ZERO, |started| self.now.since(started))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replay_time_follows_the_captures_and_never_goes_back() {
        let mut clock = Clock::new(false);
        clock.set_wall(1 << 60);
        clock.set_times(&[Time::from_nanos(7)]);
        clock.packet(0, 99);
        assert_eq!(clock.now, Time::from_nanos(7));
        clock.packet(1, 50);
        clock.packet(2, 9);
        assert_eq!((clock.now, clock.span()), (Time::from_nanos(50), Duration::from_nanos(43)));
    }

    #[test]
    fn live_time_is_the_wall_clock() {
        let mut clock = Clock::new(true);
        for (wall, now) in [(5, 5), (9, 9), (8, 9)] {
            clock.set_wall(wall);
            clock.packet(0, 1 << 60);
            assert_eq!(clock.now, Time::from_nanos(now));
        }
    }

    #[test]
    fn a_collection_is_due_every_millisecond_and_larger_after_a_sleep() {
        let mut clock = Clock::new(true);
        let rows = [
            (0, Some(256)),
            (999_999, None),
            (1_000_000, Some(256)),
            (4_000_000, Some(768)),
            (1 << 40, Some(8192)),
        ];
        for (wall, budget) in rows {
            clock.set_wall(wall);
            assert_eq!(clock.expire_budget(), budget, "at {wall}");
        }
    }
}
