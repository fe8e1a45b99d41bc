//! What is behind the mutex: the core, its sockets, and who waits.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::Thread;

use bytes::Bytes;
use rustix::event::epoll::{self, EventData, EventFlags};
use slotmap::{Key, KeyData, SecondaryMap};

use super::Shared;
use super::admission::{Entry, Peer};
use super::connector::News;
use super::handshake::{Handshakes, Shaking};
use super::linger::Lingers;
use super::link::{Came, Link};
use super::listener::{Accepted, Arrivals, Listeners};
use super::reader::READS;
use super::sys::set_rcvlowat;
use super::tls::{Shake, Tls};
use super::tray::Tray;
use crate::Time;
use crate::framing::Framing;
use crate::mux::psock::Interest;
use crate::mux::{
    AttachError, Cause, End, Event, Message, Mux, Run, SendError, Transmit, Undelivered, psock, worker,
};

/// The bell's event data.
pub(super) const BELL: EventData = EventData::new_u64(0);
/// Ends that are kept for whoever asks.
const ENDED: usize = 1024;
/// Turns whose answers leave together, when they are full of short messages.
const GATHERED: u32 = 8;
/// Looks of a driver that gathers, after which everything leaves; it takes one to four in a turn.
pub(super) const LOOKS: u32 = 32;
/// How many wake-ups' time a socket that is ready waits to be read before another worker is woken for it.
const HELP: u32 = 3;
/// Rests of a message from so many bytes on are awaited, up to so many at once.
const AWAITED: usize = 64 << 10;
const AWAITED_MOST: usize = 256 << 10;
/// What is kept of what there is to tell.
const TOLD: usize = 1024;
/// Later than anything is due.
pub(super) const FOREVER: Time = Time::from_nanos(u64::MAX);

/// A connection that ended.
#[derive(Debug)]
pub struct Ended {
    /// Which one.
    pub psock: psock::Id,
    /// Who was at the other end, over IP.
    pub peer: Option<SocketAddr>,
    /// Why.
    pub cause: Cause,
    /// The descriptor, when it was given back; it is non-blocking. Not of a connection under TLS, nor of one that has a
    /// [`super::Carrier`].
    pub socket: Option<OwnedFd>,
    /// Bytes that were read and belong to no delivered message.
    pub rest: Bytes,
    /// Answers that were not sent, or not all of them.
    pub unsent: usize,
}

/// What the core has to tell whoever has the server.
#[derive(Debug)]
pub enum Told {
    /// To a [`super::Driver`]: this worker was told to leave, and holds nothing any more.
    Left(worker::Id),
    /// A message was given up because the workers that held it died.
    Undone(Message),
    /// Connected mode: a message was not sent, or not all of it.
    Undelivered(Undelivered),
    /// There is room again for [`super::Server::send`] after it found none.
    Room,
    /// A connection was not attached, because its handshake failed or took too long.
    NotAttached {
        /// Whose, if it was TCP's.
        peer: Option<SocketAddr>,
        /// Why not.
        why: String,
    },
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) mux: Mux,
    pub(super) sockets: SecondaryMap<psock::Id, Socket>,
    pub(super) workers: SecondaryMap<worker::Id, Seat>,
    pub(super) listeners: Listeners,
    pub(super) arrivals: Arrivals,
    pub(super) handshakes: Handshakes,
    pub(super) lingers: Lingers,
    pub(super) leader: Option<worker::Id>,
    /// It, or the driver, sleeps until then at the latest, as far as it knew: what becomes due sooner has it rung.
    pub(super) until: Option<Time>,
    /// Who looks whether a leader got stuck.
    pub(super) deputy: Option<worker::Id>,
    /// Workers that are parked, the last one at the end.
    pub(super) parked: Vec<worker::Id>,
    /// Connections that have something to send, while more is gathered for them.
    pub(super) unsent: Vec<psock::Id>,
    /// Connections whose sockets are ready and that nobody reads yet, and since when; the one that waits longest first.
    pub(super) ready: VecDeque<(psock::Id, Time)>,
    /// Sockets that a worker takes at once, and how many were since epoll was last asked.
    pub(super) reads: usize,
    pub(super) taken: usize,
    /// Who was woken to help with them and has not come yet.
    pub(super) helper: Option<worker::Id>,
    /// Workers that wait for sockets beside the leader, and how many may.
    pub(super) helping: usize,
    pub(super) helpers: usize,
    /// Turns in a row for which it was.
    pub(super) gathered: u32,
    /// Turns that any worker began.
    pub(super) turns: u64,
    pub(super) ended: VecDeque<Ended>,
    pub(super) told: VecDeque<Told>,
    /// Open handles ([`super::Socket`]), once there was one; then a thread has the sockets.
    pub(super) handles: Option<usize>,
    /// Threads that wait for something to change.
    pub(super) callers: Vec<Thread>,
    /// Handles that are to be rung when there is room, on this connection or any.
    pub(super) roomless: Vec<(worker::Id, Option<psock::Id>)>,
    /// A [`super::Driver`] leads, and has the workers.
    pub(super) driven: bool,
    /// While its workers do short messages, answers of a connection leave together when all is done that it asked, or after some
    /// looks.
    pub(super) gathers: bool,
    /// It has idle workers that are to take something.
    pub(super) wanted: bool,
    /// A connection has ended since it last looked.
    pub(super) parted: bool,
    /// The core has drained; all has, when nobody lingers either.
    drained: bool,
    pub(super) closed: bool,
}

#[derive(Debug)]
pub(super) struct Socket {
    pub(super) link: Arc<Link>,
    /// Who is told when it has ended.
    keeper: Option<Sender<News>>,
    /// Whether epoll watches it.
    watched: bool,
    /// It is among those that are ready, with what epoll said of it.
    queued: bool,
    flags: EventFlags,
    /// Somebody reads it; it was ready again meanwhile.
    reading: bool,
    again: bool,
    /// SO_RCVLOWAT.
    lowat: usize,
}

/// A socket that is to be read now.
#[derive(Debug)]
pub(super) struct Reading {
    pub(super) id: psock::Id,
    pub(super) link: Arc<Link>,
    pub(super) buffer: Vec<u8>,
    /// The peer hung up or sends no more: that is behind what there is to read, and not said again.
    pub(super) over: bool,
}

impl Socket {
    fn new(link: Arc<Link>, keeper: Option<Sender<News>>) -> Self {
        Self {
            link,
            keeper,
            watched: true,
            queued: false,
            flags: EventFlags::empty(),
            reading: false,
            again: false,
            lowat: 1,
        }
    }

    /// So many bytes make a difference: nobody is woken for fewer, when they are many (the kernel's strparser has need_bytes for
    /// this). The kernel grows the receive buffer for it, up to twice as many bytes, besides what a mux counts; and says sooner
    /// that there are some when it is short of memory.
    fn expect(&mut self, need: usize) {
        let lowat = if need < AWAITED { 1 } else { need.min(AWAITED_MOST) };
        if lowat != self.lowat && self.link.is_plain() {
            self.lowat = lowat;
            set_rcvlowat(self.link.as_fd(), lowat);
        }
    }
}

/// Where a worker sits: how it is woken, and what it has not begun.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) thread: Option<Thread>,
    /// A handle's, which it is woken by while it is armed: its thread waits for other things as well (eventfd(2)).
    pub(super) bell: Option<Arc<OwnedFd>>,
    pub(super) armed: bool,
    pub(super) tray: Arc<Tray>,
}

impl Seat {
    pub(super) const fn new(tray: Arc<Tray>) -> Self {
        Self { thread: None, bell: None, armed: false, tray }
    }

    fn wake(&self, work: &mut Work) {
        match &self.bell {
            Some(bell) if self.armed => work.bells.push(Arc::clone(bell)),
            _ => work.wakes.extend(self.thread.clone()),
        }
    }
}

/// What is to be done without the mutex.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) writes: Vec<(Transmit, Arc<Link>)>,
    wakes: Vec<Thread>,
    bells: Vec<Arc<OwnedFd>>,
    ring: bool,
    /// Nothing more is said to these.
    shuts: Vec<Arc<Link>>,
    /// Dropped, and thereby closed, without the mutex.
    closes: Vec<Arc<Link>>,
}

impl Work {
    /// Whether it wakes somebody.
    pub(super) fn wakes(&self) -> bool {
        !self.wakes.is_empty()
    }

    pub(super) fn wake(&mut self, shared: &Shared) {
        for thread in self.wakes.drain(..) {
            thread.unpark();
        }
        for bell in self.bells.drain(..) {
            // As the mux's own: if it fails, it rings already.
            let _ = rustix::io::write(&*bell, &1u64.to_ne_bytes());
        }
        if std::mem::take(&mut self.ring) {
            shared.ring();
        }
        self.shuts.drain(..).for_each(|link| link.shut());
        self.closes.clear();
    }
}

impl State {
    pub(super) fn new(mux: Mux) -> Self {
        Self {
            mux,
            sockets: SecondaryMap::new(),
            workers: SecondaryMap::new(),
            listeners: Listeners::default(),
            arrivals: Arrivals::default(),
            handshakes: Handshakes::default(),
            lingers: Lingers::default(),
            leader: None,
            until: None,
            deputy: None,
            parked: Vec::new(),
            unsent: Vec::new(),
            ready: VecDeque::new(),
            reads: READS,
            taken: 0,
            helper: None,
            helping: 0,
            helpers: std::thread::available_parallelism().map_or(0, |count| helpers(count.get())),
            gathered: 0,
            turns: 0,
            ended: VecDeque::new(),
            told: VecDeque::new(),
            handles: None,
            callers: Vec::new(),
            roomless: Vec::new(),
            driven: false,
            gathers: false,
            wanted: false,
            parted: false,
            drained: false,
            closed: false,
        }
    }

    /// Attaches a connection, with a framing of its own or the server's. When that fails it is closed.
    pub(super) fn attach(
        &mut self,
        shared: &Shared,
        link: Arc<Link>,
        keeper: Option<Sender<News>>,
        framing: Option<Framing>,
        work: &mut Work,
    ) -> io::Result<psock::Id> {
        let now = shared.now();
        let framing = framing.unwrap_or_else(|| shared.framing.clone());
        let attached = self
            .mux
            .attach(framing, shared.limits, now)
            .map_err(|error| io::Error::new(io::ErrorKind::NotConnected, error));
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
                self.sockets.insert(id, Socket::new(link, keeper));
                Ok(id)
            }
            Err(error) => {
                self.close(shared, link, work);
                Err(error)
            }
        }
    }

    /// A connection that is none of ours any more: its descriptor is another one's to have, once the mutex is free.
    fn close(&mut self, shared: &Shared, link: Arc<Link>, work: &mut Work) {
        self.listeners.resume(&shared.epoll);
        work.closes.push(link);
    }

    /// Attaches a connection, behind its handshake if it has one.
    pub(super) fn admit(
        &mut self,
        shared: &Shared,
        (fd, entry): (OwnedFd, Option<Entry>),
        tls: Option<&Tls>,
        keeper: Option<Sender<News>>,
        work: &mut Work,
    ) -> io::Result<()> {
        let Some(tls) = tls else {
            let link = Arc::new(Link::new(fd, None, entry));
            return self.attach(shared, link, keeper, None, work).map(drop);
        };
        // Whatever goes wrong, the descriptor and the entry are in a link, which is closed without the mutex.
        let (session, wrong) = match tls.session() {
            _ if self.mux.is_draining() => {
                (None, Some(io::Error::new(io::ErrorKind::NotConnected, AttachError::Draining)))
            }
            Ok(session) => (Some(session), None),
            Err(error) => (None, Some(error)),
        };
        let link = Arc::new(Link::new(fd, session, entry));
        let until = shared.now() + tls.time();
        let begun = match wrong {
            Some(error) => Err(error),
            None => self.handshakes.begin(&shared.epoll, Arc::clone(&link), keeper, until),
        };
        match begun {
            Ok(None) => {}
            Ok(Some(oldest)) => {
                self.arrivals.handshakes_late += 1;
                self.not_attached(shared, oldest, "too many others shake hands".to_owned(), work);
            }
            Err(error) => {
                self.close(shared, link, work);
                return Err(error);
            }
        }
        Ok(())
    }

    /// What a listener accepted.
    pub(super) fn accepted(&mut self, shared: &Shared, accepted: Accepted, work: &mut Work) {
        let Accepted { listener, passed, denied, reset, failed } = accepted;
        self.arrivals.accepted += passed.len() as u64 + denied + reset;
        self.arrivals.denied += denied;
        self.arrivals.reset += reset;
        for socket in passed {
            if self.admit(shared, socket, listener.tls.as_ref(), None, work).is_err() {
                self.arrivals.refused += 1;
            }
        }
        if let Some(errno) = failed {
            self.arrivals.refused += 1;
            if self.listeners.pause(&shared.epoll, shared.now()) {
                log::warn!(
                    "cannot accept until a connection ends: {errno}: raise the limit of open files (`ulimit -n`, LimitNOFILE=)"
                );
            }
        }
    }

    /// A handshake went on.
    pub(super) fn shaken(&mut self, shared: &Shared, key: u64, shake: Shake, work: &mut Work) {
        let why = match shake {
            Shake::More { write } => match self.handshakes.wait(key, write) {
                Ok(()) => return,
                Err(error) => error.to_string(),
            },
            Shake::Done => {
                let Some(Shaking { link, keeper, .. }) = self.handshakes.take(key) else { return };
                let (early, over) = link.early();
                match self.attach_read(shared, link, keeper.clone(), (None, &early), work) {
                    Ok(id) if over => self.mux.handle_eof(id, shared.now()),
                    Ok(_) => {}
                    Err(_) => {
                        self.arrivals.refused += 1;
                        tell_keeper(keeper);
                    }
                }
                return;
            }
            Shake::Failed(why) => why,
        };
        if let Some(shaking) = self.handshakes.take(key) {
            self.arrivals.handshakes_failed += 1;
            self.not_attached(shared, shaking, why, work);
        }
    }

    /// Ends the handshake of a peer that was admitted; whether there was one.
    pub(super) fn refuse_shaking(&mut self, shared: &Shared, peer: &Peer, work: &mut Work) -> bool {
        let Some(shaking) = self.handshakes.take_peer(peer) else { return false };
        self.arrivals.handshakes_failed += 1;
        self.not_attached(shared, shaking, "it is not let in any more".to_owned(), work);
        true
    }

    /// Attaches a connection of which these bytes were read.
    pub(super) fn attach_read(
        &mut self,
        shared: &Shared,
        link: Arc<Link>,
        keeper: Option<Sender<News>>,
        (framing, read): (Option<Framing>, &[u8]),
        work: &mut Work,
    ) -> io::Result<psock::Id> {
        if !read.is_empty() && self.mux.is_full() {
            self.close(shared, link, work);
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, "the mux is full"));
        }
        let id = self.attach(shared, link, keeper, framing, work)?;
        if !read.is_empty() {
            self.mux.handle_bytes(id, read, shared.now());
        }
        Ok(id)
    }

    fn not_attached(&mut self, shared: &Shared, shaking: Shaking, why: String, work: &mut Work) {
        let Shaking { link, peer, keeper, .. } = shaking;
        match peer {
            Some(peer) => log::debug!("{peer} was not attached: {why}"),
            None => log::debug!("a connection was not attached: {why}"),
        }
        self.tell(Told::NotAttached { peer, why }, work);
        tell_keeper(keeper);
        self.close(shared, link, work);
    }

    /// Ends the lingering of a peer that was admitted; whether there was one.
    pub(super) fn refuse_lingering(&mut self, shared: &Shared, peer: &Peer, work: &mut Work) -> bool {
        let link = self.lingers.take_peer(peer);
        let found = link.is_some();
        link.into_iter().for_each(|link| self.close(shared, link, work));
        found
    }

    /// One that lingers was read; whether that is over.
    pub(super) fn lingered(&mut self, shared: &Shared, key: u64, over: bool, work: &mut Work) {
        if !over {
            return self.lingers.wait(key, shared.now());
        }
        if let Some(link) = self.lingers.take(key) {
            self.close(shared, link, work);
        }
    }

    /// A connection has ended: it is closed, or lingers if that would cost its peer what was sent to it.
    fn part(&mut self, shared: &Shared, link: Arc<Link>, cause: &Cause, work: &mut Work) {
        let owed = match cause {
            Cause::Drained | Cause::GivenBack | Cause::Unattached => {
                link.unacknowledged() > 0 || link.has_unread()
            }
            // Who sends what cannot be framed is not listened to without need.
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
                    self.arrivals.cut_short += 1;
                    self.close(shared, oldest, work);
                }
            }
            Err(_) => self.close(shared, link, work),
        }
    }

    /// Nobody comes in any more.
    pub(super) fn shut(&mut self, shared: &Shared, work: &mut Work) {
        self.listeners.close();
        for shaking in self.handshakes.close() {
            self.not_attached(shared, shaking, AttachError::Draining.to_string(), work);
        }
    }

    /// Does what is due.
    pub(super) fn handle_timeout(&mut self, shared: &Shared, now: Time, work: &mut Work) {
        self.mux.handle_timeout(now);
        if self.listeners.due().is_some_and(|due| due <= now) {
            self.listeners.resume(&shared.epoll);
        }
        while let Some(late) = self.handshakes.expired(now) {
            self.arrivals.handshakes_late += 1;
            self.not_attached(shared, late, "its handshake took too long".to_owned(), work);
        }
        for (link, late) in self.lingers.expired(now) {
            self.arrivals.cut_short += u64::from(late);
            self.close(shared, link, work);
        }
    }

    /// When that is to be called.
    pub(super) fn poll_timeout(&self) -> Option<Time> {
        let own = [self.mux.poll_timeout(), self.handshakes.due(), self.lingers.due(), self.listeners.due()];
        own.into_iter().flatten().min()
    }

    /// Takes what the core has to say: what epoll watches is changed at once, the rest is for later. Who waits for something to change
    /// looks again.
    pub(super) fn pump(&mut self, shared: &Shared, work: &mut Work) {
        self.pump_again(shared, work);
        work.wakes.append(&mut self.callers);
        self.ring_for_room(work);
    }

    /// The same by who waits, and has found nothing changed and changed nothing: were those woken that wait like it, they would
    /// wake each other for ever.
    pub(super) fn pump_again(&mut self, shared: &Shared, work: &mut Work) {
        self.listen(shared, work);
        // Who gathers and is awake comes again, and leaves nothing behind when it goes to sleep.
        let gathers = self.gathers && self.until.is_none() && self.gathered < LOOKS;
        let gathers = gathers && self.mux.quick_turn().is_some();
        self.gathered = if gathers { self.gathered + 1 } else { 0 };
        let Self { unsent, mux, sockets, .. } = self;
        unsent.retain(|&id| {
            if gathers && mux.outstanding(id) > 0 {
                return true;
            }
            if let Some(socket) = sockets.get(id)
                && let Some(transmit) = mux.transmit(id)
            {
                work.writes.push((transmit, Arc::clone(&socket.link)));
            }
            false
        });
    }

    /// Who is armed and waits for room is rung if there is some, or will never be.
    fn ring_for_room(&mut self, work: &mut Work) {
        let Self { roomless, mux, workers, .. } = self;
        roomless.retain(|&(id, to)| {
            let full = mux.room_for(to) == Err(SendError::Full);
            if !full && let Some(seat) = workers.get(id) {
                seat.wake(work);
            }
            full
        });
    }

    /// A handle's thread waits by its descriptor from here on, or does not any more.
    pub(super) fn set_armed(&mut self, id: worker::Id, armed: bool) {
        self.roomless.retain(|(other, _)| *other != id);
        if let Some(seat) = self.workers.get_mut(id) {
            seat.armed = armed;
        }
    }

    /// This thread looks again, so it is not among those that wait: nobody may have woken it.
    pub(super) fn waits_no_more(&mut self) {
        if !self.callers.is_empty() {
            let me = std::thread::current().id();
            self.callers.retain(|caller| caller.id() != me);
        }
    }

    /// As [`State::pump`], but what is to be sent waits for more of it: the worker has a turn full of messages, and they are short.
    pub(super) fn gather(&mut self, shared: &Shared, work: &mut Work) {
        if self.gathered >= GATHERED {
            return self.pump(shared, work);
        }
        self.gathered += 1;
        self.listen(shared, work);
    }

    fn listen(&mut self, shared: &Shared, work: &mut Work) {
        while let Some(event) = self.mux.poll_event() {
            match event {
                Event::Interest(id) => self.watch(shared, id),
                Event::Transmit(id) => self.unsent.push(id),
                Event::Wake(_) if self.driven => {
                    self.wanted = true;
                    self.ring(work);
                }
                Event::Wake(id) => self.wake(id, work),
                Event::Recall(id) => self.recall(shared, id),
                Event::Ended(end) => self.end(shared, end, work),
                Event::Undone(message) => {
                    log::debug!("{:?} was given up: its workers died", message.ticket());
                    self.tell(Told::Undone(message), work);
                }
                Event::Undelivered(undelivered) => self.tell(Told::Undelivered(undelivered), work),
                Event::Left(id) if self.driven => self.tell(Told::Left(id), work),
                Event::Room => self.tell(Told::Room, work),
                Event::Left(_) => {}
                Event::Drained => self.drained = true,
            }
        }
        if self.drained && !self.closed && self.lingers.is_empty() {
            self.give_up(work);
        }
        self.rouse(work);
    }

    /// Nothing more comes: all are told.
    pub(super) fn give_up(&mut self, work: &mut Work) {
        self.closed = true;
        work.ring = true;
        work.wakes.append(&mut self.callers);
        self.workers.values().for_each(|seat| seat.wake(work));
    }

    /// A message of a handle that was closed before there was room for it.
    pub(super) fn undelivered(&mut self, bytes: Bytes, work: &mut Work) {
        self.tell(Told::Undelivered(Undelivered { bytes, left: 0 }), work);
    }

    /// Has whoever sleeps over the sockets look again, if something is due sooner than it knew of.
    pub(super) fn rouse(&mut self, work: &mut Work) {
        if let Some(until) = self.until
            && self.poll_timeout().is_some_and(|due| due < until)
        {
            self.ring(work);
        }
    }

    /// Wakes whoever sleeps over the sockets. Who is awake looks anyway.
    fn ring(&mut self, work: &mut Work) {
        work.ring |= self.until.take().is_some();
    }

    /// A driver that sleeps is woken: it gives back to whoever wants to know.
    fn tell(&mut self, told: Told, work: &mut Work) {
        if self.driven {
            self.ring(work);
        }
        self.told.push_back(told);
        if self.told.len() > TOLD {
            // A worker that left is told in any case: there are few. Handshakes that fail are as many as peers like, and what was given
            // up has somebody wait for an answer.
            let first = |least: fn(&Told) -> bool| self.told.iter().position(least);
            let least = first(|told| matches!(told, Told::NotAttached { .. }));
            let least = least.or_else(|| first(|told| !matches!(told, Told::Left(_))));
            self.told.remove(least.unwrap_or(0));
        }
    }

    pub(super) fn wake(&mut self, id: worker::Id, work: &mut Work) {
        self.parked.retain(|&parked| parked != id);
        if self.leader == Some(id) {
            work.ring = true;
        } else if let Some(seat) = self.workers.get(id) {
            seat.wake(work);
        }
    }

    /// Wakes a parked worker, if there is one.
    pub(super) fn wake_any(&mut self, work: &mut Work) -> Option<worker::Id> {
        let id = self.parked.pop()?;
        if self.deputy == Some(id) {
            self.deputy = None;
        }
        self.wake(id, work);
        Some(id)
    }

    /// Somebody begins so many messages: who waits for sockets meanwhile?
    pub(super) fn see_to_leader(&mut self, count: usize, work: &mut Work) {
        if self.leader.is_some() {
            // It waits for as long as it knew of; more waits now.
            let queued = self.mux.queued();
            let leader = self.leader.filter(|_| queued > 0 && self.mux.is_long(queued));
            leader.into_iter().for_each(|leader| self.wake(leader, work));
        } else if !work.wakes() {
            let takes = self.mux.wary_service_time() * count as u32;
            if takes >= self.mux.config().wake_cost {
                self.wake_any(work);
            } else if self.deputy.is_none() {
                self.deputy = self.wake_any(work);
            }
        }
    }

    /// A worker has read a run: it does that, and leads no more.
    fn begin_run(&mut self, by: worker::Id, run: Run) {
        let Some(seat) = self.workers.get(by) else { return };
        seat.tray.lock().put(run);
        self.turns += 1;
        if self.leader == Some(by) {
            self.leader = None;
        }
    }

    /// Epoll says that a socket is ready.
    pub(super) fn handle_ready(&mut self, id: psock::Id, flags: EventFlags, now: Time) {
        let Some(socket) = self.sockets.get_mut(id) else { return };
        socket.flags |= flags;
        if socket.reading {
            socket.again = true;
        } else if !std::mem::replace(&mut socket.queued, true) {
            self.ready.push_back((id, now));
        }
    }

    /// The sockets that are to be read now, at most so many.
    pub(super) fn take_ready(&mut self, shared: &Shared, most: usize) -> Vec<Reading> {
        let mut all = Vec::new();
        while all.len() < most
            && let Some((id, _)) = self.ready.pop_front()
        {
            let Some(socket) = self.sockets.get_mut(id) else { continue };
            socket.queued = false;
            let flags = std::mem::replace(&mut socket.flags, EventFlags::empty());
            let gone = flags.intersects(EventFlags::HUP | EventFlags::ERR);
            match self.mux.reserve(id) {
                Some(buffer) => {
                    socket.reading = true;
                    let over = gone || flags.contains(EventFlags::RDHUP);
                    all.push(Reading { id, link: Arc::clone(&socket.link), buffer, over });
                }
                None if gone => self.hung_up(shared, id),
                // It is watched anew when it is to be read again, which says what is there.
                None => {}
            }
        }
        self.taken += all.len();
        all
    }

    /// Beside those that are at sockets or messages now, one more would be in their way.
    pub(super) fn is_crowded(&self) -> bool {
        self.mux.working() + self.helping + usize::from(self.leader.is_some()) > self.helpers
    }

    /// The leader finds sockets ready whenever it looks: another is to wait for them too. Whether one comes.
    pub(super) fn get_help(&mut self, work: &mut Work) -> bool {
        if self.is_crowded() || self.helper.is_some() {
            return false;
        }
        // Not the deputy, if there is another: it would have to be replaced.
        let deputy = self.deputy;
        if let Some(at) = self.parked.iter().rposition(|&id| Some(id) != deputy) {
            let last = self.parked.len() - 1;
            self.parked.swap(at, last);
        }
        self.helper = self.wake_any(work);
        self.helper.is_some()
    }

    /// A worker has read sockets, and has a run or not. Who sees to those that are ready besides, or will be?
    pub(super) fn see_to_ready(&mut self, now: Time, runs: bool, work: &mut Work) {
        let patience = self.mux.config().wake_cost * HELP;
        let late = self.ready.front().is_some_and(|&(_, since)| now.since(since) >= patience);
        if late && self.get_help(work) {
            // Who comes sees to them.
        } else if runs && self.deputy.is_none() && (self.leader.is_none() || !self.ready.is_empty()) {
            self.deputy = self.wake_any(work);
        }
        if runs && !self.ready.is_empty() && !work.wakes() {
            // Nobody is parked; it went to sleep before these were ready.
            self.ring(work);
        }
    }

    /// A socket was read; whether the worker that did has a run of what came.
    pub(super) fn read(
        &mut self,
        (reading, outcome): (Reading, Result<Came, Cause>),
        by: Option<worker::Id>,
        now: Time,
    ) -> bool {
        let Reading { id, buffer, over, .. } = reading;
        if let Some(socket) = self.sockets.get_mut(id) {
            socket.reading = false;
            let again = std::mem::take(&mut socket.again);
            let more = outcome.as_ref().is_ok_and(|&came| came == Came::More || over && came == Came::All);
            if again || more {
                let flags = if over { EventFlags::IN | EventFlags::RDHUP } else { EventFlags::IN };
                self.handle_ready(id, flags, now);
            }
        }
        let run = match by {
            Some(by) => self.mux.handle_read_by(id, buffer, by, now).map(|run| (by, run)),
            None => {
                self.mux.handle_read(id, buffer, now);
                None
            }
        };
        let need = self.mux.need(id);
        if let Some(socket) = self.sockets.get_mut(id) {
            socket.expect(need);
        }
        match outcome {
            Ok(Came::All | Came::More) => {}
            Ok(Came::End) => self.mux.handle_eof(id, now),
            Err(cause) => self.mux.handle_failure(id, cause, now),
        }
        let runs = run.is_some();
        run.into_iter().for_each(|(by, run)| self.begin_run(by, run));
        runs
    }

    /// Takes from a worker what it has not begun, and settles what it has done.
    fn recall(&mut self, shared: &Shared, id: worker::Id) {
        let Some(seat) = self.workers.get(id) else { return };
        let tray = Arc::clone(&seat.tray);
        let mut tray = tray.lock();
        tray.settle(&mut self.mux, id, shared.now());
        let tickets = tray.give_back(&mut self.mux, id);
        self.mux.handle_hand_back(id, &tickets, shared.now());
    }

    /// Has epoll watch a socket for what the core wants to know of it.
    fn watch(&mut self, shared: &Shared, id: psock::Id) {
        let interest = self.mux.interest(id);
        let Some(socket) = self.sockets.get_mut(id) else { return };
        let changed = if socket.watched {
            epoll::modify(&shared.epoll, &socket.link, data(id), flags(interest))
        } else if interest == Interest::default() {
            Ok(())
        } else {
            socket.watched = true;
            epoll::add(&shared.epoll, &socket.link, data(id), flags(interest))
        };
        if let Err(errno) = changed {
            self.mux.handle_error(id, errno.raw_os_error(), shared.now());
        }
    }

    /// A socket hung up or failed that nobody reads now.
    pub(super) fn hung_up(&mut self, shared: &Shared, id: psock::Id) {
        let Some(socket) = self.sockets.get_mut(id) else { return };
        match socket.link.error() {
            None => {
                // It would be said again and again. Who wants to read or write it adds it again.
                socket.watched = false;
                let _ = epoll::delete(&shared.epoll, &socket.link);
            }
            Some(errno) => self.mux.handle_error(id, errno, shared.now()),
        }
    }

    fn end(&mut self, shared: &Shared, end: End, work: &mut Work) {
        let Some(mut socket) = self.sockets.remove(end.psock) else { return };
        socket.expect(1);
        if socket.watched {
            let _ = epoll::delete(&shared.epoll, &socket.link);
        }
        tell_keeper(socket.keeper);
        let link = socket.link;
        let peer = link.address();
        // A descriptor of the same socket: a writer may still hold the link for a moment.
        let socket = if end.hand_back { link.hand_back() } else { None };
        match socket {
            Some(_) => self.close(shared, link, work),
            None => self.part(shared, link, &end.cause, work),
        }
        if self.ended.len() == ENDED {
            self.ended.pop_front();
        }
        let End { psock, cause, rest, unsent, .. } = end;
        log::debug!("{psock} ended: {cause}");
        self.ended.push_back(Ended { psock, peer, cause, socket, rest, unsent });
        if self.driven {
            self.parted = true;
            self.ring(work);
        }
    }
}

/// How many workers may wait for sockets beside the leader on so many processors: half of them are left to the peers and to the
/// system, which take about as long for short messages as their workers. With two processors a second reader of 256-byte messages
/// costs a third of their rate.
const fn helpers(processors: usize) -> usize {
    (processors / 2).saturating_sub(1)
}

fn tell_keeper(keeper: Option<Sender<News>>) {
    // It may have stopped.
    let _ = keeper.map(|keeper| keeper.send(News::Over));
}

fn data(id: psock::Id) -> EventData {
    EventData::new_u64(id.data().as_ffi())
}

/// The connection of an event, whose generation is never 0.
pub(super) fn psock_of(data: u64) -> Option<psock::Id> {
    (data >> 32 != 0).then(|| KeyData::from_ffi(data).into())
}

fn flags(interest: Interest) -> EventFlags {
    let mut flags = EventFlags::ET;
    flags.set(EventFlags::IN | EventFlags::RDHUP, interest.read);
    flags.set(EventFlags::OUT, interest.write);
    flags
}

#[cfg(test)]
mod tests;
