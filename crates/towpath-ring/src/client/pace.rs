//! How long a client stays away from the ring between two batches.
//!
//! A client that is as fast as the engine would look for each message while it is being written, and each look takes lines
//! away that the engine is writing or is about to write: both then wait for lines. So who has just taken several messages,
//! and all that there were, gives the engine some time for several more.
//!
//! Invariants: who gets one message at a time never stays away, nor does who has left some behind; and it costs at most
//! [`PER_FRAME`] spins for a frame, [`LONGEST`] in all. That is also what frames may be late by: 6 us where a spin
//! (`PAUSE`) takes longest, 140 cycles, and a tenth of that where it takes 10. An engine that waits for all verdicts before it
//! sends more is slowed by as much; its clients had better take single frames. On a CPU that both sides charge nobody stays away:
//! nothing comes while the client runs.

/// Spins for each frame but the first.
const PER_FRAME: usize = 8;
/// Most spins.
const LONGEST: usize = 128;

/// How many spins to stay away after a batch of `count` frames out of at most `max`.
pub(crate) fn away(count: usize, max: usize) -> usize {
    if count < max { LONGEST.min(count.saturating_sub(1) * PER_FRAME) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows() {
        for (count, max, spins) in [
            (0, 64, 0),
            (1, 64, 0),
            (2, 64, 8),
            (10, 64, 72),
            (17, 64, 128),
            (63, 64, 128),
            (64, 64, 0),
            (1, 1, 0),
        ] {
            assert_eq!(away(count, max), spins, "{count} of {max}");
        }
    }
}
