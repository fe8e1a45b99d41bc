//! `[port.NAME]`: where packets come from and go to.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use super::reader::{At, Table, meant};

/// A port and its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// What rules call it.
    pub name: String,
    /// Its driver.
    pub driver: Driver,
    /// Its own addresses: `me` in the rules, and where answers come from.
    pub addresses: Vec<IpAddr>,
    /// Ports of their own for some VLANs.
    pub vlans: Vec<Vlan>,
}

/// A VLAN of a port that rules know by a name of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vlan {
    /// The outermost tag.
    pub id: u16,
    /// What rules call it.
    pub name: String,
}

/// How a port reaches its medium.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Driver {
    /// An interface, by packet(7).
    AfPacket {
        /// The interface.
        interface: String,
        /// Segmentation and checksum offload (`PACKET_VNET_HDR`).
        offload: bool,
    },
    /// An interface, by AF_XDP.
    AfXdp {
        /// The interface.
        interface: String,
        /// Native mode; the generic one otherwise.
        native: bool,
        /// Without a copy, where the driver can.
        zero_copy: bool,
        /// Frames of several buffers, for a large MTU and for segments that are not cut; without a word, where it can be had.
        multi_buffer: Option<bool>,
        /// Packets are dropped while no engine is there (the program stays); otherwise the kernel has them.
        closed: bool,
    },
    /// A TUN (IP packets) or TAP (Ethernet frames) device.
    Tun {
        /// The device; made when it is not there.
        device: String,
        /// Ethernet frames.
        tap: bool,
        /// Segmentation and checksum offload (`IFF_VNET_HDR`).
        offload: bool,
    },
    /// A queue of the kernel's NFQUEUE.
    Nfqueue {
        /// Its number.
        queue: u16,
        /// The kernel lets packets through while it has no room.
        fail_open: bool,
        /// Bytes of each packet.
        copy_range: u32,
        /// Unsegmented packets.
        gso: bool,
    },
    /// Captures: packets come from one, and what leaves goes to another.
    Pcap {
        /// Where packets come from.
        read: Option<PathBuf>,
        /// What leaves is written here.
        write: Option<PathBuf>,
    },
}

impl Driver {
    /// The word of the configuration.
    pub fn word(&self) -> &'static str {
        match self {
            Self::AfPacket { .. } => "af_packet",
            Self::AfXdp { .. } => "af_xdp",
            Self::Tun { tap: false, .. } => "tun",
            Self::Tun { tap: true, .. } => "tap",
            Self::Nfqueue { .. } => "nfqueue",
            Self::Pcap { .. } => "pcap",
        }
    }

    /// Whether a packet's verdict goes back to where it came from, so that the port is wired by itself.
    pub fn returns(&self) -> bool {
        matches!(self, Self::Nfqueue { .. })
    }
}

const DRIVERS: [&str; 6] = ["af_packet", "af_xdp", "tun", "tap", "nfqueue", "pcap"];

/// Longest name of an interface (`IFNAMSIZ` less the final zero, linux/if.h).
const NAME_MAX: usize = 15;

/// Most ports.
const PORTS_MAX: usize = 256;

/// The ports; and the names of those whose driver is not known, of which nothing more can be said.
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
        let vlans = vlans(&table);
        table.finish();
        ports.push((name.clone(), Port { name: name.value.to_owned(), driver, addresses, vlans }));
    }
    if !top.has("port") && !top.has("mux") {
        top.wrong(&top.span, "there is no port", "write [port.NAME] with driver = \"...\" below");
    }
    twice(top, &ports);
    (ports, unknown)
}

fn driver(name: &At<&str>, table: &Table<'_, '_>, directory: &Path) -> Option<Driver> {
    table.need("driver", format!("there are {}", DRIVERS.join(", ")));
    let word = table.text("driver")?;
    let interface = || {
        let at = table.text("interface").unwrap_or_else(|| name.clone());
        if at.value.is_empty() || at.value.len() > NAME_MAX || at.value.contains(['/', ' ']) {
            let hint = format!("a name has 1 to {NAME_MAX} bytes, without `/` and spaces");
            table.wrong(&at.span, format!("`{}` cannot be the name of an interface", at.value), hint);
        }
        at.value.to_owned()
    };
    Some(match word.value {
        "af_packet" => {
            Driver::AfPacket { interface: interface(), offload: table.flag("offload").unwrap_or(false) }
        }
        "af_xdp" => Driver::AfXdp {
            interface: interface(),
            native: table.word("mode", &[("generic", false), ("native", true)]).unwrap_or(false),
            zero_copy: table.flag("zero-copy").unwrap_or(false),
            multi_buffer: table.flag("multi-buffer"),
            closed: table.word("fail", &[("open", false), ("closed", true)]).unwrap_or(false),
        },
        kind @ ("tun" | "tap") => Driver::Tun {
            device: interface(),
            tap: kind == "tap",
            offload: table.flag("offload").unwrap_or(false),
        },
        "nfqueue" => Driver::Nfqueue {
            queue: table.number("queue", 0..=65_535).unwrap_or(0) as u16,
            fail_open: table.word("fail", &[("open", true), ("closed", false)]).unwrap_or(false),
            copy_range: table.number("copy-range", 0..=65_535).unwrap_or(65_535) as u32,
            gso: table.flag("gso").unwrap_or(true),
        },
        "pcap" => {
            let path = |key| table.text(key).map(|text| directory.join(text.value));
            let (read, write) = (path("read"), path("write"));
            if read.is_none() && write.is_none() {
                table.wrong(
                    &word.span,
                    "a pcap port needs a file",
                    "write read = \"FILE\" or write = \"FILE\"",
                );
            }
            Driver::Pcap { read, write }
        }
        other => {
            let hint = meant(other, DRIVERS);
            let hint = hint.unwrap_or_else(|| format!("there are {}", DRIVERS.join(", ")));
            table.wrong(&word.span, format!("there is no driver \"{other}\""), hint);
            return None;
        }
    })
}

fn vlans(table: &Table<'_, '_>) -> Vec<Vlan> {
    let read = |(name, inner): (At<&str>, Table<'_, '_>)| {
        inner.need("id", "write id = N, the tag");
        let id = inner.number("id", 0..=4094);
        inner.finish();
        id.map(|id| Vlan { id: id as u16, name: name.value.to_owned() })
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

/// Names and media that two ports would have.
fn twice(top: &Table<'_, '_>, ports: &[(At<&str>, Port)]) {
    for (index, (at, port)) in ports.iter().enumerate() {
        for (_, other) in &ports[..index] {
            let medium = match (&port.driver, &other.driver) {
                (Driver::Nfqueue { queue: a, .. }, Driver::Nfqueue { queue: b, .. }) if a == b => {
                    Some(format!("queue {a}"))
                }
                (a, b) => device(a).filter(|name| device(b) == Some(*name)).map(|name| format!("`{name}`")),
            };
            if let Some(medium) = medium {
                let message = format!("ports `{}` and `{}` both have {medium}", other.name, port.name);
                top.wrong(&at.span, message, "every port needs one of its own");
            }
        }
        let names = |port: &Port| -> Vec<String> {
            let vlans = port.vlans.iter().map(|vlan| vlan.name.clone());
            std::iter::once(port.name.clone()).chain(vlans).collect()
        };
        let taken: Vec<String> = ports[..index].iter().flat_map(|(_, port)| names(port)).collect();
        for (i, vlan) in port.vlans.iter().enumerate() {
            if vlan.name == port.name || taken.contains(&vlan.name) {
                top.wrong(&at.span, format!("there are two ports called `{}`", vlan.name), "");
            }
            if port.vlans[..i].iter().any(|other| other.id == vlan.id) {
                top.wrong(&at.span, format!("VLAN {} of `{}` has two names", vlan.id, port.name), "");
            }
        }
        if taken.contains(&port.name) {
            top.wrong(&at.span, format!("there are two ports called `{}`", port.name), "");
        }
    }
}

fn device(driver: &Driver) -> Option<&str> {
    match driver {
        Driver::AfPacket { interface, .. } | Driver::AfXdp { interface, .. } => Some(interface),
        Driver::Tun { device, .. } => Some(device),
        Driver::Nfqueue { .. } | Driver::Pcap { .. } => None,
    }
}
