//! Connections outside of the core: before their handshakes are done, and while they linger.
//!
//! What: an epoll instance watches them. The leader's epoll watches that instance like a socket. The leader
//! handles them without the mutex.
//!
//! Invariant: there are at most [`MOST`]. A new one replaces the oldest.
//!
//! Races: helpers see the events, too. A ready connection is reported once (EPOLLONESHOT) until it is
//! rearmed, so that one worker at a time handles it.

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};

use super::admission::Peer;
use super::link::Link;

/// Maximum number of connections.
const MOST: usize = 1024;
/// Maximum number of connections that are handled at once.
const BURST: usize = 16;

pub(super) trait Connection {
    fn link(&self) -> &Arc<Link>;
}

/// A set of connections. Its epoll instance has the event data `DATA`.
#[derive(Debug)]
pub(super) struct PendingSet<T, const DATA: u64> {
    /// Created with the first connection.
    epoll: Option<OwnedFd>,
    /// By number, oldest first.
    all: BTreeMap<u64, T>,
    next: u64,
}

impl<T, const DATA: u64> Default for PendingSet<T, DATA> {
    fn default() -> Self {
        Self { epoll: None, all: BTreeMap::new(), next: 0 }
    }
}

impl<T: Connection, const DATA: u64> PendingSet<T, DATA> {
    /// Adds a connection. Returns the oldest one if there are too many.
    pub(super) fn begin(
        &mut self,
        epoll: &OwnedFd,
        connection: T,
        flags: EventFlags,
    ) -> io::Result<Option<T>> {
        let own = match &self.epoll {
            Some(own) => own,
            None => {
                let own = epoll::create(epoll::CreateFlags::CLOEXEC)?;
                epoll::add(epoll, &own, EventData::new_u64(DATA), EventFlags::IN)?;
                self.epoll.insert(own)
            }
        };
        let data = EventData::new_u64(self.next);
        epoll::add(own, connection.link(), data, flags | EventFlags::ONESHOT)?;
        self.all.insert(self.next, connection);
        self.next += 1;
        let oldest = self.all.keys().next().copied().filter(|_| self.all.len() > MOST);
        Ok(oldest.and_then(|key| self.take(key)))
    }

    /// Returns some of the ready connections. Each is reported once until it is rearmed.
    pub(super) fn ready(&self) -> Vec<(u64, Arc<Link>)> {
        let Some(own) = &self.epoll else { return Vec::new() };
        let mut room = [MaybeUninit::<epoll::Event>::uninit(); BURST];
        // After a signal they are reported again.
        let Ok((events, _)) = epoll::wait(own, &mut room, Some(&super::timespec(Duration::ZERO))) else {
            return Vec::new();
        };
        let named = |event: &epoll::Event| {
            let key = event.data.u64();
            Some((key, Arc::clone(self.all.get(&key)?.link())))
        };
        events.iter().filter_map(named).collect()
    }

    pub(super) fn get_mut(&mut self, key: u64) -> Option<&mut T> {
        self.all.get_mut(&key)
    }

    /// Rearms a connection.
    pub(super) fn wait(&self, key: u64, flags: EventFlags) -> io::Result<()> {
        let (Some(own), Some(connection)) = (&self.epoll, self.all.get(&key)) else { return Ok(()) };
        let data = EventData::new_u64(key);
        Ok(epoll::modify(own, connection.link(), data, flags | EventFlags::ONESHOT)?)
    }

    /// Removes a connection.
    pub(super) fn take(&mut self, key: u64) -> Option<T> {
        let connection = self.all.remove(&key)?;
        if let Some(own) = &self.epoll {
            let _ = epoll::delete(own, connection.link());
        }
        Some(connection)
    }

    /// Removes the connection of this admitted peer.
    pub(super) fn take_peer(&mut self, peer: &Peer) -> Option<T> {
        let found = self.iter().find(|(_, connection)| connection.link().peer() == Some(peer));
        let key = found.map(|(key, _)| key)?;
        self.take(key)
    }

    /// Removes all connections.
    pub(super) fn take_all(&mut self) -> Vec<T> {
        std::mem::take(&mut self.all).into_values().collect()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.all.iter().map(|(&key, connection)| (key, connection))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}
