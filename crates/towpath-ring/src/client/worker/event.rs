//! Connection events of a worker: opened and ended; closing and resetting connections.

use std::time::{Duration, Instant};

use crate::client::recv_error::RecvError;
use crate::client::{Consumer, Frame};
use crate::lane::connection_event::{EndedInfo, OpenedInfo};
use crate::lane::reserve_error::ReserveError;
use crate::shm::header::{Kind, Meta};

use super::Worker;
use super::message::{Connection, Message, connection};

/// The result of [`Worker::recv_event`].
#[derive(Debug)]
#[must_use = "an opened event or a message that is never done is never released"]
pub enum Event {
    /// A connection was opened.
    Opened(Opened),
    /// A message.
    Message(Message),
    /// A connection ended.
    Ended(Ended),
}

/// A connection was opened. The worker may answer the event and send messages to the connection. Like a message, it goes to another
/// worker if this one dies before it is done ([`Worker::done`] of [`message`](Self::message)) or answered.
#[derive(Debug)]
#[must_use = "an opened event that is never done is never released"]
pub struct Opened {
    /// Stands for the event in [`Worker::reply`] and [`Worker::done`]. Has no bytes.
    pub message: Message,
    /// Addresses and names.
    pub info: OpenedInfo,
}

impl Opened {
    /// The connection.
    #[must_use]
    pub fn connection(&self) -> Connection {
        self.message.connection()
    }
}

/// A connection ended, and all of its messages are done. Nothing more of it follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The connection.
    pub connection: Connection,
    /// Time of the event, in nanoseconds since the epoch.
    pub time: u64,
    /// The cause.
    pub info: EndedInfo,
}

impl Worker {
    /// Receives the next event; waits for it. Opened and ended connections are reported if the worker attached with
    /// [`Options::events`](crate::Options::events). One worker gets *opened*, before the connection's messages (in the orders `sticky` and
    /// `serial`, no worker gets a message before *opened* is done). *Ended* goes to each worker that got *opened* or a message of the
    /// connection, after all messages of the connection are done. None if the multiplexor ends this worker.
    ///
    /// A server that speaks first, and closes the connection after `QUIT`:
    ///
    /// ```no_run
    /// use towpath_ring::{Event, Options, Worker};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let mut worker = Worker::attach_env_with(&Options { events: true, ..Options::default() })?;
    /// while let Some(event) = worker.recv_event()? {
    ///     match event {
    ///         Event::Opened(opened) => {
    ///             worker.reply(&opened.message, b"220 ready\r\n")?;
    ///             worker.done(opened.message);
    ///         }
    ///         Event::Message(message) => {
    ///             worker.reply(&message, b"221 bye\r\n")?;
    ///             worker.close_after(&message)?;
    ///             worker.done(message);
    ///         }
    ///         Event::Ended(ended) => println!("{:?}: {}", ended.connection, ended.info.text),
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn recv_event(&mut self) -> Result<Option<Event>, RecvError> {
        self.next_event(Consumer::recv, || false)
    }

    /// Receives the next event; waits at most `timeout`. None also after the timeout, as with
    /// [`recv_timeout`](Self::recv_timeout).
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn recv_event_timeout(&mut self, timeout: Duration) -> Result<Option<Event>, RecvError> {
        let end = Instant::now().checked_add(timeout);
        self.next_event(|queue| queue.recv_until(end), || end.is_some_and(|end| Instant::now() >= end))
    }

    /// Receives the next event, if it is published.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), without poll(2).
    pub fn try_recv_event(&mut self) -> Result<Option<Event>, RecvError> {
        self.next_event(Consumer::try_recv, || true)
    }

    fn next_event(
        &mut self,
        recv: impl FnMut(&mut Consumer) -> Result<Option<Frame>, RecvError>,
        is_over: impl Fn() -> bool,
    ) -> Result<Option<Event>, RecvError> {
        let wanted = |kind: Kind| kind.is_message() || matches!(kind, Kind::OPENED | Kind::ENDED);
        let Some(frame) = self.next(recv, is_over, wanted)? else { return Ok(None) };
        let (header, payload) = (*frame.header(), self.queue.payload(&frame));
        let damaged = || RecvError::Damaged("a connection event with wrong lengths".into());
        match header.kind {
            Kind::OPENED => {
                let info = OpenedInfo::parse(header.mark, payload).ok_or_else(damaged)?;
                Ok(Some(Event::Opened(Opened { message: Message { frame }, info })))
            }
            Kind::ENDED => {
                let info = EndedInfo::parse(header.mark, header.hash, payload).ok_or_else(damaged)?;
                let ended = Ended { connection: connection(&frame), time: header.time, info };
                self.queue.verdict(frame, crate::Verdict::Pass);
                Ok(Some(Event::Ended(ended)))
            }
            _ => Ok(Some(Event::Message(Message { frame }))),
        }
    }

    /// Closes the connection of a message after its answer, and after everything that was sent to the connection before. Call it after
    /// [`reply`](Self::reply). Later messages and answers for the connection are dropped. Waits while the ring is full.
    ///
    /// A worker may close the connections that it may send to ([`forward`](Self::forward)); otherwise the multiplexor detaches it.
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn close_after(&mut self, message: &Message) -> Result<(), ReserveError> {
        self.close_after_on(message.connection(), message)
    }

    /// As [`close_after`](Self::close_after), for a message of [`recall`](Self::recall), which does not know its connection.
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn close_after_on(&mut self, connection: Connection, message: &Message) -> Result<(), ReserveError> {
        self.end(Kind::CLOSE, connection, message.frame.seq().0)
    }

    /// Closes a connection when everything that was sent to it before has left, as [`close_after`](Self::close_after).
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn close_connection(&mut self, connection: Connection) -> Result<(), ReserveError> {
        self.end(Kind::CLOSE, connection, 0)
    }

    /// Resets a connection at once: the peer sees ECONNRESET over TCP. What was not sent is dropped. Rights are those of
    /// [`close_after`](Self::close_after).
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn reset_connection(&mut self, connection: Connection) -> Result<(), ReserveError> {
        self.end(Kind::RESET, connection, 0)
    }

    pub(super) fn end(
        &mut self,
        kind: Kind,
        Connection { index: port, generation: group }: Connection,
        mark: u32,
    ) -> Result<(), ReserveError> {
        self.queue.send(&[], &Meta { kind, port, group, mark, ..Meta::default() })
    }
}
