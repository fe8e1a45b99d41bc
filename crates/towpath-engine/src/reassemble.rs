//! Reassembly: a packet in the reorder buffer that a rule sends to the reassembler.

use towpath_gate::Dir;

use crate::drop_log;
use crate::drop_reason::{DropReason, Outcome};
use crate::engine::Engine;
use crate::held::parse;
use crate::packet_ctx::Handover;
use crate::packet_io::PacketIo;
use crate::reorder::PacketId;

impl<E: PacketIo> Engine<E> {
    /// Gives a fragment to the reassembler. Returns the datagram if it is complete and no earlier packet of its flow waits.
    pub(crate) fn reassemble(&mut self, id: PacketId) -> Option<PacketId> {
        let Self { reorder, burst, reassembler, clock, .. } = self;
        let (held, ctx) = reorder.waiting_mut(id)?;
        let Ok(packet) = parse(held, ctx, burst.as_ref()) else {
            self.end(id, Outcome::Dropped(DropReason::BadReplacement));
            return None;
        };
        let arrival = (ctx.arrival, held.meta);
        let added = reassembler.add(&packet, ctx.walk.zone(), ctx.packets.into(), clock.now, arrival);
        // From here on the reassembler counts the fragment, or the datagram does.
        ctx.packets = added.whole.as_ref().map_or(0, |whole| u16::try_from(whole.parts).unwrap_or(u16::MAX));
        ctx.wait.kind = Handover::Divert;
        if let Some(whole) = &added.whole {
            held.meta.wire_len = whole.frame.len() as u32;
            held.meta.changed = true;
            held.meta.fragment_len = whole.longest;
            held.meta.port.offload = towpath_port::Offload::default();
            reorder.replace(id, &whole.frame);
        }
        self.drop_fragments(added.dropped);
        if added.whole.is_none() {
            self.end(id, Outcome::Dropped(DropReason::Reassembly));
            return None;
        }
        self.join_flow(id)
    }

    /// The reassembler has dropped this number of fragments.
    pub(crate) fn drop_fragments(&mut self, packets: u32) {
        if packets > 0 {
            self.tell_lost_fragments(packets);
        }
    }

    #[cold]
    fn tell_lost_fragments(&mut self, packets: u32) {
        let reason = DropReason::Reassembly;
        self.count(Outcome::Dropped(reason), packets);
        let Self { reassembler, traces, drop_log, walker, totals, clock, .. } = self;
        let lost = reassembler.take_lost();
        if !traces.is_empty() {
            for (frame, (arrival, meta)) in &lost {
                let number = totals.stats.packets;
                traces.record((number, *arrival), (frame, meta), None, Outcome::Dropped(reason), walker);
            }
            // The reassembler keeps no frame of a duplicate.
            traces.count_left_out(u64::from(packets).saturating_sub(lost.len() as u64));
        }
        if drop_log.wants(reason)
            && let Some((frame, (arrival, meta))) = lost.first()
        {
            let way = (Dir::In, Some(*arrival));
            let entry = || drop_log::entry(reason, None, (frame, meta), way, clock.now);
            drop_log.put(reason, packets.into(), clock.now, entry, walker.log());
        }
    }

    /// Moves a complete datagram into the order of its flow. Its fragments, except the first, were in another bucket. Returns
    /// `None` if the datagram has to wait there.
    fn join_flow(&mut self, id: PacketId) -> Option<PacketId> {
        let Self { reorder, burst, locks, live, .. } = self;
        let (held, ctx) = reorder.waiting_mut(id)?;
        let Ok(packet) = parse(held, ctx, burst.as_ref()) else {
            self.end(id, Outcome::Dropped(DropReason::Reassembly));
            return None;
        };
        let before = ctx.bucket();
        ctx.place(&packet, None::<fn(u32) -> u16>);
        let flow = ctx.hash();
        let bucket = if *live { reorder.bucket_of(flow) } else { ctx.bucket() };
        let (_, ctx) = reorder.waiting_mut(id)?;
        ctx.set_bucket(bucket);
        if bucket == before {
            return Some(id);
        }
        locks.unlock(&mut ctx.lock);
        if !self.live {
            return Some(id);
        }
        let id = reorder.move_to(id, bucket)?;
        if locks.is_locked(bucket) {
            locks.defer(bucket, id);
            return None;
        }
        Some(id)
    }
}
