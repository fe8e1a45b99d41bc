//! A wakeup between threads: eventfd(2).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::Wake;

use rustix::event::{EventfdFlags, eventfd};

/// A counter that is readable while it is not zero. Clones share it. No call blocks.
#[derive(Clone, Debug)]
pub struct EventFd(Arc<OwnedFd>);

impl EventFd {
    /// Creates one whose count is zero.
    ///
    /// # Errors
    ///
    /// Fails if eventfd(2) fails.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Makes the descriptor readable: wakes a thread that polls it.
    pub fn signal(&self) {
        // EAGAIN: the count is at its maximum, so the descriptor is readable already.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    /// Resets the count to zero.
    pub fn clear(&self) {
        let _ = rustix::io::read(&*self.0, &mut [0u8; 8]);
    }
}

impl Wake for EventFd {
    fn wake(self: Arc<Self>) {
        self.signal();
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
