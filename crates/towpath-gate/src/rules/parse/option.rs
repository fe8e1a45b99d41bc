//! The option words, one by one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use towpath_bpf::{Format, LoadOptions, Program};

use super::action::{arg, check_name, dscp, state_name};
use super::body::{addresses, ranges};
use super::cursor::{Cursor, Parse, bad_number, elements, number};
use super::words::{NO_OPTIONS, OPTIONS, refused};
use crate::rules::address::{Address, Net6, TableRef, table_name, table_ref};
use crate::rules::diagnostic::{Fault, quoted};
use crate::rules::option::*;
use crate::rules::ports::{decimal, ethertype, port};
use crate::rules::protocol::Protocol;
use crate::rules::rule::{Limit, StateOption};
use crate::rules::token::Token;
use crate::state::Tracking;

/// What an option word turned out to be.
pub(crate) enum Parsed {
    Test(Test),
    /// A state option where only tests may stand.
    State(&'static str),
}

/// Reads one test.
pub(crate) fn test(cursor: &mut Cursor<'_, '_>) -> Parse<Parsed> {
    let token = cursor.need("the option")?;
    Ok(Parsed::Test(match &*token.text {
        "in" => Test::In,
        "out" => Test::Out,
        "recv" => Test::Recv(interface(cursor)?),
        "xmit" => Test::Xmit(interface(cursor)?),
        "via" => Test::Via(interface(cursor)?),
        "layer2" | "bridged" => Test::Layer2,
        "bpf" => Test::Bpf(bpf(cursor)?),
        "MAC" | "mac" => Test::Mac { dst: mac_mask(cursor)?, src: mac_mask(cursor)? },
        "mac-type" => Test::MacType(list(cursor, "ethertype", ethertype)?),
        "frag" => Test::Frag(frag(cursor)),
        "ipoptions" | "ipopts" => Test::IpOptions(flags(cursor, "IP option", IP_OPTIONS)?),
        "iplen" => Test::IpLen(list(cursor, "length", decimal)?),
        "ipid" => Test::IpId(list(cursor, "identification", decimal)?),
        "ipprecedence" => Test::IpPrecedence(cursor.number("precedence", 0, 7)? as u8),
        "dscp" => Test::Dscp(code_points(cursor)?),
        "iptos" => Test::IpTos(flags(cursor, "type of service", IP_TOS)?),
        "ipttl" => Test::IpTtl(list(cursor, "time to live", |t| decimal(t).filter(|n| *n < 256))?),
        "ipversion" | "ipver" => Test::IpVersion(cursor.number("IP version", 0, 15)? as u8),
        "established" | "estab" => Test::Established,
        "setup" => Test::Setup,
        "tcpdatalen" => Test::TcpDataLen(list(cursor, "length", decimal)?),
        "tcpflags" | "tcpflgs" => Test::TcpFlags(flags(cursor, "TCP flag", TCP_FLAGS)?),
        "tcpmss" => Test::TcpMss(list(cursor, "segment size", decimal)?),
        "tcpoptions" | "tcpopts" => Test::TcpOptions(flags(cursor, "TCP option", TCP_OPTIONS)?),
        "tcpseq" => Test::TcpSeq(cursor.number("sequence number", 0, u32::MAX)?),
        "tcpack" => Test::TcpAck(cursor.number("acknowledgement number", 0, u32::MAX)?),
        "tcpwin" => Test::TcpWin(list(cursor, "window", decimal)?),
        "icmptypes" | "icmptype" => Test::IcmpTypes(icmp_types(cursor)?),
        "icmp6types" | "icmp6type" => Test::Icmp6Types(icmp6_types(cursor)?),
        "ext6hdr" => Test::Ext6Hdr(ext6(cursor)?),
        "flow-id" => Test::FlowId(flow_ids(cursor)?),
        "ipv4" | "ip4" => Test::Ip4,
        "ipv6" | "ip6" => Test::Ip6,
        "src-ip" | "src-ip6" | "src-ipv6" => Test::Src(option_addresses(cursor, &token.text)?),
        "dst-ip" | "dst-ip6" | "dst-ipv6" => Test::Dst(option_addresses(cursor, &token.text)?),
        "src-port" => Test::SrcPort(list(cursor, "port", port)?),
        "dst-port" => Test::DstPort(list(cursor, "port", port)?),
        "proto" => Test::Proto(proto(cursor)?),
        "lookup" => lookup(cursor)?,
        "flow" => Test::Flow(flow(cursor)?),
        "tagged" if cursor.eat("tablearg") => Test::Tagged(TagArg::Tablearg),
        "tagged" => Test::Tagged(TagArg::Tags(list(cursor, "tag", |t| {
            decimal(t).filter(|n| (1..65535).contains(n))
        })?)),
        "mark" => mark(cursor)?,
        "verrevpath" => Test::VerRevPath,
        "versrcreach" => Test::VerSrcReach,
        "antispoof" => Test::AntiSpoof,
        "keep-state" => return Ok(Parsed::State("keep-state")),
        "record-state" => return Ok(Parsed::State("record-state")),
        "limit" => return Ok(Parsed::State("limit")),
        "set-limit" => return Ok(Parsed::State("set-limit")),
        "defer-action" | "defer-immediate-action" => return Ok(Parsed::State("defer-action")),
        "lifetime" => return Ok(Parsed::State("lifetime")),
        "strict" => return Ok(Parsed::State("strict")),
        "loose" => return Ok(Parsed::State("loose")),
        other => return Err(unknown(token, other)),
    }))
}

fn unknown(token: &Token<'_>, word: &str) -> Fault {
    let at = token.position();
    match refused(NO_OPTIONS, word) {
        Some((reason, instead)) => {
            Fault::new(at, format!("option \"{word}\" is not supported: {reason}")).hint(instead)
        }
        None if word == "shared" => Fault::new(at, "\"shared\" stands behind the number of a limit")
            .hint("limit FIELDS N shared NAME, and behind that :NAME of the states"),
        None if word.starts_with(':') => {
            Fault::new(at, format!("{} stands behind no state option", quoted(word))).hint(
                "a name comes last of what belongs to the option, and before other options: keep-state :NAME, limit FIELDS N \
                 shared NAME :NAME",
            )
        }
        None => Fault::new(at, format!("unknown option {}", quoted(word)))
            .did_you_mean(word, OPTIONS.iter().copied()),
    }
}

/// The bytecode of `tcpdump -ddd`, on one line with commas.
fn bpf(cursor: &mut Cursor<'_, '_>) -> Parse<Box<str>> {
    let token = cursor.need("the bytecode")?;
    let code = token.text.trim_matches('"');
    let lines = code.replace(',', "\n");
    let options = LoadOptions { format: Format::ClassicText, name: None };
    let code = code.split(',').map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    match Program::load(lines.as_bytes(), &options) {
        Ok(_) => Ok(code.collect::<Vec<_>>().join(",").into()),
        Err(error) => Err(Fault::new(token.position(), format!("the bytecode is refused: {error}"))
            .hint("write what \"tcpdump -ddd EXPR\" prints in quotes, with commas for the ends of lines")),
    }
}

/// Reads keep-state, record-state, limit or set-limit with what belongs to it.
pub(crate) fn state(cursor: &mut Cursor<'_, '_>) -> Parse<StateOption> {
    let word = cursor.need("the state option")?;
    let (probe, limited) = match &*word.text {
        "keep-state" => (true, false),
        "record-state" => (false, false),
        "limit" => (true, true),
        _ => (false, true),
    };
    let limit = if limited { Some(limit(cursor, &word.text)?) } else { None };
    let name = state_name(cursor, false)?;
    Ok(StateOption { probe, limit, name, lifetime: None, tracking: Tracking::Ipfw })
}

fn limit(cursor: &mut Cursor<'_, '_>, word: &str) -> Parse<Limit> {
    const FIELDS: [&str; 4] = ["src-addr", "src-port", "dst-addr", "dst-port"];
    let mut limit = Limit {
        src_addr: false,
        src_net: None,
        dst_net: None,
        src_port: false,
        dst_addr: false,
        dst_port: false,
        max: Arg::Tablearg,
        per_second: false,
        shared: None,
    };
    let mut any = false;
    while let Some(found) = cursor.peek() {
        if cursor.eat("all") {
            (limit.src_addr, limit.src_port, limit.dst_addr, limit.dst_port) = (true, true, true, true);
            any = true;
            continue;
        }
        let (field, net) = found.split_once('/').map_or((found, None), |(field, net)| (field, Some(net)));
        let nets = match field {
            "src-addr" => Some((&mut limit.src_addr, Some(&mut limit.src_net))),
            "src-port" => Some((&mut limit.src_port, None)),
            "dst-addr" => Some((&mut limit.dst_addr, Some(&mut limit.dst_net))),
            "dst-port" => Some((&mut limit.dst_port, None)),
            _ => None,
        };
        let at = cursor.here();
        match (nets, net) {
            (None, _) => break,
            (Some((true, _)), _) => return Err(Fault::new(at, format!("\"{field}\" twice"))),
            (Some((asked, _)), None) => *asked = true,
            (Some((asked, Some(lengths))), Some(net)) => {
                let read = prefix_lengths(net).ok_or_else(|| {
                    Fault::new(at, format!("{} are no lengths of prefixes", quoted(net)))
                        .hint(format!("{field}/24, or {field}/24/64 for IPv4 and IPv6"))
                })?;
                (*asked, *lengths) = (true, Some(read));
            }
            (Some((_, None)), Some(_)) => {
                return Err(Fault::new(at, format!("a port has no prefix: write \"{field}\"")));
            }
        }
        any = true;
        cursor.take();
    }
    if !any {
        let at = cursor.here();
        let fault = Fault::new(at, format!("\"{word}\" needs one of src-addr, src-port, dst-addr, dst-port"));
        return Err(match cursor.peek() {
            Some(found) => fault.did_you_mean(found, FIELDS),
            None => fault,
        });
    }
    match cursor.peek().and_then(|max| max.strip_suffix("/second")) {
        Some(max) => {
            let at = cursor.here();
            cursor.take();
            // A bucket of nanoseconds cannot tell more apart.
            let most = 1_000_000_000;
            let number = number(max).filter(|max| (1..=most).contains(max));
            limit.max = Arg::Number(number.ok_or_else(|| bad_number(at, max, "rate", 1, most))?);
            limit.per_second = true;
        }
        None => limit.max = arg(cursor, "limit", 1, u32::MAX)?,
    }
    if cursor.eat("shared") {
        let token = cursor.need("the name of the shared limit")?;
        let name = check_name(&token.text, "limit name");
        limit.shared = Some(name.map_err(|message| Fault::new(token.position(), message))?);
    }
    Ok(limit)
}

/// `24`, or `24/64`: bits of IPv4 and of IPv6 addresses. One number is for both.
fn prefix_lengths(text: &str) -> Option<(u8, u8)> {
    let length = |text: &str, most: u8| text.parse().ok().filter(|length| (1..=most).contains(length));
    match text.split_once('/') {
        Some((v4, v6)) => Some((length(v4, 32)?, length(v6, 128)?)),
        None => length(text, 128).map(|both| (both.min(32), both)),
    }
}

fn list(
    cursor: &mut Cursor<'_, '_>,
    what: &str,
    number: impl Fn(&str) -> Option<u16>,
) -> Parse<crate::rules::ports::Ranges> {
    let token = cursor.need(&format!("the {what}"))?;
    Ok(ranges(cursor, token, what, number))
}

fn proto(cursor: &mut Cursor<'_, '_>) -> Parse<Protocol> {
    let token = cursor.need("the protocol")?;
    Protocol::parse(&token.text).ok_or_else(|| {
        Fault::new(token.position(), format!("unknown protocol {}", quoted(&token.text)))
            .did_you_mean(&token.text, Protocol::names())
    })
}

fn option_addresses(cursor: &mut Cursor<'_, '_>, word: &str) -> Parse<Vec<Address>> {
    let at = cursor.here();
    let list = addresses(cursor, "the address")?;
    let six = word.ends_with('6');
    if six && list.iter().any(|a| matches!(a, Address::Net4(_) | Address::Set4(_))) {
        return Err(Fault::new(at, format!("\"{word}\" takes IPv6 addresses")));
    }
    // `src-ip6 any` and `src-ip6 me` mean IPv6 packets.
    let list = list.into_iter().map(|address| match address {
        Address::Any if six => Address::Net6(Net6::prefix(0, 0)),
        Address::Me if six => Address::Me6,
        other => other,
    });
    Ok(list.collect())
}

pub(crate) fn interface(cursor: &mut Cursor<'_, '_>) -> Parse<Interface> {
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
            .hint("a port's name or one of its addresses"));
    }
    Ok(if text.contains(['*', '?', '[']) {
        Interface::Glob(text.into())
    } else {
        Interface::Name(text.into())
    })
}

fn flags(cursor: &mut Cursor<'_, '_>, what: &str, names: &[FlagName]) -> Parse<Flags> {
    let token = cursor.need(&format!("the {what}"))?;
    flag_list(token, what, names)
}

fn flag_list(token: &Token<'_>, what: &str, names: &[FlagName]) -> Parse<Flags> {
    let mut flags = Flags::default();
    for (offset, text) in elements(&token.text) {
        let (not, word) = match text.strip_prefix('!') {
            Some(word) => (true, word),
            None => (false, text),
        };
        let Some((_, bit)) = names.iter().find(|(name, _)| *name == word) else {
            return Err(Fault::new(
                token.position_at(offset),
                format!("{} is no {what}, one of {}", quoted(word), all_names(names)),
            )
            .did_you_mean(word, names.iter().map(|(name, _)| *name)));
        };
        if not { flags.clear |= bit } else { flags.set |= bit }
    }
    if flags.set & flags.clear != 0 {
        return Err(Fault::new(token.position(), format!("one {what} is asked to be both there and not")));
    }
    Ok(flags)
}

fn all_names(names: &[FlagName]) -> String {
    names.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

/// `frag` has an argument only if the next word looks like one.
fn frag(cursor: &mut Cursor<'_, '_>) -> Flags {
    let names = |word: &str| {
        elements(word).all(|(_, e)| FRAG.iter().any(|(name, _)| e.strip_prefix('!').unwrap_or(e) == *name))
    };
    if !cursor.peek().is_some_and(names) {
        return Flags::default();
    }
    let Some(token) = cursor.take() else { return Flags::default() };
    flag_list(token, "fragment flag", FRAG).unwrap_or_else(|fault| {
        cursor.note(fault);
        Flags::default()
    })
}

fn code_points(cursor: &mut Cursor<'_, '_>) -> Parse<u64> {
    let token = cursor.need("the code points")?;
    let mut points = 0;
    for (offset, text) in elements(&token.text) {
        let point = dscp(text).ok_or_else(|| {
            Fault::new(token.position_at(offset), format!("{} is no code point", quoted(text)))
                .did_you_mean(text, DSCP.iter().map(|(name, _)| *name))
        })?;
        points |= 1u64 << point;
    }
    Ok(points)
}

fn numbers(cursor: &mut Cursor<'_, '_>, what: &str, hi: u32, mut each: impl FnMut(u32)) -> Parse<()> {
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

fn icmp_types(cursor: &mut Cursor<'_, '_>) -> Parse<u32> {
    let mut types = 0;
    numbers(cursor, "ICMP type", 31, |n| types |= 1 << n)?;
    Ok(types)
}

fn icmp6_types(cursor: &mut Cursor<'_, '_>) -> Parse<[u64; 4]> {
    let mut types = [0; 4];
    numbers(cursor, "ICMPv6 type", 255, |n| types[n as usize / 64] |= 1 << (n % 64))?;
    Ok(types)
}

fn flow_ids(cursor: &mut Cursor<'_, '_>) -> Parse<Vec<u32>> {
    let mut labels = Vec::new();
    numbers(cursor, "flow label", 0xf_ffff, |n| labels.push(n))?;
    Ok(labels)
}

fn ext6(cursor: &mut Cursor<'_, '_>) -> Parse<u16> {
    let token = cursor.need("the extension headers")?;
    let mut headers = 0;
    for (offset, text) in elements(&token.text) {
        let Some((_, bit)) = EXT6.iter().find(|(name, _)| *name == text) else {
            return Err(Fault::new(
                token.position_at(offset),
                format!("{} is no extension header", quoted(text)),
            )
            .did_you_mean(text, EXT6.iter().map(|(name, _)| *name)));
        };
        headers |= bit;
    }
    Ok(headers)
}

fn mark(cursor: &mut Cursor<'_, '_>) -> Parse<Test> {
    let token = cursor.need("the mark")?;
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
    Ok(Test::Mark { value, mask })
}

/// `lookup KEY[:mask] TABLE`.
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
                .hint("packets belong to no user and no jail here"),
            _ => Fault::new(at, format!("{} is no field to look up", quoted(word)))
                .did_you_mean(word, LOOKUP_KEYS.iter().map(|(name, _)| *name)),
        });
    };
    let mask = match mask {
        None => None,
        Some(text) => Some(lookup_mask(*key, text).ok_or_else(|| {
            Fault::new(token.position_at(word.len() + 1), format!("{} is no mask for {word}", quoted(text)))
        })?),
    };
    let table = cursor.need("the table's name")?;
    let name = match table_ref(&table.text) {
        Some(Ok(reference)) if reference.value.is_none() => Ok(reference.name),
        Some(_) => Err(Fault::new(table.position(), "\"lookup\" takes a table's name")),
        None => table_name(&table.text)
            .map_err(|no| Fault::new(table.position(), format!("{} is {}", quoted(&table.text), no.message))),
    }?;
    Ok(Test::Lookup { key: *key, mask, table: name })
}

/// What stands behind `flow`: `table(NAME)`, `table(NAME,VALUE)`, or the table's name alone.
fn flow(cursor: &mut Cursor<'_, '_>) -> Parse<TableRef> {
    let token = cursor.need("table(NAME)")?;
    let alone = || table_name(&token.text).map(|name| TableRef { name, value: None });
    table_ref(&token.text)
        .unwrap_or_else(alone)
        .map_err(|_| Fault::new(token.position(), "\"flow\" needs table(NAME) or table(NAME,VALUE)"))
}

fn lookup_mask(key: LookupKey, text: &str) -> Option<LookupMask> {
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

fn mac_mask(cursor: &mut Cursor<'_, '_>) -> Parse<MacMask> {
    let token = cursor.need("the Ethernet address")?;
    parse_mac_mask(&token.text).ok_or_else(|| {
        Fault::new(token.position(), format!("{} is no Ethernet address", quoted(&token.text))).hint(
            "MAC takes the destination, then the source: \"any\", an address, address/bits or address&mask",
        )
    })
}

/// `any`, an Ethernet address, with `/bits` or `&mask`.
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

/// Six octets with colons.
pub(crate) fn mac(text: &str) -> Option<[u8; 6]> {
    let mut octets = [0; 6];
    let mut parts = text.split(':');
    for octet in &mut octets {
        let part = parts.next().filter(|part| (1..=2).contains(&part.len()))?;
        *octet = u8::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(octets)
}
