//! A parsed packet.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::link::{ETHERTYPE_MPLS, ETHERTYPE_MPLS_UPSTREAM, ETHERTYPE_PPPOE};
use crate::proto;
use crate::{Ends, Flow, LinkType, Segment};

/// The addresses of the IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
// With repr(C) the addresses are aligned to four bytes and are copied as words.
#[repr(C)]
pub enum Addresses {
    /// Not an IP packet.
    None,
    /// IPv4 source and destination.
    V4(Ipv4Addr, Ipv4Addr),
    /// IPv6 source and destination.
    V6(Ipv6Addr, Ipv6Addr),
}

/// Position of a packet in a fragmented datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fragment {
    /// Not fragmented. Includes IPv6 atomic fragments (RFC 6946).
    Whole,
    /// The first fragment, with the upper-layer header.
    First,
    /// A later fragment, without ports.
    Later,
}

/// A packet: the bytes of the frame and the fields of its headers.
///
/// [`parse`](crate::parse) returns it. Every offset lies inside `frame`.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// The captured bytes, link header first.
    pub frame: &'a [u8],
    /// Bytes the frame had on the wire (at least `frame.len()`).
    pub wire_len: u32,
    /// Link type of the frame.
    pub link: LinkType,
    /// Outermost VLAN id (12 bits), if the frame is tagged.
    pub vlan: Option<u16>,
    /// EtherType after all VLAN tags; 0 if the link layer has none. For IP in a PPPoE session or behind MPLS
    /// labels, it is the EtherType of PPPoE or MPLS.
    pub ethertype: u16,
    /// Offset of the IP header; for other packets, of the link payload.
    pub network: usize,
    /// The IP addresses.
    pub addresses: Addresses,
    /// Upper-layer protocol (IANA number). For IPv6, the protocol after all extension headers; for a later IPv6 fragment, the
    /// next header of its fragment header. 0 if not IP.
    pub proto: u8,
    /// Length of the IP packet in bytes according to its header, header included. For a packet captured before TSO, with a
    /// length field of 0, the length is that of the frame. 0 if not IP.
    pub ip_len: u32,
    /// Offset of the upper layer: its header, or a later fragment's data. `frame.len()` if none of it was captured.
    pub transport: usize,
    /// Captured bytes of the upper layer, from `transport`, without link padding.
    pub transport_len: usize,
    /// Position in a fragmented datagram.
    pub fragment: Fragment,
    /// Fragment offset in units of 8 bytes.
    pub fragment_offset: u16,
    /// Source port of TCP, UDP, UDP-Lite, SCTP, DCCP; 0 otherwise and for later fragments.
    pub src_port: u16,
    /// Destination port, as `src_port`.
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
    /// Returns true if the packet is IP in a PPPoE session (RFC 2516) or behind MPLS labels (RFC 3032): it can be forwarded as it
    /// is, but neither routed nor answered.
    pub fn is_encapsulated(&self) -> bool {
        matches!(self.ethertype, ETHERTYPE_MPLS | ETHERTYPE_MPLS_UPSTREAM | ETHERTYPE_PPPOE)
            && self.addresses != Addresses::None
    }

    /// The key of the packet's state; `None` if not IP. The scope zone of the addresses and the zone are 0; the caller sets them.
    #[inline]
    pub fn flow(&self) -> Option<Flow> {
        let ends = match self.addresses {
            Addresses::None => return None,
            Addresses::V4(src, dst) => Ends::V4(src, dst),
            Addresses::V6(src, dst) => Ends::V6(src, dst, 0),
        };
        let (src_port, dst_port) = match self.proto {
            // The identifier of a query is in both ports.
            proto::ICMP | proto::ICMP6 => self.icmp_echo_id().map_or((0, 0), |id| (id, id)),
            _ => (self.src_port, self.dst_port),
        };
        Some(Flow { ends, proto: self.proto, src_port, dst_port, zone: 0 })
    }

    /// Bytes to count for the packet: the IP packet, as in ipfw; the frame on the wire if not IP.
    #[inline]
    pub fn counted_bytes(&self) -> u32 {
        if self.ip_len == 0 { self.wire_len } else { self.ip_len }
    }

    /// The fields of the packet that update its state, with [`Packet::counted_bytes`].
    #[inline]
    pub fn segment(&self) -> Segment {
        let base = Segment { bytes: self.counted_bytes(), ..Segment::default() };
        match self.proto {
            proto::TCP => Segment {
                tcp_flags: self.tcp_flags,
                tcp_ack: self.tcp_ack,
                tcp_seq: self.tcp_seq,
                tcp_len: self.tcp_data_len().unwrap_or(0),
                tcp_fragment: self.fragment == Fragment::First,
                tcp_window: self.tcp_window,
                // The option is valid in a SYN only (RFC 7323, 2.2).
                tcp_wscale: if self.tcp_flags & 0x02 != 0 { self.tcp_wscale() } else { None },
                ..base
            },
            proto::SCTP => Segment { sctp_chunk: self.sctp_chunk(), ..base },
            _ => base,
        }
    }
}
