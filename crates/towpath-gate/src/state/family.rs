//! The states of one address family.
//!
//! Invariant: every state is in one of two queues by age: of those whose first reply is still to come, in the order of
//! their making, or of the others. A full table evicts from the first queue before it touches the second. The second
//! is a clock (Corbató 1969): a state that had packets since it was last passed over is spared once and goes to the
//! end, so that a hit costs a mark and no list is touched.

use slab::Slab;

use super::chain::{Chains, List, NONE};
use super::hash::Secret;
use super::key::{Key, Side, Unpack};
use super::list::{Kind, Listed};
use super::parents::Parents;
use super::sources::Sources;
use super::table::{Body, Entry, Table};
use super::tcp::{Life, RST, SYN, Tcp};
use super::window::{Fit, Window};
use super::{Direction, Hit, Lookup, Name, RuleId, Segment, Settings, Tracking, sctp};
use crate::Time;

const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;
const UDP_LITE: u8 = 136;

/// What a state remembers.
#[derive(Clone, Debug)]
struct State {
    /// The end that the first packet came from.
    forward: Side,
    /// A packet came from the other end.
    replied: bool,
    /// A packet came since eviction last looked.
    used: bool,
    /// The state counts in its source's cap.
    capped: bool,
    lifetime: Option<u32>,
    /// The slot of the parent that counts this state, or `NONE`.
    parent: u32,
    /// The index of the connection's windows, or `NONE` without strict tracking.
    window: u32,
    /// When the state came into its queue, and when it was made: numbers of one sequence.
    queued: u64,
    made: u64,
    tcp: Tcp,
    sctp: sctp::Phase,
    packets: [u64; 2],
    bytes: [u64; 2],
}

impl Body for State {
    fn held(&self) -> bool {
        false
    }
}

/// What both families use.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    pub(super) settings: Settings,
    pub(super) secret: Secret,
    pub(super) parents: Parents,
    pub(super) sources: Sources,
    /// Of the states with strict tracking.
    pub(super) windows: Slab<Window>,
    /// Numbers what happens to states, so that they have an age.
    pub(super) sequence: u64,
}

impl Shared {
    fn tick(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }
}

/// One packet as a state sees it.
pub(super) struct Seen<'a> {
    pub(super) proto: u8,
    pub(super) segment: &'a Segment,
    pub(super) now: Time,
}

/// What a new state takes from its rule.
pub(super) struct Template {
    pub(super) name: Name,
    pub(super) rule: RuleId,
    pub(super) lifetime: Option<u32>,
    pub(super) parent: u32,
    pub(super) capped: bool,
    pub(super) tracking: Tracking,
}

/// What came of a packet.
pub(super) enum Found {
    Hit(Hit),
    Miss,
    /// The state tracks strictly, and the packet does not fit.
    Invalid,
}

/// A state that may be evicted; the least goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate {
    replied: bool,
    queued: u64,
    slot: u32,
}

/// The states of one family.
#[derive(Clone, Debug)]
pub(super) struct Family<const N: usize> {
    table: Table<N, State>,
    ages: Chains,
    unreplied: List,
    replied: List,
    unreplied_len: usize,
}

impl<const N: usize> Family<N>
where
    Key<N>: Unpack,
{
    pub(super) fn new() -> Self {
        Self {
            table: Table::new(),
            ages: Chains::default(),
            unreplied: List::EMPTY,
            replied: List::EMPTY,
            unreplied_len: 0,
        }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    pub(super) fn unreplied(&self) -> usize {
        self.unreplied_len
    }

    pub(super) fn longest(&self) -> usize {
        self.table.longest()
    }

    pub(super) fn count_of(&self, rule: RuleId) -> usize {
        self.table.count_of(rule)
    }

    /// Finds a live state, counts the packet in it and refreshes it.
    #[inline]
    pub(super) fn hit(
        &mut self,
        shared: &mut Shared,
        key: &Key<N>,
        side: Side,
        lookup: Lookup,
        packet: &Seen<'_>,
    ) -> Found {
        let hash = shared.secret.hash(&key.0);
        let Some(slot) = self.find(hash, key, lookup, packet.now) else { return Found::Miss };
        let entry = self.table.get_mut(slot);
        let state = &mut entry.body;
        let hit = Hit { rule: entry.rule, direction: side.direction(state.forward) };
        if state.window != NONE {
            match state.fit(&mut shared.windows, hit.direction, packet.segment) {
                Fit::Fits => {}
                Fit::Ignored => {
                    state.count(hit.direction, packet);
                    return Found::Hit(hit);
                }
                Fit::Invalid => return Found::Invalid,
            }
        }
        state.used = true;
        let first_reply = hit.direction == Direction::Reverse && !state.replied;
        if let Some(expire) = state.packet(hit.direction, packet, &shared.settings) {
            self.table.set_expire(slot, expire, packet.now);
        }
        if first_reply {
            self.reply(shared, slot);
        }
        Found::Hit(hit)
    }

    /// Finds the live state that an error from `side` is about.
    pub(super) fn related(
        &self,
        shared: &Shared,
        key: &Key<N>,
        side: Side,
        lookup: Lookup,
        seq: Option<u32>,
        now: Time,
    ) -> Option<Hit> {
        let entry = self.table.get(self.find(shared.secret.hash(&key.0), key, lookup, now)?);
        let direction = side.direction(entry.body.forward);
        if let (Some(seq), Some(window)) = (seq, shared.windows.get(entry.body.window as usize)) {
            // Who makes an error up would have to know where the connection is (RFC 5927, 4.1).
            let sender =
                if direction == Direction::Forward { Direction::Reverse } else { Direction::Forward };
            if !window.sent(sender, seq) {
                return None;
            }
        }
        Some(Hit { rule: entry.rule, direction })
    }

    /// Makes a state; no live one has its key and name. How many expired ones it replaced: 0 or 1.
    pub(super) fn make(
        &mut self,
        shared: &mut Shared,
        key: Key<N>,
        side: Side,
        template: Template,
        packet: &Seen<'_>,
    ) -> u64 {
        let Template { name, rule, lifetime, parent, capped, tracking } = template;
        let hash = shared.secret.hash(&key.0);
        let expired = self.table.find(hash, &key, name);
        if let Some(slot) = expired {
            self.remove(shared, slot, packet.now);
        }
        shared.parents.add(parent);
        if capped {
            shared.sources.add(&shared.secret, &key.flow(side));
        }
        let number = shared.tick();
        let tcp = packet.proto == TCP;
        let window = if tcp && tracking == Tracking::Strict {
            let mut window = Window::default();
            window.segment(Direction::Forward, packet.segment);
            shared.windows.insert(window) as u32
        } else {
            NONE
        };
        let mut body = State {
            forward: side,
            replied: false,
            used: false,
            capped,
            lifetime,
            parent,
            window,
            queued: number,
            made: number,
            tcp: Tcp::default(),
            sctp: sctp::Phase::default(),
            packets: [0; 2],
            bytes: [0; 2],
        };
        if tcp && tracking == Tracking::Loose && packet.segment.tcp_flags & (SYN | RST) == 0 {
            body.tcp.assume_established();
        }
        let expire = body.packet(Direction::Forward, packet, &shared.settings);
        // No refresh yet: a connection that is taken for established.
        let expire = expire.unwrap_or(after(packet.now, shared.settings.dyn_syn_lifetime));
        let entry = Entry { key, name, rule, orphaned: false, expire, body };
        let slot = self.table.insert(&shared.secret, hash, entry, packet.now);
        self.ages.push(&mut self.unreplied, slot);
        self.unreplied_len += 1;
        u64::from(expired.is_some())
    }

    /// The state to evict first, of this family.
    pub(super) fn candidate(&self) -> Option<Candidate> {
        let slot = self.unreplied.first().or(self.replied.first())?;
        let State { replied, queued, .. } = self.table.get(slot).body;
        Some(Candidate { replied, queued, slot })
    }

    /// Evicts the candidate; with `spare`, one that was replied to and was used since goes to the end of its queue
    /// instead. Whether it was evicted.
    pub(super) fn evict(
        &mut self,
        shared: &mut Shared,
        candidate: Candidate,
        spare: bool,
        now: Time,
    ) -> bool {
        let Candidate { replied, slot, .. } = candidate;
        let state = &mut self.table.get_mut(slot).body;
        if spare && replied && std::mem::take(&mut state.used) {
            state.queued = shared.tick();
            self.ages.take(&mut self.replied, slot);
            self.ages.push(&mut self.replied, slot);
            return false;
        }
        self.remove(shared, slot, now);
        true
    }

    /// Removes the states of the rules that `gone` names. How many.
    pub(super) fn remove_where(
        &mut self,
        shared: &mut Shared,
        gone: impl FnMut(RuleId) -> bool,
        now: Time,
    ) -> usize {
        let mut removed = 0;
        for rule in self.table.rules_where(gone) {
            while let Some(slot) = self.table.any_of(rule) {
                self.remove(shared, slot, now);
                removed += 1;
            }
        }
        removed
    }

    /// Removes one state, live or not; `None` when there is none, else whether it was live.
    pub(super) fn remove_one(
        &mut self,
        shared: &mut Shared,
        key: &Key<N>,
        name: Name,
        now: Time,
    ) -> Option<bool> {
        let slot = self.table.find(shared.secret.hash(&key.0), key, name)?;
        let live = self.table.get(slot).live(now);
        self.remove(shared, slot, now);
        Some(live)
    }

    pub(super) fn orphan_where(&mut self, gone: impl FnMut(RuleId) -> bool) -> usize {
        self.table.rules_where(gone).into_iter().map(|rule| self.table.orphan(rule)).sum()
    }

    /// Collects states whose time was over when the current tick of the wheel began. How many.
    pub(super) fn collect(&mut self, shared: &mut Shared, now: Time, budget: &mut usize) -> u64 {
        let mut expired = 0;
        while let Some(slot) = self.table.due(now, budget) {
            self.remove(shared, slot, now);
            expired += 1;
        }
        expired
    }

    /// Collects states whose time was over since.
    pub(super) fn collect_just_due(&mut self, shared: &mut Shared, now: Time, budget: &mut usize) -> u64 {
        let mut expired = 0;
        while let Some(slot) = self.table.just_due(now, budget) {
            self.remove(shared, slot, now);
            expired += 1;
        }
        expired
    }

    pub(super) fn list_from(&self, slot: u32, now: Time) -> impl Iterator<Item = (u32, Listed)> {
        self.table.live_from(slot, now).map(move |(slot, entry)| {
            let State { forward, parent, tcp, packets, bytes, .. } = &entry.body;
            let kind = if *parent == NONE { Kind::State } else { Kind::Limit };
            let common = Listed::new(entry, entry.key.flow(*forward), kind, now);
            let seen =
                Listed { packets: *packets, bytes: *bytes, tcp_seen: tcp.seen, tcp_ack: tcp.ack, ..common };
            (slot, seen)
        })
    }

    /// The slot of a live state.
    #[inline]
    fn find(&self, hash: u64, key: &Key<N>, lookup: Lookup, now: Time) -> Option<u32> {
        match lookup {
            Lookup::Named(name) => {
                let slot = self.table.find(hash, key, name)?;
                self.table.get(slot).live(now).then_some(slot)
            }
            Lookup::Any => self.table.newest(hash, key, now, |state| state.made),
        }
    }

    #[cold]
    fn reply(&mut self, shared: &mut Shared, slot: u32) {
        self.ages.take(&mut self.unreplied, slot);
        self.ages.push(&mut self.replied, slot);
        self.unreplied_len -= 1;
        let state = &mut self.table.get_mut(slot).body;
        state.replied = true;
        state.queued = shared.tick();
    }

    /// Takes a state out, and out of all that counts it.
    fn remove(&mut self, shared: &mut Shared, slot: u32, now: Time) {
        let Entry { key, body: State { forward, replied, capped, parent, window, .. }, .. } =
            self.table.remove(&shared.secret, slot);
        if replied {
            self.ages.take(&mut self.replied, slot);
        } else {
            self.ages.take(&mut self.unreplied, slot);
            self.unreplied_len -= 1;
        }
        if window != NONE {
            shared.windows.remove(window as usize);
        }
        shared.parents.subtract(parent, now);
        if capped {
            shared.sources.subtract(&shared.secret, &key.flow(forward));
        }
    }
}

impl State {
    /// Takes a packet in. The state's new end, or `None` when it keeps the one that it has.
    #[inline]
    fn packet(&mut self, direction: Direction, packet: &Seen<'_>, settings: &Settings) -> Option<Time> {
        self.count(direction, packet);
        let seconds = match packet.proto {
            TCP => match self.tcp.segment(direction, packet.segment.tcp_flags, packet.segment.tcp_ack)? {
                Life::Ack => self.lifetime.unwrap_or(settings.dyn_ack_lifetime),
                Life::Syn => settings.dyn_syn_lifetime,
                Life::Fin => settings.dyn_fin_lifetime,
                Life::Rst => settings.dyn_rst_lifetime,
            },
            SCTP if settings.dyn_sctp => match self.sctp.packet(direction, packet.segment.sctp_chunk)? {
                sctp::Life::Short => self.lifetime.unwrap_or(settings.dyn_short_lifetime),
                sctp::Life::Ack => self.lifetime.unwrap_or(settings.dyn_ack_lifetime),
                sctp::Life::Syn => settings.dyn_syn_lifetime,
                sctp::Life::Fin => settings.dyn_fin_lifetime,
                sctp::Life::Rst => settings.dyn_rst_lifetime,
            },
            UDP | UDP_LITE => self.lifetime.unwrap_or(settings.dyn_udp_lifetime),
            _ => self.lifetime.unwrap_or(settings.dyn_short_lifetime),
        };
        Some(after(packet.now, seconds))
    }

    #[inline]
    fn count(&mut self, direction: Direction, packet: &Seen<'_>) {
        let side = direction as usize;
        self.packets[side] += 1;
        self.bytes[side] += u64::from(packet.segment.bytes);
    }

    /// What a segment is to the connection of a state with strict tracking.
    fn fit(&mut self, windows: &mut Slab<Window>, direction: Direction, segment: &Segment) -> Fit {
        let window = &mut windows[self.window as usize];
        if direction == Direction::Forward && self.tcp.ended() && Window::begins(segment) {
            (*window, self.tcp) = (Window::default(), Tcp::default());
        }
        window.segment(direction, segment)
    }
}

/// `seconds` after `now`.
#[inline]
pub(super) fn after(now: Time, seconds: u32) -> Time {
    Time::from_nanos(now.as_nanos().saturating_add(u64::from(seconds) * 1_000_000_000))
}
