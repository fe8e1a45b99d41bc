//! Verdicts, and the 64-bit word that carries a verdict through shared memory.
//!
//! [`Verdict`] and [`Decision`] are the only representation of a packet's outcome outside of this crate. The word ([`Word`]) is
//! what a client writes into a release entry or a record; only the readers and writers of this crate see it.

use crate::shm::seq::Seq;

/// The outcome for one packet.
///
/// A verdict returns the frame to its sender, except [`Hold`](Self::Hold).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict<'a> {
    /// Forward the packet. For a message: processed.
    Pass,
    /// Drop the packet silently.
    Drop,
    /// Drop the packet and notify its sender (TCP reset or ICMP unreachable).
    Reject,
    /// Forward the packet with this payload in place of the original one.
    Replace(&'a [u8]),
    /// Send the packet to the queue with this number.
    Queue(u16),
    /// Evaluate the rules again for this packet.
    Repeat,
    /// Keep the packet. Later packets proceed; this one is decided later, in any order. An engine never receives this verdict.
    Hold,
}

/// A verdict together with its scope, the change of the packet's mark, and its origin.
///
/// A client gives one to [`Consumer::verdict`](crate::Consumer::verdict); an engine receives one from
/// [`Channel::poll_verdicts`](crate::Channel::poll_verdicts).
///
/// ```
/// use towpath_ring::{Decision, Verdict};
///
/// let decision = Decision::from(Verdict::Pass).with_mark(0x2, 0xf).for_flow();
/// assert_eq!(decision.apply_mark(0x31), 0x32);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision<'a> {
    /// The outcome.
    pub verdict: Verdict<'a>,
    /// New value of the mark's bits that are set in `mask`.
    pub mark: u32,
    /// Bits of the mark that change; 0 leaves the mark unchanged.
    pub mask: u32,
    /// Whether the verdict applies to all further packets of the flow.
    pub flow: bool,
    /// Where the verdict came from. [`Consumer::verdict`](crate::Consumer::verdict) ignores this field.
    pub cause: Cause,
}

/// Where a verdict came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The client, for this frame.
    Single,
    /// The client, for every frame up to some frame.
    Cumulative,
    /// The default verdict: the client did not decide before the deadline.
    Overdue,
    /// The default verdict: the client's verdict was invalid.
    Invalid,
}

impl Decision<'_> {
    /// Sets the bits of the packet's mark that are set in `mask` to those of `mark`.
    #[must_use]
    pub const fn with_mark(mut self, mark: u32, mask: u32) -> Self {
        self.mark = mark;
        self.mask = mask;
        self
    }

    /// Applies the verdict to all further packets of the flow.
    #[must_use]
    pub const fn for_flow(mut self) -> Self {
        self.flow = true;
        self
    }

    /// Returns the mark of a packet whose mark was `before`.
    #[must_use]
    pub const fn apply_mark(&self, before: u32) -> u32 {
        before & !self.mask | self.mark & self.mask
    }
}

impl<'a> From<Verdict<'a>> for Decision<'a> {
    fn from(verdict: Verdict<'a>) -> Self {
        Self { verdict, mark: 0, mask: 0, flow: false, cause: Cause::Single }
    }
}

/// The word of a release entry or record: `seq:32 | verdict:8 | flags:8 | arg:16`, lowest bits first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word {
    pub(crate) seq: Seq,
    /// `PASS` to `HOLD`.
    code: u8,
    flags: u8,
    /// The queue of `QUEUE`, the TX frame of `REPLACE`.
    arg: u16,
}

const PASS: u8 = 1;
const DROP: u8 = 2;
const REJECT: u8 = 3;
const REPLACE: u8 = 4;
const QUEUE: u8 = 5;
const REPEAT: u8 = 6;
const HOLD: u8 = 7;

/// The verdict applies to the flow.
const FLOW: u8 = 1;
/// The mark and mask beside the word are valid.
const MARK: u8 = 2;

/// A word whose verdict or flags are undefined: the peer is broken or hostile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Invalid;

impl Word {
    /// A word that says `decision` about message `seq`. The payload of a replacement travels apart: see
    /// [`replace`](Self::replace).
    #[inline]
    pub(crate) fn new<'a>(seq: Seq, decision: impl Into<Decision<'a>>) -> Self {
        let decision = decision.into();
        let (code, arg) = match decision.verdict {
            Verdict::Pass => (PASS, 0),
            Verdict::Drop => (DROP, 0),
            Verdict::Reject => (REJECT, 0),
            Verdict::Replace(_) => (REPLACE, 0),
            Verdict::Queue(number) => (QUEUE, number),
            Verdict::Repeat => (REPEAT, 0),
            Verdict::Hold => (HOLD, 0),
        };
        let flags = if decision.flow { FLOW } else { 0 } | if decision.mask != 0 { MARK } else { 0 };
        Self { seq, code, flags, arg }
    }

    /// A word that replaces the payload of message `seq` by the payload of TX frame `frame`. With `marked`, the mark and mask beside
    /// the word are valid.
    pub(crate) const fn replace(seq: Seq, frame: u16, marked: bool) -> Self {
        Self { seq, code: REPLACE, flags: if marked { MARK } else { 0 }, arg: frame }
    }

    /// The sequence number of a word, valid or not.
    #[inline]
    pub(crate) const fn seq_of(raw: u64) -> Seq {
        Seq(raw as u32)
    }

    #[inline]
    pub(crate) const fn parse(raw: u64) -> Result<Self, Invalid> {
        let (code, flags, arg) = ((raw >> 32) as u8, (raw >> 40) as u8, (raw >> 48) as u16);
        // An undefined bit may change the verdict in a later version: refuse it.
        if code < PASS || code > HOLD || flags & !(FLOW | MARK) != 0 {
            return Err(Invalid);
        }
        Ok(Self { seq: Self::seq_of(raw), code, flags, arg })
    }

    #[inline]
    pub(crate) const fn emit(self) -> u64 {
        self.seq.0 as u64 | (self.code as u64) << 32 | (self.flags as u64) << 40 | (self.arg as u64) << 48
    }

    #[inline]
    pub(crate) const fn is_hold(self) -> bool {
        self.code == HOLD
    }

    /// The TX frame that holds the replacement.
    #[inline]
    pub(crate) const fn replacement(self) -> Option<u16> {
        if self.code == REPLACE { Some(self.arg) } else { None }
    }

    #[inline]
    pub(crate) const fn has_mark(self) -> bool {
        self.flags & MARK != 0
    }

    /// The decision, with the mark and mask that stand beside the word and, for a replacement, its payload.
    #[inline]
    pub(crate) fn decision(self, mark: (u32, u32), replacement: &[u8], cause: Cause) -> Decision<'_> {
        let verdict = match self.code {
            PASS => Verdict::Pass,
            DROP => Verdict::Drop,
            REJECT => Verdict::Reject,
            REPLACE => Verdict::Replace(replacement),
            QUEUE => Verdict::Queue(self.arg),
            REPEAT => Verdict::Repeat,
            _ => Verdict::Hold,
        };
        let (mark, mask) = if self.has_mark() { mark } else { (0, 0) };
        Decision { verdict, mark, mask, flow: self.flags & FLOW != 0, cause }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_valid_word_survives_parse_and_emit(raw: u64) {
            if let Ok(word) = Word::parse(raw) {
                prop_assert_eq!(Word::parse(word.emit()), Ok(word));
                prop_assert_eq!(word.emit(), raw);
                prop_assert_eq!(word.seq, Word::seq_of(raw));
            }
        }
    }

    #[test]
    fn undefined_words_are_refused() {
        assert_eq!(Word::parse(0), Err(Invalid));
        assert_eq!(Word::parse(8 << 32), Err(Invalid));
        assert_eq!(Word::parse(1 << 32 | 4 << 40), Err(Invalid));
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let word = Word::new(Seq(0x0102_0304), Decision::from(Verdict::Queue(0xaabb)).for_flow());
        assert_eq!(word.emit(), 0xaabb_0105_0102_0304);
        assert_eq!(Word::replace(Seq(1), 9, false).emit(), 0x0009_0004_0000_0001);
    }

    #[test]
    fn a_decision_survives_its_word() {
        let verdicts = [
            Verdict::Pass,
            Verdict::Drop,
            Verdict::Reject,
            Verdict::Queue(7),
            Verdict::Repeat,
            Verdict::Hold,
        ];
        for verdict in verdicts.into_iter().chain([Verdict::Replace(b"x")]) {
            for decision in
                [verdict.into(), Decision::from(verdict).with_mark(5, 7), Decision::from(verdict).for_flow()]
            {
                let word = Word::new(Seq(1), decision);
                assert_eq!(word.decision((decision.mark, decision.mask), b"x", Cause::Single), decision);
            }
        }
        // Without the flag, what stands beside the word has no meaning.
        assert_eq!(
            Word::new(Seq(1), Verdict::Pass).decision((5, 7), &[], Cause::Single),
            Verdict::Pass.into()
        );
    }
}
