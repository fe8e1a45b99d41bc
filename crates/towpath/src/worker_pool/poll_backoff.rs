//! Busy polling for the workers' replies before the thread sleeps; adapts to its success.

/// Empty turns before the thread sleeps while workers on other CPUs hold messages: about 10 us.
const SPINS: u32 = 30;
/// Number of sleeps after which the full number of turns is tried again.
const AGAIN: u32 = 16;

#[derive(Debug)]
pub(super) struct PollBackoff {
    /// Empty turns in a row, and their current maximum.
    quiet: u32,
    spins: u32,
    sleeps: u32,
    /// The thread slept since the last success.
    slept: bool,
}

impl Default for PollBackoff {
    fn default() -> Self {
        Self { quiet: 0, spins: SPINS, sleeps: 0, slept: false }
    }
}

impl PollBackoff {
    /// Returns true to poll again: there was something to do (`busy`), or there may be soon (`working`).
    pub(super) fn should_poll(&mut self, busy: bool, working: impl FnOnce() -> bool) -> bool {
        if busy {
            if self.quiet > 0 && !self.slept {
                self.spins = SPINS;
            }
            (self.quiet, self.slept) = (0, false);
            return true;
        }
        self.quiet += 1;
        if self.quiet <= self.spins && working() {
            return true;
        }
        if self.quiet > self.spins && !self.slept {
            self.sleeps = self.sleeps.wrapping_add(1);
            self.spins = if self.sleeps.is_multiple_of(AGAIN) { SPINS } else { self.spins / 2 };
        }
        self.slept = true;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of empty turns before it sleeps.
    fn looks(backoff: &mut PollBackoff) -> u32 {
        let mut looks = 0;
        while backoff.should_poll(false, || true) {
            looks += 1;
        }
        looks
    }

    #[test]
    fn unsuccessful_polling_is_reduced_and_success_restores_it() {
        let mut backoff = PollBackoff::default();
        let mut all = Vec::new();
        for _ in 0..7 {
            all.push(looks(&mut backoff));
            assert!(backoff.should_poll(true, || true));
        }
        assert_eq!(all, [30, 15, 7, 3, 1, 0, 0]);
        while looks(&mut backoff) < SPINS {
            backoff.should_poll(true, || true);
        }
        // The full number of turns is tried at intervals, and succeeds.
        backoff.should_poll(true, || true);
        backoff.should_poll(false, || true);
        backoff.should_poll(true, || true);
        assert_eq!(backoff.spins, SPINS);
        assert!(!backoff.should_poll(false, || false), "no worker holds a message");
    }
}
