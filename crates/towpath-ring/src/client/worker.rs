//! A mux's worker in a process of its own: receives messages of connections, answers them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use thiserror::Error;

use crate::client::recv_error::RecvError;
use crate::client::{Consumer, ConsumerStats, Frame, Ticket};
use crate::handshake::attach::Options;
use crate::handshake::attach_error::AttachError;
use crate::lane::batch::{self, BATCH_MAX, Part};
use crate::lane::reserve_error::ReserveError;
use crate::lane::verdict::Verdict;
use crate::shm::header::{Kind, Meta};

/// Messages that [`Worker::serve`] does, if there are so many, before it sees whether the multiplexor sleeps.
const BURST: u32 = 256;
/// Messages that came back which are kept for whoever asks.
const UNSENT: usize = 1024;
/// Bytes of these, whatever their number.
const UNSENT_BYTES: usize = 4 << 20;
/// Bytes of answers from which on those of a frame's messages do not wait for each other.
const SMALL: usize = 16 << 10;

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
/// A message is the worker's until it is [`done`](Self::done). If the process dies before that, another worker gets the
/// message, unless it was answered.
#[derive(Debug)]
pub struct Worker {
    queue: Consumer,
    /// Messages that it takes in a frame.
    batch: usize,
    reply: Reply,
    /// What [`Worker::serve`] was at when it ended with an error.
    begun: Option<Begun>,
    unsent: VecDeque<Unsent>,
}

/// A message of a worker that nobody took, see [`Worker::poll_unsent`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsent {
    /// The connection that it was for; `None` for any.
    pub connection: Option<Connection>,
    /// Why, as error number: EPIPE (32) that connection had ended, or ended before all of it had left; ENOTCONN (107) none was open;
    /// EAGAIN (11) all had as much to send as may wait.
    pub errno: i32,
    /// All of it.
    pub bytes: Vec<u8>,
}

/// A message that this worker has. Its bytes stay in the ring, see [`Worker::bytes`].
#[derive(Debug)]
#[must_use = "a message that is never done is never given back"]
pub struct Message {
    frame: Frame,
}

/// Names a connection of the multiplexor; not valid for another one later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Connection {
    /// Which.
    pub index: u32,
    /// Which of those that had this index.
    pub generation: u32,
}

/// A message where it lies in the ring, see [`Worker::serve`].
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    part: Part<'a>,
    connection: Connection,
    time: u64,
}

impl<'a> View<'a> {
    /// All bytes of the message.
    #[must_use]
    pub const fn bytes(&self) -> &'a [u8] {
        self.part.bytes
    }

    /// What the framing leaves when it strips the header or the delimiter; all bytes otherwise.
    #[must_use]
    pub fn payload(&self) -> &'a [u8] {
        stripped(self.part.bytes, self.part.skip, self.part.trim)
    }

    /// The connection that it came from.
    #[must_use]
    pub const fn connection(&self) -> Connection {
        self.connection
    }

    /// When it was handed to this process, in nanoseconds since the epoch.
    #[must_use]
    pub const fn time(&self) -> u64 {
        self.time
    }

    /// The framing's mark; 0 without.
    #[must_use]
    pub const fn mark(&self) -> u32 {
        self.part.mark
    }

    /// The hash of what it is ordered by; 0 without.
    #[must_use]
    pub const fn hash(&self) -> u32 {
        self.part.hash
    }
}

/// Where [`Worker::serve`] wants an answer: what is written here is appended to it.
#[derive(Debug, Default)]
pub struct Reply {
    /// Behind those to the messages before, maybe.
    bytes: Vec<u8>,
    /// Where each of those that wait to be sent ends, and how many of the frame's messages were done then.
    ends: Vec<(usize, u32)>,
}

impl Reply {
    /// Appends these bytes.
    #[inline]
    pub fn extend_from_slice(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.ends.clear();
    }
}

impl Extend<u8> for Reply {
    fn extend<T: IntoIterator<Item = u8>>(&mut self, bytes: T) {
        self.bytes.extend(bytes);
    }
}

impl io::Write for Reply {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Why [`Worker::serve`] ended.
#[derive(Debug, Error)]
pub enum ServeError {
    /// No message could be received.
    #[error(transparent)]
    Recv(#[from] RecvError),
    /// An answer could not be sent: its message is done without, or when the wait for room was ended ([`ReserveError::Interrupted`],
    /// [`ReserveError::RingFull`]), the next call sends it.
    #[error("an answer of {len} bytes: {why}")]
    Reply {
        /// Its length.
        len: usize,
        /// Why not.
        why: ReserveError,
    },
}

impl Message {
    /// The connection that it came from.
    #[must_use]
    pub fn connection(&self) -> Connection {
        connection(&self.frame)
    }

    /// When it was whole, in nanoseconds since the epoch.
    #[must_use]
    pub fn time(&self) -> u64 {
        self.frame.header().time
    }

    /// The framing's mark; 0 without.
    #[must_use]
    pub fn mark(&self) -> u32 {
        self.frame.header().mark
    }

    /// The hash of what it is ordered by; 0 without.
    #[must_use]
    pub fn hash(&self) -> u32 {
        self.frame.header().hash
    }

    /// What names it in programs that cannot own it; [`Worker::recall`] gives it back.
    #[must_use]
    pub fn into_ticket(self) -> Ticket {
        self.frame.into_ticket()
    }
}

impl Worker {
    /// Attaches to the multiplexor that started this program: the environment variable `TOWPATH_SOCKET` names it.
    ///
    /// # Errors
    /// [`AttachError::NoSocket`] when it is not set; each case says what to do.
    pub fn attach_env() -> Result<Self, AttachError> {
        Ok(Self::over(Consumer::attach_env()?))
    }

    /// Attaches to the multiplexor that listens at `path`.
    ///
    /// # Errors
    /// Each case of [`AttachError`] says what to do.
    pub fn attach(path: impl AsRef<Path>, options: &Options) -> Result<Self, AttachError> {
        Ok(Self::over(Consumer::attach_with(path, options)?))
    }

    fn over(mut queue: Consumer) -> Self {
        queue.learn();
        Self { queue, batch: 1, reply: Reply::default(), begun: None, unsent: VecDeque::new() }
    }

    /// Has [`serve`](Self::serve) take up to so many short messages of a connection at once, [`BATCH_MAX`] at most: less is to
    /// be done for each. Nobody else gets those if one of them takes long after all, nor leave answers to the others of them before
    /// it is done; if the process dies, those before it are done again, by another. 1 without it.
    #[must_use]
    pub fn taking(mut self, at_once: usize) -> Self {
        self.set_taking(at_once);
        self
    }

    /// The same for a worker that is there already, before [`serve`](Self::serve).
    pub fn set_taking(&mut self, at_once: usize) {
        self.batch = at_once.clamp(1, BATCH_MAX);
    }

    /// Does messages until the multiplexor wants this worker no more: `work` gets each where it lies, and appends its answer; without
    /// one there is none. As [`recv`](Self::recv), [`reply`](Self::reply) and [`done`](Self::done), with less to do for each message.
    ///
    /// # Errors
    /// [`ServeError`]: as [`recv`](Self::recv) and [`reply`](Self::reply). The next call goes on behind what could not be sent.
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
                done += self.serve_frame(Begun { frame, done: 0 }, &mut work)?;
                if done >= BURST {
                    break;
                }
                // Rows that are there are done before the multiplexor is woken: they are of short messages.
                let Some(next) = self.queue.take()? else { break };
                if next.header().kind != Kind::MESSAGES {
                    // Nobody knows how long this one takes, and what is done does not wait for it.
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
            Kind::MESSAGE => 1,
            Kind::MESSAGES => begun.frame.header().mark,
            _ => {
                self.note(&begun.frame);
                0
            }
        };
        let served =
            Turn { queue: &mut self.queue, reply: &mut self.reply, begun: &mut begun }.serve(count, work);
        if let Err(ServeError::Recv(_) | ServeError::Reply { why: ReserveError::Disconnected, .. }) = served {
            // The next call would fail with the same frame again, and so on.
            self.reply.clear();
        } else if begun.done >= count && self.reply.ends.is_empty() {
            self.queue.verdict(begun.frame, Verdict::Pass);
        } else {
            self.begun = Some(begun);
        }
        served.map(|()| count)
    }

    /// The next message; waits for it. None when the multiplexor wants this worker no more: it is to end.
    ///
    /// # Errors
    /// [`RecvError`]: the multiplexor wrote nonsense, or poll(2) failed.
    pub fn recv(&mut self) -> Result<Option<Message>, RecvError> {
        self.next(Consumer::recv)
    }

    /// The next message; waits at most `timeout`. None also when that has passed; [`Consumer::is_ended`] of
    /// [`queue`](Self::queue) tells.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Option<Message>, RecvError> {
        self.next(|queue| queue.recv_timeout(timeout))
    }

    /// The next message, if it is there.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), except that there is no poll(2).
    pub fn try_recv(&mut self) -> Result<Option<Message>, RecvError> {
        self.next(Consumer::try_recv)
    }

    fn next(
        &mut self,
        mut recv: impl FnMut(&mut Consumer) -> Result<Option<Frame>, RecvError>,
    ) -> Result<Option<Message>, RecvError> {
        while let Some(frame) = recv(&mut self.queue)? {
            match frame.header().kind {
                Kind::MESSAGE => return Ok(Some(Message { frame })),
                // It would be lost here; another worker gets what is in it.
                Kind::MESSAGES => {
                    return Err(RecvError::Damaged("a frame of messages, which serve asks for".into()));
                }
                _ => {
                    self.note(&frame);
                    self.queue.verdict(frame, Verdict::Pass);
                }
            }
        }
        Ok(None)
    }

    /// The next of the messages that this worker sent ([`send`](Self::send), [`forward`](Self::forward)) and that nobody took, oldest first,
    /// as far as is known: they come with the messages that are received, up to 1,024 of 4 MiB together are kept, and 64 are on their way at once. The
    /// multiplexor counts all of them. One whose connection ended before all of it had left comes back to any of its workers.
    pub fn poll_unsent(&mut self) -> Option<Unsent> {
        self.unsent.pop_front()
    }

    /// Keeps what a frame says about a message that was not sent. Others say nothing that this version knows of.
    fn note(&mut self, frame: &Frame) {
        let header = frame.header();
        if header.kind != Kind::ERROR {
            return;
        }
        let connection = Some(connection(frame)).filter(|connection| connection.generation != 0);
        let errno = i32::try_from(header.mark).unwrap_or(i32::MAX);
        self.unsent.push_back(Unsent { connection, errno, bytes: self.queue.payload(frame).to_vec() });
        // The oldest make room.
        let bytes = |unsent: &VecDeque<Unsent>| unsent.iter().map(|unsent| unsent.bytes.len()).sum::<usize>();
        while self.unsent.len() > UNSENT || self.unsent.len() > 1 && bytes(&self.unsent) > UNSENT_BYTES {
            self.unsent.pop_front();
        }
    }

    /// The message that the ticket names, see [`Consumer::recall`]: its bytes are there, what its header said is not.
    #[must_use]
    pub fn recall(&self, ticket: Ticket) -> Option<Message> {
        Some(Message { frame: self.queue.recall(ticket)? })
    }

    /// All bytes of the message, where they lie in the ring.
    ///
    /// # Panics
    /// When the message is another worker's.
    #[must_use]
    pub fn bytes(&self, message: &Message) -> &[u8] {
        self.queue.payload(&message.frame)
    }

    /// What the framing leaves when it strips the header or the delimiter; all bytes otherwise.
    ///
    /// # Panics
    /// When the message is another worker's.
    #[must_use]
    pub fn payload(&self, message: &Message) -> &[u8] {
        let layers = message.frame.header().layers;
        stripped(self.bytes(message), layers.network, layers.payload)
    }

    /// Answers the message on the connection that it came from; waits while the ring is full. There may be several answers.
    /// What was answered is not given to another worker when this one dies.
    ///
    /// # Errors
    /// [`ReserveError`]: the answer is larger than the multiplexor takes, or the multiplexor is gone.
    pub fn reply(&mut self, message: &Message, bytes: &[u8]) -> Result<(), ReserveError> {
        let meta = Meta { kind: Kind::REPLY, port: message.frame.seq().0, ..Meta::default() };
        self.queue.reply(&message.frame, bytes, &meta)
    }

    /// Sends a message on another connection; waits while the ring is full. If that connection has ended, the message
    /// comes back ([`poll_unsent`](Self::poll_unsent)).
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn forward(&mut self, connection: Connection, bytes: &[u8]) -> Result<(), ReserveError> {
        let Connection { index: port, generation: group } = connection;
        self.queue.send(bytes, &Meta { kind: Kind::MESSAGE, port, group, ..Meta::default() })
    }

    /// Connected mode: sends a message on the connection that has the least to send; waits while the ring is full.
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), ReserveError> {
        self.queue.send(bytes, &Meta { kind: Kind::MESSAGE, ..Meta::default() })
    }

    /// The message is done: its memory goes back, and the multiplexor may give this worker more.
    pub fn done(&mut self, message: Message) {
        self.queue.verdict(message.frame, Verdict::Pass);
    }

    /// Ends it, see [`Consumer::close`]: others get what it has not answered.
    pub fn close(self) {
        self.queue.close();
    }

    /// What this worker has done.
    #[must_use]
    pub fn stats(&self) -> ConsumerStats {
        self.queue.stats()
    }

    /// The client underneath, for event loops: [`Consumer::arm`], [`Consumer::disarm`].
    pub fn queue(&mut self) -> &mut Consumer {
        &mut self.queue
    }
}

/// A frame that [`Worker::serve`] is at.
#[derive(Debug)]
struct Begun {
    frame: Frame,
    /// Messages that are done.
    done: u32,
}

/// What [`Worker::serve`] does with a frame. If the work panics, what was done before is answered all the same.
struct Turn<'a> {
    queue: &'a mut Consumer,
    reply: &'a mut Reply,
    begun: &'a mut Begun,
}

impl Turn<'_> {
    fn serve(&mut self, count: u32, work: &mut impl FnMut(View<'_>, &mut Reply)) -> Result<(), ServeError> {
        // What could not be sent the last time.
        self.answer()?;
        while self.begun.done < count {
            self.work(count, work)?;
            self.answer()?;
        }
        Ok(())
    }

    /// Does messages until all are done or their answers are long.
    fn work(&mut self, count: u32, work: &mut impl FnMut(View<'_>, &mut Reply)) -> Result<(), RecvError> {
        let Begun { frame, done } = &mut *self.begun;
        let mut end = 0;
        let (header, payload) = (frame.header(), self.queue.payload(frame));
        let (connection, time, from) = (connection(frame), header.time, *done as usize);
        let mut each = |part| {
            self.queue.tell_at(frame, *done as u16);
            work(View { part, connection, time }, self.reply);
            let now = self.reply.bytes.len();
            *done += 1;
            if now > end {
                self.reply.ends.push((now, *done));
            }
            end = now;
            now < SMALL
        };
        if header.kind == Kind::MESSAGE {
            let layers = header.layers;
            let (skip, trim) = (layers.network, layers.payload);
            each(Part { bytes: payload, skip, trim, mark: header.mark, hash: header.hash });
            return Ok(());
        }
        let parts = batch::parse(payload, count);
        let parts =
            parts.ok_or_else(|| RecvError::Damaged("messages that are not where they should be".into()))?;
        let _: Option<()> = parts.skip(from).try_for_each(|part| each(part).then_some(()));
        Ok(())
    }

    /// Says what was done.
    fn answer(&mut self) -> Result<(), ServeError> {
        let Begun { frame, done } = &mut *self.begun;
        let Reply { bytes, ends } = &mut *self.reply;
        let mut count = ends.len();
        while count > 0 {
            let (len, upto) = ends[count - 1];
            // Behind the last one, others may be done that have no answer.
            let group = if count == ends.len() { *done } else { upto };
            let meta =
                Meta { kind: Kind::REPLY, port: frame.seq().0, group, mark: count as u32, ..Meta::default() };
            let sent = self.queue.reply(frame, &bytes[..len], &meta);
            match sent {
                Err(why @ (ReserveError::Interrupted | ReserveError::RingFull)) => {
                    return Err(ServeError::Reply { len, why });
                }
                // Together with the last, which is the one that made it long; those before it are not lost with it.
                Err(ReserveError::TooLarge) if count > 1 => {
                    count -= 1;
                    continue;
                }
                Ok(()) | Err(_) => {}
            }
            bytes.drain(..len);
            // A long one does not keep its memory.
            bytes.shrink_to(2 * SMALL);
            ends.drain(..count);
            ends.iter_mut().for_each(|(end, _)| *end -= len);
            count = ends.len();
            sent.map_err(|why| ServeError::Reply { len, why })?;
        }
        Ok(())
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // What the message that panicked had of an answer is not one.
        if std::thread::panicking() {
            self.reply.bytes.truncate(self.reply.ends.last().map_or(0, |(end, _)| *end));
            // One that is too long is left out.
            while let Err(ServeError::Reply { why: ReserveError::TooLarge, .. }) = self.answer() {}
            self.reply.clear();
        }
    }
}

fn connection(frame: &Frame) -> Connection {
    let header = frame.header();
    Connection { index: header.port, generation: header.group }
}

fn stripped(bytes: &[u8], skip: u16, trim: u16) -> &[u8] {
    let end = bytes.len() - usize::from(trim).min(bytes.len());
    &bytes[usize::from(skip).min(end)..end]
}

impl AsFd for Worker {
    /// As [`Consumer`]'s.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}

#[cfg(test)]
mod tests;
