//! Dynamic states: what keep-state, limit and check-state remember.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::num::NonZeroU16;

/// The two ends of a flow, in the direction of one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ends {
    /// IPv4 source, destination.
    V4(Ipv4Addr, Ipv4Addr),
    /// IPv6 source, destination, and the scope zone (0 unless an address is link-local).
    V6(Ipv6Addr, Ipv6Addr, u32),
}

/// What a state is looked up by, apart from its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Addresses.
    pub ends: Ends,
    /// Upper-layer protocol (IANA number).
    pub proto: u8,
    /// Source port, 0 where the protocol has none.
    pub src_port: u16,
    /// Destination port, 0 where the protocol has none.
    pub dst_port: u16,
    /// Tenant, 0 by default.
    pub tenant: u16,
}

/// What one packet contributes to its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// TCP flags; 0 for other protocols.
    pub tcp_flags: u8,
    /// TCP acknowledgement number.
    pub tcp_ack: u32,
    /// Bytes counted for the packet.
    pub bytes: u32,
}

/// A flow name (`keep-state :web`), interned by the rules; `Name::DEFAULT` is `:default`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(pub NonZeroU16);

/// Identity of a rule: never reused, so a rule that is added again under an old number is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuleId(pub u32);

/// Which way a packet goes through its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// As the packet that made the state.
    Forward,
    /// Against it.
    Reverse,
}

/// A state that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// The rule that made the state; its action runs.
    pub rule: RuleId,
    /// Direction of this packet.
    pub direction: Direction,
}
