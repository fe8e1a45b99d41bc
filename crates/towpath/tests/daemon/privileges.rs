//! Privileges of `towpath run` and of the processes that it starts.

use std::collections::HashMap;
use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};
use towpath_port::netns::{veth, within};

use crate::bridged::BRIDGE;
use crate::example::example;
use crate::support::{Control, Log, until};

/// The range of unused ids (docs/book/src/reference/privileges.md).
const UNUSED: std::ops::RangeInclusive<u64> = 61_184..=65_519;

pub(crate) const INSPECT: &str =
    "[queue.1]\ncommand = \"towpath inspect --queue 1 --match x --verdict drop\"\n";

/// An engine between two interfaces, in a directory that other users can enter.
pub(crate) struct Engine {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) child: Child,
    log: Log,
}

impl Engine {
    pub(crate) fn of(directory: tempfile::TempDir, mut child: Child) -> Self {
        let log = Log::of(&mut child);
        Self { directory, child, log }
    }

    /// Starts the engine and waits until its queue has `inspectors`.
    pub(crate) fn start(more: &str, inspectors: usize) -> Self {
        Self::start_after(more, inspectors, |_| {})
    }

    /// As [`start`](Self::start), with files that `prepare` makes in its directory.
    pub(crate) fn start_after(more: &str, inspectors: usize, prepare: impl FnOnce(&Path)) -> Self {
        Self::start_with(BRIDGE, more, inspectors, prepare)
    }

    /// As [`start_after`](Self::start_after), with another configuration of the ports.
    pub(crate) fn start_with(
        bridge: &str,
        more: &str,
        inspectors: usize,
        prepare: impl FnOnce(&Path),
    ) -> Self {
        veth("wan", "l0");
        veth("lan", "r0");
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        prepare(directory.path());
        let at = directory.path().display().to_string();
        std::fs::write(directory.path().join("t.toml"), format!("{bridge}{}", more.replace("DIR", &at)))
            .unwrap();
        std::fs::write(directory.path().join("r.ipfw"), "add inspect 1 ip from any to any\n").unwrap();
        // A descriptor and a variable that only the shell needs.
        let child = Command::new("sh")
            .args(["-c", "exec 9</dev/zero; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_towpath"), "run"])
            .arg(directory.path().join("t.toml"))
            .env("SECRET", "shell")
            .env("LC_TIME", "C")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut engine = Self::of(directory, child);
        until(|| engine.child.try_wait().unwrap().is_some() || engine.inspectors().len() >= inspectors);
        engine
    }

    pub(crate) fn control(&self) -> Control {
        Control::of(self.directory.path())
    }

    /// Process ids of the inspectors.
    pub(crate) fn inspectors(&self) -> Vec<u32> {
        if !self.control().ctl("show rings").status.success() {
            return Vec::new();
        }
        let answer = self.control().json("show rings --json");
        let rows = answer["rings"].as_array().unwrap();
        rows.iter().filter_map(|row| row["pid"].as_u64()).map(|pid| pid as u32).collect()
    }

    /// The inspector that replaces `first`, whose ring may still be listed.
    fn successor(&self, first: u32) -> u32 {
        let mut other = None;
        until(|| {
            other = self.inspectors().into_iter().find(|pid| *pid != first);
            other.is_some()
        });
        other.unwrap()
    }

    /// The launcher: the engine's child.
    fn launcher(&self) -> Option<u32> {
        let children = format!("/proc/{0}/task/{0}/children", self.child.id());
        std::fs::read_to_string(children).unwrap().split_whitespace().next().map(|pid| pid.parse().unwrap())
    }

    /// Stops the engine. Returns its exit code and its output.
    pub(crate) fn stop(mut self) -> (Option<i32>, String) {
        if self.child.try_wait().unwrap().is_none() {
            kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        }
        self.ended()
    }

    /// Waits until the engine has ended. Returns its exit code and its output.
    fn ended(mut self) -> (Option<i32>, String) {
        let said = self.log.whole();
        (self.child.wait().unwrap().code(), said)
    }
}

impl Drop for Engine {
    /// The engine of a test that failed.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// proc_pid_status(5) as a map; numbers of Uid and Gid are the real, effective, saved and file system id.
pub(crate) fn status(pid: u32) -> HashMap<String, String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let row =
        |line: &str| line.split_once(':').map(|(name, value)| (name.to_owned(), value.trim().to_owned()));
    text.lines().filter_map(row).collect()
}

/// The same as text for each thread of a process, except those that have ended.
fn threads(pid: u32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let found: Vec<_> =
        tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).ok()).collect();
    assert!(!found.is_empty());
    found
}

/// The user id or group id of a process, which must have only one.
pub(crate) fn id(status: &HashMap<String, String>, key: &str) -> u64 {
    let ids: Vec<u64> = status[key].split_whitespace().map(|id| id.parse().unwrap()).collect();
    assert!(ids.iter().all(|id| *id == ids[0]), "{key}: {ids:?}");
    ids[0]
}

fn has_no_privilege(status: &HashMap<String, String>) {
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status[set], "0000000000000000", "{set}");
    }
    assert_eq!(status["NoNewPrivs"], "1");
}

fn limit(pid: u32, name: &str) -> String {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits.lines().find(|line| line.starts_with(name)).unwrap();
    line[name.len()..].split_whitespace().take(2).collect::<Vec<_>>().join(" ")
}

#[towpath_testenv::needs(netns)]
#[test]
fn an_inspector_has_no_privileges() {
    within(|| {
        let engine = Engine::start(
            &format!("{INSPECT}env = [\"GREETING=hello world\"]\nlimits = [\"nofile=77\"]\n"),
            1,
        );
        let [pid] = engine.inspectors()[..] else { panic!("{:?}", engine.stop()) };
        let inspector = status(pid);
        has_no_privilege(&inspector);
        assert!(UNUSED.contains(&id(&inspector, "Uid")), "{inspector:?}");
        assert_eq!(id(&inspector, "Uid"), id(&inspector, "Gid"));
        assert_eq!(inspector["Groups"], "");
        assert_eq!(inspector["PPid"], engine.launcher().unwrap().to_string());

        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
        let environment = String::from_utf8_lossy(&environment).into_owned();
        let names: Vec<_> = environment.split('\0').filter_map(|row| row.split_once('=')).collect();
        assert!(
            names.contains(&("LC_TIME", "C")) && names.contains(&("GREETING", "hello world")),
            "{names:?}"
        );
        assert!(names.iter().any(|(name, _)| *name == "TOWPATH_SOCKET"));
        let passed = |name: &str| {
            ["PATH", "LANG", "TZ", "TERM", "GREETING"].contains(&name)
                || name.starts_with("LC_")
                || name.starts_with("TOWPATH_")
        };
        assert!(names.iter().all(|(name, _)| passed(name)), "{names:?}");

        assert_eq!(std::fs::read_link(format!("/proc/{pid}/fd/0")).unwrap(), Path::new("/dev/null"));
        for fd in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
            // It may have been closed.
            let Ok(target) = std::fs::read_link(fd.unwrap().path()) else { continue };
            assert_ne!(target, Path::new("/dev/zero"), "the shell's descriptor was passed");
        }
        assert_eq!(limit(pid, "Max open files"), "77 77");
        assert_eq!(limit(pid, "Max core file size"), "0 0");
        assert_eq!(limit(pid, "Max processes"), "512 512");
        let group = rustix::process::getpgid(Pid::from_raw(pid as i32)).unwrap();
        assert_eq!(group.as_raw_pid() as u32, pid);
        let (code, said) = engine.stop();
        assert_eq!(code, Some(0), "{said}");
        // Its parent has ended too: another process reaps it.
        until(|| !Path::new(&format!("/proc/{pid}")).exists());
    });
}

/// The directory of a cgroup (v2) file system.
fn cgroups() -> PathBuf {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let mounted = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let found = mounted.into_iter().find(|words| words[2] == "cgroup2").expect("a cgroup (v2) file system");
    found[1].into()
}

#[towpath_testenv::needs(netns, cgroup2)]
#[test]
fn an_inspector_joins_its_cgroup() {
    within(|| {
        let name = format!("towpath-test-{}", std::process::id());
        let cgroup = cgroups().join(&name);
        std::fs::create_dir(&cgroup).unwrap();
        let more = format!("{INSPECT}cgroup = \"{}\"\n[engine]\nuser = \"1\"\n", cgroup.display());
        let engine = Engine::start(&more, 1);
        let pids = engine.inspectors();
        // cgroups(7): the line of the v2 hierarchy begins with 0.
        let lines = pids.iter().map(|pid| std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap());
        let lines: Vec<String> = lines.collect();
        let users: Vec<u64> = pids.iter().map(|pid| id(&status(*pid), "Uid")).collect();
        let own = std::fs::read_to_string(format!("/proc/{}/cgroup", engine.child.id())).unwrap();
        let stopped = engine.stop();
        // A cgroup with a process cannot be removed.
        until(|| std::fs::remove_dir(&cgroup).is_ok());
        assert_eq!(stopped.0, Some(0), "{}", stopped.1);
        let [line] = &lines[..] else { panic!("{pids:?}: {}", stopped.1) };
        assert!(
            line.lines().any(|line| line.starts_with("0::") && line.ends_with(&format!("/{name}"))),
            "{line}"
        );
        assert!(!own.contains(&name), "the engine is not in it: {own}");
        assert!(UNUSED.contains(&users[0]), "{users:?}");
    });
    // A missing one is an error of the start, with the step.
    within(|| {
        let missing = cgroups().join("towpath-test-missing");
        let more = format!("{INSPECT}cgroup = \"{}\"\n", missing.display());
        let (code, said) = Engine::start(&more, 1).ended();
        assert_ne!(code, Some(0));
        assert!(said.contains("joining the cgroup"), "{said}");
    });
}

/// The program writes to a file of root's and attaches.
fn writes(user: &str) -> (Engine, String) {
    let inspect =
        format!("exec {} inspect --queue 1 --match x --verdict drop", env!("CARGO_BIN_EXE_towpath"));
    let more = format!("[queue.1]\ncommand = \"sh -c 'echo written > DIR/r.ipfw; {inspect}'\"\n{user}");
    let engine = Engine::start(&more, 1);
    let file = std::fs::read_to_string(engine.directory.path().join("r.ipfw")).unwrap();
    (engine, file)
}

#[towpath_testenv::needs(netns)]
#[test]
fn only_a_program_of_root_writes_files_of_root() {
    within(|| {
        let (engine, file) = writes("");
        assert!(file.starts_with("add inspect"), "{file}");
        assert_eq!(engine.stop().0, Some(0));
    });
    within(|| {
        let (engine, file) = writes("user = \"root\"\n");
        let [pid] = engine.inspectors()[..] else { panic!("{:?}", engine.stop()) };
        assert_eq!(file, "written\n");
        let inspector = status(pid);
        assert_eq!(id(&inspector, "Uid"), 0);
        has_no_privilege(&inspector);
        assert_eq!(engine.stop().0, Some(0));
    });
}

#[towpath_testenv::needs(netns)]
#[test]
fn the_engine_becomes_its_user() {
    within(|| {
        let engine = Engine::start(&format!("{INSPECT}[engine]\nuser = \"1\"\ngroup = \"2\"\n"), 1);
        let [pid] = engine.inspectors()[..] else { panic!("{:?}", engine.stop()) };
        let process = status(engine.child.id());
        assert_eq!((id(&process, "Uid"), id(&process, "Gid")), (1, 2));
        assert_eq!((&*process["Groups"], &*process["NoNewPrivs"]), ("", "1"));
        assert_eq!(process["CapEff"], ENGINE_CAPABILITIES);
        assert_eq!(process["CapBnd"], ENGINE_CAPABILITIES);
        for status in threads(engine.child.id()) {
            assert!(status.contains("\nUid:\t1\t1\t1\t1\n"), "{status}");
        }
        let launcher = status(engine.launcher().unwrap());
        assert_eq!((id(&launcher, "Uid"), &*launcher["NoNewPrivs"]), (0, "1"));
        assert_ne!(id(&status(pid), "Uid"), 1, "the inspector has the engine's user");
        for socket in ["ctl.sock", "ctl.sock.ring"] {
            let file = std::fs::metadata(engine.directory.path().join(socket)).unwrap();
            assert_eq!((file.uid(), file.gid()), (1, 2), "{socket}");
        }
        let (code, said) = engine.stop();
        assert_eq!(code, Some(0), "{said}");
    });
}

/// None: the launcher opens packet sockets.
const ENGINE_CAPABILITIES: &str = "0000000000000000";

#[towpath_testenv::needs(netns)]
#[test]
fn a_killed_inspector_is_restarted_without_root() {
    within(|| {
        let engine = Engine::start(&format!("{INSPECT}[engine]\nuser = \"1\"\n"), 1);
        let [first] = engine.inspectors()[..] else { panic!("{:?}", engine.stop()) };
        kill_process(Pid::from_raw(first as i32).unwrap(), Signal::KILL).unwrap();
        let second = engine.successor(first);
        assert!(UNUSED.contains(&id(&status(second), "Uid")));
        // The counters of its socket, of its verdicts for flows, and of the threads that closed the first one's memory.
        let metrics = || String::from_utf8(engine.control().ctl("metrics").stdout).unwrap();
        until(|| metrics().contains("towpath_endpoint_attached_connections_total{queue=\"1\"} 2\n"));
        for sample in ["towpath_flow_verdicts_kept{queue=\"1\"} 0\n", "\ntowpath_reaper_helpers{} "] {
            assert!(metrics().contains(sample), "{sample}: {}", metrics());
        }
        assert_eq!(engine.stop().0, Some(0));
    });
}

#[towpath_testenv::needs(netns)]
#[test]
fn the_end_of_one_side_is_the_end_of_the_other() {
    within(|| {
        let mut engine = Engine::start(INSPECT, 1);
        let [inspector] = engine.inspectors()[..] else { panic!("{:?}", engine.stop()) };
        kill_process(Pid::from_raw(engine.launcher().unwrap() as i32).unwrap(), Signal::KILL).unwrap();
        until(|| engine.child.try_wait().unwrap().is_some());
        let (code, said) = engine.stop();
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("the launcher failed"), "{said}");
        until(|| !Path::new(&format!("/proc/{inspector}")).exists());
    });
    within(|| {
        let mut engine = Engine::start(INSPECT, 1);
        let [inspector] = engine.inspectors()[..] else { panic!("{:?}", engine.stop()) };
        let launcher = engine.launcher().unwrap();
        engine.child.kill().unwrap();
        engine.child.wait().unwrap();
        until(|| [inspector, launcher].iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()));
    });
}

#[towpath_testenv::needs(netns)]
#[test]
fn a_reload_may_start_only_what_the_file_has() {
    within(|| {
        let engine = Engine::start(INSPECT, 1);
        let [first] = engine.inspectors()[..] else { panic!("{:?}", engine.stop()) };
        let user = id(&status(first), "Uid");
        let file = engine.directory.path().join("t.toml");
        let text = std::fs::read_to_string(&file).unwrap() + "limits = [\"nofile=55\"]\n";
        std::fs::write(&file, text).unwrap();
        kill_process(Pid::from_child(&engine.child), Signal::HUP).unwrap();
        let second = engine.successor(first);
        assert_eq!(limit(second, "Max open files"), "55 55");
        assert_eq!(id(&status(second), "Uid"), user, "the queue keeps its id");
        assert_eq!(engine.stop().0, Some(0));
    });
}

#[test]
fn wrong_users_and_limits_are_errors_with_a_position() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("t.toml");
    let rows = [
        ("[queue.1]\ncommand = \"x\"\nuser = \"no-such-user\"\n", ":13:8: unknown user `no-such-user`"),
        ("[queue.1]\ncommand = \"x\"\ngroup = \"no-such-group\"\n", ":13:9: unknown group `no-such-group`"),
        ("[queue.1]\ncommand = \"x\"\nlimits = [\"files=1\"]\n", ":13:11: `files=1` is not a resource limit"),
        ("[queue.1]\ncommand = \"x\"\nenv = [\"=x\"]\n", ":13:8: `=x` is not an environment variable"),
        ("[queue.1]\nsocket = \"s\"\nuser = \"0\"\n", ":13:8: `user` is for a `command`"),
        ("[engine]\nuser = \"no-such-user\"\n", ":12:8: unknown user `no-such-user`"),
        ("[engine]\ngroup = \"0\"\n", ":12:9: `group` needs `user`"),
    ];
    for (more, expected) in rows {
        std::fs::write(&file, format!("{BRIDGE}{more}")).unwrap();
        std::fs::write(directory.path().join("r.ipfw"), "add allow ip from any to any\n").unwrap();
        let output =
            Command::new(env!("CARGO_BIN_EXE_towpath")).args(["run", "--check"]).arg(&file).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(6), "{said}");
        assert!(said.contains(&format!("{}{expected}", file.display())), "{said}\n{expected}");
    }
}

/// Commands of a shell keep its user and environment, and lose their capabilities.
#[test]
fn a_replayed_inspector_has_no_capabilities() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("r"), "add inspect 1 ip from any to any\n").unwrap();
    towpath_port::pcap::Writer::create(path("a.pcap")).unwrap().finish().unwrap();
    let inspect =
        format!("exec {} inspect --queue 1 --match x --verdict drop", env!("CARGO_BIN_EXE_towpath"));
    let shell = format!("cat /proc/self/status > {}; env > {}; {inspect}", path("status"), path("env"));
    let output = Command::new(env!("CARGO_BIN_EXE_towpath"))
        .args(["replay", &path("a.pcap"), "--rules", &path("r"), "--queue", &format!("1=sh -c '{shell}'")])
        .env("SHELL_VARIABLE", "kept")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(path("status")).unwrap();
    let user = rustix::process::geteuid().as_raw();
    for line in [
        "CapPrm:\t0000000000000000",
        "CapEff:\t0000000000000000",
        "NoNewPrivs:\t1",
        &format!("Uid:\t{user}\t{user}"),
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert!(std::fs::read_to_string(path("env")).unwrap().contains("SHELL_VARIABLE=kept"));
}

/// An engine that stays root, because no user is configured and `towpath` does not exist.
#[towpath_testenv::needs(netns)]
#[test]
fn no_thread_of_an_engine_has_capabilities() {
    within(|| {
        let engine = Engine::start(&format!("{INSPECT}[engine]\nuser = \"root\"\n"), 1);
        for status in threads(engine.child.id()) {
            assert!(status.contains("\nCapEff:\t0000000000000000\n"), "{status}");
        }
        assert_eq!(engine.stop().0, Some(0));
    });
}

/// The kernel runs the handler of a signal on any thread, if the first one has another signal to handle.
#[towpath_testenv::needs(netns)]
#[test]
fn a_signal_may_reach_any_thread() {
    within(|| {
        // The thread of the states may not send to a socket.
        let bridge = format!("states = \"states\"\nstates-every = 0.1\n{BRIDGE}");
        let engine = Engine::start_with(&bridge, INSPECT, 1, |_| {});
        let threads = || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", engine.child.id())).unwrap();
            tasks.map(|task| task.unwrap().path()).collect::<Vec<_>>()
        };
        let is_states =
            |task: &PathBuf| std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name == "states\n");
        until(|| threads().iter().any(is_states));
        for task in threads() {
            let thread: i32 = task.file_name().unwrap().to_str().unwrap().parse().unwrap();
            // PIDFD_THREAD of pidfd_open(2), Linux 6.9: the signal is for this thread.
            let flags = PidfdFlags::from_bits_retain(rustix::fs::OFlags::EXCL.bits());
            let Ok(thread) = pidfd_open(Pid::from_raw(thread).unwrap(), flags) else { continue };
            // The thread may have ended.
            let _ = pidfd_send_signal(&thread, Signal::HUP);
            engine.control().json("show stats --json");
        }
        let (code, said) = engine.stop();
        assert_eq!(code, Some(0), "{said}");
    });
}

/// The engine starts its worker itself, as its own user.
#[towpath_testenv::needs(root)]
#[test]
fn a_start_without_root_has_no_launcher() {
    let directory = tempfile::tempdir().unwrap();
    let worker = example("mux_worker");
    let config = format!(
        "rules = \"r.ipfw\"\n[mux.web]\nlisten = \"unix:mux.sock\"\nframing = \"line\"\nworkers = 1\nworker = \"{}\"\n\
         [control]\nsocket = \"ctl.sock\"\n",
        worker
    );
    std::fs::write(directory.path().join("t.toml"), config).unwrap();
    std::fs::write(directory.path().join("r.ipfw"), "add allow ip from any to any\n").unwrap();
    std::os::unix::fs::chown(directory.path(), Some(1), Some(1)).unwrap();
    let start = || {
        Command::new(env!("CARGO_BIN_EXE_towpath"))
            .arg("run")
            .arg(directory.path().join("t.toml"))
            .env("SECRET", "shell")
            .uid(1)
            .gid(1)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let engine = Engine::of(tempfile::tempdir().unwrap(), start());
    let is_worker = |pid: u32| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "mux_worker")
    };
    // The first child is a worker, not a launcher.
    until(|| engine.launcher().is_some_and(is_worker));
    let worker = engine.launcher().unwrap();
    let process = status(worker);
    assert_eq!((id(&process, "Uid"), id(&process, "Gid"), &*process["NoNewPrivs"]), (1, 1, "1"));
    assert_eq!(process["CapPrm"], "0000000000000000");
    let environment = std::fs::read(format!("/proc/{worker}/environ")).unwrap();
    assert!(!String::from_utf8_lossy(&environment).contains("SECRET="));
    until(|| Control::of(directory.path()).ctl("show stats").status.success());
    assert_eq!(engine.stop().0, Some(0));

    // Another user needs root.
    let file = directory.path().join("t.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    for (more, expected, code) in [
        ("[engine]\nuser = \"2\"\n", "start the engine as root or as that user", 1),
        ("[queue.1]\ncommand = \"true\"\nuser = \"2\"\n", "need an engine that is started as root", 4),
    ] {
        std::fs::write(&file, format!("{text}{more}")).unwrap();
        let engine = Engine::of(tempfile::tempdir().unwrap(), start());
        let output = engine.ended();
        assert_eq!(output.0, Some(code), "{}", output.1);
        assert!(output.1.contains(expected), "{}", output.1);
    }
}

/// A directory that is closed to the program's user, as below /root.
#[towpath_testenv::needs(netns)]
#[test]
fn a_program_may_be_in_a_closed_directory() {
    within(|| {
        let closed = tempfile::tempdir().unwrap();
        let program = closed.path().join("program");
        // Copied by another process: a child that another test forks meanwhile would keep this process's descriptor open for writing.
        let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_towpath")).arg(&program).status().unwrap();
        assert!(copied.success());
        let inspect = INSPECT.replace("towpath inspect", &format!("{} inspect", program.display()));
        let engine = Engine::start(&inspect, 1);
        let [pid] = engine.inspectors()[..] else { panic!("{:?}", engine.stop()) };
        assert!(UNUSED.contains(&id(&status(pid), "Uid")));
        assert_eq!(std::fs::read_link(format!("/proc/{pid}/exe")).unwrap(), program);
        assert_eq!(engine.stop().0, Some(0));
    });
}
