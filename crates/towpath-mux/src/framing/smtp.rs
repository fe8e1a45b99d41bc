//! SMTP and LMTP (RFC 5321, RFC 3030, RFC 2033): command lines and mails of a client, replies of a server.
//!
//! The framing sees one direction. A mail follows the command DATA: the worker answers DATA with 354 and
//! refuses a mail, if it must, in the reply to the mail (RFC 2920, section 3.1, has clients expect this). A
//! mail is a message with the mark [`MAIL`]; `BDAT` and its counted bytes are a message with the mark [`CHUNK`].
//!
//! A mail ends with CR LF "." CR LF. Bare CR or LF in a mail are refused (RFC 5321, section 2.3.8): a server that takes
//! LF "." LF for the end would read commands in the rest of the mail (SMTP smuggling).
//!
//! A connection that switches to TLS leaves the mux at its first record ([`Step::GiveBack`]).

use super::cause::Cause;
use super::counted::{decimal, words};
use super::{Message, State, Step};

pub(super) const MAIL: u32 = 1;
pub(super) const CHUNK: u32 = 2;

/// Limit of a command line and of a line of a reply (RFC 4954, section 4: 12,288 bytes for AUTH).
const LONGEST_LINE: usize = 12_288;
/// Limit of the lines of a reply.
const LONGEST_REPLY: usize = 64 << 10;
/// First byte of a TLS handshake record (RFC 8446, 5.1).
const TLS_HANDSHAKE: u8 = 0x16;
/// `cb[0]`: a mail follows.
const DATA: u32 = 1;

pub(super) fn step(bytes: &[u8], state: &mut State) -> Step {
    if state.cb[0] == DATA {
        return mail(bytes, state);
    }
    if bytes.first() == Some(&TLS_HANDSHAKE) {
        return Step::GiveBack;
    }
    // Start of the current line of a reply.
    let mut start = state.pending as usize;
    loop {
        let end = match line(bytes, start, state) {
            Ok(end) => end,
            Err(step) => return step,
        };
        let text = &bytes[start..end];
        if is_reply(text) && text[3] == b'-' {
            if end > LONGEST_REPLY {
                return Step::Error(Cause::HeadTooBig { max: LONGEST_REPLY as u64 });
            }
            (start, state.pending, state.scanned) = (end, end as u64, end);
            continue;
        }
        if start > 0 && !is_reply(text) {
            return malformed("a reply that ends with another line");
        }
        return match start {
            0 => command(text, end, state),
            _ => Step::from(end),
        };
    }
}

/// A line of a reply: three digits, then a blank or "-".
fn is_reply(line: &[u8]) -> bool {
    line.len() > 3 && line[..3].iter().all(u8::is_ascii_digit) && matches!(line[3], b' ' | b'-' | b'\r')
}

/// The end of the line that starts at `start`.
fn line(bytes: &[u8], start: usize, state: &mut State) -> Result<usize, Step> {
    let from = state.scanned.max(start);
    match bytes.get(from..).and_then(|fresh| memchr::memchr(b'\n', fresh)) {
        Some(found) if from + found + 1 - start > LONGEST_LINE => {
            Err(Step::Error(Cause::HeadTooBig { max: LONGEST_LINE as u64 }))
        }
        Some(found) if bytes[..from + found].ends_with(b"\r") => Ok(from + found + 1),
        Some(_) => Err(malformed("a line that ends with LF only")),
        None if bytes.len().saturating_sub(start) >= LONGEST_LINE => {
            Err(Step::Error(Cause::HeadTooBig { max: LONGEST_LINE as u64 }))
        }
        None => {
            state.scanned = bytes.len();
            Err(Step::Need(bytes.len() + 1))
        }
    }
}

fn command(line: &[u8], end: usize, state: &mut State) -> Step {
    if line.contains(&0) {
        return malformed("a command with a NUL");
    }
    let mut words = words(line, b" \t");
    match words.next() {
        Some(word) if word.eq_ignore_ascii_case(b"DATA") && words.next().is_none() => {
            state.cb[0] = DATA;
            Step::from(end)
        }
        Some(word) if word.eq_ignore_ascii_case(b"BDAT") => match words.next().and_then(decimal) {
            Some(count) => match end.checked_add(usize::try_from(count).unwrap_or(usize::MAX)) {
                Some(length) => Step::Message(Message { mark: CHUNK, ..Message::of(length) }),
                None => Step::Error(Cause::TooBig { length: Some(count), max: isize::MAX as u64 }),
            },
            None => malformed("BDAT without a decimal number"),
        },
        _ => Step::from(end),
    }
}

/// A mail. Its end, "." CR LF after a line, is not payload.
fn mail(bytes: &[u8], state: &mut State) -> Step {
    let mut at = state.scanned;
    while let Some(found) = memchr::memchr2(b'\r', b'\n', &bytes[at..]) {
        let newline = at + found;
        match bytes.get(newline..newline + 2) {
            None if bytes[newline] == b'\r' => {
                state.scanned = newline;
                return Step::Need(bytes.len() + 1);
            }
            Some(b"\r\n") => {}
            _ => return malformed("a CR or LF alone in a mail"),
        }
        at = newline + 2;
        // The line that ends here is a dot.
        if bytes[..newline] == b"."[..] || bytes[..newline].ends_with(b"\r\n.") {
            state.cb[0] = 0;
            return Step::Message(Message { trim: 3, mark: MAIL, ..Message::of(at) });
        }
    }
    state.scanned = bytes.len();
    Step::Need(bytes.len() + 1)
}

fn malformed(reason: &'static str) -> Step {
    Step::Error(Cause::malformed(reason))
}
