//! Bytes in any cut go in, whole messages come out.
//!
//! What: one direction of one connection. The bytes that arrived and were not yet delivered lie in one buffer, so a message
//! is always one contiguous view with its first byte at offset 0, and so is what the framing sees.
//!
//! Invariants:
//! - the messages do not depend on how the stream was cut: the framing is asked again only with more bytes than
//!   before, and a framing of unbounded appetite sees no more than [`Limits::head`] of them;
//! - the framing is asked at most once for each arrival and each message, and not at all before as many bytes are there as it
//!   said it needs;
//! - a byte is moved at most a constant number of times on average: the buffer is compacted only when what it holds is not
//!   more than the room in front;
//! - memory follows what arrived, not what was announced, and is bounded by [`Limits::message`].
//!
//! Reference: Linux, net/strparser/strparser.c, whose errors these are (EMSGSIZE, EPROTO, EBADMSG, ETIMEDOUT).

use std::fmt;
use std::time::Duration;

use crate::Time;
use crate::framing::{self, Cause, Framing, State, Step};

/// Bytes of a refused message that are shown.
const SHOWN: usize = 32;
/// The least that a buffer grows to, in bytes.
const SMALLEST: usize = 512;

/// What an assembler allows one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a message before its length is known, for framings that do not bound that themselves (functions,
    /// programs). 64 KiB.
    pub head: usize,
    /// Bytes of a whole message, and of all that is held. 16 MiB.
    pub message: usize,
    /// From a message's first byte until its length is known; `None` for ever.
    pub head_time: Option<Duration>,
    /// From a message's first byte until its last, besides what `rate` gives; `None` for ever.
    pub body_time: Option<Duration>,
    /// Bytes per second that a long message must arrive with at least: gives `length / rate` beyond `body_time`. 0 gives
    /// nothing.
    pub rate: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { head: 64 << 10, message: 16 << 20, head_time: None, body_time: None, rate: 0 }
    }
}

/// What came out of the stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A whole message.
    Message(Message<'a>),
    /// The connection goes on in a protocol that is not for the framing. Nothing comes after it.
    GiveBack {
        /// Where in the stream, in bytes.
        offset: u64,
        /// The bytes that arrived and were not delivered.
        bytes: &'a [u8],
    },
    /// The stream cannot be framed any further. Nothing comes after it.
    Failed(Failure),
    /// The stream ended. Nothing comes after it.
    End {
        /// Where the last message ended, in bytes from the stream's start.
        offset: u64,
        /// Bytes of a message that was not whole; 0 for a clean end.
        inside: usize,
        /// The length that this message had announced, if that was known.
        length: Option<usize>,
    },
}

/// One whole message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// Where it starts, in bytes from the stream's start.
    pub offset: u64,
    /// All of it, header included.
    pub bytes: &'a [u8],
    /// What the framing leaves when it strips the header or the delimiter; all of it otherwise.
    pub payload: &'a [u8],
    /// The framing's mark; 0 without.
    pub mark: u32,
    /// The hash of what it is ordered by; 0 without.
    pub hash: u32,
}

/// Where and why a stream could not be framed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Where the message starts, in bytes from the stream's start.
    pub offset: u64,
    /// Why.
    pub cause: Cause,
    /// The message's first bytes, up to 32.
    pub head: Vec<u8>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at byte {}: {} (", self.offset, self.cause)?;
        for (at, byte) in self.head.iter().enumerate() {
            write!(f, "{}{byte:02x}", if at == 0 { "" } else { " " })?;
        }
        f.write_str(")")
    }
}

impl std::error::Error for Failure {}

/// What a hole in the stream did, see [`Assembler::handle_gap`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gap {
    /// The hole lies inside a message of known length: that one is lost, the next follows it.
    Lost {
        /// Where the lost message starts.
        offset: u64,
        /// Its length in bytes.
        length: usize,
    },
    /// Where the next message starts is not known: the stream is over.
    Over,
}

/// Puts the messages of one direction of a connection together. See the module's documentation.
#[derive(Debug)]
pub struct Assembler {
    framing: Framing,
    limits: Limits,
    state: State,
    /// Storage; the bytes held are `start..end`.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Where in the stream `buffer[start]` is.
    offset: u64,
    /// The current message, once its length is known.
    known: Option<framing::Message>,
    /// Bytes from `start` before the framing is asked again.
    need: usize,
    /// Bytes from `start` when the framing last asked for more.
    asked: usize,
    /// When the current message was first found incomplete.
    since: Option<Time>,
    /// Bytes from `start` that the last event handed out.
    taken: usize,
    /// Bytes still to come of a message that a hole made worthless.
    lost: usize,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// No byte follows what is held.
    Ending,
    Over,
}

impl Assembler {
    /// An assembler at the start of a stream.
    pub fn new(framing: Framing, limits: Limits) -> Self {
        Self::with_state(framing, limits, State::default())
    }

    /// An assembler for a connection of which the framing knows something already.
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
            lost: 0,
            phase: Phase::Open,
        }
    }

    /// Takes bytes that arrived, and says how many.
    ///
    /// Fewer than all only if as much is held as the longest message may have (then [`Assembler::poll`] has something to say),
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

    /// Room for up to `want` bytes, to read them from a socket; empty when no more may be held or the stream is over.
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

    /// Takes the first `length` bytes of what [`Assembler::reserve`] gave.
    ///
    /// # Panics
    ///
    /// When it gave less.
    pub fn commit(&mut self, length: usize) {
        assert!(length <= self.buffer.len() - self.end, "committed more than was reserved");
        self.end += length;
        self.drop_lost();
    }

    /// Says that the stream has ended: no byte follows. The events that are left come from [`Assembler::poll`].
    pub fn handle_end(&mut self) {
        if self.phase == Phase::Open {
            self.phase = Phase::Ending;
        }
    }

    /// Says that the next `length` bytes of the stream are missing (a capture that lost packets).
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

    /// The next event; `None` until more bytes arrive, the time of [`Assembler::poll_timeout`] comes, or for ever when the
    /// stream is over.
    ///
    /// The bytes of an event stay until the next call of any method that changes the assembler.
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
                Ok(None) => return self.incomplete(now),
                Err(cause) => return Some(self.fail(cause)),
            },
        };
        if self.phase == Phase::Over {
            return Some(Event::GiveBack { offset: self.offset, bytes: &self.buffer[self.start..self.end] });
        }
        if held < message.length {
            return self.incomplete(now);
        }
        let offset = self.offset;
        self.taken = message.length;
        let bytes = &self.buffer[self.start..self.start + message.length];
        let payload = &bytes[message.skip..message.length - message.trim];
        Some(Event::Message(Message { offset, bytes, payload, mark: message.mark, hash: message.hash }))
    }

    /// Takes the whole messages that lie at the front, if that is simple, and says of each where in the stream it starts. What
    /// [`Assembler::poll`] would say of them, in one go; it goes on behind them.
    pub(crate) fn scan(&mut self, mut each: impl FnMut(u64, framing::Message)) {
        self.consume();
        let Some(plain) = self.framing.plain() else { return };
        if self.phase != Phase::Open || self.known.is_some() || self.lost > 0 {
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

    /// When to call [`Assembler::poll`] even if nothing arrives.
    pub fn poll_timeout(&self) -> Option<Time> {
        let since = self.since?;
        match self.known {
            None => Some(since + self.limits.head_time?),
            Some(message) => {
                let time = self.limits.body_time?;
                let slow = match self.limits.rate {
                    0 => Duration::ZERO,
                    rate => Duration::from_nanos(
                        (message.length as u64).saturating_mul(1_000_000_000) / u64::from(rate),
                    ),
                };
                Some(since + time.saturating_add(slow))
            }
        }
    }

    /// Bytes that have to arrive before there is anything new to say, at least 1: what to give SO_RCVLOWAT.
    pub fn need(&self) -> usize {
        let held = self.end - self.start - self.taken;
        let need = if self.taken > 0 { 1 } else { self.known.map_or(self.need, |message| message.length) };
        need.saturating_sub(held).max(1) + self.lost
    }

    /// Bytes that are held: arrived and not delivered.
    pub fn held(&self) -> usize {
        self.end - self.start - self.taken
    }

    /// The bytes that are held, from the next message's start on: what goes with a connection that is handed back.
    pub fn rest(&self) -> &[u8] {
        &self.buffer[self.start + self.taken..self.end]
    }

    /// Where the next message starts, in bytes from the stream's start.
    pub fn offset(&self) -> u64 {
        self.offset + self.taken as u64
    }

    /// Whether nothing more comes out of this stream.
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// Bytes of memory that the buffer takes.
    pub fn memory(&self) -> usize {
        self.buffer.capacity()
    }

    /// Gives the buffer's memory back if nothing is held.
    pub fn shrink(&mut self) {
        self.consume();
        if self.start == self.end {
            self.buffer = Vec::new();
            (self.start, self.end) = (0, 0);
        }
    }

    /// Lends the buffer out with what it holds at its front, so that a socket is read straight into it. Until
    /// [`Assembler::restore`] the assembler is as empty as it looks.
    pub(crate) fn lend(&mut self) -> Vec<u8> {
        self.consume();
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.truncate(self.end);
        buffer.drain(..self.start);
        (self.start, self.end) = (0, 0);
        buffer
    }

    /// Takes the buffer back, with what arrived behind what it held. Offset [`Assembler::offset`] is its first byte.
    pub(crate) fn restore(&mut self, buffer: Vec<u8>) {
        debug_assert!(self.start == self.end && self.buffer.is_empty());
        self.start = 0;
        self.end = buffer.len();
        self.buffer = buffer;
    }

    /// Parts with the buffer in which the messages since [`Assembler::restore`] lie; what is held behind them moves to
    /// a buffer of its size.
    pub(crate) fn detach(&mut self) -> Vec<u8> {
        self.consume();
        let rest = self.buffer[self.start..self.end].to_vec();
        (self.start, self.end) = (0, rest.len());
        std::mem::replace(&mut self.buffer, rest)
    }

    /// The time until `now` does not count: nobody read the socket.
    pub(crate) fn excuse(&mut self, now: Time) {
        if let Some(since) = &mut self.since {
            *since = (*since).max(now);
        }
    }

    /// Whether the stream ended with bytes that the framing has not seen, because it needs more of them: it may refuse them.
    fn last_words(&self, held: usize) -> bool {
        self.phase == Phase::Ending && held > self.asked
    }

    /// Asks the framing. `None` when it needs more, or gives the connection back (then the phase says so).
    fn ask(&mut self, held: usize) -> Result<Option<framing::Message>, Cause> {
        let bounds_head = self.framing.bounds_head();
        let most = if bounds_head { self.limits.message } else { self.limits.head };
        let bytes = &self.buffer[self.start..self.start + held.min(most)];
        match self.framing.step(bytes, &mut self.state) {
            Step::Message(message) if message.length > self.limits.message => {
                Err(Cause::TooBig { length: Some(message.length as u64), max: self.limits.message as u64 })
            }
            // It had said that these bytes are not a whole message.
            Step::Message(message) if message.length <= self.asked => {
                Err(Cause::BadLength { length: message.length as i64, least: self.asked as u64 + 1 })
            }
            Step::Message(message) => {
                self.known = Some(message);
                Ok(Some(message))
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
            let length = self.known.map(|message| message.length);
            return Some(Event::End { offset: self.offset, inside: held, length });
        }
        if held == 0 && self.known.is_none() {
            return None;
        }
        self.since.get_or_insert(now);
        match self.poll_timeout() {
            Some(deadline) if now >= deadline => {
                let in_body = self.known.is_some();
                Some(self.fail(Cause::Timeout { in_body }))
            }
            _ => None,
        }
    }

    fn fail(&mut self, cause: Cause) -> Event<'_> {
        self.phase = Phase::Over;
        let shown = (self.end - self.start).min(SHOWN);
        let head = self.buffer[self.start..self.start + shown].to_vec();
        Event::Failed(Failure { offset: self.offset, cause, head })
    }

    /// Drops the message that the last event lent out.
    fn consume(&mut self) {
        if self.taken == 0 {
            return;
        }
        self.start += self.taken;
        self.offset += self.taken as u64;
        self.taken = 0;
        self.next_message();
    }

    fn next_message(&mut self) {
        self.known = None;
        self.need = 1;
        self.asked = 0;
        self.since = None;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Drops what arrived of a message that a hole made worthless.
    fn drop_lost(&mut self) {
        let dropped = self.lost.min(self.end - self.start);
        self.start += dropped;
        self.offset += dropped as u64;
        self.lost -= dropped;
        if dropped > 0 && self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Makes room for `want` more bytes behind what is held.
    fn make_room(&mut self, want: usize) {
        let held = self.end - self.start;
        // Moving costs `held`: the `start` bytes that were consumed since the last move pay for it, or the growth does.
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
