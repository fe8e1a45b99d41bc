//! Flow offload: where the packets of a flow leave, if that is the same for all of them.
//!
//! The decision is that of `forward.rs` for one packet, as far as the flow, the port that it arrives on, the rules and the routes fix it.
//! Nothing here changes a state or a counter. The kernel then forwards the packets of the flow
//! ([`towpath_port::offload`]); packets that it leaves to the engine take their usual path.

use std::fmt;

use towpath_gate::state::Flow;
use towpath_gate::{Dir, FixedWalk, FlowDecisions, NoOffload, PortId, Walk, Walker, flow_frame};
use towpath_wire::{self as wire, LinkType, Time};

use crate::forward::may_be_forwarded;
use crate::meta::NextHop;
use crate::router::Fib;
use crate::topology::{ForwardMode, Topology};

/// The path of all packets of a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowPath {
    /// The walks of the rules.
    pub walk: FixedWalk,
    /// The port that they leave by, unless a verdict drops them.
    pub egress: PortId,
    /// The next hop of a routed flow; `None` for a bridge.
    pub next_hop: Option<NextHop>,
}

/// Why the packets of a flow have no such path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPath {
    /// The rules.
    Rules(NoOffload),
    /// The packets of the port are not forwarded to another port.
    NotForwarded,
    /// The destination is an address of the router, or is valid on its own link only.
    Local,
    /// No route leads to the destination, or its next hop is not known.
    NoRoute,
    /// The frames have a VLAN tag, and the port routes.
    Tagged,
    /// The port that receives the packets is not recorded, or is not an `af_packet` or `af_xdp` port.
    Port,
    /// A native XDP program cannot redirect to the egress interface.
    Target,
    /// The interface is down, or does not exist.
    Down,
    /// The TCP connection is not established.
    NotEstablished,
    /// The rule of the state has no `offload`.
    NotMarked,
}

impl NoPath {
    /// The name of the reason in `towpath ctl show offload` and in the metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Rules(_) => "rules",
            Self::NotForwarded => "not_forwarded",
            Self::Local => "local",
            Self::NoRoute => "no_route",
            Self::Tagged => "tagged",
            Self::Port => "port",
            Self::Target => "native_egress",
            Self::Down => "down",
            Self::NotEstablished => "not_established",
            Self::NotMarked => "not_marked",
        }
    }
}

impl From<NoOffload> for NoPath {
    fn from(reason: NoOffload) -> Self {
        Self::Rules(reason)
    }
}

impl fmt::Display for NoPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rules(reason) => return reason.fmt(f),
            Self::NotForwarded => "the port's packets do not leave by another port",
            Self::Local => "its destination is the router or its own link",
            Self::NoRoute => "its next hop is not known",
            Self::Tagged => "its frames have a VLAN tag, and its port routes",
            Self::Port => "only af_packet and af_xdp ports offload flows",
            Self::Target => {
                "the driver of its egress interface takes no frames from native XDP programs (a veth: its peer has neither GRO nor XDP)"
            }
            Self::Down => "an interface is down",
            Self::NotEstablished => "its connection is not established",
            Self::NotMarked => "the rule of its state has no `offload`",
        })
    }
}

/// The path of the packets of `flow` that arrive on `arrival`. The zone of the flow does not count: it is that of the port. `decisions` are
/// the inspectors' verdicts for flows.
///
/// # Errors
///
/// The reason why the packets have to be evaluated one by one.
pub fn flow_path(
    walker: &mut Walker,
    topology: &Topology,
    flow: &Flow,
    arrival: PortId,
    now: Time,
    decisions: &FlowDecisions<'_>,
) -> Result<FlowPath, NoPath> {
    let frame = flow_frame(flow);
    let packet = wire::parse(LinkType::ETHERNET, &frame, frame.len() as u32)
        .map_err(|_| NoPath::Rules(NoOffload::Protocol))?;
    let (_, vlan) = topology.interface_of(arrival).ok_or(NoPath::Port)?;
    let mode = topology.mode(arrival).ok_or(NoPath::Port)?;
    if vlan.is_some() && !matches!(mode, ForwardMode::Bridge { .. }) {
        return Err(NoPath::Tagged);
    }
    let mut fixed = FixedWalk::default();
    let mut walk = Walk::new(Dir::In, Some(arrival), None);
    walker.fixed_walk(&mut walk, &packet, now, decisions, &mut fixed)?;
    if fixed.blocked {
        return Ok(FlowPath { walk: fixed, egress: arrival, next_hop: None });
    }
    let (egress, next_hop, walk_out) = match mode {
        ForwardMode::Bridge { xmit, walk_out } => (xmit, None, walk_out),
        ForwardMode::Router => {
            let (_, to) = flow.ends.addresses();
            if walker.ports().is_own(to, walk.zone()) || !may_be_forwarded(&packet) || to.is_multicast() {
                return Err(NoPath::Local);
            }
            let route = Fib::new(walker.routes()).lookup(to, |_, _| None).ok_or(NoPath::NoRoute)?;
            (route.port, Some(route.next_hop), true)
        }
        ForwardMode::Routes | ForwardMode::Back(_) | ForwardMode::Nowhere => {
            return Err(NoPath::NotForwarded);
        }
    };
    if walk_out {
        walk.leave(egress);
        walker.fixed_walk(&mut walk, &packet, now, decisions, &mut fixed)?;
    }
    Ok(FlowPath { walk: fixed, egress, next_hop })
}
