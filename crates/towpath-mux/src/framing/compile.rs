//! Compiler from clauses to rules: the keys, their values, and valid combinations.
//!
//! A group uses one of three spellings:
//! - Towpath's: `offset length adjust strip max be le`; `adjust` turns the field's value into the length of
//!   the whole message;
//! - Netty's LengthFieldBasedFrameDecoder: `lengthAdjustment` turns it into the number of bytes after the
//!   field;
//! - tokio-util's LengthDelimitedCodec: the frame is that number of bytes after `num_skip`, and
//!   `max_frame_length` limits the field's value.

mod end;

use std::borrow::Cow;

use super::body::{Body, Declared, End, Key, Rule, Strip};
use super::clause::Clause;
use super::error::{Fault, hint};
use super::field::{Encoding, Field};
use super::pattern::Pattern;
use super::value::{MOST_OFFSET, bytes, key, number};

/// Default limit of a message in bytes.
const DEFAULT_MAX: usize = 16 << 20;
/// tokio-util's default limit of the length field's value.
const TOKIO_MAX: u64 = 8 << 20;
const MOST_CASES: usize = 64;
const MOST_DELIMITERS: usize = 8;
const LONGEST_DELIMITER: usize = 64;

const OURS: &[&str] = &[
    "offset", "length", "be", "le", "endian", "adjust", "mask", "shift", "scale", "varint", "ber", "digits",
    "chain", "more", "last", "strip", "trim", "max", "count", "header", "head", "blanks",
];
const NETTY: &[&str] = &[
    "maxFrameLength",
    "lengthFieldOffset",
    "lengthFieldLength",
    "lengthAdjustment",
    "initialBytesToStrip",
    "byteOrder",
    "failFast",
];
const TOKIO: &[&str] = &[
    "length_field_offset",
    "length_field_length",
    "length_field_type",
    "length_adjustment",
    "num_skip",
    "max_frame_length",
    "big_endian",
    "little_endian",
    "native_endian",
];
/// Keys for all spellings.
const NEUTRAL: &[&str] = &["fixed", "delimiter", "giveback", "refuse", "min", "tail", "mark", "key", "body"];
const GROUPS: &[&str] = &["when", "else", "start"];

fn keys() -> impl Iterator<Item = &'static str> {
    [OURS, NETTY, TOKIO, NEUTRAL, GROUPS].into_iter().flatten().copied()
}

#[cfg(test)]
pub(super) fn all_keys() -> impl Iterator<Item = &'static str> {
    keys()
}

pub(super) fn is_key(word: &str) -> bool {
    keys().any(|key| key == word)
}

pub(super) fn declared(clauses: &[Clause]) -> Result<Declared, Fault> {
    let mut start = None;
    let mut rest = Vec::new();
    for clause in clauses {
        if clause.key != "start" {
            rest.push(clause);
        } else if start.is_some() {
            return Err(Fault::new(clause.at, "start is given twice"));
        } else {
            let group = members(clause)?;
            if let Some(inner) = group.iter().find(|inner| inner.key == "start") {
                return Err(Fault::new(inner.at, "start is valid at the top level only, not in a group"));
            }
            start = Some(body(group.iter().collect(), clause.at)?);
        }
    }
    Ok(Declared::new(start, body(rest, 0)?))
}

fn body(clauses: Vec<&Clause>, at: usize) -> Result<Body, Fault> {
    if !clauses.iter().any(|clause| matches!(clause.key.as_str(), "when" | "else")) {
        return Ok(Body::Rule(Terms::collect(&clauses)?.rule(at)?));
    }
    let mut cases = Vec::new();
    let mut otherwise = None;
    for clause in clauses {
        match clause.key.as_str() {
            "when" => {
                let Some(written) = &clause.pattern else {
                    return Err(Fault::new(
                        clause.at,
                        "when needs a pattern of first bytes: when 16 03 (length=2 offset=3)",
                    ));
                };
                if cases.len() == MOST_CASES {
                    return Err(Fault::new(clause.at, format!("at most {MOST_CASES} cases are allowed")));
                }
                let inner = body(members(clause)?.iter().collect(), clause.at)?;
                cases.push((Pattern::parse(written)?, inner));
            }
            "else" if otherwise.is_some() => return Err(Fault::new(clause.at, "else is given twice")),
            "else" => otherwise = Some(Box::new(body(members(clause)?.iter().collect(), clause.at)?)),
            key => {
                let message = format!("{key} next to when and else: put it into the brackets of each case");
                return Err(Fault::new(clause.at, message));
            }
        }
    }
    if cases.is_empty() {
        return Err(Fault::new(at, "else without when"));
    }
    Ok(Body::Choice { cases, otherwise })
}

fn members(clause: &Clause) -> Result<&[Clause], Fault> {
    match &clause.group {
        Some(group) => Ok(group),
        None => {
            Err(Fault::new(clause.at, format!("{} takes clauses in brackets (in TOML: a table)", clause.key)))
        }
    }
}

/// The clauses of a rule by key.
struct Terms<'a> {
    clauses: Vec<&'a Clause>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Spelling {
    Ours,
    Netty,
    Tokio,
}

impl<'a> Terms<'a> {
    fn collect(clauses: &[&'a Clause]) -> Result<Self, Fault> {
        let mut seen: Vec<&'a Clause> = Vec::with_capacity(clauses.len());
        for clause in clauses {
            let key = clause.key.as_str();
            if key == "start" {
                return Err(Fault::new(clause.at, "start is valid at the top level only, not in a group"));
            }
            if key == "body" {
                return Err(Fault::new(
                    clause.at,
                    "body applies to the whole framing: write it outside of the brackets",
                ));
            }
            if !is_key(key) {
                return Err(Fault::new(clause.at, format!("unknown key {key:?}{}", hint(key, keys()))));
            }
            if !matches!(key, "delimiter" | "header") && seen.iter().any(|other| other.key == key) {
                return Err(Fault::new(clause.at, format!("{key} is given twice")));
            }
            seen.push(clause);
        }
        Ok(Self { clauses: seen })
    }

    fn get(&self, key: &str) -> Option<&'a Clause> {
        self.clauses.iter().find(|clause| clause.key == key).copied()
    }

    /// The first clause with one of `keys`.
    fn any(&self, keys: &[&str]) -> Option<&'a Clause> {
        self.clauses.iter().find(|clause| keys.contains(&clause.key.as_str())).copied()
    }

    fn spelling(&self) -> Result<Spelling, Fault> {
        let used = [(OURS, Spelling::Ours), (NETTY, Spelling::Netty), (TOKIO, Spelling::Tokio)]
            .map(|(keys, spelling)| self.any(keys).map(|clause| (clause, spelling)));
        let mut used = used.into_iter().flatten();
        let Some((first, spelling)) = used.next() else { return Ok(Spelling::Ours) };
        match used.next() {
            None => Ok(spelling),
            Some((second, _)) => Err(Fault::new(
                second.at,
                format!(
                    "{} and {} belong to different spellings (Towpath, Netty, tokio-util): use one",
                    first.key, second.key
                ),
            )),
        }
    }

    fn rule(&self, at: usize) -> Result<Rule, Fault> {
        let spelling = self.spelling()?;
        let max = match spelling {
            Spelling::Ours => self.size("max")?.unwrap_or(DEFAULT_MAX),
            Spelling::Netty => self.size("maxFrameLength")?.unwrap_or(DEFAULT_MAX),
            // Limits the field, not the message.
            Spelling::Tokio => isize::MAX as usize,
        };
        let end = self.end(spelling, at)?;
        let rule = Rule {
            min: self.size("min")?.unwrap_or(1).max(1),
            max,
            strip: self.strip(spelling, &end)?,
            trim: self.bounded("trim", MOST_OFFSET)?.unwrap_or(0),
            tail: match self.get("tail") {
                Some(clause) => bytes(clause)?,
                None => Vec::new(),
            },
            mark: self.number("mark")?.map_or(Ok(0), |(value, at)| {
                u32::try_from(value).map_err(|_| Fault::new(at, "mark must be a 32-bit number"))
            })?,
            key: self.key(&end)?,
            blanks: match self.get("blanks") {
                Some(clause) => bytes(clause)?.into(),
                None => Cow::Borrowed(b" "),
            },
            end,
        };
        match (&rule.end, self.get("min").or(self.get("max"))) {
            (End::Fixed(length), Some(clause)) if *length < rule.min || *length > rule.max => {
                Err(Fault::new(clause.at, "fixed is outside min and max"))
            }
            (_, Some(clause)) if rule.min > rule.max => {
                Err(Fault::new(clause.at, format!("min, {}, is above max, {}", rule.min, rule.max)))
            }
            _ => Ok(rule),
        }
    }

    fn key(&self, end: &End) -> Result<Option<Key>, Fault> {
        let Some(clause) = self.get("key") else { return Ok(None) };
        match key(clause)? {
            Key::Word(_) if !matches!(end, End::Until(_) | End::Counted(_)) => Err(Fault::new(
                clause.at,
                "a word as the key needs a delimiter; write offset:length: key=8:4",
            )),
            key => Ok(Some(key)),
        }
    }

    fn strip(&self, spelling: Spelling, end: &End) -> Result<Strip, Fault> {
        let Some(clause) = self.get("strip") else {
            let bytes = match (spelling, end) {
                (Spelling::Netty, _) => self.bounded("initialBytesToStrip", MOST_OFFSET)?.unwrap_or(0),
                (
                    Spelling::Tokio,
                    End::Length(Field { offset, encoding: Encoding::Fixed { width, .. }, .. }),
                ) => self.bounded("num_skip", MOST_OFFSET)?.unwrap_or(offset + width),
                _ => 0,
            };
            return Ok(Strip::Bytes(bytes));
        };
        match (clause.value.as_ref().map_or("", |value| value.text.as_str()), end) {
            ("head", End::Length(_) | End::Counted(_)) => Ok(Strip::Head),
            ("delimiter", End::Until(_)) => Ok(Strip::Delimiter),
            ("head" | "delimiter", _) => Err(Fault::new(
                clause.at,
                "strip=head needs a length field or a count, strip=delimiter a delimiter",
            )),
            _ => Ok(Strip::Bytes(self.bounded("strip", MOST_OFFSET)?.unwrap_or(0))),
        }
    }

    fn size(&self, key: &str) -> Result<Option<usize>, Fault> {
        self.bounded(key, isize::MAX as usize)
    }

    fn bounded(&self, key: &str, most: usize) -> Result<Option<usize>, Fault> {
        match self.number(key)? {
            None => Ok(None),
            Some((value, at)) => match usize::try_from(value) {
                Ok(value) if value <= most => Ok(Some(value)),
                _ => Err(Fault::new(at, format!("{key} must be 0 to {most}"))),
            },
        }
    }

    fn ranged(&self, key: &str, least: i128, most: i128) -> Result<Option<i128>, Fault> {
        match self.number(key)? {
            Some((value, at)) if value < least || value > most => {
                Err(Fault::new(at, format!("{key} must be {least} to {most}")))
            }
            value => Ok(value.map(|(value, _)| value)),
        }
    }

    /// The number of a key and its offset in the text.
    fn number(&self, key: &str) -> Result<Option<(i128, usize)>, Fault> {
        match self.get(key).map(|clause| (clause, &clause.value)) {
            None => Ok(None),
            Some((_, Some(value))) => Ok(Some((number(value)?, value.at))),
            Some((_, None)) if key == "varint" => Ok(None),
            Some((clause, None)) => Err(Fault::new(clause.at, format!("{key} needs a number: {key}=4"))),
        }
    }
}
