//! The queues of an engine, and the packets that wait for room in them.

use std::collections::VecDeque;

use crate::introspect::QueueSnapshot;
use crate::queue::{Channel, DefaultVerdict, Policy, Queue};
use crate::reorder::PacketId;

/// The queues by index. An index stays valid.
#[derive(Debug)]
pub(crate) struct QueueSet<C> {
    queues: Vec<Queue<C>>,
    /// The policy of queues that rules name and that are not configured.
    unserved: Policy,
    /// The numbers of those queues.
    implicit: Vec<u16>,
    /// Packets of a replay that wait for room, oldest first.
    pub(crate) backlog: VecDeque<PacketId>,
}

impl<C: Channel> QueueSet<C> {
    pub(crate) fn new(queues: Vec<Queue<C>>, unserved: Policy) -> Self {
        Self { queues, unserved, implicit: Vec::new(), backlog: VecDeque::new() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queues.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.queues.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Queue<C>> {
        self.queues.iter()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Queue<C>> {
        self.queues.iter_mut()
    }

    pub(crate) fn get(&self, index: usize) -> &Queue<C> {
        &self.queues[index]
    }

    pub(crate) fn get_mut(&mut self, index: usize) -> &mut Queue<C> {
        &mut self.queues[index]
    }

    pub(crate) fn find(&mut self, number: u16) -> Option<&mut Queue<C>> {
        self.queues.iter_mut().find(|queue| queue.number() == number)
    }

    /// The index of a queue that a rule names. A queue that is not configured is created.
    pub(crate) fn index(&mut self, number: u16) -> usize {
        let known = self.queues.iter().position(|queue| queue.number() == number);
        known.unwrap_or_else(|| {
            self.queues.push(Queue::new(number, self.unserved));
            self.implicit.push(number);
            self.queues.len() - 1
        })
    }

    /// Configures a queue, now or again.
    pub(crate) fn configure(&mut self, number: u16, policy: Policy) {
        self.implicit.retain(|implicit| *implicit != number);
        match self.find(number) {
            Some(queue) => queue.set_policy(policy),
            None => self.queues.push(Queue::new(number, policy)),
        }
    }

    /// The default verdict for packets of queues that are not configured.
    pub(crate) fn unserved(&self) -> DefaultVerdict {
        self.unserved.default
    }

    pub(crate) fn set_unserved(&mut self, default: DefaultVerdict) {
        self.unserved.default = default;
        for queue in self.queues.iter_mut().filter(|queue| self.implicit.contains(&queue.number())) {
            queue.set_policy(self.unserved);
        }
    }

    /// Returns true if no inspector has a frame.
    pub(crate) fn is_drained(&self) -> bool {
        self.queues.iter().all(|queue| queue.open() == 0)
    }

    /// Snapshots of the queues, by number.
    pub(crate) fn snapshots(&mut self) -> Vec<QueueSnapshot> {
        let mut snapshots: Vec<_> = self.queues.iter_mut().map(Queue::snapshot).collect();
        snapshots.sort_by_key(|queue| queue.number);
        snapshots
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    #[test]
    fn an_implicit_queue_has_the_unserved_policy_until_it_is_configured() {
        let mut queues = QueueSet::<Infallible>::new(Vec::new(), Policy::default());
        let index = queues.index(5);
        assert_eq!((index, queues.index(5), queues.len()), (0, 0, 1));
        queues.set_unserved(DefaultVerdict::Pass);
        assert_eq!(queues.get(index).policy().default, DefaultVerdict::Pass);
        queues.configure(5, Policy::default());
        queues.set_unserved(DefaultVerdict::Pass);
        assert_eq!(queues.get(index).policy().default, DefaultVerdict::Drop);
        assert_eq!(queues.len(), 1);
    }
}
