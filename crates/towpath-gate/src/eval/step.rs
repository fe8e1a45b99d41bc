//! Results of a walk: steps, drop reasons and rejections.

use std::fmt;
use std::net::IpAddr;

use super::reply::NoReply;
use crate::state::Refused;

/// The result of a walk, final or intermediate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The packet passes.
    Pass,
    /// The packet is dropped.
    Drop(DropReason),
    /// The packet is dropped and may get a reply.
    Reject(Reject),
    /// The packet goes to the inspector of this queue. A pass verdict is final.
    Inspect(u16),
    /// The packet goes to the inspector of this queue. After a pass verdict, call [`super::Gate::walk`] again.
    Divert(u16),
    /// A copy goes to this queue. Call [`super::Gate::walk`] again.
    Tee(u16),
    /// The packet passes to this next hop, with a port if one was given.
    Forward(IpAddr, Option<u16>),
    /// The packet is a fragment. Hold it until its datagram is complete, then call [`super::Gate::walk`] again
    /// with the datagram.
    Reassemble,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pass => f.write_str("pass"),
            Self::Drop(reason) => write!(f, "drop ({})", reason.as_str()),
            Self::Reject(Reject::NoReply(reason)) => write!(f, "reject without reply ({reason})"),
            Self::Reject(Reject::Unreach { code, .. }) => {
                write!(f, "reject with ICMP unreachable, code {code}")
            }
            Self::Reject(Reject::Unreach6 { code }) => {
                write!(f, "reject with ICMPv6 unreachable, code {code}")
            }
            Self::Reject(Reject::TimeExceeded) => f.write_str("reject with ICMP time exceeded"),
            Self::Reject(Reject::TooBig { .. }) => f.write_str("reject with ICMPv6 packet too big"),
            Self::Reject(Reject::Reset) => f.write_str("reject with a TCP reset"),
            Self::Reject(Reject::Abort) => f.write_str("reject with an SCTP abort"),
            Self::Inspect(queue) => write!(f, "inspect in queue {queue}"),
            Self::Divert(queue) => write!(f, "divert to queue {queue}"),
            Self::Tee(queue) => write!(f, "copy to queue {queue}"),
            Self::Forward(ip, None) => write!(f, "pass to next hop {ip}"),
            Self::Forward(ip, Some(port)) => write!(f, "pass to next hop {ip}, port {port}"),
            Self::Reassemble => f.write_str("wait for the other fragments"),
        }
    }
}

/// Why a packet is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DropReason {
    /// A deny rule, or the default rule.
    Deny,
    /// The rule requires a state, which was refused.
    NoState(Refused),
    /// The rule requires a state, which a frame that is not IP cannot have.
    NotIp,
    /// An IPv4 TCP fragment at offset 1, which could overwrite checked flags (RFC 3128).
    TinyFragment,
    /// An unknown IPv6 extension header: the data after it cannot be interpreted.
    UnknownHeader,
    /// Calls nested deeper than [`super::CALL_DEPTH`].
    CallDepth,
    /// Too many jumps: calls, returns and states form a loop.
    Loop,
    /// The rule to return to was deleted by a reload.
    Reloaded,
    /// The rate of a pipe is exceeded.
    Policed,
    /// The pipe is not configured.
    NoPipe,
    /// The next hop is missing or of the other address family.
    NoNextHop,
}

impl DropReason {
    /// A short description for reports.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Deny => "deny",
            Self::NoState(Refused::Full) => "states full",
            Self::NoState(Refused::OverLimit) => "over limit",
            Self::NoState(Refused::OverRate) => "over rate",
            Self::NoState(Refused::ParentsFull) => "limits full",
            Self::NoState(Refused::OverSource) => "source over its share",
            Self::NoState(Refused::Invalid) => "invalid for its state",
            Self::NoState(Refused::FirstSyn) => "first SYN",
            Self::NotIp => "no state for non-IP",
            Self::TinyFragment => "tiny fragment",
            Self::UnknownHeader => "unknown extension header",
            Self::CallDepth => "call too deep",
            Self::Loop => "rule loop",
            Self::Reloaded => "rules changed",
            Self::Policed => "policed",
            Self::NoPipe => "no such pipe",
            Self::NoNextHop => "no next hop",
        }
    }
}

/// The reply to a rejected packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reject {
    /// No reply.
    NoReply(NoReply),
    /// ICMP destination unreachable.
    Unreach {
        /// Code.
        code: u8,
        /// Next-hop MTU; 0 if none was given.
        mtu: u16,
    },
    /// ICMPv6 destination unreachable.
    Unreach6 {
        /// Code.
        code: u8,
    },
    /// ICMP or ICMPv6 time exceeded in transit. Sent by a router, never by a rule.
    TimeExceeded,
    /// ICMPv6 packet too big. Sent by a router, never by a rule.
    TooBig {
        /// Next-hop MTU.
        mtu: u32,
    },
    /// TCP RST.
    Reset,
    /// SCTP ABORT.
    Abort,
}
