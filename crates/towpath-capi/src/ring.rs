//! What inspectors and workers have in common: how they attach and wait.

use std::ffi::{OsStr, c_int};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rustix::io::Errno;
use towpath_ring::{AttachError, Consumer, ConsumerStats, Options};

use crate::failure::Failure;

/// `struct towpath_ring_stats`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct RingStats {
    /// Frames received.
    pub received: u64,
    /// Frames that were lost.
    pub lost: u64,
    /// Times it slept.
    pub sleeps: u64,
    /// Doorbells rung.
    pub wakeups: u64,
    /// Messages sent in a memory of their own.
    pub oneshots: u64,
}

impl From<ConsumerStats> for RingStats {
    fn from(stats: ConsumerStats) -> Self {
        let ConsumerStats { received, lost, sleeps, wakeups, oneshots } = stats;
        Self { received, lost, sleeps, wakeups, oneshots }
    }
}

/// The socket and the options that C's arguments mean.
pub(crate) fn whereto<'a>(
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

/// How long a function waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    Ever,
    Most(Duration),
}

impl Wait {
    /// C's milliseconds, as poll(2) has them.
    pub(crate) fn from_millis(timeout: c_int) -> Result<Self, Failure> {
        match timeout {
            -1 => Ok(Self::Ever),
            0.. => Ok(Self::Most(Duration::from_millis(timeout as u64))),
            _ => Err(Failure::new(Errno::INVAL, "a timeout is -1 or milliseconds")),
        }
    }

    /// The same for an end, which is not waited for for ever.
    pub(crate) fn for_end(timeout: c_int) -> Result<Duration, Failure> {
        match Self::from_millis(timeout)? {
            Self::Most(patience) => Ok(patience),
            Self::Ever => Err(Failure::new(Errno::INVAL, "an end is not waited for for ever")),
        }
    }
}

/// What a call that found nothing says: the end, or that the time is over.
pub(crate) fn nothing(queue: &Consumer) -> Result<c_int, Failure> {
    if queue.is_ended() { Ok(0) } else { Err(Failure::new(Errno::AGAIN, "nothing came in time")) }
}

/// The ticket names nothing that is here.
pub(crate) fn stale() -> Failure {
    Failure::new(Errno::STALE, "it is not this handle's, or was given back before")
}

pub(crate) fn fd(queue: &impl AsFd) -> c_int {
    queue.as_fd().as_raw_fd()
}
