//! What a rule's body may test, one case per instruction of ipfw.

use std::net::IpAddr;

use super::address::{Address, TableRef};
use super::ports::Ranges;
use super::protocol::Protocol;

/// One test, perhaps negated.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Term {
    /// `not`.
    pub not: bool,
    /// The test.
    pub test: Test,
}

/// Tests of which one must hold: a single one, or `{ a or b }`.
pub type Block = Vec<Term>;

/// A test of one packet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Test {
    /// Protocol.
    Proto(Protocol),
    /// Source address, one of the list.
    Src(Vec<Address>),
    /// Destination address.
    Dst(Vec<Address>),
    /// Source port.
    SrcPort(Ranges),
    /// Destination port.
    DstPort(Ranges),
    /// The packet is on its way in.
    In,
    /// The packet is on its way out.
    Out,
    /// The port it came in by.
    Recv(Interface),
    /// The port it goes out by.
    Xmit(Interface),
    /// The port it goes out by if it has one, else the one it came in by.
    Via(Interface),
    /// The frame has an Ethernet header.
    Layer2,
    /// Ethernet addresses.
    Mac {
        /// Destination.
        dst: MacMask,
        /// Source.
        src: MacMask,
    },
    /// Ethertype.
    MacType(Ranges),
    /// Fragment flags; without any: a non-zero fragment offset.
    Frag(Flags),
    /// IPv4 options that are there, or not.
    IpOptions(Flags),
    /// Length of the IP packet.
    IpLen(Ranges),
    /// IPv4 identification.
    IpId(Ranges),
    /// Precedence, 0 to 7.
    IpPrecedence(u8),
    /// Differentiated services code points, a bit each.
    Dscp(u64),
    /// Type of service bits.
    IpTos(Flags),
    /// Time to live, or hop limit.
    IpTtl(Ranges),
    /// IP version.
    IpVersion(u8),
    /// TCP with RST or ACK.
    Established,
    /// TCP with SYN, without ACK.
    Setup,
    /// Bytes of TCP payload.
    TcpDataLen(Ranges),
    /// TCP flags.
    TcpFlags(Flags),
    /// Value of the TCP MSS option.
    TcpMss(Ranges),
    /// TCP options that are there, or not.
    TcpOptions(Flags),
    /// TCP sequence number.
    TcpSeq(u32),
    /// TCP acknowledgement number.
    TcpAck(u32),
    /// TCP window.
    TcpWin(Ranges),
    /// ICMP types (IPv4), a bit each.
    IcmpTypes(u32),
    /// ICMPv6 types, a bit each.
    Icmp6Types([u64; 4]),
    /// IPv6 extension headers of which one is there ([`towpath_wire::ext6`]).
    Ext6Hdr(u16),
    /// IPv6 flow labels.
    FlowId(Vec<u32>),
    /// An IPv4 packet.
    Ip4,
    /// An IPv6 packet.
    Ip6,
    /// A field of the packet is in a table; sets tablearg.
    Lookup {
        /// Which field.
        key: LookupKey,
        /// Bits of the field that count.
        mask: Option<LookupMask>,
        /// The table's name.
        table: Box<str>,
    },
    /// The packet's flow is in a table of type flow.
    Flow(TableRef),
    /// One of the packet's tags.
    Tagged(TagArg),
    /// The packet's mark.
    Mark {
        /// Value, or tablearg.
        value: Arg,
        /// Bits that count.
        mask: u32,
    },
    /// The route back to the source leaves by the port that the packet came in by.
    VerRevPath,
    /// There is a route to the source, the default route excepted.
    VerSrcReach,
    /// The source lies in the net of a port, and the packet came in by that port; or in none.
    AntiSpoof,
    /// A classic BPF program over the frame gives a result other than 0: `code jt jf k` of every instruction behind
    /// their count, with commas between.
    Bpf(Box<str>),
    /// The comment-only filler `// text`: always holds.
    True,
}

/// Which port: its name, a pattern, an address of it, a table of names.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Interface {
    /// Any port (the packet has one).
    Any,
    /// By name.
    Name(Box<str>),
    /// By a pattern: `em*`, `em?`, `em[0-3]` (fnmatch(3)).
    Glob(Box<str>),
    /// By an address of the port.
    Address(IpAddr),
    /// By a table of type iface.
    Table(TableRef),
}

/// Flags that must be set and flags that must be clear.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flags {
    /// Must be set.
    pub set: u8,
    /// Must be clear.
    pub clear: u8,
}

impl Flags {
    /// Whether `flags` is as asked.
    #[inline]
    pub const fn holds(self, flags: u8) -> bool {
        flags & self.set == self.set && flags & self.clear == 0
    }
}

/// An Ethernet address and the bits of it that count; a zero mask is `any`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MacMask {
    /// Address under the mask.
    pub addr: [u8; 6],
    /// Mask.
    pub mask: [u8; 6],
}

impl MacMask {
    /// Any address.
    pub const ANY: Self = Self { addr: [0; 6], mask: [0; 6] };

    /// Whether `mac` matches.
    pub fn contains(&self, mac: [u8; 6]) -> bool {
        (0..6).all(|i| mac[i] & self.mask[i] == self.addr[i])
    }
}

/// A number in a rule, or the value of the table entry that matched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arg {
    /// The number.
    Number(u32),
    /// `tablearg`.
    Tablearg,
}

/// What `tagged` asks for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TagArg {
    /// One of these tags.
    Tags(Ranges),
    /// The tag that the table entry names.
    Tablearg,
}

/// The field that `lookup` looks up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LookupKey {
    /// Destination address.
    DstIp,
    /// Source address.
    SrcIp,
    /// Destination port.
    DstPort,
    /// Source port.
    SrcPort,
    /// Destination Ethernet address.
    DstMac,
    /// Source Ethernet address.
    SrcMac,
    /// Differentiated services code point.
    Dscp,
    /// The packet's mark.
    Mark,
    /// The rule's own number.
    RuleNum,
}

/// Bits of a looked-up field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LookupMask {
    /// Of a number or an IPv4 address.
    Number(u32),
    /// Of an IPv6 address.
    V6(u128),
    /// Of an Ethernet address.
    Mac([u8; 6]),
}

/// A word for a bit.
pub(crate) type FlagName = (&'static str, u8);

/// `frag`: bits 7..5 of the flags byte of IPv4's fragment word, and `offset`.
pub(crate) const FRAG: &[FlagName] = &[("rf", 0x80), ("df", 0x40), ("mf", 0x20), ("offset", 0x01)];
/// `tcpflags`.
pub(crate) const TCP_FLAGS: &[FlagName] = &[
    ("syn", 0x02),
    ("fin", 0x01),
    ("ack", 0x10),
    ("psh", 0x08),
    ("rst", 0x04),
    ("urg", 0x20),
    ("ece", 0x40),
    ("cwr", 0x80),
];
/// `tcpoptions`.
pub(crate) const TCP_OPTIONS: &[FlagName] =
    &[("mss", 0x01), ("window", 0x02), ("sack", 0x04), ("ts", 0x08), ("cc", 0x10)];
/// `ipoptions`.
pub(crate) const IP_OPTIONS: &[FlagName] = &[("ssrr", 0x01), ("lsrr", 0x02), ("rr", 0x04), ("ts", 0x08)];
/// `iptos` (RFC 1349).
pub(crate) const IP_TOS: &[FlagName] = &[
    ("lowdelay", 0x10),
    ("throughput", 0x08),
    ("reliability", 0x04),
    ("mincost", 0x02),
    ("congestion", 0x01),
];
/// `ext6hdr`.
pub(crate) const EXT6: &[(&str, u16)] = &[
    ("frag", towpath_wire::ext6::FRAG),
    ("hopopt", towpath_wire::ext6::HOPOPT),
    ("route", towpath_wire::ext6::ROUTE),
    ("dstopt", towpath_wire::ext6::DSTOPT),
    ("ah", towpath_wire::ext6::AH),
    ("esp", towpath_wire::ext6::ESP),
    ("rthdr0", towpath_wire::ext6::RTHDR0),
    ("rthdr2", towpath_wire::ext6::RTHDR2),
];
/// Code points by name (RFC 2474, 2597, 3246, 5865).
pub(crate) const DSCP: &[(&str, u8)] = &[
    ("be", 0),
    ("cs0", 0),
    ("cs1", 8),
    ("cs2", 16),
    ("cs3", 24),
    ("cs4", 32),
    ("cs5", 40),
    ("cs6", 48),
    ("cs7", 56),
    ("af11", 10),
    ("af12", 12),
    ("af13", 14),
    ("af21", 18),
    ("af22", 20),
    ("af23", 22),
    ("af31", 26),
    ("af32", 28),
    ("af33", 30),
    ("af41", 34),
    ("af42", 36),
    ("af43", 38),
    ("va", 44),
    ("ef", 46),
];
/// `lookup`.
pub(crate) const LOOKUP_KEYS: &[(&str, LookupKey)] = &[
    ("dst-ip", LookupKey::DstIp),
    ("src-ip", LookupKey::SrcIp),
    ("dst-port", LookupKey::DstPort),
    ("src-port", LookupKey::SrcPort),
    ("dst-mac", LookupKey::DstMac),
    ("src-mac", LookupKey::SrcMac),
    ("dscp", LookupKey::Dscp),
    ("mark", LookupKey::Mark),
    ("rulenum", LookupKey::RuleNum),
];
