//! Locks of flows: the order of rule evaluation within a flow.
//!
//! While the rule evaluation of a packet continues after a verdict, later packets of its flow must not overtake it. The locks are those of
//! the buckets of the reorder buffer: a bucket counts the packets that lock it. Two flows in one bucket only wait for each other.

/// The number of buckets, for locks and for the reorder buffer of a live engine.
pub(crate) const BUCKETS: usize = 16_384;

#[derive(Debug)]
pub(crate) struct FlowLocks(Box<[u32; BUCKETS]>);

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
        Self(Box::new([0; BUCKETS]))
    }
}

impl FlowLocks {
    #[inline]
    pub(crate) fn is_locked(&self, bucket: u16) -> bool {
        self.0[usize::from(bucket)] > 0
    }

    /// Locks a bucket, unless `lock` is held.
    pub(crate) fn lock(&mut self, lock: &mut FlowLock, bucket: u16) {
        if !lock.is_held() {
            self.0[usize::from(bucket)] += 1;
            lock.0 = Some(bucket);
        }
    }

    /// Releases `lock`, if it is held.
    pub(crate) fn unlock(&mut self, lock: &mut FlowLock) {
        if let Some(bucket) = lock.0.take() {
            self.0[usize::from(bucket)] -= 1;
        }
    }

    #[cfg(test)]
    pub(crate) fn is_clear(&self) -> bool {
        self.0.iter().all(|count| *count == 0)
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
}
