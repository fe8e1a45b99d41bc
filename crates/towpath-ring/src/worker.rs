//! A mux's worker in a process of its own: receives messages of connections, answers them.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use crate::attach::Options;
use crate::channel::Full;
use crate::client::{Consumer, Frame};
use crate::error::{AttachError, RecvError};
use crate::header::{Kind, Meta};
use crate::verdict::Verdict;

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

impl Message {
    /// The connection that it came from.
    #[must_use]
    pub fn connection(&self) -> Connection {
        let header = self.frame.header();
        Connection { index: header.port, generation: header.group }
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
}

impl Worker {
    /// Attaches to the multiplexor that started this program: the environment variable `TOWPATH_SOCKET` names it.
    ///
    /// # Errors
    /// [`AttachError::NoSocket`] when it is not set; each case says what to do.
    pub fn attach_env() -> Result<Self, AttachError> {
        Ok(Self { queue: Consumer::attach_env()? })
    }

    /// Attaches to the multiplexor that listens at `path`.
    ///
    /// # Errors
    /// Each case of [`AttachError`] says what to do.
    pub fn attach(path: impl AsRef<Path>, options: &Options) -> Result<Self, AttachError> {
        Ok(Self { queue: Consumer::attach_with(path, options)? })
    }

    /// The next message; waits for it. None when the multiplexor wants this worker no more: it is to end.
    ///
    /// # Errors
    /// [`RecvError`]: the multiplexor wrote nonsense, or poll(2) failed.
    pub fn recv(&mut self) -> Result<Option<Message>, RecvError> {
        while let Some(frame) = self.queue.recv()? {
            if frame.header().kind == Kind::MESSAGE {
                return Ok(Some(Message { frame }));
            }
            // Nothing that this version knows of.
            self.queue.verdict(frame, Verdict::Pass);
        }
        Ok(None)
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
        let bytes = self.bytes(message);
        let layers = message.frame.header().layers;
        let end = bytes.len() - usize::from(layers.payload).min(bytes.len());
        &bytes[usize::from(layers.network).min(end)..end]
    }

    /// Answers the message on the connection that it came from; waits while the ring is full. There may be several answers.
    /// What was answered is not given to another worker when this one dies.
    ///
    /// # Errors
    /// [`Full`]: the answer is larger than the multiplexor takes, or the multiplexor is gone.
    pub fn reply(&mut self, message: &Message, bytes: &[u8]) -> Result<(), Full> {
        let meta = Meta { kind: Kind::REPLY, port: message.frame.seq().0, ..Meta::default() };
        self.queue.reply(&message.frame, bytes, &meta)
    }

    /// Sends a message on another connection; waits while the ring is full. If that connection has ended, nothing happens.
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn forward(&mut self, connection: Connection, bytes: &[u8]) -> Result<(), Full> {
        let Connection { index: port, generation: group } = connection;
        self.queue.send(bytes, &Meta { kind: Kind::MESSAGE, port, group, ..Meta::default() })
    }

    /// Connected mode: sends a message on the connection that has the least to send; waits while the ring is full.
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), Full> {
        self.queue.send(bytes, &Meta { kind: Kind::MESSAGE, ..Meta::default() })
    }

    /// The message is done: its memory goes back, and the multiplexor may give this worker more.
    pub fn done(&mut self, message: Message) {
        self.queue.verdict(message.frame, Verdict::Pass);
    }

    /// The client underneath, for event loops: [`Consumer::arm`], [`Consumer::disarm`].
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
