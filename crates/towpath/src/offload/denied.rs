//! Packets that the kernel drops, because a rule denies their source or destination.
//!
//! What: after each change of rules, tables, ports or interfaces, the rules of each port that deny an address before another rule can decide
//! ([`Walker::denied_addresses`]) get a bit each, and the kernel's maps get the addresses of the rules and of their tables. Meanwhile, the
//! entries of the ports belong to an earlier epoch, and the packets take the path through the engine. So a change is effective at once.
//!
//! Cost: a change of a table costs in proportion to what changes, in steps of bounded cost ([`Contents`]). The lock of offload is held for
//! [`STEPS`] of them at a time. In addition, each change walks the rules once for each port and class, and reading the counters takes a system
//! call for each port, class and rule that denies.
//!
//! Bounds: [`DENIED_MAX`] addresses and networks, [`DENYING_RULES`] rules, [`DENYING_PORTS`] ports. Without room for a rule, this rule and
//! all later ones stay in the engine: the first rule that denies a packet counts it.

mod contents;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use towpath_engine::{ForwardMode, Topology};
use towpath_gate::rules::table::{Key, Table, Value};
use towpath_gate::state::{Flow, RuleId};
use towpath_gate::{
    AddressTest, DenyingAddresses, DenyingRule, NoOffload, PacketClass, PortId, Unseen, Walker,
};
use towpath_port::offload::FlowMap;
use towpath_port::offload::deny::{DENIED_MAX, DENYING_CLASSES, DENYING_PORTS, DENYING_RULES, Denying};
use towpath_wire::{End, Time};

pub(super) use self::contents::Retired;
use self::contents::{AddressList, Changes, Contents};
use super::interfaces::Interfaces;
use super::{QUARANTINE, with_version};

/// Entries that one step compares, writes or removes.
const STEPS: usize = 4096;

/// The rules of each class of packets at a port, by their bits: those for which a packet counts. Empty for other rules.
type Counted = [Vec<Box<[RuleId]>>; DENYING_CLASSES];

const _: () = assert!(PacketClass::ALL.len() == DENYING_CLASSES);

/// Packets and bytes, by class and bit.
type Seen = [[[u64; 2]; DENYING_RULES]; DENYING_CLASSES];

/// By which address the kernel drops the packets of a flow, or why it does not.
pub type ByAddress = Result<AddressTest, (NoOffload, AddressTest)>;

/// A port whose packets the kernel drops by their addresses.
#[derive(Debug)]
struct Port {
    arrival: PortId,
    /// Its entry in the kernel's map.
    index: u32,
    denying: Denying,
    counted: Counted,
    /// The counters that were added to the rules.
    seen: Seen,
}

/// A rule that denies packets of a class at a port.
#[derive(Debug)]
struct Rule {
    order: RuleOrder,
    listed: AddressList,
    counts: Box<[RuleId]>,
}

/// The order of the rules: the position, and what distinguishes the addresses of a rule at different ports and of different classes.
type RuleOrder = (usize, End, usize);

/// The tables of networks in rules. A rule keeps its table while its networks are the same, so that a change of another rule is small.
type NetworkTables = HashMap<Box<[Key]>, Arc<Table>>;

/// What the kernel's maps are to have.
#[derive(Debug)]
struct Wanted {
    epoch: u64,
    ports: Vec<(PortId, Denying, Counted)>,
    /// By bit.
    tables: Vec<AddressList>,
    /// Ports are left that wait for the index of a port that has ended.
    waits: bool,
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Denied {
    map: Arc<FlowMap>,
    contents: Contents,
    network_tables: NetworkTables,
    ports: Vec<Port>,
    free: Vec<u32>,
    /// Ports that have ended, whose entries are not used again yet.
    quarantine: VecDeque<(Instant, Port)>,
    wanted: Option<Wanted>,
}

impl Denied {
    pub(super) fn new(map: Arc<FlowMap>) -> Self {
        Self {
            map,
            contents: Contents::default(),
            network_tables: NetworkTables::default(),
            ports: Vec::new(),
            free: (0..DENYING_PORTS).rev().collect(),
            quarantine: VecDeque::new(),
            wanted: None,
        }
    }

    /// Addresses and networks in the kernel's maps.
    pub(super) fn len(&self) -> usize {
        self.contents.len()
    }

    /// The rules, tables, ports or interfaces have changed.
    pub(super) fn follow(
        &mut self,
        walker: &mut Walker,
        topology: &Topology,
        interfaces: &Interfaces,
        epoch: u64,
    ) {
        let version = walker.version();
        // The gate does so after walkers see the version, and may have done so with a later one. The maps must not change before.
        self.map.set_epoch(|epoch| epoch.max(with_version(epoch, version)));
        let before = std::mem::take(&mut self.network_tables);
        let arrivals: Vec<_> = walker.ports().ids().collect();
        let mut all = Vec::new();
        for arrival in arrivals {
            let Some(denying) = denying(topology, interfaces, arrival) else { continue };
            let classes = PacketClass::ALL.map(|class| {
                let found = walker.denied_addresses(arrival, class, DENYING_RULES).rules;
                found
                    .into_iter()
                    .map(|rule| listed(rule, &before, &mut self.network_tables))
                    .collect::<Vec<_>>()
            });
            if classes.iter().any(|rules| !rules.is_empty()) {
                all.push((arrival, denying, classes));
            }
        }
        let tables = self.wanted.take().map(|wanted| wanted.tables);
        self.contents.retire(tables.unwrap_or_default());
        if walker.version() != version {
            // The rules of the ports are those of different versions. The next step has one.
            return;
        }
        let rules = fitting(all.iter().flat_map(|(_, _, classes)| classes.iter().flatten()));
        let destinations = rules.iter().enumerate().filter(|(_, (_, (end, _)))| *end == End::Destination);
        let destinations = destinations.map(|(bit, _)| 1 << bit).sum();
        let ports = all.into_iter().filter_map(|(arrival, denying, classes)| {
            let mut denying = Denying { destinations, ..denying };
            let mut counted = Counted::default();
            for (class, of_class) in classes.into_iter().enumerate() {
                counted[class] = vec![Box::default(); rules.len()];
                for rule in of_class {
                    if let Ok(bit) = rules.binary_search_by_key(&rule.order, |(order, _)| *order) {
                        counted[class][bit] = rule.counts;
                        denying.rules[class] |= 1 << bit;
                    }
                }
            }
            (denying.rules != [0; DENYING_CLASSES]).then_some((arrival, denying, counted))
        });
        let ports = ports.collect();
        let tables = rules.into_iter().map(|(_, listed)| listed).collect();
        self.wanted = Some(Wanted { epoch, ports, tables, waits: false });
    }

    /// Does a bounded part of the work that is due. Returns true if more is left.
    pub(super) fn step(&mut self, walker: &mut Walker, now: Instant, at: Time) -> bool {
        let Some(wanted) = self.wanted.take_if(|wanted| !wanted.waits || !self.free.is_empty()) else {
            return false;
        };
        let mut steps = STEPS;
        let changes = self.contents.advance(&wanted.tables, &mut steps);
        if let Err(error) = self.change(&changes) {
            // The next change of the rules or tables tries it again.
            log::warn!(
                "offload: the denied addresses cannot be written ({error}): the engine drops these packets"
            );
            self.contents.fail(changes);
            self.contents.retire(wanted.tables);
            return false;
        }
        if self.contents.has(&wanted.tables) {
            self.change_ports(walker, wanted, now, at);
            return false;
        }
        self.wanted = Some(wanted);
        true
    }

    fn change(&self, changes: &Changes) -> std::io::Result<()> {
        // First, so that there is room.
        self.map.deny().remove(&changes.remove)?;
        self.map.deny().write(&changes.write)
    }

    /// Tables of the past, to be dropped without the lock.
    pub(super) fn take_retired(&mut self) -> Retired {
        self.contents.take_retired()
    }

    /// The maps have what the ports need.
    fn change_ports(&mut self, walker: &mut Walker, wanted: Wanted, now: Instant, at: Time) {
        // What the kernel counted so far belongs to the rules that decided.
        self.drain(walker, at);
        let is = |port: &Port, (arrival, denying, counted): &(PortId, Denying, Counted)| {
            (port.arrival, &port.denying, &port.counted) == (*arrival, denying, counted)
        };
        let ended = self.ports.extract_if(.., |port| !wanted.ports.iter().any(|other| is(port, other)));
        let ended: Vec<_> = ended.collect();
        ended.into_iter().for_each(|port| self.end(port, now));
        let mut waits = false;
        for other in &wanted.ports {
            if self.ports.iter().any(|port| is(port, other)) {
                continue;
            }
            let Some(index) = self.free.pop() else {
                // Until the index of a port that has ended may be used again.
                waits = !self.quarantine.is_empty();
                continue;
            };
            let (arrival, denying, counted) = other.clone();
            let added = self.seen(index, denying.rules);
            let added = added.and_then(|seen| self.map.deny().add_port(index, denying).map(|()| seen));
            match added {
                Ok(seen) => self.ports.push(Port { arrival, index, denying, counted, seen }),
                Err(error) => {
                    log::warn!("offload: a port cannot be written: {error}");
                    self.free.push(index);
                }
            }
        }
        self.map.set_denying_ports(self.ports.len());
        self.ports.iter().for_each(|port| self.map.deny().renew(port.index, wanted.epoch));
        if waits {
            self.wanted = Some(Wanted { waits, ..wanted });
        }
    }

    /// The counters of the rules of an entry, which continue.
    fn seen(&self, index: u32, rules: [u32; DENYING_CLASSES]) -> std::io::Result<Seen> {
        let mut seen = Seen::default();
        for (class, rules) in rules.into_iter().enumerate() {
            for bit in (0..DENYING_RULES).filter(|bit| rules >> bit & 1 == 1) {
                seen[class][bit] = self.map.deny().counts(index, class, bit)?;
            }
        }
        Ok(seen)
    }

    fn end(&mut self, port: Port, now: Instant) {
        if let Err(error) = self.map.deny().remove_port(port.index, port.denying) {
            log::warn!("offload: a port cannot be removed: {error}");
        }
        self.quarantine.push_back((now, port));
    }

    /// The kernel drops no packets by their addresses any more.
    pub(super) fn clear(&mut self, walker: &mut Walker, now: Instant, at: Time) {
        std::mem::take(&mut self.ports).into_iter().for_each(|port| self.end(port, now));
        self.map.set_denying_ports(0);
        self.wanted = None;
        self.drain(walker, at);
    }

    /// Adds what the kernel counted to the rules.
    pub(super) fn drain(&mut self, walker: &mut Walker, at: Time) {
        let ended = self.quarantine.iter_mut().map(|(_, port)| port);
        for port in self.ports.iter_mut().chain(ended) {
            for class in 0..DENYING_CLASSES {
                let (counted, seen) = (&port.counted[class], &mut port.seen[class]);
                for (bit, (rules, seen)) in counted.iter().zip(seen).enumerate() {
                    if port.denying.rules[class] >> bit & 1 == 0 {
                        continue;
                    }
                    let Ok(counts) = self.map.deny().counts(port.index, class, bit) else { continue };
                    let before = std::mem::replace(seen, counts);
                    let [packets, bytes] = [0, 1].map(|at| counts[at] - before[at]);
                    if packets > 0 {
                        walker.count_unseen(rules, &[], Unseen { packets, bytes, ack: 0 }, at);
                    }
                }
            }
        }
    }

    pub(super) fn release(&mut self, now: Instant) {
        while let Some((_, port)) =
            self.quarantine.pop_front_if(|(since, _)| now.saturating_duration_since(*since) >= QUARANTINE)
        {
            self.free.push(port.index);
        }
    }

    /// The rule that the kernel drops the packets of a flow by, which the rule `denies` denies, or why it does not. `None`: it does not deny an
    /// address, or there is no room for it.
    pub(super) fn explain(
        &self,
        walker: &mut Walker,
        (flow, arrival): (&Flow, PortId),
        denies: u32,
    ) -> Option<ByAddress> {
        let test = walker.denies_by_address(denies)?;
        let class = PacketClass::position_of(flow)?;
        let known = self.ports.iter().find(|port| port.arrival == arrival);
        let found = walker.denied_addresses(arrival, PacketClass::ALL[class], DENYING_RULES);
        match (found.rules.iter().find(|rule| rule.denies(flow)), known) {
            (Some(rule), Some(port)) if port.counted[class].contains(&rule.counts) => {
                let has_table = matches!(rule.addresses, DenyingAddresses::Table(_));
                Some(Ok(AddressTest { end: rule.end, has_table }))
            }
            (Some(_), _) => None,
            (None, _) => found.stopped_by.map(|reason| Err((reason, test))),
        }
    }
}

/// A port that drops packets, without rules.
fn denying(topology: &Topology, interfaces: &Interfaces, arrival: PortId) -> Option<Denying> {
    let (interface, vlan) = topology.interface_of(arrival)?;
    let routes = match topology.mode(arrival)? {
        ForwardMode::Bridge { .. } => false,
        // The engine forwards no tagged frames by their routes.
        ForwardMode::Router if vlan.is_none() => true,
        _ => return None,
    };
    let link = interfaces.exclusive_link(interface)?;
    let own = if routes { Some(link.address?) } else { None };
    let any_vlan = !routes && vlan.is_none() && !topology.has_vlans(interface);
    Some(Denying { ifindex: link.ifindex, vlan, any_vlan, own, ..Denying::default() })
}

/// The rule with a table of its addresses: that of `before`, if there is one.
fn listed(rule: DenyingRule, before: &NetworkTables, now: &mut NetworkTables) -> Rule {
    let table = match rule.addresses {
        DenyingAddresses::Table(table) => table,
        DenyingAddresses::Networks(networks) => {
            let known = now.get(&networks).or_else(|| before.get(&networks));
            let table = known.cloned().unwrap_or_else(|| Arc::new(table_of(&networks)));
            now.entry(networks).or_insert(table).clone()
        }
    };
    let order = (rule.position, rule.end, Arc::as_ptr(&table).addr());
    Rule { order, listed: (rule.end, table), counts: rule.counts }
}

fn table_of(networks: &[Key]) -> Table {
    let mut table = Table::default();
    for network in networks {
        // Never refused: the table has no limit, and is one of addresses.
        let _ = table.replace(network, Value::default());
    }
    table
}

/// The rules for which there is room, in their order.
fn fitting<'r>(rules: impl Iterator<Item = &'r Rule>) -> Vec<(RuleOrder, AddressList)> {
    let all: BTreeMap<_, _> = rules.map(|rule| (rule.order, &rule.listed)).collect();
    let mut room = DENIED_MAX;
    let fits = |(_, (_, table)): &(RuleOrder, &AddressList)| {
        let left = room.checked_sub(table.len());
        room = left.unwrap_or(0);
        left.is_some()
    };
    let fitting = all.into_iter().take(DENYING_RULES).take_while(fits);
    fitting.map(|(order, listed)| (order, listed.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(position: usize, end: End, addresses: DenyingAddresses) -> DenyingRule {
        DenyingRule { position, counts: Box::default(), end, addresses }
    }

    /// The rules, with the tables that they had before.
    fn of(rules: Vec<DenyingRule>, before: &NetworkTables) -> (Vec<Rule>, NetworkTables) {
        let mut now = NetworkTables::default();
        (rules.into_iter().map(|rule| listed(rule, before, &mut now)).collect(), now)
    }

    #[test]
    fn rules_without_room_end_the_list() {
        let small = Arc::new(table_of(&[Key::Net4(10 << 24, 32)]));
        let many = |count: usize, position: fn(usize) -> usize| {
            let table = || DenyingAddresses::Table(Arc::clone(&small));
            let rules = (0..count).rev().map(|at| rule(position(at), End::Source, table())).collect();
            let found = fitting(of(rules, &NetworkTables::default()).0.iter());
            found.iter().map(|((position, ..), _)| *position).collect::<Vec<_>>()
        };
        assert_eq!(many(40, |at| at / 2), (0..20).collect::<Vec<_>>());
        assert_eq!(many(40, |at| at), (0..DENYING_RULES).collect::<Vec<_>>());
    }

    /// At another port or of another class, a rule may compare other addresses: they have a bit of their own.
    #[test]
    fn a_rule_has_a_bit_for_each_of_its_lists() {
        let networks = |all: &[Key]| DenyingAddresses::Networks(all.into());
        let (four, six) = (Key::Net4(10 << 24, 8), Key::Net6(0x2001 << 112, 16));
        let rules = || {
            vec![
                rule(7, End::Source, networks(std::slice::from_ref(&four))),
                rule(7, End::Source, networks(std::slice::from_ref(&six))),
                rule(7, End::Destination, networks(std::slice::from_ref(&six))),
                rule(7, End::Source, networks(std::slice::from_ref(&four))),
                rule(3, End::Destination, networks(&[four.clone(), six.clone()])),
            ]
        };
        let (first, known) = of(rules(), &NetworkTables::default());
        let found = fitting(first.iter());
        let positions: Vec<_> = found.iter().map(|((position, end, _), _)| (*position, *end)).collect();
        let expected = [(3, End::Destination), (7, End::Source), (7, End::Source), (7, End::Destination)];
        assert_eq!(positions, expected);
        assert_eq!((known.len(), found[0].1.1.len()), (3, 2));
        // The same rules later have the same tables.
        let (again, _) = of(rules(), &known);
        assert!(first.iter().zip(&again).all(|(one, other)| one.order == other.order));
    }
}
