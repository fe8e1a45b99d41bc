//! Verdicts that a poll has collected and the engine has not yet acted on.
//!
//! A verdict borrows the ring, so replacement payloads are copied. The accounts of the reorder buffer bound the copies of one poll: each
//! is charged before it is made.

use std::ops::Range;

use towpath_ring::{Decision, Verdict};

use crate::queue::QueueVerdict;
use crate::reorder::PacketId;

#[derive(Debug, Default)]
pub(crate) struct VerdictBatch {
    settlements: Vec<(PacketId, Settlement)>,
    replacements: Vec<u8>,
}

/// A verdict in the engine's own memory.
#[derive(Clone, Debug)]
pub(crate) struct Settlement {
    /// The payload of a replacement is in the batch: [`VerdictBatch::replacement`].
    pub(crate) verdict: QueueVerdict<'static>,
    replacement: Range<usize>,
}

impl VerdictBatch {
    pub(crate) fn push(&mut self, id: PacketId, verdict: QueueVerdict<'_>) {
        let mut replacement = 0..0;
        let verdict = match verdict {
            QueueVerdict::Lost(reason) => QueueVerdict::Lost(reason),
            QueueVerdict::Redeliver => QueueVerdict::Redeliver,
            QueueVerdict::Decided(decision, channel) => {
                let verdict = match decision.verdict {
                    Verdict::Replace(bytes) => {
                        let start = self.replacements.len();
                        self.replacements.extend_from_slice(bytes);
                        replacement = start..start + bytes.len();
                        Verdict::Replace(&[])
                    }
                    Verdict::Pass => Verdict::Pass,
                    Verdict::Drop => Verdict::Drop,
                    Verdict::Reject => Verdict::Reject,
                    Verdict::Queue(number) => Verdict::Queue(number),
                    Verdict::Repeat => Verdict::Repeat,
                    Verdict::Hold => Verdict::Hold,
                };
                let Decision { mark, mask, flow, cause, .. } = decision;
                QueueVerdict::Decided(Decision { verdict, mark, mask, flow, cause }, channel)
            }
        };
        self.settlements.push((id, Settlement { verdict, replacement }));
    }

    /// Takes the settlements. [`recycle`](Self::recycle) returns their memory.
    pub(crate) fn take(&mut self) -> Vec<(PacketId, Settlement)> {
        std::mem::take(&mut self.settlements)
    }

    /// The payload of a replacement.
    pub(crate) fn replacement(&self, settlement: &Settlement) -> &[u8] {
        &self.replacements[settlement.replacement.clone()]
    }

    /// Ends the batch; `settlements` is the memory that [`take`](Self::take) returned.
    pub(crate) fn recycle(&mut self, mut settlements: Vec<(PacketId, Settlement)>) {
        settlements.clear();
        self.settlements = settlements;
        self.replacements.clear();
    }
}
