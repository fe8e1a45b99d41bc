//! The differences between two configurations that can change a packet's end: `towpath check --against`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use towpath_engine::queue::{DefaultVerdict, parse};
use towpath_gate::StatePolicy;
use towpath_port::af_packet::Kernel;
use towpath_port::af_xdp::After;
use towpath_port::driver;

use super::{Bridge, Config, Port, Queue, Route, Vlan};
use crate::daemon::wiring;

/// A key whose value differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The table that has the key; `key` at the top of the file.
    pub kind: &'static str,
    /// The name of the thing and the key, such as `lan zone`.
    pub name: String,
    /// The old value; `None` if the old configuration has no such thing.
    pub old: Option<String>,
    /// The new value; `None` if the new configuration has no such thing.
    pub new: Option<String>,
}

/// The keys of one thing with their values.
type Keys = Vec<(&'static str, String)>;

/// Returns the keys that differ and that can change a packet's end, in the order of the documentation. The rules and the default rule
/// are compared by [`towpath_gate::differences`].
pub fn differences(old: &Config, new: &Config) -> Vec<Difference> {
    let mut found = Vec::new();
    compare("key", [old, new].map(top), &mut found);
    let settings = |config: &Config| -> Vec<(String, String)> {
        let rows = wiring::settings(config).rows();
        rows.into_iter().map(|(name, value)| (name.to_owned(), value.to_string())).collect()
    };
    compare("setting", [old, new].map(settings), &mut found);
    let ports = |config: &Config| each(config.ports.iter().map(|port| (port.name.clone(), port_keys(port))));
    compare("port", [old, new].map(ports), &mut found);
    let vlans = |config: &Config| {
        let vlans = config.ports.iter().flat_map(|port| port.vlans.iter().map(move |vlan| (port, vlan)));
        each(vlans.map(|(port, vlan)| (vlan.name.clone(), vlan_keys(port, vlan))))
    };
    compare("vlan", [old, new].map(vlans), &mut found);
    let bridges = |config: &Config| {
        let name = |bridge: &Bridge| bridge.ports.map(|at| name_of(config, at)).join(" ");
        each(
            config
                .bridges
                .iter()
                .map(|bridge| (name(bridge), vec![("walk-out", bridge.walk_out.to_string())])),
        )
    };
    compare("bridge", [old, new].map(bridges), &mut found);
    let routes = |config: &Config| {
        let name = |route: &Route| format!("{}/{}", route.net, route.len);
        each(config.routes.iter().map(|route| (name(route), route_keys(config, route))))
    };
    compare("route", [old, new].map(routes), &mut found);
    let queues = |config: &Config| {
        each(config.queues.iter().map(|queue| (queue.number.to_string(), queue_keys(queue))))
    };
    compare("queue", [old, new].map(queues), &mut found);
    compare("engine", [old, new].map(engine), &mut found);
    found
}

fn top(config: &Config) -> Vec<(String, String)> {
    let reload = match config.reload {
        StatePolicy::Recheck | StatePolicy::RecheckLater => "recheck",
        StatePolicy::Keep => "keep",
        StatePolicy::Drop => "drop",
        StatePolicy::Delete => "delete",
    };
    let monitors: Vec<_> = config.monitors.iter().map(|&at| name_of(config, at)).collect();
    let every = config.states_every.map(|every| format!("{} s", every.as_secs_f64()));
    let rows = [
        ("states", path(config.states.as_deref())),
        ("states-every", every.unwrap_or_else(|| "none".to_owned())),
        ("states-at-reload", reload.to_owned()),
        ("unserved", verdict(config.unserved)),
        ("monitor", list(monitors)),
    ];
    rows.map(|(key, value)| (key.to_owned(), value)).into()
}

fn port_keys(port: &Port) -> Keys {
    let mut keys = vec![
        ("driver", port.driver.name().to_owned()),
        ("address", list(port.addresses.iter().map(ToString::to_string).collect())),
        ("echo", port.echo.to_string()),
        ("zone", port.zone.to_string()),
    ];
    keys.extend(match &port.driver {
        driver::Config::AfPacket(own) => {
            let (host, closed) = match &own.kernel {
                Kernel::Shares | Kernel::Monitored => (None, false),
                Kernel::Excluded { host, closed, .. } => (Some(host), *closed),
            };
            vec![
                ("interface", own.interface.clone()),
                ("offload", own.vnet_hdr.to_string()),
                ("exclusive", host.is_some().to_string()),
                ("host", list(host.into_iter().flat_map(|host| host.texts()).map(str::to_owned).collect())),
                ("fail", fail(!closed)),
            ]
        }
        driver::Config::AfXdp(own) => vec![
            ("interface", own.interface.clone()),
            (
                "multi-buffer",
                if own.multi_buffer_optional {
                    "if supported".to_owned()
                } else {
                    own.multi_buffer.to_string()
                },
            ),
            ("fail", fail(own.after == After::Pass)),
        ],
        driver::Config::Tun(own) => {
            vec![("interface", own.interface.clone()), ("offload", own.vnet_hdr.to_string())]
        }
        driver::Config::Nfqueue(own) => vec![
            ("queue", own.queue.to_string()),
            ("copy-range", own.copy_range.to_string()),
            ("gso", own.gso.to_string()),
            ("interfaces", own.interfaces.join(" ")),
            ("queue-length", own.max_len.to_string()),
            ("conntrack", own.conntrack.to_string()),
            ("repeat", own.repeat.to_string()),
            ("fail", fail(own.fail_open)),
        ],
        driver::Config::Pcap(own) => {
            vec![("read", path(own.read.as_deref())), ("write", path(own.write.as_deref()))]
        }
    });
    keys
}

fn vlan_keys(port: &Port, vlan: &Vlan) -> Keys {
    vec![("id", format!("{} of {}", vlan.id, port.name)), ("zone", vlan.zone.to_string())]
}

fn route_keys(config: &Config, route: &Route) -> Keys {
    let mac = |mac: [u8; 6]| mac.map(|byte| format!("{byte:02x}")).join(":");
    vec![
        ("port", name_of(config, route.port)),
        ("via", route.via.map_or_else(|| "the destination".to_owned(), |via| via.to_string())),
        ("mac", route.mac.map_or_else(|| "resolved".to_owned(), mac)),
    ]
}

fn queue_keys(queue: &Queue) -> Keys {
    let (policy, inspectors) = (&queue.policy, &queue.inspectors);
    let limit =
        |frames: u32| if frames == u32::MAX { "size of the ring".to_owned() } else { frames.to_string() };
    let seconds = |nanos: u64| format!("{} s", Duration::from_nanos(nanos).as_secs_f64());
    let stall = match policy.stall == policy.deadline.saturating_mul(3) {
        true => "3 deadlines".to_owned(),
        false => seconds(policy.stall),
    };
    vec![
        ("socket", path(inspectors.socket.as_deref())),
        ("command", list(inspectors.commands.iter().map(|words| words.join(" ")).collect())),
        ("interface", if inspectors.nfqueue { "nfqueue" } else { "ring" }.to_owned()),
        ("workers", inspectors.workers.to_string()),
        ("standby", inspectors.standby.to_string()),
        ("env", list(inspectors.process.env.clone())),
        (
            "memory",
            inspectors.memory.map_or_else(|| "256 MiB".to_owned(), |bytes| format!("{} MiB", bytes >> 20)),
        ),
        ("fanout", parse::fanout_word(policy.fanout).to_owned()),
        ("overload", parse::overload_words(policy.overload)),
        ("high", limit(policy.high)),
        ("low", limit(policy.low)),
        ("share", policy.share.to_string()),
        ("may-queue", list(policy.may_queue.iter().map(ToString::to_string).collect())),
        ("may-inject", inspectors.may_inject.to_string()),
        ("deadline", seconds(policy.deadline)),
        ("stall", stall),
        ("default", verdict(policy.default)),
    ]
}

fn engine(config: &Config) -> Vec<(String, String)> {
    let reorder = &config.engine.reorder;
    let rows = [
        ("reorder-packets", reorder.packets.to_string()),
        ("reorder-memory", format!("{} MiB", reorder.bytes >> 20)),
    ];
    rows.map(|(key, value)| (key.to_owned(), value)).into()
}

fn fail(open: bool) -> String {
    if open { "open" } else { "closed" }.to_owned()
}

fn verdict(verdict: DefaultVerdict) -> String {
    format!("{verdict:?}").to_lowercase()
}

fn path(path: Option<&Path>) -> String {
    path.map_or_else(|| "none".to_owned(), |path| path.display().to_string())
}

fn list(words: Vec<String>) -> String {
    if words.is_empty() { "none".to_owned() } else { words.join(", ") }
}

fn name_of(config: &Config, port: usize) -> String {
    config.ports.get(port).map_or_else(String::new, |port| port.name.clone())
}

/// The keys of several things, each with the name of its thing.
fn each(things: impl Iterator<Item = (String, Keys)>) -> Vec<(String, String)> {
    let row = |(name, keys): (String, Keys)| {
        keys.into_iter().map(move |(key, value)| (format!("{name} {key}"), value))
    };
    things.flat_map(row).collect()
}

/// Compares named values.
fn compare(kind: &'static str, sides: [Vec<(String, String)>; 2], found: &mut Vec<Difference>) {
    let [old, new] = sides.map(BTreeMap::from_iter);
    for name in old.keys().chain(new.keys()).collect::<BTreeSet<_>>() {
        let (old, new) = (old.get(name).cloned(), new.get(name).cloned());
        if old != new {
            found.push(Difference { kind, name: name.clone(), old, new });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::keys::KEYS;

    /// Keys that change no packet's end: performance, rights, processes, and the message servers.
    const NO_EFFECT: &[(&str, &[&str])] = &[
        ("port", &["mode", "zero-copy", "optional"]),
        ("queue", &["users", "groups", "mode", "user", "group", "limits", "cgroup"]),
        ("queue.sandbox", &["seccomp", "namespaces", "read", "write"]),
        (
            "engine",
            &[
                "sandbox",
                "threads",
                "cpus",
                "wait",
                "spin",
                "burst",
                "drain",
                "log-drops",
                "hugepages",
                "user",
                "group",
                "upgrade",
                "upgrade-time",
            ],
        ),
        ("control", &["socket", "owner", "group", "mode"]),
        ("offload", &["after", "rules", "deny", "fail", "entries"]),
        ("metrics", &["listen", "group", "mode"]),
        ("ipfix", &["collector", "domain", "active-timeout", "template-refresh", "mtu", "starts"]),
        ("events", &["output", "include"]),
        (
            "fleet",
            &[
                "servers",
                "group",
                "gate",
                "credentials",
                "tls",
                "tls-ca",
                "tls-certificate",
                "tls-key",
                "replicate",
                "configuration",
                "window",
            ],
        ),
        ("log", &["format", "level", "targets"]),
    ];

    /// The rules and the default rule are compared rule by rule.
    const IN_THE_RULES: [&str; 2] = ["rules", "default"];

    const PORTS: &str = "[port.a]\ndriver = \"af_packet\"\naddress = \"192.0.2.1\"\n[port.b]\ndriver = \"af_packet\"\naddress = \"192.0.2.2\"\n";

    /// Rows: table, key, the text before the key (with its table), its old and its new line, and the difference.
    #[rustfmt::skip]
    const ROWS: &[(&str, &str, &str, &str, &str, &str)] = &[
        ("", "states", "TOP", "", "states = \"/s\"", "key states: none -> /s"),
        ("", "states-every", "TOP", "states = \"/s\"", "states = \"/s\"\nstates-every = 5", "key states-every: none -> 5 s"),
        ("", "states-at-reload", "TOP", "", "states-at-reload = \"keep\"", "key states-at-reload: recheck -> keep"),
        ("", "unserved", "TOP", "", "unserved = \"pass\"", "key unserved: drop -> pass"),
        ("", "monitor", "TOP", "monitor = [\"a\", \"b\"]", "monitor = \"a\"\n[[route]]\nto = \"10.0.0.0/8\"\nport = \"b\"", "key monitor: a, b -> a"),
        ("port", "driver", "[port.x]", "driver = \"af_packet\"", "driver = \"tap\"", "port x driver: af_packet -> tap"),
        ("port", "address", "[port.x]\ndriver = \"tap\"", "", "address = \"10.0.0.1\"", "port x address: none -> 10.0.0.1"),
        ("port", "echo", "[port.x]\ndriver = \"tap\"", "", "echo = 0", "port x echo: 1000 -> 0"),
        ("port", "zone", "[port.x]\ndriver = \"tap\"", "", "zone = 7", "port x zone: 0 -> 7"),
        ("port", "interface", "[port.x]\ndriver = \"tap\"", "", "interface = \"y\"", "port x interface: x -> y"),
        ("port", "interface", "[port.x]\ndriver = \"af_packet\"", "", "interface = \"y\"", "port x interface: x -> y"),
        ("port", "interface", "[port.x]\ndriver = \"af_xdp\"", "", "interface = \"y\"", "port x interface: x -> y"),
        ("port", "offload", "[port.x]\ndriver = \"tap\"", "", "offload = true", "port x offload: false -> true"),
        ("port", "offload", "[port.x]\ndriver = \"af_packet\"", "", "offload = true", "port x offload: false -> true"),
        ("port", "exclusive", "[port.x]\ndriver = \"af_packet\"", "", "exclusive = true", "port x exclusive: false -> true"),
        ("port", "host", "[port.x]\ndriver = \"af_packet\"", "", "host = [\"arp\", \"ssh\"]", "port x host: none -> arp, ssh"),
        ("port", "fail", "[port.x]\ndriver = \"af_packet\"", "", "fail = \"closed\"", "port x fail: open -> closed"),
        ("port", "multi-buffer", "[port.x]\ndriver = \"af_xdp\"", "", "multi-buffer = false", "port x multi-buffer: if supported -> false"),
        ("port", "fail", "[port.x]\ndriver = \"af_xdp\"", "", "fail = \"closed\"", "port x fail: open -> closed"),
        ("port", "fail", "[port.x]\ndriver = \"nfqueue\"", "", "fail = \"open\"", "port x fail: closed -> open"),
        ("port", "queue", "[port.x]\ndriver = \"nfqueue\"", "", "queue = 3", "port x queue: 0 -> 3"),
        ("port", "copy-range", "[port.x]\ndriver = \"nfqueue\"", "", "copy-range = 96", "port x copy-range: 65535 -> 96"),
        ("port", "gso", "[port.x]\ndriver = \"nfqueue\"", "", "gso = false", "port x gso: true -> false"),
        ("port", "interfaces", "[port.x]\ndriver = \"nfqueue\"", "", "interfaces = [\"eth0\", \"eth1\"]", "port x interfaces:  -> eth0 eth1"),
        ("port", "queue-length", "[port.x]\ndriver = \"nfqueue\"", "", "queue-length = 9", "port x queue-length: 20000 -> 9"),
        ("port", "conntrack", "[port.x]\ndriver = \"nfqueue\"", "", "conntrack = true", "port x conntrack: false -> true"),
        ("port", "repeat", "[port.x]\ndriver = \"nfqueue\"", "", "repeat = true", "port x repeat: false -> true"),
        ("port", "read", "[port.x]\ndriver = \"pcap\"\nwrite = \"/w\"", "", "read = \"/r\"", "port x read: none -> /r"),
        ("port", "write", "[port.x]\ndriver = \"pcap\"\nread = \"/r\"", "", "write = \"/w\"", "port x write: none -> /w"),
        ("port.vlan", "id", "[port.a.vlan.v]", "id = 5", "id = 6", "vlan v id: 5 of a -> 6 of a"),
        ("port.vlan", "zone", "[port.a.vlan.v]\nid = 5", "", "zone = 7", "vlan v zone: 0 -> 7"),
        ("bridge", "ports", "[[bridge]]", "ports = [\"a\", \"b\"]", "ports = [\"b\", \"a\"]", "bridge a b walk-out: false -> none"),
        ("bridge", "walk-out", "[[bridge]]\nports = [\"a\", \"b\"]", "", "walk-out = true", "bridge a b walk-out: false -> true"),
        ("route", "to", "[[route]]\nport = \"a\"", "to = \"10.0.0.0/8\"", "to = \"10.0.0.0/9\"", "route 10.0.0.0/8 port: a -> none"),
        ("route", "port", "[[route]]\nto = \"10.0.0.0/8\"", "port = \"a\"", "port = \"b\"", "route 10.0.0.0/8 port: a -> b"),
        ("route", "via", "[[route]]\nto = \"10.0.0.0/8\"\nport = \"a\"", "", "via = \"10.0.0.1\"", "route 10.0.0.0/8 via: the destination -> 10.0.0.1"),
        ("route", "mac", "[[route]]\nto = \"10.0.0.0/8\"\nport = \"a\"", "", "mac = \"02:00:00:00:00:01\"", "route 10.0.0.0/8 mac: resolved -> 02:00:00:00:00:01"),
        ("queue", "socket", "[queue.1]\ncommand = \"/c\"", "", "socket = \"/s\"", "queue 1 socket: none -> /s"),
        ("queue", "command", "[queue.1]\nsocket = \"/s\"", "", "command = \"/c x\"", "queue 1 command: none -> /c x"),
        ("queue", "interface", "[queue.1]\ncommand = \"/c\"", "", "interface = \"nfqueue\"", "queue 1 interface: ring -> nfqueue"),
        ("queue", "workers", "[queue.1]\ncommand = \"/c\"", "", "workers = 2", "queue 1 workers: 1 -> 2"),
        ("queue", "standby", "[queue.1]\ncommand = \"/c\"", "", "standby = 1", "queue 1 standby: 0 -> 1"),
        ("queue", "env", "[queue.1]\ncommand = \"/c\"", "env = \"A=1\"", "env = \"A=2\"", "queue 1 env: A=1 -> A=2"),
        ("queue", "memory", "[queue.1]\nsocket = \"/s\"", "", "memory = 512", "queue 1 memory: 256 MiB -> 512 MiB"),
        ("queue", "fanout", "[queue.1]\nsocket = \"/s\"", "", "fanout = \"least\"", "queue 1 fanout: flow -> least"),
        ("queue", "overload", "[queue.1]\nsocket = \"/s\"", "", "overload = \"block\"", "queue 1 overload: drop-newest -> block"),
        ("queue", "high", "[queue.1]\nsocket = \"/s\"", "", "high = 9", "queue 1 high: size of the ring -> 9"),
        ("queue", "low", "[queue.1]\nsocket = \"/s\"\nhigh = 9", "", "low = 2", "queue 1 low: 8 -> 2"),
        ("queue", "share", "[queue.1]\nsocket = \"/s\"", "", "share = 2", "queue 1 share: 1 -> 2"),
        ("queue", "may-queue", "[queue.2]\nsocket = \"/t\"\n[queue.1]\nsocket = \"/s\"", "", "may-queue = [2]", "queue 1 may-queue: none -> 2"),
        ("queue", "may-inject", "[queue.1]\nsocket = \"/s\"", "", "may-inject = true", "queue 1 may-inject: false -> true"),
        ("queue", "deadline", "[queue.1]\nsocket = \"/s\"", "", "deadline = 0.5", "queue 1 deadline: 1 s -> 0.5 s"),
        ("queue", "stall", "[queue.1]\nsocket = \"/s\"", "", "stall = 5", "queue 1 stall: 3 deadlines -> 5 s"),
        ("queue", "default", "[queue.1]\nsocket = \"/s\"", "", "default = \"pass\"", "queue 1 default: drop -> pass"),
        ("engine", "reorder-packets", "[engine]", "", "reorder-packets = 256", "engine reorder-packets: 8192 -> 256"),
        ("engine", "reorder-memory", "[engine]", "", "reorder-memory = 1", "engine reorder-memory: 16 MiB -> 1 MiB"),
    ];

    /// A configuration in which each port is wired.
    fn config(before: &str, line: &str) -> Config {
        let routes = "[[route]]\nto = \"192.0.2.0/25\"\nport = \"a\"\n[[route]]\nto = \"192.0.2.128/25\"\nport = \"b\"\n";
        let monitor = |names: &str| format!("monitor = [{names}]\n");
        let (top, wired) = match before {
            "TOP" if line.contains("monitor") => (format!("{line}\n"), ""),
            "TOP" => (format!("{}{line}\n", monitor(r#""a", "b""#)), ""),
            _ if before.starts_with("[[bridge]]") => (String::new(), ""),
            _ if before.starts_with("[[route]]") => (String::new(), routes),
            _ if before.starts_with("[port.x]") && !before.contains("nfqueue") => {
                (monitor(r#""a", "b", "x""#), "")
            }
            _ => (monitor(r#""a", "b""#), ""),
        };
        let own = if before == "TOP" { String::new() } else { format!("{before}\n{line}\n") };
        let text = format!("rules = \"/r\"\n{top}{PORTS}{wired}{own}");
        Config::parse("t", &text).unwrap_or_else(|errors| panic!("{text}: {}", errors[0]))
    }

    #[test]
    fn every_key_that_can_change_a_packets_end_is_compared() {
        let mut wrong = Vec::new();
        for (table, key, before, old, new, expected) in ROWS {
            let (old, new) = (config(before, old), config(before, new));
            assert_eq!(differences(&old, &old), [], "{table} {key}");
            let lines: Vec<_> = differences(&old, &new)
                .into_iter()
                .map(|found| {
                    let value = |value: Option<String>| value.unwrap_or_else(|| "none".to_owned());
                    format!("{} {}: {} -> {}", found.kind, found.name, value(found.old), value(found.new))
                })
                .collect();
            if !lines.iter().any(|line| line.starts_with(expected)) {
                wrong.push((expected, lines));
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    #[test]
    fn every_key_has_a_row_or_has_no_effect() {
        for key in KEYS.iter().filter(|key| !["mux", "mux.sandbox"].contains(&key.table)) {
            let without =
                NO_EFFECT.iter().any(|(table, keys)| *table == key.table && keys.contains(&key.name));
            let in_the_rules = key.table.is_empty() && IN_THE_RULES.contains(&key.name);
            let has_row = ROWS.iter().any(|row| (row.0, row.1) == (key.table, key.name));
            assert!(has_row != (without || in_the_rules), "[{}] {}", key.table, key.name);
        }
    }
}
