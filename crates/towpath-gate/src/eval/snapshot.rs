//! States in a file: written by one gate, read by another, or by the same after a restart.
//!
//! What: the rules that have states, the names of flows, the states, and a checksum; numbers are little endian. A state
//! names its rule; in a gate that has the same rule (number, set and text) it is that rule's, in another one it belongs to
//! the companion of the default rule, `allow ... // dynamic states default rule`. Ends are kept as the time that is left.
//!
//! ```text
//! "TOWPATHS" version:u32 unchecked:u8 (0, 1)
//! rules: count:u32 { number:u32 set:u8 length:u32 text }
//! names: count:u32 { length:u32 name }
//! states, until a byte of 0xff:
//!   marks:u8 proto:u8 tenant:u16 src_port:u16 dst_port:u16 addresses (8 bytes, or 32 and zone:u32)
//!   rule:u32 name:u32 left:u64 seen:u16 acks:2*u32 packets:2*u64 bytes:2*u64 lifetime:u32 [window: 6*u64]
//! crc32c:u32 of all before it
//! ```
//!
//! Of version 1 `unchecked` was not there, and was never so.
//!
//! What is read is hostile: nothing is made before all of it was looked at.

use std::collections::HashMap;
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use crc::{CRC_32_ISCSI, Crc};

use super::reload::same;
use super::{DEFAULT_DYNAMIC_RULE, Gate};
use crate::state::{Ends, Flow, Installed, Kind, Limit, Listed, Name, RuleId, Saved};
use towpath_wire::{self as wire, Time};

const MAGIC: &[u8; 8] = b"TOWPATHS";

/// The version that is written; all up to it are read.
pub const SNAPSHOT_VERSION: u32 = 2;

const CRC: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);

/// Marks of a state.
const V6: u8 = 1;
const LIMITED: u8 = 2;
const REPLIED: u8 = 4;
const WINDOW: u8 = 8;
const LIFETIME: u8 = 16;
const MARKS: u8 = V6 | LIMITED | REPLIED | WINDOW | LIFETIME;
const END: u8 = 0xff;

/// The rule of a state that has none where the snapshot was taken.
const NO_RULE: u32 = u32::MAX;

/// The longest time left that is believed, a hundred days: what a lifetime is cut to.
const LONGEST: Duration = Duration::from_secs(9_000_000);

/// Pieces of this size are given to the writer.
const PIECE: usize = 64 << 10;

/// Why a snapshot was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotError {
    /// It does not begin as one.
    NoSnapshot,
    /// Its version is this, and none up to [`SNAPSHOT_VERSION`].
    Version(u32),
    /// It ends too early.
    Cut,
    /// Its checksum is wrong: it was changed, or written in part.
    Checksum,
    /// Its checksum is right and its contents make no sense at this byte.
    Nonsense(usize),
}

impl fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSnapshot => f.write_str("this is no snapshot of states"),
            Self::Version(version) => {
                write!(
                    f,
                    "the snapshot is of version {version}, and only 1 to {SNAPSHOT_VERSION} can be read"
                )
            }
            Self::Cut => f.write_str("the snapshot is cut short; take another one"),
            Self::Checksum => f.write_str("the snapshot's checksum is wrong; take another one"),
            Self::Nonsense(at) => write!(f, "the snapshot makes no sense at byte {at}"),
        }
    }
}

impl std::error::Error for SnapshotError {}

/// What became of a snapshot's states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// States of rules that are here too.
    pub states: u64,
    /// States of other rules, which belong to the default rule's companion now.
    pub companion: u64,
    /// States that were here already.
    pub existing: u64,
    /// States for which there was no room, or no number for their name.
    pub refused: u64,
    /// Some of them were made by other rules than those that they name, and nobody has looked whether these would make them too
    /// ([`Gate::snapshot_of`]).
    pub unchecked: bool,
}

impl Gate {
    /// Gives all live states, in pieces, for a file.
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

    /// The same, and says in it whether some states are `unchecked`: a re-check ([`Gate::recheck_step`]) has not come to them.
    pub fn snapshot_of(&self, now: Time, unchecked: bool, mut piece: impl FnMut(&[u8])) {
        let mut out = Out { bytes: Vec::with_capacity(2 * PIECE), digest: CRC.digest() };
        out.put(MAGIC);
        out.put(&SNAPSHOT_VERSION.to_le_bytes());
        out.put(&[u8::from(unchecked)]);
        // Orphans are listed under their old rule: in a gate without it they are the companion's.
        let rules: Vec<_> =
            self.rules.iter().chain(&self.hidden).filter(|(id, _)| *id != DEFAULT_DYNAMIC_RULE).collect();
        let places: HashMap<RuleId, u32> = rules.iter().map(|(id, _)| *id).zip(0..).collect();
        out.put(&(rules.len() as u32).to_le_bytes());
        for (_, rule) in &rules {
            out.put(&rule.number.to_le_bytes());
            out.put(&[rule.set]);
            out.text(&rule.to_string());
            out.give(&mut piece, PIECE);
        }
        let names = self.flow_names.all();
        out.put(&(names.len() as u32).to_le_bytes());
        for name in names {
            out.text(name);
            out.give(&mut piece, PIECE);
        }
        for saved in self.states().save(now) {
            out.state(&saved, places.get(&saved.listed.rule).copied().unwrap_or(NO_RULE));
            out.give(&mut piece, PIECE);
        }
        out.put(&[END]);
        out.give(&mut piece, 0);
        let Out { digest, .. } = out;
        piece(&digest.finalize().to_le_bytes());
    }

    /// Takes the states of a snapshot in, those that it has room for. Their time goes on from where it was.
    ///
    /// # Errors
    /// When the snapshot is not whole and right; then nothing was changed.
    pub fn restore(&mut self, snapshot: &[u8], now: Time) -> Result<Restored, SnapshotError> {
        self.beside(|gate| gate.take_states(snapshot, now))
    }

    fn take_states(&mut self, snapshot: &[u8], now: Time) -> Result<Restored, SnapshotError> {
        // Once to see that all is right, once to take it.
        let Head { unchecked, rules, names, states: mut at } = head(snapshot)?;
        let own: HashMap<_, RuleId> = self.rules.iter().rev().map(|(id, rule)| (same(rule), *id)).collect();
        let rules: Vec<(RuleId, Option<Limit>)> = rules
            .into_iter()
            .map(|rule| match own.get(&rule) {
                Some(&id) => (id, self.limit_of(id)),
                None => (DEFAULT_DYNAMIC_RULE, None),
            })
            .collect();
        // Those that no state has need no number.
        let mut numbers: Vec<Option<Name>> = vec![None; names.len()];
        if names.len() > self.flow_names.room() {
            self.forget_flow_names(true);
        }
        let mut restored = Restored { unchecked, ..Restored::default() };
        while let Some((saved, rule, name)) = at.state(rules.len(), names.len())? {
            let (rule, limit) = rules.get(rule as usize).copied().unwrap_or((DEFAULT_DYNAMIC_RULE, None));
            let Some(name) = self.number(name as usize, &names, &mut numbers) else {
                restored.refused += 1;
                continue;
            };
            match self.states_mut().restore(&saved, rule, name, limit, now) {
                Ok(Installed::New) if rule == DEFAULT_DYNAMIC_RULE => restored.companion += 1,
                Ok(Installed::New) => restored.states += 1,
                Ok(Installed::Existing) => restored.existing += 1,
                Err(_) => restored.refused += 1,
            }
        }
        Ok(restored)
    }

    /// The number here of the name with that number there.
    fn number(&mut self, there: usize, names: &[String], numbers: &mut [Option<Name>]) -> Option<Name> {
        if numbers[there].is_none() {
            numbers[there] = self.flow_names.give(&names[there]);
        }
        numbers[there]
    }

    fn limit_of(&self, id: RuleId) -> Option<Limit> {
        let program = &self.live().program;
        program.rules[program.position_of(id)?].install.as_ref()?.install.limit
    }
}

/// Whether [`Gate::restore`] would read this.
///
/// # Errors
/// The snapshot is not whole and right.
pub fn check_snapshot(snapshot: &[u8]) -> Result<(), SnapshotError> {
    head(snapshot).map(drop)
}

/// Number, set and text.
type RuleText = (u32, u8, String);

/// What is before the states of a snapshot, and where they begin.
struct Head<'a> {
    unchecked: bool,
    rules: Vec<RuleText>,
    names: Vec<String>,
    states: In<'a>,
}

/// That of a snapshot of which all is right.
fn head(snapshot: &[u8]) -> Result<Head<'_>, SnapshotError> {
    let (version, body) = checked(snapshot)?;
    let mut at = In { bytes: body, at: MAGIC.len() + 4 };
    let unchecked = match version {
        1 => false,
        _ => match (at.at, at.u8()?) {
            (_, mark @ 0..=1) => mark == 1,
            (at, _) => return Err(SnapshotError::Nonsense(at)),
        },
    };
    let (mut rules, mut names) = (Vec::new(), Vec::new());
    for _ in 0..at.u32()? {
        rules.push((at.u32()?, at.u8()?, at.text()?));
    }
    for _ in 0..at.u32()? {
        names.push(at.text()?);
    }
    let mut states = at;
    while states.state(rules.len(), names.len())?.is_some() {}
    if states.at != body.len() {
        return Err(SnapshotError::Nonsense(states.at));
    }
    Ok(Head { unchecked, rules, names, states: at })
}

/// The version, and all but the checksum, when it is right.
fn checked(snapshot: &[u8]) -> Result<(u32, &[u8]), SnapshotError> {
    let rest = snapshot.strip_prefix(MAGIC).ok_or(SnapshotError::NoSnapshot)?;
    let version = u32::from_le_bytes(*rest.first_chunk().ok_or(SnapshotError::Cut)?);
    if !(1..=SNAPSHOT_VERSION).contains(&version) {
        return Err(SnapshotError::Version(version));
    }
    let (_, sum) = rest[4..].split_last_chunk().ok_or(SnapshotError::Cut)?;
    let body = &snapshot[..snapshot.len() - sum.len()];
    if CRC.checksum(body) != u32::from_le_bytes(*sum) {
        return Err(SnapshotError::Checksum);
    }
    Ok((version, body))
}

struct Out<'c> {
    bytes: Vec<u8>,
    digest: crc::Digest<'c, u32>,
}

impl Out<'_> {
    fn put(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    fn text(&mut self, text: &str) {
        self.put(&(text.len() as u32).to_le_bytes());
        self.put(text.as_bytes());
    }

    /// Gives away what there is, if it is so much.
    fn give(&mut self, piece: &mut impl FnMut(&[u8]), most: usize) {
        if self.bytes.len() >= most {
            self.digest.update(&self.bytes);
            piece(&self.bytes);
            self.bytes.clear();
        }
    }

    fn state(&mut self, saved: &Saved, rule: u32) {
        let Listed { kind, name, flow, packets, bytes, remaining, tcp_ack, .. } = &saved.listed;
        let mark = |mark: u8, is: bool| if is { mark } else { 0 };
        let marks = mark(V6, matches!(flow.ends, Ends::V6(..)))
            | mark(LIMITED, matches!(kind, Kind::Limit))
            | mark(REPLIED, saved.replied)
            | mark(WINDOW, saved.window.is_some())
            | mark(LIFETIME, saved.lifetime.is_some());
        self.put(&[marks, flow.proto]);
        [flow.tenant, flow.src_port, flow.dst_port].iter().for_each(|n| self.put(&n.to_le_bytes()));
        match flow.ends {
            Ends::V4(src, dst) => [src, dst].iter().for_each(|ip| self.put(&ip.octets())),
            Ends::V6(src, dst, zone) => {
                [src, dst].iter().for_each(|ip| self.put(&ip.octets()));
                self.put(&zone.to_le_bytes());
            }
        }
        self.put(&rule.to_le_bytes());
        self.put(&(u32::from(name.0.get()) - 1).to_le_bytes());
        self.put(&(remaining.as_nanos() as u64).to_le_bytes());
        self.put(&(saved.seen as u16).to_le_bytes());
        tcp_ack.iter().for_each(|n| self.put(&n.to_le_bytes()));
        packets.iter().chain(bytes).for_each(|n| self.put(&n.to_le_bytes()));
        self.put(&saved.lifetime.unwrap_or(0).to_le_bytes());
        saved.window.iter().flatten().for_each(|word| self.put(&word.to_le_bytes()));
    }
}

#[derive(Clone, Copy)]
struct In<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl In<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], SnapshotError> {
        let nonsense = SnapshotError::Nonsense(self.at);
        let taken = self.bytes.get(self.at..).and_then(|rest| rest.first_chunk()).ok_or(nonsense)?;
        self.at += N;
        Ok(*taken)
    }

    fn u8(&mut self) -> Result<u8, SnapshotError> {
        self.take().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, SnapshotError> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, SnapshotError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, SnapshotError> {
        self.take().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Result<String, SnapshotError> {
        let nonsense = SnapshotError::Nonsense(self.at);
        let length = self.u32()? as usize;
        let text = self.bytes.get(self.at..).and_then(|rest| rest.get(..length)).ok_or(nonsense)?;
        self.at += length;
        String::from_utf8(text.to_vec()).map_err(|_| nonsense)
    }

    /// The next state, its rule's place and its name's; `None` at the end.
    fn state(&mut self, rules: usize, names: usize) -> Result<Option<(Saved, u32, u32)>, SnapshotError> {
        let nonsense = SnapshotError::Nonsense(self.at);
        let marks = self.u8()?;
        if marks == END {
            return Ok(None);
        }
        if marks & !MARKS != 0 {
            return Err(nonsense);
        }
        let has = |mark| marks & mark != 0;
        let proto = self.u8()?;
        // Sequence windows are TCP's.
        if has(WINDOW) && proto != wire::proto::TCP {
            return Err(nonsense);
        }
        let (tenant, src_port, dst_port) = (self.u16()?, self.u16()?, self.u16()?);
        let ends = if has(V6) {
            let (src, dst) = (self.take::<16>()?, self.take::<16>()?);
            Ends::V6(Ipv6Addr::from(src), Ipv6Addr::from(dst), self.u32()?)
        } else {
            Ends::V4(Ipv4Addr::from(self.take::<4>()?), Ipv4Addr::from(self.take::<4>()?))
        };
        let (rule, name) = (self.u32()?, self.u32()?);
        if rule != NO_RULE && rule as usize >= rules || name as usize >= names {
            return Err(nonsense);
        }
        let remaining = Duration::from_nanos(self.u64()?).min(LONGEST);
        let seen = u64::from(self.u16()?);
        let tcp_ack = [self.u32()?, self.u32()?];
        let packets = [self.u64()?, self.u64()?];
        let bytes = [self.u64()?, self.u64()?];
        // Sums of counts must not overflow, whoever wrote them.
        if packets.iter().chain(&bytes).any(|&n| n > 1 << 60) {
            return Err(nonsense);
        }
        let lifetime = self.u32()?;
        let window = if has(WINDOW) {
            let mut words = [0; 6];
            for word in &mut words {
                *word = self.u64()?;
            }
            Some(words)
        } else {
            None
        };
        let listed = Listed {
            kind: if has(LIMITED) { Kind::Limit } else { Kind::State },
            rule: DEFAULT_DYNAMIC_RULE,
            name: Name::DEFAULT,
            orphaned: false,
            flow: Flow { ends, proto, src_port, dst_port, tenant },
            packets,
            bytes,
            remaining,
            tcp_seen: 0,
            tcp_ack,
        };
        let lifetime = has(LIFETIME).then_some(lifetime);
        Ok(Some((Saved { listed, seen, lifetime, replied: has(REPLIED), window }, rule, name)))
    }
}
