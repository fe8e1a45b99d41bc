//! Why a framing refuses a stream: strparser's errors, with details.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;

/// Why a stream cannot be framed any further.
///
/// [`Cause::errno`] is the error number of the kernel's strparser.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// EMSGSIZE: the message exceeds the limit of the framing or the assembler.
    TooBig {
        /// Its length in bytes, if known.
        length: Option<u64>,
        /// The limit in bytes.
        max: u64,
    },
    /// EMSGSIZE: the length is still unknown after this number of bytes.
    HeadTooBig {
        /// The limit in bytes.
        max: u64,
    },
    /// EPROTO: the announced length ends before bytes known to belong to the message.
    BadLength {
        /// The announced length in bytes, after adjustment. May be negative.
        length: i64,
        /// The minimum.
        least: u64,
    },
    /// EBADMSG: the bytes violate the protocol.
    Malformed(Cow<'static, str>),
    /// ETIMEDOUT: the message was incomplete for too long.
    Timeout {
        /// Whether its length was known.
        in_body: bool,
    },
    /// Error number returned by a framing program.
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

    /// Error number, positive (Linux, include/uapi/asm-generic/errno.h).
    pub const fn errno(&self) -> i32 {
        match self {
            Self::TooBig { .. } | Self::HeadTooBig { .. } => EMSGSIZE,
            Self::BadLength { .. } => EPROTO,
            Self::Malformed(_) => EBADMSG,
            Self::Timeout { .. } => ETIMEDOUT,
            Self::Program(errno) => *errno,
        }
    }

    /// Name of the error in the kernel; `errno` for other numbers of a program.
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
                write!(f, "a message of {length} bytes exceeds the limit of {max}")
            }
            Self::TooBig { length: None, max } => write!(f, "no end of the message within {max} bytes"),
            Self::HeadTooBig { max } => write!(f, "the length is unknown after {max} bytes"),
            Self::BadLength { length, least } => {
                write!(f, "a length of {length} bytes, but the message has at least {least}")
            }
            Self::Malformed(reason) => f.write_str(reason),
            Self::Timeout { in_body: false } => f.write_str("the message's length did not arrive in time"),
            Self::Timeout { in_body: true } => f.write_str("the rest of the message did not arrive in time"),
            Self::Program(errno) => write!(f, "the framing program returned {errno}"),
        }
    }
}

impl Error for Cause {}
