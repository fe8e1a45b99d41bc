//! What a consumer says about a frame, and the 64-bit word that says it.

use crate::shm::seq::Seq;

/// What is to happen to a frame. Giving a verdict gives the frame back, except [`Verdict::Hold`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Let it go on (or, for a message, simply: done with it).
    Pass,
    /// Drop it.
    Drop,
    /// Drop it and tell the sender (reset or unreachable).
    Reject,
    /// Let it go on with another payload, which is in this TX frame.
    Replace(u16),
    /// Hand it to this queue.
    Queue(u16),
    /// Take it through the rules again.
    Repeat,
    /// Keep it: later frames go on, this one is decided later, in any order.
    Hold,
}

/// What goes along with a verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flags(pub u8);

impl Flags {
    /// The verdict is for this flow from now on, not only for this frame.
    pub const FLOW: Self = Self(1);
    /// `mark` and `mask` are valid.
    pub const MARK: Self = Self(2);
    /// Every bit that has a meaning.
    pub const ALL: Self = Self(3);

    /// Both sets of flags.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all of `other` is set.
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// A verdict with its flags and mark, as the consumer gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// What is to happen.
    pub verdict: Verdict,
    /// [`Flags::FLOW`]; [`Flags::MARK`] is set by [`Answer::mark`].
    pub flags: Flags,
    /// New bits of the mark, under `mask`.
    pub mark: u32,
    /// Which bits of the mark change.
    pub mask: u32,
}

impl Answer {
    /// Sets the bits of the packet's mark that `mask` names to those of `mark`.
    #[must_use]
    pub const fn mark(mut self, mark: u32, mask: u32) -> Self {
        self.flags = self.flags.with(Flags::MARK);
        self.mark = mark;
        self.mask = mask;
        self
    }

    /// Makes the verdict one for the flow from now on.
    #[must_use]
    pub const fn flow(mut self) -> Self {
        self.flags = self.flags.with(Flags::FLOW);
        self
    }
}

impl From<Verdict> for Answer {
    fn from(verdict: Verdict) -> Self {
        Self { verdict, flags: Flags::default(), mark: 0, mask: 0 }
    }
}

/// The word of a release entry or record: `seq:32 | verdict:8 | flags:8 | arg:16`, lowest bits first.
///
/// The words that are not a verdict are `Err(Unknown)`: a consumer that is broken or hostile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word {
    pub(crate) seq: Seq,
    pub(crate) verdict: Verdict,
    pub(crate) flags: Flags,
}

/// A word whose verdict or flags have no meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unknown;

impl Word {
    pub(crate) const fn seq_of(raw: u64) -> Seq {
        Seq(raw as u32)
    }

    pub(crate) fn parse(raw: u64) -> Result<Self, Unknown> {
        let flags = Flags((raw >> 40) as u8);
        let arg = (raw >> 48) as u16;
        let verdict = match (raw >> 32) as u8 {
            1 => Verdict::Pass,
            2 => Verdict::Drop,
            3 => Verdict::Reject,
            4 => Verdict::Replace(arg),
            5 => Verdict::Queue(arg),
            6 => Verdict::Repeat,
            7 => Verdict::Hold,
            _ => return Err(Unknown),
        };
        // A bit without a meaning today may get one that changes the verdict: refuse it.
        if flags.0 & !Flags::ALL.0 != 0 {
            return Err(Unknown);
        }
        Ok(Self { seq: Self::seq_of(raw), verdict, flags })
    }

    pub(crate) fn emit(self) -> u64 {
        let (verdict, arg) = match self.verdict {
            Verdict::Pass => (1, 0),
            Verdict::Drop => (2, 0),
            Verdict::Reject => (3, 0),
            Verdict::Replace(arg) => (4, arg),
            Verdict::Queue(arg) => (5, arg),
            Verdict::Repeat => (6, 0),
            Verdict::Hold => (7, 0),
        };
        u64::from(self.seq.0) | verdict << 32 | u64::from(self.flags.0) << 40 | u64::from(arg) << 48
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_word_that_parses_says_what_it_said(raw: u64) {
            if let Ok(word) = Word::parse(raw) {
                prop_assert_eq!(Word::parse(word.emit()), Ok(word));
                prop_assert_eq!(word.seq, Word::seq_of(raw));
            }
        }
    }

    #[test]
    fn the_zero_word_is_no_verdict() {
        assert_eq!(Word::parse(0), Err(Unknown));
        assert_eq!(Word::parse(8 << 32), Err(Unknown));
        assert_eq!(Word::parse(1 << 32 | 4 << 40), Err(Unknown));
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let word = Word { seq: Seq(0x0102_0304), verdict: Verdict::Queue(0xaabb), flags: Flags::FLOW };
        assert_eq!(word.emit(), 0xaabb_0105_0102_0304);
    }
}
