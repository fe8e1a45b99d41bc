//! The three namespaces, wired and addressed.

use anyhow::Result;

use super::home::Home;
use crate::packet::{DESTINATION, DESTINATION_MAC};
use crate::peer::netns;

/// The interface of the near end.
pub(crate) const NEAR: &str = "near0";
/// The middle's interfaces, towards the near end and the far end.
pub(crate) const MIDDLE: [&str; 2] = ["wan", "lan"];
/// TUN devices of the middle, for what stands between those.
pub(crate) const TUN: [&str; 2] = ["tun0", "tun1"];
const FAR: &str = "far0";
/// The longest that a veth device takes.
const LARGEST: usize = 65_535;
/// Destination of what is counted and thrown away (see [`crate::packet::frame`]).
const SINK: &str = "--dport 53";

/// How packets get through the middle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wiring {
    /// Somebody takes Ethernet frames from one interface and gives them to the other: both ends are in one network.
    Bridge,
    /// The kernel routes.
    Route,
    /// The kernel routes through two TUN devices, between which somebody carries packets.
    Tun,
}

pub(crate) struct World {
    pub(crate) near: Home,
    pub(crate) middle: Home,
    pub(crate) far: Home,
}

impl World {
    /// Makes the namespaces; `mtu` of all interfaces.
    pub(crate) fn start(wiring: Wiring, mtu: usize) -> Result<Self> {
        let mut world = Self { near: Home::start()?, middle: Home::start()?, far: Home::start()? };
        let World { near, middle, far, .. } = &mut world;
        netns::connect_as([NEAR, MIDDLE[0]], near.pid(), middle.pid())?;
        netns::connect_as([FAR, MIDDLE[1]], far.pid(), middle.pid())?;
        let mtu = mtu.min(LARGEST);
        for home in [&mut *near, middle, far] {
            // Nothing but what is measured: no router discovery.
            home.set("ipv6/conf/all/disable_ipv6", "1")?;
            home.set("ipv6/conf/default/disable_ipv6", "1")?;
        }
        let counted = DESTINATION_MAC.map(|byte| format!("{byte:02x}")).join(":");
        let counted_by = if wiring == Wiring::Bridge { (&mut *far, FAR) } else { (&mut *middle, MIDDLE[0]) };
        counted_by.0.run(&format!("ip link set {} address {counted}", counted_by.1))?;
        near.run(&format!("ip link set {NEAR} mtu {mtu} up"))?;
        far.run(&format!("ip link set {FAR} mtu {mtu} up"))?;
        for device in MIDDLE {
            middle.run(&format!("ip link set {device} mtu {mtu} up"))?;
        }
        // The least that takes a packet: it has been counted before.
        far.run(&format!("iptables -t raw -A PREROUTING -p udp {SINK} -j DROP"))?;
        far.run(&format!("ip address add {DESTINATION}/24 dev {FAR}"))?;
        if wiring == Wiring::Bridge {
            near.run(&format!("ip address add 10.255.0.2/24 dev {NEAR}"))?;
            return Ok(world);
        }
        near.run(&format!("ip address add 10.254.0.2/24 dev {NEAR}"))?;
        near.run("ip route add default via 10.254.0.1")?;
        far.run("ip route add default via 10.255.0.254")?;
        middle.run(&format!("ip address add 10.254.0.1/24 dev {}", MIDDLE[0]))?;
        middle.run(&format!("ip address add 10.255.0.254/24 dev {}", MIDDLE[1]))?;
        middle.set("ipv4/ip_forward", "1")?;
        // What the generator sends comes from everywhere.
        for device in ["all", "default", MIDDLE[0], MIDDLE[1]] {
            middle.set(&format!("ipv4/conf/{device}/rp_filter"), "0")?;
        }
        if wiring == Wiring::Tun {
            world.route_through_tun(mtu)?;
        }
        Ok(world)
    }

    /// What comes from either side goes to that side's TUN device, and what comes out of a TUN device to the interface of its
    /// side.
    fn route_through_tun(&mut self, mtu: usize) -> Result<()> {
        let middle = &mut self.middle;
        for (n, (device, tun)) in MIDDLE.iter().zip(TUN).enumerate() {
            middle.run(&format!("ip tuntap add {tun} mode tun"))?;
            middle.run(&format!("ip link set {tun} mtu {mtu} txqueuelen 4000 up"))?;
            middle.set(&format!("ipv4/conf/{tun}/rp_filter"), "0")?;
            middle.run(&format!("ip route add default dev {tun} table {}", 100 + n))?;
            middle.run(&format!("ip rule add iif {device} lookup {}", 100 + n))?;
        }
        Ok(())
    }

    /// Packets that have come to the far end.
    pub(crate) fn arrived(&mut self) -> Result<u64> {
        self.far.received(FAR)
    }
}
