//! Frames on their way, and the numbers that hold them.
//!
//! Each successful call with MSG_ZEROCOPY and at least one byte has the socket's next number: u32 on the wire, 64 bits here.
//! A call covers bytes of one frame or of several (gathered), and a frame that was sent in parts has several numbers. So:
//!
//! - frames stand in a queue by sequence number; all before the cursor are handed over entirely;
//! - numbers stand in a queue from the oldest outstanding one; each names the frames that its call touched;
//! - a frame is done when all its bytes are handed over and no number that touched it is outstanding: also when its last
//!   bytes went plain while an earlier number of it is still out.
//!
//! Numbers are found by their distance from the oldest: O(1), no matter where u32 wraps. Ranges may come in any order, be
//! merged, repeat what was said, or speak of calls that never were: a range costs time for the numbers that are outstanding
//! and in it, never for those that it claims.
//!
//! References: Documentation/networking/msg_zerocopy.rst, "Notification Parsing".

use std::collections::VecDeque;
use std::ops::Range as Span;

use crate::notification::Range;
use towpath_wire::Time;

#[derive(Debug)]
struct Frame<T> {
    /// Empty when it was given back out of turn.
    token: Option<T>,
    len: usize,
    sent: usize,
    /// Outstanding numbers that touched it.
    numbers: u32,
}

#[derive(Clone, Copy, Debug)]
struct Number {
    /// Sequence number of the first frame, and how many frames.
    first: u64,
    frames: u32,
    bytes: u64,
    at: Time,
    completed: bool,
}

/// What a range did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Completed {
    /// The first number of the range, in 64 bits, where it is one that was given out.
    pub(crate) first: Option<u64>,
    pub(crate) numbers: u64,
    pub(crate) bytes: u64,
    pub(crate) duplicates: u64,
    pub(crate) unknown: u64,
    /// It began behind the oldest outstanding number.
    pub(crate) out_of_order: bool,
}

#[derive(Debug)]
pub(crate) struct Flight<T> {
    frames: VecDeque<Frame<T>>,
    /// Sequence number of the first frame, and of the first that is not entirely handed over.
    base: u64,
    cursor: u64,
    numbers: VecDeque<Number>,
    /// The number of the first of them.
    oldest: u64,
    outstanding: usize,
    pinned: u64,
    unsent: u64,
    /// Frames that hold a token.
    held: usize,
    done: VecDeque<T>,
    /// Whether those that are done are kept in `done`.
    keep_done: bool,
}

impl<T> Flight<T> {
    pub(crate) fn new(first_number: u64) -> Self {
        Self {
            frames: VecDeque::new(),
            base: 0,
            cursor: 0,
            numbers: VecDeque::new(),
            oldest: first_number,
            outstanding: 0,
            pinned: 0,
            unsent: 0,
            held: 0,
            done: VecDeque::new(),
            keep_done: true,
        }
    }

    /// Frames that were pushed and are not done.
    #[inline]
    pub(crate) fn held(&self) -> usize {
        self.held
    }

    /// Numbers given out and not completed.
    pub(crate) fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Places between the oldest outstanding number and the next: what the queue of numbers takes.
    pub(crate) fn window(&self) -> usize {
        self.numbers.len()
    }

    /// Bytes of outstanding numbers.
    pub(crate) fn pinned(&self) -> u64 {
        self.pinned
    }

    /// Bytes not handed over yet.
    #[inline]
    pub(crate) fn unsent(&self) -> u64 {
        self.unsent
    }

    /// The number that the next zero-copy call will have.
    pub(crate) fn next_number(&self) -> u64 {
        self.oldest + self.numbers.len() as u64
    }

    /// Since when the oldest outstanding number is out.
    pub(crate) fn oldest_at(&self) -> Option<Time> {
        self.numbers.front().map(|number| number.at)
    }

    #[inline]
    pub(crate) fn push(&mut self, token: T, len: usize) {
        self.frames.push_back(Frame { token: Some(token), len: 0, sent: 0, numbers: 0 });
        // Not built with the rest, which is then moved in larger pieces: reading those would have to wait for this one.
        if let Some(frame) = self.frames.back_mut() {
            frame.len = len;
        }
        self.held += 1;
        self.unsent += len as u64;
    }

    /// From now on what is done is dropped where it stands.
    pub(crate) fn drop_done(&mut self) {
        self.keep_done = false;
    }

    /// The frame that was pushed last.
    pub(crate) fn last_pushed(&mut self) -> Option<&mut T> {
        self.frames.back_mut()?.token.as_mut()
    }

    /// Whether all frames are entirely handed over.
    pub(crate) fn is_flushed(&self) -> bool {
        self.unflushed() == 0
    }

    /// How many are not.
    #[inline]
    pub(crate) fn unflushed(&self) -> usize {
        self.frames.len() - (self.cursor - self.base) as usize
    }

    /// The frame that is `at` behind the first one not entirely handed over, with what is left of it.
    #[inline]
    pub(crate) fn waiting(&self, at: usize) -> Option<(&T, Span<usize>)> {
        let frame = self.frames.get((self.cursor - self.base) as usize + at)?;
        Some((frame.token.as_ref()?, frame.sent..frame.len))
    }

    /// The kernel took `bytes` from the cursor on, with a number of their own or plain. Of a datagram it takes all or none,
    /// which may be zero bytes.
    pub(crate) fn advance(&mut self, bytes: u64, with_number: bool, now: Time) {
        debug_assert!(bytes <= self.unsent);
        let first = self.cursor;
        let mut frames = 0;
        let mut left = bytes;
        while let Some(frame) = self.frames.get_mut((self.cursor - self.base) as usize) {
            let part = ((frame.len - frame.sent) as u64).min(left);
            frames += 1;
            left -= part;
            frame.sent += part as usize;
            frame.numbers += u32::from(with_number);
            if frame.sent < frame.len {
                break;
            }
            if frame.numbers == 0 && frame.token.is_some() {
                self.held -= 1;
                finish(&mut frame.token, self.keep_done.then_some(&mut self.done));
            }
            self.cursor += 1;
            if left == 0 {
                break;
            }
        }
        self.unsent -= bytes - left;
        if with_number {
            self.numbers.push_back(Number { first, frames, bytes, at: now, completed: false });
            self.outstanding += 1;
            self.pinned += bytes;
        }
        self.trim();
    }

    /// The kernel gave its next `count` numbers to calls that failed, and they are over.
    pub(crate) fn skip(&mut self, count: u64, now: Time) {
        for _ in 0..count {
            let over = Number { first: self.cursor, frames: 0, bytes: 0, at: now, completed: true };
            self.numbers.push_back(over);
        }
        self.trim();
    }

    /// A notification came. `each` is told the bytes and the time of each number that it completes.
    pub(crate) fn complete(&mut self, range: Range, mut each: impl FnMut(u64, Time)) -> Completed {
        let mut result = Completed::default();
        // The distance of u32 numbers, as the nearer of both ways around: at most 2^31 numbers are outstanding.
        let ahead = range.first.wrapping_sub(self.oldest as u32) as i32;
        let start = i128::from(self.oldest) + i128::from(ahead);
        let end = start + i128::from(range.count());
        let (oldest, next) = (i128::from(self.oldest), i128::from(self.next_number()));
        result.out_of_order = start != oldest;
        result.first = u64::try_from(start).ok().filter(|first| *first < self.next_number());
        let clipped = start.clamp(oldest, next)..end.clamp(oldest, next);
        result.duplicates = (end.min(oldest) - start.min(oldest)) as u64;
        result.unknown = (end.max(next) - start.max(next)) as u64;
        for at in (clipped.start - oldest) as usize..(clipped.end - oldest) as usize {
            let Some(number) = self.numbers.get_mut(at) else { break };
            if std::mem::replace(&mut number.completed, true) {
                result.duplicates += 1;
                continue;
            }
            let number = *number;
            result.numbers += 1;
            result.bytes += number.bytes;
            each(number.bytes, number.at);
            self.release(number);
        }
        self.trim();
        result
    }

    fn release(&mut self, number: Number) {
        self.outstanding -= 1;
        self.pinned -= number.bytes;
        let from = (number.first - self.base) as usize;
        for at in from..from + number.frames as usize {
            let Some(frame) = self.frames.get_mut(at) else { break };
            frame.numbers -= 1;
            if frame.numbers == 0 && frame.sent == frame.len && frame.token.is_some() {
                self.held -= 1;
                finish(&mut frame.token, self.keep_done.then_some(&mut self.done));
            }
        }
    }

    /// Forgets what is over at the front of both queues. Numbers first: they name frames by their place.
    fn trim(&mut self) {
        while self.numbers.front().is_some_and(|number| number.completed) {
            self.numbers.pop_front();
            self.oldest += 1;
        }
        // A completed number behind the oldest names frames that are done, and is not looked at again.
        while self.frames.front().is_some_and(|frame| frame.token.is_none()) {
            self.frames.pop_front();
            self.base += 1;
        }
    }

    pub(crate) fn poll_done(&mut self) -> Option<T> {
        self.done.pop_front()
    }

    /// Takes everything out: frames that are done, frames that no number touches (never sent, or not in flight), and
    /// frames that the kernel may still read; and the bytes of each outstanding number.
    pub(crate) fn take_all(&mut self) -> Abandoned<T> {
        let mut abandoned =
            Abandoned { done: self.done.drain(..).collect(), unsent: Vec::new(), in_flight: Vec::new() };
        for frame in self.frames.drain(..) {
            let Some(token) = frame.token else { continue };
            if frame.numbers == 0 { abandoned.unsent.push(token) } else { abandoned.in_flight.push(token) }
        }
        let next = self.next_number();
        self.numbers.clear();
        *self = Self { base: self.cursor, cursor: self.cursor, keep_done: self.keep_done, ..Self::new(next) };
        abandoned
    }

    /// Bytes of each outstanding number.
    pub(crate) fn outstanding_bytes(&self) -> impl Iterator<Item = u64> {
        self.numbers.iter().filter(|number| !number.completed).map(|number| number.bytes)
    }
}

/// A frame is done: it goes where those that are done are kept, or is dropped, without being moved.
#[inline]
fn finish<T>(token: &mut Option<T>, done: Option<&mut VecDeque<T>>) {
    match done {
        Some(done) => done.extend(token.take()),
        None => *token = None,
    }
}

/// What was left of a connection that ended.
#[derive(Debug, Default)]
pub struct Abandoned<T> {
    /// Completed before the end, and not collected yet.
    pub done: Vec<T>,
    /// Not handed to the kernel, or not all of it, with no number outstanding: free.
    pub unsent: Vec<T>,
    /// The kernel may still read them, and will never say when it is done: for a [`Quarantine`](crate::Quarantine).
    pub in_flight: Vec<T>,
}
