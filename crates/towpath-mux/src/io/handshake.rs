//! TLS handshakes in progress: [pending](super::pending) connections, attached when they are done.
//!
//! Invariant: each handshake ends exactly once: it is attached, fails, or exceeds its deadline.

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

/// Event data of their epoll instance.
pub(super) const DATA: u64 = 1;

#[derive(Debug, Default)]
pub(super) struct Handshakes {
    all: PendingSet<PendingHandshake, DATA>,
    /// Lower bound of the earliest deadline.
    due: Option<Time>,
}

/// A connection whose handshake is in progress.
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
    /// Adds a connection. Returns the oldest one if there are too many.
    pub(super) fn begin(
        &mut self,
        epoll: &OwnedFd,
        link: Arc<Link>,
        owner: Option<Sender<ConnectionEvent>>,
        until: Time,
    ) -> io::Result<Option<PendingHandshake>> {
        let peer = super::admission::peer(&link).map(|peer| peer.remote);
        // Writability starts the handshake of a client.
        let oldest = self.all.begin(
            epoll,
            PendingHandshake { link, peer, owner, until },
            EventFlags::IN | EventFlags::OUT,
        )?;
        self.due = self.due.into_iter().chain([until]).min();
        Ok(oldest)
    }

    /// Returns some of the ready handshakes. Each is reported once until [`Handshakes::wait`].
    pub(super) fn ready(&self) -> Vec<(u64, Arc<Link>)> {
        self.all.ready()
    }

    /// Waits until the socket is readable, or writable with `write`.
    pub(super) fn wait(&self, key: u64, write: bool) -> io::Result<()> {
        // A session with pending records reads nothing before it has written them.
        self.all.wait(key, if write { EventFlags::OUT } else { EventFlags::IN })
    }

    /// Removes a handshake.
    pub(super) fn take(&mut self, key: u64) -> Option<PendingHandshake> {
        self.all.take(key)
    }

    /// Removes the handshake of this admitted peer.
    pub(super) fn take_peer(&mut self, peer: &Peer) -> Option<PendingHandshake> {
        self.all.take_peer(peer)
    }

    /// Removes and returns a handshake whose deadline has passed.
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

    /// Removes all handshakes.
    pub(super) fn close(&mut self) -> Vec<PendingHandshake> {
        self.due = None;
        self.all.take_all()
    }

    pub(super) fn len(&self) -> usize {
        self.all.iter().count()
    }

    /// A lower bound of the earliest deadline.
    pub(super) const fn due(&self) -> Option<Time> {
        self.due
    }
}
