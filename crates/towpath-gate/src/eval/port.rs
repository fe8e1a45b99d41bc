//! The ports that rules name, and the routes between them.

use std::net::IpAddr;

use prefix_trie::PrefixMap;

/// A port, as the number in which it was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortId(pub u16);

/// The configured ports: what `via em0` and `me` mean.
#[derive(Clone, Debug, Default)]
pub struct Ports {
    ports: Vec<(Box<str>, Vec<IpAddr>)>,
    me4: Vec<u32>,
    me6: Vec<u128>,
}

impl Ports {
    /// No ports.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a port with its addresses; `me` is the addresses of all ports. A name that is there already gets the
    /// addresses too.
    ///
    /// # Panics
    /// With more than 65,535 ports.
    pub fn add(&mut self, name: &str, addresses: Vec<IpAddr>) -> PortId {
        for address in &addresses {
            match address {
                IpAddr::V4(ip) => self.me4.push(ip.to_bits()),
                IpAddr::V6(ip) => self.me6.push(ip.to_bits()),
            }
        }
        self.me4.sort_unstable();
        self.me6.sort_unstable();
        if let Some(id) = self.find(name) {
            self.ports[usize::from(id.0)].1.extend(addresses);
            return id;
        }
        let id = u16::try_from(self.ports.len()).unwrap_or_else(|_| panic!("more than 65535 ports"));
        self.ports.push((name.into(), addresses));
        PortId(id)
    }

    /// The port of this name.
    pub fn find(&self, name: &str) -> Option<PortId> {
        self.ports.iter().position(|(n, _)| &**n == name).map(|at| PortId(at as u16))
    }

    /// The name of a port.
    pub fn name(&self, id: PortId) -> Option<&str> {
        self.ports.get(usize::from(id.0)).map(|(name, _)| &**name)
    }

    /// The addresses of a port.
    pub fn addresses(&self, id: PortId) -> &[IpAddr] {
        self.ports.get(usize::from(id.0)).map_or(&[], |(_, addresses)| addresses)
    }

    /// How many ports there are.
    pub fn len(&self) -> usize {
        self.ports.len()
    }

    /// Whether there is no port.
    pub fn is_empty(&self) -> bool {
        self.ports.is_empty()
    }

    /// All ports.
    pub fn ids(&self) -> impl Iterator<Item = PortId> + use<> {
        (0..self.ports.len() as u16).map(PortId)
    }

    #[inline]
    pub(crate) fn is_me4(&self, ip: u32) -> bool {
        self.me4.binary_search(&ip).is_ok()
    }

    #[inline]
    pub(crate) fn is_me6(&self, ip: u128) -> bool {
        self.me6.binary_search(&ip).is_ok()
    }
}

/// A route, for verrevpath, versrcreach and antispoof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The port it leaves by.
    pub port: PortId,
    /// The net is directly connected (no gateway).
    pub connected: bool,
}

/// The route table.
#[derive(Clone, Default)]
pub struct Routes {
    v4: PrefixMap<(u32, u8), Route>,
    v6: PrefixMap<(u128, u8), Route>,
}

impl Routes {
    /// No routes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether there is no route.
    pub fn is_empty(&self) -> bool {
        self.v4.is_empty() && self.v6.is_empty()
    }

    /// Adds or replaces the route to a prefix.
    pub fn add(&mut self, net: IpAddr, len: u8, route: Route) {
        match net {
            IpAddr::V4(ip) => drop(self.v4.insert((ip.to_bits(), len.min(32)), route)),
            IpAddr::V6(ip) => drop(self.v6.insert((ip.to_bits(), len.min(128)), route)),
        }
    }

    /// The route to an address, and the length of its prefix.
    pub fn lookup(&self, ip: IpAddr) -> Option<(Route, u8)> {
        match ip {
            IpAddr::V4(ip) => self.v4.get_lpm(&(ip.to_bits(), 32)).map(|((_, len), route)| (*route, len)),
            IpAddr::V6(ip) => self.v6.get_lpm(&(ip.to_bits(), 128)).map(|((_, len), route)| (*route, len)),
        }
    }
}
