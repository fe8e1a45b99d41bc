//! The counters of the sockets where inspectors attach. The supervisor, which owns the sockets, puts copies here; the server reads them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use towpath_ring::Stats;

/// The counters by queue. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct EndpointCounters(Arc<Mutex<Vec<(u16, Stats)>>>);

impl EndpointCounters {
    /// Replaces all counters.
    pub fn set(&self, counters: impl Iterator<Item = (u16, Stats)>) {
        let mut all = self.lock();
        all.clear();
        all.extend(counters);
    }

    /// A copy of the counters.
    pub fn get(&self) -> Vec<(u16, Stats)> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(u16, Stats)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
