//! What a gate knows of a peer: the sequence of its batches, its gaps, and how old its messages are.
//!
//! Age: the clocks of two gates differ by an unknown amount. The shortest difference between the time of arrival and the sender's time,
//! of the last one to two minutes, stands for a message without delay. Clocks that drift apart change it slowly.

use std::time::Duration;

use towpath_wire::Time;

use crate::batches::Batches;
#[cfg(test)]
use crate::batches::MAX_RANGES;
use crate::message::Sender;

/// How long the shortest difference counts, once or twice.
const DRIFT: Duration = Duration::from_secs(60);

/// Processes of a peer that have ended and are remembered.
const ENDED: usize = 4;

/// A peer that is silent for longer is not shown as one.
pub(crate) const SILENT: Duration = Duration::from_secs(3);

/// What a batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// The next one, or one that a snapshot had.
    Next,
    /// The first one of this process of the peer. `missed`: batches before it are missing.
    First { missed: bool },
    /// Batches before it are missing.
    Gap,
    /// One that was missing; `last`: no other is.
    Filled { last: bool },
    /// One that was received before.
    Repeated,
}

/// A peer.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) sender: Sender,
    /// The incarnations of the processes before, the last one first.
    ended: [u64; ENDED],
    /// The next sequence number.
    next: u64,
    /// The batches that have arrived, and these with those that a snapshot had.
    received: Batches,
    has: Batches,
    pub(crate) heard: Time,
    /// Age of the last message.
    pub(crate) lag: Duration,
    /// The shortest differences of this period and of the one before, in ns, and when this period began.
    shortest: [i64; 2],
    period: Time,
}

impl Peer {
    pub(crate) fn new(sender: Sender, now: Time) -> Self {
        Self {
            sender,
            ended: [0; ENDED],
            next: 0,
            received: Batches::default(),
            has: Batches::default(),
            heard: now,
            lag: Duration::ZERO,
            shortest: [i64::MAX; 2],
            period: now,
        }
    }

    /// Returns true if a message is of a process before the one that was heard last: a replay has its batches, too. Incarnations increase,
    /// unless the wall clock of the peer was set back.
    pub(crate) fn is_earlier(&self, incarnation: u64) -> bool {
        let current = self.sender.incarnation;
        incarnation < current || incarnation != current && self.ended.contains(&incarnation)
    }

    /// A message of the peer. Returns its age.
    pub(crate) fn hears(&mut self, sender: Sender, now: Time) -> Duration {
        if sender.incarnation != self.sender.incarnation {
            let mut ended = self.ended;
            ended.rotate_right(1);
            ended[0] = self.sender.incarnation;
            *self = Self { ended, ..Self::new(sender, now) };
        }
        (self.sender, self.heard) = (sender, now);
        if now.since(self.period) >= DRIFT {
            self.shortest = [i64::MAX, self.shortest[0]];
            self.period = now;
        }
        let difference = now.as_nanos().wrapping_sub(sender.at.as_nanos()).cast_signed();
        self.shortest[0] = self.shortest[0].min(difference);
        let least = self.shortest[0].min(self.shortest[1]);
        self.lag = Duration::from_nanos(difference.wrapping_sub(least).max(0).cast_unsigned());
        self.lag
    }

    /// A batch with this number.
    pub(crate) fn arrives(&mut self, seq: u64) -> Arrival {
        let (next, after) = (self.next, seq.saturating_add(1));
        if seq < next && self.received.has(seq, after) {
            return Arrival::Repeated;
        }
        let missed = !self.has.has(next.max(1), seq);
        let missing = !self.has.has(seq, after);
        self.next = next.max(after);
        for batches in [&mut self.received, &mut self.has] {
            batches.insert(seq, after);
            batches.bound();
        }
        match next {
            0 => Arrival::First { missed },
            // A snapshot has its states, but not the removals.
            next if seq < next && !missing => Arrival::Next,
            next if seq < next => Arrival::Filled { last: self.is_whole() },
            _ if missed => Arrival::Gap,
            _ => Arrival::Next,
        }
    }

    /// The number of the next batch; 0: none has arrived.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Returns true if no batch is missing.
    pub(crate) fn is_whole(&self) -> bool {
        self.has.has(1, self.next)
    }

    /// The batches of this process that have arrived, or that a snapshot had.
    pub(crate) fn has(&self) -> &Batches {
        &self.has
    }

    /// A snapshot had these batches of this process.
    pub(crate) fn cover(&mut self, batches: &Batches) {
        self.has.add(batches);
    }

    /// The ranges that are tracked, with their bound.
    #[cfg(test)]
    pub(crate) fn size(&self) -> (usize, usize) {
        (self.has.ranges().count(), MAX_RANGES)
    }

    pub(crate) fn is_silent(&self, now: Time) -> bool {
        now.since(self.heard) >= SILENT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sender(incarnation: u64, at: u64) -> Sender {
        let at = Time::from_nanos(at);
        Sender { incarnation, at, fingerprint: 0, in_step: true, unchecked: false }
    }

    #[test]
    fn gaps_are_found_and_filled() {
        let mut peer = Peer::new(sender(1, 0), Time::default());
        peer.cover(&Batches::below(5));
        let rows = [
            (5, Arrival::First { missed: false }),
            (6, Arrival::Next),
            (10, Arrival::Gap),
            (8, Arrival::Filled { last: false }),
            (8, Arrival::Repeated),
            (11, Arrival::Next),
            (7, Arrival::Filled { last: false }),
            (9, Arrival::Filled { last: true }),
            (5, Arrival::Repeated),
            (12, Arrival::Next),
        ];
        for (seq, expected) in rows {
            assert_eq!(peer.arrives(seq), expected, "{seq}");
        }
        assert!(peer.is_whole());
        // Another process of the same gate.
        peer.hears(sender(2, 0), Time::default());
        assert_eq!(peer.arrives(1), Arrival::First { missed: false });
    }

    #[test]
    fn what_a_snapshot_had_is_not_missing() {
        let mut peer = Peer::new(sender(1, 0), Time::default());
        peer.cover(&Batches::below(4));
        assert_eq!(peer.arrives(6), Arrival::First { missed: true });
        assert_eq!(peer.arrives(9), Arrival::Gap);
        peer.cover(&Batches::below(8));
        assert!(!peer.is_whole());
        // Its states are there, but its removals are not.
        assert_eq!((peer.arrives(4), peer.arrives(4)), (Arrival::Next, Arrival::Repeated));
        assert_eq!(peer.arrives(8), Arrival::Filled { last: true });
        assert_eq!(*peer.has(), Batches::below(10));
        // Whatever a gate claims to have: the batches that arrive are merged.
        peer.cover(&Batches::below(u64::MAX));
        assert_eq!(
            (peer.arrives(10), peer.arrives(12), peer.is_whole()),
            (Arrival::Next, Arrival::Next, true)
        );
    }

    #[test]
    fn more_gaps_than_are_tracked_need_a_snapshot() {
        let mut peer = Peer::new(sender(1, 0), Time::default());
        peer.arrives(1);
        (2..=MAX_RANGES as u64 + 2).for_each(|n| assert_eq!(peer.arrives(2 * n), Arrival::Gap));
        for n in 1..=MAX_RANGES as u64 + 2 {
            peer.arrives(2 * n + 1);
        }
        // The first one has been forgotten.
        assert!(!peer.is_whole());
        peer.cover(&Batches::below(peer.next()));
        assert!(peer.is_whole());
    }

    #[test]
    fn the_age_does_not_depend_on_the_clocks() {
        for skew in [0, 1_000_000_000_000] {
            let mut peer = Peer::new(sender(1, skew), Time::default());
            let mut age = |at: u64, delay: u64| {
                peer.hears(sender(1, skew + at), Time::from_nanos(5_000 + at + delay)).as_nanos()
            };
            assert_eq!(age(0, 100), 0);
            assert_eq!(age(1_000, 400), 300);
            assert_eq!(age(2_000, 50), 0);
            assert_eq!(age(3_000, 60), 10);
        }
    }
}
