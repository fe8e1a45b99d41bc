//! Assembler: takes the bytes of a stream in any segmentation and returns whole messages.
//!
//! What: one direction of one connection. Bytes that have arrived and are not delivered are in one contiguous
//! buffer, so that the framing and the application see a message at offset 0 of one view.
//!
//! Invariants:
//! - The messages do not depend on the segmentation of the stream. The framing is called again only with more
//!   bytes than before. A framing that does not bound its header sees at most [`Limits::head`] bytes.
//! - The framing is called at most once per arrival and per message, and never before the number of bytes
//!   that it asked for.
//! - A byte is moved a constant number of times on average: the buffer is compacted only if it holds no more
//!   bytes than are free in front.
//! - Memory follows the bytes that have arrived, not the announced length, and is bounded by
//!   [`Limits::message`].
//!
//! Reference: Linux, net/strparser/strparser.c, which defines the errors (EMSGSIZE, EPROTO, EBADMSG,
//! ETIMEDOUT).

mod event;

use std::fmt;
use std::time::Duration;

use crate::Time;
use crate::framing::{self, Cause, Framing, State, Step};

pub use event::{Event, Failure, Gap, Message, Part};

/// Number of bytes of a refused message in error texts.
const SHOWN: usize = 32;
/// Minimum size of a buffer in bytes.
const SMALLEST: usize = 512;

/// Limits of a connection's assembler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a message before its length is known, for framings that do not bound this themselves
    /// (functions, programs). Default: 64 KiB.
    pub head: usize,
    /// Bytes of a whole message, and of the buffer. Default: 16 MiB.
    pub message: usize,
    /// Time from the first byte of a message until its length is known. `None`: no limit.
    pub head_time: Option<Duration>,
    /// Time from the first byte of a message until its last, extended by `rate`. `None`: no limit.
    pub body_time: Option<Duration>,
    /// Minimum rate of long messages in bytes per second: extends `body_time` by `length / rate`. 0: no
    /// extension.
    pub rate: u32,
    /// Minimum number of bytes of a part, with a framing that delivers long messages in parts ([`Framing::streams`]): messages
    /// that have not arrived completely and are longer than four parts, of unknown length, or HTTP/1.1 requests with
    /// `Expect: 100-continue`. A part has at most 16 times this number. The
    /// first one is delivered as soon as the length, or the head, is known, and the last one may be shorter. Such messages may
    /// be longer than `message`. The times apply to each part. 0: all messages are whole. Default: 0.
    pub part: usize,
}

impl Limits {
    /// Maximum length of a message that is always delivered whole, for framings that deliver messages in parts.
    fn whole(&self) -> usize {
        self.message.min(self.part.saturating_mul(4))
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self { head: 64 << 10, message: 16 << 20, head_time: None, body_time: None, rate: 0, part: 0 }
    }
}

/// Where an assembler stands in its stream, without its bytes ([`Assembler::progress`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// State of the framing.
    pub state: State,
    /// The current message, if the framing knows its length.
    pub known: Option<framing::Message>,
    /// Number of bytes of the current message before the framing is called again.
    pub need: usize,
    /// Number of bytes of the current message that the framing has seen.
    pub asked: usize,
}

impl Default for Progress {
    /// The start of a stream.
    fn default() -> Self {
        Self { state: State::default(), known: None, need: 1, asked: 0 }
    }
}

/// A [`Progress`] that no assembler with these limits has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidProgress;

impl fmt::Display for InvalidProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the position in the stream is outside of the bounds of a message")
    }
}

impl std::error::Error for InvalidProgress {}

/// Assembles the messages of one direction of a connection. See the documentation of this module.
#[derive(Debug)]
pub struct Assembler {
    framing: Framing,
    limits: Limits,
    state: State,
    /// Storage. It holds the bytes `start..end`.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Position of `buffer[start]` in the stream.
    offset: u64,
    /// The current message after its length is known.
    known: Option<framing::Message>,
    /// Number of bytes, from `start`, before the framing is called again.
    need: usize,
    /// Number of bytes, from `start`, at the last call that returned `Need`.
    asked: usize,
    /// When the current message was first found incomplete.
    since: Option<Time>,
    /// Number of bytes that the last event refers to.
    taken: usize,
    /// The last event was a part, and others follow.
    more: bool,
    /// Number of bytes of the current message in earlier parts.
    passed: u64,
    /// Number of bytes to come of a message that a gap has damaged.
    lost: usize,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// No more bytes follow.
    Ending,
    Over,
}

impl Assembler {
    /// An assembler at the start of a stream.
    pub fn new(framing: Framing, limits: Limits) -> Self {
        Self::with_state(framing, limits, State::default())
    }

    /// An assembler for a connection whose framing state is known.
    pub fn with_state(framing: Framing, limits: Limits, state: State) -> Self {
        Self {
            framing,
            limits,
            state,
            buffer: Vec::new(),
            start: 0,
            end: 0,
            offset: 0,
            known: None,
            need: 1,
            asked: 0,
            since: None,
            taken: 0,
            more: false,
            passed: 0,
            lost: 0,
            phase: Phase::Open,
        }
    }

    /// Continues the stream of another assembler with the same framing: `rest` are the bytes that it holds.
    ///
    /// # Errors
    ///
    /// [`InvalidProgress`] if `progress` or `rest` exceeds `limits`.
    pub fn resume(
        framing: Framing,
        limits: Limits,
        progress: Progress,
        rest: &[u8],
    ) -> Result<Self, InvalidProgress> {
        let Progress { state, known, need, asked } = progress;
        let most = limits.message.max(limits.head);
        let fits = |message: framing::Message| {
            (1..=limits.message).contains(&message.length)
                && message.skip.checked_add(message.trim).is_some_and(|without| without <= message.length)
        };
        let valid = rest.len() <= most && (1..=most).contains(&need) && asked <= rest.len();
        if !valid || !known.is_none_or(fits) {
            return Err(InvalidProgress);
        }
        let (buffer, end) = (rest.to_vec(), rest.len());
        Ok(Self { buffer, end, known, need, asked, ..Self::with_state(framing, limits, state) })
    }

    /// Where this assembler stands, for [`Assembler::resume`] with the bytes of [`Assembler::rest`].
    pub fn progress(&self) -> Progress {
        let state = self.state.clone();
        match self.taken {
            0 => Progress { state, known: self.known, need: self.need, asked: self.asked },
            _ => Progress { state, ..Progress::default() },
        }
    }

    /// Takes bytes and returns their number.
    ///
    /// Takes fewer only if the buffer holds the maximum message (then [`Assembler::poll`] returns an event),
    /// or if the stream is over.
    pub fn handle_bytes(&mut self, bytes: &[u8]) -> usize {
        let mut took = 0;
        while took < bytes.len() {
            let room = self.reserve(bytes.len() - took);
            if room.is_empty() {
                break;
            }
            let length = room.len();
            room.copy_from_slice(&bytes[took..took + length]);
            self.commit(length);
            took += length;
        }
        took
    }

    /// Space for up to `want` bytes, to read from a socket. Empty if the buffer is full or the stream is
    /// over.
    pub fn reserve(&mut self, want: usize) -> &mut [u8] {
        self.consume();
        let held = self.end - self.start;
        let want = match self.phase {
            Phase::Open => want.min(self.limits.message.max(self.limits.head).saturating_sub(held)),
            _ => 0,
        };
        if self.buffer.len() - self.end < want {
            self.make_room(want);
        }
        &mut self.buffer[self.end..self.end + want]
    }

    /// Commits the first `length` bytes of the space of [`Assembler::reserve`].
    ///
    /// # Panics
    ///
    /// Panics if the space is smaller.
    pub fn commit(&mut self, length: usize) {
        assert!(length <= self.buffer.len() - self.end, "committed more than was reserved");
        self.end += length;
        self.drop_lost();
    }

    /// The stream has ended. [`Assembler::poll`] returns the remaining events.
    pub fn handle_end(&mut self) {
        if self.phase == Phase::Open {
            self.phase = Phase::Ending;
        }
    }

    /// The next `length` bytes of the stream are missing, as in a capture with lost packets.
    pub fn handle_gap(&mut self, length: u64) -> Gap {
        self.consume();
        let held = self.end - self.start;
        let (offset, whole) = match (self.phase, self.known) {
            (Phase::Open, _) if self.lost > 0 => (self.offset, self.lost),
            (Phase::Open, Some(message)) => (self.offset, message.length),
            _ => (self.offset, 0),
        };
        let missing = usize::try_from(length).unwrap_or(usize::MAX);
        if whole == 0 || missing > whole - held {
            self.phase = Phase::Over;
            return Gap::Over;
        }
        self.offset += (held + missing) as u64;
        self.lost = whole - held - missing;
        self.start = self.end;
        self.next_message();
        Gap::Lost { offset, length: whole }
    }

    /// Returns the next event. `None` until more bytes arrive or [`Assembler::poll_timeout`] is reached.
    ///
    /// The bytes of an event are valid until the next call of a method that changes the assembler.
    pub fn poll(&mut self, now: Time) -> Option<Event<'_>> {
        self.consume();
        if self.phase == Phase::Over {
            return None;
        }
        let held = self.end - self.start;
        let message = match self.known {
            Some(message) => message,
            None if held < self.need && !self.last_words(held) => return self.incomplete(now),
            None => match self.ask(held) {
                Ok(Some(message)) => message,
                Ok(None) => return self.open(held, now),
                Err(cause) => return Some(self.fail(cause)),
            },
        };
        if self.phase == Phase::Over {
            return Some(Event::GiveBack { offset: self.offset, bytes: &self.buffer[self.start..self.end] });
        }
        let whole = held >= message.length && message.length <= self.most();
        let long = || message.length > self.limits.whole() || self.framing.expects_answer(&self.state);
        if self.passed > 0 || self.streams() && !whole && long() {
            return self.part(message, held, now);
        }
        if held < message.length {
            return self.incomplete(now);
        }
        Some(self.deliver(message, Part::Whole))
    }

    /// Returns true if long messages are delivered in parts.
    const fn streams(&self) -> bool {
        self.limits.part > 0 && self.framing.streams()
    }

    /// Maximum number of bytes of a part.
    const fn most(&self) -> usize {
        self.limits.part.saturating_mul(16)
    }

    fn deliver(&mut self, message: framing::Message, part: Part) -> Event<'_> {
        let framing::Message { length, skip, trim, mark, hash } = message;
        (self.taken, self.more) = (length, part.more());
        let bytes = &self.buffer[self.start..self.start + length];
        let payload = &bytes[skip..length - trim];
        Event::Message(Message { offset: self.offset, part, bytes, payload, mark, hash })
    }

    /// Delivers a part of a message of known length. `message` is what is left of it.
    fn part(&mut self, message: framing::Message, held: usize, now: Time) -> Option<Event<'_>> {
        let (first, most) = (self.passed == 0, self.most().max(message.skip + self.limits.part));
        if held >= message.length && message.length <= most && !first {
            return Some(self.deliver(message, Part::Last));
        }
        // The bytes that the framing strips at the end are in the last part.
        let length = held.min(most).min(message.length - message.trim);
        let enough = if first { length > message.skip } else { length >= self.limits.part };
        if !enough {
            return self.incomplete(now);
        }
        let part = if first { Part::First } else { Part::Next };
        Some(self.deliver(framing::Message { length, trim: 0, ..message }, part))
    }

    /// Delivers a part of a message of unknown length.
    fn open(&mut self, held: usize, now: Time) -> Option<Event<'_>> {
        let first = self.passed == 0;
        let bytes = &self.buffer[self.start..self.start + held];
        let known = if self.streams() { self.framing.open(bytes, first, &self.state) } else { None };
        let Some(known) = known.filter(|known| first || known.length >= self.limits.part) else {
            return self.incomplete(now);
        };
        let longest = self.framing.longest();
        if self.passed + known.length as u64 > longest {
            return Some(self.fail(Cause::TooBig { length: None, max: longest }));
        }
        let length = known.length.min(self.most().max(known.skip + self.limits.part));
        self.framing.pass(length, &mut self.state);
        let part = if first { Part::First } else { Part::Next };
        Some(self.deliver(framing::Message { length, ..known }, part))
    }

    /// Consumes the whole messages at the front, if the framing is plain, and passes each with its position.
    /// Equivalent to calls of [`Assembler::poll`] and faster.
    pub(crate) fn scan(&mut self, mut each: impl FnMut(u64, framing::Message)) {
        self.consume();
        let Some(plain) = self.framing.plain() else { return };
        if self.phase != Phase::Open || self.known.is_some() || self.passed > 0 || self.lost > 0 {
            return;
        }
        let bytes = &self.buffer[self.start..self.end];
        let (mut at, mut count) = (0, 0);
        while let Some(message) = plain.message(&bytes[at..], self.limits.message) {
            each(self.offset + at as u64, message);
            at += message.length;
            count += 1;
        }
        if count > 0 {
            self.start += at;
            self.offset += at as u64;
            self.state.messages += count;
            self.next_message();
        }
    }

    /// When to call [`Assembler::poll`] without an arrival.
    pub fn poll_timeout(&self) -> Option<Time> {
        let since = self.since?;
        let length = match self.known {
            _ if self.passed > 0 => self.limits.part,
            None => return Some(since + self.limits.head_time?),
            Some(message) => message.length,
        };
        let slow = match self.limits.rate {
            0 => Duration::ZERO,
            rate => Duration::from_nanos((length as u64).saturating_mul(1_000_000_000) / u64::from(rate)),
        };
        Some(since + self.limits.body_time?.saturating_add(slow))
    }

    /// Number of bytes that must arrive before the next event, at least 1: the value for SO_RCVLOWAT.
    pub fn need(&self) -> usize {
        let held = self.end - self.start - self.taken;
        let need = match self.known {
            _ if self.taken > 0 => 1,
            Some(message) if self.passed > 0 => message.length.min(self.limits.part),
            known => known.map_or(self.need, |message| message.length),
        };
        need.saturating_sub(held).max(1) + self.lost
    }

    /// Number of bytes that have arrived and are not delivered.
    pub fn held(&self) -> usize {
        self.end - self.start - self.taken
    }

    /// These bytes. A connection that leaves the mux is returned with them.
    pub fn rest(&self) -> &[u8] {
        &self.buffer[self.start + self.taken..self.end]
    }

    /// Position of the next message in the stream.
    pub fn offset(&self) -> u64 {
        self.offset + self.taken as u64
    }

    /// Returns true after the last event.
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// Size of the buffer in bytes.
    pub fn memory(&self) -> usize {
        self.buffer.capacity()
    }

    /// Frees the buffer if it is empty.
    pub fn shrink(&mut self) {
        self.consume();
        if self.start == self.end {
            self.buffer = Vec::new();
            (self.start, self.end) = (0, 0);
        }
    }

    /// Removes the buffer, with its bytes at the front, so that a socket can be read into it. The assembler
    /// is empty until [`Assembler::restore`].
    pub(crate) fn lend(&mut self) -> Vec<u8> {
        self.consume();
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.truncate(self.end);
        buffer.drain(..self.start);
        (self.start, self.end) = (0, 0);
        buffer
    }

    /// Puts the buffer back, with the new bytes appended. Its first byte is at [`Assembler::offset`].
    pub(crate) fn restore(&mut self, buffer: Vec<u8>) {
        debug_assert!(self.start == self.end && self.buffer.is_empty());
        self.start = 0;
        self.end = buffer.len();
        self.buffer = buffer;
    }

    /// Removes the buffer with the messages since [`Assembler::restore`]. The bytes after them move to a new
    /// buffer of their size.
    pub(crate) fn detach(&mut self) -> Vec<u8> {
        self.consume();
        let rest = self.buffer[self.start..self.end].to_vec();
        (self.start, self.end) = (0, rest.len());
        std::mem::replace(&mut self.buffer, rest)
    }

    /// Excludes the time until `now` from the timers: the socket was not read.
    pub(crate) fn excuse(&mut self, now: Time) {
        if let Some(since) = &mut self.since {
            *since = (*since).max(now);
        }
    }

    /// Returns true if the stream ended with bytes that the framing has not seen because it needs more.
    fn last_words(&self, held: usize) -> bool {
        self.phase == Phase::Ending && held > self.asked
    }

    /// Calls the framing. `None` if it needs more bytes, or if another protocol begins (see the phase).
    fn ask(&mut self, held: usize) -> Result<Option<framing::Message>, Cause> {
        let bounds_head = self.framing.bounds_head();
        let most = if bounds_head { self.limits.message } else { self.limits.head };
        let bytes = &self.buffer[self.start..self.start + held.min(most)];
        match self.framing.step(bytes, &mut self.state) {
            Step::Message(message) if self.passed + message.length as u64 > self.framing.longest() => {
                Err(Cause::TooBig { length: None, max: self.framing.longest() })
            }
            Step::Message(message) if message.length > self.limits.message && !self.streams() => {
                Err(Cause::TooBig { length: Some(message.length as u64), max: self.limits.message as u64 })
            }
            // The framing said before that these bytes are not a whole message.
            Step::Message(message) if message.length <= self.asked => {
                Err(Cause::BadLength { length: message.length as i64, least: self.asked as u64 + 1 })
            }
            Step::Message(mut message) => {
                if self.passed > 0 {
                    // The bytes that the framing strips at the start were in the first part.
                    message.skip = 0;
                }
                self.known = Some(message);
                Ok(Some(message))
            }
            // It waits for as much of the message as makes a part.
            Step::Need(need) if self.streams() && self.framing.open(bytes, false, &self.state).is_some() => {
                self.need = need.min(held + self.limits.part);
                self.asked = held;
                Ok(None)
            }
            Step::Need(need) if need > most && bounds_head => {
                Err(Cause::TooBig { length: None, max: self.limits.message as u64 })
            }
            Step::Need(need) if need > most => Err(Cause::HeadTooBig { max: most as u64 }),
            Step::Need(need) => {
                self.need = need;
                self.asked = held;
                Ok(None)
            }
            Step::Error(cause) => Err(cause),
            Step::GiveBack => {
                self.phase = Phase::Over;
                Ok(Some(framing::Message::default()))
            }
        }
    }

    fn incomplete(&mut self, now: Time) -> Option<Event<'_>> {
        let held = self.end - self.start;
        if self.phase == Phase::Ending {
            self.phase = Phase::Over;
            let passed = usize::try_from(self.passed).unwrap_or(usize::MAX);
            let length = self.known.map(|message| passed.saturating_add(message.length));
            let offset = self.offset - self.passed;
            return Some(Event::End { offset, inside: passed.saturating_add(held), length });
        }
        if held == 0 && self.known.is_none() && self.passed == 0 {
            return None;
        }
        self.since.get_or_insert(now);
        match self.poll_timeout() {
            Some(deadline) if now >= deadline => {
                let in_body = self.known.is_some() || self.passed > 0;
                Some(self.fail(Cause::Timeout { in_body }))
            }
            _ => None,
        }
    }

    fn fail(&mut self, cause: Cause) -> Event<'_> {
        self.phase = Phase::Over;
        let shown = (self.end - self.start).min(SHOWN);
        let head = self.buffer[self.start..self.start + shown].to_vec();
        Event::Failed(Failure { offset: self.offset - self.passed, cause, head })
    }

    /// Drops the message of the last event.
    fn consume(&mut self) {
        if self.taken == 0 {
            return;
        }
        self.start += self.taken;
        self.offset += self.taken as u64;
        let taken = std::mem::take(&mut self.taken);
        match std::mem::take(&mut self.more) {
            true => self.next_part(taken),
            false => self.next_message(),
        }
    }

    /// A part of `taken` bytes has left.
    fn next_part(&mut self, taken: usize) {
        self.passed += taken as u64;
        if let Some(message) = &mut self.known {
            (message.length, message.skip) = (message.length - taken, 0);
        }
        self.need = self.need.saturating_sub(taken).max(1);
        self.asked = self.asked.saturating_sub(taken);
        self.since = None;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    fn next_message(&mut self) {
        self.known = None;
        self.need = 1;
        self.asked = 0;
        self.passed = 0;
        self.since = None;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Drops the bytes of a message that a gap has damaged.
    fn drop_lost(&mut self) {
        let dropped = self.lost.min(self.end - self.start);
        self.start += dropped;
        self.offset += dropped as u64;
        self.lost -= dropped;
        if dropped > 0 && self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Makes space for `want` bytes at the end.
    fn make_room(&mut self, want: usize) {
        let held = self.end - self.start;
        // Moving costs `held` bytes, paid for by the `start` bytes consumed since the last move, or by the
        // growth.
        let enough = self.start >= held && held + want <= self.buffer.len();
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, held);
        if !enough {
            let most = self.limits.message.max(self.limits.head).saturating_mul(2);
            let length = self.buffer.len().saturating_mul(2).max(SMALLEST).min(most);
            self.buffer.resize(length.max(held + want).max(self.buffer.len()), 0);
        }
    }
}

#[cfg(test)]
mod tests;
