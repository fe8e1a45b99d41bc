//! What one packet carries along on its way through the rules, and where it can end.

use std::fmt;
use std::net::IpAddr;

use super::port::PortId;
use super::reply::NoReply;
use crate::state::{Lookup, Name, Refused, RuleId};

/// Deepest nesting of `call`, as in ipfw.
pub const CALL_DEPTH: usize = 16;
/// Most tags on one packet; further ones are not attached, and counted.
pub const MAX_TAGS: usize = 16;
/// Most calls, returns and continuations behind a state's rule for one packet: rules can be written that never end.
pub(crate) const MAX_JUMPS: u16 = 256;

/// Which way a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dir {
    /// It came in by a port.
    In,
    /// It goes out by a port.
    Out,
}

/// How far one packet has come: small, and kept by the caller while an inspector holds the packet.
#[derive(Clone, Copy, Debug)]
pub struct Walk {
    pub(crate) dir: Dir,
    pub(crate) recv: Option<PortId>,
    pub(crate) xmit: Option<PortId>,
    /// The rule at which the walk stopped, by identity and by number; `None` before the first rule.
    pub(crate) stopped: Option<(RuleId, u32)>,
    pub(crate) memo: LookupCache,
    /// The rule whose state the packet was found to answer; `None` when it goes the way of the state's first packet.
    pub(crate) answers: Option<RuleId>,
    pub(crate) stack: [RuleId; CALL_DEPTH],
    pub(crate) depth: u8,
    pub(crate) tag_count: u8,
    pub(crate) tags: [u16; MAX_TAGS],
    pub(crate) mark: u32,
    pub(crate) jumps: u16,
    pub(crate) tenant: u16,
    pub(crate) lifetime: Option<u32>,
    pub(crate) edits: Edits,
}

/// The one lookup of a state that a walk remembers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LookupCache {
    /// None yet.
    Unknown,
    /// The last lookup was for this name.
    Named(Name),
    /// The last lookup was for any name.
    Any,
}

impl LookupCache {
    /// Whether this lookup can still tell something new: a second one is made only for another name, and after one for
    /// any name never.
    #[inline]
    pub(crate) fn needs(self, lookup: Lookup) -> bool {
        match self {
            Self::Unknown => true,
            Self::Named(last) => lookup != Lookup::Named(last),
            Self::Any => false,
        }
    }
}

/// What rules changed in a packet; the caller applies it when the packet leaves ([`towpath_wire::edit`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Edits {
    /// The code point (0 to 63) to set.
    pub dscp: Option<u8>,
    /// The maximum segment size to lower the packet's own to.
    pub mss: Option<u16>,
}

impl Walk {
    /// A packet before its first rule.
    pub fn new(dir: Dir, recv: Option<PortId>, xmit: Option<PortId>) -> Self {
        Self {
            dir,
            recv,
            xmit,
            stopped: None,
            memo: LookupCache::Unknown,
            answers: None,
            stack: [RuleId(0); CALL_DEPTH],
            depth: 0,
            tag_count: 0,
            tags: [0; MAX_TAGS],
            mark: 0,
            jumps: 0,
            tenant: 0,
            lifetime: None,
            edits: Edits::default(),
        }
    }

    /// The same for a packet of this tenant, whose states are apart from everyone else's.
    #[must_use]
    pub fn with_tenant(mut self, tenant: u16) -> Self {
        self.tenant = tenant;
        self
    }

    /// Begins the walk on the way out by `xmit`. What belongs to the packet (mark, tags, changes) stays with it; the
    /// place among the rules, and what was looked up, do not.
    pub fn leave(&mut self, xmit: PortId) {
        *self = Self {
            tag_count: self.tag_count,
            tags: self.tags,
            mark: self.mark,
            edits: self.edits,
            ..Self::new(Dir::Out, self.recv, Some(xmit)).with_tenant(self.tenant)
        };
    }

    /// The packet's mark.
    pub fn mark(&self) -> u32 {
        self.mark
    }

    /// Sets the packet's mark, as an inspector's verdict may.
    pub fn set_mark(&mut self, mark: u32) {
        self.mark = mark;
    }

    /// The packet's tags.
    pub fn tags(&self) -> &[u16] {
        &self.tags[..usize::from(self.tag_count)]
    }

    /// What is to be changed in the packet before it leaves.
    pub fn edits(&self) -> Edits {
        self.edits
    }

    /// Direction.
    pub fn dir(&self) -> Dir {
        self.dir
    }

    /// The port it came in by.
    pub fn recv(&self) -> Option<PortId> {
        self.recv
    }

    /// The port it goes out by.
    pub fn xmit(&self) -> Option<PortId> {
        self.xmit
    }

    /// The number of the rule that decided last.
    pub fn rule(&self) -> Option<u32> {
        self.stopped.map(|(_, number)| number)
    }

    /// Attaches a tag; false when there is no room.
    pub(crate) fn tag(&mut self, tag: u16) -> bool {
        if self.tags().contains(&tag) {
            return true;
        }
        let Some(slot) = self.tags.get_mut(usize::from(self.tag_count)) else { return false };
        *slot = tag;
        self.tag_count += 1;
        true
    }

    pub(crate) fn untag(&mut self, tag: u16) {
        if let Some(at) = self.tags().iter().position(|t| *t == tag) {
            self.tag_count -= 1;
            self.tags[at] = self.tags[usize::from(self.tag_count)];
        }
    }

    /// One more jump; false when there were too many.
    pub(crate) fn jump(&mut self) -> bool {
        self.jumps += 1;
        self.jumps <= MAX_JUMPS
    }
}

/// Where a walk ends, or pauses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The packet passes.
    Pass,
    /// It is dropped.
    Drop(DropReason),
    /// It is dropped and may be answered.
    Reject(Reject),
    /// It goes to this queue's inspector, whose pass is final.
    Inspect(u16),
    /// It goes to this queue's inspector; after a pass, call [`super::Gate::walk`] again.
    Divert(u16),
    /// A copy goes to this queue; call [`super::Gate::walk`] again.
    Tee(u16),
    /// It passes to this next hop, and perhaps port.
    Forward(IpAddr, Option<u16>),
    /// It is a fragment: keep it until its datagram is whole, then call [`super::Gate::walk`] again with that.
    Reassemble,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pass => f.write_str("pass"),
            Self::Drop(reason) => write!(f, "drop ({})", reason.as_str()),
            Self::Reject(Reject::NoReply(reason)) => write!(f, "reject without an answer: it is {reason}"),
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
            Self::Inspect(queue) => write!(f, "inspect by queue {queue}"),
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
    /// A deny rule.
    Deny,
    /// The rule needed a state and could not have it.
    NoState(Refused),
    /// The rule needed a state of a packet that is not IP.
    NotIp,
    /// An IPv4 TCP fragment at offset 1: it could overwrite the flags that were checked (RFC 3128).
    TinyFragment,
    /// An IPv6 extension header that nobody knows; anything may be behind it.
    UnknownHeader,
    /// `call` deeper than 16.
    CallDepth,
    /// Calls, returns and states send the packet round in circles.
    Loop,
    /// The rules changed so that the rule to return to is gone.
    Reloaded,
    /// A pipe's rate is exceeded.
    Policed,
    /// The pipe is not configured.
    NoPipe,
    /// The table's value has no next hop of the packet's family.
    NoNextHop,
}

impl DropReason {
    /// The reason in a few words, for reports.
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

/// How a rejected packet is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reject {
    /// Not at all.
    NoReply(NoReply),
    /// ICMP destination unreachable.
    Unreach {
        /// Code.
        code: u8,
        /// Next-hop MTU, 0 if none was given.
        mtu: u16,
    },
    /// ICMPv6 destination unreachable.
    Unreach6 {
        /// Code.
        code: u8,
    },
    /// ICMP or ICMPv6 time exceeded in transit: a router's answer, no rule's.
    TimeExceeded,
    /// ICMPv6 packet too big: the same.
    TooBig {
        /// Next-hop MTU.
        mtu: u32,
    },
    /// TCP RST.
    Reset,
    /// SCTP ABORT.
    Abort,
}
