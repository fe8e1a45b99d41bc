//! Compiler from clauses to rules: the keys, their values, and valid combinations.
//!
//! A group uses one of three spellings:
//! - Towpath's: `offset length adjust strip max be le`; `adjust` turns the field's value into the length of
//!   the whole message;
//! - Netty's LengthFieldBasedFrameDecoder: `lengthAdjustment` turns it into the number of bytes after the
//!   field;
//! - tokio-util's LengthDelimitedCodec: the frame is that number of bytes after `num_skip`, and
//!   `max_frame_length` limits the field's value.

use super::body::{Body, Declared, End, Rule, Strip};
use super::clause::Clause;
use super::delimiter::Delimiters;
use super::error::{Fault, hint};
use super::field::{Chain, Encoding, Field};
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
    "chain", "more", "last", "strip", "trim", "max",
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
const NEUTRAL: &[&str] = &["fixed", "delimiter", "giveback", "refuse", "min", "tail", "mark", "key"];
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
            if !is_key(key) {
                return Err(Fault::new(clause.at, format!("unknown key {key:?}{}", hint(key, keys()))));
            }
            if key != "delimiter" && seen.iter().any(|other| other.key == key) {
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
            key: self.get("key").map(key).transpose()?,
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

    /// The key that gives the end of a message.
    fn end(&self, spelling: Spelling, at: usize) -> Result<End, Fault> {
        const ENDS: &[&str] = &[
            "length",
            "varint",
            "ber",
            "digits",
            "fixed",
            "delimiter",
            "giveback",
            "refuse",
            "lengthFieldLength",
        ];
        let mut ends = self.clauses.iter().filter(|clause| ENDS.contains(&clause.key.as_str()));
        let Some(end) = ends.next() else {
            // tokio-util's codec has a default for each key.
            if spelling == Spelling::Tokio {
                return self.tokio();
            }
            return Err(Fault::new(
                at,
                "no key gives the end of a message: use length, varint, ber, digits, delimiter or fixed",
            ));
        };
        if let Some(second) = ends.find(|second| second.key != end.key || second.key != "delimiter") {
            return Err(Fault::new(
                second.at,
                format!("{} and {} both give the end of a message: use one", end.key, second.key),
            ));
        }
        let only_lengths =
            ["offset", "be", "le", "endian", "adjust", "mask", "shift", "scale", "chain", "more", "last"];
        match end.key.as_str() {
            "length" | "varint" | "ber" | "digits" => return self.ours(end),
            "lengthFieldLength" => return self.netty(),
            _ => {}
        }
        if let Some(clause) = self.any(&only_lengths).or(self.any(NETTY)).or(self.any(TOKIO)) {
            return Err(Fault::new(
                clause.at,
                format!("{} needs a length field and cannot be used with {}", clause.key, end.key),
            ));
        }
        Ok(match end.key.as_str() {
            "fixed" => match self.size("fixed")? {
                Some(0) | None => {
                    return Err(Fault::new(end.at, "fixed must be at least 1: fixed=24"));
                }
                Some(length) => End::Fixed(length),
            },
            "delimiter" => End::Until(self.delimiters()?),
            "giveback" => End::GiveBack,
            _ => End::Refuse(end.value.as_ref().map_or("refused", |reason| reason.text.as_str()).into()),
        })
    }

    fn ours(&self, end: &Clause) -> Result<End, Fault> {
        let encoding = match end.key.as_str() {
            "length" => Encoding::Fixed { width: self.width("length")?, big: self.big_endian()? },
            "varint" => Encoding::Leb128 {
                longest: match self.number("varint")? {
                    None => 10,
                    Some((longest @ 1..=10, _)) => longest as usize,
                    Some((_, at)) => return Err(Fault::new(at, "varint must be 1 to 10 bytes")),
                },
            },
            "ber" => Encoding::Ber,
            _ => match (bytes(end)?.as_slice(), end.at) {
                ([byte], _) if !byte.is_ascii_digit() => Encoding::Digits { end: *byte },
                (_, at) => return Err(Fault::new(at, "digits needs the byte that ends them: digits=\":\"")),
            },
        };
        let fixed = matches!(encoding, Encoding::Fixed { .. });
        if let Some(clause) = self.any(&["be", "le", "endian", "mask", "more", "last"]).filter(|_| !fixed) {
            return Err(Fault::new(
                clause.at,
                format!("{} needs length and cannot be used with {}", clause.key, end.key),
            ));
        }
        let number = |key: &str, least: i128, most: i128| match self.number(key)? {
            Some((value, at)) if value < least || value > most => {
                Err(Fault::new(at, format!("{key} must be {least} to {most}")))
            }
            value => Ok(value.map(|(value, _)| value)),
        };
        let bits = |key: &str| Ok(number(key, 0, i128::from(u64::MAX))?.map(|value| value as u64));
        Ok(End::Length(Field {
            offset: self.bounded("offset", MOST_OFFSET)?.unwrap_or(0),
            encoding,
            mask: bits("mask")?.unwrap_or(u64::MAX),
            shift: number("shift", 0, 63)?.unwrap_or(0) as u32,
            scale: number("scale", 1, 1 << 20)?.unwrap_or(1) as u64,
            adjust: number("adjust", -(1 << 40), 1 << 40)?.unwrap_or(0) as i64,
            relative: !fixed,
            max_value: u64::MAX,
            chain: match (bits("chain")?, bits("more")?, bits("last")?) {
                (None, None, None) => Chain::Single,
                (Some(value), None, None) => Chain::While(value),
                (None, Some(mask), None) => Chain::More(mask),
                (None, None, Some(mask)) => Chain::Last(mask),
                _ => {
                    return Err(Fault::new(end.at, "chain, more and last exclude each other: use one"));
                }
            },
        }))
    }

    fn netty(&self) -> Result<End, Fault> {
        let big = match self.get("byteOrder") {
            None => true,
            Some(clause) => match clause.value.as_ref().map_or("", |value| value.text.as_str()) {
                "BIG_ENDIAN" => true,
                "LITTLE_ENDIAN" => false,
                _ => return Err(Fault::new(clause.at, "byteOrder must be BIG_ENDIAN or LITTLE_ENDIAN")),
            },
        };
        // A frame that is too long always fails at once.
        if let Some(clause) = self.get("failFast")
            && !matches!(clause.value.as_ref().map_or("true", |value| value.text.as_str()), "true" | "false")
        {
            return Err(Fault::new(clause.at, "failFast must be true or false"));
        }
        let width = self.width("lengthFieldLength")?;
        let offset = self.bounded("lengthFieldOffset", MOST_OFFSET)?.unwrap_or(0);
        let adjust = self.adjustment("lengthAdjustment")?;
        Ok(plain(offset, width, big, adjust + (offset + width) as i64, u64::MAX))
    }

    fn tokio(&self) -> Result<End, Fault> {
        let orders = ["big_endian", "little_endian", "native_endian"].map(|key| self.get(key));
        let mut orders = orders.into_iter().flatten();
        let big = match (orders.next(), orders.next()) {
            (Some(_), Some(second)) => return Err(Fault::new(second.at, "the byte order is given twice")),
            (Some(order), None) if order.key == "native_endian" => cfg!(target_endian = "big"),
            (order, _) => order.is_none_or(|order| order.key == "big_endian"),
        };
        let width = match (self.get("length_field_length"), self.get("length_field_type")) {
            (Some(_), Some(second)) => {
                return Err(Fault::new(second.at, "the width of the length field is given twice"));
            }
            (Some(_), None) => self.width("length_field_length")?,
            (None, Some(of)) => match of.value.as_ref().map_or("", |value| value.text.as_str()) {
                "u8" => 1,
                "u16" => 2,
                "u32" => 4,
                "u64" => 8,
                _ => return Err(Fault::new(of.at, "length_field_type must be u8, u16, u32 or u64")),
            },
            (None, None) => 4,
        };
        let offset = self.bounded("length_field_offset", MOST_OFFSET)?.unwrap_or(0);
        let skip = self.bounded("num_skip", MOST_OFFSET)?.unwrap_or(offset + width);
        let adjust = self.adjustment("length_adjustment")? + skip as i64;
        let max = self.size("max_frame_length")?.map_or(TOKIO_MAX, |max| max as u64);
        Ok(plain(offset, width, big, adjust, max))
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
            ("head", End::Length(_)) => Ok(Strip::Head),
            ("delimiter", End::Until(_)) => Ok(Strip::Delimiter),
            ("head" | "delimiter", _) => {
                Err(Fault::new(clause.at, "strip=head needs a length field, strip=delimiter a delimiter"))
            }
            _ => Ok(Strip::Bytes(self.bounded("strip", MOST_OFFSET)?.unwrap_or(0))),
        }
    }

    fn delimiters(&self) -> Result<Delimiters, Fault> {
        let mut delimiters = Vec::new();
        let mut at = 0;
        for clause in self.clauses.iter().filter(|clause| clause.key == "delimiter") {
            at = clause.at;
            let delimiter = bytes(clause)?;
            if delimiter.is_empty() || delimiter.len() > LONGEST_DELIMITER {
                return Err(Fault::new(
                    at,
                    format!("a delimiter must have 1 to {LONGEST_DELIMITER} bytes: delimiter=\"\\r\\n\""),
                ));
            }
            delimiters.push(delimiter);
        }
        if delimiters.len() > MOST_DELIMITERS {
            return Err(Fault::new(at, format!("at most {MOST_DELIMITERS} delimiters are allowed")));
        }
        Delimiters::new(delimiters)
            .ok_or_else(|| Fault::new(at, "delimiters must not end in more than three different bytes"))
    }

    fn big_endian(&self) -> Result<bool, Fault> {
        let named = match self.get("endian") {
            None => None,
            Some(clause) => match clause.value.as_ref().map_or("", |value| value.text.as_str()) {
                "big" => Some((clause, true)),
                "little" => Some((clause, false)),
                _ => return Err(Fault::new(clause.at, "endian must be big or little")),
            },
        };
        let flags = [
            self.get("be").map(|clause| (clause, true)),
            self.get("le").map(|clause| (clause, false)),
            named,
        ];
        let mut given = flags.into_iter().flatten();
        let first = given.next();
        match given.next() {
            Some((second, _)) => Err(Fault::new(second.at, "the byte order is given twice")),
            None => Ok(first.is_none_or(|(_, big)| big)),
        }
    }

    fn width(&self, key: &str) -> Result<usize, Fault> {
        match self.number(key)? {
            Some((width @ 1..=8, _)) => Ok(width as usize),
            Some((width, at)) => Err(Fault::new(at, format!("{key} must be 1 to 8 bytes wide, not {width}"))),
            None => Err(Fault::new(
                self.get(key).map_or(0, |clause| clause.at),
                format!("{key} needs a width: {key}=4"),
            )),
        }
    }

    fn adjustment(&self, key: &str) -> Result<i64, Fault> {
        match self.number(key)? {
            None => Ok(0),
            Some((value, at)) => i32::try_from(value)
                .map(i64::from)
                .map_err(|_| Fault::new(at, format!("{key} must be a 32-bit number"))),
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

/// A length field without masks, scales and chains.
fn plain(offset: usize, width: usize, big: bool, adjust: i64, max_value: u64) -> End {
    End::Length(Field {
        offset,
        encoding: Encoding::Fixed { width, big },
        mask: u64::MAX,
        shift: 0,
        scale: 1,
        adjust,
        relative: false,
        max_value,
        chain: Chain::Single,
    })
}
