//! A packet on its way from one net to the next: one hop less to live, and the next hop's link header.

use std::net::IpAddr;
use std::ops::Range;

use towpath_gate::packet::Addresses;
use towpath_gate::wire;
use towpath_port::{Checksum, LinkType};

use crate::config::Route;
use crate::engine::Meta;

/// Where a port's routed packets go on its link.
#[derive(Clone, Debug, Default)]
pub(super) struct Hops {
    /// The port's own Ethernet address; none when it carries IP packets.
    pub(super) own: Option<[u8; 6]>,
    /// Prefixes and their next hops, the longest first.
    nets: Vec<(IpAddr, u8, Next)>,
    /// Those of packets that were decided by other routes: by the next ones while these are being taken, by the ones before
    /// afterwards, when an inspector still had some.
    others: Vec<(IpAddr, u8, Next)>,
}

/// The next hop of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// There.
    At([u8; 6]),
    /// Where this router is, which has to be asked.
    Via(IpAddr),
    /// Where the packet's destination is.
    Destination,
}

/// Why a packet cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stuck {
    /// It has no hop left.
    Expired,
    /// Nobody knows its next hop.
    NoHop,
}

impl Hops {
    /// The hops of the routes by this port.
    pub(super) fn new(routes: &[Route], port: usize, own: Option<[u8; 6]>) -> Self {
        let of_port = routes.iter().filter(|route| route.port == port);
        let next = |route: &Route| match (route.mac, route.via) {
            (Some(mac), _) => Next::At(mac),
            (None, Some(via)) => Next::Via(via),
            (None, None) => Next::Destination,
        };
        let mut nets: Vec<_> = of_port.map(|route| (route.net, route.len, next(route))).collect();
        nets.sort_by_key(|(_, len, _)| std::cmp::Reverse(*len));
        Self { own, nets, others: Vec::new() }
    }

    /// These, and where there is none those of `other` routes.
    pub(super) fn or(self, other: &[Route], port: usize) -> Self {
        let others = Self::new(other, port, self.own).nets;
        Self { others, ..self }
    }

    /// Where a packet to `to` goes on the link, or whom to ask.
    fn find(&self, to: IpAddr) -> Option<Result<[u8; 6], IpAddr>> {
        let mut nets = self.nets.iter().chain(&self.others);
        let (net, len, next) = nets.find(|(net, len, _)| contains(*net, *len, to))?;
        match *next {
            Next::At(mac) => Some(Ok(mac)),
            Next::Via(router) => Some(Err(router)),
            Next::Destination => is_somebody(to, *net, *len).then_some(Err(to)),
        }
    }

    /// Puts the packet into `out` as it leaves, and says in `meta` how it begins now. Whose Ethernet address is still to be put in
    /// front of it, if that is not known.
    pub(super) fn forward(
        &self,
        frame: &[u8],
        meta: &mut Meta,
        out: &mut Vec<u8>,
    ) -> Result<Option<IpAddr>, Stuck> {
        out.clear();
        let packet = wire::parse(meta.link, frame, meta.wire_len).map_err(|_| Stuck::NoHop)?;
        let (to, version): (IpAddr, _) = match packet.addresses {
            Addresses::V4(_, to) => (to.into(), 4),
            Addresses::V6(_, to) => (to.into(), 6),
            Addresses::None => return Err(Stuck::NoHop),
        };
        let network = packet.network;
        let Some(own) = self.own else {
            out.extend_from_slice(frame);
            return less(&mut out[network..], version).map(|()| None);
        };
        let next = self.find(meta.hop.unwrap_or(to)).ok_or(Stuck::NoHop)?;
        out.extend_from_slice(&next.unwrap_or_default());
        out.extend_from_slice(&own);
        // EtherType: IPv4 (RFC 894), IPv6 (RFC 2464).
        out.extend_from_slice(if version == 4 { &[0x08, 0x00] } else { &[0x86, 0xdd] });
        out.extend_from_slice(&frame[network..]);
        if let Checksum::Partial { start, .. } = &mut meta.port.offload.checksum {
            *start = *start + ETHERNET as u16 - network as u16;
        }
        meta.link = towpath_gate::packet::Link::Ethernet;
        meta.link_type = LinkType::ETHERNET.0;
        meta.wire_len = out.len() as u32;
        less(&mut out[ETHERNET..], version)?;
        Ok(next.err())
    }
}

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
pub(super) fn is_own(frame: &[u8], own: [u8; 6]) -> bool {
    frame.starts_with(&own)
}

/// Whether an Ethernet frame is for several hosts.
pub(super) fn is_group(frame: &[u8]) -> bool {
    frame.first().is_some_and(|to| to & 1 == 1)
}

/// One hop less.
fn less(ip: &mut [u8], version: u8) -> Result<(), Stuck> {
    if version == 6 {
        let hops = ip.get_mut(7).ok_or(Stuck::NoHop)?;
        *hops = hops.checked_sub(1).filter(|hops| *hops > 0).ok_or(Stuck::Expired)?;
        return Ok(());
    }
    // RFC 791 section 3.1: time to live, protocol, header checksum.
    const AT: Range<usize> = 8..12;
    let [ttl, _, high, low] = ip.get_mut(AT).ok_or(Stuck::NoHop)? else { return Err(Stuck::NoHop) };
    *ttl = ttl.checked_sub(1).filter(|ttl| *ttl > 0).ok_or(Stuck::Expired)?;
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
    use super::*;
    use towpath_gate::packet::Link;

    fn meta(link: Link, len: usize) -> Meta {
        Meta {
            wire_len: len as u32,
            time: 0,
            link,
            link_type: 101,
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
        let hops = Hops::default();
        let mut out = Vec::new();
        for ttl in 2..=255 {
            let ip = packet(ttl);
            hops.forward(&ip, &mut meta(Link::Ip, ip.len()), &mut out).unwrap();
            assert_eq!((out[8], sum(&out[..20])), (ttl - 1, 0xffff), "{ttl}");
        }
        let ip = packet(1);
        assert_eq!(hops.forward(&ip, &mut meta(Link::Ip, ip.len()), &mut out), Err(Stuck::Expired));
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
        let all = Hops::new(&routes, 3, Some([6; 6]));
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
        let hops = Hops::new(&routes, 3, Some([6; 6]));
        let (ip, mut out) = (packet(9), Vec::new());
        let mut meta = meta(Link::Ip, ip.len());
        meta.port.offload.checksum = Checksum::Partial { start: 20, offset: 6 };
        hops.forward(&ip, &mut meta, &mut out).unwrap();
        assert_eq!(out[..14], [2, 0, 0, 0, 0, 2, 6, 6, 6, 6, 6, 6, 8, 0]);
        assert_eq!((meta.link, meta.wire_len), (Link::Ethernet, 42));
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
        let hops = Hops::new(&routes[1..2], 4, Some([6; 6]));
        assert_eq!(hops.forward(&ip, &mut meta, &mut out), Err(Stuck::NoHop));
        // Other routes count where there is none, however long their prefixes.
        for (these, expected) in [(&routes[..1], 1), (&routes[2..], 2)] {
            (meta.link, meta.wire_len) = (Link::Ip, ip.len() as u32);
            let hops = Hops::new(these, 3, Some([6; 6])).or(&routes, 3);
            hops.forward(&ip, &mut meta, &mut out).unwrap();
            assert_eq!(out[5], expected);
        }
    }
}
