//! The model of dynamic states: a list that is slow and obviously correct.
//!
//! [`super::ops`] compares the table with it after every operation. The model shares no code with the table except
//! TCP windows, which have separate tests.

mod packet;

use std::time::Duration;

use crate::state::tcp::window::{Fit, Window};
use crate::state::{
    Counters, Direction, Ends, Flow, Hit, Install, Installed, Kind, Limit, LimitMask, Listed, Lookup, Name,
    Origin, Quoted, Refused, RuleId, Segment, Settings, Tracking,
};
use packet::{count, fit, packet, replied};
use towpath_wire::Time;

struct State {
    flow: Flow,
    name: Name,
    rule: RuleId,
    orphaned: bool,
    lifetime: Option<u32>,
    /// The lifetime in seconds that every packet sets (`state-timeout`).
    timeout: Option<u32>,
    /// The limit of its rule.
    limit: Option<Limit>,
    /// The parent that counts the state. `None` without a limit, and with a limit per second.
    counted: Option<Counted>,
    expire: Time,
    packets: [u64; 2],
    bytes: [u64; 2],
    /// FIN, SYN and RST seen, forward and reverse.
    flags: [u8; 2],
    /// Treated as established since its first packet.
    picked_up: bool,
    ack: [u32; 2],
    /// The window scales of both sides.
    scales: [Option<u8>; 2],
    /// The side whose acknowledgement was accepted last.
    turn: Option<Direction>,
    /// The windows of both sides; `None` without strict tracking.
    window: Option<Window>,
    /// SCTP chunks with their direction.
    chunks: Vec<(u8, Direction)>,
    /// A packet of the reverse direction was counted.
    answered: bool,
    /// The state is assured: a reply was seen; in TCP and SCTP, an acknowledgement of the reply or a complete handshake.
    replied: bool,
    /// `dyn_source_max` counts the state.
    capped: bool,
}

struct Parent {
    counts: Counted,
    orphaned: bool,
    expire: Time,
    /// For a limit per second: the theoretical arrival time of the generic cell rate algorithm (ITU-T I.371).
    busy: Time,
}

/// The key of a parent.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Counted {
    flow: Flow,
    rule: RuleId,
    name: Name,
}

/// The first fragment of a datagram.
struct Datagram {
    /// Its flow without ports.
    flow: Flow,
    id: u32,
    ports: (u16, u16),
    at: Time,
}

/// The model. It has the operations of [`States`](crate::state::States), and removes entries as soon as they expire.
pub struct Model {
    settings: Settings,
    /// In the order of their installs.
    states: Vec<State>,
    parents: Vec<Parent>,
    datagrams: Vec<Datagram>,
    /// Flows, in either direction, with the time of their first SYN.
    first_syns: Vec<(Flow, Time)>,
    /// States saved before a restart and not restored yet.
    saved: Vec<State>,
    counters: Counters,
}

impl Model {
    /// An empty model.
    pub fn new(settings: Settings) -> Self {
        let mut model = Self {
            settings: Settings::default(),
            states: Vec::new(),
            parents: Vec::new(),
            datagrams: Vec::new(),
            first_syns: Vec::new(),
            saved: Vec::new(),
            counters: Counters::default(),
        };
        model.set_settings(settings);
        model
    }

    /// See [`States::lookup`](crate::state::States::lookup).
    pub fn lookup(&mut self, flow: &Flow, lookup: Lookup, segment: &Segment, now: Time) -> Option<Hit> {
        let found = self.find(flow, lookup, segment, now);
        self.counters.unfit += u64::from(found.is_err());
        found.ok().flatten()
    }

    /// An error is a packet that does not fit into its connection.
    fn find(
        &mut self,
        flow: &Flow,
        lookup: Lookup,
        segment: &Segment,
        now: Time,
    ) -> Result<Option<Hit>, Refused> {
        self.expire(now);
        let flow = &self.keyed(flow);
        // The newest first.
        for state in self.states.iter_mut().rev() {
            if matches!(lookup, Lookup::Named(name) if name != state.name) {
                continue;
            }
            let direction = if state.flow == *flow {
                Direction::Forward
            } else if state.flow == flow.reversed() {
                Direction::Reverse
            } else {
                continue;
            };
            let hit = Hit { rule: state.rule, direction };
            let fit = fit(state, direction, segment);
            if fit == Fit::Invalid {
                return Err(Refused::Invalid);
            }
            count(state, direction, segment);
            if fit == Fit::Ignored {
                return Ok(Some(hit));
            }
            packet(state, direction, segment, &self.settings, now);
            state.replied |= replied(state, direction, segment, &self.settings);
            state.answered |= direction == Direction::Reverse;
            return Ok(Some(hit));
        }
        Ok(None)
    }

    /// See [`States::lookup_related`](crate::state::States::lookup_related).
    pub fn lookup_related(&mut self, quoted: &Quoted, lookup: Lookup, now: Time) -> Option<Hit> {
        self.expire(now);
        let flow = self.keyed(&quoted.flow);
        let named = |state: &&State| !matches!(lookup, Lookup::Named(name) if name != state.name);
        let hit = self.states.iter().rev().filter(named).find_map(|state| {
            // The quoted packet went the other way.
            let direction = if flow == state.flow {
                Direction::Reverse
            } else if flow.reversed() == state.flow {
                Direction::Forward
            } else {
                return None;
            };
            let sent = |window: Window| {
                quoted.tcp_seq.is_none_or(|seq| match direction {
                    Direction::Reverse => window.sent(Direction::Forward, seq),
                    Direction::Forward => window.sent(Direction::Reverse, seq),
                })
            };
            Some(state.window.is_none_or(sent).then_some(Hit { rule: state.rule, direction }))
        });
        let hit = hit.flatten();
        self.counters.related += u64::from(hit.is_some());
        hit
    }

    /// See [`States::install`](crate::state::States::install). If several states may be evicted, evicts one that is
    /// not in `kept`.
    pub fn install(
        &mut self,
        (flow, name): (&Flow, Name),
        segment: &Segment,
        rule: RuleId,
        install: &Install,
        now: Time,
        kept: &[(Flow, Name)],
    ) -> Result<Installed, Refused> {
        self.expire(now);
        match self.find(flow, Lookup::Named(name), segment, now) {
            Ok(None) => {}
            Ok(Some(_)) => return Ok(Installed::Existing),
            Err(refused) => {
                self.count_refused(refused);
                return Err(refused);
            }
        }
        let opens = flow.proto == 6 && segment.tcp_flags & 0b1_0111 == 2;
        if opens && self.settings.dyn_first_syn && !self.is_repeated(flow, now) {
            self.count_refused(Refused::FirstSyn);
            return Err(Refused::FirstSyn);
        }
        let flow = &self.keyed(flow);
        let strict = install.tracking == Tracking::Strict && flow.proto == 6;
        if strict && segment.tcp_flags & 0b1_0111 != 2 {
            self.count_refused(Refused::Invalid);
            return Err(Refused::Invalid);
        }
        let counted = match self.admit((flow, name), rule, install.limit, now, kept) {
            Ok(counted) => counted,
            Err(refused) => {
                self.count_refused(refused);
                return Err(refused);
            }
        };
        let mut state = State {
            flow: *flow,
            name,
            rule,
            orphaned: false,
            lifetime: install.lifetime,
            timeout: install.timeout.filter(|_| install.lifetime.is_none()),
            limit: install.limit,
            counted,
            expire: now,
            packets: [0; 2],
            bytes: [0; 2],
            flags: [0; 2],
            picked_up: false,
            ack: [0; 2],
            scales: [None; 2],
            turn: None,
            window: None,
            chunks: Vec::new(),
            answered: false,
            replied: false,
            capped: self.settings.dyn_source_max != 0,
        };
        if strict {
            state.window = Some(Window::default());
            fit(&mut state, Direction::Forward, segment);
        }
        count(&mut state, Direction::Forward, segment);
        if install.tracking == Tracking::Loose && flow.proto == 6 && segment.tcp_flags & 0b110 == 0 {
            (state.flags, state.picked_up) = ([2, 2], true);
            state.expire = now + seconds(self.settings.dyn_syn_lifetime);
        }
        packet(&mut state, Direction::Forward, segment, &self.settings, now);
        self.states.push(state);
        self.counters.created += 1;
        self.counters.peak = self.counters.peak.max(self.states.len() as u64);
        Ok(Installed::New)
    }

    /// Checks all bounds. Returns the parent that counts the state.
    fn admit(
        &mut self,
        (flow, name): (&Flow, Name),
        rule: RuleId,
        limit: Option<Limit>,
        now: Time,
        kept: &[(Flow, Name)],
    ) -> Result<Option<Counted>, Refused> {
        let mut counted = None;
        if let Some(limit) = limit {
            // A shared count belongs to no rule; its name is that of `shared`.
            let (rule, name) =
                limit.shared.map_or((rule, name), |name| (RuleId(u32::MAX - u32::from(name.0.get())), name));
            let counts = Counted { flow: masked(flow, limit.mask), rule, name };
            // A limit per second must remember one second.
            let least = u32::from(limit.per_second);
            let expire = now + seconds(self.settings.dyn_short_lifetime.max(least));
            if let Some(parent) = self.parents.iter_mut().find(|parent| parent.counts == counts) {
                parent.expire = expire;
                parent.orphaned = false;
            } else if self.parents.len() >= self.settings.dyn_parent_max as usize {
                return Err(Refused::ParentsFull);
            } else {
                self.parents.push(Parent { counts, orphaned: false, expire, busy: now });
            }
            if limit.per_second {
                let parent = self.parents.iter_mut().find(|parent| parent.counts == counts);
                if !parent.is_some_and(|parent| takes(parent, limit.max, now)) {
                    return Err(Refused::OverRate);
                }
            } else if children(&self.states, &counts) >= limit.max as usize {
                return Err(Refused::OverLimit);
            } else {
                counted = Some(counts);
            }
        }
        let cap = self.settings.dyn_source_max;
        let of_source = |state: &&State| state.capped && source(&state.flow) == source(flow);
        if cap != 0 && self.states.iter().filter(of_source).count() >= cap as usize {
            return Err(Refused::OverSource);
        }
        if self.settings.dyn_evict {
            self.evict(kept);
        }
        if self.states.len() >= self.settings.dyn_max as usize {
            return Err(Refused::Full);
        }
        Ok(counted)
    }

    /// Returns true if a SYN repeats the flow's first one, between 200 ms and 60 s after it.
    fn is_repeated(&mut self, flow: &Flow, now: Time) -> bool {
        let same = |first: &&mut (Flow, Time)| first.0 == *flow || first.0 == flow.reversed();
        let Some((_, first)) = self.first_syns.iter_mut().find(same) else {
            self.first_syns.push((*flow, now));
            return false;
        };
        // Milliseconds modulo 2^32.
        let millis = |time: Time| time.as_nanos() / 1_000_000;
        let age = (millis(now) - millis(*first)) % (1 << 32);
        if age >= 60_000 {
            *first = now;
        }
        (200..60_000).contains(&age)
    }

    fn count_refused(&mut self, refused: Refused) {
        let Counters { full, over_limit, over_rate, parents_full, over_source, invalid, first_syn, .. } =
            &mut self.counters;
        match refused {
            Refused::Full => *full += 1,
            Refused::OverLimit => *over_limit += 1,
            Refused::OverRate => *over_rate += 1,
            Refused::ParentsFull => *parents_full += 1,
            Refused::OverSource => *over_source += 1,
            Refused::Invalid => *invalid += 1,
            Refused::FirstSyn => *first_syn += 1,
        }
    }

    /// See [`States::note_fragment`](crate::state::States::note_fragment).
    pub fn note_fragment(&mut self, flow: &Flow, id: u32, now: Time) {
        let whole = Flow { src_port: 0, dst_port: 0, ..*flow };
        self.datagrams.retain(|datagram| (datagram.flow, datagram.id) != (whole, id));
        let ports = (flow.src_port, flow.dst_port);
        self.datagrams.push(Datagram { flow: whole, id, ports, at: now });
    }

    /// See [`States::lookup_fragment`](crate::state::States::lookup_fragment).
    pub fn lookup_fragment(
        &mut self,
        flow: &Flow,
        id: u32,
        lookup: Lookup,
        bytes: u32,
        now: Time,
    ) -> Option<Hit> {
        self.expire(now);
        let whole = Flow { src_port: 0, dst_port: 0, ..*flow };
        // In units of 8 s, modulo 65,536.
        let unit = |time: Time| time.as_nanos() / 8_000_000_000;
        let is_known = |at: Time| (unit(now) - unit(at)) % 65_536 <= 4;
        let same = |datagram: &&Datagram| (datagram.flow, datagram.id) == (whole, id);
        let first = self.datagrams.iter().find(same).filter(|first| is_known(first.at))?;
        let (src_port, dst_port) = first.ports;
        let flow = self.keyed(&Flow { src_port, dst_port, ..*flow });
        let state = self.states.iter_mut().rev().find(|state| {
            let named =
                matches!(lookup, Lookup::Any) || matches!(lookup, Lookup::Named(name) if name == state.name);
            named && (state.flow == flow || state.flow == flow.reversed())
        })?;
        let direction = if state.flow == flow { Direction::Forward } else { Direction::Reverse };
        count(state, direction, &Segment { bytes, ..Segment::default() });
        Some(Hit { rule: state.rule, direction })
    }

    /// Restarts with an empty table and a snapshot of the states, none of which is restored yet.
    pub fn restart(&mut self, now: Time) {
        self.expire(now);
        self.saved = std::mem::take(&mut self.states);
        (self.parents, self.datagrams, self.counters) = (Vec::new(), Vec::new(), Counters::default());
        self.first_syns = Vec::new();
    }

    /// The limit that a saved state was installed with.
    pub fn saved_limit(&self, flow: &Flow, name: Name) -> Option<Limit> {
        self.saved.iter().find(|state| (state.flow, state.name) == (*flow, name))?.limit
    }

    /// The number of saved states that were not restored yet.
    pub fn saved(&self) -> usize {
        self.saved.len()
    }

    /// Restores a saved state. Its rule exists, and its limit does not refuse it.
    pub fn restore(
        &mut self,
        flow: &Flow,
        name: Name,
        now: Time,
        kept: &[(Flow, Name)],
    ) -> Result<Installed, Refused> {
        self.expire(now);
        let same = |state: &State| (state.flow, state.name) == (*flow, name);
        let at = self.saved.iter().position(same).expect("a state of the snapshot is one of the model's");
        let mut state = self.saved.remove(at);
        state.flow = self.keyed(&state.flow);
        let ends = [state.flow, state.flow.reversed()];
        if self.states.iter().any(|other| other.name == name && ends.contains(&other.flow)) {
            return Ok(Installed::Existing);
        }
        let limit = state.counted.and(state.limit).map(|limit| Limit { max: u32::MAX, ..limit });
        match self.admit((&state.flow, name), state.rule, limit, now, kept) {
            Ok(counted) => state.counted = counted,
            Err(refused) => {
                // A restore counts no other refusal.
                self.counters.full += u64::from(refused == Refused::Full);
                return Err(refused);
            }
        }
        state.answered = state.packets[1] > 0;
        // A snapshot has no window scales.
        state.scales = [None; 2];
        (state.orphaned, state.capped) = (false, self.settings.dyn_source_max != 0);
        self.states.push(state);
        self.counters.created += 1;
        self.counters.peak = self.counters.peak.max(self.states.len() as u64);
        Ok(Installed::New)
    }

    /// See [`States::remove_where`](crate::state::States::remove_where).
    pub fn remove_where(&mut self, mut gone: impl FnMut(RuleId) -> bool, now: Time) -> usize {
        self.expire(now);
        let before = self.states.len();
        self.states.retain(|state| !gone(state.rule));
        self.parents.retain(|parent| !gone(parent.counts.rule));
        before - self.states.len()
    }

    /// See [`States::remove`](crate::state::States::remove).
    pub fn remove(&mut self, flow: &Flow, name: Name, now: Time) -> bool {
        self.expire(now);
        let flow = self.keyed(flow);
        let before = self.states.len();
        self.states
            .retain(|state| state.name != name || (state.flow != flow && state.flow != flow.reversed()));
        before > self.states.len()
    }

    /// See [`States::orphan_where`](crate::state::States::orphan_where).
    pub fn orphan_where(&mut self, mut gone: impl FnMut(RuleId) -> bool, now: Time) {
        self.expire(now);
        self.states.iter_mut().filter(|state| gone(state.rule)).for_each(|state| state.orphaned = true);
        let parents = self.parents.iter_mut();
        parents.filter(|parent| gone(parent.counts.rule)).for_each(|parent| parent.orphaned = true);
    }

    /// Advances the time: removes expired entries.
    pub fn expire(&mut self, now: Time) {
        self.states.retain(|state| state.expire > now);
        let states = &self.states;
        self.parents.retain(|parent| parent.expire > now || children(states, &parent.counts) > 0);
    }

    /// See [`States::set_settings`](crate::state::States::set_settings).
    pub fn set_settings(&mut self, mut settings: Settings) {
        settings.dyn_fin_lifetime = settings.dyn_fin_lifetime.min(4);
        if settings.dyn_keepalive {
            settings.dyn_rst_lifetime = settings.dyn_rst_lifetime.min(4);
        }
        self.settings = settings;
    }

    /// Makes room: evicts a state that is not assured, or, if all are, the one that expires first.
    fn evict(&mut self, kept: &[(Flow, Name)]) {
        for _ in 0..64 {
            // An install evicts one state. If `dyn_max` was lowered below the number of states, the excess expires.
            if self.states.len() != self.settings.dyn_max as usize || self.states.is_empty() {
                return;
            }
            let order =
                |state: &State| (state.replied, if state.replied { Some(state.expire) } else { None });
            let first = self.states.iter().map(order).min();
            let kept = |state: &State| kept.contains(&(state.flow, state.name));
            let goes = |state: &State| Some(order(state)) == first && !kept(state);
            let gone = self.states.iter().position(goes);
            self.states.remove(gone.expect("a state that is evicted first and not in `kept`"));
            self.counters.evicted += 1;
        }
    }

    fn keyed(&self, flow: &Flow) -> Flow {
        let query = flow.proto == 1 || flow.proto == 58;
        if query && !self.settings.dyn_icmp_id { Flow { src_port: 0, dst_port: 0, ..*flow } } else { *flow }
    }

    /// The number of states.
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// The number of states that are not assured.
    pub fn unreplied(&self) -> usize {
        self.states.iter().filter(|state| !state.replied).count()
    }

    /// Returns true if there are no states.
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// See [`States::counters`](crate::state::States::counters). Does not count expired and removed states.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Parents and states, in no particular order.
    pub fn list(&self, now: Time) -> Vec<Listed> {
        let parents = self.parents.iter().map(|parent| Listed {
            kind: Kind::Parent { count: children(&self.states, &parent.counts) as u32 },
            rule: parent.counts.rule,
            name: parent.counts.name,
            orphaned: parent.orphaned,
            flow: parent.counts.flow,
            packets: [0; 2],
            bytes: [0; 2],
            remaining: parent.expire.since(now),
            tcp_seen: 0,
            picked_up: false,
            tcp_ack: [0; 2],
            origin: Origin::UNRECORDED,
        });
        let states = self.states.iter().map(|state| Listed {
            kind: if state.counted.is_some() { Kind::Limit } else { Kind::State },
            rule: state.rule,
            name: state.name,
            orphaned: state.orphaned,
            flow: state.flow,
            packets: state.packets,
            bytes: state.bytes,
            remaining: state.expire.since(now),
            tcp_seen: u32::from(state.flags[0])
                | u32::from(state.flags[1]) << 8
                | match state.turn.filter(|_| state.flow.proto == 6) {
                    None => 0,
                    Some(Direction::Forward) => 0x1_0000,
                    Some(Direction::Reverse) => 0x2_0000,
                },
            picked_up: state.picked_up,
            tcp_ack: state.ack,
            origin: Origin::UNRECORDED,
        });
        parents.chain(states).collect()
    }
}

fn children(states: &[State], counts: &Counted) -> usize {
    states.iter().filter(|state| state.counted == Some(*counts)).count()
}

/// Returns true if a limit per second admits one more install. Each advances `busy` by 1 s / `most`, to at most one second after
/// `now`.
fn takes(parent: &mut Parent, most: u32, now: Time) -> bool {
    if most == 0 {
        return false;
    }
    let busy = parent.busy.max(now) + Duration::from_secs(1) / most;
    if busy > now + seconds(1) {
        return false;
    }
    parent.busy = busy;
    true
}

/// The key by which `dyn_source_max` counts: zone, address (of a global IPv6 address the first 64 bits), and interface.
fn source(flow: &Flow) -> (u16, Vec<u8>, u32) {
    match flow.ends {
        Ends::V4(src, _) => (flow.zone, src.octets().to_vec(), 0),
        Ends::V6(src, _, zone) if src.octets()[..2] == [0xfe, 0x80] => {
            (flow.zone, src.octets().to_vec(), zone)
        }
        Ends::V6(src, _, zone) => (flow.zone, src.octets()[..8].to_vec(), zone),
    }
}

fn masked(flow: &Flow, mask: LimitMask) -> Flow {
    let mut flow = *flow;
    let (src, dst) = (mask.contains(LimitMask::SRC_ADDR), mask.contains(LimitMask::DST_ADDR));
    match &mut flow.ends {
        Ends::V4(a, b) => {
            *a = first(a.octets(), src, mask.src[0]).into();
            *b = first(b.octets(), dst, mask.dst[0]).into();
        }
        Ends::V6(a, b, _) => {
            *a = first(a.octets(), src, mask.src[1]).into();
            *b = first(b.octets(), dst, mask.dst[1]).into();
        }
    }
    if !mask.contains(LimitMask::SRC_PORT) {
        flow.src_port = 0;
    }
    if !mask.contains(LimitMask::DST_PORT) {
        flow.dst_port = 0;
    }
    flow
}

/// The address without its last `without` bits, or zero.
fn first<const N: usize>(address: [u8; N], wanted: bool, without: u8) -> [u8; N] {
    let kept = if wanted { 8 * N - usize::from(without) } else { 0 };
    let bit = |at: usize| if at < kept { address[at / 8] & 0x80 >> (at % 8) } else { 0 };
    std::array::from_fn(|byte| (8 * byte..8 * byte + 8).fold(0, |all, at| all | bit(at)))
}

fn seconds(seconds: u32) -> Duration {
    Duration::from_secs(seconds.into())
}
