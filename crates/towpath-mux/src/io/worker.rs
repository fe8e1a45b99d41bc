//! A worker's thread: what it does between two messages.

use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use rustix::event::epoll;
use rustix::io::Errno;

use super::reader::{READS, read};
use super::state::{Seat, State, Work};
use super::{Server, Shared, timespec};
use crate::Time;
use crate::mux::{Message, Mux, Said, SendError, Ticket, psock, worker};

/// Messages in a turn from which on it is full of short ones.
const FULL: usize = 8;

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
    said: Vec<Said>,
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
    said: Vec<Said>,
}

impl Tray {
    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Tells the core what has been answered and done.
    pub(super) fn settle(&mut self, mux: &mut Mux, id: worker::Id, now: Time) {
        mux.handle_said(id, self.said.drain(..), now);
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
        if state.driven {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the server has a driver"));
        }
        let credit = state.mux.config().batch;
        let id = state.mux.clone_worker(credit, now);
        state.workers.insert(id, Seat { thread: None, tray: Arc::clone(&tray) });
        drop(state);
        Ok(Self { shared, id, tray, current: None, said: Vec::new(), batch: Vec::new() })
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
        self.said.extend(self.current.take().map(Said::Done));
        let next = {
            let mut tray = self.tray.lock();
            tray.said.append(&mut self.said);
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
        self.said.push(Said::Reply(message.ticket(), bytes.into()));
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
        match count {
            FULL.. => state.gather(shared, work),
            _ => state.pump(shared, work),
        }
        if state.leader.is_some() {
            // It waits for as long as it knew of; more waits now.
            let queued = state.mux.queued();
            let leader = state.leader.filter(|_| queued > 0 && state.mux.is_long(queued));
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
                state.handle_timeout(now, &mut work);
                if state.deputy == Some(self.id) {
                    state.deputy = None;
                }
                state.pump(shared, &mut work);
                drop(state);
                return shared.perform(work);
            }
            if state.mux.queued() > 0 && state.deputy == Some(self.id) {
                state.handle_timeout(now, &mut work);
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
        let mut room = [MaybeUninit::<epoll::Event>::uninit(); READS];
        loop {
            let mut work = Work::default();
            let (timeout, most) = {
                let mut state = shared.lock();
                let now = shared.now();
                if let Some(seat) = state.workers.get_mut(self.id)
                    && seat.thread.is_none()
                {
                    seat.thread = Some(std::thread::current());
                }
                state.handle_timeout(now, &mut work);
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
                let timeout = match work.writes.is_empty() {
                    true => state.poll_timeout().map(|time| time.since(now)),
                    false => Some(Duration::ZERO),
                };
                (timeout, state.reads)
            };
            shared.perform(work);
            let events = match epoll::wait(&shared.epoll, &mut room[..most], timeout.map(timespec).as_ref()) {
                Ok((events, _)) => events,
                Err(Errno::INTR) => continue,
                Err(errno) => {
                    shared.lock().leader = None;
                    return Err(errno.into());
                }
            };
            let mut work = Work::default();
            read(&shared, events, &mut work);
            // What came is for this thread first; who waits is woken for the rest when it has begun.
            shared.perform(work);
        }
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
            tray.said.append(&mut self.said);
            tray.said.extend(self.current.take().map(Said::Done));
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
