//! Options and data shared by the tests over real sockets.

use std::time::Duration;

use towpath_send::{BackEnd, CopyMode, Options};

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Set for a run of the tests with the back end io_uring (`uring.rs`).
pub(crate) const IO_URING: &str = "TOWPATH_SEND_IO_URING";

/// Zero copy for every byte, with a checksum of every frame at its completion.
pub(crate) fn zerocopy() -> Options {
    Options {
        choice: CopyMode::Zerocopy,
        back_end: match std::env::var_os(IO_URING) {
            Some(_) => BackEnd::IoUring,
            None => BackEnd::MsgZerocopy,
        },
        min_zerocopy: 1,
        gather: 0,
        tamper_check: true,
        stall: Some(PATIENCE),
        ..Options::default()
    }
}

/// Bytes that encode their position in the stream.
pub(crate) fn pattern(from: u64, len: usize) -> Vec<u8> {
    (from..from + len as u64).map(byte_at).collect()
}

pub(crate) fn byte_at(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}
