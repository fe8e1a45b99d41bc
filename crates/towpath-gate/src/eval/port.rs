//! Ports of the gate: the interfaces that rules name.

use std::net::IpAddr;

/// A port: its index in [`Ports`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortId(pub u16);

/// The configured ports: the names of `via em0` and the addresses of `me`.
#[derive(Clone, Debug, Default)]
pub struct Ports {
    ports: Vec<(Box<str>, Vec<IpAddr>)>,
    me4: Vec<u32>,
    me6: Vec<u128>,
    /// By port, up to the last one with a zone other than 0.
    zones: Vec<u16>,
    /// The ports whose packets arrive with the kernel's mark.
    marks: Vec<PortId>,
}

impl Ports {
    /// Creates an empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a port with its addresses. `me` matches the addresses of all ports. If the name exists, the addresses
    /// are added to that port.
    ///
    /// # Panics
    /// Panics with more than 65,535 ports.
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

    /// Returns the port with this name.
    pub fn find(&self, name: &str) -> Option<PortId> {
        self.ports.iter().position(|(n, _)| &**n == name).map(|at| PortId(at as u16))
    }

    /// Returns the name of a port.
    pub fn name(&self, id: PortId) -> Option<&str> {
        self.ports.get(usize::from(id.0)).map(|(name, _)| &**name)
    }

    /// Returns the addresses of a port.
    pub fn addresses(&self, id: PortId) -> &[IpAddr] {
        self.ports.get(usize::from(id.0)).map_or(&[], |(_, addresses)| addresses)
    }

    /// Sets the zone of a port: states belong to the zone of the port that received their packets. Default: 0.
    pub fn set_zone(&mut self, id: PortId, zone: u16) {
        let at = usize::from(id.0);
        if self.zone(id) != zone {
            self.zones.resize(self.zones.len().max(at + 1), 0);
            self.zones[at] = zone;
        }
    }

    /// Returns the zone of a port.
    #[inline]
    pub fn zone(&self, id: PortId) -> u16 {
        self.zones.get(usize::from(id.0)).copied().unwrap_or(0)
    }

    /// Declares that the packets of a port arrive with the kernel's mark. Packets of other ports have the mark 0 until a rule sets it.
    pub fn set_marks(&mut self, id: PortId) {
        self.marks.push(id);
    }

    /// Returns true if the packets of a port arrive with the kernel's mark.
    pub fn has_marks(&self, id: PortId) -> bool {
        self.marks.contains(&id)
    }

    /// Number of ports.
    pub fn len(&self) -> usize {
        self.ports.len()
    }

    /// Returns true if there are no ports.
    pub fn is_empty(&self) -> bool {
        self.ports.is_empty()
    }

    /// Iterates over all ports.
    pub fn ids(&self) -> impl Iterator<Item = PortId> + use<> {
        (0..self.ports.len() as u16).map(PortId)
    }

    /// Returns true if the address is one of a port in this zone.
    #[inline]
    pub fn is_own(&self, address: IpAddr, zone: u16) -> bool {
        let is_me = match address {
            IpAddr::V4(ip) => self.is_me4(ip.to_bits()),
            IpAddr::V6(ip) => self.is_me6(ip.to_bits()),
        };
        is_me && self.ids().any(|id| self.zone(id) == zone && self.addresses(id).contains(&address))
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
