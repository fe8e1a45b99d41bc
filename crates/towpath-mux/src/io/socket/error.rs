//! Why a call on a handle did not do what it was to do.

use std::fmt;
use std::io;

use rustix::io::Errno;

use crate::mux::SendError;

/// Why a call on a [`super::Socket`] failed; each has the error number that Linux's KCM gives, or would.
#[derive(Debug)]
pub enum Error {
    /// Nothing is there to be read, or there is no room to send: EAGAIN. A part of a message that was to be sent was not taken; those
    /// before it wait for it.
    WouldBlock,
    /// A message to be sent has more bytes than the mux sends at once: EMSGSIZE. It is dropped with all of its parts.
    TooLong {
        /// Bytes that it would have.
        length: usize,
        /// Bytes that it may have.
        most: usize,
    },
    /// The connection that it is for has ended, or the message that it answers is done: EPIPE. What was to be sent is dropped.
    Gone,
    /// No connection is open: ENOTCONN. What was to be sent is dropped.
    NotConnected,
    /// It says neither to whom, nor is the mux in connected mode ([`crate::mux::Config::connected`]); or it is to go to who asked,
    /// and nobody did: EDESTADDRREQ.
    NoAddress,
    /// A part of a message is for somebody else than its first part: EINVAL. It is not taken.
    AddressMismatch,
    /// The handle was told to receive nothing ([`super::Socket::set_receive`]): EAGAIN.
    Disabled,
    /// The mux has drained: ESHUTDOWN.
    Drained,
    /// That connection is not attached: ENOENT.
    NotAttached,
    /// The system refused something.
    Io(io::Error),
}

impl Error {
    /// The error's number, positive (Linux, include/uapi/asm-generic/errno.h).
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
            Self::WouldBlock => f.write_str("it would have to wait"),
            Self::TooLong { length, most } => {
                write!(f, "a message of {length} bytes is to be sent, at most {most} are allowed")
            }
            Self::Gone => f.write_str("the connection or the message is not there any more"),
            Self::NotConnected => f.write_str("no connection is open"),
            Self::NoAddress => f.write_str(
                "say to whom: the mux is not in connected mode, or no message was received to be answered",
            ),
            Self::AddressMismatch => f.write_str("the parts of a message are for one address"),
            Self::Disabled => f.write_str("receiving is disabled on this handle"),
            Self::Drained => f.write_str("the mux has drained"),
            Self::NotAttached => f.write_str("that connection is not attached"),
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
