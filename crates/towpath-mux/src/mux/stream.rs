//! Messages that are delivered in parts ([`crate::assembler::Limits::part`]).
//!
//! What: the first part is a message with [`Message::more`], which the scheduler gives to a worker like any other. The message is begun
//! when the worker has done this part ([`Mux::part_done`]). Then the worker gets the other parts ([`Mux::next_part`]) as they arrive,
//! [`AHEAD`] at a time, and no other worker gets any. Between two parts the worker does not hold the message: it gets others.
//!
//! Invariants:
//! - A message in parts counts as one message, until it is done.
//! - A message that is begun is never given again. If its worker ends, it is given up, and its connection ends, unless that worker had
//!   the last part and answered.
//! - The last thing that a worker gets of a message is its last part, or [`PartKind::Cut`]: its connection ended before.
//! - Parts that no worker has done count as memory of messages. Above [`Config::stream_bytes`](super::Config::stream_bytes) the connection is not read.

use std::collections::VecDeque;

use bytes::Bytes;

use super::config::Bound;
use super::event::{Cause, Event};
use super::message::{Message, Ticket};
use super::psock::{self, Psock};
use super::worker::{self, InHand, Worker};
use super::{Mux, Order, View};
use crate::Time;

/// Number of parts of a message that a worker has at a time.
const AHEAD: usize = 4;

/// Which part of a message this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartKind {
    /// Others follow.
    More,
    /// The last part.
    Last,
    /// The connection ended before the last part: none follows. Without bytes.
    Cut,
}

/// A part of a message, after the first one.
#[derive(Clone, Debug)]
pub struct MessagePart {
    message: Message,
    /// The position of the part: another one follows, it is the last one, or the message was cut.
    pub kind: PartKind,
}

impl MessagePart {
    /// The part with the ticket, mark and hash of its message.
    pub fn view(&self) -> View<'_> {
        View { more: self.kind == PartKind::More, ..self.message.view() }
    }
}

/// The bytes of a part that no worker has.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) bytes: Bytes,
    pub(super) trim: usize,
    /// Bytes charged for it.
    pub(super) charge: usize,
}

/// A message in parts, from its first part until it is done or discarded.
#[derive(Debug)]
pub(super) struct Stream {
    /// Number of the message in its connection.
    number: u64,
    /// The worker that has begun it.
    worker: Option<worker::Id>,
    /// Parts that the worker does not have.
    pieces: VecDeque<Piece>,
    /// Bytes charged for each part that it has.
    given: VecDeque<usize>,
    /// Bytes charged for all of them.
    bytes: usize,
    /// Above [`super::Config::stream_bytes`].
    full: bool,
    end: End,
    /// The worker has the last part, or was told that none follows.
    over: bool,
    /// In [`Worker::feed`].
    queued: bool,
}

/// How far a message has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Open,
    Complete,
    Cut,
}

impl Stream {
    pub(super) const fn new(number: u64) -> Self {
        Self {
            number,
            worker: None,
            pieces: VecDeque::new(),
            given: VecDeque::new(),
            bytes: 0,
            full: false,
            end: End::Open,
            over: false,
            queued: false,
        }
    }

    /// Returns the worker that a part may be given to now, once until [`Stream::next`].
    fn feed(&mut self) -> Option<worker::Id> {
        let some = !self.pieces.is_empty() || self.end == End::Cut;
        let gives = some && !self.over && !self.queued && self.given.len() < AHEAD;
        let worker = self.worker.filter(|_| gives)?;
        self.queued = true;
        Some(worker)
    }

    /// The next part.
    fn next(&mut self) -> Option<(Bytes, usize, PartKind)> {
        self.queued = false;
        let Some(Piece { bytes, trim, charge }) = self.pieces.pop_front() else {
            self.over = self.end == End::Cut;
            return self.over.then(|| (Bytes::new(), 0, PartKind::Cut));
        };
        self.given.push_back(charge);
        self.over = self.end == End::Complete && self.pieces.is_empty();
        Some((bytes, trim, if self.over { PartKind::Last } else { PartKind::More }))
    }
}

impl Psock {
    fn stream(&mut self, number: u64) -> Option<&mut Stream> {
        let at = self.streams.binary_search_by_key(&number, |stream| stream.number).ok()?;
        self.streams.get_mut(at)
    }

    /// Returns true if a message arrives in parts and its last part has not.
    fn is_receiving(&self) -> bool {
        self.streams.back().is_some_and(|stream| stream.end == End::Open)
    }

    /// Number of the first message in parts whose worker does not have its last part; `u64::MAX` without one.
    pub(super) fn first_waiting_stream(&self) -> u64 {
        self.streams.iter().find(|stream| !stream.over).map_or(u64::MAX, |stream| stream.number)
    }

    /// Returns true if so many bytes of the message wait that the connection is not read.
    pub(super) fn stream_full(&self) -> bool {
        self.streams.back().is_some_and(|stream| stream.full)
    }

    pub(super) fn fill_stream(&mut self, bound: Bound) {
        if let Some(stream) = self.streams.back_mut() {
            stream.full = bound.is_full(stream.full, stream.bytes);
        }
    }
}

impl Worker {
    /// Returns true if it has this message, and it is one in parts.
    pub(super) fn has_stream(&self, ticket: Ticket) -> bool {
        let first = |held: &InHand| held.message.ticket == ticket && held.message.more;
        self.streams.contains_key(&ticket) || self.in_hand.iter().any(first)
    }
}

impl Mux {
    /// Returns the next part for this worker, of the messages whose first part it has done. Messages take turns.
    pub fn next_part(&mut self, id: worker::Id) -> Option<MessagePart> {
        loop {
            let worker = self.workers.get_mut(id)?;
            let ticket = worker.feed.pop_front()?;
            let Some(held) = worker.streams.get(&ticket) else { continue };
            let message = held.message.clone();
            let stream = self.psocks.get_mut(ticket.psock).and_then(|psock| psock.stream(ticket.number));
            let Some(stream) = stream else { continue };
            let next = stream.next();
            self.feed(ticket);
            if let Some((bytes, trim, kind)) = next {
                if kind != PartKind::More && self.config.order == Order::Sticky {
                    self.pin(ticket.psock);
                }
                return Some(MessagePart { message: Message { bytes, trim, skip: 0, ..message }, kind });
            }
        }
    }

    /// Returns true if [`Mux::next_part`] has a part for this worker.
    pub fn has_part(&self, id: worker::Id) -> bool {
        self.workers.get(id).is_some_and(|worker| !worker.feed.is_empty())
    }

    /// The worker has done a part of this message, which is not the last one. The message is begun. Returns false if the worker does not
    /// have it.
    pub fn part_done(&mut self, id: worker::Id, ticket: Ticket, now: Time) -> bool {
        self.now = self.now.max(now);
        let Some(worker) = self.workers.get_mut(id) else { return false };
        let charge = if worker.streams.contains_key(&ticket) {
            let stream = self.psocks.get_mut(ticket.psock).and_then(|psock| psock.stream(ticket.number));
            let Some(stream) = stream else { return false };
            let Some(charge) = stream.given.pop_front() else { return false };
            stream.bytes -= charge;
            charge
        } else {
            if !worker.has_stream(ticket) {
                return false;
            }
            let Some(mut held) = worker.take(ticket) else { return false };
            let charge = std::mem::take(&mut held.message.charge);
            held.message.bytes = Bytes::new();
            (held.message.skip, held.message.trim) = (0, 0);
            worker.streams.insert(ticket, held);
            if let Some(stream) =
                self.psocks.get_mut(ticket.psock).and_then(|psock| psock.stream(ticket.number))
            {
                stream.worker = Some(id);
            }
            charge
        };
        self.release_part(ticket.psock, charge);
        self.feed(ticket);
        self.settle(ticket.psock);
        true
    }

    /// A part has arrived. Its bytes are charged as those of a message.
    pub(super) fn receive_part(&mut self, id: psock::Id, piece: Piece, last: bool) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        psock.stats.rx_bytes += piece.bytes.len() as u64;
        psock.memory += piece.charge;
        let Some(stream) = psock.streams.back_mut() else { return };
        stream.bytes += piece.charge;
        stream.pieces.push_back(piece);
        if last {
            stream.end = End::Complete;
        }
        let number = stream.number;
        self.feed(Ticket { psock: id, number });
    }

    /// Queues the message at its worker if a part may be given.
    fn feed(&mut self, ticket: Ticket) {
        let stream = self.psocks.get_mut(ticket.psock).and_then(|psock| psock.stream(ticket.number));
        if let Some(id) = stream.and_then(Stream::feed)
            && let Some(worker) = self.workers.get_mut(id)
        {
            worker.feed.push_back(ticket);
        }
    }

    /// These bytes of parts are not kept any more.
    fn release_part(&mut self, id: psock::Id, charge: usize) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        psock.memory -= charge;
        self.memory.remove_message(charge);
        self.recount(charge, 0);
    }

    /// The connection is not read any more: if a message has not arrived completely, its worker is told, and gets no more of it.
    pub(super) fn cut_stream(&mut self, id: psock::Id) {
        let Some(psock) = self.psocks.get_mut(id).filter(|psock| psock.is_receiving()) else { return };
        psock.then = None;
        let Some(stream) = psock.streams.back_mut() else { return };
        let charge = stream.pieces.drain(..).map(|piece| piece.charge).sum();
        stream.bytes -= charge;
        stream.end = End::Cut;
        let number = stream.number;
        self.counters.totals.streams_cut += 1;
        self.release_part(id, charge);
        self.feed(Ticket { psock: id, number });
    }

    /// Closes a connection; while a message arrives in parts, after it.
    pub(super) fn close_soon(&mut self, id: psock::Id, cause: Cause, hand_back: bool) {
        if let Some(psock) = self.psocks.get_mut(id).filter(|psock| psock.is_open()) {
            match psock.is_receiving() {
                true => drop(psock.then.get_or_insert((cause, hand_back))),
                false => self.close(id, cause, hand_back),
            }
        }
        self.settle(id);
    }

    /// The message has arrived after which the connection is to be closed.
    pub(super) fn close_then(&mut self, id: psock::Id) {
        if let Some(psock) = self.psocks.get_mut(id).filter(|psock| !psock.is_receiving())
            && let Some((cause, hand_back)) = psock.then.take()
        {
            self.close(id, cause, hand_back);
        }
    }

    /// Returns true if a worker has the last part of this message.
    pub(super) fn is_stream_given(&mut self, ticket: Ticket) -> bool {
        let stream = self.psocks.get_mut(ticket.psock).and_then(|psock| psock.stream(ticket.number));
        stream.is_some_and(|stream| stream.over && stream.end == End::Complete)
    }

    /// The message is done or discarded: releases its parts.
    pub(super) fn drop_stream(&mut self, ticket: Ticket) {
        let Some(psock) = self.psocks.get_mut(ticket.psock) else { return };
        let Ok(at) = psock.streams.binary_search_by_key(&ticket.number, |stream| stream.number) else {
            return;
        };
        let Some(stream) = psock.streams.remove(at) else { return };
        self.release_part(ticket.psock, stream.bytes);
    }

    /// The worker has done a message in parts. `first`: it has not done the first part. The connection of a message that it did not get
    /// completely is reset.
    pub(super) fn done_stream(&mut self, id: worker::Id, ticket: Ticket, first: Option<InHand>) -> bool {
        let held = first.or_else(|| self.workers.get_mut(id)?.streams.remove(&ticket));
        let Some(held) = held else { return false };
        let stream = self.psocks.get_mut(ticket.psock).and_then(|psock| psock.stream(ticket.number));
        if stream.is_some_and(|stream| !stream.over && stream.end != End::Cut) {
            self.abort(ticket.psock, Cause::ResetByWorker);
        }
        self.counters.totals.in_hand -= 1;
        self.counters.totals.done += 1;
        self.release(ticket.psock, 1);
        self.finish(&held.message);
        self.check_left(id);
        true
    }

    /// The worker of a message in parts has ended. The message is never given again. Its connection ends, unless it has already.
    pub(super) fn give_up_stream(&mut self, message: Message, quietly: bool) {
        let ticket = message.ticket;
        let stream = self.psocks.get_mut(ticket.psock).and_then(|psock| psock.stream(ticket.number));
        let cut = stream.is_none_or(|stream| stream.end == End::Cut);
        self.counters.totals.in_hand -= 1;
        self.counters.totals.undone += 1;
        self.counters.totals.streams_undone += 1;
        self.release(ticket.psock, 1);
        if !cut {
            self.abort(ticket.psock, Cause::WorkerEnded);
        }
        self.finish(&message);
        if !quietly {
            self.events.push_back(Event::Undone(message));
        }
    }
}
