//! Arguments and results of an install.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::BitOr;

use super::{Ends, Name, Origin, RuleId};

/// How a rule installs its states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Install {
    /// `limit` and `set-limit`.
    pub limit: Option<Limit>,
    /// `lifetime N`, in seconds. Replaces `dyn_ack_lifetime`, `dyn_udp_lifetime` and `dyn_short_lifetime` for this state. A TCP
    /// connection that is opening, closed or reset keeps `dyn_syn_lifetime`, `dyn_fin_lifetime` and `dyn_rst_lifetime`.
    pub lifetime: Option<u32>,
    /// `state-timeout N`, in seconds: the lifetime that every packet of the state sets, in each phase of a TCP connection. No effect
    /// with `lifetime`.
    pub timeout: Option<u32>,
    /// How much of a TCP connection is checked.
    pub tracking: Tracking,
    /// Where the packet was received.
    pub origin: Origin,
}

impl Install {
    /// The state's own lifetime, and whether every packet sets it, in each phase of a TCP connection.
    pub(crate) fn own_lifetime(&self) -> (Option<u32>, bool) {
        (self.lifetime.or(self.timeout), self.lifetime.is_none() && self.timeout.is_some())
    }
}

/// A bound on the states of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The fields of the flow that are counted separately.
    pub mask: LimitMask,
    /// The maximum number of states per rule, protocol and masked flow; with `per_second`, the maximum number of installs.
    pub max: u32,
    /// `N/second`: bounds the installs per second instead of the states. Up to `max` may be installed at once. These states are
    /// not of [`Kind::Limit`](super::Kind::Limit), because no parent counts them.
    pub per_second: bool,
    /// `shared NAME`: rules with the same name and mask share their counts.
    pub shared: Option<Name>,
}

impl Limit {
    /// At most `max` states of one rule.
    pub const fn new(mask: LimitMask, max: u32) -> Self {
        Self { mask, max, per_second: false, shared: None }
    }

    /// The rule that the parent belongs to, or an identity that no rule has, for a shared count.
    pub(crate) fn owner(&self, rule: RuleId) -> RuleId {
        self.shared.map_or(rule, |name| RuleId(u32::MAX - u32::from(name.0.get())))
    }
}

/// The fields of the flow that a limit counts by: any of source and destination address and port, joined with `|`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LimitMask {
    fields: u8,
    /// Low bits of the addresses that do not count, of IPv4 and IPv6.
    pub(crate) src: [u8; 2],
    pub(crate) dst: [u8; 2],
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

    /// `src-addr/V4/V6`: the first `v4` bits of an IPv4 source address (at most 32), or `v6` of an IPv6 address (at most 128).
    pub const fn src_net(v4: u8, v6: u8) -> Self {
        Self { src: [32_u8.saturating_sub(v4), 128_u8.saturating_sub(v6)], ..Self::SRC_ADDR }
    }

    /// `dst-addr/V4/V6`: as [`LimitMask::src_net`], of the destination address.
    pub const fn dst_net(v4: u8, v6: u8) -> Self {
        Self { dst: [32_u8.saturating_sub(v4), 128_u8.saturating_sub(v6)], ..Self::DST_ADDR }
    }

    /// Returns true if all fields of `other` are in this mask.
    pub const fn contains(self, other: Self) -> bool {
        self.fields & other.fields == other.fields
    }

    /// Returns true if no field is in this mask.
    pub const fn is_empty(self) -> bool {
        self.fields == 0
    }

    /// The masked addresses.
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

/// How much of a TCP connection a state checks. No effect on other protocols.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tracking {
    /// Flags and alternating acknowledgements, as ipfw. A reset must be in its receiver's window
    /// ([`dyn_rst_check`](super::Settings::dyn_rst_check)). After the connection has ended, a SYN in the direction of the first one
    /// begins another connection in the same state.
    #[default]
    Ipfw,
    /// TCP windows, too. Only a SYN can make the state. A segment outside the window does not match it; an install with such a
    /// segment is [`Refused::Invalid`].
    ///
    /// These segments match the state and do not change it:
    /// - a reset that is in the window but does not have the expected sequence number, and a SYN in the middle of the connection:
    ///   the receiver answers both with a challenge ACK (RFC 5961);
    /// - a segment with data that was acknowledged before;
    /// - while only a SYN is known: an ACK of the other side, and a reset of the SYN's sender.
    Strict,
    /// As [`Tracking::Ipfw`], but a connection whose beginning was not seen is treated as established. It has
    /// `dyn_syn_lifetime` until the other side sends a packet; acknowledgements keep it alive from then on.
    Loose,
}

impl Tracking {
    /// The word of the rule option, or `None` for the default.
    pub(crate) fn word(self) -> Option<&'static str> {
        match self {
            Self::Ipfw => None,
            Self::Strict => Some("strict"),
            Self::Loose => Some("loose"),
        }
    }
}

/// The result of a successful install.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Installed {
    /// A state was inserted.
    New,
    /// There was a live state; it counts the packet.
    Existing,
}

/// Why a packet got no state. The packet is to be denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refused {
    /// There are `dyn_max` states.
    Full,
    /// The rule's `limit` is reached.
    OverLimit,
    /// The rule's `limit` per second is reached.
    OverRate,
    /// The limit needs another parent, and there are `dyn_parent_max`.
    ParentsFull,
    /// The source has `dyn_source_max` states.
    OverSource,
    /// The flow's state has strict tracking, and the packet does not fit into its connection.
    Invalid,
    /// The packet is the first SYN of its flow, which must be repeated (`dyn_first_syn`).
    FirstSyn,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "no room for another state, consider increasing net.inet.ip.fw.dyn_max",
            Self::OverLimit => "the rule's limit is reached",
            Self::OverRate => "the rule's limit per second is reached",
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
