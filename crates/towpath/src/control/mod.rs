//! Looking into a running engine: what `towpath ctl` asks, and who answers.
//!
//! ```text
//! towpath ctl --socket--> server (a thread of its own) --sender--> inbox (on the engine's thread)
//!                         sessions, bounded                         snapshots: values, never waits
//! ```
//!
//! The engine makes no system call for anybody who looks at it: between two bursts it takes at most a few questions from
//! its sender and answers with a copy of what it knows. Sockets, slow readers and garbage are the server's concern.
//! A trace is a tap: copies go into a bounded queue, and when that is full they are dropped and counted.
//!
//! - [`protocol`]: requests and answers, and how they lie in the stream;
//! - [`Session`]: one client, without IO;
//! - [`QueryInbox`], [`QueryHandler`]: the engine's side;
//! - [`Server`]: the socket;
//! - [`show`]: answers as text.

mod accept_backoff;
pub mod dumps;
mod engine_view;
mod flow_filter;
pub mod mux;
pub mod protocol;
mod query;
pub mod records;
mod ruleset;
pub mod send;
mod server;
mod session;
pub mod show;
mod trace;

pub(crate) use accept_backoff::AcceptBackoff;
pub use engine_view::EngineView;
pub(crate) use engine_view::neighbors;
pub use flow_filter::FlowFilter;
pub use query::{Query, QueryHandler, QueryInbox, QuerySender, Response};
pub use server::Access;
pub use server::{BindError, Listening, Server};
pub use session::Session;
pub use trace::{TraceBuffer, TraceOutcome, TraceRecord};
