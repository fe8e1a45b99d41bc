//! The control socket: `towpath ctl` and its server.
//!
//! ```text
//! towpath ctl --socket--> Server (one thread) --queries--> QueryInbox (each engine thread)
//!                         Session per client               a closure runs between two bursts
//! ```
//!
//! An engine thread makes no system call for a client, except the wake-up of the server: between two bursts it runs a few queries,
//! which copy values. Sockets, slow readers and malformed requests are the server's concern. Packets of a trace go into a
//! bounded buffer; a packet without room is dropped and counted.
//!
//! - [`commands`]: the subcommands, one file each, and their table;
//! - [`command`]: the parts of a subcommand;
//! - [`protocol`]: messages on the socket;
//! - [`Session`]: one client, without IO; `slots`: the places of users;
//! - [`QueryInbox`]: the engine's side;
//! - [`Server`], [`client`]: the two ends of the socket;
//! - [`dumps`]: dumps of states, changes of states and logged packets over a ring next to the control socket.

mod accept_backoff;
mod accept_pace;
pub mod client;
pub mod command;
pub mod commands;
pub mod dumps;
mod endpoints;
mod flow_filter;
mod logged_packets;
pub mod protocol;
mod query;
mod request_pace;
mod server;
mod session;
mod slots;
pub mod state_filter;
mod subscription;
pub(crate) mod text;
mod trace;

pub(crate) use accept_backoff::AcceptBackoff;
pub(crate) use accept_pace::AcceptPace;
pub use endpoints::{EndpointCounters, ServerStats};
pub use flow_filter::FlowFilter;
pub use logged_packets::{LoggedPackets, PacketCopies, logged_packets};
pub use query::{Answer, PortRows, QueryInbox, QuerySender, SendError, Target, WorkerPoolView};
pub(crate) use server::listen;
pub use server::{BindError, Listening, Server};
pub use session::{Late, Session};
pub use slots::ControlStats;
