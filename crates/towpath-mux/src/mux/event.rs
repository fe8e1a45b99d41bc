//! Events of a mux for its caller.

use std::fmt;

use bytes::Bytes;

use super::message::Message;
use super::{psock, worker};
use crate::assembler;

/// A task for the caller, or a report.
#[derive(Debug)]
pub enum Event {
    /// The readiness to wait for has changed: see [`super::Mux::interest`].
    Interest(psock::Id),
    /// The connection has data to send: see [`super::Mux::transmit`].
    Transmit(psock::Id),
    /// This idle worker is to call [`super::Mux::poll_messages`].
    Wake(worker::Id),
    /// Another worker is idle: this worker is to hand back the messages that it has not begun
    /// ([`super::Mux::handle_hand_back`]).
    Recall(worker::Id),
    /// A connection ended. Its id is not valid any more.
    Ended(End),
    /// The connection keeps messages: call [`super::Mux::handle_unacked`] with the number of bytes that its peer has
    /// not acknowledged.
    Unacked(psock::Id),
    /// A message of [`super::Mux::send`] was not sent completely, or not acknowledged.
    Undelivered(Undelivered),
    /// A message was abandoned because too many workers died with it.
    Undone(Message),
    /// [`super::Mux::send`] has space again after it returned [`SendError::Full`].
    WriteSpace,
    /// A leaving worker holds no messages any more. Its id is not valid any more.
    Left(worker::Id),
    /// Workers have done all messages of a connection that ended ([`super::Mux::report_opened`]).
    Removed(psock::Id),
    /// A draining mux has no connections any more.
    Drained,
}

/// The end of a connection.
#[derive(Debug)]
pub struct End {
    /// The connection.
    pub psock: psock::Id,
    /// The cause of its end.
    pub cause: Cause,
    /// Give the descriptor back to the application, with `rest` as the bytes read but not used: the stream is
    /// at the start of a message. If false, close the descriptor.
    pub hand_back: bool,
    /// Bytes that were read and belong to no delivered message.
    pub rest: Bytes,
    /// Where the connection stands, if it is given back.
    pub resume: Option<Box<Resume>>,
    /// Number of replies that were not sent completely.
    pub unsent: usize,
    /// Number of its messages that workers hold or will get.
    pub outstanding: usize,
}

/// The state of a connection that is given back, for [`super::Mux::attach_resumed`]. Its bytes are passed separately.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resume {
    /// Where its assembler stands.
    pub progress: assembler::Progress,
    /// Messages were received or sent on it.
    pub used: bool,
}

/// Why a connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The peer closed it after a whole message.
    Clean,
    /// The peer closed it inside a message.
    Inside {
        /// Bytes of the message that had arrived.
        bytes: usize,
        /// Length of the message, if it was known.
        length: Option<usize>,
    },
    /// A read or write failed with this error number.
    Reset(i32),
    /// TLS failed: the bytes are not TLS, or the certificate was refused.
    Tls(String),
    /// The framing refused the stream, or a message was too big or too slow.
    Framing(assembler::Failure),
    /// The framing gave the connection back (KCM's -ESTRPIPE).
    GivenBack,
    /// The application unattached it.
    Unattached,
    /// It was drained.
    Drained,
    /// It was not drained before its deadline.
    DrainTimeout,
    /// The peer passed descriptors over a Unix socket.
    Descriptors,
    /// It was idle for too long.
    Idle,
    /// The peer accepted no data for too long.
    SendTimeout,
    /// It had more data to send than the limit.
    SendFull,
    /// The mux was full and this connection held the most memory.
    Memory,
    /// A worker closed it.
    Closed,
    /// A worker reset it.
    ResetByWorker,
    /// Its worker ended ([`super::OnWorkerEnd::Close`]).
    WorkerEnded,
}

impl Cause {
    /// Error number, positive; 0 for a clean end (Linux, include/uapi/asm-generic/errno.h).
    pub const fn errno(&self) -> i32 {
        match self {
            Self::Clean | Self::GivenBack | Self::Unattached | Self::Drained | Self::Closed => 0,
            Self::Inside { .. } => 74,
            Self::Reset(errno) => *errno,
            Self::Tls(_) => 71,
            Self::Framing(failure) => failure.cause.errno(),
            Self::Descriptors => 1,
            Self::DrainTimeout | Self::Idle | Self::SendTimeout => 110,
            Self::SendFull => 105,
            Self::Memory => 12,
            Self::ResetByWorker | Self::WorkerEnded => 103,
        }
    }

    /// Name: lower case, words joined by `_`.
    pub const fn name(&self) -> &'static str {
        use crate::framing::Cause::{HeadTooBig, Timeout, TooBig};
        match self {
            Self::Clean => "clean",
            Self::Inside { .. } => "inside",
            Self::Reset(_) => "reset",
            Self::Tls(_) => "tls",
            Self::Framing(assembler::Failure { cause: TooBig { .. } | HeadTooBig { .. }, .. }) => "too_big",
            Self::Framing(assembler::Failure { cause: Timeout { .. }, .. }) => "timeout",
            Self::Framing(_) => "malformed",
            Self::GivenBack => "given_back",
            Self::Unattached => "unattached",
            Self::Drained => "drained",
            Self::DrainTimeout => "drain_timeout",
            Self::Descriptors => "descriptors",
            Self::Idle => "idle",
            Self::SendTimeout => "send_timeout",
            Self::SendFull => "send_full",
            Self::Memory => "memory",
            Self::Closed => "closed",
            Self::ResetByWorker => "reset_by_worker",
            Self::WorkerEnded => "worker_ended",
        }
    }

    /// Returns true if the connection ended without an error.
    pub const fn is_clean(&self) -> bool {
        self.errno() == 0
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Clean => f.write_str("closed by the peer"),
            Self::Inside { bytes, length: Some(length) } => {
                write!(f, "closed by the peer inside a message: {bytes} of {length} bytes")
            }
            Self::Inside { bytes, length: None } => {
                write!(f, "closed by the peer inside a message: {bytes} bytes, its length not known yet")
            }
            Self::Reset(errno) => write!(f, "{}", std::io::Error::from_raw_os_error(*errno)),
            Self::Tls(why) => write!(f, "TLS: {why}"),
            Self::Framing(failure) => write!(f, "{failure}"),
            Self::GivenBack => f.write_str("given back by the framing"),
            Self::Unattached => f.write_str("taken back"),
            Self::Drained => f.write_str("drained"),
            Self::DrainTimeout => f.write_str("not drained in time"),
            Self::Descriptors => f.write_str("the peer passed descriptors"),
            Self::Idle => f.write_str("idle for too long"),
            Self::SendTimeout => f.write_str("the peer takes nothing of what is sent to it"),
            Self::SendFull => f.write_str("more is to be sent than may wait for this peer"),
            Self::Memory => f.write_str("the mux is full, and this connection holds most of it"),
            Self::Closed => f.write_str("closed by a worker"),
            Self::ResetByWorker => f.write_str("reset by a worker"),
            Self::WorkerEnded => f.write_str("its worker ended"),
        }
    }
}

/// A message of [`super::Mux::send`] that was not sent, or not acknowledged ([`super::Retry::Always`]).
#[derive(Debug, PartialEq, Eq)]
pub struct Undelivered {
    /// The message.
    pub bytes: Bytes,
    /// Number of its bytes that were sent before the connection ended; all of them if it was not acknowledged.
    pub left: usize,
}

/// Why a message cannot be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendError {
    /// The connection has ended (EPIPE), or the worker does not hold the message.
    Gone,
    /// No connection is open (ENOTCONN).
    NotConnected,
    /// Every connection is full (EAGAIN). [`Event::WriteSpace`] reports when to try again.
    Full,
}

impl SendError {
    /// Error number, positive (Linux, include/uapi/asm-generic/errno.h).
    pub const fn errno(self) -> i32 {
        match self {
            Self::Gone => 32,
            Self::NotConnected => 107,
            Self::Full => 11,
        }
    }
}

impl fmt::Display for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gone => "the connection or the message is not there any more",
            Self::NotConnected => "no connection is open",
            Self::Full => "as much waits to be sent as may wait",
        })
    }
}

impl std::error::Error for SendError {}
