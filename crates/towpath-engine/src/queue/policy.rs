//! The policy of a queue.

use towpath_ring::{self as ring, Fanout, Overload, Verdict};

use crate::drop_reason::DropReason;

/// The verdict for a packet that no inspector decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DefaultVerdict {
    /// Fail open.
    Pass,
    /// Fail closed.
    #[default]
    Drop,
}

impl DefaultVerdict {
    /// `reason` if the verdict is to drop, `None` if it is to pass.
    pub fn drops(self, reason: DropReason) -> Option<DropReason> {
        match self {
            Self::Pass => None,
            Self::Drop => Some(reason),
        }
    }
}

/// The policy of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// How long an inspector may keep a frame, and how long a packet waits for room, in nanoseconds of wall-clock time.
    /// Default: 1 s.
    pub deadline: u64,
    /// An inspector has stalled if it returned no frame for this time and frames were overdue, in nanoseconds of wall-clock time.
    /// `u64::MAX`: never. Default: never.
    pub stall: u64,
    /// The verdict for packets that no inspector decides. Default: drop.
    pub default: DefaultVerdict,
    /// Which inspector gets a frame. Default: by flow.
    pub fanout: Fanout,
    /// What happens to a frame if its inspector has no room. Default: the packet waits.
    pub overload: Overload,
    /// An inspector with this many frames is overloaded, until it has `low`. Default: no limit.
    pub high: u32,
    /// See `high`.
    pub low: u32,
    /// The queues that a verdict of its inspectors may name. A verdict that names another one is invalid. Default: none.
    pub may_queue: Vec<u16>,
    /// The queue's weight in the division of the reorder buffer ([`Shares`](crate::reorder::Shares)). Default: 1.
    pub share: u16,
}

impl Policy {
    pub(super) fn ring_policy(&self) -> ring::Policy {
        let overload = match self.overload {
            // The packets wait in this queue's own backlog, which knows their ids.
            Overload::DropOldest(_) => Overload::Block,
            other => other,
        };
        ring::Policy { fanout: self.fanout, overload, high: self.high, low: self.low }
    }

    /// Returns true if an inspector may give this verdict: it names no queue, or one of `may_queue`. Otherwise one inspector could
    /// send its packets to the inspectors of any queue.
    pub(super) fn allows(&self, verdict: Verdict<'_>) -> bool {
        match verdict {
            Verdict::Queue(number) => self.may_queue.contains(&number),
            _ => true,
        }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            deadline: 1_000_000_000,
            stall: u64::MAX,
            default: DefaultVerdict::Drop,
            fanout: Fanout::FlowHash,
            overload: Overload::Block,
            high: u32::MAX,
            low: u32::MAX,
            may_queue: Vec::new(),
            share: 1,
        }
    }
}
