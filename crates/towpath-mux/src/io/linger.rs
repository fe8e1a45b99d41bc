//! Connections that have ended, and whose peers may not have got all of what was sent to them.
//!
//! Why: a socket that is closed with bytes that nobody has read, or that get more of them later, is reset (RFC 1122, 4.2.2.13), and
//! what the kernel had not delivered yet is thrown away: a peer that asks ahead of what it reads would lose its last answers.
//!
//! What: nothing more is sent on them (shutdown(2)), and what still comes is read and dropped, until the peer has closed its side, or has
//! acknowledged everything and sent nothing for [`QUIET`], or its time is over. They stand [pending](super::pending).
//!
//! Invariant: for [`LINGER`] at most, and not beyond the time for draining.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::EventFlags;

use super::admission::Peer;
use super::link::Link;
use super::pending::{Connection, PendingSet};
use crate::Time;

/// The event data of their epoll.
pub(super) const DATA: u64 = 2;
/// How long one does at most.
const LINGER: Duration = Duration::from_secs(30);
/// Who has everything and was quiet for so long has stopped asking.
const QUIET: Duration = Duration::from_millis(500);
/// How often they are asked whether they have everything.
const LOOK: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub(super) struct Lingers {
    all: PendingSet<Lingering, DATA>,
    /// When they are looked at next.
    due: Option<Time>,
    /// The end of the time for draining.
    until: Option<Time>,
}

#[derive(Debug)]
struct Lingering {
    link: Arc<Link>,
    until: Time,
    /// When something came last.
    heard: Time,
}

impl Connection for Lingering {
    fn link(&self) -> &Arc<Link> {
        &self.link
    }
}

impl Lingers {
    /// Takes a connection. Gives back the oldest, when there are too many.
    pub(super) fn begin(
        &mut self,
        epoll: &OwnedFd,
        link: Arc<Link>,
        now: Time,
    ) -> io::Result<Option<Arc<Link>>> {
        let lingering = Lingering { link, until: now + LINGER, heard: now };
        let oldest = self.all.begin(epoll, lingering, EventFlags::IN)?;
        self.due.get_or_insert(now + LOOK);
        Ok(oldest.map(|oldest| oldest.link))
    }

    /// Those that have something to read, some of them; each once until it is waited for again.
    pub(super) fn ready(&self) -> Vec<(u64, Arc<Link>)> {
        self.all.ready()
    }

    /// Something came of it, and it may send more.
    pub(super) fn wait(&mut self, key: u64, now: Time) {
        let Some(lingering) = self.all.get_mut(key) else { return };
        lingering.heard = now;
        // Not watched any more, it ends when it is looked at: it is quiet.
        let _ = self.all.wait(key, EventFlags::IN);
    }

    /// It is not one of them any more.
    pub(super) fn take(&mut self, key: u64) -> Option<Arc<Link>> {
        self.all.take(key).map(|lingering| lingering.link)
    }

    /// The one of this peer, which was admitted, if it is one of them: then it is not any more.
    pub(super) fn take_peer(&mut self, peer: &Peer) -> Option<Arc<Link>> {
        self.all.take_peer(peer).map(|lingering| lingering.link)
    }

    /// The server drains until then: nobody is waited for any longer.
    pub(super) fn end_by(&mut self, until: Option<Time>) {
        self.until = self.until.into_iter().chain(until).min();
    }

    /// Those that need not linger any more, or whose time is over: whether that is so.
    pub(super) fn expired(&mut self, now: Time) -> Vec<(Arc<Link>, bool)> {
        if self.due.is_none_or(|due| due > now) {
            return Vec::new();
        }
        let drain = self.until.is_some_and(|until| until <= now);
        let over = self.all.iter().filter_map(|(key, lingering)| {
            let late = drain || lingering.until <= now;
            let quiet = now.since(lingering.heard) >= QUIET && lingering.link.unacknowledged() == 0;
            (late || quiet).then_some((key, !quiet))
        });
        let over: Vec<_> = over.collect();
        let over = over.into_iter().filter_map(|(key, late)| Some((self.take(key)?, late))).collect();
        self.due = if self.all.is_empty() { None } else { Some(now + LOOK) };
        over
    }

    /// When that is to be asked.
    pub(super) fn due(&self) -> Option<Time> {
        self.due
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}
