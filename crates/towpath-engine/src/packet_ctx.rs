//! The state of one packet on its path.

use std::net::IpAddr;

use towpath_gate::{Dir, PortId, Walk, Walker};
use towpath_ring::{self as ring, Layers};
use towpath_wire::{self as wire, Ends, Flow, Malformed, Packet, proto};

use crate::drop_reason::Outcome;
use crate::flow_locks::{BUCKETS, FlowLock};
use crate::meta::{Egress, Meta, NextHop};
use crate::topology::{ForwardMode, Topology};

/// How often inspectors may send one packet back to the rules or to another queue.
const MAX_REINJECTS: u8 = 16;

/// A packet on its path.
#[derive(Debug)]
pub(crate) struct PacketCtx {
    /// The position in the rules.
    pub(crate) walk: Walk,
    /// The port that the packet came in by.
    pub(crate) arrival: PortId,
    /// How the packet continues after it has passed direction `in`.
    pub(crate) mode: ForwardMode,
    /// Where the packet leaves, once known.
    pub(crate) egress: Egress,
    /// The next hop that its route names.
    pub(crate) next_hop: NextHop,
    /// The next hop that a rule (`fwd`) names.
    pub(crate) fwd: Option<IpAddr>,
    /// The walk in direction `out` has begun.
    pub(crate) outbound: bool,
    /// The event for which the packet waits.
    pub(crate) wait: Wait,
    /// Held while the packet waits and the rest of its walk may create a state that later packets of its flow need.
    pub(crate) lock: FlowLock,
    /// The number of received packets that it stands for.
    pub(crate) packets: u16,
    /// An inspector had it.
    pub(crate) inspected: bool,
    /// Its inspector died and it was given to another.
    pub(crate) redelivered: bool,
    reinjects: u8,
    /// Offsets of the headers, for inspectors and for the router.
    layers: Layers,
    /// Hash of the flow, the same for both directions.
    hash: u32,
    /// The flow's bucket in the reorder buffer and in the flow locks. It stays the same if an inspector changes the packet.
    bucket: u16,
}

/// The event for which a packet in the reorder buffer waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    /// Index of the queue.
    pub(crate) queue: usize,
    pub(crate) kind: Handover,
    /// Since when the packet waits for room in the queue, in nanoseconds of wall-clock time.
    pub(crate) since: Option<u64>,
}

/// How a rule hands a packet to a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Handover {
    /// `inspect`: the inspector's pass ends this walk.
    Inspect,
    /// `divert`: the walk continues at the next rule.
    Divert,
    /// `tee`: the inspector gets a copy.
    Tee,
}

/// The next step of a packet.
pub(crate) enum Next {
    /// The path ends.
    End(Outcome),
    /// The packet goes to this queue.
    Queue(u16, Handover),
    /// The fragment goes to the reassembler.
    Reassemble,
}

impl PacketCtx {
    /// Creates the context of a packet that arrives on `arrival`. `xmit`: its egress port, if the kernel has routed it.
    pub(crate) fn new(
        (arrival, xmit): (PortId, Option<PortId>),
        mode: ForwardMode,
        port: &towpath_port::Meta,
    ) -> Self {
        let connmark = port.queued.and_then(|queued| queued.conntrack).map(|connection| connection.mark);
        Self {
            walk: Walk::new(Dir::In, Some(arrival), xmit).with_marks(port.mark, connmark),
            arrival,
            mode,
            egress: Egress::Unrouted,
            next_hop: NextHop::None,
            fwd: None,
            outbound: false,
            wait: Wait { queue: 0, kind: Handover::Inspect, since: None },
            lock: FlowLock::default(),
            packets: 1,
            inspected: false,
            redelivered: false,
            reinjects: 0,
            layers: Layers::default(),
            hash: 0,
            bucket: 0,
        }
    }

    /// Notes the headers and sets the flow's bucket. `bucket_of` returns the bucket for a hash in the reorder buffer of a live engine;
    /// in a replay, buckets are only locks.
    pub(crate) fn place(&mut self, packet: &Packet<'_>, bucket_of: Option<impl FnOnce(u32) -> u16>) {
        self.note_headers(packet);
        let by_hash = |hash: u32| (hash >> (u32::BITS - BUCKETS.trailing_zeros())) as u16;
        self.bucket = bucket_of.map_or_else(|| by_hash(self.hash), |bucket_of| bucket_of(self.hash));
    }

    /// Notes the offsets of the headers and the flow's hash.
    pub(crate) fn note_headers(&mut self, packet: &Packet<'_>) {
        let offset = |at: usize| u16::try_from(at).unwrap_or(u16::MAX);
        self.layers = Layers {
            link: 0,
            network: offset(packet.network),
            payload: offset(packet.payload_range().start),
        };
        self.hash = flow_hash(packet);
    }

    /// Parses the packet with these bytes, and notes the headers.
    ///
    /// # Errors
    ///
    /// The packet is malformed: an inspector replaced it.
    pub(crate) fn parse<'a>(&mut self, bytes: &'a [u8], meta: &Meta) -> Result<Packet<'a>, Malformed> {
        let packet = wire::parse(meta.link, bytes, meta.wire_len)?;
        self.note_headers(&packet);
        Ok(packet)
    }

    /// The flow of the packet, in its zone.
    pub(crate) fn flow(&self, packet: &Packet<'_>) -> Option<Flow> {
        Some(Flow { zone: self.walk.zone(), ..packet.flow()? })
    }

    /// The hash of the flow.
    pub(crate) fn hash(&self) -> u32 {
        self.hash
    }

    /// Sets the flow's bucket.
    pub(crate) fn set_bucket(&mut self, bucket: u16) {
        self.bucket = bucket;
    }

    /// The flow's bucket.
    pub(crate) fn bucket(&self) -> u16 {
        self.bucket
    }

    /// The packet begins again at the first rule (`repeat`).
    pub(crate) fn restart(&mut self) {
        self.walk.restart();
        self.outbound = false;
        self.egress = Egress::Unrouted;
        self.wait.kind = Handover::Divert;
    }

    /// Counts one more reinjection. Returns true if the packet has had too many.
    pub(crate) fn reinject(&mut self) -> bool {
        self.reinjects = self.reinjects.saturating_add(1);
        self.reinjects > MAX_REINJECTS
    }

    /// Returns true if the packet may have to walk the rules in direction `out`.
    pub(crate) fn may_walk_out(&self, walker: &Walker) -> bool {
        match self.mode {
            ForwardMode::Routes | ForwardMode::Router => !walker.routes().is_empty(),
            ForwardMode::Bridge { walk_out, .. } => walk_out,
            ForwardMode::Back(_) | ForwardMode::Nowhere => false,
        }
    }

    /// An inspector has passed the packet. If its path ends without a look at the packet, sets the egress and returns true.
    pub(crate) fn passes_unseen(&mut self) -> bool {
        if self.wait.kind != Handover::Inspect || self.outbound {
            return false;
        }
        match self.mode {
            ForwardMode::Bridge { xmit, walk_out: false } => self.egress = Egress::Port(xmit),
            ForwardMode::Back(port) => self.egress = Egress::Port(port),
            ForwardMode::Nowhere => {}
            ForwardMode::Bridge { .. } | ForwardMode::Routes | ForwardMode::Router => return false,
        }
        true
    }

    /// The port by which the packet leaves, if it is known already.
    pub(crate) fn egress_port(&self) -> Option<PortId> {
        match self.mode {
            ForwardMode::Bridge { xmit, .. } => Some(xmit),
            ForwardMode::Back(port) => Some(port),
            ForwardMode::Routes | ForwardMode::Router | ForwardMode::Nowhere => self.egress.port(),
        }
    }

    /// Sets the bits of the packet's mark that are set in `mask`.
    pub(crate) fn set_mark(&mut self, mark: u32, mask: u32) {
        self.walk.set_mark(self.walk.mark() & !mask | mark & mask);
    }

    /// Writes the egress, the next hop and the marks into the packet's metadata.
    pub(crate) fn write_egress(&self, meta: &mut Meta) {
        (meta.egress, meta.next_hop) = (self.egress, self.next_hop);
        (meta.network, meta.packets) = (self.layers.network, self.packets);
        meta.port.mark = self.walk.mark();
        meta.port.connmark = self.walk.connmark();
    }

    /// The packet's metadata for an inspector.
    pub(crate) fn ring_meta(&self, meta: &Meta, topology: &Topology) -> ring::Meta {
        let interfaces = topology.interfaces(meta, self.mode, self.egress, self.egress_port());
        ring::Meta {
            kind: ring::Kind::PACKET,
            wire_len: meta.wire_len,
            time: meta.time,
            mark: self.walk.mark(),
            port: self.arrival.0.into(),
            hash: self.hash,
            layers: Layers { link: meta.link.0, ..self.layers },
            sender: Some(interfaces.into()),
            ..ring::Meta::default()
        }
    }
}

/// Returns true if the packet begins a connection: a SYN without ACK.
pub(crate) fn begins_connection(packet: &Packet<'_>) -> bool {
    packet.proto == proto::TCP && packet.tcp_flags & 0x12 == 0x02
}

/// A hash of the packet's flow, the same for both directions. 0 for a packet without a flow.
fn flow_hash(packet: &Packet<'_>) -> u32 {
    let Some(Flow { ends, proto, src_port, dst_port, .. }) = packet.flow() else { return 0 };
    let (src, dst) = match ends {
        Ends::V4(src, dst) => (u128::from(src.to_bits()), u128::from(dst.to_bits())),
        Ends::V6(src, dst, _) => (src.to_bits(), dst.to_bits()),
    };
    let ends = src.wrapping_add(dst);
    let ports = u64::from(src_port) + u64::from(dst_port);
    let folded = (ends as u64) ^ ((ends >> 64) as u64) ^ (ports << 20) ^ u64::from(proto);
    // Fibonacci hashing: the top bits of the product are well mixed.
    (folded.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> u32::BITS) as u32
}
