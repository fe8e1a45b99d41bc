//! A worker's thread: what it does between two messages.

use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;

use super::listener::accept;
use super::state::{Seat, State, Work, psock_of};
use super::{Server, Shared};
use crate::Time;
use crate::mux::{Message, Mux, SendError, Ticket, psock, worker};

/// Events that the leader takes at once, and sockets that it reads before it tells what came.
const EVENTS: usize = 32;
const READS: usize = 8;

/// One worker of a [`Server`], for one thread.
///
/// A message is done when the next one is asked for, or when the worker is dropped. If its thread panics, the message goes
/// to another worker ([`crate::mux::Config::redeliver`]).
#[derive(Debug)]
pub struct Worker {
    shared: Arc<Shared>,
    id: worker::Id,
    tray: Arc<Tray>,
    current: Option<Ticket>,
    answers: Vec<(Ticket, Bytes)>,
    batch: Vec<Message>,
}

/// What a worker has not begun, and has done and not told. Others may take both when it gets stuck.
#[derive(Debug, Default)]
pub(super) struct Tray {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
pub(super) struct Inner {
    pub(super) batch: VecDeque<Message>,
    answers: Vec<(Ticket, Bytes)>,
    done: Vec<Ticket>,
}

impl Tray {
    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Tells the core what has been answered and done.
    pub(super) fn settle(&mut self, mux: &mut Mux, id: worker::Id, now: Time) {
        for (ticket, bytes) in self.answers.drain(..) {
            // Nobody is there to be answered any more: the core has counted that.
            let _: Result<(), SendError> = mux.reply(id, ticket, bytes, now);
        }
        for ticket in self.done.drain(..) {
            mux.done(id, ticket, now);
        }
    }
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>) -> io::Result<Self> {
        let tray = Arc::new(Tray::default());
        let now = shared.now();
        let mut state = shared.lock();
        if state.closed {
            return Err(io::Error::new(io::ErrorKind::NotConnected, "the mux has drained"));
        }
        let credit = state.mux.config().batch;
        let id = state.mux.clone_worker(credit, now);
        state.workers.insert(id, Seat { thread: None, tray: Arc::clone(&tray) });
        drop(state);
        Ok(Self { shared, id, tray, current: None, answers: Vec::new(), batch: Vec::new() })
    }

    /// Its name in the core.
    pub const fn id(&self) -> worker::Id {
        self.id
    }

    /// The multiplexor that it works for.
    pub fn server(&self) -> Server {
        Server { shared: Arc::clone(&self.shared) }
    }

    /// The next message; waits for it. The one before is done. `None` when the mux has drained.
    ///
    /// # Errors
    ///
    /// When epoll fails.
    pub fn recv(&mut self) -> io::Result<Option<Message>> {
        let next = {
            let mut tray = self.tray.lock();
            tray.answers.append(&mut self.answers);
            tray.done.extend(self.current.take());
            tray.batch.pop_front()
        };
        if let Some(message) = next {
            self.current = Some(message.ticket());
            return Ok(Some(message));
        }
        self.next_turn()
    }

    /// Answers a message on the connection that it came from. It leaves when the worker asks for its next message, or
    /// after a few.
    pub fn reply(&mut self, message: &Message, bytes: impl Into<Bytes>) {
        self.answers.push((message.ticket(), bytes.into()));
    }

    /// Sends a message to any connection, now. A received message's bytes are not copied.
    ///
    /// # Errors
    ///
    /// [`SendError::Gone`] when the connection has ended.
    pub fn forward(&self, psock: psock::Id, bytes: impl Into<Bytes>) -> Result<(), SendError> {
        let now = self.shared.now();
        self.shared.change(|mux| mux.forward(psock, bytes, now))
    }

    /// Connected mode: sends a message on the connection that has the least to send, now.
    ///
    /// # Errors
    ///
    /// [`SendError::NotConnected`] when none is open, [`SendError::Full`] when all have as much to send as may wait.
    ///
    /// # Panics
    ///
    /// When the mux is not in connected mode.
    pub fn send(&self, bytes: impl Into<Bytes>) -> Result<psock::Id, SendError> {
        let now = self.shared.now();
        self.shared.change(|mux| mux.send(bytes, now))
    }

    /// Nothing is left of the batch: tells what was done, and gets more, leads, or sleeps.
    fn next_turn(&mut self) -> io::Result<Option<Message>> {
        let shared = Arc::clone(&self.shared);
        loop {
            let mut work = Work::default();
            let mut state = shared.lock();
            let now = shared.now();
            self.tray.lock().settle(&mut state.mux, self.id, now);
            if let Some(message) = self.begin(&mut state, now, &mut work) {
                drop(state);
                shared.perform(work);
                return Ok(Some(message));
            }
            state.pump(&shared, &mut work);
            if state.closed {
                drop(state);
                shared.perform(work);
                return Ok(None);
            }
            let lead = state.leader.is_none();
            if lead {
                state.leader = Some(self.id);
            }
            drop(state);
            let wrote = !work.writes.is_empty();
            shared.perform(work);
            if lead {
                if let Some(message) = self.lead()? {
                    return Ok(Some(message));
                }
            } else if !wrote {
                self.park();
            }
        }
    }

    /// Takes what is ready, and sees to who leads meanwhile.
    fn begin(&mut self, state: &mut State, now: Time, work: &mut Work) -> Option<Message> {
        let shared = &self.shared;
        state.mux.poll_batch(self.id, now, &mut self.batch);
        let first = self.batch.first()?;
        self.current = Some(first.ticket());
        let count = self.batch.len();
        let mut messages = self.batch.drain(..);
        let first = messages.next();
        self.tray.lock().batch.extend(messages);
        state.turns += 1;
        if state.leader == Some(self.id) {
            state.leader = None;
        }
        state.pump(shared, work);
        if state.leader.is_some() {
            // It waits for as long as it knew of; more waits now.
            let leader = state.leader.filter(|_| state.mux.queued() > 0);
            leader.into_iter().for_each(|leader| state.wake(leader, work));
        } else if !work.wakes() {
            let takes = state.mux.mean_service_time() * count as u32;
            if takes >= state.mux.config().wake_cost {
                state.wake_any(work);
            } else if state.deputy.is_none() {
                state.deputy = state.wake_any(work);
            }
        }
        first
    }

    /// Sleeps until somebody wakes it. The deputy looks around now and then.
    fn park(&self) {
        let shared = &*self.shared;
        let (mut turns, mut quiet) = (u64::MAX, 0);
        loop {
            let mut work = Work::default();
            let mut state = shared.lock();
            let now = shared.now();
            if state.closed || state.leader.is_none() && state.turns == turns {
                // Nothing began since the last look, and nobody waits for sockets: the one who works got stuck.
                state.mux.handle_timeout(now);
                if state.deputy == Some(self.id) {
                    state.deputy = None;
                }
                state.pump(shared, &mut work);
                drop(state);
                return shared.perform(work);
            }
            if state.mux.queued() > 0 && state.deputy == Some(self.id) {
                state.mux.handle_timeout(now);
            }
            let deputy = state.deputy == Some(self.id);
            quiet = if deputy && state.turns == turns { quiet + 1 } else { 0 };
            if deputy && quiet > 1 {
                state.deputy = None;
            }
            turns = state.turns;
            let timed = state.deputy == Some(self.id) || state.leader.is_none();
            let patience = state.mux.config().patience;
            state.pump(shared, &mut work);
            let woken = !state.mux.is_idle(self.id);
            if let Some(seat) = state.workers.get_mut(self.id)
                && seat.thread.is_none()
            {
                seat.thread = Some(std::thread::current());
            }
            if !woken && !state.parked.contains(&self.id) {
                let id = self.id;
                state.parked.push(id);
            }
            drop(state);
            shared.perform(work);
            if woken {
                return;
            }
            if timed {
                std::thread::park_timeout(patience);
            } else {
                std::thread::park();
            }
            let state = shared.lock();
            if !state.parked.contains(&self.id) && state.deputy != Some(self.id) {
                return;
            }
        }
    }

    /// Waits for sockets and reads them until there is a message for this worker.
    fn lead(&mut self) -> io::Result<Option<Message>> {
        let shared = Arc::clone(&self.shared);
        let mut room = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
        loop {
            let mut work = Work::default();
            let timeout = {
                let mut state = shared.lock();
                let now = shared.now();
                if let Some(seat) = state.workers.get_mut(self.id)
                    && seat.thread.is_none()
                {
                    seat.thread = Some(std::thread::current());
                }
                state.mux.handle_timeout(now);
                if let Some(message) = self.begin(&mut state, now, &mut work) {
                    drop(state);
                    shared.perform(work);
                    return Ok(Some(message));
                }
                state.pump(&shared, &mut work);
                if state.closed {
                    state.leader = None;
                    drop(state);
                    shared.perform(work);
                    return Ok(None);
                }
                if work.writes.is_empty() {
                    state.mux.poll_timeout().map(|time| time.since(now))
                } else {
                    Some(Duration::ZERO)
                }
            };
            shared.perform(work);
            let timeout = timeout.map(|time| rustix::event::Timespec {
                tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
                tv_nsec: time.subsec_nanos().into(),
            });
            let events = match epoll::wait(&shared.epoll, &mut room, timeout.as_ref()) {
                Ok((events, _)) => events,
                Err(Errno::INTR) => continue,
                Err(errno) => {
                    shared.lock().leader = None;
                    return Err(errno.into());
                }
            };
            for events in events.chunks(READS) {
                self.read(&shared, events);
            }
        }
    }

    /// Sees to some sockets: reads without the mutex, then tells what came.
    fn read(&self, shared: &Shared, events: &[epoll::Event]) {
        let mut work = Work::default();
        let mut reads: Vec<(psock::Id, Arc<OwnedFd>, Vec<u8>)> = Vec::with_capacity(READS);
        let mut listeners = Vec::new();
        {
            let mut state = shared.lock();
            for event in events {
                let (data, flags) = (event.data.u64(), event.flags);
                let Some(id) = psock_of(data) else {
                    if data == 0 {
                        let _ = rustix::io::read(&shared.bell, &mut [0; 8]);
                    }
                    listeners.extend(state.listeners.get(data));
                    continue;
                };
                if flags.contains(EventFlags::OUT) {
                    state.mux.handle_writable(id, shared.now());
                }
                let over = flags.intersects(EventFlags::HUP | EventFlags::ERR);
                if !over && !flags.contains(EventFlags::IN) {
                    continue;
                }
                match (state.mux.reserve(id), state.sockets.get(id)) {
                    (Some(buffer), Some(socket)) => reads.push((id, Arc::clone(&socket.fd), buffer)),
                    _ if over => state.hung_up(shared, id),
                    _ => {}
                }
            }
            state.pump(shared, &mut work);
        }
        shared.perform(std::mem::take(&mut work));
        let outcomes: Vec<_> = reads.into_iter().map(read_one).collect();
        let accepted: Vec<_> = listeners.iter().map(|(fd, tcp)| accept(fd, *tcp)).collect();
        let now = shared.now();
        let mut state = shared.lock();
        for (id, buffer, outcome) in outcomes {
            state.mux.handle_read(id, buffer, now);
            match outcome {
                Ok(0) => state.mux.handle_eof(id, now),
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(errno) => state.mux.handle_error(id, errno.raw_os_error(), now),
            }
        }
        for (sockets, failed) in accepted {
            for socket in sockets {
                if state.attach(shared, socket).is_err() {
                    state.listeners.refused += 1;
                }
            }
            if let Some(errno) = failed {
                state.listeners.refused += 1;
                state.listeners.pause(&shared.epoll);
                log::warn!("cannot accept until a connection ends: {errno}");
            }
        }
        // What came is for this thread first; who waits is woken for the rest when it has begun.
        if events.len() == READS {
            state.pump(shared, &mut work);
        }
        drop(state);
        shared.perform(work);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let shared = Arc::clone(&self.shared);
        let now = shared.now();
        let mut work = Work::default();
        let mut state = shared.lock();
        let mut tray = self.tray.lock();
        if !std::thread::panicking() {
            tray.answers.append(&mut self.answers);
            tray.done.extend(self.current.take());
        }
        tray.settle(&mut state.mux, self.id, now);
        let tickets: Vec<_> = tray.batch.drain(..).map(|message| message.ticket()).collect();
        drop(tray);
        state.mux.handle_hand_back(self.id, &tickets, now);
        if std::thread::panicking() {
            state.mux.handle_worker_died(self.id, now);
        } else {
            state.mux.leave(self.id, None, now);
        }
        state.workers.remove(self.id);
        state.parked.retain(|&parked| parked != self.id);
        if state.deputy == Some(self.id) {
            state.deputy = None;
        }
        if state.leader == Some(self.id) {
            state.leader = None;
        }
        state.pump(&shared, &mut work);
        if state.leader.is_none() && !work.wakes() {
            state.wake_any(&mut work);
        }
        drop(state);
        shared.perform(work);
    }
}

fn read_one(
    (id, fd, mut buffer): (psock::Id, Arc<OwnedFd>, Vec<u8>),
) -> (psock::Id, Vec<u8>, Result<usize, Errno>) {
    let outcome = rustix::io::read(&fd, rustix::buffer::spare_capacity(&mut buffer));
    (id, buffer, outcome)
}
