//! Parses `pipe N config bw RATE [burst BYTES]`: policers.

use std::collections::BTreeMap;

use crate::rules::cursor::{Cursor, Parse};
use crate::rules::diagnostic::{Fault, quoted};
use crate::rules::ruleset::Pipe;

/// Unsupported options of dummynet pipes.
const NOT_HERE: &[&str] = &[
    "delay", "plr", "mask", "buckets", "queue", "gred", "red", "noerror", "profile", "droptail", "codel",
    "fq_codel",
];

pub(super) fn command(pipes: &mut BTreeMap<u32, Pipe>, cursor: &mut Cursor<'_, '_>) -> Parse<()> {
    if cursor.eat("flush") {
        pipes.clear();
        return cursor.nothing_left("\"pipe flush\"");
    }
    if cursor.eat("delete") {
        pipes.remove(&cursor.number("pipe number", 1, 65535)?);
        return cursor.nothing_left("\"pipe delete\"");
    }
    let number = cursor.number("pipe number", 1, 65535)?;
    if cursor.eat("delete") {
        pipes.remove(&number);
        return cursor.nothing_left("\"pipe delete\"");
    }
    if !cursor.eat("config") {
        return Err(Fault::new(cursor.here(), "\"config\" or \"delete\" is missing"));
    }
    let mut pipe = Pipe { rate: 0, burst: 0 };
    while let Some(token) = cursor.take() {
        match &*token.text {
            "bw" => {
                let token = cursor.need("the bandwidth")?;
                pipe.rate = rate(&token.text).ok_or_else(|| {
                    Fault::new(token.position(), format!("{} is not a valid bandwidth", quoted(&token.text))).hint(
                        "use a number with bit/s, Kbit/s, Mbit/s, Gbit/s, Byte/s, KByte/s, MByte/s or GByte/s",
                    )
                })?;
            }
            "burst" => {
                let token = cursor.need("the burst")?;
                pipe.burst = size(&token.text).ok_or_else(|| {
                    Fault::new(
                        token.position(),
                        format!("{} is not a valid size in bytes", quoted(&token.text)),
                    )
                })?;
            }
            word if NOT_HERE.contains(&word) => {
                return Err(Fault::new(
                    token.position(),
                    format!("\"{word}\" is not supported: a pipe only limits a rate"),
                )
                .hint("use \"bw\" and \"burst\""));
            }
            word => {
                return Err(Fault::new(token.position(), format!("unknown pipe option {}", quoted(word)))
                    .did_you_mean(word, ["bw", "burst"]));
            }
        }
    }
    pipes.insert(number, pipe);
    Ok(())
}

/// Parses `10Mbit/s` as bits per second.
fn rate(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..digits].parse().ok()?;
    let unit = text[digits..].strip_suffix("/s").unwrap_or(&text[digits..]).to_ascii_lowercase();
    let (scale, unit) = match unit.as_bytes().first() {
        Some(b'k') => (1e3, &unit[1..]),
        Some(b'm') => (1e6, &unit[1..]),
        Some(b'g') => (1e9, &unit[1..]),
        _ => (1.0, &unit[..]),
    };
    let bits = match unit {
        "" | "b" | "bit" | "bits" => 1.0,
        "byte" | "bytes" => 8.0,
        _ => return None,
    };
    let rate = number * scale * bits;
    (rate < 1e15).then_some(rate as u64)
}

/// Parses `64K`, `1M` or a number of bytes.
fn size(text: &str) -> Option<u64> {
    let lower = text.to_ascii_lowercase();
    let lower = lower.trim_end_matches("bytes").trim_end_matches("byte").trim_end_matches('b');
    let (digits, scale) = match lower.as_bytes().last() {
        Some(b'k') => (&lower[..lower.len() - 1], 1 << 10),
        Some(b'm') => (&lower[..lower.len() - 1], 1 << 20),
        Some(b'g') => (&lower[..lower.len() - 1], 1 << 30),
        _ => (lower, 1),
    };
    digits.parse::<u64>().ok()?.checked_mul(scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_sizes() {
        let rows = [
            ("10Mbit/s", Some(10_000_000)),
            ("1KByte/s", Some(8000)),
            ("64", Some(64)),
            ("1.5Gbit/s", Some(1_500_000_000)),
            ("x", None),
            ("1foo", None),
        ];
        for (text, expected) in rows {
            assert_eq!(rate(text), expected, "{text}");
        }
        assert_eq!(size("64K"), Some(65536));
        assert_eq!(size("1MB"), Some(1 << 20));
        assert_eq!(size("K"), None);
    }
}
