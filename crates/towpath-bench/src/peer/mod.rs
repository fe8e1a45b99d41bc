//! What Towpath is measured against.

pub(crate) mod conntrack;
pub(crate) mod flood;
pub(crate) mod iceoryx;
pub(crate) mod maps;
pub(crate) mod netns;
pub(crate) mod nfqueue;
pub(crate) mod seqpacket;

use std::fmt;

/// Why a measurement cannot be made on this system; its bar is left out of the report.
#[derive(Debug)]
pub(crate) struct Skipped(pub(crate) String);

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "skipped: {}", self.0)
    }
}

impl std::error::Error for Skipped {}
