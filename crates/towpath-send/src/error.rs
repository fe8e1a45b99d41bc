use std::io;
use std::time::Duration;

/// An error that ends or refuses sending.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The descriptor cannot be examined, or is not a connected stream or datagram socket.
    #[error("not a connected stream or datagram socket: {0}")]
    NotASocket(#[source] io::Error),
    /// [`CopyMode::Zerocopy`](crate::CopyMode::Zerocopy) was requested and the socket does not support zero copy.
    #[error("this socket does not support zero copy ({why}); use CopyMode::Adaptive for plain sends")]
    NotSupported {
        /// The reason.
        why: Unarmed,
    },
    /// Setting UDP_SEGMENT failed.
    #[error("cannot enable UDP segmentation offload: {0}")]
    Segmentation(#[source] io::Error),
    /// A datagram exceeds the limit of the protocol or the path, or has more segments than the kernel accepts (UDP_MAX_SEGMENTS,
    /// 64 or 128), or its segments exceed the path MTU. The datagram was discarded and its buffer completed; later datagrams can
    /// still be sent.
    #[error(
        "a datagram of {bytes} bytes exceeds the socket's limit; send fewer bytes per call, or set a segment size below the path MTU (at most 64 segments at once)"
    )]
    TooLong {
        /// Length of the datagram in bytes.
        bytes: usize,
    },
    /// The peer reset or closed the connection, or the connection failed.
    #[error("the connection is gone: {0}")]
    Gone(#[source] io::Error),
    /// The peer accepted no data for [`Options::stall`](crate::Options::stall).
    #[error("the peer made no progress for {0:?}: it may have stopped reading")]
    Stalled(Duration),
    /// The error queue could not be read. Completions may be lost, so the connection cannot continue.
    #[error(
        "reading the error queue failed ({0}): completions may be lost, and the state of frames in flight is unknown"
    )]
    Queue(#[source] io::Error),
    /// sendmsg(2) or poll(2) failed for a reason without a variant here.
    #[error("sending failed: {0}")]
    Io(#[source] io::Error),
}

/// Why every send on a socket copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unarmed {
    /// Plain sends were requested.
    Requested,
    /// The socket refused SO_ZEROCOPY: AF_UNIX, raw and packet sockets, UDP-Lite, or an old kernel.
    Refused,
    /// MPTCP accepts the flag but never sends notifications.
    Mptcp,
    /// The kernel encrypts the stream (kTLS).
    KernelTls,
}

impl std::fmt::Display for Unarmed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Requested => "plain sends were requested",
            Self::Refused => "the socket refuses SO_ZEROCOPY",
            Self::Mptcp => "MPTCP does not send notifications",
            Self::KernelTls => "the kernel encrypts the stream",
        })
    }
}
