//! Under tokio: messages are a [`Stream`], and their answers go into a [`Sink`].
//!
//! What: [`Messages`] drives the sockets from the task that polls it, and is the mux's only worker: it takes messages as
//! they are asked for, up to as many as it may hold. Nothing is read or written while nobody polls it. Work that takes long
//! belongs into tasks of its own, which say their answers to the one that has the messages, by a channel for example.
//!
//! Races: the runtime says once that the server's epoll has something. That is forgotten only when a look behind it found nothing,
//! and not if it was said anew meanwhile. A task that waits for messages because it holds as many as it may is woken by what is
//! answered, which another task may do when they are split (`Messages::waiting`).

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
/// use towpath_mux::mux::Config;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let server = Server::new("line".parse()?, Config::default())?;
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
    /// Who found no message.
    waiting: Option<Waker>,
}

/// What became of a message: it is done, and answered or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Which message.
    pub ticket: Ticket,
    /// What answers it, on the connection that it came from; `None` when nothing does.
    pub bytes: Option<Bytes>,
}

impl Reply {
    /// These bytes answer it.
    pub fn to(message: &Message, bytes: impl Into<Bytes>) -> Self {
        Self { ticket: message.ticket(), bytes: Some(bytes.into()) }
    }

    /// It is done without an answer.
    pub fn none(message: &Message) -> Self {
        Self { ticket: message.ticket(), bytes: None }
    }
}

impl Server {
    /// Becomes the one who drives the sockets, for good, from a task of the tokio runtime that this is called in. Up to `credit`
    /// messages are in its hands at once.
    ///
    /// # Errors
    ///
    /// When the server has a driver or workers already, or the system gives no descriptor.
    ///
    /// # Panics
    ///
    /// Outside of a runtime that has IO and time.
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
    /// The server that they come from.
    pub fn server(&self) -> Server {
        self.driver.server()
    }

    /// The next message; `None` when the mux has drained.
    ///
    /// Cancel safe: a message that it has not given is there the next time.
    ///
    /// # Errors
    ///
    /// When epoll fails.
    pub async fn recv(&mut self) -> io::Result<Option<Message>> {
        poll_fn(|cx| Pin::new(&mut *self).poll_next(cx)).await.transpose()
    }

    /// A message is done, with its answer if it has one. What the socket does not take waits, within the mux's bounds.
    ///
    /// # Errors
    ///
    /// [`SendError::Gone`] when this does not hold the message, or its connection has ended.
    pub fn reply(&mut self, reply: Reply) -> Result<(), SendError> {
        let Reply { ticket, bytes } = reply;
        let worker = self.worker;
        let (sent, more) = self.driver.change(|mux, now| {
            let sent = bytes.map_or(Ok(()), |bytes| mux.reply(worker, ticket, bytes, now));
            let done = mux.done(worker, ticket, now);
            (if done { sent } else { Err(SendError::Gone) }, mux.queued() > 0)
        });
        // To the core it is awake while it holds messages: nothing else says that it may have more.
        if more && let Some(waiting) = self.waiting.take() {
            waiting.wake();
        }
        sent
    }

    /// Takes more from the core; whether there is a message now.
    fn take(&mut self) -> bool {
        let Self { driver, worker, batch, held, .. } = self;
        if held.is_empty() {
            driver.change(|mux, now| mux.poll_messages(*worker, now, batch));
            held.extend(batch.drain(..));
        }
        !held.is_empty()
    }

    /// Waits until the time of the core's next timer; ready when there is one and it has come.
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
            // Before the look: what comes behind that is told again.
            let told = match this.epoll.poll_read_ready(cx) {
                Poll::Ready(guard) => Some(guard?),
                Poll::Pending => None,
            };
            let turned = this.driver.wait(Some(Duration::ZERO), |_| {})?;
            match told {
                _ if turned => {}
                Some(mut guard) => {
                    guard.clear_ready();
                    continue;
                }
                None => ready!(this.poll_timer(cx)),
            }
            if !this.take() {
                // There may be more; others have a turn first.
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

    /// As [`Messages::reply`]; an answer to who is not there any more is no error.
    fn start_send(self: Pin<&mut Self>, reply: Reply) -> io::Result<()> {
        let _ = self.get_mut().reply(reply);
        Ok(())
    }

    /// Ready at once: what the socket has not taken leaves as messages are asked for.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Drains the mux: [`Messages::recv`] gives what was asked, and then `None`.
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
