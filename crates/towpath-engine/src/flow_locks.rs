//! Locks of flows: the order of rule evaluation within a flow.
//!
//! While the rest of a packet's walk can create a state that the next packet of its flow may need, the packet locks the flow: later
//! packets are deferred until the lock is released. Each bucket of the reorder buffer has one lock: two flows in one bucket may wait for each
//! other.
//!
//! Invariant: a bucket that is not locked and has deferred packets is in `released`.

use std::collections::{HashMap, VecDeque};

use crate::reorder::PacketId;

/// The number of buckets, for locks and for the reorder buffer of a live engine.
pub(crate) const BUCKETS: usize = 16_384;

#[derive(Debug)]
pub(crate) struct FlowLocks {
    /// The number of packets that lock each bucket.
    holders: Box<[u32; BUCKETS]>,
    /// The deferred packets of a bucket, oldest first. No queue is empty.
    deferred: HashMap<u16, VecDeque<PacketId>>,
    /// Buckets with deferred packets whose last lock was released.
    released: Vec<u16>,
    /// Empty queues for reuse.
    spare: Vec<VecDeque<PacketId>>,
}

/// A lock that a packet holds. [`FlowLocks::unlock`] releases it.
#[derive(Debug, Default)]
pub(crate) struct FlowLock(Option<u16>);

impl FlowLock {
    pub(crate) fn is_held(&self) -> bool {
        self.0.is_some()
    }
}

impl Default for FlowLocks {
    fn default() -> Self {
        Self {
            holders: Box::new([0; BUCKETS]),
            deferred: HashMap::new(),
            released: Vec::new(),
            spare: Vec::new(),
        }
    }
}

impl FlowLocks {
    /// Returns true if the next packet of the bucket must be deferred.
    #[inline]
    pub(crate) fn is_locked(&self, bucket: u16) -> bool {
        self.holders[usize::from(bucket)] > 0
            || !self.deferred.is_empty() && self.deferred.contains_key(&bucket)
    }

    /// Locks a bucket, unless `lock` is held.
    pub(crate) fn lock(&mut self, lock: &mut FlowLock, bucket: u16) {
        if !lock.is_held() {
            self.holders[usize::from(bucket)] += 1;
            lock.0 = Some(bucket);
        }
    }

    /// Releases `lock`, if it is held.
    pub(crate) fn unlock(&mut self, lock: &mut FlowLock) {
        let Some(bucket) = lock.0.take() else { return };
        let holders = &mut self.holders[usize::from(bucket)];
        *holders -= 1;
        if *holders == 0 && self.deferred.contains_key(&bucket) {
            self.released.push(bucket);
        }
    }

    /// Defers a packet of a locked bucket.
    pub(crate) fn defer(&mut self, bucket: u16, id: PacketId) {
        let spare = &mut self.spare;
        self.deferred.entry(bucket).or_insert_with(|| spare.pop().unwrap_or_default()).push_back(id);
    }

    /// Returns the next deferred packet of a bucket that is no longer locked.
    pub(crate) fn take_released(&mut self) -> Option<PacketId> {
        while let Some(&bucket) = self.released.last() {
            if self.holders[usize::from(bucket)] == 0
                && let Some(queue) = self.deferred.get_mut(&bucket)
            {
                let first = queue.pop_front();
                if queue.is_empty() {
                    self.spare.extend(self.deferred.remove(&bucket));
                }
                return first;
            }
            self.released.pop();
        }
        None
    }

    /// Removes all deferred packets.
    pub(crate) fn clear_deferred(&mut self) {
        self.deferred.clear();
        self.released.clear();
    }

    #[cfg(test)]
    pub(crate) fn is_clear(&self) -> bool {
        self.deferred.is_empty() && self.holders.iter().all(|count| *count == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_locked_until_its_last_lock_is_released() {
        let mut locks = FlowLocks::default();
        let [mut one, mut two] = [(); 2].map(|()| FlowLock::default());
        locks.lock(&mut one, 7);
        locks.lock(&mut one, 8);
        locks.lock(&mut two, 7);
        assert!(locks.is_locked(7) && !locks.is_locked(8));
        locks.unlock(&mut one);
        locks.unlock(&mut one);
        assert!(locks.is_locked(7));
        locks.unlock(&mut two);
        assert!(locks.is_clear());
    }

    #[test]
    fn deferred_packets_continue_in_order_until_one_of_them_locks_the_bucket_again() {
        let mut packets =
            crate::reorder::ReorderBuffer::<(), ()>::new(8, crate::reorder::Limits::default(), false);
        let mut packet = || packets.push_waiting(b"", (), (), (0, crate::reorder::Account::ENGINE));
        let [a, b, c] = [(); 3].map(|()| packet());
        let mut locks = FlowLocks::default();
        let mut lock = FlowLock::default();
        locks.lock(&mut lock, 7);
        [a, b, c].into_iter().for_each(|id| locks.defer(7, id));
        assert_eq!(locks.take_released(), None);
        locks.unlock(&mut lock);
        assert!(locks.is_locked(7), "a new packet does not overtake a deferred one");
        assert_eq!(locks.take_released(), Some(a));
        locks.lock(&mut lock, 7);
        assert_eq!(locks.take_released(), None, "the resumed packet locks the bucket");
        locks.unlock(&mut lock);
        assert_eq!([(); 3].map(|()| locks.take_released()), [Some(b), Some(c), None]);
        assert!(locks.is_clear());
    }
}
