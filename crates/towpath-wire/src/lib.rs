//! Packet headers, link types, checksums, tunnels and segmentation metadata for Towpath's data plane. No IO, no `unsafe`, no
//! dependencies.
//!
//! [`parse`] reads the headers of a frame in one pass: the link header with its VLAN tags, IPv4 or IPv6 with its extension
//! headers, and the first upper-layer header. The result is a [`Packet`], whose accessors read further fields on demand. Use it to
//! filter, count or route packets. Related modules:
//!
//! - [`tunnel`] parses the packet inside a tunnel;
//! - [`checksum`] computes, updates and detects Internet checksums;
//! - [`gso`] segments frames in software; [`Offload`] is the metadata of `struct virtio_net_hdr`;
//! - [`edit`] changes header fields in place.
//!
//! ```
//! use towpath_wire::{LinkType, parse};
//!
//! // 192.0.2.1:53 > 198.51.100.2:4242, UDP, without a link header.
//! let frame = [
//!     0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 192, 0, 2, 1, 198, 51, 100, 2, // IPv4
//!     0, 53, 0x10, 0x92, 0, 8, 0, 0, // UDP
//! ];
//! let packet = parse(LinkType::RAW, &frame, 28)?;
//! assert_eq!((packet.src_port, packet.dst_port, packet.ttl()), (53, 4242, 64));
//! # Ok::<(), towpath_wire::Malformed>(())
//! ```
//!
//! # Results of parsing
//!
//! Parsing never panics. It returns
//! - a packet with its fields;
//! - a packet of an *unknown* protocol (ARP, LLDP, an EtherType or protocol that is not parsed) with the fields of the layers below;
//! - [`Malformed`]: a length field contradicts the packet, or a header is cut off. Two parsers might see two different packets.
//!
//! A truncated capture (the frame has fewer bytes than on the wire) is not malformed if it contains the addresses and ports, or
//! the ICMP type. Missing fields are zero.
//!
//! # Not supported
//!
//! [`parse`] does not verify checksums, does not look inside tunnels, and does not parse beyond the AH of IPv4 (as in ipfw, where
//! `proto ah` matches). It does not reassemble fragments or streams.
//!
//! # Invariant
//!
//! Every offset in a [`Packet`] is at most `frame.len()`, and every parsed header ends before the end that the IP header gives.

#![forbid(unsafe_code)]

mod flow;
mod ip4;
mod ip6;
mod link;
mod link_type;
mod malformed;
mod offload;
mod ones_complement;
mod packet;
mod plain;
mod time;
mod transport;
mod upper;
mod view;

pub mod checksum;
pub mod edit;
pub mod ext6;
pub mod gso;
pub mod tunnel;

pub use ip4::{DF, MF, RF};
pub use malformed::Malformed;
pub use plain::plain;
pub use view::{Macs, OptionField, Options};

pub use flow::{End, Ends, Flow, Segment};
pub use link_type::LinkType;
pub use offload::{Checksum, Gso, GsoKind, Offload, Segmentation, VIRTIO_NET_HDR_LEN};
pub use packet::{Addresses, Fragment, Packet};
pub use time::Time;

/// IP protocol numbers (IANA, Assigned Internet Protocol Numbers).
pub mod proto {
    /// IPv6 hop-by-hop options.
    pub const HOPOPT: u8 = 0;
    /// Internet Control Message Protocol.
    pub const ICMP: u8 = 1;
    /// Transmission Control Protocol.
    pub const TCP: u8 = 6;
    /// User Datagram Protocol.
    pub const UDP: u8 = 17;
    /// Datagram Congestion Control Protocol.
    pub const DCCP: u8 = 33;
    /// IPv6 routing header.
    pub const ROUTE: u8 = 43;
    /// IPv6 fragment header.
    pub const FRAG: u8 = 44;
    /// Encapsulating Security Payload.
    pub const ESP: u8 = 50;
    /// Authentication Header.
    pub const AH: u8 = 51;
    /// ICMP for IPv6.
    pub const ICMP6: u8 = 58;
    /// No next header for IPv6.
    pub const NONE: u8 = 59;
    /// IPv6 destination options.
    pub const DSTOPT: u8 = 60;
    /// Stream Control Transmission Protocol.
    pub const SCTP: u8 = 132;
    /// IPv6 mobility header.
    pub const MOBILITY: u8 = 135;
    /// UDP-Lite.
    pub const UDPLITE: u8 = 136;
    /// Host Identity Protocol.
    pub const HIP: u8 = 139;
    /// Shim6.
    pub const SHIM6: u8 = 140;
}

/// Parses the headers of a frame.
///
/// `wire_len` is the length of the frame on the wire in bytes; values below `frame.len()` mean `frame.len()`.
///
/// # Errors
///
/// [`Malformed`] names the first inconsistent or truncated header. An unknown protocol is not an error.
///
/// # Examples
///
/// ```
/// use towpath_wire::{self as wire, Addresses, LinkType};
///
/// // 192.0.2.1:53 > 198.51.100.2:4242, UDP, no payload, without a link header.
/// let frame = [
///     0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 192, 0, 2, 1, 198, 51, 100, 2, // IPv4
///     0, 53, 0x10, 0x92, 0, 8, 0, 0, // UDP
/// ];
/// let packet = wire::parse(LinkType::RAW, &frame, 28).expect("well-formed");
/// assert_eq!(packet.addresses, Addresses::V4([192, 0, 2, 1].into(), [198, 51, 100, 2].into()));
/// assert_eq!((packet.src_port, packet.dst_port), (53, 4242));
///
/// let error = wire::parse(LinkType::RAW, &frame[..24], 24).unwrap_err();
/// assert_eq!(error, wire::Malformed::Ip4TotalLength);
/// ```
#[inline]
pub fn parse(link: LinkType, frame: &[u8], wire_len: u32) -> Result<Packet<'_>, Malformed> {
    let frame = Frame::new(frame, wire_len);
    // The common case: each arm builds its packet without an intermediate `link::Header` in memory, which would double
    // the instruction count.
    match (link, frame.bytes::<14>(0)) {
        (LinkType::ETHERNET, Some([.., 0x08, 0x00])) => ip4_packet(link, frame, link::Header::of_ip4(14)),
        (LinkType::ETHERNET, Some([.., 0x86, 0xdd])) => ip6_packet(link, frame, link::Header::of_ip6(14)),
        _ => network(link, frame, link::parse(link, frame)?),
    }
}

/// Parses from the network header on.
fn network<'a>(link: LinkType, frame: Frame<'a>, header: link::Header) -> Result<Packet<'a>, Malformed> {
    match header.network {
        link::Network::Ip4 => ip4_packet(link, frame, header),
        link::Network::Ip6 => ip6_packet(link, frame, header),
        link::Network::Other => {
            Ok(assemble(link, frame, header, Addresses::None, Ip::none(frame), Upper::default()))
        }
    }
}

#[inline(always)]
fn ip4_packet<'a>(link: LinkType, frame: Frame<'a>, header: link::Header) -> Result<Packet<'a>, Malformed> {
    let ip = ip4::parse(frame, header.at)?;
    if let Some(upper) = upper::whole(frame, &ip.next) {
        return Ok(assemble(link, frame, header, ip4::addresses(frame, header.at), ip, upper));
    }
    let upper = upper::parse(frame, &ip.next)?;
    Ok(assemble(link, frame, header, ip4::addresses(frame, header.at), ip, upper))
}

#[inline(always)]
fn ip6_packet<'a>(link: LinkType, frame: Frame<'a>, header: link::Header) -> Result<Packet<'a>, Malformed> {
    let ip = ip6::parse(frame, header.at)?;
    if let Some(upper) = upper::whole(frame, &ip.next) {
        return Ok(assemble(link, frame, header, ip6::addresses(frame, header.at), ip, upper));
    }
    let upper = upper::parse(frame, &ip.next)?;
    Ok(assemble(link, frame, header, ip6::addresses(frame, header.at), ip, upper))
}

#[inline(always)]
fn assemble<'a>(
    link: LinkType,
    frame: Frame<'a>,
    header: link::Header,
    addresses: Addresses,
    ip: Ip,
    upper: Upper,
) -> Packet<'a> {
    let captured = frame.bytes.len();
    let transport = ip.next.at.min(captured);
    Packet {
        frame: frame.bytes,
        // A frame of more than 4 GiB saturates.
        wire_len: u32::try_from(frame.wire_len).unwrap_or(u32::MAX),
        link,
        vlan: header.vlan,
        ethertype: header.ethertype,
        network: header.at.min(captured),
        addresses,
        proto: ip.next.proto,
        ip_len: ip.len,
        transport,
        transport_len: ip.next.end.min(captured).saturating_sub(transport),
        fragment: ip.next.fragment,
        fragment_offset: ip.next.fragment_offset,
        src_port: upper.src_port,
        dst_port: upper.dst_port,
        tcp_flags: upper.tcp_flags,
        tcp_seq: upper.tcp_seq,
        tcp_ack: upper.tcp_ack,
        tcp_window: upper.tcp_window,
        icmp_type: upper.icmp_type,
        icmp_code: upper.icmp_code,
        ext6: ip.next.ext6,
    }
}

/// Offset of the IP header in `frame`; `None` if the link header announces something else or is cut off.
///
/// The IP header is not read.
pub fn ip_offset(link: LinkType, frame: &[u8]) -> Option<usize> {
    let header = link::parse(link, Frame::new(frame, 0)).ok()?;
    (header.network != link::Network::Other).then_some(header.at)
}

/// The captured bytes of a frame and its length on the wire, which is at least as large.
#[derive(Clone, Copy)]
struct Frame<'a> {
    bytes: &'a [u8],
    wire_len: usize,
}

impl<'a> Frame<'a> {
    #[inline]
    fn new(bytes: &'a [u8], wire_len: u32) -> Self {
        Self { bytes, wire_len: (wire_len as usize).max(bytes.len()) }
    }

    /// The `N` bytes at `at`; `None` if they were not captured.
    #[inline]
    fn bytes<const N: usize>(self, at: usize) -> Option<&'a [u8; N]> {
        bytes(self.bytes, at)
    }

    /// The `N` bytes of a header at `at`, in a packet that ends at `end` on the wire.
    ///
    /// Returns `cut` if the header ends after `end`, and [`Malformed::CaptureCut`] if the capture does not contain it.
    #[inline]
    fn header<const N: usize>(self, at: usize, end: usize, cut: Malformed) -> Result<&'a [u8; N], Malformed> {
        if at + N > end {
            return Err(cut);
        }
        self.bytes(at).ok_or(Malformed::CaptureCut)
    }
}

/// A parsed IP header.
struct Ip {
    /// Length with header, in bytes.
    len: u32,
    next: Next,
}

/// The next header of an IP packet during parsing: an extension header or the upper layer.
struct Next {
    proto: u8,
    /// Offset of the header, and of the end of the packet on the wire: `at <= end`.
    at: usize,
    end: usize,
    fragment: Fragment,
    fragment_offset: u16,
    ext6: u16,
}

impl Ip {
    /// For a frame that is not IP.
    fn none(frame: Frame<'_>) -> Self {
        let end = frame.wire_len;
        Self { len: 0, next: Next::new(0, end, end) }
    }
}

impl Next {
    #[inline]
    fn new(proto: u8, at: usize, end: usize) -> Self {
        Self { proto, at, end, fragment: Fragment::Whole, fragment_offset: 0, ext6: 0 }
    }
}

/// A parsed upper-layer header. Fields that the protocol lacks are zero.
#[derive(Default)]
struct Upper {
    src_port: u16,
    dst_port: u16,
    tcp_flags: u8,
    tcp_seq: u32,
    tcp_ack: u32,
    tcp_window: u16,
    icmp_type: u8,
    icmp_code: u8,
}

/// The `N` bytes at `at`; `None` if there are fewer.
#[inline]
fn bytes<const N: usize>(frame: &[u8], at: usize) -> Option<&[u8; N]> {
    frame.get(at..)?.first_chunk()
}

#[inline]
fn be16(bytes: [u8; 2]) -> u16 {
    u16::from_be_bytes(bytes)
}

#[cfg(test)]
mod tests;
