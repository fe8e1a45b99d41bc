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

mod ip4;
mod ip6;
mod link;
mod malformed;
mod upper;
mod view;

pub mod edit;
pub mod ext6;
pub mod tunnel;

pub use ip4::{DF, MF, RF};
pub use malformed::Malformed;
pub use view::{Macs, OptionField, Options};

use crate::packet::{Addresses, Fragment, Link, Packet};

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
/// use towpath_gate::packet::{Addresses, Link};
/// use towpath_gate::wire;
///
/// // 192.0.2.1:53 > 198.51.100.2:4242, UDP, no payload, without a link header.
/// let frame = [
///     0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 192, 0, 2, 1, 198, 51, 100, 2, // IPv4
///     0, 53, 0x10, 0x92, 0, 8, 0, 0, // UDP
/// ];
/// let packet = wire::parse(Link::Ip, &frame, 28).expect("well-formed");
/// assert_eq!(packet.addresses, Addresses::V4([192, 0, 2, 1].into(), [198, 51, 100, 2].into()));
/// assert_eq!((packet.src_port, packet.dst_port), (53, 4242));
///
/// let error = wire::parse(Link::Ip, &frame[..24], 24).unwrap_err();
/// assert_eq!(error, wire::Malformed::Ip4TotalLength);
/// ```
#[inline]
pub fn parse(link: Link, frame: &[u8], wire_len: u32) -> Result<Packet<'_>, Malformed> {
    let mut packet = blank(link, frame, wire_len);
    let network = link::parse(&mut packet)?;
    finish(packet, network)
}

/// A packet of which nothing has been read.
#[inline]
fn blank(link: Link, frame: &[u8], wire_len: u32) -> Packet<'_> {
    let captured = u32::try_from(frame.len()).unwrap_or(u32::MAX);
    Packet {
        frame,
        wire_len: wire_len.max(captured),
        link,
        vlan: None,
        ethertype: 0,
        network: frame.len(),
        addresses: Addresses::None,
        proto: 0,
        ip_len: 0,
        transport: frame.len(),
        transport_len: 0,
        fragment: Fragment::Whole,
        fragment_offset: 0,
        src_port: 0,
        dst_port: 0,
        tcp_flags: 0,
        tcp_seq: 0,
        tcp_ack: 0,
        tcp_window: 0,
        icmp_type: 0,
        icmp_code: 0,
        ext6: 0,
    }
}

/// Reads on from the network header.
#[inline]
fn finish(mut packet: Packet<'_>, network: link::Network) -> Result<Packet<'_>, Malformed> {
    match network {
        link::Network::Ip4 => ip4::parse(&mut packet)?,
        link::Network::Ip6 => ip6::parse(&mut packet)?,
        link::Network::Other => {}
    }
    Ok(packet)
}

/// The `N` bytes at `at`; `None` when the capture does not have them.
#[inline]
fn bytes<const N: usize>(frame: &[u8], at: usize) -> Option<&[u8; N]> {
    frame.get(at..)?.first_chunk()
}

/// The `N` bytes of a header at `at`, in a packet that ended at `wire_end` on the wire.
///
/// A header that ends beyond `wire_end` is `cut`; one that was whole on the wire was cut short by the capture.
#[inline]
fn header<const N: usize>(
    frame: &[u8],
    at: usize,
    wire_end: usize,
    cut: Malformed,
) -> Result<&[u8; N], Malformed> {
    if at + N > wire_end {
        return Err(cut);
    }
    bytes(frame, at).ok_or(Malformed::CaptureCut)
}

#[inline]
fn be16(bytes: [u8; 2]) -> u16 {
    u16::from_be_bytes(bytes)
}

/// Where the frame ended on the wire; at least `frame.len()`.
#[inline]
fn wire_end(packet: &Packet<'_>) -> usize {
    // A frame of more than 4 GiB has a saturated `wire_len`.
    (packet.wire_len as usize).max(packet.frame.len())
}

#[cfg(test)]
mod tests;
