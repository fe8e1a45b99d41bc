//! The sender for those who have an event loop of their own: nothing in it waits, and the time is an argument.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::buffer::Buffer;
use crate::counters::Counters;
use crate::engine::Full;
use crate::error::{SendError, Unarmed};
use crate::policy::Mode;
use crate::pump::{Done, Pump, Remains, Turn};
use crate::sender::{Options, Socket};
use crate::sys;
use towpath_wire::Time;

/// What [`PollSender::poll_send`] came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// Everything is handed over.
    Flushed,
    /// The socket takes no more now: again when it is writable.
    Full,
    /// A queue below the socket is full, whose end nothing tells: again in a millisecond.
    Busy,
}

/// [`Sender`](crate::Sender) without waiting: push buffers, [`poll_send`](Self::poll_send) when the socket is writable,
/// [`handle_error_queue`](Self::handle_error_queue) when poll(2) or epoll says POLLERR, which is how completions tell of themselves
/// and cannot be masked.
///
/// ```
/// use std::net::{TcpListener, TcpStream};
/// use towpath_send::{Options, PollSender, Sent, Time};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let listener = TcpListener::bind("127.0.0.1:0")?;
/// let stream = TcpStream::connect(listener.local_addr()?)?;
/// let now = Time::from_nanos(0);
/// let mut sender = PollSender::new(stream, Options::default(), now)?;
/// assert!(sender.push(7, vec![1; 1000]).is_ok());
/// assert_eq!(sender.poll_send(now)?, Sent::Flushed);
/// assert!(sender.is_idle(), "this machine is sent to by copying: nothing is in flight");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PollSender {
    pump: Pump<Socket>,
    max_frames: usize,
}

impl PollSender {
    /// A sender for a connected socket; see [`Sender::new`](crate::Sender::new).
    ///
    /// # Errors
    /// As there.
    pub fn new(socket: impl Into<OwnedFd>, options: Options, now: Time) -> Result<Self, SendError> {
        let (socket, engine) = Socket::open(socket.into(), &options, now)?;
        Ok(Self { pump: Pump::new(socket, engine, &options), max_frames: options.max_frames.max(1) })
    }

    /// Queues a buffer behind those that wait.
    ///
    /// # Errors
    /// The quota is used up: the buffer comes back, with its token.
    pub fn push(&mut self, token: u64, buffer: impl Into<Buffer>) -> Result<(), Full<Done>> {
        let buffer = buffer.into();
        if !self.pump.has_room(self.max_frames) {
            return Err(Full(Done { token, buffer }));
        }
        self.pump.push(token, buffer);
        Ok(())
    }

    /// Hands over as much as the socket takes.
    ///
    /// # Errors
    /// The connection is gone; or a datagram was too long, and is taken out.
    pub fn poll_send(&mut self, now: Time) -> Result<Sent, SendError> {
        Ok(match self.pump.turn(now)? {
            Turn::Flushed => Sent::Flushed,
            Turn::Full => Sent::Full,
            Turn::Busy => Sent::Busy,
        })
    }

    /// Reads the error queue, a bounded part of it, and says whether that was all: POLLERR stays for the rest, but EPOLLET does not say
    /// it again.
    ///
    /// # Errors
    /// [`SendError::Gone`] when there was no completion and the socket has an error, which the socket says once; [`SendError::Queue`].
    pub fn handle_error_queue(&mut self, now: Time) -> Result<bool, SendError> {
        let before = self.pump.progress;
        let emptied = self.pump.read(now)?;
        if self.pump.progress != before {
            return Ok(emptied);
        }
        self.pump.backend.error().map_or(Ok(emptied), |error| Err(SendError::Gone(error)))
    }

    /// The same for those who only look: an error of the socket stays, for whoever is told of it by POLLERR.
    ///
    /// # Errors
    /// [`SendError::Queue`].
    pub fn read_completions(&mut self, now: Time) -> Result<(), SendError> {
        self.pump.read(now).map(drop)
    }

    /// Bytes that the peer's machine has acknowledged since the connection began (tcp(7), TCP_INFO); none of another socket.
    pub fn acked(&self) -> Option<u64> {
        sys::acked(self.pump.backend.fd.as_fd())
    }

    /// A buffer that the kernel is done with, when they are kept ([`Options::keep_done`]).
    pub fn poll_done(&mut self) -> Option<Done> {
        self.pump.poll_done()
    }

    /// Bytes that were pushed and not handed over.
    pub fn unsent(&self) -> u64 {
        self.pump.engine.unsent()
    }

    /// Buffers that it holds: waiting, or in flight.
    pub fn held(&self) -> usize {
        self.pump.engine.held()
    }

    /// Bytes that are in flight.
    pub fn pinned(&self) -> u64 {
        self.pump.engine.pinned()
    }

    /// Whether everything is handed over and completed.
    pub fn is_idle(&self) -> bool {
        self.pump.engine.is_flushed() && self.pump.engine.outstanding() == 0
    }

    /// Whether a buffer has been in flight for longer than a second and eight round trips.
    pub fn is_stuck(&self, now: Time) -> bool {
        self.pump.engine.is_stuck(now)
    }

    /// Zero-copy calls whose completions are outstanding.
    pub fn outstanding(&self) -> usize {
        self.pump.engine.outstanding()
    }

    /// Bytes that may be in flight at once.
    pub fn budget(&self) -> u64 {
        self.pump.engine.budget()
    }

    /// What was counted.
    pub fn counters(&self) -> &Counters {
        self.pump.engine.counters()
    }

    /// How it sends now.
    pub fn mode(&self) -> Mode {
        self.pump.engine.mode()
    }

    /// Why it sends plain whatever happens, when it does.
    pub fn unarmed(&self) -> Option<Unarmed> {
        self.pump.backend.unarmed
    }

    /// Announces the end; completions go on coming.
    ///
    /// # Errors
    /// What shutdown(2) says.
    pub fn shutdown(&self) -> Result<(), SendError> {
        self.pump.backend.shutdown().map_err(SendError::Io)
    }

    /// Resets the connection: what it had in its queue is completed at once, and can be read.
    pub fn reset(&self) {
        self.pump.backend.reset();
    }

    /// Ends: what is in flight goes into quarantine.
    pub fn abandon(mut self, now: Time) -> Remains {
        self.pump.abandon(now)
    }
}

impl AsFd for PollSender {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pump.backend.fd.as_fd()
    }
}

impl Drop for PollSender {
    fn drop(&mut self) {
        // What is in flight is leaked, as with the quarantine that this makes.
        self.pump.abandon(Time::default());
    }
}
