//! Link headers, up to the first byte of the network header.
//!
//! PPPoE sessions (RFC 2516) and MPLS label stacks (RFC 3032) are link headers too, if IP follows them.

use super::{Frame, Malformed, be16, ones_complement};
use crate::LinkType;

/// Limit on VLAN tags and on MPLS labels per frame. Networks use one or two tags, and up to ten labels.
const MAX_TAGS: usize = 16;

/// EtherTypes (IANA, IEEE 802 Numbers).
pub(super) const ETHERTYPE_IP4: u16 = 0x0800;
pub(super) const ETHERTYPE_IP6: u16 = 0x86dd;
pub(super) const ETHERTYPE_MPLS: u16 = 0x8847;
pub(super) const ETHERTYPE_MPLS_UPSTREAM: u16 = 0x8848;
pub(super) const ETHERTYPE_PPPOE: u16 = 0x8864;
/// IEEE 802.1Q customer tag, 802.1ad service tag, and the tag that bridges used before 802.1ad.
const ETHERTYPE_VLAN: [u16; 3] = [0x8100, 0x88a8, 0x9100];
/// Smallest EtherType. Smaller values of the field are lengths (IEEE 802.3, 3.2.6).
const ETHERTYPE_MIN: u16 = 0x0600;

/// LINKTYPE_LINUX_SLL's protocol field for a frame that begins with an 802.2 LLC header.
const SLL_LLC: u16 = 0x0004;
/// ARPHRD_NETLINK (linux/if_arp.h): the protocol field is a netlink family.
const ARPHRD_NETLINK: u16 = 824;

/// PPP's protocol numbers (IANA, Point-to-Point Protocol Field Assignments).
pub(super) const PPP_IP4: u16 = 0x0021;
pub(super) const PPP_IP6: u16 = 0x0057;
pub(super) const PPP_MPLS: u16 = 0x0281;
pub(super) const PPP_MPLS_MULTICAST: u16 = 0x0283;

/// NFULA_PAYLOAD (linux/netfilter/nfnetlink_log.h): the attribute that contains the packet.
const NFULA_PAYLOAD: u16 = 9;
/// Mask of an attribute type without NLA_F_NESTED and NLA_F_NET_BYTEORDER (linux/netlink.h).
const NLA_TYPE_MASK: u16 = 0x3fff;

/// The network protocol after the link header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Network {
    Ip4,
    Ip6,
    Other,
}

/// A parsed link header.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub(super) network: Network,
    /// Offset of the network header.
    pub(super) at: usize,
    pub(super) vlan: Option<u16>,
    pub(super) ethertype: u16,
}

impl Header {
    /// A header with an EtherType, followed by IPv4.
    #[inline(always)]
    pub(super) fn of_ip4(at: usize) -> Self {
        Self { network: Network::Ip4, at, vlan: None, ethertype: ETHERTYPE_IP4 }
    }

    /// A header with an EtherType, followed by IPv6.
    #[inline(always)]
    pub(super) fn of_ip6(at: usize) -> Self {
        Self { network: Network::Ip6, at, vlan: None, ethertype: ETHERTYPE_IP6 }
    }

    /// A header without EtherType.
    fn untyped(network: Network, at: usize) -> Self {
        Self { network, at, vlan: None, ethertype: 0 }
    }
}

#[inline]
pub(super) fn parse(link: LinkType, frame: Frame<'_>) -> Result<Header, Malformed> {
    match link.canonical() {
        LinkType::ETHERNET => ethernet(frame, 0),
        LinkType::RAW => raw(frame, 0),
        LinkType::NULL => null(frame, 0),
        LinkType::LINUX_SLL => {
            let header: &[u8; 16] = frame.header(0, frame.wire_len, Malformed::LinkCut)?;
            sll(frame, be16([header[14], header[15]]), be16([header[2], header[3]]), 16)
        }
        LinkType::LINUX_SLL2 => {
            let header: &[u8; 20] = frame.header(0, frame.wire_len, Malformed::LinkCut)?;
            sll(frame, be16([header[0], header[1]]), be16([header[8], header[9]]), 20)
        }
        LinkType::PPP => ppp(frame, 0),
        LinkType::PPP_ETHER => pppoe(frame),
        LinkType::C_HDLC => cisco_hdlc(frame),
        LinkType::FRELAY => frame_relay(frame),
        LinkType::FDDI => fddi(frame),
        LinkType::NFLOG => nflog(frame),
        LinkType::PFLOG => pflog(frame),
        LinkType::PKTAP => pktap(frame),
        LinkType::IEEE802_11 => wlan(frame, 0, false),
        LinkType::IEEE802_11_RADIOTAP => radiotap(frame),
        _ => Ok(Header::untyped(Network::Other, 0)),
    }
}

fn ethernet(frame: Frame<'_>, at: usize) -> Result<Header, Malformed> {
    let header: &[u8; 14] = frame.header(at, frame.wire_len, Malformed::LinkCut)?;
    ethertype(frame, be16([header[12], header[13]]), at + 14)
}

/// Parses a type field `kind` and the tags that follow it at `at`.
#[inline]
pub(super) fn ethertype(frame: Frame<'_>, kind: u16, at: usize) -> Result<Header, Malformed> {
    match kind {
        ETHERTYPE_IP4 => Ok(Header::of_ip4(at)),
        ETHERTYPE_IP6 => Ok(Header::of_ip6(at)),
        _ => rare_ethertype(frame, kind, at),
    }
}

/// The slow path of [`ethertype`]: VLAN tags, LLC, protocols other than IP.
fn rare_ethertype(frame: Frame<'_>, mut kind: u16, mut at: usize) -> Result<Header, Malformed> {
    let mut vlan = None;
    for tags in 0.. {
        if ETHERTYPE_VLAN.contains(&kind) {
            if tags == MAX_TAGS {
                return Err(Malformed::TooManyTags);
            }
            let tag: &[u8; 4] = frame.header(at, frame.wire_len, Malformed::LinkCut)?;
            vlan.get_or_insert(be16([tag[0], tag[1]]) & 0x0fff);
            kind = be16([tag[2], tag[3]]);
            at += 4;
        } else if kind < ETHERTYPE_MIN {
            let snap = llc(frame, at).filter(|(snap, _)| *snap >= ETHERTYPE_MIN);
            let Some((snap, length)) = snap else {
                return Ok(Header { network: Network::Other, at, vlan, ethertype: 0 });
            };
            kind = snap;
            at += length;
        } else {
            break;
        }
    }
    let (network, at) = match kind {
        ETHERTYPE_IP4 => (Network::Ip4, at),
        ETHERTYPE_IP6 => (Network::Ip6, at),
        ETHERTYPE_PPPOE => ip_in_pppoe(frame, at)?.unwrap_or((Network::Other, at)),
        ETHERTYPE_MPLS | ETHERTYPE_MPLS_UPSTREAM => ip_in_mpls(frame, at)?.unwrap_or((Network::Other, at)),
        _ => (Network::Other, at),
    };
    Ok(Header { network, at, vlan, ethertype: kind })
}

/// The IP header in a PPPoE session: version 1, type 1, code 0 (session data), session, length; then PPP.
fn ip_in_pppoe(frame: Frame<'_>, at: usize) -> Result<Option<(Network, usize)>, Malformed> {
    let Some([0x11, 0x00, _, _, _, _]) = frame.bytes(at) else { return Ok(None) };
    let at = at + 6;
    let at = if frame.bytes(at) == Some(&[0xff, 0x03]) { at + 2 } else { at };
    let (protocol, at) = match frame.bytes(at) {
        Some([low, _]) if low & 1 != 0 => (u16::from(*low), at + 1),
        Some(protocol) => (be16(*protocol), at + 2),
        None => return Ok(None),
    };
    match protocol {
        PPP_IP4 => Ok(Some((Network::Ip4, at))),
        PPP_IP6 => Ok(Some((Network::Ip6, at))),
        PPP_MPLS | PPP_MPLS_MULTICAST => ip_in_mpls(frame, at),
        _ => Ok(None),
    }
}

/// The IP header behind a stack of MPLS labels. The labels do not name their payload, and an Ethernet pseudowire may begin
/// with the same nibble (RFC 4928). The payload is IP if its header is valid (RFC 1812 section 5.2.2).
fn ip_in_mpls(frame: Frame<'_>, mut at: usize) -> Result<Option<(Network, usize)>, Malformed> {
    const BOTTOM_OF_STACK: u8 = 0x01;
    for _ in 0..MAX_TAGS {
        let Some(label) = frame.bytes::<4>(at) else { return Ok(None) };
        at += 4;
        if label[2] & BOTTOM_OF_STACK == 0 {
            continue;
        }
        return Ok(match frame.bytes::<1>(at).map(|first| first[0] >> 4) {
            Some(4) if is_ip4(frame, at) => Some((Network::Ip4, at)),
            Some(6) if is_ip6(frame, at) => Some((Network::Ip6, at)),
            _ => None,
        });
    }
    Err(Malformed::TooManyTags)
}

/// Returns true if the lengths and the checksum are those of an IPv4 header.
fn is_ip4(frame: Frame<'_>, at: usize) -> bool {
    let Some(header) = frame.bytes::<20>(at) else { return false };
    let (header_len, length) = (usize::from(header[0] & 15) * 4, usize::from(be16([header[2], header[3]])));
    let Some(header) = frame.bytes.get(at..at + header_len) else { return false };
    header_len >= 20
        && length >= header_len
        && length <= frame.wire_len - at
        && ones_complement::sum(header, 0) == 0xffff
}

/// Returns true if the length is that of an IPv6 header.
fn is_ip6(frame: Frame<'_>, at: usize) -> bool {
    let header = frame.bytes::<40>(at);
    header.is_some_and(|header| usize::from(be16([header[4], header[5]])) + 40 <= frame.wire_len - at)
}

/// The EtherType that corresponds to an 802.2 LLC header, and the length of the header.
fn llc(frame: Frame<'_>, at: usize) -> Option<(u16, usize)> {
    match frame.bytes(at)? {
        // SNAP (RFC 1042) with the organisation code of encapsulated Ethernet or of a bridge tunnel (802.1H).
        [0xaa, 0xaa, 0x03] => match frame.bytes(at + 3)? {
            [0, 0, 0x00 | 0xf8, k0, k1] => Some((be16([*k0, *k1]), 8)),
            _ => None,
        },
        // The SAP of IP (RFC 948).
        [0x06, 0x06, 0x03] => Some((ETHERTYPE_IP4, 3)),
        _ => None,
    }
}

/// IP without a link header. The version field distinguishes IPv4 and IPv6.
fn raw(frame: Frame<'_>, at: usize) -> Result<Header, Malformed> {
    let first: &[u8; 1] = frame.header(at, frame.wire_len, Malformed::LinkCut)?;
    match first[0] >> 4 {
        4 => Ok(Header::untyped(Network::Ip4, at)),
        6 => Ok(Header::untyped(Network::Ip6, at)),
        _ => Err(Malformed::Version),
    }
}

/// BSD loopback: an address family in the byte order of the capturing host (LINKTYPE_NULL) or in network byte order
/// (LINKTYPE_LOOP). Address families are small numbers, which reveals the order.
fn null(frame: Frame<'_>, at: usize) -> Result<Header, Malformed> {
    let family: &[u8; 4] = frame.header(at, frame.wire_len, Malformed::LinkCut)?;
    let family = u32::from_be_bytes(*family);
    let family = if family > 0xffff { family.swap_bytes() } else { family };
    Ok(Header::untyped(of_family(family), at + 4))
}

fn of_family(family: u32) -> Network {
    match family {
        2 => Network::Ip4,
        // AF_INET6 of Linux, NetBSD and OpenBSD, FreeBSD, macOS.
        10 | 24 | 28 | 30 => Network::Ip6,
        _ => Network::Other,
    }
}

/// Linux cooked capture: the protocol field is an EtherType for most devices.
fn sll(frame: Frame<'_>, kind: u16, arphrd: u16, at: usize) -> Result<Header, Malformed> {
    if arphrd == ARPHRD_NETLINK || (kind < ETHERTYPE_MIN && kind != SLL_LLC) {
        return Ok(Header::untyped(Network::Other, at));
    }
    ethertype(frame, kind, at)
}

/// PPP (RFC 1661), with or without address and control fields, with a protocol field of one or two bytes. An address of
/// Cisco HDLC is followed by Cisco HDLC (RFC 1547, 4.3.1).
fn ppp(frame: Frame<'_>, mut at: usize) -> Result<Header, Malformed> {
    match frame.bytes(at) {
        Some([0xff, 0x03]) => at += 2,
        Some([0x0f | 0x8f, 0x00]) if at == 0 => return cisco_hdlc(frame),
        _ => {}
    }
    let [first] = *frame.header(at, frame.wire_len, Malformed::LinkCut)?;
    let protocol = if first & 1 != 0 {
        at += 1;
        u16::from(first)
    } else {
        let protocol = be16(*frame.header(at, frame.wire_len, Malformed::LinkCut)?);
        at += 2;
        protocol
    };
    let other = Header::untyped(Network::Other, at);
    Ok(match protocol {
        PPP_IP4 => Header::untyped(Network::Ip4, at),
        PPP_IP6 => Header::untyped(Network::Ip6, at),
        // MPLS has the same payload behind PPP as behind an EtherType.
        PPP_MPLS => ethertype(frame, ETHERTYPE_MPLS, at)?,
        PPP_MPLS_MULTICAST => ethertype(frame, ETHERTYPE_MPLS_UPSTREAM, at)?,
        _ => other,
    })
}

/// PPPoE (RFC 2516): version 1, type 1, code, session, length. Code 0 is session data.
fn pppoe(frame: Frame<'_>) -> Result<Header, Malformed> {
    let header: &[u8; 6] = frame.header(0, frame.wire_len, Malformed::LinkCut)?;
    if header[..2] == [0x11, 0x00] { ppp(frame, 6) } else { Ok(Header::untyped(Network::Other, 0)) }
}

/// Cisco HDLC: address, control, EtherType.
fn cisco_hdlc(frame: Frame<'_>) -> Result<Header, Malformed> {
    let header: &[u8; 4] = frame.header(0, frame.wire_len, Malformed::LinkCut)?;
    ethertype(frame, be16([header[2], header[3]]), 4)
}

/// Frame Relay: an address whose last byte has its lowest bit set (Q.922), then unnumbered information with an NLPID or
/// SNAP (RFC 2427), or an EtherType (Cisco).
fn frame_relay(frame: Frame<'_>) -> Result<Header, Malformed> {
    const MOST_ADDRESS: usize = 4;
    let mut at = 0;
    loop {
        let [byte] = *frame.header(at, frame.wire_len, Malformed::LinkCut)?;
        at += 1;
        if byte & 1 != 0 {
            break;
        }
        if at == MOST_ADDRESS {
            return Ok(Header::untyped(Network::Other, 0));
        }
    }
    let kind: &[u8; 2] = frame.header(at, frame.wire_len, Malformed::LinkCut)?;
    match (kind, frame.bytes(at + 2)) {
        ([0x03, 0xcc], _) => Ok(Header::untyped(Network::Ip4, at + 2)),
        ([0x03, 0x8e], _) => Ok(Header::untyped(Network::Ip6, at + 2)),
        // SNAP with the organisation code of encapsulated Ethernet, with or without a byte of padding.
        ([0x03, 0x80], Some([0, 0, 0, k0, k1])) => ethertype(frame, be16([*k0, *k1]), at + 7),
        ([0x03, 0x00], Some([0x80, 0, 0, 0, k0])) => {
            let [k1] = *frame.header(at + 7, frame.wire_len, Malformed::LinkCut)?;
            ethertype(frame, be16([*k0, k1]), at + 8)
        }
        ([0x03, _], _) => Ok(Header::untyped(Network::Other, at)),
        (kind, _) => ethertype(frame, be16(*kind), at + 2),
    }
}

/// FDDI: frame control, two addresses, and an 802.2 header if the frame control says so (bits `xx01 xxxx`).
fn fddi(frame: Frame<'_>) -> Result<Header, Malformed> {
    let header: &[u8; 13] = frame.header(0, frame.wire_len, Malformed::LinkCut)?;
    if header[0] & 0x30 == 0x10 { ethertype(frame, 0, 13) } else { Ok(Header::untyped(Network::Other, 13)) }
}

/// The netfilter log: address family, version and resource, then attributes of length, type and value, padded to four
/// bytes, in the byte order of the capturing host. Attribute types are small numbers, which reveals the order.
fn nflog(frame: Frame<'_>) -> Result<Header, Malformed> {
    let header: &[u8; 4] = frame.header(0, frame.wire_len, Malformed::LinkCut)?;
    let family = u32::from(header[0]);
    let mut at = 4;
    while at < frame.wire_len {
        let [l0, l1, t0, t1] = *frame.header(at, frame.wire_len, Malformed::LinkCut)?;
        let order = (u16::from_le_bytes([t0, t1]) & NLA_TYPE_MASK, be16([t0, t1]) & NLA_TYPE_MASK);
        let (length, kind) = match order {
            (little, big) if little <= big => (u16::from_le_bytes([l0, l1]), little),
            (_, big) => (be16([l0, l1]), big),
        };
        if kind == NFULA_PAYLOAD {
            return Ok(Header::untyped(of_family(family), at + 4));
        }
        if length < 4 {
            return Err(Malformed::LinkCut);
        }
        at += usize::from(length).next_multiple_of(4);
    }
    Ok(Header::untyped(Network::Other, 0))
}

/// The pf log: a header that begins with its length (without padding) and the address family.
fn pflog(frame: Frame<'_>) -> Result<Header, Malformed> {
    let [length, family] = *frame.header(0, frame.wire_len, Malformed::LinkCut)?;
    let at = usize::from(length).next_multiple_of(4);
    match of_family(family.into()) {
        Network::Other => Ok(Header::untyped(Network::Other, 0)),
        network => Ok(Header::untyped(network, at)),
    }
}

/// PKTAP of macOS: the length of the header, the type of the following record (1 is a packet) and its DLT, little-endian.
fn pktap(frame: Frame<'_>) -> Result<Header, Malformed> {
    const PACKET: u32 = 1;
    let header: &[u8; 12] = frame.header(0, frame.wire_len, Malformed::LinkCut)?;
    let (words, _) = header.as_chunks::<4>();
    let [length, next, dlt] = [words[0], words[1], words[2]].map(u32::from_le_bytes);
    let at = usize::try_from(length).unwrap_or(usize::MAX);
    match dlt {
        _ if next != PACKET || at > frame.wire_len => Ok(Header::untyped(Network::Other, 0)),
        0 => null(frame, at),
        1 => ethernet(frame, at),
        // DLT_RAW has different numbers on different systems.
        12 | 14 | 101 => raw(frame, at),
        _ => Ok(Header::untyped(Network::Other, at)),
    }
}

/// IEEE 802.11 (9.2): unencrypted data with an 802.2 header. Of an aggregate (A-MSDU), the first subframe is parsed.
/// `padded`: padding after the header aligns its length to four bytes.
fn wlan(frame: Frame<'_>, at: usize, padded: bool) -> Result<Header, Malformed> {
    const DATA: u8 = 0x08;
    const NO_DATA: u8 = 0x40;
    const QOS: u8 = 0x80;
    const TO_AND_FROM_DS: u8 = 0x03;
    const PROTECTED: u8 = 0x40;
    const ORDER: u8 = 0x80;
    const AMSDU: u8 = 0x80;

    let [kind, flags] = *frame.header(at, frame.wire_len, Malformed::LinkCut)?;
    let other = Ok(Header::untyped(Network::Other, at));
    if kind & 0x0f != DATA || kind & NO_DATA != 0 || flags & PROTECTED != 0 {
        return other;
    }
    // Frame control, duration, three addresses, sequence control; a fourth address between access points.
    let mut length = if flags & TO_AND_FROM_DS == TO_AND_FROM_DS { 30 } else { 24 };
    let fragment: &[u8; 1] = frame.header(at + 22, frame.wire_len, Malformed::LinkCut)?;
    if fragment[0] & 0x0f != 0 {
        return other;
    }
    let mut aggregate = false;
    if kind & QOS != 0 {
        let qos: &[u8; 2] = frame.header(at + length, frame.wire_len, Malformed::LinkCut)?;
        aggregate = qos[0] & AMSDU != 0;
        // In QoS data the order bit announces a four-byte HT Control field.
        length += if flags & ORDER != 0 { 6 } else { 2 };
    }
    let mut at = at + if padded { length.next_multiple_of(4) } else { length };
    if aggregate {
        // The subframe header: addresses and length, as in Ethernet.
        let _: &[u8; 14] = frame.header(at, frame.wire_len, Malformed::LinkCut)?;
        at += 14;
    }
    ethertype(frame, 0, at)
}

/// 802.11 after a radiotap header (radiotap.org): version, padding, length, bitmap of fields, fields; little-endian.
fn radiotap(frame: Frame<'_>) -> Result<Header, Malformed> {
    const TSFT: u32 = 1 << 0;
    const FLAGS: u32 = 1 << 1;
    const MORE: u32 = 1 << 31;
    const DATA_PAD: u8 = 0x20;

    let header: &[u8; 8] = frame.header(0, frame.wire_len, Malformed::LinkCut)?;
    let length = usize::from(u16::from_le_bytes([header[2], header[3]]));
    let present = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
    let (mut at, mut word) = (8, present);
    while word & MORE != 0 {
        word = u32::from_le_bytes(*frame.header(at, frame.wire_len, Malformed::LinkCut)?);
        at += 4;
    }
    if present & TSFT != 0 {
        at = at.next_multiple_of(8) + 8;
    }
    let flags = if present & FLAGS != 0 && at < length { frame.bytes::<1>(at) } else { None };
    wlan(frame, length, flags.is_some_and(|flags| flags[0] & DATA_PAD != 0))
}
