use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::shm::geometry::GeometryError;

/// Why a client could not attach.
#[derive(Debug, Error)]
pub enum AttachError {
    /// `TOWPATH_SOCKET` is not set, and no path was given.
    #[error("TOWPATH_SOCKET is not set: start this program with towpath, or pass the path of the socket")]
    NoSocket,
    /// connect(2) failed.
    #[error("cannot connect to {path}: {source}", path = path.display())]
    Connect {
        /// Path of the socket.
        path: PathBuf,
        /// Error of connect(2).
        source: io::Error,
    },
    /// The two sides speak different versions of the ring's ABI.
    #[error(
        "the engine speaks ring ABI version {engine}, this client version {client}; use releases that match"
    )]
    /// Engine and client have different versions of the ring ABI.
    Version {
        /// The engine's version.
        engine: u16,
        /// This library's version.
        client: u16,
    },
    /// The engine does not permit this user (EPERM).
    #[error("not permitted: {0}")]
    NotPermitted(String),
    /// A quota of the engine is exceeded.
    #[error("limit reached: {0}")]
    Limit(String),
    /// The engine failed to set the channel up.
    #[error("the engine failed to set the channel up: {0}")]
    Engine(String),
    /// The engine did not answer in time; the value is in seconds.
    #[error("the engine did not answer within {0} s")]
    TimedOut(u64),
    /// The engine closed the connection without an answer.
    #[error("the engine closed the connection before it answered")]
    Closed,
    /// The peer does not speak this protocol.
    #[error("{0} is not the socket of a towpath engine")]
    NotTowpath(PathBuf),
    /// The received memory is not as an engine creates it; mapping it would be unsafe.
    #[error("refused memory from the engine: {0}")]
    Unsafe(String),
    /// The geometry of a ring is invalid.
    #[error("invalid geometry from the engine: {0}")]
    Geometry(#[from] GeometryError),
    /// A system call failed.
    #[error("{doing}: {source}")]
    System {
        /// Operation that failed.
        doing: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
}

impl AttachError {
    /// errno(3) value for other languages: EPERM for [`NotPermitted`](Self::NotPermitted), EPROTONOSUPPORT for
    /// [`Version`](Self::Version), ENOBUFS for [`Limit`](Self::Limit).
    #[must_use]
    pub fn errno(&self) -> i32 {
        use rustix::io::Errno;
        let errno = match self {
            Self::NoSocket => Errno::DESTADDRREQ,
            Self::Connect { source, .. } | Self::System { source, .. } => {
                return source.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
            }
            Self::Version { .. } => Errno::PROTONOSUPPORT,
            Self::NotPermitted(_) => Errno::PERM,
            Self::Limit(_) => Errno::NOBUFS,
            Self::Engine(_) => Errno::IO,
            Self::TimedOut(_) => Errno::TIMEDOUT,
            Self::Closed => Errno::CONNRESET,
            Self::NotTowpath(_) | Self::Unsafe(_) => Errno::PROTO,
            Self::Geometry(_) => Errno::INVAL,
        };
        errno.raw_os_error()
    }
}
