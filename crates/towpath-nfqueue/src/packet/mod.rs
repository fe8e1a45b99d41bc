//! The packet helpers of libnetfilter_queue: packet buffers, headers, checksums, replacement of contents, text.
//!
//! Results are those of version 1.0.5, also where they differ from its documentation. The exceptions are calls with which that version
//! accesses memory outside of the packet, does not end, or reads the wrong bytes:
//!
//! - a replacement that needs more than the tailroom, or whose offsets are outside of the packet: returns 0, nothing is changed;
//! - `pktb_push`, `_pull`, `_put`, `_trim` beyond the buffer: no effect;
//! - `pktb_tailroom` after `pktb_pull`: the bytes that are left, not more;
//! - `nfq_tcp_get_payload_len` of a header that ends behind the packet: 0;
//! - `pktb_alloc` with AF_BRIDGE: reads the EtherType in network byte order, and needs a complete Ethernet header;
//! - `nfq_ip6_set_transport_header`: the lengths of hop-by-hop, routing and destination headers are in units of 8 bytes (RFC 8200). A
//!   fragment other than the first, another upper layer than the requested one, and a header beyond the packet end the search: returns 0;
//! - checksums for an IP header whose length is less than that of its headers: of the pseudo header only;
//! - NULL instead of a buffer or a header: returns NULL, 0 or -1.

pub(crate) mod buffer;
mod ip4;
mod ip6;
mod tcp;
mod udp;

use std::ffi::{c_int, c_uint};

use towpath_wire::checksum;

use crate::memory::Header;
use buffer::PacketBuffer;

/// The header of IPv4 without options.
type Ip4Header = Header<20>;
/// The header of IPv6.
type Ip6Header = Header<40>;
/// The header of TCP without options.
type TcpHeader = Header<20>;
/// The header of UDP.
type UdpHeader = Header<8>;

fn be16(bytes: &[u8], at: usize) -> u16 {
    bytes[at..].first_chunk().map_or(0, |field| u16::from_be_bytes(*field))
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |field| u32::from_be_bytes(*field))
}

/// Length of an IPv4 header in bytes.
fn ip4_header_len(header: &[u8]) -> usize {
    usize::from(header[0] & 0x0f) * 4
}

/// Length of a TCP header in bytes.
fn tcp_header_len(header: &[u8]) -> usize {
    usize::from(header[12] >> 4) * 4
}

/// The sum of the pseudo header: addresses, protocol and length.
fn pseudo(addresses: &[u8], protocol: u8, len: usize) -> u16 {
    let len = (len as u32).to_be_bytes();
    checksum::sum(&[len[0], len[1], len[2], len[3], 0, protocol], checksum::sum(addresses, 0))
}

/// Stores the checksum of the first `len` bytes at the field `at`, which may lie behind them.
fn store_checksum(segment: &mut [u8], len: usize, at: usize, pseudo: u16) {
    segment[at..at + 2].fill(0);
    let checksum = !checksum::sum(&segment[..len], pseudo);
    segment[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
}

/// Length of the segment in an IPv4 packet, and the sum of its pseudo header.
fn segment_ip4(ip: &[u8; 20], protocol: u8) -> (usize, u16) {
    let len = usize::from(be16(ip, 2)).saturating_sub(ip4_header_len(ip));
    (len, pseudo(&ip[12..], protocol, len))
}

/// Length of the segment that begins `before` bytes behind the start of an IPv6 packet, and the sum of its pseudo header.
fn segment_ip6(ip: &[u8; 40], before: usize, protocol: u8) -> (usize, u16) {
    let len = (usize::from(be16(ip, 4)) + ip.len()).saturating_sub(before);
    (len, pseudo(&ip[8..], protocol, len))
}

/// Stores the checksum of the segment with this header at its field `at`.
fn checksum_ip4<const LEN: usize>(header: &mut Header<LEN>, ip: &Ip4Header, protocol: u8, at: usize) {
    let Some(ip) = ip.get() else { return };
    let (len, pseudo) = segment_ip4(&ip, protocol);
    if let Some(segment) = header.packet(len) {
        store_checksum(segment, len, at, pseudo);
    }
}

/// As [`checksum_ip4`]; extension headers may be between the two headers.
fn checksum_ip6<const LEN: usize>(header: &mut Header<LEN>, ip: &Ip6Header, protocol: u8, at: usize) {
    let before = header.address().wrapping_sub(ip.address());
    let Some(ip) = ip.get() else { return };
    let (len, pseudo) = segment_ip6(&ip, before, protocol);
    if let Some(segment) = header.packet(len) {
        store_checksum(segment, len, at, pseudo);
    }
}

impl PacketBuffer {
    /// Stores the checksum of the segment at the transport header. Nothing happens if the packet has fewer bytes than its header states.
    fn checksum_ip4(&mut self, protocol: u8, at: usize) {
        let Some(ip) = self.network().and_then(|network| self.tail(network).first_chunk()) else { return };
        let (len, pseudo) = segment_ip4(ip, protocol);
        self.checksum(len, at, pseudo);
    }

    /// As [`checksum_ip4`](Self::checksum_ip4).
    fn checksum_ip6(&mut self, protocol: u8, at: usize) {
        let Some((network, transport)) = self.network().zip(self.transport()) else { return };
        let Some(ip) = self.tail(network).first_chunk() else { return };
        let (len, pseudo) = segment_ip6(ip, transport.saturating_sub(network), protocol);
        self.checksum(len, at, pseudo);
    }

    fn checksum(&mut self, len: usize, at: usize, pseudo: u16) {
        let segment = self.transport().map(|transport| self.tail_mut(transport));
        if let Some(segment) = segment.filter(|segment| segment.len() >= len.max(at + 2)) {
            store_checksum(segment, len, at, pseudo);
        }
    }
}

/// Stores a length in the field `at`.
fn store_len(header: &mut [u8], at: usize, len: usize) {
    header[at..at + 2].copy_from_slice(&(len as u16).to_be_bytes());
}

/// Adds the difference of two lengths to the length in the field `at`.
fn resize(header: &mut [u8], at: usize, old: c_uint, new: c_uint) {
    let len = be16(header, at).wrapping_add(new as u16).wrapping_sub(old as u16);
    store_len(header, at, len.into());
}

/// The result of a function that prints text of this length.
fn printed(len: usize) -> c_int {
    c_int::try_from(len).unwrap_or(c_int::MAX)
}
