//! Loss records: lost frames, reported to the client in its own stream.
//!
//! What: a loss is counted at once and reported twice. The next message's header has the number of frames lost
//! before it ([`Header::lost`]), and a frame of [`Kind::GAP`] per reason has the number and the reason. This frame
//! precedes that message. If the ring has no space for both, it follows as soon as there is space: loss records do not
//! fill a full ring. A client may disable the records
//! ([`Options::gaps`](crate::Options::gaps)).
//!
//! Reference: netlink reported ENOBUFS once and nothing more (netlink_overrun, af_netlink.c).

use crate::shm::header::{Header, Kind, Meta};
use crate::shm::seq::Seq;

/// Why a frame was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loss {
    /// The ring had no space: the client had not released enough frames.
    NoRoom,
    /// The backlog was full, and a newer frame replaced it.
    Oldest,
    /// Dropped without inspection: the overload policy is to fail closed.
    Dropped,
    /// Passed without inspection: the overload policy is to fail open.
    Passed,
    /// Sent to another queue.
    HandedOn,
    /// Larger than the largest message.
    TooLarge,
    /// Overwritten before it was copied for the client: an event of the state journal.
    Overwritten,
    /// A copy (`tee`, fan-out `mirror`) beyond the engine's budget of copies.
    Limited,
}

impl Loss {
    /// All reasons, in the order of their codes.
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

    /// The number in a loss record, from 1.
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

/// Content of a frame of [`Kind::GAP`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LossRecord {
    /// Number of lost frames; `u32::MAX` stands for that number or more.
    pub count: u32,
    /// Reason; none if this library does not know the engine's code.
    pub loss: Option<Loss>,
}

impl Header {
    /// The loss record in this frame, if its kind is [`Kind::GAP`].
    #[must_use]
    pub fn loss_record(&self) -> Option<LossRecord> {
        (self.kind == Kind::GAP)
            .then(|| LossRecord { count: self.wire_len, loss: Loss::from_code(self.mark) })
    }
}

/// Losses of one client that were counted and not yet reported.
#[derive(Debug)]
pub(crate) struct LossRecords {
    /// True if the client wants records.
    wanted: bool,
    /// Frames lost since the last message was published.
    before: u16,
    /// Frames not yet reported, by reason.
    untold: [u32; Loss::ALL.len()],
    pending: bool,
    /// Outstanding loss records. Their release is not a verdict for the caller.
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

    /// Returns true if there is something to report.
    pub(crate) fn is_pending(&self) -> bool {
        self.pending
    }

    /// Frames lost before the message that is published now.
    pub(crate) fn take_before(&mut self) -> u16 {
        std::mem::take(&mut self.before)
    }

    /// The next record to publish.
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

    /// The record was published with this number.
    pub(crate) fn told(&mut self, seq: Seq) {
        self.out.push(seq);
    }

    /// Returns true if no record is outstanding.
    pub(crate) fn none_out(&self) -> bool {
        self.out.is_empty()
    }

    /// Returns true if `seq`, which was released, is a loss record.
    pub(crate) fn take(&mut self, seq: Seq) -> bool {
        let index = self.out.iter().position(|s| *s == seq);
        index.map(|i| self.out.swap_remove(i)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_one_record() {
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
    fn without_records_only_the_number_is_counted() {
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
