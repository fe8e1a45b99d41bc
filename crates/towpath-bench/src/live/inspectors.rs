//! Inspectors of a live engine: the time until an inspector on standby takes over from one that was killed, and the cost of idle
//! inspectors.
//!
//! One flow of datagrams crosses the engine at a fixed rate. Both ends are threads of this process in their namespaces and use the same
//! clock, so a datagram is timed from its sending to its arrival.

use std::fs;
use std::net::{Ipv4Addr, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use super::dut;
use super::topology::{DUT, Topology, Wiring};
use crate::clock::now_ns;
use crate::packet::DESTINATION;
use crate::peer::netns;
use crate::pin::Cpus;
use crate::side::Side;

const PORT: u16 = 5001;
/// Time between two datagrams: longer than an engine thread polls before it sleeps.
const GAP: Duration = Duration::from_micros(200);
/// Time for the last datagrams to arrive, and for an inspector to be started.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time until the windows of a chain of inspectors are full.
const WARM_UP: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(2);

/// An engine with one queue, between two namespaces.
struct Inspected {
    engine: Side,
    files: TempDir,
    topology: Topology,
}

/// A flow that is being sent.
struct Flow {
    stop: Arc<AtomicBool>,
    sender: JoinHandle<Result<Vec<u64>>>,
    receiver: JoinHandle<Result<Vec<(u64, u64)>>>,
}

/// The result of a flow.
struct Sent {
    /// When each datagram was sent, in nanoseconds.
    sent: Vec<u64>,
    /// The numbers of the datagrams that arrived, and when.
    arrived: Vec<(u64, u64)>,
}

/// The result of [`kills`].
pub(crate) struct Kills {
    /// For each kill, nanoseconds from the kill to the arrival of the first datagram that was sent after it.
    pub(crate) times: Vec<f64>,
    pub(crate) sent: usize,
    pub(crate) arrived: usize,
}

/// Cost of datagrams to one inspector.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    /// Doorbells per datagram.
    pub(crate) doorbells: f64,
    /// Nanoseconds of CPU time of the engine and all inspectors per datagram.
    pub(crate) cpu: f64,
}

/// Kills the inspector of the flow `times` times with SIGKILL, each time when the engine's inspectors are complete, with `standby` further
/// ones, and `pause` later.
pub(crate) fn kills(cpus: Cpus, standby: usize, times: usize, pause: Duration) -> Result<Kills> {
    let program = crate::subject::replay::binary()?;
    let queue = format!(
        "command = \"{} inspect --queue 1 --match nothing-like-this --verdict drop\"\nstandby = {standby}\n",
        program.display()
    );
    let inspected = Inspected::start(cpus, &format!("[queue.1]\n{queue}"), &dut::rules(true))?;
    let flow = inspected.flow(cpus)?;
    let mut killed = Vec::new();
    for _ in 0..times {
        inspected.until_inspectors(1 + standby)?;
        thread::sleep(pause);
        let rings = inspected.until_inspectors(1 + standby)?;
        // The inspector that gets the flow's frames.
        let busy = || -> Result<Option<i32>> {
            let now = inspected.rings()?;
            let grown =
                |ring: &&Ring| rings.iter().any(|old| old.pid == ring.pid && old.published < ring.published);
            Ok(now.iter().find(grown).map(|ring| ring.pid))
        };
        let pid = wait_for(busy)?;
        killed.push(now_ns());
        kill_process(Pid::from_raw(pid).context("a process id")?, Signal::KILL)?;
    }
    inspected.until_inspectors(1 + standby)?;
    let Sent { sent, arrived } = flow.finish()?;
    let time = |killed: &u64| {
        let later = arrived.iter().filter(|(number, _)| sent[*number as usize] > *killed);
        let first = later.map(|(_, at)| *at).min().context("no datagram arrived after a kill")?;
        Ok((first - killed) as f64)
    };
    let times = killed.iter().map(time).collect::<Result<_>>()?;
    Ok(Kills { times, sent: sent.len(), arrived: arrived.len() })
}

/// Measures datagrams of one flow with `inspectors` attached inspectors, of which one gets them.
pub(crate) fn cost(cpus: Cpus, inspectors: usize, time: Duration) -> Result<Cost> {
    let inspected = Inspected::start(cpus, "[queue.1]\nsocket = \"queue.sock\"\n", &dut::rules(true))?;
    let queue = inspected.files.path().join("queue.sock").display().to_string();
    let mut sides = Vec::new();
    for _ in 0..inspectors {
        let words = ["live-inspector", &queue, &cpus.consumer.to_string()].map(str::to_owned);
        let mut side = Side::start(&words, &[])?;
        side.line()?;
        sides.push(side);
    }
    inspected.until_inspectors(inspectors)?;
    let pids: Vec<u32> = sides.iter().map(Side::pid).chain([inspected.engine.pid()]).collect();
    let cpu = || pids.iter().map(|pid| cpu_time(*pid)).sum::<Result<u64>>();
    let doorbells =
        || Ok::<_, anyhow::Error>(inspected.rings()?.iter().map(|ring| ring.wakeups).sum::<u64>());
    let flow = inspected.flow(cpus)?;
    let now = || Ok::<_, anyhow::Error>((doorbells()?, cpu()?, now_ns()));
    let before = now()?;
    thread::sleep(time);
    let after = now()?;
    let Sent { sent, .. } = flow.finish()?;
    let sent = sent.iter().filter(|at| (before.2..after.2).contains(at)).count() as f64;
    Ok(Cost { doorbells: (after.0 - before.0) as f64 / sent, cpu: (after.1 - before.1) as f64 / sent })
}

/// Datagrams per second of one flow that arrive through a chain of inspectors, which each hold as many datagrams as their window has, for
/// this number of microseconds. More are sent than the slowest one passes.
pub(crate) fn chain(cpus: Cpus, delays: &[u64], time: Duration) -> Result<f64> {
    let (mut queues, mut rules) = (String::new(), String::from("add allow layer2 mac-type arp\n"));
    for number in 1..=delays.len() {
        // The queue's ring is full: a frame waits there much longer than the inspector has it.
        queues += &format!("[queue.{number}]\nsocket = \"queue{number}.sock\"\ndeadline = 60\n");
        let action = if number == delays.len() { "inspect" } else { "divert" };
        rules += &format!("add {action} {number} ip from any to any in\n");
    }
    let inspected = Inspected::start(cpus, &queues, &rules)?;
    let mut sides = Vec::new();
    for (at, micros) in delays.iter().enumerate() {
        let queue = inspected.files.path().join(format!("queue{}.sock", at + 1)).display().to_string();
        let words = ["live-delay", &queue, &cpus.consumer.to_string(), &micros.to_string()];
        let mut side = Side::start(&words.map(str::to_owned), &[])?;
        side.line()?;
        sides.push(side);
    }
    inspected.until_inspectors(delays.len())?;
    let flow = inspected.flow(cpus)?;
    // The windows are full.
    thread::sleep(WARM_UP);
    let begin = now_ns();
    thread::sleep(time);
    let end = now_ns();
    let Sent { arrived, .. } = flow.finish()?;
    let arrived = arrived.iter().filter(|(_, at)| (begin..end).contains(at)).count();
    Ok(arrived as f64 / ((end - begin) as f64 / 1e9))
}

/// An attached inspector.
struct Ring {
    pid: i32,
    published: u64,
    wakeups: u64,
}

impl Inspected {
    fn start(cpus: Cpus, queues: &str, rules: &str) -> Result<Self> {
        let topology = Topology::start(Wiring::Bridge, 1500)?;
        let [from, to] = DUT;
        let config = format!(
            "rules = \"rules\"\n[engine]\ncpus = [{}]\n[control]\nsocket = \"ctl.sock\"\n{queues}\
             [port.{from}]\ndriver = \"af_packet\"\n[port.{to}]\ndriver = \"af_packet\"\n\
             [[bridge]]\nports = [\"{from}\", \"{to}\"]\n",
            cpus.consumer
        );
        let (engine, files) = dut::run_towpath(&topology.dut.pid().to_string(), &config, rules)?;
        Ok(Self { engine, files, topology })
    }

    fn rings(&self) -> Result<Vec<Ring>> {
        let output = Command::new(crate::subject::replay::binary()?)
            .args(["ctl", "--socket"])
            .arg(self.files.path().join("ctl.sock"))
            .args(["show", "rings", "--json"])
            .output()
            .context("starting towpath ctl")?;
        if !output.status.success() {
            bail!("ctl: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let answer: Value = serde_json::from_slice(&output.stdout)?;
        let rings = answer["rings"].as_array().context("ctl: no rings")?;
        let rings = rings.iter().filter(|ring| ring["gone"].is_null()).map(|ring| {
            let number =
                |name: &str| ring[name].as_u64().with_context(|| format!("ctl: no {name} in {ring}"));
            Ok(Ring {
                pid: number("pid")? as i32,
                published: number("published")?,
                wakeups: number("wakeups")?,
            })
        });
        rings.collect()
    }

    /// Waits until this number of inspectors is attached.
    fn until_inspectors(&self, count: usize) -> Result<Vec<Ring>> {
        wait_for(|| Ok(Some(self.rings()?).filter(|rings| rings.len() == count)))
    }

    /// Starts a flow, and waits until its datagrams arrive.
    fn flow(&self, cpus: Cpus) -> Result<Flow> {
        let (near, far) = (self.topology.near.pid(), self.topology.far.pid());
        let (stop, begun) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (stopped, has_begun) = (Arc::clone(&stop), Arc::clone(&begun));
        let receiver = thread::spawn(move || {
            netns::join(far)?;
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT)).context("binding a socket")?;
            socket.set_read_timeout(Some(Duration::from_millis(200)))?;
            let (mut arrived, mut word) = (Vec::new(), [0; 8]);
            loop {
                match socket.recv(&mut word) {
                    Ok(_) => arrived.push((u64::from_ne_bytes(word), now_ns())),
                    Err(_) if stopped.load(Ordering::Relaxed) => return Ok(arrived),
                    Err(_) => {}
                }
                has_begun.store(!arrived.is_empty(), Ordering::Relaxed);
            }
        });
        let stopped = Arc::clone(&stop);
        let sender = thread::spawn(move || {
            netns::join(near)?;
            crate::pin::to(cpus.engine)?;
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).context("binding a socket")?;
            socket.connect((DESTINATION, PORT))?;
            let mut sent = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                let now = now_ns();
                socket.send(&(sent.len() as u64).to_ne_bytes())?;
                sent.push(now);
                thread::sleep(GAP);
            }
            Ok(sent)
        });
        wait_for(|| Ok(begun.load(Ordering::Relaxed).then_some(())))?;
        Ok(Flow { stop, sender, receiver })
    }
}

impl Flow {
    /// Ends the flow, and waits until no datagram has arrived for 200 ms.
    fn finish(self) -> Result<Sent> {
        self.stop.store(true, Ordering::Relaxed);
        let panicked = |_| anyhow!("a thread panicked");
        let sent = self.sender.join().map_err(panicked)??;
        let arrived = self.receiver.join().map_err(panicked)??;
        Ok(Sent { sent, arrived })
    }
}

/// Polls until `found` returns a value.
fn wait_for<T>(mut found: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = found()? {
            return Ok(value);
        }
        if start.elapsed() > PATIENCE {
            bail!("the engine's inspectors did not change within {} s", PATIENCE.as_secs());
        }
        thread::sleep(LOOK);
    }
}

/// CPU time of all threads of a process in nanoseconds (Documentation/scheduler/sched-stats.rst).
fn cpu_time(pid: u32) -> Result<u64> {
    let mut sum = 0;
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = fs::read_to_string(thread?.path().join("schedstat"))?;
        sum += text.split(' ').next().context("an empty schedstat")?.parse::<u64>()?;
    }
    Ok(sum)
}
