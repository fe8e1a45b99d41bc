//! Frames in shared memory between processes that do not trust each other.
//!
//! An engine ([`Endpoint`], [`Channel`]) hands frames to clients ([`Consumer`]) without a system call or a copy per
//! frame, and takes their verdicts back the same way. What one side writes the other side can only read; what it
//! reads it copies and checks. The layout of the shared memory is in `docs/book/src/reference/ring-abi.md`.
//!
//! Feature `tokio`: `AsyncConsumer`, the same client for tokio. Feature `test-util`: `mock`, peers that lie, for fuzzing.
//!
//! After memory-mapped netlink (Linux 3.10 to 4.5) and what was learnt from its removal.
#![deny(unsafe_code)]
// `cfg(loom)` swaps the atomics for those of a model checker; the manifest of a workspace member cannot declare it.
#![allow(unexpected_cfgs)]
#![cfg_attr(loom, allow(dead_code))]

#[cfg(not(loom))]
mod client;
#[cfg(not(loom))]
mod engine;
#[cfg(not(loom))]
mod handshake;
#[cfg(all(test, not(loom)))]
mod hostile;
mod lane;
#[cfg(all(any(test, feature = "test-util"), not(loom)))]
pub mod mock;
#[cfg(all(test, loom))]
mod model;
mod shm;
#[cfg(all(test, not(loom)))]
mod wrap;

#[cfg(all(feature = "tokio", not(loom)))]
pub use client::asynchronous::AsyncConsumer;
#[cfg(not(loom))]
pub use client::worker::{Connection, Message, Reply, ServeError, Unsent, View, Worker};
#[cfg(not(loom))]
pub use client::{Consumer, ConsumerStats, Frame, FrameId, NotReplaced, Ticket};
#[cfg(not(loom))]
pub use engine::channel::{Channel, FrameOut, POLL_BYTES, POLL_MESSAGES};
#[cfg(not(loom))]
pub use engine::dump::{Busy, Progress, Source};
#[cfg(not(loom))]
pub use engine::endpoint::{Allow, Config, Endpoint, Stats};
#[cfg(not(loom))]
pub use engine::fanout::{Enqueue, Fanout, Listener, Overload, Policy, Queue, QueueStats};
#[cfg(not(loom))]
pub use engine::peer_liveness::Death;
#[cfg(not(loom))]
pub use engine::quota::Quota;
#[cfg(not(loom))]
pub use engine::reservation::Reservation;
#[cfg(not(loom))]
pub use engine::socket_file::SocketFile;
#[cfg(not(loom))]
pub use engine::stats::ChannelStats;
#[cfg(not(loom))]
pub use engine::tx_ring::{TxFrame, TxPayload, TxSink};
#[cfg(not(loom))]
pub use handshake::attach::Options;
#[cfg(not(loom))]
pub use handshake::attach_error::AttachError;
#[cfg(not(loom))]
pub use lane::batch::{BATCH_MAX, Part};
#[cfg(not(loom))]
pub use lane::loss_record::{Loss, LossRecord};
#[cfg(not(loom))]
pub use lane::reserve_error::ReserveError;
pub use lane::verdict::{Cause, Decision, Verdict};
pub use shm::abi::{INLINE_BYTES, VERSION};
pub use shm::geometry::{Geometry, GeometryError};
pub use shm::header::{Credentials, Header, Kind, Layers, Meta};
pub use shm::seq::Seq;
#[cfg(not(loom))]
pub use {client::recv_error::RecvError, engine::bind_error::BindError};
