//! Errors of socket calls.

use std::fmt;
use std::io;

use rustix::io::Errno;

use crate::mux::SendError;

/// Why a call on a [`super::Socket`] failed. Each error has KCM's error number.
#[derive(Debug)]
pub enum Error {
    /// No message can be read, or there is no write space: EAGAIN. The passed part of a message was not
    /// taken; earlier parts are kept.
    WouldBlock,
    /// The message exceeds [`crate::mux::Config::send_most`]: EMSGSIZE. All of its parts are dropped.
    TooLong {
        /// Its length in bytes.
        length: usize,
        /// The maximum in bytes.
        most: usize,
    },
    /// The connection has ended, or the answered message is done: EPIPE. The message is dropped.
    Gone,
    /// No connection is open: ENOTCONN. The message is dropped.
    NotConnected,
    /// EDESTADDRREQ: [`super::To::Any`] without connected mode ([`crate::mux::Config::connected`]), or
    /// [`super::To::Requester`] without a received message.
    NoAddress,
    /// A part of a message has another address than the first part: EINVAL. It was not taken.
    AddressMismatch,
    /// Receiving is disabled ([`super::Socket::set_receive`]): EAGAIN.
    Disabled,
    /// The mux has drained: ESHUTDOWN.
    Drained,
    /// The connection is not attached: ENOENT.
    NotAttached,
    /// A system call failed.
    Io(io::Error),
}

impl Error {
    /// Error number, positive (Linux, include/uapi/asm-generic/errno.h).
    pub fn errno(&self) -> i32 {
        let errno = match self {
            Self::WouldBlock | Self::Disabled => Errno::AGAIN,
            Self::TooLong { .. } => Errno::MSGSIZE,
            Self::Gone => Errno::PIPE,
            Self::NotConnected => Errno::NOTCONN,
            Self::NoAddress => Errno::DESTADDRREQ,
            Self::AddressMismatch => Errno::INVAL,
            Self::Drained => Errno::SHUTDOWN,
            Self::NotAttached => Errno::NOENT,
            Self::Io(error) => return error.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
        };
        errno.raw_os_error()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WouldBlock => f.write_str("the call would block"),
            Self::TooLong { length, most } => {
                write!(f, "the message has {length} bytes; at most {most} can be sent")
            }
            Self::Gone => f.write_str("the connection has ended, or the message is done already"),
            Self::NotConnected => f.write_str("no connection is open"),
            Self::NoAddress => f.write_str(
                "no destination: the mux is not in connected mode, or no message was received to reply to",
            ),
            Self::AddressMismatch => f.write_str("all parts of a message need the same address"),
            Self::Disabled => f.write_str("receiving is disabled on this socket"),
            Self::Drained => f.write_str("the mux has drained"),
            Self::NotAttached => f.write_str("the connection is not attached"),
            Self::Io(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(error) => Some(error),
            _ => None,
        }
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<SendError> for Error {
    fn from(error: SendError) -> Self {
        match error {
            SendError::Gone => Self::Gone,
            SendError::NotConnected => Self::NotConnected,
            SendError::Full => Self::WouldBlock,
        }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Io(error) => error,
            error => Self::from_raw_os_error(error.errno()),
        }
    }
}
