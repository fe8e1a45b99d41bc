//! Zero-copy sends with honest completions: MSG_ZEROCOPY (Linux 4.14) over TCP and UDP sockets.
//!
//! A frame is handed over, the kernel sends straight from it, and it comes back exactly when the kernel is done with it:
//! faster where the path allows it, plain sends where it does not. The guide for newcomers is `docs/book/src/reference/send.md`.
//!
//! - [`Sender`] sends buffers over a connected TCP or UDP socket; `AsyncSender` (feature `tokio`) on tokio;
//!   [`PollSender`] in an event loop of one's own.
//! - [`Pool`] has frames to send from, in huge pages where there are some.
//! - [`Engine`] is the middle, without IO: numbers, frames, budgets, and the policy that decides between zero copy and
//!   plain sends.
#![deny(unsafe_code)]
// `cfg(loom)` swaps the atomics for those of a model checker; the manifest of a workspace member cannot declare it.
#![allow(unexpected_cfgs)]

#[cfg(feature = "tokio")]
mod asynchronous;
mod budget;
mod buffer;
mod counters;
mod engine;
mod error;
mod flight;
mod limits;
mod locked;
mod moderation;
mod notification;
#[cfg(any(test, feature = "test-util"))]
pub mod ops;
mod policy;
mod poll;
mod pump;
mod quarantine;
mod sender;
mod sys;
mod time;

#[cfg(feature = "tokio")]
pub use asynchronous::AsyncSender;
pub use buffer::{Buffer, Frame, Lent, Pool};
pub use counters::{Counters, Histogram, PlainCause};
pub use engine::{Choice, Config, Engine, Full, How, Kind, MAX_CALLS, MAX_PARTS, Transmit};
pub use error::{SendError, Unarmed};
pub use flight::Abandoned;
pub use limits::Limits;
pub use locked::LockedMemory;
pub use notification::{Event, ExtendedError, Range, parse};
pub use policy::{Mode, Reason};
pub use poll::{PollSender, Sent};
pub use pump::{Done, Remains};
pub use quarantine::{HOLD, Quarantine};
pub use sender::{Closed, Options, Sender};
pub use sys::{Pages, Region};
pub use towpath_wire::Time;
