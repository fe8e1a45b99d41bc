//! The path of a packet, from top to bottom: ingress, fast path or slow path, queue, verdict, egress.
//!
//! ```text
//! burst -> fast path (a state passes the packet) ------------------------------> egress
//!       -> ingress -> rules in -> forwarding decision -> rules out ------------> egress
//!                        |  ^
//!       inspect, divert, |  | verdict
//!                   tee  v  |
//!                       queue       (the packet is in the reorder buffer meanwhile)
//! ```
//!
//! `drive` takes a packet that is in the reorder buffer as far as it gets without waiting. [`Wait`] is the reason why it
//! then waits; `settle` (a verdict), `retry_backlog` (room: `backlog.rs`), `reassemble` (fragments: `reassemble.rs`) and
//! `resume_deferred` (the lock of the flow: `flow_locks.rs`) continue. Packets of one flow are evaluated as their verdicts arrive, and leave
//! in the order of their arrival.

use towpath_gate::{BURST, Dir, Edits, PortId, Walker};
use towpath_ring::Verdict;
use towpath_wire::{self as wire, Packet, Time, checksum};

use crate::drop_log::{self, DropLog};
use crate::drop_reason::{DropReason, Outcome};
use crate::edits::{self, Place};
use crate::engine::Engine;
use crate::flow_verdict::FlowVerdict;
use crate::forward::{after_pass, after_step, answer, may_be_forwarded, walk};
use crate::held::{admit_replacement, bytes, edit, parse};
use crate::meta::{Egress, Meta};
use crate::packet_ctx::{Handover, Next, PacketCtx, Wait, begins_connection};
use crate::packet_io::PacketIo;
use crate::queue::{Enqueue, Queue, QueueVerdict};
use crate::reorder::{Account, PacketId};
use crate::topology::ForwardMode;
use crate::verdict_feed::{DecidedFlow, MAX_DECIDED, Origin};
use crate::verdicts::{Settlement, VerdictBatch};

/// The result of offering a packet to its queue.
pub(crate) enum Offered {
    /// An inspector has it.
    Held,
    /// The packet continues: only a copy was made, or no inspector decides and the default is to pass.
    Continues,
    /// No inspector decides and the default is to drop.
    Dropped(DropReason),
    /// The queue has no room.
    Full,
    /// The queue has no room, and its policy names another queue.
    Other(u16),
}

// Ingress.
impl<E: PacketIo> Engine<E> {
    /// Processes the packets of a burst, each with its index.
    ///
    /// For [`BURST`] packets at a time, the dynamic states are prefetched together, so that their cache misses overlap. A packet
    /// takes the fast path if the reorder buffer is empty, no trace is active, and its egress depends on its
    /// interface only. Invariant: the slow path would pass the same packets in the same order.
    pub(crate) fn process_packets<'a>(
        &mut self,
        mut packets: impl Iterator<Item = (usize, (&'a [u8], Meta))> + Clone,
    ) -> Result<(), E::Error> {
        if !self.live {
            return packets.try_for_each(|(index, (frame, meta))| self.slow_path(None, index, frame, meta));
        }
        loop {
            let chunk = packets.clone().take(BURST);
            // While packets wait and no packet of the last chunk had a state, a prefetch rarely helps.
            let prefetched =
                self.traces.is_empty() && (self.reorder.is_empty() || std::mem::take(&mut self.by_states));
            if prefetched {
                self.prefetch_states(chunk.clone());
            }
            let mut count = 0;
            for (index, (frame, meta)) in chunk {
                let slot = count;
                count += 1;
                if !self.io.accepts(frame, &meta) {
                    continue;
                }
                let direct = self.topology.direct(meta.interface);
                match direct.filter(|_| prefetched && self.reorder.is_empty()) {
                    Some(egress) if self.fast_path((slot, egress), index, frame, &meta)? => {}
                    _ => self.slow_path(prefetched.then_some(slot), index, frame, meta)?,
                }
            }
            if count < BURST || packets.nth(BURST - 1).is_none() {
                return Ok(());
            }
        }
    }

    fn prefetch_states<'a>(&mut self, chunk: impl Iterator<Item = (usize, (&'a [u8], Meta))> + Clone) {
        // A chunk nearly always comes from one interface. Packets of another one walk the rules.
        let interface = chunk.clone().next().map(|(_, (_, meta))| meta.interface);
        let recv = interface.and_then(|interface| self.topology.untagged(interface));
        let plain = |(_, (frame, meta)): (_, (&'a [u8], Meta))| {
            let same = Some(meta.interface) == interface;
            if same { wire::plain(meta.link, frame, meta.wire_len) } else { None }
        };
        self.walker.prefetch(recv, chunk.map(plain));
    }

    /// Passes a packet if the state that was prefetched in `slot` passes it. Returns false if the packet must take the slow path.
    #[inline]
    fn fast_path(
        &mut self,
        (slot, egress): (usize, Egress),
        index: usize,
        frame: &[u8],
        meta: &Meta,
    ) -> Result<bool, E::Error> {
        if self.walker.try_pass(slot, self.clock.now).is_none() {
            return Ok(false);
        }
        self.count_received(index, meta);
        self.totals.stats.passed += 1;
        self.io.send_borrowed(index, frame, &Meta { egress, ..*meta })?;
        Ok(true)
    }

    /// Processes one packet; `index` is its position in the burst, `slot` that of its prefetched state.
    fn slow_path(
        &mut self,
        slot: Option<usize>,
        index: usize,
        frame: &[u8],
        meta: Meta,
    ) -> Result<(), E::Error> {
        self.count_received(index, &meta);
        // Borrowed, not moved: a packet is larger than a cache line.
        let parsed = wire::parse(meta.link, frame, meta.wire_len);
        let packet = match &parsed {
            Ok(packet) => packet,
            Err(malformed) => {
                self.drop_malformed((*malformed).into(), frame, &meta);
                return Ok(());
            }
        };
        if !self.live {
            self.conversations.observe(packet);
        }
        let (arrival, mode) = self.topology.of(packet, meta.interface);
        let [named, xmit] = self.topology.named(&meta);
        let mut ctx = PacketCtx::new((named.unwrap_or(arrival), xmit), mode, &meta.port);
        // Without queues and with an empty reorder buffer, most packets need no bucket.
        let placed = !self.queues.is_empty() || !self.reorder.is_empty();
        if placed {
            self.place(&mut ctx, packet);
        }
        while self.reorder.waiting() > 0 && self.locks.is_locked(ctx.bucket()) {
            if self.live {
                self.defer(index, frame, meta, ctx);
                return Ok(());
            }
            self.wait()?;
        }
        let now = self.clock.now;
        let known = slot.and_then(|slot| self.walker.try_step(slot, &mut ctx.walk, now));
        let next = match known {
            Some(step) => {
                self.by_states = true;
                after_step(step, (&mut self.walker, &self.io), packet, &mut ctx, now)
            }
            None => walk((&mut self.walker, &self.io), packet, &mut ctx, now),
        };
        match self.apply_flow_verdicts(packet, &mut ctx, next) {
            Next::End(Outcome::Passed) => return self.pass_now(index, frame, meta, &mut ctx, packet),
            Next::End(outcome) => self.end_now(outcome, frame, &meta, &ctx, packet),
            next => {
                if !placed {
                    self.place(&mut ctx, packet);
                }
                let account = self.account_of(&next, &ctx);
                if let Some(id) = self.hold(index, frame, meta, ctx, account) {
                    self.drive(id, next);
                }
            }
        }
        while !self.live && (!self.queues.backlog.is_empty() || !self.reorder.has_room()) {
            self.wait()?;
        }
        Ok(())
    }

    #[inline]
    fn count_received(&mut self, index: usize, meta: &Meta) {
        self.totals.stats.packets += 1;
        self.totals.stats.bytes += u64::from(meta.wire_len);
        self.clock.packet(index, meta.time);
    }

    /// Keeps a packet until the lock of its flow is released.
    fn defer(&mut self, index: usize, frame: &[u8], meta: Meta, ctx: PacketCtx) {
        let bucket = ctx.bucket();
        let account = self.reorder.front_account(bucket);
        if let Some(id) = self.hold(index, frame, meta, ctx, account) {
            self.locks.defer(bucket, id);
        }
    }

    /// Puts a packet that waits into the reorder buffer. A live engine drops it if its account has no room.
    fn hold(
        &mut self,
        index: usize,
        frame: &[u8],
        meta: Meta,
        ctx: PacketCtx,
        account: Account,
    ) -> Option<PacketId> {
        if self.live && !self.reorder.admits(account, frame.len()) {
            self.drop_for_room(account, (frame, &meta), &ctx);
            return None;
        }
        let place = (self.order_bucket(&ctx), account);
        Some(match self.burst {
            Some(_) => self.reorder.push_borrowed(index, frame.len(), meta, ctx, place),
            None => self.reorder.push_waiting(frame, meta, ctx, place),
        })
    }

    /// The account of a packet that waits: its queue's, or that of the packet for which it waits.
    fn account_of(&mut self, next: &Next, ctx: &PacketCtx) -> Account {
        match *next {
            Next::Queue(number, _) => {
                let index = self.queues.index(number);
                self.queues.get(index).account()
            }
            Next::Reassemble | Next::End(_) => self.reorder.front_account(self.order_bucket(ctx)),
        }
    }

    pub(crate) fn place(&mut self, ctx: &mut PacketCtx, packet: &Packet<'_>) {
        let Self { reorder, live, .. } = self;
        ctx.place(packet, live.then_some(|hash| reorder.bucket_of(hash)));
    }

    /// The packet's bucket in the reorder buffer. All packets of a replay leave in order.
    pub(crate) fn order_bucket(&self, ctx: &PacketCtx) -> u16 {
        if self.live { ctx.bucket() } else { 0 }
    }

    fn drop_for_room(&mut self, account: Account, (frame, meta): (&[u8], &Meta), ctx: &PacketCtx) {
        self.reorder.shares_mut().count_refused(account);
        let outcome = Outcome::Dropped(DropReason::NoRoom);
        self.count(outcome, 1);
        self.observe((frame, meta), ctx, outcome);
        self.io.discard(meta);
    }

    #[cold]
    fn drop_malformed(&mut self, reason: DropReason, frame: &[u8], meta: &Meta) {
        let outcome = Outcome::Dropped(reason);
        self.count(outcome, 1);
        let arrival = self.topology.untagged(meta.interface).unwrap_or(PortId(0));
        let Self { traces, drop_log, walker, totals, clock, .. } = self;
        if !traces.is_empty() {
            traces.record((totals.stats.packets, arrival), (frame, meta), None, outcome, walker);
        }
        if drop_log.wants(reason) {
            let entry = || drop_log::entry(reason, None, (frame, meta), (Dir::In, Some(arrival)), clock.now);
            drop_log.put(reason, 1, clock.now, entry, walker.log());
        }
        self.io.discard(meta);
    }
}

// Egress of a packet that was decided without waiting.
impl<E: PacketIo> Engine<E> {
    /// Sends a packet, or puts it into the reorder buffer after those that wait.
    fn pass_now(
        &mut self,
        index: usize,
        frame: &[u8],
        mut meta: Meta,
        ctx: &mut PacketCtx,
        packet: &Packet<'_>,
    ) -> Result<(), E::Error> {
        ctx.write_egress(&mut meta);
        meta.network = packet.network as u16;
        let (edits, bucket) = (ctx.walk.edits(), self.order_bucket(ctx));
        let clear = self.reorder.is_clear(bucket);
        let account = if clear { Account::ENGINE } else { self.reorder.front_account(bucket) };
        if self.live && !clear && !self.reorder.admits(account, frame.len()) {
            self.drop_for_room(account, (frame, &meta), ctx);
            return Ok(());
        }
        self.count(Outcome::Passed, 1);
        self.observe((frame, &meta), ctx, Outcome::Passed);
        if clear && edits == Edits::default() {
            return transmit(&mut self.io, Some(index), frame, &meta);
        }
        let Self { scratch, reorder, io, .. } = self;
        scratch.clear();
        scratch.extend_from_slice(frame);
        edits::apply(edits, Place::of(packet), scratch, &mut meta);
        if clear {
            return transmit(io, None, scratch, &meta);
        }
        reorder.push_passed(scratch, meta, (bucket, account));
        while !self.live && !self.reorder.has_room() {
            self.wait()?;
        }
        Ok(())
    }

    /// Drops or rejects a packet.
    fn end_now(&mut self, outcome: Outcome, frame: &[u8], meta: &Meta, ctx: &PacketCtx, packet: &Packet<'_>) {
        self.count(outcome, 1);
        self.observe((frame, meta), ctx, outcome);
        if let Some(reject) = answer(outcome, packet, self.walker.ports().addresses(ctx.arrival)) {
            let Self { replies, walker, clock, io, .. } = self;
            replies.answer(reject, packet, (ctx.arrival, meta), 1, walker, clock.now, io);
        }
        self.io.discard(meta);
    }

    /// Shows a decided packet to the traces, and a dropped one to the log.
    #[inline]
    fn observe(&mut self, (frame, meta): (&[u8], &Meta), ctx: &PacketCtx, outcome: Outcome) {
        let Self { traces, drop_log, walker, totals, clock, .. } = self;
        if !traces.is_empty() {
            let number = totals.stats.packets;
            traces.record((number, ctx.arrival), (frame, meta), Some(&ctx.walk), outcome, walker);
        }
        if let Outcome::Dropped(reason) = outcome
            && drop_log.wants(reason)
        {
            log_drop((drop_log, walker), reason, (frame, meta), ctx, clock.now);
        }
    }
}

// Queues.
impl<E: PacketIo> Engine<E> {
    /// Takes a packet in the reorder buffer along its path until it is decided or waits.
    pub(crate) fn drive(&mut self, mut id: PacketId, mut next: Next) {
        loop {
            let step = match next {
                Next::End(outcome) => return self.end(id, outcome),
                Next::Queue(number, kind) => self.enqueue(id, number, kind),
                Next::Reassemble => self.reassemble(id).map(|whole| {
                    id = whole;
                    self.pass(whole)
                }),
            };
            match step {
                Some(step) => next = step,
                None => return,
            }
        }
    }

    /// Hands a packet to a queue. Returns the next step, or `None` while the packet waits.
    fn enqueue(&mut self, id: PacketId, number: u16, kind: Handover) -> Option<Next> {
        let queue = self.queues.index(number);
        self.set_wait(id, Wait { queue, kind, since: None });
        if let Some(next) = self.flow_verdict_of_held(id, kind) {
            return Some(next);
        }
        if self.live && kind != Handover::Tee && !self.charge_queue(id, queue) {
            return Some(Next::End(Outcome::Dropped(DropReason::NoRoom)));
        }
        // After the packets that wait for room there.
        let behind = self.live && self.queues.get(queue).next_in_backlog().is_some();
        match if behind { Offered::Full } else { self.offer(id) } {
            // A copy never delays a live packet.
            Offered::Full if self.live && kind == Handover::Tee => self.skip_copy(id),
            Offered::Full => {
                self.wait_for_room(id, queue, kind);
                None
            }
            offered => self.after_offer(id, offered),
        }
    }

    pub(crate) fn after_offer(&mut self, id: PacketId, offered: Offered) -> Option<Next> {
        match offered {
            Offered::Held | Offered::Full => None,
            Offered::Continues => Some(self.pass(id)),
            Offered::Dropped(reason) => Some(Next::End(Outcome::Dropped(reason))),
            Offered::Other(number) => {
                let (_, ctx) = self.reorder.waiting_mut(id)?;
                let kind = ctx.wait.kind;
                match ctx.reinject() {
                    false => Some(Next::Queue(number, kind)),
                    true if kind == Handover::Tee => Some(self.pass(id)),
                    true => Some(Next::End(Outcome::Dropped(DropReason::ReinjectLimit))),
                }
            }
        }
    }

    /// Offers a packet to the queue that it waits for.
    pub(crate) fn offer(&mut self, id: PacketId) -> Offered {
        let Self { reorder, burst, queues, topology, totals, clock, .. } = self;
        let Some((held, ctx, shares)) = reorder.waiting_with_shares(id) else { return Offered::Held };
        let Wait { queue, kind, .. } = ctx.wait;
        let copy = kind == Handover::Tee;
        let ring_meta = ctx.ring_meta(&held.meta, topology);
        // In a replay, the interface stands for the CPU that received the packet.
        let cpu = held.meta.interface;
        let frame = bytes(held, burst.as_ref());
        let waiter = (!copy).then_some(id);
        let result = queues.get_mut(queue).enqueue(frame, &ring_meta, cpu, clock.wall, waiter, shares);
        if matches!(result, Enqueue::Held(_) | Enqueue::Copied)
            && !std::mem::replace(&mut ctx.inspected, true)
        {
            totals.stats.inspected += u64::from(ctx.packets);
        }
        match result {
            Enqueue::Full => Offered::Full,
            Enqueue::Queue(number) => Offered::Other(number),
            Enqueue::Held(account) if !copy => {
                reorder.charge_to(id, account);
                Offered::Held
            }
            Enqueue::Lost(Some(reason)) if !copy => Offered::Dropped(reason),
            Enqueue::Held(_) | Enqueue::Copied | Enqueue::Lost(_) => Offered::Continues,
        }
    }

    pub(crate) fn set_wait(&mut self, id: PacketId, wait: Wait) {
        let Self { reorder, burst, locks, walker, clock, live, .. } = self;
        let Some((held, ctx)) = reorder.waiting_mut(id) else { return };
        ctx.wait = wait;
        // The inspector sees the edits of the rules so far.
        edit(held, ctx, burst.as_ref());
        let continues = wait.kind != Handover::Inspect;
        let leaves = !ctx.outbound && ctx.may_walk_out(walker);
        // A replay always locks, so that its report does not depend on the speed of inspectors.
        let locks_flow = (continues || leaves)
            && (!*live || {
                let dir = ctx.walk.dir();
                let ahead = continues.then_some(dir).into_iter().chain(leaves.then_some(Dir::Out));
                parse(held, ctx, burst.as_ref())
                    .is_ok_and(|packet| walker.may_create_state(&ctx.walk, &packet, ahead, clock.now))
            });
        let bucket = ctx.bucket();
        match locks_flow {
            true => locks.lock(&mut ctx.lock, bucket),
            false => locks.unlock(&mut ctx.lock),
        }
    }
}

// Verdicts.
impl<E: PacketIo> Engine<E> {
    /// Collects verdicts and acts on them. Returns the number of frames.
    pub(crate) fn poll(&mut self) -> Result<usize, E::Error> {
        self.read_clock();
        let mut verdicts = std::mem::take(&mut self.verdicts);
        let mut decided = 0;
        let Self { queues, reorder, io, clock, .. } = self;
        for queue in queues.iter_mut() {
            let mut admit = |id, bytes: &[u8]| admit_replacement(reorder, io, id, bytes);
            decided += queue.poll(clock.wall, &mut admit, |id, verdict| verdicts.push(id, verdict));
            queue.close_accounts(reorder.shares_mut());
        }
        let settlements = verdicts.take();
        for (id, settlement) in &settlements {
            self.settle(*id, settlement, &verdicts);
        }
        verdicts.recycle(settlements);
        self.verdicts = verdicts;
        self.retry_backlog();
        self.inject();
        loop {
            self.flush()?;
            if !self.resume_deferred() {
                break;
            }
        }
        self.announce_decided_flows();
        // Packets that were published here were not announced with the burst.
        self.queues.iter_mut().for_each(Queue::announce);
        Ok(decided)
    }

    /// Acts on the verdict for a packet that waits.
    fn settle(&mut self, id: PacketId, settlement: &Settlement, verdicts: &VerdictBatch) {
        let Self { reorder, burst, queues, clock, feed, decided_flows, .. } = self;
        let Some((held, ctx)) = reorder.waiting_mut(id) else { return };
        let queue = queues.get_mut(ctx.wait.queue);
        let (decision, channel) = match settlement.verdict {
            QueueVerdict::Decided(decision, channel) => (decision, channel),
            QueueVerdict::Lost(None) => {
                let next = self.pass(id);
                return self.drive(id, next);
            }
            QueueVerdict::Lost(Some(reason)) => return self.end(id, Outcome::Dropped(reason)),
            QueueVerdict::Redeliver => {
                // Once: a packet that kills its inspector must not kill them all.
                let next = match std::mem::replace(&mut ctx.redelivered, true) {
                    false => Next::Queue(queue.number(), ctx.wait.kind),
                    true => match queue.abandon() {
                        Some(reason) => Next::End(Outcome::Dropped(reason)),
                        None => self.pass(id),
                    },
                };
                return self.drive(id, next);
            }
        };
        let mark = (decision.mark, decision.mask);
        ctx.set_mark(mark.0, mark.1);
        if decision.flow
            && !matches!(decision.verdict, Verdict::Replace(_) | Verdict::Repeat)
            && let Ok(packet) = parse(held, ctx, burst.as_ref())
            && let Some(flow) = ctx.flow(&packet)
        {
            let verdict = FlowVerdict { verdict: decision.verdict, mark, channel };
            let (number, arrival) = (queue.number(), ctx.arrival);
            let origin = feed.as_ref().map(|feed| Origin { feed, queue: number, arrival });
            // A packet that an inspector sends is not received, and the first one of a connection has no established state.
            let announces = ctx.packets > 0 && !begins_connection(&packet);
            if origin.is_some_and(|origin| origin.offers(decision.verdict))
                && announces
                && decided_flows.len() < MAX_DECIDED
            {
                decided_flows.push(DecidedFlow { queue: number, flow, arrival, bucket: ctx.bucket() });
            }
            queue.set_flow_verdict(&flow, verdict, clock.now, origin);
        }
        let next = match decision.verdict {
            Verdict::Pass => self.pass(id),
            Verdict::Drop | Verdict::Hold => Next::End(Outcome::Dropped(DropReason::Inspector)),
            Verdict::Reject => Next::End(Outcome::Rejected(None)),
            Verdict::Replace(_) => {
                self.replace(id, verdicts.replacement(settlement));
                self.pass(id)
            }
            Verdict::Queue(_) | Verdict::Repeat if ctx.reinject() => {
                Next::End(Outcome::Dropped(DropReason::ReinjectLimit))
            }
            Verdict::Repeat => {
                ctx.restart();
                self.pass(id)
            }
            // One of the queue's `may_queue`.
            Verdict::Queue(number) => Next::Queue(number, ctx.wait.kind),
        };
        self.drive(id, next);
    }

    /// Replaces a packet's bytes by those of an inspector. The engine corrects the checksums. Where it cannot (a fragment, a packet that
    /// the capture truncated, an unknown protocol), the inspector's checksums are kept.
    fn replace(&mut self, id: PacketId, replacement: &[u8]) {
        let Self { reorder, burst, scratch, .. } = self;
        let Some((held, _)) = reorder.waiting_mut(id) else { return };
        let had = bytes(held, burst.as_ref()).len();
        held.meta = edits::replaced_meta(&held.meta, had, replacement);
        scratch.clear();
        scratch.extend_from_slice(replacement);
        checksum::fill(held.meta.link, scratch, held.meta.wire_len);
        reorder.replace(id, scratch);
    }

    /// The packet continues after its queue. Returns the next step.
    pub(crate) fn pass(&mut self, id: PacketId) -> Next {
        let Self { reorder, burst, walker, clock, io, .. } = self;
        let Some((held, ctx)) = reorder.waiting_mut(id) else {
            return Next::End(Outcome::Dropped(DropReason::Shutdown));
        };
        if !held.meta.changed && ctx.passes_unseen() {
            return Next::End(Outcome::Passed);
        }
        let Ok(packet) = parse(held, ctx, burst.as_ref()) else {
            // The received packet was well-formed.
            return Next::End(Outcome::Dropped(DropReason::BadReplacement));
        };
        // The route is that of the packet that was replaced.
        if held.meta.changed && ctx.outbound && ctx.mode == ForwardMode::Router && !may_be_forwarded(&packet)
        {
            return Next::End(Outcome::Dropped(DropReason::BadReplacement));
        }
        after_pass((walker, io), &packet, ctx, ctx.wait.kind, clock.now)
    }

    /// Resumes the deferred packets of flows that are no longer locked. Returns true if there was one.
    fn resume_deferred(&mut self) -> bool {
        let mut any = false;
        while let Some(id) = self.locks.take_released() {
            let Self { reorder, burst, walker, clock, io, .. } = self;
            let Some((held, ctx)) = reorder.waiting_mut(id) else { continue };
            any = true;
            let next = match parse(held, ctx, burst.as_ref()) {
                Ok(packet) => walk((walker, io), &packet, ctx, clock.now),
                Err(malformed) => Next::End(Outcome::Dropped(malformed.into())),
            };
            self.drive(id, next);
        }
        any
    }
}

// Egress of packets in the reorder buffer.
impl<E: PacketIo> Engine<E> {
    /// A packet in the reorder buffer is decided. If it passed, it leaves when its turn comes.
    pub(crate) fn end(&mut self, id: PacketId, outcome: Outcome) {
        let Self { reorder, burst, locks, walker, clock, io, totals, traces, drop_log, replies, .. } = self;
        let Some((held, ctx)) = reorder.waiting_mut(id) else { return };
        locks.unlock(&mut ctx.lock);
        let packets = u32::from(ctx.packets);
        // The reassembler has a fragment that stands for no packet.
        if !traces.is_empty() && packets > 0 {
            let (number, mut meta) = (totals.stats.packets, held.meta);
            ctx.write_egress(&mut meta);
            let frame = bytes(held, burst.as_ref());
            traces.record((number, ctx.arrival), (frame, &meta), Some(&ctx.walk), outcome, walker);
        }
        if let Outcome::Dropped(reason) = outcome
            && packets > 0
            && drop_log.wants(reason)
        {
            let frame = bytes(held, burst.as_ref());
            log_drop((&mut *drop_log, &mut *walker), reason, (frame, &held.meta), ctx, clock.now);
        }
        if outcome == Outcome::Passed {
            edit(held, ctx, burst.as_ref());
            ctx.write_egress(&mut held.meta);
            reorder.pass(id);
        } else {
            let meta = &held.meta;
            let me = walker.ports().addresses(ctx.arrival);
            if may_be_answered(outcome)
                && let Ok(packet) = parse(held, ctx, burst.as_ref())
                && let Some(reject) = answer(outcome, &packet, me)
            {
                replies.answer(reject, &packet, (ctx.arrival, meta), packets, walker, clock.now, io);
            }
            io.discard(meta);
            reorder.discard(id);
        }
        self.count(outcome, packets);
    }

    /// Counts `packets` packets with this outcome.
    #[inline]
    pub(crate) fn count(&mut self, outcome: Outcome, packets: u32) {
        *match outcome {
            Outcome::Passed => &mut self.totals.stats.passed,
            Outcome::Dropped(reason) => &mut self.totals.drops[reason],
            Outcome::Rejected(_) => &mut self.totals.stats.rejected,
        } += u64::from(packets);
    }

    /// Sends the decided packets of the reorder buffer that follow no waiting packet of their bucket.
    pub(crate) fn flush(&mut self) -> Result<(), E::Error> {
        let Self { reorder, burst, io, .. } = self;
        reorder.flush(|held| transmit(io, held.borrowed(), bytes(held, burst.as_ref()), &held.meta))
    }
}

/// Hands a packet that passed to the egress. `index` is its position in the burst, if its bytes are those of the burst.
#[inline]
fn transmit<E: PacketIo>(
    io: &mut E,
    index: Option<usize>,
    frame: &[u8],
    meta: &Meta,
) -> Result<(), E::Error> {
    match (meta.egress, index) {
        (Egress::Local, _) => {
            io.deliver_local(frame, meta);
            Ok(())
        }
        (_, Some(index)) => io.send_borrowed(index, frame, meta),
        (_, None) => io.send(frame, meta),
    }
}

/// Logs a packet that was dropped before its egress.
#[cold]
fn log_drop(
    (drop_log, walker): (&mut DropLog, &mut Walker),
    reason: DropReason,
    (frame, meta): (&[u8], &Meta),
    ctx: &PacketCtx,
    now: Time,
) {
    let way = if ctx.outbound { (Dir::Out, ctx.egress.port()) } else { (Dir::In, Some(ctx.arrival)) };
    let rule = ctx.walk.rule().filter(|_| reason.is_decision());
    let entry = || drop_log::entry(reason, rule, (frame, meta), way, now);
    drop_log.put(reason, ctx.packets.into(), now, entry, walker.log());
}

fn may_be_answered(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Rejected(_) | Outcome::Dropped(DropReason::NoRoute | DropReason::TtlExceeded))
}
