//! TCP message servers: Towpath's and baselines. Each reads frames of `length=4 be adjust=4` and replies with the same bytes.

pub(crate) mod client;
pub(crate) mod drain;
pub(crate) mod idle;
pub(crate) mod rings;
pub(crate) mod server;

use std::time::{Duration, Instant};

/// Processing of a message before the reply.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Job {
    /// No processing.
    Nothing,
    /// Drop the message without a reply.
    Drop,
    /// Sleep, as for a database.
    Wait(Duration),
    /// Compute.
    Compute(Duration),
    /// Sleep for marked messages; reply to others immediately.
    Marked(Duration),
}

/// Offset of a request's number, after the length; the mark follows.
pub(crate) const NUMBER: std::ops::Range<usize> = 4..12;
pub(crate) const MARK: usize = 12;
pub(crate) const SMALLEST: usize = 16;

impl Job {
    /// Processes the message. Returns true if it needs a reply.
    pub(crate) fn run(self, message: &[u8]) -> bool {
        match self {
            Self::Nothing => {}
            Self::Drop => return false,
            Self::Wait(time) => std::thread::sleep(time),
            Self::Compute(time) => {
                let until = Instant::now() + time;
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
            }
            Self::Marked(time) if message[MARK] == 1 => std::thread::sleep(time),
            Self::Marked(_) => {}
        }
        true
    }
}

/// Returns the length of the first message if it is complete.
pub(crate) fn whole(bytes: &[u8]) -> Option<usize> {
    let length = 4 + u32::from_be_bytes(*bytes.first_chunk()?) as usize;
    (bytes.len() >= length).then_some(length)
}

/// Creates a message of `length` bytes in total.
pub(crate) fn message(length: usize, number: u64, mark: bool) -> Vec<u8> {
    let mut bytes = vec![0; length];
    bytes[..4].copy_from_slice(&(length as u32 - 4).to_be_bytes());
    bytes[NUMBER].copy_from_slice(&number.to_be_bytes());
    bytes[MARK] = u8::from(mark);
    bytes
}
