//! The gate: rules, tables, states and counters, and the walk of a packet through them.
//!
//! ```
//! use towpath_gate::gate::{Dir, Gate, Ports, Step, Walk};
//! use towpath_gate::packet::Link;
//! use towpath_gate::rules::Ruleset;
//! use towpath_gate::{Time, state, wire};
//!
//! let rules = Ruleset::parse("t", "add allow udp from any to any 53").ruleset.unwrap();
//! let mut ports = Ports::new();
//! let cap0 = ports.add("cap0", Vec::new());
//! let mut gate = Gate::new(rules, ports, state::Settings::default(), 0x5eed);
//!
//! # let frame = [
//! #     0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 4, 0, 0, 53, 0, 8, 0, 0,
//! # ];
//! let packet = wire::parse(Link::Ip, &frame, frame.len() as u32).unwrap();
//! let mut walk = Walk::new(Dir::In, Some(cap0), None);
//! assert_eq!(gate.walk(&mut walk, &packet, Time::from_secs(1)), Step::Pass);
//! assert_eq!(gate.show()[0].packets, 1);
//! ```

mod class;
mod cuts;
mod explain;
mod index;
mod insn;
mod log;
mod pipe;
mod port;
mod program;
mod reload;
mod reply;
mod run;
mod walk;
mod written;

use std::collections::HashMap;
use std::num::NonZeroU16;

pub use explain::{Explained, Explanation, Lead, Outcome};
pub use log::{Logged, PacketLog};
pub use port::{PortId, Ports, Route, Routes};
pub use reload::{Diff, StatePolicy};
pub use reply::{Limit, REPLIES_PER_SECOND, Silent};
pub use walk::{CALL_DEPTH, Dir, DropReason, Edits, MAX_TAGS, Reject, Step, Walk};
pub use written::{BadPacket, Written};

use self::pipe::Bucket;
use self::program::{Names, Program};
use crate::Time;
use crate::rules::table::Table;
use crate::rules::{Action, DEFAULT_RULE, RESERVED_SET, Rule, Ruleset, StateName};
use crate::state::{self, Name, RuleId, States};

/// The rule of states that come from outside and have no rule here: `allow ... // dynamic states default rule`.
pub const COMPANION: RuleId = RuleId(0);

/// The gate.
pub struct Gate {
    program: Program,
    /// The rules as they were written, beside `program.rules[..=default]`.
    rules: Vec<(RuleId, Rule)>,
    /// Rules that only states still have.
    hidden: Vec<(RuleId, Rule)>,
    counters: Vec<Counter>,
    states: States,
    tables: Vec<Table>,
    table_names: HashMap<Box<str>, u32>,
    flow_names: HashMap<Box<str>, Name>,
    names: Vec<Box<str>>,
    pipes: HashMap<u32, Bucket>,
    ports: Ports,
    routes: Routes,
    disabled_sets: u32,
    random: Random,
    log: PacketLog,
    settings: Settings,
    next_id: u32,
    /// Tags that found no room on their packet.
    tags_full: u64,
}

/// What the gate itself can be told, apart from the states' settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Drop IPv6 packets with an extension header that nobody knows (ipfw's deny_unknown_exthdrs).
    pub deny_unknown_exthdrs: bool,
    /// Most packets that a `log` rule without `logamount` logs; 0 is no limit (ipfw's verbose_limit).
    pub verbose_limit: u32,
    /// An ICMP error about a packet of a flow with a state goes the state's way, as its own packets do.
    pub related: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { deny_unknown_exthdrs: true, verbose_limit: 0, related: true }
    }
}

/// What a rule has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counter {
    packets: u64,
    bytes: u64,
    last: Time,
    logged: u32,
}

/// One rule of [`Gate::show`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
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
        let mut gate = Self {
            program: Program::default(),
            rules: Vec::new(),
            hidden: vec![(COMPANION, companion())],
            counters: Vec::new(),
            states: States::new(states, seed),
            tables: Vec::new(),
            table_names: HashMap::new(),
            flow_names: HashMap::new(),
            names: vec!["default".into()],
            pipes: HashMap::new(),
            ports,
            routes: Routes::new(),
            disabled_sets: 0,
            random: Random(seed ^ 0x9e37_79b9_7f4a_7c15),
            log: PacketLog::default(),
            settings: Settings::default(),
            next_id: 1,
            tags_full: 0,
        };
        gate.load(ruleset);
        gate
    }

    /// Takes a ruleset as if there had been none.
    fn load(&mut self, ruleset: Ruleset) {
        let Ruleset { rules, tables, pipes, disabled_sets } = ruleset;
        self.rules = rules.into_iter().map(|rule| (self.new_id(), rule)).collect();
        self.counters = vec![Counter::default(); self.rules.len() + self.hidden.len()];
        self.disabled_sets = disabled_sets;
        for (name, table) in tables {
            self.table_names.insert(name, self.tables.len() as u32);
            self.tables.push(table);
        }
        self.pipes = pipes.into_iter().map(|(number, pipe)| (number, Bucket::new(pipe))).collect();
        self.compile();
    }

    fn new_id(&mut self) -> RuleId {
        let id = RuleId(self.next_id);
        self.next_id += 1;
        id
    }

    /// Makes the program anew from the rules.
    fn compile(&mut self) {
        for (_, rule) in self.rules.iter().chain(&self.hidden) {
            let names = [
                rule.state.as_ref().map(|state| &state.name),
                match &rule.action {
                    Action::CheckState(name) => Some(name),
                    _ => None,
                },
            ];
            for name in names.into_iter().flatten() {
                intern(name, &mut self.flow_names, &mut self.names);
            }
        }
        let names = self.resolver();
        let program = Program::new(
            self.rules.iter().map(|(id, rule)| (*id, rule)),
            self.hidden.iter().map(|(id, rule)| (*id, rule)),
            &names,
        );
        self.program = program;
    }

    /// What names in rules stand for.
    fn resolver(&self) -> Names<'_> {
        Names {
            ports: &self.ports,
            tables: &self.table_names,
            flows: &self.flow_names,
            disabled_sets: self.disabled_sets,
        }
    }

    /// The rules that no packet has matched since they were loaded or zeroed, but for the default rule.
    pub fn unused(&self) -> impl Iterator<Item = &Rule> {
        let default = self.program.default;
        self.rules[..default]
            .iter()
            .zip(&self.counters)
            .filter(|(_, c)| c.packets == 0)
            .map(|((_, rule), _)| rule)
    }

    /// Every rule in order with its counters, the default rule last.
    pub fn show(&self) -> Vec<Shown> {
        let shown = |((_, rule), counter): (&(RuleId, Rule), &Counter)| Shown {
            number: rule.number,
            set: rule.set,
            packets: counter.packets,
            bytes: counter.bytes,
            last: (counter.packets > 0).then_some(counter.last),
            text: rule.to_string(),
        };
        self.rules.iter().zip(&self.counters).map(shown).collect()
    }

    /// The dynamic states.
    pub fn states(&self) -> &States {
        &self.states
    }

    /// The dynamic states, to change their settings.
    pub fn states_mut(&mut self) -> &mut States {
        &mut self.states
    }

    /// Frees states that are over, `budget` of them at most. Call it once a burst.
    pub fn expire(&mut self, now: Time, budget: usize) {
        self.states.expire(now, budget);
    }

    /// The name of a flow name, without the colon; `?` for one that this gate never made.
    pub fn flow_name(&self, name: Name) -> &str {
        self.names.get(usize::from(name.0.get()) - 1).map_or("?", |name| name)
    }

    /// The number of the rule with this identity, for listing states; the default rule's for one that is gone.
    pub fn rule_number(&self, id: RuleId) -> u32 {
        self.program.position_of(id).map_or(DEFAULT_RULE, |at| self.program.rules[at].number)
    }

    /// The ports.
    pub fn ports(&self) -> &Ports {
        &self.ports
    }

    /// Takes other ports; numbers of ports that walks hold must stay what they were.
    pub fn set_ports(&mut self, ports: Ports) {
        self.ports = ports;
        self.compile();
    }

    /// The routes.
    pub fn routes(&self) -> &Routes {
        &self.routes
    }

    /// Takes the routes that verrevpath, versrcreach and antispoof ask.
    pub fn set_routes(&mut self, routes: Routes) {
        self.routes = routes;
    }

    /// Enables and disables sets: bit N of `disabled` is set N. Set 31 stays enabled. States live on.
    pub fn set_disabled_sets(&mut self, disabled: u32) {
        self.disabled_sets = disabled & !(1 << RESERVED_SET);
        self.compile();
    }

    /// The table of this name.
    pub fn table(&self, name: &str) -> Option<&Table> {
        self.tables.get(*self.table_names.get(name)? as usize)
    }

    /// Changes the table of this name: everything that `change` does is one step for the packets.
    pub fn with_table<T>(&mut self, name: &str, change: impl FnOnce(&mut Table) -> T) -> Option<T> {
        self.tables.get_mut(*self.table_names.get(name)? as usize).map(change)
    }

    /// What `log` rules wrote, to be taken away by the caller.
    pub fn log(&mut self) -> &mut PacketLog {
        &mut self.log
    }

    /// The gate's own settings.
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// Changes the gate's own settings.
    pub fn set_settings(&mut self, settings: Settings) {
        self.settings = settings;
    }

    /// Tags that found no room on their packet.
    pub fn tags_full(&self) -> u64 {
        self.tags_full
    }

    /// Sets all counters to zero, or those of one rule number.
    pub fn zero(&mut self, number: Option<u32>) {
        for ((_, rule), counter) in self.rules.iter().zip(&mut self.counters) {
            if number.is_none_or(|number| rule.number == number) {
                *counter = Counter::default();
            }
        }
    }
}

/// Gives a flow name its number. Numbers stay for the life of the gate; when all 65,535 are in use, further names
/// share the default one.
fn intern(name: &StateName, flows: &mut HashMap<Box<str>, Name>, names: &mut Vec<Box<str>>) {
    let StateName::Named(name) = name else { return };
    if flows.contains_key(name) {
        return;
    }
    let number = u16::try_from(names.len() + 1).ok().and_then(NonZeroU16::new);
    if let Some(number) = number {
        flows.insert(name.clone(), Name(number));
        names.push(name.clone());
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
    /// 31 random bits.
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 33) as u32
    }
}
