//! Introspection: values that describe a running engine, for statistics and for `towpath ctl`.
//!
//! Every value is a copy. The engine passes itself as [`Introspect`] to [`PacketIo::serve_queries`](crate::PacketIo::serve_queries)
//! between two bursts, so that no packet waits for a query.

use towpath_gate::Walker;
use towpath_gate::state::States;
use towpath_metrics::metrics;
use towpath_ring::FrameOut;
use towpath_wire::Time;

use crate::clock::Clock;
use crate::engine::Totals;
use crate::queue::{self, About, Channel, InspectorSlot, Policy, Queue, VerdictStats};
use crate::queue_set::QueueSet;
use crate::reorder::Shares;
use crate::replies::ReplyStats;
use crate::trace::{TraceFilter, TraceSink, Traces};

/// A running engine, as a query sees it.
pub trait Introspect {
    /// Every channel, by number.
    fn channels(&mut self) -> Vec<ChannelSnapshot>;

    /// The frames of a channel that are not free. `None` if the channel does not exist.
    fn frames(&mut self, channel: u32) -> Option<Vec<FrameSnapshot>>;

    /// Every queue, by number.
    fn queues(&mut self) -> Vec<QueueSnapshot>;

    /// The packets by outcome.
    fn totals(&self) -> Totals;

    /// Counters of the answers to rejected packets.
    fn replies(&self) -> ReplyStats;

    /// The table of dynamic states.
    fn states(&self) -> &States;

    /// The clock of the dynamic states.
    fn clock(&self) -> Time;

    /// The names of the ports, by number.
    fn ports(&self) -> Vec<String>;

    /// Traces the frames that a channel gets. Returns false if the channel does not exist, has ended, or has its maximum
    /// number of traces.
    fn trace_channel(&mut self, channel: u32, sink: Box<dyn TraceSink>) -> bool;

    /// Traces the packets that `filter` matches. Returns false if the engine has its maximum number of traces.
    fn trace_packets(&mut self, filter: Box<dyn TraceFilter>, sink: Box<dyn TraceSink>) -> bool;
}

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
    pub stats: queue::Stats,
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
        self.inspectors = self.inspectors.max(other.inspectors);
        self.trouble = self.trouble.take().or(other.trouble);
    }
}

metrics! {
    /// Conversations of a replay.
    pub struct ConversationStats in "engine" {
        /// TCP conversations.
        pub tcp: counter connections as "conversations": "Conversations of a replay, by protocol." (protocol = "tcp"),
        /// UDP conversations.
        pub udp: counter connections as "conversations" (protocol = "udp"),
    }
}

/// The parts of an engine that queries read.
pub(crate) struct EngineView<'a, C> {
    pub(crate) queues: &'a mut QueueSet<C>,
    pub(crate) shares: &'a Shares,
    pub(crate) walker: &'a Walker,
    pub(crate) clock: &'a Clock,
    pub(crate) totals: &'a Totals,
    /// Packets that passed and wait for a neighbor.
    pub(crate) held: u64,
    pub(crate) replies: ReplyStats,
    pub(crate) traces: &'a mut Traces,
}

impl<C: Channel> EngineView<'_, C> {
    fn slot(&mut self, channel: u32) -> Option<&mut InspectorSlot<C>> {
        self.queues.iter_mut().flat_map(Queue::inspectors).find(|slot| slot.number() == channel)
    }
}

impl<C: Channel> Introspect for EngineView<'_, C> {
    fn channels(&mut self) -> Vec<ChannelSnapshot> {
        let wall = self.clock.wall;
        let mut channels = Vec::new();
        for queue in self.queues.iter_mut() {
            let (number, policy) = (queue.number(), queue.policy().clone());
            channels.extend(queue.inspectors().map(|slot| slot.snapshot(number, &policy, wall)));
        }
        channels.sort_by_key(|channel| channel.channel);
        channels
    }

    fn frames(&mut self, channel: u32) -> Option<Vec<FrameSnapshot>> {
        let wall = self.clock.wall;
        self.slot(channel).map(|slot| slot.frames(wall))
    }

    fn queues(&mut self) -> Vec<QueueSnapshot> {
        self.queues.snapshots(self.shares)
    }

    fn totals(&self) -> Totals {
        let mut totals = *self.totals;
        totals.stats.passed -= self.held;
        totals
    }

    fn replies(&self) -> ReplyStats {
        self.replies
    }

    fn states(&self) -> &States {
        self.walker.states()
    }

    fn clock(&self) -> Time {
        self.clock.now
    }

    fn ports(&self) -> Vec<String> {
        let ports = self.walker.ports();
        ports.ids().map(|id| ports.name(id).unwrap_or_default().to_owned()).collect()
    }

    fn trace_channel(&mut self, channel: u32, sink: Box<dyn TraceSink>) -> bool {
        self.slot(channel).is_some_and(|slot| slot.trace(sink))
    }

    fn trace_packets(&mut self, filter: Box<dyn TraceFilter>, sink: Box<dyn TraceSink>) -> bool {
        self.traces.add(filter, sink)
    }
}
