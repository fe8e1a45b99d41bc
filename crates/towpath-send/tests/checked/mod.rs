//! How both tests over real sockets send: without a copy, and nothing unchecked.

use std::time::Duration;

use towpath_send::{CopyMode, Options};

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Zero copy for every byte, and every frame checked at its completion.
pub(crate) fn zerocopy() -> Options {
    Options {
        choice: CopyMode::Zerocopy,
        min_zerocopy: 1,
        gather: 0,
        tamper_check: true,
        stall: Some(PATIENCE),
        ..Options::default()
    }
}

/// Bytes that tell their place in the stream.
pub(crate) fn pattern(from: u64, len: usize) -> Vec<u8> {
    (from..from + len as u64).map(byte_at).collect()
}

pub(crate) fn byte_at(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}
