//! How long a full socket is left alone.
//!
//! Each notification wakes whoever polls the socket, whether there is room to send in or not: POLLERR cannot be masked. While a sender
//! waits for room that is one wake-up for every few hundred KiB, and on a fast path, where a wake-up costs as much as sending 100 KiB
//! without a copy does, most of what sending costs. So it sleeps first, for about a third of the time in which the socket would run
//! empty, and polls then: as a network device moderates its interrupts.
//!
//! What always holds: a pause is at most [`LONGEST`], and after one in which more than half of the queue has gone the next is half as
//! long. Where a queue empties faster than can be slept, nothing is slept.

use std::time::Duration;

/// The first pause, and what is not worth sleeping: a timer comes some 50 us late.
const SHORTEST: Duration = Duration::from_micros(100);
const LONGEST: Duration = Duration::from_millis(4);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Moderation {
    pause: Duration,
    /// Times in a row that the queue emptied faster than can be slept.
    fast: u32,
}

impl Moderation {
    pub(crate) const fn new() -> Self {
        Self { pause: SHORTEST, fast: 0 }
    }

    /// How long to sleep before the socket is polled.
    pub(crate) fn pause(&self) -> Option<Duration> {
        (self.fast < GIVEN_UP).then_some(self.pause)
    }

    /// The socket's queue had so many bytes before the pause, and has so many now.
    pub(crate) fn handle_slept(&mut self, before: u64, now: u64) {
        let gone = before.saturating_sub(now);
        if gone > before / 2 {
            self.fast += u32::from(self.pause == SHORTEST);
            self.pause = (self.pause / 2).max(SHORTEST);
            return;
        }
        self.fast = 0;
        if gone < before / 4 {
            self.pause = (self.pause * 2).min(LONGEST);
        }
    }
}

/// After so many in a row nothing is slept any more.
const GIVEN_UP: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    /// A socket of `size` bytes that empties at `rate` bytes a second and is full before each pause: the last pause, and how often of a
    /// hundred times it ran empty.
    fn play(size: u64, rate: u64) -> (Option<Duration>, usize) {
        let mut moderation = Moderation::new();
        let mut empty = 0;
        for _ in 0..100 {
            let Some(pause) = moderation.pause() else { break };
            let left = size.saturating_sub((pause.as_secs_f64() * rate as f64) as u64);
            empty += usize::from(left == 0);
            moderation.handle_slept(size, left);
        }
        (moderation.pause(), empty)
    }

    #[test]
    fn a_quarter_to_a_half_of_the_queue_goes_meanwhile() {
        for (size, rate) in [(8 << 20, 2_500_000_000_u64), (8 << 20, 5_000_000_000), (1 << 20, 1_000_000_000)]
        {
            let (pause, empty) = play(size, rate);
            let gone = pause.map(|pause| pause.as_secs_f64() * rate as f64 / size as f64);
            assert!(gone.is_some_and(|gone| (0.25..=0.5).contains(&gone)), "{size} at {rate}: {gone:?}");
            assert_eq!(empty, 0);
        }
    }

    #[test]
    fn slow_ones_wait_no_longer_than_the_longest_and_fast_ones_not_at_all() {
        assert_eq!(play(8 << 20, 1_000_000), (Some(LONGEST), 0));
        let (pause, empty) = play(64 << 10, 10_000_000_000);
        assert!(pause.is_none() && empty <= GIVEN_UP as usize);
    }
}
