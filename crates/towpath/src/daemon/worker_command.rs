//! Commands from the supervisor to a worker, and the eventfd that wakes it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::Sender;
use std::time::Instant;

use towpath_gate::state::Keepalive;

use super::muxes::Served;
use crate::config::Engine;
use towpath_engine::queue::{DefaultVerdict, Policy, RingChannel};
use towpath_port::{HandOver, Stats};

/// What a worker hands over to one in another process, when nothing is received any more.
#[derive(Debug)]
pub(super) struct HandedOver {
    /// Queues and sockets of the inspectors.
    pub(super) inspectors: Vec<(u16, OwnedFd)>,
    /// The counters of the ports.
    pub(super) ports: Vec<Stats>,
}

/// A command from the supervisor to a worker.
#[derive(Debug)]
pub(super) enum WorkerCommand {
    /// Attaches an inspector to a queue. The number identifies its channel.
    Join(u16, u32, Box<RingChannel>),
    /// The same for an inspector on standby.
    JoinStandby(u16, u32, Box<RingChannel>),
    /// Checks whether the inspectors are alive: a process has ended.
    CheckInspectors,
    /// Serves a mux between packet bursts.
    Serve(Box<Served>),
    /// Starts receiving: all inspectors and workers of the configuration have attached.
    Begin,
    /// Sends keepalive segments of idle connections by their routes.
    Keepalives(Vec<Keepalive>),
    /// Sets the policy of a queue, which is created if it is new.
    Queue(u16, Policy),
    /// Sets the verdict for packets of queues that are not configured.
    Unserved(DefaultVerdict),
    /// Sets burst size, wait policy and drain timeout.
    Pace(Engine),
    /// Drops the sender, which tells the supervisor that all earlier commands are done.
    Settle(Sender<()>),
    /// Stops receiving, for an upgrade. The sender is dropped when every received packet is decided and sent, and no inspector has a
    /// frame. Inspectors that still have one at the time are detached.
    Pause(Instant, Sender<()>),
    /// Sends what each port hands over to another process.
    Ports(Sender<Vec<io::Result<Option<HandOver>>>>),
    /// Gives up the inspectors. The worker is paused.
    HandOver(Sender<HandedOver>),
    /// Continues the counters of the ports of another process.
    Counters(Vec<Stats>),
    /// Receives again after `Pause`.
    Resume,
    /// Stops receiving and waits for packets that inspectors hold.
    Drain,
}
