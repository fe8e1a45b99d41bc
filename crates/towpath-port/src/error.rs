use std::io;

use crate::LinkType;

/// Why a port cannot go on. Every message names the port and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file could not be opened or created.
    #[error("{name}: cannot open: {source}")]
    Open {
        /// Path of the file.
        name: String,
        /// What the system said.
        source: io::Error,
    },
    /// Reading or writing failed.
    #[error("{name}: {source}")]
    Io {
        /// Name of the port.
        name: String,
        /// What the system said.
        source: io::Error,
    },
    /// The file is neither pcap nor pcapng (nor one of them under gzip).
    #[error("{name}: not a capture: {reason}; expected pcap or pcapng, plain or gzipped")]
    NotACapture {
        /// Path of the file.
        name: String,
        /// What was found instead.
        reason: String,
    },
    /// A pcap file has one link type, and a frame of another was to be written to it.
    #[error(
        "{name}: a pcap file holds one link type, this one {file}; a frame of {frame} does not fit: \
         write a .pcapng file, which holds both"
    )]
    LinkTypes {
        /// Path of the file.
        name: String,
        /// Link type that the file began with.
        file: LinkType,
        /// Link type of the frame that was refused.
        frame: LinkType,
    },
    /// A pcap file counts seconds in 32 bits, and a frame's time is after 2106-02-07.
    #[error(
        "{name}: a pcap file's times end in 2106, this frame's is {time_ns} ns since 1970: write a .pcapng file"
    )]
    Time {
        /// Path of the file.
        name: String,
        /// Time of the frame that was refused.
        time_ns: u64,
    },
    /// The frame is longer than [`MAX_FRAME`](crate::MAX_FRAME), or than the port's interface takes.
    #[error("{name}: a frame of {len} bytes is longer than the {max} that this port carries")]
    TooLong {
        /// Name of the port.
        name: String,
        /// Length of the frame in bytes.
        len: usize,
        /// Bytes that would have been taken.
        max: usize,
    },
    /// The frame has only the beginning of a packet that the kernel holds, and was to replace it.
    #[error(
        "{name}: the kernel handed over {len} bytes of a longer packet, which they cannot replace: let it go on as it is, \
         or have it whole (`copy-range`)"
    )]
    Cut {
        /// Name of the port.
        name: String,
        /// Length of the frame in bytes.
        len: usize,
    },
    /// The frame begins otherwise than the port's frames do, and its link header cannot be made up.
    #[error(
        "{name}: carries frames of {link}, and this one is of {frame}: connect ports of one kind \
         (tap or Ethernet interfaces; tun and NFQUEUE)"
    )]
    LinkType {
        /// Name of the port.
        name: String,
        /// Link type of the port.
        link: LinkType,
        /// Link type of the frame that was refused.
        frame: LinkType,
    },
    /// There is no interface of this name.
    #[error("no such interface \"{interface}\": look at `ip link` in the port's network namespace")]
    NoInterface {
        /// The name that was looked for.
        interface: String,
    },
    /// The process may not do this.
    #[error(
        "{name}: needs {capability}: run as root, or in a user and network namespace of its own where that is enough"
    )]
    Privilege {
        /// Name of the port.
        name: String,
        /// The capability that is missing (capabilities(7)).
        capability: &'static str,
    },
    /// This kernel, or this interface's driver, lacks what was asked for.
    #[error("{name}: {what}")]
    Unsupported {
        /// Name of the port.
        name: String,
        /// What is lacking, and what to use in its place.
        what: String,
    },
    /// Somebody else has what the port needs.
    #[error("{name}: {what}")]
    InUse {
        /// Name of the port.
        name: String,
        /// What is in use, and what to do.
        what: String,
    },
    /// The configuration of the port asks for something that cannot be.
    #[error("{name}: {what}")]
    Config {
        /// Name of the port.
        name: String,
        /// Which value, and what it may be.
        what: String,
    },
    /// This port does not do what was asked: a capture that is read cannot be sent to, nor the reverse.
    #[error("{name}: cannot {verb}, this port goes the other way")]
    Direction {
        /// Name of the port.
        name: String,
        /// `send` or `receive`.
        verb: &'static str,
    },
}
