//! Values of clauses: numbers, bytes, keys.

use super::body::Key;
use super::clause::{Clause, Scalar};
use super::error::Fault;

/// Maximum offset of a length field and of a key.
pub(super) const MOST_OFFSET: usize = 1 << 16;
/// Maximum number of a word.
pub(super) const MOST_WORD: usize = 255;

/// `16`, `-4`, `0x7fff`, `1_000`, `64K`, `16M`, `1G` (powers of 1024).
pub(super) fn number(value: &Scalar) -> Result<i128, Fault> {
    let fault = || {
        Fault::new(value.at, format!("{:?} is not a number: write 4, -4, 0x7fff, 64K, 16M or 1G", value.text))
    };
    let (sign, digits) = match value.text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, value.text.strip_prefix('+').unwrap_or(&value.text)),
    };
    let digits = digits.replace('_', "");
    let magnitude = if let Some(hex) = digits.strip_prefix("0x") {
        u64::from_str_radix(hex, 16).map_err(|_| fault())?
    } else {
        let (digits, unit) = match digits.strip_suffix(['K', 'k', 'M', 'm', 'G', 'g']) {
            Some(rest) => match digits.as_bytes().last() {
                Some(b'K' | b'k') => (rest, 1 << 10),
                Some(b'M' | b'm') => (rest, 1 << 20),
                _ => (rest, 1u64 << 30),
            },
            None => (digits.as_str(), 1),
        };
        let count = digits.parse::<u64>().map_err(|_| fault())?;
        count.checked_mul(unit).ok_or_else(fault)?
    };
    Ok(sign * i128::from(magnitude))
}

/// Bytes in hex, such as `0x0d0a`, or text.
pub(super) fn bytes(clause: &Clause) -> Result<Vec<u8>, Fault> {
    let Some(value) = &clause.value else {
        let key = &clause.key;
        return Err(Fault::new(clause.at, format!("{key} needs bytes: {key}=\"\\r\\n\" or {key}=0x0d0a")));
    };
    let Some(hex) = value.text.strip_prefix("0x") else { return Ok(value.text.clone().into_bytes()) };
    let fault =
        || Fault::new(value.at, format!("{:?} is not a sequence of hex bytes such as 0x0d0a", value.text));
    if !hex.is_ascii() || hex.len() % 2 != 0 || hex.is_empty() {
        return Err(fault());
    }
    (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).map_err(|_| fault()))
        .collect()
}

/// `key=OFFSET:LENGTH` or `key=WORD`.
pub(super) fn key(clause: &Clause) -> Result<Key, Fault> {
    let read = || {
        let text = &clause.value.as_ref()?.text;
        let Some((offset, length)) = text.split_once(':') else {
            return text.parse().ok().filter(|word| *word <= MOST_WORD).map(Key::Word);
        };
        let (offset, length) = (offset.parse().ok()?, length.parse().ok()?);
        (offset <= MOST_OFFSET && (1..=MOST_OFFSET).contains(&length)).then_some(Key::Bytes(offset, length))
    };
    let at = clause.value.as_ref().map_or(clause.at, |value| value.at);
    let message = "key must be offset:length of the key bytes, or the number of a word: key=8:4, key=1";
    read().ok_or_else(|| Fault::new(at, message))
}
