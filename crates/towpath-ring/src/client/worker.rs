//! A worker process of a multiplexor: receives messages of connections and answers them.

mod event;
mod message;
mod reply;
mod turn;

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::client::recv_error::RecvError;
use crate::client::{Consumer, ConsumerStats, Frame, Ticket};
use crate::handshake::attach::Options;
use crate::handshake::attach_error::AttachError;
use crate::lane::batch::BATCH_MAX;
use crate::lane::reserve_error::ReserveError;
use crate::lane::verdict::Verdict;
use crate::shm::header::{Kind, Meta};

pub use event::{Ended, Event, Opened};
pub use message::{Connection, Message, View};
pub use reply::{Reply, ServeError};

use message::{connection, stripped};
use turn::{Begun, Turn};

/// Messages that [`Worker::serve`] processes before it checks whether the multiplexor sleeps.
const BURST: u32 = 256;
/// Frames without a message that a receiving call takes before it looks at its time limit.
const OTHERS: u32 = 64;
/// Undelivered messages kept for [`Worker::poll_unsent`].
const UNSENT: usize = 1024;
/// Bytes of undelivered messages kept.
const UNSENT_BYTES: usize = 4 << 20;
/// A worker of a multiplexor (`towpath mux`).
///
/// ```no_run
/// use towpath_ring::Worker;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut worker = Worker::attach_env()?;
/// while let Some(message) = worker.recv()? {
///     let answer = worker.bytes(&message).to_ascii_uppercase();
///     worker.reply(&message, &answer)?;
///     worker.done(message);
/// }
/// # Ok(())
/// # }
/// ```
///
/// A message is the worker's until [`done`](Self::done). If the process dies before, another worker gets the message
/// unless it was answered.
#[derive(Debug)]
pub struct Worker {
    queue: Consumer,
    /// Messages accepted in one frame.
    batch: usize,
    reply: Reply,
    /// Frame that [`Worker::serve`] processed when it failed.
    begun: Option<Begun>,
    unsent: VecDeque<Unsent>,
}

/// An undelivered message of a worker, see [`Worker::poll_unsent`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsent {
    /// Destination; `None` for any connection.
    pub connection: Option<Connection>,
    /// Reason as error number: EPIPE (32): the connection ended before the message was sent completely; ENOTCONN
    /// (107): no connection was open; EAGAIN (11): the send queues of all connections were full.
    pub errno: i32,
    /// The message.
    pub bytes: Vec<u8>,
}

impl Worker {
    /// Attaches to the multiplexor that started this program: the environment variable `TOWPATH_SOCKET` names it.
    ///
    /// # Errors
    /// [`AttachError::NoSocket`] if it is not set, and those of [`attach`](Self::attach).
    pub fn attach_env() -> Result<Self, AttachError> {
        Ok(Self::over(Consumer::attach_env()?))
    }

    /// As [`attach_env`](Self::attach_env), with options.
    ///
    /// # Errors
    /// As [`attach_env`](Self::attach_env).
    pub fn attach_env_with(options: &Options) -> Result<Self, AttachError> {
        let path = std::env::var_os("TOWPATH_SOCKET").ok_or(AttachError::NoSocket)?;
        Self::attach(path, options)
    }

    /// Attaches to the multiplexor at `path`.
    ///
    /// # Errors
    /// [`AttachError`]; each variant says what to do.
    pub fn attach(path: impl AsRef<Path>, options: &Options) -> Result<Self, AttachError> {
        Ok(Self::over(Consumer::attach_with(path, options)?))
    }

    pub(crate) fn over(mut queue: Consumer) -> Self {
        queue.learn();
        Self { queue, batch: 1, reply: Reply::default(), begun: None, unsent: VecDeque::new() }
    }

    /// Makes [`serve`](Self::serve) accept up to `at_once` short messages of a connection in one frame, at most
    /// [`BATCH_MAX`]. This reduces the work per message. The messages of a frame stay with this worker even if one
    /// of them takes long, and their answers wait for it. If the process dies, another worker processes the frame's
    /// earlier messages again. The default is 1.
    #[must_use]
    pub fn taking(mut self, at_once: usize) -> Self {
        self.set_taking(at_once);
        self
    }

    /// Like [`taking`](Self::taking), for an existing worker. Call it before [`serve`](Self::serve).
    pub fn set_taking(&mut self, at_once: usize) {
        self.batch = at_once.clamp(1, BATCH_MAX);
    }

    /// Processes messages until the multiplexor ends this worker. `work` gets each message in the ring, and appends
    /// its answer; without bytes, no answer is sent. Equivalent to [`recv`](Self::recv), [`reply`](Self::reply) and
    /// [`done`](Self::done), with less work per message.
    ///
    /// # Errors
    /// [`ServeError`]: as [`recv`](Self::recv) and [`reply`](Self::reply). The next call continues after the failed
    /// answer.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let worker = towpath_ring::Worker::attach_env()?;
    /// worker.taking(16).serve(|message, answer| answer.extend(message.bytes().to_ascii_uppercase()))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn serve(&mut self, mut work: impl FnMut(View<'_>, &mut Reply)) -> Result<(), ServeError> {
        self.queue.set_batch_max(self.batch);
        if let Some(begun) = self.begun.take() {
            self.serve_frame(begun, &mut work)?;
        }
        while let Some(mut frame) = self.queue.recv()? {
            let mut done = 0;
            loop {
                // A frame without a message counts too: the multiplexor is woken for it as well.
                done += self.serve_frame(Begun { frame, done: 0 }, &mut work)?.max(1);
                if done >= BURST {
                    break;
                }
                // Published batches are processed before the multiplexor is woken: their messages are short.
                let Some(next) = self.queue.take()? else { break };
                if next.header().kind != Kind::MESSAGES {
                    // A single message may take long; finished messages do not wait for it.
                    self.queue.flush();
                }
                frame = next;
            }
        }
        Ok(())
    }

    fn serve_frame(
        &mut self,
        mut begun: Begun,
        work: &mut impl FnMut(View<'_>, &mut Reply),
    ) -> Result<u32, ServeError> {
        let count = match begun.frame.header().kind {
            kind if kind.is_message() => 1,
            Kind::MESSAGES => begun.frame.header().mark,
            _ => {
                self.note(&begun.frame);
                0
            }
        };
        let served =
            Turn { queue: &mut self.queue, reply: &mut self.reply, begun: &mut begun }.serve(count, work);
        if let Err(ServeError::Recv(_) | ServeError::Reply { why: ReserveError::Disconnected, .. }) = served {
            // The next call would fail at the same frame again.
            self.reply.clear();
        } else if begun.done >= count && self.reply.ends.is_empty() && self.reply.then.is_none() {
            self.queue.verdict(begun.frame, Verdict::Pass);
        } else {
            self.begun = Some(begun);
        }
        served.map(|()| count)
    }

    /// Receives the next message; waits for it. `None` if the multiplexor ends this worker.
    ///
    /// # Errors
    /// [`RecvError`]: the multiplexor wrote invalid data, or poll(2) failed.
    pub fn recv(&mut self) -> Result<Option<Message>, RecvError> {
        self.next_message(Consumer::recv, || false)
    }

    /// Receives the next message; waits at most `timeout`. `None` after the timeout and if the multiplexor ends this
    /// worker; [`Consumer::is_ended`] of [`queue`](Self::queue) distinguishes them.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Option<Message>, RecvError> {
        let end = Instant::now().checked_add(timeout);
        self.next_message(|queue| queue.recv_until(end), || end.is_some_and(|end| Instant::now() >= end))
    }

    /// Receives the next message, if it is published.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), without poll(2).
    pub fn try_recv(&mut self) -> Result<Option<Message>, RecvError> {
        self.next_message(Consumer::try_recv, || true)
    }

    fn next_message(
        &mut self,
        recv: impl FnMut(&mut Consumer) -> Result<Option<Frame>, RecvError>,
        is_over: impl Fn() -> bool,
    ) -> Result<Option<Message>, RecvError> {
        Ok(self.next(recv, is_over, Kind::is_message)?.map(|frame| Message { frame }))
    }

    /// Returns the next frame of a wanted kind that `recv` finds. A multiplexor that publishes frames without messages as
    /// fast as they are taken could keep the call here forever: after each [`OTHERS`] such frames, the call ends if
    /// `is_over` returns true.
    fn next(
        &mut self,
        mut recv: impl FnMut(&mut Consumer) -> Result<Option<Frame>, RecvError>,
        is_over: impl Fn() -> bool,
        wanted: impl Fn(Kind) -> bool,
    ) -> Result<Option<Frame>, RecvError> {
        let mut others = 0;
        while let Some(frame) = recv(&mut self.queue)? {
            match frame.header().kind {
                kind if wanted(kind) => {
                    self.queue.tell_received(&frame);
                    return Ok(Some(frame));
                }
                // The messages would be lost here; after the error, another worker gets them.
                Kind::MESSAGES => {
                    return Err(RecvError::Damaged("a batch, which only `serve` accepts".into()));
                }
                _ => {
                    self.note(&frame);
                    self.queue.verdict(frame, Verdict::Pass);
                    others += 1;
                    if others == OTHERS {
                        if is_over() {
                            break;
                        }
                        others = 0;
                    }
                }
            }
        }
        Ok(None)
    }

    /// Returns the oldest undelivered message of this worker ([`send`](Self::send), [`forward`](Self::forward)).
    /// Undelivered messages arrive together with received messages; up to 1,024 messages and 4 MiB are kept, and 64
    /// are in flight. The multiplexor counts all of them. A message whose connection ended before it was sent
    /// completely may return to any worker.
    pub fn poll_unsent(&mut self) -> Option<Unsent> {
        self.unsent.pop_front()
    }

    /// Keeps an undelivered message. Ignores frames of other kinds.
    fn note(&mut self, frame: &Frame) {
        let header = frame.header();
        if header.kind != Kind::ERROR {
            return;
        }
        let connection = Some(connection(frame)).filter(|connection| connection.generation != 0);
        let errno = i32::try_from(header.mark).unwrap_or(i32::MAX);
        self.unsent.push_back(Unsent { connection, errno, bytes: self.queue.payload(frame).to_vec() });
        // Drops the oldest beyond the limits.
        let bytes = |unsent: &VecDeque<Unsent>| unsent.iter().map(|unsent| unsent.bytes.len()).sum::<usize>();
        while self.unsent.len() > UNSENT || self.unsent.len() > 1 && bytes(&self.unsent) > UNSENT_BYTES {
            self.unsent.pop_front();
        }
    }

    /// Returns the message of a ticket, see [`Consumer::recall`]: its bytes are valid, its header is empty.
    #[must_use]
    pub fn recall(&self, ticket: Ticket) -> Option<Message> {
        Some(Message { frame: self.queue.recall(ticket)? })
    }

    /// All bytes of the message, in the ring.
    ///
    /// # Panics
    /// The message is another worker's.
    #[must_use]
    pub fn bytes(&self, message: &Message) -> &[u8] {
        self.queue.payload(&message.frame)
    }

    /// The bytes that the framing leaves after it strips header or delimiter; all bytes without stripping.
    ///
    /// # Panics
    /// The message is another worker's.
    #[must_use]
    pub fn payload(&self, message: &Message) -> &[u8] {
        let layers = message.frame.header().layers;
        stripped(self.bytes(message), layers.network, layers.payload)
    }

    /// Answers the message on its connection; waits while the ring is full. An answered message is not given to another
    /// worker if this one dies.
    ///
    /// A message has one answer. The multiplexor detaches a worker that answers again, unless it runs with
    /// `--worker-may push`. [`reply_part`](Self::reply_part) sends an answer in parts.
    ///
    /// # Errors
    /// [`ReserveError`]: the answer is larger than the multiplexor permits, or the multiplexor is disconnected.
    pub fn reply(&mut self, message: &Message, bytes: &[u8]) -> Result<(), ReserveError> {
        self.answer(Kind::REPLY, message, bytes)
    }

    /// Sends a part of the answer; waits while the ring is full. Call [`reply`](Self::reply) with the last part, which may
    /// be empty. Messages that workers [`send`](Self::send) on the same connection may leave between two parts. Answers to
    /// other messages may too, unless the order is `replies`, `serial` or `sticky`. A message that was answered in part is
    /// not given to another worker if this one dies.
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn reply_part(&mut self, message: &Message, bytes: &[u8]) -> Result<(), ReserveError> {
        self.answer(Kind::REPLY_PART, message, bytes)
    }

    fn answer(&mut self, kind: Kind, message: &Message, bytes: &[u8]) -> Result<(), ReserveError> {
        let meta = Meta { kind, port: message.frame.seq().0, ..Meta::default() };
        self.queue.reply(&message.frame, bytes, &meta)
    }

    /// Sends a message on another connection; waits while the ring is full. If that connection has ended, the
    /// message returns ([`poll_unsent`](Self::poll_unsent)).
    ///
    /// A worker may send to the connections that it received messages from. The multiplexor detaches a worker that
    /// sends to another one, unless it runs with `--worker-may push`.
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn forward(&mut self, connection: Connection, bytes: &[u8]) -> Result<(), ReserveError> {
        let Connection { index: port, generation: group } = connection;
        self.queue.send(bytes, &Meta { kind: Kind::MESSAGE, port, group, ..Meta::default() })
    }

    /// Connected mode: sends a message on the connection with the shortest send queue; waits while the ring is full.
    /// The multiplexor must run with `--worker-may push`; otherwise it detaches the worker.
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), ReserveError> {
        self.queue.send(bytes, &Meta { kind: Kind::MESSAGE, ..Meta::default() })
    }

    /// Releases the message. The multiplexor may send further messages to this worker.
    pub fn done(&mut self, message: Message) {
        self.queue.verdict(message.frame, Verdict::Pass);
    }

    /// Ends the worker, see [`Consumer::close`]. Other workers get its unanswered messages.
    pub fn close(self) {
        self.queue.close();
    }

    /// The worker's counters.
    #[must_use]
    pub fn stats(&self) -> ConsumerStats {
        self.queue.stats()
    }

    /// The underlying consumer, for event loops: [`Consumer::arm`], [`Consumer::disarm`].
    pub fn queue(&mut self) -> &mut Consumer {
        &mut self.queue
    }
}

impl AsFd for Worker {
    /// As [`Consumer`]'s.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}

#[cfg(test)]
mod tests;
