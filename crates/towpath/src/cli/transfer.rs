//! The protocol between `towpath send` and `towpath recv`: a header, records and their checksum; then the receiver's answer.
//!
//! ```text
//! header  "twpsend2"  length: u64 LE        with holes; 2^64-1 if it is unknown (standard input)
//! record  length: u64 LE  bytes             data
//! record  2^63 + length: u64 LE             a hole
//! record  0: u64 LE                         the end
//! trailer checksum: u64 LE                  XXH3-64 of the data, and of the words of holes: detects damage, not manipulation
//! answer  "twprecv1"  status: u64 LE  received: u64 LE  checksum: u64 LE  CPU: u64 LE, microseconds
//! ```
//! The answer follows the trailer, or arrives earlier if the receiver cannot continue. The receiver sends zero bytes before it as
//! keepalives: data that the sender's socket accepted may stay in buffers for a long time.

use std::io::{self, Read};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

pub(crate) const HEADER_BYTES: usize = 16;
pub(crate) const ANSWER_BYTES: usize = 40;
pub(crate) const HEADER: [u8; 8] = *b"twpsend2";
const ANSWER: [u8; 8] = *b"twprecv1";

/// The keepalive byte; a receiver that takes data sends it every `ALIVE_EVERY`.
pub(crate) const ALIVE: u8 = 0;
pub(crate) const ALIVE_EVERY: Duration = Duration::from_millis(200);

/// The sender's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Length of the file, if known.
    pub(crate) length: Option<u64>,
}

impl Header {
    pub(crate) fn emit(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&HEADER);
        bytes[8..].copy_from_slice(&self.length.unwrap_or(u64::MAX).to_le_bytes());
        bytes
    }

    /// Parses a header; `None` if the bytes are not a header.
    pub(crate) fn parse(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let length = Some(word(bytes, 8)).filter(|length| *length != u64::MAX);
        bytes.starts_with(&HEADER).then_some(Self { length })
    }
}

/// The first word of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    Data(u64),
    Hole(u64),
    End,
}

/// The bit of a hole.
const HOLE: u64 = 1 << 63;

impl Record {
    pub(crate) fn emit(self) -> [u8; 8] {
        match self {
            Self::Data(length) => length,
            Self::Hole(length) => HOLE | length,
            Self::End => 0,
        }
        .to_le_bytes()
    }

    pub(crate) fn parse(bytes: [u8; 8]) -> Self {
        match u64::from_le_bytes(bytes) {
            0 => Self::End,
            word if word & HOLE != 0 => Self::Hole(word & !HOLE),
            word => Self::Data(word),
        }
    }
}

/// Result at the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Whole,
    /// The received data differ from the sent data.
    Damaged,
    /// No space left on the receiver's disk.
    DiskFull,
    /// The receiver cannot write for another reason.
    CannotWrite,
}

impl Status {
    const ALL: [Self; 4] = [Self::Whole, Self::Damaged, Self::DiskFull, Self::CannotWrite];
}

/// The receiver's final answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: Status,
    pub(crate) received: u64,
    pub(crate) checksum: u64,
    /// User and system CPU time of receiving.
    pub(crate) cpu: Duration,
}

impl Answer {
    pub(crate) fn emit(&self) -> [u8; ANSWER_BYTES] {
        let mut bytes = [0; ANSWER_BYTES];
        bytes[..8].copy_from_slice(&ANSWER);
        let cpu = u64::try_from(self.cpu.as_micros()).unwrap_or(u64::MAX);
        let words = [self.status as u64, self.received, self.checksum, cpu];
        for (place, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Parses an answer; `None` if the bytes are not an answer.
    pub(crate) fn parse(bytes: &[u8; ANSWER_BYTES]) -> Option<Self> {
        if !bytes.starts_with(&ANSWER) {
            return None;
        }
        let status = *Status::ALL.get(usize::try_from(word(bytes, 8)).ok()?)?;
        let cpu = Duration::from_micros(word(bytes, 32));
        Some(Self { status, received: word(bytes, 16), checksum: word(bytes, 24), cpu })
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word))
}

/// Reads until `into` is full or the input ends. Returns the number of bytes read.
pub(crate) fn read_full(from: &mut impl Read, into: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < into.len() {
        match from.read(&mut into[filled..]) {
            Ok(0) => break,
            Ok(len) => filled += len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// User and system CPU time of this process.
pub(crate) fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// User and system CPU time of this thread.
pub(crate) fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Formats a byte count with a binary unit.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut name) = (count as f64, "B");
    for unit in UNITS {
        if value < 1024.0 {
            break;
        }
        (value, name) = (value / 1024.0, unit);
    }
    if name == "B" { format!("{count} B") } else { format!("{value:.2} {name}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_records_and_statuses_survive_emit_and_parse() {
        for header in [Header { length: Some(12_345) }, Header { length: None }] {
            assert_eq!(Header::parse(&header.emit()), Some(header));
        }
        assert_eq!(Header::parse(b"GET / HTTP/1.1\r\n"), None);
        for record in [Record::Data(1), Record::Hole(5), Record::End] {
            assert_eq!(Record::parse(record.emit()), record);
        }
        for status in Status::ALL {
            let answer =
                Answer { status, received: 7, checksum: u64::MAX - 1, cpu: Duration::from_micros(1_234_567) };
            assert_eq!(Answer::parse(&answer.emit()), Some(answer));
        }
        let mut unknown =
            Answer { status: Status::Whole, received: 0, checksum: 0, cpu: Duration::ZERO }.emit();
        unknown[8] = 9;
        assert_eq!(Answer::parse(&unknown), None);
        assert_eq!(Answer::parse(&[0; ANSWER_BYTES]), None);
    }

    #[test]
    fn bytes_have_units() {
        let rows = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (3 << 30, "3.00 GiB"),
            (5 << 50, "5120.00 TiB"),
        ];
        for (count, text) in rows {
            assert_eq!(bytes(count), text);
        }
    }
}
