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
    /// The last look found [`EVENTS`]: there may be more.
    rest: bool,
}

impl Poller {
    pub(super) fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Self { epoll, tokens: Vec::with_capacity(EVENTS), rest: false })
    }

    pub(super) fn add(&self, fd: impl AsFd, token: u64) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(token), EventFlags::IN)?)
    }

    pub(super) fn remove(&self, fd: impl AsFd) {
        // Fails only if the descriptor is closed.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// The tokens of readable descriptors, up to [`EVENTS`] of them. Does not wait. Makes a system call only if the poller's descriptor
    /// `was_readable` since the last look, or if that one may have left some.
    pub(super) fn ready(&mut self, was_readable: bool) -> impl Iterator<Item = u64> + '_ {
        self.tokens.clear();
        if was_readable || self.rest {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            let mut events = [const { MaybeUninit::uninit() }; EVENTS];
            // After an error, the next look finds them.
            let found = epoll::wait(&self.epoll, &mut events, Some(&now));
            self.rest = found.as_ref().map_or(true, |(ready, _)| ready.len() == EVENTS);
            if let Ok((ready, _)) = found {
                self.tokens.extend(ready.iter().map(|event| event.data.u64()));
            }
        }
        self.tokens.drain(..)
    }

    /// Returns true if the last look may have left some.
    pub(super) fn has_rest(&self) -> bool {
        self.rest
    }
}

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
