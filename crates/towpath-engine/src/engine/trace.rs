//! Traces: copies of packets and of their fate for a client that asked for them.
//!
//! A trace never slows a packet: its sink drops and counts what it has no room for. Without a trace, a packet costs one
//! look at an empty list.

use std::fmt::Debug;

use towpath_gate::{Walk, Walker};
use towpath_ring as ring;
use towpath_wire::{self as wire, Packet};

use super::Meta;
use super::packet_ctx::Fate;
use crate::queue::Outcome;

/// Traces at a time.
const TRACES: usize = 8;

/// Receives the copies of one trace. No method blocks.
pub trait TraceSink: Debug + Send {
    /// Returns true if the client has ended the trace.
    fn is_over(&self) -> bool;

    /// A channel publishes this frame.
    fn given(&mut self, seq: ring::Seq, bytes: &[u8], meta: &ring::Meta);

    /// Frame `seq` is decided; the inspector had it for `after` nanoseconds.
    fn decided(&mut self, seq: ring::Seq, after: u64, outcome: &Outcome<'_>);

    /// The engine has decided this packet.
    fn packet(&mut self, packet: &TracedPacket<'_>);
}

/// Selects the packets of a trace.
pub trait TraceFilter: Debug + Send {
    /// Returns true if the trace wants this packet; `rule` decided it.
    fn takes(&self, packet: &Packet<'_>, rule: Option<u32>) -> bool;
}

/// A packet that the engine has decided.
#[derive(Clone, Copy, Debug)]
pub struct TracedPacket<'a> {
    /// Its number among all packets of the engine.
    pub number: u64,
    /// The number of the port that it burst in by.
    pub arrival: u32,
    /// The frame.
    pub bytes: &'a [u8],
    /// What the port said about it.
    pub meta: &'a Meta,
    /// The number of the rule that decided.
    pub rule: Option<u32>,
    /// Its fate. `None` if it passed.
    pub fate: Option<Fate>,
    /// The name of the port that it leaves by.
    pub out: Option<&'a str>,
}

/// The traces of an engine.
#[derive(Debug, Default)]
pub(super) struct Traces(Vec<(Box<dyn TraceFilter>, Box<dyn TraceSink>)>);

impl Traces {
    /// Adds a trace. Returns false if there are too many.
    pub(super) fn add(&mut self, filter: Box<dyn TraceFilter>, sink: Box<dyn TraceSink>) -> bool {
        self.tidy();
        let room = self.0.len() < TRACES;
        if room {
            self.0.push((filter, sink));
        }
        room
    }

    /// Removes the traces that their clients have ended.
    pub(super) fn tidy(&mut self) {
        self.0.retain(|(_, sink)| !sink.is_over());
    }

    /// Returns true if there is no trace.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Copies a decided packet to the traces that want it. It passed if it has no fate. `number` is its number among all
    /// packets, `arrival` the port that it burst in by.
    #[cold]
    pub(super) fn tell(
        &mut self,
        (number, arrival): (u64, u32),
        (bytes, meta): (&[u8], &Meta),
        walk: &Walk,
        fate: Option<Fate>,
        walker: &Walker,
    ) {
        self.tidy();
        let Ok(packet) = wire::parse(meta.link, bytes, meta.wire_len) else { return };
        let rule = walk.rule();
        let out = meta.out.and_then(|port| walker.ports().name(port));
        let traced = TracedPacket { number, arrival, bytes, meta, rule, fate, out };
        for (_, sink) in self.0.iter_mut().filter(|(filter, _)| filter.takes(&packet, rule)) {
            sink.packet(&traced);
        }
    }
}
