//! From bytes to messages that wait for a worker.

use std::fmt;

use bytes::Bytes;

use super::batch::Batch;
use super::event::{Cause, Event};
use super::message::{Message, Ticket};
use super::pool::Pool;
use super::psock::{self, Psock};
use super::{Mux, Order, worker};
use crate::Time;
use crate::assembler::{self, Assembler, Limits};
use crate::framing::{self, Framing, State};

/// From this many bytes of an unfinished message on, the rest is read behind them rather than into a spare buffer.
const LARGE: usize = 16 << 10;
/// Messages that are this part of their buffer or more keep it; of others a copy is made.
const KEEP: usize = 4;
/// A read that was given too little room is followed by one with twice as much, up to so many times [`super::Config::read`].
const WIDE: usize = 4;
/// The most that one read is given room for, when a message is known to be that long.
const READ_MOST: usize = 1 << 20;

/// Messages of a read that room to note them is kept for.
const NOTED: usize = 1024;

/// Why a connection cannot be attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachError {
    /// The mux drains.
    Draining,
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the mux drains: it takes no new connection")
    }
}

impl std::error::Error for AttachError {}

/// Where a message lies in the buffer it was read into.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub(super) start: usize,
    pub(super) length: usize,
    pub(super) skip: usize,
    pub(super) trim: usize,
    pub(super) mark: u32,
    pub(super) hash: u32,
}

impl Extent {
    pub(super) const fn range(&self) -> std::ops::Range<usize> {
        self.start..self.start + self.length
    }

    pub(super) const fn end(&self) -> usize {
        self.start + self.length
    }
}

/// State of reads: buffers, scratch space, and the worker that reads.
#[derive(Debug, Default)]
pub(super) struct Reads {
    pub(super) pool: Pool,
    /// Scratch space; empty between two reads.
    extents: Vec<Extent>,
    /// The worker that calls [`Mux::handle_read_by`], and the batch that it gets.
    pub(super) worker: Option<worker::Id>,
    pub(super) local: Option<Batch>,
}

/// What the assembler said last about a stream that goes on no further.
enum Last {
    GiveBack { inside: bool },
    Failed(assembler::Failure),
    End { inside: usize, length: Option<usize> },
}

impl Mux {
    /// Attaches a connection at the start of a message. Bytes that were read of it already go to [`Mux::handle_bytes`] first.
    ///
    /// # Errors
    ///
    /// When the mux drains.
    pub fn attach(&mut self, framing: Framing, limits: Limits, now: Time) -> Result<psock::Id, AttachError> {
        self.attach_with_state(framing, limits, State::default(), now)
    }

    /// Attaches a connection of which the framing knows something already.
    ///
    /// # Errors
    ///
    /// When the mux drains.
    pub fn attach_with_state(
        &mut self,
        framing: Framing,
        limits: Limits,
        state: State,
        now: Time,
    ) -> Result<psock::Id, AttachError> {
        if self.draining {
            return Err(AttachError::Draining);
        }
        self.now = self.now.max(now);
        let assembler = Assembler::with_state(framing, limits, state);
        let id = self.psocks.insert(Psock::new(assembler, now));
        self.counters.totals.attach += 1;
        if self.config.connected {
            self.balance.insert(id);
            self.report_write_space();
        }
        self.settle(id);
        Ok(id)
    }

    /// A buffer to read the connection's socket into: what arrives goes behind what is there, into its spare capacity, and
    /// then to [`Mux::handle_read`]. `None` when the connection is not to be read now.
    pub fn reserve(&mut self, id: psock::Id) -> Option<Vec<u8>> {
        if !self.interest(id).read {
            self.settle(id);
            return None;
        }
        let read = self.config.read;
        let psock = self.psocks.get_mut(id).filter(|psock| psock.reading.is_none())?;
        let need = psock.assembler.need();
        let mut buffer = psock.assembler.lend();
        if buffer.len() < LARGE {
            let mut room = self.reads.pool.take();
            room.extend_from_slice(&buffer);
            buffer = room;
        }
        psock.reading = Some(buffer.len());
        buffer.reserve_exact(read.max(psock.read_size).max(need.min(READ_MOST)));
        Some(buffer)
    }

    /// Takes back what [`Mux::reserve`] gave, with what was read behind it. Says how many bytes that was.
    pub fn handle_read(&mut self, id: psock::Id, buffer: Vec<u8>, now: Time) -> usize {
        self.now = self.now.max(now);
        let Some(psock) = self.psocks.get_mut(id) else { return 0 };
        let Some(before) = psock.reading.take() else { return 0 };
        let came = buffer.len() - before;
        psock.read_size = match () {
            () if buffer.len() == buffer.capacity() => (2 * came).min(WIDE * self.config.read),
            () if came < psock.read_size / 4 => psock.read_size / 2,
            () => psock.read_size,
        };
        psock.assembler.restore(buffer);
        if came > 0 {
            psock.active = self.now;
        }
        if psock.is_open() {
            self.assemble(id);
        } else {
            if !psock.is_dead() {
                self.recount_buffer(id);
            }
            self.settle(id);
        }
        came
    }

    /// Takes bytes that were read elsewhere. Says how many: none of them when the connection is not to be read now.
    pub fn handle_bytes(&mut self, id: psock::Id, bytes: &[u8], now: Time) -> usize {
        let Some(mut buffer) = self.reserve(id) else { return 0 };
        buffer.extend_from_slice(bytes);
        self.handle_read(id, buffer, now)
    }

    /// The peer has sent its last byte. It may still be answered.
    pub fn handle_eof(&mut self, id: psock::Id, now: Time) {
        self.now = self.now.max(now);
        let Some(psock) = self.psocks.get_mut(id) else { return };
        if psock.is_open() {
            psock.assembler.handle_end();
            self.assemble(id);
        }
    }

    /// A read or a write failed with this error: the connection is gone.
    pub fn handle_error(&mut self, id: psock::Id, errno: i32, now: Time) {
        self.handle_failure(id, Cause::Reset(errno), now);
    }

    /// The connection is gone, for this reason.
    pub fn handle_failure(&mut self, id: psock::Id, cause: Cause, now: Time) {
        self.now = self.now.max(now);
        self.abort(id, cause);
    }

    /// The least bytes that make a difference: what to give SO_RCVLOWAT.
    pub fn need(&self, id: psock::Id) -> usize {
        self.psocks.get(id).map_or(1, |psock| psock.assembler.need())
    }

    /// Takes the messages that are whole, and what ends the stream.
    pub(super) fn assemble(&mut self, id: psock::Id) {
        let now = self.now;
        let Some(psock) = self.psocks.get_mut(id) else { return };
        let base = psock.assembler.offset();
        let (mut found, mut last) = (std::mem::take(&mut self.reads.extents), None);
        let asked = psock.assembler.need() > 1;
        let note = |found: &mut Vec<Extent>, offset, message: framing::Message| {
            let framing::Message { length, skip, trim, mark, hash } = message;
            found.push(Extent { start: (offset - base) as usize, length, skip, trim, mark, hash });
        };
        loop {
            psock.assembler.scan(|offset, message| note(&mut found, offset, message));
            let Some(event) = psock.assembler.poll(now) else { break };
            match event {
                assembler::Event::Message(message) => found.push(extent_of(&message, base)),
                assembler::Event::GiveBack { .. } => {
                    last = Some(Last::GiveBack { inside: asked && found.is_empty() });
                }
                assembler::Event::Failed(failure) => last = Some(Last::Failed(failure)),
                assembler::Event::End { inside, length, .. } => last = Some(Last::End { inside, length }),
            }
        }
        if psock.assembler.held() > 0 && last.is_none() {
            psock.stats.rx_need_more += 1;
        }
        if found.is_empty() {
            self.trim_buffer(id);
        } else {
            self.deliver(id, &found);
            found.clear();
        }
        if found.capacity() <= NOTED {
            self.reads.extents = found;
        }
        self.recount_buffer(id);
        match last {
            None => {}
            Some(Last::End { inside: 0, .. }) => self.close(id, Cause::Clean, false),
            Some(Last::End { inside, length }) => {
                self.close(id, Cause::Inside { bytes: inside, length }, false)
            }
            Some(Last::Failed(failure)) => self.close(id, Cause::Framing(failure), false),
            Some(Last::GiveBack { inside }) => {
                if let Some(psock) = self.psocks.get_mut(id) {
                    psock.stats.rx_intr += u64::from(!inside);
                    psock.stats.rx_unrecov_intr += u64::from(inside);
                }
                self.close(id, Cause::GivenBack, true);
            }
        }
        self.settle(id);
    }

    /// Nothing is whole: the buffer is kept as small as what it holds.
    fn trim_buffer(&mut self, id: psock::Id) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        let held = psock.assembler.held();
        if held >= LARGE || psock.assembler.memory() <= 2 * held {
            return;
        }
        let buffer = psock.assembler.detach();
        self.recycle(buffer);
    }

    /// Parts the messages found from the buffer: they keep it, or a copy of what they need of it when that is much less.
    fn deliver(&mut self, id: psock::Id, found: &[Extent]) {
        let now = self.now;
        let Some(psock) = self.psocks.get_mut(id) else { return };
        let mut buffer = psock.assembler.detach();
        let used = found.last().map_or(0, Extent::end);
        let (bytes, memory, buffer) = if used >= buffer.capacity() / KEEP {
            let memory = buffer.capacity();
            buffer.truncate(used);
            (self.reads.pool.lend(buffer, (WIDE + 1) * self.config.read), memory, None)
        } else {
            (Bytes::copy_from_slice(&buffer[..used]), used, Some(buffer))
        };
        if let Some(by) = self.local_reader(found.len(), used) {
            self.give_local(by, id, bytes, memory, found);
            buffer.into_iter().for_each(|buffer| self.recycle(buffer));
            return;
        }
        if found.len() > 1 && self.config.order == Order::None {
            self.queue_batch(id, bytes, memory, found);
            buffer.into_iter().for_each(|buffer| self.recycle(buffer));
            return;
        }
        let (share, mut rest, mut charged) = (memory / found.len(), memory % found.len(), 0);
        for found in found {
            let charge = share + std::mem::take(&mut rest) + size_of::<Message>();
            let Extent { skip, trim, mark, hash, .. } = *found;
            let bytes = bytes.slice(found.range());
            let Some(psock) = self.psocks.get_mut(id) else { return };
            let ticket = Ticket { psock: id, number: psock.next };
            psock.next += 1;
            psock.stats.rx_msgs += 1;
            psock.stats.rx_bytes += bytes.len() as u64;
            psock.outstanding += 1;
            psock.memory += charge;
            if self.config.order == Order::Replies {
                psock.answers.push_back(psock::Answer::default());
            }
            charged += charge;
            self.memory.add_message(charge);
            self.counters.totals.received += 1;
            self.counters.totals.queued += 1;
            self.place(Message { ticket, bytes, skip, trim, mark, hash, received: now, charge, deaths: 0 });
        }
        self.recount(0, charged);
        if let Some(buffer) = buffer {
            self.recycle(buffer);
        }
    }

    fn recycle(&mut self, buffer: Vec<u8>) {
        if buffer.capacity() <= (WIDE + 1) * self.config.read {
            self.reads.pool.put(buffer);
        }
    }

    /// Counts the assembler's memory anew.
    pub(super) fn recount_buffer(&mut self, id: psock::Id) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        let (before, after) = (psock.buffered, psock.assembler.memory());
        psock.buffered = after;
        self.recount(before, after);
    }

    /// When the mux is full, and would be so when workers had done all that they have and will get, the connection that holds most
    /// ends: they are not waited for, since they may take for ever.
    pub(super) fn shed_memory(&mut self) {
        while self.memory.is_stuck() {
            let most = self
                .psocks
                .iter()
                .filter(|(_, psock)| !psock.is_dead())
                .max_by_key(|(_, psock)| psock.buffered + psock.tx.bytes);
            let Some((id, psock)) = most else { return };
            if psock.buffered + psock.tx.bytes == 0 {
                return;
            }
            self.abort(id, Cause::Memory);
        }
    }

    /// Says again what is to be waited for, if that has changed.
    pub(super) fn update_interest(&mut self, id: psock::Id) {
        let interest = self.interest(id);
        let Some(psock) = self.psocks.get_mut(id) else { return };
        if psock.reported == interest {
            return;
        }
        if interest.read && !psock.reported.read {
            // Its timers do not run while we are the ones who wait.
            psock.assembler.excuse(self.now);
        }
        psock.reported = interest;
        self.events.push_back(Event::Interest(id));
    }
}

fn extent_of(message: &assembler::Message<'_>, base: u64) -> Extent {
    let start = (message.offset - base) as usize;
    let skip = message.payload.as_ptr().addr() - message.bytes.as_ptr().addr();
    Extent {
        start,
        length: message.bytes.len(),
        skip,
        trim: message.bytes.len() - skip - message.payload.len(),
        mark: message.mark,
        hash: message.hash,
    }
}

/// The counter of KCM's for what the framing refused; whether there is one.
pub(super) fn count_refusal(stats: &mut psock::Stats, cause: &framing::Cause) -> bool {
    match cause {
        framing::Cause::TooBig { .. } | framing::Cause::HeadTooBig { .. } => stats.rx_msg_too_big += 1,
        framing::Cause::BadLength { .. } => stats.rx_bad_hdr_len += 1,
        framing::Cause::Timeout { .. } => stats.rx_msg_timeouts += 1,
        framing::Cause::Malformed(_) | framing::Cause::Program(_) => return false,
    }
    true
}
