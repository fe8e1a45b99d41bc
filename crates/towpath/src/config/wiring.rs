//! `[[bridge]]`, `[[route]]` and `monitor`: the destination of passed packets.

use std::net::IpAddr;

use towpath_port::LinkType;

use super::port::Port;
use super::reader::{At, Table, meant};

/// Two ports that forward to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bridge {
    /// Indices of the ports.
    pub ports: [usize; 2],
    /// Evaluate the rules again, direction out, on the sending port.
    pub walk_out: bool,
}

/// Packets to a prefix leave by a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The prefix.
    pub net: IpAddr,
    /// Its length in bits.
    pub len: u8,
    /// Index of the port.
    pub port: usize,
    /// The next hop. Default: the packet's destination.
    pub via: Option<IpAddr>,
    /// The next hop's Ethernet address, for ports with Ethernet frames. Default: ARP or neighbor discovery resolves it.
    pub mac: Option<[u8; 6]>,
}

pub(super) struct Wiring {
    pub(super) bridges: Vec<Bridge>,
    pub(super) monitors: Vec<usize>,
    pub(super) routes: Vec<Route>,
}

/// The ports.
struct Ports<'p, 't> {
    all: &'p [(At<&'t str>, Port)],
    /// Names of ports with an unknown driver.
    unknown: &'p [&'t str],
}

pub(super) fn take(top: &Table<'_, '_>, all: &[(At<&str>, Port)], unknown: &[&str]) -> Wiring {
    let ports = &Ports { all, unknown };
    let mut wired: Vec<Option<&str>> =
        all.iter().map(|(_, port)| port.driver.returns_verdicts().then_some("nfqueue")).collect();
    let mut bridges = Vec::new();
    for table in top.tables("bridge") {
        table.need("ports", "write ports = [\"A\", \"B\"]");
        let names = table.texts("ports");
        let found: Vec<usize> =
            names.iter().filter_map(|name| wire(&table, ports, &mut wired, name, "bridge")).collect();
        let walk_out = table.flag("walk-out").unwrap_or(false);
        match found[..] {
            [a, b] if names.len() == 2 => {
                let (one, other) = (&all[a].1, &all[b].1);
                if one.zone != other.zone {
                    let message = format!(
                        "`{}` is in zone {}, `{}` in zone {}: replies would not find their states",
                        one.name, one.zone, other.name, other.zone
                    );
                    table.wrong(&table.span_of("ports"), message, "give both ports the same zone");
                }
                bridges.push(Bridge { ports: [a, b], walk_out });
            }
            _ if names.len() != 2 && table.has("ports") => {
                let message = format!("a bridge has two ports, not {}", names.len());
                table.wrong(&table.span_of("ports"), message, "");
            }
            _ => {}
        }
        table.finish();
    }
    let monitors: Vec<usize> = top
        .texts("monitor")
        .iter()
        .filter_map(|name| wire(top, ports, &mut wired, name, "monitor"))
        .collect();
    let routes: Vec<Route> =
        top.tables("route").into_iter().filter_map(|table| route(table, ports, &wired)).collect();
    // With routes, every port without other wiring is a router port.
    if !top.has("route") {
        for ((at, port), _) in all.iter().zip(&wired).filter(|(_, wired)| wired.is_none()) {
            let hint = "name it in a [[bridge]] or in monitor = [...], or add a [[route]]";
            top.wrong(&at.span, format!("port `{}` is not wired", port.name), hint);
        }
    }
    Wiring { bridges, monitors, routes }
}

fn find(table: &Table<'_, '_>, ports: &Ports<'_, '_>, name: &At<&str>) -> Option<usize> {
    let found = ports.all.iter().position(|(_, port)| port.name == name.value);
    if found.is_none() && !ports.unknown.contains(&name.value) {
        let names: Vec<&str> = ports.all.iter().map(|(_, port)| port.name.as_str()).collect();
        let hint = meant(name.value, names.iter().copied());
        let hint = hint.unwrap_or_else(|| format!("the ports are {}", names.join(", ")));
        table.wrong(&name.span, format!("unknown port `{}`", name.value), hint);
    }
    found
}

/// Finds a port by name and marks it as wired; reports a second wiring.
fn wire<'w>(
    table: &Table<'_, '_>,
    ports: &Ports<'_, '_>,
    wired: &mut [Option<&'w str>],
    name: &At<&str>,
    what: &'w str,
) -> Option<usize> {
    let port = find(table, ports, name)?;
    match wired[port].replace(what) {
        None => Some(port),
        Some("nfqueue") => {
            wired[port] = Some("nfqueue");
            let hint = "its packets go back to the kernel with their verdict";
            table.wrong(&name.span, format!("`{}` is an nfqueue port", name.value), hint);
            None
        }
        Some(other) => {
            let message = format!("port `{}` is in a {other} already", name.value);
            table.wrong(&name.span, message, "a port is wired once");
            None
        }
    }
}

fn route(table: Table<'_, '_>, ports: &Ports<'_, '_>, wired: &[Option<&str>]) -> Option<Route> {
    table.need("to", "write to = \"PREFIX\"");
    table.need("port", "write port = \"NAME\"");
    let to = table.text("to").and_then(|text| prefix(&table, &text));
    let name = table.text("port");
    let port = name.as_ref().and_then(|name| find(&table, ports, name));
    let via = table.text("via").and_then(|text| hop(&table, &text, to));
    let mac = table.text("mac").and_then(|text| mac(&table, &text));
    if let (Some(port), Some(name)) = (port, &name) {
        if let Some(other) = wired[port] {
            let hint = "a packet that is routed cannot leave there";
            table.wrong(&name.span, format!("port `{}` is in a {other}", name.value), hint);
        }
        let bare = ports.all[port].1.driver.link() == Some(LinkType::RAW);
        // ARP and neighbor solicitations need a source address.
        let six = to.is_some_and(|(net, _)| net.is_ipv6());
        let unnumbered = !ports.all[port].1.addresses.iter().any(|address| address.is_ipv6() == six);
        if !bare && unnumbered && !table.has("mac") {
            let message = format!("port `{}` has no `address` to ask for the next hop from", name.value);
            let hint = format!(
                "give it an IPv{} address, or write mac = \"aa:bb:cc:dd:ee:ff\", the next hop's Ethernet address",
                if six { 6 } else { 4 }
            );
            table.wrong(&name.span, message, hint);
        }
    }
    table.finish();
    let (net, len) = to?;
    Some(Route { net, len, port: port?, via, mac })
}

/// Parses the next hop of a route to this prefix.
fn hop(table: &Table<'_, '_>, text: &At<&str>, to: Option<(IpAddr, u8)>) -> Option<IpAddr> {
    let hop = text.value.parse::<IpAddr>().ok().filter(|hop| !hop.is_multicast() && !hop.is_unspecified());
    let family = |hop: &IpAddr| to.is_none_or(|(net, _)| net.is_ipv6() == hop.is_ipv6());
    let found = hop.filter(family);
    if found.is_none() {
        let hint = "write the address of a router on the port's link, of the prefix's family";
        table.wrong(&text.span, format!("`{}` cannot be a next hop", text.value), hint);
    }
    found
}

fn prefix(table: &Table<'_, '_>, text: &At<&str>) -> Option<(IpAddr, u8)> {
    let (address, len) = text.value.split_once('/').map_or((text.value, None), |(a, len)| (a, Some(len)));
    let parsed = address.parse::<IpAddr>().ok().and_then(|net| {
        let width = if net.is_ipv4() { 32 } else { 128 };
        let len = len.map_or(Some(width), |len| len.parse().ok())?;
        (len <= width).then_some((net, len))
    });
    if parsed.is_none() {
        let hint = "write an address and a length, such as \"10.0.0.0/8\" or \"2001:db8::/32\"";
        table.wrong(&text.span, format!("`{}` is not a prefix", text.value), hint);
    }
    parsed
}

fn mac(table: &Table<'_, '_>, text: &At<&str>) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.value.split(':');
    let whole = mac.iter_mut().all(|byte| {
        let part = parts.next().filter(|part| matches!(part.len(), 1 | 2));
        part.and_then(|part| u8::from_str_radix(part, 16).ok()).map(|value| *byte = value).is_some()
    });
    if !whole || parts.next().is_some() {
        table.wrong(
            &text.span,
            format!("`{}` is not an Ethernet address", text.value),
            "write \"aa:bb:cc:dd:ee:ff\"",
        );
        return None;
    }
    Some(mac)
}
