use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::shm::geometry::GeometryError;

/// Why an endpoint could not be set up.
#[derive(Debug, Error)]
pub enum BindError {
    /// The socket could not be made.
    #[error("cannot listen on {path}: {source}", path = path.display())]
    Listen {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A live engine listens there.
    #[error("another engine listens on {0}; stop it or choose another path")]
    InUse(PathBuf),
    /// The shape of a ring breaks a rule.
    #[error("{direction} ring: {rule}")]
    Geometry {
        /// Which ring.
        direction: &'static str,
        /// The rule.
        rule: GeometryError,
    },
    /// The number of lanes breaks a rule.
    #[error("{0} lanes: a channel has 1 to 64")]
    Lanes(u32),
    /// The number of records breaks a rule.
    #[error("{0} records: the number must be a power of two from 2 to 65536")]
    Records(u32),
}
