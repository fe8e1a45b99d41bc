//! Guesses the preset of a stream: tries each preset on both directions and scores the result.
//!
//! A framing that only reads a length fits almost any data for a while, so coverage is not enough. Each
//! preset has a check of its messages: whether their start has what the protocol puts there. The score of a
//! preset for a direction is
//!
//! ```text
//! covered bytes / bytes  x  (0.1 + 0.9 x plausible messages / messages)  x  weight of the evidence
//! ```
//!
//! A single message weighs less than many, and a refused byte halves the score. The score of a stream is the
//! mean of its directions by bytes, reduced if one of them fits much worse.

use towpath_mux::Time;
use towpath_mux::assembler::{Assembler, Event, Limits};
use towpath_mux::framing::{Framing, PRESETS, State};

/// Number of bytes of each direction that are tried.
pub const TRIED: usize = 64 << 10;
/// Number of messages of each direction that are checked.
const LOOKED_AT: usize = 256;
/// Factor of the score if client and server are swapped.
const SWAPPED: f64 = 0.95;
/// Minimum score of a result.
const LEAST: f64 = 0.2;

/// First bytes of a direction.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Bytes from the start, up to [`TRIED`] or the first hole.
    pub bytes: Vec<u8>,
    /// The direction ends with them: an incomplete message counts against a framing.
    pub whole: bool,
    /// The start was not captured.
    pub midstream: bool,
    /// The sample is closed.
    closed: bool,
}

impl Sample {
    /// Appends bytes, as far as there is space.
    pub fn extend(&mut self, bytes: &[u8], midstream: bool) {
        if !self.closed {
            let room = TRIED - self.bytes.len();
            self.bytes.extend_from_slice(&bytes[..bytes.len().min(room)]);
            self.closed = bytes.len() > room;
            self.midstream = midstream;
        }
    }

    /// Closes the sample: at the end of the direction, or at a hole.
    pub fn close(&mut self, end: bool) {
        if !self.closed {
            self.closed = true;
            self.whole = end;
        }
    }
}

/// A preset with its score.
#[derive(Clone, Debug, PartialEq)]
pub struct Guess {
    /// Preset for the client's bytes.
    pub request: &'static str,
    /// Preset for the server's bytes; usually the same.
    pub reply: &'static str,
    /// Fits with client and server swapped.
    pub swapped: bool,
    /// 0 to 1.
    pub score: f64,
    /// Explanation.
    pub reason: String,
}

/// Presets that fit the bytes of client and server, best first.
///
/// # Examples
///
/// ```
/// use towpath::streams::guess::{Sample, guess};
///
/// let mut samples = [Sample::default(), Sample::default()];
/// samples[0].extend(b"*1\r\n$4\r\nPING\r\n", false);
/// samples[1].extend(b"+PONG\r\n", false);
/// assert_eq!(guess(&samples)[0].request, "resp");
/// ```
pub fn guess(samples: &[Sample; 2]) -> Vec<Guess> {
    let mut guesses: Vec<Guess> = PRESETS
        .iter()
        .filter(|preset| preset.name != "postgres-backend")
        .filter_map(|preset| {
            let reply = if preset.name == "postgres-frontend" { "postgres-backend" } else { preset.name };
            let [client, server] = samples;
            let straight = judge(preset.name, reply, [client, server])?;
            let swapped = judge(preset.name, reply, [server, client])?;
            // The direction that was taken for the client's may be the server's.
            Some(if swapped.score * SWAPPED > straight.score {
                Guess { swapped: true, score: swapped.score * SWAPPED, ..swapped }
            } else {
                straight
            })
        })
        .filter(|guess| guess.score >= LEAST)
        .collect();
    guesses.sort_by(|a, b| b.score.total_cmp(&a.score));
    guesses
}

fn judge(request: &'static str, reply: &'static str, samples: [&Sample; 2]) -> Option<Guess> {
    let mut judged = Vec::new();
    for (name, sample, whose) in [(request, samples[0], "client"), (reply, samples[1], "server")] {
        if !sample.bytes.is_empty() {
            judged.push((whose, sample.bytes.len() as f64, attempt(name, sample, whose == "client")));
        }
    }
    let bytes: f64 = judged.iter().map(|(_, bytes, _)| bytes).sum();
    let mean = judged.iter().map(|(_, bytes, attempt)| bytes * attempt.score()).sum::<f64>() / bytes;
    let worst = judged.iter().map(|(_, _, attempt)| attempt.score()).reduce(f64::min)?;
    let reason: Vec<_> = judged.iter().map(|(whose, _, attempt)| attempt.reason(whose)).collect();
    Some(Guess {
        request,
        reply,
        swapped: false,
        score: mean.min(1.5 * worst).max(0.5 * mean) * weight(request),
        reason: reason.join("; "),
    })
}

/// Any text consists of lines, so `line` has a lower weight than another preset that fits equally well.
fn weight(name: &str) -> f64 {
    if name == "line" { 0.8 } else { 1.0 }
}

/// Result of a preset on a direction.
struct Attempt {
    bytes: usize,
    covered: usize,
    messages: usize,
    looked: usize,
    right: usize,
    /// Why it stopped before the end.
    stopped: Option<String>,
    refused: bool,
    /// Bytes after the last message belong to another protocol: encryption started.
    given_back: bool,
}

impl Attempt {
    fn score(&self) -> f64 {
        if self.messages == 0 {
            return 0.0;
        }
        let covered = if self.given_back { 1.0 } else { self.covered as f64 / self.bytes as f64 };
        let right = self.right as f64 / self.looked as f64;
        let evidence = 1.0 - 0.3 / self.messages as f64;
        let refused = if self.refused { 0.5 } else { 1.0 };
        covered * (0.1 + 0.9 * right) * evidence * refused
    }

    fn reason(&self, whose: &str) -> String {
        let mut reason = format!(
            "{whose}: {} messages, {} of {} bytes, {} of {} look right",
            self.messages, self.covered, self.bytes, self.right, self.looked
        );
        if let Some(stopped) = &self.stopped {
            reason.push_str(", ");
            reason.push_str(stopped);
        }
        reason
    }
}

fn attempt(name: &'static str, sample: &Sample, client: bool) -> Attempt {
    let mut attempt = Attempt {
        bytes: sample.bytes.len(),
        covered: 0,
        messages: 0,
        looked: 0,
        right: 0,
        stopped: None,
        refused: false,
        given_back: false,
    };
    let Ok(framing) = Framing::preset(name) else { return attempt };
    let looks_right = look(name);
    let state = State { midstream: sample.midstream, ..State::default() };
    let mut assembler = Assembler::with_state(framing, Limits::default(), state);
    assembler.handle_bytes(&sample.bytes);
    assembler.handle_end();
    while let Some(event) = assembler.poll(Time::default()) {
        match event {
            Event::Message(message) => {
                attempt.messages += 1;
                attempt.covered += message.bytes.len();
                if attempt.looked < LOOKED_AT {
                    attempt.looked += 1;
                    attempt.right += usize::from(looks_right(message.bytes, client));
                }
            }
            Event::Failed(failure) => {
                attempt.stopped = Some(format!("then {failure}"));
                attempt.refused = true;
            }
            Event::GiveBack { offset, .. } => {
                attempt.stopped = Some(format!("given back at byte {offset}"));
                attempt.given_back = true;
            }
            Event::End { inside, .. } if inside > 0 && sample.whole => {
                attempt.stopped = Some(format!("ends {inside} bytes into a message"));
            }
            // The sample was cut, not the stream.
            Event::End { inside, .. } => attempt.covered += if attempt.messages > 0 { inside } else { 0 },
        }
    }
    attempt
}

/// Checks the start of a message; the flag is true for the client's messages.
type Look = fn(&[u8], bool) -> bool;

/// The check for a preset. Presets whose framing checks the start of messages need none.
fn look(name: &str) -> Look {
    match name {
        "dns-tcp" => |m, _| dns(m),
        "kafka" => kafka,
        "thrift-framed" => |m, _| thrift(m),
        "mongodb" => |m, _| {
            matches!(
                be(m, 12, 4).map(|op| (op as u32).swap_bytes()),
                Some(1 | 1000 | 2001..=2007 | 2010..=2013)
            )
        },
        "mqtt" => |m, _| mqtt(m),
        "mysql-packet" => |m, _| m.len() > 4 && m[3] < 64 && m.len() < 1 << 20,
        "http2-frame" => |m, _| http2(m),
        "resp" => resp,
        "websocket" => websocket,
        "line" => |m, _| line(m),
        "memcached-text" => {
            |m, client| first_word(m, if client { MEMCACHED_COMMANDS } else { MEMCACHED_REPLIES })
        }
        "rtp-over-tcp" => |m, _| m.len() >= 10 && m[2] >> 6 == 2,
        "rtsp" => |m, _| m[0] == b'$' || m.windows(5).any(|at| at == b"RTSP/"),
        "smtp" => smtp,
        "diameter" => |m, _| m.len() % 4 == 0 && be(m, 4, 1).is_some_and(|flags| flags & 0x0f == 0),
        "smpp" => |m, _| {
            be(m, 4, 4).is_some_and(|command| matches!(command & 0x7fff_ffff, 0..=9 | 0x15 | 0x21 | 0x0b | 0x102 | 0x103 | 0x111..=0x113))
        },
        "onc-rpc" => {
            |m, _| matches!(be(m, 8, 4), Some(0 | 1)) && m.len() >= 28 || matches!(be(m, 8, 4), Some(1))
        }
        "openwire" => |m, _| {
            m.len() > 5
                && (matches!(m[4], 1..=34 | 50..=70 | 90 | 91 | 100..=115))
                && (m.len() < 12 || m[4] != 1 || &m[5..8] == b"Act")
        },
        "kerberos-tcp" => |m, _| m.len() > 6 && matches!(m[4], 0x6a..=0x7e) && m[5] >= 0x30,
        "cassandra4" => |m, client| m.len() > 4 && cassandra(m) && (m[0] & 0x80 == 0) == client,
        "amqp091" => |m, _| m.starts_with(b"AMQP") || matches!(m[0], 1..=4 | 8),
        "memcached-binary" => {
            |m, client| be(m, 1, 1).is_some_and(|opcode| opcode <= 0x48) && (m[0] == 0x80) == client
        }
        "bgp" => |m, _| matches!(be(m, 18, 1), Some(1..=5)),
        "ldap" => {
            |m, _| m[0] == 0x30 && m[1..].windows(2).take(8).any(|at| at[0] == 0x02 && matches!(at[1], 1..=4))
        }
        "nbss" => |m, _| {
            m.len() == 4 || m.get(5..8).is_some_and(|magic| magic == b"SMB") || matches!(m[0], 0x81..=0x85)
        },
        "tpkt" | "rdp" => |m, _| {
            m[0] != 3
                || m.get(5).is_some_and(|pdu| matches!(pdu & 0xf0, 0x10 | 0x20 | 0x50..=0x80 | 0xc0..=0xf0))
                    && m.get(4).is_some_and(|li| usize::from(*li) < m.len())
        },
        "modbus-tcp" => |m, _| {
            m.len() <= 260
                && be(m, 7, 1).is_some_and(
                    |function| matches!(function & 0x7f, 1..=8 | 11 | 12 | 15..=17 | 20..=24 | 43 | 90),
                )
        },
        "openflow" => |m, _| be(m, 1, 1).is_some_and(|kind| kind <= 35),
        "opcua" => |m, _| {
            [&b"HEL"[..], b"ACK", b"ERR", b"OPN", b"CLO", b"MSG", b"RHE"]
                .iter()
                .any(|kind| m.starts_with(kind))
        },
        "doip" => |m, _| m[0] ^ m[1] == 0xff,
        "syslog" => |m, _| m.contains(&b'<') && m.contains(&b'>'),
        "tls-record" => |m, _| m.len() > 5,
        _ => |_, _| true,
    }
}

/// Text without control characters and without the marks of other presets.
fn line(message: &[u8]) -> bool {
    let text = std::str::from_utf8(message)
        .is_ok_and(|text| !text.trim_end().contains(|c: char| c.is_control() && c != '\t'));
    text && message.len() > 2 && !matches!(message[0], b'*' | b'$')
}

const MEMCACHED_COMMANDS: &[&str] = &[
    "get",
    "gets",
    "gat",
    "gats",
    "set",
    "add",
    "replace",
    "append",
    "prepend",
    "cas",
    "delete",
    "incr",
    "decr",
    "touch",
    "stats",
    "version",
    "quit",
    "flush_all",
    "verbosity",
    "mg",
    "ms",
    "md",
    "ma",
    "mn",
    "me",
];
const MEMCACHED_REPLIES: &[&str] = &[
    "VALUE",
    "END",
    "STORED",
    "NOT_STORED",
    "EXISTS",
    "NOT_FOUND",
    "DELETED",
    "TOUCHED",
    "OK",
    "ERROR",
    "CLIENT_ERROR",
    "SERVER_ERROR",
    "VERSION",
    "STAT",
    "HD",
    "VA",
    "EN",
    "NS",
    "EX",
    "NF",
    "MN",
];
const SMTP_COMMANDS: &[&str] = &[
    "EHLO", "HELO", "LHLO", "MAIL", "RCPT", "DATA", "BDAT", "RSET", "NOOP", "QUIT", "AUTH", "STARTTLS",
    "VRFY", "EXPN", "HELP", "ehlo", "helo", "lhlo", "mail", "rcpt", "data", "rset", "quit",
];

/// The first word of the message is one of these.
fn first_word(message: &[u8], words: &[&str]) -> bool {
    let word = message.split(u8::is_ascii_whitespace).next().unwrap_or(&[]);
    words.iter().any(|known| known.as_bytes() == word)
}

/// A command or a mail; a reply starts with its code.
fn smtp(message: &[u8], client: bool) -> bool {
    match client {
        true => first_word(message, SMTP_COMMANDS) || message.ends_with(b"\r\n.\r\n"),
        false => {
            message.len() > 4
                && message[..3].iter().all(u8::is_ascii_digit)
                && matches!(message[3], b' ' | b'-')
        }
    }
}

/// A RESP type. A client may send an inline command, which starts with its name.
fn resp(message: &[u8], client: bool) -> bool {
    match message[0] {
        b'*' | b'$' | b'+' | b'-' | b':' | b'%' | b'~' | b'>' | b'_' | b'#' | b',' | b'|' => true,
        byte => client && byte.is_ascii_alphabetic() || message == b"\r\n" || message == b"\n",
    }
}

/// Big-endian number of `width` bytes at `at`.
fn be(message: &[u8], at: usize, width: usize) -> Option<u64> {
    let bytes = message.get(at..at + width)?;
    Some(bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

/// Opcode, reserved bit and counts of the header (RFC 1035, 4.1.1).
fn dns(message: &[u8]) -> bool {
    let (Some(flags), Some(questions), Some(answers)) =
        (be(message, 4, 2), be(message, 6, 2), be(message, 8, 2))
    else {
        return false;
    };
    let response = flags & 0x8000 != 0;
    matches!(flags >> 11 & 0xf, 0 | 2 | 4 | 5 | 6)
        && flags & 0x40 == 0
        && questions <= 4
        && (response || answers <= 1)
        && message.len() >= 14 + 5 * questions as usize
}

/// A request starts with an API key and a version, a response with the correlation id of its request.
fn kafka(message: &[u8], client: bool) -> bool {
    if !client {
        // Correlation ids count up from 0 or 1.
        return be(message, 4, 2) == Some(0) && message.len() >= 8 && !thrift(message);
    }
    let (Some(key), Some(version)) = (be(message, 4, 2), be(message, 6, 2)) else { return false };
    // A request names its client: a plausible length, or -1.
    let client =
        be(message, 12, 2).is_some_and(|length| length == 0xffff || 14 + length as usize <= message.len());
    key <= 92 && version <= 20 && client && message.len() >= 14
}

/// Strict binary protocol, compact protocol, or old-style name (Thrift, "Binary protocol encoding").
fn thrift(message: &[u8]) -> bool {
    match message.get(4..8) {
        Some([0x80, 0x01, 0, 1..=4]) => true,
        Some([0x82, kind, ..]) => matches!(kind & 0x1f, 1 | 2),
        Some([0, 0, 0, length]) => {
            let name = message.get(8..8 + usize::from(*length));
            *length > 0
                && name.is_some_and(|name| {
                    name.iter().all(|byte| byte.is_ascii_alphanumeric() || b"_.:".contains(byte))
                })
        }
        _ => false,
    }
}

/// Flags that match the packet type (MQTT 5.0, 2.1.3).
fn mqtt(message: &[u8]) -> bool {
    let flags = message[0] & 0x0f;
    match message[0] >> 4 {
        1 => {
            flags == 0
                && (message.windows(4).take(8).any(|at| at == b"MQTT")
                    || message.windows(6).take(8).any(|at| at == b"MQIsdp"))
        }
        3 => flags & 0x06 != 0x06,
        6 | 8 | 10 => flags == 2,
        _ => flags == 0,
    }
}

/// Known frame type, reserved bit clear, and a length within the default limit.
fn http2(message: &[u8]) -> bool {
    message.starts_with(b"PRI ")
        || message.starts_with(b"HTTP/")
        || message.starts_with(b"GET ")
        || be(message, 3, 1).is_some_and(|kind| kind <= 0x10)
            && be(message, 5, 1).is_some_and(|stream| stream & 0x80 == 0)
            && message.len() <= 9 + (1 << 20)
}

/// Known opcode, no reserved bit but that of compression, masked if and only if from the client (RFC 6455,
/// 5.1 to 5.5). Parts of fragmented messages do not count, because much other data resembles them.
fn websocket(message: &[u8], client: bool) -> bool {
    if message.starts_with(b"GET ") || message.starts_with(b"HTTP/1.1 101") {
        return message.windows(9).any(|at| at.eq_ignore_ascii_case(b"websocket"));
    }
    let (first, second) = (message[0], message.get(1).copied().unwrap_or(0));
    let known = match first & 0x0f {
        1 | 2 => first & 0xb0 == 0x80,
        8..=10 => first & 0xf0 == 0x80 && second & 0x7f < 126,
        _ => false,
    };
    known && (second & 0x80 != 0) == client
}

fn cassandra(message: &[u8]) -> bool {
    let opcode = if message[0] & 0x7f <= 2 { message[3] } else { message[4] };
    opcode <= 0x10
}
