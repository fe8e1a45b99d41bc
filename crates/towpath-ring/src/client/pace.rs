//! Pause of a client between two batches.
//!
//! What: a client that is as fast as the engine would look for each message while the engine writes it. Each look
//! takes cache lines that the engine is writing or about to write, and both sides wait for lines. A client that has
//! just received several messages, and all that were published, therefore pauses, so that the engine publishes
//! several more.
//!
//! Invariant: a client that receives one message at a time never pauses, nor does one that left messages unread. The
//! pause is at most [`PER_FRAME`] spins per frame and [`LONGEST`] in all. Frames may be late by as much: 6 us where
//! a spin (`PAUSE`) takes 140 cycles, a tenth of that where it takes 10. An engine that waits for all verdicts
//! before it sends more is slowed by the same time; its clients should receive single frames. On a shared CPU, a
//! client never pauses: the engine does not run meanwhile.

/// Spins per frame, except the first.
const PER_FRAME: usize = 8;
/// Largest number of spins.
const LONGEST: usize = 128;

/// Spins after a batch of `count` frames out of at most `max`.
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
