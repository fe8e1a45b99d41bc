//! Lingering: connections that have ended and whose peers may not have received everything.
//!
//! Why: closing a socket with unread data, or data that arrives later, makes the kernel reset the connection
//! (RFC 1122, 4.2.2.13) and drop undelivered data. A peer that pipelines requests would lose its last
//! replies.
//!
//! What: the connection is shut down for writing (shutdown(2)). Further data is read and dropped, until the
//! peer closes, or has acknowledged everything and sent nothing for [`QUIET`], or the deadline passes.
//! Lingering connections are [pending](super::pending).
//!
//! Invariant: a connection lingers for at most [`LINGER`], and not after the drain deadline.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::EventFlags;

use super::admission::Peer;
use super::link::Link;
use super::pending::{Connection, PendingSet};
use crate::Time;

/// Event data of their epoll instance.
pub(super) const DATA: u64 = 2;
/// Maximum time.
const LINGER: Duration = Duration::from_secs(30);
/// A peer that has acknowledged everything and was silent for this time has stopped sending.
const QUIET: Duration = Duration::from_millis(500);
/// Interval of checks.
const LOOK: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub(super) struct Lingers {
    all: PendingSet<Lingering, DATA>,
    /// Next check.
    due: Option<Time>,
    /// Drain deadline.
    until: Option<Time>,
}

#[derive(Debug)]
struct Lingering {
    link: Arc<Link>,
    until: Time,
    /// Time of the last data.
    last_data: Time,
}

impl Connection for Lingering {
    fn link(&self) -> &Arc<Link> {
        &self.link
    }
}

impl Lingers {
    /// Adds a connection. Returns the oldest one if there are too many.
    pub(super) fn begin(
        &mut self,
        epoll: &OwnedFd,
        link: Arc<Link>,
        now: Time,
    ) -> io::Result<Option<Arc<Link>>> {
        let lingering = Lingering { link, until: now + LINGER, last_data: now };
        let oldest = self.all.begin(epoll, lingering, EventFlags::IN)?;
        self.due.get_or_insert(now + LOOK);
        Ok(oldest.map(|oldest| oldest.link))
    }

    /// Returns some of the readable connections. Each is reported once until [`Lingers::wait`].
    pub(super) fn ready(&self) -> Vec<(u64, Arc<Link>)> {
        self.all.ready()
    }

    /// Data was read. Waits for more.
    pub(super) fn wait(&mut self, key: u64, now: Time) {
        let Some(lingering) = self.all.get_mut(key) else { return };
        lingering.last_data = now;
        // If it cannot be watched, the next check finds it silent and ends it.
        let _ = self.all.wait(key, EventFlags::IN);
    }

    /// Removes a connection.
    pub(super) fn take(&mut self, key: u64) -> Option<Arc<Link>> {
        self.all.take(key).map(|lingering| lingering.link)
    }

    /// Removes the connection of this admitted peer.
    pub(super) fn take_peer(&mut self, peer: &Peer) -> Option<Arc<Link>> {
        self.all.take_peer(peer).map(|lingering| lingering.link)
    }

    /// Sets the drain deadline.
    pub(super) fn end_by(&mut self, until: Option<Time>) {
        self.until = self.until.into_iter().chain(until).min();
    }

    /// Removes and returns connections that are finished or late (true).
    pub(super) fn expired(&mut self, now: Time) -> Vec<(Arc<Link>, bool)> {
        if self.due.is_none_or(|due| due > now) {
            return Vec::new();
        }
        let drain = self.until.is_some_and(|until| until <= now);
        let over = self.all.iter().filter_map(|(key, lingering)| {
            let late = drain || lingering.until <= now;
            let quiet = now.since(lingering.last_data) >= QUIET && lingering.link.unacknowledged() == 0;
            (late || quiet).then_some((key, !quiet))
        });
        let over: Vec<_> = over.collect();
        let over = over.into_iter().filter_map(|(key, late)| Some((self.take(key)?, late))).collect();
        self.due = if self.all.is_empty() { None } else { Some(now + LOOK) };
        over
    }

    /// Time of the next check.
    pub(super) fn due(&self) -> Option<Time> {
        self.due
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}
