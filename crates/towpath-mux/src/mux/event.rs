//! What the mux has to tell whoever drives it.

use std::fmt;

use bytes::Bytes;

use super::message::Message;
use super::{psock, worker};
use crate::assembler;

/// What the mux has to tell whoever drives it.
#[derive(Debug)]
pub enum Event {
    /// What to wait for on this connection may have changed: see [`super::Mux::interest`].
    Interest(psock::Id),
    /// There is something to send: see [`super::Mux::transmit`].
    Transmit(psock::Id),
    /// This idle worker has something to do: have it call [`super::Mux::poll_messages`].
    Wake(worker::Id),
    /// Others are idle: have this worker hand back what it has not begun ([`super::Mux::handle_hand_back`]).
    Recall(worker::Id),
    /// A connection ended; its id is not valid any more.
    Ended(End),
    /// A message of [`super::Mux::send`] was not sent, or not all of it.
    Undelivered(Undelivered),
    /// A message was given up because the workers that held it died.
    Undone(Message),
    /// There is room again for [`super::Mux::send`] after it answered [`SendError::Full`].
    WriteSpace,
    /// A worker that was told to leave holds nothing any more; its id is not valid any more.
    Left(worker::Id),
    /// A mux that was told to drain holds nothing any more.
    Drained,
}

/// The end of a connection.
#[derive(Debug)]
pub struct End {
    /// Which one.
    pub psock: psock::Id,
    /// Why.
    pub cause: Cause,
    /// Whether the descriptor goes back to whoever attached it, with `rest` as the bytes that were read and not used: the
    /// stream stands at a message's start. Otherwise it is to be closed.
    pub hand_back: bool,
    /// Bytes that were read and belong to no delivered message.
    pub rest: Bytes,
    /// Replies that were not sent, or not all of them.
    pub unsent: usize,
    /// Messages of it that workers still have or will get.
    pub outstanding: usize,
}

/// Why a connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The peer closed it behind a whole message.
    Clean,
    /// The peer closed it inside a message.
    Inside {
        /// Bytes that had arrived of that message.
        bytes: usize,
        /// The length that it had announced, if that was known.
        length: Option<usize>,
    },
    /// A read or a write failed, with this error number.
    Reset(i32),
    /// What came is no TLS, or not by the peer that it is to be by.
    Tls(String),
    /// The stream could not be framed, was too big, or a message took too long.
    Framing(assembler::Failure),
    /// The framing gave the connection back (KCM's -ESTRPIPE).
    GivenBack,
    /// Whoever attached it took it back.
    Unattached,
    /// It was drained.
    Drained,
    /// Draining it took too long.
    DrainTimeout,
    /// Nothing happened on it for too long.
    Idle,
    /// The peer took nothing of what was sent for too long.
    SendTimeout,
    /// More was to be sent than may wait.
    SendFull,
    /// The mux was full and this connection held most of it.
    Memory,
}

impl Cause {
    /// The error's number, positive; 0 for ends that are no errors (Linux, include/uapi/asm-generic/errno.h).
    pub const fn errno(&self) -> i32 {
        match self {
            Self::Clean | Self::GivenBack | Self::Unattached | Self::Drained => 0,
            Self::Inside { .. } => 74,
            Self::Reset(errno) => *errno,
            Self::Tls(_) => 71,
            Self::Framing(failure) => failure.cause.errno(),
            Self::DrainTimeout | Self::Idle | Self::SendTimeout => 110,
            Self::SendFull => 105,
            Self::Memory => 12,
        }
    }

    /// Whether it is the end that somebody wanted.
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
            Self::Idle => f.write_str("idle for too long"),
            Self::SendTimeout => f.write_str("the peer takes nothing of what is sent to it"),
            Self::SendFull => f.write_str("more is to be sent than may wait for this peer"),
            Self::Memory => f.write_str("the mux is full, and this connection holds most of it"),
        }
    }
}

/// A message of [`super::Mux::send`] that was not sent.
#[derive(Debug, PartialEq, Eq)]
pub struct Undelivered {
    /// The message.
    pub bytes: Bytes,
    /// How many of its bytes left before the connection ended.
    pub left: usize,
}

/// Why something cannot be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendError {
    /// The connection has ended (EPIPE), or the worker does not hold that message any more.
    Gone,
    /// No connection is open (ENOTCONN).
    NotConnected,
    /// Every connection has as much to send as may wait (EAGAIN); [`Event::WriteSpace`] says when to try again.
    Full,
}

impl SendError {
    /// The error's number, positive (Linux, include/uapi/asm-generic/errno.h).
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
