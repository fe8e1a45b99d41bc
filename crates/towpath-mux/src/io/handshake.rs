//! Connections that shake hands: they are attached when that is done, and until then cost neither a worker nor the core
//! anything.
//!
//! What: they are watched by an epoll of their own, which the leader's epoll watches like a socket. The leader drives
//! them, without the mutex.
//!
//! Invariant: each ends in one way: attached, failed, or too late. There are [`MOST`] at most; the oldest makes room.
//!
//! Races: others that wait for sockets hear of them too. One that is ready is said once (EPOLLONESHOT), and then not before it
//! is waited for again; so one worker drives it at a time.

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};

use super::admission::Peer;
use super::connector::News;
use super::link::Link;
use crate::Time;

/// The event data of their epoll.
pub(super) const DATA: u64 = 1;
/// Connections that shake hands at once.
const MOST: usize = 1024;
/// Connections that are driven in one go.
const BURST: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Handshakes {
    /// Made with the first.
    epoll: Option<OwnedFd>,
    /// By number, the oldest first.
    all: BTreeMap<u64, Shaking>,
    next: u64,
    /// Not later than the earliest of their deadlines.
    due: Option<Time>,
}

/// A connection that shakes hands.
#[derive(Debug)]
pub(super) struct Shaking {
    pub(super) link: Arc<Link>,
    pub(super) peer: Option<SocketAddr>,
    pub(super) keeper: Option<Sender<News>>,
    until: Time,
}

impl Handshakes {
    /// Takes a connection. Gives back the oldest, when there are too many.
    pub(super) fn begin(
        &mut self,
        epoll: &OwnedFd,
        link: Arc<Link>,
        keeper: Option<Sender<News>>,
        until: Time,
    ) -> io::Result<Option<Shaking>> {
        let own = match &self.epoll {
            Some(own) => own,
            None => {
                let own = epoll::create(epoll::CreateFlags::CLOEXEC)?;
                epoll::add(epoll, &own, EventData::new_u64(DATA), EventFlags::IN)?;
                self.epoll.insert(own)
            }
        };
        // A client speaks first: that there is room to write is what starts it.
        let data = EventData::new_u64(self.next);
        epoll::add(own, &link, data, EventFlags::IN | EventFlags::OUT | EventFlags::ONESHOT)?;
        let peer = super::admission::peer(&link).map(|peer| peer.remote);
        let shaking = Shaking { link, peer, keeper, until };
        self.all.insert(self.next, shaking);
        self.next += 1;
        self.due = self.due.into_iter().chain([until]).min();
        Ok(if self.all.len() > MOST {
            self.all.keys().next().copied().and_then(|key| self.take(key))
        } else {
            None
        })
    }

    /// Those that have something to read or room to write, some of them; each once until it is waited for again.
    pub(super) fn ready(&self) -> Vec<(u64, Arc<Link>)> {
        let Some(own) = &self.epoll else { return Vec::new() };
        let mut room = [MaybeUninit::<epoll::Event>::uninit(); BURST];
        // Interrupted: they are reported again.
        let Ok((events, _)) = epoll::wait(own, &mut room, Some(&super::timespec(Duration::ZERO))) else {
            return Vec::new();
        };
        let named = |event: &epoll::Event| {
            let key = event.data.u64();
            Some((key, Arc::clone(&self.all.get(&key)?.link)))
        };
        events.iter().filter_map(named).collect()
    }

    /// It goes on when there is something to read, or room to `write`.
    pub(super) fn wait(&self, key: u64, write: bool) -> io::Result<()> {
        let (Some(own), Some(shaking)) = (&self.epoll, self.all.get(&key)) else { return Ok(()) };
        // It reads nothing before it has written.
        let flags = if write { EventFlags::OUT } else { EventFlags::IN };
        Ok(epoll::modify(own, &shaking.link, EventData::new_u64(key), flags | EventFlags::ONESHOT)?)
    }

    /// It is not one of them any more.
    pub(super) fn take(&mut self, key: u64) -> Option<Shaking> {
        let shaking = self.all.remove(&key)?;
        if let Some(own) = &self.epoll {
            let _ = epoll::delete(own, &shaking.link);
        }
        Some(shaking)
    }

    /// The one of this peer, which was admitted, if it is one of them: then it is not any more.
    pub(super) fn take_peer(&mut self, peer: &Peer) -> Option<Shaking> {
        let found = self.all.iter().find(|(_, shaking)| shaking.link.peer() == Some(peer));
        let key = found.map(|(&key, _)| key)?;
        self.take(key)
    }

    /// One whose time is over, if there is one.
    pub(super) fn expired(&mut self, now: Time) -> Option<Shaking> {
        if self.due.is_none_or(|due| due > now) {
            return None;
        }
        match self.all.iter().find(|(_, shaking)| shaking.until <= now) {
            Some((&key, _)) => self.take(key),
            None => {
                self.due = self.all.values().map(|shaking| shaking.until).min();
                None
            }
        }
    }

    /// All of them, when nobody is to come in any more.
    pub(super) fn close(&mut self) -> Vec<Shaking> {
        self.due = None;
        std::mem::take(&mut self.all).into_values().collect()
    }

    /// When the next one's time is over, at the earliest.
    pub(super) const fn due(&self) -> Option<Time> {
        self.due
    }
}
