//! Packet ports: capture files, network interfaces, TUN/TAP devices, NFQUEUE, a traffic generator.
//!
//! A [`Port`] receives and sends frames in bursts. A [`Burst`] is the reusable memory of one burst. Use this crate to process
//! packets at layer 2 or 3 with one interface to all drivers:
//!
//! | driver | medium | privilege |
//! |---|---|---|
//! | [`pcap`] | capture files, pcap and pcapng | none |
//! | [`Loopback`] | memory, for tests | none |
//! | [`generator`] | generated traffic | none |
//! | [`af_packet`] | any interface, by a packet socket | `CAP_NET_RAW`; exclusive: `CAP_NET_ADMIN`, `CAP_BPF` |
//! | [`af_xdp`] | queues of an Ethernet interface, before the network stack | `CAP_NET_RAW`, `CAP_NET_ADMIN`, `CAP_BPF` |
//! | [`tun`] | a TUN or TAP device | `CAP_NET_ADMIN` |
//! | [`nfqueue`] | packets that an iptables or nftables rule queues | `CAP_NET_ADMIN` |
//!
//! A port whose medium cannot complete checksums or segment frames ([`Offload`]) does it in software when sending;
//! [`towpath_wire::checksum`] and [`towpath_wire::gso`] have the functions. [`driver`] is the table of drivers that can be
//! selected by name.
//!
//! Not supported: DPDK, netmap, operating systems other than Linux. The crate does not parse packets (see `towpath-wire`) and
//! does not configure routes or addresses.
//!
//! ```no_run
//! use towpath_port::{Burst, Port, Received, pcap};
//!
//! let mut port = pcap::Reader::open("office.pcap")?;
//! let mut burst = Burst::new(64);
//! while port.receive(&mut burst)? != Received::End {
//!     for frame in burst.iter() {
//!         println!("{} ns, {} bytes of {}", frame.time_ns, frame.bytes.len(), frame.link);
//!     }
//! }
//! if let Some(warning) = port.warning() {
//!     eprintln!("{warning}");
//! }
//! # Ok::<(), towpath_port::Error>(())
//! ```

pub mod af_packet;
pub mod af_xdp;
mod bpf_asm;
mod burst;
mod claim;
mod clock;
pub mod clsact;
#[cfg(any(test, feature = "test-util"))]
pub mod conformance;
pub mod credentials;
pub mod driver;
mod error;
pub mod forbidden_call;
pub mod generator;
pub mod hand_over;
mod host_filter;
mod interface;
pub mod kernel_path;
mod loopback;
mod mapping;
mod meta;
mod named;
pub mod namespace;
#[cfg(any(test, feature = "test-util"))]
pub mod netns;
pub mod nfqueue;
pub mod offload;
mod opener;
pub mod pcap;
pub mod pins;
mod port;
pub mod probe;
#[cfg(test)]
mod reopen_tests;
mod rtnetlink;
pub mod scheduling;
mod stats;
mod sys;
pub mod tun;
mod tx_offload;
#[cfg(test)]
mod veth_tests;
mod waiting;

pub use burst::{Burst, Frame, Full};
pub use error::Error;
pub use hand_over::HandOver;
pub use loopback::Loopback;
pub use meta::{Conntrack, Meta, Queued};
pub use opener::{Object, Opener};
pub use port::{Caps, Port, QueueVerdict, Received, State};
pub use stats::{Stats, TxDrop};
pub use towpath_wire::{Checksum, Gso, GsoKind, LinkType, Offload, Segmentation};

/// Length of the longest frame that a port receives or sends, in bytes: libpcap's `MAXIMUM_SNAPLEN`.
///
/// BIG TCP packets (more than 65,535 bytes) fit. In a capture file, a larger length indicates damage.
pub const MAX_FRAME: usize = 262_144;
