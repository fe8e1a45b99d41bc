use std::io;
use std::time::Duration;

/// Why sending stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// What the descriptor is could not be found out, or it is no connected stream or datagram socket.
    #[error("not a socket that can be sent on: {0}")]
    NotASocket(#[source] io::Error),
    /// Zero copy was insisted on, and this socket does not do it.
    #[error(
        "zero copy was asked for, and this socket does not do it ({why}); use Choice::Adaptive to send plain instead"
    )]
    NotSupported {
        /// What was found.
        why: Unarmed,
    },
    /// UDP_SEGMENT could not be set.
    #[error("UDP segmentation offload could not be switched on: {0}")]
    Segmentation(#[source] io::Error),
    /// A datagram that is longer than the protocol or the path takes, or of more segments than the kernel cuts at once (UDP_MAX_SEGMENTS,
    /// 64 or 128), or of longer ones than the path takes. It was taken out, as one that is done; those behind it can be sent.
    #[error(
        "a datagram of {bytes} bytes is longer than the socket takes; send less at once, or set a segment size that the path takes (and at most 64 segments at once)"
    )]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// The peer reset or closed the connection, or it broke.
    #[error("the connection is gone: {0}")]
    Gone(#[source] io::Error),
    /// The peer has taken nothing for as long as was allowed.
    #[error("the peer has taken nothing for {0:?}: it may have stopped reading")]
    Stalled(Duration),
    /// The error queue could not be read, so that completions are lost: the connection cannot go on.
    #[error(
        "a completion was lost while reading the error queue ({0}): nothing is known about frames in flight any more"
    )]
    Queue(#[source] io::Error),
    /// sendmsg(2) or poll(2) failed for another reason.
    #[error("sending failed: {0}")]
    Io(#[source] io::Error),
}

/// Why a socket is not sent on without a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unarmed {
    /// Plain sends were asked for.
    Choice,
    /// The socket refused SO_ZEROCOPY: AF_UNIX, raw and packet sockets, UDP-Lite, an old kernel.
    Refused,
    /// MPTCP accepts the flag silently and never notifies.
    Mptcp,
    /// The kernel encrypts (kTLS).
    KernelTls,
}

impl std::fmt::Display for Unarmed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Choice => "plain sends were asked for",
            Self::Refused => "it refuses SO_ZEROCOPY",
            Self::Mptcp => "MPTCP does not notify",
            Self::KernelTls => "the kernel encrypts what is sent on it",
        })
    }
}
