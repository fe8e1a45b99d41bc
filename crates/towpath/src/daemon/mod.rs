//! The engine between live ports.
//!
//! ```text
//! supervisor (the main thread)          worker (a thread for packets)
//! signals, sockets where inspectors   -->  commands: join, stop
//! attach, processes that it started        ports -> Engine -> Outside -> ports
//! ```
//!
//! A [`Worker`] has its ports, its engine, its inspectors' channels and its muxes to itself: its loop takes no lock that
//! anybody keeps, and waits for nobody. It sleeps only when nothing came for a while, on everything that may bring something: the ports, the
//! inspectors' doorbells, its eventfd. What needs a lookup, a file or a process is the [`Supervisor`]'s work.

mod capture_port;
mod huge_pages;
mod inspector_sockets;
mod mux_admission;
mod mux_service;
mod muxes;
mod named_port;
mod port_slot;
mod privilege;
mod round_robin;
mod signals;
mod supervisor;
mod worker;
mod worker_command;

pub use self::privilege::Capabilities;
pub use self::supervisor::{Ended, Failure, Supervisor};
pub use self::worker::Worker;

/// Makes the directory of a socket, when only that is missing: /run begins empty with every boot. Where it cannot be made,
/// the socket cannot either, and says so.
fn make_directory_of(path: &std::path::Path) {
    if let Some(directory) = path.parent()
        && !directory.exists()
    {
        let _ = std::fs::create_dir(directory);
    }
}
