//! Builds the gate of a configuration: its ports, routes and settings.

use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketType};
use towpath_gate::rules::Ruleset;
use towpath_gate::{Gate, state};
use towpath_gate::{Gateway, PortId, Ports, Routes};

use super::super::huge_pages;
use crate::config::Config;
use crate::settings::Settings;
use towpath_engine::{ForwardMode, Topology};
use towpath_port::driver;

/// The ports of a configuration ([`wired`]).
#[derive(Clone, Debug)]
pub struct Wired {
    /// All ports.
    pub ports: Ports,
    /// The ports of the configuration, in its order.
    pub interfaces: Vec<WiredInterface>,
    /// The ports of the muxes with their names.
    pub muxes: Vec<(PortId, String)>,
}

/// One port of a configuration.
#[derive(Clone, Debug)]
pub struct WiredInterface {
    /// Its number.
    pub port: PortId,
    /// How its packets are forwarded.
    pub mode: ForwardMode,
    /// Identifiers of VLANs, and the ports that their packets arrive on.
    pub vlans: Vec<(u16, PortId)>,
    /// The ports of the interfaces that an nfqueue port lists.
    pub listed: Vec<PortId>,
}

/// Numbers the ports. A port's number is its position in the configuration; ports of VLANs follow, then those of muxes.
pub fn wired(config: &Config) -> Wired {
    let mut ports = Ports::new();
    let ids: Vec<_> = config.ports.iter().map(|port| ports.add(&port.name, port.addresses.clone())).collect();
    let mut interfaces = Vec::new();
    for (at, port) in config.ports.iter().enumerate() {
        ports.set_zone(ids[at], port.zone);
        let mut vlans = Vec::new();
        for vlan in &port.vlans {
            let id = ports.add(&vlan.name, Vec::new());
            ports.set_zone(id, vlan.zone);
            vlans.push((vlan.id, id));
        }
        let mut listed = Vec::new();
        for name in port.listed() {
            let id = ports.add(name, Vec::new());
            ports.set_zone(id, port.zone);
            ports.set_marks(id);
            listed.push(id);
        }
        if port.driver.returns_verdicts() {
            ports.set_marks(ids[at]);
        }
        interfaces.push(WiredInterface { port: ids[at], mode: way(config, at, &ids), vlans, listed });
    }
    let muxes = config.muxes.iter().map(|mux| (ports.add(&mux.name, Vec::new()), mux.name.clone())).collect();
    Wired { ports, interfaces, muxes }
}

/// Builds the gate, the topology of its ports, and the ports of the muxes with their names.
pub(super) fn gate(config: &Config, ruleset: &Ruleset) -> (Gate, Topology, Vec<(PortId, String)>) {
    let Wired { ports, interfaces, muxes } = wired(config);
    let mut topology = Topology::none();
    for (at, WiredInterface { port, mode, vlans, listed }) in interfaces.into_iter().enumerate() {
        topology.add(port, mode);
        topology.index(interface_index(&config.ports[at].driver));
        vlans.into_iter().for_each(|(vlan, port)| topology.tagged(vlan, port));
        listed.into_iter().for_each(|port| topology.listed(port));
    }
    // A random hash key: hash collisions of states cannot be provoked from outside.
    let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0);
    let pages = huge_pages::states(config.engine.hugepages);
    let mut gate = Gate::with_pages(ruleset.clone(), ports, state::Settings::default(), seed, pages);
    gate.set_routes(routes(config));
    settings(config).give(&mut gate);
    (gate, topology, muxes)
}

/// The index of a driver's interface; 0 if there is none now.
fn interface_index(driver: &driver::Config) -> u32 {
    let Some(name) = driver.interface() else { return 0 };
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None);
    socket.and_then(|socket| name_to_index(socket, name)).unwrap_or(0)
}

/// Returns the routes of a configuration. A port's number is its position.
pub fn routes(config: &Config) -> Routes {
    let mut routes = Routes::new();
    for route in &config.routes {
        let port = PortId(route.port as u16);
        // With a gateway, or as the default route, the network is not directly connected.
        let connected = route.via.is_none() && route.len > 0;
        let gateway = match (route.mac, route.via) {
            (Some(mac), _) => Gateway::Mac(mac),
            (None, Some(via)) => Gateway::Address(via),
            (None, None) => Gateway::OnLink,
        };
        routes.add(route.net, route.len, towpath_gate::Route { port, connected, gateway });
    }
    routes
}

fn way(config: &Config, port: usize, ids: &[towpath_gate::PortId]) -> ForwardMode {
    if config.ports[port].driver.returns_verdicts() {
        return ForwardMode::Back(ids[port]);
    }
    if config.monitors.contains(&port) {
        return ForwardMode::Nowhere;
    }
    let bridge = config.bridges.iter().find(|bridge| bridge.ports.contains(&port));
    bridge.map_or(ForwardMode::Router, |bridge| {
        let other = if bridge.ports[0] == port { bridge.ports[1] } else { bridge.ports[0] };
        ForwardMode::Bridge { xmit: ids[other], walk_out: bridge.walk_out }
    })
}

/// Returns the settings of a configuration.
///
/// # Panics
/// Panics if a setting of the configuration does not exist: reading the configuration checks the settings.
pub fn settings(config: &Config) -> Settings {
    let mut settings = Settings::default();
    for (name, value) in &config.settings {
        settings.set(name, *value).expect("the configuration was checked");
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_owns_the_nets_without_a_gateway() {
        let head = "rules = \"r\"\n[port.lan]\ndriver = \"tun\"\n";
        let route = |(to, more): (&str, &str)| format!("[[route]]\nto = \"{to}\"\nport = \"lan\"\n{more}\n");
        let rows =
            [("10.0.0.0/24", ""), ("10.9.0.0/16", "via = \"10.0.0.9\""), ("0.0.0.0/0", ""), ("::/0", "")];
        let text = head.to_owned() + &rows.map(route).concat();
        let routes = routes(&Config::parse("t", &text).unwrap());
        let addresses = [("10.0.0.7", true), ("10.9.0.7", false), ("8.8.8.8", false), ("2001:db8::1", false)];
        for (address, connected) in addresses {
            let (route, _) = routes.lookup(address.parse().unwrap()).unwrap();
            assert_eq!(route.connected, connected, "{address}");
        }
    }
}
