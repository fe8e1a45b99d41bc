//! Capture files: a streaming reader and a writer of pcap and pcapng.
//!
//! The reader supports classic pcap in both byte orders, with microseconds, nanoseconds, the longer record header of the "modified"
//! format, and versions before 2.3; pcapng in both byte orders with any number of sections and interfaces; gzip compression of
//! either; and as source a path, standard input or any [`std::io::Read`]. Of pcapng it reads section headers, interface descriptions
//! and enhanced, simple and obsolete packet blocks, and skips other blocks.
//!
//! Not supported: snoop, netmon, ERF and other formats; packets longer than [`MAX_FRAME`](crate::MAX_FRAME).
//!
//! References: draft-ietf-opsawg-pcap, draft-ietf-opsawg-pcapng, pcap-savefile(5).
//
// Reasons for a parser in this crate: pcap-parser 0.17 streams and agrees on every well-formed capture of the tests, but reads
// if_tsoffset of big-endian sections in the wrong byte order, does not support power-of-two resolutions, obsolete packet blocks
// and big-endian modified pcap, treats a packet length that contradicts its block as "more data needed" (and swallows the
// rest of the file), drops the cause of an IO error, and allocates for every packet with options. The tests use it to read
// the writer's output.

mod blocks;
mod classic;
mod input;
mod ng;
mod order;
mod pipe;
mod port;
mod reader;
mod writer;

pub use blocks::{Blocks, Options};
pub use port::Config;
pub use reader::{Damage, Progress, Reader, Warning};
pub use writer::{Format, Resolution, Writer};

use crate::Frame;

/// Limit on a record or block in memory: the longest frame, and options.
const MAX_BLOCK: usize = 1 << 20;

/// The bytes of a packet of `wire_len` bytes. Further bytes in the file are not part of the packet, as in Wireshark.
#[inline]
fn part(bytes: &[u8], wire_len: u32) -> &[u8] {
    &bytes[..bytes.len().min(wire_len as usize)]
}

/// The first item of the available bytes.
enum Step<'a> {
    /// A packet; the record is `used` bytes long.
    Frame { frame: Frame<'a>, used: usize },
    /// This many bytes without a packet.
    Skip(u64),
    /// An incomplete record of at most [`MAX_BLOCK`] bytes: more bytes are needed.
    More,
    /// Invalid data, and the reason.
    Corrupt(String),
}
