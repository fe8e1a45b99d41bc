use std::io;

use thiserror::Error;

/// Why receiving ended.
#[derive(Debug, Error)]
pub enum RecvError {
    /// The engine wrote something that makes no sense: a defect, or not an engine.
    #[error("the ring is damaged: {0}")]
    Damaged(String),
    /// A system call failed.
    #[error("waiting for frames: {0}")]
    System(#[from] io::Error),
}
