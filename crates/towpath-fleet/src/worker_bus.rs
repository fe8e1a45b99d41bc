//! The bus of [`workers`](crate::workers): a client of NATS core that a front or a worker host runs on a thread of its own.
//!
//! The thread also serves the rings of the workers ([`Side`]), so that a message passes one thread between a ring and the bus. What is
//! ready is published together: a turn of the side comes first, then the messages that it has collected.
//!
//! A session is one connection. When it fails, the side is told, and another one begins after a second.
//!
//! The side never waits for the server. What the client does not take waits here, in the `Outbox`; the client takes more when the server does.
//!
//! Memory, inbound: the messages that the client has read are taken out of it at once, and handed to the side before it reads again, which
//! it does at most 128 times, for 64 KiB each. The client drops messages of a subscription above `QUEUES`, which are more than that. Then
//! the session ends, so that every front and host knows which messages have not arrived: a piece that is dropped would not be missed
//! before the next one of its session comes.
//!
//! Memory, outbound: from `ROOM` on, a side adds no pieces of sessions, so that their rings wait. What remains are answers to the messages
//! of others. If more than `OUTBOUND_BYTES` wait, the session ends.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::os::fd::BorrowedFd;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use async_nats::message::OutboundMessage;
use async_nats::{Client, Event, Message, ServerError, Subject, Subscriber};
use bytes::Bytes;
use futures_util::stream::{SelectAll, select_all};
use futures_util::{FutureExt, SinkExt, StreamExt};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::task::coop::unconstrained;
use tokio::time::{sleep_until, timeout};

use crate::nats::{ClientQueues, RETRY, ServerConfig, SessionError, connect};
use crate::workers::Outgoing;

/// Messages that wait in the client. In: those of a turn of reading, 128 * 64 KiB in messages of at least 16 bytes. Out: 16 MiB in pieces of
/// 64 KiB; others wait in the outbox.
const QUEUES: ClientQueues = ClientQueues { inbound: 1 << 19, outbound: 256 };

/// Bytes in the outbox above which a side adds no pieces of sessions.
const ROOM: usize = 8 << 20;

/// Bytes in the outbox above which the session ends.
const OUTBOUND_BYTES: usize = 128 << 20;

/// What a message in the outbox counts, besides the bytes of its subject and its content.
const OVERHEAD: usize = 64;
const _: () = assert!(OVERHEAD >= size_of::<(Subject, Bytes)>());

/// Time for the last messages.
const LAST: Duration = Duration::from_secs(1);

/// Messages that are handled before the rings have their turn.
const MESSAGES: usize = 64;

/// How long the thread polls after a message before it sleeps, with a yield of its CPU in every other turn. The answer of a worker with
/// little work comes earlier, and no thread has to be woken for it. A round trip has ten wake-ups, each of 30 to 40 us on a virtual machine.
const POLL: Duration = Duration::from_micros(400);

/// A front or a worker host.
pub trait Side {
    /// A connection to this server has begun.
    fn connected(&mut self, server: &str);

    /// There is no connection.
    fn disconnected(&mut self, error: &SessionError);

    /// The server refuses a subject.
    fn warning(&mut self, text: &str);

    /// A message that came at `now`. `subject` is what follows the configured subject. `copied`: not sent by a front or host, but by a
    /// stream or consumer.
    fn message(&mut self, subject: &str, bytes: &Bytes, copied: bool, now: Instant);

    /// A turn: serves the rings, and adds messages to `out`. `readable`: [`fd`](Self::fd) was readable since the last turn. `room`: bytes of
    /// pieces that may be added; the last one may be longer than the rest of the room. Without room, the rings wait.
    fn turn(&mut self, readable: bool, room: usize, out: &mut Vec<Outgoing>);

    /// Prepares a sleep. Returns false if there is something to do.
    fn arm(&mut self) -> bool;

    /// When the next turn is due.
    fn due(&self) -> Instant;

    /// A descriptor that is readable when there is something to do after [`arm`](Self::arm).
    fn fd(&self) -> BorrowedFd<'_>;

    /// Returns true if the thread ends.
    fn is_over(&self) -> bool;
}

/// Serves `side` until it is over. `subjects` follow `subject`.
///
/// # Errors
/// The thread has no runtime, or the descriptor cannot be watched.
pub fn run(
    config: &ServerConfig,
    name: &str,
    subject: &str,
    subjects: &[String],
    side: &mut impl Side,
) -> io::Result<()> {
    let mut wait = Duration::ZERO;
    while !side.is_over() {
        // One for each session: its end ends the client, also one that cannot send what it has.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let session = async {
            #[expect(
                deprecated,
                reason = "the new function is unsafe; an OwnedFd always names the same descriptor"
            )]
            let ready = AsyncFd::with_interest(side.fd().try_clone_to_owned()?, Interest::READABLE)?;
            let outbox = Outbox::default();
            let mut bus = Bus { subject, subjects, ready, readable: true, out: Vec::new(), outbox };
            if bus.meanwhile(side, tokio::time::sleep(wait)).await?.is_none() {
                return Ok(None);
            }
            let (events, mut happened) = mpsc::channel(64);
            match bus.meanwhile(side, connect(config, name, QUEUES, events)).await? {
                Some(Ok(client)) => bus.serve(client, side, &mut happened).await,
                Some(Err(error)) => Ok(Some(error)),
                None => Ok(None),
            }
        };
        let ended: io::Result<_> = runtime.block_on(session);
        // A lookup of the server's name may still run.
        runtime.shutdown_background();
        let Some(error) = ended? else { break };
        side.disconnected(&error);
        wait = RETRY;
    }
    Ok(())
}

struct Bus<'a> {
    subject: &'a str,
    subjects: &'a [String],
    ready: AsyncFd<std::os::fd::OwnedFd>,
    /// It was readable since the last turn.
    readable: bool,
    /// Of one turn.
    out: Vec<Outgoing>,
    outbox: Outbox,
}

impl Bus<'_> {
    fn turn(&mut self, side: &mut impl Side) {
        side.turn(std::mem::take(&mut self.readable), self.outbox.room(), &mut self.out);
    }

    /// Serves the rings without a connection until `done` is. `None`: the side is over.
    async fn meanwhile<T>(
        &mut self,
        side: &mut impl Side,
        done: impl Future<Output = T>,
    ) -> io::Result<Option<T>> {
        let mut done = std::pin::pin!(done);
        while !side.is_over() {
            self.turn(side);
            self.out.clear();
            let again = !side.arm();
            let due = tokio::time::Instant::from_std(side.due());
            tokio::select! {
                result = &mut done => return Ok(Some(result)),
                ready = self.ready.readable() => {
                    ready?.clear_ready();
                    self.readable = true;
                }
                // Not a sleep: one without a duration would not let the runtime look at the descriptor.
                () = tokio::task::yield_now(), if again => {}
                () = sleep_until(due), if !again => {}
            }
        }
        Ok(None)
    }

    /// One connection until it ends. `None`: the side is over.
    async fn serve(
        &mut self,
        mut client: Client,
        side: &mut impl Side,
        events: &mut mpsc::Receiver<Event>,
    ) -> io::Result<Option<SessionError>> {
        let mut incoming = match self.subscribe(&client).await {
            Ok(subscribers) => select_all(subscribers),
            Err(error) => return Ok(Some(error)),
        };
        let info = client.server_info();
        side.connected(&format!("{}:{}", info.host, info.port));
        let skip = self.subject.len() + 1;
        let mut inbox = Inbox::default();
        let (mut polls, mut yielded) = (Instant::now(), false);
        loop {
            let came = inbox.pass_on(side, skip);
            self.turn(side);
            let busy = came || !self.out.is_empty();
            self.outbox.add(self.subject, &mut self.out);
            let full = self.outbox.room() == 0;
            if let Err(error) = self.outbox.send(&mut client).await {
                return Ok(Some(error));
            }
            if side.is_over() {
                // Otherwise the client would keep the messages of the server.
                drop(incoming);
                let _ = timeout(LAST, self.outbox.send_all(&mut client)).await;
                return Ok(None);
            }
            if !inbox.messages.is_empty() {
                continue;
            }
            let now = Instant::now();
            if busy {
                polls = now + POLL;
            }
            let poll = now < polls;
            // Other processes come first, but not before the client has written what it was given, or read what the last turn has found: its
            // task runs after this one.
            yielded = poll && !busy && !yielded;
            if yielded {
                std::thread::yield_now();
            }
            // Also after a turn with much to do, or without room: what is left keeps the side from a sleep.
            let again = poll || !side.arm() || full && self.outbox.room() > 0;
            let due = tokio::time::Instant::from_std(side.due());
            let waits = !self.outbox.messages.is_empty();
            tokio::select! {
                biased;
                event = events.recv() => match event {
                    Some(Event::Disconnected | Event::Closed) | None => return Ok(Some(SessionError::Ended)),
                    Some(Event::ServerError(ServerError::AuthorizationViolation)) => return Ok(Some(SessionError::Refused)),
                    Some(Event::ServerError(error)) => side.warning(&format!("the server: {error}")),
                    Some(Event::SlowConsumer(_)) => return Ok(Some(SessionError::Behind)),
                    Some(_) => {}
                },
                // Before the messages, so that many of them do not delay the rings.
                ready = self.ready.readable() => {
                    ready?.clear_ready();
                    self.readable = true;
                }
                message = incoming.next() => match message {
                    Some(message) => inbox.take(message, &mut incoming),
                    None => return Ok(Some(SessionError::Ended)),
                },
                // An error is found by the next sending.
                _ = poll_fn(|context| client.poll_ready_unpin(context)), if waits => {}
                // A timer has a resolution of a millisecond.
                () = tokio::task::yield_now(), if again => {}
                () = sleep_until(due), if !again => {}
            }
        }
    }

    /// Does not wait: the client has room for the subscriptions, and sends them before all messages.
    async fn subscribe(&self, client: &Client) -> Result<Vec<Subscriber>, SessionError> {
        let mut subscribers = Vec::new();
        for tail in self.subjects {
            let subject = format!("{}.{tail}", self.subject);
            let subscribed = client.subscribe(subject).await;
            subscribers.push(subscribed.map_err(|error| SessionError::Client(error.to_string()))?);
        }
        Ok(subscribers)
    }
}

/// Messages that the client has not taken.
#[derive(Debug, Default)]
struct Outbox {
    messages: VecDeque<(Subject, Bytes)>,
    /// What they count.
    bytes: usize,
}

impl Outbox {
    /// Bytes of pieces that a side may add.
    fn room(&self) -> usize {
        ROOM.saturating_sub(self.bytes)
    }

    fn add(&mut self, subject: &str, out: &mut Vec<Outgoing>) {
        for Outgoing { subject: tail, bytes } in out.drain(..) {
            let subject = Subject::from(format!("{subject}.{tail}"));
            self.bytes += cost(&subject, &bytes);
            self.messages.push_back((subject, bytes));
        }
    }

    /// Gives messages to the client, as many as it takes now. Does not wait.
    async fn send(&mut self, client: &mut Client) -> Result<(), SessionError> {
        unconstrained(poll_fn(|context| Poll::Ready(self.send_some(client, context)))).await?;
        if self.bytes > OUTBOUND_BYTES { Err(SessionError::Behind) } else { Ok(()) }
    }

    fn send_some(&mut self, client: &mut Client, context: &mut Context<'_>) -> Result<(), SessionError> {
        let failed = |error: async_nats::PublishError| SessionError::Client(error.to_string());
        while !self.messages.is_empty() {
            match client.poll_ready_unpin(context) {
                Poll::Ready(ready) => ready.map_err(failed)?,
                Poll::Pending => break,
            }
            if let Some((subject, payload)) = self.messages.pop_front() {
                self.bytes -= cost(&subject, &payload);
                let message = OutboundMessage { subject, payload, reply: None, headers: None };
                client.start_send_unpin(message).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Waits until the server has all of them.
    async fn send_all(&mut self, client: &mut Client) -> Result<(), SessionError> {
        poll_fn(|context| match self.send_some(client, context) {
            Ok(()) if !self.messages.is_empty() => Poll::Pending,
            sent => Poll::Ready(sent),
        })
        .await?;
        client.flush().await.map_err(|error| SessionError::Client(error.to_string()))
    }
}

/// What a message in the outbox counts.
fn cost(subject: &Subject, bytes: &Bytes) -> usize {
    OVERHEAD + subject.len() + bytes.len()
}

/// Messages that the client has read and the side has not got.
#[derive(Debug, Default)]
struct Inbox {
    messages: VecDeque<Message>,
}

impl Inbox {
    /// Takes a message and all others that the client has.
    fn take(&mut self, first: Message, incoming: &mut SelectAll<Subscriber>) {
        let mut next = Some(first);
        while let Some(message) = next {
            self.messages.push_back(message);
            next = unconstrained(incoming.next()).now_or_never().flatten();
        }
    }

    /// Gives up to [`MESSAGES`] of them to the side. Returns true if there was one. `skip`: the length of the configured subject, and a dot.
    fn pass_on(&mut self, side: &mut impl Side, skip: usize) -> bool {
        if self.messages.is_empty() {
            return false;
        }
        let now = Instant::now();
        for message in self.messages.drain(..MESSAGES.min(self.messages.len())) {
            // A front or a host sends neither headers nor a subject for replies; copies of streams have the former, those of consumers the
            // latter.
            let copied = message.headers.is_some() || message.reply.is_some();
            side.message(message.subject.get(skip..).unwrap_or_default(), &message.payload, copied, now);
        }
        true
    }
}

#[cfg(test)]
mod tests;
