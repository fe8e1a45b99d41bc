//! A worker's thread: leader and followers. See the documentation of [`super`].

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

/// A turn with at least this number of messages counts as full of short ones.
const FULL: usize = 8;
/// The leader spins before it sleeps from this score; maximum of the score.
const SPIN_MIN: u8 = 4;
const SPIN_MAX: u8 = 16;
/// A wait of at most this time counts as immediate. After this number of immediate waits in a row a helper is
/// woken.
const IMMEDIATE: Duration = Duration::from_micros(3);
const SATURATED: u8 = 8;
/// Replies of a batch are copied together up to this number of bytes, to be sent by one write.
const SMALL: usize = 4096;

/// A worker of a [`Server`], for one thread.
///
/// A message is done when the next one is requested or the worker is dropped. If the thread panics, another
/// worker gets the message ([`crate::mux::Config::redeliver`]).
#[derive(Debug)]
pub struct Worker {
    shared: Arc<Shared>,
    id: worker::Id,
    local_queue: Arc<LocalQueue>,
    current: Option<Ticket>,
    /// The batch that the current message belongs to. `answer` has the current message's replies, `answers`
    /// their number; other replies are in `completions`.
    batch: Option<Batch>,
    answer: Answer,
    answers: u32,
    completions: Vec<Completion>,
    /// [`Worker::serve`]: indices of the messages taken from the batch, and the end of each reply in
    /// `answer`.
    group: Range<usize>,
    ends: Vec<usize>,
    /// Maximum length of `group`.
    at_once: usize,
    scratch: Vec<Message>,
    wake_cost: Duration,
    /// Events of the last epoll_wait(2).
    events: Vec<(u64, epoll::EventFlags)>,
    /// Number of immediate waits in a row.
    ready_streak: u8,
    /// Score of recent waits that were shorter than the cost of sleeping.
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

    /// The worker's id in the core.
    pub const fn id(&self) -> worker::Id {
        self.id
    }

    /// The multiplexor of this worker.
    pub fn server(&self) -> Server {
        Server { shared: Arc::clone(&self.shared) }
    }

    /// Waits for the next message. Completes the previous one. Returns `None` when the mux has drained.
    ///
    /// # Errors
    ///
    /// Fails if epoll_wait(2) fails.
    pub fn recv(&mut self) -> io::Result<Option<Message>> {
        match self.complete_and_take() {
            Some(message) => Ok(Some(message)),
            None => self.next_turn(),
        }
    }

    /// Processes messages until the mux has drained. `work` gets a view of each message and appends the
    /// reply, if any. Equivalent to [`Worker::recv`] and [`Worker::reply_slice`] with less overhead per
    /// message.
    ///
    /// # Errors
    ///
    /// Fails if epoll_wait(2) fails.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::io::{Read, Write};
    /// use towpath_mux::io::Server;
    /// use towpath_mux::mux::{Config, Order};
    ///
    /// let server = Server::new("line".parse()?, Config::new(Order::Replies))?;
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
            // The other messages of a batch need the local queue's lock once per group only.
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

    /// Makes [`Worker::serve`] take up to `at_once` short messages of a batch together, which costs less per
    /// message. If one of them takes long, other workers cannot take the others of the group, and their
    /// replies wait. Default: 1.
    #[must_use]
    pub fn taking(mut self, at_once: usize) -> Self {
        self.at_once = at_once.max(1);
        self
    }

    /// Completes the current messages and takes the next group of the batch. Returns false if there are none.
    #[inline]
    fn next_group(&mut self, local_queue: &LocalQueue) -> bool {
        let mut local_queue = local_queue.lock();
        self.complete(&mut local_queue);
        self.group = local_queue.advance(self.at_once);
        !self.group.is_empty()
    }

    /// Completes the current message and takes the next one from the local queue.
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

    /// Records the completion of the current messages in the local queue.
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
            // The batch was split meanwhile.
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
            // The batch was split meanwhile.
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

    /// Turns the collected replies into a completion.
    fn flush_answer(&mut self, ticket: Ticket) {
        if self.answers > 0 {
            self.completions.push(Completion::Reply(ticket, self.answer.bytes.split().freeze()));
            self.answers = 0;
        }
    }

    /// Replies to a message on its connection. The reply is sent when the worker requests its next message,
    /// or a few messages later.
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

    /// As [`Worker::reply`], copying the bytes. Saves an allocation if the reply is in a reused buffer.
    pub fn reply_slice(&mut self, message: &Message, bytes: &[u8]) {
        if !self.coalesces(message.ticket(), bytes.len()) {
            return self.reply(message, Bytes::copy_from_slice(bytes));
        }
        self.answer.bytes.extend_from_slice(bytes);
        self.answers += 1;
    }

    /// Returns true if a reply of this length is sent together with others of the batch.
    fn coalesces(&self, ticket: Ticket, length: usize) -> bool {
        let fits = self.answer.bytes.len() + length <= SMALL && self.completions.is_empty();
        self.batch.is_some() && self.current == Some(ticket) && fits
    }

    /// Sends a message on any connection at once. Does not copy the bytes of a received message.
    ///
    /// # Errors
    ///
    /// Returns [`SendError::Gone`] if the connection has ended.
    pub fn forward(&self, psock: psock::Id, bytes: impl Into<Bytes>) -> Result<(), SendError> {
        let now = self.shared.now();
        let bytes = bytes.into();
        let (id, length) = (self.id, bytes.len());
        self.shared.change(|mux| mux.forward(psock, bytes, now).inspect(|()| mux.count_sent(id, length)))
    }

    /// The local queue is empty: applies completions, then gets messages, leads, or sleeps.
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
            if state.is_look_due(now) {
                drop(state);
                self.look()?;
                state = shared.lock();
            }
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

    /// No worker waits for sockets, because messages are queued for all of them: reads the ready ones, so that other connections get
    /// their turn.
    fn look(&mut self) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        self.poll(READS, Some(Duration::ZERO))?;
        // The eventfd is for the leader.
        self.events.retain(|(data, _)| *data != EVENTFD.u64());
        let mut work = Work::default();
        read(&shared, &self.events, &mut work, None);
        shared.perform(work);
        Ok(())
    }

    /// Takes messages, and ensures that another worker leads meanwhile.
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

    /// Sleeps until woken. The watchdog checks the leader at intervals.
    fn park(&self) {
        let shared = &*self.shared;
        let (mut turns, mut quiet) = (u64::MAX, 0);
        loop {
            let mut work = Work::default();
            let mut state = shared.lock();
            let now = shared.now();
            let unseen = state.pollers.leader.is_none() || !state.ready.is_empty();
            if state.closed || unseen && state.turns == turns {
                // No turn began since the last check, and no worker waits for sockets or reads the ready
                // ones: the leader is stuck.
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

    /// Time to spin: about the cost of sleeping and waking.
    fn patience(&self) -> Duration {
        2 * self.wake_cost
    }

    /// Waits for sockets: spins if that paid recently, then sleeps.
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

    /// Returns true if this worker waits for sockets in addition to the leader.
    fn helps(&self, state: &State) -> bool {
        self.spin_score >= SPIN_MIN && !state.has_enough_pollers()
    }

    /// Spins if that paid recently. Returns true if a socket is ready.
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

    /// Updates the streak of immediate waits.
    fn note_wait(&mut self, took: Duration) {
        self.ready_streak = if took < IMMEDIATE { self.ready_streak.saturating_add(1) } else { 0 };
    }

    /// Calls epoll_wait(2).
    fn poll(&mut self, most: usize, timeout: Option<Duration>) -> io::Result<()> {
        self.events.clear();
        let mut room = [MaybeUninit::<epoll::Event>::uninit(); READS];
        let events = epoll_wait(&self.shared, &mut room[..most], timeout)?;
        self.events.extend(events.unwrap_or_default().iter().map(|event| (event.data.u64(), event.flags)));
        Ok(())
    }

    /// Reads ready sockets, and waits for them as the leader or a helper, until there is a message for this
    /// worker. Returns `None` if another worker leads and no socket is ready.
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
                // Ready sockets may never end; look for others at intervals.
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
            // This thread takes the messages first. It wakes other workers for the rest when it begins.
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
    /// Runs [`Worker::serve`] in `workers` threads until the mux has drained.
    ///
    /// # Errors
    ///
    /// Fails if epoll_wait(2) fails, or if the mux has drained already.
    ///
    /// # Panics
    ///
    /// Resumes a panic of `work` after the other threads have finished.
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

/// The reply of [`Worker::serve`]: bytes written here are appended to it.
#[derive(Debug, Default)]
pub struct Answer {
    /// May start with replies to other messages.
    bytes: BytesMut,
}

impl Answer {
    /// Appends bytes.
    #[inline]
    pub fn extend_from_slice(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }
}

impl Extend<u8> for Answer {
    fn extend<T: IntoIterator<Item = u8>>(&mut self, bytes: T) {
        // `BytesMut` appends slices faster than single bytes.
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
            // The panic was in a message of a group: those before it are done, those after it are not begun.
            if let Some(batch) = self.batch.as_ref().filter(|_| local_queue.batch.is_none()) {
                // The batch was split meanwhile: the worker holds the messages after it as single ones.
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
