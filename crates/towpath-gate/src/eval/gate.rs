//! The gate: ruleset, tables, counters and the current generation.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::flow_names::FlowNames;
use super::generation::Generation;
use super::log::PacketLog;
use super::port::Ports;
use super::program::{Program, Resolver};
use super::random::Random;
use super::retired::RetiredGeneration;
use super::routes::Routes;
use super::rule_counters::RuleCounter;
use super::step::Step;
use super::token_bucket::TokenBucket;
use super::walk::Walk;
use super::walker::{Shared, Walker};
use crate::rules::table::Table;
use crate::rules::{DEFAULT_RULE, RESERVED_SET, Rule, Ruleset};
use crate::settings::{SettingError, settings};
use crate::state::{self, Flow, Keepalive, Kind, Listed, Name, Pages, RuleId, States};
use towpath_metrics::metrics;
use towpath_wire::{Packet, Time};

/// The rule of restored states whose own rule does not exist here: `allow ... // dynamic states default rule`.
pub const DEFAULT_DYNAMIC_RULE: RuleId = RuleId(0);

/// Owns the ruleset. Other threads evaluate it through a [`Walker`]; the owner can also evaluate it itself
/// ([`Gate::walk`]).
///
/// Rules, tables, ports and routes are changed through the gate. Walkers see each change as one step.
pub struct Gate {
    pub(super) shared: Arc<Shared>,
    /// The gate's own walker; always at the current generation.
    pub(super) walker: Walker,
    /// The rules in source form, in the order of `program.rules[..=default]`.
    pub(super) rules: Vec<(RuleId, Rule)>,
    /// Deleted rules that still have states, and the default dynamic rule.
    pub(super) hidden: Vec<(RuleId, Rule)>,
    /// Deleted rules whose states stay with them ([`StatePolicy::Keep`](super::StatePolicy::Keep)).
    pub(super) orphans: HashSet<RuleId>,
    /// Steps of a re-check are due.
    pub(super) rechecking: bool,
    /// Counter values at the last [`Gate::zero`].
    pub(super) zeroed: HashMap<RuleId, RuleCounter>,
    /// Number of packets that each `log` rule has logged.
    pub(super) logged: HashMap<RuleId, Arc<AtomicU32>>,
    pub(super) table_names: HashMap<Box<str>, u32>,
    pub(super) flow_names: FlowNames,
    pub(super) disabled_sets: u32,
    pub(super) next_id: u32,
    pub(super) walkers: u64,
    pub(super) seed: u64,
    /// Earlier generations that a walker may still use.
    pub(super) retired: Vec<RetiredGeneration>,
    /// Called with the version of each change.
    pub(super) publishes: Option<Box<dyn Fn(u64) + Send + Sync>>,
}

metrics! {
    /// Counters of the gate, summed over its walkers.
    pub struct GateCounters in "gate" {
        /// Tags that a rule could not attach, because the packet already had 16.
        pub tags_full: counter events,
    }
}

settings! {
    /// Settings of the gate. The settings of the state table are [`state::Settings`].
    ///
    /// With `fragments`, later fragments have the ports of the first fragment (virtual reassembly); without, they have no ports, as
    /// in ipfw.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct GateSettings {
        /// drop IPv6 packets with an unknown extension header
        pub deny_unknown_exthdrs: ipfw switch = true,
        /// packets that a `log` rule without `logamount` logs; 0 means all
        pub verbose_limit: ipfw number = 0,
        /// an ICMP error follows the state of the packet that it quotes
        pub related: towpath switch = true,
        /// later fragments follow the state of the first one
        pub fragments: towpath switch = true,
    }
}

impl GateSettings {
    /// Sets the setting called `name`.
    ///
    /// # Errors
    /// There is no such setting, or `value` is out of its range.
    pub fn set(&mut self, name: &str, value: u64) -> Result<(), SettingError> {
        self.set_value(name, value)
    }
}

/// One rule with its counters ([`Gate::show`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleInfo {
    /// Rule number.
    pub number: u32,
    /// Set, 0 to 31.
    pub set: u8,
    /// Packets for which the action ran.
    pub packets: u64,
    /// Bytes of these packets: the length of the IP packet, or of the frame on the wire if it is not IP.
    pub bytes: u64,
    /// Time of the last packet; `None` if there was none.
    pub last: Option<Time>,
    /// Normalised text of the rule.
    pub text: String,
}

impl Gate {
    /// Creates a gate with a ruleset. `seed` makes `prob` and the hash of the state table unpredictable. Take it
    /// from the system's random source, or use a constant to repeat a run.
    pub fn new(ruleset: Ruleset, ports: Ports, states: state::Settings, seed: u64) -> Self {
        Self::with_pages(ruleset, ports, states, seed, Pages::Base)
    }

    /// Creates a gate whose states are stored in pages of this kind. With huge pages, call [`Gate::prepare`]
    /// periodically, so that no packet waits for the first access to a page.
    pub fn with_pages(
        ruleset: Ruleset,
        ports: Ports,
        states: state::Settings,
        seed: u64,
        pages: Pages,
    ) -> Self {
        let shared = Arc::new(Shared::default());
        let states = States::with_pages(states, seed, pages);
        let walker = Walker::register(Arc::clone(&shared), states, Random::new(seed, 0));
        let mut gate = Self {
            shared,
            walker,
            rules: Vec::new(),
            hidden: vec![(DEFAULT_DYNAMIC_RULE, default_dynamic_rule())],
            orphans: HashSet::new(),
            rechecking: false,
            zeroed: HashMap::new(),
            logged: HashMap::new(),
            table_names: HashMap::new(),
            flow_names: FlowNames::new(),
            disabled_sets: 0,
            next_id: 1,
            walkers: 0,
            seed,
            retired: Vec::new(),
            publishes: None,
        };
        gate.load(ruleset, ports);
        gate
    }

    /// Creates a walker for another thread. The walker sees every change of rules, tables and states from its next
    /// packet. Returns `None` if there are 64 walkers, the gate's own included.
    ///
    /// Replaced rules and tables stay in memory while a walker uses them; [`Gate::expire`] frees them.
    pub fn walker(&mut self) -> Option<Walker> {
        let states = self.walker.states.worker()?;
        self.walkers += 1;
        Some(Walker::register(Arc::clone(&self.shared), states, Random::new(self.seed, self.walkers)))
    }

    /// Calls `publishes` with the version of each change of rules, tables, ports, routes and settings from now on, when walkers see the
    /// change. The call must not block.
    pub fn on_change(&mut self, publishes: impl Fn(u64) + Send + Sync + 'static) {
        publishes(self.shared.current.version());
        self.publishes = Some(Box::new(publishes));
    }

    /// The gate's own walker, for [`Walker::fixed_walk`].
    pub fn own_walker(&mut self) -> &mut Walker {
        &mut self.walker
    }

    /// Returns true if a rule has `offload`.
    pub fn offloads(&self) -> bool {
        self.generation().program.offloads()
    }

    /// Evaluates the rules for a packet, like [`Walker::walk`]. `now` must not decrease between calls.
    pub fn walk(&mut self, walk: &mut Walk, packet: &Packet<'_>, now: Time) -> Step {
        self.walker.walk(walk, packet, now)
    }

    /// Evaluates the rules one after the other, without the index. The tests compare it with [`Gate::walk`].
    #[doc(hidden)]
    pub fn walk_linear(&mut self, walk: &mut Walk, packet: &Packet<'_>, now: Time) -> Step {
        self.walker.walk_linear(walk, packet, now)
    }

    /// The current generation.
    #[inline]
    pub(super) fn generation(&self) -> &Generation {
        &self.walker.generation
    }

    /// Loads a ruleset into an empty gate.
    pub(super) fn load(&mut self, ruleset: Ruleset, ports: Ports) {
        let Ruleset { rules, tables, pipes, disabled_sets } = ruleset;
        self.rules = rules.into_iter().map(|rule| (self.new_id(), rule)).collect();
        self.disabled_sets = disabled_sets;
        let tables = self.name_tables(tables);
        let bucket = |(number, pipe)| (number, Arc::new(TokenBucket::new(pipe)));
        let pipes = Arc::new(pipes.into_iter().map(bucket).collect());
        let ports = Arc::new(ports);
        self.compile(|generation| *generation = Generation { tables, pipes, ports, ..generation.clone() });
    }

    pub(super) fn new_id(&mut self) -> RuleId {
        let id = RuleId(self.next_id);
        self.next_id += 1;
        id
    }

    /// Assigns numbers to the tables, replacing all earlier numbers.
    pub(super) fn name_tables(&mut self, tables: BTreeMap<Box<str>, Table>) -> Arc<Vec<Arc<Table>>> {
        self.table_names = tables.keys().cloned().zip(0..).collect();
        Arc::new(tables.into_values().map(Arc::new).collect())
    }

    /// Compiles the rules and publishes the program together with the changes of `change`.
    pub(super) fn compile(&mut self, change: impl FnOnce(&mut Generation)) {
        self.name_flows();
        let with_log = self.rules.iter().chain(&self.hidden).filter(|(_, rule)| rule.log.is_some());
        let logged = with_log.map(|(id, _)| (*id, self.logged.get(id).cloned().unwrap_or_default()));
        self.logged = logged.collect();
        // All work is done before the change is published: walkers do not wait for it.
        let mut next = self.generation().clone();
        change(&mut next);
        let program = Program::new(
            self.rules.iter().map(|(id, rule)| (*id, rule)),
            self.hidden.iter().map(|(id, rule)| (*id, rule)),
            &self.resolver(&next.ports),
        );
        next.left_names = if self.rechecking { program.left_names() } else { Arc::default() };
        next.program = Arc::new(program);
        self.change(|generation| *generation = next);
    }

    /// Assigns numbers to the flow names of all rules.
    pub(super) fn name_flows(&mut self) {
        let names = |rules: &[(RuleId, Rule)]| -> Vec<Box<str>> {
            rules.iter().flat_map(|(_, rule)| rule.flow_names()).collect()
        };
        // In the order of the rules, so that two gates with the same rules assign the same numbers.
        let own = names(&self.rules);
        let short = |gate: &Self| {
            let new = own.iter().filter(|name| gate.flow_names.get(name).is_none());
            new.collect::<HashSet<_>>().len() > gate.flow_names.free()
        };
        if short(self) {
            self.reclaim_flow_names(true);
        }
        if short(self) {
            // Removes the states of deleted rules, including those that a walker creates at this moment.
            let ids: HashSet<RuleId> = self.rules.iter().map(|(id, _)| *id).collect();
            self.walker.states.remove_where(|id| !ids.contains(&id));
            self.reclaim_flow_names(false);
        }
        for name in own.iter().chain(&names(&self.hidden)) {
            self.flow_names.intern(name);
        }
    }

    /// Frees the numbers of names that no rule and no state uses. With `also_left`, names that a walker's earlier
    /// generation uses are kept as well.
    pub(super) fn reclaim_flow_names(&mut self, also_left: bool) {
        let own = self.rules.iter().flat_map(|(_, rule)| rule.flow_names());
        let mut used: HashSet<Name> = own.filter_map(|name| self.flow_names.get(&name)).collect();
        if also_left {
            let programs = self
                .retired
                .iter()
                .filter_map(RetiredGeneration::program)
                .chain([&*self.generation().program]);
            used.extend(programs.flat_map(Program::flow_names));
        }
        used.extend(self.states().list(self.walker.states.now()).map(|listed| listed.name));
        self.flow_names.retain(&used);
    }

    /// Publishes a change to the current generation.
    pub(super) fn change<T>(&mut self, change: impl FnOnce(&mut Generation) -> T) -> T {
        // All work is done in the copy: walkers take it when it is complete.
        let mut next = self.generation().clone();
        let done = change(&mut next);
        let single = self.shared.slots.is_single();
        let before = (!single).then(|| (self.shared.current.version(), self.generation().clone()));
        let version = self.shared.current.publish(next.clone());
        if let Some(publishes) = &self.publishes {
            publishes(version);
        }
        self.walker.switch_to(version, next);
        match before {
            Some((version, generation)) => self.retired.push(RetiredGeneration::new(version, generation)),
            // No walker takes it any more.
            None => self.shared.current.discard_previous(),
        }
        done
    }

    /// Returns the meaning of the names in rules.
    pub(super) fn resolver<'g>(&'g self, ports: &'g Ports) -> Resolver<'g> {
        Resolver {
            ports,
            tables: &self.table_names,
            flows: self.flow_names.numbers(),
            disabled_sets: self.disabled_sets,
            logged: &self.logged,
        }
    }

    /// Returns the counters of `rules` since they were zeroed.
    pub(super) fn rule_counters(&self) -> Vec<RuleCounter> {
        let mut counters = self.shared.slots.sums(self.rules.iter().map(|(id, _)| *id));
        for (counter, (id, _)) in counters.iter_mut().zip(&self.rules) {
            if let Some(zeroed) = self.zeroed.get(id) {
                *counter = counter.since(*zeroed);
            }
        }
        counters
    }

    /// Returns the rules that have matched no packet since they were loaded or zeroed, except the default rule.
    pub fn unused(&self) -> impl Iterator<Item = &Rule> {
        let default = self.generation().program.default;
        let counted = self.rules[..default].iter().zip(self.rule_counters());
        counted.filter(|(_, counter)| counter.packets == 0).map(|((_, rule), _)| rule)
    }

    /// Returns every rule in order with its counters; the default rule is last.
    pub fn show(&self) -> Vec<RuleInfo> {
        let shown = |((_, rule), counter): (&(RuleId, Rule), RuleCounter)| RuleInfo {
            number: rule.number,
            set: rule.set,
            packets: counter.packets,
            bytes: counter.bytes,
            last: (counter.packets > 0).then_some(counter.last),
            text: rule.to_string(),
        };
        self.rules.iter().zip(self.rule_counters()).map(shown).collect()
    }

    /// The state table.
    pub fn states(&self) -> &States {
        &self.walker.states
    }

    /// The state table, to change its settings.
    pub fn states_mut(&mut self) -> &mut States {
        &mut self.walker.states
    }

    /// Frees at most `budget` expired states, and memory that walkers no longer use. Call it once per burst, or
    /// periodically if other threads evaluate the packets.
    pub fn expire(&mut self, now: Time, budget: usize) {
        self.maintain(|gate| {
            gate.walker.expire(now, budget);
            if !gate.retired.is_empty() {
                gate.reclaim_retired();
            }
        });
    }

    /// Runs maintenance work on the states. Afterwards no reclamation waits for the gate's own walker, unless that
    /// walker also evaluates packets.
    pub(super) fn maintain<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let idle = self.walker.states.is_idle();
        let done = work(self);
        if idle {
            self.walker.states.idle();
        }
        done
    }

    /// Allocates and touches memory that the state table will need, and continues its growth
    /// ([`States::prepare`]). Returns true if more work remains. Takes about a millisecond, several with huge
    /// pages; call it from a thread that does not process packets.
    pub fn prepare(&mut self) -> bool {
        self.maintain(|gate| gate.walker.states.prepare())
    }

    /// Removes the state of a flow (in either direction) under `name` ([`States::remove`]). Returns true if it was live.
    pub fn remove_state(&mut self, flow: &Flow, name: Name, now: Time) -> bool {
        self.maintain(|gate| gate.walker.states.remove(flow, name, now))
    }

    /// Calls `send` for each keepalive that is due ([`States::keepalives`]), at most `budget`. The caller sends
    /// each by the port to which it is routed, without evaluating the rules.
    pub fn keepalives(&mut self, now: Time, budget: usize, send: impl FnMut(Keepalive)) {
        self.maintain(|gate| gate.walker.states.keepalives(now, budget, send));
    }

    /// Returns the text of a flow name without the colon; `?` if the gate does not know it.
    pub fn flow_name(&self, name: Name) -> &str {
        self.flow_names.name(name).unwrap_or("?")
    }

    /// Returns the number of a rule for a listing of states. A deleted rule has the number of the default rule.
    pub fn rule_number(&self, id: RuleId) -> u32 {
        let program = &self.generation().program;
        program.position_of(id).map_or(DEFAULT_RULE, |at| program.rules[at].number)
    }

    /// The number of the rule under which a listing has this entry: [`rule_number`](Self::rule_number), or that of the default dynamic
    /// rule for the parent of orphans, which counts no state of a rule.
    pub fn listed_rule(&self, listed: &Listed) -> u32 {
        match listed.kind {
            Kind::Parent { .. } if listed.orphaned => self.rule_number(DEFAULT_DYNAMIC_RULE),
            _ => self.rule_number(listed.rule),
        }
    }

    /// The ports.
    pub fn ports(&self) -> &Ports {
        &self.generation().ports
    }

    /// Replaces the ports. The numbers of ports that walks in progress hold must not change.
    pub fn set_ports(&mut self, ports: Ports) {
        self.compile(|generation| generation.ports = Arc::new(ports));
    }

    /// The routes.
    pub fn routes(&self) -> &Routes {
        &self.generation().routes
    }

    /// Replaces the routes of `verrevpath`, `versrcreach` and `antispoof`.
    pub fn set_routes(&mut self, routes: Routes) {
        self.change(|generation| generation.routes = Arc::new(routes));
    }

    /// Enables and disables sets: bit N of `disabled` disables set N. Set 31 cannot be disabled. States are kept.
    pub fn set_disabled_sets(&mut self, disabled: u32) {
        self.disabled_sets = disabled & !(1 << RESERVED_SET);
        self.compile(|_| ());
    }

    /// Returns the table with this name.
    pub fn table(&self, name: &str) -> Option<&Table> {
        self.generation().tables.get(*self.table_names.get(name)? as usize).map(|table| &**table)
    }

    /// Changes the table with this name. Packets see all changes of one call as one step, and no packet waits.
    /// Returns `None` if the table does not exist.
    pub fn with_table<T>(&mut self, name: &str, change: impl FnOnce(&mut Table) -> T) -> Option<T> {
        let at = *self.table_names.get(name)? as usize;
        self.change(|generation| {
            let table = Arc::make_mut(&mut generation.tables).get_mut(at)?;
            // A shared table is cloned, which costs a few pointers.
            Some(change(Arc::make_mut(table)))
        })
    }

    /// Log entries of packets that the gate itself evaluated. The caller takes them.
    pub fn log(&mut self) -> &mut PacketLog {
        &mut self.walker.log
    }

    /// The settings of the gate.
    pub fn settings(&self) -> GateSettings {
        self.generation().settings
    }

    /// Replaces the settings of the gate.
    pub fn set_settings(&mut self, settings: GateSettings) {
        self.change(|generation| generation.settings = settings);
    }

    /// Returns the counters of the gate.
    pub fn counters(&self) -> GateCounters {
        GateCounters { tags_full: self.shared.slots.tags_full() }
    }

    /// Resets the number of packets that all rules have logged, or the rules with this number: they log up to `logamount` again.
    pub fn reset_log(&mut self, number: Option<u32>) {
        for (id, rule) in &self.rules {
            if number.is_none_or(|number| rule.number == number)
                && let Some(logged) = self.logged.get(id)
            {
                // Relaxed: an independent number.
                logged.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Zeroes the counters of all rules, or of the rules with this number, and resets their logs ([`Gate::reset_log`]).
    pub fn zero(&mut self, number: Option<u32>) {
        let seen = self.shared.slots.sums(self.rules.iter().map(|(id, _)| *id));
        for ((id, rule), seen) in self.rules.iter().zip(seen) {
            if number.is_none_or(|number| rule.number == number) {
                self.zeroed.insert(*id, seen);
            }
        }
        self.reset_log(number);
    }
}

fn default_dynamic_rule() -> Rule {
    let mut rule = Ruleset::empty().with_default_allow(true).rules.remove(0);
    rule.set = RESERVED_SET;
    rule.comment = Some("dynamic states default rule".into());
    rule
}
