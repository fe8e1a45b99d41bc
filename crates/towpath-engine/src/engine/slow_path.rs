//! What becomes of the packets in the window: handed to a queue, decided, sent on through the rules, put together, ended.
//!
//! What: `drive` takes a packet as far as it gets without waiting. What it then waits for is in the window
//! (`Wait`), and `settle`, `retry` and `reassemble` go on from there.

use std::sync::Arc;

use towpath_gate::reassembly::Added;
use towpath_gate::{Dir, Edits, Walk};
use towpath_port::{Burst, Checksum};
use towpath_wire::{self as wire, Packet, checksum};

use super::path::{Decision, Fate, Kind, Next, Settled, Wait, apply, begins, detoured, goes_on, label, obey};
use super::{Edge, Engine, Meta};
use crate::queue::{DefaultVerdict, Offer, Queue};
use crate::window::{Stored, Ticket};

/// What came of offering a packet to a queue.
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

impl<E: Edge> Engine<E> {
    /// Acts on a decision about a packet that waits.
    pub(super) fn settle(&mut self, ticket: Ticket, decision: Settled) {
        let Some((stored, progress)) = self.window.waiting_mut(ticket) else { return };
        let Settled { outcome, mark: (mark, mask), ruling } = decision;
        progress.set_mark(mark, mask);
        if let Some(ruling) = ruling
            && let Ok(packet) = parse(stored, self.came.as_ref())
            && let Some(flow) = packet.flow()
        {
            self.queues[progress.wait.queue].rule(&flow, ruling, self.clock);
        }
        let next = match outcome {
            Decision::Repeat | Decision::Queue(_) if detoured(progress) => Next::Gone(Fate::Dropped),
            Decision::Gone(fate) => Next::Gone(fate),
            Decision::Pass => self.step(ticket),
            Decision::Repeat => {
                progress.walk = Walk::new(Dir::In, Some(progress.arrival), None);
                progress.leaving = false;
                progress.out = None;
                progress.wait.kind = Kind::Divert;
                self.step(ticket)
            }
            Decision::Replace(mut bytes) => {
                let had = self::bytes(stored, self.came.as_ref()).len();
                stored.meta.wire_len = replaced(&stored.meta, had, &bytes);
                // An inspector changes bytes; that the checksums fit them again is our work. Where it cannot be done
                // (a fragment, a packet that was cut short, a protocol we do not know) the inspector's own stand.
                checksum::fill(stored.meta.link, &mut bytes, stored.meta.wire_len);
                stored.meta.changed = true;
                stored.meta.port.offload.checksum = Checksum::Unverified;
                self.window.replace(ticket, &bytes);
                self.step(ticket)
            }
            // A queue that neither rules nor the command line know: an inspector's word does not make one.
            Decision::Queue(number) if !self.queues.iter().any(|queue| queue.number() == number) => {
                match self.unserved.default {
                    DefaultVerdict::Pass => self.step(ticket),
                    DefaultVerdict::Drop => Next::Gone(Fate::Dropped),
                }
            }
            Decision::Queue(number) => Next::Queue(number, progress.wait.kind),
            // Once: a packet that kills its inspector shall not kill them all.
            Decision::Orphan if progress.orphaned => match self.queues[progress.wait.queue].abandon() {
                DefaultVerdict::Pass => self.step(ticket),
                DefaultVerdict::Drop => Next::Gone(Fate::Dropped),
            },
            Decision::Orphan => {
                progress.orphaned = true;
                Next::Queue(self.queues[progress.wait.queue].number(), progress.wait.kind)
            }
        };
        self.drive(ticket, next);
    }

    /// The packet of `ticket` may go on: what comes next on its path.
    fn step(&mut self, ticket: Ticket) -> Next {
        let Self { window, came, walker, clock, .. } = self;
        let Some((stored, progress)) = window.waiting_mut(ticket) else { return Next::Gone(Fate::Dropped) };
        // Nothing of it has changed, and what comes next does not depend on what it is.
        if !stored.meta.changed && progress.ends() {
            return Next::Out;
        }
        let Ok(packet) = parse(stored, came.as_ref()) else {
            // It parsed when it came: an inspector has put something malformed in its place.
            return Next::Gone(Fate::Dropped);
        };
        progress.look(&packet);
        goes_on(walker, &packet, progress, progress.wait.kind, *clock)
    }

    /// Takes the packet of `ticket` along its path until it is decided or somebody holds it.
    pub(super) fn drive(&mut self, mut ticket: Ticket, mut next: Next) {
        loop {
            next = match next {
                Next::Out => return self.end(ticket, None),
                Next::Gone(fate) => return self.end(ticket, Some(fate)),
                Next::Queue(number, kind) => {
                    let queue = self.queue_index(number);
                    self.set_wait(ticket, Wait { queue, kind, since: None });
                    match self.ruled(ticket, kind) {
                        Some(next) => next,
                        None => match self.offer_in_turn(ticket) {
                            // A copy never slows a live packet.
                            Handed::Full if self.live && kind == Kind::Tee => match self.skip_copy(ticket) {
                                Some(next) => next,
                                None => return,
                            },
                            Handed::Full => return self.put_off(ticket, queue, kind),
                            handed => match self.act(ticket, handed) {
                                Some(next) => next,
                                None => return,
                            },
                        },
                    }
                }
                Next::Reassemble => match self.reassemble(ticket) {
                    Some(whole) => {
                        ticket = whole;
                        self.step(ticket)
                    }
                    None => return,
                },
            }
        }
    }

    /// What comes next after a packet was offered; nothing while an inspector has it.
    fn act(&mut self, ticket: Ticket, handed: Handed) -> Option<Next> {
        match handed {
            Handed::Held | Handed::Full => None,
            Handed::On => Some(self.step(ticket)),
            Handed::Dropped => Some(Next::Gone(Fate::Dropped)),
            Handed::Other(number) => {
                let (_, progress) = self.window.waiting_mut(ticket)?;
                let kind = progress.wait.kind;
                match detoured(progress) {
                    false => Some(Next::Queue(number, kind)),
                    true if kind == Kind::Tee => Some(self.step(ticket)),
                    true => Some(Next::Gone(Fate::Dropped)),
                }
            }
        }
    }

    /// What comes next for a packet that waits, where an inspector has decided about its flow.
    fn ruled(&mut self, ticket: Ticket, kind: Kind) -> Option<Next> {
        let (stored, progress) = self.window.waiting_mut(ticket)?;
        if kind == Kind::Tee || !self.queues[progress.wait.queue].has_rulings() {
            return None;
        }
        let packet = parse(stored, self.came.as_ref()).ok()?;
        let flow = packet.flow()?;
        let ruling = self.queues[progress.wait.queue].ruling(&flow, begins(&packet), self.clock)?;
        Some(obey(ruling, &mut self.walker, &packet, progress, kind, self.clock))
    }

    /// The packet waits for room.
    fn put_off(&mut self, ticket: Ticket, queue: usize, kind: Kind) {
        self.set_wait(ticket, Wait { queue, kind, since: Some(self.wall) });
        match self.queues[queue].enqueue(ticket) {
            Ok(None) => {}
            Ok(Some(oldest)) => self.end(oldest, Some(Fate::Dropped)),
            Err(ticket) if self.live => self.queues[queue].put_off(ticket),
            Err(ticket) => self.backlog.push_back(ticket),
        }
    }

    /// Offers a packet to its queue, behind those that wait for room there.
    fn offer_in_turn(&mut self, ticket: Ticket) -> Handed {
        let Some((_, progress)) = self.window.waiting_mut(ticket) else { return Handed::Dropped };
        let queue = &self.queues[progress.wait.queue];
        if self.live && queue.next_in_backlog().is_some() { Handed::Full } else { self.offer(ticket) }
    }

    /// The packet goes on without its copy.
    fn skip_copy(&mut self, ticket: Ticket) -> Option<Next> {
        let (stored, progress) = self.window.waiting_mut(ticket)?;
        let queue = &mut self.queues[progress.wait.queue];
        queue.skip(&label(&stored.meta, progress), stored.meta.interface);
        Some(self.step(ticket))
    }

    /// Gives a fragment to the reassembler. If that made its datagram whole, and nothing of its flow is before it, the datagram
    /// goes on.
    fn reassemble(&mut self, ticket: Ticket) -> Option<Ticket> {
        let Self { window, came, reassembler, clock, .. } = self;
        let (stored, progress) = window.waiting_mut(ticket)?;
        let Ok(packet) = parse(stored, came.as_ref()) else {
            self.end(ticket, Some(Fate::Dropped));
            return None;
        };
        let Added { whole, dropped } = reassembler.add(&packet, progress.parts, *clock);
        // From here on the reassembler counts the fragment, or the datagram does.
        progress.parts = whole.as_ref().map_or(0, |whole| whole.parts);
        progress.wait.kind = Kind::Divert;
        if let Some(whole) = &whole {
            stored.meta.wire_len = whole.frame.len() as u32;
            stored.meta.changed = true;
            stored.meta.port.offload = towpath_port::Offload::default();
            window.replace(ticket, &whole.frame);
        }
        self.count(Fate::Dropped, dropped);
        if whole.is_none() {
            self.end(ticket, Some(Fate::Dropped));
            return None;
        }
        self.join_flow(ticket)
    }

    /// A datagram is in its flow from when it is whole: its fragments' lane, but for the first one's, is another. Nothing when
    /// it has to wait for its turn there.
    fn join_flow(&mut self, ticket: Ticket) -> Option<Ticket> {
        let Self { window, came, continuing, .. } = self;
        let (stored, progress) = window.waiting_mut(ticket)?;
        let Ok(packet) = parse(stored, came.as_ref()) else {
            self.end(ticket, Some(Fate::Dropped));
            return None;
        };
        let before = progress.bucket();
        progress.place(&packet);
        let bucket = progress.bucket();
        if bucket == before {
            return Some(ticket);
        }
        if let Some(bucket) = progress.bucket.take() {
            continuing[bucket] -= 1;
        }
        if !self.live {
            return Some(ticket);
        }
        let waits = continuing[bucket] > 0;
        if waits {
            continuing[bucket] += 1;
            progress.bucket = Some(bucket);
            progress.aside = true;
        }
        let ticket = window.move_to(ticket, bucket as u16)?;
        (!waits).then_some(ticket)
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
        while let Some(&ticket) = self.backlog.front() {
            let Some(handed) = self.offer_again(ticket) else { break };
            self.backlog.pop_front();
            self.go_on(ticket, handed);
        }
        for queue in 0..self.queues.len() {
            while let Some(ticket) = self.queues[queue].next_in_backlog() {
                let Some(handed) = self.offer_again(ticket) else { break };
                self.queues[queue].leave_backlog();
                self.go_on(ticket, handed);
            }
        }
    }

    fn go_on(&mut self, ticket: Ticket, handed: Handed) {
        if let Some(next) = self.act(ticket, handed) {
            self.drive(ticket, next);
        }
    }

    /// Offers a packet that waits for room; nothing when it still has to wait.
    fn offer_again(&mut self, ticket: Ticket) -> Option<Handed> {
        let Some((_, progress)) = self.window.waiting_mut(ticket) else { return Some(Handed::Held) };
        let wait = progress.wait;
        match self.offer(ticket) {
            Handed::Full => {
                let (stored, progress) = self.window.waiting_mut(ticket)?;
                let queue = &mut self.queues[wait.queue];
                if self.wall.saturating_sub(wait.since.unwrap_or(self.wall)) <= queue.policy().deadline {
                    return None;
                }
                let verdict = queue.give_up(&label(&stored.meta, progress), stored.meta.interface);
                Some(match verdict {
                    DefaultVerdict::Drop if wait.kind != Kind::Tee => Handed::Dropped,
                    _ => Handed::On,
                })
            }
            handed => Some(handed),
        }
    }

    /// Offers a packet to the queue that it waits for.
    fn offer(&mut self, ticket: Ticket) -> Handed {
        let Some((stored, progress)) = self.window.waiting_mut(ticket) else { return Handed::Dropped };
        let Wait { queue, kind, .. } = progress.wait;
        let label = label(&stored.meta, progress);
        let answer_to = (kind != Kind::Tee).then_some(ticket);
        // Of a capture, the interface stands for the processor that the packet came on.
        let cpu = stored.meta.interface;
        let frame = bytes(stored, self.came.as_ref());
        let offer = self.queues[queue].offer(frame, &label, cpu, self.wall, answer_to);
        if matches!(offer, Offer::Held | Offer::Copied) && !std::mem::replace(&mut progress.inspected, true) {
            self.totals.inspected += u64::from(progress.parts);
        }
        match offer {
            Offer::Full => Handed::Full,
            Offer::Queue(number) => Handed::Other(number),
            Offer::Held if kind != Kind::Tee => Handed::Held,
            Offer::Lost(DefaultVerdict::Drop) if kind != Kind::Tee => Handed::Dropped,
            Offer::Held | Offer::Copied | Offer::Lost(_) => Handed::On,
        }
    }

    fn set_wait(&mut self, ticket: Ticket, wait: Wait) {
        let Self { window, came, continuing, walker, .. } = self;
        let Some((stored, progress)) = window.waiting_mut(ticket) else { return };
        progress.wait = wait;
        // The inspector sees what the rules have changed so far.
        change(progress.walk.edits(), stored, came.as_ref());
        let goes_on = wait.kind != Kind::Inspect || progress.walks_out(walker);
        if goes_on && progress.bucket.is_none() {
            let bucket = progress.bucket();
            continuing[bucket] += 1;
            progress.bucket = Some(bucket);
        }
    }

    /// The packet of `ticket` is decided: it passes when it has no fate.
    pub(super) fn end(&mut self, ticket: Ticket, fate: Option<Fate>) {
        let Some((stored, progress)) = self.window.waiting_mut(ticket) else { return };
        if let Some(bucket) = progress.bucket.take() {
            self.continuing[bucket] -= 1;
        }
        let parts = progress.parts;
        if !self.traces.is_empty() {
            let Self { traces, walker, totals, came, .. } = self;
            let place = (totals.packets, progress.arrival.0.into());
            let meta = Meta { out: progress.out, ..stored.meta };
            traces.tell(place, (bytes(stored, came.as_ref()), &meta), &progress.walk, fate, walker);
        }
        match fate {
            None => {
                change(progress.walk.edits(), stored, self.came.as_ref());
                (stored.meta.out, stored.meta.hop) = (progress.out, progress.hop);
                self.totals.passed += u64::from(parts);
                self.window.pass(ticket);
            }
            Some(fate) => {
                if fate != Fate::Dropped
                    && let Ok(packet) = parse(stored, self.came.as_ref())
                    && let Some(reject) =
                        fate.answer(&packet, self.walker.ports().addresses(progress.arrival))
                {
                    let came = (progress.arrival, &stored.meta);
                    let Self { replies, walker, clock, edge, .. } = self;
                    replies.answer(reject, &packet, came, parts, walker, *clock, edge);
                }
                let meta = stored.meta;
                self.edge.discard(&meta);
                self.count(fate, parts);
                self.window.discard(ticket);
            }
        }
    }
}

/// A waiting packet's bytes: its own, or those in the burst that it came with.
#[inline]
pub(super) fn bytes<'a>(stored: &'a Stored<Meta>, came: Option<&'a Arc<Burst>>) -> &'a [u8] {
    stored.bytes(|index| came.expect("its burst is being handled").frame(index).bytes)
}

#[inline]
pub(super) fn parse<'a>(
    stored: &'a Stored<Meta>,
    came: Option<&'a Arc<Burst>>,
) -> Result<Packet<'a>, wire::Malformed> {
    wire::parse(stored.meta.link, bytes(stored, came), stored.meta.wire_len)
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
fn change(edits: Edits, stored: &mut Stored<Meta>, came: Option<&Arc<Burst>>) {
    if edits != Edits::default() {
        let burst = |index| came.expect("its burst is being handled").frame(index).bytes;
        let (frame, meta) = stored.parts_mut(burst);
        apply(edits, frame, meta);
    }
}

#[cfg(test)]
mod tests {
    use towpath_port::Queued;
    use towpath_wire::Link;

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
                link: Link::Ip,
                link_type: 101,
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
