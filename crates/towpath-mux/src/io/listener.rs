//! Listeners: sockets that connections come from.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};

/// The least event data of a listener; its index is added. Connections' data is beyond 2^32.
pub(super) const FIRST: u64 = 16;
/// Connections that are accepted in one go.
const BURST: usize = 64;

/// A mux's listeners.
#[derive(Debug, Default)]
pub struct Listeners {
    all: Vec<(Arc<OwnedFd>, bool)>,
    /// Connections that were refused because no descriptor or memory was left for them.
    pub(super) refused: u64,
    /// Not watched, because no descriptor was left for what they accept.
    paused: bool,
}

impl Listeners {
    pub(super) fn add(&mut self, epoll: &OwnedFd, listener: OwnedFd, tcp: bool) -> io::Result<()> {
        let data = epoll::EventData::new_u64(FIRST + self.all.len() as u64);
        epoll::add(epoll, &listener, data, epoll::EventFlags::IN)?;
        self.all.push((Arc::new(listener), tcp));
        Ok(())
    }

    pub(super) fn close(&mut self) {
        // The event data of those that are left would be others': all go, and none comes any more.
        self.all.clear();
    }

    /// Leaves connections where they wait, until one that is open ends: they would be reported again and again.
    pub(super) fn pause(&mut self, epoll: &OwnedFd) {
        self.paused = true;
        self.watch(epoll, epoll::EventFlags::empty());
    }

    pub(super) fn resume(&mut self, epoll: &OwnedFd) {
        if std::mem::take(&mut self.paused) {
            self.watch(epoll, epoll::EventFlags::IN);
        }
    }

    fn watch(&self, epoll: &OwnedFd, flags: epoll::EventFlags) {
        for (at, (listener, _)) in self.all.iter().enumerate() {
            let _ = epoll::modify(epoll, listener, epoll::EventData::new_u64(FIRST + at as u64), flags);
        }
    }

    pub(super) fn get(&self, data: u64) -> Option<(Arc<OwnedFd>, bool)> {
        self.all.get(usize::try_from(data.checked_sub(FIRST)?).ok()?).cloned()
    }
}

/// Accepts what waits, without blocking. The last error says why it is not more, if that is a bad reason.
pub(super) fn accept(listener: &OwnedFd, tcp: bool) -> (Vec<OwnedFd>, Option<Errno>) {
    let mut sockets = Vec::new();
    while sockets.len() < BURST {
        match accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
            Ok(socket) => {
                if tcp {
                    // Answers are whole messages: waiting for more of them to fill a segment only delays.
                    let _ = sockopt::set_tcp_nodelay(&socket, true);
                }
                sockets.push(socket);
            }
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(Errno::AGAIN) => return (sockets, None),
            Err(errno) => return (sockets, Some(errno)),
        }
    }
    (sockets, None)
}
