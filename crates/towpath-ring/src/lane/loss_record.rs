//! LossRecord records: what a client did not get, told in its own stream.
//!
//! A loss is counted at once, and told twice: the next message's header says how many were lost before it
//! ([`Header::lost`]), and a frame of [`Kind::GAP`] for each reason says how many and why. The frame stands before that
//! message, unless there was no room for both: then it follows as soon as there is, so that a full ring is not filled with
//! records of its being full. Netlink said ENOBUFS once and nothing more (netlink_overrun, af_netlink.c), and programs
//! switched even that off; ours may too ([`Options::gaps`](crate::Options::gaps)).

use crate::shm::header::{Header, Kind, Meta};
use crate::shm::seq::Seq;

/// Why a client did not get a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loss {
    /// There was no room: it has not given enough frames back.
    NoRoom,
    /// It waited in a backlog and gave way to a newer one.
    Oldest,
    /// Dropped uninspected: the policy is to fail closed.
    Dropped,
    /// Passed uninspected: the policy is to fail open.
    Passed,
    /// Handed to another queue.
    HandedOn,
    /// Larger than anything that may be sent.
    TooLarge,
    /// A tap was too slow: the frame was overwritten before or while it was read.
    Overwritten,
    /// Beyond what the client asked to get (a rate, a filter).
    Limited,
}

impl Loss {
    /// Every reason, in the order of its code.
    pub const ALL: [Self; 8] = [
        Self::NoRoom,
        Self::Oldest,
        Self::Dropped,
        Self::Passed,
        Self::HandedOn,
        Self::TooLarge,
        Self::Overwritten,
        Self::Limited,
    ];

    /// The number in a gap record, from 1.
    #[must_use]
    pub const fn code(self) -> u32 {
        self as u32 + 1
    }

    /// The reason with this number.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.get(code.checked_sub(1)? as usize).copied()
    }
}

/// What a frame of [`Kind::GAP`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LossRecord {
    /// How many frames were lost; `u32::MAX` stands for that many or more.
    pub count: u32,
    /// Why; none when the engine names a reason that this library does not know.
    pub loss: Option<Loss>,
}

impl Header {
    /// What this frame says about lost ones, when it is of [`Kind::GAP`].
    #[must_use]
    pub fn loss_record(&self) -> Option<LossRecord> {
        (self.kind == Kind::GAP)
            .then(|| LossRecord { count: self.wire_len, loss: Loss::from_code(self.mark) })
    }
}

/// One client's losses: counted, and not yet told.
#[derive(Debug)]
pub(crate) struct LossRecords {
    /// Whether the client wants records.
    wanted: bool,
    /// Lost since the last message was published.
    before: u16,
    /// Not yet told, by reason.
    untold: [u32; Loss::ALL.len()],
    pending: bool,
    /// Records that are out: the client gives them back, and nobody else is to hear of it.
    out: Vec<Seq>,
}

impl LossRecords {
    pub(crate) fn new(wanted: bool) -> Self {
        Self { wanted, before: 0, untold: [0; _], pending: false, out: Vec::new() }
    }

    pub(crate) fn count(&mut self, loss: Loss, frames: u32) {
        self.before = self.before.saturating_add(u16::try_from(frames).unwrap_or(u16::MAX));
        if self.wanted {
            let untold = &mut self.untold[loss as usize];
            *untold = untold.saturating_add(frames);
            self.pending = true;
        }
    }

    /// Whether there is something to tell.
    pub(crate) fn is_pending(&self) -> bool {
        self.pending
    }

    /// How many were lost before the message that is published now.
    pub(crate) fn take_before(&mut self) -> u16 {
        std::mem::take(&mut self.before)
    }

    /// The next record.
    pub(crate) fn next(&mut self) -> Option<Meta> {
        let loss = Loss::ALL.into_iter().find(|loss| self.untold[*loss as usize] > 0);
        let Some(loss) = loss else {
            self.pending = false;
            return None;
        };
        let count = std::mem::take(&mut self.untold[loss as usize]);
        self.pending = self.untold.iter().any(|n| *n > 0);
        Some(Meta { kind: Kind::GAP, wire_len: count, mark: loss.code(), ..Meta::default() })
    }

    /// The record is out under this number.
    pub(crate) fn told(&mut self, seq: Seq) {
        self.out.push(seq);
    }

    /// Whether no record is out.
    pub(crate) fn none_out(&self) -> bool {
        self.out.is_empty()
    }

    /// Whether `seq`, which has come back, is a record.
    pub(crate) fn take(&mut self, seq: Seq) -> bool {
        let index = self.out.iter().position(|s| *s == seq);
        index.map(|i| self.out.swap_remove(i)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_a_record_and_is_told_once() {
        let mut gaps = LossRecords::new(true);
        assert!(!gaps.is_pending() && gaps.next().is_none());
        gaps.count(Loss::Passed, 3);
        gaps.count(Loss::NoRoom, 70_000);
        gaps.count(Loss::Passed, 1);
        assert_eq!((gaps.take_before(), gaps.take_before()), (u16::MAX, 0));
        let mut told = Vec::new();
        while let Some(meta) = gaps.next() {
            let header = meta.header(0, 0);
            told.push(header.loss_record().unwrap());
            assert_eq!(gaps.is_pending(), told.len() == 1);
        }
        let gap = |count, loss| LossRecord { count, loss: Some(loss) };
        assert_eq!(told, [gap(70_000, Loss::NoRoom), gap(4, Loss::Passed)]);
    }

    #[test]
    fn who_does_not_want_records_gets_the_number_only() {
        let mut gaps = LossRecords::new(false);
        gaps.count(Loss::Oldest, 2);
        assert!(!gaps.is_pending() && gaps.next().is_none());
        assert_eq!(gaps.take_before(), 2);
    }

    #[test]
    fn codes_are_those_of_the_abi() {
        for (i, loss) in Loss::ALL.into_iter().enumerate() {
            assert_eq!(loss.code(), i as u32 + 1);
            assert_eq!(Loss::from_code(loss.code()), Some(loss));
        }
        assert_eq!((Loss::from_code(0), Loss::from_code(9)), (None, None));
    }
}
