//! A packet as it comes: looked at, taken through the rules as far as it gets, and sent, ended, or kept in the window.

use towpath_gate::Edits;
use towpath_wire::{self as wire, Packet, Time};

use super::path::{Kind, Next, Progress, advance, apply, begins, follow, obey};
use super::{Edge, Engine, Meta};
use crate::window::Ticket;

impl<E: Edge> Engine<E> {
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
            self.edge.discard(&meta);
            return Ok(());
        };
        if !self.live {
            self.conversations.observe(packet);
        }
        let (arrival, way) = self.arrivals.of(packet, meta.interface);
        let mut progress = Progress::new(arrival, way);
        // Without a queue and with nobody to overtake, most packets need no place.
        let placed = !self.queues.is_empty() || !self.window.is_empty();
        if placed {
            progress.place(packet);
        }
        if self.window.waiting() > 0 {
            let bucket = progress.bucket();
            if self.live && self.continuing[bucket] > 0 {
                self.put_aside(index, frame, meta, progress);
                return Ok(());
            }
            while self.continuing[bucket] > 0 {
                self.wait()?;
            }
        }
        let Self { walker, clock, by_states, .. } = self;
        let known = fetched.and_then(|at| walker.try_step(at, &mut progress.walk, *clock));
        let next = match known {
            Some(step) => {
                *by_states = true;
                follow(step, walker, packet, &mut progress, *clock)
            }
            None => advance(walker, packet, &mut progress, *clock),
        };
        match self.follow_rulings(packet, &mut progress, next) {
            Next::Out => return self.out(index, frame, meta, &progress),
            Next::Gone(fate) => {
                self.count(fate, 1);
                if !self.traces.is_empty() {
                    let Self { traces, walker, totals, .. } = self;
                    let place = (totals.packets, arrival.0.into());
                    traces.tell(place, (frame, &meta), &progress.walk, Some(fate), walker);
                }
                if let Some(reject) = fate.answer(packet, self.walker.ports().addresses(arrival)) {
                    let Self { replies, walker, clock, edge, .. } = self;
                    replies.answer(reject, packet, (arrival, &meta), 1, walker, *clock, edge);
                }
                self.edge.discard(&meta);
            }
            _ if self.live && !self.window.has_room() => self.overrun(&meta),
            next => {
                if !placed {
                    progress.place(packet);
                }
                let ticket = self.push(index, frame, meta, progress);
                self.drive(ticket, next);
            }
        }
        if self.live {
            return Ok(());
        }
        while !self.backlog.is_empty() || !self.window.has_room() {
            self.wait()?;
        }
        Ok(())
    }

    fn out(
        &mut self,
        index: usize,
        frame: &[u8],
        mut meta: Meta,
        progress: &Progress,
    ) -> Result<(), E::Error> {
        (meta.out, meta.hop) = (progress.out, progress.hop);
        let (edits, lane) = (progress.walk.edits(), self.lane(progress));
        let clear = self.window.is_clear(lane);
        if self.live && !clear && !self.window.has_room() {
            self.overrun(&meta);
            return Ok(());
        }
        self.totals.passed += 1;
        if !self.traces.is_empty() {
            let Self { traces, walker, totals, .. } = self;
            let place = (totals.packets, progress.arrival.0.into());
            traces.tell(place, (frame, &meta), &progress.walk, None, walker);
        }
        if clear && edits == Edits::default() {
            return self.edge.pass(index, frame, &meta);
        }
        let Self { scratch, window, edge, .. } = self;
        scratch.clear();
        scratch.extend_from_slice(frame);
        apply(edits, scratch, &mut meta);
        if clear {
            return edge.send(scratch, &meta);
        }
        window.push_passed(scratch, meta, lane);
        while !self.live && !self.window.has_room() {
            self.wait()?;
        }
        Ok(())
    }

    /// The packet's lane in the window.
    fn lane(&self, progress: &Progress) -> u16 {
        if self.live { progress.bucket() as u16 } else { 0 }
    }

    /// There is no room to keep a packet until it is decided.
    fn overrun(&mut self, meta: &Meta) {
        self.totals.no_room += 1;
        self.totals.dropped += 1;
        self.edge.discard(meta);
    }

    /// Keeps a packet until those before it in its flow have met the rules.
    fn put_aside(&mut self, index: usize, frame: &[u8], meta: Meta, mut progress: Progress) {
        if !self.window.has_room() {
            return self.overrun(&meta);
        }
        let bucket = progress.bucket();
        self.continuing[bucket] += 1;
        progress.bucket = Some(bucket);
        progress.aside = true;
        self.push(index, frame, meta, progress);
    }

    /// Puts a packet that waits into the window.
    fn push(&mut self, index: usize, frame: &[u8], meta: Meta, progress: Progress) -> Ticket {
        let lane = self.lane(&progress);
        match self.came {
            Some(_) => self.window.push_lent(index, frame.len(), meta, progress, lane),
            None => self.window.push_waiting(frame, meta, progress, lane),
        }
    }

    /// What comes next for a packet where an inspector has decided about its flow: it does not go to the queue.
    fn follow_rulings(&mut self, packet: &Packet<'_>, progress: &mut Progress, mut next: Next) -> Next {
        while let Next::Queue(number, kind @ (Kind::Inspect | Kind::Divert)) = next {
            let queue = self.queues.iter_mut().find(|queue| queue.number() == number && queue.has_rulings());
            let ruling = queue.and_then(|queue| queue.ruling(&packet.flow()?, begins(packet), self.clock));
            let Some(ruling) = ruling else { break };
            next = obey(ruling, &mut self.walker, packet, progress, kind, self.clock);
        }
        next
    }
}
