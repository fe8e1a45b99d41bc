//! Changes of states, and their form in the [journal](super::journal).
//!
//! A state is recorded when it is inserted (if a reader [needs that](super::journal::Changes)), when its phase changes, and when it is
//! unlinked; packets that only refresh it are not recorded.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use super::journal::WORDS;
use super::states::Saved;
use super::table::entry::unpack_tcp;
use crate::state::{Ends, Flow, Kind, Listed, Name, Origin, RuleId};
use towpath_wire::Time;

const TCP: u8 = 6;

/// A change of a state, or of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum EventKind {
    /// A state was inserted.
    Created = 1,
    /// The state of the preceding `Created` event was restored from a snapshot.
    Restored = 2,
    /// The other side has sent its first packet.
    Replied = 3,
    /// The phase of the connection has changed (established, closed, opened again), or the rule that owns the state.
    Updated = 4,
    /// A state was collected after it expired.
    Expired = 5,
    /// A state was removed, alone or with its rule.
    Removed = 6,
    /// A state was evicted to make room.
    Evicted = 7,
    /// The number of states has reached 9/10 of `dyn_max`.
    NearlyFull = 8,
    /// The number of states has fallen below 8/10 of `dyn_max` after [`EventKind::NearlyFull`].
    NoLongerFull = 9,
}

impl EventKind {
    const ALL: [Self; 9] = [
        Self::Created,
        Self::Restored,
        Self::Replied,
        Self::Updated,
        Self::Expired,
        Self::Removed,
        Self::Evicted,
        Self::NearlyFull,
        Self::NoLongerFull,
    ];

    /// The word for logs and `towpath ctl`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Restored => "restored",
            Self::Replied => "replied",
            Self::Updated => "updated",
            Self::Expired => "expired",
            Self::Removed => "removed",
            Self::Evicted => "evicted",
            Self::NearlyFull => "nearly full",
            Self::NoLongerFull => "no longer full",
        }
    }

    /// Returns true if the state no longer exists.
    pub const fn is_end(self) -> bool {
        matches!(self, Self::Expired | Self::Removed | Self::Evicted)
    }

    /// Returns true for an event of the table.
    pub const fn is_of_table(self) -> bool {
        matches!(self, Self::NearlyFull | Self::NoLongerFull)
    }

    pub(crate) fn from_bits(bits: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == bits)
    }
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateEvent {
    /// The time passed to the worker's call.
    pub at: Time,
    /// The change.
    pub kind: EventKind,
    /// The state at that time, without TCP windows; `None` for events of the table.
    pub(crate) saved: Option<Saved>,
}

// Bits of a change's flags.
const V6: u64 = 1;
const LIMITED: u64 = 1 << 1;
const REPLIED: u64 = 1 << 2;
const LIFETIME: u64 = 1 << 3;
const EVERY_PACKET: u64 = 1 << 4;
const ORPHANED: u64 = 1 << 5;

impl StateEvent {
    /// The state at the time of the event; `None` for events of the table.
    pub fn state(&self) -> Option<&Listed> {
        self.saved.as_ref().map(|saved| &saved.listed)
    }

    /// The number of the state: no other state has it until this one has ended. `None` for events of the table.
    pub fn id(&self) -> Option<u32> {
        self.saved.as_ref().map(|saved| saved.id)
    }

    /// The words of an event of the table.
    pub(crate) fn pack_table(at: Time, kind: EventKind) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        words[0] = at.as_nanos();
        words[1] = (kind as u64) << 32;
        words
    }

    /// The words of an event of a state.
    #[inline]
    pub(crate) fn pack(at: Time, kind: EventKind, saved: &Saved) -> [u64; WORDS] {
        let Saved { id, listed, seen, lifetime, every_packet, replied, .. } = saved;
        let Flow { ends, proto, src_port, dst_port, zone } = listed.flow;
        let (v6, src, dst, scope) = match ends {
            Ends::V4(src, dst) => (0, src.to_bits().into(), dst.to_bits().into(), 0),
            Ends::V6(src, dst, scope) => (V6, src.to_bits(), dst.to_bits(), scope),
        };
        let flag = |flag, on| if on { flag } else { 0 };
        let flags = v6
            | flag(LIMITED, listed.kind == Kind::Limit)
            | flag(REPLIED, *replied)
            | flag(LIFETIME, lifetime.is_some())
            | flag(EVERY_PACKET, *every_packet)
            | flag(ORPHANED, listed.orphaned);
        let two = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let four = |parts: [u16; 4]| parts.iter().fold(0, |word, part| word << 16 | u64::from(*part));
        let name = listed.name.0.get();
        [
            at.as_nanos(),
            u64::from(*id) | (kind as u64) << 32 | u64::from(proto) << 40 | flags << 48,
            four([zone, src_port, dst_port, name]),
            two(listed.rule.0, lifetime.unwrap_or(0)),
            (src >> 64) as u64,
            src as u64,
            (dst >> 64) as u64,
            dst as u64,
            two(scope, (*seen as u32) << 8 | u32::from(listed.origin.to_bits())),
            listed.remaining.as_nanos() as u64,
            two(listed.tcp_ack[1], listed.tcp_ack[0]),
            listed.packets[0],
            listed.packets[1],
            listed.bytes[0],
            listed.bytes[1],
        ]
    }

    /// The words of a change that readers ignore: the state had already ended.
    pub(crate) const VOID: [u64; WORDS] = [0; WORDS];

    /// The event of these words, or `None` if they are [`VOID`](Self::VOID).
    pub(crate) fn unpack(words: &[u64; WORDS]) -> Option<Self> {
        let at = Time::from_nanos(words[0]);
        let kind = EventKind::from_bits((words[1] >> 32) as u8)?;
        if kind.is_of_table() {
            return Some(Self { at, kind, saved: None });
        }
        let flags = words[1] >> 48;
        let has = |flag| flags & flag != 0;
        let proto = (words[1] >> 40) as u8;
        let wide = |at: usize| u128::from(words[at]) << 64 | u128::from(words[at + 1]);
        let part = |at: u32| (words[2] >> (48 - 16 * at)) as u16;
        let ends = match has(V6) {
            true => {
                Ends::V6(Ipv6Addr::from_bits(wide(4)), Ipv6Addr::from_bits(wide(6)), (words[8] >> 32) as u32)
            }
            false => Ends::V4(Ipv4Addr::from_bits(words[5] as u32), Ipv4Addr::from_bits(words[7] as u32)),
        };
        let seen = u64::from((words[8] as u32) >> 8);
        let tcp = unpack_tcp(seen, words[10]);
        let listed = Listed {
            kind: if has(LIMITED) { Kind::Limit } else { Kind::State },
            rule: RuleId((words[3] >> 32) as u32),
            name: Name(part(3).try_into().ok()?),
            orphaned: has(ORPHANED),
            flow: Flow { ends, proto, src_port: part(1), dst_port: part(2), zone: part(0) },
            packets: [words[11], words[12]],
            bytes: [words[13], words[14]],
            remaining: Duration::from_nanos(words[9]),
            tcp_seen: if proto == TCP { tcp.word() } else { 0 },
            picked_up: proto == TCP && tcp.is_picked_up(),
            tcp_ack: tcp.ack,
            origin: Origin::from_bits(words[8] as u8),
        };
        let saved = Saved {
            id: words[1] as u32,
            listed,
            seen,
            lifetime: has(LIFETIME).then_some(words[3] as u32),
            every_packet: has(EVERY_PACKET),
            replied: has(REPLIED),
            window: None,
        };
        Some(Self { at, kind, saved: Some(saved) })
    }
}
