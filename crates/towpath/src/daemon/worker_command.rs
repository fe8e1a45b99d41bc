//! What the supervisor tells a worker, and how it wakes it.

use std::sync::mpsc::Sender;

use towpath_gate::state::Keepalive;

use super::muxes::Served;
use crate::config::{Engine, Route};
use crate::inspector::Inspector;
use towpath_engine::queue::{DefaultVerdict, Policy};

/// What the supervisor tells a worker.
#[derive(Debug)]
pub(super) enum WorkerCommand {
    /// An inspector has attached to a queue; the number names its channel.
    Join(u16, u32, Box<Inspector>),
    /// A mux, to be served between the packets.
    Serve(Box<Served>),
    /// Everybody who was to be there at the start has attached: packets are received from now on.
    Begin,
    /// Segments for silent connections, to be sent by their routes.
    Keepalives(Vec<Keepalive>),
    /// There is this queue, with this policy's default verdict from now on.
    Queue(u16, Policy),
    /// What becomes of packets for queues that are not configured.
    Unserved(DefaultVerdict),
    /// What goes whereto, of the ports that are routed to; and by other routes, where there is none.
    Routes(Vec<Route>, Vec<Route>),
    /// Most packets at a time, what to do when nothing comes, how long to wait for inspectors at the end.
    Pace(Engine),
    /// To be let go of when everything that was said before is done.
    Settle(Sender<()>),
    /// Nothing more is received; what inspectors have is waited for.
    Drain,
}
