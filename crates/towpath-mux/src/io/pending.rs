//! Connections that are not the core's yet, or no more: they cost neither a worker nor the core anything.
//!
//! What: they are watched by an epoll of their own, which the leader's epoll watches like a socket. The leader drives
//! them, without the mutex.
//!
//! Invariant: there are [`MOST`] at most; the oldest makes room.
//!
//! Races: others that wait for sockets hear of them too. One that is ready is said once (EPOLLONESHOT), and then not before it
//! is waited for again; so one worker drives it at a time.

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};

use super::admission::Peer;
use super::link::Link;

/// Connections at once.
const MOST: usize = 1024;
/// Connections that are driven in one go.
const BURST: usize = 16;

pub(super) trait Connection {
    fn link(&self) -> &Arc<Link>;
}

/// Their epoll has the event data `DATA`.
#[derive(Debug)]
pub(super) struct PendingSet<T, const DATA: u64> {
    /// Made with the first.
    epoll: Option<OwnedFd>,
    /// By number, the oldest first.
    all: BTreeMap<u64, T>,
    next: u64,
}

impl<T, const DATA: u64> Default for PendingSet<T, DATA> {
    fn default() -> Self {
        Self { epoll: None, all: BTreeMap::new(), next: 0 }
    }
}

impl<T: Connection, const DATA: u64> PendingSet<T, DATA> {
    /// Takes a connection, and waits for it. Gives back the oldest, when there are too many.
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

    /// Those that are ready, some of them; each once until it is waited for again.
    pub(super) fn ready(&self) -> Vec<(u64, Arc<Link>)> {
        let Some(own) = &self.epoll else { return Vec::new() };
        let mut room = [MaybeUninit::<epoll::Event>::uninit(); BURST];
        // Interrupted: they are reported again.
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

    /// It is said again when it is ready.
    pub(super) fn wait(&self, key: u64, flags: EventFlags) -> io::Result<()> {
        let (Some(own), Some(connection)) = (&self.epoll, self.all.get(&key)) else { return Ok(()) };
        let data = EventData::new_u64(key);
        Ok(epoll::modify(own, connection.link(), data, flags | EventFlags::ONESHOT)?)
    }

    /// It is not one of them any more.
    pub(super) fn take(&mut self, key: u64) -> Option<T> {
        let connection = self.all.remove(&key)?;
        if let Some(own) = &self.epoll {
            let _ = epoll::delete(own, connection.link());
        }
        Some(connection)
    }

    /// The one of this peer, which was admitted, if it is one of them: then it is not any more.
    pub(super) fn take_peer(&mut self, peer: &Peer) -> Option<T> {
        let found = self.iter().find(|(_, connection)| connection.link().peer() == Some(peer));
        let key = found.map(|(key, _)| key)?;
        self.take(key)
    }

    /// All of them, none of which is one any more.
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
