//! Capture files: pcap and pcapng, read as a stream and written.
//!
//! Read: classic pcap in both byte orders with microseconds, nanoseconds and the longer record header of the "modified"
//! format, those older than version 2.3 too; pcapng with any number of sections and interfaces, in both byte orders; either under gzip; from a path,
//! standard input or any [`std::io::Read`]. Of pcapng blocks those with packets and interfaces are read (section
//! header, interface description, enhanced packet, simple packet and the obsolete packet block); the others are
//! skipped, their insides never looked at.
//!
//! Not read: snoop, netmon, ERF and other formats; packets longer than [`MAX_FRAME`](crate::MAX_FRAME).
//!
//! References: draft-ietf-opsawg-pcap, draft-ietf-opsawg-pcapng, pcap-savefile(5).
//
// Why the formats are read by our own code: pcap-parser 0.17, which streams and agrees on every well-formed capture we
// have, reads if_tsoffset of big-endian sections in the wrong order, knows no power-of-two resolution, no obsolete
// packet block and no big-endian modified pcap, takes a packet length that lies about its block for "more data needed"
// (and so swallows the rest of the file), drops the reason of an IO error, and allocates for every packet with options.
// The tests have it read what our writer writes.

mod blocks;
mod classic;
mod input;
mod ng;
mod order;
mod reader;
mod writer;

pub use blocks::{Blocks, Options};
pub use reader::{Damage, Progress, Reader, Warning};
pub use writer::{Format, Resolution, Writer};

use crate::Frame;

/// The longest record or block that is held in memory at once: the longest frame and generous options.
const MAX_BLOCK: usize = 1 << 20;

/// The bytes of a packet that had `wire_len` bytes on the wire. What a file has beyond them was no part of it: for
/// Wireshark the packet ends there, too.
#[inline]
fn part(bytes: &[u8], wire_len: u32) -> &[u8] {
    &bytes[..bytes.len().min(wire_len as usize)]
}

/// What the bytes at hand begin with.
enum Step<'a> {
    /// A packet; the record is `used` bytes long.
    Frame { frame: Frame<'a>, used: usize },
    /// This many bytes that are no packet.
    Skip(u64),
    /// A part of something: more bytes are needed. The whole is at most [`MAX_BLOCK`] long.
    More,
    /// Nothing that can be read.
    Corrupt(String),
}
