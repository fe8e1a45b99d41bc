//! The tests of a rule body: what a packet must match.

mod args;
mod field;

use std::fmt::{self, Formatter};

use towpath_bpf::{Format, LoadOptions, Program};

pub use self::args::{Arg, Flags, Interface, LookupKey, LookupMask, MacMask, TagArg};
pub(crate) use self::args::{
    CodePoint, DSCP, addresses, arg, code_point, comma_list, list, mac, parse_mac_mask, ranges,
};
pub use self::field::FieldTest;
pub(crate) use self::field::{Scope, Subject};

use self::args::{LOOKUP_KEYS, MacAddr, interface, lookup_mask, option_addresses, write_list};
use super::address::{Address, TableRef, table_name, table_ref};
use super::cursor::{Cursor, Parse, bad_number, number};
use super::diagnostic::{Fault, quoted};
use super::keywords::{NO_OPTIONS, refused};
use super::ports::{Ranges, decimal, port};
use super::protocol::Protocol;
use super::token::Token;

/// One test, optionally negated.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Term {
    /// `not`.
    pub not: bool,
    /// The test.
    pub test: Test,
}

/// An or-block: one of its tests must match. A single test, or `{ a or b }`.
pub type Block = Vec<Term>;

/// A test of one packet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Test {
    /// Protocol.
    Proto(Protocol),
    /// Source address: one of the list.
    Src(Vec<Address>),
    /// Destination address: one of the list.
    Dst(Vec<Address>),
    /// Source port.
    SrcPort(Ranges),
    /// Destination port.
    DstPort(Ranges),
    /// The packet is incoming.
    In,
    /// The packet is outgoing.
    Out,
    /// The receive port.
    Recv(Interface),
    /// The transmit port.
    Xmit(Interface),
    /// The transmit port, or the receive port of an incoming packet.
    Via(Interface),
    /// The frame has an Ethernet header.
    Layer2,
    /// Fields of the packet.
    Field(FieldTest),
    /// A TCP segment with RST or ACK.
    Established,
    /// A TCP segment with SYN and without ACK.
    Setup,
    /// An IPv4 packet.
    Ip4,
    /// An IPv6 packet.
    Ip6,
    /// A field of the packet is in a table. Sets `tablearg`.
    Lookup {
        /// The field.
        key: LookupKey,
        /// Bits of the field to compare; `None` is all.
        mask: Option<LookupMask>,
        /// Name of the table.
        table: Box<str>,
    },
    /// The packet's flow is in a table of type `flow`.
    Flow(TableRef),
    /// The packet has one of these tags.
    Tagged(TagArg),
    /// The packet's mark.
    Mark {
        /// Value, or tablearg.
        value: Arg,
        /// Bits to compare.
        mask: u32,
    },
    /// The mark of the kernel's connection tracking entry.
    Connmark {
        /// Value.
        value: u32,
        /// Bits to compare.
        mask: u32,
    },
    /// The route to the source leaves through the receive port (strict reverse path, RFC 3704).
    VerRevPath,
    /// A route to the source exists, other than the default route (loose reverse path, RFC 3704).
    VerSrcReach,
    /// If the source is in a directly connected network, the packet was received on the port of that network.
    AntiSpoof,
    /// A classic BPF program returns a value other than 0 for the frame. The text is the number of instructions, then
    /// `code jt jf k` per instruction, separated by commas.
    Bpf(Box<str>),
    /// Always matches: the filler of a rule that has only a comment.
    True,
}

type ParseTest = fn(&mut Cursor<'_, '_>, &str) -> Parse<Test>;

/// The options that are not in the table of [`FieldTest`], with their argument parsers.
const TESTS: &[(&[&str], ParseTest)] = &[
    (&["in"], |_, _| Ok(Test::In)),
    (&["out"], |_, _| Ok(Test::Out)),
    (&["recv"], |c, _| interface(c).map(Test::Recv)),
    (&["xmit"], |c, _| interface(c).map(Test::Xmit)),
    (&["via"], |c, _| interface(c).map(Test::Via)),
    (&["layer2", "bridged"], |_, _| Ok(Test::Layer2)),
    (&["established", "estab"], |_, _| Ok(Test::Established)),
    (&["setup"], |_, _| Ok(Test::Setup)),
    (&["ipv4", "ip4"], |_, _| Ok(Test::Ip4)),
    (&["ipv6", "ip6"], |_, _| Ok(Test::Ip6)),
    (&["src-ip", "src-ip6", "src-ipv6"], |c, word| option_addresses(c, word).map(Test::Src)),
    (&["dst-ip", "dst-ip6", "dst-ipv6"], |c, word| option_addresses(c, word).map(Test::Dst)),
    (&["src-port"], |c, _| list(c, "port", port).map(Test::SrcPort)),
    (&["dst-port"], |c, _| list(c, "port", port).map(Test::DstPort)),
    (&["proto"], |c, _| proto(c).map(Test::Proto)),
    (&["lookup"], |c, _| lookup(c)),
    (&["flow"], |c, _| flow(c).map(Test::Flow)),
    (&["tagged"], |c, _| tagged(c).map(Test::Tagged)),
    (&["mark"], |c, _| mark(c)),
    (&["connmark"], |c, _| connmark(c)),
    (&["verrevpath"], |_, _| Ok(Test::VerRevPath)),
    (&["versrcreach"], |_, _| Ok(Test::VerSrcReach)),
    (&["antispoof"], |_, _| Ok(Test::AntiSpoof)),
    (&["bpf"], |c, _| bpf(c).map(Test::Bpf)),
];

/// Options that are not tests: they belong to the rule, and cannot be negated.
pub(crate) const STATE_OPTIONS: &[&str] = &[
    "keep-state",
    "record-state",
    "limit",
    "set-limit",
    "defer-action",
    "defer-immediate-action",
    "lifetime",
    "strict",
    "offload",
    "loose",
];

/// Every option word.
pub(crate) fn words() -> impl Iterator<Item = &'static str> {
    let tests = TESTS.iter().flat_map(|(words, _)| words.iter());
    tests.chain(FieldTest::WORDS).chain(STATE_OPTIONS).copied()
}

/// Parses one test with its argument.
pub(crate) fn test(cursor: &mut Cursor<'_, '_>) -> Parse<Test> {
    let token = cursor.need("the option")?;
    let word = &*token.text;
    if let Some((_, parse)) = TESTS.iter().find(|(words, _)| words.contains(&word)) {
        return parse(cursor, word);
    }
    match FieldTest::parse(word, cursor) {
        Some(test) => test.map(Test::Field),
        None => Err(unknown(token, word)),
    }
}

fn unknown(token: &Token<'_>, word: &str) -> Fault {
    let at = token.position();
    if STATE_OPTIONS.contains(&word) {
        return Fault::new(at, format!("\"{word}\" cannot be negated or be part of an or-block"));
    }
    match refused(NO_OPTIONS, word) {
        Some((reason, instead)) => {
            Fault::new(at, format!("option \"{word}\" is not supported: {reason}")).hint(instead)
        }
        None if word == "shared" => Fault::new(at, "\"shared\" must follow the number of a limit")
            .hint("write limit FIELDS N shared NAME, then :NAME for the states"),
        None if word.starts_with(':') => Fault::new(
            at,
            format!("{} does not follow a state option", quoted(word)),
        )
        .hint(
            "write the name last in the state option: keep-state :NAME, or limit FIELDS N shared NAME :NAME",
        ),
        None => Fault::new(at, format!("unknown option {}", quoted(word))).did_you_mean(word, words()),
    }
}

fn proto(cursor: &mut Cursor<'_, '_>) -> Parse<Protocol> {
    let token = cursor.need("the protocol")?;
    Protocol::parse(&token.text).ok_or_else(|| {
        Fault::new(token.position(), format!("unknown protocol {}", quoted(&token.text)))
            .did_you_mean(&token.text, Protocol::names())
    })
}

fn tagged(cursor: &mut Cursor<'_, '_>) -> Parse<TagArg> {
    if cursor.eat("tablearg") {
        return Ok(TagArg::Tablearg);
    }
    list(cursor, "tag", |text| decimal(text).filter(|tag| (1..65535).contains(tag))).map(TagArg::Tags)
}

fn mark(cursor: &mut Cursor<'_, '_>) -> Parse<Test> {
    let (value, mask) = masked(cursor, "the mark")?;
    Ok(Test::Mark { value, mask })
}

fn connmark(cursor: &mut Cursor<'_, '_>) -> Parse<Test> {
    let at = cursor.here();
    match masked(cursor, "the mark of the connection")? {
        (Arg::Number(value), mask) => Ok(Test::Connmark { value, mask }),
        (Arg::Tablearg, _) => Err(bad_number(at, "tablearg", "mark", 0, u32::MAX)),
    }
}

/// Parses `VALUE[:mask]`.
fn masked(cursor: &mut Cursor<'_, '_>, what: &'static str) -> Parse<(Arg, u32)> {
    let token = cursor.need(what)?;
    let (value, mask) = match token.text.split_once(':') {
        Some((value, mask)) => (value, Some(mask)),
        None => (&*token.text, None),
    };
    let wrong = |text: &str| bad_number(token.position(), text, "mark", 0, u32::MAX);
    let mask = match mask {
        None => u32::MAX,
        Some(text) => number(text).ok_or_else(|| wrong(text))?,
    };
    let value = match value {
        "tablearg" => Arg::Tablearg,
        text => Arg::Number(number(text).ok_or_else(|| wrong(text))? & mask),
    };
    Ok((value, mask))
}

/// Parses the arguments of `lookup KEY[:mask] TABLE`.
fn lookup(cursor: &mut Cursor<'_, '_>) -> Parse<Test> {
    let token = cursor.need("the field to look up")?;
    let (word, mask) = match token.text.split_once(':') {
        Some((word, mask)) => (word, Some(mask)),
        None => (&*token.text, None),
    };
    let Some((_, key)) = LOOKUP_KEYS.iter().find(|(name, _)| *name == word) else {
        let at = token.position();
        return Err(match word {
            "uid" | "jail" => Fault::new(at, format!("\"lookup {word}\" is not supported"))
                .hint("packets have no user or jail"),
            _ => Fault::new(at, format!("{} is not a lookup field", quoted(word)))
                .did_you_mean(word, LOOKUP_KEYS.iter().map(|(name, _)| *name)),
        });
    };
    let mask = match mask {
        None => None,
        Some(text) => Some(lookup_mask(*key, text).ok_or_else(|| {
            Fault::new(
                token.position_at(word.len() + 1),
                format!("{} is not a valid mask for {word}", quoted(text)),
            )
        })?),
    };
    let table = cursor.need("the table's name")?;
    let name = match table_ref(&table.text) {
        Some(Ok(reference)) if reference.value.is_none() => Ok(reference.name),
        Some(_) => Err(Fault::new(table.position(), "\"lookup\" needs a table name")),
        None => table_name(&table.text)
            .map_err(|no| Fault::new(table.position(), format!("{} is {}", quoted(&table.text), no.message))),
    }?;
    Ok(Test::Lookup { key: *key, mask, table: name })
}

/// Parses the argument of `flow`: `table(NAME)`, `table(NAME,VALUE)`, or the name alone.
fn flow(cursor: &mut Cursor<'_, '_>) -> Parse<TableRef> {
    let token = cursor.need("table(NAME)")?;
    let alone = || table_name(&token.text).map(|name| TableRef { name, value: None });
    table_ref(&token.text)
        .unwrap_or_else(alone)
        .map_err(|_| Fault::new(token.position(), "\"flow\" needs table(NAME) or table(NAME,VALUE)"))
}

/// Parses the bytecode of `tcpdump -ddd`, on one line with commas.
fn bpf(cursor: &mut Cursor<'_, '_>) -> Parse<Box<str>> {
    let token = cursor.need("the bytecode")?;
    let code = token.text.trim_matches('"');
    let lines = code.replace(',', "\n");
    let options = LoadOptions { format: Format::ClassicText, name: None };
    let code = code.split(',').map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    match Program::load(lines.as_bytes(), &options) {
        Ok(_) => Ok(code.collect::<Vec<_>>().join(",").into()),
        Err(error) => Err(Fault::new(token.position(), format!("invalid bytecode: {error}"))
            .hint("quote the output of \"tcpdump -ddd EXPR\", with commas instead of line ends")),
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Proto(proto) => write!(f, "proto {proto}"),
            Self::Src(addresses) => {
                f.write_str("src-ip")?;
                write_list(f, addresses)
            }
            Self::Dst(addresses) => {
                f.write_str("dst-ip")?;
                write_list(f, addresses)
            }
            Self::SrcPort(ports) => write!(f, "src-port {ports}"),
            Self::DstPort(ports) => write!(f, "dst-port {ports}"),
            Self::In => f.write_str("in"),
            Self::Out => f.write_str("out"),
            Self::Recv(interface) => write!(f, "recv {interface}"),
            Self::Xmit(interface) => write!(f, "xmit {interface}"),
            Self::Via(interface) => write!(f, "via {interface}"),
            Self::Layer2 => f.write_str("layer2"),
            Self::Field(test) => test.fmt(f),
            Self::Established => f.write_str("established"),
            Self::Setup => f.write_str("setup"),
            Self::Ip4 => f.write_str("ipv4"),
            Self::Ip6 => f.write_str("ipv6"),
            Self::Lookup { key, mask, table } => {
                let word = LOOKUP_KEYS.iter().find(|(_, k)| k == key).map_or("?", |(word, _)| word);
                write!(f, "lookup {word}")?;
                match mask {
                    None => {}
                    Some(LookupMask::Number(mask)) if matches!(key, LookupKey::SrcIp | LookupKey::DstIp) => {
                        write!(f, ":{}", std::net::Ipv4Addr::from_bits(*mask))?;
                    }
                    Some(LookupMask::Number(mask)) => write!(f, ":{mask:#x}")?,
                    Some(LookupMask::V6(mask)) => write!(f, ":{}", std::net::Ipv6Addr::from_bits(*mask))?,
                    Some(LookupMask::Mac(mask)) => write!(f, ":{}", MacAddr(*mask))?,
                }
                write!(f, " {table}")
            }
            Self::Flow(table) => write!(f, "flow {table}"),
            Self::Tagged(TagArg::Tags(tags)) => write!(f, "tagged {tags}"),
            Self::Tagged(TagArg::Tablearg) => f.write_str("tagged tablearg"),
            Self::Mark { value, mask } => {
                match value {
                    Arg::Number(value) => write!(f, "mark {value:#x}")?,
                    Arg::Tablearg => f.write_str("mark tablearg")?,
                }
                if *mask == u32::MAX { Ok(()) } else { write!(f, ":{mask:#x}") }
            }
            Self::Connmark { value, mask: u32::MAX } => write!(f, "connmark {value:#x}"),
            Self::Connmark { value, mask } => write!(f, "connmark {value:#x}:{mask:#x}"),
            Self::VerRevPath => f.write_str("verrevpath"),
            Self::VerSrcReach => f.write_str("versrcreach"),
            Self::AntiSpoof => f.write_str("antispoof"),
            Self::Bpf(code) => write!(f, "bpf \"{code}\""),
            Self::True => f.write_str("proto ip"),
        }
    }
}
