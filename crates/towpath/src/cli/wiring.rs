//! Code shared by several commands: ports and routes of the command line, reading rule files, and walking a packet through the rules,
//! in and out.

use std::io::Read;
use std::net::IpAddr;
use std::path::Path;

use clap::Args;
use towpath::config::parse_rule_file;
use towpath_engine::Topology;
use towpath_gate::rules::Ruleset;
use towpath_gate::{Dir, Gate, Gateway, PortId, Ports, Route, Routes, Step, Walk, state};
use towpath_wire::{Addresses, Packet, Time};

use crate::args::{AddressArg, RouteArg, VlanPort, address, exit, route, vlan_port};
use crate::cli::{fail, say, warn};

/// Port of arriving packets, unless `--port` names another one for their VLAN.
pub(crate) const UNTAGGED: &str = "cap0";

#[derive(Debug, Args)]
pub(crate) struct Wiring {
    /// Name the port of a VLAN: packets with tag ID arrive on NAME, other packets on cap0
    #[arg(long = "port", value_name = "NAME=vlan:ID", value_parser = vlan_port)]
    pub(crate) ports: Vec<VlanPort>,

    /// Route packets for PREFIX to port NAME; routed packets also walk the rules with direction out
    ///
    /// The longest matching prefix wins. A packet without a matching prefix is not walked a second time. For `antispoof`, each PREFIX
    /// except 0.0.0.0/0 and ::/0 is a net of NAME.
    #[arg(long = "route", value_name = "PREFIX=NAME", value_parser = route)]
    pub(crate) routes: Vec<RouteArg>,

    /// Assign an address to a port, for `me` and `me6` in the rules
    #[arg(long = "address", value_name = "NAME=ADDRESS", value_parser = address)]
    pub(crate) addresses: Vec<AddressArg>,
}

/// An error in the rules or the wiring; each variant determines the exit code.
pub(crate) enum Wrong {
    Usage(String),
    Rules(Vec<String>),
}

impl Wrong {
    pub(crate) fn tell(self) -> u8 {
        match self {
            Self::Usage(message) => fail(exit::USAGE, message),
            Self::Rules(errors) => {
                errors.iter().for_each(say);
                exit::BAD_RULES
            }
        }
    }
}

impl Wiring {
    /// Returns the ports by name, the arrival port of each VLAN, and the routes. `more` is an additional port without a VLAN.
    fn connect(&self, more: Option<&str>) -> Result<(Ports, Topology, Routes), Wrong> {
        let mut names = vec![UNTAGGED];
        for port in &self.ports {
            if names.contains(&port.name.as_str()) {
                return Err(Wrong::Usage(format!("port `{}` is named twice", port.name)));
            }
            names.push(&port.name);
        }
        names.extend(more.filter(|name| !names.contains(name)));
        let known = |name: &str| match names.iter().position(|known| *known == name) {
            Some(index) => Ok(index),
            None => Err(Wrong::Usage(format!(
                "there is no port `{name}`; the ports are {} (name more with --port NAME=vlan:ID)",
                names.join(", ")
            ))),
        };
        let mut addresses: Vec<Vec<IpAddr>> = vec![Vec::new(); names.len()];
        for arg in &self.addresses {
            addresses[known(&arg.port)?].push(arg.address);
        }
        let mut ports = Ports::new();
        let ids: Vec<PortId> =
            names.iter().zip(addresses).map(|(name, addresses)| ports.add(name, addresses)).collect();
        let mut topology = Topology::new(ids[0]);
        for (port, &id) in self.ports.iter().zip(&ids[1..]) {
            topology.tagged(port.vlan, id);
        }
        let mut routes = Routes::new();
        for route in &self.routes {
            let port = ids[known(&route.port)?];
            // The command line has no gateways. The default route gets one, so that its addresses do not count as the port's own nets.
            routes.add(
                route.net,
                route.len,
                Route { port, connected: route.len > 0, gateway: Gateway::OnLink },
            );
        }
        Ok((ports, topology, routes))
    }

    /// A gate with the rules of `file` and these ports and routes.
    pub(crate) fn gate(&self, file: &Path, more: Option<&str>) -> Result<(Gate, Topology), Wrong> {
        self.gate_with(rules(file)?, more)
    }

    /// A gate with these rules, ports and routes.
    pub(crate) fn gate_with(&self, ruleset: Ruleset, more: Option<&str>) -> Result<(Gate, Topology), Wrong> {
        let (ports, topology, routes) = self.connect(more)?;
        // A random hash key: it need not stay secret here, but no capture can be crafted to collide under it.
        let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0);
        let mut gate = Gate::new(ruleset, ports, state::Settings::default(), seed);
        gate.set_routes(routes);
        Ok((gate, topology))
    }
}

/// Reads the rules of a file. Prints warnings.
pub(crate) fn rules(file: &Path) -> Result<Ruleset, Wrong> {
    let text = read(file).map_err(|error| Wrong::Rules(vec![format!("towpath: {error}")]))?;
    let parsed = parse_rule_file(&file.display().to_string(), &text);
    parsed.warnings.iter().for_each(warn);
    parsed.ruleset.map_err(|errors| Wrong::Rules(errors.iter().map(ToString::to_string).collect()))
}

/// Walks a packet through the rules, in and out, for its effect on states and counters. Assumes that inspectors pass it.
pub(crate) fn go(gate: &mut Gate, mut walk: Walk, packet: &Packet<'_>, now: Time) {
    loop {
        match gate.walk(&mut walk, packet, now) {
            Step::Divert(_) | Step::Tee(_) | Step::Reassemble => {}
            step => match way_out(gate, &walk, packet, step) {
                Some(port) => walk.leave(port),
                None => return,
            },
        }
    }
}

/// Returns the output port of a packet that passed with direction in, if a route matches.
pub(crate) fn way_out(gate: &Gate, walk: &Walk, packet: &Packet<'_>, step: Step) -> Option<PortId> {
    if walk.dir() != Dir::In || !matches!(step, Step::Pass | Step::Inspect(_) | Step::Forward(..)) {
        return None;
    }
    let destination = match packet.addresses {
        Addresses::V4(_, dst) => dst.into(),
        Addresses::V6(_, dst) => dst.into(),
        Addresses::None => return None,
    };
    gate.routes().lookup(destination).map(|(route, _)| route.port)
}

/// Maximum size of a rule file, in bytes; several times the size of a table with 5 million prefixes.
const MAX_RULES: u64 = 1 << 30;

/// Reads a rule file, or standard input for `-`. Errors name the file.
pub(crate) fn read(file: &Path) -> Result<String, String> {
    let mut bytes = Vec::new();
    let whole = if file == Path::new("-") {
        std::io::stdin().lock().take(MAX_RULES + 1).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(file).and_then(|file| file.take(MAX_RULES + 1).read_to_end(&mut bytes))
    };
    whole.map_err(|error| format!("{}: {error}", file.display()))?;
    if bytes.len() as u64 > MAX_RULES {
        return Err(format!("{}: no rule file is larger than 1 GiB", file.display()));
    }
    // Comments may be in any encoding. A word that is not UTF-8 is reported as unknown, with its position.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use towpath_gate::PacketSpec;
    use towpath_wire as wire;

    use super::*;

    #[test]
    fn what_lies_behind_the_default_route_is_no_ports_own_net() {
        let routes = ["10.0.0.0/24=a", "0.0.0.0/0=b", "2001:db8::/64=a", "::/0=b"];
        let wiring = Wiring {
            ports: ["a=vlan:100", "b=vlan:200"].map(|port| vlan_port(port).unwrap()).into(),
            routes: routes.map(|text| route(text).unwrap()).into(),
            addresses: Vec::new(),
        };
        let rules = "add deny ip from any to any not antispoof in\nadd allow ip from any to any";
        let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
        let Ok((mut gate, _)) = wiring.gate_with(ruleset, None) else { panic!("the wiring is right") };
        let rows = [
            ("in a udp 10.0.0.1:1 > 1.1.1.1:1", true),
            ("in b udp 10.0.0.1:1 > 1.1.1.1:1", false),
            ("in a udp 8.8.8.8:1 > 1.1.1.1:1", true),
            ("in b udp 8.8.8.8:1 > 1.1.1.1:1", true),
            ("in b udp [2001:db8::1]:1 > [2001:db8:1::1]:1", false),
            ("in a udp [2001:db8:1::1]:1 > [2001:db8::1]:1", true),
        ];
        for (text, passes) in rows {
            let written = PacketSpec::parse(text).unwrap();
            let packet = wire::parse(written.link(), &written.frame, written.frame.len() as u32).unwrap();
            let port = written.port.as_deref().and_then(|name| gate.ports().find(name));
            let mut walk = Walk::new(Dir::In, port, None);
            let step = gate.walk(&mut walk, &packet, Time::from_secs(1));
            assert_eq!(step == Step::Pass, passes, "{text}: {step:?}");
        }
    }
}
