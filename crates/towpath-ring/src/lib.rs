//! Frames in shared memory between processes that do not trust each other.
//!
//! An engine ([`Endpoint`], [`Channel`]) hands frames to clients ([`Consumer`]) without a system call or a copy per
//! frame, and takes their verdicts back the same way. A [`Group`] gives each message to several clients from one copy, and
//! to those that only look on ([`Tap`]). What one side writes the other side can only read; what it
//! reads it copies and checks. The layout of the shared memory is in `docs/book/src/reference/ring-abi.md`.
//!
//! Feature `tokio`: `AsyncConsumer`, the same client for tokio. Feature `test-util`: `mock`, peers that lie, for fuzzing.
//!
//! After memory-mapped netlink (Linux 3.10 to 4.5) and what was learnt from its removal.
#![deny(unsafe_code)]
// `cfg(loom)` swaps the atomics for those of a model checker; the manifest of a workspace member cannot declare it.
#![allow(unexpected_cfgs)]
#![cfg_attr(loom, allow(dead_code))]

mod abi;
#[cfg(all(feature = "tokio", not(loom)))]
mod asynchronous;
#[cfg(not(loom))]
mod attach;
#[cfg(not(loom))]
mod bundle;
#[cfg(not(loom))]
mod channel;
#[cfg(not(loom))]
mod client;
#[cfg(not(loom))]
mod cpu;
#[cfg(not(loom))]
mod dump;
#[cfg(not(loom))]
mod endpoint;
#[cfg(not(loom))]
mod error;
#[cfg(not(loom))]
mod gap;
mod geometry;
#[cfg(not(loom))]
mod group;
#[cfg(not(loom))]
mod grow;
mod header;
#[cfg(not(loom))]
mod hello;
#[cfg(all(test, not(loom)))]
mod hostile;
#[cfg(not(loom))]
mod inbox;
mod lane;
#[cfg(not(loom))]
mod life;
#[cfg(not(loom))]
mod limits;
#[cfg(not(loom))]
mod member;
#[cfg(all(any(test, feature = "test-util"), not(loom)))]
pub mod mock;
#[cfg(all(test, loom))]
mod model;
#[cfg(not(loom))]
mod open;
#[cfg(not(loom))]
mod outbox;
#[cfg(not(loom))]
mod overload;
mod park;
mod region;
#[cfg(not(loom))]
mod rings;
mod seq;
#[cfg(not(loom))]
mod slot;
#[cfg(not(loom))]
mod socket_file;
#[cfg(not(loom))]
mod stats;
mod sync;
#[cfg(not(loom))]
mod sys;
#[cfg(not(loom))]
mod tap;
mod taplog;
#[cfg(not(loom))]
mod transmit;
mod verdict;
#[cfg(not(loom))]
mod verdicts;
#[cfg(not(loom))]
mod worker;
#[cfg(all(test, not(loom)))]
mod wrap;

pub use abi::{INLINE_BYTES, VERSION};
#[cfg(all(feature = "tokio", not(loom)))]
pub use asynchronous::AsyncConsumer;
#[cfg(not(loom))]
pub use attach::Options;
#[cfg(not(loom))]
pub use bundle::{BUNDLE_MOST, Part};
#[cfg(not(loom))]
pub use channel::{Channel, FrameOut, Full, POLL_BYTES, POLL_MESSAGES};
#[cfg(not(loom))]
pub use client::{Consumer, ConsumerStats, Frame, FrameId, NotReplaced, Ticket};
#[cfg(not(loom))]
pub use dump::{Busy, Progress, Source};
#[cfg(not(loom))]
pub use endpoint::{Allow, Config, Endpoint, Stats};
#[cfg(not(loom))]
pub use error::{AttachError, BindError, RecvError};
#[cfg(not(loom))]
pub use gap::{Gap, Loss};
pub use geometry::{Geometry, GeometryError};
#[cfg(not(loom))]
pub use group::{Group, GroupStats, Joined, MemberId};
#[cfg(not(loom))]
pub use grow::Growth;
pub use header::{Credentials, Header, Kind, Layers, Meta};
#[cfg(not(loom))]
pub use life::Death;
#[cfg(not(loom))]
pub use limits::Limits;
#[cfg(not(loom))]
pub use overload::{Fanout, Listener, Offer, Overload, Policy, Queue, QueueStats};
pub use seq::Seq;
#[cfg(not(loom))]
pub use slot::Slot;
#[cfg(not(loom))]
pub use socket_file::SocketFile;
#[cfg(not(loom))]
pub use stats::ChannelStats;
#[cfg(not(loom))]
pub use tap::{Tap, Tapped};
#[cfg(not(loom))]
pub use transmit::{TxFrame, TxPayload, TxSink};
pub use verdict::{Answer, Flags, Verdict};
#[cfg(not(loom))]
pub use verdicts::{Cause, Decision};
#[cfg(not(loom))]
pub use worker::{Connection, Message, Reply, ServeError, Unsent, View, Worker};
