//! A worker's local_queue: what it has not begun, and what it has done and not told.
//!
//! What: the worker takes messages from here and puts here what became of them. Others may take both when it gets stuck in a
//! message: then what it has not begun goes to them, and answers to what it has done leave.
//!
//! Races: the local_queue is locked for moments only, never while the worker is at a message. Who also has the server's lock took that
//! one first.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};

use crate::Time;
use crate::mux::{Batch, Completion, Message, Mux, Ticket, worker};

/// Answers of a batch are written into blocks of so many bytes, so that one write has many; another one is begun when there is no more
/// room than this.
const BLOCK: usize = 64 << 10;
const LEAST: usize = 4 << 10;

/// What a worker has not begun, and has done and not told. Others may take both when it gets stuck.
#[derive(Debug, Default)]
pub(super) struct LocalQueue {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
pub(super) struct Inner {
    pub(super) messages: VecDeque<Message>,
    pub(super) completions: Vec<Completion>,
    /// Messages that the worker read itself: so many of them it has begun, and so many it has done and not told.
    pub(super) batch: Option<Batch>,
    working: usize,
    done: usize,
    /// Answers to those, in pieces of so many; the last piece is growing.
    replies: Vec<(Bytes, u32)>,
    block: BytesMut,
    answers: u32,
}

impl LocalQueue {
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Tells the core what has been answered and done.
    pub(super) fn settle(&mut self, mux: &mut Mux, id: worker::Id, now: Time) {
        if let Some(batch) = &self.batch {
            let over = batch.is_empty() && self.working == 0;
            self.cut();
            mux.handle_local_batch(id, std::mem::take(&mut self.done), self.replies.drain(..), now);
            if over {
                self.batch = None;
            }
        }
        if !self.completions.is_empty() {
            mux.handle_completions(id, self.completions.drain(..), now);
        }
    }

    /// The worker reads a batch. Under the server's lock, so that the core and the local_queue agree on it.
    pub(super) fn put(&mut self, batch: Batch) {
        (self.batch, self.working, self.done) = (Some(batch), 0, 0);
    }

    /// Gives up what is not begun. Of a batch, the rest becomes messages like others.
    pub(super) fn give_back(&mut self, mux: &mut Mux, id: worker::Id) -> Vec<Ticket> {
        let mut back: Vec<_> = self.messages.drain(..).map(|message| message.ticket()).collect();
        if let Some(batch) = self.batch.take() {
            mux.split_local(id);
            back.extend(batch.rest());
        }
        back
    }

    /// The places of the batch's next messages, at most so many, which are thereby begun; empty when there are none.
    #[inline]
    pub(super) fn advance(&mut self, most: usize) -> Range<usize> {
        let places = self.batch.as_mut().map_or(0..0, |batch| batch.advance(most));
        self.working += places.len();
        places
    }

    /// Those of the batch that were begun last and are not to be done are not begun.
    pub(super) fn rewind(&mut self, count: usize) {
        if let Some(batch) = &mut self.batch {
            batch.rewind(count);
            self.working -= count;
        }
    }

    /// The growing piece is whole.
    fn cut(&mut self) {
        if self.answers > 0 {
            let block = std::mem::take(&mut self.block);
            self.replies.push((block.freeze(), std::mem::take(&mut self.answers)));
        }
    }

    /// So many of the batch's messages that were begun are done, the first ones, and this answers them. It is not copied: answers that
    /// were written one behind the other into the worker's buffer are one piece.
    #[inline]
    pub(super) fn done(&mut self, count: usize, answer: &mut BytesMut, answers: u32) {
        self.working -= count;
        self.done += count;
        if answers == 0 {
            return;
        }
        let end = self.block.as_ptr().addr() + self.block.len();
        if end != answer.as_ptr().addr() {
            self.cut();
        }
        self.block.unsplit(answer.split());
        self.answers += answers;
        if answer.capacity() < LEAST {
            answer.reserve(BLOCK);
        }
    }

    /// A long answer to the message that is worked on.
    pub(super) fn answer(&mut self, bytes: Bytes) {
        self.cut();
        self.replies.push((bytes, 1));
    }
}
