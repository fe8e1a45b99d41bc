//! Workers of a multiplexor on other machines: the rings of both sides.
//!
//! [`RemoteFront`] is a starter of worker processes for a [`WorkerPool`](crate::worker_pool::WorkerPool). A worker that it starts is a
//! client of the pool's ring in this process, whose frames go to a worker host and back. [`serve`] is the worker host: it starts programs with a
//! ring, as a pool does, and passes the frames of fronts on. [`towpath_fleet::workers`] decides; here are the rings, the processes and the
//! clock. Each side has one thread, which also is the client of NATS ([`towpath_fleet::worker_bus`]).

mod front;
mod host;
mod poller;

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::Instant;

use towpath_fleet::nats::ServerConfig;
use towpath_fleet::workers::Record;
use towpath_ring::{Credentials, Header, Layers, Meta, Seq};
use towpath_wire::Time;

pub use front::{FrontConfig, RemoteFront};
pub use host::{HostConfig, HostOutcome, serve};

/// How the bus is reached, and the subject.
#[derive(Clone, Debug)]
pub struct BusSettings {
    /// The server.
    pub server: ServerConfig,
    /// The subject.
    pub subject: String,
    /// The name of this process; a word of subjects.
    pub name: String,
}

/// A random number.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// A name for this process: that of the machine, as far as a subject may have it, and a random part.
pub fn default_name() -> String {
    let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let fits = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' };
    let machine: String = machine.chars().take(40).map(fits).collect();
    format!("{machine}-{:06x}", random() & 0xff_ffff)
}

fn time(start: Instant, now: Instant) -> Time {
    // An origin before the start, so that no time is zero.
    Time::from_secs(1) + now.saturating_duration_since(start)
}

fn instant(start: Instant, time: Time) -> Instant {
    start + time.since(Time::from_secs(1))
}

/// The header of a frame as a record.
fn record(header: &Header, seq: Seq) -> Record {
    let Header { kind, wire_len, group, time, mark, port, pid, uid, gid, hash, layers, .. } = *header;
    Record {
        seq: seq.0,
        kind: kind.0,
        wire_len,
        group,
        time,
        mark,
        port,
        sender: [pid, uid, gid],
        hash,
        layers: [layers.link, layers.network, layers.payload],
        ..Record::default()
    }
}

/// A record as the metadata of a frame.
fn meta(record: &Record) -> Meta {
    let Record { kind, wire_len, group, time, mark, port, sender: [pid, uid, gid], hash, layers, .. } =
        *record;
    let [link, network, payload] = layers;
    Meta {
        kind: towpath_ring::Kind(kind),
        wire_len,
        time,
        mark,
        port,
        group,
        hash,
        layers: Layers { link, network, payload },
        sender: Some(Credentials { pid, uid, gid }),
    }
}
