//! A rule as data.

use std::net::IpAddr;

use super::diagnostic::Position;
use super::option::{Arg, Block};
use crate::state::Tracking;

/// Number of the default rule.
pub const DEFAULT_RULE: u32 = 65535;
/// Sets are 0 to 31.
pub const RESERVED_SET: u8 = 31;

/// One rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Number: rules are ordered by it, then by insertion.
    pub number: u32,
    /// Set, 0 to 31.
    pub set: u8,
    /// `prob p`, as ipfw keeps it: the rule is tried when 31 random bits are below this.
    pub prob: Option<u32>,
    /// What happens to a packet that matches.
    pub action: Action,
    /// `log`.
    pub log: Option<Log>,
    /// `tag` or `untag`.
    pub tag: Option<Tag>,
    /// What a packet must be.
    pub body: Body,
    /// keep-state and its kin.
    pub state: Option<StateOption>,
    /// `defer-action`: install the state, and go on with the next rule.
    pub defer: bool,
    /// The comment, kept and printed.
    pub comment: Option<String>,
    /// Where the rule stands in its file.
    pub at: Position,
}

impl Rule {
    /// The names of states that it makes, looks up or counts by, but for the default one.
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

/// What a packet must be. All blocks must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Body {
    /// How the body was written.
    pub form: Form,
    /// Protocol, as [`super::option::Test::Proto`].
    pub proto: Block,
    /// Source address.
    pub src: Block,
    /// Source port.
    pub src_port: Option<super::option::Term>,
    /// Destination address.
    pub dst: Block,
    /// Destination port.
    pub dst_port: Option<super::option::Term>,
    /// The rest, in the order written.
    pub options: Vec<Block>,
}

impl Body {
    /// All blocks in the order in which they are tested.
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

/// How a body was written, and is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Form {
    /// `PROTO from SRC to DST OPTIONS`.
    #[default]
    Full,
    /// `PROTO OPTIONS`.
    Proto,
    /// `OPTIONS`, or nothing at all.
    Options,
}

/// What happens to a packet that matches.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Passes.
    Allow,
    /// Is dropped.
    Deny,
    /// Is dropped; an ICMP host unreachable answers.
    Reject,
    /// Is dropped; an ICMP unreachable with this code answers.
    Unreach {
        /// ICMP code.
        code: u8,
        /// Next-hop MTU for `needfrag`.
        mtu: Option<u16>,
    },
    /// Is dropped; an ICMPv6 unreachable with this code answers.
    Unreach6(u8),
    /// Is dropped; a TCP RST answers (IPv4).
    Reset,
    /// The same for IPv6.
    Reset6,
    /// Is dropped; an SCTP ABORT answers (IPv4).
    Abort,
    /// The same for IPv6.
    Abort6,
    /// Counts; the next rule is tried.
    Count,
    /// The state of the packet's flow decides, if there is one.
    CheckState(StateName),
    /// Goes on at a later rule.
    Skipto(Target),
    /// Goes on at another rule and may return.
    Call(Target),
    /// Returns to where the last `call` was.
    Return(ReturnTo),
    /// Goes to an inspector whose pass is final.
    Inspect(Arg),
    /// Goes to an inspector; after its pass the next rule is tried.
    Divert(Arg),
    /// A copy goes to an inspector; the next rule is tried.
    Tee(Arg),
    /// Passes through a policer: what exceeds its rate is dropped.
    Pipe(Arg),
    /// Passes, to this next hop.
    Forward(NextHop),
    /// A fragment is kept until its datagram is whole; the next rule is tried with that.
    Reass,
    /// The code point is set; the next rule is tried.
    SetDscp(Arg),
    /// The mark is set; the next rule is tried.
    SetMark(Arg),
    /// The MSS option of a TCP SYN is lowered to this; the next rule is tried.
    TcpSetMss(u16),
    /// States that later rules make for this packet live so many seconds; the next rule is tried.
    StateTimeout(u32),
}

/// Where skipto and call go.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// The first rule with this number or a greater one.
    Number(u32),
    /// The rule that the table entry names.
    Tablearg,
    /// The rule below `:NAME`; resolved when the whole file is read.
    Label {
        /// The label's name, without the colon.
        name: Box<str>,
        /// Number of the rule below it.
        number: u32,
        /// How many rules with this number stand above it.
        above: u32,
    },
}

/// Where `return` goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReturnTo {
    /// At the next rule number after the call (ipfw's default).
    NextRulenum,
    /// At the next rule after the call, even if it has the same number.
    NextRule,
}

/// Where `fwd` sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NextHop {
    /// This address, and perhaps port.
    Address(IpAddr, Option<u16>),
    /// The address that the table entry has.
    Tablearg,
}

/// `log [logamount N]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Log {
    /// Most packets that are logged; `None` is the gate's own limit, 0 is no limit.
    pub amount: Option<u32>,
}

/// `tag N` or `untag N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag {
    /// The tag is taken away.
    pub remove: bool,
    /// Which: 1 to 65534.
    pub tag: Arg,
}

/// Which flow name a state option or check-state has.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StateName {
    /// `:default`, also when none is written.
    Default,
    /// `:NAME`.
    Named(Box<str>),
    /// `:any`, for check-state only.
    Any,
}

/// The state option of a rule; a rule has at most one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateOption {
    /// Whether the rule looks a state up first (keep-state, limit) or only makes one (record-state, set-limit).
    pub probe: bool,
    /// For limit and set-limit.
    pub limit: Option<Limit>,
    /// Flow name.
    pub name: StateName,
    /// `lifetime N`: seconds that its states live, in place of the settings.
    pub lifetime: Option<u32>,
    /// `strict` or `loose`: how much of TCP its states check.
    pub tracking: Tracking,
}

/// `limit src-addr 4`, `limit src-addr/24/64 100/second shared web`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Limit {
    /// Flows with the same source address share one count.
    pub src_addr: bool,
    /// So many bits of it, of IPv4 and of IPv6; `None` is all.
    pub src_net: Option<(u8, u8)>,
    /// So many bits of the destination address.
    pub dst_net: Option<(u8, u8)>,
    /// Same source port.
    pub src_port: bool,
    /// Same destination address.
    pub dst_addr: bool,
    /// Same destination port.
    pub dst_port: bool,
    /// Most states.
    pub max: Arg,
    /// Most that are made in a second, and not most that there are.
    pub per_second: bool,
    /// Counted together with other rules' of this name.
    pub shared: Option<Box<str>>,
}
