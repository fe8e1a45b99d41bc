//! [`Order::Key`](super::Order::Key): messages with the same hash are done one at a time.

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};

use super::message::Message;

/// One queue per hash. A queue exists while a message with its hash is ready or with a worker; it holds the messages after that one.
#[derive(Debug, Default)]
pub(super) struct KeyQueues {
    queues: HashMap<u32, VecDeque<Message>>,
}

impl KeyQueues {
    /// Returns the message if it may become ready. Queues it if one with the same hash is ready or with a worker.
    pub(super) fn enter(&mut self, message: Message) -> Option<Message> {
        match self.queues.entry(message.hash) {
            Entry::Occupied(mut queue) => {
                queue.get_mut().push_back(message);
                None
            }
            Entry::Vacant(queue) => {
                queue.insert(VecDeque::new());
                Some(message)
            }
        }
    }

    /// A message with this hash is done. Returns the next one, which becomes ready.
    pub(super) fn next(&mut self, hash: u32) -> Option<Message> {
        let next = self.queues.get_mut(&hash)?.pop_front();
        if next.is_none() {
            self.queues.remove(&hash);
        }
        next
    }

    /// Number of queued messages.
    pub(super) fn len(&self) -> usize {
        self.queues.values().map(VecDeque::len).sum()
    }
}
