//! RESP 2 and 3 (Redis serialization protocol specification), and Redis' inline commands.
//!
//! A message is a command or a reply with all nested values. A counter replaces a stack: `pending` is the
//! number of values to come; an aggregate of n values removes itself and adds n.
//!
//! `scanned` is the start of the next value, `cb[0]` the searched part of its line, so that only the digits
//! of a line are read twice.
//!
//! Not supported: the streamed strings and aggregates of RESP3 (`$?`, `*?`), which no server sends.

use super::cause::Cause;
use super::counted::{decimal, words};
use super::{State, Step};

/// Maximum line of digits; Redis limits the number to 32 bytes.
const LONGEST_HEAD: usize = 32;
/// PROTO_INLINE_MAX_SIZE of Redis' server.h, for inline commands and other lines.
const LONGEST_LINE: usize = 64 * 1024;
/// proto-max-bulk-len (512 MB) and space for the enclosing values.
const LONGEST: usize = (512 << 20) + LONGEST_LINE;

pub(super) fn step(bytes: &[u8], state: &mut State) -> Step {
    if state.scanned == 0 && state.pending == 0 {
        state.pending = 1;
    }
    loop {
        match value(bytes, state) {
            Ok(()) if state.pending == 0 => return Step::from(state.scanned),
            Ok(()) => {}
            Err(step) => return step,
        }
    }
}

/// An argument of a command: a value of an array of bulk strings, or a word of an inline command.
pub(super) fn argument(message: &[u8], at: usize) -> Option<&[u8]> {
    let (head, mut rest) = split_line(message)?;
    let Some(count) = head.strip_prefix(b"*") else {
        return words(head, b" \t").nth(at).filter(|_| !b"$+-:_,#(=!~>%|".contains(&message[0]));
    };
    if at as u64 >= decimal(count)? {
        return None;
    }
    for _ in 0..at {
        let (length, value) = split_line(rest)?;
        rest = value.get(usize::try_from(decimal(length.strip_prefix(b"$")?)?).ok()? + 2..)?;
    }
    let (length, value) = split_line(rest)?;
    value.get(..usize::try_from(decimal(length.strip_prefix(b"$")?)?).ok()?)
}

/// A line without its end, and what follows it.
fn split_line(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = memchr::memchr(b'\n', bytes)?;
    Some((bytes[..end].strip_suffix(b"\r").unwrap_or(&bytes[..end]), &bytes[end + 1..]))
}

/// Skips one value: advances `scanned` and updates `pending`.
fn value(bytes: &[u8], state: &mut State) -> Result<(), Step> {
    let at = state.scanned;
    let Some(kind) = bytes.get(at) else { return Err(Step::Need(at + 1)) };
    let (end, text) = line(bytes, state, *kind)?;
    let mut next = end;
    let mut inner = 0;
    match kind {
        b'+' | b'-' | b':' | b'_' | b',' | b'#' | b'(' => {}
        b'$' | b'=' | b'!' => {
            if let Some(length) = count(text, LONGEST)? {
                next = end + length + 2;
                match bytes.get(end + length..next) {
                    None => return Err(Step::Need(next)),
                    Some(b"\r\n") => {}
                    Some(_) => return Err(malformed("a bulk string that does not end with CR LF")),
                }
            }
        }
        b'*' | b'~' | b'>' => inner = count(text, usize::MAX)?.unwrap_or(0) as u64,
        b'%' => inner = (count(text, usize::MAX)?.unwrap_or(0) as u64).saturating_mul(2),
        // An attribute precedes its value and belongs to the same message.
        b'|' => inner = (count(text, usize::MAX)?.unwrap_or(0) as u64).saturating_mul(2).saturating_add(1),
        _ => {}
    }
    state.cb[0] = 0;
    state.scanned = next;
    state.pending = (state.pending - 1).saturating_add(inner);
    if next > LONGEST {
        return Err(too_big());
    }
    Ok(())
}

/// The line at the start of a value: its end, and the text after its first byte.
fn line<'a>(bytes: &'a [u8], state: &mut State, kind: u8) -> Result<(usize, &'a [u8]), Step> {
    let at = state.scanned;
    let inline = match kind {
        b'+' | b'-' | b':' | b'_' | b',' | b'#' | b'(' | b'$' | b'=' | b'!' | b'*' | b'~' | b'>' | b'%'
        | b'|' => false,
        // An inline command: printable, and not inside another value.
        b' '..=b'~' | b'\r' | b'\n' if at == 0 => true,
        _ => return Err(malformed("neither a RESP type nor an inline command")),
    };
    let counted = matches!(kind, b'$' | b'=' | b'!' | b'*' | b'~' | b'>' | b'%' | b'|');
    let longest = if counted { LONGEST_HEAD } else { LONGEST_LINE };
    let searched = state.cb[0] as usize;
    let fresh = bytes.get(at + searched..).unwrap_or(&[]);
    let Some(found) = memchr::memchr(b'\n', fresh) else {
        let length = bytes.len() - at;
        if length >= longest {
            return Err(malformed("a RESP line that is too long"));
        }
        state.cb[0] = length as u32;
        return Err(Step::Need(bytes.len() + 1));
    };
    let end = at + searched + found + 1;
    if end - at > longest {
        return Err(malformed("a RESP line that is too long"));
    }
    let line = &bytes[at..end - 1];
    match line.strip_suffix(b"\r") {
        Some(line) => Ok((end, line.get(1..).unwrap_or(&[]))),
        // Redis accepts an inline command that ends with LF only.
        None if inline => Ok((end, &[])),
        None => Err(malformed("a RESP line that ends with LF only")),
    }
}

/// A count of bytes or values; `None` for -1 (RESP2's null).
fn count(text: &[u8], most: usize) -> Result<Option<usize>, Step> {
    if text == b"-1" {
        return Ok(None);
    }
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return Err(malformed(match text {
            b"?" => "a streamed value of RESP3, which is not supported",
            _ => "a RESP count that is not a number",
        }));
    }
    let count = text.iter().try_fold(0usize, |count, digit| {
        count.checked_mul(10)?.checked_add(usize::from(digit - b'0')).filter(|count| *count <= most)
    });
    match count {
        Some(count) => Ok(Some(count)),
        None => Err(too_big()),
    }
}

fn malformed(reason: &'static str) -> Step {
    Step::Error(Cause::malformed(reason))
}

fn too_big() -> Step {
    Step::Error(Cause::TooBig { length: None, max: LONGEST as u64 })
}
