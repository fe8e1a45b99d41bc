//! Dynamic states: what keep-state, limit and check-state remember.
//!
//! They are ipfw's (ipfw(8), STATEFUL FIREWALL; lifetimes as the code has them, not the manual page). What differs:
//!
//! - A state ends to the nanosecond, and is never found after its end; ipfw finds it until it is collected.
//! - `limit` never lets one more through, and a state that exists is found before the limit is looked at, also by
//!   `set-limit`.
//! - What is expired takes up no room: an install that would be refused collects first.
//! - An acknowledgement number counts only in a segment with ACK.
//! - `check-state :any` finds the state that was made last, as ipfw does as long as its table has not grown.
//! - Full tables may evict, sources may be capped, ICMP identifiers and SCTP chunks may be looked at: settings that
//!   are off ([`Settings`]). TCP may be tracked strictly or loosely: per rule ([`Tracking`]).
//!
//! Any number of threads use the same states, each by its own [`States`] ([`States::worker`]).
//!
//! ```
//! use towpath_wire::Time;
//! use towpath_gate::state::{Direction, Ends, Flow, Install, Lookup, Name, RuleId, Segment, Settings, States};
//!
//! let mut states = States::new(Settings::default(), 0x5eed);
//! let query = Flow {
//!     ends: Ends::V4([10, 0, 0, 1].into(), [9, 9, 9, 9].into()),
//!     proto: 17,
//!     src_port: 5353,
//!     dst_port: 53,
//!     tenant: 0,
//! };
//! let packet = Segment { bytes: 60, ..Segment::default() };
//! let rule = RuleId(1);
//! states.install(&query, Name::DEFAULT, &packet, rule, &Install::default(), Time::from_secs(0)).unwrap();
//!
//! let reply = query.reversed();
//! let hit = states.lookup(&reply, Lookup::Any, &packet, Time::from_secs(9)).unwrap();
//! assert_eq!((hit.rule, hit.direction), (rule, Direction::Reverse));
//! // UDP lives 10 s after its last packet.
//! assert!(states.lookup(&reply, Lookup::Any, &packet, Time::from_secs(19)).is_none());
//! ```

mod concurrent;
mod counters;
mod events;
mod fragment_table;
mod keepalive;
mod limits;
mod listing;
mod related;
mod sctp;
mod settings;
mod states;
mod table;
mod tcp;
#[doc(hidden)]
pub mod testing;

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::num::NonZeroU16;
use std::ops::BitOr;

pub use counters::Counters;
pub use events::{EventKind, StateEvent};
pub use keepalive::{KEEPALIVE_INTERVAL, Keepalive};
pub use listing::{Cursor, Kind, Line, Listed};
pub use related::Quoted;
pub use settings::{KEEPALIVE_PERIOD, LIFETIME_MAX, SYN_NEARLY_FULL, SettingError, Settings};
pub(crate) use states::Saved;
pub use states::{BURST, States, Top};
pub use table::memory::Pages;
pub use towpath_wire::{Ends, Flow, Segment};

/// A flow name (`keep-state :web`), interned by the rules; `Name::DEFAULT` is `:default`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(pub NonZeroU16);

impl Name {
    /// `:default`, the name of states whose rule names none.
    pub const DEFAULT: Self = Self(NonZeroU16::MIN);
}

/// Identity of a rule: never reused, so a rule that is added again under an old number is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuleId(pub u32);

/// Which way a packet goes through its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// As the packet that made the state.
    Forward = 0,
    /// Against it.
    Reverse = 1,
}

/// A state that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// The rule that made the state; its action runs.
    pub rule: RuleId,
    /// Direction of this packet.
    pub direction: Direction,
}

/// Which states a lookup may find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// States of any name (`check-state :any`); of several, the one that was made last.
    Any,
    /// States of this name only.
    Named(Name),
}

/// How a rule wants its states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Install {
    /// `limit` and `set-limit`: how many states there may be.
    pub limit: Option<Limit>,
    /// `lifetime N`, in seconds: replaces `dyn_ack_lifetime`, `dyn_udp_lifetime` and `dyn_short_lifetime` for this
    /// state, whichever its protocol refreshes with. A TCP connection that is opening, closed or reset keeps
    /// `dyn_syn_lifetime`, `dyn_fin_lifetime` and `dyn_rst_lifetime`.
    pub lifetime: Option<u32>,
    /// How much of TCP is checked.
    pub tracking: Tracking,
}

/// The bound of `limit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// What is counted apart.
    pub mask: LimitMask,
    /// The most states there may be per rule, protocol and masked flow; or, with `per_second`, the most that are made.
    pub max: u32,
    /// `N/second`: how many states are made in a second, and not how many there are. As many may be made at once as in a
    /// second. What is made is no [`Kind::Limit`]: nothing is counted down when it ends.
    pub per_second: bool,
    /// `shared NAME`: counted together with what other rules with the same name, fields and protocol make.
    pub shared: Option<Name>,
}

impl Limit {
    /// At most `max` states of one rule.
    pub const fn new(mask: LimitMask, max: u32) -> Self {
        Self { mask, max, per_second: false, shared: None }
    }

    /// Whose count it is: the rule's, or one that no rule is.
    fn owner(&self, rule: RuleId) -> RuleId {
        self.shared.map_or(rule, |name| RuleId(u32::MAX - u32::from(name.0.get())))
    }
}

/// Which fields of the flow a limit counts by: any of source and destination address and port, joined with `|`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LimitMask {
    fields: u8,
    /// Bits of the addresses that do not count, of IPv4 and IPv6.
    src: [u8; 2],
    dst: [u8; 2],
}

impl LimitMask {
    /// `src-addr`.
    pub const SRC_ADDR: Self = Self::of(1);
    /// `src-port`.
    pub const SRC_PORT: Self = Self::of(2);
    /// `dst-addr`.
    pub const DST_ADDR: Self = Self::of(4);
    /// `dst-port`.
    pub const DST_PORT: Self = Self::of(8);

    const fn of(fields: u8) -> Self {
        Self { fields, src: [0; 2], dst: [0; 2] }
    }

    /// `src-addr/V4/V6`: by the first bits of the source address, of IPv4 and of IPv6; not more than there are.
    pub const fn src_net(v4: u8, v6: u8) -> Self {
        Self { src: [32_u8.saturating_sub(v4), 128_u8.saturating_sub(v6)], ..Self::SRC_ADDR }
    }

    /// `dst-addr/V4/V6`, likewise.
    pub const fn dst_net(v4: u8, v6: u8) -> Self {
        Self { dst: [32_u8.saturating_sub(v4), 128_u8.saturating_sub(v6)], ..Self::DST_ADDR }
    }

    /// Whether all fields of `other` are in this mask.
    pub const fn contains(self, other: Self) -> bool {
        self.fields & other.fields == other.fields
    }

    /// Whether no field is in it.
    pub const fn is_empty(self) -> bool {
        self.fields == 0
    }

    /// The addresses as far as they count.
    pub(crate) fn ends(self, ends: Ends) -> Ends {
        let (src, dst) = (self.contains(Self::SRC_ADDR), self.contains(Self::DST_ADDR));
        let first4 = |ip: Ipv4Addr, is: bool, without: u8| {
            let mask = if is { u32::MAX.checked_shl(without.into()).unwrap_or(0) } else { 0 };
            Ipv4Addr::from_bits(ip.to_bits() & mask)
        };
        let first6 = |ip: Ipv6Addr, is: bool, without: u8| {
            let mask = if is { u128::MAX.checked_shl(without.into()).unwrap_or(0) } else { 0 };
            Ipv6Addr::from_bits(ip.to_bits() & mask)
        };
        match ends {
            Ends::V4(a, b) => Ends::V4(first4(a, src, self.src[0]), first4(b, dst, self.dst[0])),
            Ends::V6(a, b, zone) => Ends::V6(first6(a, src, self.src[1]), first6(b, dst, self.dst[1]), zone),
        }
    }
}

impl BitOr for LimitMask {
    type Output = Self;

    fn bitor(self, rhs: Self) -> Self {
        let more = |a: [u8; 2], b: [u8; 2]| [a[0].max(b[0]), a[1].max(b[1])];
        Self { fields: self.fields | rhs.fields, src: more(self.src, rhs.src), dst: more(self.dst, rhs.dst) }
    }
}

/// How much of a TCP connection a state checks. Other protocols take no notice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tracking {
    /// Flags and alternating acknowledgements, as ipfw does.
    #[default]
    Ipfw,
    /// Sequence windows too. The state can be made by a SYN only. A segment outside the window does not match it, and
    /// to install with it is [`Refused::Invalid`]. A reset that is in the window and not exact, and a SYN in the middle
    /// of the connection, match and change nothing: their receiver answers them with a challenge ACK (RFC 5961). A new
    /// SYN in the direction of the first, after the connection has ended, begins another one in the same state.
    Strict,
    /// As [`Tracking::Ipfw`], but a connection whose beginning was not seen is taken for established: it has
    /// `dyn_syn_lifetime` for the other side to be heard, and from then on lives by the acknowledgements.
    Loose,
}

impl Tracking {
    /// The rule option's word; none without one.
    pub(crate) fn word(self) -> Option<&'static str> {
        match self {
            Self::Ipfw => None,
            Self::Strict => Some("strict"),
            Self::Loose => Some("loose"),
        }
    }
}

/// An install that succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Installed {
    /// The state was made.
    New,
    /// It was there; the packet counts as a hit on it.
    Existing,
}

/// Why a state was not installed; the packet is to be denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refused {
    /// There are `dyn_max` states.
    Full,
    /// The rule's limit is reached.
    OverLimit,
    /// The rule makes no more states in this second.
    OverRate,
    /// The limit needs a new parent, and there are `dyn_parent_max`.
    ParentsFull,
    /// The source has `dyn_source_max` states.
    OverSource,
    /// There is a state with strict tracking, and the packet does not fit into its connection.
    Invalid,
    /// It is the first SYN of its flow, which has to repeat it (`dyn_first_syn`).
    FirstSyn,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "no room for another state, consider increasing net.inet.ip.fw.dyn_max",
            Self::OverLimit => "the rule's limit is reached",
            Self::OverRate => "the rule makes no more states in this second",
            Self::ParentsFull => {
                "no room for another limit, consider increasing net.inet.ip.fw.dyn_parent_max"
            }
            Self::OverSource => {
                "the source has too many states, consider increasing net.inet.ip.fw.dyn_source_max"
            }
            Self::Invalid => "the packet does not fit into its connection",
            Self::FirstSyn => {
                "the first SYN of a flow is dropped, its repetition is not (net.inet.ip.fw.dyn_first_syn)"
            }
        })
    }
}

impl std::error::Error for Refused {}
