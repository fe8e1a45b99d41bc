//! The metadata of a frame: where it came from, and where it leaves.

use std::net::IpAddr;

use towpath_gate::PortId;
use towpath_port::Frame;
use towpath_wire::LinkType;

/// Where a packet leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Egress {
    /// By no port: a packet of a replay without a route, or of a monitored port.
    #[default]
    Unrouted,
    /// By this port.
    Port(PortId),
    /// To the router itself.
    Local,
}

impl Egress {
    /// The port, if the packet leaves by one.
    pub fn port(self) -> Option<PortId> {
        match self {
            Self::Port(port) => Some(port),
            Self::Unrouted | Self::Local => None,
        }
    }
}

/// The next hop of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NextHop {
    /// The packet is not routed, or its destination is not a single host.
    #[default]
    None,
    /// The host with this Ethernet address.
    Mac([u8; 6]),
    /// The host with this IP address. ARP or neighbor discovery resolves it.
    Neighbor(IpAddr),
    /// The host with this IP address, which was resolved by the route lookup.
    Resolved(IpAddr, Adjacency),
}

/// The index of a neighbor in a thread's copy of the neighbor table. The entry may have changed when it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adjacency(pub(crate) u16);

/// The metadata of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// Bytes on the wire.
    pub wire_len: u32,
    /// Capture time in nanoseconds since the epoch.
    pub time: u64,
    /// The link type: the header at the beginning of the frame.
    pub link: LinkType,
    /// The interface that received the frame: its number in the capture, or the number of the live port.
    pub interface: u32,
    /// Where the packet leaves. Set when it has passed.
    pub egress: Egress,
    /// The next hop of a routed packet. Set when it has passed.
    pub next_hop: NextHop,
    /// Offset of the IP header of a routed packet. Set when it has passed.
    pub network: u16,
    /// The number of received packets that the frame stands for: more than 1 for a reassembled datagram, 0 for a frame
    /// of the router itself.
    pub packets: u16,
    /// Length of the longest received fragment of a reassembled datagram, with the IPv4 header. 0 for other packets.
    pub fragment_len: u16,
    /// The bytes differ from those that were received.
    pub changed: bool,
    /// The port driver's metadata.
    pub port: towpath_port::Meta,
}

impl Meta {
    /// The metadata of a frame that arrived on `interface`.
    pub fn received(frame: &Frame<'_>, interface: u32) -> Self {
        Self {
            wire_len: frame.wire_len,
            time: frame.time_ns,
            interface,
            port: frame.meta,
            ..Self::new(frame.link, 0)
        }
    }

    /// The metadata of one packet of `len` bytes that is complete and has no offloads.
    pub fn new(link: LinkType, len: usize) -> Self {
        Self {
            wire_len: len as u32,
            time: 0,
            link,
            interface: 0,
            egress: Egress::Unrouted,
            next_hop: NextHop::None,
            network: 0,
            packets: 1,
            fragment_len: 0,
            changed: false,
            port: towpath_port::Meta::default(),
        }
    }
}
