//! Copies of the state of queues and channels, for queries.

use towpath_metrics::Histogram;
use towpath_ring::FrameOut;

use super::channel::About;
use super::policy::Policy;
use super::stats::{Stats, VerdictStats};
use crate::flow_verdict;

/// A channel to an inspector.
#[derive(Clone, Debug)]
pub struct ChannelSnapshot {
    /// The channel's number.
    pub channel: u32,
    /// The queue that it serves.
    pub queue: u16,
    /// The queue's policy.
    pub policy: Policy,
    /// Why the channel ended, if it has.
    pub gone: Option<String>,
    /// Frames that the inspector has now.
    pub open: u32,
    /// Age of the oldest of them in nanoseconds.
    pub oldest: Option<u64>,
    /// Active traces.
    pub traces: u32,
    /// Frames of the ring that are not free.
    pub used: u32,
    /// Verdicts of the inspector.
    pub verdicts: VerdictStats,
    /// The peer and the ring. `None` for a channel without them.
    pub about: Option<About>,
}

/// A message in a ring that is not free.
#[derive(Clone, Copy, Debug)]
pub struct FrameSnapshot {
    /// Its place in the ring and its state there.
    pub out: FrameOut,
    /// Bytes of the packet. `None` if no packet waits for it.
    pub len: Option<u32>,
    /// Nanoseconds since it was published. `None` if no packet waits for it.
    pub age: Option<u64>,
    /// The payload is larger than its frames: it has its own memory.
    pub oneshot: bool,
}

/// A queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueSnapshot {
    /// The queue's number.
    pub number: u16,
    /// Its counters.
    pub stats: Stats,
    /// The counters of its verdicts for flows.
    pub flow_verdicts: flow_verdict::Stats,
    /// Time from the publication of a frame to the reading of its verdict.
    pub verdict_time: Histogram,
    /// Attached inspectors.
    pub inspectors: u64,
    /// Why inspectors were detached, if any was.
    pub trouble: Option<String>,
}

impl QueueSnapshot {
    /// Adds the same queue of another thread. Each inspector serves every thread.
    pub fn add(&mut self, other: Self) {
        let high_water = self.stats.high_water.max(other.stats.high_water);
        self.stats.add(&other.stats);
        self.stats.high_water = high_water;
        self.flow_verdicts.add(&other.flow_verdicts);
        self.verdict_time.merge(&other.verdict_time);
        self.inspectors = self.inspectors.max(other.inspectors);
        self.trouble = self.trouble.take().or(other.trouble);
    }
}
