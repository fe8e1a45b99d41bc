//! tokio: messages as a [`Stream`], replies as a [`Sink`].
//!
//! What: [`Messages`] drives the sockets from the task that polls it, and is the mux's only worker. Sockets
//! are read and written only while it is polled. Spawn long work as separate tasks and return the replies to
//! this task, for example by a channel.
//!
//! Races: the runtime reports readiness of the server's epoll once. This is cleared only after a turn that
//! found nothing, and stays set if it was reported again meanwhile. A task that holds its maximum of messages
//! waits for a completion; when the stream is split, another task may complete messages, and wakes this one
//! (`Messages::waiting`).

use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use futures_sink::Sink;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, Sleep, sleep_until};

use super::sys::watch;
use super::{Driver, Server};
use crate::mux::{Message, SendError, Ticket, worker};

/// The messages of a [`Server`], for one task.
///
/// # Examples
///
/// ```
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
/// use towpath_mux::io::{Reply, Server};
/// use towpath_mux::mux::{Config, Order};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let server = Server::new("line".parse()?, Config::new(Order::Replies))?;
/// let address = server.listen("127.0.0.1:0")?;
/// let mut messages = server.messages(64)?;
/// let echo = tokio::spawn(async move {
///     while let Some(message) = messages.recv().await? {
///         // One that is gone meanwhile is not answered.
///         let _ = messages.reply(Reply::to(&message, message.bytes().clone()));
///     }
///     Ok::<_, std::io::Error>(())
/// });
///
/// let mut client = tokio::net::TcpStream::connect(address).await?;
/// client.write_all(b"hello\n").await?;
/// let mut answer = [0; 6];
/// client.read_exact(&mut answer).await?;
/// assert_eq!(&answer, b"hello\n");
///
/// server.drain(None);
/// echo.await??;
/// # Ok(())
/// # }
/// ```
pub struct Messages {
    driver: Driver,
    epoll: AsyncFd<OwnedFd>,
    timer: Pin<Box<Sleep>>,
    worker: worker::Id,
    batch: Vec<Message>,
    held: VecDeque<Message>,
    /// The task that waits for a message.
    waiting: Option<Waker>,
}

/// Completion of a message, with or without a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The message.
    pub ticket: Ticket,
    /// The reply, if any.
    pub bytes: Option<Bytes>,
}

impl Reply {
    /// A message done with this reply.
    pub fn to(message: &Message, bytes: impl Into<Bytes>) -> Self {
        Self { ticket: message.ticket(), bytes: Some(bytes.into()) }
    }

    /// A message done without a reply.
    pub fn none(message: &Message) -> Self {
        Self { ticket: message.ticket(), bytes: None }
    }
}

impl Server {
    /// Drives the sockets from tasks of the current tokio runtime. This is final. Up to `credit` messages are
    /// held at once.
    ///
    /// # Errors
    ///
    /// Fails if the server has a driver, workers or sockets, or if the epoll descriptor cannot be duplicated.
    ///
    /// # Panics
    ///
    /// Panics outside of a tokio runtime with IO and time enabled.
    pub fn messages(&self, credit: usize) -> io::Result<Messages> {
        let mut driver = self.driver()?;
        let epoll = watch(driver.epoll()?)?;
        let worker = driver.change(|mux, now| mux.clone_worker(credit, now));
        let timer = Box::pin(sleep_until(Instant::now()));
        let (batch, held) = (Vec::new(), VecDeque::new());
        Ok(Messages { driver, epoll, timer, worker, batch, held, waiting: None })
    }
}

impl Messages {
    /// The server.
    pub fn server(&self) -> Server {
        self.driver.server()
    }

    /// Returns the next message, or `None` when the mux has drained.
    ///
    /// This method is cancel safe: no message is lost.
    ///
    /// # Errors
    ///
    /// Fails if epoll_wait(2) fails.
    pub async fn recv(&mut self) -> io::Result<Option<Message>> {
        poll_fn(|cx| Pin::new(&mut *self).poll_next(cx)).await.transpose()
    }

    /// Completes a message, with its reply if any. Bytes that the socket does not accept wait within the
    /// bounds of the mux.
    ///
    /// # Errors
    ///
    /// Returns [`SendError::Gone`] if the message is not held, or if its connection has ended.
    pub fn reply(&mut self, reply: Reply) -> Result<(), SendError> {
        let Reply { ticket, bytes } = reply;
        let worker = self.worker;
        let (sent, more) = self.driver.change(|mux, now| {
            let sent = bytes.map_or(Ok(()), |bytes| mux.reply(worker, ticket, bytes, now));
            let done = mux.done(worker, ticket, now);
            (if done { sent } else { Err(SendError::Gone) }, mux.queued() > 0)
        });
        // The core takes a worker that holds messages for awake and would not wake it.
        if more && let Some(waiting) = self.waiting.take() {
            waiting.wake();
        }
        sent
    }

    /// Takes messages from the core. Returns true if there is one.
    fn take(&mut self) -> bool {
        let Self { driver, worker, batch, held, .. } = self;
        if held.is_empty() {
            driver.change(|mux, now| mux.poll_messages(*worker, now, batch));
            held.extend(batch.drain(..));
        }
        !held.is_empty()
    }

    /// Waits for the core's next timer.
    fn poll_timer(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(time) = self.driver.poll_timeout() else { return Poll::Pending };
        self.timer.as_mut().reset(Instant::from_std(time));
        self.timer.as_mut().poll(cx)
    }
}

impl Stream for Messages {
    type Item = io::Result<Message>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if this.take() {
                return Poll::Ready(this.held.pop_front().map(Ok));
            }
            if this.driver.is_drained() {
                return Poll::Ready(None);
            }
            this.waiting.get_or_insert_with(|| cx.waker().clone()).clone_from(cx.waker());
            // Before the turn: readiness reported after this point is kept.
            let readiness = match this.epoll.poll_read_ready(cx) {
                Poll::Ready(guard) => Some(guard?),
                Poll::Pending => None,
            };
            let turned = this.driver.wait(Some(Duration::ZERO), |_| {})?;
            match readiness {
                _ if turned => {}
                Some(mut guard) => {
                    guard.clear_ready();
                    continue;
                }
                None => ready!(this.poll_timer(cx)),
            }
            if !this.take() {
                // There may be more. Yield to other tasks first.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
    }
}

impl Sink<Reply> for Messages {
    type Error = io::Error;

    fn poll_ready(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// As [`Messages::reply`]. A reply to a connection that has ended is not an error.
    fn start_send(self: Pin<&mut Self>, reply: Reply) -> io::Result<()> {
        let _ = self.get_mut().reply(reply);
        Ok(())
    }

    /// Ready at once. Bytes that the socket has not accepted are sent while messages are polled.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Drains the mux. [`Messages::recv`] returns the remaining messages and then `None`.
    fn poll_close(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.driver.server().drain(None);
        Poll::Ready(Ok(()))
    }
}

impl fmt::Debug for Messages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Messages")
            .field("worker", &self.worker)
            .field("held", &self.held.len())
            .finish_non_exhaustive()
    }
}
