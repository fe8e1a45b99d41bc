//! Life of connections: accept, handshake, attach; end, give back, linger, close.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use rustix::event::epoll;
use rustix::io::Errno;

use super::super::Shared;
use super::super::admission::{Entry, Peer};
use super::super::connection_info::Lifecycle;
use super::super::connector::ConnectionEvent;
use super::super::handshake::PendingHandshake;
use super::super::link::Link;
use super::super::listener::Accepted;
use super::super::sys::set_notsent_lowat;
use super::super::tls::{HandshakeStep, Tls};
use super::{Ended, Event, Socket, State, Work, data, flags};
use crate::Time;
use crate::framing::Framing;
use crate::mux::psock::Interest;
use crate::mux::{self, AttachError, Cause, End, psock};

/// Connected mode: bytes that a socket has and has not sent. The core does not count them when it compares connections.
const NOTSENT: i32 = 64 << 10;

impl State {
    /// Attaches a connection, with its framing or the server's. Closes it on failure.
    pub(super) fn attach(
        &mut self,
        shared: &Shared,
        link: Arc<Link>,
        owner: Option<Sender<ConnectionEvent>>,
        framing: Option<Framing>,
        work: &mut Work,
    ) -> io::Result<psock::Id> {
        let framing = framing.unwrap_or_else(|| shared.framing.clone());
        let attached = self.mux.attach(framing, shared.limits, shared.now());
        self.watch_attached(shared, attached, link, owner, work)
    }

    /// Attaches a connection that another process has given back. Closes it on failure.
    pub(in crate::io) fn attach_resumed(
        &mut self,
        shared: &Shared,
        link: Arc<Link>,
        resume: mux::Resume,
        rest: &[u8],
        work: &mut Work,
    ) -> io::Result<psock::Id> {
        let attached =
            self.mux.attach_resumed(shared.framing.clone(), shared.limits, resume, rest, shared.now());
        let id = self.watch_attached(shared, attached, link, None, work)?;
        let need = self.mux.need(id);
        if let Some(socket) = self.sockets.get_mut(id) {
            socket.expect(need);
        }
        Ok(id)
    }

    /// Watches the socket of a connection that the core has taken. Closes it on failure.
    fn watch_attached(
        &mut self,
        shared: &Shared,
        attached: Result<psock::Id, AttachError>,
        link: Arc<Link>,
        owner: Option<Sender<ConnectionEvent>>,
        work: &mut Work,
    ) -> io::Result<psock::Id> {
        let now = shared.now();
        if self.mux.config().connected {
            set_notsent_lowat(link.as_fd(), NOTSENT);
        }
        let attached = attached.map_err(|error| io::Error::new(io::ErrorKind::NotConnected, error));
        let watched = attached.and_then(|id| {
            let interest = flags(Interest { read: true, write: false });
            if let Err(errno) = epoll::add(&shared.epoll, &link, data(id), interest) {
                self.mux.handle_error(id, errno.raw_os_error(), now);
                return Err(errno.into());
            }
            Ok(id)
        });
        match watched {
            Ok(id) => {
                self.attached(id, &link);
                self.sockets.insert(id, Socket::new(link, owner));
                Ok(id)
            }
            Err(error) => {
                self.close(shared, link, work);
                Err(error)
            }
        }
    }

    /// Closes a connection after the mutex is released. Its descriptor becomes free.
    pub(super) fn close(&mut self, shared: &Shared, link: Arc<Link>, work: &mut Work) {
        self.listeners.resume(&shared.epoll);
        work.closes.push(link);
    }

    /// Attaches a connection, after its TLS handshake if it has one.
    pub(in crate::io) fn admit(
        &mut self,
        shared: &Shared,
        (fd, entry, listener): (OwnedFd, Option<Entry>, Option<Arc<str>>),
        tls: Option<&Tls>,
        owner: Option<Sender<ConnectionEvent>>,
        work: &mut Work,
    ) -> io::Result<()> {
        let Some(tls) = tls else {
            let link = Arc::new(Link::new(fd, None, entry).accepted_by(listener));
            return self.attach(shared, link, owner, None, work).map(drop);
        };
        // On every path the descriptor and the entry are in a link, which is closed without the mutex.
        let (session, wrong) = match tls.session() {
            _ if self.mux.is_draining() => {
                (None, Some(io::Error::new(io::ErrorKind::NotConnected, AttachError::Draining)))
            }
            Ok(session) => (Some(session), None),
            Err(error) => (None, Some(error)),
        };
        let link = Arc::new(Link::new(fd, session, entry).accepted_by(listener));
        let until = shared.now() + tls.time();
        let begun = match wrong {
            Some(error) => Err(error),
            None => self.handshakes.begin(&shared.epoll, Arc::clone(&link), owner, until),
        };
        match begun {
            Ok(None) => {}
            Ok(Some(oldest)) => {
                self.accept_stats.handshakes_late += 1;
                self.not_attached(shared, oldest, "too many handshakes are in progress".to_owned(), work);
            }
            Err(error) => {
                self.close(shared, link, work);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Handles accepted connections.
    pub(in crate::io) fn accepted(&mut self, shared: &Shared, accepted: Accepted, work: &mut Work) {
        let Accepted { listener, passed, denied, reset, failed } = accepted;
        self.accept_stats.accepted += passed.len() as u64 + denied + reset;
        self.accept_stats.denied += denied;
        self.accept_stats.reset += reset;
        for (fd, entry) in passed {
            let socket = (fd, entry, Some(Arc::clone(&listener.name)));
            if self.admit(shared, socket, listener.tls.as_ref(), None, work).is_err() {
                self.accept_stats.refused += 1;
            }
        }
        if let Some(errno) = failed {
            self.accept_stats.refused += 1;
            if self.listeners.pause(&shared.epoll, shared.now()) {
                log::warn!(
                    "cannot accept until a connection ends: {errno}: raise the limit of open files (`ulimit -n`, LimitNOFILE=)"
                );
            }
        }
    }

    /// A handshake made progress.
    pub(in crate::io) fn handshake_advanced(
        &mut self,
        shared: &Shared,
        key: u64,
        shake: HandshakeStep,
        work: &mut Work,
    ) {
        let why = match shake {
            HandshakeStep::More { write } => match self.handshakes.wait(key, write) {
                Ok(()) => return,
                Err(error) => error.to_string(),
            },
            HandshakeStep::Done => {
                let Some(PendingHandshake { link, owner, .. }) = self.handshakes.take(key) else { return };
                let (early, over) = link.early();
                match self.attach_read(shared, link, owner.clone(), (None, &early), work) {
                    Ok(id) if over => self.mux.handle_eof(id, shared.now()),
                    Ok(_) => {}
                    Err(_) => {
                        self.accept_stats.refused += 1;
                        notify_owner(owner);
                    }
                }
                return;
            }
            HandshakeStep::Failed(why) => why,
        };
        if let Some(shaking) = self.handshakes.take(key) {
            self.accept_stats.handshakes_failed += 1;
            self.not_attached(shared, shaking, why, work);
        }
    }

    /// Ends the handshake of an admitted peer. Returns true if there was one.
    pub(in crate::io) fn refuse_handshake(&mut self, shared: &Shared, peer: &Peer, work: &mut Work) -> bool {
        let Some(shaking) = self.handshakes.take_peer(peer) else { return false };
        self.accept_stats.handshakes_failed += 1;
        self.not_attached(shared, shaking, "the peer is not admitted any more".to_owned(), work);
        true
    }

    /// Attaches a connection of which bytes were read.
    pub(in crate::io) fn attach_read(
        &mut self,
        shared: &Shared,
        link: Arc<Link>,
        owner: Option<Sender<ConnectionEvent>>,
        (framing, read): (Option<Framing>, &[u8]),
        work: &mut Work,
    ) -> io::Result<psock::Id> {
        if !read.is_empty() && self.mux.is_full() {
            self.close(shared, link, work);
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, "the mux is full"));
        }
        let id = self.attach(shared, link, owner, framing, work)?;
        if !read.is_empty() {
            self.mux.handle_bytes(id, read, shared.now());
        }
        Ok(id)
    }

    pub(super) fn not_attached(
        &mut self,
        shared: &Shared,
        shaking: PendingHandshake,
        why: String,
        work: &mut Work,
    ) {
        let PendingHandshake { link, peer, owner, .. } = shaking;
        match peer {
            Some(peer) => log::debug!("{peer} was not attached: {why}"),
            None => log::debug!("a connection was not attached: {why}"),
        }
        self.push_event(Event::NotAttached { peer, why }, work);
        notify_owner(owner);
        self.close(shared, link, work);
    }

    /// Closes the lingering connection of an admitted peer. Returns true if there was one.
    pub(in crate::io) fn refuse_lingering(&mut self, shared: &Shared, peer: &Peer, work: &mut Work) -> bool {
        let link = self.lingers.take_peer(peer);
        let found = link.is_some();
        link.into_iter().for_each(|link| self.close(shared, link, work));
        found
    }

    /// A lingering connection was read. `over`: it can be closed.
    pub(in crate::io) fn lingered(&mut self, shared: &Shared, key: u64, over: bool, work: &mut Work) {
        if !over {
            return self.lingers.wait(key, shared.now());
        }
        if let Some(link) = self.lingers.take(key) {
            self.close(shared, link, work);
        }
    }

    /// Closes a connection that ended, or lets it linger if closing would lose data that the peer has not
    /// received.
    fn part(&mut self, shared: &Shared, link: Arc<Link>, cause: &Cause, work: &mut Work) {
        let owed = match cause {
            Cause::Drained | Cause::GivenBack | Cause::Unattached | Cause::Closed | Cause::WorkerEnded => {
                link.unacknowledged() > 0 || link.has_unread()
            }
            // A peer that violates the framing is read only as long as it has not acknowledged replies.
            Cause::Framing(_) => link.unacknowledged() > 0,
            _ => false,
        };
        let oldest = match owed {
            true => self.lingers.begin(&shared.epoll, Arc::clone(&link), shared.now()),
            false => return self.close(shared, link, work),
        };
        match oldest {
            Ok(oldest) => {
                work.shuts.push(link);
                if let Some(oldest) = oldest {
                    self.accept_stats.cut_short += 1;
                    self.close(shared, oldest, work);
                }
            }
            Err(_) => self.close(shared, link, work),
        }
    }

    /// Stops admitting connections.
    pub(in crate::io) fn shut(&mut self, shared: &Shared, work: &mut Work) {
        self.listeners.close();
        for shaking in self.handshakes.close() {
            self.not_attached(shared, shaking, AttachError::Draining.to_string(), work);
        }
    }

    /// Ends a connection that failed, after the core knows what its peer has acknowledged.
    pub(in crate::io) fn fail(&mut self, id: psock::Id, cause: Cause, now: Time) {
        if self.mux.keeps(id)
            && let Some((Some(bytes), _)) = self.sockets.get(id).map(|socket| socket.link.unacked())
        {
            self.mux.handle_unacked(id, bytes, now);
        }
        self.mux.handle_failure(id, cause, now);
    }

    /// Reports to the core what the peer of a connection has not acknowledged.
    pub(super) fn report_unacked(&mut self, id: psock::Id, now: Time) {
        let Some(link) = self.sockets.get(id).map(|socket| Arc::clone(&socket.link)) else { return };
        let (bytes, over) = link.unacked();
        if let Some(bytes) = bytes {
            self.mux.handle_unacked(id, bytes, now);
        }
        if over && self.mux.keeps(id) {
            // No further acknowledgement can arrive, and a closing connection is not read.
            let errno = link.error().unwrap_or(Errno::CONNRESET.raw_os_error());
            self.mux.handle_error(id, errno, now);
        }
    }

    pub(super) fn end(&mut self, shared: &Shared, end: End, work: &mut Work) {
        let Some(mut socket) = self.sockets.remove(end.psock) else { return };
        if end.outstanding > 0 {
            self.discard(shared, end.psock);
        }
        socket.expect(1);
        if socket.watched {
            let _ = epoll::delete(&shared.epoll, &socket.link);
        }
        notify_owner(socket.owner);
        let link = socket.link;
        if end.cause == Cause::ResetByWorker {
            link.reset();
        }
        let peer = link.address();
        let End { psock, cause, rest, resume, unsent, .. } = end;
        let resume = resume.map(|core| Box::new(link.resume(*core)));
        let socket = match if end.hand_back { Link::hand_back(link) } else { Err(link) } {
            Ok(socket) => {
                self.listeners.resume(&shared.epoll);
                Some(socket)
            }
            Err(link) => {
                self.part(shared, link, &cause, work);
                None
            }
        };
        if let Some(lifecycle) = &mut self.lifecycle {
            lifecycle.push_back(Lifecycle::Ended(psock, cause.clone()));
        }
        log::debug!("{psock} ended: {cause}");
        self.notices.push_ended(Ended { psock, peer, cause, socket, rest, resume, unsent });
        if self.mode.is_driver() {
            self.connection_ended = true;
            self.notify(work);
        }
    }
}

impl State {
    /// Starts to report the life of connections to the driver, and to workers as opened events.
    pub(in crate::io) fn report_connections(&mut self, now: Time) {
        if self.lifecycle.is_none() {
            let open = self.sockets.iter();
            let open = open.map(|(id, socket)| Lifecycle::Opened(id, Box::new(socket.link.info())));
            self.lifecycle = Some(open.collect());
        }
        self.mux.report_opened(now);
    }

    fn attached(&mut self, id: psock::Id, link: &Link) {
        if let Some(lifecycle) = &mut self.lifecycle {
            lifecycle.push_back(Lifecycle::Opened(id, Box::new(link.info())));
        }
    }

    /// Workers have done all messages of a connection that ended.
    pub(super) fn removed(&mut self, id: psock::Id, work: &mut Work) {
        if let Some(lifecycle) = &mut self.lifecycle {
            lifecycle.push_back(Lifecycle::Removed(id));
            self.connection_ended = true;
            self.notify(work);
        }
    }
}

fn notify_owner(owner: Option<Sender<ConnectionEvent>>) {
    // The connector may have stopped.
    let _ = owner.map(|owner| owner.send(ConnectionEvent::Over));
}
