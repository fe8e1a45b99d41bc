//! What is behind the mutex: the core, its sockets, and who waits.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::Thread;

use bytes::Bytes;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use slotmap::{Key, KeyData, SecondaryMap};

use super::Shared;
use super::listener::Listeners;
use super::reader::READS;
use super::worker::Tray;
use crate::mux::psock::Interest;
use crate::mux::{Cause, End, Event, Message, Mux, Outcome, Transmit, Undelivered, psock, worker};

/// The bell's event data.
pub(super) const BELL: EventData = EventData::new_u64(0);
/// Ends that are kept for whoever asks.
const ENDED: usize = 1024;
/// Turns whose answers leave together, when they are full of short messages.
const GATHERED: u32 = 8;
/// What is kept of what there is to tell.
const TOLD: usize = 1024;
/// Buffers in one writev(2) (include/uapi/linux/uio.h, UIO_MAXIOV).
const IOV: usize = 1024;

/// A connection that ended.
#[derive(Debug)]
pub struct Ended {
    /// Which one.
    pub psock: psock::Id,
    /// Why.
    pub cause: Cause,
    /// The descriptor, when it was given back; it is non-blocking.
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
    /// There is room again for [`super::Worker::send`] after it found none.
    Room,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) mux: Mux,
    pub(super) sockets: SecondaryMap<psock::Id, Socket>,
    pub(super) workers: SecondaryMap<worker::Id, Seat>,
    pub(super) listeners: Listeners,
    pub(super) leader: Option<worker::Id>,
    /// Who looks whether a leader got stuck.
    pub(super) deputy: Option<worker::Id>,
    /// Workers that are parked, the last one at the end.
    pub(super) parked: Vec<worker::Id>,
    /// Connections that have something to send, while more is gathered for them.
    pub(super) unsent: Vec<psock::Id>,
    /// Sockets that the leader takes at once.
    pub(super) reads: usize,
    /// Turns in a row for which it was.
    pub(super) gathered: u32,
    /// Turns that any worker began.
    pub(super) turns: u64,
    pub(super) ended: VecDeque<Ended>,
    pub(super) told: VecDeque<Told>,
    /// A [`super::Driver`] leads, and has the workers.
    pub(super) driven: bool,
    /// It has idle workers that are to take something.
    pub(super) wanted: bool,
    pub(super) closed: bool,
}

#[derive(Debug)]
pub(super) struct Socket {
    pub(super) fd: Arc<OwnedFd>,
    /// Whether epoll watches it.
    watched: bool,
}

/// Where a worker sits: how it is woken, and what it has not begun.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) thread: Option<Thread>,
    pub(super) tray: Arc<Tray>,
}

/// What is to be done without the mutex.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) writes: Vec<(Transmit, Arc<OwnedFd>)>,
    wakes: Vec<Thread>,
    ring: bool,
    /// Dropped, and thereby closed, without the mutex.
    closes: Vec<Arc<OwnedFd>>,
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
        if std::mem::take(&mut self.ring) {
            shared.ring();
        }
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
            leader: None,
            deputy: None,
            parked: Vec::new(),
            unsent: Vec::new(),
            reads: READS,
            gathered: 0,
            turns: 0,
            ended: VecDeque::new(),
            told: VecDeque::new(),
            driven: false,
            wanted: false,
            closed: false,
        }
    }

    pub(super) fn attach(&mut self, shared: &Shared, socket: OwnedFd) -> io::Result<psock::Id> {
        let now = shared.now();
        let id = self
            .mux
            .attach(shared.framing.clone(), shared.limits, now)
            .map_err(|error| io::Error::new(io::ErrorKind::NotConnected, error))?;
        if let Err(errno) =
            epoll::add(&shared.epoll, &socket, data(id), flags(Interest { read: true, write: false }))
        {
            self.mux.handle_error(id, errno.raw_os_error(), now);
            return Err(errno.into());
        }
        self.sockets.insert(id, Socket { fd: Arc::new(socket), watched: true });
        Ok(id)
    }

    /// Takes what the core has to say: what epoll watches is changed at once, the rest is for later.
    pub(super) fn pump(&mut self, shared: &Shared, work: &mut Work) {
        self.listen(shared, work);
        self.gathered = 0;
        while let Some(id) = self.unsent.pop() {
            if let Some(socket) = self.sockets.get(id)
                && let Some(transmit) = self.mux.transmit(id)
            {
                work.writes.push((transmit, Arc::clone(&socket.fd)));
            }
        }
    }

    /// The same, but what is to be sent waits for more of it: the worker has a turn full of messages, and they are short.
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
                Event::Wake(_) if self.driven => self.wanted = true,
                Event::Wake(id) => self.wake(id, work),
                Event::Recall(id) => self.recall(shared, id),
                Event::Ended(end) => self.end(shared, end, work),
                Event::Undone(message) => {
                    log::debug!("{:?} was given up: its workers died", message.ticket());
                    self.tell(Told::Undone(message));
                }
                Event::Undelivered(undelivered) => self.tell(Told::Undelivered(undelivered)),
                Event::Left(id) if self.driven => self.tell(Told::Left(id)),
                Event::Room => self.tell(Told::Room),
                Event::Left(_) => {}
                Event::Drained => {
                    self.closed = true;
                    work.ring = true;
                    for seat in self.workers.values() {
                        work.wakes.extend(seat.thread.clone());
                    }
                }
            }
        }
    }

    fn tell(&mut self, told: Told) {
        if self.told.len() >= TOLD {
            // A worker that left is told in any case: there are few.
            let least = self.told.iter().position(|told| !matches!(told, Told::Left(_)));
            self.told.remove(least.unwrap_or(0));
        }
        self.told.push_back(told);
    }

    pub(super) fn wake(&mut self, id: worker::Id, work: &mut Work) {
        self.parked.retain(|&parked| parked != id);
        if self.leader == Some(id) {
            work.ring = true;
        } else if let Some(seat) = self.workers.get(id) {
            work.wakes.extend(seat.thread.clone());
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

    /// Takes from a worker what it has not begun, and settles what it has done.
    fn recall(&mut self, shared: &Shared, id: worker::Id) {
        let Some(seat) = self.workers.get(id) else { return };
        let tray = Arc::clone(&seat.tray);
        let mut tray = tray.lock();
        let back: Vec<_> = tray.batch.drain(..).collect();
        tray.settle(&mut self.mux, id, shared.now());
        let tickets: Vec<_> = back.iter().map(Message::ticket).collect();
        self.mux.handle_hand_back(id, &tickets, shared.now());
    }

    /// Has epoll watch a socket for what the core wants to know of it.
    fn watch(&mut self, shared: &Shared, id: psock::Id) {
        let interest = self.mux.interest(id);
        let Some(socket) = self.sockets.get_mut(id) else { return };
        let changed = if socket.watched {
            epoll::modify(&shared.epoll, &socket.fd, data(id), flags(interest))
        } else if interest == Interest::default() {
            Ok(())
        } else {
            socket.watched = true;
            epoll::add(&shared.epoll, &socket.fd, data(id), flags(interest))
        };
        if let Err(errno) = changed {
            self.mux.handle_error(id, errno.raw_os_error(), shared.now());
        }
    }

    /// A socket hung up or failed that nobody reads now.
    pub(super) fn hung_up(&mut self, shared: &Shared, id: psock::Id) {
        let Some(socket) = self.sockets.get_mut(id) else { return };
        match rustix::net::sockopt::socket_error(&socket.fd) {
            Ok(Ok(())) => {
                // It would be said again and again. Who wants to read or write it adds it again.
                socket.watched = false;
                let _ = epoll::delete(&shared.epoll, &socket.fd);
            }
            Ok(Err(errno)) | Err(errno) => self.mux.handle_error(id, errno.raw_os_error(), shared.now()),
        }
    }

    fn end(&mut self, shared: &Shared, end: End, work: &mut Work) {
        let Some(socket) = self.sockets.remove(end.psock) else { return };
        if socket.watched {
            let _ = epoll::delete(&shared.epoll, &socket.fd);
        }
        self.listeners.resume(&shared.epoll);
        let socket = match end.hand_back {
            // A writer may still hold it for a moment: then it is another descriptor of the same socket.
            true => Arc::try_unwrap(socket.fd).or_else(|fd| fd.try_clone()).ok(),
            false => {
                work.closes.push(socket.fd);
                None
            }
        };
        if self.ended.len() == ENDED {
            self.ended.pop_front();
        }
        let End { psock, cause, rest, unsent, .. } = end;
        log::debug!("{psock:?} ended: {cause}");
        self.ended.push_back(Ended { psock, cause, socket, rest, unsent });
    }
}

/// Writes as much as the socket takes.
pub(super) fn write((mut transmit, fd): (Transmit, Arc<OwnedFd>)) -> (Transmit, Outcome) {
    let mut slices = Vec::new();
    while !transmit.is_empty() {
        slices.clear();
        slices.extend(transmit.slices().take(IOV).map(IoSlice::new));
        let wrote = rustix::io::writev(&fd, &slices);
        // The slices borrow what they are of.
        slices = Vec::new();
        match wrote {
            Ok(bytes) => transmit.advance(bytes),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return (transmit, Outcome::Blocked),
            Err(errno) => return (transmit, Outcome::Failed(errno.raw_os_error())),
        }
    }
    (transmit, Outcome::Taken)
}

fn data(id: psock::Id) -> EventData {
    EventData::new_u64(id.data().as_ffi())
}

/// The connection of an event, whose generation is never 0.
pub(super) fn psock_of(data: u64) -> Option<psock::Id> {
    (data >> 32 != 0).then(|| KeyData::from_ffi(data).into())
}

fn flags(interest: Interest) -> EventFlags {
    let mut flags = EventFlags::empty();
    flags.set(EventFlags::IN, interest.read);
    flags.set(EventFlags::OUT, interest.write);
    flags
}
