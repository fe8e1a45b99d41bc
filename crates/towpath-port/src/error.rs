use std::io;

use crate::LinkType;

/// An error of a port. Every message names the port and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file could not be opened or created.
    #[error("{name}: cannot open: {source}")]
    Open {
        /// Path of the file.
        name: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Reading or writing failed.
    #[error("{name}: {source}")]
    Io {
        /// Name of the port.
        name: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The file is neither pcap nor pcapng (nor one of them under gzip).
    #[error("{name}: not a capture: {reason}; expected pcap or pcapng, plain or gzipped")]
    NotACapture {
        /// Path of the file.
        name: String,
        /// The file's actual contents.
        reason: String,
    },
    /// A frame of another link type was written to a pcap file, which has one link type.
    #[error(
        "{name}: a pcap file has one link type, here {file}; a frame of {frame} cannot be written: \
         write a .pcapng file, which can have several"
    )]
    LinkTypes {
        /// Path of the file.
        name: String,
        /// Link type of the file.
        file: LinkType,
        /// Link type of the frame.
        frame: LinkType,
    },
    /// A frame after 2106-02-07 was written to a pcap file, whose timestamps have 32-bit seconds.
    #[error(
        "{name}: pcap timestamps end in 2106; this frame's time is {time_ns} ns since 1970: write a .pcapng file"
    )]
    Time {
        /// Path of the file.
        name: String,
        /// Time of the frame.
        time_ns: u64,
    },
    /// The frame is longer than [`MAX_FRAME`](crate::MAX_FRAME), or than the interface's MTU permits.
    #[error("{name}: a frame of {len} bytes exceeds the port's limit of {max}")]
    TooLong {
        /// Name of the port.
        name: String,
        /// Length of the frame in bytes.
        len: usize,
        /// The limit in bytes.
        max: usize,
    },
    /// A truncated frame cannot replace the packet in the kernel's queue.
    #[error(
        "{name}: the frame has the first {len} bytes of a longer packet and cannot replace it: accept it unchanged, \
         or increase `copy-range`"
    )]
    Cut {
        /// Name of the port.
        name: String,
        /// Length of the frame in bytes.
        len: usize,
    },
    /// The frame has another link type than the port.
    #[error(
        "{name}: the port's link type is {link}, the frame's is {frame}: connect ports of one kind \
         (tap or Ethernet interfaces; tun and NFQUEUE)"
    )]
    LinkType {
        /// Name of the port.
        name: String,
        /// Link type of the port.
        link: LinkType,
        /// Link type of the frame.
        frame: LinkType,
    },
    /// The interface does not exist.
    #[error("no such interface \"{interface}\": run `ip link` in the port's network namespace")]
    NoInterface {
        /// Name of the interface.
        interface: String,
    },
    /// The process lacks a capability.
    #[error("{name}: needs {capability}: run as root, or in a private user and network namespace")]
    Privilege {
        /// Name of the port.
        name: String,
        /// The missing capability (capabilities(7)).
        capability: &'static str,
    },
    /// The packets of the interface cannot be kept from the kernel's network stack.
    #[error(
        "{name}: cannot keep the packets from the kernel's network stack ({source}): run as root outside of any user namespace \
         (before Linux 6.6, with CONFIG_NET_CLS_BPF and CONFIG_NET_SCH_INGRESS), or write exclusive = false if the kernel may process them too"
    )]
    NotExclusive {
        /// Name of the port.
        name: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The programs of flow offload cannot be attached.
    #[error(
        "{name}: offload is not possible ({source}): it needs root outside of any user namespace, and Linux 6.6; remove [offload]"
    )]
    NoOffload {
        /// Name of the port.
        name: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The kernel or the interface's driver lacks a feature.
    #[error("{name}: {what}")]
    Unsupported {
        /// Name of the port.
        name: String,
        /// The missing feature, and an alternative.
        what: String,
    },
    /// The resource is in use.
    #[error("{name}: {what}")]
    InUse {
        /// Name of the port.
        name: String,
        /// The resource, and the remedy.
        what: String,
    },
    /// The configuration of the port is invalid.
    #[error("{name}: {what}")]
    Config {
        /// Name of the port.
        name: String,
        /// The key and its valid values.
        what: String,
    },
    /// The port does not support this direction: a capture reader cannot send, a writer cannot receive.
    #[error("{name}: this port cannot {verb}")]
    Direction {
        /// Name of the port.
        name: String,
        /// `send` or `receive`.
        verb: &'static str,
    },
}
