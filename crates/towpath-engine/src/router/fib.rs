//! Forwarding: the route lookup, and a packet's change from one link to the next (TTL, link header, MTU).

use std::net::IpAddr;
use std::ops::Range;

use towpath_gate::{Gateway, PortId, Routes};
use towpath_port::{Caps, Checksum, GsoKind};
use towpath_wire::{LinkType, checksum, gso};

use crate::drop_reason::DropReason;
use crate::meta::{Adjacency, Meta, NextHop};

/// The forwarding table: one lookup finds the longest prefix, the port, the next hop and its neighbor.
///
/// The table is the gate's route table, so that rules (`verrevpath`) and the router see the same routes, and a packet that
/// was decided under old routes carries its next hop with it.
#[derive(Clone, Copy)]
pub struct Fib<'a>(&'a Routes);

/// The result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The port that the packet leaves by.
    pub port: PortId,
    /// Its next hop on the port's link.
    pub next_hop: NextHop,
}

/// A packet with its new link header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Forwarded {
    /// The neighbor whose Ethernet address goes into the link header, and the entry that the route lookup found.
    pub(crate) neighbor: Option<(IpAddr, Option<Adjacency>)>,
    /// The offset of the IPv4 header, if the packet must be fragmented.
    pub(crate) fragment_at: Option<usize>,
}

impl<'a> Fib<'a> {
    /// The table with these routes.
    pub fn new(routes: &'a Routes) -> Self {
        Self(routes)
    }

    /// The route to an address. `neighbor` looks up the neighbor with an address on the link of a port, without a request to it.
    #[inline]
    pub fn lookup(
        self,
        to: IpAddr,
        neighbor: impl FnOnce(PortId, IpAddr) -> Option<Adjacency>,
    ) -> Option<Route> {
        let (route, len) = self.0.lookup(to)?;
        let host = match route.gateway {
            Gateway::Mac(mac) => return Some(Route { port: route.port, next_hop: NextHop::Mac(mac) }),
            Gateway::Address(router) => router,
            Gateway::OnLink if is_one_host(to, len) => to,
            Gateway::OnLink => return Some(Route { port: route.port, next_hop: NextHop::None }),
        };
        let next_hop = match neighbor(route.port, host) {
            Some(adjacency) => NextHop::Resolved(host, adjacency),
            None => NextHop::Neighbor(host),
        };
        Some(Route { port: route.port, next_hop })
    }
}

/// Writes the packet into `out` as it leaves a port with the Ethernet address `mac`, and updates `meta`. The link of a port
/// without an address carries IP packets. `mtu` is the length of the longest IP packet.
///
/// # Errors
///
/// [`NoNextHop`](DropReason::NoNextHop), [`TtlExceeded`](DropReason::TtlExceeded) or [`TooLong`](DropReason::TooLong).
pub(crate) fn forward(
    frame: &[u8],
    meta: &mut Meta,
    mac: Option<[u8; 6]>,
    mtu: usize,
    out: &mut Vec<u8>,
) -> Result<Forwarded, DropReason> {
    out.clear();
    let network = usize::from(meta.network);
    let ip = frame.get(network..).unwrap_or_default();
    let version = ip.first().map_or(0, |byte| byte >> 4);
    if !matches!(version, 4 | 6) {
        return Err(DropReason::NoNextHop);
    }
    let Some(mac) = mac else {
        out.extend_from_slice(frame);
        decrement_ttl(&mut out[network..], version)?;
        let fragment_at = needs_fragmentation(frame, network, meta, mtu)?.then_some(network);
        return Ok(Forwarded { neighbor: None, fragment_at });
    };
    let (destination, neighbor) = match meta.next_hop {
        NextHop::None => return Err(DropReason::NoNextHop),
        NextHop::Mac(destination) => (destination, None),
        NextHop::Neighbor(address) => ([0; 6], Some((address, None))),
        NextHop::Resolved(address, adjacency) => ([0; 6], Some((address, Some(adjacency)))),
    };
    out.extend_from_slice(&destination);
    out.extend_from_slice(&mac);
    // EtherType: IPv4 (RFC 894), IPv6 (RFC 2464).
    out.extend_from_slice(if version == 4 { &[0x08, 0x00] } else { &[0x86, 0xdd] });
    out.extend_from_slice(ip);
    decrement_ttl(&mut out[ETHERNET..], version)?;
    let fragment_at = needs_fragmentation(frame, network, meta, mtu)?.then_some(ETHERNET);
    if let Checksum::Partial { start, .. } = &mut meta.port.offload.checksum {
        *start = *start + ETHERNET as u16 - network as u16;
    }
    meta.link = LinkType::ETHERNET;
    meta.network = ETHERNET as u16;
    meta.wire_len = out.len() as u32;
    Ok(Forwarded { neighbor, fragment_at })
}

/// The length of the longest IP packet that a port sends.
pub fn mtu(caps: &Caps) -> usize {
    let header = if caps.link == Some(LinkType::ETHERNET) { ETHERNET } else { 0 };
    caps.max_frame.map_or(usize::MAX, |max| (max as usize).saturating_sub(header))
}

/// Returns true if the packet at `network` is longer than `mtu` and may be fragmented.
///
/// # Errors
///
/// [`TooLong`](DropReason::TooLong) if it is longer and may not.
pub(crate) fn needs_fragmentation(
    frame: &[u8],
    network: usize,
    meta: &Meta,
    mtu: usize,
) -> Result<bool, DropReason> {
    let ip = &frame[network..];
    if ip.len() <= mtu {
        return Ok(false);
    }
    let word = |at: usize| usize::from(u16::from_be_bytes([ip[at], ip[at + 1]]));
    // RFC 791 section 3.1, RFC 8200 section 3. The length of an unsegmented packet may be 0.
    let (ip_len, may_fragment) = match ip {
        // A datagram that came in fragments may leave in fragments of the same length.
        [first, ..] if first >> 4 == 4 && ip.len() >= 20 => {
            let came_so = (1..=mtu).contains(&meta.fragment_len.into());
            (word(2), ip[6] & DONT_FRAGMENT == 0 || came_so)
        }
        [_, ..] if ip.len() >= 40 => (40 + word(4), false),
        _ => return Ok(false),
    };
    let segmentation = meta.port.offload.gso;
    let long = match segmentation.map(|gso| gso.kind) {
        // Segmentation cuts TCP to the MTU of the link.
        Some(GsoKind::Tcp4 | GsoKind::Tcp6) => false,
        Some(GsoKind::Udp) => gso::max_segment_len(meta.link, frame, meta.port.offload) - network > mtu,
        None => ip_len > mtu,
    };
    match long {
        false => Ok(false),
        // Datagrams that are not yet segmented are not fragmented.
        true if segmentation.is_none() && may_fragment => Ok(true),
        true => Err(DropReason::TooLong),
    }
}

/// Fragments the IPv4 packet at `network` of `frame` (RFC 791 section 3.2) into fragments of at most `mtu` bytes. Calls `each` with each
/// fragment, after the packet's link header, and whether it is the last. `piece` is the memory of the fragments. The packet's
/// checksums are complete.
///
/// Returns false, without a call, if the frame does not contain the whole header, if the MTU has no room for 8 bytes, if the header has no
/// length, or if the end of the packet is beyond the largest fragment offset: such offsets would wrap, and the fragments would be
/// another packet.
pub(crate) fn fragment(
    frame: &[u8],
    network: usize,
    mtu: usize,
    piece: &mut Vec<u8>,
    mut each: impl FnMut(&mut [u8], bool),
) -> bool {
    let header_len = frame.get(network).map_or(0, |first| usize::from(first & 15) * 4);
    let data = network + header_len;
    // An inspector may have replaced the packet: no earlier parse vouches for these bytes.
    if header_len < IP4 || data > frame.len() {
        return false;
    }
    let half = |at: usize| u16::from_be_bytes([frame[network + at], frame[network + at + 1]]);
    // An Ethernet frame may be padded.
    let end = frame.len().min(network + usize::from(half(2)));
    let (first, later) = (&frame[network..data], later_header(&frame[network..data]));
    let flags = half(6);
    let before = usize::from(flags & OFFSET) * 8;
    if mtu < first.len() + 8 || end <= data || before + (end - data) > usize::from(u16::MAX) {
        return false;
    }
    let mut at = data;
    while at < end {
        let header = if at == data { first } else { &later[..] };
        let room = (mtu - header.len()) & !7;
        let len = room.min(end - at);
        piece.clear();
        piece.extend_from_slice(&frame[..network]);
        piece.extend_from_slice(header);
        piece.extend_from_slice(&frame[at..at + len]);
        let more = if at + len < end { MORE_FRAGMENTS } else { flags & MORE_FRAGMENTS };
        let offset = ((before + at - data) / 8) as u16;
        let ip = &mut piece[network..network + header.len()];
        ip[0] = 0x40 | (header.len() / 4) as u8;
        ip[2..4].copy_from_slice(&((header.len() + len) as u16).to_be_bytes());
        ip[6..8].copy_from_slice(&(flags & !(MORE_FRAGMENTS | OFFSET) | more | offset).to_be_bytes());
        ip[10..12].fill(0);
        let sum = !checksum::sum(ip, 0);
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        at += len;
        each(piece, at >= end);
    }
    true
}

/// The header of the fragments after the first: of its options those with the copied flag.
fn later_header(first: &[u8]) -> Vec<u8> {
    let mut header = first[..IP4].to_vec();
    let mut options = &first[IP4..];
    // RFC 791 section 3.1: end of options, no operation, and options with a length. The highest bit is the copied flag.
    while let [kind, rest @ ..] = options
        && *kind != 0
    {
        let len = if *kind == 1 { 1 } else { rest.first().map_or(0, |len| usize::from(*len)) };
        let Some((option, behind)) = options.split_at_checked(len).filter(|_| len > 0) else { break };
        if kind & 0x80 != 0 {
            header.extend_from_slice(option);
        }
        options = behind;
    }
    header.resize(header.len().next_multiple_of(4), 0);
    header
}

/// IPv4 flags (RFC 791 section 3.1): in the sixth byte of the header, and in the word there.
const DONT_FRAGMENT: u8 = 0x40;
const MORE_FRAGMENTS: u16 = 0x2000;
const OFFSET: u16 = 0x1fff;

/// Bytes of an IPv4 header without options (RFC 791 section 3.1).
const IP4: usize = 20;

/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;

/// Returns true if an address on a link with a prefix of `len` bits can be that of one host.
fn is_one_host(address: IpAddr, len: u8) -> bool {
    let broadcast = match address {
        IpAddr::V4(to) => {
            // All host bits are set: the link's broadcast address.
            let hosts = u32::MAX.checked_shr(len.into()).unwrap_or(0);
            to.is_broadcast() || len < 31 && to.to_bits() & hosts == hosts
        }
        IpAddr::V6(_) => false,
    };
    !broadcast && !address.is_multicast() && !address.is_unspecified() && !address.is_loopback()
}

/// Returns true if the destination of an Ethernet frame is `mac`.
pub(crate) fn is_for(frame: &[u8], mac: [u8; 6]) -> bool {
    frame.starts_with(&mac)
}

/// Returns true if the destination of an Ethernet frame is a multicast or broadcast address.
pub(crate) fn is_multicast(frame: &[u8]) -> bool {
    frame.first().is_some_and(|to| to & 1 == 1)
}

/// Decrements the TTL or hop limit, and updates the IPv4 header checksum.
fn decrement_ttl(ip: &mut [u8], version: u8) -> Result<(), DropReason> {
    if version == 6 {
        let hops = ip.get_mut(7).ok_or(DropReason::NoNextHop)?;
        *hops = hops.checked_sub(1).filter(|hops| *hops > 0).ok_or(DropReason::TtlExceeded)?;
        return Ok(());
    }
    // RFC 791 section 3.1: time to live, protocol, header checksum.
    const AT: Range<usize> = 8..12;
    let Some([ttl, _, high, low]) = ip.get_mut(AT) else { return Err(DropReason::NoNextHop) };
    *ttl = ttl.checked_sub(1).filter(|ttl| *ttl > 0).ok_or(DropReason::TtlExceeded)?;
    // RFC 1624: HC' = ~(~HC + ~m + m'); the word with the TTL decreased by 0x0100.
    let sum = u32::from(!u16::from_be_bytes([*high, *low])) + u32::from(!0x0100u16);
    let folded = (sum & 0xffff) + (sum >> 16);
    [*high, *low] = (!(folded as u16)).to_be_bytes();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use towpath_port::{Gso, Offload};

    const MTU: usize = 1500;

    fn meta(len: usize) -> Meta {
        Meta::new(LinkType::RAW, len)
    }

    /// The ones' complement sum of an IPv4 header is 0xffff when its checksum is right.
    fn sum(header: &[u8]) -> u16 {
        let sum: u32 = header.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
        ((sum & 0xffff) + (sum >> 16)) as u16
    }

    fn packet(ttl: u8) -> Vec<u8> {
        let mut ip = vec![
            0x45, 0, 0, 28, 0, 7, 0, 0, ttl, 17, 0, 0, 10, 0, 0, 1, 10, 9, 0, 2, 4, 0, 0, 53, 0, 8, 0, 0,
        ];
        let check = !sum(&ip[..20]);
        ip[10..12].copy_from_slice(&check.to_be_bytes());
        ip
    }

    #[test]
    fn the_ttl_is_decremented_and_the_checksum_updated() {
        let mut out = Vec::new();
        for ttl in 2..=255 {
            let ip = packet(ttl);
            forward(&ip, &mut meta(ip.len()), None, MTU, &mut out).unwrap();
            assert_eq!((out[8], sum(&out[..20])), (ttl - 1, 0xffff), "{ttl}");
        }
        let ip = packet(1);
        let forwarded = forward(&ip, &mut meta(ip.len()), None, MTU, &mut out);
        assert_eq!(forwarded, Err(DropReason::TtlExceeded));
    }

    #[test]
    fn the_longest_prefix_has_the_port_and_the_next_hop() {
        let mut routes = Routes::new();
        let rows = [
            ("0.0.0.0", 0, 1, Gateway::Mac([2; 6])),
            ("10.8.0.0", 16, 2, Gateway::OnLink),
            ("10.9.0.0", 16, 3, Gateway::Address([10, 9, 9, 9].into())),
            ("10.9.0.0", 24, 4, Gateway::Mac([4; 6])),
        ];
        for (net, len, port, gateway) in rows {
            let route = towpath_gate::Route { port: PortId(port), connected: len > 0, gateway };
            routes.add(net.parse().unwrap(), len, route);
        }
        let neighbor = |address: [u8; 4]| NextHop::Neighbor(address.into());
        #[rustfmt::skip]
        let rows = [
            ("10.8.0.9",        2, neighbor([10, 8, 0, 9])),
            ("10.8.255.255",    2, NextHop::None),
            ("10.9.1.9",        3, neighbor([10, 9, 9, 9])),
            ("10.9.0.9",        4, NextHop::Mac([4; 6])),
            ("224.0.1.1",       1, NextHop::Mac([2; 6])),
            ("10.7.7.7",        1, NextHop::Mac([2; 6])),
        ];
        for (to, port, next_hop) in rows {
            let route = Fib::new(&routes).lookup(to.parse().unwrap(), |_, _| None);
            assert_eq!(route, Some(Route { port: PortId(port), next_hop }), "{to}");
            let adjacency = Adjacency(9);
            let found = Fib::new(&routes).lookup(to.parse().unwrap(), |on, address| {
                assert_eq!((on, NextHop::Neighbor(address)), (PortId(port), next_hop), "{to}");
                Some(adjacency)
            });
            let expected = match next_hop {
                NextHop::Neighbor(address) => NextHop::Resolved(address, adjacency),
                other => other,
            };
            assert_eq!(found.map(|route| route.next_hop), Some(expected), "{to}");
        }
        assert_eq!(Fib::new(&routes).lookup("2001:db8::1".parse().unwrap(), |_, _| None), None);
    }

    #[test]
    fn only_one_host_is_a_neighbor() {
        let rows = [
            ("10.8.0.9", 16, true),
            ("10.8.255.255", 16, false),
            ("10.8.255.255", 31, true),
            ("255.255.255.255", 0, false),
            ("224.0.1.1", 4, false),
            ("0.0.0.0", 0, false),
            ("ff02::1", 8, false),
            ("2001:db8::ffff", 64, true),
        ];
        for (address, len, expected) in rows {
            assert_eq!(is_one_host(address.parse().unwrap(), len), expected, "{address}/{len}");
        }
    }

    #[test]
    fn the_link_header_is_that_of_the_next_hop() {
        let (ip, mut out) = (packet(9), Vec::new());
        let mut meta = Meta { next_hop: NextHop::Mac([2, 0, 0, 0, 0, 2]), ..meta(ip.len()) };
        meta.port.offload.checksum = Checksum::Partial { start: 20, offset: 6 };
        let mac = Some([6; 6]);
        forward(&ip, &mut meta, mac, MTU, &mut out).unwrap();
        assert_eq!(out[..14], [2, 0, 0, 0, 0, 2, 6, 6, 6, 6, 6, 6, 8, 0]);
        assert_eq!((meta.link, meta.wire_len, meta.network), (LinkType::ETHERNET, 42, 14));
        assert_eq!(meta.port.offload.checksum, Checksum::Partial { start: 34, offset: 6 });
        let mut meta = super::tests::meta(ip.len());
        assert_eq!(forward(&ip, &mut meta, mac, MTU, &mut out), Err(DropReason::NoNextHop));
    }

    /// An IPv4 packet with options, flags and offset, and `data` bytes of data.
    fn long(options: &[u8], flags: u16, data: usize) -> Vec<u8> {
        let header = 20 + options.len();
        let mut ip = packet(9);
        ip.truncate(20);
        ip[0] = 0x40 | (header / 4) as u8;
        ip[2..4].copy_from_slice(&((header + data) as u16).to_be_bytes());
        ip[6..8].copy_from_slice(&flags.to_be_bytes());
        ip.extend(options);
        ip.extend((0..data).map(|at| (at / 3) as u8));
        ip
    }

    /// Each fragment: its header without length, flags and checksum; its flags and offset; its data.
    fn fragments(packet: &[u8], network: usize, mtu: usize) -> Vec<(Vec<u8>, u16, Vec<u8>)> {
        let mut parts = Vec::new();
        let mut ended = false;
        let given = fragment(packet, network, mtu, &mut Vec::new(), |piece, last| {
            assert!(!std::mem::replace(&mut ended, last));
            assert_eq!(piece[..network], packet[..network]);
            let ip = &piece[network..];
            let header = usize::from(ip[0] & 15) * 4;
            assert!(ip.len() <= mtu && usize::from(u16::from_be_bytes([ip[2], ip[3]])) == ip.len());
            assert_eq!(sum(&ip[..header]), 0xffff);
            let mut same = ip[..header].to_vec();
            same[2..4].fill(0);
            same[6..8].fill(0);
            same[10..12].fill(0);
            parts.push((same, u16::from_be_bytes([ip[6], ip[7]]), ip[header..].to_vec()));
        });
        assert_eq!((given, ended), (!parts.is_empty(), !parts.is_empty()));
        parts
    }

    proptest! {
        #[test]
        fn fragments_are_the_packet(len in 1_usize..4000, mtu in 68_usize..1600, at in prop_oneof![0_u16..100, 7600_u16..8192], more: bool, network in 0_usize..19) {
            let flags = at | if more { MORE_FRAGMENTS } else { 0 };
            // Ethernet frames may be padded.
            let frame = [vec![7; network], long(&[], flags, len), vec![0; 9]].concat();
            let (mut data, mut last) = (Vec::new(), None);
            if usize::from(at) * 8 + len > usize::from(u16::MAX) {
                // The offsets would wrap.
                prop_assert!(fragments(&frame, network, mtu).is_empty());
                return Ok(());
            }
            for (_, flags, part) in fragments(&frame, network, mtu) {
                prop_assert_eq!(usize::from(flags & OFFSET), usize::from(at) + data.len() / 8);
                prop_assert!(last.is_none_or(|last| last & MORE_FRAGMENTS != 0) && data.len().is_multiple_of(8));
                data.extend(part);
                last = Some(flags);
            }
            prop_assert_eq!(last.map(|last| last & MORE_FRAGMENTS != 0), Some(more));
            prop_assert_eq!(&data[..], &frame[network + 20..][..len]);
        }
    }

    #[test]
    fn options_with_the_copied_flag_are_copied() {
        // Record route is for the first fragment, router alert (RFC 2113) for all. The length of the last option is invalid.
        let rows: [(&[u8], &[u8]); 4] = [
            (&[1, 7, 7, 4, 0, 0, 0, 0, 0x94, 4, 0, 0], &[0x94, 4, 0, 0]),
            (&[0x94, 4, 0, 0], &[0x94, 4, 0, 0]),
            (&[0x82, 3, 9, 1, 0, 0x94, 4, 0], &[0x82, 3, 9, 0]),
            (&[0x94, 0, 0x94, 9], &[]),
        ];
        for (options, copied) in rows {
            let parts = fragments(&long(options, 0, 100), 0, 68);
            assert_eq!(&parts[0].0[20..], options);
            assert!(parts.len() > 2 && parts[1..].iter().all(|(header, ..)| &header[20..] == copied));
        }
        assert!(fragments(&long(&[1; 40], 0, 100), 0, 67).is_empty(), "no room for 8 bytes");
        let mut unsaid = long(&[], 0, 100);
        unsaid[2..4].fill(0);
        assert!(fragments(&unsaid, 0, 68).is_empty(), "the header has no length");
    }

    #[test]
    fn bytes_that_are_no_header_are_not_fragmented() {
        for network in [0, 14] {
            for first in [0x40, 0x41, 0x44, 0x46, 0x4f] {
                for len in 0..=20 {
                    let frame = [vec![7; network], vec![first; len]].concat();
                    assert!(fragments(&frame, network, 1500).is_empty(), "{first:#x} {len}");
                }
            }
            for first in [0x40, 0x44] {
                let frame = [vec![7; network], vec![first; 3000]].concat();
                assert!(fragments(&frame, network, 1500).is_empty(), "{first:#x}");
            }
        }
    }

    #[test]
    fn a_packet_over_the_mtu_is_fragmented_segmented_or_dropped() {
        let gso = |kind| Some(Gso { kind, size: 1460, ecn: false });
        let mut six = vec![0x60, 0, 0, 0, 0x05, 0xb4, 17, 9];
        six.resize(40 + 1460, 1);
        six[44..46].copy_from_slice(&1460_u16.to_be_bytes());
        let udp = |flags: u16| {
            let mut ip = long(&[], flags, 1480);
            ip[24..26].copy_from_slice(&1480_u16.to_be_bytes());
            ip
        };
        let tcp = {
            let mut ip = long(&[], 0x4000, 4020);
            (ip[9], ip[32]) = (6, 5 << 4);
            ip
        };
        let (goes, fragmented, dropped) = (Ok(None), Ok(Some(0)), Err(DropReason::TooLong));
        #[rustfmt::skip]
        let rows = [
            ("not longer",              udp(0x4000), None,                1500, goes),
            ("may be fragmented",       udp(0),      None,                1499, fragmented),
            ("must not be fragmented",  udp(0x4000), None,                1499, dropped),
            ("IPv6, not longer",        six.clone(), None,                1500, goes),
            ("IPv6 is not fragmented",  six,         None,                1499, dropped),
            ("unsegmented TCP",         tcp,         gso(GsoKind::Tcp4),  1400, goes),
            ("unsegmented UDP",         udp(0x4000), gso(GsoKind::Udp),   1488, goes),
            ("long UDP segments",       udp(0x4000), gso(GsoKind::Udp),   1487, dropped),
        ];
        for (name, ip, gso, mtu, expected) in rows {
            let mut meta = meta(ip.len());
            let start = if ip[0] == 0x60 { 40 } else { 20 };
            meta.port.offload = Offload { checksum: Checksum::Partial { start, offset: 6 }, gso };
            let forwarded = forward(&ip, &mut meta, None, mtu, &mut Vec::new());
            assert_eq!(forwarded.map(|forwarded| forwarded.fragment_at), expected, "{name}");
        }
    }
}
