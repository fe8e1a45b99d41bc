//! Descriptors of rings and processes in one descriptor: epoll(7).

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::time::Timespec;

/// Descriptors of one look.
const EVENTS: usize = 64;

#[derive(Debug)]
pub(super) struct Poller {
    epoll: OwnedFd,
    /// Of the last look.
    tokens: Vec<u64>,
}

impl Poller {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?, tokens: Vec::with_capacity(EVENTS) })
    }

    pub(super) fn add(&self, fd: impl AsFd, token: u64) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(token), EventFlags::IN)?)
    }

    pub(super) fn remove(&self, fd: impl AsFd) {
        // Fails only if the descriptor is closed.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// The tokens of readable descriptors, up to [`EVENTS`] of them. Does not wait.
    pub(super) fn ready(&mut self) -> impl Iterator<Item = u64> + '_ {
        self.tokens.clear();
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut events = [const { MaybeUninit::uninit() }; EVENTS];
        // After an error, the next look finds them.
        if let Ok((ready, _)) = epoll::wait(&self.epoll, &mut events, Some(&now)) {
            self.tokens.extend(ready.iter().map(|event| event.data.u64()));
        }
        self.tokens.drain(..)
    }
}

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
