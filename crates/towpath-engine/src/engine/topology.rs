//! How ports hang together: where a packet arrives, and by which mode it leaves when it has passed.

use towpath_gate::PortId;
use towpath_wire::Packet;

/// The ports that packets can arrive on, by the interface that brings them.
#[derive(Clone, Debug)]
pub struct Topology {
    interfaces: Vec<Interface>,
}

#[derive(Clone, Debug)]
struct Interface {
    untagged: PortId,
    by_vlan: Vec<(u16, PortId)>,
    mode: ForwardMode,
}

/// By which mode a packet leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForwardMode {
    /// By its route, after a second walk; without one as it is. What a replay does.
    Routes,
    /// By its route, after a second walk; without one it is dropped.
    Router,
    /// By this port, perhaps after a second walk.
    Bridge {
        /// The other port.
        xmit: PortId,
        /// Whether there is a second walk.
        walk_out: bool,
    },
    /// Back by the port that it burst by.
    Back,
    /// Not at all.
    Nowhere,
}

impl Topology {
    /// All packets arrive on `port`, until [`Topology::tagged`] says otherwise.
    pub fn new(port: PortId) -> Self {
        let mut topology = Self::none();
        topology.add(port, ForwardMode::Routes);
        topology
    }

    /// No interface yet.
    pub fn none() -> Self {
        Self { interfaces: Vec::new() }
    }

    /// The next interface: its packets arrive on `port`, and leave by `mode`.
    pub fn add(&mut self, port: PortId, mode: ForwardMode) {
        self.interfaces.push(Interface { untagged: port, by_vlan: Vec::new(), mode });
    }

    /// Packets of the last interface whose outermost VLAN is `vlan` arrive on `port`.
    pub fn tagged(&mut self, vlan: u16, port: PortId) {
        if let Some(interface) = self.interfaces.last_mut() {
            interface.by_vlan.push((vlan, port));
        }
    }

    /// The port that a packet of the first interface arrives on.
    ///
    /// # Panics
    /// Without any interface.
    pub fn port(&self, packet: &Packet<'_>) -> PortId {
        self.of(packet, 0).0
    }

    /// The port that packets of an interface leave by, where that is known beforehand and they do not walk again; none of an
    /// interface whose packets need a look.
    pub(super) fn straight(&self, interface: u32) -> Option<Option<PortId>> {
        match self.interfaces.get(interface as usize)?.mode {
            ForwardMode::Bridge { xmit, walk_out: false } => Some(Some(xmit)),
            ForwardMode::Nowhere => Some(None),
            ForwardMode::Bridge { .. } | ForwardMode::Routes | ForwardMode::Router | ForwardMode::Back => {
                None
            }
        }
    }

    /// The port that packets of an interface arrive on, those that are not tagged.
    pub(super) fn untagged(&self, interface: u32) -> Option<PortId> {
        self.interfaces.get(interface as usize).map(|interface| interface.untagged)
    }

    /// The port that a packet arrives on, and its mode on. An interface that was not added is the first one.
    ///
    /// # Panics
    /// Without any interface.
    pub fn of(&self, packet: &Packet<'_>, interface: u32) -> (PortId, ForwardMode) {
        let interface = self.interfaces.get(interface as usize).unwrap_or(&self.interfaces[0]);
        let tagged = packet.vlan.and_then(|vlan| interface.by_vlan.iter().find(|(id, _)| *id == vlan));
        (tagged.map_or(interface.untagged, |&(_, port)| port), interface.mode)
    }
}
