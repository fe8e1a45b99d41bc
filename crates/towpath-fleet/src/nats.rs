//! The bus: a client of NATS on a thread of its own.
//!
//! Subjects of the group `G`, for the gates `A` and `B`:
//!
//! | subject | from | content |
//! |---|---|---|
//! | `towpath.G.states.A` | A | batches of A |
//! | `towpath.G.sync.B.A` | A | requests of A to B |
//! | `towpath.G.bulk.B.A` | A | chunks of A for B |
//!
//! The last word is the sender, so that permissions of the server authenticate it. The stream `towpath-G` has the batches of the last
//! minute in memory. Without JetStream, or without permission for it, snapshots fill all gaps.
//!
//! A gate that may create a stream could make the server send its messages once more under the name of another gate. Gates send messages
//! without headers and without a subject for replies. Copies by a stream have the former, and copies by a consumer the latter: they are
//! refused. A stream that takes messages from elsewhere, or changes their subjects, is not used.
//!
//! A session is one connection. When it fails, the thread begins another one after one second. Channels between this thread and the caller
//! are bounded, and the caller never waits for the network.
//!
//! Memory: a server that does not read fills `OUTBOUND` and the client, and further messages go back to the caller, which counts them. The
//! thread takes messages of peers out of the client at once, so that no more wait there than one turn of the client reads from the socket.
//! If the caller is slower, `INBOUND_BYTES` wait for it, and others are dropped and counted: the replica finds the gap.

use std::path::PathBuf;
use std::time::Duration;
use std::{fs, io};

use async_nats::jetstream::{self, consumer, stream};
use async_nats::{Client, ConnectErrorKind, ConnectOptions, Event, Message, ServerError, Subscriber};
use futures_util::StreamExt;
use thiserror::Error;
use tokio::sync::mpsc;
use tokio::task::coop::unconstrained;
use tokio::time::timeout;

pub use self::group::{GroupBus, GroupIncoming};
use self::thread::{ClientThread, Gone, Rooms, Told};
use crate::{Channel, Output};

mod group;
mod tables;
mod thread;

/// Time between two sessions.
pub(crate) const RETRY: Duration = Duration::from_secs(1);

/// Time for a connection, and for an answer of the server.
pub(crate) const ANSWER: Duration = Duration::from_secs(3);

/// Messages that wait for the server. A chunk, the longest one, has up to 128 KiB: they are at most 32 MiB, and half as much in batches.
const OUTBOUND: usize = 256;

/// Messages and bytes that wait for the caller: three seconds of 200,000 new states a second.
const INBOUND: usize = 16_384;
const INBOUND_BYTES: usize = 64 << 20;

/// Messages that wait in a client of NATS.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientQueues {
    /// Of each subscription. The client drops others and tells so.
    pub(crate) inbound: usize,
    /// For the server, with subscriptions and the like. With more, the sender waits.
    pub(crate) outbound: usize,
}

/// Few messages for the server, because [`OUTBOUND`] wait before them. They have 8 MiB at most.
const QUEUES: ClientQueues = ClientQueues { inbound: 16_384, outbound: 64 };

/// Time and bytes of the stream.
const STREAM_AGE: Duration = Duration::from_secs(60);
const STREAM_BYTES: i64 = 256 << 20;

/// Longest replay.
const REPLAY: Duration = Duration::from_secs(2);

/// How a server is reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerConfig {
    /// `nats://HOST:PORT` or `tls://HOST:PORT`; the first that answers is used.
    pub servers: Vec<String>,
    /// A file of credentials, or with the seed of an nkey.
    pub credentials: Option<PathBuf>,
    /// TLS is required.
    pub tls: bool,
    /// Certificates of authorities besides those of the system.
    pub tls_ca: Option<PathBuf>,
    /// The certificate and the key of this client.
    pub tls_identity: Option<(PathBuf, PathBuf)>,
}

/// How the group is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BusConfig {
    /// The server.
    pub server: ServerConfig,
    /// The group.
    pub group: String,
    /// This gate.
    pub gate: String,
}

/// Why a session did not begin, or ended.
#[derive(Debug, Error)]
pub enum SessionError {
    /// The credentials cannot be read.
    #[error("credentials {}: {source}", file.display())]
    Credentials {
        /// The file.
        file: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The server refused the credentials.
    #[error(
        "the server refuses this client (authorization violation); check `credentials` and the users of the server"
    )]
    Refused,
    /// No server accepts a connection.
    #[error("cannot connect to {servers}: {source}")]
    Connect {
        /// The servers.
        servers: String,
        /// The error.
        source: async_nats::ConnectError,
    },
    /// TLS failed.
    #[error("TLS with {servers}: {source}; check `tls-ca`, `tls-certificate` and the server's certificate")]
    Tls {
        /// The servers.
        servers: String,
        /// The error.
        source: async_nats::ConnectError,
    },
    /// The connection ended.
    #[error("the connection ended")]
    Ended,
    /// More messages wait than may.
    #[error("more than 128 MiB of messages wait; check the load of the server and the network to it")]
    Behind,
    /// The client failed.
    #[error("{0}")]
    Client(String),
}

/// What the bus tells the caller.
#[derive(Debug)]
pub enum Incoming {
    /// A session has begun, with this server.
    Connected(String),
    /// There is no session.
    Away(SessionError),
    /// The server refuses a subject, or has no stream: the group works in part.
    Warning(String),
    /// A message that was refused: the server has sent it under this name, not the gate.
    Republished {
        /// The gate that the subject names.
        from: String,
    },
    /// The stream did not send all batches of a peer.
    ReplayFailed {
        /// The peer.
        peer: String,
        /// The reason.
        error: String,
    },
    /// A message.
    Message {
        /// How it came.
        channel: Channel,
        /// The gate that sent it.
        from: String,
        /// The message.
        bytes: Vec<u8>,
    },
}

/// The client of states. Dropping it ends its thread.
#[derive(Debug)]
pub struct Bus(ClientThread<Output, Incoming>);

impl Bus {
    /// Starts the thread, which calls `begin` first.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(config: BusConfig, begin: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let run = async move |outputs: &mut mpsc::Receiver<Output>, caller: &Caller| {
            Incoming::Away(session(&config, outputs, caller).await)
        };
        let rooms = Rooms { outbound: OUTBOUND, inbound: INBOUND, inbound_bytes: INBOUND_BYTES };
        ClientThread::start("fleet-nats", rooms, begin, run).map(Self)
    }

    /// Gives a message to the client.
    ///
    /// # Errors
    /// The client has no room; returns the message.
    pub fn send(&self, output: Output) -> Result<(), Output> {
        self.0.send(output)
    }

    /// Returns true if half of the client's room is free.
    pub fn has_room(&self) -> bool {
        self.0.has_room()
    }

    /// Waits for the next message at most for `wait`.
    pub fn receive(&self, wait: Duration) -> Option<Incoming> {
        self.0.receive(wait)
    }

    /// The number of messages that were dropped since the last call, because too much waited for the caller.
    pub fn take_dropped(&self) -> u64 {
        self.0.take_dropped()
    }
}

type Caller = Told<Incoming>;

impl Caller {
    /// A message that a gate has sent. It is dropped if there is no room.
    fn message(&self, channel: Channel, message: &Message) -> Result<(), Gone> {
        // A copy of a consumer.
        let copied = message.reply.is_some();
        let (incoming, bytes) = read(channel, message, copied);
        self.offer(incoming, bytes)
    }

    /// A message of the stream. Waits for room: the stream keeps those that follow.
    async fn replayed(&self, channel: Channel, message: &Message) -> Result<(), Gone> {
        let (incoming, bytes) = read(channel, message, false);
        self.tell_bytes(incoming, bytes).await
    }
}

/// What the caller is told of a message, and its bytes.
fn read(channel: Channel, message: &Message, copied: bool) -> (Incoming, usize) {
    let from = sender(message);
    let bytes = message.payload.len() + from.len();
    // A copy of another stream has headers.
    match copied || message.headers.is_some() {
        true => (Incoming::Republished { from }, bytes),
        false => (Incoming::Message { channel, from, bytes: message.payload.to_vec() }, bytes),
    }
}

/// The gate that sent a message: the last word of the subject.
fn sender(message: &Message) -> String {
    message.subject.rsplit('.').next().unwrap_or_default().to_owned()
}

/// One connection, until it ends.
async fn session(config: &BusConfig, outputs: &mut mpsc::Receiver<Output>, caller: &Caller) -> SessionError {
    let (events, mut happened) = mpsc::channel(64);
    let client = match connect(&config.server, &config.gate, QUEUES, events).await {
        Ok(client) => client,
        Err(error) => return error,
    };
    match talk(config, &client, outputs, caller, &mut happened).await {
        Ok(()) => SessionError::Ended,
        Err(error) => error,
    }
}

pub(crate) async fn connect(
    config: &ServerConfig,
    name: &str,
    queues: ClientQueues,
    events: mpsc::Sender<Event>,
) -> Result<Client, SessionError> {
    let mut options = ConnectOptions::new()
        .name(format!("towpath {name}"))
        .connection_timeout(ANSWER)
        .ping_interval(RETRY)
        // Its own batches do not come back.
        .no_echo()
        // A session is one connection.
        .max_reconnects(1)
        .subscription_capacity(queues.inbound)
        .client_capacity(queues.outbound)
        .event_callback(move |event| {
            let events = events.clone();
            async move {
                // If the channel is full, the session has not looked at events that end it.
                let _ = events.try_send(event);
            }
        });
    if let Some(file) = &config.credentials {
        let wrong = |source| SessionError::Credentials { file: file.clone(), source };
        let text = fs::read_to_string(file).map_err(wrong)?;
        // A seed of a user begins with SU; credentials have it between two lines.
        options = match text.trim() {
            seed if seed.starts_with("SU") => options.nkey(seed.to_owned()),
            // The client needs the end of the last line.
            _ => options.credentials(&(text + "\n")).map_err(wrong)?,
        };
    }
    // The client does not take them from the addresses.
    if let Some((user, password)) = config.servers.iter().find_map(|server| user_of(server)) {
        options = options.user_and_password(user.to_owned(), password.to_owned());
    }
    if let Some(ca) = &config.tls_ca {
        options = options.add_root_certificates(ca.clone());
    }
    if let Some((certificate, key)) = &config.tls_identity {
        options = options.add_client_certificate(certificate.clone(), key.clone());
    }
    if config.tls {
        options = options.require_tls(true);
    }
    let servers =
        || config.servers.iter().map(|server| without_password(server)).collect::<Vec<_>>().join(", ");
    options.connect(&config.servers[..]).await.map_err(|source| match source.kind() {
        ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication => SessionError::Refused,
        ConnectErrorKind::Tls => SessionError::Tls { servers: servers(), source },
        // The client reports a handshake that fails as an error of the socket.
        _ if source.to_string().contains("certificate") => SessionError::Tls { servers: servers(), source },
        _ => SessionError::Connect { servers: servers(), source },
    })
}

/// The user and the password in the address of a server.
fn user_of(server: &str) -> Option<(&str, &str)> {
    let (_, rest) = server.split_once("://")?;
    rest.rsplit_once('@')?.0.split_once(':')
}

/// The address of a server as a log may show it.
fn without_password(server: &str) -> String {
    match (server.split_once("://"), server.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, host))) => format!("{scheme}://{host}"),
        (None, Some((_, host))) => host.to_owned(),
        _ => server.to_owned(),
    }
}

async fn talk(
    config: &BusConfig,
    client: &Client,
    outputs: &mut mpsc::Receiver<Output>,
    caller: &Caller,
    events: &mut mpsc::Receiver<Event>,
) -> Result<(), SessionError> {
    let BusConfig { group, gate, .. } = config;
    let failed = |error: &dyn std::fmt::Display| SessionError::Client(error.to_string());
    let subscribe = async |subject: String| client.subscribe(subject).await.map_err(|error| failed(&error));
    let subscribers = [
        subscribe(format!("towpath.{group}.states.*")).await?,
        subscribe(format!("towpath.{group}.sync.{gate}.*")).await?,
        subscribe(format!("towpath.{group}.bulk.{gate}.*")).await?,
    ];
    client.flush().await.map_err(|error| failed(&error))?;
    let stream = match timeout(ANSWER, open_stream(client, group)).await {
        Ok(Ok(stream)) => Some(stream),
        Ok(Err(error)) => {
            let _ = caller.tell(Incoming::Warning(no_stream(&error))).await;
            None
        }
        Err(_) => {
            let _ = caller.tell(Incoming::Warning(no_stream(&"no answer"))).await;
            None
        }
    };
    let info = client.server_info();
    let _ = caller.tell(Incoming::Connected(format!("{}:{}", info.host, info.port))).await;
    // Neither a server that does not read nor a caller that does not keeps the others from their work.
    let ended = tokio::select! {
        // Not interrupted while there are messages: what waits in the client has no bound in bytes.
        Gone = unconstrained(receive(subscribers, caller)) => Ok(()),
        sent = send(config, client, stream, outputs, caller) => sent,
        ended = watch(events, caller) => ended,
    };
    if ended.is_ok() {
        let _ = timeout(ANSWER, client.flush()).await;
    }
    ended
}

/// Passes the messages of gates to the caller until that has gone.
async fn receive([mut states, mut requests, mut chunks]: [Subscriber; 3], caller: &Caller) -> Gone {
    loop {
        let told = tokio::select! {
            Some(message) = states.next() => caller.message(Channel::States, &message),
            Some(message) = requests.next() => caller.message(Channel::Request, &message),
            Some(message) = chunks.next() => caller.message(Channel::Chunk, &message),
            // The client has ended, as its events say.
            else => std::future::pending().await,
        };
        if told.is_err() {
            return Gone;
        }
    }
}

/// Sends what the caller has for the server, until the caller has gone.
async fn send(
    config: &BusConfig,
    client: &Client,
    stream: Option<stream::Stream>,
    outputs: &mut mpsc::Receiver<Output>,
    caller: &Caller,
) -> Result<(), SessionError> {
    while let Some(output) = outputs.recv().await {
        match (output, &stream) {
            (Output::Replay { peer }, Some(stream)) => {
                let subject = format!("towpath.{}.states.{peer}", config.group);
                tokio::spawn(replay_within(stream.clone(), subject, peer, caller.clone()));
            }
            (output, _) => publish(config, client, output).await?,
        }
    }
    Ok(())
}

/// Waits for the end of the connection, or of the caller.
async fn watch(events: &mut mpsc::Receiver<Event>, caller: &Caller) -> Result<(), SessionError> {
    loop {
        let told = match events.recv().await {
            Some(Event::Disconnected | Event::Closed) | None => return Err(SessionError::Ended),
            Some(Event::ServerError(ServerError::AuthorizationViolation)) => {
                return Err(SessionError::Refused);
            }
            Some(Event::ServerError(error)) => {
                caller.tell(Incoming::Warning(format!("the server: {error}"))).await
            }
            Some(Event::SlowConsumer(_)) => {
                caller.dropped();
                Ok(())
            }
            Some(_) => Ok(()),
        };
        if told.is_err() {
            return Ok(());
        }
    }
}

fn no_stream(error: &dyn std::fmt::Display) -> String {
    format!(
        "no stream, so that snapshots fill gaps: {error}; enable JetStream, and allow this gate its subjects"
    )
}

async fn publish(config: &BusConfig, client: &Client, output: Output) -> Result<(), SessionError> {
    let BusConfig { group, gate, .. } = config;
    let (subject, bytes) = match output {
        Output::Batch { bytes, .. } => (format!("towpath.{group}.states.{gate}"), bytes),
        Output::Request { to, bytes } => (format!("towpath.{group}.sync.{to}.{gate}"), bytes),
        Output::Chunk { to, bytes } => (format!("towpath.{group}.bulk.{to}.{gate}"), bytes),
        Output::Replay { .. } => return Ok(()),
    };
    client.publish(subject, bytes.into()).await.map_err(|error| SessionError::Client(error.to_string()))
}

async fn open_stream(client: &Client, group: &str) -> Result<stream::Stream, async_nats::Error> {
    let config = stream::Config {
        name: format!("towpath-{group}"),
        subjects: vec![format!("towpath.{group}.states.*")],
        storage: stream::StorageType::Memory,
        max_age: STREAM_AGE,
        max_bytes: STREAM_BYTES,
        // Batches are published without waiting for an acknowledgement.
        no_ack: true,
        ..Default::default()
    };
    let subjects = config.subjects.clone();
    let stream = jetstream::new(client.clone()).get_or_create_stream(config).await?;
    let found = &stream.cached_info().config;
    if copies_messages(found) || found.subjects != subjects {
        return Err(format!(
            "the stream towpath-{group} was not made by a gate: it takes messages from elsewhere or sends them elsewhere; delete it"
        )
        .into());
    }
    Ok(stream)
}

/// Returns true if a stream takes messages from elsewhere, sends them elsewhere, or changes their subjects.
fn copies_messages(config: &stream::Config) -> bool {
    config.republish.is_some()
        || config.mirror.is_some()
        || config.sources.is_some()
        || config.subject_transform.is_some()
}

/// Replays the batches of a peer. Tells the caller if that takes too long or fails.
async fn replay_within(stream: stream::Stream, subject: String, peer: String, caller: Caller) {
    let error = match timeout(REPLAY, replay(stream, subject, caller.clone())).await {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("not complete after {} s", REPLAY.as_secs()),
    };
    let _ = caller.tell(Incoming::ReplayFailed { peer, error }).await;
}

/// Passes the batches of a subject that the stream has to the caller.
async fn replay(stream: stream::Stream, subject: String, caller: Caller) -> Result<(), async_nats::Error> {
    let config = consumer::pull::Config {
        filter_subject: subject,
        ack_policy: consumer::AckPolicy::None,
        deliver_policy: consumer::DeliverPolicy::All,
        inactive_threshold: ANSWER,
        memory_storage: true,
        ..Default::default()
    };
    let consumer = stream.create_consumer(config).await?;
    loop {
        let mut batch = consumer.fetch().max_messages(64).messages().await?;
        let mut pending = 0;
        let mut some = false;
        while let Some(message) = batch.next().await {
            let message = message?;
            pending = message.info()?.pending;
            some = true;
            if caller.replayed(Channel::Replayed, &message).await.is_err() {
                return Ok(());
            }
        }
        if pending == 0 || !some {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::without_password;

    #[test]
    fn the_log_shows_no_password() {
        assert_eq!(without_password("nats://gate:secret@192.0.2.1:4222"), "nats://192.0.2.1:4222");
        assert_eq!(without_password("gate:se@cret@192.0.2.1"), "192.0.2.1");
        assert_eq!(without_password("tls://bus.example:4222"), "tls://bus.example:4222");
    }
}
