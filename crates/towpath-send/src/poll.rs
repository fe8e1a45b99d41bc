//! The sender for an existing event loop: it never waits, and the time is an argument.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::buffer::Buffer;
use crate::counters::{Counters, Distributions};
use crate::driver::{Done, Driver, Remains, Turn};
use crate::engine::Full;
use crate::error::{SendError, Unarmed};
use crate::policy::Mode;
use crate::sender::{BackEnd, Options};
use crate::socket::Socket;
use crate::sys;
use towpath_wire::Time;

/// Result of [`PollSender::poll_send`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// The kernel has accepted all data.
    Flushed,
    /// The socket is full: call again when it is writable.
    Full,
    /// A queue below the socket is full, and no event reports when it has room: call again after a millisecond.
    Busy,
}

/// [`Sender`](crate::Sender) without waiting. Push buffers; call [`poll_send`](Self::poll_send) when the socket is writable, and
/// [`handle_error_queue`](Self::handle_error_queue) when poll(2) or epoll(7) reports POLLERR. Completions raise POLLERR, which
/// cannot be masked.
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
/// assert!(sender.is_idle(), "loopback is copied: nothing is in flight");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PollSender {
    driver: Driver<Socket>,
    max_frames: usize,
}

impl PollSender {
    /// Creates a sender for a connected socket; see [`Sender::new`](crate::Sender::new).
    ///
    /// # Errors
    /// See [`Sender::new`](crate::Sender::new).
    pub fn new(socket: impl Into<OwnedFd>, options: Options, now: Time) -> Result<Self, SendError> {
        // The caller waits for one descriptor, the socket.
        let options = Options { back_end: BackEnd::MsgZerocopy, ..options };
        let (socket, engine) = Socket::open(socket.into(), &options, now)?;
        Ok(Self { driver: Driver::new(socket, engine, &options), max_frames: options.max_frames.max(1) })
    }

    /// Queues a buffer.
    ///
    /// # Errors
    /// [`Options::max_frames`] buffers are held; returns the buffer with its token.
    pub fn push(&mut self, token: u64, buffer: impl Into<Buffer>) -> Result<(), Full<Done>> {
        let buffer = buffer.into();
        if !self.driver.has_room(self.max_frames) {
            return Err(Full(Done { token, buffer }));
        }
        self.driver.push(token, buffer);
        Ok(())
    }

    /// Transmits as much as the socket accepts.
    ///
    /// # Errors
    /// The connection ended; or a datagram was too long and was discarded.
    pub fn poll_send(&mut self, now: Time) -> Result<Sent, SendError> {
        Ok(match self.driver.turn(now)? {
            Turn::Flushed => Sent::Flushed,
            Turn::Full => Sent::Full,
            Turn::Busy => Sent::Busy,
        })
    }

    /// Reads a bounded part of the error queue. Returns true if the queue is empty. Otherwise POLLERR stays set, but EPOLLET does not
    /// report it again.
    ///
    /// # Errors
    /// [`SendError::Gone`] if there was no completion and the socket has a pending error, which this call clears; [`SendError::Queue`].
    pub fn handle_error_queue(&mut self, now: Time) -> Result<bool, SendError> {
        let before = self.driver.progress;
        let emptied = self.driver.read(now)?;
        if self.driver.progress != before {
            return Ok(emptied);
        }
        self.driver.backend.error().map_or(Ok(emptied), |error| Err(SendError::Gone(error)))
    }

    /// Like [`handle_error_queue`](Self::handle_error_queue), but leaves a pending error of the socket in place.
    ///
    /// # Errors
    /// [`SendError::Queue`].
    pub fn read_completions(&mut self, now: Time) -> Result<(), SendError> {
        self.driver.read(now).map(drop)
    }

    /// Bytes that the peer's TCP has acknowledged since the connection began (tcp(7), TCP_INFO); `None` for other sockets.
    pub fn acked(&self) -> Option<u64> {
        sys::acked(self.driver.backend.fd.as_fd())
    }

    /// Returns a completed buffer, with [`Options::keep_done`].
    pub fn poll_done(&mut self) -> Option<Done> {
        self.driver.poll_done()
    }

    /// Bytes pushed and not yet accepted by the kernel.
    pub fn unsent(&self) -> u64 {
        self.driver.engine.unsent()
    }

    /// Buffers held: waiting or in flight.
    pub fn held(&self) -> usize {
        self.driver.engine.held()
    }

    /// Bytes in flight.
    pub fn pinned(&self) -> u64 {
        self.driver.engine.pinned()
    }

    /// Returns true if all data was accepted and completed.
    pub fn is_idle(&self) -> bool {
        self.driver.engine.is_flushed() && self.driver.engine.outstanding() == 0
    }

    /// Returns true if a buffer has been in flight for longer than a second and eight round trips.
    pub fn is_stuck(&self, now: Time) -> bool {
        self.driver.engine.is_stuck(now)
    }

    /// Number of zero-copy calls whose completions are outstanding.
    pub fn outstanding(&self) -> usize {
        self.driver.engine.outstanding()
    }

    /// Limit on bytes in flight at present.
    pub fn budget(&self) -> u64 {
        self.driver.engine.budget()
    }

    /// The sender's counters.
    pub fn counters(&self) -> &Counters {
        self.driver.engine.counters()
    }

    /// The sender's distributions.
    pub fn distributions(&self) -> &Distributions {
        self.driver.engine.distributions()
    }

    /// The current mode.
    pub fn mode(&self) -> Mode {
        self.driver.engine.mode()
    }

    /// The reason why zero copy cannot be used on the socket; `None` if it can.
    pub fn unarmed(&self) -> Option<Unarmed> {
        self.driver.backend.unarmed
    }

    /// Shuts down the write side. Completions still arrive.
    ///
    /// # Errors
    /// Errors of shutdown(2).
    pub fn shutdown(&self) -> Result<(), SendError> {
        self.driver.backend.shutdown().map_err(SendError::Io)
    }

    /// Resets the connection. The data in its queue completes at once; read the completions afterwards.
    pub fn reset(&self) {
        self.driver.backend.reset();
    }

    /// Ends the sender; buffers in flight go into quarantine.
    pub fn abandon(mut self, now: Time) -> Remains {
        self.driver.abandon(now)
    }
}

impl AsFd for PollSender {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.driver.backend.fd.as_fd()
    }
}

impl Drop for PollSender {
    fn drop(&mut self) {
        // The resulting quarantine is dropped, which leaks the buffers in flight.
        self.driver.abandon(Time::default());
    }
}
