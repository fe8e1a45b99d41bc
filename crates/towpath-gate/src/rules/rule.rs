//! The data model of a rule.

use std::net::IpAddr;

use super::diagnostic::Position;
use super::option::{Arg, Block};
use crate::state::Tracking;

/// Number of the default rule.
pub const DEFAULT_RULE: u32 = 65535;
/// The set of the default rule, which cannot be disabled. Sets are 0 to 31.
pub const RESERVED_SET: u8 = 31;

/// One rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Rule number. Rules are ordered by number, then by insertion.
    pub number: u32,
    /// Set, 0 to 31.
    pub set: u8,
    /// `prob p`: the rule is evaluated if 31 random bits are below this.
    pub prob: Option<u32>,
    /// The action for a matching packet.
    pub action: Action,
    /// `log`.
    pub log: Option<Log>,
    /// `tag` or `untag`.
    pub tag: Option<Tag>,
    /// The tests.
    pub body: Body,
    /// The state option: keep-state, record-state, limit or set-limit.
    pub state: Option<StateOption>,
    /// `defer-action`: install the state and continue at the next rule.
    pub defer: bool,
    /// The comment, which is printed with the rule.
    pub comment: Option<String>,
    /// Position in the rule file.
    pub at: Position,
}

impl Rule {
    /// The flow names that the rule installs, looks up or shares, except the default one.
    pub(crate) fn flow_names(&self) -> impl Iterator<Item = Box<str>> {
        let own = self.state.as_ref().map(|state| &state.name);
        let checked = match &self.action {
            Action::CheckState(name) => Some(name),
            _ => None,
        };
        let named = |name: &StateName| match name {
            StateName::Named(name) => Some(name.clone()),
            _ => None,
        };
        let shared = self.state.as_ref().and_then(|state| state.limit.as_ref()?.shared.clone());
        [own.and_then(named), checked.and_then(named), shared].into_iter().flatten()
    }
}

/// The tests of a rule. All blocks must match.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Body {
    /// The form in which the body was written.
    pub form: Form,
    /// Protocol ([`super::option::Test::Proto`]).
    pub proto: Block,
    /// Source address.
    pub src: Block,
    /// Source port.
    pub src_port: Option<super::option::Term>,
    /// Destination address.
    pub dst: Block,
    /// Destination port.
    pub dst_port: Option<super::option::Term>,
    /// Options, in the order written.
    pub options: Vec<Block>,
}

impl Body {
    /// All blocks, in the order of evaluation.
    pub fn blocks(&self) -> impl Iterator<Item = &[super::option::Term]> {
        fn one(term: &Option<super::option::Term>) -> Option<&[super::option::Term]> {
            term.as_ref().map(std::slice::from_ref)
        }
        [
            Some(&self.proto[..]),
            Some(&self.src[..]),
            one(&self.src_port),
            Some(&self.dst[..]),
            one(&self.dst_port),
        ]
        .into_iter()
        .flatten()
        .chain(self.options.iter().map(|block| &block[..]))
        .filter(|block| !block.is_empty())
    }
}

/// The form of a body, which is also its printed form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Form {
    /// `PROTO from SRC to DST OPTIONS`.
    #[default]
    Full,
    /// `PROTO OPTIONS`.
    Proto,
    /// `OPTIONS`, possibly none.
    Options,
}

/// The action for a matching packet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Passes the packet.
    Allow,
    /// Drops the packet.
    Deny,
    /// Drops the packet and replies with ICMP host unreachable.
    Reject,
    /// Drops the packet and replies with ICMP unreachable.
    Unreach {
        /// ICMP code.
        code: u8,
        /// Next-hop MTU for `needfrag`.
        mtu: Option<u16>,
    },
    /// Drops the packet and replies with ICMPv6 unreachable with this code.
    Unreach6(u8),
    /// Drops the packet and replies with a TCP RST (IPv4).
    Reset,
    /// Drops the packet and replies with a TCP RST (IPv6).
    Reset6,
    /// Drops the packet and replies with an SCTP ABORT (IPv4).
    Abort,
    /// Drops the packet and replies with an SCTP ABORT (IPv6).
    Abort6,
    /// Counts the packet and continues.
    Count,
    /// Runs the action of the packet's state, if it has one.
    CheckState(StateName),
    /// Continues at a later rule.
    Skipto(Target),
    /// Continues at another rule, which may return.
    Call(Target),
    /// Returns to the last `call`.
    Return(ReturnTo),
    /// Sends the packet to an inspector whose pass verdict is final.
    Inspect(Arg),
    /// Sends the packet to an inspector and continues after its pass verdict.
    Divert(Arg),
    /// Sends a copy to an inspector and continues.
    Tee(Arg),
    /// Passes the packet through a policer, which drops packets above its rate.
    Pipe(Arg),
    /// Passes the packet to this next hop.
    Forward(NextHop),
    /// Holds a fragment until its datagram is complete, and continues with the datagram.
    Reass,
    /// Sets the code point and continues.
    SetDscp(Arg),
    /// Sets the mark and continues.
    SetMark(Arg),
    /// Sets the mark of the kernel's connection tracking entry, if the packet came with one, and continues.
    SetConnmark(u32),
    /// Lowers the MSS option of a TCP SYN to this and continues.
    TcpSetMss(u16),
    /// Sets the lifetime in seconds that every packet sets for states that later rules create for this packet, and continues.
    StateTimeout(u32),
    /// Sets the zone in which later rules look up and create states for this packet, and continues.
    SetZone(u16),
}

impl Action {
    /// Whether the action passes packets. `None`: it decides no packet, or leaves it to an inspector.
    pub fn passes(&self) -> Option<bool> {
        match self {
            Self::Allow | Self::Forward(_) | Self::Pipe(_) => Some(true),
            Self::Deny
            | Self::Reject
            | Self::Unreach { .. }
            | Self::Unreach6(_)
            | Self::Reset
            | Self::Reset6
            | Self::Abort
            | Self::Abort6 => Some(false),
            _ => None,
        }
    }
}

/// Target of skipto and call.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// The first rule with at least this number.
    Number(u32),
    /// The rule number in the table value.
    Tablearg,
    /// The rule below `:NAME`, resolved after the whole file has been read.
    Label {
        /// Name of the label, without the colon.
        name: Box<str>,
        /// Number of the rule below it.
        number: u32,
        /// Number of rules with the same number above it.
        above: u32,
    },
}

/// Where `return` continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReturnTo {
    /// At the next rule number after the call (ipfw's default).
    NextRulenum,
    /// At the next rule after the call, even if it has the same number.
    NextRule,
}

/// Next hop of `fwd`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NextHop {
    /// This address, optionally with a port.
    Address(IpAddr, Option<u16>),
    /// The address in the table value.
    Tablearg,
}

/// `log [logamount N]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Log {
    /// Maximum number of logged packets. `None` uses the limit of the gate; 0 means no limit.
    pub amount: Option<u32>,
}

/// `tag N` or `untag N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag {
    /// Removes the tag instead of adding it.
    pub remove: bool,
    /// The tag, 1 to 65534.
    pub tag: Arg,
}

/// The flow name of a state option or check-state.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StateName {
    /// `:default`, also if none is written.
    Default,
    /// `:NAME`.
    Named(Box<str>),
    /// `:any`, only with check-state.
    Any,
}

/// The state option of a rule; at most one per rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateOption {
    /// The rule looks up a state first (keep-state, limit). False: it only creates one (record-state, set-limit).
    pub probe: bool,
    /// The limit of limit and set-limit.
    pub limit: Option<Limit>,
    /// Flow name.
    pub name: StateName,
    /// `lifetime N`: lifetime of its states in seconds, instead of the settings.
    pub lifetime: Option<u32>,
    /// `strict` or `loose`: how its states track TCP.
    pub tracking: Tracking,
    /// `offload`: the kernel may forward packets of its states.
    pub offload: bool,
}

/// `limit src-addr 4`, `limit src-addr/24/64 100/second shared web`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    /// Count flows per source address.
    pub src_addr: bool,
    /// Prefix lengths of the source address for IPv4 and IPv6; `None` is the whole address.
    pub src_net: Option<(u8, u8)>,
    /// Prefix lengths of the destination address for IPv4 and IPv6.
    pub dst_net: Option<(u8, u8)>,
    /// Count flows per source port.
    pub src_port: bool,
    /// Count flows per destination address.
    pub dst_addr: bool,
    /// Count flows per destination port.
    pub dst_port: bool,
    /// Maximum number of states.
    pub max: Arg,
    /// The limit is a rate of new states per second, instead of a number of states.
    pub per_second: bool,
    /// Name of the count, shared with other rules.
    pub shared: Option<Box<str>>,
}
