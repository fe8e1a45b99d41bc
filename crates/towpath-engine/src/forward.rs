//! Rule evaluation and the forwarding decision: from one place on a packet's path to the next.
//!
//! Values in, values out: nothing here sends, waits or counts. The rules and the neighbors are read together: one lookup gives the port, the
//! next hop and its Ethernet address.

use towpath_gate::{Reject, Step, Walker};
use towpath_ring::Verdict;
use towpath_wire::{Addresses, Packet, Time, proto};

use crate::drop_reason::{DropReason, Outcome};
use crate::flow_verdict::FlowVerdict;
use crate::meta::Egress;
use crate::packet_ctx::{Handover, Next, PacketCtx};
use crate::packet_io::PacketIo;
use crate::router::Fib;
use crate::topology::ForwardMode;

/// Evaluates the rules from the packet's position until something else has to happen.
pub(crate) fn walk<E: PacketIo>(
    (walker, io): (&mut Walker, &E),
    packet: &Packet<'_>,
    ctx: &mut PacketCtx,
    now: Time,
) -> Next {
    let step = walker.walk(&mut ctx.walk, packet, now);
    after_step(step, (walker, io), packet, ctx, now)
}

/// The consequence of a step of the rules.
#[inline]
pub(crate) fn after_step<E: PacketIo>(
    step: Step,
    (walker, io): (&mut Walker, &E),
    packet: &Packet<'_>,
    ctx: &mut PacketCtx,
    now: Time,
) -> Next {
    match step {
        Step::Pass => forward((walker, io), packet, ctx, now),
        // Only a router has next hops.
        Step::Forward(hop, _) => {
            ctx.fwd = Some(hop);
            forward((walker, io), packet, ctx, now)
        }
        Step::Reassemble => Next::Reassemble,
        Step::Drop(reason) => drop(reason.into()),
        Step::Reject(reject) => Next::End(Outcome::Rejected(Some(reject))),
        Step::Inspect(queue) => Next::Queue(queue, Handover::Inspect),
        Step::Divert(queue) => Next::Queue(queue, Handover::Divert),
        Step::Tee(queue) => Next::Queue(queue, Handover::Tee),
    }
}

/// The consequence of an inspector's pass.
pub(crate) fn after_pass<E: PacketIo>(
    (walker, io): (&mut Walker, &E),
    packet: &Packet<'_>,
    ctx: &mut PacketCtx,
    kind: Handover,
    now: Time,
) -> Next {
    match kind {
        Handover::Inspect => forward((walker, io), packet, ctx, now),
        Handover::Divert | Handover::Tee => walk((walker, io), packet, ctx, now),
    }
}

/// The consequence of an inspector's verdict for the packet's flow.
pub(crate) fn after_flow_verdict<E: PacketIo>(
    verdict: FlowVerdict,
    (walker, io): (&mut Walker, &E),
    packet: &Packet<'_>,
    ctx: &mut PacketCtx,
    kind: Handover,
    now: Time,
) -> Next {
    ctx.set_mark(verdict.mark.0, verdict.mark.1);
    match verdict.verdict {
        Verdict::Reject => Next::End(Outcome::Rejected(None)),
        Verdict::Queue(_) if ctx.reinject() => drop(DropReason::ReinjectLimit),
        Verdict::Queue(number) => Next::Queue(number, kind),
        Verdict::Drop | Verdict::Hold => drop(DropReason::Inspector),
        Verdict::Pass | Verdict::Replace(_) | Verdict::Repeat => {
            after_pass((walker, io), packet, ctx, kind, now)
        }
    }
}

/// The packet passed the rules. Decides where it leaves; before that, a packet of a router or of a filtering bridge walks
/// the rules in direction `out`.
fn forward<E: PacketIo>(
    (walker, io): (&mut Walker, &E),
    packet: &Packet<'_>,
    ctx: &mut PacketCtx,
    now: Time,
) -> Next {
    let neighbor = |port, address| io.neighbor(port, address);
    if ctx.outbound {
        // `fwd` in direction `out` may name a next hop behind another port.
        if let (ForwardMode::Router, Some(hop)) = (ctx.mode, ctx.fwd) {
            match Fib::new(walker.routes()).lookup(hop, neighbor) {
                Some(route) => (ctx.egress, ctx.next_hop) = (Egress::Port(route.port), route.next_hop),
                None => return drop(DropReason::NoRoute),
            }
        }
        return Next::End(Outcome::Passed);
    }
    let (xmit, walk_out) = match ctx.mode {
        ForwardMode::Bridge { xmit, walk_out } => (xmit, walk_out),
        ForwardMode::Back(port) => (port, false),
        ForwardMode::Nowhere => return Next::End(Outcome::Passed),
        ForwardMode::Router if packet.is_encapsulated() => return drop(DropReason::NoRoute),
        // Before the addresses: those of neighbor discovery are link-local.
        ForwardMode::Router if is_local(packet) => {
            ctx.egress = Egress::Local;
            return Next::End(Outcome::Passed);
        }
        // Before the hop limit: the packet has arrived.
        ForwardMode::Router if is_own(walker, packet, ctx) => {
            if !towpath_gate::is_echo_request(packet) {
                return drop(DropReason::NotServed);
            }
            ctx.egress = Egress::Local;
            return Next::End(Outcome::Passed);
        }
        ForwardMode::Router if stays_on_link(packet) => return drop(DropReason::NoRoute),
        ForwardMode::Router if ttl(packet) <= 1 => return drop(DropReason::TtlExceeded),
        mode @ (ForwardMode::Routes | ForwardMode::Router) => {
            let hop = ctx.fwd.filter(|_| mode == ForwardMode::Router);
            let to = hop.or_else(|| destination(packet));
            match to.and_then(|to| Fib::new(walker.routes()).lookup(to, neighbor)) {
                Some(route) => {
                    ctx.next_hop = route.next_hop;
                    (route.port, true)
                }
                None if mode == ForwardMode::Routes => return Next::End(Outcome::Passed),
                None => return drop(DropReason::NoRoute),
            }
        }
    };
    ctx.egress = Egress::Port(xmit);
    if !walk_out {
        return Next::End(Outcome::Passed);
    }
    ctx.outbound = true;
    ctx.walk.leave(xmit);
    walk((walker, io), packet, ctx, now)
}

fn drop(reason: DropReason) -> Next {
    Next::End(Outcome::Dropped(reason))
}

/// The answer to a packet that did not pass: `Some(None)` is the answer to an inspector's rejection. The packet came in by
/// a port with the addresses `me`. A router without an address of the packet's family sends no ICMP error.
pub(crate) fn answer(
    outcome: Outcome,
    packet: &Packet<'_>,
    me: &[std::net::IpAddr],
) -> Option<Option<Reject>> {
    let six = matches!(packet.addresses, Addresses::V6(..));
    let has_address = || me.iter().any(|address| address.is_ipv6() == six);
    match outcome {
        Outcome::Rejected(reject) => Some(reject),
        Outcome::Dropped(DropReason::NoRoute) if has_address() => Some(Some(Reject::no_route(packet))),
        Outcome::Dropped(DropReason::TtlExceeded) if has_address() => {
            Some(Some(Reject::time_exceeded(packet)))
        }
        Outcome::Dropped(_) | Outcome::Passed => None,
    }
}

/// Returns true if a router may forward the packet: IP, without PPPoE or MPLS, with addresses that are valid on other links.
pub(crate) fn may_be_forwarded(packet: &Packet<'_>) -> bool {
    !packet.is_encapsulated() && !is_local(packet) && !stays_on_link(packet)
}

/// Returns true if the packet is for the router itself: not IP (ARP), or IPv6 neighbor discovery (RFC 4861 section 4).
fn is_local(packet: &Packet<'_>) -> bool {
    packet.addresses == Addresses::None
        || packet.proto == proto::ICMP6 && matches!(packet.icmp_type, 133..=137)
}

/// Returns true if the packet is for an address of the router, in the zone that it came from.
fn is_own(walker: &Walker, packet: &Packet<'_>, ctx: &PacketCtx) -> bool {
    destination(packet).is_some_and(|to| walker.ports().is_own(to, ctx.walk.zone()))
}

/// Returns true if an address of the packet is valid on its own link only. "Routers must not forward any packets with
/// Link-Local source or destination addresses to other links" (RFC 4291 section 2.5.6; RFC 3927 section 7; RFC 4291
/// section 2.7 for multicast).
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

/// The TTL (RFC 791 section 3.1) or hop limit (RFC 8200 section 3).
fn ttl(packet: &Packet<'_>) -> u8 {
    let at = if matches!(packet.addresses, Addresses::V6(..)) { 7 } else { 8 };
    packet.frame.get(packet.network + at).copied().unwrap_or(0)
}

/// The address by which the packet is routed. A packet in PPPoE or MPLS is not.
fn destination(packet: &Packet<'_>) -> Option<std::net::IpAddr> {
    match packet.addresses {
        _ if packet.is_encapsulated() => None,
        Addresses::V4(_, dst) => Some(dst.into()),
        Addresses::V6(_, dst) => Some(dst.into()),
        Addresses::None => None,
    }
}
