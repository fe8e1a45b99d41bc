//! Traces: copies of packets and of their outcomes, for clients that request them.
//!
//! A trace never slows a packet: a sink without room drops and counts. Without a trace, the cost per packet is one check of an empty
//! list.

use std::fmt::Debug;

use towpath_gate::{PortId, Walk, Walker};
use towpath_ring::{self as ring, Decision};
use towpath_wire::{self as wire, Packet};

use crate::drop_reason::{DropReason, Outcome};
use crate::meta::Meta;

/// Maximum number of traces.
const TRACES: usize = 8;

/// Receives the copies of one trace. No method blocks.
pub trait TraceSink: Debug + Send {
    /// Returns true if the client has ended the trace.
    fn is_over(&self) -> bool;

    /// A channel publishes this frame.
    fn given(&mut self, seq: ring::Seq, bytes: &[u8], meta: &ring::Meta);

    /// Frame `seq` is decided, or lost for a reason. The inspector had it for `after` nanoseconds.
    fn decided(&mut self, seq: ring::Seq, after: u64, decision: &Result<Decision<'_>, DropReason>);

    /// The engine has decided this packet.
    fn packet(&mut self, packet: &TracedPacket<'_>);

    /// The engine had no room for this number of dropped packets.
    fn left_out(&mut self, packets: u64) {
        let _ = packets;
    }
}

/// Selects the packets of a trace.
pub trait TraceFilter: Debug + Send {
    /// Returns true if the trace wants this packet; `rule` decided it. `packet` is `None` if the frame is malformed.
    fn takes(&self, packet: Option<&Packet<'_>>, rule: Option<u32>, outcome: Outcome) -> bool;
}

/// A packet that the engine has decided.
#[derive(Clone, Copy, Debug)]
pub struct TracedPacket<'a> {
    /// Its number among all packets of the engine.
    pub number: u64,
    /// The number of the port by which it arrived.
    pub arrival: PortId,
    /// The frame.
    pub bytes: &'a [u8],
    /// The frame's metadata.
    pub meta: &'a Meta,
    /// The number of the rule that decided.
    pub rule: Option<u32>,
    /// Its outcome.
    pub outcome: Outcome,
    /// Its zone.
    pub zone: u16,
    /// The name of the port that it leaves by, or failed to leave by.
    pub out: Option<&'a str>,
}

/// The traces of an engine.
#[derive(Debug, Default)]
pub(crate) struct Traces(Vec<(Box<dyn TraceFilter>, Box<dyn TraceSink>)>);

impl Traces {
    /// Adds a trace. Returns false if there are too many.
    pub(crate) fn add(&mut self, filter: Box<dyn TraceFilter>, sink: Box<dyn TraceSink>) -> bool {
        self.tidy();
        let room = self.0.len() < TRACES;
        if room {
            self.0.push((filter, sink));
        }
        room
    }

    /// Removes the traces that their clients have ended.
    pub(crate) fn tidy(&mut self) {
        self.0.retain(|(_, sink)| !sink.is_over());
    }

    /// Returns true if there is no trace.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Tells the traces that the egress had no room for dropped packets.
    pub(crate) fn count_left_out(&mut self, packets: u64) {
        if packets > 0 {
            self.0.iter_mut().for_each(|(_, sink)| sink.left_out(packets));
        }
    }

    /// Copies a decided packet to the traces that select it. `number` is its number among all packets, `arrival` the port that
    /// it came in by. `walk` is `None` if no rule was evaluated, or if the packet passed the rules and failed to leave.
    #[cold]
    pub(crate) fn record(
        &mut self,
        (number, arrival): (u64, PortId),
        (bytes, meta): (&[u8], &Meta),
        walk: Option<&Walk>,
        outcome: Outcome,
        walker: &Walker,
    ) {
        self.tidy();
        let packet = wire::parse(meta.link, bytes, meta.wire_len).ok();
        let rule = walk.and_then(Walk::rule);
        let leaves = outcome == Outcome::Passed || walk.is_none();
        let out = meta.egress.port().filter(|_| leaves).and_then(|port| walker.ports().name(port));
        let zone = walk.map_or(0, Walk::zone);
        let traced = TracedPacket { number, arrival, bytes, meta, rule, outcome, zone, out };
        for (_, sink) in self.0.iter_mut().filter(|(filter, _)| filter.takes(packet.as_ref(), rule, outcome))
        {
            sink.packet(&traced);
        }
    }
}
