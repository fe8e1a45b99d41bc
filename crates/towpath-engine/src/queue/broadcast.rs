//! A packet of a broadcast queue: the verdicts of its inspectors combined into one.
//!
//! The packet waits for every inspector. The strictest verdict wins: reject, then drop, then the first of replace, queue and
//! repeat, then pass. An inspector that does not decide counts as the queue's default verdict. Marks combine in the order
//! of the verdicts. The result applies to the flow if every verdict does.

use towpath_ring::{Decision, Verdict};

use super::policy::DefaultVerdict;
use crate::drop_reason::DropReason;

/// Verdicts so far.
#[derive(Debug)]
pub(super) struct PendingBroadcast {
    open: usize,
    /// The strictest decision. The payload of a replacement is in `replacement`.
    strictest: Decision<'static>,
    /// Why the packet is dropped, if the default verdict is the strictest.
    reason: Option<DropReason>,
    replacement: Vec<u8>,
}

impl PendingBroadcast {
    /// `open` inspectors have the packet.
    pub(super) fn new(open: usize) -> Self {
        let strictest = Decision::from(Verdict::Pass).for_flow();
        Self { open, strictest, reason: None, replacement: Vec::new() }
    }

    /// Adds the verdict of one inspector. Returns true if it was the last.
    pub(super) fn add(
        &mut self,
        decision: Result<Decision<'_>, DropReason>,
        default: DefaultVerdict,
    ) -> bool {
        let (verdict, reason) = match decision {
            Ok(Decision { verdict, mark, mask, flow, .. }) => {
                self.strictest.mark = self.strictest.mark & !mask | mark & mask;
                self.strictest.mask |= mask;
                self.strictest.flow &= flow;
                (verdict, None)
            }
            Err(reason) => {
                self.strictest.flow = false;
                match default.drops(reason) {
                    None => (Verdict::Pass, None),
                    reason => (Verdict::Drop, reason),
                }
            }
        };
        if strictness(verdict) > strictness(self.strictest.verdict) {
            self.reason = reason;
            self.strictest.verdict = match verdict {
                Verdict::Replace(bytes) => {
                    self.replacement = bytes.to_vec();
                    Verdict::Replace(&[])
                }
                Verdict::Pass => Verdict::Pass,
                Verdict::Drop | Verdict::Hold => Verdict::Drop,
                Verdict::Reject => Verdict::Reject,
                Verdict::Queue(number) => Verdict::Queue(number),
                Verdict::Repeat => Verdict::Repeat,
            };
        }
        self.open -= 1;
        self.open == 0
    }

    /// The combined decision.
    pub(super) fn result(&self) -> Result<Decision<'_>, DropReason> {
        match (self.reason, self.strictest.verdict) {
            (Some(reason), _) => Err(reason),
            (None, Verdict::Replace(_)) => {
                Ok(Decision { verdict: Verdict::Replace(&self.replacement), ..self.strictest })
            }
            (None, _) => Ok(self.strictest),
        }
    }
}

fn strictness(verdict: Verdict<'_>) -> u8 {
    match verdict {
        Verdict::Pass => 0,
        Verdict::Replace(_) | Verdict::Queue(_) | Verdict::Repeat => 1,
        Verdict::Drop | Verdict::Hold => 2,
        Verdict::Reject => 3,
    }
}
