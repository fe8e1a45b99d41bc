//! Snapshots: the states of a gate in a file, for another gate or for a restart.
//!
//! A snapshot begins with a *base*: the [records](crate::state::record) of all states. If it was written while packets were
//! processed, records of changed states follow. A gate that has the rule of a state (set and text, in the same order) assigns the
//! state to it; otherwise the state belongs to the default dynamic rule, `allow ... // dynamic states default rule`. A record stores
//! the time until the state expires, not the time of expiry.
//!
//! ```text
//! "TOWPATHS" version:u32
//! frames: length:u32 crc32c:u32 payload (length bytes; kind:u8 and the content of the kind)
//!   1 rules:    unchecked:u8 (0, 1) conditions:u32 { hash:u64 number:u32 }
//!   2 held:     { record }
//!   3 complete: nothing; the base is complete
//!   4 changes:  unchecked:u8 { record }
//!   5 gap:      nothing; changes are missing here
//!   6 end:      nothing; the engine has ended, and the base was written after its last packet
//! ```
//!
//! Numbers are little endian. The checksum of a frame is that of the checksum before it (of the first 12 bytes for the first frame)
//! and the payload, so that no frame can be left out. `conditions` is [`Gate::conditions`].
//!
//! A base that is incomplete or damaged is an error. After it, frames are read up to the first one that is incomplete or damaged:
//! the end of a file that was being written. The last record of a state decides.
//!
//! A snapshot without the end frame is older than the last packets. Its TCP windows and acknowledgement numbers would refuse current
//! segments, so its states are restored without them: a state of a `strict` rule is no longer strict.
//!
//! The input is untrusted: nothing is created before all of it was validated.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;

use crc::{CRC_32_ISCSI, Crc};

use super::gate::{DEFAULT_DYNAMIC_RULE, Gate};
use super::kept_rules::{Kept, kept};
use super::port::{PortId, Ports};
use crate::rules::Rule;
use crate::state::record::{Record, RecordError, RecordOrigin, RecordPort, RuleRef};
use crate::state::{
    Cursor, EventKind, Install, Installed, Kind, Limit, Listed, Name, Origin, RecordedPort, RuleId, Saved,
    StateEvent,
};
use towpath_wire::Time;

const MAGIC: &[u8; 8] = b"TOWPATHS";

/// The version of snapshots that is written and read.
pub const SNAPSHOT_VERSION: u32 = 5;

pub(super) const CRC: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);

/// Bytes of magic and version.
const HEAD: usize = 12;

/// Maximum length of a payload.
const MAX_FRAME: usize = 64 << 20;

/// Slots in one frame of a base that [`Gate::snapshot`] writes.
const PART: u32 = 4096;

/// A kind of frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Frame {
    /// The rules.
    Rules = 1,
    /// States of the base.
    Held = 2,
    /// The base is complete.
    Complete = 3,
    /// Changes of states after the base.
    Changes = 4,
    /// Changes are missing here.
    Gap = 5,
    /// The engine has ended in order.
    End = 6,
}

/// Why a snapshot was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotError {
    /// The file does not start with the magic bytes.
    BadMagic,
    /// The version is not supported.
    Version(u32),
    /// The file ends before its base is complete.
    Truncated,
    /// A checksum of the base is wrong: the file was changed or is incomplete.
    Checksum,
    /// The checksum is right, but the contents are invalid at this byte.
    Malformed(usize),
}

impl fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadMagic => f.write_str("not a snapshot of states"),
            Self::Version(version) => {
                write!(
                    f,
                    "snapshot version {version} is not supported ({SNAPSHOT_VERSION} is); take another one"
                )
            }
            Self::Truncated => f.write_str("the snapshot is truncated; take another one"),
            Self::Checksum => f.write_str("the checksum of the snapshot is wrong; take another one"),
            Self::Malformed(at) => write!(f, "the snapshot is malformed at byte {at}"),
        }
    }
}

impl std::error::Error for SnapshotError {}

/// Result of restoring a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// States whose rule exists here.
    pub states: u64,
    /// States of other rules; they now belong to the default dynamic rule.
    pub default_dynamic: u64,
    /// States that already existed.
    pub existing: u64,
    /// States that were refused: the table was full, or no number was free for their name.
    pub refused: u64,
    /// The current rules may not create some of the states, and no re-check has covered them: the snapshot says so
    /// ([`Gate::snapshot_of`]), or the rules, disabled sets, table entries, zones or addresses of the snapshot are others.
    pub unchecked: bool,
    /// The engine that wrote the snapshot did not end in order: it was killed. The states are those of its last interval.
    pub killed: bool,
    /// Bytes at the end that were incomplete or damaged, and not used.
    pub cut: u64,
    /// Changes are missing: states that had ended may be restored, and new ones missing.
    pub gap: bool,
}

/// Adds frames to a snapshot. The caller stores the bytes that it appends to `out`.
#[derive(Clone, Copy, Debug)]
pub struct SnapshotWriter {
    crc: u32,
}

impl SnapshotWriter {
    /// Begins a snapshot.
    pub fn begin(out: &mut Vec<u8>) -> Self {
        let at = out.len();
        out.extend(MAGIC);
        out.extend(SNAPSHOT_VERSION.to_le_bytes());
        Self { crc: CRC.checksum(&out[at..]) }
    }

    /// Appends a frame with this content.
    pub fn frame(&mut self, kind: Frame, content: &[u8], out: &mut Vec<u8>) {
        let payload = [&[kind as u8], content];
        let length = content.len() as u32 + 1;
        self.crc = chained(self.crc, &payload);
        out.extend(length.to_le_bytes());
        out.extend(self.crc.to_le_bytes());
        payload.iter().for_each(|part| out.extend(*part));
    }
}

fn chained(before: u32, payload: &[&[u8]]) -> u32 {
    let mut digest = CRC.digest();
    digest.update(&before.to_le_bytes());
    payload.iter().for_each(|part| digest.update(part));
    digest.finalize()
}

/// The rules of a gate as records name them. A copy, because hashing all rules for each record would take too long.
#[derive(Clone, Debug, Default)]
pub struct RuleRefs(HashMap<RuleId, RuleRef>);

/// A rule as records name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedRule {
    /// Hash of its content, and its number.
    pub reference: RuleRef,
    /// The rule in ipfw's output format.
    pub text: String,
    /// Whether its action passes packets. `None`: the action decides no packet (`count`, `skipto`) or leaves it to an inspector.
    pub passes: Option<bool>,
}

impl Gate {
    /// Writes all live states to `piece`, in pieces.
    ///
    /// ```
    /// # use towpath_gate::{Gate, Ports, rules::Ruleset, state};
    /// # use towpath_wire::Time;
    /// # let rules = || Ruleset::parse("t", "add allow ip from any to any keep-state").ruleset.unwrap();
    /// # let new = |seed| Gate::new(rules(), Ports::new(), state::Settings::default(), seed);
    /// # let (gate, mut other) = (new(1), new(2));
    /// let mut file = Vec::new();
    /// gate.snapshot(Time::from_secs(100), |piece| file.extend_from_slice(piece));
    /// let restored = other.restore(&file, Time::from_secs(7)).unwrap();
    /// assert_eq!(restored.refused, 0);
    /// ```
    pub fn snapshot(&self, now: Time, piece: impl FnMut(&[u8])) {
        self.snapshot_of(now, false, piece);
    }

    /// Like [`Gate::snapshot`], and records whether some states are `unchecked`: a re-check
    /// ([`Gate::recheck_step`]) has not covered them.
    pub fn snapshot_of(&self, now: Time, unchecked: bool, mut piece: impl FnMut(&[u8])) {
        let (mut out, mut content) = (Vec::new(), Vec::new());
        let mut writer = SnapshotWriter::begin(&mut out);
        let mut refs = RuleRefs::default();
        self.update_refs(&mut refs);
        self.snapshot_rules(&refs, unchecked, &mut content);
        writer.frame(Frame::Rules, &content, &mut out);
        let mut next = Some(Cursor::default());
        while let Some(at) = next {
            content.clear();
            next = self.snapshot_part(&refs, at, PART, now, &mut content);
            if !content.is_empty() {
                writer.frame(Frame::Held, &content, &mut out);
            }
            piece(&out);
            out.clear();
        }
        writer.frame(Frame::Complete, &[], &mut out);
        writer.frame(Frame::End, &[], &mut out);
        piece(&out);
    }

    /// Updates `refs` to the current rules. Only new rules are hashed. Returns true if `refs` changed.
    pub fn update_refs(&self, refs: &mut RuleRefs) -> bool {
        let before = std::mem::take(&mut refs.0);
        let reference = |(id, rule): &(RuleId, Rule)| match before.get(id) {
            Some(known) => (*id, RuleRef { number: rule.number, ..*known }),
            None => (*id, reference_of(rule)),
        };
        refs.0 = self.named_rules().map(reference).collect();
        refs.0 != before
    }

    /// The rules that records name, for flow records and events.
    pub fn described_rules(&self) -> Vec<NamedRule> {
        let described = |(_, rule): &(RuleId, Rule)| NamedRule {
            reference: reference_of(rule),
            text: rule.to_string(),
            passes: rule.action.passes(),
        };
        self.named_rules().map(described).collect()
    }

    /// The rules that records name. Orphans are listed under their old rule. A gate without that rule assigns them to the default
    /// dynamic rule.
    fn named_rules(&self) -> impl Iterator<Item = &(RuleId, Rule)> {
        self.rules.iter().chain(&self.hidden).filter(|(id, _)| *id != DEFAULT_DYNAMIC_RULE)
    }

    /// Appends the content of [`Frame::Rules`] to `out`. Takes time in proportion to the entries of tables.
    pub fn snapshot_rules(&self, refs: &RuleRefs, unchecked: bool, out: &mut Vec<u8>) {
        out.push(unchecked.into());
        out.extend(self.conditions().to_le_bytes());
        for (id, rule) in self.named_rules() {
            let RuleRef { hash, number } = refs.0.get(id).copied().unwrap_or_else(|| reference_of(rule));
            out.extend(hash.to_le_bytes());
            out.extend(number.to_le_bytes());
        }
    }

    /// Appends the records of the states in the next `slots` slots from `from` on to `out`: the content of [`Frame::Held`]. Returns
    /// the cursor that continues, or `None` at the end.
    pub fn snapshot_part(
        &self,
        refs: &RuleRefs,
        from: Cursor,
        slots: u32,
        now: Time,
        out: &mut Vec<u8>,
    ) -> Option<Cursor> {
        self.scan_part(refs, from, slots, now, |record| record.encode(out))
    }

    /// Passes the states in the next `slots` slots from `from` on to `each`. Returns the cursor that continues, or `None` at the end.
    pub fn scan_part(
        &self,
        refs: &RuleRefs,
        from: Cursor,
        slots: u32,
        now: Time,
        mut each: impl FnMut(&Record<'_>),
    ) -> Option<Cursor> {
        let (saved, next) = self.states().save_part(from, slots, now);
        saved.iter().for_each(|saved| each(&self.record(refs, saved, None, now)));
        next
    }

    /// Appends the record of a change to `out`, part of the content of [`Frame::Changes`]. Changes of the table have none.
    pub fn snapshot_change(&self, refs: &RuleRefs, event: &StateEvent, out: &mut Vec<u8>) {
        if let Some(saved) = &event.saved {
            self.record(refs, saved, Some(event.kind), event.at).encode(out);
        }
    }

    fn record<'a>(&'a self, refs: &RuleRefs, saved: &Saved, kind: Option<EventKind>, at: Time) -> Record<'a> {
        let Listed { flow, packets, bytes, remaining, tcp_ack, origin, .. } = saved.listed;
        let port = match origin.port() {
            RecordedPort::None => RecordPort::None,
            RecordedPort::Unrecorded => RecordPort::Unrecorded,
            RecordedPort::Port(port) => {
                self.ports().name(PortId(port)).map_or(RecordPort::Unrecorded, RecordPort::Named)
            }
        };
        Record {
            kind,
            id: saved.id,
            at,
            flow,
            rule: refs.0.get(&saved.listed.rule).copied().unwrap_or_default(),
            name: self.flow_name(saved.listed.name),
            limited: saved.listed.kind == Kind::Limit,
            replied: saved.replied,
            remaining,
            seen: saved.seen as u16,
            tcp_ack,
            packets,
            bytes,
            lifetime: saved.lifetime,
            every_packet: saved.every_packet,
            window: saved.window,
            origin: origin.outgoing().map(|outgoing| RecordOrigin { outgoing, port }),
        }
    }

    /// Restores the states of a snapshot, as far as there is room. Their time left continues from `now`.
    ///
    /// # Errors
    /// Returns an error if the snapshot is damaged. The gate is then unchanged.
    pub fn restore(&mut self, snapshot: &[u8], now: Time) -> Result<Restored, SnapshotError> {
        self.maintain(|gate| gate.take_states(snapshot, now))
    }

    fn take_states(&mut self, snapshot: &[u8], now: Time) -> Result<Restored, SnapshotError> {
        // The first pass validates, the second pass creates the states.
        let found = Snapshot::parse(snapshot)?;
        let own: Vec<_> = self.rules.iter().map(|(_, rule)| reference_of(rule)).collect();
        let row = |rule: &RuleRef| (rule.hash, rule.number);
        let (own_rows, there) =
            (own.iter().map(row).collect::<Vec<_>>(), found.rules.iter().map(row).collect::<Vec<_>>());
        let mut rules: HashMap<RuleRef, (RuleId, Option<Limit>)> = HashMap::new();
        let mut same = own.len() == there.len() && found.conditions == self.conditions();
        for ((id, _), kept) in self.rules.iter().zip(kept(&there, &own_rows)) {
            same &= matches!(kept, Kept::Same(_));
            if let Some(at) = kept.old() {
                rules.entry(found.rules[at]).or_insert((*id, self.limit_of(*id)));
            }
        }
        // Rules that were added after the base.
        let known: HashSet<u64> = found.rules.iter().map(|rule| rule.hash).collect();
        let mut by_hash = HashMap::new();
        for ((id, _), reference) in self.rules.iter().zip(&own).filter(|(_, own)| !known.contains(&own.hash))
        {
            by_hash.entry(reference.hash).or_insert((*id, self.limit_of(*id)));
        }
        let ports = self.ports().clone();
        let names: HashSet<&str> = found.records(snapshot).map(|(_, record)| record.name).collect();
        let new = names.iter().filter(|name| self.flow_names.get(name).is_none()).count();
        if new > self.flow_names.free() {
            self.reclaim_flow_names(true);
        }
        let mut numbers: HashMap<&str, Option<Name>> = HashMap::new();
        let mut restored = Restored {
            unchecked: found.unchecked || found.gap || !same,
            killed: !found.ended,
            cut: found.cut as u64,
            gap: found.gap,
            ..Restored::default()
        };
        for (at, record) in found.records(snapshot) {
            if found.changed.get(&record.id).is_some_and(|last| *last != at) || is_end(&record) {
                continue;
            }
            let rule = rules.get(&record.rule).or_else(|| by_hash.get(&record.rule.hash));
            let (rule, limit) = rule.copied().unwrap_or((DEFAULT_DYNAMIC_RULE, None));
            let name = *numbers.entry(record.name).or_insert_with(|| self.flow_names.intern(record.name));
            let Some(name) = name else {
                restored.refused += 1;
                continue;
            };
            let mut saved = saved(&record, &ports);
            if !found.ended {
                (saved.window, saved.listed.tcp_ack) = (None, [0; 2]);
            }
            match self.states_mut().restore(&saved, rule, name, limit, now) {
                Ok(Installed::New) if rule == DEFAULT_DYNAMIC_RULE => restored.default_dynamic += 1,
                Ok(Installed::New) => restored.states += 1,
                Ok(Installed::Existing) => restored.existing += 1,
                Err(_) => restored.refused += 1,
            }
        }
        Ok(restored)
    }

    pub(super) fn limit_of(&self, id: RuleId) -> Option<Limit> {
        self.install_of(id)?.limit
    }

    /// How a rule inserts states, if it does.
    pub(super) fn install_of(&self, id: RuleId) -> Option<&Install> {
        let program = &self.generation().program;
        Some(&program.rules[program.position_of(id)?].install.as_ref()?.install)
    }
}

pub(super) fn reference_of(rule: &Rule) -> RuleRef {
    RuleRef::new(rule.set, &rule.to_string(), rule.number)
}

fn is_end(record: &Record<'_>) -> bool {
    record.kind.is_some_and(EventKind::is_end)
}

/// The state of a record, in the numbers of this process except for rule and name.
pub(super) fn saved(record: &Record<'_>, ports: &Ports) -> Saved {
    let origin = match record.origin {
        None => Origin::UNRECORDED,
        Some(RecordOrigin { outgoing, port: RecordPort::None }) => Origin::new(outgoing, None),
        Some(RecordOrigin { outgoing, port: RecordPort::Unrecorded }) => Origin::without_port(outgoing),
        Some(RecordOrigin { outgoing, port: RecordPort::Named(name) }) => match ports.find(name) {
            Some(port) => Origin::new(outgoing, Some(port.0)),
            None => Origin::without_port(outgoing),
        },
    };
    let listed = Listed {
        kind: if record.limited { Kind::Limit } else { Kind::State },
        rule: DEFAULT_DYNAMIC_RULE,
        name: Name::DEFAULT,
        orphaned: false,
        flow: record.flow,
        packets: record.packets,
        bytes: record.bytes,
        remaining: record.remaining,
        tcp_seen: 0,
        picked_up: false,
        tcp_ack: record.tcp_ack,
        origin,
    };
    Saved {
        id: record.id,
        listed,
        seen: record.seen.into(),
        lifetime: record.lifetime,
        every_packet: record.every_packet,
        replied: record.replied,
        window: record.window,
    }
}

/// Checks that [`Gate::restore`] would accept a snapshot.
///
/// # Errors
/// Returns an error if the snapshot is damaged.
pub fn check_snapshot(snapshot: &[u8]) -> Result<(), SnapshotError> {
    Snapshot::parse(snapshot).map(drop)
}

/// A validated snapshot.
#[derive(Debug, Default)]
struct Snapshot {
    unchecked: bool,
    conditions: u32,
    rules: Vec<RuleRef>,
    /// The positions of the records, in their order.
    records: Vec<Range<usize>>,
    /// The position of the last change of each state that has changed since the base.
    changed: HashMap<u32, usize>,
    ended: bool,
    gap: bool,
    cut: usize,
}

impl Snapshot {
    fn parse(bytes: &[u8]) -> Result<Self, SnapshotError> {
        let version = bytes.strip_prefix(MAGIC).ok_or(SnapshotError::BadMagic)?;
        let version = u32::from_le_bytes(*version.first_chunk().ok_or(SnapshotError::Truncated)?);
        if version != SNAPSHOT_VERSION {
            return Err(SnapshotError::Version(version));
        }
        let (mut found, mut crc, mut at) = (Self::default(), CRC.checksum(&bytes[..HEAD]), HEAD);
        let (mut begun, mut complete) = (false, false);
        while at < bytes.len() && !found.ended {
            let payload = match payload(&bytes[at..], &mut crc) {
                Ok(payload) => payload,
                // The end of a file that was being written.
                Err(_) if complete => break,
                Err(error) => return Err(error),
            };
            let malformed = SnapshotError::Malformed(at);
            let (&kind, content) = payload.split_first().ok_or(malformed)?;
            let content_at = at + 8 + 1;
            at = content_at + content.len();
            match (kind, begun, complete) {
                (1, false, _) => {
                    begun = true;
                    found.take_rules(content).ok_or(malformed)?;
                }
                (2, true, false) => found.take_records(bytes, content_at..at, false)?,
                (3, true, false) if content.is_empty() => complete = true,
                (4, true, _) => {
                    let unchecked = *content.first().filter(|flag| **flag < 2).ok_or(malformed)? == 1;
                    found.unchecked |= unchecked;
                    found.take_records(bytes, content_at + 1..at, true)?;
                }
                (5, true, _) if content.is_empty() => found.gap = true,
                (6, true, true) if content.is_empty() => found.ended = true,
                _ => return Err(malformed),
            }
        }
        if !complete {
            return Err(SnapshotError::Truncated);
        }
        found.cut = bytes.len() - at;
        Ok(found)
    }

    fn take_rules(&mut self, content: &[u8]) -> Option<()> {
        let (&unchecked, rest) = content.split_first().filter(|(flag, _)| **flag < 2)?;
        let (conditions, rows) = rest.split_first_chunk()?;
        self.unchecked = unchecked == 1;
        self.conditions = u32::from_le_bytes(*conditions);
        for row in rows.chunks(12) {
            let (hash, number) = row.split_first_chunk()?;
            let (hash, number) = (u64::from_le_bytes(*hash), u32::from_le_bytes(number.try_into().ok()?));
            self.rules.push(RuleRef { hash, number });
        }
        Some(())
    }

    /// Records of an unknown version are an error: their states would be lost silently.
    fn take_records(
        &mut self,
        bytes: &[u8],
        range: Range<usize>,
        changes: bool,
    ) -> Result<(), SnapshotError> {
        let mut at = range.start;
        while at < range.end {
            let (record, length) = Record::decode(&bytes[at..range.end]).map_err(|error| match error {
                RecordError::Version(version) => SnapshotError::Version(version.into()),
                RecordError::Truncated | RecordError::Malformed => SnapshotError::Malformed(at),
            })?;
            if changes {
                self.changed.insert(record.id, at);
            } else if record.kind.is_some() {
                return Err(SnapshotError::Malformed(at));
            }
            at += length;
        }
        self.records.push(range);
        Ok(())
    }

    /// The records with their positions.
    fn records<'b>(&'b self, bytes: &'b [u8]) -> impl Iterator<Item = (usize, Record<'b>)> {
        self.records.iter().cloned().flat_map(move |range| {
            let mut at = range.start;
            std::iter::from_fn(move || {
                let (record, length) = Record::decode(&bytes[at..range.end]).ok()?;
                let begin = at;
                at += length;
                Some((begin, record))
            })
        })
    }
}

/// The payload of the frame at the beginning of `bytes`.
fn payload<'b>(bytes: &'b [u8], crc: &mut u32) -> Result<&'b [u8], SnapshotError> {
    let (length, rest) = bytes.split_first_chunk().ok_or(SnapshotError::Truncated)?;
    let (sum, rest) = rest.split_first_chunk().ok_or(SnapshotError::Truncated)?;
    let length = u32::from_le_bytes(*length) as usize;
    if length > MAX_FRAME {
        return Err(SnapshotError::Checksum);
    }
    let payload = rest.get(..length).ok_or(SnapshotError::Truncated)?;
    let expected = chained(*crc, &[payload]);
    if expected != u32::from_le_bytes(*sum) {
        return Err(SnapshotError::Checksum);
    }
    *crc = expected;
    Ok(payload)
}
