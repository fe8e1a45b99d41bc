use rustix::time::{ClockId, clock_gettime};
use towpath_wire::Time;

/// The monotonic clock of one sender, read as seldom as can be: a reading costs as much as everything else that is done about a
/// short message.
///
/// The kernel's coarse clock (it moves with the timer interrupt, every 1 to 10 ms) is read instead, which is four times as fast. While
/// it stands still and sends come thick, the precise clock is read at every sixteenth of them.
#[derive(Debug)]
pub(crate) struct Clock {
    origin: i64,
    tick: i64,
    /// Readings since the coarse clock moved.
    readings: u32,
    last: Time,
}

/// Readings in one tick from which on they count as thick.
const THICK: u32 = 64;
const EVERY: u32 = 16;

impl Clock {
    pub(crate) fn new() -> Self {
        Self { origin: nanos(ClockId::Monotonic), tick: 0, readings: 0, last: Time::default() }
    }

    /// Now, precisely.
    pub(crate) fn read(&mut self) -> Time {
        let since = nanos(ClockId::Monotonic).saturating_sub(self.origin);
        self.last = Time::from_nanos(u64::try_from(since).unwrap_or(0)).max(self.last);
        self.last
    }

    /// Now, or the time of one of the last few sends.
    pub(crate) fn glance(&mut self) -> Time {
        let tick = nanos(ClockId::MonotonicCoarse);
        if tick != self.tick {
            (self.tick, self.readings) = (tick, 0);
        }
        self.readings += 1;
        if self.readings > THICK && !self.readings.is_multiple_of(EVERY) {
            return self.last;
        }
        self.read()
    }
}

fn nanos(clock: ClockId) -> i64 {
    let time = clock_gettime(clock);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_glance_is_never_behind_another_and_never_ahead() {
        let mut clock = Clock::new();
        let mut before = Time::default();
        for _ in 0..10_000 {
            let now = clock.glance();
            assert!(now >= before && now <= clock.read());
            before = clock.last;
        }
    }
}
