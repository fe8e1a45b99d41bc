//! What waits for a worker, whichever: the oldest first.
//!
//! What: messages of one read stand here as one thing, a row, until somebody takes them: as many of them as it may have, as a row
//! again ([`Ready::pop_batch`]), or one ([`Ready::pop_front`]). A row that is not taken whole stays in front with what is left of it.
//!
//! Invariant: `messages` counts those in rows too, and no row is empty.

use std::collections::VecDeque;

use super::batch::Batch;
use super::message::Message;
use crate::Time;

#[derive(Debug, Default)]
pub(super) struct Ready {
    queue: VecDeque<Entry>,
    messages: usize,
}

/// One thing that waits.
#[derive(Debug)]
pub(super) enum Entry {
    Message(Message),
    Batch(Batch),
}

impl Ready {
    /// Messages that wait.
    pub(super) const fn len(&self) -> usize {
        self.messages
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.messages == 0
    }

    /// When the oldest of them was whole.
    pub(super) fn oldest(&self) -> Option<Time> {
        self.queue.front().map(|entry| match entry {
            Entry::Message(message) => message.received,
            Entry::Batch(batch) => batch.received(),
        })
    }

    pub(super) fn push_back(&mut self, message: Message) {
        self.messages += 1;
        self.queue.push_back(Entry::Message(message));
    }

    pub(super) fn push_front(&mut self, message: Message) {
        self.messages += 1;
        self.queue.push_front(Entry::Message(message));
    }

    pub(super) fn push_batch(&mut self, batch: Batch) {
        self.messages += batch.len();
        self.queue.push_back(Entry::Batch(batch));
    }

    pub(super) fn pop_front(&mut self) -> Option<Message> {
        if let Some(Entry::Batch(batch)) = self.queue.front_mut()
            && batch.len() > 1
        {
            self.messages -= 1;
            return batch.begin();
        }
        let entry = self.queue.pop_front()?;
        self.messages -= 1;
        match entry {
            Entry::Message(message) => Some(message),
            Entry::Batch(mut batch) => batch.begin(),
        }
    }

    /// The oldest message, or of the oldest row as many as make up no more than `most` messages and `bytes` bytes; one in any case.
    pub(super) fn pop_batch(&mut self, most: usize, bytes: usize) -> Option<Entry> {
        let count = match self.queue.front_mut()? {
            Entry::Message(_) => 1,
            Entry::Batch(batch) => {
                let count = batch.fitting(most, bytes).max(1);
                if count < batch.len() {
                    self.messages -= count;
                    return Some(Entry::Batch(batch.split_to(count)));
                }
                count
            }
        };
        self.messages -= count;
        self.queue.pop_front()
    }
}
