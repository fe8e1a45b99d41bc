//! Zero-copy transmission with MSG_ZEROCOPY (Linux 4.14) or io_uring over TCP and UDP sockets, with exact completions.
//!
//! The kernel transmits directly from the caller's buffer. The caller gives a buffer to a sender and gets it back when the
//! kernel has reported that it no longer reads it. Where zero copy does not work or does not pay (loopback, short messages,
//! exhausted memory limits), the sender falls back to plain sends.
//!
//! Use this crate for large messages (tens of KiB and more) over a real network device, and where the CPU time of copying
//! matters. For short messages a plain `write(2)` is as fast. The guide is `docs/book/src/reference/send.md`.
//!
//! - [`Sender`] sends buffers over a connected TCP or UDP socket and blocks. `AsyncSender` (feature `tokio`) is its
//!   counterpart for tokio, [`PollSender`] the one for an existing event loop.
//! - [`Pool`] allocates frames to send from, in huge pages where these are available.
//! - [`Engine`] is the state machine without IO: completion numbers, frames in flight, memory budgets, and the policy that
//!   chooses between zero-copy and plain sends.
//!
//! ```
//! use std::io::Read;
//! use std::net::{TcpListener, TcpStream};
//! use std::time::Duration;
//! use towpath_send::{Options, Pool, Sender};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let listener = TcpListener::bind("127.0.0.1:0")?;
//! let stream = TcpStream::connect(listener.local_addr()?)?;
//! let mut pool = Pool::new(4, 64 << 10, true)?;
//! let mut sender = Sender::new(stream, Options::default())?;
//!
//! let mut frame = pool.take().ok_or("no free frame")?;
//! frame.put(b"hello");
//! sender.send(frame)?;
//! sender.close(Duration::from_secs(10))?;
//!
//! let mut received = Vec::new();
//! listener.accept()?.0.read_to_end(&mut received)?;
//! assert_eq!(received, b"hello");
//! # Ok(())
//! # }
//! ```
#![deny(unsafe_code)]
// `cfg(loom)` replaces the atomics with those of the model checker; a workspace member cannot declare the cfg in its manifest.
#![allow(unexpected_cfgs)]

#[cfg(feature = "tokio")]
mod asynchronous;
mod budget;
mod buffer;
mod counters;
mod driver;
mod engine;
mod error;
mod inflight;
mod limits;
mod locked;
mod notification;
#[cfg(any(test, feature = "test-util"))]
pub mod ops;
mod policy;
mod poll;
mod quarantine;
mod requests;
mod sender;
mod socket;
mod sys;
mod time;
mod tx_backoff;

#[cfg(feature = "tokio")]
pub use asynchronous::AsyncSender;
pub use buffer::{Buffer, Frame, Lent, Pool};
pub use counters::{Counters, Distributions, Histogram, PlainCause, Summary};
pub use driver::{Done, Remains};
pub use engine::{Config, CopyMode, Engine, Full, Kind, MAX_CALLS, MAX_PARTS, Path, Transmit};
pub use error::{SendError, Unarmed};
pub use inflight::Abandoned;
pub use limits::Limits;
pub use locked::LockedMemory;
pub use notification::{Event, ExtendedError, Range, parse};
pub use policy::{Mode, Reason};
pub use poll::{PollSender, Sent};
pub use quarantine::{HOLD, Quarantine};
pub use sender::{BackEnd, Closed, Options, Sender};
pub use sys::{Pages, Region};
pub use towpath_wire::Time;
