//! How long a client stays away from the ring after it has taken all that there was.
//!
//! A client that is as fast as the engine would look for each message while it is being written, and each look takes lines
//! away that the engine is writing or is about to write: both then wait for lines, and neither gets on. So while frames
//! come thick and fast, and batches are small all the same, it stays away for a few spins, and a batch is there at once.
//!
//! Invariants: who waits for one message at a time is not kept from it: staying away begins only when the next frames were there
//! at the first look, and becomes shorter when they were not; it ends when it did not make batches longer (the engine then
//! waits for us).
//! It never lasts longer than [`LONGEST`] spins, some microseconds.

/// Most spins.
const LONGEST: u32 = 128;
/// By how many spins it becomes longer.
const STEP: u32 = 16;
/// Frames of a batch that is long enough.
const ENOUGH: usize = 48;
/// Spins that must have brought a frame, or they were in vain.
const WORTH: u32 = 16;
/// Batches until it is tried again after it was in vain.
const HOLD_OFF: u32 = 256;

#[derive(Debug, Default)]
pub(crate) struct Pace {
    spins: u32,
    /// Whether the last batch was all that there was.
    caught_up: bool,
    hold_off: u32,
}

impl Pace {
    /// How many spins to stay away now.
    #[inline]
    pub(crate) fn away(&self) -> u32 {
        if self.caught_up { self.spins } else { 0 }
    }

    /// A batch of `count` frames out of at most `max` was taken; whether it was there `at_once`, at the first look.
    #[inline]
    pub(crate) fn taken(&mut self, count: usize, max: usize, at_once: bool) {
        let stayed = self.away();
        self.caught_up = count < max;
        self.hold_off = self.hold_off.saturating_sub(1);
        if !at_once {
            // Little by little: an engine that takes its verdicts sends nothing meanwhile.
            self.spins = self.spins.saturating_sub(STEP);
        } else if count * (WORTH as usize) < stayed as usize {
            self.spins = 0;
            self.hold_off = HOLD_OFF;
        } else if self.caught_up && count < ENOUGH && self.hold_off == 0 {
            self.spins = LONGEST.min(self.spins + STEP);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client that takes at most `max` of the frames that have come; `rate` come for each spin, and it takes a spin for
    /// itself. The engine has at most `window` frames out.
    fn run(rate: f64, max: usize, window: usize) -> (u32, usize) {
        let (mut pace, mut there, mut longest, mut last) = (Pace::default(), 0.0, 0, 0);
        for _ in 0..100 {
            let away = pace.away();
            longest = longest.max(away);
            there = f64::min(there + rate * f64::from(away + 1), window as f64);
            let at_once = there >= 1.0;
            if !at_once {
                there = 1.0;
            }
            last = max.min(there as usize);
            there -= last as f64;
            pace.taken(last, max, at_once);
        }
        (longest, last)
    }

    #[test]
    fn rows() {
        // Frames come thick and fast: batches become long, and it stays away no longer than that takes.
        let (longest, batch) = run(1.0, 64, 4096);
        assert!(batch >= ENOUGH && longest <= 64, "{longest} spins, {batch} frames");
        // One message at a time, with or without an engine that waits for the answer: not kept from it.
        assert_eq!(run(0.1, 64, 4096).0, 0);
        assert_eq!(run(0.1, 64, 1).0, 0);
        // The engine waits for us, so nothing more comes while we stay away: tried, and given up.
        assert_eq!(run(1.0, 64, 1).0, 2 * STEP);
        assert_eq!(run(1.0, 64, 2).0, 3 * STEP);
    }
}
