//! What several commands share: the ports and routes of the command line, reading rules, and a packet's whole way
//! through them.

use std::io::Read;
use std::net::IpAddr;
use std::path::Path;

use clap::Args;
use towpath_engine::Topology;
use towpath_gate::rules::Ruleset;
use towpath_gate::{Dir, Gate, Gateway, PortId, Ports, Route, Routes, Step, Walk, state};
use towpath_wire::{Addresses, Packet, Time};

use crate::args::{AddressArg, RouteArg, VlanPort, address, exit, route, vlan_port};
use crate::cli::{fail, say, warn};

/// The port that packets arrive on unless `--port` names another for their VLAN.
pub(crate) const UNTAGGED: &str = "cap0";

#[derive(Debug, Args)]
pub(crate) struct Wiring {
    /// Name the port of a VLAN: packets tagged ID arrive on NAME, the others on cap0
    #[arg(long = "port", value_name = "NAME=vlan:ID", value_parser = vlan_port)]
    pub(crate) ports: Vec<VlanPort>,

    /// Send packets to PREFIX out of port NAME: they also walk the rules once with direction out
    ///
    /// The longest matching prefix wins; a packet that no prefix matches is not walked a second time. For `antispoof` each PREFIX
    /// is NAME's own net, but not 0.0.0.0/0 and ::/0.
    #[arg(long = "route", value_name = "PREFIX=NAME", value_parser = route)]
    pub(crate) routes: Vec<RouteArg>,

    /// Give a port an address, for `me` and `me6` in the rules
    #[arg(long = "address", value_name = "NAME=ADDRESS", value_parser = address)]
    pub(crate) addresses: Vec<AddressArg>,
}

/// Rules or wiring that cannot be used; each case knows its exit code.
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
    /// The ports by name, which one a packet arrives on, and the routes. `more` are ports that only have a name.
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
            // The command line names no gateways. The default route has one: what lies behind it is nobody's own net.
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
        // The hash key is not a secret worth keeping here, but no capture can be made to collide under it.
        let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0);
        let mut gate = Gate::new(ruleset, ports, state::Settings::default(), seed);
        gate.set_routes(routes);
        Ok((gate, topology))
    }
}

/// The rules of a file. Warnings are printed.
pub(crate) fn rules(file: &Path) -> Result<Ruleset, Wrong> {
    let text = read(file).map_err(|error| Wrong::Rules(vec![format!("towpath: {error}")]))?;
    let parsed = Ruleset::parse(&file.display().to_string(), &text);
    parsed.warnings.iter().for_each(warn);
    parsed.ruleset.map_err(|errors| Wrong::Rules(errors.iter().map(ToString::to_string).collect()))
}

/// Takes a packet through the rules, in and out, for the states it makes and the rules it uses. An inspector's pass is
/// taken for granted.
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

/// The port by which a packet that passed on its way in leaves, if there is a route.
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

/// Largest rule file: several times what a table of 5 million prefixes takes.
const MAX_RULES: u64 = 1 << 30;

/// The text of a rule file, or of standard input when it is `-`; an error that names the file.
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
    // Comments may be in any encoding; a word that is not UTF-8 is unknown and will be named with its place.
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
