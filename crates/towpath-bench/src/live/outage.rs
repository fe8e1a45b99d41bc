//! The outage of a bridge that is killed and started again at once, with a number of states: the longest time in which no packet of a
//! steady flow arrives.

use std::fs;
use std::io::stdin;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::dut;
use super::topology::{DUT, Topology, Wiring};
use crate::packet::DESTINATION;
use crate::peer::netns;
use crate::pin::{self, Cpus};
use crate::raw::say;
use crate::side::Side;

const PORT: u16 = 5002;
/// Time between two packets of the flow.
const GAP: Duration = Duration::from_micros(200);
/// Interval of the running snapshot.
const EVERY: &str = "0.5";
/// Maximum time for an engine to start, or to write its first snapshot.
const BEGIN: Duration = Duration::from_secs(120);

/// Runs the near end: sends packets until it is killed.
pub(crate) fn send(netns_pid: u32, cpu: usize) -> Result<()> {
    netns::join(netns_pid)?;
    pin::to(cpu)?;
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT))?;
    socket.connect((DESTINATION, PORT))?;
    say("ready")?;
    loop {
        // While no bridge runs, errors of the link do not matter.
        let _ = socket.send(&[0; 64]);
        thread::sleep(GAP);
    }
}

/// Runs the far end: after a line on its input, prints the number of packets and the longest gap between two of them in ns.
pub(crate) fn receive(netns_pid: u32, cpu: usize) -> Result<()> {
    netns::join(netns_pid)?;
    pin::to(cpu)?;
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT))?;
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    say("ready")?;
    let stop = Arc::new(AtomicBool::new(false));
    let over = Arc::clone(&stop);
    thread::spawn(move || {
        let _ = stdin().read_line(&mut String::new());
        over.store(true, Ordering::Release);
    });
    let (mut last, mut packets, mut longest) = (None, 0_u64, Duration::ZERO);
    while !stop.load(Ordering::Acquire) {
        if socket.recv(&mut [0; 64]).is_ok() {
            let now = Instant::now();
            longest = longest.max(last.map_or(Duration::ZERO, |last| now - last));
            (last, packets) = (Some(now), packets + 1);
        }
    }
    say(&packets.to_string())?;
    say(&longest.as_nanos().to_string())
}

/// Measures the outage in ms. `prepare` writes the states with which the first engine starts, and `check` reads those of the second one.
pub(crate) fn measure(
    cpus: Cpus,
    states: u32,
    prepare: impl FnOnce(&Path) -> Result<()>,
    check: impl FnOnce(&Path) -> Result<()>,
) -> Result<f64> {
    let topology = Topology::start(Wiring::Bridge, 1500)?;
    let files = TempDir::new().context("making a directory")?;
    let file = |name: &str| files.path().join(name);
    fs::write(file("rules"), dut::rules(false))?;
    let [from, to] = DUT;
    let text = format!(
        "rules = \"rules\"\nstates = \"states\"\nstates-every = {EVERY}\n\
         [settings]\ndyn_max = {}\ndyn_udp_lifetime = 3600\n[engine]\ncpus = [{}]\nwait = \"spin\"\n\
         [port.{from}]\ndriver = \"af_packet\"\n[port.{to}]\ndriver = \"af_packet\"\n\
         [[bridge]]\nports = [\"{from}\", \"{to}\"]\n",
        states + (1 << 20),
        cpus.consumer,
    );
    fs::write(file("live.toml"), text)?;
    prepare(&file("states"))?;
    let side = |role: &str, netns_pid: u32| {
        let mut side = Side::start(&[role.to_owned(), netns_pid.to_string(), cpus.engine.to_string()], &[])?;
        side.line()?;
        anyhow::Ok(side)
    };
    let (program, config) = (crate::subject::replay::binary()?, file("live.toml"));
    let dut = topology.dut.pid().to_string();
    let words = ["within", &dut, "--", &program.to_string_lossy(), "run", &config.to_string_lossy()]
        .map(str::to_owned);
    let inode = || fs::metadata(file("states")).ok().map(|file| file.ino());
    let before = inode();
    let engine = Side::start(&words, &[])?;
    let begun = Instant::now();
    // The engine has a snapshot of its own.
    while inode() == before {
        ensure!(begun.elapsed() < BEGIN, "the engine wrote no states");
        thread::sleep(Duration::from_millis(20));
    }
    let _sender = side("outage-send", topology.near.pid())?;
    let mut receiver = side("outage-receive", topology.far.pid())?;
    thread::sleep(Duration::from_secs(2));
    let before = inode();
    // Killed, and waited for.
    drop(engine);
    let engine = Side::start(&words, &[])?;
    let begun = Instant::now();
    while inode() == before {
        ensure!(begun.elapsed() < BEGIN, "the engine did not start again");
        thread::sleep(Duration::from_millis(20));
    }
    receiver.tell("stop")?;
    let (packets, longest) = (receiver.number()?, receiver.number()?);
    drop(engine);
    receiver.finish()?;
    check(&file("states"))?;
    ensure!(packets > 1000.0, "only {packets} packets arrived");
    Ok(longest / 1e6)
}
