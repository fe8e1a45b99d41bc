//! The states of one gate.

use std::cmp::Ordering;

use slab::Slab;

use super::chain::NONE;
use super::family::{Family, Found, Seen, Shared, Template, after};
use super::hash::Secret;
use super::key::{Key4, Key6};
use super::list::{Cursor, Listed};
use super::parents::Parents;
use super::sources::Sources;
use super::window::Window;
use super::{
    Ends, Flow, Hit, Install, Installed, Limit, Lookup, Name, Quoted, Refused, RuleId, Segment, Settings,
    Tracking,
};
use crate::Time;

/// How much an install may look at to find room that expired states take up.
const RECLAIM: usize = 256;

/// How many states an install may look at to evict one, and how many of these it may spare.
const EVICT: usize = 64;
const SPARE: usize = 16;

const ICMP: u8 = 1;
const TCP: u8 = 6;
const ICMP6: u8 = 58;

/// What happened to states since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// States made: those held, expired, removed and evicted.
    pub created: u64,
    /// The most states held at once.
    pub peak: usize,
    /// States collected because their time was over.
    pub expired: u64,
    /// States removed with their rule.
    pub removed: u64,
    /// States evicted to make room (`dyn_evict`).
    pub evicted: u64,
    /// How often the states have come to 9/10 of `dyn_max`, having been below 8/10.
    pub nearly_full: u64,
    /// ICMP errors that were about a state.
    pub related: u64,
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

/// How full the table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gauge {
    /// States held.
    pub states: usize,
    /// Of these, how many were never replied to: under a flood, most.
    pub unreplied: usize,
    /// `dyn_max`.
    pub states_max: usize,
    /// Parents held.
    pub parents: usize,
    /// `dyn_parent_max`.
    pub parents_max: usize,
    /// The states have come to 9/10 of `dyn_max` and have not fallen below 8/10 since.
    pub nearly_full: bool,
}

/// Dynamic states: ipfw's, found by a packet of either direction.
///
/// A state is live until its expiry, to the nanosecond, and is never found after it; it is held, and counts in
/// [`States::len`], until it is collected: by [`States::expire`], at most 0.3 s later when that is called often
/// enough, or by an install that needs its room.
#[derive(Clone, Debug)]
pub struct States {
    shared: Shared,
    v4: Family<2>,
    v6: Family<6>,
    counters: Counters,
    nearly_full: bool,
    /// Which family collects first, in turn.
    v6_first: bool,
}

impl States {
    /// An empty table. `seed` keys the hash and should be unpredictable to network peers.
    pub fn new(settings: Settings, seed: u64) -> Self {
        let shared = Shared {
            settings: settings.clamped(),
            secret: Secret::new(seed),
            parents: Parents::new(),
            sources: Sources::default(),
            windows: Slab::new(),
            sequence: 0,
        };
        Self {
            shared,
            v4: Family::new(),
            v6: Family::new(),
            counters: Counters::default(),
            nearly_full: false,
            v6_first: false,
        }
    }

    /// Finds the live state of a packet's flow, in either direction; the packet counts in it and refreshes it.
    #[inline]
    pub fn lookup(&mut self, flow: &Flow, lookup: Lookup, segment: &Segment, now: Time) -> Option<Hit> {
        match self.find(flow, lookup, segment, now) {
            Found::Hit(hit) => Some(hit),
            Found::Miss => None,
            Found::Invalid => {
                self.counters.invalid += 1;
                None
            }
        }
    }

    /// Finds the live state that an ICMP error is about: the direction is that of the error, against the packet that it
    /// quotes. The state stays as it is.
    pub fn lookup_related(&mut self, quoted: &Quoted, lookup: Lookup, now: Time) -> Option<Hit> {
        let flow = &self.keyed(&quoted.flow);
        let hit = match flow.ends {
            Ends::V4(src, dst) => {
                let (key, side) = Key4::new(src, dst, flow);
                self.v4.related(&self.shared, &key, side.other(), lookup, quoted.tcp_seq, now)
            }
            Ends::V6(src, dst, zone) => {
                let (key, side) = Key6::new(src, dst, zone, flow);
                self.v6.related(&self.shared, &key, side.other(), lookup, quoted.tcp_seq, now)
            }
        };
        self.counters.related += u64::from(hit.is_some());
        hit
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
        let made = match self.find(flow, Lookup::Named(name), segment, now) {
            Found::Hit(_) => return Ok(Installed::Existing),
            Found::Miss => self.make(&self.keyed(flow), name, segment, rule, install, now),
            Found::Invalid => Err(Refused::Invalid),
        };
        match made {
            Ok(()) => {
                self.counters.created += 1;
                self.counters.peak = self.counters.peak.max(self.len());
                self.gauge_moved();
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
        // The parents go too, so it does not matter when they were last used.
        let now = Time::default();
        let mut removed = self.v4.remove_where(&mut self.shared, &mut gone, now);
        removed += self.v6.remove_where(&mut self.shared, &mut gone, now);
        let Shared { parents, secret, .. } = &mut self.shared;
        parents.remove_where(secret, gone);
        self.counters.removed += removed as u64;
        self.gauge_moved();
        removed
    }

    /// Removes the state of a flow (in either direction) under `name`. Whether there was a live one.
    pub fn remove(&mut self, flow: &Flow, name: Name, now: Time) -> bool {
        let flow = &self.keyed(flow);
        let removed = match flow.ends {
            Ends::V4(src, dst) => {
                let (key, _) = Key4::new(src, dst, flow);
                self.v4.remove_one(&mut self.shared, &key, name, now)
            }
            Ends::V6(src, dst, zone) => {
                let (key, _) = Key6::new(src, dst, zone, flow);
                self.v6.remove_one(&mut self.shared, &key, name, now)
            }
        };
        self.counters.removed += u64::from(removed.is_some());
        self.gauge_moved();
        removed == Some(true)
    }

    /// Marks the states of every rule that `gone` names as orphaned: they live on without their rule
    /// (`dyn_keep_states`). How many states that were. Their parents stay while they count one of them.
    pub fn orphan_where(&mut self, mut gone: impl FnMut(RuleId) -> bool) -> usize {
        self.shared.parents.orphan_where(&mut gone);
        self.v4.orphan_where(&mut gone) + self.v6.orphan_where(&mut gone)
    }

    /// How many states `rule` has: an orphans' rule may be forgotten when it is 0.
    pub fn count_of(&self, rule: RuleId) -> usize {
        self.v4.count_of(rule) + self.v6.count_of(rule)
    }

    /// Collects entries whose time is over, looking at no more than `budget`. To be called once per burst.
    pub fn expire(&mut self, now: Time, mut budget: usize) {
        self.v6_first = !self.v6_first;
        let shared = &mut self.shared;
        let mut expired = 0;
        if self.v6_first {
            expired += self.v6.collect(shared, now, &mut budget);
        }
        expired += self.v4.collect(shared, now, &mut budget);
        expired += self.v6.collect(shared, now, &mut budget);
        shared.parents.collect(&shared.secret, now, &mut budget);
        self.expired(expired);
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
        self.shared.parents.len()
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

    /// How full the table is.
    pub fn gauge(&self) -> Gauge {
        Gauge {
            states: self.len(),
            unreplied: self.v4.unreplied() + self.v6.unreplied(),
            states_max: self.settings().dyn_max as usize,
            parents: self.parents(),
            parents_max: self.settings().dyn_parent_max as usize,
            nearly_full: self.nearly_full,
        }
    }

    /// The settings in force.
    pub fn settings(&self) -> &Settings {
        &self.shared.settings
    }

    /// Changes the settings. States that are there keep the expiry that they have until their next packet, and are
    /// kept when `dyn_max` falls below their number.
    pub fn set_settings(&mut self, settings: Settings) {
        self.shared.settings = settings.clamped();
        self.gauge_moved();
    }

    /// What is live: parents, then IPv4 states, then IPv6 states.
    pub fn list(&self, now: Time) -> impl Iterator<Item = Listed> {
        self.dump(Cursor::default(), now).map(|(listed, _)| listed)
    }

    /// [`States::list`] in pieces: each entry with the cursor that goes on after it, at any later time and whatever
    /// happened in between. No state comes twice, and none is missed that lived throughout.
    pub fn dump(&self, from: Cursor, now: Time) -> impl Iterator<Item = (Listed, Cursor)> {
        // Parts before the cursor's are over, those after it begin at 0.
        let start = move |part: u8| match part.cmp(&from.part) {
            Ordering::Less => u32::MAX,
            Ordering::Equal => from.slot,
            Ordering::Greater => 0,
        };
        let after = |part| move |(slot, listed)| (listed, Cursor { part, slot: slot + 1 });
        let parents = self.shared.parents.list_from(start(0), now).map(after(0));
        let v4 = self.v4.list_from(start(1), now).map(after(1));
        let v6 = self.v6.list_from(start(2), now).map(after(2));
        parents.chain(v4).chain(v6)
    }

    #[inline]
    fn find(&mut self, flow: &Flow, lookup: Lookup, segment: &Segment, now: Time) -> Found {
        let flow = &self.keyed(flow);
        let packet = Seen { proto: flow.proto, segment, now };
        match flow.ends {
            Ends::V4(src, dst) => {
                let (key, side) = Key4::new(src, dst, flow);
                self.v4.hit(&mut self.shared, &key, side, lookup, &packet)
            }
            Ends::V6(src, dst, zone) => {
                let (key, side) = Key6::new(src, dst, zone, flow);
                self.v6.hit(&mut self.shared, &key, side, lookup, &packet)
            }
        }
    }

    /// The flow as the key has it: without the identifiers of ICMP queries unless they count.
    #[inline]
    fn keyed(&self, flow: &Flow) -> Flow {
        if matches!(flow.proto, ICMP | ICMP6) && !self.settings().dyn_icmp_id {
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
        if install.tracking == Tracking::Strict && flow.proto == TCP && !Window::begins(segment) {
            return Err(Refused::Invalid);
        }
        if self.is_full() {
            self.reclaim(now, RECLAIM);
        }
        let parent = match install.limit {
            Some(limit) => self.parent(flow, name, rule, limit, now)?,
            None => NONE,
        };
        let capped = self.cap(flow, now)?;
        self.make_room(now)?;
        let Install { lifetime, tracking, .. } = *install;
        let template = Template { name, rule, lifetime, parent, capped, tracking };
        let packet = Seen { proto: flow.proto, segment, now };
        self.counters.expired += match flow.ends {
            Ends::V4(src, dst) => {
                let (key, side) = Key4::new(src, dst, flow);
                self.v4.make(&mut self.shared, key, side, template, &packet)
            }
            Ends::V6(src, dst, zone) => {
                let (key, side) = Key6::new(src, dst, zone, flow);
                self.v6.make(&mut self.shared, key, side, template, &packet)
            }
        };
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
        let wanted = Parents::wanted(&self.shared.secret, flow, limit.mask, name, rule);
        let expire = after(now, self.settings().dyn_short_lifetime);
        let full = |states: &Self| states.parents() >= states.settings().dyn_parent_max as usize;
        let mut found = self.shared.parents.find(&wanted, now);
        // A parent past its time may be there only because its children were not collected yet.
        if full(self) && found.is_none_or(|(_, past)| past) {
            self.reclaim(now, RECLAIM);
            self.reclaim_parents(now, RECLAIM);
            found = self.shared.parents.find(&wanted, now);
        }
        let slot = match found {
            Some((slot, _)) => {
                self.shared.parents.touch(slot, expire, now);
                slot
            }
            None if full(self) => return Err(Refused::ParentsFull),
            None => self.shared.parents.insert(&self.shared.secret, wanted, expire, now),
        };
        if self.shared.parents.count(slot) >= limit.max {
            self.reclaim(now, RECLAIM);
        }
        if self.shared.parents.count(slot) >= limit.max {
            return Err(Refused::OverLimit);
        }
        Ok(slot)
    }

    /// Whether the state is to be counted for its source; an error when the source has too many.
    fn cap(&mut self, flow: &Flow, now: Time) -> Result<bool, Refused> {
        let max = self.settings().dyn_source_max;
        if max == 0 {
            return Ok(false);
        }
        let over = |states: &Self| states.shared.sources.count(&states.shared.secret, flow) >= max;
        if over(self) {
            self.reclaim(now, RECLAIM);
        }
        if over(self) { Err(Refused::OverSource) } else { Ok(true) }
    }

    /// Evicts states while there is no room, if that is the policy.
    fn make_room(&mut self, now: Time) -> Result<(), Refused> {
        if !self.is_full() {
            return Ok(());
        }
        if !self.settings().dyn_evict {
            return Err(Refused::Full);
        }
        for look in 0..EVICT {
            let spare = look < SPARE;
            let evicted = match (self.v4.candidate(), self.v6.candidate()) {
                (Some(v4), v6) if v6.is_none_or(|v6| v4 < v6) => {
                    self.v4.evict(&mut self.shared, v4, spare, now)
                }
                (_, Some(v6)) => self.v6.evict(&mut self.shared, v6, spare, now),
                (_, None) => break,
            };
            self.counters.evicted += u64::from(evicted);
            if !self.is_full() {
                return Ok(());
            }
        }
        Err(Refused::Full)
    }

    fn is_full(&self) -> bool {
        self.len() >= self.settings().dyn_max as usize
    }

    /// Collects expired states to make room, those included that expired just now.
    fn reclaim(&mut self, now: Time, mut budget: usize) {
        let shared = &mut self.shared;
        let mut expired = self.v4.collect(shared, now, &mut budget);
        expired += self.v6.collect(shared, now, &mut budget);
        expired += self.v4.collect_just_due(shared, now, &mut budget);
        expired += self.v6.collect_just_due(shared, now, &mut budget);
        self.expired(expired);
    }

    fn reclaim_parents(&mut self, now: Time, mut budget: usize) {
        let Shared { parents, secret, .. } = &mut self.shared;
        parents.collect_all(secret, now, &mut budget);
    }

    fn expired(&mut self, states: u64) {
        self.counters.expired += states;
        if states > 0 {
            self.gauge_moved();
        }
    }

    fn gauge_moved(&mut self) {
        let (states, max) = (self.len() as u64, u64::from(self.settings().dyn_max));
        let full = states * 10 >= max * if self.nearly_full { 8 } else { 9 };
        self.counters.nearly_full += u64::from(full && !self.nearly_full);
        self.nearly_full = full;
    }
}
