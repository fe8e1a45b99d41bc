//! Verdicts for flows on the path of a packet: they are applied to later packets, and announced to flow offload.

use towpath_wire::Packet;

use crate::engine::Engine;
use crate::forward::after_flow_verdict;
use crate::held::parse;
use crate::packet_ctx::{Handover, Next, PacketCtx, begins_connection};
use crate::packet_io::PacketIo;
use crate::queue::Queue;
use crate::reorder::PacketId;
use crate::verdict_feed::{DecidedFlow, Origin};

impl<E: PacketIo> Engine<E> {
    /// Applies the inspectors' verdicts for the packet's flow: the packet does not go to those queues.
    pub(crate) fn apply_flow_verdicts(
        &mut self,
        packet: &Packet<'_>,
        ctx: &mut PacketCtx,
        mut next: Next,
    ) -> Next {
        while let Next::Queue(number, kind @ (Handover::Inspect | Handover::Divert)) = next {
            let now = self.clock.now;
            let queue = self.queues.find(number).filter(|queue| queue.has_flow_verdicts());
            // A packet that an inspector sends is not received.
            let feed = self.feed.as_ref().filter(|_| ctx.packets > 0 && self.reorder.is_clear(ctx.bucket()));
            let origin = feed.map(|feed| Origin { feed, queue: number, arrival: ctx.arrival });
            let find = |queue: &mut Queue<_>| {
                queue.flow_verdict(&ctx.flow(packet)?, begins_connection(packet), now, origin)
            };
            let Some(verdict) = queue.and_then(find) else { break };
            next = after_flow_verdict(verdict, (&mut self.walker, &self.io), packet, ctx, kind, now);
        }
        next
    }

    /// The same for a packet in the reorder buffer.
    pub(crate) fn flow_verdict_of_held(&mut self, id: PacketId, kind: Handover) -> Option<Next> {
        let Self { reorder, burst, queues, walker, clock, io, .. } = self;
        let (held, ctx) = reorder.waiting_mut(id)?;
        let queue = queues.get_mut(ctx.wait.queue);
        if kind == Handover::Tee || !queue.has_flow_verdicts() {
            return None;
        }
        let packet = parse(held, ctx, burst.as_ref()).ok()?;
        let flow = ctx.flow(&packet)?;
        let verdict = queue.flow_verdict(&flow, begins_connection(&packet), clock.now, None)?;
        Some(after_flow_verdict(verdict, (walker, io), &packet, ctx, kind, clock.now))
    }

    /// Announces the verdicts for flows of which no packet waits any more. The others are announced by a later packet.
    pub(crate) fn announce_decided_flows(&mut self) {
        let Self { reorder, queues, clock, feed: Some(feed), decided_flows, .. } = self else { return };
        for DecidedFlow { queue: number, flow, arrival, bucket } in decided_flows.drain(..) {
            if reorder.is_clear(bucket)
                && let Some(queue) = queues.find(number)
            {
                queue.announce_flow_verdict(&flow, clock.now, Origin { feed, queue: number, arrival });
            }
        }
    }
}
