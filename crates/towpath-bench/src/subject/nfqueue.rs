//! Metrics of programs for NFQUEUE: the same program, unchanged, on Towpath's queue and on the kernel's.
//!
//! The program accepts packets of a flood. On the kernel's queue, the kernel routes them, and the queue is in FORWARD. On Towpath's,
//! the engine bridges them, and shares the program's CPU; the generator and the kernel's receive processing have the other one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::live::dut::{self, Driver, Work};
use crate::live::load::{self, Load};
use crate::live::topology::{Topology, Wiring};
use crate::metric::{Better, Metric};
use crate::peer::Skipped;
use crate::pin::Cpus;
use crate::side::Side;
use crate::stat::median;
use crate::subject::replay::binary;
use crate::subject::rows::{self, Row};

const LOAD: Load = Load::Flood { len: 64, flows: 2000 };
/// Packets per second while a queue is rebuilt: both sides keep up with it.
const PACE: f64 = 20_000.0;
/// Time for 1,000 rebuilds, one for each 20 packets.
const REBUILDS: Duration = Duration::from_secs(4);

#[derive(Clone, Copy, Debug)]
enum Program {
    Single,
    Batch,
    Python,
}

#[derive(Clone, Copy, Debug)]
enum Figure {
    Rate,
    Cpu,
    Rebuilds,
}

struct Case {
    name: String,
    program: Program,
    figure: Figure,
    target: f64,
}

/// The queue that the program reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Queue {
    Towpath,
    Kernel,
}

/// Measures and prints all rows. Returns true if every measured metric meets its target.
pub(crate) fn run(json: bool, time: Duration, reps: u32, only: Option<&str>) -> Result<bool> {
    let cases = rows::chosen(cases(), only)?;
    rows::need_root()?;
    let cpus = Cpus::find()?;
    let files = TempDir::new().context("making a directory")?;
    rows::measure(&cases, json, |case| case.measure(files.path(), cpus, time, reps))
}

/// The names of all rows.
pub(crate) fn names() -> Vec<String> {
    rows::names(&cases())
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (program, word, target) in [
        (Program::Single, "C, a verdict each", 2.0),
        (Program::Batch, "C, batch verdicts", 1.6),
        (Program::Python, "python-netfilterqueue", 1.2),
    ] {
        let case =
            |rest: &str, figure, target| Case { name: format!("{word}{rest}"), program, figure, target };
        cases.push(case(", 64 B", Figure::Rate, target));
        cases.push(case(", CPU of a packet", Figure::Cpu, 0.6));
    }
    let name = "packets lost in 1,000 rebuilds of the queue".to_owned();
    cases.push(Case { name, program: Program::Single, figure: Figure::Rebuilds, target: 0.0 });
    cases
}

impl Row for Case {
    fn name(&self) -> &str {
        &self.name
    }
}

impl Case {
    fn measure(&self, files: &Path, cpus: Cpus, time: Duration, reps: u32) -> Result<Metric> {
        let (mut ours, mut peer, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..reps {
            let [own, other] =
                [Queue::Towpath, Queue::Kernel].map(|queue| self.through(queue, files, cpus, time));
            let (own, other) = (own?, other?);
            ours.push(own);
            peer.push(other);
            ratios.push(own / other);
        }
        let (ours, peer) = (median(&ours), median(&peer));
        Ok(match self.figure {
            Figure::Rate => {
                let (name, ratio) = (&self.name, median(&ratios));
                Metric::paired(name, ours * 1e-3, peer * 1e-3, ratio, "k/s", Better::Higher, self.target)
            }
            Figure::Cpu => {
                Metric::paired(&self.name, ours, peer, median(&ratios), "ns", Better::Lower, self.target)
            }
            Figure::Rebuilds => Metric::new(&self.name, ours, peer, "packets", Better::Lower, self.target),
        })
    }

    /// The figure of one queue.
    fn through(&self, queue: Queue, files: &Path, cpus: Cpus, time: Duration) -> Result<f64> {
        let wiring = if queue == Queue::Towpath { Wiring::Bridge } else { Wiring::Route };
        let mut topology = Topology::start(wiring, LOAD.mtu())?;
        let mut running = self.start(queue, &mut topology, files, cpus)?;
        match self.figure {
            Figure::Rate => LOAD.measure(&mut topology, cpus, time),
            Figure::Cpu => {
                let (before, arrived) = (cpu_time(running.program.pid())?, topology.arrived()?);
                LOAD.measure(&mut topology, cpus, time)?;
                let packets = topology.arrived()? - arrived;
                ensure!(packets > 0, "no packet arrived");
                Ok((cpu_time(running.program.pid())? - before) as f64 / packets as f64)
            }
            Figure::Rebuilds => {
                let (sent, arrived) = load::paced(&mut topology, cpus, (64, 100), PACE, REBUILDS)?;
                let done = running.program.line()?;
                ensure!(done == "done", "the program said {done:?}");
                Ok((sent - arrived) as f64)
            }
        }
    }

    /// Starts the program, and for Towpath's queue the engine before it.
    fn start(&self, queue: Queue, topology: &mut Topology, files: &Path, cpus: Cpus) -> Result<Running> {
        let mut words =
            ["within", &topology.dut.pid().to_string(), "--", "taskset", "-c"].map(str::to_owned).to_vec();
        words.push(cpus.consumer.to_string());
        let mut engine = None;
        match queue {
            Queue::Kernel => topology.dut.run("iptables -A FORWARD -j NFQUEUE --queue-num 1")?,
            Queue::Towpath => {
                let work = dut::with_queue(&topology.dut.pid().to_string(), Driver::AfPacket, cpus)?;
                let (towpath, control) = (binary()?, work.control().context("the engine's socket")?);
                words.extend([towpath.display().to_string(), "nfq".to_owned(), "--engine".to_owned()]);
                words.extend([control.display().to_string(), "--".to_owned()]);
                engine = Some(work);
            }
        }
        words.extend(self.command(files)?);
        let mut program = Side::start(&words, &[])?;
        let begun = Instant::now();
        let line = program.line()?;
        ensure!(line == "ready", "the program said {line:?} after {} ms", begun.elapsed().as_millis());
        Ok(Running { program, _engine: engine })
    }

    fn command(&self, files: &Path) -> Result<Vec<String>> {
        let mode = match (self.program, self.figure) {
            (_, Figure::Rebuilds) => "rebuild",
            (Program::Single, _) => "single",
            (Program::Batch, _) => "batch",
            (Program::Python, _) => return python(files),
        };
        let program = compile(files)?.display().to_string();
        Ok([&program, mode, "1"].map(ToString::to_string).to_vec())
    }
}

/// A running program. It ends before the engine, whose files it uses.
struct Running {
    program: Side,
    _engine: Option<Work>,
}

/// The C program, compiled once.
fn compile(files: &Path) -> Result<PathBuf> {
    let program = files.join("accept");
    if program.exists() {
        return Ok(program);
    }
    let source = files.join("accept.c");
    fs::write(&source, include_str!("../../programs/accept.c")).context("writing the program")?;
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O2", "-o"])
        .arg(&program)
        .arg(&source)
        .args(["-lnetfilter_queue", "-lnfnetlink"]);
    let output = cc.output().map_err(|error| Skipped(format!("needs a C compiler: {error}")))?;
    if !output.status.success() {
        return Err(Skipped("needs the headers of libnetfilter_queue and libnfnetlink".to_owned()).into());
    }
    Ok(program)
}

/// The Python program, in the virtual environment of `.ci/run programs`.
fn python(files: &Path) -> Result<Vec<String>> {
    let own = std::env::current_exe().context("finding this program")?;
    let target = own.ancestors().nth(2).context("the target directory")?;
    let python = target.join("clients/bin/python").display().to_string();
    let known = Command::new(&python).args(["-c", "import netfilterqueue"]).output();
    if !known.is_ok_and(|output| output.status.success()) {
        return Err(Skipped("needs python-netfilterqueue (`.ci/run programs`)".to_owned()).into());
    }
    let script = files.join("accept.py");
    fs::write(&script, include_str!("../../programs/accept.py")).context("writing the program")?;
    Ok(vec![python, script.display().to_string(), "1".to_owned()])
}

/// CPU time of a process in nanoseconds (/proc/PID/task/TID/schedstat).
fn cpu_time(pid: u32) -> Result<u64> {
    let tasks = format!("/proc/{pid}/task");
    let mut sum = 0;
    for task in fs::read_dir(&tasks).with_context(|| tasks.clone())? {
        let text = fs::read_to_string(task?.path().join("schedstat")).context("schedstat")?;
        sum += text.split(' ').next().unwrap_or_default().parse::<u64>().context("schedstat")?;
    }
    Ok(sum)
}
