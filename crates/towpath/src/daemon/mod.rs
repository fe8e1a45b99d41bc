//! `towpath run`: the packet engine on live ports, supervised.
//!
//! ```text
//! supervisor (the main thread)            worker (one thread per engine)
//! signals, files, inspectors' sockets,    ports -> Engine -> PortIo -> ports
//! child processes                   -->   commands: join, queue, routes, drain
//! ```
//!
//! A [`Worker`] owns its ports, its engine, its inspectors' channels and its muxes. Its loop waits for no other thread. It sleeps
//! only after a while without work, and is woken by its ports, its inspectors' doorbells and its eventfd. The
//! [`Supervisor`] does everything that needs a lookup, a file or a process.

mod huge_pages;
mod inherited;
mod inspector_sockets;
pub mod launcher;
mod mux_admission;
mod mux_service;
mod muxes;
mod privilege;
mod remote_front;
mod round_robin;
mod signals;
mod stalled;
mod supervisor;
mod worker;
mod worker_command;

pub use self::inherited::Inherited;
pub use self::privilege::Capabilities;
pub use self::supervisor::ruleset as wiring;
pub use self::supervisor::{Ended, Failure, Supervisor};
pub use self::worker::Worker;

/// Creates the directory of a socket for the engine's user if only the last component is missing: /run is empty after boot. If this fails, binding
/// the socket reports the error.
fn make_directory_of(path: &std::path::Path, identity: Option<crate::process::Identity>) {
    if let Some(directory) = path.parent()
        && !directory.exists()
        && std::fs::create_dir(directory).is_ok()
    {
        let _ = inspector_sockets::own(directory, identity);
    }
}
