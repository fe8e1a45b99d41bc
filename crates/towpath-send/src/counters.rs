//! Counters of a sender. Invariants: `bytes pushed or borrowed = zerocopy + plain + too long + unsent`, and `numbers = completed + abandoned +
//! outstanding`.

use std::ops::AddAssign;

use towpath_metrics::metrics;

use crate::policy::Reason;

/// The reason why bytes were sent without MSG_ZEROCOPY.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainCause {
    /// The socket does not support zero copy (SO_ZEROCOPY refused, MPTCP, kTLS), or plain sends were requested.
    Unarmed,
    /// The call was shorter than `min_zerocopy`.
    Small,
    /// The call was a datagram without segmentation offload.
    NoSegmentation,
    /// The policy is in copying mode; the counters `switched_*` have the reasons.
    Copying,
    /// A probe is outstanding; probes are isolated.
    Probing,
    /// The budget of locked memory or of groups was exhausted.
    Budget,
    /// The kernel returned ENOBUFS twice.
    NoBuffers,
    /// The peer has pinned frames for too long.
    Stuck,
    /// The bytes were borrowed for the call (`AsyncWrite`), so the kernel cannot read them later.
    Borrowed,
}

impl PlainCause {
    /// All causes.
    pub const ALL: [Self; 9] = [
        Self::Unarmed,
        Self::Small,
        Self::NoSegmentation,
        Self::Copying,
        Self::Probing,
        Self::Budget,
        Self::NoBuffers,
        Self::Stuck,
        Self::Borrowed,
    ];

    /// Name for tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unarmed => "unarmed",
            Self::Small => "small",
            Self::NoSegmentation => "no-segmentation",
            Self::Copying => "copying",
            Self::Probing => "probing",
            Self::Budget => "budget",
            Self::NoBuffers => "no-buffers",
            Self::Stuck => "stuck",
            Self::Borrowed => "borrowed",
        }
    }
}

/// A histogram with power-of-two buckets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram([u64; 32]);

impl Histogram {
    pub(crate) fn add(&mut self, value: u64) {
        let bucket = (u64::BITS - value.leading_zeros()) as usize;
        self.0[bucket.min(self.0.len() - 1)] += 1;
    }

    /// Bucket `n` counts the values from `2^(n-1)` up to, but not including, `2^n`; the last bucket also counts all larger values.
    pub const fn buckets(&self) -> &[u64] {
        &self.0
    }

    /// Upper bound of the bucket that contains the quantile `share` (0 to 1). `None` without values.
    pub fn quantile(&self, share: f64) -> Option<u64> {
        let total: u64 = self.0.iter().sum();
        let mut seen = 0;
        let wanted = ((total as f64 * share).ceil() as u64).max(1);
        self.0
            .iter()
            .position(|count| {
                seen += count;
                seen >= wanted
            })
            .map(|bucket| 1 << bucket)
    }
}

impl AddAssign<&Self> for Histogram {
    fn add_assign(&mut self, rhs: &Self) {
        self.0.iter_mut().zip(rhs.0).for_each(|(sum, more)| *sum += more);
    }
}

metrics! {
    /// Counters of one sender, or sums of several.
    pub struct Counters in "send" {
        /// Bytes sent with MSG_ZEROCOPY.
        pub zerocopy_bytes: counter bytes,
        /// Bytes sent with MSG_ZEROCOPY that the kernel reported as copied; an estimate, because it reports ranges of calls.
        pub copied_bytes: counter bytes,
        /// Bytes sent plain because the socket does not support zero copy, or plain sends were requested.
        pub plain_unarmed: counter bytes as "plain": "Bytes sent without MSG_ZEROCOPY, by cause." (cause = "unarmed"),
        /// Bytes sent plain because the call was shorter than `min_zerocopy`.
        pub plain_small: counter bytes as "plain" (cause = "small"),
        /// Bytes sent plain because the call was a datagram without segmentation offload.
        pub plain_no_segmentation: counter bytes as "plain" (cause = "no-segmentation"),
        /// Bytes sent plain in copying mode.
        pub plain_copying: counter bytes as "plain" (cause = "copying"),
        /// Bytes sent plain while a probe was outstanding.
        pub plain_probing: counter bytes as "plain" (cause = "probing"),
        /// Bytes sent plain because the budget of locked memory or of groups was exhausted.
        pub plain_budget: counter bytes as "plain" (cause = "budget"),
        /// Bytes sent plain because the kernel returned ENOBUFS twice.
        pub plain_no_buffers: counter bytes as "plain" (cause = "no-buffers"),
        /// Bytes sent plain because the peer has pinned frames for too long.
        pub plain_stuck: counter bytes as "plain" (cause = "stuck"),
        /// Bytes sent plain because they were borrowed for the call (`AsyncWrite`).
        pub plain_borrowed: counter bytes as "plain" (cause = "borrowed"),
        /// Calls with MSG_ZEROCOPY that the kernel accepted: completion numbers assigned.
        pub numbers: counter events as "calls",
        /// Completion numbers that the kernel reported as completed.
        pub completed: counter events,
        /// Completion numbers that were outstanding when their sender ended.
        pub abandoned: counter events,
        /// Completion numbers in ranges with the code COPIED.
        pub copied: counter events,
        /// Calls without MSG_ZEROCOPY that the kernel accepted.
        pub plain_calls: counter events,
        /// Notifications read.
        pub notifications: counter events,
        /// Notification ranges that did not begin at the oldest outstanding number.
        pub out_of_order: counter events,
        /// Completion numbers that were notified more than once.
        pub duplicates: counter events,
        /// Notified numbers that were never assigned.
        pub unknown: counter events,
        /// Calls with MSG_ZEROCOPY that failed with ENOBUFS.
        pub no_buffers: counter events,
        /// Isolated probes that were not copied.
        pub probes_not_copied: counter events as "probes": "Isolated probes, by result." (result = "not_copied"),
        /// Isolated probes that were copied.
        pub probes_copied: counter events as "probes" (result = "copied"),
        /// Connections that started in copying mode because their destination is local.
        pub switched_local: counter events as "switches": "Mode switches, by reason." (reason = "local"),
        /// Mode switches because the pause between probes had ended.
        pub switched_again: counter events as "switches" (reason = "again"),
        /// Mode switches because a probe was sent without a copy.
        pub switched_not_copied: counter events as "switches" (reason = "not-copied"),
        /// Mode switches because three consecutive probes were copied.
        pub switched_copied: counter events as "switches" (reason = "copied"),
        /// Mode switches because of a run of COPIED ranges.
        pub switched_suspicion: counter events as "switches" (reason = "suspicion"),
        /// Mode switches because the socket refused MSG_ZEROCOPY.
        pub switched_refused: counter events as "switches" (reason = "refused"),
        /// Datagrams discarded because they exceed the socket's limit.
        pub too_long: counter packets,
        /// Bytes of datagrams discarded because they exceed the socket's limit.
        pub too_long_bytes: counter bytes,
        /// Frames whose checksum changed between send and completion, with `tamper_check`.
        pub tampered: counter events,
        /// Entries of the error queue of other kinds that were lost because `Sender::poll_other` was not called.
        pub events_lost: counter events,
    }
}

impl Counters {
    /// Bytes sent plain because of `cause`.
    pub const fn plain_for(&self, cause: PlainCause) -> u64 {
        match cause {
            PlainCause::Unarmed => self.plain_unarmed,
            PlainCause::Small => self.plain_small,
            PlainCause::NoSegmentation => self.plain_no_segmentation,
            PlainCause::Copying => self.plain_copying,
            PlainCause::Probing => self.plain_probing,
            PlainCause::Budget => self.plain_budget,
            PlainCause::NoBuffers => self.plain_no_buffers,
            PlainCause::Stuck => self.plain_stuck,
            PlainCause::Borrowed => self.plain_borrowed,
        }
    }

    /// All bytes sent plain.
    pub fn plain_bytes(&self) -> u64 {
        PlainCause::ALL.iter().map(|cause| self.plain_for(*cause)).sum()
    }

    pub(crate) const fn add_plain(&mut self, cause: PlainCause, bytes: u64) {
        self.plain_calls += 1;
        *match cause {
            PlainCause::Unarmed => &mut self.plain_unarmed,
            PlainCause::Small => &mut self.plain_small,
            PlainCause::NoSegmentation => &mut self.plain_no_segmentation,
            PlainCause::Copying => &mut self.plain_copying,
            PlainCause::Probing => &mut self.plain_probing,
            PlainCause::Budget => &mut self.plain_budget,
            PlainCause::NoBuffers => &mut self.plain_no_buffers,
            PlainCause::Stuck => &mut self.plain_stuck,
            PlainCause::Borrowed => &mut self.plain_borrowed,
        } += bytes;
    }

    pub(crate) const fn count_switch(&mut self, reason: Reason) {
        *match reason {
            Reason::Local => &mut self.switched_local,
            Reason::Again => &mut self.switched_again,
            Reason::NotCopied => &mut self.switched_not_copied,
            Reason::Copied => &mut self.switched_copied,
            Reason::Suspicion => &mut self.switched_suspicion,
            Reason::Refused => &mut self.switched_refused,
        } += 1;
    }
}

metrics! {
    /// The counters that embedders read: C's `struct towpath_sender_counters` and Python's `SenderCounters`.
    ///
    /// The layout is part of the C ABI. A new counter belongs to [`Counters`], which C and Python list by name.
    #[repr(C)]
    pub struct Summary in "send_summary" {
        /// bytes sent with zero copy
        pub zerocopy_bytes: counter bytes,
        /// bytes sent with zero copy that the kernel copied
        pub copied_bytes: counter bytes,
        /// bytes sent plain
        pub plain_bytes: counter bytes,
        /// zero-copy calls
        pub calls: counter events,
        /// zero-copy calls that have completed
        pub completed: counter events,
        /// completed zero-copy calls that the kernel reported as copied
        pub copied: counter events,
        /// zero-copy calls that failed with ENOBUFS and were sent plain
        pub no_buffers: counter events,
        /// buffers modified while on loan, with tamper_check
        pub tampered: counter events,
    }
}

impl From<&Counters> for Summary {
    fn from(counters: &Counters) -> Self {
        Self {
            zerocopy_bytes: counters.zerocopy_bytes,
            copied_bytes: counters.copied_bytes,
            plain_bytes: counters.plain_bytes(),
            calls: counters.numbers,
            completed: counters.completed,
            copied: counters.copied,
            no_buffers: counters.no_buffers,
            tampered: counters.tampered,
        }
    }
}

/// Distributions of one sender, or sums of several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Distributions {
    /// Completion numbers per notification.
    pub per_notification: Histogram,
    /// Microseconds from the call to the reading of its notification.
    pub pin_time: Histogram,
}

impl Distributions {
    /// Adds a pin time in nanoseconds.
    #[inline]
    pub(crate) fn add_pin_time(&mut self, nanos: u64) {
        self.pin_time.add(nanos / 1000);
    }
}

impl AddAssign<&Self> for Distributions {
    fn add_assign(&mut self, rhs: &Self) {
        self.per_notification += &rhs.per_notification;
        self.pin_time += &rhs.pin_time;
    }
}

#[cfg(test)]
mod tests {
    use towpath_metrics::Metrics;

    use super::*;

    #[test]
    fn plain_causes_index_their_counters() {
        let mut counters = Counters::default();
        for (at, cause) in PlainCause::ALL.into_iter().enumerate() {
            counters.add_plain(cause, 1 << at);
        }
        for (at, cause) in PlainCause::ALL.into_iter().enumerate() {
            assert_eq!(counters.plain_for(cause), 1 << at, "{}", cause.name());
        }
        assert_eq!((counters.plain_bytes(), counters.plain_calls), (511, 9));
    }

    /// Names of causes and reasons are the labels of their counters.
    #[test]
    fn labels_are_the_names_of_causes_and_reasons() {
        let labels = |stem: &'static str| {
            let rows = Counters::TABLE.iter().filter(move |row| row.stem == stem);
            rows.map(|row| row.label.unwrap().1).collect::<Vec<_>>()
        };
        assert_eq!(labels("plain"), PlainCause::ALL.map(PlainCause::name));
        assert_eq!(labels("switches"), Reason::ALL.map(Reason::name));
        for (at, reason) in Reason::ALL.into_iter().enumerate() {
            let mut counters = Counters::default();
            counters.count_switch(reason);
            let counted =
                counters.values().filter(|(row, _)| row.stem == "switches").position(|(_, n)| n == 1);
            assert_eq!(counted, Some(at), "{}", reason.name());
        }
    }

    #[test]
    fn histogram_buckets_are_powers_of_two() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.quantile(0.5), None);
        for value in [0, 1, 2, 3, 1000, u64::MAX] {
            histogram.add(value);
        }
        assert_eq!(histogram.buckets()[..3], [1, 1, 2]);
        assert_eq!(histogram.quantile(0.5), Some(4));
        assert_eq!(histogram.quantile(0.8), Some(1 << 10));
        assert_eq!(histogram.quantile(1.0), Some(1 << 31));
    }
}
