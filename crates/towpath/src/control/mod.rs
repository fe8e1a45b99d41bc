//! Looking into a running engine: what `towpath ctl` asks, and who answers.
//!
//! ```text
//! towpath ctl --socket--> server (a thread of its own) --mailbox--> desk (on the engine's thread)
//!                         sessions, bounded                         snapshots: values, never waits
//! ```
//!
//! The engine makes no system call for anybody who looks at it: between two bursts it takes at most a few questions from
//! its mailbox and answers with a copy of what it knows. Sockets, slow readers and garbage are the server's concern.
//! A trace is a tap: copies go into a bounded queue, and when that is full they are dropped and counted.
//!
//! - [`protocol`]: requests and answers, and how they lie in the stream;
//! - [`Session`]: one client, without IO;
//! - [`Desk`], [`Observed`]: the engine's side;
//! - [`Server`]: the socket;
//! - [`show`]: answers as text.

mod book;
mod desk;
pub mod dumps;
mod engine_view;
pub mod mux;
mod pause;
pub mod protocol;
pub mod rows;
pub mod send;
mod server;
mod session;
pub mod show;
mod sieve;
mod tap;

pub use desk::{Ask, Desk, Mailbox, Observed, Reply, Wake};
pub use engine_view::EngineView;
pub(crate) use engine_view::neighbors;
pub(crate) use pause::Pause;
pub use server::Access;
pub use server::{BindError, Listening, Server};
pub use session::Session;
pub use sieve::Sieve;
pub use tap::{Note, Tap, Traced};
