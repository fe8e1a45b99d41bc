use thiserror::Error;

use crate::lane::frames::NoRoom;

/// Why a message could not be reserved or sent. Nothing was published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ReserveError {
    /// The message is larger than the ring, and larger than [`Config::oneshot_max`](crate::Config::oneshot_max) or than the memory
    /// that the system has. [`Channel::reserve`](crate::Channel::reserve) returns it for every message larger than the ring. For a
    /// replacement: larger than [`Config::replacement_max`](crate::Config::replacement_max).
    #[error("the message is larger than the ring")]
    TooLarge,
    /// The receiver has not released enough frames. In an engine: poll for verdicts, then retry.
    #[error("the ring is full: its receiver has not released enough frames")]
    RingFull,
    /// Held frames leave no contiguous space that is large enough.
    #[error("held frames leave no contiguous space for the message")]
    NoContiguousSpace,
    /// The other side has closed the channel, or its process has ended.
    #[error("the other side is disconnected")]
    Disconnected,
    /// A signal handler ran while a client waited for space
    /// ([`Consumer::set_interruptible`](crate::Consumer::set_interruptible)). The call may be repeated.
    #[error("interrupted by a signal while the ring was full")]
    Interrupted,
}

impl From<NoRoom> for ReserveError {
    fn from(why: NoRoom) -> Self {
        match why {
            NoRoom::TooLarge => Self::TooLarge,
            NoRoom::RingFull => Self::RingFull,
            NoRoom::NoContiguousSpace => Self::NoContiguousSpace,
        }
    }
}
