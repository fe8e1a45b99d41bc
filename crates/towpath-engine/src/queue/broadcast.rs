//! What the inspectors of a broadcast queue say about one packet.
//!
//! Everybody is waited for, and the strictest counts: reject, drop, then the first that wants the packet to take another
//! way (replace, queue, repeat), then pass. Marks add up in the order in which the verdicts come. The verdict is for the
//! flow when everybody's is.

use super::{Answer, DefaultVerdict, Outcome, Reply};

#[derive(Debug)]
pub(super) struct PendingBroadcast {
    open: usize,
    verdict: Verdict,
    mark: (u32, u32),
    flow: bool,
}

#[derive(Debug)]
enum Verdict {
    Pass,
    Replace(Vec<u8>),
    Queue(u16),
    Repeat,
    Drop,
    Reject,
}

impl Verdict {
    fn rank(&self) -> u8 {
        match self {
            Self::Pass => 0,
            Self::Replace(_) | Self::Queue(_) | Self::Repeat => 1,
            Self::Drop => 2,
            Self::Reject => 3,
        }
    }
}

impl PendingBroadcast {
    /// So many inspectors have the packet.
    pub(super) fn new(open: usize) -> Self {
        Self { open, verdict: Verdict::Pass, mark: (0, 0), flow: true }
    }

    /// One has said something, or nothing; true when that was the last.
    pub(super) fn cast(&mut self, outcome: Outcome<'_>, default: DefaultVerdict) -> bool {
        let verdict = match (outcome, default) {
            (Outcome::Answer(Reply { answer, mark: (mark, mask), flow }), _) => {
                self.mark = (self.mark.0 & !mask | mark & mask, self.mark.1 | mask);
                self.flow &= flow;
                match answer {
                    Answer::Pass => Verdict::Pass,
                    Answer::Drop => Verdict::Drop,
                    Answer::Reject => Verdict::Reject,
                    Answer::Queue(number) => Verdict::Queue(number),
                    Answer::Repeat => Verdict::Repeat,
                    Answer::Replace(bytes) => Verdict::Replace(bytes.to_vec()),
                }
            }
            (_, default) => {
                self.flow = false;
                match default {
                    DefaultVerdict::Pass => Verdict::Pass,
                    DefaultVerdict::Drop => Verdict::Drop,
                }
            }
        };
        if verdict.rank() > self.verdict.rank() {
            self.verdict = verdict;
        }
        self.open -= 1;
        self.open == 0
    }

    pub(super) fn announce(&self, tell: impl FnOnce(Reply<'_>)) {
        let answer = match &self.verdict {
            Verdict::Pass => Answer::Pass,
            Verdict::Drop => Answer::Drop,
            Verdict::Reject => Answer::Reject,
            Verdict::Queue(number) => Answer::Queue(*number),
            Verdict::Repeat => Answer::Repeat,
            Verdict::Replace(bytes) => Answer::Replace(bytes),
        };
        tell(Reply { answer, mark: self.mark, flow: self.flow });
    }
}
