use std::io;

use thiserror::Error;

/// Why receiving failed.
#[derive(Debug, Error)]
pub enum RecvError {
    /// The engine wrote invalid data: a defect, or the peer is not an engine.
    #[error("the ring is damaged: {0}")]
    Damaged(String),
    /// A system call failed.
    #[error("waiting for frames: {0}")]
    System(#[from] io::Error),
}
