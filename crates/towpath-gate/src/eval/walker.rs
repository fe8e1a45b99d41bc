//! The gate as one thread uses it: its place among the walkers, with all that a packet's walk changes.
//!
//! What: rules and tables are shared and never changed under a walker ([`super::generation`]); states are shared and changed
//! by single atomic operations ([`crate::state`]); counters, the log and the random numbers are the walker's own. So a
//! packet's walk takes no lock. What the gate changes is taken over before a walker's next packet.

use std::sync::Arc;

use super::generation::{CurrentGeneration, Generation};
use super::log::{PacketLog, RefusalLogLimiter};
use super::port::{Ports, Routes};
use super::rule_counters::{RuleCounters, WalkerSlot, WalkerSlots};
use super::{GateSettings, Random};
use crate::state::States;
use towpath_wire::Time;

/// What the gate and its walkers share.
#[derive(Default)]
pub(super) struct Shared {
    pub(super) current: CurrentGeneration,
    pub(super) seats: WalkerSlots,
    pub(super) refusals: RefusalLogLimiter,
}

/// A thread's own way into the gate ([`super::Gate::walker`]): takes packets through the rules beside other threads.
///
/// Packets of one flow may go to any walker; their order is kept where they are given to one. A thread that does not
/// call for long should say so ([`Walker::idle`]).
///
/// ```
/// use towpath_gate::{Dir, Gate, Ports, Step, Walk};
/// use towpath_wire::{self as wire, LinkType, Time};
/// use towpath_gate::rules::Ruleset;
/// use towpath_gate::state;
///
/// let rules = Ruleset::parse("t", "add allow udp from any to any 53 keep-state").ruleset.unwrap();
/// let mut gate = Gate::new(rules, Ports::new(), state::Settings::default(), 0x5eed);
/// let mut walkers: Vec<_> = std::iter::repeat_with(|| gate.walker().unwrap()).take(2).collect();
///
/// # let frame = [
/// #     0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 4, 0, 0, 53, 0, 8, 0, 0,
/// # ];
/// std::thread::scope(|scope| {
///     for walker in &mut walkers {
///         scope.spawn(|| {
///             let packet = wire::parse(LinkType::RAW, &frame, frame.len() as u32).unwrap();
///             let mut walk = Walk::new(Dir::In, None, None);
///             assert_eq!(walker.walk(&mut walk, &packet, Time::from_secs(1)), Step::Pass);
///         });
///     }
/// });
/// // Both had a packet of one flow: there is one state.
/// assert_eq!((gate.show()[0].packets, gate.states().len()), (2, 1));
/// ```
pub struct Walker {
    pub(super) shared: Arc<Shared>,
    pub(super) live: Generation,
    pub(super) version: u64,
    /// What was in force when packets were fetched last ([`super::burst`]).
    pub(super) fetched: u64,
    pub(super) seat: Arc<WalkerSlot>,
    pub(super) counts: Arc<RuleCounters>,
    away: bool,
    pub(super) states: States,
    pub(super) random: Random,
    pub(super) log: PacketLog,
}

impl Walker {
    pub(super) fn join(shared: Arc<Shared>, states: States, random: Random) -> Self {
        let (version, live) = shared.current.take();
        let counts = Arc::new(RuleCounters::new(Arc::clone(&live.program), None));
        let seat = shared.seats.join(version, Arc::clone(&counts));
        let log = PacketLog::default();
        Self { shared, live, version, fetched: version, seat, counts, away: false, states, random, log }
    }

    /// Takes over what the gate has changed, if it has. [`Walker::walk`] does it by itself; for a thread that has no
    /// packets, so that what was replaced can go.
    #[inline]
    pub fn catch_up(&mut self) {
        if self.away || self.shared.current.version() != self.version {
            self.take_over();
        }
    }

    #[cold]
    fn take_over(&mut self) {
        if self.away {
            self.away = false;
            self.seat.come(self.version);
        }
        if self.shared.current.version() != self.version {
            let (version, live) = self.shared.current.take();
            self.go_by(version, live);
        }
    }

    /// Goes by this from now on.
    pub(super) fn go_by(&mut self, version: u64, live: Generation) {
        if !Arc::ptr_eq(&live.program, &self.counts.program) {
            self.counts = Arc::new(RuleCounters::new(Arc::clone(&live.program), Some(&self.counts)));
        }
        (self.version, self.live) = (version, live);
        self.seat.take(version, Arc::clone(&self.counts));
    }

    /// Says that this thread will not call for a while: nothing that is to go waits for it. The next call comes back.
    pub fn idle(&mut self) {
        self.states.idle();
        self.away = true;
        self.seat.go();
    }

    /// Frees states that are over, `budget` of them at most, and makes room that was theirs. Call it once a burst.
    pub fn expire(&mut self, now: Time, budget: usize) {
        self.catch_up();
        self.states.expire(now, budget);
    }

    /// The dynamic states, as this walker sees them: they are the same for all.
    pub fn states(&self) -> &States {
        &self.states
    }

    /// The dynamic states, for what changes this walker's handle on them.
    pub fn states_mut(&mut self) -> &mut States {
        &mut self.states
    }

    /// What `log` rules wrote about this walker's packets, to be taken away by the caller. How much a rule logs
    /// (`logamount`) is counted for all walkers together.
    pub fn log(&mut self) -> &mut PacketLog {
        &mut self.log
    }

    /// The ports, as of the last call.
    pub fn ports(&self) -> &Ports {
        &self.live.ports
    }

    /// The routes, as of the last call.
    pub fn routes(&self) -> &Routes {
        &self.live.routes
    }

    /// The gate's own settings, as of the last call.
    pub fn settings(&self) -> GateSettings {
        self.live.settings
    }
}

impl Drop for Walker {
    fn drop(&mut self) {
        self.shared.seats.leave(&self.seat);
    }
}
