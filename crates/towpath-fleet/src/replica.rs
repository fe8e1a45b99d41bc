//! The replica of a gate: changes of its states go to its peers, and theirs come to its table.
//!
//! What: the replica has no IO and no clock. The caller passes changes of the table, messages of the bus, and the time; the replica
//! returns messages, and merges records into a [`Table`]. A batch has a sequence number. When one is missing, the replica asks the caller
//! for a replay by the stream of the bus, and takes a [snapshot](crate::sync) if the gap is still open after [`REPLAY`].
//!
//! Order: a merge does not depend on the order of records, so batches are merged as they arrive, also while a replay or a snapshot is open.
//!
//! Bounds: [`MAX_PEERS`] peers with bounded gaps, [`MAX_SERVING`] open requests, and the changes that wait ([`outgoing`](crate::outgoing)).
//! Messages of others are untrusted: a malformed one is counted and dropped.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use towpath_gate::state::record::Record;
use towpath_gate::state::{Cursor, EventKind, Refused};
use towpath_gate::{Merged, NotMerged};
use towpath_wire::Time;

use crate::batches::Batches;
use crate::known::Known;
#[cfg(test)]
use crate::known::MAX_KNOWN;
use crate::message::{Has, Item, Kind, Message, MessageError, Sender, records};
use crate::outgoing::{Outgoing, Replicate};
use crate::peer::{Arrival, Peer, SILENT};
#[cfg(test)]
use crate::removed::MAX_REMOVED;
use crate::removed::{Removed, Sent};
use crate::stats::FleetStats;
use crate::sync::{CHUNKS, Chunk, Sync};

/// Maximum number of peers.
pub const MAX_PEERS: usize = 128;

/// Maximum number of peers whose requests for chunks are open.
const MAX_SERVING: usize = 32;

/// Interval of batches without records.
const ALIVE: Duration = Duration::from_secs(1);

/// Time for a replay, after which a snapshot fills the gap.
const REPLAY: Duration = Duration::from_secs(2);

/// Time in which peers are heard after the gate has connected. They send once per second. Then one snapshot serves for all whose batches
/// its peer has.
const HEARD: Duration = Duration::from_millis(1200);

/// Time after which a gate without peers is in step.
const JOIN: Duration = Duration::from_millis(2500);

/// Time left of a connection whose end arrives late.
const ENDED: Duration = Duration::from_millis(100);

/// Age at which a removal is late: a state of the same flow may have been made since. It is removed only if it does not expire later than
/// the removed one, by more than [`LATER`].
const LATE: Duration = Duration::from_secs(2);
const LATER: Duration = Duration::from_secs(1);

/// Bytes at which a chunk is complete, slots of the table that are scanned at once, and scans of one chunk. A chunk has at most
/// `CHUNK` bytes and the records of `PART` slots: 128 KiB.
const CHUNK: usize = 64 << 10;
const PART: u32 = 64;
const SCANS: usize = 256;

/// The table of states.
pub trait Table {
    /// The fingerprint of the rules, and whether some states have not been checked against them.
    fn rules(&mut self) -> (u64, bool);
    /// Merges a record of a peer.
    ///
    /// # Errors
    /// The reason why the state does not exist here.
    fn merge(&mut self, record: &Record<'_>, trusted: bool) -> Result<Merged, NotMerged>;
    /// Removes the state of a record that a peer has removed, unless it expires later than in `within`. Returns its number.
    fn remove(&mut self, record: &Record<'_>, within: Option<Duration>) -> Option<u32>;
    /// Passes the states in the next `slots` slots to `each`. Returns the cursor that continues, or `None` at the end.
    fn scan(&mut self, from: Cursor, slots: u32, each: &mut dyn FnMut(&Record<'_>)) -> Option<Cursor>;
}

/// The settings of a replica.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The name of the gate in its group.
    pub gate: String,
    /// Different for each process of the group, and larger for a later one of the gate. If it is smaller, because the wall clock was set
    /// back, peers take its messages when they have not heard the process before for three seconds.
    pub incarnation: u64,
    /// The states that are sent.
    pub replicate: Replicate,
    /// The suppression window.
    pub window: Duration,
}

/// How a message came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// To all gates.
    States,
    /// To all gates, and sent again by the stream of the bus ([`Output::Replay`]).
    Replayed,
    /// A request to this gate.
    Request,
    /// A part of a snapshot for this gate.
    Chunk,
}

/// What the caller does for the replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Sends a message to all gates. `states` is the number of its records.
    Batch {
        /// The message.
        bytes: Vec<u8>,
        /// The number of its records.
        states: u64,
    },
    /// Sends a request to a peer.
    Request {
        /// The peer.
        to: String,
        /// The message.
        bytes: Vec<u8>,
    },
    /// Sends a part of a snapshot to a peer.
    Chunk {
        /// The peer.
        to: String,
        /// The message.
        bytes: Vec<u8>,
    },
    /// Passes the batches of a peer that the stream of the bus has to [`Replica::message`] again.
    Replay {
        /// The peer.
        peer: String,
    },
}

/// A peer, for `towpath ctl show fleet`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerView {
    /// Its name.
    pub name: String,
    /// It has the states of its peers.
    pub in_step: bool,
    /// All of its batches were received.
    pub whole: bool,
    /// It has the same rules, so that its states need no check.
    pub same_rules: bool,
    /// Time since its last message.
    pub heard: Duration,
    /// Age of its last message.
    pub lag: Duration,
}

/// A snapshot that is being taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyncView {
    /// The peer.
    pub peer: String,
    /// Its states that have arrived.
    pub states: u64,
}

#[derive(Debug)]
struct Serving {
    to: String,
    epoch: u64,
    cursor: Cursor,
    chunks: u64,
}

/// See the module documentation.
#[derive(Debug)]
pub struct Replica {
    settings: Settings,
    outgoing: Outgoing,
    removed: Removed,
    peers: BTreeMap<String, Peer>,
    known: Known,
    sync: Sync,
    serving: VecDeque<Serving>,
    replays: VecDeque<String>,
    /// The number of the next batch.
    seq: u64,
    /// When the next batch without records is due, and the next one that tells what the gate has.
    alive: Time,
    tells: Time,
    /// When the bus was connected, and whether peers had time to be heard since.
    connected: Option<Time>,
    joined: bool,
    stats: FleetStats,
}

impl Replica {
    /// A replica that is not connected.
    pub fn new(settings: Settings) -> Self {
        Self {
            outgoing: Outgoing::new(settings.replicate, settings.window),
            settings,
            removed: Removed::default(),
            peers: BTreeMap::new(),
            known: Known::default(),
            sync: Sync::default(),
            serving: VecDeque::new(),
            replays: VecDeque::new(),
            seq: 1,
            alive: Time::default(),
            tells: Time::default(),
            connected: None,
            joined: false,
            stats: FleetStats::default(),
        }
    }

    /// A change of the table.
    pub fn change(&mut self, record: &Record<'_>, now: Time) {
        if self.outgoing.change(record, now, &mut self.stats) {
            let incarnation = self.settings.incarnation;
            self.removed.add(record, Sent { incarnation, there: now, here: now }, now);
        }
    }

    /// The reader of the journal was too slow for this many changes.
    pub fn missed(&mut self, changes: u64) {
        self.stats.not_sent_missed += changes;
    }

    /// A state that a walk through the table has found. A walk begins once per second.
    pub fn scanned(&mut self, record: &Record<'_>, now: Time) {
        self.outgoing.scanned(record, now);
    }

    /// The bus refused a message that the server has sent a copy of, under another subject.
    pub fn republished(&mut self) {
        self.stats.messages_republished += 1;
    }

    /// The bus dropped messages, because it was faster than the caller. A missing batch is a gap.
    pub fn dropped(&mut self, messages: u64) {
        self.stats.messages_busy += messages;
    }

    /// A replay did not end, or failed. A snapshot fills the gap.
    pub fn replay_failed(&mut self) {
        self.stats.replays_failed += 1;
    }

    /// The bus is connected, and messages arrive from now on.
    pub fn connect(&mut self, now: Time) {
        self.connected = Some(now);
        self.joined = false;
        (self.alive, self.tells) = (now, now);
        self.sync.resume(now);
    }

    /// The bus is away. Peers find a gap when it is back.
    pub fn disconnect(&mut self) {
        self.connected = None;
        self.joined = false;
        self.serving.clear();
        self.replays.clear();
        self.sync.interrupt();
    }

    /// Returns true if the gate has the states of its peers.
    pub fn is_in_step(&self) -> bool {
        self.connected.is_some() && self.joined && self.sync.is_idle()
    }

    /// A message that came by `channel` from the gate `from`, which the bus has authenticated.
    pub fn message(&mut self, channel: Channel, from: &str, bytes: &[u8], table: &mut impl Table, now: Time) {
        let message = match Message::decode(bytes) {
            Ok(message) => message,
            Err(MessageError::Malformed) => return self.stats.messages_malformed += 1,
            Err(MessageError::Version(_)) => return self.stats.messages_version += 1,
        };
        if from == self.settings.gate {
            // Another process has its name, or the server sends its own messages back.
            self.stats.messages_own_name +=
                u64::from(message.sender.incarnation != self.settings.incarnation);
            return;
        }
        if !self.peers.contains_key(from) && !self.has_room(now) {
            return self.stats.messages_peers += 1;
        }
        let Message { sender, kind, has, records } = message;
        let is_current = |peer: &Peer| peer.sender.incarnation == sender.incarnation;
        // A replay fills the gaps of one process. The stream also has batches of those before, whose incarnations are larger if the wall
        // clock was set back.
        if channel == Channel::Replayed && !self.peers.get(from).is_some_and(is_current) {
            return self.stats.repeated += 1;
        }
        let is_new = !self.peers.contains_key(from);
        let peer = self.peers.entry(from.to_owned()).or_insert_with(|| Peer::new(sender, now));
        // If the last process is silent, the other one may have begun after it.
        if peer.is_earlier(sender.incarnation) && !peer.is_silent(now) {
            return self.stats.repeated += 1;
        }
        let before =
            (!is_new && peer.sender.incarnation != sender.incarnation).then_some(peer.sender.incarnation);
        if let Some(before) = before {
            self.known.add(before, peer.has());
            self.sync.ended(before, from);
        }
        let age = peer.hears(sender, now);
        if is_new || before.is_some() {
            peer.cover(&self.known.take(sender.incarnation));
        }
        if !peer.is_whole() {
            let all = Batches::below(peer.next());
            self.sync.want(sender.incarnation, &all, from, self.heard_at(now));
        }
        if !has.is_empty() {
            self.compare(from, has, now);
        }
        match (channel, kind) {
            (Channel::States | Channel::Replayed, Kind::States { seq }) => {
                self.batch(from, seq, records, age, table, now)
            }
            (Channel::Request, Kind::Request { epoch, cursor, chunks }) => {
                self.request(from, epoch, cursor, chunks)
            }
            (Channel::Chunk, Kind::Chunk { epoch, cursor, next }) => {
                let chunk = self.sync.chunk((from, sender.incarnation), (epoch, cursor, next), has, now);
                self.chunk(from, chunk, records, age, table, now);
            }
            _ => self.stats.messages_malformed += 1,
        }
    }

    /// The next thing to do at `now`, if any.
    pub fn poll(&mut self, table: &mut impl Table, now: Time) -> Option<Output> {
        while self.connected.is_none() {
            let (_, states) = self.outgoing.poll(now)?;
            self.stats.not_sent_away += states;
            // Peers find the gap.
            self.seq += 1;
        }
        self.joined |= self.connected.is_some_and(|at| now.since(at) >= JOIN);
        if let Some((records, states)) = self.outgoing.poll(now) {
            return Some(self.make_batch(&records, states, table, now));
        }
        if now >= self.alive.min(self.tells) {
            return Some(self.make_batch(&[], 0, table, now));
        }
        if let Some(peer) = self.replays.pop_front() {
            return Some(Output::Replay { peer });
        }
        let peers = &self.peers;
        let live = |name: &str| {
            let peer = peers.get(name).filter(|peer| !peer.is_silent(now));
            peer.map(|peer| (peer.sender.incarnation, peer.next()))
        };
        if let Some((to, epoch, cursor)) = self.sync.poll(now, live, &mut self.stats.snapshots_failed) {
            let kind = Kind::Request { epoch, cursor, chunks: CHUNKS };
            return Some(Output::Request { to, bytes: self.encode(kind, false, &[], table, now) });
        }
        None
    }

    /// The next part of a snapshot that a peer has asked for. The caller calls this while the bus takes more.
    pub fn poll_chunk(&mut self, table: &mut impl Table, now: Time) -> Option<Output> {
        let mut serving = self.serving.pop_front()?;
        let begins = serving.cursor == Cursor::default();
        let (mut chunk, mut next, mut states) = (Vec::new(), Some(serving.cursor), 0);
        for _ in 0..SCANS {
            let Some(at) = next.filter(|_| chunk.len() < CHUNK) else { break };
            next = table.scan(at, PART, &mut |record| {
                if self.outgoing.carries(record) {
                    record.encode(&mut chunk);
                    states += 1;
                }
            });
        }
        self.stats.snapshot_sent += states;
        let (epoch, cursor) = (serving.epoch, serving.cursor.to_bits());
        let kind = Kind::Chunk { epoch, cursor, next: next.map(Cursor::to_bits) };
        let bytes = self.encode(kind, begins, &chunk, table, now);
        let to = serving.to.clone();
        serving.chunks -= 1;
        if let Some(next) = next.filter(|_| serving.chunks > 0) {
            serving.cursor = next;
            // Peers take turns.
            self.serving.push_back(serving);
        }
        Some(Output::Chunk { to, bytes })
    }

    /// Returns true if a peer has asked for chunks.
    pub fn is_serving(&self) -> bool {
        !self.serving.is_empty()
    }

    /// The bus did not take an output. Peers find the gap of a batch, and ask again for chunks.
    pub fn lost(&mut self, output: &Output) {
        if let Output::Batch { states, .. } = output {
            self.stats.sent -= states;
            self.stats.batches -= 1;
            self.stats.not_sent_busy += states;
        }
    }

    /// When [`poll`](Self::poll) is to be called next.
    pub fn timeout(&self) -> Option<Time> {
        let alive = self.connected.map(|_| self.alive.min(self.tells));
        alive.into_iter().chain(self.outgoing.timeout()).chain(self.sync.timeout()).min()
    }

    /// The counters at `now`.
    pub fn stats(&self, now: Time) -> FleetStats {
        let live = || self.peers.values().filter(|peer| !peer.is_silent(now));
        FleetStats {
            connected: self.connected.is_some().into(),
            in_step: self.is_in_step().into(),
            peers: live().count() as u64,
            lag: live().map(|peer| peer.lag.as_nanos() as u64).max().unwrap_or(0),
            ..self.stats
        }
    }

    /// The peers that were heard lately.
    pub fn peers(&self, table: &mut impl Table, now: Time) -> Vec<PeerView> {
        let (own, _) = table.rules();
        let view = |(name, peer): (&String, &Peer)| PeerView {
            name: name.clone(),
            in_step: peer.sender.in_step,
            whole: peer.is_whole(),
            same_rules: peer.sender.fingerprint == own,
            heard: now.since(peer.heard),
            lag: peer.lag,
        };
        self.peers.iter().filter(|(_, peer)| !peer.is_silent(now)).map(view).collect()
    }

    /// The snapshot that is being taken.
    pub fn syncing(&self) -> Option<SyncView> {
        let running = self.sync.running.as_ref()?;
        Some(SyncView { peer: running.peer.clone(), states: running.states })
    }

    /// What is held, each with its bound.
    #[cfg(test)]
    pub(crate) fn sizes(&self) -> Vec<(usize, usize)> {
        let own = [
            (self.peers.len(), MAX_PEERS),
            (self.serving.len(), MAX_SERVING),
            (self.replays.len(), MAX_PEERS),
            (self.removed.len(), MAX_REMOVED),
            (self.known.len(), MAX_KNOWN),
        ];
        own.into_iter()
            .chain(self.sync.sizes())
            .chain(self.outgoing.sizes())
            .chain(self.peers.values().map(Peer::size))
            .collect()
    }

    fn make_batch(&mut self, records: &[u8], states: u64, table: &mut impl Table, now: Time) -> Output {
        let tells = now >= self.tells;
        if tells {
            self.tells = now + ALIVE;
        }
        let bytes = self.encode(Kind::States { seq: self.seq }, tells, records, table, now);
        self.seq += 1;
        self.alive = now + ALIVE;
        self.stats.batches += 1;
        self.stats.sent += states;
        Output::Batch { bytes, states }
    }

    /// A message. `tells`: with what the gate has.
    fn encode(&self, kind: Kind, tells: bool, records: &[u8], table: &mut impl Table, now: Time) -> Vec<u8> {
        let (fingerprint, unchecked) = table.rules();
        let sender = Sender {
            incarnation: self.settings.incarnation,
            at: now,
            fingerprint,
            in_step: self.is_in_step(),
            unchecked,
        };
        let has = if tells { self.has() } else { Vec::new() };
        Message { sender, kind, has: Has::of(&has), records }.encode()
    }

    /// The batches that this gate has.
    fn has(&self) -> Vec<u8> {
        let own = Batches::below(self.seq);
        let peers = self.peers.values().map(|peer| (peer.sender.incarnation, peer.has()));
        Has::encode([(self.settings.incarnation, &own)].into_iter().chain(peers).chain(self.known.iter()))
    }

    /// A peer has these batches. Wants a snapshot of the peer if this gate lacks some, and they will not arrive.
    fn compare(&mut self, from: &str, has: Has<'_>, now: Time) {
        for (incarnation, batches) in has.processes() {
            let mut peers = self.peers.values();
            let lacks = match peers.find(|peer| peer.sender.incarnation == incarnation) {
                // Its next batch shows what is missing.
                Some(peer) if !peer.is_silent(now) && !self.sync.has_failed(incarnation) => false,
                Some(peer) => !peer.has().includes(&batches),
                None if incarnation == self.settings.incarnation => false,
                None => !self.known.includes(incarnation, &batches),
            };
            if lacks {
                let at = self.heard_at(now).max(self.sync.next(incarnation));
                self.sync.want(incarnation, &batches, from, at);
            }
        }
    }

    /// A snapshot had these batches.
    fn cover(&mut self, covers: &BTreeMap<u64, Batches>) {
        for (&incarnation, batches) in covers {
            match self.peers.values_mut().find(|peer| peer.sender.incarnation == incarnation) {
                Some(peer) => {
                    let missing = !peer.is_whole();
                    peer.cover(batches);
                    self.stats.resynced += u64::from(missing && peer.is_whole());
                    self.sync.has(incarnation, peer.has());
                }
                None if incarnation == self.settings.incarnation => {}
                None => {
                    self.known.add(incarnation, batches);
                    self.sync.has(incarnation, batches);
                }
            }
        }
    }

    /// Forgets a silent peer if there is no room for another one.
    fn has_room(&mut self, now: Time) -> bool {
        if self.peers.len() >= MAX_PEERS {
            let silent = self.peers.iter().filter(|(_, peer)| peer.is_silent(now));
            let oldest = silent.min_by_key(|(_, peer)| peer.heard).map(|(name, _)| name.clone());
            if let Some(peer) = oldest.and_then(|name| self.peers.remove(&name)) {
                self.known.add(peer.sender.incarnation, peer.has());
            }
        }
        self.peers.len() < MAX_PEERS
    }

    fn batch(
        &mut self,
        from: &str,
        seq: u64,
        records: &[u8],
        age: Duration,
        table: &mut impl Table,
        now: Time,
    ) {
        let heard_at = self.heard_at(now);
        let Some(peer) = self.peers.get_mut(from) else { return };
        let incarnation = peer.sender.incarnation;
        match peer.arrives(seq) {
            Arrival::Next | Arrival::First { missed: false } | Arrival::Filled { last: false } => {}
            Arrival::First { missed: true } => {
                self.sync.want(incarnation, &Batches::below(seq), from, heard_at)
            }
            Arrival::Gap => {
                self.stats.gaps += 1;
                if !self.replays.iter().any(|peer| peer == from) && self.replays.len() < MAX_PEERS {
                    self.replays.push_back(from.to_owned());
                }
                self.sync.want(incarnation, &Batches::below(seq), from, now + REPLAY);
            }
            Arrival::Filled { last: true } => self.stats.replayed += 1,
            Arrival::Repeated => return self.stats.repeated += 1,
        }
        self.sync.has(incarnation, peer.has());
        self.stats.received += self.apply(from, (records, true), age, table, now);
    }

    fn request(&mut self, from: &str, epoch: u64, cursor: u64, chunks: u64) {
        // A repeated request replaces the one before.
        self.serving.retain(|serving| serving.to != from);
        if self.serving.len() >= MAX_SERVING || chunks == 0 {
            return self.stats.requests_refused += 1;
        }
        // A peer cannot make this gate send more at once.
        let chunks = chunks.min(CHUNKS);
        let cursor = Cursor::from_bits(cursor);
        self.serving.push_back(Serving { to: from.to_owned(), epoch, cursor, chunks });
    }

    fn chunk(
        &mut self,
        from: &str,
        chunk: Chunk,
        records: &[u8],
        age: Duration,
        table: &mut impl Table,
        now: Time,
    ) {
        if chunk == Chunk::Other {
            return;
        }
        let states = self.apply(from, (records, false), age, table, now);
        self.stats.snapshot_received += states;
        if let Some(running) = &mut self.sync.running {
            running.states += states;
        }
        if chunk == Chunk::Last {
            self.stats.snapshots += 1;
            self.joined = true;
            let mut covers = self.sync.finish(now);
            let sender = self.peers.get(from).map(|peer| peer.sender);
            if !sender.is_some_and(|sender| sender.fingerprint == table.rules().0 && !sender.unchecked) {
                // It may have refused states of peers that can be asked.
                let others = self.peers.iter().filter(|(name, peer)| *name != from && !peer.is_silent(now));
                others.for_each(|(_, peer)| drop(covers.remove(&peer.sender.incarnation)));
            }
            self.cover(&covers);
        }
    }

    /// When all peers have been heard since the bus was connected.
    fn heard_at(&self, now: Time) -> Time {
        self.connected.map_or(now, |at| now.max(at + HEARD))
    }

    /// Merges records. `to_all`: of a batch, which all peers receive. Returns their number.
    fn apply(
        &mut self,
        from: &str,
        (bytes, to_all): (&[u8], bool),
        age: Duration,
        table: &mut impl Table,
        now: Time,
    ) -> u64 {
        let (fingerprint, _) = table.rules();
        let sender = self.peers.get(from).map(|peer| peer.sender);
        let trusted = sender.is_some_and(|sender| sender.fingerprint == fingerprint && !sender.unchecked);
        let here = Time::from_nanos(now.as_nanos().saturating_sub(age.as_nanos() as u64));
        let (incarnation, there) = sender.map_or((0, here), |sender| (sender.incarnation, sender.at));
        let sent = Sent { incarnation, there, here };
        let mut states = 0;
        for item in records(bytes) {
            let record = match item {
                Item::Record(record) => record,
                Item::Version => {
                    self.stats.refused_version += 1;
                    continue;
                }
                Item::Malformed => {
                    self.stats.messages_malformed += 1;
                    continue;
                }
            };
            states += 1;
            let mut remaining = record.remaining.saturating_sub(age);
            if record.kind == Some(EventKind::Removed) {
                self.removed.add(&record, sent, now);
                if let Some(id) = table.remove(&record, (age >= LATE).then_some(remaining + LATER)) {
                    self.stats.removed += 1;
                    self.outgoing.removed_by_peer(&record, id, now);
                }
                continue;
            }
            if self.removed.is_older(&record, sent) {
                self.stats.refused_removed += 1;
                continue;
            }
            if remaining.is_zero() && record.has_closed() {
                // It ends here, too.
                remaining = ENDED;
            }
            if remaining.is_zero() {
                self.stats.refused_expired += 1;
                continue;
            }
            let record = Record { remaining, ..record };
            match table.merge(&record, trusted) {
                Ok(merged) => {
                    let counts = &mut self.stats;
                    *if merged.created { &mut counts.created } else { &mut counts.merged } += 1;
                    counts.without_window += u64::from(merged.without_window);
                    self.outgoing.merged(&record, (merged.id, merged.before), to_all, now);
                }
                Err(reason) => *self.refused(reason) += 1,
            }
        }
        states
    }

    fn refused(&mut self, reason: NotMerged) -> &mut u64 {
        let stats = &mut self.stats;
        match reason {
            NotMerged::Rules => &mut stats.refused_rules,
            NotMerged::Names => &mut stats.refused_names,
            NotMerged::Refused(Refused::Full | Refused::ParentsFull) => &mut stats.refused_full,
            NotMerged::Refused(_) => &mut stats.refused_limit,
        }
    }
}

const _: () = assert!(SILENT.as_millis() > JOIN.as_millis());
