//! A packet as it comes: looked at, taken through the rules as far as it gets, and sent, ended, or kept in the reorder.

use towpath_gate::Edits;
use towpath_wire::{self as wire, Packet, Time};

use super::packet_ctx::{Kind, Next, PacketCtx, advance, apply, begins, follow, obey};
use super::{Engine, Meta, PacketIo};
use crate::reorder::PacketId;

impl<E: PacketIo> Engine<E> {
    /// Takes a packet, the one at `index` of its burst; `fetched` is its place among those whose states were fetched.
    pub(super) fn handle_packet(
        &mut self,
        fetched: Option<usize>,
        index: usize,
        frame: &[u8],
        meta: Meta,
    ) -> Result<(), E::Error> {
        self.totals.packets += 1;
        self.totals.bytes += u64::from(meta.wire_len);
        if !self.live {
            let time = self.times.get(index).copied().unwrap_or(Time::from_nanos(meta.time));
            self.clock = self.clock.max(time);
        }
        self.started.get_or_insert(self.clock);
        // Borrowed, not moved: a packet is a cache line and more.
        let parsed = wire::parse(meta.link, frame, meta.wire_len);
        let Ok(packet) = &parsed else {
            self.totals.undecodable += 1;
            self.io.discard(&meta);
            return Ok(());
        };
        if !self.live {
            self.conversations.observe(packet);
        }
        let (arrival, mode) = self.topology.of(packet, meta.interface);
        let mut ctx = PacketCtx::new(arrival, mode);
        // Without a queue and with nobody to overtake, most packets need no place.
        let placed = !self.queues.is_empty() || !self.reorder.is_empty();
        if placed {
            ctx.place(packet);
        }
        if self.reorder.waiting() > 0 {
            let bucket = ctx.bucket();
            if self.live && self.continuing[bucket] > 0 {
                self.put_aside(index, frame, meta, ctx);
                return Ok(());
            }
            while self.continuing[bucket] > 0 {
                self.wait()?;
            }
        }
        let Self { walker, clock, by_states, .. } = self;
        let known = fetched.and_then(|at| walker.try_step(at, &mut ctx.walk, *clock));
        let next = match known {
            Some(step) => {
                *by_states = true;
                follow(step, walker, packet, &mut ctx, *clock)
            }
            None => advance(walker, packet, &mut ctx, *clock),
        };
        match self.follow_flow_verdicts(packet, &mut ctx, next) {
            Next::Out => return self.out(index, frame, meta, &ctx),
            Next::End(fate) => {
                self.count(fate, 1);
                if !self.traces.is_empty() {
                    let Self { traces, walker, totals, .. } = self;
                    let place = (totals.packets, arrival.0.into());
                    traces.tell(place, (frame, &meta), &ctx.walk, Some(fate), walker);
                }
                if let Some(reject) = fate.answer(packet, self.walker.ports().addresses(arrival)) {
                    let Self { replies, walker, clock, io, .. } = self;
                    replies.answer(reject, packet, (arrival, &meta), 1, walker, *clock, io);
                }
                self.io.discard(&meta);
            }
            _ if self.live && !self.reorder.has_room() => self.overrun(&meta),
            next => {
                if !placed {
                    ctx.place(packet);
                }
                let id = self.push(index, frame, meta, ctx);
                self.drive(id, next);
            }
        }
        if self.live {
            return Ok(());
        }
        while !self.backlog.is_empty() || !self.reorder.has_room() {
            self.wait()?;
        }
        Ok(())
    }

    fn out(&mut self, index: usize, frame: &[u8], mut meta: Meta, ctx: &PacketCtx) -> Result<(), E::Error> {
        (meta.out, meta.hop) = (ctx.out, ctx.hop);
        let (edits, lane) = (ctx.walk.edits(), self.order_bucket(ctx));
        let clear = self.reorder.is_clear(lane);
        if self.live && !clear && !self.reorder.has_room() {
            self.overrun(&meta);
            return Ok(());
        }
        self.totals.passed += 1;
        if !self.traces.is_empty() {
            let Self { traces, walker, totals, .. } = self;
            let place = (totals.packets, ctx.arrival.0.into());
            traces.tell(place, (frame, &meta), &ctx.walk, None, walker);
        }
        if clear && edits == Edits::default() {
            return self.io.pass(index, frame, &meta);
        }
        let Self { scratch, reorder, io, .. } = self;
        scratch.clear();
        scratch.extend_from_slice(frame);
        apply(edits, scratch, &mut meta);
        if clear {
            return io.send(scratch, &meta);
        }
        reorder.push_passed(scratch, meta, lane);
        while !self.live && !self.reorder.has_room() {
            self.wait()?;
        }
        Ok(())
    }

    /// The packet's lane in the reorder.
    fn order_bucket(&self, ctx: &PacketCtx) -> u16 {
        if self.live { ctx.bucket() as u16 } else { 0 }
    }

    /// There is no room to keep a packet until it is decided.
    fn overrun(&mut self, meta: &Meta) {
        self.totals.no_room += 1;
        self.totals.dropped += 1;
        self.io.discard(meta);
    }

    /// Keeps a packet until those before it in its flow have met the rules.
    fn put_aside(&mut self, index: usize, frame: &[u8], meta: Meta, mut ctx: PacketCtx) {
        if !self.reorder.has_room() {
            return self.overrun(&meta);
        }
        let bucket = ctx.bucket();
        self.continuing[bucket] += 1;
        ctx.bucket = Some(bucket);
        ctx.aside = true;
        self.push(index, frame, meta, ctx);
    }

    /// Puts a packet that waits into the reorder.
    fn push(&mut self, index: usize, frame: &[u8], meta: Meta, ctx: PacketCtx) -> PacketId {
        let lane = self.order_bucket(&ctx);
        match self.burst {
            Some(_) => self.reorder.push_borrowed(index, frame.len(), meta, ctx, lane),
            None => self.reorder.push_waiting(frame, meta, ctx, lane),
        }
    }

    /// What comes next for a packet where an inspector has decided about its flow: it does not go to the queue.
    fn follow_flow_verdicts(&mut self, packet: &Packet<'_>, ctx: &mut PacketCtx, mut next: Next) -> Next {
        while let Next::Queue(number, kind @ (Kind::Inspect | Kind::Divert)) = next {
            let queue =
                self.queues.iter_mut().find(|queue| queue.number() == number && queue.has_flow_verdicts());
            let flow_verdict =
                queue.and_then(|queue| queue.flow_verdict(&packet.flow()?, begins(packet), self.clock));
            let Some(flow_verdict) = flow_verdict else { break };
            next = obey(flow_verdict, &mut self.walker, packet, ctx, kind, self.clock);
        }
        next
    }
}
