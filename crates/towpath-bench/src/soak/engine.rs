//! The engine of a soak: `towpath run` with ports of three drivers, two queues and a mux, in a network namespace of its own.
//!
//! ```text
//! ends:    near0    far0    near1   far1                 sends and receives
//!            |        |       |       |      tap0   tap1
//! engine:   wan ==== lan    xwan == xlan    near == far   three bridges: af_packet, af_xdp, tap
//! ```

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;
use tempfile::TempDir;

use crate::live::netns_proc::NetnsProc;
use crate::subject::replay::binary;

/// UDP ports: of the two queues, without a queue, with states, and denied.
pub(super) const FIRST_QUEUE: u16 = 9;
pub(super) const SECOND_QUEUE: u16 = 10;
pub(super) const PLAIN: u16 = 11;
pub(super) const STATEFUL: u16 = 12;
pub(super) const DENIED: u16 = 13;
/// TCP port of the mux.
pub(super) const MUX: u16 = 7001;
/// Workers of the mux, inspectors of the first queue, which this program starts, and of the second, which the engine starts.
pub(super) const WORKERS: usize = 3;
pub(super) const OWN_INSPECTORS: usize = 2;
pub(super) const INSPECTORS: usize = 2;
/// Maximum time of a step: the machine may be busy.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(20);

/// A bridge of the engine and the interfaces around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bridge {
    pub(super) driver: &'static str,
    /// The engine's ports.
    pub(super) ports: [&'static str; 2],
    /// The interfaces that a sender and a receiver use.
    pub(super) ends: [&'static str; 2],
}

pub(super) const BRIDGES: [Bridge; 3] = [
    Bridge { driver: "af_packet", ports: ["wan", "lan"], ends: ["near0", "far0"] },
    Bridge { driver: "af_xdp", ports: ["xwan", "xlan"], ends: ["near1", "far1"] },
    Bridge { driver: "tap", ports: ["tap0", "tap1"], ends: ["tap0", "tap1"] },
];

pub(super) struct Engine {
    files: TempDir,
    engine: NetnsProc,
    ends: NetnsProc,
    first: Child,
    /// The present engine.
    now: Pid,
    launcher: Pid,
    /// Both have ended: their ids may be those of other processes.
    stopped: bool,
}

impl Engine {
    pub(super) fn start() -> Result<Self> {
        ensure!(rustix::process::geteuid().is_root(), "the soak needs root, for namespaces and upgrades");
        let files = TempDir::new().context("making a directory")?;
        // Workers and inspectors run as other users.
        fs::set_permissions(files.path(), fs::Permissions::from_mode(0o755))?;
        let (mut engine, mut ends) = (NetnsProc::start()?, NetnsProc::start()?);
        for namespace in [&mut engine, &mut ends] {
            // No router discovery: the engine receives the packets of the senders only.
            namespace.set("ipv6/conf/all/disable_ipv6", "1")?;
            namespace.set("ipv6/conf/default/disable_ipv6", "1")?;
        }
        engine.run("ip link set lo up")?;
        for Bridge { ports, ends: others, .. } in BRIDGES.iter().filter(|path| path.driver != "tap") {
            for (port, other) in ports.iter().zip(others) {
                engine
                    .run(&format!("ip link add {port} type veth peer name {other} netns {}", ends.pid()))?;
                engine.run(&format!("ip link set {port} up"))?;
                ends.run(&format!("ip link set {other} up"))?;
            }
        }
        let at = |name: &str| files.path().join(name);
        fs::write(at("run.toml"), configuration()?)?;
        fs::write(at("rules"), rules(0))?;
        let first = Command::new(std::env::current_exe().context("finding this program")?)
            .args(["side", "within", &engine.pid().to_string(), "--"])
            .arg(binary()?)
            .args(["run", "--json"])
            .arg(at("run.toml"))
            .stdin(Stdio::null())
            // All engines write there: each one its report, and its log.
            .stdout(File::create(at("reports"))?)
            .stderr(File::create(at("log"))?)
            .spawn()
            .context("starting towpath run")?;
        let now = Pid::from_child(&first);
        let mut started = Self { files, engine, ends, first, now, launcher: now, stopped: false };
        let end = Instant::now() + PATIENCE;
        while !started.ctl(&["show", "stats"]).is_ok_and(|said| said.status.success()) {
            if let Some(status) = started.first.try_wait()? {
                bail!("towpath run ended ({status}): {}", started.log_end());
            }
            ensure!(Instant::now() < end, "towpath run did not start: {}", started.log_end());
            thread::sleep(LOOK);
        }
        started.launcher = started.find_launcher()?;
        Ok(started)
    }

    pub(super) fn directory(&self) -> &Path {
        self.files.path()
    }

    /// The process whose network namespace has the sender and the receiver of a bridge.
    pub(super) fn place(&self, path: &Bridge) -> u32 {
        if path.driver == "tap" { self.engine.pid() } else { self.ends.pid() }
    }

    /// The process whose network namespace the engine is in.
    pub(super) fn netns(&self) -> u32 {
        self.engine.pid()
    }

    /// The present engine, and its launcher.
    pub(super) fn processes(&self) -> [Pid; 2] {
        [self.now, self.launcher]
    }

    /// A command that runs in the engine's namespace.
    pub(super) fn command(&self, program: &Path) -> Result<Command> {
        let mut command = Command::new(std::env::current_exe().context("finding this program")?);
        command.args(["side", "within", &self.netns().to_string(), "--"]).arg(program);
        Ok(command)
    }

    fn find_launcher(&self) -> Result<Pid> {
        let engine = self.now.as_raw_nonzero().get();
        let children = fs::read_to_string(format!("/proc/{engine}/task/{engine}/children"))?;
        let name = |pid: &str| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let found = children.split_whitespace().find(|pid| {
            let line = name(pid);
            line.split(|byte| *byte == 0).any(|word| word == b"launcher")
        });
        found.and_then(|pid| Pid::from_raw(pid.parse().ok()?)).context("the engine has no launcher")
    }

    /// The last lines of the log.
    pub(super) fn log_end(&self) -> String {
        let text = fs::read_to_string(self.directory().join("log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(5)..].join("; ")
    }

    fn ctl(&self, words: &[&str]) -> Result<Output> {
        let socket = self.directory().join("ctl.sock");
        let mut command = Command::new(binary()?);
        command.args(["ctl", "--socket"]).arg(socket).args(words).output().context("starting towpath ctl")
    }

    /// The answer to a command of `ctl`.
    pub(super) fn ask(&self, words: &str) -> Result<Value> {
        let said = self.ctl(&words.split(' ').chain(["--json"]).collect::<Vec<_>>())?;
        ensure!(said.status.success(), "ctl {words}: {}", String::from_utf8_lossy(&said.stderr).trim());
        serde_json::from_slice(&said.stdout).with_context(|| format!("the answer to ctl {words}"))
    }

    /// The value of a metric without labels.
    pub(super) fn metric(&self, name: &str) -> Result<f64> {
        let said = self.ctl(&["metrics"])?;
        ensure!(said.status.success(), "ctl metrics: {}", String::from_utf8_lossy(&said.stderr).trim());
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix("{} "));
        value.with_context(|| format!("no metric {name}"))?.trim().parse().context("a number")
    }

    /// The process ids of the attached inspectors of a queue.
    pub(super) fn inspectors(&self, queue: u16) -> Result<Vec<i32>> {
        let answer = self.ask("show rings")?;
        let rings = answer["rings"].as_array().context("no rings")?;
        let attached = rings.iter().filter(|ring| ring["gone"].is_null() && ring["queue"] == queue);
        Ok(attached.filter_map(|ring| Some(ring["pid"].as_i64()? as i32)).collect())
    }

    /// The process ids of the mux's workers. A worker that is not attached has none.
    pub(super) fn workers(&self) -> Result<Vec<i32>> {
        let answer = self.ask("show mux")?;
        let workers = answer["mux"]["workers"].as_array().context("no workers")?;
        Ok(workers
            .iter()
            .filter_map(|worker| Some(worker["pid"].as_i64()? as i32))
            .filter(|pid| *pid > 0)
            .collect())
    }

    /// Waits until all inspectors and workers are attached.
    pub(super) fn complete(&self) -> Result<()> {
        until("all inspectors and workers are attached", || {
            Ok(self.inspectors(1)?.len() == OWN_INSPECTORS
                && self.inspectors(2)?.len() == INSPECTORS
                && self.workers()?.len() == WORKERS)
        })
    }

    /// Reloads other rules, and waits until they hold.
    pub(super) fn reload(&self, round: u64) -> Result<()> {
        fs::write(self.directory().join("rules"), rules(round))?;
        kill_process(self.now, Signal::HUP).context("the engine has ended")?;
        let mark = mark(round);
        until("the new rules hold", || {
            let said = self.ctl(&["show", "rules"])?;
            Ok(String::from_utf8_lossy(&said.stdout).contains(&mark))
        })
    }

    /// Upgrades the engine to the same program, and waits until the one before has ended. Returns the time without reception.
    pub(super) fn upgrade(&mut self) -> Result<Duration> {
        let before = pidfd_open(self.now, PidfdFlags::empty())?;
        let answer = self.ask("upgrade")?;
        let process = answer["process"].as_i64().and_then(|id| Pid::from_raw(id as i32));
        let process = process.with_context(|| format!("no process: {answer}"))?;
        ended(&before)?;
        self.now = process;
        let pause = Duration::from_secs_f64(self.metric("towpath_upgrade_pause_seconds")?);
        if let Some(status) = self.first.try_wait()? {
            ensure!(status.success(), "the first engine failed ({status}): {}", self.log_end());
        }
        Ok(pause)
    }

    /// Ends the engine and its launcher. Returns the reports of all engines.
    pub(super) fn stop(&mut self) -> Result<Vec<Value>> {
        let [engine, launcher] = self.processes().map(|process| pidfd_open(process, PidfdFlags::empty()));
        kill_process(self.now, Signal::TERM).context("the engine ended early")?;
        ended(&engine?)?;
        ended(&launcher?).context("the launcher has not ended")?;
        self.stopped = true;
        // It may be the engine that has just ended.
        let _ = self.first.wait();
        let text = fs::read(self.directory().join("reports"))?;
        let reports = serde_json::Deserializer::from_slice(&text).into_iter();
        reports.collect::<Result<_, _>>().context("reading the reports")
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.stopped {
            return;
        }
        // All fail if the process has ended. The launcher ends its children, also an engine that an upgrade has just started.
        let _ = kill_process(self.now, Signal::KILL);
        let _ = kill_process(self.launcher, Signal::KILL);
        let _ = self.first.kill();
        let _ = self.first.wait();
    }
}

/// Waits for a process to end.
fn ended(process: &OwnedFd) -> Result<()> {
    let limit = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&limit))?;
    ensure!(ready > 0, "a process did not end within {} s", PATIENCE.as_secs());
    Ok(())
}

/// Waits until `done`.
pub(super) fn until(what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !done()? {
        ensure!(Instant::now() < end, "not within {} s: {what}", PATIENCE.as_secs());
        thread::sleep(LOOK);
    }
    Ok(())
}

fn configuration() -> Result<String> {
    let own: PathBuf = std::env::current_exe().context("finding this program")?;
    let (own, towpath) = (own.display(), binary()?);
    let towpath = towpath.display();
    let mut text = format!(
        "rules = \"rules\"\n[engine]\nupgrade = [\"{towpath}\"]\nupgrade-time = 60\n[control]\nsocket = \"ctl.sock\"\n\
         [queue.1]\nsocket = \"q1.sock\"\ndeadline = 1\n\
         [queue.2]\ncommand = \"{towpath} inspect --queue 2 --match nothing-like-this --verdict drop\"\nworkers = {INSPECTORS}\ndeadline = 1\n\
         [mux.echo]\nlisten = \"127.0.0.1:{MUX}\"\nframing = \"length=4 be adjust=4\"\norder = \"replies\"\nworkers = {WORKERS}\n\
         redeliver = 255\nworker = \"{own} side mux-worker\"\ndrain = 60\n"
    );
    for Bridge { driver, ports, .. } in BRIDGES {
        for port in ports {
            text += &format!("[port.{port}]\ndriver = \"{driver}\"\n");
        }
    }
    for Bridge { ports: [from, to], .. } in BRIDGES {
        text += &format!("[[bridge]]\nports = [\"{from}\", \"{to}\"]\n");
    }
    Ok(text)
}

/// The text of the rule that differs in each round.
fn mark(round: u64) -> String {
    format!("udp from any to any {}", 60_000 + round % 1000)
}

fn rules(round: u64) -> String {
    format!(
        "add 100 allow tcp from any to any setup recv echo keep-state\n\
         add 200 check-state\n\
         add 300 inspect 1 udp from any to any {FIRST_QUEUE}\n\
         add 310 inspect 2 udp from any to any {SECOND_QUEUE}\n\
         add 400 deny udp from any to any {DENIED}\n\
         add 500 allow udp from any to any {STATEFUL} keep-state\n\
         add 600 allow udp from any to any {PLAIN}\n\
         add 900 count {}\n",
        mark(round)
    )
}
