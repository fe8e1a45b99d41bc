//! A flow's key: its two ends in a fixed order, packed into words that are compared and hashed as they are.
//!
//! Both directions of a flow have one key. [`Side`] says which of the two ends a packet came from. A state needs no
//! second comparison for its reverse direction.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::state::{Direction, Ends, Flow, LimitMask, RuleId};

/// Evaluates an expression with the [`Key`] and the [`Side`] of a `&Flow`, for either address family.
macro_rules! with_key {
    ($flow:expr, |$key:ident, $side:ident| $work:expr) => {
        match $flow.ends {
            crate::state::Ends::V4(src, dst) => {
                let ($key, $side) = crate::state::table::key::Key4::new(src, dst, $flow);
                $work
            }
            crate::state::Ends::V6(src, dst, zone) => {
                let ($key, $side) = crate::state::table::key::Key6::new(src, dst, zone, $flow);
                $work
            }
        }
    };
}
pub(crate) use with_key;

/// A packed key of `N` words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key<const N: usize>(pub(crate) [u64; N]);

/// An IPv4 key: the zone and the lower end (address and port); the protocol and the higher end.
pub(crate) type Key4 = Key<2>;
/// An IPv6 key: two addresses of two words each; ports, zone and protocol; the scope zone.
pub(crate) type Key6 = Key<6>;
/// The key of a parent: the rule, and the masked flow in the direction of the packet.
pub(crate) type ParentKey = Key<7>;

/// The end of the key that is the source: the one that sorts first, or the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Low,
    High,
}

impl Side {
    /// The direction of a packet from `self` in a state whose first packet came from `forward`.
    #[inline]
    pub(crate) fn direction(self, forward: Side) -> Direction {
        if self == forward { Direction::Forward } else { Direction::Reverse }
    }
}
impl Side {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Low => Self::High,
            Self::High => Self::Low,
        }
    }
}

/// The parts of a key.
pub(crate) trait FlowKey: Sized {
    /// The flow with `side` as its source.
    fn flow(&self, side: Side) -> Flow;
    /// The protocol.
    fn proto(&self) -> u8;
}

impl Key4 {
    #[inline]
    pub(crate) fn new(src: Ipv4Addr, dst: Ipv4Addr, flow: &Flow) -> (Self, Side) {
        // Each end as one number: ordering them takes no branch, which would be unpredictable.
        let end = |address: Ipv4Addr, port: u16| u64::from(u32::from(address)) << 16 | u64::from(port);
        let (src, dst) = (end(src, flow.src_port), end(dst, flow.dst_port));
        let (low, high) = (src.min(dst), src.max(dst));
        let key = Key([u64::from(flow.zone) << 48 | low, u64::from(flow.proto) << 48 | high]);
        (key, if src <= dst { Side::Low } else { Side::High })
    }
}

impl FlowKey for Key4 {
    fn flow(&self, side: Side) -> Flow {
        let [low, high] = self.0.map(|end| Ipv4Addr::from((end >> 16) as u32));
        let [src_port, dst_port] = self.0.map(|end| end as u16);
        let (zone, proto) = ((self.0[0] >> 48) as u16, self.proto());
        let flow = Flow { ends: Ends::V4(low, high), proto, src_port, dst_port, zone };
        match side {
            Side::Low => flow,
            Side::High => flow.reversed(),
        }
    }

    #[inline]
    fn proto(&self) -> u8 {
        (self.0[1] >> 48) as u8
    }
}

impl Key6 {
    #[inline]
    pub(crate) fn new(src: Ipv6Addr, dst: Ipv6Addr, zone: u32, flow: &Flow) -> (Self, Side) {
        let (src, dst) = (u128::from(src), u128::from(dst));
        let low_first = (src, flow.src_port) <= (dst, flow.dst_port);
        let ((low, low_port), (high, high_port)) = if low_first {
            ((src, flow.src_port), (dst, flow.dst_port))
        } else {
            ((dst, flow.dst_port), (src, flow.src_port))
        };
        let [a, b] = halves(low);
        let [c, d] = halves(high);
        let key = Key([a, b, c, d, rest(low_port, high_port, flow), u64::from(zone)]);
        (key, if low_first { Side::Low } else { Side::High })
    }
}

impl FlowKey for Key6 {
    fn flow(&self, side: Side) -> Flow {
        let Key([a, b, c, d, rest, zone]) = *self;
        let (low, high, zone) = (whole(a, b), whole(c, d), zone as u32);
        match side {
            Side::Low => unpack(rest, Ends::V6(low, high, zone)),
            Side::High => unpack(rest, Ends::V6(low, high, zone)).reversed(),
        }
    }

    #[inline]
    fn proto(&self) -> u8 {
        self.0[4] as u8
    }
}

/// The flow that a limit counts by: fields outside the mask are zero, the direction stays.
pub(crate) fn masked(flow: &Flow, mask: LimitMask) -> Flow {
    let ends = mask.ends(flow.ends);
    let src_port = if mask.contains(LimitMask::SRC_PORT) { flow.src_port } else { 0 };
    let dst_port = if mask.contains(LimitMask::DST_PORT) { flow.dst_port } else { 0 };
    Flow { ends, src_port, dst_port, ..*flow }
}

impl ParentKey {
    /// The key of a masked flow under a rule.
    pub(crate) fn of_parent(masked: &Flow, rule: RuleId) -> Self {
        let (src, dst, zone, v6) = match masked.ends {
            Ends::V4(src, dst) => (u128::from(u32::from(src)), u128::from(u32::from(dst)), 0, 0),
            Ends::V6(src, dst, zone) => (u128::from(src), u128::from(dst), zone, 1),
        };
        let [a, b] = halves(src);
        let [c, d] = halves(dst);
        let ports = rest(masked.src_port, masked.dst_port, masked);
        Key([a, b, c, d, ports, u64::from(zone), v6 << 32 | u64::from(rule.0)])
    }
}

fn halves(address: u128) -> [u64; 2] {
    [(address >> 64) as u64, address as u64]
}

fn whole(high: u64, low: u64) -> Ipv6Addr {
    Ipv6Addr::from(u128::from(high) << 64 | u128::from(low))
}

/// The word with everything but the addresses: ports, zone, protocol.
fn rest(low_port: u16, high_port: u16, flow: &Flow) -> u64 {
    u64::from(low_port) << 48
        | u64::from(high_port) << 32
        | u64::from(flow.zone) << 16
        | u64::from(flow.proto)
}

/// The flow whose source is the low end.
fn unpack(rest: u64, ends: Ends) -> Flow {
    Flow {
        ends,
        proto: rest as u8,
        src_port: (rest >> 48) as u16,
        dst_port: (rest >> 32) as u16,
        zone: (rest >> 16) as u16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(ends: Ends, src_port: u16, dst_port: u16) -> Flow {
        Flow { ends, proto: 6, src_port, dst_port, zone: 9 }
    }

    fn v4(src: [u8; 4], dst: [u8; 4]) -> Ends {
        Ends::V4(src.into(), dst.into())
    }

    fn v6(src: &str, dst: &str, zone: u32) -> Ends {
        Ends::V6(src.parse().unwrap(), dst.parse().unwrap(), zone)
    }

    #[test]
    fn both_directions_have_one_key_and_unpack() {
        let flows = [
            flow(v4([10, 0, 0, 1], [10, 0, 0, 2]), 1024, 80),
            flow(v4([10, 0, 0, 2], [10, 0, 0, 1]), 1024, 80),
            flow(v4([10, 0, 0, 1], [10, 0, 0, 1]), 80, 1024),
            flow(v4([255, 255, 255, 255], [0, 0, 0, 0]), 65535, 0),
            flow(v6("fe80::1", "fe80::2", 3), 1, 2),
            flow(v6("2001:db8::2", "2001:db8::1", 0), 1, 2),
        ];
        for flow in flows {
            let back = flow.reversed();
            match (flow.ends, back.ends) {
                (Ends::V4(a, b), Ends::V4(c, d)) => {
                    let ((key, side), (key_back, side_back)) =
                        (Key4::new(a, b, &flow), Key4::new(c, d, &back));
                    assert_eq!(key, key_back);
                    assert_ne!(side, side_back);
                    assert_eq!((key.flow(side), key.flow(side_back)), (flow, back));
                }
                (Ends::V6(a, b, zone), Ends::V6(c, d, _)) => {
                    let (key, side) = Key6::new(a, b, zone, &flow);
                    let (key_back, side_back) = Key6::new(c, d, zone, &back);
                    assert_eq!(key, key_back);
                    assert_ne!(side, side_back);
                    assert_eq!((key.flow(side), key.flow(side_back)), (flow, back));
                }
                _ => unreachable!(),
            }
        }
    }

    #[test]
    fn a_flow_to_itself_is_forward_in_both_directions() {
        let own = flow(v4([127, 0, 0, 1], [127, 0, 0, 1]), 5, 5);
        let Ends::V4(a, b) = own.ends else { unreachable!() };
        assert_eq!(Key4::new(a, b, &own), Key4::new(b, a, &own.reversed()));
    }

    #[test]
    fn every_field_is_in_the_key() {
        let base = flow(v4([1, 2, 3, 4], [5, 6, 7, 8]), 10, 20);
        let key = |flow: &Flow| match flow.ends {
            Ends::V4(a, b) => Key4::new(a, b, flow).0,
            Ends::V6(..) => unreachable!(),
        };
        let others = [
            Flow { proto: 17, ..base },
            Flow { zone: 8, ..base },
            Flow { src_port: 11, ..base },
            Flow { dst_port: 21, ..base },
            Flow { src_port: 20, dst_port: 10, ..base },
            Flow { ends: v4([1, 2, 3, 5], [5, 6, 7, 8]), ..base },
        ];
        for other in others {
            assert_ne!(key(&base), key(&other), "{other:?}");
        }
    }

    #[test]
    fn parents_differ_by_rule_family_and_mask() {
        let four = flow(v4([0, 0, 0, 1], [0, 0, 0, 2]), 10, 20);
        let six = flow(v6("::1", "::2", 0), 10, 20);
        let key = |flow, mask, rule| ParentKey::of_parent(&masked(flow, mask), RuleId(rule));
        assert_ne!(key(&four, LimitMask::SRC_ADDR, 1), key(&four, LimitMask::SRC_ADDR, 2));
        assert_ne!(key(&four, LimitMask::SRC_ADDR, 1), key(&six, LimitMask::SRC_ADDR, 1));
        assert_ne!(key(&four, LimitMask::SRC_ADDR, 1), key(&four, LimitMask::DST_ADDR, 1));
        assert_ne!(key(&four, LimitMask::SRC_PORT, 1), key(&four, LimitMask::DST_PORT, 1));
        let elsewhere = flow(v4([0, 0, 0, 1], [9, 9, 9, 9]), 11, 21);
        assert_eq!(key(&four, LimitMask::SRC_ADDR, 1), key(&elsewhere, LimitMask::SRC_ADDR, 1));
    }
}
