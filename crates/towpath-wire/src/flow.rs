use std::net::{Ipv4Addr, Ipv6Addr};

/// The two ends of a flow, in the direction of one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
// With C's layout addresses begin at a multiple of four, and are moved as words.
#[repr(C)]
pub enum Ends {
    /// IPv4 source, destination.
    V4(Ipv4Addr, Ipv4Addr),
    /// IPv6 source, destination, and the scope zone (0 unless an address is link-local).
    V6(Ipv6Addr, Ipv6Addr, u32),
}

/// What a state is looked up by, apart from its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Addresses.
    pub ends: Ends,
    /// Upper-layer protocol (IANA number).
    pub proto: u8,
    /// Source port, 0 where the protocol has none. Of an ICMP query or its answer the identifier, in both ports; the
    /// states take no notice of it unless `dyn_icmp_id` is on.
    pub src_port: u16,
    /// Destination port, likewise.
    pub dst_port: u16,
    /// Tenant, 0 by default.
    pub tenant: u16,
}

impl Flow {
    /// The same flow as the other side sends it.
    pub fn reversed(self) -> Self {
        let ends = match self.ends {
            Ends::V4(src, dst) => Ends::V4(dst, src),
            Ends::V6(src, dst, zone) => Ends::V6(dst, src, zone),
        };
        Self { ends, src_port: self.dst_port, dst_port: self.src_port, ..self }
    }
}

/// What one packet contributes to its state.
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
    /// TCP window, unscaled.
    pub tcp_window: u16,
    /// The window scale option of a TCP SYN.
    pub tcp_wscale: Option<u8>,
    /// The type of the first SCTP chunk.
    pub sctp_chunk: Option<u8>,
    /// Bytes counted for the packet.
    pub bytes: u32,
}
