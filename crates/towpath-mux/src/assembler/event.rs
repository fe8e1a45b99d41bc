//! The events of a stream: messages, and why they end.

use std::fmt;

#[cfg(doc)]
use super::Assembler;
use crate::framing::Cause;

/// An event of the stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A message, or a part of one.
    Message(Message<'a>),
    /// Another protocol begins here, and the connection leaves the mux. The last event.
    GiveBack {
        /// Position in the stream, in bytes.
        offset: u64,
        /// Bytes that have arrived and were not delivered.
        bytes: &'a [u8],
    },
    /// The stream cannot be framed any further. The last event.
    Failed(Failure),
    /// The stream ended. The last event.
    End {
        /// End of the last message, in bytes from the start of the stream.
        offset: u64,
        /// Number of bytes of an incomplete message; 0 for a clean end.
        inside: usize,
        /// Length of this message, if it was known.
        length: Option<usize>,
    },
}

/// A message, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// Position of its first byte in the stream.
    pub offset: u64,
    /// Whole message or part.
    pub part: Part,
    /// The whole message, header included; or the bytes of the part.
    pub bytes: &'a [u8],
    /// The message without the parts that the framing strips.
    pub payload: &'a [u8],
    /// The framing's mark; 0 without one.
    pub mark: u32,
    /// The framing's hash; 0 without one.
    pub hash: u32,
}

/// Where and why a stream cannot be framed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Position of the message's first byte in the stream.
    pub offset: u64,
    /// The reason.
    pub cause: Cause,
    /// The first bytes of the message, up to 32.
    pub head: Vec<u8>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at byte {}: {} (", self.offset, self.cause)?;
        for (at, byte) in self.head.iter().enumerate() {
            write!(f, "{}{byte:02x}", if at == 0 { "" } else { " " })?;
        }
        f.write_str(")")
    }
}

impl std::error::Error for Failure {}

/// Effect of a gap in the stream ([`Assembler::handle_gap`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gap {
    /// The gap is inside a message of known length. This message is lost; the next one follows it.
    Lost {
        /// Position of the lost message.
        offset: u64,
        /// Its length in bytes.
        length: usize,
    },
    /// The start of the next message is unknown. The stream is over.
    Over,
}

/// Which part of a message an event has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    /// The whole message.
    #[default]
    Whole,
    /// The first part.
    First,
    /// A part between the first and the last one.
    Next,
    /// The last part.
    Last,
}

impl Part {
    /// Returns true if a part of the same message follows.
    pub const fn more(self) -> bool {
        matches!(self, Self::First | Self::Next)
    }
}
