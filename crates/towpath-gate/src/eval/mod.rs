//! The gate: rules, tables, states and counters, and the walk of a packet through them.
//!
//! ```
//! use towpath_gate::{Dir, Gate, Ports, Step, Walk};
//! use towpath_wire::LinkType;
//! use towpath_gate::rules::Ruleset;
//! use towpath_gate::state;
//! use towpath_wire::{Time, self as wire};
//!
//! let rules = Ruleset::parse("t", "add allow udp from any to any 53").ruleset.unwrap();
//! let mut ports = Ports::new();
//! let cap0 = ports.add("cap0", Vec::new());
//! let mut gate = Gate::new(rules, ports, state::Settings::default(), 0x5eed);
//!
//! # let frame = [
//! #     0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 4, 0, 0, 53, 0, 8, 0, 0,
//! # ];
//! let packet = wire::parse(LinkType::RAW, &frame, frame.len() as u32).unwrap();
//! let mut walk = Walk::new(Dir::In, Some(cap0), None);
//! assert_eq!(gate.walk(&mut walk, &packet, Time::from_secs(1)), Step::Pass);
//! assert_eq!(gate.show()[0].packets, 1);
//! ```

mod burst;
mod class;
mod decision_tree;
mod evaluate;
mod explain;
mod flow_names;
mod generation;
mod index;
mod insn;
mod inspect_burst;
mod log;
mod packet_spec;
mod port;
mod program;
mod reload;
mod reply;
mod rule_counters;
mod snapshot;
mod stateless_prefix;
mod token_bucket;
mod walk;
mod walker;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

pub use burst::BURST;
pub use explain::{ActionOutcome, ExplainedRule, Explanation, RuleOutcome};
pub use log::{LogEntry, PacketLog};
pub use packet_spec::{PacketSpec, PacketSpecError};
pub use port::{PortId, Ports, Route, Routes};
pub use reload::{Diff, Rechecked, StatePolicy};
pub use reply::{NoReply, REPLIES_PER_SECOND, ReplyLimiter};
pub use snapshot::{Restored, SNAPSHOT_VERSION, SnapshotError, check_snapshot};
pub use walk::{CALL_DEPTH, Dir, DropReason, Edits, MAX_TAGS, Reject, Step, Walk};
pub use walker::Walker;

use self::flow_names::FlowNames;
use self::generation::Generation;
use self::program::{Program, Resolver};
use self::reload::RetiredGeneration;
use self::rule_counters::RuleCounter;
use self::token_bucket::TokenBucket;
use self::walker::Shared;
use crate::rules::table::Table;
use crate::rules::{DEFAULT_RULE, RESERVED_SET, Rule, Ruleset};
use crate::state::{self, Keepalive, Name, Pages, RuleId, States};
use towpath_wire::{Packet, Time};

/// The rule of states that come from outside and have no rule here: `allow ... // dynamic states default rule`.
pub const DEFAULT_DYNAMIC_RULE: RuleId = RuleId(0);

/// The gate: who has it decides what the rules are. It takes packets through them itself ([`Gate::walk`]), and any
/// number of threads do beside it ([`Gate::walker`]).
pub struct Gate {
    shared: Arc<Shared>,
    /// The gate's own walker, which always goes by what is in force.
    walker: Walker,
    /// The rules as they were written, beside `program.rules[..=default]`.
    rules: Vec<(RuleId, Rule)>,
    /// Rules that only states still have.
    hidden: Vec<(RuleId, Rule)>,
    /// What rules had seen when they were set to zero.
    zeroed: HashMap<RuleId, RuleCounter>,
    /// How much rules with `log` have logged.
    logged: HashMap<RuleId, Arc<AtomicU32>>,
    table_names: HashMap<Box<str>, u32>,
    flow_names: FlowNames,
    disabled_sets: u32,
    next_id: u32,
    walkers: u64,
    seed: u64,
    /// What was in force before, as long as walkers have it.
    leaving: Vec<RetiredGeneration>,
}

/// What the gate itself can be told, apart from the states' settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateSettings {
    /// Drop IPv6 packets with an extension header that nobody knows (ipfw's deny_unknown_exthdrs).
    pub deny_unknown_exthdrs: bool,
    /// Most packets that a `log` rule without `logamount` logs; 0 is no limit (ipfw's verbose_limit).
    pub verbose_limit: u32,
    /// An ICMP error about a packet of a flow with a state goes the state's way, as its own packets do.
    pub related: bool,
    /// A later fragment goes the way of its flow's state too, by the ports that the first fragment had (virtual
    /// reassembly). Off, it has no ports, as in ipfw.
    pub fragments: bool,
}

impl Default for GateSettings {
    fn default() -> Self {
        Self { deny_unknown_exthdrs: true, verbose_limit: 0, related: true, fragments: true }
    }
}

/// One rule of [`Gate::show`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleInfo {
    /// Number.
    pub number: u32,
    /// Set.
    pub set: u8,
    /// Packets for which the rule's action ran.
    pub packets: u64,
    /// Their bytes: of IP packets the length of the IP packet, of other frames that of the frame on the wire.
    pub bytes: u64,
    /// When the last one came; `None` before the first.
    pub last: Option<Time>,
    /// The rule, normalised.
    pub text: String,
}

impl Gate {
    /// A gate with these rules. `seed` makes `prob` and the states' hash unpredictable: take it from the system's
    /// random source, or fix it to repeat a run.
    pub fn new(ruleset: Ruleset, ports: Ports, states: state::Settings, seed: u64) -> Self {
        Self::with_pages(ruleset, ports, states, seed, Pages::Base)
    }

    /// The same with states in pages of that kind. Who wants huge ones calls [`Gate::prepare`] from time to time, so that no
    /// packet waits for the first touch of one.
    pub fn with_pages(
        ruleset: Ruleset,
        ports: Ports,
        states: state::Settings,
        seed: u64,
        pages: Pages,
    ) -> Self {
        let shared = Arc::new(Shared::default());
        let states = States::with_pages(states, seed, pages);
        let walker = Walker::join(Arc::clone(&shared), states, Random::new(seed, 0));
        let mut gate = Self {
            shared,
            walker,
            rules: Vec::new(),
            hidden: vec![(DEFAULT_DYNAMIC_RULE, companion())],
            zeroed: HashMap::new(),
            logged: HashMap::new(),
            table_names: HashMap::new(),
            flow_names: FlowNames::new(),
            disabled_sets: 0,
            next_id: 1,
            walkers: 0,
            seed,
            leaving: Vec::new(),
        };
        gate.load(ruleset, ports);
        gate
    }

    /// Another thread's way in: it sees every change of rules, tables and states from its next packet on. `None` when
    /// there are 64, the gate itself included.
    ///
    /// What a change replaces is kept as long as a walker goes by it, and goes in [`Gate::expire`].
    pub fn walker(&mut self) -> Option<Walker> {
        let states = self.walker.states.worker()?;
        self.walkers += 1;
        Some(Walker::join(Arc::clone(&self.shared), states, Random::new(self.seed, self.walkers)))
    }

    /// Takes a packet through the rules: from the first, or, with a walk that stopped at a divert or tee, on from the
    /// next one. `now` never goes back.
    pub fn walk(&mut self, walk: &mut Walk, packet: &Packet<'_>, now: Time) -> Step {
        self.walker.walk(walk, packet, now)
    }

    /// The same, one rule after the other: what the index must agree with.
    #[doc(hidden)]
    pub fn walk_linear(&mut self, walk: &mut Walk, packet: &Packet<'_>, now: Time) -> Step {
        self.walker.walk_linear(walk, packet, now)
    }

    /// What is in force.
    #[inline]
    fn live(&self) -> &Generation {
        &self.walker.live
    }

    /// Takes a ruleset as if there had been none.
    fn load(&mut self, ruleset: Ruleset, ports: Ports) {
        let Ruleset { rules, tables, pipes, disabled_sets } = ruleset;
        self.rules = rules.into_iter().map(|rule| (self.new_id(), rule)).collect();
        self.disabled_sets = disabled_sets;
        let tables = self.name_tables(tables);
        let bucket = |(number, pipe)| (number, Arc::new(TokenBucket::new(pipe)));
        let pipes = Arc::new(pipes.into_iter().map(bucket).collect());
        let ports = Arc::new(ports);
        self.compile(|live| *live = Generation { tables, pipes, ports, ..live.clone() });
    }

    fn new_id(&mut self) -> RuleId {
        let id = RuleId(self.next_id);
        self.next_id += 1;
        id
    }

    /// Gives tables their numbers, and takes those of all others away.
    fn name_tables(&mut self, tables: BTreeMap<Box<str>, Table>) -> Arc<Vec<Arc<Table>>> {
        self.table_names = tables.keys().cloned().zip(0..).collect();
        Arc::new(tables.into_values().map(Arc::new).collect())
    }

    /// Makes the program anew from the rules, and puts it in force together with what `change` changes.
    fn compile(&mut self, change: impl FnOnce(&mut Generation)) {
        self.name_flows();
        let with_log = self.rules.iter().chain(&self.hidden).filter(|(_, rule)| rule.log.is_some());
        let logged = with_log.map(|(id, _)| (*id, self.logged.get(id).cloned().unwrap_or_default()));
        self.logged = logged.collect();
        // All of the work is done before it is in force: walkers wait for none of it.
        let mut next = self.live().clone();
        change(&mut next);
        let program = Program::new(
            self.rules.iter().map(|(id, rule)| (*id, rule)),
            self.hidden.iter().map(|(id, rule)| (*id, rule)),
            &self.resolver(&next.ports),
        );
        next.program = Arc::new(program);
        self.change(|live| *live = next);
    }

    /// Gives the flow names of all rules their numbers.
    fn name_flows(&mut self) {
        let names = |rules: &[(RuleId, Rule)]| -> Vec<Box<str>> {
            rules.iter().flat_map(|(_, rule)| rule.flow_names()).collect()
        };
        // In the order of the rules: two gates with the same rules have the same numbers.
        let own = names(&self.rules);
        let short = |gate: &Self| {
            let new = own.iter().filter(|name| gate.flow_names.get(name).is_none());
            new.collect::<HashSet<_>>().len() > gate.flow_names.room()
        };
        if short(self) {
            self.forget_flow_names(true);
        }
        if short(self) {
            // What rules that are gone have left behind gives way, and what a walker makes by one now goes with it.
            let ids: HashSet<RuleId> = self.rules.iter().map(|(id, _)| *id).collect();
            self.walker.states.remove_where(|id| !ids.contains(&id));
            self.forget_flow_names(false);
        }
        for name in own.iter().chain(&names(&self.hidden)) {
            self.flow_names.give(name);
        }
    }

    /// Takes the numbers of names back that no rule has, and no state; nor, `also_left`, a rule that a walker may go by.
    fn forget_flow_names(&mut self, also_left: bool) {
        let own = self.rules.iter().flat_map(|(_, rule)| rule.flow_names());
        let mut used: HashSet<Name> = own.filter_map(|name| self.flow_names.get(&name)).collect();
        if also_left {
            let programs =
                self.leaving.iter().filter_map(RetiredGeneration::program).chain([&*self.live().program]);
            used.extend(programs.flat_map(Program::flow_names));
        }
        used.extend(self.states().list(self.walker.states.now()).map(|listed| listed.name));
        self.flow_names.keep(&used);
    }

    /// Changes what is in force. Its number then.
    fn change<T>(&mut self, change: impl FnOnce(&mut Generation) -> T) -> T {
        let alone = self.shared.seats.alone();
        let before = (!alone).then(|| (self.shared.current.version(), self.live().clone()));
        let mut own = std::mem::take(&mut self.walker.live);
        let (version, done) = self.shared.current.change(&mut own, change);
        self.walker.go_by(version, own);
        self.leaving.extend(before.map(|(version, live)| RetiredGeneration::new(version, live)));
        done
    }

    /// What names in rules stand for.
    fn resolver<'g>(&'g self, ports: &'g Ports) -> Resolver<'g> {
        Resolver {
            ports,
            tables: &self.table_names,
            flows: self.flow_names.numbers(),
            disabled_sets: self.disabled_sets,
            logged: &self.logged,
        }
    }

    /// What each rule has seen since it was set to zero, of `rules`.
    fn counters(&self) -> Vec<RuleCounter> {
        let mut counters = self.shared.seats.sums(self.rules.iter().map(|(id, _)| *id));
        for (counter, (id, _)) in counters.iter_mut().zip(&self.rules) {
            if let Some(zeroed) = self.zeroed.get(id) {
                *counter = counter.since(*zeroed);
            }
        }
        counters
    }

    /// The rules that no packet has matched since they were loaded or zeroed, but for the default rule.
    pub fn unused(&self) -> impl Iterator<Item = &Rule> {
        let default = self.live().program.default;
        let counted = self.rules[..default].iter().zip(self.counters());
        counted.filter(|(_, counter)| counter.packets == 0).map(|((_, rule), _)| rule)
    }

    /// Every rule in order with its counters, the default rule last.
    pub fn show(&self) -> Vec<RuleInfo> {
        let shown = |((_, rule), counter): (&(RuleId, Rule), RuleCounter)| RuleInfo {
            number: rule.number,
            set: rule.set,
            packets: counter.packets,
            bytes: counter.bytes,
            last: (counter.packets > 0).then_some(counter.last),
            text: rule.to_string(),
        };
        self.rules.iter().zip(self.counters()).map(shown).collect()
    }

    /// The dynamic states.
    pub fn states(&self) -> &States {
        &self.walker.states
    }

    /// The dynamic states, to change their settings.
    pub fn states_mut(&mut self) -> &mut States {
        &mut self.walker.states
    }

    /// Frees states that are over, `budget` of them at most, and what walkers no longer go by. Call it once a burst, or
    /// from time to time when the walkers do the work.
    pub fn expire(&mut self, now: Time, budget: usize) {
        self.beside(|gate| {
            gate.walker.expire(now, budget);
            if !gate.leaving.is_empty() {
                gate.let_leave();
            }
        });
    }

    /// Does something with the states that is no packet's: nobody waits for the gate itself afterwards, unless it takes
    /// packets through the rules too, and so calls again.
    fn beside<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let idle = self.walker.states.is_idle();
        let done = work(self);
        if idle {
            self.walker.states.idle();
        }
        done
    }

    /// Makes and touches memory that states are going to need, and lets growth go on ([`States::prepare`]). Whether there is
    /// more to do now. For who does not take packets: it takes a millisecond or, with huge pages, several.
    pub fn prepare(&mut self) -> bool {
        self.beside(|gate| gate.walker.states.prepare())
    }

    /// Gives the keepalives that are due ([`States::keepalives`]): for the gate's owner to send, outside the rules, by
    /// the port that each is routed to.
    pub fn keepalives(&mut self, now: Time, budget: usize, send: impl FnMut(Keepalive)) {
        self.beside(|gate| gate.walker.states.keepalives(now, budget, send));
    }

    /// The name of a flow name, without the colon; `?` for one that this gate never made.
    pub fn flow_name(&self, name: Name) -> &str {
        self.flow_names.name(name).unwrap_or("?")
    }

    /// The number of the rule with this identity, for listing states; the default rule's for one that is gone.
    pub fn rule_number(&self, id: RuleId) -> u32 {
        let program = &self.live().program;
        program.position_of(id).map_or(DEFAULT_RULE, |at| program.rules[at].number)
    }

    /// The ports.
    pub fn ports(&self) -> &Ports {
        &self.live().ports
    }

    /// Takes other ports; numbers of ports that walks hold must stay what they were.
    pub fn set_ports(&mut self, ports: Ports) {
        self.compile(|live| live.ports = Arc::new(ports));
    }

    /// The routes.
    pub fn routes(&self) -> &Routes {
        &self.live().routes
    }

    /// Takes the routes that verrevpath, versrcreach and antispoof ask.
    pub fn set_routes(&mut self, routes: Routes) {
        self.change(|live| live.routes = Arc::new(routes));
    }

    /// Enables and disables sets: bit N of `disabled` is set N. Set 31 stays enabled. States live on.
    pub fn set_disabled_sets(&mut self, disabled: u32) {
        self.disabled_sets = disabled & !(1 << RESERVED_SET);
        self.compile(|_| ());
    }

    /// The table of this name.
    pub fn table(&self, name: &str) -> Option<&Table> {
        self.live().tables.get(*self.table_names.get(name)? as usize).map(|table| &**table)
    }

    /// Changes the table of this name: everything that `change` does is one step for the packets. Beside walkers the
    /// change is made in a copy of the table: one call for many entries is much better than many calls.
    pub fn with_table<T>(&mut self, name: &str, change: impl FnOnce(&mut Table) -> T) -> Option<T> {
        let at = *self.table_names.get(name)? as usize;
        let mut change = Some(change);
        let copied = match self.shared.seats.alone() {
            true => None,
            // The copy is made before walkers could wait for it.
            false => {
                let mut table = Table::clone(self.live().tables.get(at)?);
                change.take().map(|change| (change(&mut table), Arc::new(table)))
            }
        };
        self.change(|live| {
            let table = Arc::make_mut(&mut live.tables).get_mut(at)?;
            match (copied, change) {
                (Some((done, copy)), _) => {
                    *table = copy;
                    Some(done)
                }
                (None, change) => Some(change?(Arc::make_mut(table))),
            }
        })
    }

    /// What `log` rules wrote about packets that the gate itself took through the rules, to be taken away by the caller.
    pub fn log(&mut self) -> &mut PacketLog {
        &mut self.walker.log
    }

    /// The gate's own settings.
    pub fn settings(&self) -> GateSettings {
        self.live().settings
    }

    /// Changes the gate's own settings.
    pub fn set_settings(&mut self, settings: GateSettings) {
        self.change(|live| live.settings = settings);
    }

    /// Tags that found no room on their packet.
    pub fn tags_full(&self) -> u64 {
        self.shared.seats.tags_full()
    }

    /// Sets all counters to zero, or those of one rule number.
    pub fn zero(&mut self, number: Option<u32>) {
        let seen = self.shared.seats.sums(self.rules.iter().map(|(id, _)| *id));
        for ((id, rule), seen) in self.rules.iter().zip(seen) {
            if number.is_none_or(|number| rule.number == number) {
                self.zeroed.insert(*id, seen);
                if let Some(logged) = self.logged.get(id) {
                    // Relaxed: a number.
                    logged.store(0, Ordering::Relaxed);
                }
            }
        }
    }
}

fn companion() -> Rule {
    let mut rule = Ruleset::empty().with_default_allow(true).rules.remove(0);
    rule.set = RESERVED_SET;
    rule.comment = Some("dynamic states default rule".into());
    rule
}

/// The generator behind `prob` (splitmix64): small, and repeatable from its seed.
#[derive(Clone, Copy, Debug)]
struct Random(u64);

impl Random {
    /// The numbers of walker `walker`.
    fn new(seed: u64, walker: u64) -> Self {
        Self(seed ^ 0x9e37_79b9_7f4a_7c15 ^ walker.wrapping_mul(0xd6e8_feb8_6659_fd93))
    }

    /// 31 random bits.
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 33) as u32
    }
}
