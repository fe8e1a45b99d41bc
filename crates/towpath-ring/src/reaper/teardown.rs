use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{PeerKey, Reaped, Reaper, Value};

/// The parts of a connection that has several owners. They are dropped in one job, when the last owner has dropped its
/// handle.
///
/// ```
/// use towpath_ring::reaper::{PeerKey, Reaper};
///
/// let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
/// let teardown = Reaper::shared().teardown(PeerKey::User(1000));
/// let one = teardown.wrap(one);
/// let other = teardown.wrap(other);
/// drop((one, other));
/// // Here, a helper thread begins to close both.
/// drop(teardown);
/// ```
pub struct Teardown {
    reaper: Reaper,
    peer: PeerKey,
    parts: Mutex<Parts>,
}

/// Fields are dropped in order.
#[derive(Default)]
struct Parts {
    values: Vec<Value>,
    last: Vec<Value>,
}

impl Teardown {
    pub(super) fn new(reaper: Reaper, peer: PeerKey) -> Arc<Self> {
        Arc::new(Self { reaper, peer, parts: Mutex::default() })
    }

    /// The peer whose values are dropped one after another.
    #[must_use]
    pub fn peer(&self) -> PeerKey {
        self.peer
    }

    /// The reaper.
    #[must_use]
    pub fn reaper(&self) -> &Reaper {
        &self.reaper
    }

    /// Adds a part.
    pub fn add(&self, part: impl Send + 'static) {
        self.parts().values.push(Box::new(part));
    }

    /// Adds a part that is dropped after all others: the connection's slot, or its charge against a limit.
    pub fn add_last(&self, part: impl Send + 'static) {
        self.parts().last.push(Box::new(part));
    }

    /// Wraps `value`, so that its drop [adds](Self::add) it.
    pub fn wrap<T: Send + 'static>(self: &Arc<Self>, value: T) -> Reaped<T> {
        Reaped::new(self.clone(), value)
    }

    fn parts(&self) -> MutexGuard<'_, Parts> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Teardown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Teardown").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl Drop for Teardown {
    fn drop(&mut self) {
        let parts = std::mem::take(&mut *self.parts());
        if !parts.values.is_empty() || !parts.last.is_empty() {
            self.reaper.drop_for(self.peer, parts);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;
    use crate::reaper::Limits;

    struct Named(u32, Sender<u32>);

    impl Drop for Named {
        fn drop(&mut self) {
            self.1.send(self.0).unwrap();
        }
    }

    #[test]
    fn parts_are_one_job_when_the_last_owner_is_gone() {
        let (report, dropped) = channel();
        let reaper = Reaper::new(Limits::default());
        let teardown = reaper.teardown(PeerKey::User(1));
        teardown.add_last(Named(3, report.clone()));
        let one = teardown.wrap(Named(1, report.clone()));
        let two = teardown.wrap(Named(2, report.clone()));
        drop(teardown);
        drop(one);
        assert_eq!(reaper.stats().pending, 0);
        drop(two);
        assert_eq!([dropped.recv(), dropped.recv(), dropped.recv()], [Ok(1), Ok(2), Ok(3)]);
        while reaper.stats().dropped == 0 {
            std::thread::yield_now();
        }
        assert_eq!(reaper.stats().dropped, 1, "one job");
    }
}
