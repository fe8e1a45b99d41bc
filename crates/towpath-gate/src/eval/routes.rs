//! The route table of the reverse path tests and of a router.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use prefix_trie::PrefixMap;

use super::port::PortId;

/// A route for verrevpath, versrcreach and antispoof, and for a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The transmit port.
    pub port: PortId,
    /// The network is directly connected: no gateway.
    pub connected: bool,
    /// The next hop. Rules do not use it.
    pub gateway: Gateway,
}

/// The next hop of a route.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gateway {
    /// The destination itself, on the port's link.
    #[default]
    OnLink,
    /// The router with this address, on the port's link.
    Address(IpAddr),
    /// The host with this Ethernet address.
    Mac([u8; 6]),
}

/// The route table.
#[derive(Clone, Default)]
pub struct Routes {
    v4: PrefixMap<(u32, u8), Route>,
    v6: PrefixMap<(u128, u8), Route>,
}

impl Routes {
    /// Creates an empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns true if there are no routes.
    pub fn is_empty(&self) -> bool {
        self.v4.is_empty() && self.v6.is_empty()
    }

    /// Adds the route to a prefix, or replaces it.
    pub fn add(&mut self, net: IpAddr, len: u8, route: Route) {
        match net {
            IpAddr::V4(ip) => drop(self.v4.insert((ip.to_bits(), len.min(32)), route)),
            IpAddr::V6(ip) => drop(self.v6.insert((ip.to_bits(), len.min(128)), route)),
        }
    }

    /// The routes as `PREFIX/LENGTH` and route, in the order of the prefixes, IPv4 first.
    pub(super) fn iter(&self) -> impl Iterator<Item = (String, Route)> {
        let four =
            |((bits, len), route): ((u32, u8), &Route)| (IpAddr::V4(Ipv4Addr::from_bits(bits)), len, *route);
        let six =
            |((bits, len), route): ((u128, u8), &Route)| (IpAddr::V6(Ipv6Addr::from_bits(bits)), len, *route);
        let all = self.v4.iter().map(four).chain(self.v6.iter().map(six));
        all.map(|(net, len, route)| (format!("{net}/{len}"), route))
    }

    /// Returns the route to an address (longest prefix) and the prefix length.
    pub fn lookup(&self, ip: IpAddr) -> Option<(Route, u8)> {
        match ip {
            IpAddr::V4(ip) => self.v4.get_lpm(&(ip.to_bits(), 32)).map(|((_, len), route)| (*route, len)),
            IpAddr::V6(ip) => self.v6.get_lpm(&(ip.to_bits(), 128)).map(|((_, len), route)| (*route, len)),
        }
    }
}
