//! Frames for a worker process: messages, parts, ended events and notices of unsent messages.

use std::sync::Arc;

use towpath_mux::Time;
use towpath_mux::mux::{Batch, Mux, PartKind, psock};
use towpath_ring::{Kind, Meta, ReserveError};

use super::{Process, RX};
use crate::worker_pool::completions::{Completions, UnsentQueue};
use crate::worker_pool::connections::{Connections, EndedEvent};
use crate::worker_pool::frame::{
    FrameMessages, Out, Stream, messages, part, pass, pieces, place, send_first, send_part,
};

/// Maximum number of bytes of parts in its RX area, so that there is space for messages.
const PARTS: usize = RX as usize / 2;
/// Maximum number of notices of unsent messages and of ended events that it holds.
const NOTICES: usize = 64;

impl Process {
    /// Takes messages from the core until it holds `most`. Returns true if there are messages to publish.
    pub(in crate::worker_pool) fn fill(&mut self, mux: &mut Mux, now: Time, most: usize) -> bool {
        let Some(id) = self.id.filter(|_| self.has_room() && self.working < most) else { return false };
        let events = self.wants_events();
        loop {
            let count = mux.poll_batches(id, most, now, &mut self.batch);
            for batch in self.batch.drain(..) {
                match batch.first() {
                    // A worker without events has no use for it.
                    Some(opened) if batch.is_opened() && !events => drop(mux.done(id, opened, now)),
                    _ => self.waiting.push_back(batch),
                }
            }
            if count == 0 || !self.waiting.is_empty() {
                return !self.waiting.is_empty();
            }
        }
    }

    /// Returns true if the core has a part for it and there is space.
    pub(in crate::worker_pool) fn takes_part(&self, mux: &Mux) -> bool {
        self.part_bytes < PARTS && self.parts.is_empty() && self.id.is_some_and(|id| mux.has_part(id))
    }

    /// Takes parts of messages from the core. Returns true if there are any to publish.
    pub(in crate::worker_pool) fn feed(&mut self, mux: &mut Mux) -> bool {
        let Some(id) = self.id.filter(|_| self.takes_part(mux)) else { return false };
        while self.part_bytes < PARTS
            && let Some(part) = mux.next_part(id)
        {
            self.part_bytes += part.view().bytes().len();
            self.parts.push_back(part);
        }
        !self.parts.is_empty()
    }

    /// Returns true if it asked for connection events.
    pub(in crate::worker_pool) fn wants_events(&self) -> bool {
        self.channel.as_ref().is_some_and(|channel| channel.wants_events())
    }

    /// A connection has ended, and all of its messages are done.
    pub(in crate::worker_pool) fn handle_ended(&mut self, connection: psock::Id, ended: &Arc<EndedEvent>) {
        if self.wants_events() && self.authority.received(connection) {
            self.ended.push_back(Arc::clone(ended));
        }
        self.authority.revoke(connection);
    }

    /// Publishes ended events, as far as there is space.
    pub(in crate::worker_pool) fn report_ended(&mut self) {
        let Some(channel) = &mut self.channel else { return };
        let mut reported = false;
        while let Some(ended) = self.ended.front()
            && self.notices.len() < NOTICES
            && let Ok(seq) = channel.send(&ended.payload, &ended.meta)
        {
            self.notices.push_back(seq);
            self.ended.pop_front();
            reported = true;
        }
        if reported {
            channel.kick();
        }
    }

    /// Publishes notices of unsent messages, as far as there is space.
    fn report_unsent(&mut self, unsent: &mut UnsentQueue) {
        let (Some(channel), Some(id)) = (&mut self.channel, self.id) else { return };
        let mut reported = false;
        unsent.retain(|unsent| {
            if unsent.worker.is_some_and(|worker| worker != id) || self.notices.len() >= NOTICES {
                return true;
            }
            let (port, group) = unsent.to.map_or((0, 0), psock::Id::parts);
            let mark = unsent.error.errno().unsigned_abs();
            match channel
                .send(&unsent.bytes, &Meta { kind: Kind::ERROR, port, group, mark, ..Meta::default() })
            {
                Ok(seq) => self.notices.push_back(seq),
                // The loss was counted before.
                Err(ReserveError::TooLarge) => return false,
                Err(_) => return true,
            }
            reported = true;
            false
        });
        if reported {
            channel.kick();
        }
    }

    /// Publishes waiting messages.
    pub(in crate::worker_pool) fn hand_over(
        &mut self,
        completions: &mut Completions,
        connections: &Connections,
        now: u64,
        epoch: u64,
    ) {
        if !self.ended.is_empty() {
            self.report_ended();
        }
        if !completions.unsent.is_empty() {
            self.report_unsent(&mut completions.unsent);
        }
        let (Some(channel), Some(id)) = (&mut self.channel, self.id) else { return };
        if self.waiting.is_empty() && self.parts.is_empty() && !std::mem::take(&mut self.gave_room) {
            return;
        }
        let (most, mut published) = (channel.batch_max(), false);
        // Before messages: a later message of the connection may be among these.
        while let Some(part) = self.parts.front() {
            let (ticket, bytes) = (part.view().ticket(), part.view().bytes().len());
            let stream = self.streams.entry(ticket).or_default();
            let Ok(seq) = send_part(channel, part, stream.parts + 1, epoch) else { break };
            published = true;
            stream.parts += 1;
            let held = Out {
                part: Some((part.kind, bytes)),
                ..Out::new(FrameMessages { first: ticket, count: 1 }, now)
            };
            self.parts.pop_front();
            if self.out.is_empty() {
                self.first = seq;
            }
            while place(self.first, seq).is_some_and(|at| at > self.out.len()) {
                self.out.push_back(None);
            }
            self.out.push_back(Some(held));
            if self.working == 0 {
                (self.progress, self.moves) = (now, false);
            }
            self.working += 1;
        }
        while let Some((first, ticket)) = self.waiting.front().and_then(|run| Some((run, run.first()?))) {
            let mut count = messages(&self.waiting, most);
            let sent = match count {
                1 if first.is_opened() => {
                    let (meta, payload) = connections.opened(first, epoch);
                    channel.send(&payload, &meta)
                }
                1 => send_first(channel, first, epoch),
                _ => {
                    let (port, group) = ticket.psock.parts();
                    let parts = self.waiting.iter().flat_map(Batch::views).take(count).map(part);
                    let meta = Meta { time: epoch, port, group, ..Meta::default() };
                    match channel.send_batch_of(parts, pieces(&self.waiting, count), &meta) {
                        // No contiguous space for all of them: publish the first one alone, in its own area
                        // if necessary.
                        Err(ReserveError::NoContiguousSpace | ReserveError::TooLarge) => {
                            count = 1;
                            send_first(channel, first, epoch)
                        }
                        sent => sent,
                    }
                }
            };
            match sent {
                Ok(seq) => {
                    published = true;
                    if self.out.is_empty() {
                        self.first = seq;
                    }
                    // Unknown sequence numbers do not exist today and are ignored.
                    while place(self.first, seq).is_some_and(|at| at > self.out.len()) {
                        self.out.push_back(None);
                    }
                    let messages = FrameMessages { first: ticket, count: count as u32 };
                    self.authority.grant(ticket.psock);
                    let mut held = Out::new(messages, now);
                    if first.more() {
                        let bytes = first.bytes(1).len();
                        held.part = Some((PartKind::More, bytes));
                        self.part_bytes += bytes;
                        self.streams.insert(ticket, Stream { parts: 1, ..Stream::default() });
                    }
                    self.out.push_back(Some(held));
                    if self.working == 0 {
                        (self.progress, self.moves) = (now, false);
                    }
                    self.working += count;
                }
                Err(ReserveError::TooLarge) => {
                    tracing::warn!("{:?}: a message is larger than a worker can be given", ticket.psock);
                    completions.refused.push((id, ticket));
                }
                Err(_) => break,
            }
            pass(&mut self.waiting, count);
        }
        match published {
            true => channel.kick(),
            false => channel.kick_for_room(),
        }
    }
}
