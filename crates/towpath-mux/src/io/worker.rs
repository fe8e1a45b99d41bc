//! A worker's thread: what it does between two messages.

use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use rustix::event::epoll;
use rustix::io::Errno;

use super::reader::{READS, read};
use super::state::{Seat, State, Work};
use super::{Server, Shared, timespec};
use crate::Time;
use crate::mux::{Message, Mux, Run, Said, SendError, Ticket, psock, worker};

/// Messages in a turn from which on it is full of short ones.
const FULL: usize = 8;
/// From so often on a leader waits awake for sockets before it sleeps, and as often as is remembered.
const EAGER: u8 = 4;
const EAGER_MOST: u8 = 16;
/// Answers in bytes up to which those of a run are copied together, so that one write has them all.
const SMALL: usize = 4096;
/// What they are copied into, at least.
const BLOCK: usize = 64 << 10;

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
    /// It is one of a run, and was answered so, so many times, in `answer`; or else in `said`.
    running: bool,
    answer: Vec<u8>,
    answers: u32,
    said: Vec<Said>,
    batch: Vec<Message>,
    wake_cost: Duration,
    /// How often lately, about, sockets were ready sooner than sleeping is worth.
    eager: u8,
}

/// What a worker has not begun, and has done and not told. Others may take both when it gets stuck.
#[derive(Debug, Default)]
pub(super) struct Tray {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
pub(super) struct Inner {
    batch: VecDeque<Message>,
    said: Vec<Said>,
    /// Messages that the worker read itself: one of them is being worked on, or none; so many are done and not told.
    run: Option<Run>,
    working: bool,
    done: usize,
    /// Answers to those, in pieces of so many; the last piece is growing.
    replies: Vec<(Bytes, u32)>,
    block: BytesMut,
    answers: u32,
}

impl Tray {
    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Tells the core what has been answered and done.
    pub(super) fn settle(&mut self, mux: &mut Mux, id: worker::Id, now: Time) {
        if let Some(run) = &self.run {
            let over = run.is_empty() && !self.working;
            self.cut();
            mux.handle_run(id, std::mem::take(&mut self.done), self.replies.drain(..), now);
            if over {
                self.run = None;
            }
        }
        if !self.said.is_empty() {
            mux.handle_said(id, self.said.drain(..), now);
        }
    }

    /// The worker reads a run. Under the server's lock, so that the core and the tray agree on it.
    pub(super) fn put(&mut self, run: Run) {
        (self.run, self.working, self.done) = (Some(run), false, 0);
    }

    /// Gives up what is not begun. Of a run, the rest becomes messages like others.
    pub(super) fn give_back(&mut self, mux: &mut Mux, id: worker::Id) -> Vec<Ticket> {
        let mut back: Vec<_> = self.batch.drain(..).map(|message| message.ticket()).collect();
        if let Some(run) = self.run.take() {
            mux.unroll(id);
            back.extend(run.rest());
        }
        back
    }

    /// The next message, and whether it is one of a run.
    fn next(&mut self) -> Option<(Message, bool)> {
        if let Some(message) = self.run.as_mut().and_then(Run::begin) {
            self.working = true;
            return Some((message, true));
        }
        Some((self.batch.pop_front()?, false))
    }

    /// The growing piece is whole.
    fn cut(&mut self) {
        if self.answers > 0 {
            self.replies.push((self.block.split().freeze(), std::mem::take(&mut self.answers)));
        }
    }

    /// The run's message that is worked on is done, and this answers it.
    fn done(&mut self, answer: &[u8], answers: u32, said: &mut Vec<Said>) {
        self.working = false;
        self.done += 1;
        if answers > 0 {
            if self.block.capacity() - self.block.len() < answer.len() {
                self.cut();
                self.block.reserve(answer.len().max(BLOCK));
            }
            self.block.extend_from_slice(answer);
            self.answers += answers;
        }
        for said in said.drain(..) {
            if let Said::Reply(_, bytes) = said {
                self.cut();
                self.replies.push((bytes, 1));
            }
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
        if state.driven {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the server has a driver"));
        }
        let (credit, wake_cost) = (state.mux.config().batch, state.mux.config().wake_cost);
        let id = state.mux.clone_worker(credit, now);
        state.workers.insert(id, Seat { thread: None, tray: Arc::clone(&tray) });
        drop(state);
        Ok(Self {
            shared,
            id,
            tray,
            current: None,
            running: false,
            answer: Vec::new(),
            answers: 0,
            said: Vec::new(),
            batch: Vec::new(),
            wake_cost,
            eager: 0,
        })
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
        match self.tell_and_take() {
            Some(message) => Ok(Some(message)),
            None => self.next_turn(),
        }
    }

    /// Tells the tray what became of the current message, and takes the next one from there.
    fn tell_and_take(&mut self) -> Option<Message> {
        let tray = Arc::clone(&self.tray);
        let mut tray = tray.lock();
        self.tell(&mut tray);
        let (message, running) = tray.next()?;
        (self.current, self.running) = (Some(message.ticket()), running);
        Some(message)
    }

    /// Tells the tray what became of the current message.
    fn tell(&mut self, tray: &mut Inner) {
        let Some(ticket) = self.current.take() else { return };
        if self.running && tray.run.is_some() {
            tray.done(&self.answer, self.answers, &mut self.said);
        } else {
            // Its run was taken apart meanwhile.
            self.say_answer(ticket);
            tray.said.append(&mut self.said);
            tray.said.push(Said::Done(ticket));
        }
        self.answer.clear();
        self.answers = 0;
    }

    /// What was answered so far is said by itself.
    fn say_answer(&mut self, ticket: Ticket) {
        if self.answers > 0 {
            self.said.push(Said::Reply(ticket, Bytes::copy_from_slice(&self.answer)));
            self.answer.clear();
            self.answers = 0;
        }
    }

    /// Answers a message on the connection that it came from. It leaves when the worker asks for its next message, or
    /// after a few.
    pub fn reply(&mut self, message: &Message, bytes: impl Into<Bytes>) {
        let bytes = bytes.into();
        if self.runs(message.ticket(), bytes.len()) {
            self.answer.extend_from_slice(&bytes);
            self.answers += 1;
            return;
        }
        self.say_answer(message.ticket());
        self.said.push(Said::Reply(message.ticket(), bytes));
    }

    /// The same with a copy of these bytes, which saves an allocation where an answer is made in a buffer that is used again.
    pub fn reply_slice(&mut self, message: &Message, bytes: &[u8]) {
        if !self.runs(message.ticket(), bytes.len()) {
            return self.reply(message, Bytes::copy_from_slice(bytes));
        }
        self.answer.extend_from_slice(bytes);
        self.answers += 1;
    }

    /// Whether an answer of that length leaves together with others of the run.
    fn runs(&self, ticket: Ticket, length: usize) -> bool {
        let fits = self.answer.len() + length <= SMALL && self.said.is_empty();
        self.running && self.current == Some(ticket) && fits
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
        (self.current, self.running) = (Some(first.ticket()), false);
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
        state.see_to_leader(count, work);
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
                state.handle_timeout(shared, now, &mut work);
                if state.deputy == Some(self.id) {
                    state.deputy = None;
                }
                state.pump(shared, &mut work);
                drop(state);
                return shared.perform(work);
            }
            if state.mux.queued() > 0 && state.deputy == Some(self.id) {
                state.handle_timeout(shared, now, &mut work);
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

    /// How long sockets are waited for awake: going to sleep and being woken takes about as long.
    fn patience(&self) -> Duration {
        2 * self.wake_cost
    }

    /// Waits awake for a moment, when that was worth it lately: whether a socket is ready.
    fn spin(&mut self, timeout: Option<Duration>) -> bool {
        let patience = self.patience();
        if self.eager < EAGER || timeout.is_some_and(|timeout| timeout < patience) {
            return false;
        }
        let begin = Instant::now();
        while begin.elapsed() < patience {
            let mut room = [MaybeUninit::<epoll::Event>::uninit(); 1];
            let now = timespec(Duration::ZERO);
            if epoll::wait(&self.shared.epoll, &mut room, Some(&now))
                .is_ok_and(|(events, _)| !events.is_empty())
            {
                self.eager = EAGER_MOST.min(self.eager + 1);
                return true;
            }
        }
        self.eager -= EAGER / 2;
        false
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
                state.handle_timeout(&shared, now, &mut work);
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
            let timeout = if self.spin(timeout) { Some(Duration::ZERO) } else { timeout };
            let slept = (timeout != Some(Duration::ZERO)).then(Instant::now);
            let events = epoll::wait(&shared.epoll, &mut room[..most], timeout.map(timespec).as_ref());
            if let Some(slept) = slept {
                let soon = slept.elapsed() < self.patience();
                self.eager = if soon { EAGER_MOST.min(self.eager + 1) } else { self.eager / 2 };
            }
            let events = match events {
                Ok((events, _)) => events,
                Err(Errno::INTR) => continue,
                Err(errno) => {
                    shared.lock().leader = None;
                    return Err(errno.into());
                }
            };
            let mut work = Work::default();
            let runs = read(&shared, events, &mut work, Some(self.id));
            // What came is for this thread first; who waits is woken for the rest when it has begun.
            shared.perform(work);
            if runs && let Some(message) = self.tell_and_take() {
                return Ok(Some(message));
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let shared = Arc::clone(&self.shared);
        let now = shared.now();
        let mut work = Work::default();
        let mut state = shared.lock();
        let tray = Arc::clone(&self.tray);
        let mut tray = tray.lock();
        if !std::thread::panicking() {
            self.tell(&mut tray);
        }
        tray.settle(&mut state.mux, self.id, now);
        let tickets = tray.give_back(&mut state.mux, self.id);
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
