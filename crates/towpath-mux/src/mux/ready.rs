//! What waits for a worker, whichever: the oldest first.
//!
//! What: messages of one read stand here as one thing, a row, until somebody takes them: as many of them as it may have, as a row
//! again ([`Ready::pop_row`]), or one ([`Ready::pop_front`]). A row that is not taken whole stays in front with what is left of it.
//!
//! Invariant: `messages` counts those in rows too, and no row is empty.

use std::collections::VecDeque;

use super::message::Message;
use super::run::Run;
use crate::Time;

#[derive(Debug, Default)]
pub(super) struct Ready {
    queue: VecDeque<Waiting>,
    messages: usize,
}

/// One thing that waits.
#[derive(Debug)]
pub(super) enum Waiting {
    One(Message),
    Row(Run),
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
        self.queue.front().map(|waiting| match waiting {
            Waiting::One(message) => message.received,
            Waiting::Row(run) => run.received(),
        })
    }

    pub(super) fn push_back(&mut self, message: Message) {
        self.messages += 1;
        self.queue.push_back(Waiting::One(message));
    }

    pub(super) fn push_front(&mut self, message: Message) {
        self.messages += 1;
        self.queue.push_front(Waiting::One(message));
    }

    pub(super) fn push_row(&mut self, run: Run) {
        self.messages += run.len();
        self.queue.push_back(Waiting::Row(run));
    }

    pub(super) fn pop_front(&mut self) -> Option<Message> {
        if let Some(Waiting::Row(run)) = self.queue.front_mut()
            && run.len() > 1
        {
            self.messages -= 1;
            return run.begin();
        }
        let waiting = self.queue.pop_front()?;
        self.messages -= 1;
        match waiting {
            Waiting::One(message) => Some(message),
            Waiting::Row(mut run) => run.begin(),
        }
    }

    /// The oldest message, or of the oldest row as many as make up no more than `most` messages and `bytes` bytes; one in any case.
    pub(super) fn pop_row(&mut self, most: usize, bytes: usize) -> Option<Waiting> {
        let count = match self.queue.front_mut()? {
            Waiting::One(_) => 1,
            Waiting::Row(run) => {
                let count = run.fitting(most, bytes).max(1);
                if count < run.len() {
                    self.messages -= count;
                    return Some(Waiting::Row(run.split_to(count)));
                }
                count
            }
        };
        self.messages -= count;
        self.queue.pop_front()
    }
}
