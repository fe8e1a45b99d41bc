//! From bytes to messages that wait for a worker.

use std::fmt;

use bytes::Bytes;

use super::batch::Batch;
use super::event::{Cause, Event, Resume};
use super::message::{Message, Ticket};
use super::pool::Pool;
use super::psock::{self, Psock};
use super::stream::{Piece, Stream};
use super::{Mux, Order, worker};
use crate::Time;
use crate::assembler::{self, Assembler, Limits, Part};
use crate::framing::{self, Framing, State};

/// With this many bytes of an incomplete message, reads append to its buffer instead of using a spare one.
const LARGE: usize = 16 << 10;
/// Messages that take at least 1/KEEP of their buffer keep it. Others are copied.
const KEEP: usize = 4;
/// A read that fills its space doubles the next one, up to this multiple of [`super::Config::read`].
const WIDE: usize = 4;
/// Maximum space of one read if a message is known to be that long.
const READ_MOST: usize = 1 << 20;

/// Maximum length of the extents vector that is kept between reads.
const NOTED: usize = 1024;

/// Why a connection cannot be attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachError {
    /// The mux drains and takes no new connection.
    Draining,
    /// The position in the stream of a connection from another mux exceeds the limits.
    Invalid,
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Draining => "the mux drains: it takes no new connection",
            Self::Invalid => "its incomplete message exceeds the limits of this mux",
        })
    }
}

impl std::error::Error for AttachError {}

/// Place of a message in the buffer that it was read into.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub(super) start: usize,
    pub(super) length: usize,
    pub(super) skip: usize,
    pub(super) trim: usize,
    pub(super) mark: u32,
    pub(super) hash: u32,
    pub(super) part: Part,
}

impl Extent {
    pub(super) const fn range(&self) -> std::ops::Range<usize> {
        self.start..self.start + self.length
    }

    pub(super) const fn end(&self) -> usize {
        self.start + self.length
    }
}

/// State of reads: buffers, scratch space, and the reading worker.
#[derive(Debug, Default)]
pub(super) struct Reads {
    pub(super) pool: Pool,
    /// Scratch space; empty between two reads.
    extents: Vec<Extent>,
    /// The worker that called [`Mux::handle_read_by`], and the batch that it gets.
    pub(super) worker: Option<worker::Id>,
    pub(super) local: Option<Batch>,
}

/// The assembler's event that ended a stream.
enum Last {
    GiveBack { inside: bool },
    Failed(assembler::Failure),
    End { inside: usize, length: Option<usize> },
}

impl Mux {
    /// Attaches a connection. Its stream is at the start of a message. Pass bytes that were already read to
    /// [`Mux::handle_bytes`] first.
    ///
    /// # Errors
    ///
    /// Returns [`AttachError::Draining`] if the mux drains.
    pub fn attach(&mut self, framing: Framing, limits: Limits, now: Time) -> Result<psock::Id, AttachError> {
        self.attach_with_state(framing, limits, State::default(), now)
    }

    /// Attaches a connection whose framing state is known.
    ///
    /// # Errors
    ///
    /// Returns [`AttachError::Draining`] if the mux drains.
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
        let assembler = Assembler::with_state(framing, limits, state);
        Ok(self.insert(assembler, false, now))
    }

    /// Attaches a connection that another mux with the same framing has given back: `resume` and `rest` are those of its
    /// [`End`](super::End).
    ///
    /// # Errors
    ///
    /// Returns [`AttachError`] if the mux drains, or if the position in the stream exceeds `limits`.
    pub fn attach_resumed(
        &mut self,
        framing: Framing,
        limits: Limits,
        resume: Resume,
        rest: &[u8],
        now: Time,
    ) -> Result<psock::Id, AttachError> {
        if self.draining {
            return Err(AttachError::Draining);
        }
        let assembler = Assembler::resume(framing, limits, resume.progress, rest);
        let id = self.insert(assembler.map_err(|_| AttachError::Invalid)?, resume.used, now);
        // Starts the timer of an incomplete message.
        self.assemble(id);
        Ok(id)
    }

    fn insert(&mut self, assembler: Assembler, resumed: bool, now: Time) -> psock::Id {
        self.now = self.now.max(now);
        let id = self.psocks.insert(Psock { resumed, ..Psock::new(assembler, now) });
        self.counters.totals.attach += 1;
        self.in_flight.active(id, self.now);
        if self.config.connected {
            self.balance.insert(id);
            self.report_write_space();
        }
        if self.reports_opened {
            self.open(id);
        }
        self.settle(id);
        id
    }

    /// Returns a buffer for reading the connection's socket. Append the bytes in its spare capacity and pass
    /// it to [`Mux::handle_read`]. Returns `None` if the connection must not be read now.
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

    /// Takes back the buffer of [`Mux::reserve`] with the bytes read. Returns their number.
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

    /// Takes bytes that were read elsewhere. Returns their number, or 0 if the connection must not be read
    /// now.
    pub fn handle_bytes(&mut self, id: psock::Id, bytes: &[u8], now: Time) -> usize {
        let Some(mut buffer) = self.reserve(id) else { return 0 };
        buffer.extend_from_slice(bytes);
        self.handle_read(id, buffer, now)
    }

    /// The peer closed its side. It can still receive replies.
    pub fn handle_eof(&mut self, id: psock::Id, now: Time) {
        self.now = self.now.max(now);
        let Some(psock) = self.psocks.get_mut(id) else { return };
        if psock.is_open() {
            psock.assembler.handle_end();
            self.assemble(id);
        }
    }

    /// A read or write failed with this error number. Ends the connection.
    pub fn handle_error(&mut self, id: psock::Id, errno: i32, now: Time) {
        self.handle_failure(id, Cause::Reset(errno), now);
    }

    /// Ends the connection with this cause.
    pub fn handle_failure(&mut self, id: psock::Id, cause: Cause, now: Time) {
        self.now = self.now.max(now);
        self.abort(id, cause);
    }

    /// Minimum number of bytes that complete the next step of assembly: the value for SO_RCVLOWAT.
    pub fn need(&self, id: psock::Id) -> usize {
        self.psocks.get(id).map_or(1, |psock| psock.assembler.need())
    }

    /// Delivers whole messages and handles the end of the stream.
    pub(super) fn assemble(&mut self, id: psock::Id) {
        let now = self.now;
        let Some(psock) = self.psocks.get_mut(id) else { return };
        let base = psock.assembler.offset();
        let (mut found, mut last) = (std::mem::take(&mut self.reads.extents), None);
        let asked = psock.assembler.need() > 1;
        let note = |found: &mut Vec<Extent>, offset, message: framing::Message| {
            let framing::Message { length, skip, trim, mark, hash } = message;
            let (start, part) = ((offset - base) as usize, Part::Whole);
            found.push(Extent { start, length, skip, trim, mark, hash, part });
        };
        loop {
            psock.assembler.scan(|offset, message| note(&mut found, offset, message));
            let Some(event) = psock.assembler.poll(now) else { break };
            match event {
                assembler::Event::Message(message) => {
                    found.push(extent_of(&message, base));
                    if message.part == Part::Last && psock.then.is_some() {
                        break;
                    }
                }
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
        self.close_then(id);
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

    /// No message is whole: shrinks the buffer to the bytes that it holds.
    fn trim_buffer(&mut self, id: psock::Id) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        let held = psock.assembler.held();
        if held >= LARGE || psock.assembler.memory() <= 2 * held {
            return;
        }
        let buffer = psock.assembler.detach();
        self.recycle(buffer);
    }

    /// Delivers the messages found in the buffer. They share it, or a copy if they take only a small part of
    /// it.
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
        let whole = found.iter().all(|found| found.part == Part::Whole);
        if let Some(by) = self.local_reader(id, found.len(), used).filter(|_| whole) {
            self.give_local(by, id, bytes, memory, found);
            buffer.into_iter().for_each(|buffer| self.recycle(buffer));
            return;
        }
        if found.len() > 1 && whole && self.config.order == Order::None {
            self.queue_batch(id, bytes, memory, found);
            buffer.into_iter().for_each(|buffer| self.recycle(buffer));
            return;
        }
        self.in_flight.active(id, self.now);
        let (share, mut rest, mut charged) = (memory / found.len(), memory % found.len(), 0);
        for found in found {
            let charge = share + std::mem::take(&mut rest) + size_of::<Message>();
            let Extent { skip, trim, mark, hash, part, .. } = *found;
            let bytes = bytes.slice(found.range());
            charged += charge;
            self.memory.add_message(charge);
            if matches!(part, Part::Next | Part::Last) {
                self.receive_part(id, Piece { bytes, trim, charge }, part == Part::Last);
                continue;
            }
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
            let more = part == Part::First;
            if more {
                psock.streams.push_back(Stream::new(ticket.number));
                self.counters.totals.streamed += 1;
            }
            self.counters.totals.received += 1;
            self.counters.totals.queued += 1;
            self.place(Message {
                ticket,
                bytes,
                skip,
                trim,
                mark,
                hash,
                received: now,
                charge,
                deaths: 0,
                more,
            });
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

    /// Updates the account of the assembler's memory.
    pub(super) fn recount_buffer(&mut self, id: psock::Id) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        let (before, after) = (psock.buffered, psock.assembler.memory());
        psock.buffered = after;
        self.recount(before, after);
    }

    /// Frees memory: ends the connection that holds the most memory while partial messages and unsent data alone
    /// keep the mux above its low mark. It does not wait for workers, which may take forever.
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

    /// Reports the connection's interest if it has changed.
    pub(super) fn update_interest(&mut self, id: psock::Id) {
        let interest = self.interest(id);
        let Some(psock) = self.psocks.get_mut(id) else { return };
        if psock.reported == interest {
            return;
        }
        if interest.read && !psock.reported.read {
            // Assembly timers do not run while the mux itself pauses the connection.
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
        part: message.part,
    }
}

/// Counts a refusal by the framing under KCM's name. Returns false if KCM has no counter for it.
pub(super) fn count_refusal(stats: &mut psock::Stats, cause: &framing::Cause) -> bool {
    match cause {
        framing::Cause::TooBig { .. } | framing::Cause::HeadTooBig { .. } => stats.rx_msg_too_big += 1,
        framing::Cause::BadLength { .. } => stats.rx_bad_hdr_len += 1,
        framing::Cause::Timeout { .. } => stats.rx_msg_timeouts += 1,
        framing::Cause::Malformed(_) | framing::Cause::Program(_) => return false,
    }
    true
}
