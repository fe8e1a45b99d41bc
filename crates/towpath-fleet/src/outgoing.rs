//! Which changes of states are sent, and when.
//!
//! What: the first change of a state, and each one of a TCP connection, is due at once, another one after the suppression window, in which
//! later changes of the same state replace it. Due changes leave in batches of at most [`BATCH`] bytes, or after [`LINGER`]. A state whose
//! packets this gate sees is sent again after a third of its lifetime, which a walk through the table finds.
//!
//! Ownership: a state that was merged from a peer is not sent until this gate has seen a packet of it. The packets that the merge has
//! counted are remembered with its expiry, so the walk notices others.
//!
//! Bounds: [`WAITING`] changes wait; with more, batches leave before they are due. 16 bytes are kept for each state number of the table.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use towpath_gate::state::EventKind;
use towpath_gate::state::record::{MAX_BYTES, Record};
use towpath_wire::{Flow, Time, proto};

use crate::stats::FleetStats;

/// Maximum bytes of records in a batch.
pub(crate) const BATCH: usize = 64 << 10;

/// How long a change that is due waits for others.
pub(crate) const LINGER: Duration = Duration::from_millis(2);

/// Maximum number of changes that wait.
const WAITING: usize = 1 << 16;

/// Maximum number of a state; those of the largest table are below it.
const MAX_ID: u32 = 1 << 28;

/// State numbers that [`KnownStates`] allocates together: 64 KiB.
const PAGE: usize = 4096;

/// Parts of a second in which times of [`Known`] are kept.
const PARTS: u64 = 16;

/// Which states are replicated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replicate {
    /// States whose other side has sent a packet.
    #[default]
    Replied,
    /// All states.
    All,
}

/// Of [`Known::hash`]: the record that is known was one of a peer; it had TCP windows.
const THEIRS: u32 = 1;
const WINDOW: u32 = 2;

/// What the peers know of a state.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// Hash of its flow, with [`THEIRS`] and [`WINDOW`].
    hash: u32,
    /// When it was last sent or merged, in [`PARTS`] of a second; 0: never.
    at: u32,
    /// When it then was to expire; 0: a peer has removed it.
    expires: u32,
    /// The packets that were counted then.
    packets: u32,
}

impl Known {
    /// Returns true if this is known of a flow with this hash.
    fn is_of(&self, hash: u32) -> bool {
        self.at != 0 && (self.hash ^ hash) & !(THEIRS | WINDOW) == 0
    }
}

/// What the peers know of each state number.
#[derive(Debug, Default)]
struct KnownStates {
    /// Each of [`PAGE`] numbers, allocated when one of them is known: changes do not wait for the copy of a larger array.
    pages: Vec<Option<Box<[Known]>>>,
}

impl KnownStates {
    fn get(&self, id: u32) -> Option<&Known> {
        self.pages.get(id as usize / PAGE)?.as_ref()?.get(id as usize % PAGE)
    }

    /// Numbers from [`MAX_ID`] on are left out.
    fn set(&mut self, id: u32, known: Known) {
        if id >= MAX_ID {
            return;
        }
        let at = id as usize / PAGE;
        if at >= self.pages.len() {
            self.pages.resize(at + 1, None);
        }
        let page = self.pages[at].get_or_insert_with(|| vec![Known::default(); PAGE].into());
        page[id as usize % PAGE] = known;
    }
}

/// Bytes of memory for each state number.
#[cfg(test)]
pub(crate) const KNOWN_BYTES: usize = size_of::<Known>();

#[derive(Debug)]
struct Change {
    record: Vec<u8>,
    urgent: bool,
}

/// The changes that wait, and what the peers know.
#[derive(Debug)]
pub(crate) struct Outgoing {
    replicate: Replicate,
    window: Duration,
    hasher: RandomState,
    known: KnownStates,
    waiting: HashMap<u32, Change>,
    /// The numbers of waiting states, in the order in which they are due. A number may no longer wait, or be in both.
    urgent: VecDeque<(Time, u32)>,
    delayed: VecDeque<(Time, u32)>,
    /// Records of states that were removed.
    removed: VecDeque<(Time, Vec<u8>)>,
    bytes: usize,
}

impl Outgoing {
    pub(crate) fn new(replicate: Replicate, window: Duration) -> Self {
        Self {
            replicate,
            window,
            hasher: RandomState::new(),
            known: KnownStates::default(),
            waiting: HashMap::new(),
            urgent: VecDeque::new(),
            delayed: VecDeque::new(),
            removed: VecDeque::new(),
            bytes: 0,
        }
    }

    /// Returns true if the state is replicated.
    pub(crate) fn carries(&self, record: &Record<'_>) -> bool {
        self.replicate == Replicate::All || record.replied || record.packets[1] > 0
    }

    /// A change of the journal. Returns true if peers are told that the state was removed.
    pub(crate) fn change(&mut self, record: &Record<'_>, now: Time, stats: &mut FleetStats) -> bool {
        let Some(kind) = record.kind else { return false };
        if kind.is_end() {
            return self.ended(record, kind, now, stats);
        }
        match kind {
            // The state of a peer, or of a file: the walk through the table sends the latter.
            EventKind::Restored => drop(self.forgotten(record.id)),
            // The beginning of a state that was merged.
            EventKind::Created if self.known_before(record).is_some() => {}
            _ if self.carries(record) => self.queue(record, now),
            _ => {}
        }
        false
    }

    /// A state that a walk through the table has found.
    pub(crate) fn scanned(&mut self, record: &Record<'_>, now: Time) {
        if !self.carries(record) || self.waiting.contains_key(&record.id) {
            return;
        }
        let Some(known) = self.known_before(record) else { return self.queue(record, now) };
        let (part, expires) = (part(now), part(now + record.remaining));
        let lifetime = known.expires.saturating_sub(known.at);
        let third = part.saturating_sub(known.at) >= lifetime / 3;
        // A connection that has come here from a peer, whose windows are wrong from now on.
        let came = known.hash & THEIRS != 0 && record.is_tracked();
        // Changes of the journal have no windows.
        let scales = known.hash & (THEIRS | WINDOW) == 0 && record.window.is_some();
        // A peer may have counted as many packets, but others. An expiry that is much later shows that.
        let much = lifetime / 3 + PARTS as u32;
        let passed = packets(record.packets) != known.packets || expires.saturating_sub(known.expires) > much;
        let passed = passed && expires > known.expires;
        if passed && (third || came) || scales {
            self.queue(record, now);
        }
    }

    /// A record of a peer that was merged into the state `id`. `to_all`: all peers have received the record. `before`: the packets that this
    /// gate had counted.
    pub(crate) fn merged(
        &mut self,
        record: &Record<'_>,
        (id, before): (u32, [u64; 2]),
        to_all: bool,
        now: Time,
    ) {
        let hash = self.hash(&record.flow);
        let sent = |known: &Known| known.is_of(hash) && known.packets == packets(before);
        if !to_all && before != [0; 2] && !self.known.get(id).is_some_and(sent) {
            // This gate has to send what it has counted: other peers do not know it.
            return;
        }
        let mut known = self.known_of(record, now);
        known.hash |= THEIRS;
        self.known.set(id, known);
    }

    /// The state `id` was removed because a peer has removed it: peers know.
    pub(crate) fn removed_by_peer(&mut self, record: &Record<'_>, id: u32, now: Time) {
        self.forgotten(id);
        let known = self.known_of(record, now);
        self.known.set(id, Known { expires: 0, ..known });
    }

    /// When [`poll`](Self::poll) returns a batch next.
    pub(crate) fn timeout(&self) -> Option<Time> {
        let urgent = self.urgent.front().map(|(at, _)| *at + LINGER);
        let removed = self.removed.front().map(|(at, _)| *at + LINGER);
        let delayed = self.delayed.front().map(|(at, _)| *at);
        urgent.into_iter().chain(removed).chain(delayed).min()
    }

    /// The records of a batch that is due, and their number.
    pub(crate) fn poll(&mut self, now: Time) -> Option<(Vec<u8>, u64)> {
        let full = self.bytes >= BATCH || self.waiting.len() >= WAITING;
        if !full && self.timeout().is_none_or(|due| now < due) {
            return None;
        }
        let (mut batch, mut states) = (Vec::new(), 0);
        let crowded = self.waiting.len() >= WAITING;
        // First, so that a state of the same flow that was made since comes after.
        while batch.len() + MAX_BYTES <= BATCH
            && let Some((_, record)) = self.removed.pop_front()
        {
            self.bytes -= record.len();
            batch.extend(record);
            states += 1;
        }
        while batch.len() + MAX_BYTES <= BATCH {
            let id = match self.urgent.pop_front() {
                Some((_, id)) => id,
                None => match self.delayed.front() {
                    Some((due, id)) if *due <= now || crowded => {
                        let id = *id;
                        self.delayed.pop_front();
                        if self.waiting.get(&id).is_some_and(|change| change.urgent) {
                            continue;
                        }
                        id
                    }
                    _ => break,
                },
            };
            if let Some(change) = self.forgotten(id) {
                batch.extend(change.record);
                states += 1;
            }
        }
        (states > 0).then_some((batch, states))
    }

    /// What is held, each with its bound.
    #[cfg(test)]
    pub(crate) fn sizes(&self) -> [(usize, usize); 3] {
        let order = self.urgent.len() + self.delayed.len();
        [(self.waiting.len(), WAITING), (self.removed.len(), WAITING), (order, 2 * WAITING)]
    }

    fn queue(&mut self, record: &Record<'_>, now: Time) {
        let mut known = self.known_of(record, now);
        let before = self.known.get(record.id).filter(|before| before.is_of(known.hash));
        let urgent = record.kind.is_some() && (record.flow.proto == proto::TCP || before.is_none());
        known.hash |= before.map_or(0, |before| before.hash & WINDOW);
        let mut bytes = Vec::with_capacity(128);
        Record { kind: None, ..record.clone() }.encode(&mut bytes);
        self.bytes += bytes.len();
        self.known.set(record.id, known);
        let before = self.waiting.insert(record.id, Change { record: bytes, urgent });
        self.bytes -= before.as_ref().map_or(0, |change| change.record.len());
        match before {
            Some(Change { urgent: true, .. }) => {
                // It has its place.
                self.waiting.entry(record.id).and_modify(|change| change.urgent = true);
            }
            Some(_) if !urgent => {}
            _ if urgent => self.urgent.push_back((now, record.id)),
            _ => self.delayed.push_back((now + self.window, record.id)),
        }
    }

    fn ended(&mut self, record: &Record<'_>, kind: EventKind, now: Time, stats: &mut FleetStats) -> bool {
        let known = self.known_before(record);
        if known.is_some() {
            self.known.set(record.id, Known::default());
        }
        if self.forgotten(record.id).is_some() {
            // A connection that has ended while it waited.
            stats.not_sent_ended += 1;
        } else if known.is_none() {
            stats.not_sent_unreplied += 1;
        }
        // States that expire do so at all gates, and another gate may have room for an evicted one.
        if kind != EventKind::Removed || known.is_none_or(|known| known.expires == 0) {
            return false;
        }
        if self.removed.len() >= WAITING {
            stats.not_sent_busy += 1;
            return true;
        }
        let mut bytes = Vec::with_capacity(128);
        record.encode(&mut bytes);
        self.bytes += bytes.len();
        self.removed.push_back((now, bytes));
        true
    }

    /// What peers know after this record.
    fn known_of(&self, record: &Record<'_>, now: Time) -> Known {
        let window = if record.window.is_some() { WINDOW } else { 0 };
        Known {
            hash: self.hash(&record.flow) | window,
            at: part(now),
            expires: part(now + record.remaining),
            packets: packets(record.packets),
        }
    }

    fn forgotten(&mut self, id: u32) -> Option<Change> {
        let change = self.waiting.remove(&id)?;
        self.bytes -= change.record.len();
        Some(change)
    }

    /// What the peers know of the state.
    fn known_before(&self, record: &Record<'_>) -> Option<Known> {
        self.known.get(record.id).filter(|known| known.is_of(self.hash(&record.flow))).copied()
    }

    /// The same for both directions of a flow, with room for [`THEIRS`] and [`WINDOW`].
    fn hash(&self, flow: &Flow) -> u32 {
        self.hasher.hash_one(flow.undirected()) as u32 & !(THEIRS | WINDOW)
    }
}

/// A time in [`PARTS`] of a second, above 0.
fn part(time: Time) -> u32 {
    u32::try_from(time.as_nanos() / (1_000_000_000 / PARTS) + 1).unwrap_or(u32::MAX)
}

fn packets([forward, reverse]: [u64; 2]) -> u32 {
    forward.wrapping_add(reverse) as u32
}
