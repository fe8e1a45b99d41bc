//! The parts of an engine that queries read.

use towpath_gate::Walker;
use towpath_gate::state::States;
use towpath_wire::Time;

use crate::clock::Clock;
use crate::introspect::Introspect;
use crate::queue::{Channel, ChannelSnapshot, FrameSnapshot, InspectorSlot, Queue, QueueSnapshot};
use crate::queue_set::QueueSet;
use crate::reorder::Shares;
use crate::totals::{ReplyStats, Totals};
use crate::trace::{TraceFilter, TraceSink, Traces};

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
        channels.sort_unstable_by_key(|channel| channel.channel);
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
