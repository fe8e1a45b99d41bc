//! Reloads of the configuration of `towpath run` under traffic: all changes take effect in one step, and no packet is dropped.

use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal, kill_process};
use towpath_port::netns::{Host, ip, settled, veth, within};

use crate::support::{Control, Log, until};

/// Number of reloads.
const RELOADS: u32 = 120;

struct Engine {
    control: Control,
    child: Child,
    log: Log,
}

impl Engine {
    fn start(directory: &Path) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_towpath"))
            .args(["run", directory.join("t.toml").to_str().unwrap()])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Log::of(&mut child);
        let engine = Self { control: Control::of(directory), child, log };
        until(|| engine.control.ctl("show stats").status.success());
        engine
    }

    /// Sends SIGHUP and waits until the engine has logged the reload.
    fn reload(&mut self) {
        kill_process(Pid::from_child(&self.child), Signal::HUP).unwrap();
        let line = self.log.line("reloaded: ");
        assert!(!line.contains("not reloaded"), "{line}");
    }

    fn stop(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

/// A router with three networks. Two of them are exchanged, and new rules send packets to new queues.
#[towpath_testenv::needs(netns)]
#[test]
fn routes_and_queues_come_with_their_rules() {
    within(|| {
        let left = Host::new();
        for (own, other) in [("wan", "l0"), ("lan", "r0"), ("alt", "a0")] {
            veth(own, other);
            ip(&format!("link set {other} up"));
        }
        ip("link set wan address 02:00:00:00:00:0f");
        left.take("l0", "10.0.0.1/24");
        settled("wan");
        left.run(|| {
            ip("route add 10.0.0.0/8 via 10.0.0.254");
            ip("neigh add 10.0.0.254 lladdr 02:00:00:00:00:0f dev l0");
        });
        let directory = tempfile::tempdir().unwrap();
        let write = |reload: u32| {
            let mut config = "rules = \"r.ipfw\"\n[control]\nsocket = \"ctl.sock\"\n".to_owned();
            for port in ["wan", "lan", "alt"] {
                config += &format!("[port.{port}]\ndriver = \"af_packet\"\n");
            }
            let nets = if reload.is_multiple_of(2) {
                ["10.8.0.0/16", "10.9.0.0/16"]
            } else {
                ["10.9.0.0/16", "10.8.0.0/16"]
            };
            for (net, port) in nets.iter().zip(["lan", "alt"]) {
                config +=
                    &format!("[[route]]\nto = \"{net}\"\nport = \"{port}\"\nmac = \"02:00:00:00:00:09\"\n");
            }
            // A reload cannot remove a queue: their number grows.
            let newest = reload / 8;
            for queue in 1..=newest {
                config += &format!("[queue.{queue}]\nsocket = \"q{queue}.sock\"\ndefault = \"pass\"\n");
            }
            let inspect = if newest > 0 {
                format!("add inspect {newest} udp from any to any in\n")
            } else {
                String::new()
            };
            std::fs::write(directory.path().join("t.toml"), config).unwrap();
            std::fs::write(directory.path().join("r.ipfw"), inspect + "add allow ip from any to any\n")
                .unwrap();
        };
        write(0);
        let mut engine = Engine::start(directory.path());
        let over = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&over);
        let sent = left.start(move || {
            let socket = UdpSocket::bind("10.0.0.1:0").unwrap();
            while !stop.load(Ordering::Relaxed) {
                for to in ["10.8.0.1:9", "10.9.0.1:9"] {
                    // send(2) may fail with ENOBUFS; that packet was never on the wire.
                    let _ = socket.send_to(b"hello", to);
                }
            }
        });
        for reload in 1..=RELOADS {
            write(reload);
            engine.reload();
        }
        over.store(true, Ordering::Relaxed);
        sent.recv().unwrap();
        let stats = engine.control.json("show stats --json");
        assert!(stats["stats"]["passed"].as_u64() > Some(u64::from(RELOADS)), "{stats}");
        assert_eq!(
            (&stats["stats"]["dropped"], &stats["stats"]["rejected"]),
            (&0.into(), &0.into()),
            "{stats}"
        );
        let ports = engine.control.json("show ports --json");
        for port in ports["ports"].as_array().unwrap() {
            let lost = port["lost"].as_array().unwrap();
            assert!(!lost.iter().any(|lost| lost[0] == "no_next_hop"), "{ports}");
        }
        engine.stop();
    });
}

/// A user and a group that no system has.
const STRANGER: u32 = 64_999;

#[towpath_testenv::needs(netns)]
#[test]
fn a_reload_changes_the_users_that_may_attach() {
    within(|| {
        for (own, other) in [("wan", "l0"), ("lan", "r0")] {
            veth(own, other);
        }
        let directory = tempfile::tempdir().unwrap();
        // A directory in which the other user can reach the socket and the program.
        std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let program = directory.path().join("towpath");
        // Copied by another process: a child that another test forks meanwhile would keep this process's descriptor open for writing.
        let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_towpath")).arg(&program).status().unwrap();
        assert!(copied.success());
        let write = |users: &str| {
            let config = format!(
                "rules = \"r.ipfw\"\n[port.wan]\ndriver = \"af_packet\"\n[port.lan]\ndriver = \"af_packet\"\n\
                 [[bridge]]\nports = [\"wan\", \"lan\"]\n[control]\nsocket = \"ctl.sock\"\n\
                 [queue.1]\nsocket = \"q1.sock\"\n{users}\n"
            );
            std::fs::write(directory.path().join("t.toml"), config).unwrap();
        };
        std::fs::write(directory.path().join("r.ipfw"), "add allow ip from any to any\n").unwrap();
        write("");
        let mut engine = Engine::start(directory.path());
        let attach = |group: u32| {
            Command::new(&program)
                .args(["inspect", "--queue", "1", "--match", "x", "--verdict", "drop"])
                .env("TOWPATH_SOCKET", directory.path().join("q1.sock"))
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .uid(STRANGER)
                .gid(group)
                .spawn()
                .expect("another user may run programs in TMPDIR")
        };
        let rows = [
            ("", STRANGER, false),
            ("users = [\"64998\", \"64999\"]", 1, true),
            ("users = [\"64998\"]", STRANGER, false),
            // The group has no member in any file: it is the group of the process.
            ("groups = [\"64999\"]", STRANGER, true),
            ("groups = [\"64999\"]", 1, false),
            ("", STRANGER, false),
        ];
        for (users, group, may) in rows {
            write(users);
            engine.reload();
            let mut child = attach(group);
            let attached =
                || engine.control.json("show queues --json")["queues"][0]["inspectors"].as_u64().unwrap();
            if may {
                until(|| attached() == 1);
                child.kill().unwrap();
                child.wait().unwrap();
                until(|| attached() == 0);
            } else {
                assert!(!child.wait().unwrap().success(), "{users}");
                assert_eq!(attached(), 0, "{users}");
            }
        }
        engine.stop();
    });
}

/// UDP flows of a capture, half of them to port 53, half to 123.
const FLOWS: u32 = 100_000;

/// A capture with one packet of each.
fn flows() -> Vec<u8> {
    let mut capture = Vec::new();
    // pcap, microseconds, version 2.4, raw IP.
    for word in [0xa1b2_c3d4, 4 << 16 | 2, 0, 0, 262_144, 101u32] {
        capture.extend(word.to_le_bytes());
    }
    for flow in 0..FLOWS {
        let [_, net, high, low] = flow.to_be_bytes();
        let port = if flow % 2 == 0 { 53 } else { 123 };
        let packet = [
            0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, net, high, low, 10, 99, 0, 2, 4, 0, 0, port, 0, 8,
            0, 0,
        ];
        for word in [1, 0, 28, 28u32] {
            capture.extend(word.to_le_bytes());
        }
        capture.extend(packet);
    }
    capture
}

/// The rules of a reload apply at once, and states are re-checked in the background. An engine that stops meanwhile leaves the rest of
/// the re-check to the next one.
#[towpath_testenv::needs(netns)]
#[test]
fn states_are_rechecked_in_the_background() {
    within(|| {
        veth("wan", "l0");
        veth("lan", "r0");
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let rules = |denied: &str| {
            let rules = format!(
                "add 5 check-state\n{denied}add 20 allow udp from any to any keep-state lifetime 900000\n"
            );
            std::fs::write(path("r.ipfw"), rules).unwrap();
        };
        let replay = |capture: &str, option: &str| {
            let (rules, states) = (path("r.ipfw"), path("states"));
            let output = Command::new(env!("CARGO_BIN_EXE_towpath"))
                .args(["replay", "--json", path(capture).to_str().unwrap()])
                .args(["--rules", rules.to_str().unwrap(), option, states.to_str().unwrap()])
                .output()
                .unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
        };
        let capture = flows();
        std::fs::write(path("empty"), &capture[..24]).unwrap();
        std::fs::write(path("flows"), capture).unwrap();
        let config = "states = \"states\"\nrules = \"r.ipfw\"\n[port.wan]\ndriver = \"af_packet\"\n\
                      [port.lan]\ndriver = \"af_packet\"\n[[bridge]]\nports = [\"wan\", \"lan\"]\n\
                      [control]\nsocket = \"ctl.sock\"\n";
        std::fs::write(path("t.toml"), config).unwrap();
        rules("");
        assert_eq!(replay("flows", "--states-out")["states"]["left"], FLOWS);

        let mut engine = Engine::start(directory.path());
        let stats = |engine: &Engine| engine.control.json("show stats --json")["stats"].clone();
        assert_eq!(
            (&stats(&engine)["states"]["left"], &stats(&engine)["recheck"]["looked"]),
            (&FLOWS.into(), &0.into())
        );
        rules("add 10 deny udp from any to any 53\n");
        engine.reload();
        // However far it is.
        let looked = stats(&engine)["recheck"]["looked"].as_u64().unwrap();
        assert!(looked <= FLOWS.into(), "{looked}");
        let line = engine.log.line("re-checked ");
        assert!(line.contains(&format!("{FLOWS} states: {} dropped", FLOWS / 2)), "{line}");
        let recheck = stats(&engine)["recheck"].clone();
        assert_eq!((&recheck["running"], &recheck["dropped"]), (&false.into(), &(FLOWS / 2).into()));

        // The first rules again, so that no state is dropped. Before that re-check ends: other rules, and the stop.
        rules("");
        engine.reload();
        rules("add 10 deny udp from 10.0.0.0/16 to any\n");
        engine.reload();
        engine.stop();
        let engine = Engine::start(directory.path());
        until(|| stats(&engine)["recheck"]["running"] == false);
        engine.stop();
        let report = replay("empty", "--states-in");
        assert_eq!(report["restored"]["states"], (FLOWS - 65_536) / 2);
    });
}
