//! Frames in shared memory between processes that do not trust each other.
//!
//! An engine ([`Endpoint`], [`Channel`]) sends frames to clients ([`Consumer`]) without a system call or a copy per
//! frame, and receives their verdicts ([`Verdict`], [`Decision`]) the same way. Use this crate to write an inspector
//! of packets, a worker of a multiplexor ([`Worker`]), or another program with the same needs: many small messages,
//! several processes, and peers that may be broken or hostile.
//!
//! Memory that one side writes is read-only for the other side. Values that a side reads from the peer are copied
//! and then checked. The layout of the shared memory is documented in the book (*Ring ABI*).
//!
//! ```
//! use towpath_ring::{Config, Consumer, Endpoint, Meta, Verdict};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! let path = directory.path().join("ring.sock");
//! let mut endpoint = Endpoint::bind(&path, Config::default())?;
//!
//! // The client, usually another process.
//! let client = std::thread::spawn(move || {
//!     let mut queue = Consumer::attach(&path).expect("attached");
//!     let frame = queue.recv().expect("valid data").expect("a frame");
//!     let verdict = if queue.payload(&frame).starts_with(b"GET") { Verdict::Pass } else { Verdict::Drop };
//!     queue.verdict(frame, verdict);
//! });
//!
//! // The engine.
//! let mut channel = loop {
//!     match endpoint.accept()? {
//!         Some(channel) => break channel,
//!         None => endpoint.wait(None)?,
//!     }
//! };
//! channel.send(b"GET / HTTP/1.1", &Meta::default())?;
//! channel.wait(None)?;
//! channel.poll_verdicts(0, |_, decision| assert_eq!(decision.verdict, Verdict::Pass));
//! # client.join().unwrap();
//! # Ok(())
//! # }
//! ```
//!
//! Feature `tokio`: `AsyncConsumer`, the client for tokio. Feature `test-util`: `mock`, hostile peers for fuzzing.
//!
//! Reference: memory-mapped netlink (Linux 3.10 to 4.5) and the reasons for its removal. Not supported: Windows, and
//! peers on other machines.
#![deny(unsafe_code)]
// `cfg(loom)` swaps the atomics for those of a model checker; the manifest of a workspace member cannot declare it.
#![allow(unexpected_cfgs)]
#![cfg_attr(loom, allow(dead_code))]

#[cfg(not(loom))]
mod client;
#[cfg(not(loom))]
mod engine;
pub mod group;
#[cfg(not(loom))]
mod handshake;
#[cfg(all(test, not(loom)))]
mod hostile;
#[cfg(all(test, not(loom)))]
mod hostile_engine;
mod lane;
#[cfg(all(any(test, feature = "test-util"), not(loom)))]
pub mod mock;
#[cfg(all(test, loom))]
mod model;
#[cfg(not(loom))]
pub mod reaper;
mod shm;
#[cfg(all(test, not(loom)))]
mod wrap;

#[cfg(all(feature = "tokio", not(loom)))]
pub use client::asynchronous::AsyncConsumer;
#[cfg(not(loom))]
pub use client::worker::{
    Connection, Ended, Event, Message, Opened, Reply, ServeError, Unsent, View, Worker,
};
#[cfg(not(loom))]
pub use client::{Consumer, ConsumerStats, Frame, FrameId, Inject, InjectError, NotReplaced, Ticket};
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
pub use lane::batch::{BATCH_MAX, Part, Position};
#[cfg(not(loom))]
pub use lane::connection_event::{EndCause, EndedInfo, OpenedInfo};
#[cfg(not(loom))]
pub use lane::loss_record::{Loss, LossRecord};
#[cfg(not(loom))]
pub use lane::reserve_error::ReserveError;
pub use lane::verdict::{Cause, Decision, Verdict};
pub use shm::abi::{INLINE_BYTES, VERSION};
pub use shm::geometry::{Geometry, GeometryError};
pub use shm::header::{Credentials, Header, Interfaces, Kind, Layers, Meta};
pub use shm::seq::Seq;
#[cfg(not(loom))]
pub use {client::recv_error::RecvError, engine::bind_error::BindError};
