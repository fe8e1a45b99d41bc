//! The ready queue: messages that any worker may take, oldest first.
//!
//! What: messages of one read stay together as a batch until a worker takes them: as many as it may have, as
//! a batch ([`Ready::pop_batch`]), or one ([`Ready::pop_front`]). The rest of a batch stays at the front.
//!
//! Invariant: `messages` includes the messages in batches. No batch is empty.

use std::collections::VecDeque;

use super::batch::Batch;
use super::message::Message;
use crate::Time;

#[derive(Debug, Default)]
pub(super) struct Ready {
    queue: VecDeque<Entry>,
    messages: usize,
}

/// An entry of the queue.
#[derive(Debug)]
pub(super) enum Entry {
    Message(Message),
    Batch(Batch),
}

impl Ready {
    /// Number of messages.
    pub(super) const fn len(&self) -> usize {
        self.messages
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.messages == 0
    }

    /// When the oldest message was complete.
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

    /// Removes the oldest message, or up to `most` messages and `bytes` bytes of the oldest batch; at least
    /// one message.
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
