//! Length fields: position, encoding, and meaning.

use super::cause::Cause;

/// A length field and how it gives the length of the message.
///
/// Without `relative` the length is `value * scale + adjust`. With it, this number of bytes follows the
/// field.
#[derive(Debug)]
pub(super) struct Field {
    /// Number of bytes before the field.
    pub(super) offset: usize,
    pub(super) encoding: Encoding,
    pub(super) mask: u64,
    pub(super) shift: u32,
    pub(super) scale: u64,
    pub(super) adjust: i64,
    pub(super) relative: bool,
    /// Limit of the field's value before adjustment (tokio-util's max_frame_length).
    pub(super) max_value: u64,
    pub(super) chain: Chain,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Encoding {
    /// 1 to 8 bytes.
    Fixed { width: usize, big: bool },
    /// Seven bits per byte, least significant first, at most `longest` bytes (DWARF 5, section 7.6; MQTT 5.0,
    /// section 1.5.5).
    Leb128 { longest: usize },
    /// Definite form, short or long (X.690, section 8.1.3).
    Ber,
    /// Decimal digits up to `end`.
    Digits { end: u8 },
}

/// How a part announces another part of the same message.
#[derive(Clone, Copy, Debug)]
pub(super) enum Chain {
    /// A message has one part.
    Single,
    /// Another part follows if the field has this value (MySQL's 0xffffff).
    While(u64),
    /// Another part follows while one of these bits is set.
    More(u64),
    /// Another part follows until one of these bits is set (ONC RPC's last fragment).
    Last(u64),
}

/// Number of digits of the largest 64-bit number.
const MOST_DIGITS: usize = 20;

/// A part of a message.
pub(super) struct Part {
    /// End of its field, from the start of the part.
    pub(super) head: usize,
    /// Announced length including the header.
    pub(super) length: i128,
    /// Another part follows.
    pub(super) more: bool,
}

pub(super) enum Measured {
    Part(Part),
    /// Number of bytes of the part that are needed.
    Need(usize),
    Error(Cause),
}

impl Field {
    /// Reads the field of the part that starts with `bytes`.
    pub(super) fn measure(&self, bytes: &[u8]) -> Measured {
        let field = bytes.get(self.offset..).unwrap_or(&[]);
        let read = match self.encoding {
            Encoding::Fixed { width, big } => fixed(field, width, big),
            Encoding::Leb128 { longest } => leb128(field, longest),
            Encoding::Ber => ber(field),
            Encoding::Digits { end } => digits(field, end),
        };
        let (raw, width) = match read {
            Read::Value(raw, width) => (raw, width),
            Read::Need(need) => return Measured::Need(self.offset + need),
            Read::Bad(reason) => return Measured::Error(Cause::malformed(reason)),
        };
        let value = (raw & self.mask) >> self.shift;
        if value > self.max_value {
            return Measured::Error(Cause::TooBig { length: Some(value), max: self.max_value });
        }
        let head = self.offset + width;
        let counted = i128::from(value) * i128::from(self.scale) + i128::from(self.adjust);
        let length = if self.relative { counted + head as i128 } else { counted };
        let more = match self.chain {
            Chain::Single => false,
            Chain::While(full) => value == full,
            Chain::More(mask) => raw & mask != 0,
            Chain::Last(mask) => raw & mask == 0,
        };
        Measured::Part(Part { head, length, more })
    }
}

enum Read {
    /// Value, and number of bytes of the field.
    Value(u64, usize),
    Need(usize),
    Bad(&'static str),
}

fn fixed(field: &[u8], width: usize, big: bool) -> Read {
    // Fast path: most protocols have this width.
    if width == 4
        && let Some(bytes) = field.first_chunk()
    {
        let value = if big { u32::from_be_bytes(*bytes) } else { u32::from_le_bytes(*bytes) };
        return Read::Value(value.into(), 4);
    }
    let Some(bytes) = field.get(..width) else { return Read::Need(width) };
    let push = |value: u64, byte: &u8| value << 8 | u64::from(*byte);
    let value = if big { bytes.iter().fold(0, push) } else { bytes.iter().rev().fold(0, push) };
    Read::Value(value, width)
}

fn leb128(field: &[u8], longest: usize) -> Read {
    let mut value = 0u64;
    for (at, byte) in field.iter().take(longest).enumerate() {
        let bits = u64::from(byte & 0x7f);
        // Ten bytes have 70 bits; the last one may use only one.
        if at == 9 && bits > 1 {
            return Read::Bad("a variable-length number above 64 bits");
        }
        value |= bits << (7 * at);
        if byte & 0x80 == 0 {
            return Read::Value(value, at + 1);
        }
    }
    if field.len() >= longest {
        return Read::Bad("a variable-length number that does not end");
    }
    Read::Need(field.len() + 1)
}

fn ber(field: &[u8]) -> Read {
    match field.first() {
        None => Read::Need(1),
        Some(short @ 0..=0x7f) => Read::Value(u64::from(*short), 1),
        Some(0x80) => Read::Bad("a BER length in the indefinite form"),
        Some(long @ 0x81..=0x88) => match fixed(&field[1..], usize::from(long & 0x7f), true) {
            Read::Value(value, width) => Read::Value(value, 1 + width),
            Read::Need(need) => Read::Need(1 + need),
            bad @ Read::Bad(_) => bad,
        },
        Some(_) => Read::Bad("a BER length of more than 8 bytes"),
    }
}

fn digits(field: &[u8], end: u8) -> Read {
    let mut value = 0u64;
    for (at, byte) in field.iter().take(MOST_DIGITS + 1).enumerate() {
        if *byte == end && at > 0 {
            return Read::Value(value, at + 1);
        }
        let digit = match byte {
            b'0'..=b'9' => u64::from(byte - b'0'),
            _ => return Read::Bad("a length that is not decimal digits"),
        };
        match value.checked_mul(10).and_then(|value| value.checked_add(digit)) {
            Some(more) => value = more,
            None => return Read::Bad("a decimal length above 64 bits"),
        }
    }
    if field.len() > MOST_DIGITS {
        return Read::Bad("a decimal length of more than 20 digits");
    }
    Read::Need(field.len() + 1)
}
