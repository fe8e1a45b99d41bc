//! The states of one gate.

use super::chain::NONE;
use super::hash::Secret;
use super::key::{self, Key, Key4, Key6, ParentKey, Side, Unpack};
use super::list::{Kind, Listed};
use super::table::{Body, Entry, Table};
use super::tcp::{Life, Tcp};
use super::{
    Direction, Ends, Flow, Hit, Install, Installed, Limit, Lookup, Name, Refused, RuleId, Segment, Settings,
};
use crate::Time;

/// How much an install may look at to find room that expired states take up.
const RECLAIM: usize = 256;

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP6: u8 = 58;
const UDP_LITE: u8 = 136;

/// What a state remembers.
#[derive(Clone, Debug)]
struct State {
    /// The end that the first packet came from.
    forward: Side,
    lifetime: Option<u32>,
    /// The slot of the parent that counts this state, or `NONE`.
    parent: u32,
    tcp: Tcp,
    packets: [u64; 2],
    bytes: [u64; 2],
}

impl Body for State {
    fn held(&self) -> bool {
        false
    }
}

/// What a limit counts in. Its entry's expiry is `dyn_short_lifetime` after its last use.
#[derive(Clone, Debug)]
struct Parent {
    flow: Flow,
    count: u32,
}

impl Body for Parent {
    fn held(&self) -> bool {
        self.count > 0
    }
}

/// What happened to states since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// States made.
    pub created: u64,
    /// The most states held at once.
    pub peak: usize,
    /// States collected because their time was over.
    pub expired: u64,
    /// States removed with their rule.
    pub removed: u64,
    /// Installs refused with [`Refused::Full`].
    pub full: u64,
    /// Installs refused with [`Refused::OverLimit`].
    pub over_limit: u64,
    /// Installs refused with [`Refused::ParentsFull`].
    pub parents_full: u64,
    /// Installs refused with [`Refused::OverSource`].
    pub over_source: u64,
    /// Packets of a state with strict tracking that did not fit into its connection.
    pub invalid: u64,
}

/// Dynamic states: ipfw's, found by a packet of either direction.
///
/// A state is live until its expiry, to the nanosecond, and is never found after it; it is held, and counts in
/// [`States::len`], until it is collected: by [`States::expire`], at most 0.3 s later when that is called often
/// enough, or by an install that needs its room.
#[derive(Clone, Debug)]
pub struct States {
    settings: Settings,
    secret: Secret,
    v4: Table<2, State>,
    v6: Table<6, State>,
    parents: Table<7, Parent>,
    counters: Counters,
    /// Which family collects first, in turn.
    v6_first: bool,
}

impl States {
    /// An empty table. `seed` keys the hash and should be unpredictable to network peers.
    pub fn new(settings: Settings, seed: u64) -> Self {
        Self {
            settings: settings.clamped(),
            secret: Secret::new(seed),
            v4: Table::new(),
            v6: Table::new(),
            parents: Table::new(),
            counters: Counters::default(),
            v6_first: false,
        }
    }

    /// Finds the live state of a packet's flow, in either direction; the packet counts in it and refreshes it.
    #[inline]
    pub fn lookup(&mut self, flow: &Flow, lookup: Lookup, segment: &Segment, now: Time) -> Option<Hit> {
        let flow = &self.keyed(flow);
        let packet = Seen { proto: flow.proto, segment, now };
        match flow.ends {
            Ends::V4(src, dst) => {
                let (key, side) = Key4::new(src, dst, flow);
                self.v4.hit(self.secret.hash(&key.0), &key, side, lookup, &packet, &self.settings)
            }
            Ends::V6(src, dst, zone) => {
                let (key, side) = Key6::new(src, dst, zone, flow);
                self.v6.hit(self.secret.hash(&key.0), &key, side, lookup, &packet, &self.settings)
            }
        }
    }

    /// Makes a state for the flow under `name`, of which the packet is the first; or, when there is one, counts the
    /// packet in it, whichever rule made it.
    ///
    /// # Errors
    /// The packet is to be denied: there is no room, or a limit is reached. Room that expired states take up is used
    /// first.
    pub fn install(
        &mut self,
        flow: &Flow,
        name: Name,
        segment: &Segment,
        rule: RuleId,
        install: &Install,
        now: Time,
    ) -> Result<Installed, Refused> {
        if self.lookup(flow, Lookup::Named(name), segment, now).is_some() {
            return Ok(Installed::Existing);
        }
        let made = self.make(&self.keyed(flow), name, segment, rule, install, now);
        match made {
            Ok(()) => {
                self.counters.created += 1;
                self.counters.peak = self.counters.peak.max(self.len());
            }
            Err(Refused::Full) => self.counters.full += 1,
            Err(Refused::OverLimit) => self.counters.over_limit += 1,
            Err(Refused::ParentsFull) => self.counters.parents_full += 1,
            Err(Refused::OverSource) => self.counters.over_source += 1,
            Err(Refused::Invalid) => self.counters.invalid += 1,
        }
        made.map(|()| Installed::New)
    }

    /// Removes the states of every rule that `gone` names, and their parents. How many states that were.
    ///
    /// The work is in proportion to the rules that have states and to the states removed.
    pub fn remove_where(&mut self, mut gone: impl FnMut(RuleId) -> bool) -> usize {
        let mut removed = 0;
        for rule in self.v4.rules_where(&mut gone) {
            while let Some(slot) = self.v4.any_of(rule) {
                self.v4.drop_state(&mut self.parents, &self.secret, slot, None);
                removed += 1;
            }
        }
        for rule in self.v6.rules_where(&mut gone) {
            while let Some(slot) = self.v6.any_of(rule) {
                self.v6.drop_state(&mut self.parents, &self.secret, slot, None);
                removed += 1;
            }
        }
        // A parent's children belong to its rule, so they are gone by now.
        for rule in self.parents.rules_where(&mut gone) {
            while let Some(slot) = self.parents.any_of(rule) {
                self.parents.remove(&self.secret, slot);
            }
        }
        self.counters.removed += removed as u64;
        removed
    }

    /// Marks the states of every rule that `gone` names as orphaned: they live on without their rule
    /// (`dyn_keep_states`). How many states that were. Their parents stay while they count one of them.
    pub fn orphan_where(&mut self, mut gone: impl FnMut(RuleId) -> bool) -> usize {
        let mut orphaned = 0;
        for rule in self.v4.rules_where(&mut gone) {
            orphaned += self.v4.orphan(rule);
        }
        for rule in self.v6.rules_where(&mut gone) {
            orphaned += self.v6.orphan(rule);
        }
        for rule in self.parents.rules_where(&mut gone) {
            self.parents.orphan(rule);
        }
        orphaned
    }

    /// How many states `rule` has: an orphans' rule may be forgotten when it is 0.
    pub fn count_of(&self, rule: RuleId) -> usize {
        self.v4.count_of(rule) + self.v6.count_of(rule)
    }

    /// Collects entries whose time is over, looking at no more than `budget`. To be called once per burst.
    pub fn expire(&mut self, now: Time, mut budget: usize) {
        self.v6_first = !self.v6_first;
        let parents = &mut self.parents;
        let mut expired = 0;
        if self.v6_first {
            expired += self.v6.collect(parents, &self.secret, now, &mut budget);
        }
        expired += self.v4.collect(parents, &self.secret, now, &mut budget);
        expired += self.v6.collect(parents, &self.secret, now, &mut budget);
        self.counters.expired += expired;
        while let Some(slot) = self.parents.due(now, &mut budget) {
            self.parents.remove(&self.secret, slot);
        }
    }

    /// Collects every entry whose time is over, whatever it costs. For a report or a test.
    pub fn expire_all(&mut self, now: Time) {
        self.reclaim(now, usize::MAX);
        self.reclaim_parents(now, usize::MAX);
    }

    /// `dyn_count`: states held, those included that have expired and were not collected yet.
    #[inline]
    pub fn len(&self) -> usize {
        self.v4.len() + self.v6.len()
    }

    /// Whether there are no states.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `dyn_parent_count`: parents held.
    pub fn parents(&self) -> usize {
        self.parents.len()
    }

    /// States made since the beginning.
    pub fn created(&self) -> u64 {
        self.counters.created
    }

    /// The most states held at once.
    pub fn peak(&self) -> usize {
        self.counters.peak
    }

    /// `curr_max_length`: the most states of one flow, under different names, that have stood beside each other.
    pub fn curr_max_length(&self) -> usize {
        self.v4.longest().max(self.v6.longest())
    }

    /// What happened since the beginning.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// The settings in force.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Changes the settings. States that are there keep the expiry that they have until their next packet, and are
    /// kept when `dyn_max` falls below their number.
    pub fn set_settings(&mut self, settings: Settings) {
        self.settings = settings.clamped();
    }

    /// What is live: parents, then IPv4 states, then IPv6 states.
    pub fn list(&self, now: Time) -> impl Iterator<Item = Listed> {
        let parents = self.parents.iter().filter(move |entry| entry.live(now)).map(move |entry| {
            let kind = Kind::Parent { count: entry.body.count };
            listed(entry, entry.body.flow, kind, now)
        });
        parents.chain(self.v4.list(now)).chain(self.v6.list(now))
    }

    /// The flow as the key has it: without the identifiers of ICMP queries unless they count.
    #[inline]
    fn keyed(&self, flow: &Flow) -> Flow {
        if matches!(flow.proto, ICMP | ICMP6) && !self.settings.dyn_icmp_id {
            return Flow { src_port: 0, dst_port: 0, ..*flow };
        }
        *flow
    }

    fn make(
        &mut self,
        flow: &Flow,
        name: Name,
        segment: &Segment,
        rule: RuleId,
        install: &Install,
        now: Time,
    ) -> Result<(), Refused> {
        if self.is_full() {
            self.reclaim(now, RECLAIM);
        }
        let parent = match install.limit {
            Some(limit) => self.parent(flow, name, rule, limit, now)?,
            None => NONE,
        };
        if self.is_full() {
            return Err(Refused::Full);
        }
        let template =
            Template { name, rule, lifetime: install.lifetime, parent, serial: self.counters.created };
        let packet = Seen { proto: flow.proto, segment, now };
        match flow.ends {
            Ends::V4(src, dst) => {
                let (key, side) = Key4::new(src, dst, flow);
                let (parents, secret) = (&mut self.parents, &self.secret);
                self.counters.expired +=
                    self.v4.make(parents, secret, key, side, template, &packet, &self.settings);
            }
            Ends::V6(src, dst, zone) => {
                let (key, side) = Key6::new(src, dst, zone, flow);
                let (parents, secret) = (&mut self.parents, &self.secret);
                self.counters.expired +=
                    self.v6.make(parents, secret, key, side, template, &packet, &self.settings);
            }
        }
        Ok(())
    }

    /// The parent that has room to count one more state.
    fn parent(
        &mut self,
        flow: &Flow,
        name: Name,
        rule: RuleId,
        limit: Limit,
        now: Time,
    ) -> Result<u32, Refused> {
        let flow = key::masked(flow, limit.mask);
        let key = ParentKey::of_parent(&flow, rule);
        let hash = self.secret.hash(&key.0);
        let expire = after(now, self.settings.dyn_short_lifetime);
        let full = |states: &Self| states.parents.len() >= states.settings.dyn_parent_max as usize;
        let mut found = self.parents.find(hash, &key, name);
        // A parent past its time may be there only because its children were not collected yet.
        if full(self) && found.is_none_or(|slot| self.parents.get(slot).expire <= now) {
            self.reclaim(now, RECLAIM);
            self.reclaim_parents(now, RECLAIM);
            found = self.parents.find(hash, &key, name);
        }
        let slot = match found {
            Some(slot) => {
                // A rule that installs is not gone.
                self.parents.get_mut(slot).orphaned = false;
                self.parents.set_expire(slot, expire, now);
                slot
            }
            None if full(self) => return Err(Refused::ParentsFull),
            None => {
                let body = Parent { flow, count: 0 };
                let entry = Entry { key, name, rule, orphaned: false, serial: 0, expire, body };
                self.parents.insert(&self.secret, hash, entry, now)
            }
        };
        if self.parents.get(slot).body.count >= limit.max {
            self.reclaim(now, RECLAIM);
        }
        if self.parents.get(slot).body.count >= limit.max {
            return Err(Refused::OverLimit);
        }
        Ok(slot)
    }

    fn is_full(&self) -> bool {
        self.len() >= self.settings.dyn_max as usize
    }

    /// Collects expired states to make room, those included that expired just now.
    fn reclaim(&mut self, now: Time, mut budget: usize) {
        let (parents, secret) = (&mut self.parents, &self.secret);
        let mut expired = self.v4.collect(parents, secret, now, &mut budget);
        expired += self.v6.collect(parents, secret, now, &mut budget);
        expired += self.v4.collect_just_due(parents, secret, now, &mut budget);
        expired += self.v6.collect_just_due(parents, secret, now, &mut budget);
        self.counters.expired += expired;
    }

    fn reclaim_parents(&mut self, now: Time, mut budget: usize) {
        while let Some(slot) = self.parents.due(now, &mut budget) {
            self.parents.remove(&self.secret, slot);
        }
        while let Some(slot) = self.parents.just_due(now, &mut budget) {
            self.parents.remove(&self.secret, slot);
        }
    }
}

/// One packet as a state sees it.
struct Seen<'a> {
    proto: u8,
    segment: &'a Segment,
    now: Time,
}

/// What a new state takes from its rule.
struct Template {
    name: Name,
    rule: RuleId,
    lifetime: Option<u32>,
    parent: u32,
    serial: u64,
}

impl State {
    /// Takes a packet in. The state's new end, or `None` when it keeps the one that it has.
    #[inline]
    fn packet(&mut self, direction: Direction, packet: &Seen<'_>, settings: &Settings) -> Option<Time> {
        let side = direction as usize;
        self.packets[side] += 1;
        self.bytes[side] += u64::from(packet.segment.bytes);
        let seconds = match packet.proto {
            TCP => match self.tcp.segment(direction, packet.segment.tcp_flags, packet.segment.tcp_ack)? {
                Life::Ack => self.lifetime.unwrap_or(settings.dyn_ack_lifetime),
                Life::Syn => settings.dyn_syn_lifetime,
                Life::Fin => settings.dyn_fin_lifetime,
                Life::Rst => settings.dyn_rst_lifetime,
            },
            UDP | UDP_LITE => self.lifetime.unwrap_or(settings.dyn_udp_lifetime),
            _ => self.lifetime.unwrap_or(settings.dyn_short_lifetime),
        };
        Some(after(packet.now, seconds))
    }
}

impl<const N: usize> Table<N, State> {
    #[inline]
    fn hit(
        &mut self,
        hash: u64,
        key: &Key<N>,
        side: Side,
        lookup: Lookup,
        packet: &Seen<'_>,
        settings: &Settings,
    ) -> Option<Hit> {
        let slot = match lookup {
            Lookup::Named(name) => self.find(hash, key, name)?,
            Lookup::Any => self.newest(hash, key, packet.now)?,
        };
        let entry = self.get_mut(slot);
        if !entry.live(packet.now) {
            return None;
        }
        let hit = Hit { rule: entry.rule, direction: side.direction(entry.body.forward) };
        if let Some(expire) = entry.body.packet(hit.direction, packet, settings) {
            self.set_expire(slot, expire, packet.now);
        }
        Some(hit)
    }

    /// Makes the state; no live one has its key and name. How many expired ones it replaced: 0 or 1.
    #[expect(clippy::too_many_arguments, reason = "the parts of States that a table does not own")]
    fn make(
        &mut self,
        parents: &mut Table<7, Parent>,
        secret: &Secret,
        key: Key<N>,
        side: Side,
        template: Template,
        packet: &Seen<'_>,
        settings: &Settings,
    ) -> u64 {
        let Template { name, rule, lifetime, parent, serial } = template;
        let hash = secret.hash(&key.0);
        let expired = self.find(hash, &key, name);
        if let Some(slot) = expired {
            self.drop_state(parents, secret, slot, Some(packet.now));
        }
        if parent != NONE {
            parents.get_mut(parent).body.count += 1;
        }
        let tcp = Tcp::default();
        let mut body = State { forward: side, lifetime, parent, tcp, packets: [0; 2], bytes: [0; 2] };
        let expire = body.packet(Direction::Forward, packet, settings).unwrap_or(packet.now);
        let entry = Entry { key, name, rule, orphaned: false, serial, expire, body };
        self.insert(secret, hash, entry, packet.now);
        u64::from(expired.is_some())
    }

    /// Takes a state out, and out of its parent's count. With a time, the parent is collected soon if that was the
    /// last state it counted.
    fn drop_state(&mut self, parents: &mut Table<7, Parent>, secret: &Secret, slot: u32, now: Option<Time>) {
        let parent = self.remove(secret, slot).body.parent;
        if parent == NONE {
            return;
        }
        let body = &mut parents.get_mut(parent).body;
        body.count -= 1;
        if let (0, Some(now)) = (body.count, now) {
            parents.release(parent, now);
        }
    }

    fn collect(
        &mut self,
        parents: &mut Table<7, Parent>,
        secret: &Secret,
        now: Time,
        budget: &mut usize,
    ) -> u64 {
        let mut expired = 0;
        while let Some(slot) = self.due(now, budget) {
            self.drop_state(parents, secret, slot, Some(now));
            expired += 1;
        }
        expired
    }

    fn collect_just_due(
        &mut self,
        parents: &mut Table<7, Parent>,
        secret: &Secret,
        now: Time,
        budget: &mut usize,
    ) -> u64 {
        let mut expired = 0;
        while let Some(slot) = self.just_due(now, budget) {
            self.drop_state(parents, secret, slot, Some(now));
            expired += 1;
        }
        expired
    }

    fn list(&self, now: Time) -> impl Iterator<Item = Listed>
    where
        Key<N>: Unpack,
    {
        self.iter().filter(move |entry| entry.live(now)).map(move |entry| {
            let State { forward, parent, tcp, packets, bytes, .. } = &entry.body;
            let kind = if *parent == NONE { Kind::State } else { Kind::Limit };
            let common = listed(entry, entry.key.flow(*forward), kind, now);
            Listed { packets: *packets, bytes: *bytes, tcp_seen: tcp.seen, tcp_ack: tcp.ack, ..common }
        })
    }
}

/// The line of an entry, as far as states and parents have it in common.
fn listed<const N: usize, B>(entry: &Entry<N, B>, flow: Flow, kind: Kind, now: Time) -> Listed {
    Listed {
        kind,
        rule: entry.rule,
        name: entry.name,
        orphaned: entry.orphaned,
        flow,
        packets: [0; 2],
        bytes: [0; 2],
        remaining: entry.expire.since(now),
        tcp_seen: 0,
        tcp_ack: [0; 2],
    }
}

#[inline]
fn after(now: Time, seconds: u32) -> Time {
    Time::from_nanos(now.as_nanos().saturating_add(u64::from(seconds) * 1_000_000_000))
}
