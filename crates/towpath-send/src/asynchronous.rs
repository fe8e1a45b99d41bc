//! The sender for tokio.
//!
//! Completions raise EPOLLERR, which tokio interprets as the end of the write half: a registered socket would be ready forever
//! after the first completion. The socket is therefore registered with a private edge-triggered epoll instance (one edge per
//! completion), and tokio watches that epoll's descriptor. Reading has a second such instance, so that a reading and a writing task
//! have separate wakers.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep, timeout};

use crate::buffer::Buffer;
use crate::counters::{Counters, Distributions, PlainCause};
use crate::driver::{Done, Driver, Turn};
use crate::engine::MAX_PARTS;
use crate::error::{SendError, Unarmed};
use crate::policy::Mode;
use crate::sender::{AFTER_RESET, BackEnd, Closed, Options};
use crate::socket::Socket;
use crate::sys::{self, Part};
use towpath_wire::Time;

/// Limit on one wait, after which the state is checked again.
const LOOK: Duration = Duration::from_secs(1);
const BUSY_WAIT: Duration = Duration::from_millis(1);

/// [`Sender`](crate::Sender) for tokio, with the same buffers and counters. Requires a runtime with IO and time enabled.
///
/// Dropping a future does not lose queued buffers: the next call sends them. [`Options::stall`] is not used; use
/// `tokio::time::timeout`.
///
/// It is also tokio's [`AsyncRead`] and [`AsyncWrite`], for code that is written for a `TcpStream` (hyper, tonic). Bytes written this
/// way are borrowed for one call, so the kernel copies them; they follow the queued buffers. Zero copy needs the ownership that
/// [`send`](Self::send) and [`queue`](Self::queue) take. `tokio::io::split` makes a read half and a write half for two tasks.
#[derive(Debug)]
pub struct AsyncSender {
    driver: Driver<Socket>,
    /// The epoll instance that watches the socket for writing and for completions.
    ready: AsyncFd<OwnedFd>,
    /// The one for reading, from the first read on.
    readable: Option<AsyncFd<OwnedFd>>,
    /// Ends the present wait, if there is one.
    timer: Option<Pin<Box<Sleep>>>,
    shut: bool,
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
        let ready = watch(&socket, EventFlags::OUT).map_err(SendError::Io)?;
        Ok(Self {
            driver: Driver::new(socket, engine, &options),
            ready,
            readable: None,
            timer: None,
            shut: false,
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

    /// The kernel interface in use.
    pub fn back_end(&self) -> BackEnd {
        self.driver.backend.back_end()
    }

    /// The reason why zero copy cannot be used on the socket; `None` if it can.
    pub fn unarmed(&self) -> Option<Unarmed> {
        self.driver.backend.unarmed
    }

    async fn drive(&mut self, until: impl Fn(&Self) -> bool) -> Result<(), SendError> {
        poll_fn(|cx| self.poll_drive(cx, &until)).await
    }

    /// Sends queued buffers and reads completions until `until` holds.
    fn poll_drive(
        &mut self,
        cx: &mut Context<'_>,
        until: impl Fn(&Self) -> bool,
    ) -> Poll<Result<(), SendError>> {
        loop {
            let turn = self.driver.turn(self.now())?;
            if until(self) {
                break;
            }
            let before = self.driver.progress;
            self.driver.read(self.now())?;
            if until(self) {
                break;
            }
            if self.driver.progress != before {
                self.timer = None;
            } else if turn == Turn::Busy {
                ready!(self.poll_timer(cx, BUSY_WAIT));
            } else {
                ready!(self.poll_event(cx))?;
            }
        }
        self.timer = None;
        Poll::Ready(Ok(()))
    }

    /// Waits for an event of the socket, for a limited time.
    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), SendError>> {
        let flags = match self.ready.poll_read_ready(cx) {
            Poll::Pending => {
                ready!(self.poll_timer(cx, LOOK));
                return Poll::Ready(Ok(()));
            }
            Poll::Ready(ready) => {
                // Later events raise a new edge; the next turn handles earlier ones.
                ready.map_err(SendError::Io)?.clear_ready();
                take_edges(&self.ready).map_err(SendError::Io)?
            }
        };
        self.timer = None;
        let before = self.driver.progress;
        if flags.contains(EventFlags::ERR)
            && self.driver.read(self.now())?
            && self.driver.progress == before
            && let Some(error) = self.driver.backend.error()
        {
            return Poll::Ready(Err(SendError::Gone(error)));
        }
        Poll::Ready(Ok(()))
    }

    /// Waits for `time` since the first poll of this wait.
    fn poll_timer(&mut self, cx: &mut Context<'_>, time: Duration) -> Poll<()> {
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(time)));
        ready!(timer.as_mut().poll(cx));
        self.timer = None;
        Poll::Ready(())
    }

    /// Sends borrowed bytes, after the queued buffers.
    fn poll_send_borrowed(&mut self, cx: &mut Context<'_>, parts: &[Part<'_>]) -> Poll<io::Result<usize>> {
        if !self.driver.engine.is_flushed() {
            ready!(self.poll_drive(cx, |sender| sender.driver.engine.is_flushed()))
                .map_err(io::Error::other)?;
        }
        let now = self.now();
        if self.driver.engine.wants_notifications(now) {
            self.driver.read(now).map_err(io::Error::other)?;
        }
        loop {
            let error = match sys::send(self.driver.backend.fd.as_fd(), parts, false) {
                Ok(bytes) => {
                    self.timer = None;
                    self.driver.engine.counters_mut().add_plain(PlainCause::Borrowed, bytes as u64);
                    return Poll::Ready(Ok(bytes));
                }
                Err(error) => error,
            };
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN) => ready!(self.poll_event(cx)).map_err(io::Error::other)?,
                Some(libc::ENOBUFS) => ready!(self.poll_timer(cx, BUSY_WAIT)),
                _ => return Poll::Ready(Err(error)),
            }
        }
    }

    fn now(&self) -> Time {
        Time::from_nanos(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}

/// Bytes are borrowed and therefore copied by the kernel; they are counted as [`PlainCause::Borrowed`].
impl AsyncWrite for AsyncSender {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_send_borrowed(cx, &[Part::of(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut parts = [Part::NONE; MAX_PARTS];
        let mut count = 0;
        for slice in slices.iter().filter(|slice| !slice.is_empty()).take(MAX_PARTS) {
            parts[count] = Part::of(slice);
            count += 1;
        }
        self.poll_send_borrowed(cx, &parts[..count])
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Resolves when the kernel has accepted all queued buffers.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_drive(cx, |sender| sender.driver.engine.is_flushed()).map_err(io::Error::other)
    }

    /// Shuts down the write side, and resolves when every completion arrived.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.shut {
            ready!(self.as_mut().poll_flush(cx))?;
            self.check_lost(false).map_err(io::Error::other)?;
            self.driver.backend.shutdown()?;
            self.shut = true;
        }
        ready!(self.poll_drive(cx, |sender| sender.driver.engine.outstanding() == 0))
            .map_err(io::Error::other)?;
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for AsyncSender {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let fd = self.driver.backend.fd.as_fd();
            match recv(fd, buffer.initialize_unfilled(), RecvFlags::DONTWAIT) {
                Ok((bytes, _)) => {
                    buffer.advance(bytes);
                    return Poll::Ready(Ok(()));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if self.readable.is_none() {
                        self.readable =
                            Some(watch(&self.driver.backend, EventFlags::IN | EventFlags::RDHUP)?);
                    }
                    let Some(readable) = &self.readable else { continue };
                    ready!(readable.poll_read_ready(cx))?.clear_ready();
                    take_edges(readable)?;
                }
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }
}

/// Returns and clears the pending events of an epoll instance.
fn take_edges(epoll: &AsyncFd<OwnedFd>) -> io::Result<EventFlags> {
    let mut events = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 2];
    match epoll::wait(epoll.get_ref(), &mut events[..], Some(&Timespec::default())) {
        Ok(0) | Err(Errno::INTR) => Ok(EventFlags::empty()),
        // The flags of the socket; completions of the ring are found by the next turn.
        Ok(count) => Ok(events[..count]
            .iter()
            .find(|event| event.data.u64() == 0)
            .map_or(EventFlags::empty(), |event| event.flags)),
        Err(error) => Err(error.into()),
    }
}

/// An epoll instance that watches the socket, watched by tokio.
fn watch(socket: &Socket, flags: EventFlags) -> io::Result<AsyncFd<OwnedFd>> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, &socket.fd, EventData::new_u64(0), flags | EventFlags::ET)?;
    if let Some(uring) = socket.uring.as_ref().filter(|_| flags.contains(EventFlags::OUT)) {
        epoll::add(&epoll, uring.as_fd(), EventData::new_u64(1), EventFlags::IN | EventFlags::ET)?;
    }
    sys::reactor(epoll)
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
