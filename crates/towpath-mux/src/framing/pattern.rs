//! Patterns for the first bytes of a message, used by `when`.
//!
//! Syntax: `16` a byte, `14-18` a range, `80/80` a value under a mask, `..` any byte, `ff*16` sixteen times,
//! `"GET "` text, `~"get "` text in any case.

use super::clause::Scalar;
use super::error::Fault;
use super::text::unescape;

/// Maximum length. Bounds the comparison per message.
const LONGEST: usize = 64;

/// Bytes in ranges, under masks.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Pattern(Vec<Byte>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Byte {
    mask: u8,
    low: u8,
    high: u8,
}

/// Result of matching.
pub(super) enum Begins {
    Yes,
    No,
    /// Matches so far; one more byte is needed.
    Perhaps,
}

impl Pattern {
    pub(super) fn parse(written: &Scalar) -> Result<Self, Fault> {
        let mut bytes = Vec::new();
        let mut rest = written.text.as_str();
        loop {
            rest = rest.trim_start();
            let at = written.at + (written.text.len() - rest.len());
            let Some(first) = rest.chars().next() else { break };
            let quoted = rest.strip_prefix('~').unwrap_or(rest);
            if let Some(quote @ ('"' | '\'')) = quoted.chars().next() {
                let any_case = first == '~';
                let body = &quoted[1..];
                let Some(end) = closing(body, quote) else {
                    return Err(Fault::new(at, format!("missing closing {quote}")));
                };
                let text = unescape(&body[..end], at + 1 + usize::from(any_case))?;
                bytes.extend(text.bytes().map(|byte| match byte.is_ascii_alphabetic() && any_case {
                    true => Byte { mask: !0x20, low: byte & !0x20, high: byte & !0x20 },
                    false => Byte { mask: 0xff, low: byte, high: byte },
                }));
                rest = &body[end + 1..];
            } else {
                let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
                let (byte, times) = atom(&rest[..end], at)?;
                if times > LONGEST {
                    return Err(Fault::new(at, format!("a pattern has at most {LONGEST} bytes")));
                }
                bytes.extend(std::iter::repeat_n(byte, times));
                rest = &rest[end..];
            }
        }
        match bytes.len() {
            0 => Err(Fault::new(written.at, "missing pattern of first bytes, such as 16 03")),
            1..=LONGEST => Ok(Self(bytes)),
            _ => Err(Fault::new(written.at, format!("a pattern has at most {LONGEST} bytes"))),
        }
    }

    pub(super) fn begins(&self, bytes: &[u8]) -> Begins {
        for (pattern, byte) in self.0.iter().zip(bytes) {
            let byte = byte & pattern.mask;
            if byte < pattern.low || byte > pattern.high {
                return Begins::No;
            }
        }
        if bytes.len() < self.0.len() { Begins::Perhaps } else { Begins::Yes }
    }
}

fn closing(body: &str, quote: char) -> Option<usize> {
    let mut escaped = false;
    for (offset, c) in body.char_indices() {
        if c == quote && !escaped {
            return Some(offset);
        }
        escaped = c == '\\' && !escaped;
    }
    None
}

/// A byte with its repetition.
fn atom(word: &str, at: usize) -> Result<(Byte, usize), Fault> {
    let fault = || {
        Fault::new(
            at,
            format!(
                "{word:?} is not a byte: write 16, 14-18, 80/80 (value/mask), .. (any), ff*16 or \"text\""
            ),
        )
    };
    let (byte, times) = match word.split_once('*') {
        Some((byte, times)) => (byte, times.parse().ok().filter(|times| *times > 0).ok_or_else(fault)?),
        None => (word, 1),
    };
    let hex = |digits: &str| match digits.len() {
        2 => u8::from_str_radix(digits, 16).map_err(|_| fault()),
        _ => Err(fault()),
    };
    let byte = if byte == ".." {
        Byte { mask: 0, low: 0, high: 0 }
    } else if let Some((low, high)) = byte.split_once('-') {
        let (low, high) = (hex(low)?, hex(high)?);
        if low > high {
            return Err(Fault::new(at, format!("{word:?} is an empty range")));
        }
        Byte { mask: 0xff, low, high }
    } else if let Some((value, mask)) = byte.split_once('/') {
        let (value, mask) = (hex(value)?, hex(mask)?);
        if value & !mask != 0 {
            return Err(Fault::new(
                at,
                format!("{word:?} never matches: the value has bits outside the mask"),
            ));
        }
        Byte { mask, low: value, high: value }
    } else {
        let value = hex(byte)?;
        Byte { mask: 0xff, low: value, high: value }
    };
    Ok((byte, times))
}
