//! Peers that Towpath is compared with.

pub(crate) mod conntrack;
pub(crate) mod flood;
pub(crate) mod iceoryx;
pub(crate) mod maps;
pub(crate) mod netns;
pub(crate) mod nfqueue;
pub(crate) mod seqpacket;

use std::fmt;

/// The reason why this system cannot run a measurement; the report omits its metric.
#[derive(Debug)]
pub(crate) struct Skipped(pub(crate) String);

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "skipped: {}", self.0)
    }
}

impl std::error::Error for Skipped {}
