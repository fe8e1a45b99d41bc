//! Workers of a multiplexor on other machines.
//!
//! A **front** (`towpath mux --remote`) has messages, a **worker host** (`towpath worker`) has programs. Both are clients of one NATS
//! server. [`Front`] and [`Host`] decide: messages and a time go in, messages and events come out. They have no IO and no clock. A session
//! joins one worker slot of a front with one program of a host, and carries the frames of the front's ring to the program's ring and back
//! ([`Link`]). To the multiplexor, a session is a local worker, so that redelivery, order, drain and events are those of local workers.
//!
//! Subjects below the configured one, `S`, for the front `F` and the host `H`; the last word is the sender, so that permissions of the
//! server authenticate it:
//!
//! | subject | from | content |
//! |---|---|---|
//! | `S.offer.H` | H | the host is alive and has workers |
//! | `S.host.H.F` | F | everything for H |
//! | `S.front.F.H` | H | everything for F |
//!
//! Hosts offer and fronts ping every [`HEARTBEAT`]. A side that hears nothing for [`SILENCE`] ends the sessions of the other one.
//!
//! - `message`: messages as bytes.
//! - `link`: the records of a session, windows.
//! - `front`, `host`: the two sides.

mod front;
mod host;
mod link;
mod message;
#[cfg(test)]
mod world;

use std::time::Duration;

use bytes::Bytes;

pub use front::{Front, FrontEvent, HostView};
pub use host::{Host, HostEvent, HostSettings};
pub use link::{Link, LinkError, RECORD, Record, What};
pub use message::VERSION as WORKER_VERSION;
use towpath_metrics::metrics;

/// Interval of the messages that show that a side is alive.
pub const HEARTBEAT: Duration = Duration::from_millis(200);

/// A side that was not heard for this time is gone.
pub const SILENCE: Duration = Duration::from_millis(750);

/// Hosts of a front, and fronts that a host knows. Others are ignored and counted.
pub const MAX_PEERS: usize = 64;

/// Processes of one name that a side knows: one that was killed, and one that replaces it.
const INSTANCES: usize = 2;

/// Workers of a host.
pub const MAX_WORKERS: u16 = 64;

/// Messages that a remote worker may hold.
pub const MAX_CREDIT: u16 = 256;

/// Bytes of messages of one peer that wait in memory. Above it, the session ends that received the last ones.
const PEER_BYTES: usize = 128 << 20;

/// A message for the bus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// The subject after the configured one.
    pub subject: String,
    /// The message.
    pub bytes: Bytes,
}

metrics! {
    /// Workers on other machines: what was exchanged, and which messages of the bus were refused.
    pub struct WorkerStats in "remote" {
        /// Sessions that began.
        pub sessions: counter events,
        /// Sessions that ended because the other side was not heard.
        pub silent: counter events as "ended": "Sessions that ended, by reason." (reason = "silent"),
        /// Sessions that ended because a message of the bus was lost, came twice or was damaged.
        pub broken: counter events as "ended" (reason = "broken"),
        /// Connections to the server that ended because more than 128 MiB of messages for it waited.
        pub overflows: counter events,
        /// Messages of the bus that were refused, by reason: no message of this protocol.
        pub malformed: counter messages as "refused": "Messages of the bus that were refused, by reason." (reason = "malformed"),
        /// Messages that were refused: another version of the protocol.
        pub version: counter messages as "refused" (reason = "version"),
        /// Messages that were refused: a worker, session or peer that does not exist, or does not exist any more.
        pub unknown: counter messages as "refused" (reason = "unknown"),
        /// Messages that were refused: too many peers, or more than two processes of one name.
        pub too_many: counter messages as "refused" (reason = "too_many"),
    }
}

/// A process: its name, which the subject shows, and its instance.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Peer {
    name: String,
    instance: u64,
}

impl Peer {
    /// Returns true if there are already [`INSTANCES`] processes of this name.
    fn is_one_too_many<'a>(&self, known: impl Iterator<Item = &'a Self>) -> bool {
        known.filter(|peer| peer.name == self.name).count() >= INSTANCES
    }
}

/// Returns true if `text` may be a name: one word of a subject.
pub fn is_name(text: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    (1..=64).contains(&text.len()) && text.chars().all(fits)
}

/// Returns true if `text` may be the subject of a front and its hosts: names with dots between them.
pub fn is_subject(text: &str) -> bool {
    text.len() <= 128 && text.split('.').all(is_name)
}

#[cfg(test)]
mod tests {
    use super::{is_name, is_subject};

    #[test]
    fn subjects_have_no_wildcards() {
        assert!(["jobs", "a.b-c.d_9"].into_iter().all(is_subject));
        assert!(!["", "a..b", "a.*", "jobs.>", ".a", "a b", "a."].into_iter().any(is_subject));
        assert!(is_name("h-1") && !is_name("h.1") && !is_name(&"x".repeat(65)));
    }
}
