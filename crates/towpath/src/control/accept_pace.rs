//! Bounds the share of a CPU that new connections cost: a peer that connects in a loop otherwise keeps a thread of the engine and the
//! helper threads busy, and packets wait for a CPU. During a pause, connections wait in the kernel's backlog.

use std::time::{Duration, Instant};

/// Pause after a turn, as a multiple of its time: new connections cost at most a twentieth of a CPU.
const PAUSE: u32 = 19;

/// Longest pause. Without this limit, a thread that was preempted in a turn would pause for a multiple of the preemption.
const LONGEST: Duration = Duration::from_millis(50);

/// A turn accepts no further connection after this time.
const TURN: Duration = Duration::from_micros(200);

/// The pace of one thread. See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct AcceptPace {
    until: Option<Instant>,
}

impl AcceptPace {
    /// Time until the next turn. Zero: it may begin.
    pub(crate) fn left(&self, now: Instant) -> Duration {
        self.until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now))
    }

    /// Returns true if a turn that began at `begun` accepts no further connection at `now`.
    pub(crate) fn is_over(begun: Instant, now: Instant) -> bool {
        now.saturating_duration_since(begun) >= TURN
    }

    /// Begins a pause after a turn from `begun` to `now`.
    pub(crate) fn pause(&mut self, begun: Instant, now: Instant) {
        let turn = now.saturating_duration_since(begun);
        self.until = Some(now + turn.saturating_mul(PAUSE).min(LONGEST));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_take_a_twentieth_of_the_time() {
        let (begin, mut pace) = (Instant::now(), AcceptPace::default());
        let at = |micros| begin + Duration::from_micros(micros);
        assert_eq!(pace.left(begin), Duration::ZERO);
        pace.pause(begin, at(100));
        assert_eq!(pace.left(at(100)), Duration::from_micros(1900));
        assert_eq!((pace.left(at(1999)), pace.left(at(2000))), (Duration::from_micros(1), Duration::ZERO));
        // A preempted turn.
        pace.pause(at(2000), at(1_002_000));
        assert_eq!(pace.left(at(1_002_000)), LONGEST);
        assert!(AcceptPace::is_over(begin, at(200)) && !AcceptPace::is_over(begin, at(199)));
    }
}
