//! Connections that shake hands: they are attached when that is done, and stand [pending](super::pending) until then.
//!
//! Invariant: each ends in one way: attached, failed, or too late.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use rustix::event::epoll::EventFlags;

use super::admission::Peer;
use super::connector::ConnectionEvent;
use super::link::Link;
use super::pending::{Connection, PendingSet};
use crate::Time;

/// The event data of their epoll.
pub(super) const DATA: u64 = 1;

#[derive(Debug, Default)]
pub(super) struct Handshakes {
    all: PendingSet<PendingHandshake, DATA>,
    /// Not later than the earliest of their deadlines.
    due: Option<Time>,
}

/// A connection that shakes hands.
#[derive(Debug)]
pub(super) struct PendingHandshake {
    pub(super) link: Arc<Link>,
    pub(super) peer: Option<SocketAddr>,
    pub(super) owner: Option<Sender<ConnectionEvent>>,
    until: Time,
}

impl Connection for PendingHandshake {
    fn link(&self) -> &Arc<Link> {
        &self.link
    }
}

impl Handshakes {
    /// Takes a connection. Gives back the oldest, when there are too many.
    pub(super) fn begin(
        &mut self,
        epoll: &OwnedFd,
        link: Arc<Link>,
        owner: Option<Sender<ConnectionEvent>>,
        until: Time,
    ) -> io::Result<Option<PendingHandshake>> {
        let peer = super::admission::peer(&link).map(|peer| peer.remote);
        // A client speaks first: that there is room to write is what starts it.
        let oldest = self.all.begin(
            epoll,
            PendingHandshake { link, peer, owner, until },
            EventFlags::IN | EventFlags::OUT,
        )?;
        self.due = self.due.into_iter().chain([until]).min();
        Ok(oldest)
    }

    /// Those that have something to read or room to write, some of them; each once until it is waited for again.
    pub(super) fn ready(&self) -> Vec<(u64, Arc<Link>)> {
        self.all.ready()
    }

    /// It goes on when there is something to read, or room to `write`.
    pub(super) fn wait(&self, key: u64, write: bool) -> io::Result<()> {
        // It reads nothing before it has written.
        self.all.wait(key, if write { EventFlags::OUT } else { EventFlags::IN })
    }

    /// It is not one of them any more.
    pub(super) fn take(&mut self, key: u64) -> Option<PendingHandshake> {
        self.all.take(key)
    }

    /// The one of this peer, which was admitted, if it is one of them: then it is not any more.
    pub(super) fn take_peer(&mut self, peer: &Peer) -> Option<PendingHandshake> {
        self.all.take_peer(peer)
    }

    /// One whose time is over, if there is one.
    pub(super) fn expired(&mut self, now: Time) -> Option<PendingHandshake> {
        if self.due.is_none_or(|due| due > now) {
            return None;
        }
        let late = self.all.iter().find(|(_, shaking)| shaking.until <= now).map(|(key, _)| key);
        match late {
            Some(key) => self.take(key),
            None => {
                self.due = self.all.iter().map(|(_, shaking)| shaking.until).min();
                None
            }
        }
    }

    /// All of them, when nobody is to come in any more.
    pub(super) fn close(&mut self) -> Vec<PendingHandshake> {
        self.due = None;
        self.all.take_all()
    }

    /// When the next one's time is over, at the earliest.
    pub(super) const fn due(&self) -> Option<Time> {
        self.due
    }
}
