//! Link headers, down to the first byte of the network header.

use super::{Malformed, be16, bytes, header, wire_end};
use crate::packet::{Link, Packet};

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

/// Fills in `vlan`, `ethertype` and `network`.
#[inline]
pub(super) fn parse(packet: &mut Packet<'_>) -> Result<Network, Malformed> {
    match packet.link {
        Link::Ethernet => {
            let header: &[u8; 14] = header(packet.frame, 0, wire_end(packet), Malformed::LinkCut)?;
            ethertype(packet, be16([header[12], header[13]]), 14)
        }
        Link::Ip => raw(packet),
        Link::Null => null(packet),
        Link::Sll => {
            let header: &[u8; 16] = header(packet.frame, 0, wire_end(packet), Malformed::LinkCut)?;
            sll(packet, be16([header[14], header[15]]), be16([header[2], header[3]]), 16)
        }
        Link::Sll2 => {
            let header: &[u8; 20] = header(packet.frame, 0, wire_end(packet), Malformed::LinkCut)?;
            sll(packet, be16([header[0], header[1]]), be16([header[8], header[9]]), 20)
        }
        Link::Other => {
            packet.network = 0;
            Ok(Network::Other)
        }
    }
}

/// A type field, and whatever tags follow it at `at`.
#[inline]
pub(super) fn ethertype(packet: &mut Packet<'_>, kind: u16, at: usize) -> Result<Network, Malformed> {
    match kind {
        ETHERTYPE_IP4 => {
            packet.ethertype = kind;
            packet.network = at;
            Ok(Network::Ip4)
        }
        ETHERTYPE_IP6 => {
            packet.ethertype = kind;
            packet.network = at;
            Ok(Network::Ip6)
        }
        _ => rare_ethertype(packet, kind, at),
    }
}

/// VLAN tags, LLC, and everything that is not IP.
fn rare_ethertype(packet: &mut Packet<'_>, mut kind: u16, mut at: usize) -> Result<Network, Malformed> {
    let end = wire_end(packet);
    for tags in 0.. {
        if ETHERTYPE_VLAN.contains(&kind) {
            if tags == MAX_TAGS {
                return Err(Malformed::TooManyTags);
            }
            let tag: &[u8; 4] = header(packet.frame, at, end, Malformed::LinkCut)?;
            packet.vlan.get_or_insert(be16([tag[0], tag[1]]) & 0x0fff);
            kind = be16([tag[2], tag[3]]);
            at += 4;
        } else if kind < ETHERTYPE_MIN {
            packet.network = at.min(packet.frame.len());
            let Some((snap, length)) = llc(packet.frame, at) else { return Ok(Network::Other) };
            kind = snap;
            at += length;
            if kind < ETHERTYPE_MIN {
                return Ok(Network::Other);
            }
        } else {
            break;
        }
    }
    packet.ethertype = kind;
    packet.network = at.min(packet.frame.len());
    Ok(match kind {
        ETHERTYPE_IP4 => Network::Ip4,
        ETHERTYPE_IP6 => Network::Ip6,
        _ => Network::Other,
    })
}

/// The EtherType that an 802.2 LLC header stands for, and the length of the header.
fn llc(frame: &[u8], at: usize) -> Option<(u16, usize)> {
    match bytes::<3>(frame, at)? {
        // SNAP (RFC 1042) with the organisation code of encapsulated Ethernet, or of a bridge tunnel (802.1H).
        [0xaa, 0xaa, 0x03] => match bytes::<5>(frame, at + 3)? {
            [0, 0, 0x00 | 0xf8, kind @ ..] => Some((be16(*kind), 8)),
            _ => None,
        },
        // The SAP of IP (RFC 948).
        [0x06, 0x06, 0x03] => Some((ETHERTYPE_IP4, 3)),
        _ => None,
    }
}

/// Raw IP: the version says which.
fn raw(packet: &mut Packet<'_>) -> Result<Network, Malformed> {
    packet.network = 0;
    let first: &[u8; 1] = header(packet.frame, 0, wire_end(packet), Malformed::LinkCut)?;
    match first[0] >> 4 {
        4 => Ok(Network::Ip4),
        6 => Ok(Network::Ip6),
        _ => Err(Malformed::Version),
    }
}

/// BSD loopback: an address family in the byte order of the host that captured (LINKTYPE_NULL) or in network byte order
/// (LINKTYPE_LOOP). Families are small numbers, so the order shows.
fn null(packet: &mut Packet<'_>) -> Result<Network, Malformed> {
    let family: &[u8; 4] = header(packet.frame, 0, wire_end(packet), Malformed::LinkCut)?;
    let family = u32::from_be_bytes(*family);
    let family = if family > 0xffff { family.swap_bytes() } else { family };
    packet.network = 4;
    Ok(match family {
        2 => Network::Ip4,
        // AF_INET6 of Linux, NetBSD and OpenBSD, FreeBSD, macOS.
        10 | 24 | 28 | 30 => Network::Ip6,
        _ => Network::Other,
    })
}

/// Linux cooked capture: the protocol field is an EtherType for most devices.
fn sll(packet: &mut Packet<'_>, kind: u16, arphrd: u16, at: usize) -> Result<Network, Malformed> {
    packet.network = at;
    if arphrd == ARPHRD_NETLINK || (kind < ETHERTYPE_MIN && kind != SLL_LLC) {
        return Ok(Network::Other);
    }
    ethertype(packet, kind, at)
}
