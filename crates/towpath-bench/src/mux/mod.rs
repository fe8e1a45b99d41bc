//! Message servers over TCP: ours, and what people write otherwise. All read frames of `length=4 be adjust=4` and answer with
//! what they got.

pub(crate) mod client;
pub(crate) mod idle;
pub(crate) mod rings;
pub(crate) mod server;

use std::time::{Duration, Instant};

/// What a server does with a message before it answers.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Job {
    /// Nothing.
    Nothing,
    /// Drops it, without an answer.
    Drop,
    /// Waits, as for a database.
    Wait(Duration),
    /// Computes.
    Compute(Duration),
    /// Waits so long for those that are marked, and answers the others at once.
    Marked(Duration),
}

/// Where a request's number and mark are, behind the length.
pub(crate) const NUMBER: std::ops::Range<usize> = 4..12;
pub(crate) const MARK: usize = 12;
pub(crate) const SMALLEST: usize = 16;

impl Job {
    /// Does it; whether there is an answer.
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

/// The length of the first message of these bytes, if all of it is there.
pub(crate) fn whole(bytes: &[u8]) -> Option<usize> {
    let length = 4 + u32::from_be_bytes(*bytes.first_chunk()?) as usize;
    (bytes.len() >= length).then_some(length)
}

/// A message of `length` bytes in all.
pub(crate) fn message(length: usize, number: u64, mark: bool) -> Vec<u8> {
    let mut bytes = vec![0; length];
    bytes[..4].copy_from_slice(&(length as u32 - 4).to_be_bytes());
    bytes[NUMBER].copy_from_slice(&number.to_be_bytes());
    bytes[MARK] = u8::from(mark);
    bytes
}
