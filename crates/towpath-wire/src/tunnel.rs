//! Packets inside tunnels, one layer at a time.
//!
//! Rules see outer packets only. Statistics and reports use this module to look inside. [`parse`](crate::parse) itself parses IP in
//! PPPoE sessions and behind MPLS labels, which are link headers.
//!
//! Supported: IP in IP (RFC 2003, 2473, 4213), GRE with IP, Ethernet, PPP (PPTP), MPLS, ERSPAN and 802.11 inside (RFC 2784, 2637),
//! MPLS (RFC 3032, 4023, 4385), PPPoE sessions (RFC 2516), AH under IPv4 (RFC 4302), EtherIP (RFC 3378), Ethernet in IPv6
//! (RFC 8986), provider backbone bridges (802.1ah), VN-Tag, E-Tag (802.1BR), NSH (RFC 8300), and in UDP: VXLAN (RFC 7348)
//! and VXLAN-GPE, Geneve (RFC 8926), GTP-U (3GPP TS 29.281), Teredo (RFC 4380), L2TP (RFC 2661). Not supported: IPsec ESP,
//! compression, all but the first of several packets in one 802.11 frame, tunnels on non-standard ports.

use super::link::{
    self, ETHERTYPE_IP4, ETHERTYPE_IP6, ETHERTYPE_MPLS, ETHERTYPE_MPLS_UPSTREAM, ETHERTYPE_PPPOE, PPP_IP4,
    PPP_IP6, PPP_MPLS, PPP_MPLS_MULTICAST,
};
use super::{Frame, Ip, Malformed, Next, be16, bytes, proto, upper};
use crate::{Addresses, Fragment, LinkType, Packet};

/// Parses the packet inside `packet`. Returns `None` for a fragment, and if `packet` is not a supported tunnel.
///
/// The inner packet's `frame` is a part of the outer frame. Its link type is [`LinkType::RAW`] if it has no link header (MPLS,
/// PPP), and [`LinkType::UNKNOWN`] if it follows a bare EtherType.
///
/// # Errors
///
/// [`Malformed`] if the inner packet is malformed.
///
/// # Examples
///
/// ```
/// use towpath_wire::{self as wire, LinkType, tunnel};
///
/// let frame = [
///     0x45, 0, 0, 48, 0, 0, 0, 0, 64, 4, 0, 0, 192, 0, 2, 1, 198, 51, 100, 2, // IPv4, carrying IPv4
///     0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, // that carries UDP
///     0, 53, 0x10, 0x92, 0, 8, 0, 0,
/// ];
/// let outer = wire::parse(LinkType::RAW, &frame, 48)?;
/// let inner = tunnel::inner(&outer)?.expect("a tunnel");
/// assert_eq!((inner.src_port, inner.dst_port), (53, 4242));
/// assert!(tunnel::inner(&inner)?.is_none());
/// # Ok::<(), wire::Malformed>(())
/// ```
#[inline]
pub fn inner<'a>(packet: &Packet<'a>) -> Result<Option<Packet<'a>>, Malformed> {
    let may = match (packet.addresses, packet.proto) {
        (Addresses::None, _) => packet.ethertype >= ETHERTYPE_MPLS,
        (_, proto::UDP) => UDP_PORTS.contains(&packet.dst_port) || UDP_PORTS.contains(&packet.src_port),
        (_, proto) => matches!(proto, IPIP | IPV6 | GRE | ETHERIP | MPLS | ETHERNET | proto::AH),
    };
    if may && packet.fragment == Fragment::Whole { carried(packet) } else { Ok(None) }
}

/// As [`inner`], for a frame on its way out of this host: also VXLAN on the port that Linux used before IANA assigned one.
pub(crate) fn inner_of_sender<'a>(packet: &Packet<'a>) -> Result<Option<Packet<'a>>, Malformed> {
    let vxlan = packet.proto == proto::UDP && packet.dst_port == VXLAN_LINUX;
    if vxlan && packet.fragment == Fragment::Whole { carried(packet) } else { inner(packet) }
}

/// Tunnel protocols (IANA, Assigned Internet Protocol Numbers).
const IPIP: u8 = 4;
const IPV6: u8 = 41;
const GRE: u8 = 47;
const ETHERIP: u8 = 97;
const MPLS: u8 = 137;
const ETHERNET: u8 = 143;

/// UDP ports of tunnels (IANA, Service Name and Port Number Registry).
const L2TP: u16 = 1701;
const GTP_U: u16 = 2152;
const TEREDO: u16 = 3544;
const VXLAN: u16 = 4789;
/// The default destination port of Linux's vxlan driver (drivers/net/vxlan).
const VXLAN_LINUX: u16 = 8472;
const VXLAN_GPE: u16 = 4790;
const GENEVE: u16 = 6081;
const UDP_PORTS: [u16; 6] = [VXLAN, GENEVE, GTP_U, TEREDO, L2TP, VXLAN_GPE];

/// EtherTypes of tunnels only (IANA, IEEE 802 Numbers).
const ETHERTYPE_ERSPAN_III: u16 = 0x22eb;
const ETHERTYPE_TEB: u16 = 0x6558;
const ETHERTYPE_PPP: u16 = 0x880b;
const ETHERTYPE_ERSPAN: u16 = 0x88be;
const ETHERTYPE_PBB: u16 = 0x88e7;
const ETHERTYPE_VNTAG: u16 = 0x8926;
const ETHERTYPE_ETAG: u16 = 0x893f;
const ETHERTYPE_NSH: u16 = 0x894f;

/// The remainder of a packet after a header.
type Body<'a> = Frame<'a>;

impl<'a> Body<'a> {
    fn skip(self, length: usize) -> Option<Self> {
        Some(Self { bytes: self.bytes.get(length..)?, wire_len: self.wire_len - length })
    }

    fn head<const N: usize>(self) -> Option<[u8; N]> {
        self.bytes.first_chunk().copied()
    }
}

/// The first header of the inner packet.
enum Carried<'a> {
    /// An IP header of either version.
    Ip(Body<'a>),
    /// An Ethernet header.
    Ethernet(Body<'a>),
    /// An 802.11 header.
    Wlan(Body<'a>),
    /// The protocol of an EtherType.
    EtherType(u16, Body<'a>),
}

fn carried<'a>(packet: &Packet<'a>) -> Result<Option<Packet<'a>>, Malformed> {
    if packet.proto == proto::AH && matches!(packet.addresses, Addresses::V4(..)) {
        return authenticated(packet);
    }
    let carried = match packet.addresses {
        Addresses::None => {
            let bytes = packet.frame.get(packet.network..).unwrap_or(&[]);
            let body =
                Body { bytes, wire_len: Frame::new(packet.frame, packet.wire_len).wire_len - packet.network };
            behind_ethertype(packet.ethertype, body)
        }
        Addresses::V4(..) | Addresses::V6(..) => in_ip(packet),
    };
    let (link, body, header) = match carried {
        None => return Ok(None),
        Some(Carried::Ip(body)) => (LinkType::RAW, body, link::parse(LinkType::RAW, body)?),
        Some(Carried::Ethernet(body)) => (LinkType::ETHERNET, body, link::parse(LinkType::ETHERNET, body)?),
        Some(Carried::Wlan(body)) => (LinkType::IEEE802_11, body, link::parse(LinkType::IEEE802_11, body)?),
        Some(Carried::EtherType(kind, body)) => (LinkType::UNKNOWN, body, link::ethertype(body, kind, 0)?),
    };
    super::network(link, body, header).map(Some)
}

/// The same packet, parsed further after its authentication header.
fn authenticated<'a>(packet: &Packet<'a>) -> Result<Option<Packet<'a>>, Malformed> {
    let Some([next, length]) = bytes::<2>(packet.frame, packet.transport) else { return Ok(None) };
    let at = packet.transport + (usize::from(*length) + 2) * 4;
    let next = Next::new(*next, at, packet.network + packet.ip_len as usize);
    if next.at > next.end {
        return Err(Malformed::UpperCut);
    }
    let frame = Frame::new(packet.frame, packet.wire_len);
    let upper = upper::parse(frame, &next)?;
    let header = link::Header {
        network: link::Network::Ip4,
        at: packet.network,
        vlan: packet.vlan,
        ethertype: packet.ethertype,
    };
    let ip = Ip { len: packet.ip_len, next };
    Ok(Some(super::assemble(packet.link, frame, header, packet.addresses, ip, upper)))
}

fn in_ip<'a>(packet: &Packet<'a>) -> Option<Carried<'a>> {
    let end = packet.transport + packet.transport_len;
    let wire_end = packet.network + packet.ip_len as usize;
    let body = Body {
        bytes: packet.frame.get(packet.transport..end)?,
        wire_len: wire_end.checked_sub(packet.transport)?,
    };
    match packet.proto {
        IPIP | IPV6 => Some(Carried::Ip(body)),
        GRE => gre(body),
        // Version 3 and twelve bits reserved.
        ETHERIP => Some(Carried::Ethernet(body.skip(2)?)),
        MPLS => mpls(body),
        ETHERNET => Some(Carried::Ethernet(body)),
        proto::UDP => in_udp(packet, body.skip(8)?),
        _ => None,
    }
}

fn behind_ethertype(kind: u16, body: Body<'_>) -> Option<Carried<'_>> {
    match kind {
        ETHERTYPE_IP4 | ETHERTYPE_IP6 => Some(Carried::Ip(body)),
        ETHERTYPE_TEB => Some(Carried::Ethernet(body)),
        ETHERTYPE_PPP => ppp(body),
        ETHERTYPE_MPLS | ETHERTYPE_MPLS_UPSTREAM => mpls(body),
        // Version 1, type 1, code 0 (session data), session, length.
        ETHERTYPE_PPPOE => match body.head()? {
            [0x11, 0x00] => ppp(body.skip(6)?),
            _ => None,
        },
        ETHERTYPE_PBB => Some(Carried::Ethernet(body.skip(4)?)),
        ETHERTYPE_VNTAG => tagged(body.skip(4)?),
        ETHERTYPE_ETAG => tagged(body.skip(6)?),
        ETHERTYPE_NSH => nsh(body),
        _ => None,
    }
}

/// The remainder of a tag: an EtherType and its payload.
fn tagged(body: Body<'_>) -> Option<Carried<'_>> {
    Some(Carried::EtherType(be16(body.head()?), body.skip(2)?))
}

/// Generic routing encapsulation, version 0 (RFC 2784, RFC 2890) and version 1 (PPTP, RFC 2637, 4.1).
fn gre(body: Body<'_>) -> Option<Carried<'_>> {
    const CHECKSUM: u16 = 0x8000;
    const ROUTING: u16 = 0x4000;
    const KEY: u16 = 0x2000;
    const SEQUENCE: u16 = 0x1000;
    const ACKNOWLEDGEMENT: u16 = 0x0080;

    let [f0, f1, k0, k1] = body.head()?;
    let (flags, kind) = (be16([f0, f1]), be16([k0, k1]));
    let optional = match flags & 0x7 {
        0 if flags & ROUTING == 0 => flags & (CHECKSUM | KEY | SEQUENCE),
        1 => flags & (KEY | SEQUENCE | ACKNOWLEDGEMENT),
        _ => return None,
    };
    let body = body.skip(4 + 4 * optional.count_ones() as usize)?;
    match kind {
        // ERSPAN type I has no header. Type II has a header of eight bytes and a GRE sequence number.
        ETHERTYPE_ERSPAN if flags & SEQUENCE == 0 => Some(Carried::Ethernet(body)),
        ETHERTYPE_ERSPAN => Some(Carried::Ethernet(body.skip(8)?)),
        // The last bit announces eight more bytes.
        ETHERTYPE_ERSPAN_III => {
            let header: [u8; 12] = body.head()?;
            Some(Carried::Ethernet(body.skip(if header[11] & 1 == 0 { 12 } else { 20 })?))
        }
        0x8100 | 0x88a8 => Some(Carried::EtherType(kind, body)),
        // Aruba access points.
        0x8200..=0x83ff => Some(Carried::Wlan(body)),
        _ => behind_ethertype(kind, body),
    }
}

/// A stack of MPLS labels. The payload has no type field; its first nibble distinguishes IP from a control word (RFC 4385, 3).
fn mpls(mut body: Body<'_>) -> Option<Carried<'_>> {
    const BOTTOM_OF_STACK: u8 = 0x01;
    loop {
        let label: [u8; 4] = body.head()?;
        body = body.skip(4)?;
        if label[2] & BOTTOM_OF_STACK != 0 {
            break;
        }
    }
    match body.head::<1>()?[0] >> 4 {
        4 | 6 => Some(Carried::Ip(body)),
        // A control word; Ethernet is the most likely payload.
        0 => Some(Carried::Ethernet(body.skip(4)?)),
        _ => None,
    }
}

/// PPP (RFC 1661), with or without address and control fields, with a protocol field of one or two bytes.
fn ppp(body: Body<'_>) -> Option<Carried<'_>> {
    let body = if body.head() == Some([0xff, 0x03]) { body.skip(2)? } else { body };
    let (protocol, body) = match body.head()? {
        [low, _] if low & 1 != 0 => (u16::from(low), body.skip(1)?),
        protocol => (be16(protocol), body.skip(2)?),
    };
    match protocol {
        PPP_IP4 | PPP_IP6 => Some(Carried::Ip(body)),
        PPP_MPLS | PPP_MPLS_MULTICAST => mpls(body),
        _ => None,
    }
}

/// Network service header (RFC 8300). Its length is in units of four bytes.
fn nsh(body: Body<'_>) -> Option<Carried<'_>> {
    let [_, length, _, next] = body.head()?;
    let body = body.skip(usize::from(length & 0x3f) * 4)?;
    match next {
        1 | 2 => Some(Carried::Ip(body)),
        3 => Some(Carried::Ethernet(body)),
        5 => mpls(body),
        _ => None,
    }
}

/// Tunnels in UDP. The destination port takes precedence: most tunnels use the source port for load balancing only.
fn in_udp<'a>(packet: &Packet<'a>, body: Body<'a>) -> Option<Carried<'a>> {
    let known = packet.dst_port == VXLAN_LINUX || UDP_PORTS.contains(&packet.dst_port);
    let port = if known { packet.dst_port } else { packet.src_port };
    match port {
        // The I flag: the VNI is valid.
        VXLAN | VXLAN_LINUX if body.head::<1>()?[0] & 0x08 != 0 => Some(Carried::Ethernet(body.skip(8)?)),
        VXLAN_GPE => {
            let [_, _, _, next] = body.head()?;
            let body = body.skip(8)?;
            match next {
                1 | 2 => Some(Carried::Ip(body)),
                3 => Some(Carried::Ethernet(body)),
                4 => nsh(body),
                5 => mpls(body),
                _ => None,
            }
        }
        // Version 0; options in words of four bytes.
        GENEVE => {
            let [first, _, k0, k1] = body.head()?;
            if first >> 6 != 0 {
                return None;
            }
            behind_ethertype(be16([k0, k1]), body.skip(8 + usize::from(first & 0x3f) * 4)?)
        }
        GTP_U => gtp(body),
        TEREDO => teredo(body),
        L2TP => l2tp(body),
        _ => None,
    }
}

/// GTP-U, version 1: a T-PDU (3GPP TS 29.281, 5.1 and 5.2).
fn gtp(body: Body<'_>) -> Option<Carried<'_>> {
    const T_PDU: u8 = 255;
    const EXTENSION: u8 = 0x04;

    let [flags, T_PDU] = body.head()? else { return None };
    // Version 1, protocol type GTP.
    if flags & 0xf0 != 0x30 {
        return None;
    }
    // Any of the three flags means that all three fields are present.
    if flags & 0x07 == 0 {
        return Some(Carried::Ip(body.skip(8)?));
    }
    let optional: [u8; 12] = body.head()?;
    let mut next = if flags & EXTENSION != 0 { optional[11] } else { 0 };
    let mut body = body.skip(12)?;
    while next != 0 {
        let length = usize::from(body.head::<1>()?[0]) * 4;
        next = *body.bytes.get(length.checked_sub(1)?)?;
        body = body.skip(length)?;
    }
    Some(Carried::Ip(body))
}

/// Teredo: IPv6 after optional authentication and origin indications (RFC 4380, 5.1.1).
fn teredo(mut body: Body<'_>) -> Option<Carried<'_>> {
    if body.head() == Some([0x00, 0x01]) {
        let [_, _, client_len, auth_len] = body.head()?;
        body = body.skip(13 + usize::from(client_len) + usize::from(auth_len))?;
    }
    if body.head() == Some([0x00, 0x00]) {
        body = body.skip(8)?;
    }
    (body.head::<1>()?[0] >> 4 == 6).then_some(Carried::Ip(body))
}

/// L2TP version 2, a data message (RFC 2661, 3.1).
fn l2tp(body: Body<'_>) -> Option<Carried<'_>> {
    const TYPE: u16 = 0x8000;
    const LENGTH: u16 = 0x4000;
    const SEQUENCE: u16 = 0x0800;
    const OFFSET: u16 = 0x0200;

    let flags = be16(body.head()?);
    if flags & TYPE != 0 || flags & 0x000f != 2 {
        return None;
    }
    // Flags, tunnel and session; the flags announce further fields.
    let mut length = 6;
    length += if flags & LENGTH != 0 { 2 } else { 0 };
    length += if flags & SEQUENCE != 0 { 4 } else { 0 };
    if flags & OFFSET != 0 {
        let offset = body.skip(length)?.head()?;
        length += 2 + usize::from(be16(offset));
    }
    ppp(body.skip(length)?)
}
