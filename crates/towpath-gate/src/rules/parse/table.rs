//! Parses `table NAME create|add|delete|...`.

use super::{Builder, LabelValue};
use crate::rules::address::{self, Address, table_name};
use crate::rules::cursor::{Cursor, Parse, elements, number};
use crate::rules::diagnostic::{Fault, Position, quoted};
use crate::rules::option::{code_point, parse_mac_mask};
use crate::rules::protocol::Protocol;
use crate::rules::table::{COLUMNS, Column, FlowFields, FlowKey, Key, Kind, Refused, Table, Value};
use crate::rules::token::{Line, Token};

const COMMANDS: &[&str] = &[
    "add", "atomic", "create", "delete", "destroy", "flush", "load", "lock", "modify", "swap", "unlock",
    "list", "info", "detail", "lookup",
];

/// The commands that `table all` executes for all tables.
const ALL_COMMANDS: &[&str] = &["flush", "destroy", "list", "info", "detail"];

/// Parses and executes a table command. With `quiet` (`-q`), `add` replaces an existing entry, and `delete`
/// ignores a missing one.
pub(super) fn command(builder: &mut Builder, cursor: &mut Cursor<'_, '_>, quiet: bool) -> Parse<()> {
    let token = cursor.need("the table's name")?;
    let at = token.position();
    // A table may have the name `all`: the other commands apply to it.
    if token.text == "all" && cursor.peek().is_none_or(|word| ALL_COMMANDS.contains(&word)) {
        return all(builder, cursor);
    }
    let name = table_name(&token.text)
        .map_err(|no| Fault::new(at, format!("{} is {}", quoted(&token.text), no.message)))?;
    let word = cursor.need("what to do with the table")?;
    let tables = &mut builder.ruleset.tables;
    match &*word.text {
        "create" => {
            let (table, again) = create(cursor)?;
            match (tables.get_mut(&name), again) {
                (None, _) => {
                    tables.insert(name, table);
                }
                (Some(there), Again::Missing) if there.kind() == table.kind() => {}
                (Some(there), Again::OrFlush) if there.kind() == table.kind() => {
                    there.flush();
                    builder.label_values.remove(&name);
                }
                (Some(there), Again::Missing | Again::OrFlush) => {
                    let message =
                        format!("the table {name} already exists, with keys of type {}", there.kind());
                    return Err(Fault::new(at, message));
                }
                (Some(_), Again::Error) => {
                    return Err(Fault::new(at, format!("the table {name} already exists"))
                        .hint("add \"missing\" to keep it, or \"or-flush\" to empty it"));
                }
            }
            Ok(())
        }
        "add" => add(builder, &name, cursor, quiet),
        "atomic" if cursor.eat("add") => add(builder, &name, cursor, quiet),
        "delete" => delete(builder, &name, at, cursor, quiet),
        "destroy" | "flush" => {
            builder.label_values.remove(&name);
            let there = match &*word.text {
                "destroy" => tables.remove(&name).is_some(),
                _ => tables.get_mut(&name).map(Table::flush).is_some(),
            };
            // Not an error, as in ipfw: files that are loaded repeatedly start this way.
            if !there && !quiet {
                builder.warnings.push(Fault::new(at, format!("the table {name} does not exist")));
            }
            cursor.nothing_left("the command")
        }
        "swap" => {
            let other = cursor.need("the other table's name")?;
            let other_name: Box<str> = (&*other.text).into();
            existing(builder, &name, at)?;
            let mut second = std::mem::take(existing(builder, &other_name, other.position())?);
            std::mem::swap(existing(builder, &name, at)?, &mut second);
            *existing(builder, &other_name, other.position())? = second;
            let mut of = |name: &str| builder.label_values.remove(name).unwrap_or_default();
            let (mine, others) = (of(&name), of(&other_name));
            builder.label_values.insert(name, others);
            builder.label_values.insert(other_name, mine);
            cursor.nothing_left("\"swap\"")
        }
        "load" => {
            let file = cursor.need("the file's name")?;
            cursor.nothing_left("the file's name")?;
            load(builder, &name, at, file, quiet)
        }
        "lock" | "unlock" => {
            let locked = word.text == "lock";
            existing(builder, &name, at)?.set_locked(locked);
            cursor.nothing_left("the command")
        }
        "modify" => {
            if !cursor.eat("limit") {
                return Err(Fault::new(cursor.here(), "\"limit\" is missing"));
            }
            let limit = cursor.number("limit", 0, u32::MAX)?;
            existing(builder, &name, at)?.set_limit((limit != 0).then_some(limit as usize));
            cursor.nothing_left("\"modify\"")
        }
        "list" | "info" | "detail" | "lookup" => {
            let message = format!("\"{}\" has no effect: a rule file only changes tables", word.text);
            builder.warnings.push(Fault::new(word.position(), message));
            Ok(())
        }
        other => Err(Fault::new(word.position(), format!("unknown table command {}", quoted(other)))
            .did_you_mean(other, COMMANDS.iter().copied())),
    }
}

fn existing<'b>(builder: &'b mut Builder, name: &str, at: Position) -> Parse<&'b mut Table> {
    // Two lookups, because the borrow checker rejects returning the first borrow here.
    if builder.ruleset.tables.contains_key(name)
        && let Some(table) = builder.ruleset.tables.get_mut(name)
    {
        return Ok(table);
    }
    Err(Fault::new(at, format!("the table {name} does not exist")))
}

/// Replaces the entries of a table by those of a file.
fn load(builder: &mut Builder, name: &str, at: Position, file: &Token<'_>, quiet: bool) -> Parse<()> {
    let table = existing(builder, name, at)?.clone();
    if table.is_locked() {
        return Err(Fault::new(at, format!("the table {name} is locked")).hint("unlock it before \"load\""));
    }
    let path = file.text.trim_matches('"');
    let Some(read) = &builder.read_file else {
        return Err(Fault::new(file.position(), "\"load\" reads a file, which is not possible here")
            .hint("use \"towpath ctl table NAME load FILE\" or a rule file"));
    };
    let text = read(path).map_err(|error| {
        Fault::new(file.position(), format!("the file {} cannot be read: {error}", quoted(path)))
    })?;
    match super::table_file(path, &text, &table, quiet) {
        Ok(table) => {
            builder.label_values.remove(name);
            *existing(builder, name, at)? = table;
        }
        Err(errors) => builder.file_errors.extend(errors),
    }
    Ok(())
}

/// Adds the entry of a line of a file: a key, and a value if there is one.
pub(super) fn file_line(table: &mut Table, line: &Line<'_>, quiet: bool) -> Parse<()> {
    let mut tokens = line.tokens.iter();
    let Some(token) = tokens.next() else { return Ok(()) };
    let key = parse_key(token, table.kind())?;
    let value = match tokens.next() {
        None => Value::default(),
        Some(token) => match parse_value(token, table.columns())? {
            (value, labels) if labels.is_empty() => value,
            _ => {
                let message = format!("the value {} is a label", quoted(&token.text));
                return Err(Fault::new(token.position(), message)
                    .hint("write the rule's number: a file of entries has no labels"));
            }
        },
    };
    if let Some(token) = tokens.next() {
        return Err(Fault::new(
            token.position(),
            format!("unexpected {} after the entry", quoted(&token.text)),
        )
        .hint("write one entry per line: KEY or KEY VALUE"));
    }
    let added = if quiet { table.replace(&key, value) } else { table.add(&key, value) };
    added.map_err(|refused| {
        let fault = Fault::new(token.position(), format!("{}: {refused}", quoted(&token.text)));
        match refused {
            Refused::Exists => fault.hint("with \"-q\" before \"table\" the last entry of a key counts"),
            _ => fault,
        }
    })
}

fn all(builder: &mut Builder, cursor: &mut Cursor<'_, '_>) -> Parse<()> {
    let word = cursor.need("what to do with all tables")?;
    match &*word.text {
        "flush" => {
            builder.ruleset.tables.values_mut().for_each(Table::flush);
            builder.label_values.clear();
        }
        "destroy" => {
            builder.ruleset.tables.clear();
            builder.label_values.clear();
        }
        // They only show something.
        _ => {}
    }
    cursor.nothing_left("the command")
}

/// The effect of `create` on a table that exists.
enum Again {
    Error,
    /// `missing`: keeps the table.
    Missing,
    /// `or-flush`: empties the table.
    OrFlush,
}

fn create(cursor: &mut Cursor<'_, '_>) -> Parse<(Table, Again)> {
    let mut again = Again::Error;
    let mut kind = Kind::Addr;
    let mut columns = vec![Column::Legacy];
    let mut limit = None;
    let mut locked = false;
    while let Some(token) = cursor.take() {
        match &*token.text {
            "type" => kind = table_kind(cursor.need("the table's type")?)?,
            "valtype" => columns = valtype(cursor.need("the value's columns")?)?,
            "limit" => limit = Some(cursor.number("limit", 0, u32::MAX)? as usize),
            "locked" => locked = true,
            // The algorithm is ignored: the storage depends only on the type.
            "algo" => drop(cursor.need("the algorithm")?),
            "missing" => again = Again::Missing,
            "or-flush" => again = Again::OrFlush,
            other => {
                return Err(Fault::new(token.position(), format!("unknown table option {}", quoted(other)))
                    .did_you_mean(
                        other,
                        ["type", "valtype", "limit", "locked", "algo", "missing", "or-flush"],
                    ));
            }
        }
    }
    let mut table = Table::new(kind, columns);
    table.set_limit(limit.filter(|limit| *limit > 0));
    table.set_locked(locked);
    Ok((table, again))
}

fn table_kind(token: &Token<'_>) -> Parse<Kind> {
    let (word, fields) = match token.text.split_once(':') {
        Some((word, fields)) => (word, Some(fields)),
        None => (&*token.text, None),
    };
    match (word, fields) {
        ("addr", _) => Ok(Kind::Addr),
        ("iface", None) => Ok(Kind::Iface),
        ("number", None) => Ok(Kind::Number),
        ("mac", None) => Ok(Kind::Mac),
        ("flow", None) => Ok(Kind::Flow(FlowFields::ALL)),
        ("flow", Some(fields)) => flow_fields(token, fields).map(Kind::Flow),
        _ => Err(Fault::new(token.position(), format!("unknown table type {}", quoted(&token.text)))
            .did_you_mean(word, ["addr", "iface", "number", "flow", "mac"])),
    }
}

fn flow_fields(token: &Token<'_>, text: &str) -> Parse<FlowFields> {
    let mut fields =
        FlowFields { src_ip: false, proto: false, src_port: false, dst_ip: false, dst_port: false };
    for (offset, word) in elements(text) {
        *match word {
            "src-ip" => &mut fields.src_ip,
            "proto" => &mut fields.proto,
            "src-port" => &mut fields.src_port,
            "dst-ip" => &mut fields.dst_ip,
            "dst-port" => &mut fields.dst_port,
            _ => {
                let at = token.position_at(token.text.len() - text.len() + offset);
                return Err(Fault::new(at, format!("{} is not a valid flow field", quoted(word)))
                    .did_you_mean(word, ["src-ip", "proto", "src-port", "dst-ip", "dst-port"]));
            }
        } = true;
    }
    Ok(fields)
}

fn valtype(token: &Token<'_>) -> Parse<Vec<Column>> {
    let mut columns = Vec::new();
    for (offset, word) in elements(&token.text) {
        let Some((_, column)) = COLUMNS.iter().find(|(name, _)| *name == word) else {
            let fault =
                Fault::new(token.position_at(offset), format!("{} is not a valid value type", quoted(word)));
            return Err(match word {
                "fib" | "nat" | "netgraph" => fault.hint("the column is not used"),
                _ => fault.did_you_mean(word, COLUMNS.iter().map(|(name, _)| *name)),
            });
        };
        columns.push(*column);
    }
    // The columns have a fixed order.
    columns.sort_by_key(|column| COLUMNS.iter().position(|(_, other)| other == column));
    columns.dedup();
    if columns.contains(&Column::Legacy) && columns.len() > 1 {
        return Err(Fault::new(
            token.position(),
            "\"legacy\" covers all columns and cannot be combined with others",
        ));
    }
    Ok(columns)
}

fn add(builder: &mut Builder, name: &str, cursor: &mut Cursor<'_, '_>, quiet: bool) -> Parse<()> {
    if cursor.peek().is_none() {
        return Err(Fault::new(cursor.here(), "the entry is missing"));
    }
    if !builder.ruleset.tables.contains_key(name) {
        let kind = cursor.peek().map_or(Kind::Addr, guessed);
        builder.ruleset.tables.insert(name.into(), Table::new(kind, vec![Column::Legacy]));
    }
    while let Some(token) = cursor.take() {
        let Some(table) = builder.ruleset.tables.get_mut(name).filter(|_| !cursor.full()) else { break };
        let columns = table.columns().to_vec();
        let key = parse_key(token, table.kind());
        let value = cursor.take();
        // A bad key is reported once, not again for its value.
        let key = match key {
            Ok(key) => key,
            Err(fault) => {
                cursor.note(fault);
                continue;
            }
        };
        let (value, labels) = match value.map(|token| parse_value(token, &columns)) {
            None => (Value::default(), Vec::new()),
            Some(Ok(parsed)) => parsed,
            Some(Err(fault)) => {
                cursor.note(fault);
                continue;
            }
        };
        let added = if quiet { table.replace(&key, value) } else { table.add(&key, value) };
        if let Err(refused) = added {
            cursor.note(Fault::new(token.position(), format!("{}: {refused}", quoted(&token.text))));
            continue;
        }
        if !labels.is_empty() {
            builder.label_values.entry(name.into()).or_default().insert(key, labels);
        } else if quiet && let Some(of) = builder.label_values.get_mut(name) {
            of.remove(&key);
        }
    }
    Ok(())
}

/// Guesses the type of a table from its first key, as ipfw does. ipfw takes a key with a dot for an address or
/// host name; here a name that ends in a number is a port (em0.100).
fn guessed(key: &str) -> Kind {
    let digit = key.starts_with(|c: char| c.is_ascii_digit());
    let dotted = key.rsplit_once('.').is_some_and(|(_, last)| digit || number(last).is_none());
    if number(key).is_some() {
        Kind::Number
    } else if dotted || key.contains([':', '/']) {
        Kind::Addr
    } else {
        Kind::Iface
    }
}

fn delete(
    builder: &mut Builder,
    name: &str,
    at: Position,
    cursor: &mut Cursor<'_, '_>,
    quiet: bool,
) -> Parse<()> {
    existing(builder, name, at)?;
    if cursor.peek().is_none() {
        return Err(Fault::new(cursor.here(), "the entry is missing"));
    }
    while let Some(token) = cursor.take() {
        if cursor.full() {
            break;
        }
        let Some(table) = builder.ruleset.tables.get_mut(name) else { break };
        let outcome = parse_key(token, table.kind()).map(|key| {
            let deleted = table.delete(&key);
            if let (Ok(true), Some(labels)) = (deleted, builder.label_values.get_mut(name)) {
                labels.remove(&key);
            }
            deleted
        });
        match outcome {
            Err(fault) => cursor.note(fault),
            Ok(Ok(there)) if there || quiet => {}
            Ok(Ok(_)) => {
                cursor.note(Fault::new(
                    token.position(),
                    format!("the entry {} does not exist", quoted(&token.text)),
                ));
            }
            Ok(Err(refused)) => {
                cursor.note(Fault::new(token.position(), format!("{}: {refused}", quoted(&token.text))));
            }
        }
    }
    Ok(())
}

/// Parses a key of this type.
fn parse_key(token: &Token<'_>, kind: Kind) -> Parse<Key> {
    let text = &*token.text;
    let wrong = |what: &str| Fault::new(token.position(), format!("{} is not a valid {what}", quoted(text)));
    match kind {
        Kind::Addr => match address::parse(text) {
            Ok(Address::Net4(net)) => match net.prefix_len() {
                Some(len) => Ok(Key::Net4(net.addr, len)),
                None => Err(wrong("prefix").hint("the mask must be contiguous")),
            },
            Ok(Address::Net6(net)) => match net.prefix_len() {
                Some(len) => Ok(Key::Net6(net.addr, len)),
                None => Err(wrong("prefix").hint("the mask must be contiguous")),
            },
            Err(no) => Err(Fault { hint: no.hint.map(str::to_owned), ..wrong("address or prefix") }),
            Ok(_) => Err(wrong("address or prefix")),
        },
        Kind::Iface => Ok(Key::Iface(text.into())),
        Kind::Number => number(text).map(Key::Number).ok_or_else(|| wrong("number")),
        Kind::Flow(fields) => flow_key(text, fields)
            .map(Key::Flow)
            .ok_or_else(|| wrong("flow").hint(format!("the keys of this table are {fields}"))),
        Kind::Mac => {
            parse_mac_mask(text).and_then(Key::mac).ok_or_else(|| wrong("Ethernet address or prefix"))
        }
    }
}

fn flow_key(text: &str, fields: FlowFields) -> Option<FlowKey> {
    let mut words = text.split(',');
    let mut key = FlowKey::default();
    if fields.src_ip {
        key.src_ip = Some(words.next()?.parse().ok()?);
    }
    if fields.proto {
        key.proto = match Protocol::parse(words.next()?)? {
            Protocol::Number(number) => number,
            _ => return None,
        };
    }
    if fields.src_port {
        key.src_port = crate::rules::ports::port(words.next()?)?;
    }
    if fields.dst_ip {
        key.dst_ip = Some(words.next()?.parse().ok()?);
    }
    if fields.dst_port {
        key.dst_port = crate::rules::ports::port(words.next()?)?;
    }
    words.next().is_none().then_some(key)
}

/// Parses a value. Labels are resolved after the whole file has been read.
fn parse_value(token: &Token<'_>, columns: &[Column]) -> Parse<(Value, Vec<LabelValue>)> {
    let mut value = Value::default();
    let mut labels = Vec::new();
    let mut texts = elements(&token.text);
    for (i, column) in columns.iter().enumerate() {
        let Some((offset, text)) = texts.next() else {
            return Err(Fault::new(
                token.position(),
                format!("the value has fewer than {} columns", columns.len()),
            ));
        };
        let at = token.position_at(offset);
        let wrong = || {
            Fault::new(at, format!("{} is not a valid value", quoted(text)))
                .hint("keys and values alternate; only the last key may have no value")
        };
        let number_of = match (column, text.strip_prefix(':')) {
            (Column::Skipto | Column::Legacy, Some(label)) => {
                let label =
                    super::action::check_name(label, "label").map_err(|message| Fault::new(at, message))?;
                labels.push(LabelValue { column: *column, label, at });
                Some(0)
            }
            (Column::Ipv6, _) => {
                let hop: std::net::Ipv6Addr = text.parse().map_err(|_| wrong())?;
                value.ipv6 = if hop.is_unspecified() { None } else { Some(hop) };
                None
            }
            (Column::Ipv4, _) => Some(text.parse::<std::net::Ipv4Addr>().map_err(|_| wrong())?.to_bits()),
            (Column::Legacy, _) => match (number(text), text.parse::<std::net::IpAddr>()) {
                (Some(number), _) => Some(number),
                (None, Ok(std::net::IpAddr::V4(ip))) => Some(ip.to_bits()),
                (None, Ok(std::net::IpAddr::V6(ip))) => {
                    value.ipv6 = if ip.is_unspecified() { None } else { Some(ip) };
                    None
                }
                (None, Err(_)) => return Err(wrong()),
            },
            // Marks are hexadecimal, with or without 0x.
            (Column::Mark, _) => {
                let digits = text.strip_prefix("0x").or(text.strip_prefix("0X")).unwrap_or(text);
                Some(u32::from_str_radix(digits, 16).map_err(|_| wrong())?)
            }
            (Column::Dscp, _) => Some(code_point(text).ok_or_else(wrong)?.into()),
            _ => Some(number(text).ok_or_else(wrong)?),
        };
        if let Some(number) = number_of {
            value.set(*column, number);
            if i == 0 {
                value.number = number;
            }
        }
    }
    match texts.next() {
        None => Ok((value, labels)),
        Some((offset, _)) => Err(Fault::new(
            token.position_at(offset),
            format!("the value has more than {} columns", columns.len()),
        )),
    }
}
