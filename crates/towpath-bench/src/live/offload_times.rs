//! Times of flow offload: the way of a verdict into the kernel's map, and a reload while the kernel forwards many flows.

use std::fs;
use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use towpath_ring::{Consumer, Decision, Verdict};

use super::dut::{self, Driver, Dut};
use super::flood::Order;
use super::load;
use super::topology::{DUT, Topology, Wiring};
use crate::clock::now_ns;
use crate::packet::DESTINATION;
use crate::peer::netns;
use crate::pin::{self, Cpus};
use crate::xdp::FlowMap;

/// The address of the near end, and the port of the far end, whose packets end there.
const SOURCE: Ipv4Addr = Ipv4Addr::new(10, 255, 0, 2);
const PORT: u16 = 53;
/// The source port of the first flow that counts.
const FIRST: u16 = 10_000;
/// Time between two packets of a flow.
const GAP: Duration = Duration::from_micros(50);
/// Time between two looks at the map.
const LOOK: Duration = Duration::from_micros(10);
/// Time between two flows. Each [`RARE`]th comes after a pause in which the engine has nothing to offload.
const PAUSE: Duration = Duration::from_millis(5);
const LONG_PAUSE: Duration = Duration::from_millis(150);
const RARE: u16 = 5;
/// Maximum time for a flow to be offloaded.
const PATIENCE: Duration = Duration::from_secs(10);

/// Nanoseconds from an inspector's verdict for a flow until the kernel's map has the flow, for each of `count` flows, of which packets
/// follow.
pub(crate) fn verdicts(cpus: Cpus, count: u16) -> Result<Vec<u64>> {
    let mut topology = Topology::start(Wiring::Bridge, 1500)?;
    let [from, to] = DUT;
    let config = format!(
        "rules = \"rules\"\n[engine]\ncpus = [{}]\n[control]\nsocket = \"ctl.sock\"\n[queue.1]\nsocket = \"queue.sock\"\n[offload]\n\
         [port.{from}]\ndriver = \"af_packet\"\n[port.{to}]\ndriver = \"af_packet\"\n[[bridge]]\nports = [\"{from}\", \"{to}\"]\n",
        cpus.consumer
    );
    let rules = "add allow layer2 mac-type arp\nadd inspect 1 udp from any to any\n";
    let (_engine, files) = dut::run_towpath(&topology.dut.pid().to_string(), &config, rules)?;
    let map = FlowMap::newest()?;
    let ingress = topology.dut.index(from)?;
    let (tell, decided) = mpsc::channel();
    let mut queue = Consumer::attach(files.path().join("queue.sock"))?;
    // Ends with the engine.
    thread::spawn(move || {
        while let Ok(Some(frame)) = queue.recv() {
            queue.verdict(frame, Decision { flow: true, ..Verdict::Pass.into() });
            queue.flush();
            if tell.send(now_ns()).is_err() {
                return;
            }
        }
    });
    let near = topology.near.pid();
    let sender = thread::spawn(move || {
        netns::join(near)?;
        pin::to(cpus.engine)?;
        // The first flow waits until the engine has seen that the interfaces are up.
        verdict(&map, ingress, &decided, FIRST - 1)?;
        (0..count).map(|number| verdict(&map, ingress, &decided, FIRST + number)).collect()
    });
    sender.join().map_err(|_| anyhow!("the sender panicked"))?
}

/// The time of one flow.
fn verdict(map: &FlowMap, ingress: u32, decided: &mpsc::Receiver<u64>, port: u16) -> Result<u64> {
    thread::sleep(if port.is_multiple_of(RARE) { LONG_PAUSE } else { PAUSE });
    let socket = UdpSocket::bind((SOURCE, port)).context("binding a socket")?;
    socket.connect((DESTINATION, PORT))?;
    while decided.try_recv().is_ok() {}
    socket.send(&[0; 36])?;
    let at = decided.recv_timeout(PATIENCE).context("the inspector got no packet")?;
    let mut next = Instant::now();
    let begun = next;
    while !map.has(SOURCE, DESTINATION, ingress, (port, PORT))? {
        ensure!(begun.elapsed() < PATIENCE, "the flow was not offloaded");
        if next.elapsed() >= GAP {
            socket.send(&[0; 36])?;
            next = Instant::now();
        }
        // Other threads may need this CPU.
        thread::sleep(LOOK);
    }
    Ok(now_ns() - at)
}

/// The result of [`reload`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reload {
    /// Packets that were sent during a reload, and of those the packets that arrived.
    pub(crate) sent: u64,
    pub(crate) arrived: u64,
    /// Nanoseconds from the answer to a command that adds a rule, which denies all packets, until the last packet arrived.
    pub(crate) late: u64,
}

/// Flows of [`reload`], and packets per second: fewer than the engine forwards without offload.
const FLOWS: u32 = 100_000;
const RATE: u64 = 100_000;
const TIME: Duration = Duration::from_secs(3);
/// Floods before which the kernel forwards all flows.
const ROUNDS: u32 = 40;
/// Time of a flood before the reload.
const BEFORE: Duration = Duration::from_secs(1);

/// Reloads the rules while the kernel forwards [`FLOWS`] flows.
pub(crate) fn reload(cpus: Cpus) -> Result<Reload> {
    let mut topology = Topology::start(Wiring::Bridge, 1500)?;
    let engine = Dut::Towpath { driver: Driver::AfPacketManyFlows, park: true, inspectors: 0 };
    let work = engine.start(&mut topology, cpus, 1500)?;
    let control = work.control().context("the engine's socket")?;
    let order = Order { flows: FLOWS, len: 64, time: TIME, rate: RATE };
    are_offloaded(&topology, cpus, order, &control)?;
    let before = topology.arrived()?;
    let mut flood = load::sender(&topology, cpus, order)?;
    let begun = Instant::now();
    thread::sleep(BEFORE);
    // A rule that no packet reaches.
    let rules = dut::rules(false) + "add 65000 count ip from any to any\n";
    fs::write(control.with_file_name("rules"), rules)?;
    let engine =
        work.pid().and_then(|pid| Pid::from_raw(pid.cast_signed())).context("the engine's process id")?;
    kill_process(engine, Signal::HUP)?;
    while !ctl(&control, &["show", "rules"])?.to_string().contains("65000") {
        ensure!(begun.elapsed() < TIME, "the rules were not reloaded during the flood");
    }
    let sent = flood.number()? as u64;
    flood.finish()?;
    // The last ones are on their way.
    thread::sleep(Duration::from_millis(200));
    let arrived = topology.arrived()? - before;
    are_offloaded(&topology, cpus, order, &control)?;
    let mut flood = load::sender(&topology, cpus, order)?;
    thread::sleep(BEFORE);
    ctl(&control, &["add", "1", "deny", "udp", "from", "any", "to", "any"])?;
    let answered = Instant::now();
    let (mut last, mut late) = (topology.arrived()?, Duration::ZERO);
    while answered.elapsed() < Duration::from_millis(500) {
        let now = topology.arrived()?;
        if now != last {
            (last, late) = (now, answered.elapsed());
        }
    }
    flood.number()?;
    flood.finish()?;
    Ok(Reload { sent, arrived, late: late.as_nanos() as u64 })
}

/// Sends packets until the kernel forwards all flows: each has two entries, and new packets do not come to the engine.
fn are_offloaded(topology: &Topology, cpus: Cpus, order: Order, control: &Path) -> Result<()> {
    let (mut before, mut said) = (0, Value::Null);
    for _ in 0..ROUNDS {
        let mut flood = load::sender(topology, cpus, order)?;
        let sent = flood.number()? as u64;
        flood.finish()?;
        let shown = ctl(control, &["show", "offload"])?;
        let number = |name: &str| shown["offload"][name].as_u64().context("ctl: no such counter");
        let (entries, forwarded) = (number("entries")?, number("forwarded_packets")?);
        if entries >= 2 * u64::from(FLOWS) && forwarded - before >= sent {
            return Ok(());
        }
        (before, said) = (forwarded, shown);
    }
    bail!("the flows were not offloaded: {said}");
}

/// The answer to a command of `towpath ctl`.
fn ctl(control: &Path, words: &[&str]) -> Result<Value> {
    let mut command = Command::new(crate::subject::replay::binary()?);
    let said = command.args(["ctl", "--socket"]).arg(control).args(words).arg("--json").output()?;
    ensure!(said.status.success(), "ctl: {}", String::from_utf8_lossy(&said.stderr).trim());
    Ok(serde_json::from_slice(&said.stdout).unwrap_or_default())
}
