//! The launcher: a small process that keeps root's privileges when root starts `towpath run`.
//!
//! ```text
//! engine (the started process)                          launcher (its child, root)
//! starts the launcher, binds sockets, then becomes      reads the configuration itself
//! the user of [engine], with no_new_privs
//!                         -- Adopt ----------------->   reads the configuration again
//!                         -- Open ---------------->   descriptors of ports that need a privilege
//!                         -- Start, Status, Kill --->   inspectors and workers, each as its own user
//!                         -- Upgrade --------------->   the next version of the engine, with a connection of its own
//! ```
//!
//! Rules:
//! - The engine can name only programs and ports that the launcher has read from the configuration. A program is named by a hash of its
//!   place, words and settings, an object of a port (`object.rs`) by the port's name and its kind.
//! - Requests and replies have a fixed layout (`message.rs`). The launcher handles no data of a peer.
//! - One request at a time is answered, in bounded time: the launcher waits for no process that it started.
//! - When the socket closes, each side assumes that the other has exited: the launcher kills its children and exits, the engine drains
//!   and exits.
//!   Signals that stop the engine do not stop the launcher.
//!
//! The engine is the parent, so that its process id, exit code, signals and output are those of an engine without a launcher.

mod client;
mod message;
mod object;
mod server;
mod unused_id;

pub(super) use client::Launcher;
pub use server::serve;

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::config::Config;
use crate::process::{Place, Program};

/// The programs of a configuration and their places.
fn programs(config: &Config) -> impl Iterator<Item = (Place, Program)> + '_ {
    let queues = config
        .queues
        .iter()
        .flat_map(|queue| queue.inspectors.programs().map(|program| (Place::Queue(queue.number), program)));
    let muxes = config.muxes.iter().filter(|mux| mux.workers > 0);
    queues.chain(muxes.map(|mux| (Place::Mux(mux.name.clone()), mux.program())))
}

/// The name of a program in requests. Both sides are the same executable, so they have the same hash function.
fn digest(place: &Place, program: &Program) -> u64 {
    let mut hasher = DefaultHasher::new();
    (place, program).hash(&mut hasher);
    hasher.finish()
}

/// A hash of everything in a configuration that the launcher uses.
fn digest_of_all(config: &Config) -> u64 {
    let mut hasher = DefaultHasher::new();
    for program in programs(config) {
        program.hash(&mut hasher);
    }
    let mut ports: Vec<_> =
        config.ports.iter().map(|port| format!("{} {:?}", port.name, port.driver)).collect();
    ports.sort_unstable();
    ports.hash(&mut hasher);
    config.engine.upgrade.hash(&mut hasher);
    hasher.finish()
}
