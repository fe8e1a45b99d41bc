//! Clauses that give the end of a message, in each spelling.

use super::super::body::End;
use super::super::clause::Clause;
use super::super::counted::{Count, Counted, DEFAULT_HEAD};
use super::super::delimiter::Delimiters;
use super::super::error::Fault;
use super::super::field::{Chain, Encoding, Field};
use super::super::value::{MOST_OFFSET, MOST_WORD, bytes};
use super::{LONGEST_DELIMITER, MOST_DELIMITERS, NETTY, Spelling, TOKIO, TOKIO_MAX, Terms};

impl Terms<'_> {
    /// The key that gives the end of a message.
    pub(super) fn end(&self, spelling: Spelling, at: usize) -> Result<End, Fault> {
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
        let counted = ["count", "header", "head"];
        let only_lengths =
            ["offset", "be", "le", "endian", "adjust", "mask", "shift", "scale", "chain", "more", "last"];
        match (end.key.as_str(), self.any(&counted)) {
            ("delimiter", Some(clause)) => return self.counted(clause),
            (key, Some(clause)) => {
                let message = format!("{} needs delimiter and cannot be used with {key}", clause.key);
                return Err(Fault::new(clause.at, message));
            }
            ("length" | "varint" | "ber" | "digits", None) => return self.ours(end),
            ("lengthFieldLength", None) => return self.netty(),
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

    /// A head with a count; `clause` is one of its keys.
    fn counted(&self, clause: &Clause) -> Result<End, Fault> {
        let others = ["offset", "be", "le", "endian", "mask", "shift", "scale", "chain", "more", "last"];
        if let Some(clause) = self.any(&others) {
            let message = format!("{} needs a length field and cannot be used with count", clause.key);
            return Err(Fault::new(clause.at, message));
        }
        let count = match (self.get("count"), self.get("header")) {
            (Some(_), Some(second)) => {
                return Err(Fault::new(second.at, "count and header both give the count: use one"));
            }
            (Some(word), None) => match word.value.as_ref().map_or("", |value| value.text.as_str()) {
                "last" => Count::LastWord,
                text => match text.parse() {
                    Ok(word) if word <= MOST_WORD => Count::Word(word),
                    _ => {
                        let message = format!("count must be a word's number, 0 to {MOST_WORD}, or last");
                        return Err(Fault::new(word.at, message));
                    }
                },
            },
            (None, Some(_)) => Count::Field(self.fields()?),
            (None, None) => return Err(Fault::new(clause.at, "head needs count or header")),
        };
        Ok(End::Counted(Counted {
            delimiters: self.delimiters()?,
            count,
            adjust: self.ranged("adjust", -(1 << 40), 1 << 40)?.unwrap_or(0) as i64,
            head: self.size("head")?.unwrap_or(DEFAULT_HEAD),
        }))
    }

    /// Names of the fields that have the count.
    fn fields(&self) -> Result<Vec<Vec<u8>>, Fault> {
        let names = self.clauses.iter().filter(|clause| clause.key == "header");
        let name = |clause: &&&Clause| {
            let mut name = bytes(clause)?;
            if name.last() == Some(&b':') {
                name.pop();
            }
            match name.iter().all(|byte| byte.is_ascii_graphic() && *byte != b':') && !name.is_empty() {
                true => Ok(name),
                false => Err(Fault::new(clause.at, "header needs a field's name: header=\"Content-Length\"")),
            }
        };
        names.map(|clause| name(&clause)).collect()
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
        let bits = |key: &str| Ok(self.ranged(key, 0, i128::from(u64::MAX))?.map(|value| value as u64));
        Ok(End::Length(Field {
            offset: self.bounded("offset", MOST_OFFSET)?.unwrap_or(0),
            encoding,
            mask: bits("mask")?.unwrap_or(u64::MAX),
            shift: self.ranged("shift", 0, 63)?.unwrap_or(0) as u32,
            scale: self.ranged("scale", 1, 1 << 20)?.unwrap_or(1) as u64,
            adjust: self.ranged("adjust", -(1 << 40), 1 << 40)?.unwrap_or(0) as i64,
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
