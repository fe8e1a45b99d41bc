//! The engine under a service manager: `manager.py` stands in for systemd. The units in contrib/systemd.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;
use tempfile::TempDir;
use towpath_port::netns::within;

use crate::example::example;
use crate::live::machines::*;
use crate::support::{Control, LogFile, free, until};

/// A manager and its engine, which has one mux.
struct Manager {
    directory: TempDir,
    at: SocketAddr,
    child: Child,
    commands: ChildStdin,
    events: Receiver<Value>,
    _watched: Arc<LogFile>,
}

impl Manager {
    /// Starts the manager with these options.
    fn new(at: SocketAddr, options: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let config = directory.path().join("t.toml");
        let config = config.to_str().unwrap().to_owned();
        Self::of(directory, at, options, &["run", &config])
    }

    /// Starts the manager of a command of towpath.
    fn of(directory: TempDir, at: SocketAddr, options: &[&str], words: &[&str]) -> Self {
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        let mut child = Command::new("python3")
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/daemon/manager.py"))
            .arg(directory.path())
            .args(options)
            .args(["--", env!("CARGO_BIN_EXE_towpath")])
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let (commands, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, events) = channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let _ = sender.send(serde_json::from_str(&line).unwrap());
            }
        });
        let watched = LogFile::of(&child, directory.path().join("log"));
        let this = Self { directory, at, child, commands, events, _watched: watched };
        this.write(&format!("\"{at}\""));
        std::fs::write(this.path("r"), "add 100 allow tcp from any to any\n").unwrap();
        this
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes a configuration that listens on these addresses.
    fn write(&self, listen: &str) {
        let worker = example("mux_worker");
        let text = format!(
            "rules = \"r\"\n[mux.web]\nlisten = [{listen}]\nframing = \"offset=0 length=4 be adjust=4\"\nworkers = 1\n\
             thread = 0\nworker = \"{}\"\n[control]\nsocket = \"ctl.sock\"\n",
            worker
        );
        std::fs::write(self.path("t.toml"), text).unwrap();
    }

    fn tell(&mut self, command: &str) {
        writeln!(self.commands, "{command}").unwrap();
    }

    /// The next event that `is` accepts; the others are dropped.
    fn event(&self, mut is: impl FnMut(&Value) -> bool) -> Value {
        loop {
            let event = self.events.recv_timeout(Duration::from_secs(60));
            let event = event.unwrap_or_else(|_| panic!("no such event; the log: {}", self.log()));
            if is(&event) {
                return event;
            }
        }
    }

    /// The next notification with this assignment.
    fn notified(&self, name: &str, value: &str) -> Value {
        self.event(|event| event["notify"][name] == value)["notify"].take()
    }

    fn start(&mut self) -> Value {
        self.tell("start");
        let started = self.event(|event| event["started"].is_number());
        self.notified("READY", "1");
        started
    }

    /// Ends the engine by a signal. Returns its exit code.
    fn end(&mut self, signal: &str) -> Value {
        self.tell(&format!("signal {signal}"));
        self.tell("wait");
        self.event(|event| event["exit"].is_number())["exit"].take()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap()
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A connection through which the worker answers.
fn answered(mut stream: TcpStream) {
    stream.write_all(b"\0\0\0\x02hi").unwrap();
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut answer = vec![0; u32::from_be_bytes(length) as usize];
    stream.read_exact(&mut answer).unwrap();
    assert!(answer.ends_with(b" hi"), "{}", String::from_utf8_lossy(&answer));
}

#[towpath_testenv::needs(python)]
#[test]
fn the_manager_is_told_the_state() {
    let mut manager = Manager::new(free(), &[]);
    manager.tell("start");
    let ready = manager.notified("READY", "1");
    assert_eq!(ready["STATUS"], "0 ports, 1 mux, 2 rules");
    answered(TcpStream::connect(manager.at).unwrap());
    let micros = || {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
    };
    let before = micros();
    manager.tell("signal SIGHUP");
    let reloading = manager.notified("RELOADING", "1");
    let time: u64 = reloading["MONOTONIC_USEC"].as_str().unwrap().parse().unwrap();
    assert!((before..=micros()).contains(&time), "{reloading}");
    assert_eq!(manager.notified("READY", "1")["STATUS"], "0 ports, 1 mux, 2 rules");
    std::fs::write(manager.path("r"), "add 100 alow tcp from any to any\n").unwrap();
    manager.tell("signal SIGHUP");
    manager.notified("RELOADING", "1");
    let status = manager.notified("READY", "1")["STATUS"].take();
    assert!(
        status.as_str().unwrap().starts_with("not reloaded: ") && status.to_string().contains("alow"),
        "{status}"
    );
    manager.tell("signal SIGTERM");
    manager.notified("STOPPING", "1");
    manager.tell("wait");
    assert_eq!(manager.event(|event| event["exit"].is_number())["exit"], 0);
}

#[towpath_testenv::needs(python)]
#[test]
fn connections_wait_while_the_engine_starts_again() {
    let mut manager = Manager::new(free(), &[]);
    let unix = manager.path("m.sock");
    let addresses = format!("\"{}\", \"unix:{}\"", manager.at, unix.display());
    manager.write(&addresses);
    manager.tell("start");
    let mut stored = Vec::new();
    manager.event(|event| {
        if event["notify"]["FDSTORE"] == "1" {
            assert_eq!(event["fds"], 1);
            assert!(event["notify"]["FDNAME"].as_str().unwrap().starts_with("towpath-"), "{event}");
        }
        event["notify"]["READY"] == "1"
    });
    // Killed: nothing is closed in an orderly way. Later a restart with SIGTERM, at which the engine closes everything.
    for signal in ["SIGKILL", "SIGTERM"] {
        manager.end(signal);
        // No process serves the sockets, and connections are accepted by the kernel.
        let waiting = TcpStream::connect(manager.at).unwrap();
        let local = std::os::unix::net::UnixStream::connect(&unix).unwrap();
        let control = std::os::unix::net::UnixStream::connect(manager.path("ctl.sock")).unwrap();
        let started = manager.start();
        stored = started["passed"].as_array().unwrap().clone();
        answered(waiting);
        drop((local, control));
        answered(TcpStream::connect(manager.at).unwrap());
    }
    stored.sort_by_key(ToString::to_string);
    assert_eq!(stored, ["towpath-control", "towpath-mux-web-0", "towpath-mux-web-1"]);
    // A socket that the configuration no longer names is closed and removed.
    manager.end("SIGTERM");
    manager.write(&format!("\"{}\"", manager.at));
    manager.tell("start");
    let removed = manager.notified("FDSTOREREMOVE", "1");
    assert_eq!(removed["FDNAME"], "towpath-mux-web-1");
    manager.notified("READY", "1");
    assert!(std::os::unix::net::UnixStream::connect(&unix).is_err());
    // Another address with the name of a stored one takes its place in the store.
    manager.end("SIGTERM");
    let other = free();
    manager.write(&format!("\"{other}\""));
    manager.start();
    manager.end("SIGKILL");
    let waiting = TcpStream::connect(other).unwrap();
    assert!(TcpStream::connect(manager.at).is_err());
    // A stored Unix socket whose file is gone is made again.
    std::fs::remove_file(manager.path("ctl.sock")).unwrap();
    let mut names = manager.start()["passed"].as_array().unwrap().clone();
    names.sort_by_key(ToString::to_string);
    assert_eq!(names, ["towpath-control", "towpath-mux-web-0"]);
    answered(waiting);
    assert!(Control::of(manager.directory.path()).ctl("show mux").status.success());
    assert_eq!(manager.end("SIGTERM"), 0);
}

#[towpath_testenv::needs(python)]
#[test]
fn sockets_of_the_manager_are_used() {
    let (at, other) = (free(), free());
    let [listen, more] = [("mux-web", at), ("unused", other)].map(|(name, at)| format!("{name}={at}"));
    let mut manager = Manager::new(at, &["--listen", &listen, "--listen", &more]);
    // systemd starts a service with the first connection.
    let mut waiting = None;
    until(|| {
        waiting = TcpStream::connect(at).ok();
        waiting.is_some()
    });
    manager.tell("start");
    let mut own = false;
    manager.event(|event| {
        assert_ne!(event["notify"]["FDNAME"], "towpath-mux-web-0", "the manager has it");
        own |= event["notify"]["FDNAME"] == "towpath-control";
        event["notify"]["READY"] == "1"
    });
    assert!(own, "the engine stores its control socket");
    answered(waiting.unwrap());
    until(|| {
        manager.log().contains("passed the descriptor unused, which no address of the configuration names")
    });
    assert_eq!(manager.end("SIGTERM"), 0);
}

/// `towpath mux` listens on a socket of the manager, and the process that replaces it does so too.
#[towpath_testenv::needs(python)]
#[test]
fn a_mux_uses_the_sockets_of_the_manager() {
    let (at, other) = (free(), free());
    let [listen, more] = [("web", at), ("unused", other)].map(|(name, at)| format!("{name}={at}"));
    let worker = example("mux_worker");
    let address = at.to_string();
    let words = ["mux", &address, "--framing", "offset=0 length=4 be adjust=4", "--workers", "1", "--worker"];
    let mut manager = Manager::of(
        tempfile::tempdir().unwrap(),
        at,
        &["--listen", &listen, "--listen", &more],
        &[&words[..], &[&worker]].concat(),
    );
    // The manager listens before the mux runs.
    let mut waiting = None;
    until(|| {
        waiting = TcpStream::connect(at).ok();
        waiting.is_some()
    });
    manager.start();
    answered(waiting.unwrap());
    until(|| {
        manager.log().contains("passed the descriptor unused, which no address of the configuration names")
    });
    manager.tell("signal SIGUSR2");
    let new = manager.event(|event| event["notify"]["MAINPID"].is_string())["notify"]["MAINPID"].take();
    manager.tell("wait");
    assert_eq!(manager.event(|event| event["exit"].is_number())["exit"], 0);
    answered(TcpStream::connect(at).unwrap());
    let new = Pid::from_raw(new.as_str().unwrap().parse().unwrap()).unwrap();
    let ended = pidfd_open(new, PidfdFlags::empty()).unwrap();
    kill_process(new, Signal::TERM).unwrap();
    poll(&mut [PollFd::new(&ended, PollFlags::IN)], None).unwrap();
}

/// A debugger stops one thread of the engine: the manager is no longer notified, although all others run.
#[towpath_testenv::needs(python, root)]
#[test]
fn a_hung_packet_thread_ends_the_notifications() {
    let mut manager = Manager::new(free(), &["--watchdog", "2000000"]);
    manager.start();
    (0..3).for_each(|_| _ = manager.notified("WATCHDOG", "1"));
    let hung = |manager: &Manager| manager.log().matches("engine-0 has not advanced for 1.0 s").count();
    let before = hung(&manager);
    manager.tell("hang engine-0");
    manager.event(|event| event["hung"] == "engine-0");
    until(|| hung(&manager) > before);
    manager.tell("mark");
    manager.event(|event| event["mark"] == true);
    // More than the interval of notifications.
    thread::sleep(Duration::from_secs(2));
    manager.tell("mark");
    manager.event(|event| {
        assert!(event["notify"]["WATCHDOG"].is_null(), "{event}");
        event["mark"] == true
    });
    manager.tell("release engine-0");
    manager.notified("WATCHDOG", "1");
    answered(TcpStream::connect(manager.at).unwrap());
    assert_eq!(manager.end("SIGTERM"), 0);
}

fn unit(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/systemd").join(name)
}

fn analyze(arguments: &[&str], unit: &Path) -> (bool, String) {
    let output = Command::new("systemd-analyze").args(arguments).arg(unit).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

/// The exposure of each unit is at most what the page says.
#[towpath_testenv::needs("systemd-analyze")]
#[test]
fn the_units_are_as_secure_as_documented() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/book/src/reference/systemd.md");
    let page = std::fs::read_to_string(page).unwrap();
    for name in ["towpath@.service", "towpath-launcher@.service"] {
        let row = page.lines().find(|line| line.starts_with(&format!("| `{name}` |"))).unwrap();
        let most: f64 = row.split('|').nth(3).unwrap().trim().parse().unwrap();
        assert!(name != "towpath@.service" || most < 2.5, "{row}");
        let threshold = format!("--threshold={:.0}", most * 10.0);
        let (secure, text) = analyze(&["security", "--offline=true", &threshold], &unit(name));
        assert!(secure, "{name}: above {most}\n{text}");
        let (_, text) = analyze(&["verify", "--man=no"], &unit(name));
        let wrong: Vec<&str> = text.lines().filter(|line| !line.contains("is not executable")).collect();
        assert!(wrong.is_empty(), "{name}: {wrong:?}");
    }
}

/// The directives of a unit with this name, in the order of the file.
fn directives(unit: &str, name: &str) -> Vec<String> {
    let prefix = format!("{name}=");
    unit.lines().filter_map(|line| line.strip_prefix(&prefix)).map(str::to_owned).collect()
}

/// The system calls of a set or of a name.
fn expand(word: &str) -> BTreeSet<String> {
    if !word.starts_with('@') {
        return [word.to_owned()].into();
    }
    let output = Command::new("systemd-analyze").args(["syscall-filter", word]).output().unwrap();
    assert!(output.status.success(), "{word}");
    let text = String::from_utf8(output.stdout).unwrap();
    let members =
        text.lines().skip(1).map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    members.flat_map(expand).collect()
}

#[towpath_testenv::needs(netns, xdp, "strace", "setpriv", "systemd-analyze")]
#[test]
fn a_bridge_needs_no_more_than_its_unit_permits() {
    needs_no_more_than("towpath@.service");
}

#[towpath_testenv::needs(netns, xdp, "strace", "setpriv", "systemd-analyze")]
#[test]
fn a_launcher_needs_no_more_than_its_unit_permits() {
    needs_no_more_than("towpath-launcher@.service");
}

/// Runs a bridge with AF_XDP and an inspector, with the user and the capabilities of the unit. All that it does is permitted by the unit.
fn needs_no_more_than(name: &str) {
    let text = std::fs::read_to_string(unit(name)).unwrap();
    let mut permitted = BTreeSet::new();
    for line in directives(&text, "SystemCallFilter") {
        let words = line.trim_start_matches('~').split(' ').map(expand);
        match line.starts_with('~') {
            true => words.for_each(|set| permitted.retain(|call| !set.contains(call))),
            false => words.for_each(|set| permitted.extend(set)),
        }
    }
    let [families] = &directives(&text, "RestrictAddressFamilies")[..] else { panic!("{text}") };
    let capabilities = directives(&text, "CapabilityBoundingSet").join(" ");
    let capabilities = capabilities.replace("CAP_", "+").replace(' ', ",").to_ascii_lowercase();
    // In place of LimitMEMLOCK=infinity, which a container may not set.
    let capabilities = format!("-all,{capabilities},+ipc_lock");
    let is_root = directives(&text, "User").is_empty();
    let user: &[&str] = match is_root {
        true => &["--no-new-privs", "--inh-caps=-all"],
        false => &["--no-new-privs", "--reuid=65532", "--regid=65532", "--clear-groups"],
    };

    let mut traced = String::new();
    within(|| {
        let (left, right) = machines();
        let queue = "[queue.1]\ncommand = \"towpath inspect --queue 1 --match nothing-like-this --verdict drop\"\n\
                     deadline = 600\n[metrics]\nlisten = \"127.0.0.1:0\"\n";
        let config = BRIDGE.replace("driver = \"af_packet\"", "driver = \"af_xdp\"");
        let engine = if is_root { "[engine]\nuser = \"nobody\"\n" } else { "" };
        let config = format!("states = \"states\"\nstates-every = 0.1\n{config}{queue}{engine}");
        let files = files(&config, RULES);
        std::fs::set_permissions(files.path(), Permissions::from_mode(0o777)).unwrap();
        let trace = files.path().join("trace");
        let mut command = Command::new("setpriv");
        command.args(user).arg(format!("--bounding-set={capabilities}"));
        if !is_root {
            command.arg(format!("--inh-caps={capabilities}"));
            command.arg(format!("--ambient-caps={capabilities}"));
        }
        let mut child = command
            .args(["strace", "-f", "-qq", "-s", "0", "-o"])
            .arg(&trace)
            .args([env!("CARGO_BIN_EXE_towpath"), "run"])
            .arg(files.path().join("t.toml"))
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(files.path().join("log")).unwrap())
            .spawn()
            .unwrap();
        let log = || std::fs::read_to_string(files.path().join("log")).unwrap();
        let control = Control::of(files.path());
        until(|| {
            assert!(child.try_wait().unwrap().is_none(), "{}", log());
            control.ctl("show stats").status.success()
        });
        arrived(transfer(&left, &right, 9000));
        let children = format!("/proc/{0}/task/{0}/children", child.id());
        let engine = std::fs::read_to_string(children).unwrap().trim().parse().unwrap();
        let engine = Pid::from_raw(engine).unwrap();
        kill_process(engine, Signal::HUP).unwrap();
        until(|| {
            assert!(child.try_wait().unwrap().is_none(), "{}", log());
            log().contains("reloaded: ")
        });
        assert!(control.ctl("metrics").status.success());
        kill_process(engine, Signal::TERM).unwrap();
        assert!(child.wait().unwrap().success(), "{}", log());
        traced = std::fs::read_to_string(trace).unwrap();
    });
    let mut used = BTreeSet::new();
    for line in traced.lines() {
        // `4711  socket(AF_UNIX, ...`; or `4711  <... poll resumed>`.
        let Some((_, call)) = line.split_once(' ') else { continue };
        let Some((name, arguments)) = call.trim_start().split_once('(') else { continue };
        // A call that strace does not know is newer than the sets of systemd, too.
        let is_known = !name.starts_with("syscall_");
        if is_known && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            used.insert(name.to_owned());
        }
        if let ("socket" | "socketpair", Some((family, _))) = (name, arguments.split_once(',')) {
            let family = if family == "AF_LOCAL" { "AF_UNIX" } else { family };
            assert!(families.split(' ').any(|permitted| permitted == family), "{line}");
        }
        // MemoryDenyWriteExecute, RestrictNamespaces.
        assert!(!arguments.contains("PROT_WRITE|PROT_EXEC"), "{line}");
        assert!(name != "mprotect" || !arguments.contains("PROT_EXEC"), "{line}");
        assert!(!arguments.contains("CLONE_NEW"), "{line}");
    }
    assert!(["bpf", "recvmsg", "sched_setattr"].iter().all(|call| used.contains(*call)), "{used:?}");
    let refused: Vec<_> = used.difference(&permitted).collect();
    assert!(refused.is_empty(), "not permitted by the unit: {refused:?}");
}
