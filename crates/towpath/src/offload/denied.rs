//! Sources that the kernel drops, because a rule denies them by a table.
//!
//! What: after each change of rules, tables, ports or interfaces, the rules of each port that deny by a table before another rule can decide
//! ([`Walker::denied_sources`]) get a bit each, and the kernel's maps get the contents of their tables. Meanwhile, the entries of the ports
//! belong to an earlier epoch, and the packets take the path through the engine. So a change is effective at once.
//!
//! Cost: a change of a table costs in proportion to what changes, in steps of bounded cost ([`Contents`]). The lock of offload is held for
//! [`STEPS`] of them at a time.
//!
//! Bounds: [`DENIED_MAX`] addresses and networks, [`DENYING_RULES`] rules, [`DENYING_PORTS`] ports. Without room for a rule, this rule and
//! all later ones stay in the engine: the first rule that denies a packet counts it.

mod contents;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use towpath_engine::{ForwardMode, Topology};
use towpath_gate::rules::table::Table;
use towpath_gate::state::RuleId;
use towpath_gate::{DeniedTable, NoOffload, PortId, Unseen, Walker};
use towpath_port::offload::FlowMap;
use towpath_port::offload::deny::{DENIED_MAX, DENYING_PORTS, DENYING_RULES, Denying};
use towpath_wire::Time;

pub(super) use self::contents::Retired;
use self::contents::{Changes, Contents};
use super::interfaces::Interfaces;
use super::{QUARANTINE, with_version};

/// Entries that one step compares, writes or removes.
const STEPS: usize = 4096;

/// The rules of a port, by their bits: those for which a packet counts. Empty for the rules of other ports.
type Counted = Vec<Box<[RuleId]>>;

/// A port whose packets the kernel drops by tables.
#[derive(Debug)]
struct Port {
    arrival: PortId,
    /// Its entry in the kernel's map.
    index: u32,
    denying: Denying,
    counted: Counted,
    /// The counters that were added to the rules, by bit.
    seen: Vec<[u64; 2]>,
}

/// What the kernel's maps are to have.
#[derive(Debug)]
struct Wanted {
    epoch: u64,
    ports: Vec<(PortId, Denying, Counted)>,
    /// By bit.
    tables: Vec<Arc<Table>>,
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Denied {
    map: Arc<FlowMap>,
    contents: Contents,
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
        let all: Vec<_> = walker
            .ports()
            .ids()
            .filter_map(|arrival| {
                let denying = denying(topology, interfaces, arrival)?;
                let rules = walker.denied_sources(arrival).rules;
                (!rules.is_empty()).then_some((arrival, denying, rules))
            })
            .collect();
        let tables = self.wanted.take().map(|wanted| wanted.tables);
        self.contents.retire(tables.unwrap_or_default());
        if walker.version() != version {
            // The rules of the ports are those of different versions. The next step has one.
            return;
        }
        let rules = fitting(all.iter().flat_map(|(_, _, rules)| rules));
        let ports = all.into_iter().filter_map(|(arrival, denying, own)| {
            let mut counted: Counted = vec![Box::default(); rules.len()];
            let mut bits = 0;
            for rule in own {
                if let Some(bit) = rules.iter().position(|it| it.position == rule.position) {
                    counted[bit] = rule.counts;
                    bits |= 1 << bit;
                }
            }
            (bits != 0).then_some((arrival, Denying { rules: bits, ..denying }, counted))
        });
        let ports = ports.collect();
        let tables = rules.into_iter().map(|rule| rule.table).collect();
        self.wanted = Some(Wanted { epoch, ports, tables });
    }

    /// Does a bounded part of the work that is due. Returns true if more is left.
    pub(super) fn step(&mut self, walker: &mut Walker, now: Instant, at: Time) -> bool {
        let Some(wanted) = self.wanted.take() else { return false };
        let mut steps = STEPS;
        let changes = self.contents.advance(&wanted.tables, &mut steps);
        if let Err(error) = self.change(&changes) {
            // The next change of the rules or tables tries it again.
            log::warn!(
                "offload: the tables of rules that deny cannot be written ({error}): their packets stay in the engine"
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
        for other in wanted.ports {
            if self.ports.iter().any(|port| is(port, &other)) {
                continue;
            }
            let Some(index) = self.free.pop() else { continue };
            let (arrival, denying, counted) = other;
            let counts = (0..counted.len()).map(|bit| self.map.deny().counts(index, bit));
            let seen = counts.collect::<Result<Vec<_>, _>>();
            let added = seen.and_then(|seen| self.map.deny().add_port(index, denying).map(|()| seen));
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
    }

    fn end(&mut self, port: Port, now: Instant) {
        if let Err(error) = self.map.deny().remove_port(port.index, port.denying) {
            log::warn!("offload: a port cannot be removed: {error}");
        }
        self.quarantine.push_back((now, port));
    }

    /// The kernel drops no packets by tables any more.
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
            for (bit, (rules, seen)) in port.counted.iter().zip(&mut port.seen).enumerate() {
                let Ok(counts) = self.map.deny().counts(port.index, bit) else { continue };
                let before = std::mem::replace(seen, counts);
                let [packets, bytes] = [0, 1].map(|at| counts[at] - before[at]);
                if packets > 0 {
                    walker.count_unseen(rules, &[], Unseen { packets, bytes, ack: 0 }, at);
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

    /// Whether the kernel drops packets from a source that the rule `denies` denies, or why not. `None`: it does not deny by a table, or there is no
    /// room for it.
    pub(super) fn explain(
        &self,
        walker: &mut Walker,
        (source, arrival): (IpAddr, PortId),
        denies: u32,
    ) -> Option<Result<(), NoOffload>> {
        if !walker.denies_by_source_table(denies) {
            return None;
        }
        let known = self.ports.iter().find(|port| port.arrival == arrival);
        let found = walker.denied_sources(arrival);
        match (found.rules.iter().find(|rule| rule.table.lookup_ip(source).is_some()), known) {
            (Some(rule), Some(port)) if port.counted.contains(&rule.counts) => Some(Ok(())),
            (Some(_), _) => None,
            (None, _) => found.end.map(Err),
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
    Some(Denying { ifindex: link.ifindex, vlan, any_vlan, rules: 0, own })
}

/// The rules for which there is room, in their order.
fn fitting<'r>(rules: impl Iterator<Item = &'r DeniedTable>) -> Vec<DeniedTable> {
    let mut all: Vec<_> = rules.cloned().collect();
    all.sort_by_key(|rule| rule.position);
    all.dedup_by_key(|rule| rule.position);
    let mut room = DENIED_MAX;
    let fits = |rule: &&DeniedTable| {
        let left = room.checked_sub(rule.table.len());
        room = left.unwrap_or(0);
        left.is_some()
    };
    let count = all.iter().take(DENYING_RULES).take_while(fits).count();
    all.truncate(count);
    all
}

#[cfg(test)]
mod tests {
    use towpath_gate::rules::table::{Key, Value};

    use super::*;

    #[test]
    fn rules_without_room_end_the_list() {
        let rule = |position, table: &Arc<Table>| DeniedTable {
            position,
            number: position as u32,
            counts: Box::default(),
            table: Arc::clone(table),
        };
        let mut small = Table::default();
        small.add(&Key::Net4(10 << 24, 32), Value::legacy(0)).unwrap();
        let small = Arc::new(small);
        let many: Vec<_> = (0..40).map(|at| rule(at / 2, &small)).collect();
        let positions: Vec<_> = fitting(many.iter().rev()).iter().map(|rule| rule.position).collect();
        assert_eq!(positions, (0..20).collect::<Vec<_>>());
        let many: Vec<_> = (0..40).map(|at| rule(at, &small)).collect();
        assert_eq!(fitting(many.iter()).len(), DENYING_RULES);
    }
}
