//! The queues of an engine, and the packets that wait for room in them.

use std::collections::VecDeque;

use crate::queue::{Channel, DefaultVerdict, Policy, Queue, QueueSnapshot};
use crate::reorder::{PacketId, Shares};

/// No queue, in [`QueueSet::by_number`]. Numbers are 1..65535, so no index has this value.
const NONE: u16 = u16::MAX;

/// The queues by index. An index stays valid.
///
/// The configuration and the rules create queues. No verdict does: an inspector names only queues of the configuration
/// ([`Policy::may_queue`]).
#[derive(Debug)]
pub(crate) struct QueueSet<C> {
    queues: Vec<Queue<C>>,
    /// The index of each queue by its number, up to the largest number.
    by_number: Vec<u16>,
    /// The policy of queues that rules name and that are not configured.
    unserved: Policy,
    /// The numbers of those queues.
    implicit: Vec<u16>,
    /// Packets of a replay that wait for room, oldest first.
    pub(crate) backlog: VecDeque<PacketId>,
}

impl<C: Channel> QueueSet<C> {
    pub(crate) fn new(queues: Vec<Queue<C>>, unserved: Policy) -> Self {
        let mut set = Self {
            queues: Vec::with_capacity(queues.len()),
            by_number: Vec::new(),
            unserved,
            implicit: Vec::new(),
            backlog: VecDeque::new(),
        };
        queues.into_iter().for_each(|queue| set.push(queue));
        set
    }

    fn push(&mut self, queue: Queue<C>) {
        let number = usize::from(queue.number());
        if self.by_number.len() <= number {
            self.by_number.resize(number + 1, NONE);
        }
        self.by_number[number] = self.queues.len() as u16;
        self.queues.push(queue);
    }

    #[inline]
    fn position(&self, number: u16) -> Option<usize> {
        let index = *self.by_number.get(usize::from(number))?;
        (index != NONE).then_some(usize::from(index))
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
        self.position(number).map(|index| &mut self.queues[index])
    }

    /// The index of a queue that a rule names. A queue that is not configured is created.
    pub(crate) fn index(&mut self, number: u16) -> usize {
        self.position(number).unwrap_or_else(|| {
            self.push(Queue::new(number, self.unserved.clone()));
            self.implicit.push(number);
            self.queues.len() - 1
        })
    }

    /// Configures a queue, now or again.
    pub(crate) fn configure(&mut self, number: u16, policy: Policy, shares: &mut Shares) {
        self.implicit.retain(|implicit| *implicit != number);
        match self.find(number) {
            Some(queue) => queue.set_policy(policy),
            None => self.push(Queue::new(number, policy)),
        }
        self.find(number).into_iter().for_each(|queue| queue.open_accounts(shares));
    }

    pub(crate) fn set_unserved(&mut self, default: DefaultVerdict) {
        self.unserved.default = default;
        for queue in self.queues.iter_mut().filter(|queue| self.implicit.contains(&queue.number())) {
            queue.set_policy(self.unserved.clone());
        }
    }

    /// Returns true if an inspector may send packets of its own.
    pub(crate) fn may_inject(&self) -> bool {
        self.queues.iter().any(Queue::may_inject)
    }

    /// Returns true if no inspector has a frame.
    pub(crate) fn is_drained(&self) -> bool {
        self.queues.iter().all(|queue| queue.open() == 0)
    }

    /// Snapshots of the queues, by number.
    pub(crate) fn snapshots(&mut self, shares: &Shares) -> Vec<QueueSnapshot> {
        let mut snapshots: Vec<_> = self.queues.iter_mut().map(|queue| queue.snapshot(shares)).collect();
        snapshots.sort_unstable_by_key(|queue| queue.number);
        snapshots
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::reorder::{Account, Limits};

    #[test]
    fn an_implicit_queue_has_the_unserved_policy_until_it_is_configured() {
        let mut queues = QueueSet::<Infallible>::new(Vec::new(), Policy::default());
        let index = queues.index(5);
        assert_eq!((index, queues.index(5), queues.len()), (0, 0, 1));
        assert_eq!(queues.get(index).account(), Account::ENGINE);
        queues.set_unserved(DefaultVerdict::Pass);
        assert_eq!(queues.get(index).policy().default, DefaultVerdict::Pass);
        let mut shares = Shares::new(Limits::default(), true);
        queues.configure(5, Policy::default(), &mut shares);
        queues.set_unserved(DefaultVerdict::Pass);
        assert_eq!(queues.get(index).policy().default, DefaultVerdict::Drop);
        assert_eq!(queues.len(), 1);
        assert_ne!(queues.get(index).account(), Account::ENGINE);
        assert_eq!((queues.index(65_535), queues.index(1), queues.index(5)), (1, 2, 0));
        assert!(queues.find(2).is_none() && queues.find(65_534).is_none());
        assert_eq!(queues.find(65_535).map(|queue| queue.number()), Some(65_535));
    }
}
