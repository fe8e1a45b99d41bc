//! The bus of a group's configuration: a client of NATS on a thread of its own, beside that of the states.
//!
//! | subject | from | content |
//! |---|---|---|
//! | `towpath.G.config.A` | A | versions to check, answers, and the version that A has |
//! | `$KV.towpath-G.current` | a gate that may configure the group | the version, in the bucket `towpath-G` |
//!
//! Messages on `towpath.G.config.A` have no headers and no subject for replies, as those of states. A value is written with the name of
//! its stream in a header (`Nats-Expected-Stream`), and a value without it is refused: a gate that may make consumers could otherwise let
//! the server send one of its messages to the bucket. A message with this header cannot get into another stream.

use std::io;
use std::time::Duration;

use async_nats::header::{NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, NATS_EXPECTED_STREAM};
use async_nats::jetstream::context::PublishErrorKind;
use async_nats::jetstream::{self, consumer, stream};
use async_nats::{Client, Event, HeaderMap, Message, ServerError};
use futures_util::StreamExt;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::{
    ANSWER, BusConfig, ClientQueues, ClientThread, Gone, RETRY, Rooms, SessionError, Told, connect,
    copies_messages, sender, tables,
};
use crate::group::{CONTENT_MAX, GroupOutput, WriteError};

/// Messages that wait for the server, and for the caller. They have up to 1 MiB each.
const ROOMS: Rooms = Rooms { outbound: 64, inbound: 64, inbound_bytes: usize::MAX };

/// Messages of one subscription that wait in the client while the caller checks a version. A message has up to 1 MiB, so that a peer could
/// fill gigabytes with more of them. The client drops others: a status is sent again, and a question without an answer is refused. Messages
/// of consumers are asked for in smaller batches, and none of them is dropped. Few wait for the server, because [`ROOMS`] has more.
const QUEUES: ClientQueues = ClientQueues { inbound: 256, outbound: 32 };

/// Revisions of the value that the bucket keeps, and its bytes.
const HISTORY: i64 = 16;
const BUCKET_BYTES: i64 = 32 << 20;

/// Time after which the server forgets a consumer that does not ask.
pub(super) const INACTIVE: Duration = Duration::from_secs(30);

/// What the bus tells the caller.
#[derive(Debug)]
pub enum GroupIncoming {
    /// A session has begun with this server, whose longest message has so many bytes.
    Connected(String, usize),
    /// There is no session.
    Away(SessionError),
    /// There is no bucket, or it cannot be read.
    NoBucket(String),
    /// The server refuses something.
    Warning(String),
    /// The bucket has no value.
    Absent,
    /// The bucket has this value.
    Current(u64, Vec<u8>),
    /// The bucket has a value of this revision that no gate has written.
    Foreign(u64),
    /// The value was written, or not.
    Written(Result<u64, WriteError>),
    /// The stream of tables is open.
    TablesOpen {
        /// When it was made, in ns: another stream has another time.
        made: u64,
        /// Its last message.
        last: u64,
    },
    /// The stream has no message after the one that was asked for with this epoch.
    NothingFollows(u64),
    /// A message of a table.
    Entries {
        /// That of the request to follow the stream.
        epoch: u64,
        /// Its number.
        seq: u64,
        /// The number of messages that follow it now.
        pending: u64,
        /// The table.
        table: String,
        /// The gate that published it.
        from: String,
        /// The message; `None` if the server has sent it, not the gate.
        bytes: Option<Vec<u8>>,
    },
    /// Messages of a table are in the stream, the last one with this number; or why not.
    Published(Result<u64, String>),
    /// A message that the server has sent under this name, not the gate.
    Republished(String),
    /// A message of a gate.
    Message(String, Vec<u8>),
}

/// The client of the configuration. Dropping it ends its thread.
#[derive(Debug)]
pub struct GroupBus(ClientThread<GroupOutput, GroupIncoming>);

pub(super) type Caller = Told<GroupIncoming>;

impl GroupBus {
    /// Starts the thread, which calls `begin` first.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(config: BusConfig, begin: impl FnOnce() + Send + 'static) -> io::Result<Self> {
        let run = async move |outputs: &mut mpsc::Receiver<GroupOutput>, caller: &Caller| {
            GroupIncoming::Away(session(&config, outputs, caller).await)
        };
        ClientThread::start("group-nats", ROOMS, begin, run).map(Self)
    }

    /// Gives a message to the client.
    ///
    /// # Errors
    /// The client has no room; returns the message.
    pub fn send(&self, output: GroupOutput) -> Result<(), GroupOutput> {
        self.0.send(output)
    }

    /// Waits for the next message at most for `wait`.
    pub fn receive(&self, wait: Duration) -> Option<GroupIncoming> {
        self.0.receive(wait)
    }

    /// The number of messages that were dropped since the last call, because too many waited for the caller.
    pub fn take_dropped(&self) -> u64 {
        self.0.take_dropped()
    }
}

/// One connection, until it ends.
async fn session(
    config: &BusConfig,
    outputs: &mut mpsc::Receiver<GroupOutput>,
    caller: &Caller,
) -> SessionError {
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

async fn talk(
    config: &BusConfig,
    client: &Client,
    outputs: &mut mpsc::Receiver<GroupOutput>,
    caller: &Caller,
    events: &mut mpsc::Receiver<Event>,
) -> Result<(), SessionError> {
    let BusConfig { group, gate, .. } = config;
    let failed = |error: &dyn std::fmt::Display| SessionError::Client(error.to_string());
    let subject = format!("towpath.{group}.config");
    let mut messages = client.subscribe(format!("{subject}.*")).await.map_err(|error| failed(&error))?;
    client.flush().await.map_err(|error| failed(&error))?;
    let info = client.server_info();
    let server = format!("{}:{}", info.host, info.port);
    let _ = caller.tell(GroupIncoming::Connected(server, info.max_payload)).await;
    tokio::spawn(watch(client.clone(), group.clone(), caller.clone()));
    tokio::spawn(tables::look(client.clone(), group.clone(), caller.clone()));
    let mut following: Option<tokio::task::JoinHandle<()>> = None;
    loop {
        let told = tokio::select! {
            Some(message) = messages.next() => receive(caller, message).await,
            output = outputs.recv() => match output {
                Some(GroupOutput::Publish(bytes)) => {
                    let published = client.publish(format!("{subject}.{gate}"), bytes.into()).await;
                    published.map(Ok).map_err(|error| failed(&error))?
                }
                Some(GroupOutput::Write { base, content }) => {
                    let written = write(client, group, base, content).await;
                    caller.tell(GroupIncoming::Written(written)).await
                }
                Some(GroupOutput::Follow { made, after, epoch }) => {
                    let from = tables::Start { made, after, epoch };
                    let follow = tables::follow(client.clone(), group.clone(), from, caller.clone());
                    let before = following.replace(tokio::spawn(follow));
                    before.inspect(tokio::task::JoinHandle::abort);
                    Ok(())
                }
                Some(GroupOutput::Entries(publication)) => {
                    let names = (group.clone(), gate.clone());
                    tokio::spawn(tables::publish(client.clone(), names, publication, caller.clone()));
                    Ok(())
                }
                None => Err(Gone),
            },
            event = events.recv() => match event {
                Some(Event::Disconnected | Event::Closed) | None => return Err(SessionError::Ended),
                Some(Event::ServerError(ServerError::AuthorizationViolation)) => return Err(SessionError::Refused),
                Some(Event::ServerError(error)) => {
                    caller.tell(GroupIncoming::Warning(format!("the server: {error}"))).await
                }
                Some(Event::SlowConsumer(_)) => {
                    caller.dropped();
                    Ok(())
                }
                Some(_) => Ok(()),
            },
        };
        if told.is_err() {
            let _ = timeout(ANSWER, client.flush()).await;
            return Ok(());
        }
    }
}

async fn receive(caller: &Caller, message: Message) -> Result<(), Gone> {
    let from = sender(&message);
    // Copies of a stream have headers, and those of a consumer a subject for replies.
    if message.headers.is_some() || message.reply.is_some() {
        return caller.tell(GroupIncoming::Republished(from)).await;
    }
    caller.tell(GroupIncoming::Message(from, message.payload.to_vec())).await
}

fn bucket_of(group: &str) -> String {
    format!("KV_towpath-{group}")
}

fn key_of(group: &str) -> String {
    format!("$KV.towpath-{group}.current")
}

/// Writes the value if the key still has the revision `base`.
async fn write(client: &Client, group: &str, base: u64, content: Vec<u8>) -> Result<u64, WriteError> {
    let mut headers = HeaderMap::new();
    headers.insert(NATS_EXPECTED_STREAM, bucket_of(group));
    headers.insert(NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, base.to_string());
    let context = jetstream::new(client.clone());
    let refused = |error: &dyn std::fmt::Display| {
        WriteError::Refused(format!(
            "the server did not take the version: {error}; this gate needs the permission to publish `{}`",
            key_of(group)
        ))
    };
    let acknowledged = context
        .publish_with_headers(key_of(group), headers, content.into())
        .await
        .map_err(|error| refused(&error))?;
    match acknowledged.await {
        Ok(acknowledged) => Ok(acknowledged.sequence),
        Err(error) if error.kind() == PublishErrorKind::WrongLastSequence => Err(WriteError::Changed),
        Err(error) => Err(refused(&error)),
    }
}

/// Opens the bucket; the first gate makes it.
async fn open_bucket(client: &Client, group: &str) -> Result<stream::Stream, async_nats::Error> {
    let name = bucket_of(group);
    // As clients of NATS make buckets.
    let config = stream::Config {
        name: name.clone(),
        subjects: vec![format!("$KV.towpath-{group}.>")],
        max_messages_per_subject: HISTORY,
        max_bytes: BUCKET_BYTES,
        discard: stream::DiscardPolicy::New,
        allow_rollup: true,
        deny_delete: true,
        allow_direct: true,
        storage: stream::StorageType::File,
        ..Default::default()
    };
    let subjects = config.subjects.clone();
    let stream = jetstream::new(client.clone()).get_or_create_stream(config).await?;
    let found = &stream.cached_info().config;
    if copies_messages(found) || found.subjects != subjects {
        let wrong = "takes messages from elsewhere or sends them elsewhere; delete it";
        return Err(format!("the bucket towpath-{group} was not made by a gate: it {wrong}").into());
    }
    Ok(stream)
}

/// Tells the caller the value and each one that follows, until the session ends.
async fn watch(client: Client, group: String, caller: Caller) {
    loop {
        let reason = match follow(&client, &group, &caller).await {
            Ok(Gone) => return,
            Err(error) => error,
        };
        let hint = "enable JetStream, and allow this gate the subjects of the bucket";
        let reason = format!("no configuration of the group: {reason}; {hint}");
        if caller.tell(GroupIncoming::NoBucket(reason)).await.is_err() {
            return;
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn follow(client: &Client, group: &str, caller: &Caller) -> Result<Gone, async_nats::Error> {
    let stream =
        timeout(ANSWER, open_bucket(client, group)).await.map_err(|_| "the server does not answer")??;
    let config = consumer::pull::Config {
        filter_subject: key_of(group),
        ack_policy: consumer::AckPolicy::None,
        deliver_policy: consumer::DeliverPolicy::LastPerSubject,
        inactive_threshold: INACTIVE,
        memory_storage: true,
        ..Default::default()
    };
    let consumer = stream.create_consumer(config).await?;
    if consumer.cached_info().num_pending == 0 && caller.tell(GroupIncoming::Absent).await.is_err() {
        return Ok(Gone);
    }
    let mut values = consumer.stream().max_messages_per_batch(4).heartbeat(RETRY).messages().await?;
    while let Some(value) = values.next().await {
        let value = value?;
        let version = value.info()?.stream_sequence;
        let (headers, bytes) = (&value.headers, &value.payload);
        let expected = headers.as_ref().and_then(|headers| headers.get(NATS_EXPECTED_STREAM));
        if expected.map(|stream| stream.as_str()) != Some(&*bucket_of(group)) {
            if caller.tell(GroupIncoming::Foreign(version)).await.is_err() {
                return Ok(Gone);
            }
            continue;
        }
        // A longer value is damaged; the group says so.
        let bytes = bytes[..bytes.len().min(CONTENT_MAX + 1)].to_vec();
        if caller.tell(GroupIncoming::Current(version, bytes)).await.is_err() {
            return Ok(Gone);
        }
    }
    Err("the server ended the consumer".into())
}
