//! A worker's thread: what it does between two messages.

use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use rustix::event::epoll;

use super::local_queue::{Inner, LocalQueue};
use super::reader::{READS, read};
use super::state::{EVENTFD, FOREVER, Mode, State, Work, WorkerSlot};
use super::turn::epoll_wait;
use super::{Server, Shared};
use crate::Time;
use crate::mux::{Batch, Completion, Message, SendError, Ticket, View, psock, worker};

/// Messages in a turn from which on it is full of short ones.
const FULL: usize = 8;
/// From so often on a leader waits awake for sockets before it sleeps, and as often as is remembered.
const SPIN_MIN: u8 = 4;
const SPIN_MAX: u8 = 16;
/// Sockets were ready at once when waiting for them took no longer than this; so often in a row, and another is to help.
const IMMEDIATE: Duration = Duration::from_micros(3);
const SATURATED: u8 = 8;
/// Answers in bytes up to which those of a run are copied together, so that one write has them all.
const SMALL: usize = 4096;

/// One worker of a [`Server`], for one thread.
///
/// A message is done when the next one is asked for, or when the worker is dropped. If its thread panics, the message goes
/// to another worker ([`crate::mux::Config::redeliver`]).
#[derive(Debug)]
pub struct Worker {
    shared: Arc<Shared>,
    id: worker::Id,
    local_queue: Arc<LocalQueue>,
    current: Option<Ticket>,
    /// The run that it is one of, if it is. It was answered so, so many times, in `answer`; or else in `completions`.
    batch: Option<Batch>,
    answer: Answer,
    answers: u32,
    completions: Vec<Completion>,
    /// [`Worker::serve`]: the messages of the run that it has taken, and where the answers end to those that it has done.
    group: Range<usize>,
    ends: Vec<usize>,
    /// How many it takes at most.
    at_once: usize,
    scratch: Vec<Message>,
    wake_cost: Duration,
    /// What epoll completions last.
    events: Vec<(u64, epoll::EventFlags)>,
    /// How often in a row sockets were ready at once.
    ready_streak: u8,
    /// How often lately, about, sockets were ready sooner than sleeping is worth.
    spin_score: u8,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>) -> io::Result<Self> {
        let local_queue = Arc::new(LocalQueue::default());
        let now = shared.now();
        let mut state = shared.lock();
        if state.closed {
            return Err(io::Error::new(io::ErrorKind::NotConnected, "the mux has drained"));
        }
        if state.mode != Mode::Workers {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "the server has a driver or sockets; workers need a server without them",
            ));
        }
        let (credit, wake_cost) = (state.mux.config().batch, state.mux.config().wake_cost);
        let id = state.mux.clone_worker(credit, now);
        state.workers.insert(id, WorkerSlot::new(Arc::clone(&local_queue)));
        drop(state);
        Ok(Self {
            shared,
            id,
            local_queue,
            current: None,
            batch: None,
            answer: Answer::default(),
            answers: 0,
            completions: Vec::new(),
            group: 0..0,
            ends: Vec::new(),
            at_once: 1,
            scratch: Vec::new(),
            wake_cost,
            events: Vec::with_capacity(READS),
            ready_streak: 0,
            spin_score: 0,
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
        match self.complete_and_take() {
            Some(message) => Ok(Some(message)),
            None => self.next_turn(),
        }
    }

    /// Does messages until the mux has drained: `work` gets each where it lies, and appends its answer; without one there is none. As [`Worker::recv`] and [`Worker::reply_slice`], with less to do for each message.
    ///
    /// # Errors
    ///
    /// When epoll fails.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::io::{Read, Write};
    /// use towpath_mux::io::Server;
    /// use towpath_mux::mux::Config;
    ///
    /// let server = Server::new("line".parse()?, Config::default())?;
    /// let address = server.listen("127.0.0.1:0")?;
    /// let mut worker = server.worker()?;
    /// let capitals = std::thread::spawn(move || {
    ///     worker.serve(|message, answer| answer.extend(message.bytes().to_ascii_uppercase()))
    /// });
    ///
    /// let mut client = std::net::TcpStream::connect(address)?;
    /// client.write_all(b"hello\n")?;
    /// let mut answer = [0; 6];
    /// client.read_exact(&mut answer)?;
    /// assert_eq!(&answer, b"HELLO\n");
    ///
    /// server.drain(None);
    /// capitals.join().expect("it does not panic")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn serve(&mut self, mut work: impl FnMut(View<'_>, &mut Answer)) -> io::Result<()> {
        while let Some(message) = self.recv()? {
            work(message.view(), &mut self.answer);
            self.answers = u32::from(!self.answer.bytes.is_empty());
            if self.answer.bytes.len() > SMALL {
                self.flush_answer(message.ticket());
            }
            drop(message);
            // The others of a run need no more than a look at the local_queue now and then.
            let Some(batch) = self.batch.clone() else { continue };
            let local_queue = Arc::clone(&self.local_queue);
            while self.next_group(&local_queue) {
                for view in self.group.clone().filter_map(|at| batch.view(at)) {
                    let before = self.answer.bytes.len();
                    work(view, &mut self.answer);
                    self.answers += u32::from(self.answer.bytes.len() > before);
                    self.ends.push(self.answer.bytes.len());
                }
            }
        }
        Ok(())
    }

    /// Has [`Worker::serve`] take up to so many short messages of a connection at once, if it has read them itself: less is to be
    /// done for each. Nobody else gets those if one of them takes long after all, nor leave answers to the others of them before
    /// it is done. 1 without it.
    #[must_use]
    pub fn taking(mut self, at_once: usize) -> Self {
        self.at_once = at_once.max(1);
        self
    }

    /// Tells the local_queue what became of the messages that the worker has, and takes the next ones of the batch. Whether there are any.
    #[inline]
    fn next_group(&mut self, local_queue: &LocalQueue) -> bool {
        let mut local_queue = local_queue.lock();
        self.complete(&mut local_queue);
        self.group = local_queue.advance(self.at_once);
        !self.group.is_empty()
    }

    /// Tells the local_queue what became of the current message, and takes the next one from there.
    fn complete_and_take(&mut self) -> Option<Message> {
        let local_queue = Arc::clone(&self.local_queue);
        let mut local_queue = local_queue.lock();
        self.complete(&mut local_queue);
        if let Some(at) = local_queue.advance(1).next() {
            drop(local_queue);
            let batch = self.batch.as_ref()?;
            self.current = Some(batch.ticket(at));
            return batch.message(at);
        }
        self.batch = None;
        let message = local_queue.messages.pop_front()?;
        self.current = Some(message.ticket());
        Some(message)
    }

    /// Tells the local_queue what became of the messages that the worker has.
    #[inline]
    fn complete(&mut self, local_queue: &mut Inner) {
        if !self.group.is_empty() {
            return self.complete_group(local_queue);
        }
        let Some(ticket) = self.current.take() else { return };
        if self.batch.is_some() && local_queue.batch.is_some() {
            local_queue.done(1, &mut self.answer.bytes, self.answers);
            for completions in self.completions.drain(..) {
                if let Completion::Reply(_, bytes) = completions {
                    local_queue.answer(bytes);
                }
            }
        } else {
            // Its run was taken apart meanwhile.
            self.flush_answer(ticket);
            local_queue.completions.append(&mut self.completions);
            local_queue.completions.push(Completion::Done(ticket));
        }
        self.answers = 0;
    }

    #[inline]
    fn complete_group(&mut self, local_queue: &mut Inner) {
        let group = std::mem::take(&mut self.group);
        if local_queue.batch.is_some() {
            local_queue.done(self.ends.len(), &mut self.answer.bytes, self.answers);
        } else if let Some(batch) = &self.batch {
            // The run was taken apart meanwhile.
            let mut from = 0;
            for (at, &end) in group.zip(&self.ends) {
                if end > from {
                    let bytes = Bytes::copy_from_slice(&self.answer.bytes[from..end]);
                    local_queue.completions.push(Completion::Reply(batch.ticket(at), bytes));
                }
                local_queue.completions.push(Completion::Done(batch.ticket(at)));
                from = end;
            }
            self.answer.bytes.clear();
        }
        self.ends.clear();
        self.answers = 0;
    }

    /// What was answered so far is completions by itself.
    fn flush_answer(&mut self, ticket: Ticket) {
        if self.answers > 0 {
            self.completions.push(Completion::Reply(ticket, self.answer.bytes.split().freeze()));
            self.answers = 0;
        }
    }

    /// Answers a message on the connection that it came from. It leaves when the worker asks for its next message, or
    /// after a few.
    pub fn reply(&mut self, message: &Message, bytes: impl Into<Bytes>) {
        let bytes = bytes.into();
        if self.coalesces(message.ticket(), bytes.len()) {
            self.answer.bytes.extend_from_slice(&bytes);
            self.answers += 1;
            return;
        }
        self.flush_answer(message.ticket());
        self.completions.push(Completion::Reply(message.ticket(), bytes));
    }

    /// The same with a copy of these bytes, which saves an allocation where an answer is made in a buffer that is used again.
    pub fn reply_slice(&mut self, message: &Message, bytes: &[u8]) {
        if !self.coalesces(message.ticket(), bytes.len()) {
            return self.reply(message, Bytes::copy_from_slice(bytes));
        }
        self.answer.bytes.extend_from_slice(bytes);
        self.answers += 1;
    }

    /// Whether an answer of that length leaves together with others of the batch.
    fn coalesces(&self, ticket: Ticket, length: usize) -> bool {
        let fits = self.answer.bytes.len() + length <= SMALL && self.completions.is_empty();
        self.batch.is_some() && self.current == Some(ticket) && fits
    }

    /// Sends a message to any connection, now. A received message's bytes are not copied.
    ///
    /// # Errors
    ///
    /// [`SendError::Gone`] when the connection has ended.
    pub fn forward(&self, psock: psock::Id, bytes: impl Into<Bytes>) -> Result<(), SendError> {
        let now = self.shared.now();
        let bytes = bytes.into();
        let (id, length) = (self.id, bytes.len());
        self.shared.change(|mux| mux.forward(psock, bytes, now).inspect(|()| mux.count_sent(id, length)))
    }

    /// Nothing is left of the batch: tells what was done, and gets more, leads, or sleeps.
    fn next_turn(&mut self) -> io::Result<Option<Message>> {
        let shared = Arc::clone(&self.shared);
        loop {
            let mut work = Work::default();
            let mut state = shared.lock();
            let now = shared.now();
            if state.pollers.helper == Some(self.id) {
                state.pollers.helper = None;
                self.spin_score = self.spin_score.max(SPIN_MIN + 1);
            }
            self.local_queue.lock().settle(&mut state.mux, self.id, now);
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
            let lead = state.pollers.leader.is_none() || !state.ready.is_empty() || self.helps(&state);
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
        state.mux.poll_messages(self.id, now, &mut self.scratch);
        let first = self.scratch.first()?;
        (self.current, self.batch) = (Some(first.ticket()), None);
        let count = self.scratch.len();
        let mut messages = self.scratch.drain(..);
        let first = messages.next();
        self.local_queue.lock().messages.extend(messages);
        state.turns += 1;
        if state.pollers.leader == Some(self.id) {
            state.pollers.leader = None;
        }
        match count {
            FULL.. => state.gather(shared, work),
            _ => state.pump(shared, work),
        }
        state.ensure_leader(count, work);
        first
    }

    /// Sleeps until somebody wakes it. The watchdog looks around now and then.
    fn park(&self) {
        let shared = &*self.shared;
        let (mut turns, mut quiet) = (u64::MAX, 0);
        loop {
            let mut work = Work::default();
            let mut state = shared.lock();
            let now = shared.now();
            let unseen = state.pollers.leader.is_none() || !state.ready.is_empty();
            if state.closed || unseen && state.turns == turns {
                // Nothing began since the last look, and nobody waits for sockets or reads those that are ready: the one who
                // works got stuck.
                state.handle_timeout(&self.shared, now, &mut work);
                if state.pollers.watchdog == Some(self.id) {
                    state.pollers.watchdog = None;
                }
                state.pump(shared, &mut work);
                drop(state);
                return shared.perform(work);
            }
            if state.mux.queued() > 0 && state.pollers.watchdog == Some(self.id) {
                state.handle_timeout(&self.shared, now, &mut work);
            }
            let watchdog = state.pollers.watchdog == Some(self.id);
            quiet = if watchdog && state.turns == turns { quiet + 1 } else { 0 };
            if watchdog && quiet > 1 {
                state.pollers.watchdog = None;
            }
            turns = state.turns;
            let timed = state.pollers.watchdog == Some(self.id) || state.pollers.leader.is_none();
            let patience = state.mux.config().patience;
            state.pump(shared, &mut work);
            let woken = !state.mux.is_idle(self.id);
            if let Some(slot) = state.workers.get_mut(self.id)
                && slot.thread.is_none()
            {
                slot.thread = Some(std::thread::current());
            }
            if !woken && !state.pollers.parked.contains(&self.id) {
                let id = self.id;
                state.pollers.parked.push(id);
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
            if !state.pollers.parked.contains(&self.id) && state.pollers.watchdog != Some(self.id) {
                return;
            }
        }
    }

    /// How long sockets are waited for awake: going to sleep and being woken takes about as long.
    fn patience(&self) -> Duration {
        2 * self.wake_cost
    }

    /// Waits for sockets, awake for a moment when that was worth it lately, and then asleep.
    fn wait(&mut self, most: usize, timeout: Option<Duration>, spins: bool) -> io::Result<()> {
        let patience = self.patience();
        let begin = Instant::now();
        if spins && timeout.is_none_or(|timeout| timeout >= patience) && self.spin(most)? {
            return Ok(());
        }
        self.poll(most, timeout)?;
        if timeout != Some(Duration::ZERO) {
            let took = begin.elapsed();
            self.note_wait(took);
            let soon = took < patience;
            self.spin_score = if soon { SPIN_MAX.min(self.spin_score + 1) } else { self.spin_score / 2 };
        }
        Ok(())
    }

    /// Whether it waits for sockets beside the leader.
    fn helps(&self, state: &State) -> bool {
        self.spin_score >= SPIN_MIN && !state.has_enough_pollers()
    }

    /// Waits awake for a moment, when that was worth it lately: whether a socket is ready.
    fn spin(&mut self, most: usize) -> io::Result<bool> {
        if self.spin_score < SPIN_MIN {
            return Ok(false);
        }
        let begin = Instant::now();
        while begin.elapsed() < self.patience() {
            self.poll(most, Some(Duration::ZERO))?;
            if !self.events.is_empty() {
                let took = begin.elapsed();
                self.note_wait(took);
                self.spin_score = SPIN_MAX.min(self.spin_score + 1);
                return Ok(true);
            }
        }
        self.spin_score -= SPIN_MIN / 2;
        Ok(false)
    }

    /// Waiting took so long.
    fn note_wait(&mut self, took: Duration) {
        self.ready_streak = if took < IMMEDIATE { self.ready_streak.saturating_add(1) } else { 0 };
    }

    /// Asks epoll which sockets are ready.
    fn poll(&mut self, most: usize, timeout: Option<Duration>) -> io::Result<()> {
        self.events.clear();
        let mut room = [MaybeUninit::<epoll::Event>::uninit(); READS];
        let events = epoll_wait(&self.shared, &mut room[..most], timeout)?;
        self.events.extend(events.unwrap_or_default().iter().map(|event| (event.data.u64(), event.flags)));
        Ok(())
    }

    /// Reads the sockets that are ready, and waits for them if nobody does, until there is a message for this worker. `None`
    /// when somebody else waits and nothing is ready.
    fn lead(&mut self) -> io::Result<Option<Message>> {
        let shared = Arc::clone(&self.shared);
        loop {
            let mut work = Work::default();
            let mut state = shared.lock();
            let now = shared.now();
            if let Some(slot) = state.workers.get_mut(self.id)
                && slot.thread.is_none()
            {
                slot.thread = Some(std::thread::current());
            }
            state.handle_timeout(&self.shared, now, &mut work);
            if let Some(message) = self.begin(&mut state, now, &mut work) {
                drop(state);
                shared.perform(work);
                return Ok(Some(message));
            }
            state.pump(&shared, &mut work);
            let leads = *state.pollers.leader.get_or_insert(self.id) == self.id;
            let helps = !leads && self.helps(&state);
            if state.closed || !leads && !helps && state.ready.is_empty() {
                state.pollers.leader = state.pollers.leader.filter(|_| !leads);
                drop(state);
                shared.perform(work);
                return Ok(None);
            }
            let alone = leads && !state.mux.is_worked_for();
            if leads && self.ready_streak >= SATURATED {
                self.ready_streak = 0;
                state.wake_helper(&mut work);
            }
            let most = state.ready.burst;
            let wait = match () {
                () if !leads && !state.ready.is_empty() => None,
                () if !leads => Some(Some(state.mux.config().patience)),
                // Those that are ready may keep it busy for ever: it looks at others now and then.
                () if !state.ready.is_empty() => (state.ready.taken >= READS).then_some(Some(Duration::ZERO)),
                () if !work.writes.is_empty() => Some(Some(Duration::ZERO)),
                () => Some(state.poll_timeout().map(|time| time.since(now))),
            };
            if wait.is_some() {
                state.ready.taken = 0;
                state.pollers.helping += usize::from(!leads);
            }
            if leads
                && let Some(timeout) = wait
                && timeout != Some(Duration::ZERO)
            {
                state.pollers.sleeps_until = Some(timeout.map_or(FOREVER, |timeout| now + timeout));
            }
            drop(state);
            shared.perform(work);
            self.events.clear();
            let waited = match wait {
                Some(timeout) => self.wait(most, timeout, alone),
                None => {
                    self.spin_score = SPIN_MAX.min(self.spin_score + 1);
                    Ok(())
                }
            };
            if let Err(error) = waited {
                let mut state = shared.lock();
                match leads {
                    true => (state.pollers.leader, state.pollers.sleeps_until) = (None, None),
                    false => state.pollers.helping -= 1,
                }
                return Err(error);
            }
            let mut work = Work::default();
            if !leads && wait.is_some() {
                shared.lock().pollers.helping -= 1;
                // The eventfd is for the leader.
                self.events.retain(|(data, _)| *data != EVENTFD.u64());
            }
            let runs = read(&shared, &self.events, &mut work, Some(self.id));
            // What came is for this thread first; who waits is woken for the rest when it has begun.
            shared.perform(work);
            if runs {
                self.batch = self.local_queue.lock().batch.clone();
                if let Some(message) = self.complete_and_take() {
                    return Ok(Some(message));
                }
            }
        }
    }
}

impl Server {
    /// Has so many threads do messages until the mux has drained, as [`Worker::serve`] does; gives back then.
    ///
    /// # Errors
    ///
    /// When epoll fails, or the mux has drained already.
    ///
    /// # Panics
    ///
    /// When `work` did, after the others have done their part.
    pub fn serve(
        &self,
        workers: usize,
        work: impl Fn(View<'_>, &mut Answer) + Send + Sync,
    ) -> io::Result<()> {
        let all = (0..workers).map(|_| self.worker()).collect::<io::Result<Vec<_>>>()?;
        let work = &work;
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                all.into_iter().map(|mut worker| scope.spawn(move || worker.serve(work))).collect();
            let ends: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
            ends.into_iter().try_for_each(|end| end.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }
}

/// Where [`Worker::serve`] wants an answer: what is written here is appended to it.
#[derive(Debug, Default)]
pub struct Answer {
    /// Behind those to other messages, maybe.
    bytes: BytesMut,
}

impl Answer {
    /// Appends these bytes.
    #[inline]
    pub fn extend_from_slice(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }
}

impl Extend<u8> for Answer {
    fn extend<T: IntoIterator<Item = u8>>(&mut self, bytes: T) {
        // A vector's own bytes are not copied here.
        self.bytes.extend_from_slice(&bytes.into_iter().collect::<Vec<_>>());
    }
}

impl io::Write for Answer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let shared = Arc::clone(&self.shared);
        let now = shared.now();
        let mut work = Work::default();
        let mut state = shared.lock();
        let local_queue = Arc::clone(&self.local_queue);
        let mut local_queue = local_queue.lock();
        let mut tickets = Vec::new();
        if !std::thread::panicking() {
            self.complete(&mut local_queue);
        } else if let Some(left) = self.group.len().checked_sub(self.ends.len() + 1) {
            // It panicked at one of those that it had taken: those before are done, those behind are not begun.
            if let Some(batch) = self.batch.as_ref().filter(|_| local_queue.batch.is_none()) {
                // The run was taken apart meanwhile: it holds those behind like any others.
                tickets.extend((self.group.end - left..self.group.end).map(|at| batch.ticket(at)));
            }
            local_queue.rewind(left);
            self.answer.bytes.truncate(self.ends.last().copied().unwrap_or(0));
            self.group.end -= left;
            self.complete_group(&mut local_queue);
        }
        local_queue.settle(&mut state.mux, self.id, now);
        tickets.extend(local_queue.give_back(&mut state.mux, self.id));
        drop(local_queue);
        state.mux.handle_hand_back(self.id, &tickets, now);
        if std::thread::panicking() {
            state.mux.handle_worker_died(self.id, now);
        } else {
            state.mux.leave(self.id, None, now);
        }
        state.workers.remove(self.id);
        state.pollers.remove(self.id);
        state.pump(&shared, &mut work);
        if state.pollers.leader.is_none() && !work.wakes() {
            state.wake_any(&mut work);
        }
        drop(state);
        shared.perform(work);
    }
}
