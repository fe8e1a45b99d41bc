//! The wiring of the ports: the port that a packet arrives on, and how it is forwarded.

use towpath_gate::PortId;
use towpath_ring::Interfaces;
use towpath_wire::Packet;

use crate::meta::{Egress, Meta};

/// `NF_INET_` hooks (linux/netfilter.h).
const PREROUTING: u8 = 0;
const LOCAL_IN: u8 = 1;
const FORWARD: u8 = 2;

/// The interfaces, by number, with their ports and forward modes.
#[derive(Clone, Debug)]
pub struct Topology {
    interfaces: Vec<Interface>,
}

#[derive(Clone, Debug)]
struct Interface {
    untagged: PortId,
    by_vlan: Vec<(u16, PortId)>,
    /// The ports of the interfaces that an nfqueue port lists, by their position in the list.
    listed: Vec<PortId>,
    mode: ForwardMode,
    /// The system's interface index; 0 without one.
    index: u32,
}

/// How packets of an interface are forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForwardMode {
    /// By their routes, after a walk in direction `out`. A packet without a route passes without a port. For replays.
    Routes,
    /// By their routes, after a walk in direction `out`. A packet without a route is dropped.
    Router,
    /// By another port.
    Bridge {
        /// The other port.
        xmit: PortId,
        /// Packets walk the rules in direction `out`.
        walk_out: bool,
    },
    /// By this port, which received them from the kernel (NFQUEUE). Rules may see another port ([`Topology::listed`]).
    Back(PortId),
    /// They are not forwarded: the port is monitored.
    Nowhere,
}

impl Topology {
    /// One interface whose packets arrive on `port`, with [`ForwardMode::Routes`].
    pub fn new(port: PortId) -> Self {
        let mut topology = Self::none();
        topology.add(port, ForwardMode::Routes);
        topology
    }

    /// No interface.
    pub fn none() -> Self {
        Self { interfaces: Vec::new() }
    }

    /// Adds the next interface: its packets arrive on `port`.
    pub fn add(&mut self, port: PortId, mode: ForwardMode) {
        self.interfaces.push(Interface {
            untagged: port,
            by_vlan: Vec::new(),
            listed: Vec::new(),
            mode,
            index: 0,
        });
    }

    /// Packets of the last interface whose outermost VLAN is `vlan` arrive on `port`.
    pub fn tagged(&mut self, vlan: u16, port: PortId) {
        if let Some(interface) = self.interfaces.last_mut() {
            interface.by_vlan.push((vlan, port));
        }
    }

    /// Adds the port of the next interface that the last interface lists ([`Queued::listed`](towpath_port::Queued::listed)). Packets of the
    /// listed interface arrive on this port or leave by it.
    pub fn listed(&mut self, port: PortId) {
        if let Some(interface) = self.interfaces.last_mut() {
            interface.listed.push(port);
        }
    }

    /// Sets the system's index of the last interface, which inspectors get.
    pub fn index(&mut self, index: u32) {
        if let Some(interface) = self.interfaces.last_mut() {
            interface.index = index;
        }
    }

    /// The interfaces that an inspector gets with a packet. `xmit`: the packet's egress port, if known.
    pub(crate) fn interfaces(
        &self,
        meta: &Meta,
        mode: ForwardMode,
        egress: Egress,
        xmit: Option<PortId>,
    ) -> Interfaces {
        let ingress = self.interfaces.get(meta.interface as usize).map_or(0, |interface| interface.index);
        if let Some(queued) = meta.port.queued {
            // The port is a queue of the kernel.
            return Interfaces { ingress, egress: queued.out_interface, hook: queued.hook, bridged: false };
        }
        let hook = match (egress, xmit) {
            (Egress::Local, _) => LOCAL_IN,
            (_, Some(_)) => FORWARD,
            (_, None) => PREROUTING,
        };
        let bridged = matches!(mode, ForwardMode::Bridge { .. });
        Interfaces { ingress, egress: xmit.map_or(0, |port| self.index_of(port)), hook, bridged }
    }

    /// The interface index of a port; 0 if it has none.
    fn index_of(&self, port: PortId) -> u32 {
        let of_port = |interface: &&Interface| {
            interface.untagged == port || interface.by_vlan.iter().any(|(_, tagged)| *tagged == port)
        };
        self.interfaces.iter().find(of_port).map_or(0, |interface| interface.index)
    }

    /// The listed ports of a packet's input and output interface.
    pub(crate) fn named(&self, meta: &Meta) -> [Option<PortId>; 2] {
        let (Some(queued), Some(interface)) =
            (meta.port.queued, self.interfaces.get(meta.interface as usize))
        else {
            return [None; 2];
        };
        queued.listed.map(|at| interface.listed.get(usize::from(at?)).copied())
    }

    /// The port that a packet of the first interface arrives on.
    ///
    /// # Panics
    ///
    /// Panics if there is no interface.
    pub fn port(&self, packet: &Packet<'_>) -> PortId {
        self.of(packet, 0).0
    }

    /// The port that a packet arrives on, and how it is forwarded. An unknown interface is the first one.
    ///
    /// # Panics
    ///
    /// Panics if there is no interface.
    pub fn of(&self, packet: &Packet<'_>, interface: u32) -> (PortId, ForwardMode) {
        let interface = self.interfaces.get(interface as usize).unwrap_or(&self.interfaces[0]);
        let tagged = packet.vlan.and_then(|vlan| interface.by_vlan.iter().find(|(id, _)| *id == vlan));
        (tagged.map_or(interface.untagged, |&(_, port)| port), interface.mode)
    }

    /// How the packets that arrive on `port` are forwarded. `None` if no interface has the port.
    pub fn mode(&self, port: PortId) -> Option<ForwardMode> {
        self.interface_of(port).map(|(at, _)| self.mode_of(at))
    }

    /// How the packets of an interface are forwarded.
    pub(crate) fn mode_of(&self, interface: usize) -> ForwardMode {
        self.interfaces[interface].mode
    }

    /// The number of the interface of a port, and the VLAN if the port has the packets of one.
    pub fn interface_of(&self, port: PortId) -> Option<(usize, Option<u16>)> {
        self.interfaces.iter().enumerate().find_map(|(at, interface)| {
            let vlan = || interface.by_vlan.iter().find(|(_, tagged)| *tagged == port).map(|(vlan, _)| *vlan);
            if interface.untagged == port { Some((at, None)) } else { Some((at, Some(vlan()?))) }
        })
    }

    /// Returns true if packets of the interface arrive on a port that depends on their VLAN.
    pub fn has_vlans(&self, interface: usize) -> bool {
        self.interfaces.get(interface).is_some_and(|interface| !interface.by_vlan.is_empty())
    }

    /// The port that packets of an interface arrive on, whose outermost VLAN is `vlan`.
    pub fn arrival(&self, interface: usize, vlan: Option<u16>) -> Option<PortId> {
        let interface = self.interfaces.get(interface)?;
        let tagged = vlan.and_then(|vlan| interface.by_vlan.iter().find(|(id, _)| *id == vlan));
        Some(tagged.map_or(interface.untagged, |&(_, port)| port))
    }

    /// Where the packets of an interface leave, if that does not depend on the packet.
    pub(crate) fn direct(&self, interface: u32) -> Option<Egress> {
        match self.interfaces.get(interface as usize)?.mode {
            ForwardMode::Bridge { xmit, walk_out: false } => Some(Egress::Port(xmit)),
            ForwardMode::Nowhere => Some(Egress::Unrouted),
            ForwardMode::Bridge { .. } | ForwardMode::Routes | ForwardMode::Router | ForwardMode::Back(_) => {
                None
            }
        }
    }

    /// The port that the untagged packets of an interface arrive on.
    pub(crate) fn untagged(&self, interface: u32) -> Option<PortId> {
        self.interfaces.get(interface as usize).map(|interface| interface.untagged)
    }
}
