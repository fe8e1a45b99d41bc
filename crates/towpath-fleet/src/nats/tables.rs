//! The stream of table entries: `towpath.G.table.T.A` has the messages of the gate A for the table T, in the stream `towpath-G-tables`.
//!
//! Each message names its stream in a header, for the reason that [`group`](super::group) gives.

use std::collections::VecDeque;

use async_nats::header::NATS_EXPECTED_STREAM;
use async_nats::jetstream::{self, consumer, stream};
use async_nats::{Client, HeaderMap};
use futures_util::StreamExt;
use tokio::time::timeout;

use super::group::{Caller, GroupIncoming, INACTIVE};
use super::{ANSWER, RETRY, copies_messages};
use crate::group::tables::Publication;

/// Bytes of the stream. When it is full, the server refuses messages.
const STREAM_BYTES: i64 = 256 << 20;

/// Messages that are sent before the first one is acknowledged, and those of one answer of the server.
const AHEAD: usize = 16;
const BATCH: usize = 32;

fn stream_of(group: &str) -> String {
    format!("towpath-{group}-tables")
}

/// Opens the stream; the first gate makes it. Returns it, and when it was made in ns.
async fn open(client: &Client, group: &str) -> Result<(stream::Stream, u64), async_nats::Error> {
    let config = stream::Config {
        name: stream_of(group),
        subjects: vec![format!("towpath.{group}.table.*.*")],
        max_bytes: STREAM_BYTES,
        discard: stream::DiscardPolicy::New,
        storage: stream::StorageType::File,
        ..Default::default()
    };
    let subjects = config.subjects.clone();
    let opened = timeout(ANSWER, jetstream::new(client.clone()).get_or_create_stream(config)).await;
    let stream = opened.map_err(|_| "the server does not answer")??;
    let found = &stream.cached_info().config;
    if copies_messages(found) || found.subjects != subjects {
        let name = stream_of(group);
        let wrong = "takes messages from elsewhere or sends them elsewhere; delete it";
        return Err(format!("the stream {name} was not made by a gate: it {wrong}").into());
    }
    let made = stream.cached_info().created.unix_timestamp_nanos() as u64;
    Ok((stream, made))
}

/// Opens the stream and tells the caller its last message. The caller then asks to follow it.
pub(super) async fn look(client: Client, group: String, caller: Caller) {
    loop {
        let error = match open(&client, &group).await {
            Ok((stream, made)) => {
                let last = stream.cached_info().state.last_sequence;
                let _ = caller.tell(GroupIncoming::TablesOpen { made, last }).await;
                return;
            }
            Err(error) => error,
        };
        let problem = format!("no tables of the group: {error}; allow this gate the subjects of the stream");
        if caller.tell(GroupIncoming::Warning(problem)).await.is_err() {
            return;
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Where reading begins: in the stream that was made then, after this message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Start {
    pub(super) made: u64,
    pub(super) after: u64,
    pub(super) epoch: u64,
}

/// Passes messages to the caller, until the session ends or there is another stream. Then it tells the caller that one.
pub(super) async fn follow(client: Client, group: String, mut from: Start, caller: Caller) {
    loop {
        let error = match messages(&client, &group, &mut from, &caller).await {
            Ok(Over) => return,
            Err(error) => error,
        };
        let problem = format!("no entries of tables: {error}; this gate continues with those that it has");
        if caller.tell(GroupIncoming::Warning(problem)).await.is_err() {
            return;
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// The caller has gone, or the stream is another one.
struct Over;

async fn messages(
    client: &Client,
    group: &str,
    from: &mut Start,
    caller: &Caller,
) -> Result<Over, async_nats::Error> {
    let epoch = from.epoch;
    let (stream, made) = open(client, group).await?;
    if made != from.made {
        let last = stream.cached_info().state.last_sequence;
        let _ = caller.tell(GroupIncoming::TablesOpen { made, last }).await;
        return Ok(Over);
    }
    let config = consumer::pull::Config {
        ack_policy: consumer::AckPolicy::None,
        deliver_policy: consumer::DeliverPolicy::ByStartSequence { start_sequence: from.after + 1 },
        inactive_threshold: INACTIVE,
        memory_storage: true,
        ..Default::default()
    };
    let consumer = stream.create_consumer(config).await?;
    let nothing = GroupIncoming::NothingFollows(epoch);
    if consumer.cached_info().num_pending == 0 && caller.tell(nothing).await.is_err() {
        return Ok(Over);
    }
    let mut messages = consumer.stream().max_messages_per_batch(BATCH).heartbeat(RETRY).messages().await?;
    while let Some(message) = messages.next().await {
        let message = message?;
        let info = message.info()?;
        let (seq, pending) = (info.stream_sequence, info.pending);
        let expected = message.headers.as_ref().and_then(|headers| headers.get(NATS_EXPECTED_STREAM));
        let written = expected.map(|stream| stream.as_str()) == Some(&*stream_of(group));
        let mut words = message.subject.rsplit('.');
        let (gate, table) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let (gate, table) = (gate.to_owned(), table.to_owned());
        // A message that no gate has published counts, and has no content.
        let bytes = written.then(|| message.payload.to_vec());
        from.after = seq;
        let entries = GroupIncoming::Entries { epoch, seq, pending, table, from: gate, bytes };
        if caller.tell(entries).await.is_err() {
            return Ok(Over);
        }
    }
    Err("the server ended the consumer".into())
}

/// Publishes messages and waits until the stream has them.
pub(super) async fn publish(
    client: Client,
    (group, gate): (String, String),
    publication: Publication,
    caller: Caller,
) {
    let published = published(&client, &group, &gate, &publication).await;
    let keep = published
        .map(|(first, last)| (publication.keep_from(first), last))
        .map_err(|error| error.to_string());
    if let Ok((keep, _)) = keep.clone()
        && keep > 0
        && let Err(error) = purge(&client, &group, &publication.table, keep).await
    {
        let problem = format!(
            "the stream {} keeps old entries: {error}; allow this gate `$JS.API.STREAM.PURGE.{}`",
            stream_of(&group),
            stream_of(&group)
        );
        let _ = caller.tell(GroupIncoming::Warning(problem)).await;
    }
    let _ = caller.tell(GroupIncoming::Published(keep.map(|(_, last)| last))).await;
}

async fn purge(client: &Client, group: &str, table: &str, keep: u64) -> Result<(), async_nats::Error> {
    let stream = jetstream::new(client.clone()).get_stream_no_info(stream_of(group)).await?;
    stream.purge().sequence(keep).filter(format!("towpath.{group}.table.{table}.*")).await?;
    Ok(())
}

/// Returns the numbers of the first and the last message.
async fn published(
    client: &Client,
    group: &str,
    gate: &str,
    publication: &Publication,
) -> Result<(u64, u64), async_nats::Error> {
    let Publication { table, messages, .. } = publication;
    let context = jetstream::new(client.clone());
    let subject = format!("towpath.{group}.table.{table}.{gate}");
    let mut open = VecDeque::new();
    let (mut first, mut last) = (None, 0);
    for bytes in messages {
        let mut headers = HeaderMap::new();
        headers.insert(NATS_EXPECTED_STREAM, stream_of(group));
        open.push_back(context.publish_with_headers(subject.clone(), headers, bytes.clone().into()).await?);
        if open.len() >= AHEAD
            && let Some(acknowledged) = open.pop_front()
        {
            last = acknowledged.await?.sequence;
            first.get_or_insert(last);
        }
    }
    for acknowledged in open {
        last = acknowledged.await?.sequence;
        first.get_or_insert(last);
    }
    Ok((first.unwrap_or_default(), last))
}
