//! What a sender counts. `bytes pushed = zerocopy + plain + too long + unsent`, and `numbers = completed + abandoned +
//! outstanding`.

use std::ops::AddAssign;

use crate::policy::Reason;

/// Why bytes went out without the flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlainCause {
    /// The socket does not do zero copy: SO_ZEROCOPY refused, MPTCP, kTLS; or plain sends were asked for.
    Unarmed,
    /// A call shorter than `min_zerocopy`.
    Small,
    /// A datagram without segmentation offload.
    NoSegmentation,
    /// The policy copies: see the reasons of its switches.
    Copying,
    /// A probe is out, and nothing may go beside it.
    Probing,
    /// No room in the budget of locked memory or of groups.
    Budget,
    /// The kernel said ENOBUFS twice.
    NoBuffers,
    /// This peer has pinned frames for too long.
    Stuck,
}

impl PlainCause {
    /// All of them, in the order of [`Counters::plain`].
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

    /// A word for tables and JSON.
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

/// A histogram by powers of two.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram([u64; 32]);

impl Histogram {
    pub(crate) fn add(&mut self, value: u64) {
        let bucket = (u64::BITS - value.leading_zeros()) as usize;
        self.0[bucket.min(self.0.len() - 1)] += 1;
    }

    /// How many values are below `2^n`, not counting those below `2^(n-1)`, for each `n` from 0; the last bucket has all
    /// that are larger.
    pub const fn buckets(&self) -> &[u64] {
        &self.0
    }

    /// The upper end of the bucket in which the given share (0 to 1) of the values is reached; none without values.
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

/// What one sender did, or several together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes handed over by calls with MSG_ZEROCOPY.
    pub zerocopy_bytes: u64,
    /// Those of them in ranges that the kernel said it copied (an estimate: see [`Range::copied`](crate::Range::copied)).
    pub copied_bytes: u64,
    /// Bytes sent plain, by [`PlainCause::ALL`].
    pub plain: [u64; PlainCause::ALL.len()],
    /// Calls with MSG_ZEROCOPY that the kernel took: numbers given out.
    pub numbers: u64,
    /// Numbers completed.
    pub completed: u64,
    /// Numbers whose completion nobody will see: their sender ended before.
    pub abandoned: u64,
    /// Those completed in ranges with the code COPIED.
    pub copied: u64,
    /// Calls without the flag that the kernel took.
    pub plain_calls: u64,
    /// Notifications read.
    pub notifications: u64,
    /// Numbers per notification.
    pub per_notification: Histogram,
    /// Notification ranges that did not begin at the oldest outstanding number.
    pub out_of_order: u64,
    /// Numbers notified again.
    pub duplicates: u64,
    /// Numbers notified that no call has.
    pub unknown: u64,
    /// Microseconds from the call to the reading of its notification.
    pub pin_time: Histogram,
    /// ENOBUFS of calls with the flag.
    pub no_buffers: u64,
    /// Isolated probes that the kernel did not copy, and that it copied.
    pub probes: [u64; 2],
    /// Mode switches by reason, in the order of [`Reason::ALL`].
    pub switches: [u64; Reason::ALL.len()],
    /// Datagrams that were taken out because they are longer than the socket takes, and their bytes.
    pub too_long: u64,
    /// See `too_long`.
    pub too_long_bytes: u64,
    /// Frames whose checksum at completion was not that of the send (only where it is checked).
    pub tampered: u64,
    /// Entries of the error queue that were not about zero copy, and that nobody took in time.
    pub events_lost: u64,
}

impl Counters {
    /// Bytes sent plain for `cause`.
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

    /// By nanoseconds.
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
    fn causes_stand_at_their_place() {
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
    fn histograms_are_by_powers_of_two() {
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
