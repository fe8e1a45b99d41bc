//! Why a framing refuses a stream: strparser's errors, with what a person needs to know.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;

/// Why a stream cannot be framed any further.
///
/// [`Cause::errno`] is the number that the kernel's strparser gives for the same thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// EMSGSIZE: the message is longer than the framing or the assembler allows.
    TooBig {
        /// The length that the message announces, in bytes; `None` when its end was never seen.
        length: Option<u64>,
        /// The bound that it breaks, in bytes.
        max: u64,
    },
    /// EMSGSIZE: so many bytes came and the length was still unknown.
    HeadTooBig {
        /// The bound, in bytes.
        max: u64,
    },
    /// EPROTO: the length that the message announces ends before bytes that belong to it.
    BadLength {
        /// The announced length in bytes, which may be below zero after adjusting.
        length: i64,
        /// The least that it has to be.
        least: u64,
    },
    /// EBADMSG: the bytes are not of this protocol.
    Malformed(Cow<'static, str>),
    /// ETIMEDOUT: the message was not whole in time.
    Timeout {
        /// Whether its length was known.
        in_body: bool,
    },
    /// The number that a framing program gave.
    Program(i32),
}

// include/uapi/asm-generic/errno.h
const EPROTO: i32 = 71;
const EBADMSG: i32 = 74;
const EMSGSIZE: i32 = 90;
const ETIMEDOUT: i32 = 110;

impl Cause {
    /// [`Cause::Malformed`] with a fixed reason.
    pub const fn malformed(reason: &'static str) -> Self {
        Self::Malformed(Cow::Borrowed(reason))
    }

    /// The error's number, positive (Linux, include/uapi/asm-generic/errno.h).
    pub const fn errno(&self) -> i32 {
        match self {
            Self::TooBig { .. } | Self::HeadTooBig { .. } => EMSGSIZE,
            Self::BadLength { .. } => EPROTO,
            Self::Malformed(_) => EBADMSG,
            Self::Timeout { .. } => ETIMEDOUT,
            Self::Program(errno) => *errno,
        }
    }

    /// The error's name as the kernel spells it; `errno` for a program's own number.
    pub const fn name(&self) -> &'static str {
        match self.errno() {
            EMSGSIZE => "EMSGSIZE",
            EPROTO => "EPROTO",
            EBADMSG => "EBADMSG",
            ETIMEDOUT => "ETIMEDOUT",
            _ => "errno",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.name())?;
        match self {
            Self::TooBig { length: Some(length), max } => {
                write!(f, "a message of {length} bytes, at most {max} are allowed")
            }
            Self::TooBig { length: None, max } => write!(f, "no end of the message within {max} bytes"),
            Self::HeadTooBig { max } => write!(f, "no length known after {max} bytes"),
            Self::BadLength { length, least } => {
                write!(f, "a length of {length} bytes, the message has at least {least}")
            }
            Self::Malformed(reason) => f.write_str(reason),
            Self::Timeout { in_body: false } => f.write_str("the message's length did not arrive in time"),
            Self::Timeout { in_body: true } => f.write_str("the rest of the message did not arrive in time"),
            Self::Program(errno) => write!(f, "the framing program answered {errno}"),
        }
    }
}

impl Error for Cause {}
