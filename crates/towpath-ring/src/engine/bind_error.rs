use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::shm::geometry::GeometryError;

/// Why an endpoint could not be created.
#[derive(Debug, Error)]
pub enum BindError {
    /// The socket could not be created.
    #[error("cannot listen on {path}: {source}", path = path.display())]
    Listen {
        /// Path of the socket.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// Another engine listens at the path.
    #[error("another engine listens on {0}; stop it or choose another path")]
    InUse(PathBuf),
    /// The geometry of a ring is invalid.
    #[error("{direction} ring: {rule}")]
    Geometry {
        /// `RX` or `TX`.
        direction: &'static str,
        /// The broken rule.
        rule: GeometryError,
    },
    /// The number of lanes is invalid.
    #[error("{0} lanes: must be 1 to 64")]
    Lanes(u32),
    /// The number of records is invalid.
    #[error("{0} records: must be a power of two from 2 to 65536")]
    Records(u32),
}
