//! The entries of flow offload, and the states that may get one.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use towpath_engine::offload::{FlowPath, NoPath, flow_path};
use towpath_engine::router::{Directory, NextHop};
use towpath_engine::verdict_feed::VerdictReader;
use towpath_engine::{ForwardMode, Topology};
use towpath_gate::state::{
    Cursor, EventKind, Flow, JournalRead, JournalReader, Kind, Listed, Lookup, Origin, RecordedPort,
};
use towpath_gate::{FlowDecision, PortId, Walker};
use towpath_port::offload::{FlowCounts, FlowKey, FlowMap, Link, Redirect, Route};
use towpath_wire::{Time, proto};

use super::denied::{ByAddress, Denied, Retired};
use super::entry::{Entries, Entry, settle};
use super::interfaces::Interfaces;
use super::keys::{StateKey, flow_key, state_keys};
use super::reasons::{begins, count, is_established, is_transient};
use super::verdicts::{Verdicts, are_same};
use super::{ACTIVITY, LINKS, NotOffloaded, OffloadStats, PENDING, Parts, QUARANTINE, SWEEP, TICK, VERSION};
use crate::config;

mod drain;

/// Limits on the work of one step, in which others wait for the lock: a few milliseconds.
const EVENTS: usize = 1024;
const EXAMINED: usize = 256;
const DUMPED: usize = 1024;
/// Entries that are written to the map at once. The entry of a verdict waits for fewer than this many others.
const BATCH: usize = 64;
/// Waiting states that one step looks at, most of which are not due.
const LOOKED: usize = 4 * EXAMINED;
/// The bits of the epoch that count changes of interfaces.
const LINK_BITS: u64 = (u16::MAX as u64) << LINKS;

/// A state that has too few packets.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    state: StateKey,
    due: Instant,
    /// The time until it is looked at again, doubled each time.
    pause: Duration,
}

/// See the module documentation.
pub(super) struct Table {
    map: Arc<FlowMap>,
    config: config::Offload,
    walker: Walker,
    journal: JournalReader,
    topology: Topology,
    interfaces: Interfaces,
    directory: Option<Arc<Directory>>,
    start: Instant,
    entries: Entries,
    /// Entries that are not in the map yet: see `write_added`.
    added: Vec<(FlowKey, u32)>,
    free: Vec<u32>,
    /// Entries that have ended, whose slots are not used again yet.
    quarantine: VecDeque<(Instant, Entry)>,
    waiting: VecDeque<Waiting>,
    /// Entries of an earlier epoch that are to be examined again.
    stale: Vec<FlowKey>,
    /// The epoch of the entries that are not in `stale`, without pauses.
    epoch: u64,
    /// Where a walk through all states continues.
    sweep: Option<Cursor>,
    verdicts: Verdicts,
    /// With `deny`.
    denied: Option<Denied>,
    /// States were not examined for lack of room.
    missed: bool,
    /// The beginning of the last walk for this reason.
    swept: Instant,
    ticked: Instant,
    /// When the current round through all entries began, and the slot at which it continues: see `drain_part`.
    round: (Instant, u32),
    active: Instant,
    stats: OffloadStats,
    refused: NotOffloaded,
}

impl Table {
    pub(super) fn new(
        map: Arc<FlowMap>,
        config: config::Offload,
        parts: Parts,
        interfaces: Interfaces,
        verdicts: VerdictReader,
    ) -> Self {
        let Parts { walker, journal, topology, directory, start, .. } = parts;
        let capacity = map.capacity();
        let now = Instant::now();
        let denied = config.deny.then(|| Denied::new(Arc::clone(&map)));
        Self {
            map,
            config,
            walker,
            journal,
            topology,
            interfaces,
            directory,
            start,
            entries: Entries::default(),
            added: Vec::with_capacity(BATCH),
            free: (0..capacity).rev().collect(),
            quarantine: VecDeque::new(),
            waiting: VecDeque::new(),
            stale: Vec::new(),
            epoch: 0,
            // States that exist already.
            sweep: Some(Cursor::default()),
            verdicts: Verdicts::new(verdicts),
            denied,
            missed: false,
            swept: now,
            ticked: now,
            round: (now, 0),
            active: now,
            stats: OffloadStats { capacity: capacity.into(), ..OffloadStats::default() },
            refused: NotOffloaded::default(),
        }
    }

    pub(super) fn stats(&self) -> (OffloadStats, NotOffloaded) {
        let deferred = self.stats.deferred + self.verdicts.deferred();
        let denied = self.denied.as_ref().map_or(0, Denied::len) as u64;
        (OffloadStats { entries: self.entries.len() as u64, denied, deferred, ..self.stats }, self.refused)
    }

    /// The time of the states.
    fn now(&self) -> Time {
        Time::from_nanos(u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// Does a bounded part of the work that is due. Returns true if more is expected soon.
    pub(super) fn step(&mut self, now: Instant) -> bool {
        self.map.beat();
        self.walker.catch_up();
        let tick = now.saturating_duration_since(self.ticked) >= TICK;
        if self.interfaces.have_changed(tick) {
            self.map.set_epoch(|epoch| {
                let links = ((epoch >> LINKS) as u16).wrapping_add(1);
                epoch & !LINK_BITS | u64::from(links) << LINKS
            });
        }
        self.follow_epoch();
        let mut busy = self.read_journal(now);
        let at = self.now();
        busy |= self.denied.as_mut().is_some_and(|denied| denied.step(&mut self.walker, now, at));
        self.write_added();
        busy |= self.read_verdicts();
        self.write_added();
        busy |= self.examine_stale();
        busy |= self.examine_waiting(now);
        busy |= self.sweep(now);
        self.write_added();
        self.drain_part(now);
        if tick {
            self.ticked = now;
            self.drain_denied(at);
            self.confirm_neighbors();
            self.release_slots(now);
            self.verdicts.retry();
            if self.missed && self.sweep.is_none() && now.saturating_duration_since(self.swept) >= SWEEP {
                (self.missed, self.swept) = (false, now);
                self.sweep = Some(Cursor::default());
                self.verdicts.tidy();
            }
        }
        if busy {
            self.active = now;
        }
        // A sleeping walker must not delay the release of retired rules.
        self.walker.idle();
        now.saturating_duration_since(self.active) < ACTIVITY
    }

    /// The epoch by the rules that the walker has, without pauses.
    fn current_epoch(&self) -> u64 {
        self.walker.version() << VERSION | self.map.epoch() & LINK_BITS
    }

    /// After a change of the epoch, all entries are examined again, and states that could not be offloaded before.
    fn follow_epoch(&mut self) {
        let epoch = self.current_epoch();
        if epoch == self.epoch {
            return;
        }
        self.epoch = epoch;
        self.stale = self.entries.keys().collect();
        self.sweep = Some(Cursor::default());
        self.verdicts.tidy();
        if let Some(denied) = &mut self.denied {
            denied.follow(&mut self.walker, &self.topology, &self.interfaces, epoch);
        }
    }

    /// See [`Retired`].
    pub(super) fn take_retired(&mut self) -> Retired {
        self.denied.as_mut().map(Denied::take_retired).unwrap_or_default()
    }

    /// See [`Denied::explain`].
    pub(super) fn denied(&mut self, packets: (&Flow, PortId), denies: u32) -> Option<ByAddress> {
        self.denied.as_ref()?.explain(&mut self.walker, packets, denies)
    }

    /// Offloads the flows that inspectors have passed.
    fn read_verdicts(&mut self) -> bool {
        self.verdicts.forget_after_gap();
        for _ in 0..EXAMINED {
            let Some(announced) = self.verdicts.read() else { return false };
            if announced.verdict.passes() || self.config.deny && announced.verdict.drops() {
                let at = self.now();
                let offered = self.offer_direction(None, &announced.flow, announced.arrival, at);
                if offered.is_err_and(is_transient) {
                    self.verdicts.retry_soon();
                }
            }
        }
        true
    }

    fn read_journal(&mut self, now: Instant) -> bool {
        let mut any = false;
        for _ in 0..EVENTS {
            match self.journal.read() {
                JournalRead::End => return any,
                JournalRead::Gap(_) => {
                    // An end may be missing, and so may a new state.
                    self.stale = self.entries.keys().collect();
                    self.sweep = Some(Cursor::default());
                }
                JournalRead::Change(event) => {
                    any = true;
                    let Some(state) = event.state() else { continue };
                    if event.kind.is_end() {
                        self.end_state(&(state.flow, state.name), now);
                    } else {
                        let state = state.clone();
                        if event.kind == EventKind::Updated {
                            self.look_again(&state);
                        }
                        self.consider(&state, now);
                    }
                }
            }
        }
        true
    }

    /// A state has changed: its entries are examined again. A connection that begins is not ended by the RST of an earlier one.
    fn look_again(&mut self, state: &Listed) {
        for key in self.entries.keys_of_state(&(state.flow, state.name)) {
            if let Some(entry) = self.entries.get_mut(&key).filter(|_| begins(state)) {
                entry.reset = self.map.counts(entry.slot).rst;
            }
            self.stale.push(key);
        }
    }

    pub(super) fn end_state(&mut self, state: &StateKey, now: Instant) {
        for key in self.entries.keys_of_state(state) {
            self.remove(&key, now);
        }
    }

    /// Offloads a state if it has enough packets, or looks at it again later.
    fn consider(&mut self, state: &Listed, now: Instant) {
        let key = (state.flow, state.name);
        if matches!(state.kind, Kind::Parent { .. }) || !matches!(state.flow.proto, proto::TCP | proto::UDP) {
            return;
        }
        if self.is_due(state) && !self.offer(&key, state.origin) {
            return;
        }
        self.wait_for(Waiting { state: key, due: now, pause: super::ACTIVE });
    }

    /// The state has enough packets, and its connection is established.
    fn is_due(&self, state: &Listed) -> bool {
        state.packets[0] + state.packets[1] >= self.config.after && is_established(state)
    }

    fn wait_for(&mut self, waiting: Waiting) {
        if self.waiting.len() >= PENDING {
            self.stats.deferred += 1;
            self.missed = true;
            return;
        }
        self.waiting.push_back(waiting);
    }

    /// Looks again at states that had too few packets.
    fn examine_waiting(&mut self, now: Instant) -> bool {
        let mut examined = 0;
        for _ in 0..self.waiting.len().min(LOOKED) {
            let Some(mut waiting) = self.waiting.pop_front() else { break };
            if waiting.due > now {
                self.waiting.push_back(waiting);
                continue;
            }
            examined += 1;
            let (flow, name) = waiting.state;
            let at = self.now();
            let Some(state) = self.walker.states_mut().listed(&flow, Lookup::Named(name), at) else {
                continue;
            };
            if !self.is_due(&state) || self.offer(&waiting.state, state.origin) {
                // A state whose packets do not come waits for the next walk through all states.
                if waiting.pause < TICK {
                    waiting.pause *= 2;
                    waiting.due = now + waiting.pause;
                    self.waiting.push_back(waiting);
                } else {
                    self.missed = true;
                }
            }
            if examined == EXAMINED {
                break;
            }
        }
        !self.waiting.is_empty()
    }

    /// Examines entries of an earlier epoch again.
    fn examine_stale(&mut self) -> bool {
        let now = Instant::now();
        for _ in 0..EXAMINED {
            let Some(key) = self.stale.pop() else { return false };
            let Some(entry) = self.entries.get(&key) else { continue };
            let (flow, arrival, state) = (entry.flow, entry.arrival, entry.state);
            let verdicts = entry.verdicts.clone();
            let at = self.now();
            // What the kernel counted so far belongs to the rules that decided.
            self.drain_entry(&key, at);
            match self.prepare(&flow, arrival, at) {
                Ok((found, path, redirect, neighbor)) if found == key => {
                    let epoch = self.epoch;
                    let Some(entry) = self.entries.get_mut(&key) else { continue };
                    let passing = self.verdicts.of(&path.walk, at);
                    if *entry.states == *path.walk.states
                        && passing.is_some_and(|passing| are_same(&verdicts, &passing))
                        && self.map.renew(entry.slot, redirect, epoch)
                        && verdicts.iter().all(|verdict| verdict.attach(entry.slot))
                    {
                        entry.rules = path.walk.rules.into();
                        entry.neighbor = neighbor;
                        self.stats.renewed += 1;
                        continue;
                    }
                    self.remove(&key, now);
                    self.insert(state.as_ref(), (key, flow, arrival), path, redirect, neighbor);
                }
                _ => self.remove(&key, now),
            }
        }
        !self.stale.is_empty()
    }

    /// Walks through all states: those that existed before, and those that were not examined.
    fn sweep(&mut self, now: Instant) -> bool {
        let Some(from) = self.sweep else { return false };
        let at = self.now();
        let states = self.walker.states();
        let part: Vec<(Listed, Cursor)> = states.dump(from, at).take(DUMPED).collect();
        self.sweep = match part.last() {
            Some((_, next)) if part.len() == DUMPED => Some(*next),
            _ => None,
        };
        for (state, _) in &part {
            if self.entries.of_state(&(state.flow, state.name)).len() < 2 {
                self.consider(state, now);
            }
        }
        self.sweep.is_some()
    }

    /// Writes the entries of both directions of a state. Returns true if one has to be tried again soon.
    fn offer(&mut self, state: &StateKey, origin: Origin) -> bool {
        let (flow, _) = *state;
        let RecordedPort::Port(port) = origin.port() else {
            count(&mut self.refused, NoPath::Port);
            return false;
        };
        let at = self.now();
        let arrival = PortId(port);
        let bridged = match self.topology.mode(arrival) {
            Some(ForwardMode::Bridge { xmit, .. }) => Some(xmit),
            _ => None,
        };
        let forward = self.offer_direction(Some(state), &flow, arrival, at);
        let mut later = forward.is_err_and(is_transient);
        let egress = forward.ok().flatten().or(bridged);
        // Replies arrive by the port that the packets leave by, with the same tag.
        let vlan = self.topology.interface_of(arrival).and_then(|(_, vlan)| vlan);
        let out = egress.and_then(|egress| self.topology.interface_of(egress));
        if let Some(back) = out.and_then(|(at, _)| self.topology.arrival(at, vlan)) {
            later |= self.offer_direction(Some(state), &flow.reversed(), back, at).is_err_and(is_transient);
        }
        later
    }

    /// Returns the egress port if there is an entry now, unless it drops packets.
    fn offer_direction(
        &mut self,
        state: Option<&StateKey>,
        flow: &Flow,
        arrival: PortId,
        at: Time,
    ) -> Result<Option<PortId>, NoPath> {
        let (key, path, redirect, neighbor) =
            self.prepare(flow, arrival, at).inspect_err(|reason| count(&mut self.refused, *reason))?;
        let egress = (!path.walk.blocked).then_some(path.egress);
        if self.entries.get(&key).is_none() {
            self.insert(state, (key, *flow, arrival), path, redirect, neighbor);
        }
        Ok(egress)
    }

    /// The path of a flow's packets, if the kernel may forward them.
    pub(super) fn path(&mut self, flow: &Flow, arrival: PortId, now: Time) -> Result<FlowPath, NoPath> {
        self.prepare(flow, arrival, now).map(|(_, path, ..)| path)
    }

    #[expect(clippy::type_complexity, reason = "the parts of an entry, used at two places")]
    fn prepare(
        &mut self,
        flow: &Flow,
        arrival: PortId,
        now: Time,
    ) -> Result<(FlowKey, FlowPath, Redirect, Option<(u16, IpAddr)>), NoPath> {
        let verdicts = &self.verdicts;
        let decisions = |queue, flow: &Flow| {
            let verdict = verdicts.deciding(queue, flow, now)?;
            let (mark, mask) = verdict.mark();
            let pass = verdict.passes().then_some(FlowDecision::Pass(mark, mask));
            pass.or_else(|| self.config.deny.then_some(FlowDecision::Drop))
        };
        let path = flow_path(&mut self.walker, &self.topology, flow, arrival, now, &decisions)?;
        if !(self.config.all || path.walk.marked || !path.walk.verdicts.is_empty()) {
            return Err(NoPath::NotMarked);
        }
        for hit in path.walk.states.iter().filter(|_| !path.walk.blocked) {
            let state = self.walker.states_mut().listed(&hit.flow, Lookup::Named(hit.name), now);
            if !state.is_some_and(|state| is_established(&state)) {
                return Err(NoPath::NotEstablished);
            }
        }
        let (interface, vlan) = self.topology.interface_of(arrival).ok_or(NoPath::Port)?;
        if path.walk.blocked {
            let (key, redirect) = self.blocked(flow, (arrival, interface, vlan))?;
            return Ok((key, path, redirect, None));
        }
        let (out, _) = self.topology.interface_of(path.egress).ok_or(NoPath::Port)?;
        let (from, to, one_buffer) = self.interfaces.pair(interface, out)?;
        let mut neighbor = None;
        let route = match path.next_hop {
            None => None,
            Some(hop) => {
                let mac = match hop {
                    NextHop::Mac(mac) => Some(mac),
                    NextHop::Neighbor(address) | NextHop::Resolved(address, _) => {
                        neighbor = Some((path.egress.0, address));
                        self.directory
                            .as_ref()
                            .and_then(|directory| directory.resolve(path.egress.0, address, now.as_nanos()))
                    }
                    NextHop::None => None,
                };
                let address = |link: Link| link.address.ok_or(NoPath::NoRoute);
                Some(Route { to: mac.ok_or(NoPath::NoRoute)?, from: address(to)?, own: address(from)? })
            }
        };
        let key = flow_key(flow, from.ifindex, vlan);
        // A bridge forwards all tags alike if none has a port of its own.
        let any_vlan = route.is_none() && !self.topology.has_vlans(interface);
        let (ifindex, mtu) = (to.ifindex, to.mtu);
        Ok((key, path, Redirect { ifindex, mtu, any_vlan, one_buffer, drop: false, route }, neighbor))
    }

    /// The entry of a flow whose packets are dropped.
    fn blocked(
        &self,
        flow: &Flow,
        (arrival, interface, vlan): (PortId, usize, Option<u16>),
    ) -> Result<(FlowKey, Redirect), NoPath> {
        let from = self.interfaces.link(interface)?;
        // A router drops only what it receives.
        let routes = !matches!(self.topology.mode(arrival), Some(ForwardMode::Bridge { .. }));
        let route = match routes {
            true => Some(Route { own: from.address.ok_or(NoPath::NoRoute)?, ..Route::default() }),
            false => None,
        };
        let any_vlan = !routes && !self.topology.has_vlans(interface);
        let redirect = Redirect { drop: true, any_vlan, route, ..Redirect::default() };
        Ok((flow_key(flow, from.ifindex, vlan), redirect))
    }

    fn insert(
        &mut self,
        state: Option<&StateKey>,
        (key, flow, arrival): (FlowKey, Flow, PortId),
        path: FlowPath,
        redirect: Redirect,
        neighbor: Option<(u16, IpAddr)>,
    ) {
        let Some(verdicts) = self.verdicts.of(&path.walk, self.now()) else { return };
        let Some(slot) = self.free.pop() else {
            self.stats.full += 1;
            self.missed = true;
            return;
        };
        self.map.write(slot, redirect, self.epoch);
        self.entries.insert(Entry {
            key,
            slot,
            flow,
            arrival,
            state: state_keys(state, &path.walk.states).first().copied(),
            other: None,
            verdicts: verdicts.clone(),
            rules: path.walk.rules.into(),
            states: path.walk.states.into(),
            neighbor,
            redirect,
            // `write` has cleared the counters of the slot's earlier entry.
            seen: FlowCounts { in_use: true, ..FlowCounts::default() },
            reset: None,
        });
        self.added.push((key, slot));
        if !verdicts.iter().all(|verdict| verdict.attach(slot)) {
            self.remove(&key, Instant::now());
        } else if self.config.outlive && !redirect.drop {
            let left = self.left(slot);
            self.outlive(slot, left);
        }
        if self.added.len() >= BATCH {
            self.write_added();
        }
    }

    /// Writes the entries that were added to the map. Those that it has no room for are removed.
    fn write_added(&mut self) {
        if self.added.is_empty() {
            return;
        }
        let mut added = std::mem::take(&mut self.added);
        let mut rest = &added[..];
        while !rest.is_empty() {
            let (written, result) = self.map.insert(rest);
            self.stats.offered += written as u64;
            rest = &rest[written..];
            let Some(((key, _), next)) = rest.split_first().filter(|_| result.is_err()) else { continue };
            rest = next;
            self.stats.full += 1;
            self.missed = true;
            self.remove(key, Instant::now());
            // It was never offered.
            self.stats.removed -= 1;
        }
        added.clear();
        self.added = added;
    }

    /// Ends an entry.
    fn remove(&mut self, key: &FlowKey, now: Instant) {
        self.write_added();
        let at = self.now();
        self.apply_reset(key, at);
        let Some(mut entry) = self.entries.remove(key) else { return };
        // The kernel counts no further packets, except of programs that have read the entry before: see `settle_ended`.
        self.map.end(entry.slot);
        settle(&self.map, &mut self.walker, &mut entry, at);
        for verdict in &entry.verdicts {
            verdict.detach(entry.slot);
            self.verdicts.retry_soon();
        }
        // A failure leaves an entry whose slot has no epoch: it forwards nothing.
        if let Err(error) = self.map.remove(key) {
            log::warn!("offload: an entry cannot be removed: {error}");
        }
        self.quarantine.push_back((now, entry));
        self.stats.removed += 1;
    }

    /// Ends all entries.
    pub(super) fn clear(&mut self) {
        let now = Instant::now();
        let keys: Vec<_> = self.entries.keys().collect();
        keys.iter().for_each(|key| self.remove(key, now));
        let at = self.now();
        if let Some(denied) = &mut self.denied {
            denied.clear(&mut self.walker, now, at);
        }
    }

    fn release_slots(&mut self, now: Instant) {
        if let Some(denied) = &mut self.denied {
            denied.release(now);
        }
        self.settle_ended(self.now());
        while let Some((_, entry)) =
            self.quarantine.pop_front_if(|(since, _)| now.saturating_duration_since(*since) >= QUARANTINE)
        {
            self.free.push(entry.slot);
        }
    }

    /// Keeps the neighbors of routed flows known, as packets do.
    fn confirm_neighbors(&mut self) {
        let Some(directory) = self.directory.clone() else { return };
        let (now, at) = (Instant::now(), self.now());
        let mut known: HashMap<(u16, IpAddr), Option<[u8; 6]>> = HashMap::new();
        let mut moved = Vec::new();
        for entry in self.entries.all() {
            let (Some((port, address)), Some(Route { to: mac, .. })) = (entry.neighbor, entry.redirect.route)
            else {
                continue;
            };
            let found = *known
                .entry((port, address))
                .or_insert_with(|| directory.resolve(port, address, at.as_nanos()));
            if found != Some(mac) {
                moved.push(entry.key);
            }
        }
        moved.iter().for_each(|key| self.remove(key, now));
        self.missed |= !moved.is_empty();
    }
}
