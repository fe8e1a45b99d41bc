//! Introspection: values that describe a running engine, for statistics and for `towpath ctl`.
//!
//! Every value is a copy. The engine hands itself as [`Introspect`] to the query server of its
//! [`PacketIo`](super::PacketIo) between two bursts, so a query never waits for a packet and a packet never waits for a query.

use towpath_gate::Walker;
use towpath_gate::state::States;
use towpath_metrics::metrics;
use towpath_ring::FrameOut;
use towpath_wire::Time;

use super::trace::{TraceFilter, TraceSink, Traces};
use super::{ReplyStats, Stats};
use crate::queue::{self, About, Channel, InspectorSlot, Policy, Queue, VerdictStats};

/// A running engine, as a query sees it.
pub trait Introspect {
    /// Every channel, by number.
    fn channels(&mut self) -> Vec<ChannelSnapshot>;

    /// The frames of a channel that are not free. `None` if the channel does not exist.
    fn frames(&mut self, channel: u32) -> Option<Vec<FrameSnapshot>>;

    /// Every queue, by number.
    fn queues(&mut self) -> Vec<QueueSnapshot>;

    /// Packet counters.
    fn stats(&self) -> Stats;

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
#[derive(Clone, Debug)]
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

metrics! {
    /// Conversations of a replay.
    pub struct ConversationStats in "engine" {
        /// TCP conversations.
        pub tcp: counter connections as "conversations" (protocol = "tcp"),
        /// UDP conversations.
        pub udp: counter connections as "conversations" (protocol = "udp"),
    }
}

/// The engine's parts that a query may look at.
pub(super) struct View<'a, C> {
    pub(super) queues: &'a mut [Queue<C>],
    pub(super) walker: &'a Walker,
    /// The engine's wall clock in nanoseconds.
    pub(super) wall: u64,
    pub(super) clock: Time,
    pub(super) stats: Stats,
    pub(super) replies: ReplyStats,
    pub(super) traces: &'a mut Traces,
}

impl<C: Channel> View<'_, C> {
    fn slot(&mut self, channel: u32) -> Option<&mut InspectorSlot<C>> {
        self.queues.iter_mut().flat_map(Queue::listeners).find(|slot| slot.number() == channel)
    }
}

impl<C: Channel> Introspect for View<'_, C> {
    fn channels(&mut self) -> Vec<ChannelSnapshot> {
        let mut channels = Vec::new();
        for queue in &mut *self.queues {
            let (number, policy) = (queue.number(), queue.policy());
            channels.extend(queue.listeners().map(|slot| slot.snapshot(number, policy, self.wall)));
        }
        channels.sort_by_key(|channel| channel.channel);
        channels
    }

    fn frames(&mut self, channel: u32) -> Option<Vec<FrameSnapshot>> {
        let wall = self.wall;
        self.slot(channel).map(|slot| slot.frames(wall))
    }

    fn queues(&mut self) -> Vec<QueueSnapshot> {
        snapshots(self.queues)
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn replies(&self) -> ReplyStats {
        self.replies
    }

    fn states(&self) -> &States {
        self.walker.states()
    }

    fn clock(&self) -> Time {
        self.clock
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

/// The queues by number.
pub(super) fn snapshots<C: Channel>(queues: &mut [Queue<C>]) -> Vec<QueueSnapshot> {
    let mut snapshots: Vec<_> = queues.iter_mut().map(Queue::snapshot).collect();
    snapshots.sort_by_key(|queue| queue.number);
    snapshots
}
