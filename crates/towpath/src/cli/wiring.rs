//! Code shared by several commands: ports and routes of the command line, and reading rule files.

use std::io::Read;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::ValueHint;
use towpath::config::{Config, parse_rule_file};
use towpath::daemon::wiring::{self, Wired, WiredInterface};
use towpath_engine::{ForwardMode, Topology};
use towpath_gate::rules::{Diagnostic, Parsed, Ruleset};
use towpath_gate::{Gate, Gateway, PortId, Ports, Route, Routes, state};

use crate::args::{AddressArg, RouteArg, VlanPort, address, exit, route, vlan_port};
use crate::cli::{fail, say, warn};

/// Port of arriving packets, unless `--port` names another one for their VLAN.
pub(crate) const UNTAGGED: &str = "cap0";

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Wiring {
    /// Take ports, addresses, routes, settings and the default rule from a configuration of `towpath run`
    ///
    /// Without a rule file, its rules are used too. Packets of a capture arrive on the port of --ingress.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with_all = ["ports", "routes", "addresses"])]
    pub(crate) config: Option<PathBuf>,

    /// The port of the configuration on which packets of captures arrive; packets of its VLANs arrive on their ports
    /// (default: the first port)
    #[arg(long, value_name = "PORT", requires = "config")]
    pub(crate) ingress: Option<String>,

    /// Name the port of a VLAN: packets with tag ID arrive on NAME, other packets on cap0
    #[arg(long = "port", value_name = "NAME=vlan:ID", value_parser = vlan_port)]
    pub(crate) ports: Vec<VlanPort>,

    /// Route packets for PREFIX to port NAME; routed packets also walk the rules with direction out
    ///
    /// The longest matching prefix wins. A packet without a matching prefix is not walked a second time. For `antispoof`, each PREFIX
    /// except 0.0.0.0/0 and ::/0 is directly connected to NAME.
    #[arg(long = "route", value_name = "PREFIX=NAME", value_parser = route)]
    pub(crate) routes: Vec<RouteArg>,

    /// Assign an address to a port, for `me` and `me6` in the rules
    #[arg(long = "address", value_name = "NAME=ADDRESS", value_parser = address)]
    pub(crate) addresses: Vec<AddressArg>,
}

/// The rules and everything else that decides about packets.
pub(crate) struct Loaded {
    pub(crate) ruleset: Ruleset,
    pub(crate) config: Option<Config>,
}

impl Loaded {
    /// The default rule allows.
    pub(crate) fn default_allow(&self) -> bool {
        self.config.as_ref().is_some_and(|config| config.default_allow)
    }
}

/// An error in the rules or the wiring; each variant determines the exit code.
pub(crate) enum Wrong {
    Usage(String),
    Rules(Vec<String>),
    Config(Vec<String>),
}

impl Wrong {
    pub(crate) fn tell(self) -> u8 {
        match self {
            Self::Usage(message) => fail(exit::USAGE, message),
            Self::Rules(errors) => {
                errors.iter().for_each(say);
                exit::BAD_RULES
            }
            Self::Config(errors) => {
                errors.iter().for_each(say);
                exit::BAD_CONFIG
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

    /// Reads the rules: those of `file`, or of the configuration. Prints warnings.
    pub(crate) fn load(&self, file: Option<&Path>) -> Result<Loaded, Wrong> {
        let config = self.config.as_deref().map(read_config).transpose()?;
        let of_config = config.as_ref().map(|config| &*config.rules);
        let file = file.or(of_config).ok_or_else(|| Wrong::Usage("there is no rule file".to_owned()))?;
        let text = read(file).map_err(|error| Wrong::Rules(vec![format!("towpath: {error}")]))?;
        let Parsed { ruleset, warnings, .. } = parse(config.as_ref(), &file.display().to_string(), &text);
        warnings.iter().for_each(warn);
        let ruleset =
            ruleset.map_err(|errors| Wrong::Rules(errors.iter().map(ToString::to_string).collect()))?;
        Ok(Loaded { ruleset, config })
    }

    /// Builds the gate. `on` is the port that packets arrive on; if no VLAN or configuration has it, it is one more port.
    pub(crate) fn gate(&self, loaded: &Loaded, on: Option<&str>) -> Result<(Gate, Topology), Wrong> {
        let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0);
        self.gate_with_seed(loaded, on, seed)
    }

    /// As [`gate`](Self::gate), with a seed for `prob` and the hash of the state table.
    pub(crate) fn gate_with_seed(
        &self,
        loaded: &Loaded,
        on: Option<&str>,
        seed: u64,
    ) -> Result<(Gate, Topology), Wrong> {
        let new = |ports| Gate::new(loaded.ruleset.clone(), ports, state::Settings::default(), seed);
        let Some(config) = &loaded.config else {
            let (ports, topology, routes) = self.connect(on)?;
            let mut gate = new(ports);
            gate.set_routes(routes);
            return Ok((gate, topology));
        };
        let Wired { ports, interfaces, .. } = wiring::wired(config);
        let on = on.or(self.ingress.as_deref());
        let id = match on {
            Some(name) => ports.find(name).ok_or_else(|| {
                let names: Vec<_> = ports.ids().filter_map(|id| ports.name(id)).collect();
                Wrong::Usage(format!("there is no port `{name}`; the ports are {}", names.join(", ")))
            })?,
            None => PortId(0),
        };
        let of_vlan = |interface: &&WiredInterface| interface.vlans.iter().any(|(_, port)| *port == id);
        let interface = interfaces.get(usize::from(id.0)).or_else(|| interfaces.iter().find(of_vlan));
        // An engine drops packets without a route; here they have no second walk.
        let mode = match interface.map(|interface| interface.mode) {
            Some(mode @ ForwardMode::Bridge { .. }) => mode,
            _ => ForwardMode::Routes,
        };
        let mut topology = Topology::none();
        topology.add(id, mode);
        for (vlan, port) in interface.iter().flat_map(|interface| &interface.vlans) {
            topology.tagged(*vlan, *port);
        }
        let mut gate = new(ports);
        gate.set_routes(wiring::routes(config));
        wiring::settings(config).give(&mut gate);
        Ok((gate, topology))
    }
}

/// Reads a configuration, without its rules.
pub(crate) fn read_config(path: &Path) -> Result<Config, Wrong> {
    let lines = |errors: Vec<Diagnostic>| Wrong::Config(errors.iter().map(ToString::to_string).collect());
    Config::read(path).map_err(lines)
}

/// Parses rules, as the rules of a configuration if there is one.
pub(crate) fn parse(config: Option<&Config>, file: &str, text: &str) -> Parsed {
    match config.map(|config| config.parse_rules(file, text)) {
        Some(Ok(rules)) => Parsed { ruleset: Ok(rules.ruleset), warnings: rules.warnings },
        Some(Err(errors)) => Parsed { ruleset: Err(errors), warnings: Vec::new() },
        None => parse_rule_file(file, text),
    }
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
    use towpath_gate::{Dir, PacketSpec, Step, Walk};
    use towpath_wire::{self as wire, Time};

    use super::*;

    #[test]
    fn networks_behind_the_default_route_are_not_directly_connected() {
        let routes = ["10.0.0.0/24=a", "0.0.0.0/0=b", "2001:db8::/64=a", "::/0=b"];
        let wiring = Wiring {
            ports: ["a=vlan:100", "b=vlan:200"].map(|port| vlan_port(port).unwrap()).into(),
            routes: routes.map(|text| route(text).unwrap()).into(),
            ..Wiring::default()
        };
        let rules = "add deny ip from any to any not antispoof in\nadd allow ip from any to any";
        let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
        let loaded = Loaded { ruleset, config: None };
        let Ok((mut gate, _)) = wiring.gate(&loaded, None) else { panic!("the wiring is right") };
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
