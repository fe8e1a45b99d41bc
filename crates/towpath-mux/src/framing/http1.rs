//! HTTP/1.0 and HTTP/1.1 messages (RFC 9112): a head of lines, and a body by Content-Length or in chunks.
//!
//! A message that two parsers could end in different places is refused (RFC 9112, sections 2.2, 5, 6 and 11):
//! bare CR or LF, folded lines, blanks around a field's name, both Content-Length and Transfer-Encoding,
//! lengths that differ, and transfer codings other than `chunked` alone.
//!
//! A direction is framed alone. Therefore
//! - a response ends by its own head. The response to HEAD has no body, and a head that may announce one; it
//!   cannot be framed;
//! - after CONNECT, an upgrade, or a response whose body ends with the connection, everything that follows is
//!   raw: each arrival is a message with the mark [`RAW`].
//!
//! `pending` is the part of the message, `scanned` the end of the searched head, the start of the next chunk, or in a chunk its end.
//!
//! With `body=stream`, the bytes before `scanned` (in a chunk: before its CR LF) may leave before the message ends ([`known`], [`pass`]).

use super::cause::Cause;
use super::counted::decimal;
use super::{Message, State, Step};

/// Mark of bytes after the connection left HTTP.
pub(super) const RAW: u32 = 1;
/// Limits of a head, of a trailer section, and of the line before a chunk, in bytes.
const LONGEST_HEAD: usize = 64 << 10;
const LONGEST_CHUNK_LINE: usize = 4096;
/// Limit of a body, so that lengths do not overflow.
const LONGEST: u64 = 1 << 40;

/// `pending`: in the head, before a chunk, in a chunk, in the trailers.
const HEAD: u64 = 0;
const CHUNKS: u64 = 1;
const TRAILERS: u64 = 2;
const DATA: u64 = 3;
/// `cb[0]`: nothing, the connection leaves HTTP after this message, everything is raw.
const LEAVES: u32 = 1;
const LEFT: u32 = 2;
/// `cb[1]`: length of the trailers that was searched.
const SEARCHED: usize = 1;
/// `cb[2]`: the peer may wait for `100 Continue` before it sends the body of this message.
const EXPECTS: usize = 2;

pub(super) fn step(bytes: &[u8], state: &mut State) -> Step {
    if state.cb[0] == LEFT {
        return Step::Message(Message { mark: RAW, ..Message::of(bytes.len()) });
    }
    let result = loop {
        let end = match state.pending {
            HEAD => head(bytes, state),
            CHUNKS => chunk(bytes, state),
            DATA => data(bytes, state),
            _ => trailers(bytes, state),
        };
        match end {
            Ok(None) => {}
            Ok(Some(length)) => break Ok(length),
            Err(step) => break Err(step),
        }
    };
    match result {
        Ok(length) => {
            state.cb[0] = if state.cb[0] == LEAVES { LEFT } else { 0 };
            // An empty line before a request is ignored (RFC 9112, section 2.2).
            let skip = blank(bytes);
            Step::Message(Message { skip, ..Message::of(length) })
        }
        Err(step) => step,
    }
}

/// The head. Returns the length of a message without chunks.
fn head(bytes: &[u8], state: &mut State) -> Result<Option<usize>, Step> {
    let start = blank(bytes);
    let end = lines(bytes, start, &mut state.scanned, LONGEST_HEAD)?;
    let parsed = parse(&bytes[start..end])?;
    state.cb[0] = if parsed.leaves { LEAVES } else { 0 };
    state.cb[EXPECTS] = u32::from(parsed.expects);
    if parsed.chunked {
        (state.pending, state.scanned) = (CHUNKS, end);
        return Ok(None);
    }
    match usize::try_from(parsed.length) {
        Ok(length) if parsed.length <= LONGEST => Ok(Some(end + length)),
        _ => Err(Step::Error(Cause::TooBig { length: Some(parsed.length), max: LONGEST })),
    }
}

/// The end of the lines that begin at `start`, after an empty line. `scanned` is the end of the bytes that
/// were searched.
fn lines(bytes: &[u8], start: usize, scanned: &mut usize, longest: usize) -> Result<usize, Step> {
    let mut at = (*scanned).max(start);
    while let Some(byte) = bytes.get(at) {
        if at - start >= longest {
            return Err(Step::Error(Cause::HeadTooBig { max: longest as u64 }));
        }
        let before = if at > start { bytes[at - 1] } else { 0 };
        match (before, byte) {
            (b'\r', b'\n') if at == start + 1 || bytes[..at - 1].ends_with(b"\n") => return Ok(at + 1),
            (b'\r', b'\n') => {}
            (b'\r', _) => return Err(malformed("a CR without LF in the head")),
            (_, b'\n') => return Err(malformed("a LF without CR in the head")),
            (_, b'\t' | b'\r' | b' '..=b'~' | 0x80..) => {}
            _ => return Err(malformed("a control character in the head")),
        }
        at += 1;
    }
    *scanned = at;
    Err(Step::Need(bytes.len() + 1))
}

/// The end of the message that a head announces.
struct Parsed {
    /// Length of the body, if it has no chunks.
    length: u64,
    chunked: bool,
    /// Raw bytes follow the message.
    leaves: bool,
    /// `Expect: 100-continue` (RFC 9110, section 10.1.1).
    expects: bool,
}

/// Parses a head with its empty line.
fn parse(head: &[u8]) -> Result<Parsed, Step> {
    let mut lines = head[..head.len() - 4.min(head.len())].split(|byte| *byte == b'\n');
    let first = lines.next().unwrap_or(&[]);
    let first = Start::parse(first.strip_suffix(b"\r").unwrap_or(first))?;
    let (mut length, mut chunked, mut upgrade, mut connection) = (None, false, false, false);
    let mut expects = false;
    for line in lines {
        let (name, value) = field(line.strip_suffix(b"\r").unwrap_or(line))?;
        if name.eq_ignore_ascii_case(b"content-length") {
            let value = decimal(value).ok_or_else(|| malformed("a Content-Length that is not one number"))?;
            if length.is_some_and(|other| other != value) {
                return Err(malformed("two different values of Content-Length"));
            }
            length = Some(value);
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            if chunked || !value.eq_ignore_ascii_case(b"chunked") {
                return Err(malformed("a Transfer-Encoding other than chunked alone"));
            }
            chunked = true;
        } else if name.eq_ignore_ascii_case(b"expect") {
            expects |= value
                .split(|byte| *byte == b',')
                .any(|option| option.trim_ascii().eq_ignore_ascii_case(b"100-continue"));
        } else if name.eq_ignore_ascii_case(b"upgrade") {
            // The upgrade to HTTP/2 is obsolete (RFC 9113, section 3.1): such a client continues in HTTP/1.1.
            upgrade |= !value.eq_ignore_ascii_case(b"h2c");
        } else if name.eq_ignore_ascii_case(b"connection") {
            connection |= value
                .split(|byte| *byte == b',')
                .any(|option| option.trim_ascii().eq_ignore_ascii_case(b"upgrade"));
        }
    }
    if chunked && length.is_some() {
        return Err(malformed("both Content-Length and Transfer-Encoding"));
    }
    if chunked && first.old {
        return Err(malformed("a Transfer-Encoding in HTTP/1.0"));
    }
    let whole = |leaves| Parsed { length: 0, chunked: false, leaves, expects: false };
    let announced = Parsed { length: length.unwrap_or(0), chunked, leaves: false, expects: false };
    Ok(match first.kind {
        Kind::Connect if chunked || length.is_some_and(|length| length > 0) => {
            return Err(malformed("a CONNECT request with a body"));
        }
        Kind::Connect => whole(true),
        // "A server that receives a 100-continue expectation in an HTTP/1.0 request MUST ignore that expectation."
        Kind::Request => Parsed {
            leaves: upgrade && connection && !first.old,
            expects: expects && !first.old,
            ..announced
        },
        Kind::Status(101) => whole(true),
        Kind::Status(100..=199 | 204 | 304) => whole(false),
        // The body ends with the connection.
        Kind::Status(_) if !chunked && length.is_none() => whole(true),
        Kind::Status(_) => announced,
    })
}

enum Kind {
    Request,
    Connect,
    Status(u16),
}

/// The first line.
struct Start {
    kind: Kind,
    /// HTTP/1.0.
    old: bool,
}

impl Start {
    fn parse(line: &[u8]) -> Result<Self, Step> {
        let mut words = line.split(|byte| *byte == b' ');
        let (first, second) = (words.next().unwrap_or(&[]), words.next().unwrap_or(&[]));
        if first.starts_with(b"HTTP/") {
            let old = version(first)?;
            return match (second, second.iter().all(u8::is_ascii_digit)) {
                (&[a @ b'1'..=b'9', b, c], true) => {
                    let digit = |byte: u8| u16::from(byte - b'0');
                    Ok(Self { kind: Kind::Status(digit(a) * 100 + digit(b) * 10 + digit(c)), old })
                }
                _ => Err(malformed("a status that is not three digits")),
            };
        }
        let (Some(third), None) = (words.next(), words.next()) else {
            return Err(malformed("the first line is not that of an HTTP/1 request or response"));
        };
        if !is_token(first) || second.is_empty() || second.contains(&b'\t') {
            return Err(malformed("the first line is not that of an HTTP/1 request or response"));
        }
        let kind = if first == b"CONNECT" { Kind::Connect } else { Kind::Request };
        Ok(Self { kind, old: version(third)? })
    }
}

/// Returns true for HTTP/1.0.
fn version(word: &[u8]) -> Result<bool, Step> {
    match word {
        b"HTTP/1.1" => Ok(false),
        b"HTTP/1.0" => Ok(true),
        _ => Err(malformed("not HTTP/1.0 or HTTP/1.1")),
    }
}

/// Name and value of a field line. A folded line begins with a blank, which is not part of a name.
fn field(line: &[u8]) -> Result<(&[u8], &[u8]), Step> {
    if matches!(line.first(), Some(b' ' | b'\t')) {
        return Err(malformed("a folded line in the head"));
    }
    match memchr::memchr(b':', line) {
        Some(colon) if is_token(&line[..colon]) => Ok((&line[..colon], line[colon + 1..].trim_ascii())),
        _ => Err(malformed("a line of the head that is no field")),
    }
}

/// A token (RFC 9110, section 5.6.2).
fn is_token(word: &[u8]) -> bool {
    !word.is_empty()
        && word.iter().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte))
}

/// The line before a chunk. `scanned` is its start.
fn chunk(bytes: &[u8], state: &mut State) -> Result<Option<usize>, Step> {
    let start = state.scanned;
    let line = bytes.get(start..).unwrap_or(&[]);
    let Some(end) = memchr::memchr(b'\n', line) else {
        return match line.len() >= LONGEST_CHUNK_LINE {
            true => Err(malformed("the line before a chunk is too long")),
            false => Err(Step::Need(bytes.len().max(start) + 1)),
        };
    };
    if end >= LONGEST_CHUNK_LINE {
        return Err(malformed("the line before a chunk is too long"));
    }
    let Some(text) = line[..end].strip_suffix(b"\r") else {
        return Err(malformed("a LF without CR before a chunk"));
    };
    // Extensions are ignored (RFC 9112, section 7.1.1).
    let digits = text.split(|byte| matches!(byte, b';' | b' ' | b'\t')).next().unwrap_or(&[]);
    let extension = text[digits.len()..].trim_ascii_start();
    if !(extension.is_empty() && digits.len() == text.len() || extension.starts_with(b";"))
        || extension.iter().any(|byte| byte.is_ascii_control() && *byte != b'\t')
    {
        return Err(malformed("a chunk whose size is not a hexadecimal number"));
    }
    let size =
        hexadecimal(digits).ok_or_else(|| malformed("a chunk whose size is not a hexadecimal number"))?;
    let data = start + end + 1;
    if size == 0 {
        (state.pending, state.scanned, state.cb[SEARCHED]) = (TRAILERS, data, 0);
        return Ok(None);
    }
    let next = match usize::try_from(size) {
        Ok(size) if size as u64 <= LONGEST && (data as u64) <= LONGEST => data + size + 2,
        _ => return Err(Step::Error(Cause::TooBig { length: Some(size), max: LONGEST })),
    };
    (state.pending, state.scanned) = (DATA, next);
    Ok(None)
}

/// A chunk. `scanned` is its end.
fn data(bytes: &[u8], state: &mut State) -> Result<Option<usize>, Step> {
    let next = state.scanned;
    match bytes.get(next - 2..next) {
        None => Err(Step::Need(next)),
        Some(b"\r\n") => {
            state.pending = CHUNKS;
            Ok(None)
        }
        Some(_) => Err(malformed("a chunk that does not end with CR LF")),
    }
}

/// Returns how many of the first `held` bytes of a message in chunks the framing need not see again, after [`Step::Need`]. 0 in the head.
pub(super) fn known(held: usize, state: &State) -> usize {
    match state.pending {
        HEAD => 0,
        DATA => held.min(state.scanned - 2),
        _ => state.scanned,
    }
}

/// Updates `state`: the first `count` bytes of the message, at most [`known`], were delivered.
pub(super) const fn pass(count: usize, state: &mut State) {
    state.scanned -= count;
}

/// Returns true if the peer may not send the rest of the message before it has an answer.
pub(super) const fn expects(state: &State) -> bool {
    state.cb[EXPECTS] != 0
}

/// Number of bytes before the request line.
pub(super) fn blank(bytes: &[u8]) -> usize {
    if bytes.starts_with(b"\r\n") { 2 } else { 0 }
}

fn hexadecimal(text: &[u8]) -> Option<u64> {
    // 16 digits fit into 64 bits.
    let text = std::str::from_utf8(text).ok().filter(|text| (1..=16).contains(&text.len()))?;
    text.bytes().all(|byte| byte.is_ascii_hexdigit()).then(|| u64::from_str_radix(text, 16).ok())?
}

/// The trailer section, from `scanned` on. Returns the length of the message.
fn trailers(bytes: &[u8], state: &mut State) -> Result<Option<usize>, Step> {
    let start = state.scanned;
    let mut searched = start + state.cb[SEARCHED] as usize;
    let end = lines(bytes, start, &mut searched, LONGEST_HEAD);
    state.cb[SEARCHED] = (searched - start) as u32;
    let end = end?;
    let section = &bytes[start..end - 2];
    for line in section.strip_suffix(b"\r\n").into_iter().flat_map(|lines| lines.split(|byte| *byte == b'\n'))
    {
        let (name, _) = field(line.strip_suffix(b"\r").unwrap_or(line))?;
        if name.eq_ignore_ascii_case(b"content-length") || name.eq_ignore_ascii_case(b"transfer-encoding") {
            return Err(malformed("a length among the trailers"));
        }
    }
    Ok(Some(end))
}

fn malformed(reason: &'static str) -> Step {
    Step::Error(Cause::malformed(reason))
}
