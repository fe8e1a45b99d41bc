//! Counters of a sender. Invariants: `bytes pushed = zerocopy + plain + too long + unsent`, and `numbers = completed + abandoned +
//! outstanding`.

use std::ops::AddAssign;

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
    /// The policy is in copying mode; [`Counters::switches`] has the reasons.
    Copying,
    /// A probe is outstanding; probes are isolated.
    Probing,
    /// The budget of locked memory or of groups was exhausted.
    Budget,
    /// The kernel returned ENOBUFS twice.
    NoBuffers,
    /// The peer has pinned frames for too long.
    Stuck,
}

impl PlainCause {
    /// All causes, in the order of [`Counters::plain`].
    pub const ALL: [Self; 8] = [
        Self::Unarmed,
        Self::Small,
        Self::NoSegmentation,
        Self::Copying,
        Self::Probing,
        Self::Budget,
        Self::NoBuffers,
        Self::Stuck,
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
        add(&mut self.0, &rhs.0);
    }
}

fn add(sums: &mut [u64], more: &[u64]) {
    sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
}

/// Counters of one sender, or sums of several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes sent with MSG_ZEROCOPY.
    pub zerocopy_bytes: u64,
    /// The part of `zerocopy_bytes` that the kernel reported as copied (an estimate: see [`Range::copied`](crate::Range::copied)).
    pub copied_bytes: u64,
    /// Bytes sent plain, in the order of [`PlainCause::ALL`].
    pub plain: [u64; PlainCause::ALL.len()],
    /// Calls with MSG_ZEROCOPY that the kernel accepted: completion numbers assigned.
    pub numbers: u64,
    /// Numbers completed.
    pub completed: u64,
    /// Numbers that were outstanding when their sender ended.
    pub abandoned: u64,
    /// Numbers completed in ranges with the code COPIED.
    pub copied: u64,
    /// Calls without MSG_ZEROCOPY that the kernel accepted.
    pub plain_calls: u64,
    /// Notifications read.
    pub notifications: u64,
    /// Numbers per notification.
    pub per_notification: Histogram,
    /// Notification ranges that did not begin at the oldest outstanding number.
    pub out_of_order: u64,
    /// Numbers that were notified more than once.
    pub duplicates: u64,
    /// Notified numbers that were never assigned.
    pub unknown: u64,
    /// Microseconds from the call to the reading of its notification.
    pub pin_time: Histogram,
    /// Calls with MSG_ZEROCOPY that failed with ENOBUFS.
    pub no_buffers: u64,
    /// Isolated probes: not copied, copied.
    pub probes: [u64; 2],
    /// Mode switches by reason, in the order of [`Reason::ALL`].
    pub switches: [u64; Reason::ALL.len()],
    /// Datagrams discarded because they exceed the socket's limit.
    pub too_long: u64,
    /// Bytes of these datagrams.
    pub too_long_bytes: u64,
    /// Frames whose checksum changed between send and completion, with [`Options::tamper_check`](crate::Options::tamper_check).
    pub tampered: u64,
    /// Other entries of the error queue that were lost because [`Sender::poll_other`](crate::Sender::poll_other) was not called.
    pub events_lost: u64,
}

impl Counters {
    /// Bytes sent plain because of `cause`.
    pub fn plain_for(&self, cause: PlainCause) -> u64 {
        PlainCause::ALL.iter().zip(self.plain).find(|(each, _)| **each == cause).map_or(0, |(_, bytes)| bytes)
    }

    /// All bytes sent plain.
    pub fn plain_bytes(&self) -> u64 {
        self.plain.iter().sum()
    }

    pub(crate) fn add_plain(&mut self, cause: PlainCause, bytes: u64) {
        self.plain_calls += 1;
        self.plain[cause as usize] += bytes;
    }

    /// Adds a pin time in nanoseconds.
    #[inline]
    pub(crate) fn add_pin_time(&mut self, nanos: u64) {
        self.pin_time.add(nanos / 1000);
    }
}

impl AddAssign<&Self> for Counters {
    fn add_assign(&mut self, rhs: &Self) {
        let Self {
            zerocopy_bytes,
            copied_bytes,
            plain,
            numbers,
            completed,
            abandoned,
            copied,
            plain_calls,
            notifications,
            per_notification,
            out_of_order,
            duplicates,
            unknown,
            pin_time,
            no_buffers,
            probes,
            switches,
            too_long,
            too_long_bytes,
            tampered,
            events_lost,
        } = rhs;
        self.zerocopy_bytes += zerocopy_bytes;
        self.copied_bytes += copied_bytes;
        add(&mut self.plain, plain);
        self.numbers += numbers;
        self.completed += completed;
        self.abandoned += abandoned;
        self.copied += copied;
        self.plain_calls += plain_calls;
        self.notifications += notifications;
        self.per_notification += per_notification;
        self.out_of_order += out_of_order;
        self.duplicates += duplicates;
        self.unknown += unknown;
        self.pin_time += pin_time;
        self.no_buffers += no_buffers;
        add(&mut self.probes, probes);
        add(&mut self.switches, switches);
        self.too_long += too_long;
        self.too_long_bytes += too_long_bytes;
        self.tampered += tampered;
        self.events_lost += events_lost;
    }
}

#[cfg(test)]
mod tests {
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
        assert_eq!((counters.plain_bytes(), counters.plain_calls), (255, 8));
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
