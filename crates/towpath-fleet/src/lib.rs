//! States of dynamic rules in a group of gates, replicated over a message bus.
//!
//! Each gate sends the changes of its states to its peers, and merges theirs into its table, so that connections continue through another
//! gate when one fails. [`Replica`] decides; it has no IO and no clock. With the feature `nats`, [`nats`] is the bus.
//!
//! - `message`: messages as bytes.
//! - `outgoing`: which changes are sent, and when.
//! - `peer`: sequence numbers, gaps, and the age of messages.
//! - `removed`: states that were removed, whose records may still be on their way.
//! - `sync`: snapshots of peers.
//! - [`workers`]: workers of a multiplexor on other machines. With the feature `nats`, [`worker_bus`] is their bus.
//!
//! No packet waits for this crate: changes come from the change journal of the state table.
#![forbid(unsafe_code)]

mod batches;
pub mod group;
mod known;
mod message;
#[cfg(feature = "nats")]
pub mod nats;
mod outgoing;
mod peer;
mod removed;
mod replica;
#[cfg(test)]
mod simulation;
mod stats;
mod sync;
#[cfg(feature = "nats")]
pub mod worker_bus;
pub mod workers;

pub use message::VERSION;
pub use outgoing::Replicate;
pub use replica::{Channel, MAX_PEERS, Output, PeerView, Replica, Settings, SyncView, Table};
pub use stats::FleetStats;
