//! `[port.NAME]`: the ports and their drivers.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use towpath_port::driver;

use super::keys::{self, Value};
use super::reader::{At, Table, meant};

/// A port and its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its name in rules.
    pub name: String,
    /// Its driver and the driver's configuration.
    pub driver: driver::Config,
    /// Wait for an interface that does not exist at the start.
    pub optional: bool,
    /// Own addresses: `me` in rules, and the source of replies.
    pub addresses: Vec<IpAddr>,
    /// Replies to echo requests per second.
    pub echo: u32,
    /// The zone of the states of its packets.
    pub zone: u16,
    /// VLANs that rules see as separate ports.
    pub vlans: Vec<Vlan>,
}

impl Port {
    /// The kernel's interfaces that rules may name, of an nfqueue port.
    pub fn listed(&self) -> &[String] {
        match &self.driver {
            driver::Config::Nfqueue(own) => &own.interfaces,
            _ => &[],
        }
    }
}

/// A VLAN that rules see as a separate port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vlan {
    /// VLAN id of the outermost tag.
    pub id: u16,
    /// Its name in rules.
    pub name: String,
    /// The zone of the states of its packets.
    pub zone: u16,
}

/// Longest name of an interface (`IFNAMSIZ` - 1, linux/if.h).
const NAME_MAX: usize = 15;

/// Replies to echo requests per second (net.ipv4.icmp_msgs_per_sec of Linux).
const ECHO: u32 = 1000;

/// Maximum number of ports.
const PORTS_MAX: usize = 256;

/// Reads the ports. Also returns the names of ports with an unknown driver, whose other errors cannot be checked.
pub(super) fn take<'t>(top: &Table<'t, '_>, directory: &Path) -> (Vec<(At<&'t str>, Port)>, Vec<&'t str>) {
    let (mut ports, mut unknown): (Vec<(At<&str>, Port)>, _) = (Vec::new(), Vec::new());
    for (name, table) in top.named("port") {
        if ports.len() == PORTS_MAX {
            table.wrong(&name.span, format!("more than {PORTS_MAX} ports"), "");
            break;
        }
        let Some(driver) = driver(&name, &table, directory) else {
            unknown.push(name.value);
            continue;
        };
        let addresses = table.texts("address").into_iter().filter_map(|text| address(&table, &text));
        let addresses = addresses.collect();
        let zone = table.number("zone").unwrap_or(0) as u16;
        let echo = table.number("echo").map_or(ECHO, |echo| echo as u32);
        let vlans = vlans(&table, zone);
        let optional = table.flag("optional").unwrap_or(false);
        table.finish();
        let name_of = name.value.to_owned();
        ports.push((name.clone(), Port { name: name_of, driver, optional, addresses, echo, zone, vlans }));
    }
    if !top.has("port") && !top.has("mux") {
        top.wrong(
            &top.span,
            "a configuration needs a port or a mux",
            "write [port.NAME] with driver = \"...\" below",
        );
    }
    twice(top, &ports);
    (ports, unknown)
}

fn driver(name: &At<&str>, table: &Table<'_, '_>, directory: &Path) -> Option<driver::Config> {
    let names = || driver::names().map(|(name, _)| name);
    let all = || format!("the drivers are {}", names().collect::<Vec<_>>().join(", "));
    table.need("driver", all());
    let word = table.text("driver")?;
    let config = driver::Config::from_options(word.value, &Options { name, table, word: &word, directory });
    if config.is_none() {
        let hint = meant(word.value, names()).unwrap_or_else(all);
        table.wrong(&word.span, format!("unknown driver \"{}\"", word.value), hint);
    }
    config
}

/// The values of a key of `[port.NAME]`.
fn key_of(name: &str) -> Value {
    keys::key("port", name).value
}

/// The keys of one `[port.NAME]` table.
struct Options<'a, 't, 'f> {
    name: &'a At<&'t str>,
    table: &'a Table<'t, 'f>,
    /// The value of `driver`.
    word: &'a At<&'t str>,
    directory: &'a Path,
}

impl driver::Options for Options<'_, '_, '_> {
    fn text(&self, key: &'static str) -> Option<String> {
        self.table.text(key).map(|text| text.value.to_owned())
    }

    fn flag(&self, key: &'static str) -> Option<bool> {
        self.table.flag(key)
    }

    fn number(&self, key: &'static str, range: RangeInclusive<u64>) -> Option<u64> {
        debug_assert!(matches!(key_of(key), Value::Number(min, max) if range == (min..=max)), "{key}");
        self.table.number(key)
    }

    fn word(&self, key: &'static str, words: &[&str]) -> Option<usize> {
        let word = self.table.word(key)?;
        words.iter().position(|own| *own == word)
    }

    fn texts(&self, key: &'static str) -> Option<Vec<String>> {
        let texts: Vec<String> =
            self.table.texts(key).into_iter().map(|text| text.value.to_owned()).collect();
        self.table.has(key).then_some(texts)
    }

    fn path(&self, key: &'static str) -> Option<PathBuf> {
        self.table.text(key).map(|text| self.directory.join(text.value))
    }

    fn interface(&self) -> String {
        let at = self.table.text("interface").unwrap_or_else(|| self.name.clone());
        if at.value.is_empty() || at.value.len() > NAME_MAX || at.value.contains(['/', ' ']) {
            let hint = format!("a name has 1 to {NAME_MAX} bytes, without `/` and spaces");
            self.table.wrong(&at.span, format!("`{}` cannot be the name of an interface", at.value), hint);
        }
        at.value.to_owned()
    }

    fn invalid(&self, message: &str, hint: &str) {
        self.table.wrong(&self.word.span, message, hint);
    }
}

/// The VLANs of a port in `zone`.
fn vlans(table: &Table<'_, '_>, zone: u16) -> Vec<Vlan> {
    let read = |(name, inner): (At<&str>, Table<'_, '_>)| {
        inner.need("id", "write id = N, the tag");
        let id = inner.number("id");
        let zone = inner.number("zone").map_or(zone, |zone| zone as u16);
        inner.finish();
        id.map(|id| Vlan { id: id as u16, name: name.value.to_owned(), zone })
    };
    table.named("vlan").into_iter().filter_map(read).collect()
}

fn address(table: &Table<'_, '_>, text: &At<&str>) -> Option<IpAddr> {
    let address = text.value.parse().ok();
    if address.is_none() {
        let hint = "write an address without a prefix length, such as \"192.0.2.1\"";
        table.wrong(&text.span, format!("`{}` is not an IP address", text.value), hint);
    }
    address
}

/// Reports interfaces that an nfqueue port lists and that are ports themselves, or are listed in another zone.
fn listed_twice(top: &Table<'_, '_>, at: &At<&str>, port: &Port, ports: &[(At<&str>, Port)]) {
    for (i, name) in port.listed().iter().enumerate() {
        let is_port = |(_, other): &(At<&str>, Port)| {
            other.name == *name || other.vlans.iter().any(|vlan| vlan.name == *name)
        };
        let elsewhere =
            |(_, other): &(At<&str>, Port)| other.listed().contains(name) && other.zone != port.zone;
        if port.listed()[..i].contains(name) || ports.iter().any(is_port) {
            top.wrong(&at.span, format!("the port name `{name}` is used twice"), "");
        } else if ports.iter().any(elsewhere) {
            top.wrong(
                &at.span,
                format!("two ports in different zones list `{name}`"),
                "give both ports the same zone",
            );
        }
    }
}

/// Reports names and interfaces that two ports share.
fn twice(top: &Table<'_, '_>, ports: &[(At<&str>, Port)]) {
    for (index, (at, port)) in ports.iter().enumerate() {
        for (_, other) in &ports[..index] {
            let medium =
                port.driver.exclusive().filter(|medium| other.driver.exclusive().as_ref() == Some(medium));
            if let Some(medium) = medium {
                let message = format!("ports `{}` and `{}` both use {medium}", other.name, port.name);
                top.wrong(&at.span, message, "use another interface or queue");
            }
        }
        let names = |port: &Port| -> Vec<String> {
            let vlans = port.vlans.iter().map(|vlan| vlan.name.clone());
            std::iter::once(port.name.clone()).chain(vlans).collect()
        };
        let taken: Vec<String> = ports[..index].iter().flat_map(|(_, port)| names(port)).collect();
        for (i, vlan) in port.vlans.iter().enumerate() {
            if vlan.name == port.name || taken.contains(&vlan.name) {
                top.wrong(&at.span, format!("the port name `{}` is used twice", vlan.name), "");
            }
            if port.vlans[..i].iter().any(|other| other.id == vlan.id) {
                top.wrong(&at.span, format!("VLAN {} of `{}` has two names", vlan.id, port.name), "");
            }
        }
        if taken.contains(&port.name) {
            top.wrong(&at.span, format!("the port name `{}` is used twice", port.name), "");
        }
        listed_twice(top, at, port, ports);
    }
}
