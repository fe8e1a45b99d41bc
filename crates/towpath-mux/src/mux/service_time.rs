//! Estimates of the time that a worker needs for a message.
//!
//! What: [`ServiceTime`] holds four estimates, in nanoseconds, updated once per turn with the turn's time per message. The
//! scheduler sizes turns by them and decides whether waking another worker is worth its cost ([`super::wake`]).
//!
//! A turn counts once, whatever its number of messages, so that a batch of fast messages does not hide one slow message.

/// Another worker is woken for short messages only if their work takes at least as long as this number of wake-ups.
pub(super) const WORTH: u64 = 5;
/// Length of a turn while no other worker is idle, in wake-ups.
const BUSY_TURN: u64 = 10;

/// Running estimates of the service time per message, in nanoseconds. All are 0 before the first message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ServiceTime {
    /// Exponentially weighted moving average; weight of a new turn: 1/16.
    pub(super) ewma: u64,
    /// The same average with weight 1/16 upward and 1/64 downward: it remembers slow messages for longer.
    pub(super) ewma_slow: u64,
    /// Approximate median: moves by 1/16 towards each turn's value. A preempted worker or a rare slow message hardly changes it.
    pub(super) median: u64,
    /// Approximate minimum of the recent turns. Grows by 1/64 per turn, so it doubles in about fifty longer turns.
    pub(super) floor: u64,
}

impl ServiceTime {
    /// Adds a turn that took `each` nanoseconds per message; at least 1.
    pub(super) fn record(&mut self, each: u64) {
        let step = self.median / 16 + 1;
        self.median = match self.median {
            0 => each,
            median if each > median => (median + step).min(each),
            median => median.saturating_sub(step).max(each),
        };
        self.floor = match self.floor {
            0 => each,
            floor => each.min(floor + floor / 64 + 1),
        };
        self.ewma = if self.ewma == 0 { each } else { (self.ewma - self.ewma / 16 + each / 16).max(1) };
        self.ewma_slow = match self.ewma_slow {
            slow if each > slow => slow + (each - slow) / 16,
            slow => slow - (slow - each) / 64,
        };
    }

    /// Returns true if no message has been measured.
    pub(super) const fn is_unknown(&self) -> bool {
        self.median == 0
    }

    /// Number of messages that together take [`WORTH`] wake-ups of `cost` nanoseconds. `None` if the service time is unknown or
    /// not below `cost`.
    pub(super) fn short_batch(&self, cost: u64) -> Option<usize> {
        let known = self.median > 0 && self.median < cost;
        known.then(|| (cost.saturating_mul(WORTH) / self.median) as usize)
    }

    /// The same, at least 1, if all recent messages were short. Worker processes are measured including their wake-up, which makes
    /// small batches look slow; the floor decides instead of the median.
    pub(super) fn quick_batch(&self, cost: u64) -> Option<usize> {
        let worth = cost.saturating_mul(WORTH);
        let quick = self.median > 0 && self.floor < cost && self.ewma_slow < worth;
        quick.then(|| (worth / self.median).max(1) as usize)
    }

    /// Returns true if `messages` take long enough to wake another worker meanwhile: one wake-up for long messages, [`WORTH`]
    /// wake-ups for short ones. True if the service time is unknown.
    pub(super) const fn is_long(&self, messages: usize, cost: u64) -> bool {
        let least = if self.median >= cost { cost } else { cost.saturating_mul(WORTH) };
        self.median == 0 || self.median.saturating_mul(messages as u64) >= least
    }

    /// Messages of one turn, 1 to `most`: as many as take one wake-up while another worker is idle (`others_idle`), ten times
    /// as many otherwise. 1 if the service time is unknown.
    pub(super) fn turn(&self, others_idle: bool, cost: u64, most: u64) -> usize {
        let budget = if others_idle { cost } else { cost.saturating_mul(BUSY_TURN) };
        budget.checked_div(self.ewma).map_or(1, |count| count.clamp(1, most) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(turns: impl IntoIterator<Item = u64>) -> ServiceTime {
        let mut time = ServiceTime::default();
        turns.into_iter().for_each(|each| time.record(each));
        time
    }

    #[test]
    fn one_slow_turn_moves_the_averages_but_not_median_and_floor() {
        let time = recorded((0..100).map(|_| 100).chain([1_000_000]));
        assert!(time.ewma > 50_000 && time.ewma_slow > 50_000, "{time:?}");
        assert!(time.median < 120 && time.floor < 120, "{time:?}");
    }

    #[test]
    fn the_slow_average_falls_four_times_slower() {
        let time = recorded([1_000_000].into_iter().chain((0..64).map(|_| 100)));
        assert!(time.ewma_slow > time.ewma, "{time:?}");
    }

    #[test]
    fn turns_are_bounded_and_start_with_one_message() {
        let (cost, most) = (20_000, 64);
        assert_eq!(ServiceTime::default().turn(false, cost, most), 1);
        assert!(
            ServiceTime::default().is_long(1, cost) && ServiceTime::default().short_batch(cost).is_none()
        );
        let time = recorded([1000; 100]);
        assert_eq!((time.turn(true, cost, most), time.turn(false, cost, most)), (20, 64));
        assert_eq!((time.short_batch(cost), time.quick_batch(cost)), (Some(100), Some(100)));
        assert!(time.is_long(100, cost) && !time.is_long(99, cost));
        let time = recorded([50_000; 100]);
        assert_eq!(
            (time.turn(true, cost, most), time.short_batch(cost), time.quick_batch(cost)),
            (1, None, None)
        );
        assert!(time.is_long(1, cost));
    }
}
