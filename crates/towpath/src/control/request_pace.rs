//! The rate of a reader's requests: most of them run a query on each engine thread, which processes packets meanwhile. No IO.
//!
//! A virtual scheduling algorithm (GCRA, ITU-T I.371): [`BURST`] requests at once, then one every [`PERIOD`].

/// Requests at once.
const BURST: u64 = 64;

/// Nanoseconds between two requests afterwards.
const PERIOD: u64 = 20_000_000;

/// The rate of one client. See the module documentation.
#[derive(Debug, Default)]
pub(super) struct RequestPace {
    /// Time at which a new burst may begin.
    empty: u64,
}

impl RequestPace {
    /// Earliest time of the next request.
    pub(super) fn due(&self) -> u64 {
        self.empty.saturating_sub((BURST - 1) * PERIOD)
    }

    /// Counts a request at `now`.
    pub(super) fn take(&mut self, now: u64) {
        self.empty = self.empty.max(now) + PERIOD;
    }
}
