//! A worker's local queue: messages that it has not begun, and completions that the core does not know yet.
//!
//! What: the worker takes messages from here and records completions here. If it gets stuck in a message,
//! other workers take the messages that it has not begun, and its completed replies are sent.
//!
//! Races: the lock is held briefly, never while the worker processes a message. Lock order: the server's
//! mutex first.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};

use crate::Time;
use crate::mux::{Batch, Completion, Message, Mux, Ticket, psock, worker};

/// Size of the blocks that replies of a batch are written into, so that one write sends many. A block with
/// less free space than the second value is replaced.
const BLOCK: usize = 64 << 10;
const LEAST: usize = 4 << 10;

/// Messages that a worker has not begun, and its completions.
#[derive(Debug, Default)]
pub(super) struct LocalQueue {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
pub(super) struct Inner {
    pub(super) messages: VecDeque<Message>,
    pub(super) completions: Vec<Completion>,
    /// The batch that the worker read itself, with the number of messages in progress, and done but not
    /// applied.
    pub(super) batch: Option<Batch>,
    working: usize,
    done: usize,
    /// Replies to these messages, in pieces, each with its number of replies. `block` is the last piece, which still grows.
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
    /// Applies the completions to the core.
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

    /// The worker has read a batch. Called with the server's mutex, so that core and local queue agree.
    pub(super) fn put(&mut self, batch: Batch) {
        (self.batch, self.working, self.done) = (Some(batch), 0, 0);
    }

    /// Removes and returns the messages that are not begun. Splits a batch.
    pub(super) fn give_back(&mut self, mux: &mut Mux, id: worker::Id) -> Vec<Ticket> {
        let mut back: Vec<_> = self.messages.drain(..).map(|message| message.ticket()).collect();
        if let Some(batch) = self.batch.take() {
            mux.split_local(id);
            back.extend(batch.rest());
        }
        back
    }

    /// Removes and returns the messages of a connection that are not begun. Splits a batch of it.
    pub(super) fn take_of(&mut self, psock: psock::Id, mux: &mut Mux, id: worker::Id) -> Vec<Ticket> {
        let mut taken = Vec::new();
        self.messages.retain(|message| {
            let other = message.psock() != psock;
            if !other {
                taken.push(message.ticket());
            }
            other
        });
        if let Some(batch) = self.batch.take_if(|batch| batch.psock() == psock) {
            mux.split_local(id);
            taken.extend(batch.rest());
        }
        taken
    }

    /// Begins up to `most` messages of the batch and returns their indices.
    #[inline]
    pub(super) fn advance(&mut self, most: usize) -> Range<usize> {
        let places = self.batch.as_mut().map_or(0..0, |batch| batch.advance(most));
        self.working += places.len();
        places
    }

    /// Marks the last `count` begun messages of the batch as not begun.
    pub(super) fn rewind(&mut self, count: usize) {
        if let Some(batch) = &mut self.batch {
            batch.rewind(count);
            self.working -= count;
        }
    }

    /// Ends the growing piece.
    fn cut(&mut self) {
        if self.answers > 0 {
            let block = std::mem::take(&mut self.block);
            self.replies.push((block.freeze(), std::mem::take(&mut self.answers)));
        }
    }

    /// The first `count` messages in progress are done, with these replies. Consecutive replies in the
    /// worker's buffer become one piece without copying.
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

    /// Adds a long reply to the current message.
    pub(super) fn answer(&mut self, bytes: Bytes) {
        self.cut();
        self.replies.push((bytes, 1));
    }
}
