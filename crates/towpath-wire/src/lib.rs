//! Wire views: from the bytes of a frame to a [`Packet`], in one pass.
//!
//! What is looked at: the link header with its VLAN tags, IPv4 or IPv6 with its extension headers, and the first
//! upper-layer header. What is not: checksums, the inside of tunnels (IP-in-IP, GRE, VXLAN, MPLS, PPPoE: the gate decides
//! the packet that carries them; [`tunnel::inner`] reads on for those who count), and IPv4's AH (as in ipfw, where
//! `proto ah` is the end).
//!
//! Three answers, never a panic:
//! - a packet whose headers were read;
//! - a packet that is *unknown* (ARP, LLDP, an EtherType or protocol we do not look into): rules decide it by what
//!   is known of it;
//! - [`Malformed`]: a field that lies, or a header that ends before it should, so that two readers of the packet might see
//!   two different packets.
//!
//! A capture that was cut short (the frame has fewer bytes than were on the wire) is not malformed as long as addresses and
//! ports (or the ICMP type) are there: what is missing reads as zero.
//!
//! Invariant: every offset in the packet lies inside `frame` (at most `frame.len()`), and every header whose fields
//! were read lies before the end that the IP header gave.

#![forbid(unsafe_code)]

mod flow;
mod ip4;
mod ip6;
mod link;
mod link_type;
mod malformed;
mod offload;
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

pub use flow::{Ends, Flow, Segment};
pub use link_type::LinkType;
pub use offload::{Checksum, Gso, GsoKind, Offload, Segmentation, VIRTIO_NET_HDR_LEN};
pub use packet::{Addresses, Fragment, Packet};
pub use time::Time;

/// Protocol numbers that the wire views know (IANA, Assigned Internet Protocol Numbers).
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

/// Reads the headers of one frame.
///
/// `wire_len` is the length that the frame had on the wire, in bytes; a value below `frame.len()` counts as
/// `frame.len()`.
///
/// # Errors
///
/// [`Malformed`] names the first header that lies or is cut off. An unknown protocol is not an error.
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
    // The common case runs straight through: each of the two makes its packet in one piece. Going by way of the
    // general `link::Header` costs twice the time, because it is put together in memory and read back.
    match (link, frame.bytes::<14>(0)) {
        (LinkType::ETHERNET, Some([.., 0x08, 0x00])) => ip4_packet(link, frame, link::Header::of_ip4(14)),
        (LinkType::ETHERNET, Some([.., 0x86, 0xdd])) => ip6_packet(link, frame, link::Header::of_ip6(14)),
        _ => network(link, frame, link::parse(link, frame)?),
    }
}

/// Reads on from the network header.
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

/// The bytes of a frame, and how many there were on the wire: at least as many.
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

    /// The `N` bytes at `at`; `None` when the capture does not have them.
    #[inline]
    fn bytes<const N: usize>(self, at: usize) -> Option<&'a [u8; N]> {
        bytes(self.bytes, at)
    }

    /// The `N` bytes of a header at `at`, in a packet that ended at `end` on the wire.
    ///
    /// A header that ends beyond `end` is `cut`; one that was whole on the wire was cut short by the capture.
    #[inline]
    fn header<const N: usize>(self, at: usize, end: usize, cut: Malformed) -> Result<&'a [u8; N], Malformed> {
        if at + N > end {
            return Err(cut);
        }
        self.bytes(at).ok_or(Malformed::CaptureCut)
    }
}

/// What an IP header says.
struct Ip {
    /// Length with header, in bytes.
    len: u32,
    next: Next,
}

/// The header that an IP packet has got to: the one behind the IP header, then extension header after extension header, then
/// the upper layer.
struct Next {
    proto: u8,
    /// Where it starts, and where the packet ended on the wire: `at <= end`.
    at: usize,
    end: usize,
    fragment: Fragment,
    fragment_offset: u16,
    ext6: u16,
}

impl Ip {
    /// Of a frame that is not IP.
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

/// What an upper-layer header says; zero where it says nothing.
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

/// The `N` bytes at `at`; `None` when there are fewer.
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
