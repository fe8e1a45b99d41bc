//! Arguments of options: their types, parsers and printed forms.

use std::fmt::{self, Display, Formatter, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::rules::address::{self, Address, Net6, TableRef, table_ref};
use crate::rules::cursor::{Cursor, Parse, bad_number, elements, number};
use crate::rules::diagnostic::{Fault, quoted};
use crate::rules::ports::{self, Ranges};
use crate::rules::token::Token;

/// A port: by name, pattern, address, or a table of names.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Interface {
    /// Any port.
    Any,
    /// The port with this name.
    Name(Box<str>),
    /// Ports whose name matches a pattern: `em*`, `em?`, `em[0-3]` (fnmatch(3)).
    Glob(Box<str>),
    /// The port with this address.
    Address(IpAddr),
    /// The ports in a table of type `iface`.
    Table(TableRef),
}

/// Flags that must be set and flags that must be clear.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flags {
    /// Bits that must be set.
    pub set: u8,
    /// Bits that must be clear.
    pub clear: u8,
}

impl Flags {
    /// Returns true if all bits of `set` are set in `flags`, and all bits of `clear` are clear.
    #[inline]
    pub const fn match_bits(self, flags: u8) -> bool {
        flags & self.set == self.set && flags & self.clear == 0
    }
}

/// An Ethernet address with a mask. A zero mask is `any`.
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

    /// Returns true if the address matches.
    pub fn contains(&self, mac: [u8; 6]) -> bool {
        (0..6).all(|i| mac[i] & self.mask[i] == self.addr[i])
    }
}

/// A number, or the value of the table entry that matched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arg {
    /// The number.
    Number(u32),
    /// The value of the table entry (`tablearg`).
    Tablearg,
}

/// Argument of `tagged`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TagArg {
    /// One of these tags.
    Tags(Ranges),
    /// The tag in the value of the table entry.
    Tablearg,
}

/// The field that `lookup` reads.
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
    /// Mark of the packet.
    Mark,
    /// Number of the rule itself.
    RuleNum,
}

/// The bits of a field to look up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LookupMask {
    /// Bits of a number or an IPv4 address.
    Number(u32),
    /// Bits of an IPv6 address.
    V6(u128),
    /// Bits of an Ethernet address.
    Mac([u8; 6]),
}

/// Fields of `lookup`.
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
/// Parses a number or `tablearg`.
pub(crate) fn arg(cursor: &mut Cursor<'_, '_>, what: &str, lo: u32, hi: u32) -> Parse<Arg> {
    if cursor.eat("tablearg") {
        return Ok(Arg::Tablearg);
    }
    cursor.number(what, lo, hi).map(Arg::Number)
}

/// Parses a code point by name or number.
pub(crate) fn code_point(text: &str) -> Option<u8> {
    let lower = text.to_ascii_lowercase();
    let named = DSCP.iter().find(|(name, _)| *name == lower).map(|(_, point)| *point);
    named.or_else(|| number(text).filter(|n| *n < 64).map(|n| n as u8))
}

/// Parses a comma list of addresses and notes every bad one.
pub(crate) fn addresses(cursor: &mut Cursor<'_, '_>, what: &str) -> Parse<Vec<Address>> {
    let token = cursor.need(what)?;
    let mut list = Vec::new();
    for (offset, text) in elements(&token.text) {
        if cursor.full() {
            break;
        }
        match address::parse(text) {
            Ok(address) => list.push(address),
            Err(no) => {
                let message = match no.message.as_str() {
                    "not an address" => format!("{} is not an address", quoted(text)),
                    other => format!("{} in {}", other, quoted(text)),
                };
                let fault = Fault::new(token.position_at(offset), message);
                cursor.note(match no.hint {
                    Some(hint) => fault.hint(hint),
                    None => fault,
                });
                // A placeholder; the rule is rejected anyway.
                list.push(Address::Any);
            }
        }
    }
    if list.len() > 1 && list.contains(&Address::Any) {
        // `any` makes the rest of the list meaningless; ipfw also reads the list as `any`.
        list.retain(|address| *address == Address::Any);
        list.truncate(1);
    }
    Ok(list)
}

/// Parses a list of numbers and ranges and notes every bad element.
pub(crate) fn ranges(
    cursor: &mut Cursor<'_, '_>,
    token: &Token<'_>,
    what: &str,
    number: impl Fn(&str) -> Option<u16>,
) -> Ranges {
    match ports::parse(&token.text, what, number) {
        Ok(ranges) => ranges,
        Err(all) => {
            for bad in all {
                let fault = Fault::new(token.position_at(bad.offset), bad.message);
                let names = if what == "port" { ports::SERVICES } else { &[] };
                cursor.note(match bad.word {
                    Some(word) => fault.did_you_mean(&word, names.iter().map(|(name, _)| *name)),
                    None => fault,
                });
            }
            Ranges::default()
        }
    }
}

pub(crate) fn list(
    cursor: &mut Cursor<'_, '_>,
    what: &str,
    number: impl Fn(&str) -> Option<u16>,
) -> Parse<crate::rules::ports::Ranges> {
    let token = cursor.need(&format!("the {what}"))?;
    Ok(ranges(cursor, token, what, number))
}

pub(super) fn option_addresses(cursor: &mut Cursor<'_, '_>, word: &str) -> Parse<Vec<Address>> {
    let at = cursor.here();
    let list = addresses(cursor, "the address")?;
    let six = word.ends_with('6');
    if six && list.iter().any(|a| matches!(a, Address::Net4(_) | Address::Set4(_))) {
        return Err(Fault::new(at, format!("\"{word}\" needs IPv6 addresses")));
    }
    // `src-ip6 any` and `src-ip6 me` mean IPv6 packets.
    let list = list.into_iter().map(|address| match address {
        Address::Any if six => Address::Net6(Net6::prefix(0, 0)),
        Address::Me if six => Address::Me6,
        other => other,
    });
    Ok(list.collect())
}

pub(super) fn interface(cursor: &mut Cursor<'_, '_>) -> Parse<Interface> {
    let token = cursor.need("the port's name or address")?;
    let text = &*token.text;
    if text == "any" {
        return Ok(Interface::Any);
    }
    if let Some(table) = table_ref(text) {
        return table.map(Interface::Table).map_err(|no| Fault::new(token.position(), no.message));
    }
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Ok(Interface::Address(ip));
    }
    if text.contains('.') && text.chars().all(|c| c.is_ascii_digit() || matches!(c, '.' | '/')) {
        return Err(Fault::new(token.position(), format!("{} is not an address", quoted(text)))
            .hint("use a port name or an address of a port"));
    }
    let is_pattern = text.contains(['*', '?', '[']);
    let special =
        |c: char| matches!(c, '\'' | '"' | '(' | ')' | '{' | '}' | ',') || (c == '\\' && !is_pattern);
    if text.contains(special) {
        return Err(Fault::new(token.position(), format!("{} cannot be the name of a port", quoted(text)))
            .hint("use a port's name, a pattern such as em*, a port's address, table(NAME) or any"));
    }
    Ok(if is_pattern { Interface::Glob(text.into()) } else { Interface::Name(text.into()) })
}

pub(super) fn flags(cursor: &mut Cursor<'_, '_>, what: &str, names: &[(&'static str, u8)]) -> Parse<Flags> {
    let token = cursor.need(&format!("the {what}"))?;
    flag_list(token, what, names)
}

fn flag_list(token: &Token<'_>, what: &str, names: &[(&'static str, u8)]) -> Parse<Flags> {
    let mut flags = Flags::default();
    for (offset, text) in elements(&token.text) {
        let (not, word) = match text.strip_prefix('!') {
            Some(word) => (true, word),
            None => (false, text),
        };
        let Some((_, bit)) = names.iter().find(|(name, _)| *name == word) else {
            return Err(Fault::new(
                token.position_at(offset),
                format!("{} is not a valid {what}: use {}", quoted(word), all_names(names)),
            )
            .did_you_mean(word, names.iter().map(|(name, _)| *name)));
        };
        if not { flags.clear |= bit } else { flags.set |= bit }
    }
    if flags.set & flags.clear != 0 {
        return Err(Fault::new(token.position(), format!("the same {what} is both required and excluded")));
    }
    Ok(flags)
}

fn all_names(names: &[(&'static str, u8)]) -> String {
    names.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

/// Parses flags if the next word is a list of them; an option without flags is [`Flags::default`].
pub(super) fn optional_flags(cursor: &mut Cursor<'_, '_>, what: &str, names: &[(&'static str, u8)]) -> Flags {
    let is_flag = |word: &str| names.iter().any(|(name, _)| word.strip_prefix('!').unwrap_or(word) == *name);
    if !cursor.peek().is_some_and(|word| elements(word).all(|(_, element)| is_flag(element))) {
        return Flags::default();
    }
    flags(cursor, what, names).unwrap_or_else(|fault| {
        cursor.note(fault);
        Flags::default()
    })
}

pub(super) fn code_points(cursor: &mut Cursor<'_, '_>) -> Parse<u64> {
    let token = cursor.need("the code points")?;
    let mut points = 0;
    for (offset, text) in elements(&token.text) {
        let point = code_point(text).ok_or_else(|| {
            Fault::new(token.position_at(offset), format!("{} is not a valid code point", quoted(text)))
                .did_you_mean(text, DSCP.iter().map(|(name, _)| *name))
        })?;
        points |= 1u64 << point;
    }
    Ok(points)
}

pub(super) fn numbers(
    cursor: &mut Cursor<'_, '_>,
    what: &str,
    hi: u32,
    mut each: impl FnMut(u32),
) -> Parse<()> {
    let token = cursor.need(&format!("the {what}"))?;
    for (offset, text) in elements(&token.text) {
        match number(text).filter(|n| *n <= hi) {
            _ if cursor.full() => break,
            Some(number) => each(number),
            None => cursor.note(bad_number(token.position_at(offset), text, what, 0, hi)),
        }
    }
    Ok(())
}

pub(super) fn lookup_mask(key: LookupKey, text: &str) -> Option<LookupMask> {
    match key {
        LookupKey::DstIp | LookupKey::SrcIp => {
            if let Ok(mask) = text.parse::<Ipv4Addr>() {
                return Some(LookupMask::Number(mask.to_bits()));
            }
            text.parse::<Ipv6Addr>().ok().map(|mask| LookupMask::V6(mask.to_bits()))
        }
        LookupKey::DstMac | LookupKey::SrcMac => mac(text).map(LookupMask::Mac),
        _ => number(text).map(LookupMask::Number),
    }
}

pub(super) fn mac_mask(cursor: &mut Cursor<'_, '_>) -> Parse<MacMask> {
    let token = cursor.need("the Ethernet address")?;
    parse_mac_mask(&token.text).ok_or_else(|| {
        Fault::new(token.position(), format!("{} is not a valid Ethernet address", quoted(&token.text))).hint(
            "MAC takes the destination, then the source: \"any\", an address, address/bits or address&mask",
        )
    })
}

/// Parses `any`, or an Ethernet address with optional `/bits` or `&mask`.
pub(crate) fn parse_mac_mask(text: &str) -> Option<MacMask> {
    if text == "any" {
        return Some(MacMask::ANY);
    }
    let (addr, mask) = if let Some((addr, bits)) = text.split_once('/') {
        let bits: u32 = bits.parse().ok().filter(|bits| *bits <= 48)?;
        let ones = (!0u64).checked_shl(48 - bits).unwrap_or(0) & 0xffff_ffff_ffff;
        let mut mask = [0; 6];
        mask.copy_from_slice(&ones.to_be_bytes()[2..]);
        (mac(addr)?, mask)
    } else if let Some((addr, mask)) = text.split_once('&') {
        (mac(addr)?, mac(mask)?)
    } else {
        (mac(text)?, [0xff; 6])
    };
    Some(MacMask { addr: std::array::from_fn(|i| addr[i] & mask[i]), mask })
}

/// Parses six octets separated by colons.
pub(crate) fn mac(text: &str) -> Option<[u8; 6]> {
    let mut octets = [0; 6];
    let mut parts = text.split(':');
    for octet in &mut octets {
        let part = parts.next().filter(|part| (1..=2).contains(&part.len()))?;
        *octet = u8::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(octets)
}

impl Display for Arg {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Tablearg => f.write_str("tablearg"),
        }
    }
}

/// Prints a code point, by name if it has one.
pub(crate) struct CodePoint(pub(crate) u8);

impl Display for CodePoint {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match DSCP.iter().find(|(_, point)| *point == self.0) {
            Some((name, _)) => f.write_str(name),
            None => self.0.fmt(f),
        }
    }
}

impl Display for Interface {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("any"),
            Self::Name(text) | Self::Glob(text) => f.write_str(text),
            Self::Address(ip) => ip.fmt(f),
            Self::Table(table) => table.fmt(f),
        }
    }
}

/// Prints an Ethernet address.
pub(super) struct MacAddr(pub(super) [u8; 6]);

impl Display for MacAddr {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl Display for MacMask {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.mask == [0; 6] {
            return f.write_str("any");
        }
        MacAddr(self.addr).fmt(f)?;
        let bits = self.mask.iter().fold(0u64, |bits, octet| bits << 8 | u64::from(*octet));
        let ones = (bits << 16).leading_ones();
        match ones == bits.count_ones() {
            true if ones == 48 => Ok(()),
            true => write!(f, "/{ones}"),
            false => write!(f, "&{}", MacAddr(self.mask)),
        }
    }
}

/// Writes the items, separated by commas.
pub(crate) fn comma_list<T: Display>(
    f: &mut Formatter<'_>,
    items: impl IntoIterator<Item = T>,
) -> fmt::Result {
    for (i, item) in items.into_iter().enumerate() {
        if i > 0 {
            f.write_char(',')?;
        }
        item.fmt(f)?;
    }
    Ok(())
}

/// Writes a blank and the items, separated by commas: the argument of an option.
pub(super) fn write_list<T: Display>(
    f: &mut Formatter<'_>,
    items: impl IntoIterator<Item = T>,
) -> fmt::Result {
    f.write_char(' ')?;
    comma_list(f, items)
}

/// Writes a blank and the words of the flags, `!` before those that must be clear.
pub(super) fn write_flags(f: &mut Formatter<'_>, flags: Flags, names: &[(&'static str, u8)]) -> fmt::Result {
    if flags == Flags::default() {
        return Ok(());
    }
    let named = names.iter().filter(|(_, bit)| (flags.set | flags.clear) & bit != 0);
    let not = |bit: u8| if flags.clear & bit != 0 { "!" } else { "" };
    write_list(f, named.map(|(name, bit)| format!("{}{name}", not(*bit))))
}

/// Writes a blank and the ranges in hexadecimal.
pub(super) fn write_hex_ranges(f: &mut Formatter<'_>, ranges: &Ranges) -> fmt::Result {
    let range = |(lo, hi): &(u16, u16)| match lo == hi {
        true => format!("{lo:#06x}"),
        false => format!("{lo:#06x}-{hi:#06x}"),
    };
    write_list(f, ranges.0.iter().map(range))
}
