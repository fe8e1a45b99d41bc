//! Back-off of a sender whose socket is full.
//!
//! Each MSG_ZEROCOPY completion on the error queue wakes the thread that polls the socket, whether there is room to send or not:
//! POLLERR cannot be masked. A sender that waits for room would be woken for every few hundred KiB. On a fast path a wake-up costs
//! as much as sending 100 KiB without a copy, so wake-ups would dominate the cost. The sender therefore sleeps first, for about a
//! third of the time in which the socket would drain, and polls afterwards: the equivalent of interrupt moderation in a network
//! device.
//!
//! Invariants: a pause is at most [`LONGEST`], and a pause in which more than half of the queue drained is followed by one of half
//! the length. After [`GIVEN_UP`] consecutive shortest pauses that each drained more than half of the queue, the sender never sleeps
//! again.

use std::time::Duration;

/// The first and shortest pause. Shorter sleeps are not worthwhile: a timer fires some 50 us late.
const SHORTEST: Duration = Duration::from_micros(100);
const LONGEST: Duration = Duration::from_millis(4);

#[derive(Clone, Copy, Debug)]
pub(crate) struct TxBackoff {
    pause: Duration,
    /// Consecutive pauses of the shortest length in which more than half of the queue drained.
    fast: u32,
}

impl TxBackoff {
    pub(crate) const fn new() -> Self {
        Self { pause: SHORTEST, fast: 0 }
    }

    /// Time to sleep before polling the socket; `None` polls at once.
    pub(crate) fn pause(&self) -> Option<Duration> {
        (self.fast < GIVEN_UP).then_some(self.pause)
    }

    /// Adapts the pause. The socket's queue had `before` bytes before the pause and has `now` bytes after it.
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

/// Value of `fast` at which the sender stops sleeping.
const GIVEN_UP: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a socket of `size` bytes that drains at `rate` bytes per second and is full before each pause. Returns the last pause, and
    /// how many of a hundred pauses drained the queue.
    fn play(size: u64, rate: u64) -> (Option<Duration>, usize) {
        let mut tx_backoff = TxBackoff::new();
        let mut empty = 0;
        for _ in 0..100 {
            let Some(pause) = tx_backoff.pause() else { break };
            let left = size.saturating_sub((pause.as_secs_f64() * rate as f64) as u64);
            empty += usize::from(left == 0);
            tx_backoff.handle_slept(size, left);
        }
        (tx_backoff.pause(), empty)
    }

    #[test]
    fn a_pause_drains_a_quarter_to_a_half_of_the_queue() {
        for (size, rate) in [(8 << 20, 2_500_000_000_u64), (8 << 20, 5_000_000_000), (1 << 20, 1_000_000_000)]
        {
            let (pause, empty) = play(size, rate);
            let gone = pause.map(|pause| pause.as_secs_f64() * rate as f64 / size as f64);
            assert!(gone.is_some_and(|gone| (0.25..=0.5).contains(&gone)), "{size} at {rate}: {gone:?}");
            assert_eq!(empty, 0);
        }
    }

    #[test]
    fn slow_queues_pause_at_most_longest_and_fast_queues_do_not_pause() {
        assert_eq!(play(8 << 20, 1_000_000), (Some(LONGEST), 0));
        let (pause, empty) = play(64 << 10, 10_000_000_000);
        assert!(pause.is_none() && empty <= GIVEN_UP as usize);
    }
}
