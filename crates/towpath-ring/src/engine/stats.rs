use towpath_metrics::metrics;

use crate::lane::loss_record::Loss;

metrics! {
    /// Counters of one channel, at the engine.
    ///
    /// `published` = `decided` + `overdue` + `invalid` + `drained` + `out`, at any time.
    pub struct ChannelStats in "ring" {
        /// Frames published to the client, loss records included.
        pub published: counter frames,
        /// Payload bytes published to the client.
        pub bytes: counter bytes,
        /// Frames decided by the client.
        pub decided: counter frames,
        /// Frames decided by the client with a cumulative verdict; included in `decided`.
        pub cumulative: counter frames,
        /// Frames that got the default verdict because the client exceeded the deadline.
        pub overdue: counter frames as "default_verdict": "Frames that got the default verdict, by reason." (reason = "overdue"),
        /// Frames that got the default verdict because the client's verdict was invalid.
        pub invalid: counter frames as "default_verdict" (reason = "invalid"),
        /// Undecided frames taken back when the client disconnected.
        pub drained: counter frames as "default_verdict" (reason = "drained"),
        /// Undecided frames at the client.
        pub out: gauge frames,
        /// Undecided frames that the client holds; included in `out`.
        pub held: gauge frames,
        /// Highest value of `out`.
        pub high_water: gauge frames,
        /// Holds refused because the client reached its limit.
        pub holds_refused: counter events,
        /// Verdicts for frames that already had the default verdict.
        pub late: counter frames,
        /// Invalid words, headers and messages from the client.
        pub violations: counter events,
        /// Messages received from the client, without replacements.
        pub messages: counter messages,
        /// Reservations that failed because the ring had no space.
        pub full: counter events,
        /// Messages sent to the client in a one-shot memfd.
        pub oneshots: counter messages,
        /// One-shot messages sent because held frames left no contiguous space; included in `oneshots`.
        pub oneshots_held: counter messages,
        /// Messages and replacements received from the client in a one-shot memfd.
        pub oneshots_in: counter messages,
        /// Frames lost because the ring had no space.
        pub lost_no_room: counter frames as "lost": "Frames that did not reach the client, by reason." (reason = "no_room"),
        /// Frames lost in the backlog because newer frames replaced them.
        pub lost_oldest: counter frames as "lost" (reason = "oldest"),
        /// Frames dropped without inspection by the overload policy.
        pub lost_dropped: counter frames as "lost" (reason = "dropped"),
        /// Frames passed without inspection by the overload policy.
        pub lost_passed: counter frames as "lost" (reason = "passed"),
        /// Frames sent to another queue by the overload policy.
        pub lost_handed_on: counter frames as "lost" (reason = "handed_on"),
        /// Frames larger than the largest message.
        pub lost_too_large: counter frames as "lost" (reason = "too_large"),
        /// Frames overwritten before the client read them.
        pub lost_overwritten: counter frames as "lost" (reason = "overwritten"),
        /// Copies (`tee`, fan-out `mirror`) that were not made because the turn's budget of copies was spent.
        pub lost_limited: counter frames as "lost" (reason = "limited"),
        /// Loss records published.
        pub gaps: counter frames,
        /// Doorbells sent to the client.
        pub wakeups: counter events,
        /// 1 if the payload area towards the client is in huge pages.
        pub huge_pages: gauge events,
        /// Sequence number of the next frame that the client reads, as the client reports it.
        pub consumed: gauge events,
    }
}

impl ChannelStats {
    /// The counter of frames lost for this reason.
    pub(crate) fn lost_mut(&mut self, loss: Loss) -> &mut u64 {
        match loss {
            Loss::NoRoom => &mut self.lost_no_room,
            Loss::Oldest => &mut self.lost_oldest,
            Loss::Dropped => &mut self.lost_dropped,
            Loss::Passed => &mut self.lost_passed,
            Loss::HandedOn => &mut self.lost_handed_on,
            Loss::TooLarge => &mut self.lost_too_large,
            Loss::Overwritten => &mut self.lost_overwritten,
            Loss::Limited => &mut self.lost_limited,
        }
    }

    /// Frames lost for this client, for any reason.
    #[must_use]
    pub fn lost(&self) -> u64 {
        let mut stats = *self;
        Loss::ALL.into_iter().map(|loss| *stats.lost_mut(loss)).sum()
    }
}
