//! The device under test: Towpath, a baseline forwarder, or the kernel.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use super::topology::{DUT, TUN, Topology, Wiring};
use crate::pin::Cpus;
use crate::side::Side;

/// A port driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Driver {
    AfPacket,
    /// With segmentation and checksum offload passed through unchanged.
    AfPacketOffload,
    /// The kernel forwards the packets of all flows that have a state.
    AfPacketFlows,
    /// As `AfPacketFlows`, with room for a million flows.
    AfPacketManyFlows,
    AfXdp,
    /// The kernel forwards the packets of all flows that have a state.
    AfXdpFlows,
    /// The kernel drops the packets of all flows: an inspector has blocked them.
    AfXdpBlocked,
    /// The kernel drops the packets of [`DENIED`] sources: a rule denies them by a table.
    AfXdpDenied,
    Tun,
    TunOffload,
    Nfqueue,
}

/// The forwarding program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dut {
    /// `towpath run` with twenty rules and keep-state.
    Towpath { driver: Driver, park: bool, inspectors: u16 },
    /// A loop that only copies packets.
    BaselineFwd { driver: Driver, park: bool },
    /// The kernel forwards; `accept` processes return verdicts through NFQUEUE, `batch` packets at a time.
    Nfqueue { accept: u16, batch: usize },
    /// The kernel forwards and tracks connections.
    Conntrack,
    /// The kernel's bridge.
    Bridge,
    /// A tc program of one instruction redirects all packets of each interface to the other one.
    Redirect,
    /// A tc program redirects the packets of [`REDIRECTED`] flows of the first interface, after the lookup of flow offload.
    RedirectFlows,
    /// An XDP program does the same.
    RedirectXdp,
    /// An XDP program drops these packets, after the same lookup.
    DropXdp,
    /// An XDP program drops the packets of [`DENIED`] sources, after the lookup of rules that deny by a table.
    DropSourcesXdp,
    /// XDP_DROP at the interface to the near end.
    Drop,
}

/// Flows that [`Dut::RedirectFlows`] and [`Dut::RedirectXdp`] redirect.
pub(crate) const REDIRECTED: u32 = 1000;
/// Sources that [`Dut::DropSourcesXdp`] and [`Driver::AfXdpDenied`] drop. The generator has the first 65,536 of them.
pub(crate) const DENIED: u32 = 100_000;
/// Limit on states.
const STATES: u32 = 1_000_000;
/// Maximum startup time of Towpath.
const BEGIN: Duration = Duration::from_secs(10);

impl Driver {
    fn word(self) -> &'static str {
        match self {
            Self::AfPacket | Self::AfPacketOffload | Self::AfPacketFlows | Self::AfPacketManyFlows => {
                "af_packet"
            }
            Self::AfXdp | Self::AfXdpFlows | Self::AfXdpBlocked | Self::AfXdpDenied => "af_xdp",
            Self::Tun | Self::TunOffload => "tun",
            Self::Nfqueue => "nfqueue",
        }
    }

    fn offload(self) -> bool {
        matches!(
            self,
            Self::AfPacketOffload | Self::AfPacketFlows | Self::AfPacketManyFlows | Self::TunOffload
        )
    }

    fn wiring(self) -> Wiring {
        match self {
            Self::AfPacket
            | Self::AfPacketOffload
            | Self::AfPacketFlows
            | Self::AfPacketManyFlows
            | Self::AfXdp
            | Self::AfXdpFlows
            | Self::AfXdpBlocked
            | Self::AfXdpDenied => Wiring::Bridge,
            Self::Tun | Self::TunOffload => Wiring::Tun,
            Self::Nfqueue => Wiring::Route,
        }
    }

    fn devices(self) -> [&'static str; 2] {
        if self.wiring() == Wiring::Tun { TUN } else { DUT }
    }
}

/// Guard of a running device under test, which stops on drop.
pub(crate) struct Work {
    // Declared first: the processes end before the files that they use are removed.
    sides: Vec<Side>,
    files: Option<TempDir>,
}

impl Work {
    /// The process id of Towpath.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.sides.first().map(Side::pid)
    }

    /// The engine's control socket.
    pub(crate) fn control(&self) -> Option<PathBuf> {
        self.files.as_ref().map(|files| files.path().join("ctl.sock"))
    }
}

impl Dut {
    pub(crate) fn wiring(self) -> Wiring {
        match self {
            Self::Towpath { driver, .. } | Self::BaselineFwd { driver, .. } => driver.wiring(),
            Self::Nfqueue { .. } | Self::Conntrack => Wiring::Route,
            Self::Bridge
            | Self::Redirect
            | Self::RedirectFlows
            | Self::RedirectXdp
            | Self::DropXdp
            | Self::DropSourcesXdp
            | Self::Drop => Wiring::Bridge,
        }
    }

    /// Starts the device under test for packets of at most `len` bytes. It forwards packets when this returns.
    pub(crate) fn start(self, topology: &mut Topology, cpus: Cpus, len: usize) -> Result<Work> {
        let netns_pid = topology.dut.pid().to_string();
        let cpu = cpus.consumer.to_string();
        match self {
            Self::Towpath { driver, park, inspectors } => {
                if driver == Driver::Nfqueue {
                    topology.dut.run("iptables -A FORWARD -j NFQUEUE --queue-num 0")?;
                }
                towpath(&netns_pid, driver, park, inspectors, cpus)
            }
            Self::Nfqueue { accept, batch } => {
                let to = match accept {
                    1 => "--queue-num 0".to_owned(),
                    more => format!("--queue-balance 0:{}", more - 1),
                };
                topology.dut.run(&format!("iptables -A FORWARD -j NFQUEUE {to}"))?;
                let mut sides = Vec::new();
                for queue in 0..accept {
                    let words = [
                        "live-nfqueue",
                        &netns_pid,
                        &queue.to_string(),
                        &len.to_string(),
                        &batch.to_string(),
                        &cpu,
                    ]
                    .map(str::to_owned);
                    let mut side = Side::start(&words, &[])?;
                    side.line()?;
                    sides.push(side);
                }
                Ok(Work { sides, files: None })
            }
            Self::BaselineFwd { driver, park } => {
                let [from, to] = driver.devices();
                let how = if driver.offload() { "offload" } else { "plain" };
                let wait = if park { "park" } else { "spin" };
                let words =
                    ["baseline-fwd", driver.word(), &netns_pid, from, to, how, wait, &cpu].map(str::to_owned);
                let mut side = Side::start(&words, &[])?;
                side.line()?;
                Ok(Work { sides: vec![side], files: None })
            }
            Self::Bridge => {
                topology.dut.run("ip link add br0 type bridge")?;
                topology.dut.run("ip link set br0 up")?;
                for device in DUT {
                    topology.dut.run(&format!("ip link set {device} master br0"))?;
                }
                Ok(Work { sides: Vec::new(), files: None })
            }
            Self::Redirect => {
                for (from, to) in [(DUT[0], DUT[1]), (DUT[1], DUT[0])] {
                    topology.dut.redirect(from, to)?;
                }
                Ok(Work { sides: Vec::new(), files: None })
            }
            Self::RedirectFlows | Self::RedirectXdp => {
                let hook = if self == Self::RedirectXdp { "xdp" } else { "tc" };
                topology.dut.redirect_flows(hook, DUT[0], DUT[1], REDIRECTED)?;
                Ok(Work { sides: Vec::new(), files: None })
            }
            Self::DropXdp => {
                topology.dut.drop_flows(DUT[0], REDIRECTED)?;
                Ok(Work { sides: Vec::new(), files: None })
            }
            Self::DropSourcesXdp => {
                topology.dut.drop_sources(DUT[0], DENIED)?;
                Ok(Work { sides: Vec::new(), files: None })
            }
            Self::Drop => {
                topology.dut.drop_all(DUT[0])?;
                Ok(Work { sides: Vec::new(), files: None })
            }
            Self::Conntrack => {
                topology.dut.run("iptables -A FORWARD -m conntrack --ctstate INVALID -j DROP")?;
                Ok(Work { sides: Vec::new(), files: None })
            }
        }
    }
}

/// Starts `towpath run` in a namespace, with a configuration that has the rule file `rules` and the control socket `ctl.sock`.
pub(crate) fn run_towpath(netns_pid: &str, config: &str, rules: &str) -> Result<(Side, TempDir)> {
    let program = crate::subject::replay::binary()?;
    let files = TempDir::new().context("making a directory")?;
    let path = files.path().join("live.toml");
    fs::write(files.path().join("rules"), rules)?;
    fs::write(&path, config)?;
    let words = ["within", netns_pid, "--", &program.to_string_lossy(), "run", &path.to_string_lossy()];
    let side = Side::start(&words.map(str::to_owned), &[])?;
    let control = files.path().join("ctl.sock");
    let turns = BEGIN.as_millis() / 20;
    for turn in 0.. {
        if UnixStream::connect(&control).is_ok() {
            break;
        }
        if turn == turns {
            bail!("towpath run did not start");
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok((side, files))
}

/// Starts Towpath with queue 1, to which inspectors will attach.
pub(crate) fn with_queue(netns_pid: &str, driver: Driver, cpus: Cpus) -> Result<Work> {
    engine(netns_pid, driver, true, true, cpus)
}

fn towpath(netns_pid: &str, driver: Driver, park: bool, inspectors: u16, cpus: Cpus) -> Result<Work> {
    let mut work = engine(netns_pid, driver, park, inspectors > 0, cpus)?;
    let queue = work.control().context("the engine's directory")?.with_file_name("queue.sock");
    let queue = queue.to_string_lossy().into_owned();
    // Inspectors share a CPU with the engine: the other CPU runs the generator and the kernel's receive processing.
    for _ in 0..inspectors {
        let words = ["live-inspector", &queue, &cpus.consumer.to_string()].map(str::to_owned);
        let mut side = Side::start(&words, &[])?;
        side.line()?;
        work.sides.push(side);
    }
    Ok(work)
}

fn engine(netns_pid: &str, driver: Driver, park: bool, inspected: bool, cpus: Cpus) -> Result<Work> {
    let mut config = configuration(driver, park, inspected, cpus.consumer);
    if driver == Driver::AfXdpBlocked {
        let program = crate::subject::replay::binary()?;
        let program = program.display();
        config += &format!(
            "[queue.1]\ncommand = \"{program} inspect --queue 1 --match x --verdict drop --flow\"\n[offload]\ndeny = true\n"
        );
    }
    let inspected = inspected || driver == Driver::AfXdpBlocked;
    let mut rules = rules(inspected);
    if driver == Driver::AfXdpDenied {
        config += "[offload]\ndeny = true\n";
        rules = denied_sources() + &rules;
    }
    let (side, files) = run_towpath(netns_pid, &config, &rules)?;
    Ok(Work { sides: vec![side], files: Some(files) })
}

/// A rule that denies [`DENIED`] sources by a table, before all others.
fn denied_sources() -> String {
    let mut text = String::from("table bad create type addr\nadd deny ip from table(bad) to any in\n");
    for source in 0..DENIED {
        text += &format!("table bad add {}\n", Ipv4Addr::from_bits(10 << 24 | source));
    }
    text
}

/// Twenty rules. A packet is matched against all rules of its protocol until it has a state.
pub(crate) fn rules(inspected: bool) -> String {
    let mut text = String::from("add allow layer2 mac-type arp\nadd check-state\n");
    for n in 1..=17 {
        text += &format!("add deny tcp from 192.168.{n}.0/24 to any {}\n", 6000 + n);
    }
    text += if inspected {
        "add inspect 1 ip from any to any keep-state\n"
    } else {
        "add allow ip from any to any keep-state\n"
    };
    text
}

fn configuration(driver: Driver, park: bool, inspected: bool, cpu: usize) -> String {
    let mut text = format!("rules = \"rules\"\n[settings]\ndyn_max = {STATES}\n");
    text += &format!("[engine]\ncpus = [{cpu}]\nwait = \"{}\"\n", if park { "park" } else { "spin" });
    text += "[control]\nsocket = \"ctl.sock\"\n";
    if inspected {
        text += "[queue.1]\nsocket = \"queue.sock\"\nfanout = \"flow\"\n";
    }
    let word = driver.word();
    if driver == Driver::Nfqueue {
        return text + &format!("[port.kernel]\ndriver = \"{word}\"\nqueue = 0\n");
    }
    for device in driver.devices() {
        text += &format!("[port.{device}]\ndriver = \"{word}\"\n");
        if driver.offload() {
            text += "offload = true\n";
        }
    }
    match driver {
        Driver::AfPacketFlows | Driver::AfXdpFlows => text += "[offload]\nrules = \"all\"\n",
        Driver::AfPacketManyFlows => text += "[offload]\nrules = \"all\"\nentries = 2097152\n",
        _ => {}
    }
    let [from, to] = driver.devices();
    text + &format!("[[bridge]]\nports = [\"{from}\", \"{to}\"]\n")
}
