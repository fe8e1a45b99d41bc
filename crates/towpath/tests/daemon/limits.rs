//! `towpath run` at its limits: descriptors, traces, the queue of an interface, SIGKILL. The engine waits for room or counts the loss,
//! and uses room that becomes free.

use std::io::Read;
use std::net::UdpSocket;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use towpath_port::netns::{Host, ip, settled, veth, within};

use crate::bridged::BRIDGE;
use crate::support::{Control, Log, until};

struct Engine {
    control: Control,
    child: Child,
    log: Log,
}

impl Engine {
    /// Starts the engine in a shell, after the commands `before`.
    fn start(directory: &Path, config: &str, before: &str) -> Self {
        Self::try_start(directory, config, before).unwrap_or_else(|said| panic!("{said}"))
    }

    /// Starts the engine. On an error, returns its output.
    fn try_start(directory: &Path, config: &str, before: &str) -> Result<Self, String> {
        std::fs::write(directory.join("t.toml"), config).unwrap();
        std::fs::write(directory.join("r.ipfw"), "add 100 allow ip from any to any\n").unwrap();
        let mut child = Command::new("sh")
            .args(["-c", &format!("{before} exec \"$0\" \"$@\"")])
            .args([env!("CARGO_BIN_EXE_towpath"), "run", directory.join("t.toml").to_str().unwrap()])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Log::of(&mut child);
        let mut engine = Self { control: Control::of(directory), child, log };
        let mut ended = false;
        until(|| {
            ended = engine.child.try_wait().unwrap().is_some();
            ended || engine.control.ctl("show stats").status.success()
        });
        if ended { Err(engine.log.whole()) } else { Ok(engine) }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Stops it. Returns its output.
    fn stop(mut self) -> String {
        self.signal(Signal::TERM);
        let said = self.log.whole();
        assert!(self.child.wait().unwrap().success(), "{said}");
        said
    }
}

#[towpath_testenv::needs(netns)]
#[test]
fn connections_wait_for_free_descriptors() {
    within(|| {
        veth("wan", "l0");
        veth("lan", "r0");
        let directory = tempfile::tempdir().unwrap();
        let engine = Engine::start(directory.path(), BRIDGE, "ulimit -n 64;");
        let socket = directory.path().join("ctl.sock");
        // More connections than free descriptors: the last ones wait.
        let clients: Vec<_> = (0..60).map(|_| UnixStream::connect(&socket).unwrap()).collect();
        let waits = |what: &str| {
            engine.log.text().lines().any(|line| line.contains(what) && line.contains("connections wait"))
        };
        until(|| waits("control: "));
        let dump = || {
            Command::new(env!("CARGO_BIN_EXE_towpath"))
                .args(["ctl", "--socket", socket.to_str().unwrap(), "dump", "states"])
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        };
        // A dump is served, or refused if a descriptor was free for its connection but not for its rings.
        let check = |dump: Child| {
            let output = dump.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() || said.contains("Too many open files"), "{said}");
        };
        // A descriptor that the engine used for a moment may be free when a dump connects, until the next client takes it.
        let mut waiting = dump();
        until(|| {
            if waiting.try_wait().unwrap().is_some() {
                check(std::mem::replace(&mut waiting, dump()));
            }
            waits("ctl.sock.ring: ")
        });
        drop(clients);
        check(waiting);
        until(|| engine.control.ctl("dump states").status.success());
        assert!(engine.control.ctl("show rules").status.success());
        let said = engine.stop();
        // The wait was logged at most once for each power of two of its seconds.
        assert!(said.matches("connections wait").count() < 20, "{said}");
    });
}

#[towpath_testenv::needs(netns)]
#[test]
fn a_trace_ends_with_its_client() {
    within(|| {
        veth("wan", "l0");
        veth("lan", "r0");
        let directory = tempfile::tempdir().unwrap();
        let engine = Engine::start(directory.path(), BRIDGE, "");
        // Traces of a rule that matches no packet: no packet shows that a client is gone.
        let trace = |number: u32| {
            let capture = directory.path().join(format!("{number}.pcapng"));
            let child = Command::new(env!("CARGO_BIN_EXE_towpath"))
                .args(["ctl", "--socket", directory.path().join("ctl.sock").to_str().unwrap()])
                .args(["trace", "--rule", "9999", "--out", capture.to_str().unwrap()])
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            (child, capture)
        };
        for round in 0..3 {
            let traces: Vec<_> = (0..8).map(|at| trace(8 * round + at)).collect();
            for (at, (mut child, capture)) in traces.into_iter().enumerate() {
                // The trace runs when it has written its file. It is refused while the engine has not noticed that another client is gone,
                // and then tries again.
                until(|| {
                    if child.try_wait().unwrap().is_some() {
                        let mut said = String::new();
                        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
                        assert!(said.contains("already runs 8 packet traces"), "{said}");
                        (child, _) = trace(8 * round + at as u32);
                    }
                    std::fs::metadata(&capture).is_ok_and(|file| file.len() > 0)
                });
                assert_eq!(child.try_wait().unwrap(), None);
                child.kill().unwrap();
                child.wait().unwrap();
            }
        }
        engine.stop();
    });
}

#[towpath_testenv::needs(netns, tun)]
#[test]
fn packets_that_do_not_fit_the_queue_of_a_tun_interface_are_counted() {
    within(|| {
        let directory = tempfile::tempdir().unwrap();
        let config = BRIDGE.replace("af_packet", "tun");
        let engine = Engine::start(directory.path(), &config, "");
        ip("addr add 10.7.0.1/24 dev wan");
        let socket = UdpSocket::bind("10.7.0.1:0").unwrap();
        engine.signal(Signal::STOP);
        for _ in 0..5000 {
            // send(2) may fail with ENOBUFS; that packet never reached the interface.
            let _ = socket.send_to(&[7; 100], "10.7.0.2:9");
        }
        engine.signal(Signal::CONT);
        let dropped = || -> u64 {
            let text = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
            let line = text.lines().find_map(|line| line.trim_start().strip_prefix("wan:")).unwrap();
            line.split_whitespace().nth(11).unwrap().parse().unwrap()
        };
        until(|| {
            let ports = engine.control.json("show ports --json");
            let wan = ports["ports"].as_array().unwrap().iter().find(|port| port["name"] == "wan").unwrap();
            let lost = wan["lost"].as_array().unwrap().iter().find(|lost| lost[0] == "rx_full");
            // 0: this kernel stops the sender instead.
            lost.map_or(dropped() == 0, |lost| lost[1].as_u64() == Some(dropped()))
        });
        engine.stop();
    });
}

/// The default fail policy of an AF_XDP port: open.
#[towpath_testenv::needs(netns, xdp)]
#[test]
fn the_kernel_gets_the_packets_after_an_engine_with_af_xdp_is_killed() {
    within(|| {
        let left = Host::new();
        veth("wan", "l0");
        veth("lan", "r0");
        ip("link set wan address 02:00:00:00:00:0f");
        ip("addr add 10.0.0.254/24 dev wan");
        left.take("l0", "10.0.0.1/24");
        settled("wan");
        left.run(|| ip("neigh add 10.0.0.254 lladdr 02:00:00:00:00:0f dev l0"));
        let directory = tempfile::tempdir().unwrap();
        let mut engine =
            Engine::try_start(directory.path(), &BRIDGE.replace("af_packet", "af_xdp"), "").unwrap();
        let socket = UdpSocket::bind("10.0.0.254:9").unwrap();
        socket.set_nonblocking(true).unwrap();
        let send = || {
            left.run(|| UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"hello", "10.0.0.254:9").unwrap());
        };
        // The packets wait in the engine.
        until(|| {
            send();
            let ports = engine.control.json("show ports --json");
            let wan = ports["ports"].as_array().unwrap().iter().find(|port| port["name"] == "wan").unwrap();
            wan["received"].as_u64() > Some(0)
        });
        assert!(socket.recv(&mut [0; 8]).is_err());
        engine.child.kill().unwrap();
        engine.child.wait().unwrap();
        until(|| {
            send();
            socket.recv(&mut [0; 8]).is_ok()
        });
    });
}
