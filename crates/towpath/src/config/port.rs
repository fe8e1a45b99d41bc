//! `[port.NAME]`: the ports and their drivers.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use super::reader::{At, Table, meant};

/// A port and its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its name in rules.
    pub name: String,
    /// Its driver.
    pub driver: Driver,
    /// Own addresses: `me` in rules, and the source of replies.
    pub addresses: Vec<IpAddr>,
    /// VLANs that rules see as separate ports.
    pub vlans: Vec<Vlan>,
}

/// A VLAN that rules see as a separate port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vlan {
    /// VLAN id of the outermost tag.
    pub id: u16,
    /// Its name in rules.
    pub name: String,
}

/// A port driver and its options.
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
        /// Native mode instead of generic mode.
        native: bool,
        /// Zero-copy mode, if the driver supports it.
        zero_copy: bool,
        /// Multi-buffer frames, for a large MTU and for large segments; `None`: if supported.
        multi_buffer: Option<bool>,
        /// Without an engine packets are dropped (the program stays) instead of passed to the kernel.
        closed: bool,
    },
    /// A TUN (IP packets) or TAP (Ethernet frames) device.
    Tun {
        /// The device, created if missing.
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
        /// The kernel passes packets while the queue is full.
        fail_open: bool,
        /// Bytes copied of each packet.
        copy_range: u32,
        /// Unsegmented packets.
        gso: bool,
    },
    /// Capture files: one to receive from, one to send to.
    Pcap {
        /// The capture to receive from.
        read: Option<PathBuf>,
        /// The capture to send to.
        write: Option<PathBuf>,
    },
}

impl Driver {
    /// The driver's name in the configuration.
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

    /// Returns true if packets return to the kernel with their verdict, so that the port needs no wiring.
    pub fn returns(&self) -> bool {
        matches!(self, Self::Nfqueue { .. })
    }
}

const DRIVERS: [&str; 6] = ["af_packet", "af_xdp", "tun", "tap", "nfqueue", "pcap"];

/// Longest name of an interface (`IFNAMSIZ` - 1, linux/if.h).
const NAME_MAX: usize = 15;

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
        let vlans = vlans(&table);
        table.finish();
        ports.push((name.clone(), Port { name: name.value.to_owned(), driver, addresses, vlans }));
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
            native: table.word("mode") == Some("native"),
            zero_copy: table.flag("zero-copy").unwrap_or(false),
            multi_buffer: table.flag("multi-buffer"),
            closed: table.word("fail") == Some("closed"),
        },
        kind @ ("tun" | "tap") => Driver::Tun {
            device: interface(),
            tap: kind == "tap",
            offload: table.flag("offload").unwrap_or(false),
        },
        "nfqueue" => Driver::Nfqueue {
            queue: table.number("queue").unwrap_or(0) as u16,
            fail_open: table.word("fail") == Some("open"),
            copy_range: table.number("copy-range").unwrap_or(65_535) as u32,
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
            table.wrong(&word.span, format!("unknown driver \"{other}\""), hint);
            return None;
        }
    })
}

fn vlans(table: &Table<'_, '_>) -> Vec<Vlan> {
    let read = |(name, inner): (At<&str>, Table<'_, '_>)| {
        inner.need("id", "write id = N, the tag");
        let id = inner.number("id");
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

/// Reports names and interfaces that two ports share.
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
    }
}

fn device(driver: &Driver) -> Option<&str> {
    match driver {
        Driver::AfPacket { interface, .. } | Driver::AfXdp { interface, .. } => Some(interface),
        Driver::Tun { device, .. } => Some(device),
        Driver::Nfqueue { .. } | Driver::Pcap { .. } => None,
    }
}
