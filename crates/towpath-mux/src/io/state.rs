//! The state behind the mutex: the core, its sockets, and the threads that wait.

mod connections;
mod mode;
mod notices;
mod pollers;
mod ready;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::Thread;

use bytes::Bytes;
use rustix::event::epoll::{EventData, EventFlags};
use slotmap::{Key, KeyData, SecondaryMap};

use super::Shared;
use super::connection_info::Lifecycle;
use super::connector::ConnectionEvent;
use super::hand_over::Resume;
use super::handshake::Handshakes;
use super::linger::Lingers;
use super::link::Link;
use super::listener::{AcceptStats, Listeners};
use super::local_queue::LocalQueue;
use super::sys::set_rcvlowat;
use crate::Time;
use crate::mux::psock::Interest;
use crate::mux::{self, Cause, Message, Mux, SendError, Transmit, Undelivered, psock, worker};

pub(super) use mode::Mode;
pub(super) use notices::Notices;
pub(super) use pollers::Pollers;
pub(super) use ready::{Reading, ReadySockets};

/// Event data of the eventfd.
pub(super) const EVENTFD: EventData = EventData::new_u64(0);
/// Turns full of short messages whose replies are sent together.
const GATHERED: u32 = 8;
/// Turns of a driver after which held-back data is sent. One turn of messages takes one to four.
pub(super) const COALESCED_MAX: u32 = 32;
/// Bounds of SO_RCVLOWAT: shorter rests of a message are read in parts, longer ones in steps of the maximum.
const LOWAT_MIN: usize = 64 << 10;
const LOWAT_MAX: usize = 256 << 10;
/// Later than every deadline.
pub(super) const FOREVER: Time = Time::from_nanos(u64::MAX);

/// A connection that ended.
#[derive(Debug)]
pub struct Ended {
    /// The connection.
    pub psock: psock::Id,
    /// Address of the peer, over IP.
    pub peer: Option<SocketAddr>,
    /// Cause of the end.
    pub cause: Cause,
    /// The descriptor, non-blocking, if the connection was given back. `None` under TLS, and if the
    /// connection had a [`super::ZerocopySender`].
    pub socket: Option<OwnedFd>,
    /// Bytes that were read and belong to no delivered message.
    pub rest: Bytes,
    /// Where the connection stands, if it was given back, for [`super::Server::attach_moved`].
    pub resume: Option<Box<Resume>>,
    /// Number of replies that were not sent completely.
    pub unsent: usize,
}

/// An event of a server for the application.
#[derive(Debug)]
pub enum Event {
    /// For a [`super::Driver`]: this worker leaves and holds no messages any more.
    Left(worker::Id),
    /// A message was abandoned because too many workers died with it.
    Undone(Message),
    /// Connected mode: a message was not sent completely.
    Undelivered(Undelivered),
    /// [`super::Server::send`] has space again after it returned [`SendError::Full`].
    WriteSpace,
    /// A connection was not attached because its handshake failed or took too long.
    NotAttached {
        /// Address of the peer, over TCP.
        peer: Option<SocketAddr>,
        /// Reason.
        why: String,
    },
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) mux: Mux,
    pub(super) sockets: SecondaryMap<psock::Id, Socket>,
    pub(super) workers: SecondaryMap<worker::Id, WorkerSlot>,
    pub(super) listeners: Listeners,
    pub(super) accept_stats: AcceptStats,
    pub(super) handshakes: Handshakes,
    pub(super) lingers: Lingers,
    pub(super) pollers: Pollers,
    pub(super) ready: ReadySockets,
    pub(super) tx: TxSchedule,
    /// Number of turns that workers began.
    pub(super) turns: u64,
    pub(super) notices: Notices,
    /// [`Mode::Driver`]: the life of connections, oldest first, if the driver asked for it. The driver empties it in each turn.
    pub(super) lifecycle: Option<VecDeque<Lifecycle>>,
    pub(super) mode: Mode,
    /// Threads to wake when anything changes.
    pub(super) waiters: Vec<Thread>,
    /// Armed [`super::Socket`]s to wake when there is write space on the connection, or on any.
    pub(super) write_space_waiters: Vec<(worker::Id, Option<psock::Id>)>,
    /// [`Mode::Driver`]: an idle worker is to be given messages.
    pub(super) worker_wanted: bool,
    /// [`Mode::Driver`]: a connection has ended since the last turn.
    pub(super) connection_ended: bool,
    /// The core has drained. The server has drained when no connection lingers either.
    drained: bool,
    pub(super) closed: bool,
}

/// Connections with data to send, and whether to wait for more of it.
#[derive(Debug, Default)]
pub(super) struct TxSchedule {
    pub(super) psocks: Vec<psock::Id>,
    /// [`super::Driver::gather`]: while workers do short messages, the replies of a connection leave together when all of its messages are
    /// done, or after [`COALESCED_MAX`] turns.
    pub(super) coalesces: bool,
    /// Turns in a row that held data back.
    pub(super) coalesced: u32,
}

#[derive(Debug)]
pub(super) struct Socket {
    pub(super) link: Arc<Link>,
    /// Receives a notice when the connection has ended.
    owner: Option<Sender<ConnectionEvent>>,
    /// The socket is registered with epoll.
    watched: bool,
    /// In the ready queue, with these events.
    queued: bool,
    flags: EventFlags,
    /// A worker reads it; `again`: it has become ready meanwhile.
    reading: bool,
    again: bool,
    /// Current value of SO_RCVLOWAT.
    lowat: usize,
}

impl Socket {
    fn new(link: Arc<Link>, owner: Option<Sender<ConnectionEvent>>) -> Self {
        Self {
            link,
            owner,
            watched: true,
            queued: false,
            flags: EventFlags::empty(),
            reading: false,
            again: false,
            lowat: 1,
        }
    }

    /// Returns true if a connector keeps it.
    pub(super) const fn is_kept(&self) -> bool {
        self.owner.is_some()
    }

    /// Sets SO_RCVLOWAT so that no thread is woken before `need` bytes are there, if that is many (need_bytes
    /// of the kernel's strparser). The kernel grows the receive buffer up to twice as many bytes, which the
    /// mux does not count. Under memory pressure it reports fewer bytes.
    fn expect(&mut self, need: usize) {
        let lowat = if need < LOWAT_MIN { 1 } else { need.min(LOWAT_MAX) };
        if lowat != self.lowat && self.link.is_plain() {
            self.lowat = lowat;
            set_rcvlowat(self.link.as_fd(), lowat);
        }
    }
}

/// A worker's place in the server: how to wake it, and its local queue.
#[derive(Debug)]
pub(super) struct WorkerSlot {
    pub(super) thread: Option<Thread>,
    /// Wakes an armed [`super::Socket`], whose thread waits for other descriptors, too (eventfd(2)).
    pub(super) eventfd: Option<Arc<OwnedFd>>,
    pub(super) armed: bool,
    pub(super) local_queue: Arc<LocalQueue>,
}

impl WorkerSlot {
    pub(super) const fn new(local_queue: Arc<LocalQueue>) -> Self {
        Self { thread: None, eventfd: None, armed: false, local_queue }
    }

    fn wake(&self, work: &mut Work) {
        match &self.eventfd {
            Some(eventfd) if self.armed => work.eventfds.push(Arc::clone(eventfd)),
            _ => work.wakes.extend(self.thread.clone()),
        }
    }
}

/// Work to do without the mutex.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) writes: Vec<(Transmit, Arc<Link>)>,
    wakes: Vec<Thread>,
    eventfds: Vec<Arc<OwnedFd>>,
    notify: bool,
    /// Connections to shut down for writing.
    shuts: Vec<Arc<Link>>,
    /// Connections to close by dropping them.
    closes: Vec<Arc<Link>>,
}

impl Work {
    /// Returns true if a thread will be woken.
    pub(super) fn wakes(&self) -> bool {
        !self.wakes.is_empty()
    }

    pub(super) fn wake(&mut self, shared: &Shared) {
        for thread in self.wakes.drain(..) {
            thread.unpark();
        }
        for eventfd in self.eventfds.drain(..) {
            // Fails only if the counter is at its maximum; then the eventfd is readable.
            let _ = rustix::io::write(&*eventfd, &1u64.to_ne_bytes());
        }
        if std::mem::take(&mut self.notify) {
            shared.notify();
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
            accept_stats: AcceptStats::default(),
            handshakes: Handshakes::default(),
            lingers: Lingers::default(),
            pollers: Pollers::new(std::thread::available_parallelism().map_or(0, |count| count.get())),
            ready: ReadySockets::default(),
            tx: TxSchedule::default(),
            turns: 0,
            notices: Notices::default(),
            lifecycle: None,
            mode: Mode::default(),
            waiters: Vec::new(),
            write_space_waiters: Vec::new(),
            worker_wanted: false,
            connection_ended: false,
            drained: false,
            closed: false,
        }
    }

    /// Handles everything that is due.
    pub(super) fn handle_timeout(&mut self, shared: &Shared, now: Time, work: &mut Work) {
        self.mux.handle_timeout(now);
        if self.listeners.due().is_some_and(|due| due <= now) {
            self.listeners.resume(&shared.epoll);
        }
        while let Some(late) = self.handshakes.expired(now) {
            self.accept_stats.handshakes_late += 1;
            self.not_attached(shared, late, "its handshake took too long".to_owned(), work);
        }
        for (link, late) in self.lingers.expired(now) {
            self.accept_stats.cut_short += u64::from(late);
            self.close(shared, link, work);
        }
    }

    /// When to call [`State::handle_timeout`].
    pub(super) fn poll_timeout(&self) -> Option<Time> {
        let own = [self.mux.poll_timeout(), self.handshakes.due(), self.lingers.due(), self.listeners.due()];
        own.into_iter().flatten().min()
    }

    /// Handles the core's events. Changes epoll interest at once; adds the rest to `work`. Wakes threads that
    /// wait for a change.
    pub(super) fn pump(&mut self, shared: &Shared, work: &mut Work) {
        self.pump_quietly(shared, work);
        work.wakes.append(&mut self.waiters);
        self.notify_write_space(work);
    }

    /// The same for a waiting thread that has changed nothing. Waking other waiting threads here would make
    /// them wake each other forever.
    pub(super) fn pump_quietly(&mut self, shared: &Shared, work: &mut Work) {
        self.handle_events(shared, work);
        // An awake thread that holds back data comes again. It sends all before it sleeps.
        let coalesces =
            self.tx.coalesces && self.pollers.sleeps_until.is_none() && self.tx.coalesced < COALESCED_MAX;
        let coalesces = coalesces && self.mux.quick_batch().is_some();
        self.tx.coalesced = if coalesces { self.tx.coalesced + 1 } else { 0 };
        let Self { tx, mux, sockets, .. } = self;
        tx.psocks.retain(|&id| {
            if coalesces && mux.outstanding(id) > 0 {
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

    /// Wakes armed sockets for which there is write space, or for which there will never be.
    fn notify_write_space(&mut self, work: &mut Work) {
        let Self { write_space_waiters, mux, workers, .. } = self;
        write_space_waiters.retain(|&(id, to)| {
            let full = mux.check_write_space(to) == Err(SendError::Full);
            if !full && let Some(slot) = workers.get(id) {
                slot.wake(work);
            }
            full
        });
    }

    /// Marks a socket's thread as waiting by its eventfd, or not.
    pub(super) fn set_armed(&mut self, id: worker::Id, armed: bool) {
        self.write_space_waiters.retain(|(other, _)| *other != id);
        if let Some(slot) = self.workers.get_mut(id) {
            slot.armed = armed;
        }
    }

    /// This thread is not waiting any more. It may have returned without being woken.
    pub(super) fn remove_waiter(&mut self) {
        if !self.waiters.is_empty() {
            let me = std::thread::current().id();
            self.waiters.retain(|caller| caller.id() != me);
        }
    }

    /// As [`State::pump`], but holds back data to send: the worker has a turn full of short messages.
    pub(super) fn gather(&mut self, shared: &Shared, work: &mut Work) {
        if self.tx.coalesced >= GATHERED {
            return self.pump(shared, work);
        }
        self.tx.coalesced += 1;
        self.handle_events(shared, work);
    }

    fn handle_events(&mut self, shared: &Shared, work: &mut Work) {
        while let Some(event) = self.mux.poll_event() {
            match event {
                mux::Event::Interest(id) => self.watch(shared, id),
                mux::Event::Transmit(id) => self.tx.psocks.push(id),
                mux::Event::Wake(_) if self.mode.is_driver() => {
                    self.worker_wanted = true;
                    self.notify(work);
                }
                mux::Event::Wake(id) => self.wake(id, work),
                mux::Event::Recall(id) => self.recall(shared, id),
                mux::Event::Ended(end) => self.end(shared, end, work),
                mux::Event::Undone(message) => {
                    log::debug!("{:?} was given up: its workers died", message.ticket());
                    self.push_event(Event::Undone(message), work);
                }
                mux::Event::Unacked(id) => self.report_unacked(id, shared.now()),
                mux::Event::Undelivered(undelivered) => {
                    self.push_event(Event::Undelivered(undelivered), work)
                }
                mux::Event::Left(id) if self.mode.is_driver() => self.push_event(Event::Left(id), work),
                mux::Event::WriteSpace => self.push_event(Event::WriteSpace, work),
                mux::Event::Left(_) => {}
                mux::Event::Removed(id) => self.removed(id, work),
                mux::Event::Drained => self.drained = true,
            }
        }
        if self.drained && !self.closed && self.lingers.is_empty() {
            self.close_all(work);
        }
        self.reschedule(work);
    }

    /// The server has drained: wakes everything.
    pub(super) fn close_all(&mut self, work: &mut Work) {
        self.closed = true;
        work.notify = true;
        work.wakes.append(&mut self.waiters);
        self.workers.values().for_each(|slot| slot.wake(work));
    }

    /// Reports a message of a closed socket for which there was no write space.
    pub(super) fn undelivered(&mut self, bytes: Bytes, work: &mut Work) {
        self.push_event(Event::Undelivered(Undelivered { bytes, left: 0 }), work);
    }

    /// Wakes the poller if something is due earlier than it knows.
    pub(super) fn reschedule(&mut self, work: &mut Work) {
        if let Some(until) = self.pollers.sleeps_until
            && self.poll_timeout().is_some_and(|due| due < until)
        {
            self.notify(work);
        }
    }

    /// Wakes the sleeping poller. An awake poller looks anyway.
    fn notify(&mut self, work: &mut Work) {
        work.notify |= self.pollers.sleeps_until.take().is_some();
    }

    /// Adds an event and wakes a sleeping driver.
    fn push_event(&mut self, event: Event, work: &mut Work) {
        if self.mode.is_driver() {
            self.notify(work);
        }
        self.notices.push_event(event);
    }

    pub(super) fn wake(&mut self, id: worker::Id, work: &mut Work) {
        self.pollers.parked.retain(|&parked| parked != id);
        if self.pollers.leader == Some(id) {
            work.notify = true;
        } else if let Some(slot) = self.workers.get(id) {
            slot.wake(work);
        }
    }

    /// Wakes a parked worker, if there is one.
    pub(super) fn wake_any(&mut self, work: &mut Work) -> Option<worker::Id> {
        let id = self.pollers.pop_parked()?;
        self.wake(id, work);
        Some(id)
    }

    /// A worker begins `count` messages. Ensures that another one waits for sockets, if that pays.
    pub(super) fn ensure_leader(&mut self, count: usize, work: &mut Work) {
        if self.pollers.leader.is_some() {
            // The leader waits for an earlier deadline than before.
            let queued = self.mux.queued();
            let leader = self.pollers.leader.filter(|_| queued > 0 && self.mux.is_long(queued));
            leader.into_iter().for_each(|leader| self.wake(leader, work));
        } else if !work.wakes() {
            let takes = self.mux.slow_service_time() * count as u32;
            if takes >= self.mux.config().wake_cost {
                self.wake_any(work);
            } else if self.pollers.watchdog.is_none() {
                self.pollers.watchdog = self.wake_any(work);
            }
        }
    }

    /// Recalls the messages that a worker has not begun, and applies its completions.
    fn recall(&mut self, shared: &Shared, id: worker::Id) {
        let Some(slot) = self.workers.get(id) else { return };
        let local_queue = Arc::clone(&slot.local_queue);
        let mut local_queue = local_queue.lock();
        local_queue.settle(&mut self.mux, id, shared.now());
        let tickets = local_queue.give_back(&mut self.mux, id);
        self.mux.handle_hand_back(id, &tickets, shared.now());
    }

    /// Takes the messages of a connection that has ended from the workers that have not begun them. The core discards them.
    pub(super) fn discard(&mut self, shared: &Shared, psock: psock::Id) {
        let Self { workers, mux, .. } = self;
        for (id, slot) in workers {
            let mut local_queue = slot.local_queue.lock();
            local_queue.settle(mux, id, shared.now());
            let tickets = local_queue.take_of(psock, mux, id);
            if !tickets.is_empty() {
                mux.handle_hand_back(id, &tickets, shared.now());
            }
        }
    }
}

fn data(id: psock::Id) -> EventData {
    EventData::new_u64(id.data().as_ffi())
}

/// The connection of an event. Generations are never 0, other event data is below 2^32.
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
