//! Rules without an engine: `check`, `check --against` and `explain` evaluate the packets of captures with them.

use std::time::Duration;

use towpath::explained::way_out;
use towpath_engine::Topology;
use towpath_gate::{Dir, Edits, Gate, PortId, Step, Walk};
use towpath_wire::{Packet, Time};

use crate::args::exit;
use crate::cli::fail;
use crate::cli::wiring::Wrong;

/// Interval between collections of expired states, in capture time.
pub(crate) const EXPIRE_EVERY: Duration = Duration::from_secs(1);

/// A gate whose packets arrive on the first interface of its topology. Inspectors pass every packet.
pub(crate) struct OfflineGate {
    pub(crate) gate: Gate,
    topology: Topology,
    /// The time of the last collection of expired states.
    expired: Time,
}

/// Why packets could not be evaluated.
pub(crate) enum Failure {
    Wrong(Wrong),
    Capture(String),
}

impl Failure {
    /// Prints the error. Returns the exit code.
    pub(crate) fn tell(self) -> u8 {
        match self {
            Self::Wrong(wrong) => wrong.tell(),
            Self::Capture(message) => fail(exit::NO_CAPTURE, message),
        }
    }
}

impl From<Wrong> for Failure {
    fn from(wrong: Wrong) -> Self {
        Self::Wrong(wrong)
    }
}

impl From<towpath_port::Error> for Failure {
    fn from(error: towpath_port::Error) -> Self {
        Self::Capture(error.to_string())
    }
}

/// The outcome of a packet's walks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) step: Step,
    /// Number of the rule that decided; `None` if the packet was dropped before the first rule.
    pub(crate) rule: Option<u32>,
    /// Changes of the packet.
    pub(crate) edits: Edits,
    /// Direction of the walk that ended it.
    pub(crate) dir: Dir,
}

impl Ended {
    /// Returns true if the packet ends in the same way, whichever rule decides.
    pub(crate) fn same_as(&self, other: &Self) -> bool {
        (self.step, self.edits) == (other.step, other.edits)
    }
}

impl OfflineGate {
    pub(crate) fn new((gate, topology): (Gate, Topology)) -> Self {
        Self { gate, topology, expired: Time::default() }
    }

    /// The port that a packet arrives on.
    pub(crate) fn arrival(&self, packet: &Packet<'_>) -> PortId {
        self.topology.port(packet)
    }

    /// Evaluates the rules for an arriving packet, in and out, with their effects on states and counters.
    pub(crate) fn process(&mut self, packet: &Packet<'_>, now: Time) -> Ended {
        if now.since(self.expired) >= EXPIRE_EVERY {
            self.gate.expire(now, usize::MAX);
            self.expired = now;
        }
        let mut walk = Walk::new(Dir::In, Some(self.arrival(packet)), None);
        loop {
            let step = self.walk(&mut walk, packet, now);
            match self.way_out(&walk, packet, step) {
                Some(port) => walk.leave(port),
                None => return Ended { step, rule: walk.rule(), edits: walk.edits(), dir: walk.dir() },
            }
        }
    }

    /// Evaluates the rules in one direction.
    pub(crate) fn walk(&mut self, walk: &mut Walk, packet: &Packet<'_>, now: Time) -> Step {
        loop {
            match self.gate.walk(walk, packet, now) {
                Step::Divert(_) | Step::Tee(_) | Step::Reassemble => {}
                step => return step,
            }
        }
    }

    /// See [`way_out`].
    pub(crate) fn way_out(&self, walk: &Walk, packet: &Packet<'_>, step: Step) -> Option<PortId> {
        let (_, mode) = self.topology.of(packet, 0);
        way_out(mode, self.gate.routes(), walk, packet, step)
    }
}
