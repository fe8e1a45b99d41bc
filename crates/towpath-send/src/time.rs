use rustix::time::{ClockId, clock_gettime};
use towpath_wire::Time;

/// The monotonic clock of one sender. It avoids precise readings, because one costs as much as the rest of sending a short
/// message.
///
/// `glance` reads the kernel's coarse clock, which is four times as fast and advances with the timer interrupt (every 1 to 10 ms).
/// With more than 64 readings in one tick, it reads the precise clock at every sixteenth reading only.
#[derive(Debug)]
pub(crate) struct Clock {
    origin: i64,
    tick: i64,
    /// Readings since the coarse clock advanced.
    readings: u32,
    last: Time,
}

/// Readings in one tick after which only every `EVERY`th reads the precise clock.
const THICK: u32 = 64;
const EVERY: u32 = 16;

impl Clock {
    pub(crate) fn new() -> Self {
        Self { origin: nanos(ClockId::Monotonic), tick: 0, readings: 0, last: Time::default() }
    }

    /// The precise time.
    pub(crate) fn read(&mut self) -> Time {
        let since = nanos(ClockId::Monotonic).saturating_sub(self.origin);
        self.last = Time::from_nanos(u64::try_from(since).unwrap_or(0)).max(self.last);
        self.last
    }

    /// The time of this call, or of one of the last few calls.
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
    fn glances_are_monotonic_and_never_in_the_future() {
        let mut clock = Clock::new();
        let mut before = Time::default();
        for _ in 0..10_000 {
            let now = clock.glance();
            assert!(now >= before && now <= clock.read());
            before = clock.last;
        }
    }
}
