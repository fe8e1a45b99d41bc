//! The three namespaces with their links and addresses.

use anyhow::Result;

use super::netns_proc::NetnsProc;
use crate::packet::{DESTINATION, DESTINATION_MAC};
use crate::peer::netns;

/// Interface of the near end.
pub(crate) const NEAR: &str = "near0";
/// Interfaces of the device under test, to the near end and the far end.
pub(crate) const DUT: [&str; 2] = ["wan", "lan"];
/// TUN devices of the device under test, between these interfaces.
pub(crate) const TUN: [&str; 2] = ["tun0", "tun1"];
const FAR: &str = "far0";
/// Maximum MTU of a veth device.
const LARGEST: usize = 65_535;
/// Matches the packets to count and drop (see [`crate::packet::frame`]).
const SINK: &str = "--dport 53";

/// How the device under test forwards packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wiring {
    /// A program copies Ethernet frames between the interfaces: both ends are in one network.
    Bridge,
    /// The kernel routes.
    Route,
    /// The kernel routes through two TUN devices, between which a program copies packets.
    Tun,
}

pub(crate) struct Topology {
    pub(crate) near: NetnsProc,
    pub(crate) dut: NetnsProc,
    pub(crate) far: NetnsProc,
}

impl Topology {
    /// Creates the namespaces; all interfaces get `mtu`.
    pub(crate) fn start(wiring: Wiring, mtu: usize) -> Result<Self> {
        let mut topology =
            Self { near: NetnsProc::start()?, dut: NetnsProc::start()?, far: NetnsProc::start()? };
        let Topology { near, dut, far, .. } = &mut topology;
        netns::connect_as([NEAR, DUT[0]], near.pid(), dut.pid())?;
        netns::connect_as([FAR, DUT[1]], far.pid(), dut.pid())?;
        let mtu = mtu.min(LARGEST);
        for netns in [&mut *near, dut, far] {
            // Disable IPv6, so that no router discovery adds packets.
            netns.set("ipv6/conf/all/disable_ipv6", "1")?;
            netns.set("ipv6/conf/default/disable_ipv6", "1")?;
        }
        let counted = DESTINATION_MAC.map(|byte| format!("{byte:02x}")).join(":");
        let counted_by = if wiring == Wiring::Bridge { (&mut *far, FAR) } else { (&mut *dut, DUT[0]) };
        counted_by.0.run(&format!("ip link set {} address {counted}", counted_by.1))?;
        near.run(&format!("ip link set {NEAR} mtu {mtu} up"))?;
        far.run(&format!("ip link set {FAR} mtu {mtu} up"))?;
        for device in DUT {
            dut.run(&format!("ip link set {device} mtu {mtu} up"))?;
        }
        // Drop in the raw table, the earliest hook: the interface has counted the packet already.
        far.run(&format!("iptables -t raw -A PREROUTING -p udp {SINK} -j DROP"))?;
        far.run(&format!("ip address add {DESTINATION}/24 dev {FAR}"))?;
        if wiring == Wiring::Bridge {
            near.run(&format!("ip address add 10.255.0.2/24 dev {NEAR}"))?;
            return Ok(topology);
        }
        near.run(&format!("ip address add 10.254.0.2/24 dev {NEAR}"))?;
        near.run("ip route add default via 10.254.0.1")?;
        far.run("ip route add default via 10.255.0.254")?;
        dut.run(&format!("ip address add 10.254.0.1/24 dev {}", DUT[0]))?;
        dut.run(&format!("ip address add 10.255.0.254/24 dev {}", DUT[1]))?;
        dut.set("ipv4/ip_forward", "1")?;
        // The generator uses arbitrary source addresses.
        for device in ["all", "default", DUT[0], DUT[1]] {
            dut.set(&format!("ipv4/conf/{device}/rp_filter"), "0")?;
        }
        if wiring == Wiring::Tun {
            topology.route_through_tun(mtu)?;
        }
        Ok(topology)
    }

    /// Routes packets from each side to the side's TUN device, and packets from a TUN device to the side's interface.
    fn route_through_tun(&mut self, mtu: usize) -> Result<()> {
        let dut = &mut self.dut;
        for (n, (device, tun)) in DUT.iter().zip(TUN).enumerate() {
            dut.run(&format!("ip tuntap add {tun} mode tun"))?;
            dut.run(&format!("ip link set {tun} mtu {mtu} txqueuelen 4000 up"))?;
            dut.set(&format!("ipv4/conf/{tun}/rp_filter"), "0")?;
            dut.run(&format!("ip route add default dev {tun} table {}", 100 + n))?;
            dut.run(&format!("ip rule add iif {device} lookup {}", 100 + n))?;
        }
        Ok(())
    }

    /// Number of packets that have arrived at the far end.
    pub(crate) fn arrived(&mut self) -> Result<u64> {
        self.far.received(FAR)
    }
}
