//! The protocol between `towpath send` and `towpath recv`: a header, the data and their checksum; then the receiver's answer.
//!
//! ```text
//! header  "twpsend1"  length: u64 LE
//! bytes   length
//! trailer checksum: u64 LE                  XXH3-64 of the bytes: detects damage, not manipulation
//! answer  "twprecv1"  status: u64 LE  received: u64 LE  checksum: u64 LE  CPU: u64 LE, microseconds
//! ```
//! The answer follows the trailer, or arrives earlier if the receiver cannot continue. The receiver sends zero bytes before it as
//! keepalives: data that the sender's socket accepted may stay in buffers for a long time.

use std::io::{self, Read};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

pub(crate) const HEADER_BYTES: usize = 16;
pub(crate) const ANSWER_BYTES: usize = 40;
const HEADER: [u8; 8] = *b"twpsend1";
const ANSWER: [u8; 8] = *b"twprecv1";

/// The keepalive byte; a receiver that takes data sends it every `ALIVE_EVERY`.
pub(crate) const ALIVE: u8 = 0;
pub(crate) const ALIVE_EVERY: Duration = Duration::from_millis(200);

/// Encodes the header.
pub(crate) fn header(length: u64) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(&HEADER);
    bytes[8..].copy_from_slice(&length.to_le_bytes());
    bytes
}

/// Returns the length in a header, or `None` if the bytes are not a header.
pub(crate) fn parse_header(bytes: &[u8; HEADER_BYTES]) -> Option<u64> {
    bytes.starts_with(&HEADER).then(|| word(bytes, 8))
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
    fn what_is_written_is_read() {
        assert_eq!(parse_header(&header(12_345)), Some(12_345));
        assert_eq!(parse_header(b"GET / HTTP/1.1\r\n"), None);
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
    fn bytes_are_told_in_units() {
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
