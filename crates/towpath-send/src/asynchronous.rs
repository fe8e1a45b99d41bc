//! The sender for tokio.
//!
//! Completions raise EPOLLERR, which tokio interprets as the end of the write half: a registered socket would be ready forever
//! after the first completion. The socket is therefore registered with a private edge-triggered epoll instance (one edge per
//! completion), and tokio watches that epoll's descriptor.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tokio::time::{sleep, timeout};

use crate::buffer::Buffer;
use crate::counters::{Counters, Distributions};
use crate::driver::{Done, Driver, Turn};
use crate::error::{SendError, Unarmed};
use crate::policy::Mode;
use crate::sender::{AFTER_RESET, Closed, Options, Socket};
use crate::sys;
use towpath_wire::Time;

/// Limit on one wait, after which the state is checked again.
const LOOK: Duration = Duration::from_secs(1);
const BUSY_WAIT: Duration = Duration::from_millis(1);

/// [`Sender`](crate::Sender) for tokio, with the same buffers and counters. Requires a runtime with IO and time enabled.
///
/// Dropping a future does not lose queued buffers: the next call sends them. [`Options::stall`] is not used; use
/// `tokio::time::timeout`.
#[derive(Debug)]
pub struct AsyncSender {
    driver: Driver<Socket>,
    /// The epoll instance that watches the socket.
    ready: AsyncFd<OwnedFd>,
    origin: Instant,
    max_frames: usize,
    gather: u64,
    batch: usize,
}

impl AsyncSender {
    /// Creates a sender for a connected socket (`std`'s, or tokio's after `into_std`).
    ///
    /// # Errors
    /// See [`Sender::new`](crate::Sender::new); also errors of epoll(7) and of tokio's reactor.
    ///
    /// # Panics
    /// Panics outside a runtime with IO enabled.
    pub fn new(socket: impl Into<OwnedFd>, options: Options) -> Result<Self, SendError> {
        let (socket, engine) = Socket::open(socket.into(), &options, Time::default())?;
        let epoll = watch(&socket).map_err(|error| SendError::Io(error.into()))?;
        let ready = sys::reactor(epoll).map_err(SendError::Io)?;
        Ok(Self {
            driver: Driver::new(socket, engine, &options),
            ready,
            origin: Instant::now(),
            max_frames: options.max_frames.max(1),
            gather: options.gather as u64,
            batch: options.batch,
        })
    }

    /// Sends a buffer. Resolves when the kernel has accepted this buffer and all queued ones.
    ///
    /// # Errors
    /// The connection ended, or a datagram is too long.
    pub async fn send(&mut self, buffer: impl Into<Buffer>) -> Result<(), SendError> {
        self.queue(0, buffer).await?;
        self.flush().await
    }

    /// Queues a buffer. Waits only while [`Options::max_frames`] buffers are held.
    ///
    /// # Errors
    /// See [`send`](Self::send).
    pub async fn queue(&mut self, token: u64, buffer: impl Into<Buffer>) -> Result<(), SendError> {
        let buffer = buffer.into();
        if !self.driver.has_room(self.max_frames) {
            self.drive(|sender| sender.driver.has_room(sender.max_frames)).await?;
        }
        self.driver.push(token, buffer);
        let engine = &self.driver.engine;
        let enough =
            if self.batch > 1 { engine.waiting() >= self.batch } else { engine.unsent() >= self.gather };
        if enough {
            self.driver.try_turn(self.now())?;
        }
        Ok(())
    }

    /// Resolves when the kernel has accepted all queued data.
    ///
    /// # Errors
    /// See [`send`](Self::send).
    pub async fn flush(&mut self) -> Result<(), SendError> {
        self.drive(|sender| sender.driver.engine.is_flushed()).await
    }

    /// Resolves when all data is sent and every completion arrived.
    ///
    /// # Errors
    /// See [`send`](Self::send).
    pub async fn drain(&mut self) -> Result<(), SendError> {
        self.idle().await?;
        self.check_lost(false)
    }

    async fn idle(&mut self) -> Result<(), SendError> {
        self.drive(|sender| sender.driver.engine.is_flushed() && sender.driver.engine.outstanding() == 0)
            .await
    }

    /// Returns the error that ended the connection, as in [`Sender::drain`](crate::Sender::drain): the kernel also completes data that a
    /// reset discarded.
    fn check_lost(&mut self, announced: bool) -> Result<(), SendError> {
        self.driver.backend.lost(announced).map_or(Ok(()), |error| Err(SendError::Gone(error)))
    }

    /// Returns a completed buffer, with [`Options::keep_done`]. Never waits.
    ///
    /// # Errors
    /// The error queue could not be read.
    pub fn reclaim(&mut self) -> Result<Option<Done>, SendError> {
        if self.driver.engine.outstanding() > 0 {
            self.driver.read(self.now())?;
        }
        Ok(self.driver.poll_done())
    }

    /// See [`Sender::read_completions`](crate::Sender::read_completions).
    ///
    /// # Errors
    /// The error queue could not be read.
    pub fn read_completions(&mut self) -> Result<(), SendError> {
        self.driver.read(self.now()).map(drop)
    }

    /// Ends the connection; see [`Sender::close`](crate::Sender::close).
    ///
    /// # Errors
    /// The error queue could not be read.
    pub async fn close(mut self, patience: Duration) -> Result<Closed, SendError> {
        let end = async |sender: &mut Self| -> Result<(), SendError> {
            sender.flush().await?;
            sender.check_lost(false)?;
            sender.driver.backend.shutdown().map_err(SendError::Io)?;
            sender.idle().await?;
            sender.check_lost(true)
        };
        let finished = matches!(timeout(patience, end(&mut self)).await, Ok(Ok(())));
        if !finished {
            self.driver.backend.reset();
            let soon = Instant::now() + AFTER_RESET;
            while self.driver.engine.outstanding() > 0 && Instant::now() < soon {
                self.driver.read(self.now())?;
                sleep(BUSY_WAIT).await;
            }
        }
        let remains = self.driver.abandon(self.now());
        let distributions = self.distributions().clone();
        Ok(Closed { finished, remains, counters: *self.counters(), distributions })
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

    /// The reason why the socket is always sent on with copies, if any.
    pub fn unarmed(&self) -> Option<Unarmed> {
        self.driver.backend.unarmed
    }

    async fn drive(&mut self, until: impl Fn(&Self) -> bool) -> Result<(), SendError> {
        loop {
            let turn = self.driver.turn(self.now())?;
            if until(self) {
                return Ok(());
            }
            let before = self.driver.progress;
            self.driver.read(self.now())?;
            if until(self) {
                return Ok(());
            }
            if self.driver.progress != before {
                continue;
            }
            if turn == Turn::Busy {
                sleep(BUSY_WAIT).await;
                continue;
            }
            let Ok(ready) = timeout(LOOK, self.ready.readable()).await else { continue };
            // Later events raise a new edge; the next turn handles earlier ones.
            ready.map_err(SendError::Io)?.clear_ready();
            let failed = self.take_edges()?.contains(EventFlags::ERR);
            let before = self.driver.progress;
            if failed
                && self.driver.read(self.now())?
                && self.driver.progress == before
                && let Some(error) = self.driver.backend.error()
            {
                return Err(SendError::Gone(error));
            }
        }
    }

    /// Returns and clears the socket's pending events.
    fn take_edges(&self) -> Result<EventFlags, SendError> {
        let mut events = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }];
        match epoll::wait(self.ready.get_ref(), &mut events[..], Some(&Timespec::default())) {
            Ok(0) | Err(Errno::INTR) => Ok(EventFlags::empty()),
            Ok(_) => Ok(events[0].flags),
            Err(error) => Err(SendError::Io(error.into())),
        }
    }

    fn now(&self) -> Time {
        Time::from_nanos(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}

fn watch(socket: &Socket) -> rustix::io::Result<OwnedFd> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, &socket.fd, EventData::new_u64(0), EventFlags::OUT | EventFlags::ET)?;
    Ok(epoll)
}

impl AsFd for AsyncSender {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.driver.backend.fd.as_fd()
    }
}

impl Drop for AsyncSender {
    fn drop(&mut self) {
        let now = self.now();
        self.driver.abandon(now);
    }
}
