use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::shm::geometry::GeometryError;

/// Why a client could not attach.
#[derive(Debug, Error)]
pub enum AttachError {
    /// No path was given and the environment names none.
    #[error("TOWPATH_SOCKET is not set: start this program through towpath, or name the socket")]
    NoSocket,
    /// The socket could not be connected.
    #[error("cannot connect to {path}: {source}", path = path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What connect(2) said.
        source: io::Error,
    },
    /// The two sides speak different versions of the ring's ABI.
    #[error(
        "the engine speaks ring ABI version {engine}, this client version {client}; use releases that match"
    )]
    Version {
        /// The engine's version.
        engine: u16,
        /// This library's version.
        client: u16,
    },
    /// The engine does not allow this user (EPERM).
    #[error("not permitted: {0}")]
    NotPermitted(String),
    /// A limit of the engine would be exceeded.
    #[error("limit reached: {0}")]
    Limit(String),
    /// The engine could not set the channel up.
    #[error("the engine could not set the channel up: {0}")]
    Engine(String),
    /// The engine did not answer in time.
    #[error("the engine did not answer within {0} s")]
    TimedOut(u64),
    /// The engine closed the connection without an answer.
    #[error("the engine closed the connection before it answered")]
    Closed,
    /// What is at the other end does not speak this protocol.
    #[error("{0} is not a towpath engine's socket")]
    NotTowpath(PathBuf),
    /// The memory that came is not what an engine sends; mapping it would not be safe.
    #[error("refused memory from the engine: {0}")]
    Unsafe(String),
    /// The shape of the ring breaks a rule.
    #[error("the engine's ring breaks a rule: {0}")]
    Geometry(#[from] GeometryError),
    /// A system call failed.
    #[error("{doing}: {source}")]
    System {
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl AttachError {
    /// The error's number for interfaces that have nothing else (errno(3)): EPERM for [`NotPermitted`](Self::NotPermitted),
    /// EPROTONOSUPPORT for [`Version`](Self::Version), ENOBUFS for [`Limit`](Self::Limit).
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
