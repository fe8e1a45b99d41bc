//! What becomes of the packets in the reorder: handed to a queue, decided, sent on through the rules, put together, ended.
//!
//! What: `drive` takes a packet as far as it gets without waiting. What it then waits for is in the reorder
//! (`Wait`), and `settle`, `retry` and `reassemble` go on from there.

use std::sync::Arc;

use towpath_gate::reassembly::Added;
use towpath_gate::{Dir, Edits, Walk};
use towpath_port::{Burst, Checksum};
use towpath_wire::{self as wire, Packet, checksum};

use super::packet_ctx::{
    Decision, Fate, Kind, Next, Settled, Wait, apply, begins, goes_on, label, obey, reinjected,
};
use super::{Engine, Meta, PacketIo};
use crate::queue::{DefaultVerdict, Enqueue, Queue};
use crate::reorder::{Held, PacketId};

/// What burst of offering a packet to a queue.
enum Handed {
    /// The inspector has it.
    Held,
    /// Only a copy went, or nobody is there and the default is to pass: it goes on.
    On,
    /// Nobody is there to look at it, and the default is to drop.
    Dropped,
    /// There is no room.
    Full,
    /// There is no room, and the policy is to hand it to this queue.
    Other(u16),
}

impl<E: PacketIo> Engine<E> {
    /// Acts on a decision about a packet that waits.
    pub(super) fn settle(&mut self, id: PacketId, decision: Settled) {
        let Some((stored, ctx)) = self.reorder.waiting_mut(id) else { return };
        let Settled { outcome, mark: (mark, mask), flow_verdict } = decision;
        ctx.set_mark(mark, mask);
        if let Some(flow_verdict) = flow_verdict
            && let Ok(packet) = parse(stored, self.burst.as_ref())
            && let Some(flow) = packet.flow()
        {
            self.queues[ctx.wait.queue].rule(&flow, flow_verdict, self.clock);
        }
        let next = match outcome {
            Decision::Repeat | Decision::Queue(_) if reinjected(ctx) => Next::End(Fate::Dropped),
            Decision::End(fate) => Next::End(fate),
            Decision::Pass => self.step(id),
            Decision::Repeat => {
                ctx.walk = Walk::new(Dir::In, Some(ctx.arrival), None);
                ctx.leaving = false;
                ctx.out = None;
                ctx.wait.kind = Kind::Divert;
                self.step(id)
            }
            Decision::Replace(mut bytes) => {
                let had = self::bytes(stored, self.burst.as_ref()).len();
                stored.meta.wire_len = replaced(&stored.meta, had, &bytes);
                // An inspector changes bytes; that the checksums fit them again is our work. Where it cannot be done
                // (a fragment, a packet that was cut short, a protocol we do not know) the inspector's own stand.
                checksum::fill(stored.meta.link, &mut bytes, stored.meta.wire_len);
                stored.meta.changed = true;
                stored.meta.port.offload.checksum = Checksum::Unverified;
                self.reorder.replace(id, &bytes);
                self.step(id)
            }
            // A queue that neither rules nor the command line know: an inspector's word does not make one.
            Decision::Queue(number) if !self.queues.iter().any(|queue| queue.number() == number) => {
                match self.unserved.default {
                    DefaultVerdict::Pass => self.step(id),
                    DefaultVerdict::Drop => Next::End(Fate::Dropped),
                }
            }
            Decision::Queue(number) => Next::Queue(number, ctx.wait.kind),
            // Once: a packet that kills its inspector shall not kill them all.
            Decision::Orphan if ctx.orphaned => match self.queues[ctx.wait.queue].abandon() {
                DefaultVerdict::Pass => self.step(id),
                DefaultVerdict::Drop => Next::End(Fate::Dropped),
            },
            Decision::Orphan => {
                ctx.orphaned = true;
                Next::Queue(self.queues[ctx.wait.queue].number(), ctx.wait.kind)
            }
        };
        self.drive(id, next);
    }

    /// The packet of `id` may go on: what comes next on its path.
    fn step(&mut self, id: PacketId) -> Next {
        let Self { reorder, burst, walker, clock, .. } = self;
        let Some((stored, ctx)) = reorder.waiting_mut(id) else { return Next::End(Fate::Dropped) };
        // Nothing of it has changed, and what comes next does not depend on what it is.
        if !stored.meta.changed && ctx.ends() {
            return Next::Out;
        }
        let Ok(packet) = parse(stored, burst.as_ref()) else {
            // It parsed when it burst: an inspector has put something malformed in its place.
            return Next::End(Fate::Dropped);
        };
        ctx.look(&packet);
        goes_on(walker, &packet, ctx, ctx.wait.kind, *clock)
    }

    /// Takes the packet of `id` along its path until it is decided or somebody holds it.
    pub(super) fn drive(&mut self, mut id: PacketId, mut next: Next) {
        loop {
            next = match next {
                Next::Out => return self.end(id, None),
                Next::End(fate) => return self.end(id, Some(fate)),
                Next::Queue(number, kind) => {
                    let queue = self.queue_index(number);
                    self.set_wait(id, Wait { queue, kind, since: None });
                    match self.ruled(id, kind) {
                        Some(next) => next,
                        None => match self.offer_in_turn(id) {
                            // A copy never slows a live packet.
                            Handed::Full if self.live && kind == Kind::Tee => match self.skip_copy(id) {
                                Some(next) => next,
                                None => return,
                            },
                            Handed::Full => return self.put_off(id, queue, kind),
                            handed => match self.act(id, handed) {
                                Some(next) => next,
                                None => return,
                            },
                        },
                    }
                }
                Next::Reassemble => match self.reassemble(id) {
                    Some(whole) => {
                        id = whole;
                        self.step(id)
                    }
                    None => return,
                },
            }
        }
    }

    /// What comes next after a packet was offered; nothing while an inspector has it.
    fn act(&mut self, id: PacketId, handed: Handed) -> Option<Next> {
        match handed {
            Handed::Held | Handed::Full => None,
            Handed::On => Some(self.step(id)),
            Handed::Dropped => Some(Next::End(Fate::Dropped)),
            Handed::Other(number) => {
                let (_, ctx) = self.reorder.waiting_mut(id)?;
                let kind = ctx.wait.kind;
                match reinjected(ctx) {
                    false => Some(Next::Queue(number, kind)),
                    true if kind == Kind::Tee => Some(self.step(id)),
                    true => Some(Next::End(Fate::Dropped)),
                }
            }
        }
    }

    /// What comes next for a packet that waits, where an inspector has decided about its flow.
    fn ruled(&mut self, id: PacketId, kind: Kind) -> Option<Next> {
        let (stored, ctx) = self.reorder.waiting_mut(id)?;
        if kind == Kind::Tee || !self.queues[ctx.wait.queue].has_flow_verdicts() {
            return None;
        }
        let packet = parse(stored, self.burst.as_ref()).ok()?;
        let flow = packet.flow()?;
        let flow_verdict = self.queues[ctx.wait.queue].flow_verdict(&flow, begins(&packet), self.clock)?;
        Some(obey(flow_verdict, &mut self.walker, &packet, ctx, kind, self.clock))
    }

    /// The packet waits for room.
    fn put_off(&mut self, id: PacketId, queue: usize, kind: Kind) {
        self.set_wait(id, Wait { queue, kind, since: Some(self.wall) });
        match self.queues[queue].enqueue(id) {
            Ok(None) => {}
            Ok(Some(oldest)) => self.end(oldest, Some(Fate::Dropped)),
            Err(id) if self.live => self.queues[queue].put_off(id),
            Err(id) => self.backlog.push_back(id),
        }
    }

    /// Offers a packet to its queue, behind those that wait for room there.
    fn offer_in_turn(&mut self, id: PacketId) -> Handed {
        let Some((_, ctx)) = self.reorder.waiting_mut(id) else { return Handed::Dropped };
        let queue = &self.queues[ctx.wait.queue];
        if self.live && queue.next_in_backlog().is_some() { Handed::Full } else { self.offer(id) }
    }

    /// The packet goes on without its copy.
    fn skip_copy(&mut self, id: PacketId) -> Option<Next> {
        let (stored, ctx) = self.reorder.waiting_mut(id)?;
        let queue = &mut self.queues[ctx.wait.queue];
        queue.skip(&label(&stored.meta, ctx), stored.meta.interface);
        Some(self.step(id))
    }

    /// Gives a fragment to the reassembler. If that made its datagram whole, and nothing of its flow is before it, the datagram
    /// goes on.
    fn reassemble(&mut self, id: PacketId) -> Option<PacketId> {
        let Self { reorder, burst, reassembler, clock, .. } = self;
        let (stored, ctx) = reorder.waiting_mut(id)?;
        let Ok(packet) = parse(stored, burst.as_ref()) else {
            self.end(id, Some(Fate::Dropped));
            return None;
        };
        let Added { whole, dropped } = reassembler.add(&packet, ctx.parts, *clock);
        // From here on the reassembler counts the fragment, or the datagram does.
        ctx.parts = whole.as_ref().map_or(0, |whole| whole.parts);
        ctx.wait.kind = Kind::Divert;
        if let Some(whole) = &whole {
            stored.meta.wire_len = whole.frame.len() as u32;
            stored.meta.changed = true;
            stored.meta.port.offload = towpath_port::Offload::default();
            reorder.replace(id, &whole.frame);
        }
        self.count(Fate::Dropped, dropped);
        if whole.is_none() {
            self.end(id, Some(Fate::Dropped));
            return None;
        }
        self.join_flow(id)
    }

    /// A datagram is in its flow from when it is whole: its fragments' lane, but for the first one's, is another. Nothing when
    /// it has to wait for its turn there.
    fn join_flow(&mut self, id: PacketId) -> Option<PacketId> {
        let Self { reorder, burst, continuing, .. } = self;
        let (stored, ctx) = reorder.waiting_mut(id)?;
        let Ok(packet) = parse(stored, burst.as_ref()) else {
            self.end(id, Some(Fate::Dropped));
            return None;
        };
        let before = ctx.bucket();
        ctx.place(&packet);
        let bucket = ctx.bucket();
        if bucket == before {
            return Some(id);
        }
        if let Some(bucket) = ctx.bucket.take() {
            continuing[bucket] -= 1;
        }
        if !self.live {
            return Some(id);
        }
        let waits = continuing[bucket] > 0;
        if waits {
            continuing[bucket] += 1;
            ctx.bucket = Some(bucket);
            ctx.aside = true;
        }
        let id = reorder.move_to(id, bucket as u16)?;
        (!waits).then_some(id)
    }

    fn queue_index(&mut self, number: u16) -> usize {
        let known = self.queues.iter().position(|queue| queue.number() == number);
        known.unwrap_or_else(|| {
            self.queues.push(Queue::new(number, self.unserved));
            self.named.push(number);
            self.queues.len() - 1
        })
    }

    /// Offers what waits for room, oldest first, as long as there is some; gives up on what waits too long.
    pub(super) fn retry(&mut self) {
        while let Some(&id) = self.backlog.front() {
            let Some(handed) = self.offer_again(id) else { break };
            self.backlog.pop_front();
            self.go_on(id, handed);
        }
        for queue in 0..self.queues.len() {
            while let Some(id) = self.queues[queue].next_in_backlog() {
                let Some(handed) = self.offer_again(id) else { break };
                self.queues[queue].leave_backlog();
                self.go_on(id, handed);
            }
        }
    }

    fn go_on(&mut self, id: PacketId, handed: Handed) {
        if let Some(next) = self.act(id, handed) {
            self.drive(id, next);
        }
    }

    /// Offers a packet that waits for room; nothing when it still has to wait.
    fn offer_again(&mut self, id: PacketId) -> Option<Handed> {
        let Some((_, ctx)) = self.reorder.waiting_mut(id) else { return Some(Handed::Held) };
        let wait = ctx.wait;
        match self.offer(id) {
            Handed::Full => {
                let (stored, ctx) = self.reorder.waiting_mut(id)?;
                let queue = &mut self.queues[wait.queue];
                if self.wall.saturating_sub(wait.since.unwrap_or(self.wall)) <= queue.policy().deadline {
                    return None;
                }
                let verdict = queue.give_up(&label(&stored.meta, ctx), stored.meta.interface);
                Some(match verdict {
                    DefaultVerdict::Drop if wait.kind != Kind::Tee => Handed::Dropped,
                    _ => Handed::On,
                })
            }
            handed => Some(handed),
        }
    }

    /// Offers a packet to the queue that it waits for.
    fn offer(&mut self, id: PacketId) -> Handed {
        let Some((stored, ctx)) = self.reorder.waiting_mut(id) else { return Handed::Dropped };
        let Wait { queue, kind, .. } = ctx.wait;
        let label = label(&stored.meta, ctx);
        let answer_to = (kind != Kind::Tee).then_some(id);
        // Of a capture, the interface stands for the processor that the packet burst on.
        let cpu = stored.meta.interface;
        let frame = bytes(stored, self.burst.as_ref());
        let offer = self.queues[queue].offer(frame, &label, cpu, self.wall, answer_to);
        if matches!(offer, Enqueue::Held | Enqueue::Copied) && !std::mem::replace(&mut ctx.inspected, true) {
            self.totals.inspected += u64::from(ctx.parts);
        }
        match offer {
            Enqueue::Full => Handed::Full,
            Enqueue::Queue(number) => Handed::Other(number),
            Enqueue::Held if kind != Kind::Tee => Handed::Held,
            Enqueue::Lost(DefaultVerdict::Drop) if kind != Kind::Tee => Handed::Dropped,
            Enqueue::Held | Enqueue::Copied | Enqueue::Lost(_) => Handed::On,
        }
    }

    fn set_wait(&mut self, id: PacketId, wait: Wait) {
        let Self { reorder, burst, continuing, walker, .. } = self;
        let Some((stored, ctx)) = reorder.waiting_mut(id) else { return };
        ctx.wait = wait;
        // The inspector sees what the rules have changed so far.
        change(ctx.walk.edits(), stored, burst.as_ref());
        let goes_on = wait.kind != Kind::Inspect || ctx.walks_out(walker);
        if goes_on && ctx.bucket.is_none() {
            let bucket = ctx.bucket();
            continuing[bucket] += 1;
            ctx.bucket = Some(bucket);
        }
    }

    /// The packet of `id` is decided: it passes when it has no fate.
    pub(super) fn end(&mut self, id: PacketId, fate: Option<Fate>) {
        let Some((stored, ctx)) = self.reorder.waiting_mut(id) else { return };
        if let Some(bucket) = ctx.bucket.take() {
            self.continuing[bucket] -= 1;
        }
        let parts = ctx.parts;
        if !self.traces.is_empty() {
            let Self { traces, walker, totals, burst, .. } = self;
            let place = (totals.packets, ctx.arrival.0.into());
            let meta = Meta { out: ctx.out, ..stored.meta };
            traces.tell(place, (bytes(stored, burst.as_ref()), &meta), &ctx.walk, fate, walker);
        }
        match fate {
            None => {
                change(ctx.walk.edits(), stored, self.burst.as_ref());
                (stored.meta.out, stored.meta.hop) = (ctx.out, ctx.hop);
                self.totals.passed += u64::from(parts);
                self.reorder.pass(id);
            }
            Some(fate) => {
                if fate != Fate::Dropped
                    && let Ok(packet) = parse(stored, self.burst.as_ref())
                    && let Some(reject) = fate.answer(&packet, self.walker.ports().addresses(ctx.arrival))
                {
                    let burst = (ctx.arrival, &stored.meta);
                    let Self { replies, walker, clock, io, .. } = self;
                    replies.answer(reject, &packet, burst, parts, walker, *clock, io);
                }
                let meta = stored.meta;
                self.io.discard(&meta);
                self.count(fate, parts);
                self.reorder.discard(id);
            }
        }
    }
}

/// A waiting packet's bytes: its own, or those in the burst that it burst with.
#[inline]
pub(super) fn bytes<'a>(stored: &'a Held<Meta>, burst: Option<&'a Arc<Burst>>) -> &'a [u8] {
    stored.bytes(|index| burst.expect("its burst is being handled").frame(index).bytes)
}

#[inline]
pub(super) fn parse<'a>(
    stored: &'a Held<Meta>,
    burst: Option<&'a Arc<Burst>>,
) -> Result<Packet<'a>, wire::Malformed> {
    wire::parse(stored.meta.link, bytes(stored, burst), stored.meta.wire_len)
}

/// The length on the wire of the packet that stands in place of another: its own. Of a packet that was cut short by the
/// capture an inspector sees the first bytes only, and answers with those: then what is missing is missing still. Where the
/// whole packet waits in a kernel's queue, its first bytes do not stand for it: they are no packet.
fn replaced(meta: &Meta, had: usize, bytes: &[u8]) -> u32 {
    let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let missing = meta.wire_len.saturating_sub(had as u32);
    let whole = missing == 0 || meta.port.queued.is_some();
    if whole || wire::parse(meta.link, bytes, len).is_ok() { len } else { len.saturating_add(missing) }
}

/// Makes the changes that rules asked for.
fn change(edits: Edits, stored: &mut Held<Meta>, burst: Option<&Arc<Burst>>) {
    if edits != Edits::default() {
        let burst = |index| burst.expect("its burst is being handled").frame(index).bytes;
        let (frame, meta) = stored.parts_mut(burst);
        apply(edits, frame, meta);
    }
}

#[cfg(test)]
mod tests {
    use towpath_port::Queued;
    use towpath_wire::LinkType;

    use super::*;

    #[test]
    fn what_stands_for_a_packet_that_is_not_here_whole() {
        // The first 28 bytes of a packet of 100, and a whole one of 28.
        let whole = [0x45, 0, 0, 28, 0, 0, 0, 0, 9, 17, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 0, 7, 0, 9, 0, 8, 0, 0];
        let mut first = whole;
        (first[3], first[25]) = (100, 80);
        let queued = Some(Queued { cut: true, ..Queued::default() });
        for (bytes, queued, expected) in
            [(first, None, 100), (whole, None, 28), (first, queued, 28), (whole, queued, 28)]
        {
            let port = towpath_port::Meta { queued, ..towpath_port::Meta::default() };
            let meta = Meta {
                wire_len: 100,
                time: 0,
                link: LinkType::RAW,
                interface: 0,
                out: None,
                hop: None,
                changed: false,
                port,
            };
            assert_eq!(replaced(&meta, 28, &bytes), expected, "{queued:?}");
        }
    }
}
