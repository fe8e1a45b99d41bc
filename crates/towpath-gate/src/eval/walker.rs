//! Walkers: a thread's handle for evaluating the rules.
//!
//! Rules and tables are shared and immutable ([`super::generation`]). States are shared and changed by single
//! atomic operations ([`crate::state`]). Counters, log and random numbers belong to the walker. A walk therefore
//! takes no lock. The walker adopts changes of the gate before its next packet.

use std::sync::Arc;

use super::gate::GateSettings;
use super::generation::{CurrentGeneration, Generation};
use super::log::{PacketLog, RefusalLogLimiter};
use super::port::Ports;
use super::random::Random;
use super::routes::Routes;
use super::rule_counters::RuleCounters;
use super::walker_slot::{WalkerSlot, WalkerSlots};
use crate::state::States;
use towpath_wire::Time;

/// The data that the gate and its walkers share.
#[derive(Default)]
pub(super) struct Shared {
    pub(super) current: CurrentGeneration,
    pub(super) slots: WalkerSlots,
    pub(super) refusals: RefusalLogLimiter,
}

/// Evaluates the rules in one thread, concurrently with other walkers. Created by
/// [`Gate::walker`](super::Gate::walker).
///
/// Packets of one flow may go to any walker; their order is kept only if they go to the same one. Call
/// [`Walker::idle`] before a long pause.
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
    pub(super) generation: Generation,
    pub(super) version: u64,
    /// Version of the generation at the last prefetch ([`super::burst`]).
    pub(super) fetched: u64,
    pub(super) slot: Arc<WalkerSlot>,
    pub(super) counts: Arc<RuleCounters>,
    idle: bool,
    pub(super) states: States,
    pub(super) random: Random,
    pub(super) log: PacketLog,
}

impl Walker {
    pub(super) fn register(shared: Arc<Shared>, states: States, random: Random) -> Self {
        let (version, generation) = shared.current.take();
        let counts = Arc::new(RuleCounters::new(Arc::clone(&generation.program), None));
        let slot = shared.slots.register(version, Arc::clone(&counts));
        let log = PacketLog::default();
        Self { shared, generation, version, fetched: version, slot, counts, idle: false, states, random, log }
    }

    /// Adopts the current generation. [`Walker::walk`] does this itself; a thread without packets calls it so that
    /// replaced generations can be freed.
    #[inline]
    pub fn catch_up(&mut self) {
        if self.idle || self.shared.current.version() != self.version {
            self.adopt_generation();
        }
    }

    #[cold]
    fn adopt_generation(&mut self) {
        if self.idle {
            self.idle = false;
            self.slot.set_active(self.version);
        }
        if self.shared.current.version() != self.version {
            let (version, generation) = self.shared.current.take();
            self.switch_to(version, generation);
        }
    }

    /// Switches to a generation.
    pub(super) fn switch_to(&mut self, version: u64, generation: Generation) {
        if !Arc::ptr_eq(&generation.program, &self.counts.program) {
            self.counts = Arc::new(RuleCounters::new(Arc::clone(&generation.program), Some(&self.counts)));
        }
        (self.version, self.generation) = (version, generation);
        self.slot.publish(version, Arc::clone(&self.counts));
    }

    /// Marks the walker as idle: reclamation does not wait for it. The next call on the walker makes it active
    /// again.
    pub fn idle(&mut self) {
        self.states.idle();
        self.idle = true;
        self.slot.set_idle();
    }

    /// Frees at most `budget` expired states and their memory. Call it once per burst.
    pub fn expire(&mut self, now: Time, budget: usize) {
        self.catch_up();
        self.states.expire(now, budget);
    }

    /// The state table, which all walkers share.
    pub fn states(&self) -> &States {
        &self.states
    }

    /// The state table, for calls that change this walker's handle.
    pub fn states_mut(&mut self) -> &mut States {
        &mut self.states
    }

    /// Log entries of this walker's packets. The caller takes them. The limit of a rule (`logamount`) counts over
    /// all walkers.
    pub fn log(&mut self) -> &mut PacketLog {
        &mut self.log
    }

    /// The ports at the last call.
    pub fn ports(&self) -> &Ports {
        &self.generation.ports
    }

    /// The routes at the last call.
    pub fn routes(&self) -> &Routes {
        &self.generation.routes
    }

    /// The settings of the gate at the last call.
    pub fn settings(&self) -> GateSettings {
        self.generation.settings
    }
}

impl Drop for Walker {
    fn drop(&mut self) {
        self.shared.slots.unregister(&self.slot);
    }
}
