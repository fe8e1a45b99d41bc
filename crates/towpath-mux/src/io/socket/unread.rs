//! How much of a message a read consumes.
//!
//! A datagram longer than the buffer loses the rest, with MSG_TRUNC. A packet continues with the next read;
//! the read that reaches its end has MSG_EOR. (Linux's KCM loses the rest since 2022.)

use super::{Flags, Kind};

/// Result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Read {
    /// Number of bytes in the buffer.
    pub(super) copied: usize,
    /// [`Flags::TRUNC`] and [`Flags::EOR`].
    pub(super) flags: Flags,
    /// Number of bytes consumed.
    pub(super) taken: usize,
}

/// Reads `rest` bytes of a message into `room` bytes of buffer.
pub(super) fn fit(kind: Kind, rest: usize, room: usize, peek: bool) -> Read {
    let copied = rest.min(room);
    let whole = copied == rest;
    let (flags, taken) = match kind {
        Kind::Dgram if whole => (Flags::EOR, rest),
        Kind::Dgram => (Flags::EOR | Flags::TRUNC, rest),
        Kind::Seqpacket if whole => (Flags::EOR, rest),
        Kind::Seqpacket => (Flags::empty(), copied),
    };
    Read { copied, flags, taken: if peek { 0 } else { taken } }
}

/// Copies the rest of a message into the buffer.
pub(super) fn read(kind: Kind, rest: &[u8], buffer: &mut [u8], peek: bool) -> Read {
    let read = fit(kind, rest.len(), buffer.len(), peek);
    buffer[..read.copied].copy_from_slice(&rest[..read.copied]);
    read
}
