//! Snapshots: the states of a gate in a file, for another gate or for a restart.
//!
//! A snapshot contains the rules that have states, the flow names, the states and a checksum. Numbers are little
//! endian. A state names its rule. A gate that has the same rule (set and text, in the same order) assigns the state to
//! it; otherwise the state belongs to the default dynamic rule, `allow ... // dynamic states default rule`. Expiry is
//! stored as the time left.
//!
//! ```text
//! "TOWPATHS" version:u32 unchecked:u8 (0, 1) conditions:u32
//! rules: count:u32 { number:u32 set:u8 length:u32 text }
//! names: count:u32 { length:u32 name }
//! states, until a byte of 0xff:
//!   flags:u8 proto:u8 zone:u16 src_port:u16 dst_port:u16 addresses (8 bytes, or 32 and zone:u32)
//!   rule:u32 name:u32 left:u64 seen:u16 acks:2*u32 packets:2*u64 bytes:2*u64 lifetime:u32 [window: 6*u64]
//!   [origin: outgoing:u8 (0, 1) port:u8 (0 none, 1 unrecorded, 2 recorded) [length:u8 name]]
//! crc32c:u32 of all before it
//! ```
//!
//! Version 1 has no `unchecked`; it is false. Version 2 has no states whose lifetime every packet sets (`state-timeout`).
//! Versions 1 and 2 have no `origin`. Versions 1 to 3 have no `conditions` ([`Gate::conditions`]).
//!
//! The input is untrusted: nothing is created before all of it was validated.

use std::collections::HashMap;
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use crc::{CRC_32_ISCSI, Crc};

use super::gate::{DEFAULT_DYNAMIC_RULE, Gate};
use super::kept_rules::{Kept, content, kept};
use super::port::{PortId, Ports};
use crate::state::{Ends, Flow, Installed, Kind, Limit, Listed, Name, Origin, RecordedPort, RuleId, Saved};
use towpath_wire::{self as wire, Time};

const MAGIC: &[u8; 8] = b"TOWPATHS";

/// The version that is written. Older versions are read too.
pub const SNAPSHOT_VERSION: u32 = 4;

pub(super) const CRC: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);

/// Flags of a state.
const V6: u8 = 1;
const LIMITED: u8 = 2;
const REPLIED: u8 = 4;
const WINDOW: u8 = 8;
const LIFETIME: u8 = 16;
const EVERY_PACKET: u8 = 32;
const ORIGIN: u8 = 64;
const FLAGS: u8 = V6 | LIMITED | REPLIED | WINDOW | LIFETIME | EVERY_PACKET | ORIGIN;
const END: u8 = 0xff;

/// A state without a rule in the source gate.
const NO_RULE: u32 = u32::MAX;

/// Maximum accepted time left, a hundred days. Longer times are reduced to it.
const MAX_REMAINING: Duration = Duration::from_secs(9_000_000);

/// Size of the pieces that the writer receives.
const PIECE_BYTES: usize = 64 << 10;

/// Why a snapshot was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotError {
    /// The file does not start with the magic bytes.
    BadMagic,
    /// The version is not supported: above [`SNAPSHOT_VERSION`], or 0.
    Version(u32),
    /// The file ends too early.
    Truncated,
    /// The checksum is wrong: the file was changed or is incomplete.
    Checksum,
    /// The checksum is right, but the contents are invalid at this byte.
    Malformed(usize),
}

impl fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadMagic => f.write_str("not a snapshot of states"),
            Self::Version(version) => {
                write!(f, "snapshot version {version} is not supported (1 to {SNAPSHOT_VERSION} are)")
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
    /// ([`Gate::snapshot_of`]); the rules, disabled sets, table entries, zones or addresses of the snapshot are others; or it
    /// is of a version before 4.
    pub unchecked: bool,
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
        let mut out = Writer { bytes: Vec::with_capacity(2 * PIECE_BYTES), digest: CRC.digest() };
        out.put(MAGIC);
        out.put(&SNAPSHOT_VERSION.to_le_bytes());
        out.put(&[u8::from(unchecked)]);
        out.put(&self.conditions().to_le_bytes());
        // Orphans are listed under their old rule. A gate without that rule assigns them to the default dynamic
        // rule.
        let rules: Vec<_> =
            self.rules.iter().chain(&self.hidden).filter(|(id, _)| *id != DEFAULT_DYNAMIC_RULE).collect();
        let places: HashMap<RuleId, u32> = rules.iter().map(|(id, _)| *id).zip(0..).collect();
        out.put(&(rules.len() as u32).to_le_bytes());
        for (_, rule) in &rules {
            out.put(&rule.number.to_le_bytes());
            out.put(&[rule.set]);
            out.text(&rule.to_string());
            out.give(&mut piece, PIECE_BYTES);
        }
        let names = self.flow_names.all();
        out.put(&(names.len() as u32).to_le_bytes());
        for name in names {
            out.text(name);
            out.give(&mut piece, PIECE_BYTES);
        }
        for saved in self.states().save(now) {
            let rule = places.get(&saved.listed.rule).copied().unwrap_or(NO_RULE);
            out.state(&saved, rule, self.ports());
            out.give(&mut piece, PIECE_BYTES);
        }
        out.put(&[END]);
        out.give(&mut piece, 0);
        let Writer { digest, .. } = out;
        piece(&digest.finalize().to_le_bytes());
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
        let Header { unchecked, conditions, rules: there, names, states: mut at } = header(snapshot)?;
        let own: Vec<_> = self.rules.iter().map(|(_, rule)| (content(rule), rule.number)).collect();
        let mut rules: Vec<_> = vec![(DEFAULT_DYNAMIC_RULE, None); there.len()];
        let mut same = own.len() == there.len() && conditions == Some(self.conditions());
        for ((id, _), kept) in self.rules.iter().zip(kept(&there, &own)) {
            same &= matches!(kept, Kept::Same(_));
            if let Some(at) = kept.old() {
                rules[at] = (*id, self.limit_of(*id));
            }
        }
        let ports = self.ports().clone();
        // A name without states needs no number.
        let mut numbers: Vec<Option<Name>> = vec![None; names.len()];
        if names.len() > self.flow_names.free() {
            self.reclaim_flow_names(true);
        }
        let mut restored = Restored { unchecked: unchecked || !same, ..Restored::default() };
        while let Some((saved, rule, name)) = at.state(rules.len(), names.len(), &ports)? {
            let (rule, limit) = rules.get(rule as usize).copied().unwrap_or((DEFAULT_DYNAMIC_RULE, None));
            let Some(name) = self.number(name as usize, &names, &mut numbers) else {
                restored.refused += 1;
                continue;
            };
            match self.states_mut().restore(&saved, rule, name, limit, now) {
                Ok(Installed::New) if rule == DEFAULT_DYNAMIC_RULE => restored.default_dynamic += 1,
                Ok(Installed::New) => restored.states += 1,
                Ok(Installed::Existing) => restored.existing += 1,
                Err(_) => restored.refused += 1,
            }
        }
        Ok(restored)
    }

    /// Returns the number in this gate of the name that has number `there` in the snapshot.
    fn number(&mut self, there: usize, names: &[String], numbers: &mut [Option<Name>]) -> Option<Name> {
        if numbers[there].is_none() {
            numbers[there] = self.flow_names.intern(&names[there]);
        }
        numbers[there]
    }

    fn limit_of(&self, id: RuleId) -> Option<Limit> {
        let program = &self.generation().program;
        program.rules[program.position_of(id)?].install.as_ref()?.install.limit
    }
}

/// Checks that [`Gate::restore`] would accept a snapshot.
///
/// # Errors
/// Returns an error if the snapshot is damaged.
pub fn check_snapshot(snapshot: &[u8]) -> Result<(), SnapshotError> {
    header(snapshot).map(drop)
}

/// Set, text and number of a rule.
type RuleText = ((u8, String), u32);

/// The part before the states, and a reader at the first state.
struct Header<'a> {
    unchecked: bool,
    /// Version 4 and later.
    conditions: Option<u32>,
    rules: Vec<RuleText>,
    names: Vec<String>,
    states: Reader<'a>,
}

/// Parses the header of a snapshot and validates the whole.
fn header(snapshot: &[u8]) -> Result<Header<'_>, SnapshotError> {
    let (version, body) = checked(snapshot)?;
    let mut at = Reader { bytes: body, at: MAGIC.len() + 4 };
    let unchecked = match version {
        1 => false,
        _ => match (at.at, at.u8()?) {
            (_, mark @ 0..=1) => mark == 1,
            (at, _) => return Err(SnapshotError::Malformed(at)),
        },
    };
    let conditions = if version < 4 { None } else { Some(at.u32()?) };
    let (mut rules, mut names) = (Vec::new(), Vec::new());
    for _ in 0..at.u32()? {
        let number = at.u32()?;
        rules.push(((at.u8()?, at.text()?), number));
    }
    for _ in 0..at.u32()? {
        names.push(at.text()?);
    }
    let mut states = at;
    let ports = Ports::new();
    while states.state(rules.len(), names.len(), &ports)?.is_some() {}
    if states.at != body.len() {
        return Err(SnapshotError::Malformed(states.at));
    }
    Ok(Header { unchecked, conditions, rules, names, states: at })
}

/// Returns the version, and the snapshot without its checksum if that is right.
fn checked(snapshot: &[u8]) -> Result<(u32, &[u8]), SnapshotError> {
    let rest = snapshot.strip_prefix(MAGIC).ok_or(SnapshotError::BadMagic)?;
    let version = u32::from_le_bytes(*rest.first_chunk().ok_or(SnapshotError::Truncated)?);
    if !(1..=SNAPSHOT_VERSION).contains(&version) {
        return Err(SnapshotError::Version(version));
    }
    let (_, sum) = rest[4..].split_last_chunk().ok_or(SnapshotError::Truncated)?;
    let body = &snapshot[..snapshot.len() - sum.len()];
    if CRC.checksum(body) != u32::from_le_bytes(*sum) {
        return Err(SnapshotError::Checksum);
    }
    Ok((version, body))
}

struct Writer<'c> {
    bytes: Vec<u8>,
    digest: crc::Digest<'c, u32>,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    fn text(&mut self, text: &str) {
        self.put(&(text.len() as u32).to_le_bytes());
        self.put(text.as_bytes());
    }

    /// Passes the buffered bytes to `piece` if there are at least `most`.
    fn give(&mut self, piece: &mut impl FnMut(&[u8]), most: usize) {
        if self.bytes.len() >= most {
            self.digest.update(&self.bytes);
            piece(&self.bytes);
            self.bytes.clear();
        }
    }

    fn state(&mut self, saved: &Saved, rule: u32, ports: &Ports) {
        let Listed { kind, name, flow, packets, bytes, remaining, tcp_ack, origin, .. } = &saved.listed;
        let mark = |mark: u8, is: bool| if is { mark } else { 0 };
        let flags = mark(V6, matches!(flow.ends, Ends::V6(..)))
            | mark(LIMITED, matches!(kind, Kind::Limit))
            | mark(REPLIED, saved.replied)
            | mark(WINDOW, saved.window.is_some())
            | mark(LIFETIME, saved.lifetime.is_some())
            | mark(EVERY_PACKET, saved.every_packet)
            | mark(ORIGIN, origin.outgoing().is_some());
        self.put(&[flags, flow.proto]);
        [flow.zone, flow.src_port, flow.dst_port].iter().for_each(|n| self.put(&n.to_le_bytes()));
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
        let Some(outgoing) = origin.outgoing() else { return };
        let port = match origin.port() {
            RecordedPort::None => None,
            RecordedPort::Unrecorded => Some(None),
            RecordedPort::Port(port) => Some(ports.name(PortId(port)).filter(|name| name.len() <= 255)),
        };
        self.put(&[outgoing.into()]);
        match port {
            None => self.put(&[0]),
            Some(None) => self.put(&[1]),
            Some(Some(name)) => {
                self.put(&[2, name.len() as u8]);
                self.put(name.as_bytes());
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], SnapshotError> {
        let malformed = SnapshotError::Malformed(self.at);
        let taken = self.bytes.get(self.at..).and_then(|rest| rest.first_chunk()).ok_or(malformed)?;
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
        let malformed = SnapshotError::Malformed(self.at);
        let length = self.u32()? as usize;
        let text = self.bytes.get(self.at..).and_then(|rest| rest.get(..length)).ok_or(malformed)?;
        self.at += length;
        String::from_utf8(text.to_vec()).map_err(|_| malformed)
    }

    /// Where the first packet of a state was received. A port that is not in `ports` is not recorded.
    fn origin(&mut self, ports: &Ports) -> Result<Origin, SnapshotError> {
        let malformed = SnapshotError::Malformed(self.at);
        let outgoing = match self.u8()? {
            outgoing @ 0..=1 => outgoing == 1,
            _ => return Err(malformed),
        };
        Ok(match self.u8()? {
            0 => Origin::new(outgoing, None),
            1 => Origin::without_port(outgoing),
            2 => {
                let length = self.u8()?;
                let name = self.bytes.get(self.at..).and_then(|rest| rest.get(..length.into()));
                let name = std::str::from_utf8(name.ok_or(malformed)?).map_err(|_| malformed)?;
                self.at += name.len();
                match ports.find(name) {
                    Some(port) => Origin::new(outgoing, Some(port.0)),
                    None => Origin::without_port(outgoing),
                }
            }
            _ => return Err(malformed),
        })
    }

    /// Reads the next state with the indices of its rule and name; `None` at the end.
    fn state(
        &mut self,
        rules: usize,
        names: usize,
        ports: &Ports,
    ) -> Result<Option<(Saved, u32, u32)>, SnapshotError> {
        let malformed = SnapshotError::Malformed(self.at);
        let flags = self.u8()?;
        if flags == END {
            return Ok(None);
        }
        // A lifetime that every packet sets is one.
        if flags & !FLAGS != 0 || flags & (EVERY_PACKET | LIFETIME) == EVERY_PACKET {
            return Err(malformed);
        }
        let has = |mark| flags & mark != 0;
        let proto = self.u8()?;
        // Only TCP has sequence windows.
        if has(WINDOW) && proto != wire::proto::TCP {
            return Err(malformed);
        }
        let (zone, src_port, dst_port) = (self.u16()?, self.u16()?, self.u16()?);
        let ends = if has(V6) {
            let (src, dst) = (self.take::<16>()?, self.take::<16>()?);
            Ends::V6(Ipv6Addr::from(src), Ipv6Addr::from(dst), self.u32()?)
        } else {
            Ends::V4(Ipv4Addr::from(self.take::<4>()?), Ipv4Addr::from(self.take::<4>()?))
        };
        let (rule, name) = (self.u32()?, self.u32()?);
        if rule != NO_RULE && rule as usize >= rules || name as usize >= names {
            return Err(malformed);
        }
        let remaining = Duration::from_nanos(self.u64()?).min(MAX_REMAINING);
        let seen = u64::from(self.u16()?);
        let tcp_ack = [self.u32()?, self.u32()?];
        let packets = [self.u64()?, self.u64()?];
        let bytes = [self.u64()?, self.u64()?];
        // Limits untrusted counters, so that sums do not overflow.
        if packets.iter().chain(&bytes).any(|&n| n > 1 << 60) {
            return Err(malformed);
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
        let origin = if has(ORIGIN) { self.origin(ports)? } else { Origin::UNRECORDED };
        let listed = Listed {
            kind: if has(LIMITED) { Kind::Limit } else { Kind::State },
            rule: DEFAULT_DYNAMIC_RULE,
            name: Name::DEFAULT,
            orphaned: false,
            flow: Flow { ends, proto, src_port, dst_port, zone },
            packets,
            bytes,
            remaining,
            tcp_seen: 0,
            picked_up: false,
            tcp_ack,
            origin,
        };
        let (lifetime, every_packet) = (has(LIFETIME).then_some(lifetime), has(EVERY_PACKET));
        Ok(Some((Saved { listed, seen, lifetime, every_packet, replied: has(REPLIED), window }, rule, name)))
    }
}
