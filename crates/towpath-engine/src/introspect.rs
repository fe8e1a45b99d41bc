//! Introspection: values that describe a running engine, for statistics and for `towpath ctl`.
//!
//! Every value is a copy. The engine passes itself as [`Introspect`] to [`PacketIo::serve_queries`](crate::PacketIo::serve_queries)
//! between two bursts, so that no packet waits for a query.

use towpath_gate::state::States;
use towpath_wire::Time;

use crate::queue::{ChannelSnapshot, FrameSnapshot, QueueSnapshot};
use crate::totals::{ReplyStats, Totals};
use crate::trace::{TraceFilter, TraceSink};

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
