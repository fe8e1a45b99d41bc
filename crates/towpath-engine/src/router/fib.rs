//! A packet on its way from one net to the next: one hop decrement_ttl to live, the next hop's link header, and no longer than its link takes.

use std::net::IpAddr;
use std::ops::Range;

use towpath_port::{Caps, Checksum, GsoKind, LinkType};
use towpath_wire::{self as wire, Addresses, Packet};
use towpath_wire::{checksum, gso};

use crate::Meta;

/// Where a port's routed packets go on its link.
#[derive(Clone, Debug, Default)]
pub struct Fib {
    /// The port's own Ethernet address; none when it carries IP packets.
    pub own: Option<[u8; 6]>,
    /// Prefixes and their next hops, the longest first.
    nets: Vec<(IpAddr, u8, NextHop)>,
    /// Those of packets that were decided by other routes: by the next ones while these are being taken, by the ones before
    /// afterwards, when an inspector still had some.
    others: Vec<(IpAddr, u8, NextHop)>,
}

/// Packets to a prefix leave by a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The prefix.
    pub net: IpAddr,
    /// Its length.
    pub len: u8,
    /// Index of the port.
    pub port: usize,
    /// The next hop. Default: the packet's destination.
    pub via: Option<IpAddr>,
    /// The next hop's Ethernet address, for ports with Ethernet frames. Default: ARP or neighbor discovery finds it.
    pub mac: Option<[u8; 6]>,
}

/// The next hop of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NextHop {
    /// There.
    At([u8; 6]),
    /// Where this router is, which has to be asked.
    Via(IpAddr),
    /// Where the packet's destination is.
    Destination,
}

/// Why a packet cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ForwardError {
    /// It has no hop left.
    Expired,
    /// Nobody knows its next hop.
    NoHop,
    /// It is longer than the link takes, and its sender does not want it divided.
    TooLong,
}

/// A packet that goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Forwarded {
    /// Whose Ethernet address is still to be put in front of it.
    pub(crate) ask: Option<IpAddr>,
    /// Where its IP header begins, when it is to be divided first.
    pub(crate) fragment: Option<usize>,
}

impl Fib {
    /// The hops of the routes by this port.
    pub fn new(routes: &[Route], port: usize, own: Option<[u8; 6]>) -> Self {
        let of_port = routes.iter().filter(|route| route.port == port);
        let next = |route: &Route| match (route.mac, route.via) {
            (Some(mac), _) => NextHop::At(mac),
            (None, Some(via)) => NextHop::Via(via),
            (None, None) => NextHop::Destination,
        };
        let mut nets: Vec<_> = of_port.map(|route| (route.net, route.len, next(route))).collect();
        nets.sort_by_key(|(_, len, _)| std::cmp::Reverse(*len));
        Self { own, nets, others: Vec::new() }
    }

    /// These, and where there is none those of `other` routes.
    pub fn or(self, other: &[Route], port: usize) -> Self {
        let others = Self::new(other, port, self.own).nets;
        Self { others, ..self }
    }

    /// Where a packet to `to` goes on the link, or whom to ask.
    fn find(&self, to: IpAddr) -> Option<Result<[u8; 6], IpAddr>> {
        let mut nets = self.nets.iter().chain(&self.others);
        let (net, len, next) = nets.find(|(net, len, _)| contains(*net, *len, to))?;
        match *next {
            NextHop::At(mac) => Some(Ok(mac)),
            NextHop::Via(router) => Some(Err(router)),
            NextHop::Destination => is_somebody(to, *net, *len).then_some(Err(to)),
        }
    }

    /// Puts the packet into `out` as it leaves for a link that takes packets of `mtu` bytes, and says in `meta` how it begins now.
    pub(crate) fn forward(
        &self,
        frame: &[u8],
        meta: &mut Meta,
        mtu: usize,
        out: &mut Vec<u8>,
    ) -> Result<Forwarded, ForwardError> {
        out.clear();
        let packet = wire::parse(meta.link, frame, meta.wire_len).map_err(|_| ForwardError::NoHop)?;
        let (to, version): (IpAddr, _) = match packet.addresses {
            Addresses::V4(_, to) => (to.into(), 4),
            Addresses::V6(_, to) => (to.into(), 6),
            Addresses::None => return Err(ForwardError::NoHop),
        };
        let network = packet.network;
        let Some(own) = self.own else {
            out.extend_from_slice(frame);
            decrement_ttl(&mut out[network..], version)?;
            let fragment = needs_fragmentation(frame, &packet, meta, mtu)?.then_some(network);
            return Ok(Forwarded { ask: None, fragment });
        };
        let next = self.find(meta.hop.unwrap_or(to)).ok_or(ForwardError::NoHop)?;
        out.extend_from_slice(&next.unwrap_or_default());
        out.extend_from_slice(&own);
        // EtherType: IPv4 (RFC 894), IPv6 (RFC 2464).
        out.extend_from_slice(if version == 4 { &[0x08, 0x00] } else { &[0x86, 0xdd] });
        out.extend_from_slice(&frame[network..]);
        decrement_ttl(&mut out[ETHERNET..], version)?;
        let fragment = needs_fragmentation(frame, &packet, meta, mtu)?.then_some(ETHERNET);
        if let Checksum::Partial { start, .. } = &mut meta.port.offload.checksum {
            *start = *start + ETHERNET as u16 - network as u16;
        }
        meta.link = towpath_wire::LinkType::ETHERNET;

        meta.wire_len = out.len() as u32;
        Ok(Forwarded { ask: next.err(), fragment })
    }
}

/// Bytes of the longest IP packet that a port sends.
pub fn mtu(caps: &Caps) -> usize {
    let header = if caps.link == Some(LinkType::ETHERNET) { ETHERNET } else { 0 };
    caps.max_frame.map_or(usize::MAX, |max| (max as usize).saturating_sub(header))
}

/// Whether the packet is longer than `mtu` and may be divided.
fn needs_fragmentation(
    frame: &[u8],
    packet: &Packet<'_>,
    meta: &Meta,
    mtu: usize,
) -> Result<bool, ForwardError> {
    let network = packet.network;
    if frame.len() - network <= mtu {
        return Ok(false);
    }
    let gso = meta.port.offload.gso;
    let long = match gso.map(|gso| gso.kind) {
        // Whoever cuts it makes its segments as short as the link needs them.
        Some(GsoKind::Tcp4 | GsoKind::Tcp6) => false,
        Some(GsoKind::Udp) => gso::max_segment_len(meta.link, frame, meta.port.offload) - network > mtu,
        None => packet.ip_len as usize > mtu,
    };
    match packet.addresses {
        _ if !long => Ok(false),
        // Datagrams that are not cut yet are not divided either.
        Addresses::V4(..) if gso.is_none() && frame[network + 6] & DONT_FRAGMENT == 0 => Ok(true),
        _ => Err(ForwardError::TooLong),
    }
}

/// Divides the IPv4 packet at `network` of `frame` into fragments of at most `mtu` bytes, and gives each with the link header to `each`; `piece`
/// is memory for them. The packet's checksums are finished.
///
/// False, and nothing is given, when not even eight bytes of it fit, when its header does not say how long it is, or when its end is
/// beyond what offsets can say: they would begin anew, with fragments that look like packets which no rule has seen.
///
/// RFC 791 section 3.2; its procedure makes two of one, this as many as there are.
pub(crate) fn fragment(
    frame: &[u8],
    network: usize,
    mtu: usize,
    piece: &mut Vec<u8>,
    mut each: impl FnMut(&mut [u8]),
) -> bool {
    let half = |at: usize| u16::from_be_bytes([frame[network + at], frame[network + at + 1]]);
    let data = network + usize::from(frame[network] & 15) * 4;
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
        each(piece);
        at += len;
    }
    true
}

/// The header of fragments behind the first: of its options those that are copied into every fragment.
fn later_header(first: &[u8]) -> Vec<u8> {
    let mut header = first[..20].to_vec();
    let mut options = &first[20..];
    // RFC 791 section 3.1: end of the list, no operation, and the others with their length. The highest bit is the copied flag.
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

/// Of the sixth byte of an IPv4 header, and of the word there (RFC 791 section 3.1).
const DONT_FRAGMENT: u8 = 0x40;
const MORE_FRAGMENTS: u16 = 0x2000;
const OFFSET: u16 = 0x1fff;

/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;

/// Whether an address on a link is one host's: nobody answers for others.
fn is_somebody(address: IpAddr, net: IpAddr, len: u8) -> bool {
    let several = match (address, net) {
        // The link's broadcast address, or that of all links.
        (IpAddr::V4(to), IpAddr::V4(net)) => {
            let hosts = u32::MAX.checked_shr(len.into()).unwrap_or(0);
            to.is_broadcast() || len < 31 && to.to_bits() == net.to_bits() | hosts
        }
        _ => false,
    };
    !several && !address.is_multicast() && !address.is_unspecified() && !address.is_loopback()
}

/// Whether an Ethernet frame is for `own`.
pub(crate) fn is_own(frame: &[u8], own: [u8; 6]) -> bool {
    frame.starts_with(&own)
}

/// Whether an Ethernet frame is for several hosts.
pub(crate) fn is_group(frame: &[u8]) -> bool {
    frame.first().is_some_and(|to| to & 1 == 1)
}

/// One hop decrement_ttl.
fn decrement_ttl(ip: &mut [u8], version: u8) -> Result<(), ForwardError> {
    if version == 6 {
        let hops = ip.get_mut(7).ok_or(ForwardError::NoHop)?;
        *hops = hops.checked_sub(1).filter(|hops| *hops > 0).ok_or(ForwardError::Expired)?;
        return Ok(());
    }
    // RFC 791 section 3.1: time to live, protocol, header checksum.
    const AT: Range<usize> = 8..12;
    let [ttl, _, high, low] = ip.get_mut(AT).ok_or(ForwardError::NoHop)? else {
        return Err(ForwardError::NoHop);
    };
    *ttl = ttl.checked_sub(1).filter(|ttl| *ttl > 0).ok_or(ForwardError::Expired)?;
    // RFC 1624: HC' = ~(~HC + ~m + m'), where the word with the TTL went down by 0x0100.
    let sum = u32::from(!u16::from_be_bytes([*high, *low])) + u32::from(!0x0100u16);
    let folded = (sum & 0xffff) + (sum >> 16);
    [*high, *low] = (!(folded as u16)).to_be_bytes();
    Ok(())
}

fn contains(net: IpAddr, len: u8, address: IpAddr) -> bool {
    let (net, address, width) = match (net, address) {
        (IpAddr::V4(net), IpAddr::V4(address)) => {
            (u128::from(net.to_bits()), u128::from(address.to_bits()), 32)
        }
        (IpAddr::V6(net), IpAddr::V6(address)) => (net.to_bits(), address.to_bits(), 128),
        _ => return false,
    };
    len == 0 || (net ^ address) >> (width - u32::from(len)) == 0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use towpath_port::{Gso, Offload};
    use towpath_wire::LinkType;

    use super::*;

    const MTU: usize = 1500;

    fn meta(link: LinkType, len: usize) -> Meta {
        Meta {
            wire_len: len as u32,
            time: 0,
            link,
            interface: 0,
            out: None,
            hop: None,
            changed: false,
            port: towpath_port::Meta::default(),
        }
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
    fn a_hop_less_and_the_checksum_still_right() {
        let hops = Fib::default();
        let mut out = Vec::new();
        for ttl in 2..=255 {
            let ip = packet(ttl);
            hops.forward(&ip, &mut meta(LinkType::RAW, ip.len()), MTU, &mut out).unwrap();
            assert_eq!((out[8], sum(&out[..20])), (ttl - 1, 0xffff), "{ttl}");
        }
        let ip = packet(1);
        assert_eq!(
            hops.forward(&ip, &mut meta(LinkType::RAW, ip.len()), MTU, &mut out),
            Err(ForwardError::Expired)
        );
    }

    /// Whom a router asks about a packet to `to`: 10.8/16 is on the link, 10.9/16 behind a router, all else is at a known place.
    fn hops_asked(to: &str) -> Option<IpAddr> {
        let route = |net: &str, len, via: Option<&str>, mac| Route {
            net: net.parse().unwrap(),
            len,
            port: 3,
            via: via.map(|via| via.parse().unwrap()),
            mac,
        };
        let routes = [
            route("0.0.0.0", 0, None, Some([2; 6])),
            route("10.8.0.0", 16, None, None),
            route("10.9.0.0", 16, Some("10.9.9.9"), None),
        ];
        let all = Fib::new(&routes, 3, Some([6; 6]));
        all.find(to.parse().unwrap()).and_then(Result::err)
    }

    #[test]
    fn the_longest_prefix_names_the_next_hop() {
        let route = |net: &str, len, last| Route {
            net: net.parse().unwrap(),
            len,
            port: 3,
            via: None,
            mac: Some([2, 0, 0, 0, 0, last]),
        };
        let other = Route { port: 4, ..route("10.9.0.0", 24, 9) };
        let routes = [route("0.0.0.0", 0, 1), route("10.9.0.0", 16, 2), other];
        let hops = Fib::new(&routes, 3, Some([6; 6]));
        let (ip, mut out) = (packet(9), Vec::new());
        let mut meta = meta(LinkType::RAW, ip.len());
        meta.port.offload.checksum = Checksum::Partial { start: 20, offset: 6 };
        hops.forward(&ip, &mut meta, MTU, &mut out).unwrap();
        assert_eq!(out[..14], [2, 0, 0, 0, 0, 2, 6, 6, 6, 6, 6, 6, 8, 0]);
        assert_eq!((meta.link, meta.wire_len), (LinkType::ETHERNET, 42));
        assert_eq!(meta.port.offload.checksum, Checksum::Partial { start: 34, offset: 6 });
        let asked = |to: &str| hops_asked(to);
        #[rustfmt::skip]
        let rows = [
            ("10.8.0.9", Some("10.8.0.9")), ("10.8.255.255", None), ("10.9.0.9", Some("10.9.9.9")), ("224.0.1.1", None),
            ("255.255.255.255", None), ("10.7.7.7", None),
        ];
        for (to, expected) in rows {
            assert_eq!(asked(to), expected.map(|hop| hop.parse().unwrap()), "{to}");
        }
        let hops = Fib::new(&routes[1..2], 4, Some([6; 6]));
        assert_eq!(hops.forward(&ip, &mut meta, MTU, &mut out), Err(ForwardError::NoHop));
        // Other routes count where there is none, however long their prefixes.
        for (these, expected) in [(&routes[..1], 1), (&routes[2..], 2)] {
            (meta.link, meta.wire_len) = (LinkType::RAW, ip.len() as u32);
            let hops = Fib::new(these, 3, Some([6; 6])).or(&routes, 3);
            hops.forward(&ip, &mut meta, MTU, &mut out).unwrap();
            assert_eq!(out[5], expected);
        }
    }

    /// An IPv4 packet with options, these flags and offset, and so much data.
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

    /// Each fragment's header without what differs, its flags and offset, its data.
    fn fragments(packet: &[u8], network: usize, mtu: usize) -> Vec<(Vec<u8>, u16, Vec<u8>)> {
        let mut parts = Vec::new();
        let given = fragment(packet, network, mtu, &mut Vec::new(), |piece| {
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
        assert_eq!(given, !parts.is_empty());
        parts
    }

    proptest! {
        #[test]
        fn fragments_are_the_packet(len in 1_usize..4000, mtu in 68_usize..1600, at in prop_oneof![0_u16..100, 7600_u16..8192], more: bool, network in 0_usize..19) {
            let flags = at | if more { MORE_FRAGMENTS } else { 0 };
            // Padded, as Ethernet frames may be.
            let frame = [vec![7; network], long(&[], flags, len), vec![0; 9]].concat();
            let (mut data, mut last) = (Vec::new(), None);
            if usize::from(at) * 8 + len > usize::from(u16::MAX) {
                // Its last bytes would be at offsets that there are not, or at those of its first.
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
    fn options_are_copied_as_they_say() {
        // Record route is for the first fragment only, the router alert (RFC 2113) for all; and one whose length is a lie.
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
        assert!(fragments(&long(&[1; 40], 0, 100), 0, 67).is_empty(), "there is no room for any of it");
        let mut unsaid = long(&[], 0, 100);
        unsaid[2..4].fill(0);
        assert!(fragments(&unsaid, 0, 68).is_empty(), "its header does not say how long it is");
    }

    #[test]
    fn what_is_too_long_is_divided_cut_or_told() {
        let hops = Fib::default();
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
        let (goes, divided, told) = (Ok(None), Ok(Some(0)), Err(ForwardError::TooLong));
        #[rustfmt::skip]
        let rows = [
            ("it fits",               udp(0x4000), None,                1500, goes),
            ("it may be divided",     udp(0),      None,                1499, divided),
            ("it may not",            udp(0x4000), None,                1499, told),
            ("IPv6",                  six.clone(), None,                1500, goes),
            ("IPv6 is never divided", six,         None,                1499, told),
            ("TCP that is to be cut", tcp,         gso(GsoKind::Tcp4),  1400, goes),
            ("datagrams that fit",    udp(0x4000), gso(GsoKind::Udp),   1488, goes),
            ("datagrams that do not", udp(0x4000), gso(GsoKind::Udp),   1487, told),
        ];
        for (name, ip, gso, mtu, expected) in rows {
            let mut meta = meta(LinkType::RAW, ip.len());
            let start = if ip[0] == 0x60 { 40 } else { 20 };
            meta.port.offload = Offload { checksum: Checksum::Partial { start, offset: 6 }, gso };
            let forwarded = hops.forward(&ip, &mut meta, mtu, &mut Vec::new());
            assert_eq!(forwarded.map(|forwarded| forwarded.fragment), expected, "{name}");
        }
    }
}
