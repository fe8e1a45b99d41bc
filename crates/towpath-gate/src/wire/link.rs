//! Link headers, down to the first byte of the network header.

use super::{Frame, Malformed, be16};
use crate::packet::Link;

/// VLAN tags looked through in one frame; real networks use one, two, seldom three.
const MAX_TAGS: usize = 16;

/// EtherTypes (IANA, IEEE 802 Numbers).
const ETHERTYPE_IP4: u16 = 0x0800;
const ETHERTYPE_IP6: u16 = 0x86dd;
/// IEEE 802.1Q customer tag, 802.1ad service tag, and the tag that bridges used before 802.1ad.
const ETHERTYPE_VLAN: [u16; 3] = [0x8100, 0x88a8, 0x9100];
/// The type field is a type from here on, below it is a length or nothing (IEEE 802.3, 3.2.6).
const ETHERTYPE_MIN: u16 = 0x0600;

/// LINKTYPE_LINUX_SLL's protocol field for a frame that begins with an 802.2 LLC header.
const SLL_LLC: u16 = 0x0004;
/// ARPHRD_NETLINK (linux/if_arp.h): the protocol field is a netlink family.
const ARPHRD_NETLINK: u16 = 824;

/// What the link header announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Network {
    Ip4,
    Ip6,
    Other,
}

/// What the link header says.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub(super) network: Network,
    /// Where what it announces starts.
    pub(super) at: usize,
    pub(super) vlan: Option<u16>,
    pub(super) ethertype: u16,
}

impl Header {
    /// An EtherType field, directly followed by IPv4.
    #[inline(always)]
    pub(super) fn of_ip4(at: usize) -> Self {
        Self { network: Network::Ip4, at, vlan: None, ethertype: ETHERTYPE_IP4 }
    }

    /// An EtherType field, directly followed by IPv6.
    #[inline(always)]
    pub(super) fn of_ip6(at: usize) -> Self {
        Self { network: Network::Ip6, at, vlan: None, ethertype: ETHERTYPE_IP6 }
    }

    /// Of a link without EtherType.
    fn untyped(network: Network, at: usize) -> Self {
        Self { network, at, vlan: None, ethertype: 0 }
    }
}

#[inline]
pub(super) fn parse(link: Link, frame: Frame<'_>) -> Result<Header, Malformed> {
    match link {
        Link::Ethernet => {
            let header: &[u8; 14] = frame.header(0, frame.wire_len, Malformed::LinkCut)?;
            ethertype(frame, be16([header[12], header[13]]), 14)
        }
        Link::Ip => raw(frame),
        Link::Null => null(frame),
        Link::Sll => {
            let header: &[u8; 16] = frame.header(0, frame.wire_len, Malformed::LinkCut)?;
            sll(frame, be16([header[14], header[15]]), be16([header[2], header[3]]), 16)
        }
        Link::Sll2 => {
            let header: &[u8; 20] = frame.header(0, frame.wire_len, Malformed::LinkCut)?;
            sll(frame, be16([header[0], header[1]]), be16([header[8], header[9]]), 20)
        }
        Link::Other => Ok(Header::untyped(Network::Other, 0)),
    }
}

/// A type field, and whatever tags follow it at `at`.
#[inline]
pub(super) fn ethertype(frame: Frame<'_>, kind: u16, at: usize) -> Result<Header, Malformed> {
    match kind {
        ETHERTYPE_IP4 => Ok(Header::of_ip4(at)),
        ETHERTYPE_IP6 => Ok(Header::of_ip6(at)),
        _ => rare_ethertype(frame, kind, at),
    }
}

/// VLAN tags, LLC, and everything that is not IP.
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
    let network = match kind {
        ETHERTYPE_IP4 => Network::Ip4,
        ETHERTYPE_IP6 => Network::Ip6,
        _ => Network::Other,
    };
    Ok(Header { network, at, vlan, ethertype: kind })
}

/// The EtherType that an 802.2 LLC header stands for, and the length of the header.
fn llc(frame: Frame<'_>, at: usize) -> Option<(u16, usize)> {
    match frame.bytes(at)? {
        // SNAP (RFC 1042) with the organisation code of encapsulated Ethernet, or of a bridge tunnel (802.1H).
        [0xaa, 0xaa, 0x03] => match frame.bytes(at + 3)? {
            [0, 0, 0x00 | 0xf8, k0, k1] => Some((be16([*k0, *k1]), 8)),
            _ => None,
        },
        // The SAP of IP (RFC 948).
        [0x06, 0x06, 0x03] => Some((ETHERTYPE_IP4, 3)),
        _ => None,
    }
}

/// Raw IP: the version says which.
fn raw(frame: Frame<'_>) -> Result<Header, Malformed> {
    let first: &[u8; 1] = frame.header(0, frame.wire_len, Malformed::LinkCut)?;
    match first[0] >> 4 {
        4 => Ok(Header::untyped(Network::Ip4, 0)),
        6 => Ok(Header::untyped(Network::Ip6, 0)),
        _ => Err(Malformed::Version),
    }
}

/// BSD loopback: an address family in the byte order of the host that captured (LINKTYPE_NULL) or in network byte order
/// (LINKTYPE_LOOP). Families are small numbers, so the order shows.
fn null(frame: Frame<'_>) -> Result<Header, Malformed> {
    let family: &[u8; 4] = frame.header(0, frame.wire_len, Malformed::LinkCut)?;
    let family = u32::from_be_bytes(*family);
    let family = if family > 0xffff { family.swap_bytes() } else { family };
    let network = match family {
        2 => Network::Ip4,
        // AF_INET6 of Linux, NetBSD and OpenBSD, FreeBSD, macOS.
        10 | 24 | 28 | 30 => Network::Ip6,
        _ => Network::Other,
    };
    Ok(Header::untyped(network, 4))
}

/// Linux cooked capture: the protocol field is an EtherType for most devices.
fn sll(frame: Frame<'_>, kind: u16, arphrd: u16, at: usize) -> Result<Header, Malformed> {
    if arphrd == ARPHRD_NETLINK || (kind < ETHERTYPE_MIN && kind != SLL_LLC) {
        return Ok(Header::untyped(Network::Other, at));
    }
    ethertype(frame, kind, at)
}
