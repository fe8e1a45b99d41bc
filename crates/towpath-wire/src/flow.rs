use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The addresses of a flow, in the direction of one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
// With repr(C) the addresses are aligned to four bytes and are copied as words.
#[repr(C)]
pub enum Ends {
    /// IPv4 source, destination.
    V4(Ipv4Addr, Ipv4Addr),
    /// IPv6 source, destination, and the scope zone (0 unless an address is link-local).
    V6(Ipv6Addr, Ipv6Addr, u32),
}

/// The source or the destination of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum End {
    /// The source.
    Source,
    /// The destination.
    Destination,
}

impl Ends {
    /// The address of an end.
    pub fn address(self, end: End) -> IpAddr {
        let (source, destination) = self.addresses();
        match end {
            End::Source => source,
            End::Destination => destination,
        }
    }

    /// Source and destination.
    #[inline]
    pub fn addresses(self) -> (IpAddr, IpAddr) {
        match self {
            Self::V4(src, dst) => (src.into(), dst.into()),
            Self::V6(src, dst, _) => (src.into(), dst.into()),
        }
    }
}

/// The key of a dynamic state without its flow name: addresses, protocol, ports and zone of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Addresses.
    pub ends: Ends,
    /// Upper-layer protocol (IANA number).
    pub proto: u8,
    /// Source port; 0 if the protocol has none. For an ICMP query or reply, both ports hold the identifier; states ignore it
    /// unless `dyn_icmp_id` is on.
    pub src_port: u16,
    /// Destination port, as `src_port`.
    pub dst_port: u16,
    /// The zone of the port that received the packet, 0 by default: each zone has separate states.
    pub zone: u16,
}

impl Flow {
    /// The flow of packets in the opposite direction.
    pub fn reversed(self) -> Self {
        let ends = match self.ends {
            Ends::V4(src, dst) => Ends::V4(dst, src),
            Ends::V6(src, dst, zone) => Ends::V6(dst, src, zone),
        };
        Self { ends, src_port: self.dst_port, dst_port: self.src_port, ..self }
    }

    /// The one of the two directions whose source is the lower end: the same for a flow and its [reverse](Self::reversed).
    pub fn undirected(self) -> Self {
        let ordered = match self.ends {
            Ends::V4(src, dst) => (src, self.src_port) <= (dst, self.dst_port),
            Ends::V6(src, dst, _) => (src, self.src_port) <= (dst, self.dst_port),
        };
        if ordered { self } else { self.reversed() }
    }
}

/// The fields of one packet that update its state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// TCP flags; 0 for other protocols.
    pub tcp_flags: u8,
    /// TCP acknowledgement number.
    pub tcp_ack: u32,
    /// TCP sequence number.
    pub tcp_seq: u32,
    /// Bytes of TCP payload.
    pub tcp_len: u32,
    /// The packet is the first fragment of its datagram: the segment has more bytes than `tcp_len`.
    pub tcp_fragment: bool,
    /// TCP window, unscaled.
    pub tcp_window: u16,
    /// Window scale option of a TCP SYN (RFC 7323).
    pub tcp_wscale: Option<u8>,
    /// Type of the first SCTP chunk (RFC 9260).
    pub sctp_chunk: Option<u8>,
    /// Bytes to count for the packet.
    pub bytes: u32,
}
