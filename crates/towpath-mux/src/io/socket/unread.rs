//! What one read takes of a message.
//!
//! A datagram that is longer than the buffer loses its rest, and says so. Of a packet the next read goes on where this one ended; the one
//! that reaches its end says that (Linux's KCM loses the rest since 2022).

use super::{Flags, Kind};

/// What came of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Read {
    /// Bytes that are in the buffer.
    pub(super) copied: usize,
    /// [`Flags::TRUNC`] and [`Flags::EOR`].
    pub(super) flags: Flags,
    /// Bytes that are not to be read again.
    pub(super) taken: usize,
}

/// How many bytes of what is left of a message go into so much room, what is said of it, and how many are thereby read.
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

/// Reads what is left of a message.
pub(super) fn read(kind: Kind, rest: &[u8], buffer: &mut [u8], peek: bool) -> Read {
    let read = fit(kind, rest.len(), buffer.len(), peek);
    buffer[..read.copied].copy_from_slice(&rest[..read.copied]);
    read
}
