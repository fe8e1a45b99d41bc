//! The attacked engine: `towpath run` in a temporary directory.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use super::Setup;
use super::attack::process_ticks;
use super::ports::{Ports, Sender};
use crate::subject::replay::binary;

/// UDP ports of the flows: inspected by the honest inspector, not inspected, and of the attackers' queue.
pub(super) const INSPECTED: u16 = 53;
pub(super) const UNINSPECTED: u16 = 54;
pub(super) const ATTACKED: u16 = 55;
/// MiB of shared memory that the attackers may have in a queue.
pub(super) const MEMORY: u64 = 64;
/// Maximum startup time.
const BEGIN: Duration = Duration::from_secs(30);
/// Longest time from SIGTERM to the end: `drain`, and the time that the engine's parts get (15 s), on a busy machine.
const END: Duration = Duration::from_secs(40);
/// Longest time of a `ctl` command.
const ANSWER: Duration = Duration::from_secs(20);

pub(super) struct Engine {
    process: Child,
    files: TempDir,
    ports: Ports,
    threads: usize,
    /// Addresses of the muxes.
    pub(super) honest_mux: String,
    pub(super) hostile_mux: String,
    stopped: Arc<AtomicBool>,
}

impl Engine {
    /// Starts an engine. `worker` selects the attack of the hostile worker.
    pub(super) fn start(setup: Setup, worker: &str) -> Result<Self> {
        let files = TempDir::new().context("making a directory")?;
        let at = |name: &str| files.path().join(name);
        // The attackers run as another user.
        fs::set_permissions(files.path(), fs::Permissions::from_mode(0o755))?;
        let ports = Ports::make(setup.driver, setup.threads, files.path())?;
        fs::write(at("run.toml"), configuration(setup, worker, &ports)?)?;
        fs::write(at("rules"), rules())?;
        let mut command = match ports.netns() {
            None => Command::new(binary()?),
            Some(pid) => {
                let mut command = Command::new(std::env::current_exe().context("finding this program")?);
                command.args(["side", "within", &pid.to_string(), "--"]).arg(binary()?);
                command
            }
        };
        let mut process = command
            .args(["run", "--json"])
            .arg(at("run.toml"))
            .stdin(Stdio::null())
            .stdout(File::create(at("report"))?)
            .stderr(Stdio::piped())
            .spawn()
            .context("starting towpath run")?;
        let stderr = process.stderr.take().context("no standard error")?;
        let (said, lines) = mpsc::channel();
        let stopped = Arc::new(AtomicBool::new(false));
        let pause = stopped.clone();
        thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                // After the start, the receiver is gone and the send fails; the lines are discarded.
                let _ = said.send(line);
                while pause.load(Ordering::Relaxed) {
                    thread::sleep(Duration::from_millis(10));
                }
            }
        });
        let mut engine = Self {
            process,
            files,
            ports,
            threads: setup.threads as usize,
            honest_mux: String::new(),
            hostile_mux: String::new(),
            stopped,
        };
        let end = Instant::now() + BEGIN;
        let mut log = Vec::new();
        while engine.honest_mux.is_empty() || engine.hostile_mux.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            let Ok(line) = lines.recv_timeout(left) else {
                bail!("towpath run did not start: {}", log.join("; "));
            };
            if let Some((who, address)) = line.split_once(": listens on ") {
                match who.rsplit(' ').next() {
                    Some("honest") => engine.honest_mux = address.trim().to_owned(),
                    _ => engine.hostile_mux = address.trim().to_owned(),
                }
            }
            log.push(line);
        }
        Ok(engine)
    }

    pub(super) fn directory(&self) -> &Path {
        self.files.path()
    }

    /// The process whose network namespace the engine is in. None: that of this process.
    pub(super) fn netns(&self) -> Option<u32> {
        self.ports.netns()
    }

    /// Opens the sender's end of the ports.
    pub(super) fn sender(&mut self) -> Result<Sender> {
        let Self { ports, files, .. } = self;
        ports.sender(files.path())
    }

    /// Opens the receiver's end of the ports. None: the engine writes [`output`](Self::output).
    pub(super) fn receiver(&self) -> Result<Option<OwnedFd>> {
        self.ports.receiver()
    }

    /// The capture that the engine writes.
    pub(super) fn output(&self) -> PathBuf {
        self.directory().join("out.pcap")
    }

    /// Leaves the engine's log unread.
    pub(super) fn stop_reading(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    pub(super) fn read_again(&self) {
        self.stopped.store(false, Ordering::Relaxed);
    }

    /// Resident memory in bytes (VmRSS of proc_pid_status(5)).
    pub(super) fn memory(&self) -> Result<u64> {
        let path = format!("/proc/{}/status", self.process.id());
        let status = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("the engine ended")?;
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().context("VmRSS")?;
        Ok(kib << 10)
    }

    /// CPU time of the hostile worker, and of the programs of the engine that have ended, in [`TICK`](super::attack::TICK)s.
    pub(super) fn program_ticks(&self) -> u64 {
        let children = |process: &str| {
            let path = format!("/proc/{process}/task/{process}/children");
            let text = fs::read_to_string(path).unwrap_or_default();
            text.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        let ticks = |process: &str| process_ticks(process).unwrap_or_default();
        let is_hostile = |process: &&String| {
            let words = fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
            words.contains("hostile-worker")
        };
        let engine = self.process.id().to_string();
        // Without root, the engine starts its programs itself.
        let launcher = children(&engine).into_iter().next().filter(|_| rustix::process::geteuid().is_root());
        let parent = launcher.unwrap_or(engine);
        let [_, ended] = ticks(&parent);
        children(&parent).iter().filter(is_hostile).map(|process| ticks(process)[0]).sum::<u64>() + ended
    }

    /// Open descriptors without the connections of the hostile worker's mux, which stay open while their messages wait for a barred
    /// worker. None without root: the engine is not dumpable.
    pub(super) fn descriptors(&self) -> Option<usize> {
        let count = || fs::read_dir(format!("/proc/{}/fd", self.process.id())).ok().map(Iterator::count);
        // Connections may end between the two counts, but none begins.
        let (all, connections) = (count()?, self.hostile_connections().unwrap_or(0));
        Some(all.saturating_sub(connections))
    }

    /// Connections of the mux with the hostile worker.
    fn hostile_connections(&self) -> Result<usize> {
        let output = self.ctl(&["show", "mux", "--json"])?;
        let answer: Value = serde_json::from_slice(&output.stdout)?;
        let first = &answer["mux"];
        let mut muxes = std::iter::once(first).chain(first["others"].as_array().into_iter().flatten());
        let mux = muxes.find(|mux| mux["name"] == "hostile").context("no mux `hostile`")?;
        let listed = mux["psocks"].as_array().context("no psocks")?.len();
        Ok(listed + mux["psocks_left_out"].as_u64().context("no psocks_left_out")? as usize)
    }

    /// Asks the engine for its counters and checks their sum. Returns the number of packets.
    pub(super) fn conserves(&self) -> Result<u64> {
        let output = self.ctl(&["show", "stats", "--json"])?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
        let answer: Value = serde_json::from_slice(&output.stdout)?;
        let count = |name: &str| answer["stats"][name].as_u64().with_context(|| format!("no {name}"));
        let outcomes = count("passed")? + count("dropped")? + count("rejected")? + count("waiting")?;
        ensure!(count("packets")? == outcomes, "packets are not the sum of their outcomes: {answer}");
        count("packets")
    }

    /// Waits until the engine has received as many packets as were sent. Packets in the buffers of links and pipes would be lost when the
    /// engine ends.
    pub(super) fn await_packets(&self, sent: u64) -> Result<()> {
        let end = Instant::now() + ANSWER;
        while self.conserves()? < sent && Instant::now() < end {
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Waits until all threads of the engine have the ring of the honest inspector. It attaches before they do.
    pub(super) fn await_inspector(&self) -> Result<()> {
        let end = Instant::now() + BEGIN;
        while Instant::now() < end {
            let output = self.ctl(&["show", "rings", "--json"])?;
            let Ok(answer) = serde_json::from_slice::<Value>(&output.stdout) else {
                bail!("ctl: {}", String::from_utf8_lossy(&output.stderr).trim());
            };
            // One ring for each thread.
            let rings = answer["rings"].as_array().into_iter().flatten();
            if rings.filter(|ring| ring["queue"] == 1).count() == self.threads {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(20));
        }
        bail!("the honest inspector has no packets after {} s", BEGIN.as_secs())
    }

    fn ctl(&self, words: &[&str]) -> Result<Output> {
        let mut process = Command::new(binary()?)
            .args(["ctl", "--socket"])
            .arg(self.directory().join("ctl.sock"))
            .args(words)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("starting towpath ctl")?;
        if !ends_within(&mut process, ANSWER)? {
            // Fails only if it has ended meanwhile.
            let _ = process.kill();
            let _ = process.wait();
            bail!("no answer within {} s", ANSWER.as_secs());
        }
        process.wait_with_output().context("reading the answer")
    }

    /// Ends the engine and returns its report.
    pub(super) fn stop(&mut self) -> Result<Value> {
        kill_process(Pid::from_child(&self.process), Signal::TERM).context("the engine ended early")?;
        ensure!(ends_within(&mut self.process, END)?, "the engine did not stop within {} s", END.as_secs());
        let status = self.process.wait()?;
        ensure!(status.success(), "the engine failed ({status})");
        let report = fs::read(self.directory().join("report"))?;
        serde_json::from_slice(&report).context("reading the engine's report")
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Both calls fail only if it has been waited for already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn ends_within(process: &mut Child, time: Duration) -> Result<bool> {
    let end = Instant::now() + time;
    while process.try_wait()?.is_none() {
        if Instant::now() > end {
            return Ok(false);
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(true)
}

fn configuration(setup: Setup, worker: &str, ports: &Ports) -> Result<String> {
    let own = std::env::current_exe().context("finding this program")?;
    let own = own.display();
    let users = if rustix::process::geteuid().is_root() {
        format!("users = [\"{}\"]\n", super::attack::OTHER_USER)
    } else {
        String::new()
    };
    let mut text = format!(
        "rules = \"rules\"\n[engine]\nthreads = {}\n[control]\nsocket = \"ctl.sock\"\n\
         [queue.1]\nsocket = \"honest.sock\"\ndeadline = 60\n\
         [queue.2]\nsocket = \"attacked.sock\"\n{users}memory = {MEMORY}\ndeadline = 0.05\nmay-queue = [3]\n\
         [queue.3]\nsocket = \"other.sock\"\n{users}memory = {MEMORY}\ndeadline = 0.05\nmay-queue = [2]\n\
         [queue.4]\nsocket = \"watched.sock\"\n{users}memory = 256\nfanout = \"mirror\"\n",
        setup.threads
    );
    for (name, side) in [("honest", "mux-worker".to_owned()), ("hostile", format!("hostile-worker {worker}"))]
    {
        text += &format!(
            "[mux.{name}]\nlisten = \"127.0.0.1:0\"\nframing = \"length=4 be adjust=4\"\nworkers = 1\n\
             worker = \"{own} side {side}\"\ndrain = 1\n"
        );
    }
    Ok(text + &ports.configuration())
}

fn rules() -> String {
    format!(
        "add 10 allow tcp from any to any setup in via honest\nadd 20 allow tcp from any to any setup in via hostile\n\
         add 25 tee 4 udp from any to any\nadd 30 inspect 1 udp from any to any {INSPECTED}\nadd 40 inspect 2 udp from any to any {ATTACKED}\n\
         add 50 allow ip from any to any\n"
    )
}
