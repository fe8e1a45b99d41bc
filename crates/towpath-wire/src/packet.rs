//! One packet as the rules see it: what a single pass over its headers found.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::proto;
use crate::{Ends, Flow, LinkType, Segment};

/// The addresses of the IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
// With C's layout addresses begin at a multiple of four, and are moved as words.
#[repr(C)]
pub enum Addresses {
    /// Not an IP packet.
    None,
    /// IPv4 source and destination.
    V4(Ipv4Addr, Ipv4Addr),
    /// IPv6 source and destination.
    V6(Ipv6Addr, Ipv6Addr),
}

/// Which part of a fragmented datagram a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fragment {
    /// Not fragmented (an IPv6 atomic fragment included).
    Whole,
    /// The first fragment: it has the upper-layer header.
    First,
    /// A later fragment: it has no ports.
    Later,
}

/// One packet: the frame's bytes and what its headers say.
///
/// Made by [`crate::parse`], which guarantees that every offset lies inside `frame`.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// The captured bytes, link header first.
    pub frame: &'a [u8],
    /// Bytes the frame had on the wire (at least `frame.len()`).
    pub wire_len: u32,
    /// How the frame begins.
    pub link: LinkType,
    /// Outermost VLAN id (12 bits), if the frame is tagged.
    pub vlan: Option<u16>,
    /// The ethertype after all VLAN tags; 0 when the link has none.
    pub ethertype: u16,
    /// Where the IP header (or, for others, the link's payload) starts.
    pub network: usize,
    /// The IP addresses.
    pub addresses: Addresses,
    /// Upper-layer protocol (IANA number); for IPv6 after all extension headers, for a later IPv6 fragment the header that
    /// its datagram goes on with. 0 when not IP.
    pub proto: u8,
    /// Length of the IP packet in bytes, header included, as its header says (for a packet captured before its sender's
    /// network card divided it, as the frame says); 0 when not IP.
    pub ip_len: u32,
    /// Where the upper layer starts: its header, or a later fragment's data. `frame.len()` when nothing of it was
    /// captured.
    pub transport: usize,
    /// Bytes of the upper layer that were captured, from `transport`; padding of the link excluded.
    pub transport_len: usize,
    /// Fragmentation.
    pub fragment: Fragment,
    /// Fragment offset in units of 8 bytes.
    pub fragment_offset: u16,
    /// Source port of TCP, UDP, UDP-Lite, SCTP, DCCP; 0 otherwise and for later fragments.
    pub src_port: u16,
    /// Destination port, likewise.
    pub dst_port: u16,
    /// TCP flags (FIN 0x01, SYN 0x02, RST 0x04, PSH 0x08, ACK 0x10, URG 0x20, ECE 0x40, CWR 0x80); 0 if not TCP.
    pub tcp_flags: u8,
    /// TCP sequence number; 0 if not TCP.
    pub tcp_seq: u32,
    /// TCP acknowledgement number; 0 if not TCP.
    pub tcp_ack: u32,
    /// TCP window, unscaled; 0 if not TCP.
    pub tcp_window: u16,
    /// ICMP or ICMPv6 type; 0 if neither (check `proto`).
    pub icmp_type: u8,
    /// ICMP or ICMPv6 code.
    pub icmp_code: u8,
    /// IPv6 extension headers seen, see [`crate::ext6`].
    pub ext6: u16,
}

impl Packet<'_> {
    /// What a state is looked up by: `None` when not IP. The scope zone and the tenant are 0: whoever knows the
    /// port sets them.
    #[inline]
    pub fn flow(&self) -> Option<Flow> {
        let ends = match self.addresses {
            Addresses::None => return None,
            Addresses::V4(src, dst) => Ends::V4(src, dst),
            Addresses::V6(src, dst) => Ends::V6(src, dst, 0),
        };
        let (src_port, dst_port) = match self.proto {
            // The identifier of a query stands for both ports.
            proto::ICMP | proto::ICMP6 => self.icmp_echo_id().map_or((0, 0), |id| (id, id)),
            _ => (self.src_port, self.dst_port),
        };
        Some(Flow { ends, proto: self.proto, src_port, dst_port, tenant: 0 })
    }

    /// The bytes that count: those of the IP packet, as in ipfw; of the frame on the wire when not IP.
    #[inline]
    pub fn counted_bytes(&self) -> u32 {
        if self.ip_len == 0 { self.wire_len } else { self.ip_len }
    }

    /// What the packet contributes to its state, with its [`Packet::counted_bytes`].
    #[inline]
    pub fn segment(&self) -> Segment {
        let base = Segment { bytes: self.counted_bytes(), ..Segment::default() };
        match self.proto {
            proto::TCP => Segment {
                tcp_flags: self.tcp_flags,
                tcp_ack: self.tcp_ack,
                tcp_seq: self.tcp_seq,
                tcp_len: self.tcp_data_len().unwrap_or(0),
                tcp_window: self.tcp_window,
                // The option means something in a SYN only (RFC 7323, 2.2).
                tcp_wscale: if self.tcp_flags & 0x02 != 0 { self.tcp_wscale() } else { None },
                ..base
            },
            proto::SCTP => Segment { sctp_chunk: self.sctp_chunk(), ..base },
            _ => base,
        }
    }
}
