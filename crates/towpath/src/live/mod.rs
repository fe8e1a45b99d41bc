//! The engine between live ports.
//!
//! ```text
//! administrator (the main thread)          worker (a thread for packets)
//! signals, sockets where inspectors   -->  orders: join, stop
//! attach, processes that it started        ports -> Engine -> Outside -> ports
//! ```
//!
//! A [`Worker`] has its ports, its engine, its inspectors' channels and its muxes to itself: its loop takes no lock that
//! anybody keeps, and waits for nobody. It sleeps only when nothing came for a while, on everything that may bring something: the ports, the
//! inspectors' doorbells, its [`Bell`]. What needs a lookup, a file or a process is the [`Administrator`]'s work.

mod administrator;
mod captures;
mod door;
mod hugepages;
mod muxes;
mod named;
mod order;
mod port;
mod privilege;
mod round;
mod service;
mod signals;
mod sockets;
mod worker;

pub use self::administrator::{Administrator, Ended, Failure};
pub use self::order::Bell;
pub use self::privilege::Capabilities;
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
