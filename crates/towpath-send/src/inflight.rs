//! Frames in flight, and the completion numbers that cover them.
//!
//! Each successful call with MSG_ZEROCOPY and at least one byte gets the socket's next number: u32 on the wire, 64 bits here. A call
//! covers bytes of one frame or of several (gathered), and a frame that was sent in parts has several numbers.
//!
//! - Frames are queued by sequence number; the kernel has accepted all frames before the cursor completely.
//! - Numbers are queued from the oldest outstanding one; each has the range of frames that its call covered.
//! - A frame is complete when all its bytes are accepted and no number that covers it is outstanding. This also holds if its last
//!   bytes were sent plain while an earlier number was outstanding.
//!
//! A number is found by its distance from the oldest in O(1), wherever u32 wraps. Ranges may arrive in any order, be merged, repeat,
//! or include numbers that were never assigned: the cost of a range is bounded by the outstanding numbers in it.
//!
//! References: Documentation/networking/msg_zerocopy.rst, "Notification Parsing".

use std::collections::VecDeque;
use std::ops::Range as Span;

use crate::notification::Range;
use towpath_wire::Time;

#[derive(Debug)]
struct Frame<T> {
    /// `None` after the frame completed out of order.
    token: Option<T>,
    len: usize,
    sent: usize,
    /// Count of outstanding numbers that cover it.
    numbers: u32,
}

#[derive(Clone, Copy, Debug)]
struct Number {
    /// Sequence number of the first frame, and the number of frames.
    first: u64,
    frames: u32,
    bytes: u64,
    at: Time,
    completed: bool,
}

/// Result of a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Completed {
    /// The first number of the range in 64 bits, if it was assigned.
    pub(crate) first: Option<u64>,
    pub(crate) numbers: u64,
    pub(crate) bytes: u64,
    pub(crate) duplicates: u64,
    pub(crate) unknown: u64,
    /// The range did not begin at the oldest outstanding number.
    pub(crate) out_of_order: bool,
}

#[derive(Debug)]
pub(crate) struct Inflight<T> {
    frames: VecDeque<Frame<T>>,
    /// Sequence number of the first frame, and of the first one that is not completely accepted.
    base: u64,
    cursor: u64,
    numbers: VecDeque<Number>,
    /// The number of the first entry of `numbers`.
    oldest: u64,
    outstanding: usize,
    pinned: u64,
    unsent: u64,
    /// Count of frames with a token.
    held: usize,
    done: VecDeque<T>,
    /// True if completed frames are kept in `done`.
    keep_done: bool,
}

impl<T> Inflight<T> {
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

    /// Frames that were pushed and are not completed.
    #[inline]
    pub(crate) fn held(&self) -> usize {
        self.held
    }

    /// Count of numbers assigned and not completed.
    pub(crate) fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Length of the queue of numbers, from the oldest outstanding one.
    pub(crate) fn number_span(&self) -> usize {
        self.numbers.len()
    }

    /// Bytes of outstanding numbers.
    pub(crate) fn pinned(&self) -> u64 {
        self.pinned
    }

    /// Bytes not yet accepted by the kernel.
    #[inline]
    pub(crate) fn unsent(&self) -> u64 {
        self.unsent
    }

    /// The number of the next zero-copy call.
    pub(crate) fn next_number(&self) -> u64 {
        self.oldest + self.numbers.len() as u64
    }

    /// Time of the call with the oldest outstanding number.
    pub(crate) fn oldest_at(&self) -> Option<Time> {
        self.numbers.front().map(|number| number.at)
    }

    #[inline]
    pub(crate) fn push(&mut self, token: T, len: usize) {
        self.frames.push_back(Frame { token: Some(token), len: 0, sent: 0, numbers: 0 });
        // Written separately: moving the struct in larger pieces than it was written in stalls store forwarding.
        if let Some(frame) = self.frames.back_mut() {
            frame.len = len;
        }
        self.held += 1;
        self.unsent += len as u64;
    }

    /// Drops completed frames instead of keeping them.
    pub(crate) fn drop_done(&mut self) {
        self.keep_done = false;
    }

    /// The frame that was pushed last.
    pub(crate) fn last_pushed(&mut self) -> Option<&mut T> {
        self.frames.back_mut()?.token.as_mut()
    }

    /// Returns true if all frames are completely accepted.
    pub(crate) fn is_flushed(&self) -> bool {
        self.unflushed() == 0
    }

    /// Count of frames that are not completely accepted.
    #[inline]
    pub(crate) fn unflushed(&self) -> usize {
        self.frames.len() - (self.cursor - self.base) as usize
    }

    /// The frame at position `at` from the cursor, with its unsent part.
    #[inline]
    pub(crate) fn waiting(&self, at: usize) -> Option<(&T, Span<usize>)> {
        let frame = self.frames.get((self.cursor - self.base) as usize + at)?;
        Some((frame.token.as_ref()?, frame.sent..frame.len))
    }

    /// The kernel accepted `bytes` from the cursor on, with a new number or plain. A datagram is accepted completely; it may have zero
    /// bytes.
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

    /// The kernel assigned its next `count` numbers to calls that failed; they count as completed.
    pub(crate) fn skip(&mut self, count: u64, now: Time) {
        for _ in 0..count {
            let over = Number { first: self.cursor, frames: 0, bytes: 0, at: now, completed: true };
            self.numbers.push_back(over);
        }
        self.trim();
    }

    /// Processes a notification. Calls `each` with the bytes and the time of each number that it completes.
    pub(crate) fn complete(&mut self, range: Range, mut each: impl FnMut(u64, Time)) -> Completed {
        let mut result = Completed::default();
        // Signed distance of u32 numbers; at most 2^31 numbers are outstanding.
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

    /// Removes completed entries at the front of both queues, numbers first, because they refer to frames by position.
    fn trim(&mut self) {
        while self.numbers.front().is_some_and(|number| number.completed) {
            self.numbers.pop_front();
            self.oldest += 1;
        }
        // A completed number behind the oldest refers to completed frames and is not used again.
        while self.frames.front().is_some_and(|frame| frame.token.is_none()) {
            self.frames.pop_front();
            self.base += 1;
        }
    }

    pub(crate) fn poll_done(&mut self) -> Option<T> {
        self.done.pop_front()
    }

    /// Removes everything: completed frames, frames without outstanding numbers (unsent), and frames that the kernel may still read.
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

/// Completes a frame: appends its token to `done`, or drops it in place.
#[inline]
fn finish<T>(token: &mut Option<T>, done: Option<&mut VecDeque<T>>) {
    match done {
        Some(done) => done.extend(token.take()),
        None => *token = None,
    }
}

/// The frames of a connection that ended.
#[derive(Debug, Default)]
pub struct Abandoned<T> {
    /// Completed before the end, and not collected.
    pub done: Vec<T>,
    /// Not completely accepted by the kernel, with no number outstanding: free for reuse.
    pub unsent: Vec<T>,
    /// The kernel may still read these, and no completion can arrive: move them to a [`Quarantine`](crate::Quarantine).
    pub in_flight: Vec<T>,
}
