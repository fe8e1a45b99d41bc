//! Configuration of a worker pool.

use std::time::Duration;

use towpath_mux::io::Tls;
use towpath_send::CopyMode;

use crate::process::{Place, Program, Starter};

use super::remote_slots::RemoteSlots;

/// Configuration of a worker pool.
#[derive(Clone, Debug)]
pub struct Config {
    /// The program of a worker. `towpath` as the first word means this executable.
    pub program: Program,
    /// The mux in the configuration.
    pub place: Place,
    /// Starts the workers.
    pub starter: Starter,
    /// Number of workers. 0 with workers on other machines only.
    pub workers: usize,
    /// Workers on other machines.
    pub remote: Option<RemoteSlots>,
    /// Time for connections to finish when the pool ends, and for a replaced worker.
    pub drain: Duration,
    /// A worker that holds a message for longer is killed. `None`: no limit.
    pub timeout: Option<Duration>,
    /// End the connection of a message that was abandoned because its workers died.
    pub close_undone: bool,
    /// Name of the mux.
    pub name: String,
    /// The workers' channels are numbered from here + 1.
    pub first_channel: u32,
    /// The mode in which replies of 16 KiB and more are sent.
    pub send: CopyMode,
    /// A worker may send messages to all connections, and answer a message several times.
    pub may_push: bool,
    /// Compare the checksum of each long reply at completion with that at submission. Reads every byte twice.
    /// See [`towpath_send::Counters::tampered`].
    pub send_check: bool,
    /// Certificates that SIGHUP reads again.
    pub tls: Option<Tls>,
}
