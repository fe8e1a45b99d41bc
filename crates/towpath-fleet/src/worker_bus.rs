//! The bus of [`workers`](crate::workers): a client of NATS core that a front or a worker host runs on a thread of its own.
//!
//! The thread also serves the rings of the workers ([`Side`]), so that a message passes one thread between a ring and the bus. What is
//! ready is published together: a turn of the side comes first, then the messages that it has collected.
//!
//! A session is one connection. When it fails, the side is told, and another one begins after a second.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use async_nats::{Client, Event, Message, ServerError, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::select_all;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::time::{sleep_until, timeout};

use crate::nats::{ANSWER, ClientQueues, RETRY, ServerConfig, SessionError, connect};
use crate::workers::Outgoing;

/// Messages that wait in the client.
const QUEUES: ClientQueues = ClientQueues { inbound: 65_536, outbound: 2048 };

/// Messages that are handled before the rings have their turn.
const MESSAGES: usize = 64;

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

    /// A turn: serves the rings, and adds messages to `out`. Returns true if there was something to do.
    fn turn(&mut self, out: &mut Vec<Outgoing>) -> bool;

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
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        #[expect(
            deprecated,
            reason = "the new function is unsafe; an OwnedFd always names the same descriptor"
        )]
        let ready = AsyncFd::with_interest(side.fd().try_clone_to_owned()?, Interest::READABLE)?;
        let mut bus = Bus { subject, subjects, ready, out: Vec::new() };
        while !side.is_over() {
            let (events, mut happened) = mpsc::channel(64);
            let connecting = connect(config, name, QUEUES, events);
            let Some(connected) = bus.meanwhile(side, connecting).await? else { break };
            let error = match connected {
                Ok(client) => bus.serve(&client, side, &mut happened).await?,
                Err(error) => Some(error),
            };
            let Some(error) = error else { break };
            side.disconnected(&error);
            if bus.meanwhile(side, tokio::time::sleep(RETRY)).await?.is_none() {
                break;
            }
        }
        Ok(())
    })
}

struct Bus<'a> {
    subject: &'a str,
    subjects: &'a [String],
    ready: AsyncFd<std::os::fd::OwnedFd>,
    out: Vec<Outgoing>,
}

impl Bus<'_> {
    /// Serves the rings without a connection until `done` is. `None`: the side is over.
    async fn meanwhile<T>(
        &mut self,
        side: &mut impl Side,
        done: impl Future<Output = T>,
    ) -> io::Result<Option<T>> {
        let mut done = std::pin::pin!(done);
        while !side.is_over() {
            let busy = side.turn(&mut self.out);
            self.out.clear();
            let wait = if busy || !side.arm() { Duration::ZERO } else { until(side) };
            tokio::select! {
                result = &mut done => return Ok(Some(result)),
                ready = self.ready.readable() => ready?.clear_ready(),
                () = tokio::time::sleep(wait) => {}
            }
        }
        Ok(None)
    }

    /// One connection until it ends. `None`: the side is over.
    async fn serve(
        &mut self,
        client: &Client,
        side: &mut impl Side,
        events: &mut mpsc::Receiver<Event>,
    ) -> io::Result<Option<SessionError>> {
        let mut incoming = match self.subscribe(client).await {
            Ok(subscribers) => select_all(subscribers),
            Err(error) => return Ok(Some(error)),
        };
        let info = client.server_info();
        side.connected(&format!("{}:{}", info.host, info.port));
        let skip = self.subject.len() + 1;
        loop {
            let busy = side.turn(&mut self.out);
            if let Some(error) = self.publish(client).await {
                return Ok(Some(error));
            }
            if side.is_over() {
                let _ = timeout(ANSWER, client.flush()).await;
                return Ok(None);
            }
            let again = busy || !side.arm();
            let due = tokio::time::Instant::from_std(side.due());
            tokio::select! {
                biased;
                event = events.recv() => match event {
                    Some(Event::Disconnected | Event::Closed) | None => return Ok(Some(SessionError::Ended)),
                    Some(Event::ServerError(ServerError::AuthorizationViolation)) => return Ok(Some(SessionError::Refused)),
                    Some(Event::ServerError(error)) => side.warning(&format!("the server: {error}")),
                    Some(_) => {}
                },
                message = incoming.next() => {
                    let Some(message) = message else { return Ok(Some(SessionError::Ended)) };
                    let now = Instant::now();
                    take(side, &message, skip, now);
                    // More of them, if they have arrived.
                    for _ in 1..MESSAGES {
                        let Some(Some(message)) = futures_util::FutureExt::now_or_never(incoming.next()) else { break };
                        take(side, &message, skip, now);
                    }
                }
                ready = self.ready.readable() => ready?.clear_ready(),
                // A timer has a resolution of a millisecond.
                () = tokio::task::yield_now(), if again => {}
                () = sleep_until(due), if !again => {}
            }
        }
    }

    async fn subscribe(&self, client: &Client) -> Result<Vec<Subscriber>, SessionError> {
        let failed = |error: &dyn std::fmt::Display| SessionError::Client(error.to_string());
        let mut subscribers = Vec::new();
        for tail in self.subjects {
            let subject = format!("{}.{tail}", self.subject);
            subscribers.push(client.subscribe(subject).await.map_err(|error| failed(&error))?);
        }
        client.flush().await.map_err(|error| failed(&error))?;
        Ok(subscribers)
    }

    async fn publish(&mut self, client: &Client) -> Option<SessionError> {
        for Outgoing { subject, bytes } in self.out.drain(..) {
            let subject = format!("{}.{subject}", self.subject);
            if let Err(error) = client.publish(subject, bytes).await {
                return Some(SessionError::Client(error.to_string()));
            }
        }
        None
    }
}

fn until(side: &impl Side) -> Duration {
    side.due().saturating_duration_since(Instant::now())
}

fn take(side: &mut impl Side, message: &Message, skip: usize, now: Instant) {
    // A front or a host sends neither headers nor a subject for replies; copies of streams have the former, those of consumers the latter.
    let copied = message.headers.is_some() || message.reply.is_some();
    side.message(message.subject.get(skip..).unwrap_or_default(), &message.payload, copied, now);
}
