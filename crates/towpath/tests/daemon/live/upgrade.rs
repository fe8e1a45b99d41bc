//! Upgrades of a running engine under load: no packet is lost, and inspectors keep their connections.

use std::collections::BTreeSet;
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use towpath_port::netns::{Host, within};

use super::machines::*;
use crate::executable::write_script;
use crate::support::until;

const TOWPATH: &str = env!("CARGO_BIN_EXE_towpath");

/// TCP only by states: a connection whose state is lost stalls. UDP to one port is inspected.
const RULES: &str = "\
add 100 allow layer2 mac-type arp
add 200 check-state
add 300 inspect 1 udp from any to any 9
add 310 inspect 2 udp from any to any 10
add 400 allow tcp from any to any setup recv wan keep-state
add 500 allow udp from any to any 11
";

/// Time for a new version, also on a busy machine.
pub(super) const TIME: &str = "upgrade-time = 600";

/// Number of upgrades under load. `.ci/nightly upgrade` sets it to 100.
pub(super) fn upgrades() -> u32 {
    std::env::var("TOWPATH_UPGRADES").ok().and_then(|text| text.parse().ok()).unwrap_or(3)
}

/// The engine that runs now.
pub(super) struct Running {
    /// The first engine, which is a child of this process.
    pub(super) first: Engine,
    /// The present one, unless it is the first.
    now: Option<Pid>,
}

impl Running {
    pub(super) fn start(directory: &Path) -> Self {
        Self::of(Engine::start(directory))
    }

    pub(super) fn of(mut first: Engine) -> Self {
        // All engines write there: each one its report.
        let mut reports = first.child.stdout.take().unwrap();
        thread::spawn(move || io::copy(&mut reports, &mut io::sink()));
        Self { first, now: None }
    }

    pub(super) fn id(&self) -> Pid {
        self.now.unwrap_or_else(|| Pid::from_child(&self.first.child))
    }

    /// Upgrades, and waits until the engine before has ended.
    pub(super) fn upgrade(&mut self) {
        ended(&self.replace());
        if let Ok(Some(status)) = self.first.child.try_wait() {
            assert!(status.success(), "{status}");
        }
    }

    /// Upgrades. Returns the engine before, which may have connections that stay.
    pub(super) fn replace(&mut self) -> OwnedFd {
        let before = pidfd_open(self.id(), PidfdFlags::empty()).unwrap();
        let said = self.first.ctl("upgrade --json");
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        let said: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
        assert_eq!(said["before"].as_i64(), Some(self.id().as_raw_nonzero().get().into()), "{said}");
        self.now = Pid::from_raw(said["process"].as_i64().unwrap() as i32);
        before
    }

    /// Stops the present engine.
    pub(super) fn stop(self) {
        let process = pidfd_open(self.id(), PidfdFlags::empty()).unwrap();
        kill_process(self.id(), Signal::TERM).unwrap();
        ended(&process);
    }
}

/// Waits until a process has ended.
pub(super) fn ended(process: &impl AsFd) {
    poll(&mut [PollFd::new(process, PollFlags::IN)], None).unwrap();
}

pub(super) fn config(programs: &str) -> String {
    let queues = "\
[queue.1]
socket = \"q1.sock\"
deadline = 5
[queue.2]
command = \"TOWPATH inspect --queue 2 --match nothing-like-this --verdict drop\"
workers = 2
deadline = 5
";
    let queues = queues.replace("TOWPATH", TOWPATH);
    format!("{BRIDGE}{queues}[engine]\nupgrade = [\"{programs}\"]\n{TIME}\n")
}

pub(super) fn inspector(directory: &Path) -> Child {
    Command::new(TOWPATH)
        .args(["inspect", "--queue", "1", "--match", "nothing-like-this", "--verdict", "drop"])
        .env("TOWPATH_SOCKET", directory.join("q1.sock"))
        .spawn()
        .unwrap()
}

/// A datagram without a number. The kernel drops datagrams while it looks for the address of a neighbor and has some hundred: the load
/// begins when each port has got one.
const FIRST: u64 = u64::MAX;

/// Tenths of a second without a datagram after which those that have not arrived are lost.
const SILENCE: u32 = 100;

/// Numbers that have not arrived at every port, at most. A receive ring has 128 blocks, and each packet has at most one: the datagrams of
/// three ports and the segments of a connection have room, however long the engine does not receive.
const AHEAD: u64 = 32;

/// Numbered datagrams from the left machine to ports of the right one, without pause. Made before the machines are busy.
pub(super) struct Load {
    stop: Arc<AtomicBool>,
    /// Nothing more is sent.
    over: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    sender: Option<JoinHandle<()>>,
    receivers: Vec<JoinHandle<BTreeSet<u64>>>,
}

impl Load {
    pub(super) fn start(left: &Host, right: &Host, ports: &[u16]) -> Self {
        let (stop, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (over, reached) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let arrived: Arc<[AtomicU64]> = ports.iter().map(|_| AtomicU64::new(0)).collect();
        let receivers = ports.iter().enumerate().map(|(at, &port)| {
            let arrived = Arc::clone(&arrived);
            let server = right.run(move || UdpSocket::bind((RIGHT, port)).unwrap());
            // The machine itself must lose none.
            set_socket_recv_buffer_size_force(&server, 32 << 20).unwrap();
            server.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            let (over, sent, reached) = (Arc::clone(&over), Arc::clone(&sent), Arc::clone(&reached));
            thread::spawn(move || {
                let (mut got, mut number) = (BTreeSet::new(), [0; 8]);
                let (mut first, mut silence) = (true, 0);
                loop {
                    match server.recv(&mut number) {
                        Ok(_) if number == FIRST.to_be_bytes() => {
                            reached.fetch_add(usize::from(std::mem::take(&mut first)), Ordering::Relaxed);
                        }
                        Ok(_) => {
                            assert!(got.insert(u64::from_be_bytes(number)), "a datagram arrived twice");
                            arrived[at].store(got.len() as u64, Ordering::Relaxed);
                            silence = 0;
                        }
                        Err(_) if over.load(Ordering::Relaxed) => {
                            silence += 1;
                            // On a busy machine, the last ones are on their way for a while.
                            if got.len() as u64 == sent.load(Ordering::Relaxed) || silence > SILENCE {
                                return got;
                            }
                        }
                        Err(_) => {}
                    }
                }
            })
        });
        let receivers = receivers.collect();
        let (stopped, count, ports) = (Arc::clone(&stop), Arc::clone(&sent), ports.to_vec());
        let client = left.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap());
        let sender = thread::spawn(move || {
            while reached.load(Ordering::Relaxed) < ports.len() && !stopped.load(Ordering::Relaxed) {
                for &port in &ports {
                    client.send_to(&FIRST.to_be_bytes(), (RIGHT, port)).unwrap();
                }
                thread::sleep(Duration::from_millis(20));
            }
            // Those that have not arrived for long are lost.
            let (mut lost, mut waited) = (0, 0);
            while !stopped.load(Ordering::Relaxed) {
                let number = count.load(Ordering::Relaxed);
                let least = arrived.iter().map(|arrived| arrived.load(Ordering::Relaxed)).min().unwrap();
                if number < least + lost + AHEAD {
                    for &port in &ports {
                        client.send_to(&number.to_be_bytes(), (RIGHT, port)).unwrap();
                    }
                    count.store(number + 1, Ordering::Relaxed);
                    waited = 0;
                    continue;
                }
                thread::sleep(Duration::from_millis(1));
                waited += 1;
                if waited == 100 * SILENCE {
                    lost = number - least;
                }
            }
        });
        Self { stop, over, sent, sender: Some(sender), receivers }
    }

    /// Waits until some more were sent.
    pub(super) fn goes_on(&self) {
        let before = self.sent.load(Ordering::Relaxed);
        until(|| self.sent.load(Ordering::Relaxed) > before + 200);
    }

    /// Stops, and returns the numbers that did not arrive, for each port, and the number of sent ones.
    pub(super) fn end(mut self) -> (Vec<u64>, u64) {
        self.goes_on();
        self.stop.store(true, Ordering::Relaxed);
        self.sender.take().unwrap().join().unwrap();
        self.over.store(true, Ordering::Relaxed);
        let sent = self.sent.load(Ordering::Relaxed);
        let missing = |got: BTreeSet<u64>| {
            let lost: Vec<u64> = (0..sent).filter(|number| !got.contains(number)).collect();
            if let (Some(first), Some(last)) = (lost.first(), lost.last()) {
                eprintln!("{} datagrams from number {first} to {last} of {sent} are missing", lost.len());
            }
            lost.len() as u64
        };
        (self.receivers.drain(..).map(|receiver| missing(receiver.join().unwrap())).collect(), sent)
    }
}

impl Drop for Load {
    /// After a failed assertion, the machines end.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.over.store(true, Ordering::Relaxed);
    }
}

/// The process ids of the attached inspectors.
fn inspectors(engine: &Engine) -> BTreeSet<i64> {
    let rings = engine.json("show rings --json");
    let rings = rings["rings"].as_array().unwrap().iter().filter(|ring| ring["gone"].is_null());
    rings.map(|ring| ring["pid"].as_i64().unwrap()).collect()
}

/// Upgrades between interfaces of a driver, under load.
fn loses_nothing(driver: &str) {
    within(|| {
        let (left, right) = machines();
        let files = files(&config(TOWPATH).replace("af_packet", driver), RULES);
        let mut engine = Running::start(files.path());
        let mut own = inspector(files.path());
        until(|| inspectors(&engine.first).len() == 3);
        let before = inspectors(&engine.first);
        let load = Load::start(&left, &right, &[9, 10, 11]);
        let echo = Echo::start(&left, &right, 9100);
        echo.goes_on();
        for _ in 0..upgrades() {
            load.goes_on();
            engine.upgrade();
            echo.goes_on();
            assert_eq!(inspectors(&engine.first), before);
        }
        let (missing, sent) = load.end();
        assert_eq!(missing, [0, 0, 0], "of {sent} datagrams");
        echo.goes_on();
        echo.end();
        assert!(own.try_wait().unwrap().is_none(), "the inspector has ended");
        engine.stop();
        own.wait().unwrap();
        let left: Vec<_> = ["ctl.sock", "q1.sock", "ctl.sock.ring"]
            .into_iter()
            .filter(|name| files.path().join(name).exists())
            .collect();
        assert!(left.is_empty(), "{left:?}");
    });
}

#[towpath_testenv::needs(netns)]
#[test]
fn upgrades_lose_no_packet_no_connection_and_no_inspector() {
    loses_nothing("af_packet");
}

#[towpath_testenv::needs(netns, xdp)]
#[test]
fn upgrades_lose_nothing_on_xdp_sockets() {
    loses_nothing("af_xdp");
}

/// A program that writes its process id into `DIRECTORY/new` and then runs `words`.
pub(super) fn script(directory: &Path, name: &str, words: &str) -> String {
    let path = directory.join(name);
    let file = directory.join("new").display().to_string();
    write_script(&path, &format!("echo $$ > {file}.part; mv {file}.part {file}\n{words}"));
    path.display().to_string()
}

/// The process id of the last started program.
pub(super) fn started(directory: &Path) -> Pid {
    let file = directory.join("new");
    let mut id = None;
    until(|| {
        id = std::fs::read_to_string(&file)
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .and_then(Pid::from_raw);
        id.is_some()
    });
    std::fs::remove_file(&file).unwrap();
    id.unwrap()
}

#[towpath_testenv::needs(netns)]
#[test]
fn an_engine_continues_if_the_next_one_does_not_come_up() {
    within(|| {
        let (left, right) = machines();
        let files = files("", RULES);
        let directory = files.path();
        let good = script(directory, "good", &format!("exec {TOWPATH} \"$@\""));
        let ends = script(directory, "ends", "exit 3");
        let hangs = script(directory, "hangs", "exec sleep 1000");
        // Another program of the same protocol of messages.
        let other =
            script(directory, "other", &format!("exec {TOWPATH} mux unix:{}/m -- cat", directory.display()));
        let programs = [&*good, &*ends, &*hangs, &*other, "/nonexistent"].join("\", \"");
        let config = config(&programs);
        std::fs::write(directory.join("t.toml"), &config).unwrap();
        let mut engine = Running::start(directory);
        let mut own = inspector(directory);
        until(|| inspectors(&engine.first).len() == 3);
        let before = inspectors(&engine.first);
        let load = Load::start(&left, &right, &[9, 10, 11]);
        let echo = Echo::start(&left, &right, 9100);
        let refused = |engine: &Running, words: &str, expected: &str| {
            let said = engine.first.ctl(words);
            let text = String::from_utf8_lossy(&said.stderr).into_owned();
            assert!(!said.status.success() && text.contains(expected), "{words}: {text}");
        };
        refused(&engine, "upgrade /bin/sh", "`upgrade` of [engine] names");
        refused(&engine, &format!("upgrade {ends}"), "ended (exit status: 3)");
        refused(&engine, "upgrade /nonexistent", "No such file");
        refused(&engine, &format!("upgrade {other}"), "not upgraded");
        // A short time for the version that is never ready: the others have theirs on a busy machine.
        for (config, is_late) in [(config.replace(TIME, "upgrade-time = 1"), true), (config, false)] {
            std::fs::write(directory.join("t.toml"), config).unwrap();
            engine.first.signal(Signal::HUP);
            engine.first.log.line("reloaded: ");
            if is_late {
                refused(&engine, &format!("upgrade {hangs}"), "was not ready in time");
            }
        }
        // A configuration that this version cannot read.
        let text = std::fs::read_to_string(directory.join("r.ipfw")).unwrap();
        std::fs::write(directory.join("r.ipfw"), "add 100 fly\n").unwrap();
        refused(&engine, "upgrade", "refuses");
        std::fs::write(directory.join("r.ipfw"), text).unwrap();
        let _ = std::fs::remove_file(directory.join("new"));
        // Killed while it prepares.
        std::thread::scope(|scope| {
            let upgrade = scope.spawn(|| engine.first.ctl("upgrade"));
            kill_process(started(directory), Signal::KILL).unwrap();
            assert!(!upgrade.join().unwrap().status.success());
        });
        echo.goes_on();
        load.goes_on();
        assert_eq!(inspectors(&engine.first), before);
        let (missing, sent) = load.end();
        assert_eq!(missing, [0, 0, 0], "of {sent} datagrams");
        // Killed when it carries packets: the engine before takes over again.
        let said = engine.first.ctl("upgrade --json");
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        kill_process(started(directory), Signal::KILL).unwrap();
        until(|| engine.first.ctl("show stats").status.success() && inspectors(&engine.first) == before);
        assert!(engine.first.child.try_wait().unwrap().is_none(), "the engine before has ended");
        echo.goes_on();
        // The engine before is killed as soon as the new one carries packets: that one goes on, and has the files.
        let said = engine.first.ctl("upgrade --json");
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        engine.first.signal(Signal::KILL);
        engine.first.child.wait().unwrap();
        engine.now = Some(started(directory));
        echo.goes_on();
        until(|| inspectors(&engine.first) == before);
        echo.end();
        assert!(own.try_wait().unwrap().is_none(), "the inspector has ended");
        engine.stop();
        own.wait().unwrap();
        assert!(!directory.join("ctl.sock").exists() && !directory.join("q1.sock").exists());
    });
}
