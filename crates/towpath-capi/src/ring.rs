//! Attaching and waiting, shared by inspectors and workers.

use std::ffi::{OsStr, c_int};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rustix::io::Errno;
use towpath_ring::{AttachError, Consumer, ConsumerStats, Options};

use crate::error::Failure;

/// `struct towpath_ring_stats`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct RingStats {
    /// Frames received.
    pub received: u64,
    /// Frames lost.
    pub lost: u64,
    /// Waits that slept.
    pub sleeps: u64,
    /// Wake-ups sent to the engine.
    pub wakeups: u64,
    /// Messages sent in separate memory.
    pub oneshots: u64,
}

impl From<ConsumerStats> for RingStats {
    fn from(stats: ConsumerStats) -> Self {
        let ConsumerStats { received, lost, sleeps, wakeups, oneshots } = stats;
        Self { received, lost, sleeps, wakeups, oneshots }
    }
}

/// The socket path and the options for C's arguments.
pub(crate) fn attach_target<'a>(
    path: Option<&'a OsStr>,
    name: Option<&OsStr>,
) -> Result<(std::borrow::Cow<'a, OsStr>, Options), Failure> {
    let options = name.map_or_else(Options::default, |name| Options::named(&name.to_string_lossy()));
    let path = match path {
        Some(path) => path.into(),
        None => std::env::var_os("TOWPATH_SOCKET").ok_or(AttachError::NoSocket)?.into(),
    };
    Ok((path, options))
}

/// The timeout of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    Forever,
    Most(Duration),
}

impl Wait {
    /// Converts milliseconds with poll(2)'s convention: -1 is infinite.
    pub(crate) fn from_millis(timeout: c_int) -> Result<Self, Failure> {
        match timeout {
            -1 => Ok(Self::Forever),
            0.. => Ok(Self::Most(Duration::from_millis(timeout as u64))),
            _ => Err(Failure::new(Errno::INVAL, "the timeout must be -1 or a number of milliseconds")),
        }
    }

    /// Like `from_millis`, for a close, which must not be infinite.
    pub(crate) fn for_close(timeout: c_int) -> Result<Duration, Failure> {
        match Self::from_millis(timeout)? {
            Self::Most(patience) => Ok(patience),
            Self::Forever => Err(Failure::new(Errno::INVAL, "the timeout of close must not be infinite")),
        }
    }
}

/// Result of a receive without a frame: 0 at the end of the channel, otherwise EAGAIN.
pub(crate) fn nothing(queue: &Consumer) -> Result<c_int, Failure> {
    if queue.is_ended() {
        Ok(0)
    } else {
        Err(Failure::new(Errno::AGAIN, "nothing arrived within the timeout"))
    }
}

/// The error for a ticket that identifies no frame of this handle.
pub(crate) fn stale() -> Failure {
    Failure::new(Errno::STALE, "the frame or message does not belong to this handle, or is already done")
}

pub(crate) fn fd(queue: &impl AsFd) -> c_int {
    queue.as_fd().as_raw_fd()
}
