//! Where packets come from and go to.
//!
//! A [`Port`] receives and sends frames in batches; a [`Burst`] is the reusable memory of one batch. These drivers need no
//! privilege: [`pcap`] files in and out, [`Loopback`] for tests and for programs that bring their own packets, and a
//! [`generator`] of traffic. These are live: [`af_packet`] for any interface, [`af_xdp`] for its queues before the network stack,
//! [`tun`] for interfaces of one's own, [`nfqueue`] behind an existing iptables or nftables set-up. What their frames leave undone ([`Offload`]) every
//! port puts right on the way out where its medium cannot; [`towpath_wire::checksum`] and [`towpath_wire::gso`] do it for programs that change packets.
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
mod burst;
mod clock;
#[cfg(any(test, feature = "test-util"))]
pub mod conformance;
pub mod driver;
mod error;
pub mod generator;
mod interface;
mod loopback;
mod mapping;
mod meta;
mod named;
pub mod namespace;
#[cfg(any(test, feature = "test-util"))]
pub mod netns;
pub mod nfqueue;
pub mod pcap;
mod port;
mod stats;
mod sys;
pub mod tun;
mod tx_offload;
#[cfg(test)]
mod veth_tests;

pub use burst::{Burst, Frame, Full};
pub use error::Error;
pub use loopback::Loopback;
pub use meta::{Conntrack, Meta, Queued};
pub use port::{Caps, Port, QueueVerdict, Received, State};
pub use stats::Stats;
pub use towpath_wire::{Checksum, Gso, GsoKind, LinkType, Offload, Segmentation};

/// The longest frame that a port receives or sends, in bytes: libpcap's `MAXIMUM_SNAPLEN`.
///
/// A BIG TCP packet (more than 65,535 bytes) fits; a length beyond this is a lie or a damaged file.
pub const MAX_FRAME: usize = 262_144;
