//! Options that compare fields of one packet: one row per option.
//!
//! A row states the option's words (the first one is printed), the packets that it applies to, the type of its argument,
//! and three expressions: how the argument is parsed, printed and compared. A new option is a row here, an entry in the
//! rules reference, and rows in `tests/rows`. The compiler and the packet classifier need no change.
//!
//! Options that need the walk, a table, a port or a route are in [`super::Test`] and in `eval/insn.rs`.

use std::fmt::{self, Formatter};

use towpath_wire::{Addresses, Fragment, Packet, ext6, proto};

use super::args::*;
use crate::rules::cursor::{Cursor, Parse, elements};
use crate::rules::diagnostic::{Fault, quoted};
use crate::rules::ports::{Ranges, decimal, ethertype};

/// The packets that a test applies to. The test fails for all other packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// All frames.
    Any,
    /// IP packets. A frame that is not IP never matches, not even with `not`. The same holds for the scopes below.
    Ip,
    /// IPv4 packets.
    Ip4,
    /// IPv6 packets.
    Ip6,
    /// TCP segments with their header: not later fragments.
    Tcp,
    /// Packets of protocol 1 with their header.
    Icmp,
    /// Packets of protocol 58 with their header.
    Icmp6,
}

impl Scope {
    #[inline]
    pub(crate) fn includes(self, packet: &Packet<'_>) -> bool {
        let upper = |number| packet.proto == number && packet.fragment != Fragment::Later;
        match self {
            Self::Any | Self::Ip => true,
            Self::Ip4 => matches!(packet.addresses, Addresses::V4(..)),
            Self::Ip6 => matches!(packet.addresses, Addresses::V6(..)),
            Self::Tcp => upper(proto::TCP),
            Self::Icmp => upper(proto::ICMP),
            Self::Icmp6 => upper(proto::ICMP6),
        }
    }
}

/// The input of a comparison: the packet, and the code point that an earlier `setdscp` gave it.
pub(crate) struct Subject<'p> {
    pub(crate) packet: &'p Packet<'p>,
    pub(crate) dscp: Option<u8>,
}

macro_rules! field_tests {
    ($(
        $(#[$doc:meta])*
        $name:ident($type:ty) = $word:literal $(| $alias:literal)*, $scope:ident,
        parse |$cursor:ident| $parse:expr,
        print |$f:ident, $printed:ident| $print:expr,
        compare |$value:ident, $subject:ident| $compare:expr;
    )*) => {
        /// A test of fields of the packet itself.
        #[derive(Clone, Debug, PartialEq, Eq, Hash)]
        pub enum FieldTest {
            $($(#[$doc])* $name($type),)*
        }

        impl FieldTest {
            /// The words of all options of this table.
            pub(crate) const WORDS: &'static [&'static str] = &[$($word, $($alias,)*)*];

            /// Parses the argument of the option `word`, which the cursor has already consumed. `None` if the table has
            /// no such option.
            pub(super) fn parse(word: &str, cursor: &mut Cursor<'_, '_>) -> Option<Parse<Self>> {
                match word {
                    $($word $(| $alias)* => {
                        let parse = |$cursor: &mut Cursor<'_, '_>| -> Parse<$type> { $parse };
                        Some(parse(cursor).map(Self::$name))
                    })*
                    _ => None,
                }
            }

            /// The packets that the test applies to.
            pub(crate) fn scope(&self) -> Scope {
                match self {
                    $(Self::$name(_) => Scope::$scope,)*
                }
            }

            /// Returns true if the packet matches.
            pub(crate) fn matches(&self, subject: &Subject<'_>) -> bool {
                match self {
                    $(Self::$name($value) => {
                        let $subject = subject;
                        Scope::$scope.includes(subject.packet) && $compare
                    })*
                }
            }
        }

        impl fmt::Display for FieldTest {
            fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$name($printed) => {
                        let $f = f;
                        $f.write_str($word)?;
                        $print
                    })*
                }
            }
        }
    };
}

field_tests! {
    /// Ethernet addresses: destination, source.
    Mac((MacMask, MacMask)) = "MAC" | "mac", Any,
        parse |c| Ok((mac_mask(c)?, mac_mask(c)?)),
        print |f, macs| write!(f, " {} {}", macs.0, macs.1),
        compare |macs, s| s.packet.macs().is_some_and(|m| macs.0.contains(m.dst) && macs.1.contains(m.src));

    /// EtherType.
    MacType(Ranges) = "mac-type", Any,
        parse |c| list(c, "ethertype", ethertype),
        print |f, types| write_hex_ranges(f, types),
        compare |types, s| !s.packet.link.is_raw_ip() && types.contains(s.packet.ethertype);

    /// Fragment flags. Without flags: a fragment offset other than 0.
    Frag(Flags) = "frag", Ip,
        parse |c| Ok(optional_flags(c, "fragment flag", FRAG)),
        print |f, flags| write_flags(f, *flags, FRAG),
        compare |flags, s| is_fragment(s.packet, *flags);

    /// IPv4 options that are present, or absent with `!`.
    IpOptions(Flags) = "ipoptions" | "ipopts", Ip4,
        parse |c| flags(c, "IP option", IP_OPTIONS),
        print |f, flags| write_flags(f, *flags, IP_OPTIONS),
        compare |flags, s| flags.match_bits(ip_options(s.packet));

    /// Length of the IP packet in bytes.
    IpLen(Ranges) = "iplen", Ip,
        parse |c| list(c, "length", decimal),
        print |f, lengths| write!(f, " {lengths}"),
        compare |lengths, s| lengths.contains(saturate(s.packet.ip_len));

    /// IPv4 identification.
    IpId(Ranges) = "ipid", Ip,
        parse |c| list(c, "identification", decimal),
        print |f, ids| write!(f, " {ids}"),
        compare |ids, s| s.packet.ip_id().is_some_and(|id| ids.contains(id));

    /// IP precedence, 0 to 7: the upper three bits of the type of service.
    IpPrecedence(u8) = "ipprecedence", Ip,
        parse |c| Ok(c.number("precedence", 0, 7)? as u8),
        print |f, precedence| write!(f, " {precedence}"),
        compare |precedence, s| s.tos() >> 5 == *precedence;

    /// Differentiated services code points: bit N is code point N.
    Dscp(u64) = "dscp", Ip,
        parse |c| code_points(c),
        print |f, points| write_list(f, bits(points, 64).map(CodePoint)),
        compare |points, s| points >> (s.tos() >> 2) & 1 == 1;

    /// Type of service bits (RFC 1349).
    IpTos(Flags) = "iptos", Ip4,
        parse |c| flags(c, "type of service", IP_TOS),
        print |f, flags| write_flags(f, *flags, IP_TOS),
        compare |flags, s| flags.match_bits(s.tos());

    /// Time to live, or hop limit.
    IpTtl(Ranges) = "ipttl", Ip,
        parse |c| list(c, "time to live", |text| decimal(text).filter(|ttl| *ttl < 256)),
        print |f, ttls| write!(f, " {ttls}"),
        compare |ttls, s| ttls.contains(s.packet.ttl().into());

    /// IP version.
    IpVersion(u8) = "ipversion" | "ipver", Ip,
        parse |c| Ok(c.number("IP version", 0, 15)? as u8),
        print |f, version| write!(f, " {version}"),
        compare |version, s| match s.packet.addresses {
            Addresses::None => false,
            Addresses::V4(..) => *version == 4,
            Addresses::V6(..) => *version == 6,
        };

    /// Length of the TCP payload in bytes.
    TcpDataLen(Ranges) = "tcpdatalen", Tcp,
        parse |c| list(c, "length", decimal),
        print |f, lengths| write!(f, " {lengths}"),
        compare |lengths, s| s.packet.tcp_data_len().is_some_and(|len| lengths.contains(saturate(len)));

    /// TCP flags that are set, or clear with `!`.
    TcpFlags(Flags) = "tcpflags" | "tcpflgs", Tcp,
        parse |c| flags(c, "TCP flag", TCP_FLAGS),
        print |f, flags| write_flags(f, *flags, TCP_FLAGS),
        compare |flags, s| flags.match_bits(s.packet.tcp_flags);

    /// Value of the TCP MSS option.
    TcpMss(Ranges) = "tcpmss", Tcp,
        parse |c| list(c, "segment size", decimal),
        print |f, sizes| write!(f, " {sizes}"),
        compare |sizes, s| s.packet.tcp_mss().is_some_and(|mss| sizes.contains(mss));

    /// TCP options that are present, or absent with `!`.
    TcpOptions(Flags) = "tcpoptions" | "tcpopts", Tcp,
        parse |c| flags(c, "TCP option", TCP_OPTIONS),
        print |f, flags| write_flags(f, *flags, TCP_OPTIONS),
        compare |flags, s| flags.match_bits(tcp_options(s.packet));

    /// TCP sequence number.
    TcpSeq(u32) = "tcpseq", Tcp,
        parse |c| c.number("sequence number", 0, u32::MAX),
        print |f, seq| write!(f, " {seq}"),
        compare |seq, s| s.packet.tcp_seq == *seq;

    /// TCP acknowledgement number.
    TcpAck(u32) = "tcpack", Tcp,
        parse |c| c.number("acknowledgement number", 0, u32::MAX),
        print |f, ack| write!(f, " {ack}"),
        compare |ack, s| s.packet.tcp_ack == *ack;

    /// TCP window, not scaled.
    TcpWin(Ranges) = "tcpwin", Tcp,
        parse |c| list(c, "window", decimal),
        print |f, windows| write!(f, " {windows}"),
        compare |windows, s| windows.contains(s.packet.tcp_window);

    /// ICMP types: bit N is type N, at most 31.
    IcmpTypes(u32) = "icmptypes" | "icmptype", Icmp,
        parse |c| icmp_types(c),
        print |f, types| write_list(f, bits(&u64::from(*types), 32)),
        compare |types, s| s.packet.icmp_type < 32 && types >> s.packet.icmp_type & 1 == 1;

    /// ICMPv6 types: bit N % 64 of word N / 64 is type N.
    Icmp6Types([u64; 4]) = "icmp6types" | "icmp6type", Icmp6,
        parse |c| icmp6_types(c),
        print |f, types| write_list(f, (0..=255u8).filter(|kind| has_bit(types, *kind))),
        compare |types, s| has_bit(types, s.packet.icmp_type);

    /// IPv6 extension headers, one of which is present ([`towpath_wire::ext6`]).
    Ext6Hdr(u16) = "ext6hdr", Ip,
        parse |c| ext6_headers(c),
        print |f, headers| write_list(f, EXT6.iter().filter(|(_, bit)| headers & bit != 0).map(|(name, _)| name)),
        compare |headers, s| s.packet.ext6 & headers != 0;

    /// IPv6 flow labels.
    FlowId(Vec<u32>) = "flow-id", Ip6,
        parse |c| flow_labels(c),
        print |f, labels| write_list(f, labels),
        compare |labels, s| s.packet.flow_label().is_some_and(|label| labels.contains(&label));
}

impl FieldTest {
    /// Returns true if the result is the same for all packets of a flow that [offload](crate::FixedWalk) forwards: no fragments, no
    /// options and extension headers of IP, TCP segments with ACK and without SYN, FIN and RST.
    pub(crate) fn is_fixed_by_flow(&self) -> bool {
        // FIN, SYN, RST, ACK.
        const KNOWN: u8 = 0x17;
        match self {
            Self::TcpFlags(flags) => (flags.set | flags.clear) & !KNOWN == 0,
            _ => self.is_fixed_by_form(),
        }
    }

    /// Returns true if the result is the same for all packets of a family and a protocol that have no fragments, options and extension
    /// headers of IP.
    pub(crate) fn is_fixed_by_form(&self) -> bool {
        match self {
            Self::MacType(_) | Self::IpVersion(_) | Self::IpOptions(_) | Self::Ext6Hdr(_) => true,
            Self::Frag(flags) => *flags == Flags::default() || *flags == OFFSET,
            _ => false,
        }
    }
}

impl Subject<'_> {
    /// The type of service byte, with the code point of an earlier `setdscp`.
    fn tos(&self) -> u8 {
        match self.dscp {
            Some(dscp) => dscp << 2 | self.packet.tos() & 3,
            None => self.packet.tos(),
        }
    }
}

/// `frag offset`.
const OFFSET: Flags = Flags { set: 0x01, clear: 0 };

/// `frag`: without flags, or with `offset` alone, the packet has a fragment offset. All other flags are those of the IPv4
/// fragment word; an IPv6 packet never matches them, set or clear (ipfw: only the bare `frag` covers both families).
fn is_fragment(packet: &Packet<'_>, flags: Flags) -> bool {
    let offset = packet.fragment_offset != 0;
    if flags == Flags::default() || flags == OFFSET {
        return offset;
    }
    Scope::Ip4.includes(packet) && flags.match_bits(packet.ipoff_flags() | u8::from(offset))
}

/// The IPv4 options of the packet, as bits of [`IP_OPTIONS`].
fn ip_options(packet: &Packet<'_>) -> u8 {
    packet.ip_options().fold(0, |seen, option| {
        seen | match option.kind {
            137 => 0x01,
            131 => 0x02,
            7 => 0x04,
            68 => 0x08,
            _ => 0,
        }
    })
}

/// The TCP options of the packet, as bits of [`TCP_OPTIONS`].
fn tcp_options(packet: &Packet<'_>) -> u8 {
    packet.tcp_options().fold(0, |seen, option| {
        seen | match option.kind {
            2 => 0x01,
            3 => 0x02,
            4 | 5 => 0x04,
            8 => 0x08,
            11..=13 => 0x10,
            _ => 0,
        }
    })
}

/// Lengths above 65,535 compare as 65,535.
fn saturate(length: u32) -> u16 {
    u16::try_from(length).unwrap_or(u16::MAX)
}

/// The positions of the set bits among the lowest `width`.
fn bits(word: &u64, width: u8) -> impl Iterator<Item = u8> {
    (0..width).filter(move |bit| word >> bit & 1 == 1)
}

fn has_bit(words: &[u64; 4], bit: u8) -> bool {
    words[usize::from(bit) / 64] >> (bit % 64) & 1 == 1
}

/// Bits and their words.
type FlagName = (&'static str, u8);

/// `frag`: bits 7 to 5 of the flags byte of the IPv4 fragment word, and `offset`.
const FRAG: &[FlagName] = &[("rf", 0x80), ("df", 0x40), ("mf", 0x20), ("offset", 0x01)];
const TCP_FLAGS: &[FlagName] = &[
    ("syn", 0x02),
    ("fin", 0x01),
    ("ack", 0x10),
    ("psh", 0x08),
    ("rst", 0x04),
    ("urg", 0x20),
    ("ece", 0x40),
    ("cwr", 0x80),
];
const TCP_OPTIONS: &[FlagName] =
    &[("mss", 0x01), ("window", 0x02), ("sack", 0x04), ("ts", 0x08), ("cc", 0x10)];
const IP_OPTIONS: &[FlagName] = &[("ssrr", 0x01), ("lsrr", 0x02), ("rr", 0x04), ("ts", 0x08)];
/// `iptos` (RFC 1349).
const IP_TOS: &[FlagName] = &[
    ("lowdelay", 0x10),
    ("throughput", 0x08),
    ("reliability", 0x04),
    ("mincost", 0x02),
    ("congestion", 0x01),
];
/// `ext6hdr`.
const EXT6: &[(&str, u16)] = &[
    ("frag", ext6::FRAG),
    ("hopopt", ext6::HOPOPT),
    ("route", ext6::ROUTE),
    ("dstopt", ext6::DSTOPT),
    ("ah", ext6::AH),
    ("esp", ext6::ESP),
    ("rthdr0", ext6::RTHDR0),
    ("rthdr2", ext6::RTHDR2),
];

fn icmp_types(cursor: &mut Cursor<'_, '_>) -> Parse<u32> {
    let mut types = 0;
    numbers(cursor, "ICMP type", 31, |number| types |= 1 << number)?;
    Ok(types)
}

fn icmp6_types(cursor: &mut Cursor<'_, '_>) -> Parse<[u64; 4]> {
    let mut types = [0; 4];
    numbers(cursor, "ICMPv6 type", 255, |number| types[number as usize / 64] |= 1 << (number % 64))?;
    Ok(types)
}

fn flow_labels(cursor: &mut Cursor<'_, '_>) -> Parse<Vec<u32>> {
    let mut labels = Vec::new();
    numbers(cursor, "flow label", 0xf_ffff, |number| labels.push(number))?;
    Ok(labels)
}

fn ext6_headers(cursor: &mut Cursor<'_, '_>) -> Parse<u16> {
    let token = cursor.need("the extension headers")?;
    let mut headers = 0;
    for (offset, text) in elements(&token.text) {
        let Some((_, bit)) = EXT6.iter().find(|(name, _)| *name == text) else {
            let message = format!("{} is not an extension header", quoted(text));
            return Err(Fault::new(token.position_at(offset), message)
                .did_you_mean(text, EXT6.iter().map(|(name, _)| *name)));
        };
        headers |= bit;
    }
    Ok(headers)
}
