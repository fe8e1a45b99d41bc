//! One packet's place on its path, and the step from one place to the next: values in, values out.

use std::net::IpAddr;

use towpath_gate::state::{Ends, Flow};
use towpath_gate::{Dir, Edits, PortId, Reject, Step, Walk, Walker};
use towpath_wire::{self as wire, Addresses, Packet, Time, edit, proto};

use towpath_port::Checksum;
use towpath_ring::{self as ring, Layers};

use super::{ForwardMode, Meta};
use crate::flow_verdict::{self, FlowVerdict};
use crate::queue::{Answer, Decided, DefaultVerdict, Reply};

/// Where a packet is on its path.
#[derive(Debug)]
pub(super) struct PacketCtx {
    pub(super) walk: Walk,
    /// The port it burst in on.
    pub(super) arrival: PortId,
    /// How it goes on when it has passed.
    mode: ForwardMode,
    /// The port it leaves by, once that is known.
    pub(super) out: Option<PortId>,
    /// The next hop that a rule has named.
    pub(super) hop: Option<IpAddr>,
    /// It has not met the rules yet: those before it in its flow have to be decided first.
    pub(super) aside: bool,
    /// The second walk (direction out) has begun.
    pub(super) leaving: bool,
    /// What it waits for.
    pub(super) wait: Wait,
    /// Its place in `Engine::continuing`, taken while its walk will go on after the verdict.
    pub(super) bucket: Option<usize>,
    /// How often an inspector sent it back to the rules or on to another queue.
    pub(super) reinjects: u8,
    /// How many packets it stands for: a datagram that was put together stands for its fragments.
    pub(super) parts: u32,
    /// It was handed to an inspector before.
    pub(super) inspected: bool,
    /// The inspector that had it is gone, and it was offered to another.
    pub(super) orphaned: bool,
    /// Where its layers begin, for the inspectors.
    layers: Layers,
    /// Hash of its flow, the same for both directions.
    hash: u32,
    /// Its flow's bucket when it burst, or was put together: its lane in a live engine's reorder, whatever inspectors make of it.
    home: u16,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    /// Index of the queue.
    pub(super) queue: usize,
    pub(super) kind: Kind,
    /// Since when it waits for room in the queue, if it does.
    pub(super) since: Option<u64>,
}

/// How a rule handed a packet over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The inspector's pass ends this walk.
    Inspect,
    /// The walk goes on at the next rule.
    Divert,
    /// Only a copy goes to the inspector.
    Tee,
}

/// What comes next for a packet.
pub(super) enum Next {
    Out,
    End(Fate),
    Queue(u16, Kind),
    /// It waits until its datagram is whole.
    Reassemble,
}

/// Why a packet does not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// A rule, an inspector or a full table dropped it.
    Dropped,
    /// There is no route.
    NoRoute,
    /// It has no hop left.
    Expired,
    /// How it is answered, if a rule said so: an inspector only rejects.
    Rejected(Option<Reject>),
}

/// A decision in the engine's own memory.
pub(super) struct Settled {
    pub(super) outcome: Decision,
    /// New bits of the mark, and which.
    pub(super) mark: (u32, u32),
    /// It is for the flow from now on.
    pub(super) flow_verdict: Option<FlowVerdict>,
}

pub(super) enum Decision {
    Pass,
    Replace(Vec<u8>),
    Queue(u16),
    Repeat,
    End(Fate),
    /// Its inspector is gone, and there are others.
    Orphan,
}

/// FlowVerdictCache are told apart by this many buckets while they wait; two flows in one bucket only wait for each other.
pub(super) const BUCKETS: usize = 4096;

/// How often inspectors may send one packet round before it is dropped.
pub(super) const MAX_REINJECTS: u8 = 16;

impl PacketCtx {
    /// A packet that has just come in by `arrival`, and goes on by `mode` when it passes.
    pub(super) fn new(arrival: PortId, mode: ForwardMode) -> Self {
        Self {
            walk: Walk::new(Dir::In, Some(arrival), None),
            arrival,
            mode,
            out: None,
            hop: None,
            aside: false,
            leaving: false,
            wait: Wait { queue: 0, kind: Kind::Inspect, since: None },
            bucket: None,
            reinjects: 0,
            parts: 1,
            inspected: false,
            orphaned: false,
            layers: Layers::default(),
            hash: 0,
            home: 0,
        }
    }

    /// Looks, and notes which flow the packet keeps its order in.
    pub(super) fn place(&mut self, packet: &Packet<'_>) {
        self.look(packet);
        self.home = (self.hash >> (u32::BITS - BUCKETS.trailing_zeros())) as u16;
    }

    /// Notes what inspectors are told about the packet, so that nobody has to parse it again.
    pub(super) fn look(&mut self, packet: &Packet<'_>) {
        let offset = |at: usize| u16::try_from(at).unwrap_or(u16::MAX);
        self.layers = Layers {
            link: 0,
            network: offset(packet.network),
            payload: offset(packet.payload_range().start),
        };
        self.hash = hash(packet);
    }

    /// Whether the packet may have to walk a second time.
    pub(super) fn walks_out(&self, walker: &Walker) -> bool {
        match self.mode {
            ForwardMode::Routes | ForwardMode::Router => !walker.routes().is_empty(),
            ForwardMode::Bridge { walk_out, .. } => walk_out,
            ForwardMode::Back | ForwardMode::Nowhere => false,
        }
    }

    /// An inspector has let the packet through: when that is the end of its path, sets the port that it leaves by.
    pub(super) fn ends(&mut self) -> bool {
        if self.wait.kind != Kind::Inspect || self.leaving {
            return false;
        }
        match self.mode {
            ForwardMode::Bridge { xmit, walk_out: false } => self.out = Some(xmit),
            ForwardMode::Back => self.out = Some(self.arrival),
            ForwardMode::Nowhere => {}
            ForwardMode::Bridge { .. } | ForwardMode::Routes | ForwardMode::Router => return false,
        }
        true
    }

    /// Sets the bits of the packet's mark that `mask` names.
    pub(super) fn set_mark(&mut self, mark: u32, mask: u32) {
        self.walk.set_mark(self.walk.mark() & !mask | mark & mask);
    }

    /// The packet's place in `Engine::continuing`.
    pub(super) fn bucket(&self) -> usize {
        self.home.into()
    }
}

/// Counts one more detour; true when the packet has had too many.
pub(super) fn reinjected(ctx: &mut PacketCtx) -> bool {
    ctx.reinjects = ctx.reinjects.saturating_add(1);
    ctx.reinjects > MAX_REINJECTS
}

/// Walks the rules from where the packet is, until something else has to happen.
pub(super) fn advance(walker: &mut Walker, packet: &Packet<'_>, ctx: &mut PacketCtx, now: Time) -> Next {
    let step = walker.walk(&mut ctx.walk, packet, now);
    follow(step, walker, packet, ctx, now)
}

/// What a step of the walk leads to.
#[inline]
pub(super) fn follow(
    step: Step,
    walker: &mut Walker,
    packet: &Packet<'_>,
    ctx: &mut PacketCtx,
    now: Time,
) -> Next {
    match step {
        Step::Pass => leave(walker, packet, ctx, now),
        // For a router; a bridge has no next hops, nor has a capture.
        Step::Forward(hop, _) => {
            ctx.hop = Some(hop);
            leave(walker, packet, ctx, now)
        }
        Step::Reassemble => Next::Reassemble,
        Step::Drop(_) => Next::End(Fate::Dropped),
        Step::Reject(reject) => Next::End(Fate::Rejected(Some(reject))),
        Step::Inspect(queue) => Next::Queue(queue, Kind::Inspect),
        Step::Divert(queue) => Next::Queue(queue, Kind::Divert),
        Step::Tee(queue) => Next::Queue(queue, Kind::Tee),
    }
}

/// An inspector has let the packet through that a rule handed over as `kind`.
pub(super) fn goes_on(
    walker: &mut Walker,
    packet: &Packet<'_>,
    ctx: &mut PacketCtx,
    kind: Kind,
    now: Time,
) -> Next {
    match kind {
        Kind::Inspect => leave(walker, packet, ctx, now),
        Kind::Divert | Kind::Tee => advance(walker, packet, ctx, now),
    }
}

/// An inspector has decided about the packet's flow.
pub(super) fn obey(
    flow_verdict: FlowVerdict,
    walker: &mut Walker,
    packet: &Packet<'_>,
    ctx: &mut PacketCtx,
    kind: Kind,
    now: Time,
) -> Next {
    ctx.set_mark(flow_verdict.mark.0, flow_verdict.mark.1);
    match flow_verdict.verdict {
        flow_verdict::Verdict::Pass => goes_on(walker, packet, ctx, kind, now),
        flow_verdict::Verdict::Drop => Next::End(Fate::Dropped),
        flow_verdict::Verdict::Reject => Next::End(Fate::Rejected(None)),
        flow_verdict::Verdict::Queue(_) if reinjected(ctx) => Next::End(Fate::Dropped),
        flow_verdict::Verdict::Queue(number) => Next::Queue(number, kind),
    }
}

/// Whether the packet begins a connection: a SYN without ACK.
pub(super) fn begins(packet: &Packet<'_>) -> bool {
    packet.proto == proto::TCP && packet.tcp_flags & 0x12 == 0x02
}

/// A walk has ended with pass: the second one, if the packet has a mode out and has not had it yet.
fn leave(walker: &mut Walker, packet: &Packet<'_>, ctx: &mut PacketCtx, now: Time) -> Next {
    if ctx.leaving {
        // Named by the second walk, the next hop may be behind another port.
        if let (ForwardMode::Router, Some(hop)) = (ctx.mode, ctx.hop) {
            match walker.routes().lookup(hop) {
                Some((route, _)) => ctx.out = Some(route.port),
                None => return Next::End(Fate::NoRoute),
            }
        }
        return Next::Out;
    }
    let (xmit, walk_out) = match ctx.mode {
        ForwardMode::Bridge { xmit, walk_out } => (xmit, walk_out),
        ForwardMode::Back => (ctx.arrival, false),
        ForwardMode::Nowhere => return Next::Out,
        // Addressed to this link, not through it: the router's own affair.
        ForwardMode::Router if packet.addresses == Addresses::None || finds_neighbors(packet) => {
            return Next::Out;
        }
        ForwardMode::Router if stays_on_link(packet) => return Next::End(Fate::NoRoute),
        ForwardMode::Router if hops(packet) <= 1 => return Next::End(Fate::Expired),
        mode @ (ForwardMode::Routes | ForwardMode::Router) => {
            match route(walker, packet, ctx.hop.filter(|_| mode == ForwardMode::Router)) {
                Some(xmit) => (xmit, true),
                None if mode == ForwardMode::Routes => return Next::Out,
                None => return Next::End(Fate::NoRoute),
            }
        }
    };
    ctx.out = Some(xmit);
    if !walk_out {
        return Next::Out;
    }
    ctx.leaving = true;
    ctx.walk.leave(xmit);
    advance(walker, packet, ctx, now)
}

/// Whether it is a message of IPv6's neighbor discovery (RFC 4861 section 4): the ARP of IPv6, and no more than that to be passed on.
fn finds_neighbors(packet: &Packet<'_>) -> bool {
    packet.proto == proto::ICMP6 && matches!(packet.icmp_type, 133..=137)
}

/// Whether an address of the packet means something on its own link only. "Routers must not forward any packets with Link-Local
/// source or destination addresses to other links" (RFC 4291 section 2.5.6; RFC 3927 section 7; RFC 4291 section 2.7 of
/// multicast).
fn stays_on_link(packet: &Packet<'_>) -> bool {
    match packet.addresses {
        Addresses::V4(src, dst) => {
            src.is_link_local()
                || dst.is_link_local()
                || dst.is_broadcast()
                || dst.octets()[..3] == [224, 0, 0]
        }
        Addresses::V6(src, dst) => {
            let multicast = dst.is_multicast() && dst.octets()[1] & 0xf <= 2;
            src.is_unicast_link_local() || dst.is_unicast_link_local() || multicast
        }
        Addresses::None => false,
    }
}

/// How many hops the packet may still go (RFC 791 section 3.1, RFC 8200 section 3).
fn hops(packet: &Packet<'_>) -> u8 {
    let at = if matches!(packet.addresses, Addresses::V6(..)) { 7 } else { 8 };
    packet.frame.get(packet.network + at).copied().unwrap_or(0)
}

impl Fate {
    /// How the packet is answered that burst in by a port with these addresses; the inner one as [`Fate::Rejected`]. A router
    /// without an address of its own has nobody to answer as.
    pub(super) fn answer(self, packet: &Packet<'_>, me: &[IpAddr]) -> Option<Option<Reject>> {
        let six = matches!(packet.addresses, Addresses::V6(..));
        let router = || me.iter().any(|address| address.is_ipv6() == six);
        match self {
            Self::Rejected(reject) => Some(reject),
            Self::NoRoute if router() => Some(Some(Reject::no_route(packet))),
            Self::Expired if router() => Some(Some(Reject::time_exceeded(packet))),
            Self::Dropped | Self::NoRoute | Self::Expired => None,
        }
    }
}

/// The port that the packet's route leaves by, or that to its next hop.
fn route(walker: &Walker, packet: &Packet<'_>, hop: Option<IpAddr>) -> Option<PortId> {
    let destination = match packet.addresses {
        _ if hop.is_some() => hop?,
        Addresses::V4(_, dst) => dst.into(),
        Addresses::V6(_, dst) => dst.into(),
        Addresses::None => return None,
    };
    walker.routes().lookup(destination).map(|(route, _)| route.port)
}

/// Makes the changes that rules asked for. What does not fit the packet (an MSS option that is not there) is left out.
pub(super) fn apply(edits: Edits, frame: &mut [u8], meta: &mut Meta) {
    if edits == Edits::default() {
        return;
    }
    let Ok(Packet { network, transport, transport_len, .. }) = wire::parse(meta.link, frame, meta.wire_len)
    else {
        return;
    };
    meta.changed = true;
    if let Some(dscp) = edits.dscp {
        edit::set_dscp(frame, network, dscp);
    }
    if let Some(mss) = edits.mss {
        let unfinished = unfinished_checksum(frame, meta);
        edit::clamp_mss(frame, transport, transport_len, mss);
        // It covers the pseudo header only: the segment's own bytes are not in it yet.
        if let Some((at, sum)) = unfinished {
            frame[at].copy_from_slice(&sum);
        }
    }
}

/// A checksum field that somebody else will finish: where it is, and what stands there.
fn unfinished_checksum(frame: &[u8], meta: &Meta) -> Option<(std::ops::Range<usize>, [u8; 2])> {
    let Checksum::Partial { start, offset } = meta.port.offload.checksum else { return None };
    let at = usize::from(start) + usize::from(offset);
    Some((at..at + 2, frame.get(at..at + 2)?.try_into().ok()?))
}

/// A hash of the packet's flow, the same for both directions; 0 when it has none.
fn hash(packet: &Packet<'_>) -> u32 {
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

/// What an inspector is told about a packet, apart from its bytes and its queue.
pub(super) fn label(meta: &Meta, ctx: &PacketCtx) -> ring::Meta {
    ring::Meta {
        kind: ring::Kind::PACKET,
        wire_len: meta.wire_len,
        time: meta.time,
        mark: ctx.walk.mark(),
        port: ctx.arrival.0.into(),
        hash: ctx.hash,
        layers: Layers { link: meta.link.0, ..ctx.layers },
        ..ring::Meta::default()
    }
}

impl Settled {
    /// Copies a decision; `room` is how many bytes of replacements may still be copied in this turn. Replacements beyond
    /// it are dropped: only an inspector that sends them faster than packets come gets there.
    pub(super) fn new(decided: Decided<'_>, room: &mut usize) -> Self {
        let plain = |outcome| Self { outcome, mark: (0, 0), flow_verdict: None };
        match decided {
            Decided::Lost(DefaultVerdict::Pass) => plain(Decision::Pass),
            Decided::Lost(DefaultVerdict::Drop) => plain(Decision::End(Fate::Dropped)),
            Decided::Orphan => plain(Decision::Orphan),
            Decided::Answer(Reply { answer, mark, flow }, channel) => {
                let verdict = match answer {
                    _ if !flow => None,
                    Answer::Pass => Some(flow_verdict::Verdict::Pass),
                    Answer::Drop => Some(flow_verdict::Verdict::Drop),
                    Answer::Reject => Some(flow_verdict::Verdict::Reject),
                    Answer::Queue(number) => Some(flow_verdict::Verdict::Queue(number)),
                    Answer::Replace(_) | Answer::Repeat => None,
                };
                let flow_verdict = verdict.map(|verdict| FlowVerdict { verdict, mark, channel });
                Self { outcome: Decision::new(answer, room), mark, flow_verdict }
            }
        }
    }
}

impl Decision {
    fn new(answer: Answer<'_>, room: &mut usize) -> Self {
        match answer {
            Answer::Pass => Self::Pass,
            Answer::Drop => Self::End(Fate::Dropped),
            Answer::Reject => Self::End(Fate::Rejected(None)),
            Answer::Queue(number) => Self::Queue(number),
            Answer::Repeat => Self::Repeat,
            Answer::Replace(bytes) => match room.checked_sub(bytes.len()) {
                Some(left) => {
                    *room = left;
                    Self::Replace(bytes.to_vec())
                }
                None => Self::End(Fate::Dropped),
            },
        }
    }
}
