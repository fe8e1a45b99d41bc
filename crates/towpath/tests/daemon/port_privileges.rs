//! Privileges that ports need: what the engine keeps, and what the launcher opens.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use towpath_port::netns::{Host, ip, veth, within};
use towpath_port::{Frame, LinkType, Port, af_packet};

use crate::bridged::BRIDGE;
use crate::privileges::{Engine, id, status};
use crate::support::until;

/// An engine with this configuration that became user 1, once its control socket answers.
fn as_user(config: &str) -> Engine {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("t.toml"), format!("{config}[engine]\nuser = \"1\"\n")).unwrap();
    std::fs::write(directory.path().join("r.ipfw"), "add allow ip from any to any\n").unwrap();
    std::fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_towpath"))
        .arg("run")
        .arg(directory.path().join("t.toml"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut engine = Engine::of(directory, child);
    until(|| {
        engine.child.try_wait().unwrap().is_some() || engine.control().ctl("show stats").status.success()
    });
    if engine.child.try_wait().unwrap().is_some() {
        panic!("{config}{:?}", engine.stop());
    }
    engine
}

/// The state of the port `wan`.
fn state(engine: &Engine) -> String {
    let answer = engine.control().json("show ports --json");
    let port = answer["ports"].as_array().unwrap().iter().find(|port| port["name"] == "wan").unwrap().clone();
    port["state"].as_str().unwrap().to_owned()
}

/// The index of the interface `wan` in this thread's network namespace.
fn index() -> Option<u32> {
    let output = Command::new("ip").args(["-o", "link", "show", "dev", "wan"]).output().unwrap();
    String::from_utf8_lossy(&output.stdout).split(':').next()?.parse().ok()
}

/// The launcher opens the ports again for an engine without capabilities.
#[towpath_testenv::needs(netns, xdp, tun)]
#[test]
fn interfaces_come_back_for_an_engine_without_capabilities() {
    for driver in ["af_packet", "af_xdp"] {
        within(|| {
            veth("wan", "l0");
            veth("lan", "r0");
            let engine = as_user(&BRIDGE.replace("af_packet", driver));
            let held = status(engine.child.id())["CapPrm"].clone();
            // CAP_IPC_LOCK where RLIMIT_MEMLOCK cannot be raised.
            let may_hold: &[&str] = match driver {
                "af_xdp" => &["0000000000000000", "0000000000004000"],
                _ => &["0000000000000000"],
            };
            assert!(may_hold.contains(&held.as_str()), "{driver}: {held}");
            assert_eq!(state(&engine), "up", "{driver}");
            ip("link del wan");
            until(|| state(&engine) == "gone");
            veth("wan", "l0");
            until(|| state(&engine) == "up");
            let received = || {
                let answer = engine.control().json("show ports --json");
                let ports = answer["ports"].as_array().unwrap().clone();
                ports.iter().find(|port| port["name"] == "wan").unwrap()["received"].as_u64().unwrap()
            };
            let frames = || {
                let before = received();
                let mut tx = af_packet::Socket::open(af_packet::Config::new("l0")).unwrap();
                until(|| {
                    tx.send(&mut std::iter::once(Frame::new(&[0xff; 60], LinkType::ETHERNET))).unwrap();
                    received() > before
                });
            };
            frames();
            // The same index, of a new interface.
            for _ in 0..2 {
                ip("link del wan");
                ip("link add wan index 77 type veth peer name l0");
                ip("link set wan up");
                ip("link set l0 up");
                frames();
            }
            // Another network namespace and back.
            let other = Host::new();
            ip(&format!("link set wan netns {}", other.tid()));
            until(|| state(&engine) == "gone");
            let home = rustix::thread::gettid().as_raw_nonzero();
            other.run(move || ip(&format!("link set wan netns {home}")));
            ip("link set wan up");
            frames();
            let (code, said) = engine.stop();
            assert_eq!(code, Some(0), "{driver}: {said}");
        });
    }
    within(|| {
        let engine = as_user(&BRIDGE.replace("af_packet", "tap"));
        let before = index();
        assert!(before.is_some());
        ip("link del wan");
        // The launcher creates it again.
        until(|| index().is_some_and(|now| Some(now) != before) && state(&engine) == "up");
        assert_eq!(engine.stop().0, Some(0));
    });
}

/// The capabilities of the unit with a launcher suffice for AF_XDP, also where its LimitMEMLOCK= has no effect. Without both, the
/// error names the limit and the remedy.
#[towpath_testenv::needs(netns, xdp, "setpriv")]
#[test]
fn the_unit_with_a_launcher_starts_af_xdp() {
    let unit = concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib/systemd/towpath-launcher@.service");
    let unit = std::fs::read_to_string(unit).unwrap();
    let values = |key: &str| -> Vec<&str> {
        unit.lines().filter_map(|line| line.strip_prefix(key)).flat_map(str::split_whitespace).collect()
    };
    let bounding: Vec<_> = values("CapabilityBoundingSet=")
        .iter()
        .map(|name| name.strip_prefix("CAP_").unwrap().to_lowercase())
        .map(|name| format!(",+{name}"))
        .collect();
    let bounding = format!("-all{}", bounding.concat());
    assert!(unit.contains("\nLimitMEMLOCK=infinity\n"));
    let without = bounding.replace(",+ipc_lock", "");
    assert_ne!(bounding, without);
    // systemd's DefaultLimitMEMLOCK, in KiB.
    let limit = "8192";
    for (bounding, starts) in [(&bounding, true), (&without, false)] {
        within(|| {
            veth("wan", "l0");
            veth("lan", "r0");
            let directory = tempfile::tempdir().unwrap();
            let config = BRIDGE.replace("af_packet", "af_xdp");
            std::fs::write(directory.path().join("t.toml"), config).unwrap();
            std::fs::write(directory.path().join("r.ipfw"), "add allow ip from any to any\n").unwrap();
            let child = Command::new("sh")
                .args([
                    "-c",
                    "ulimit -l $0 && exec setpriv --inh-caps=-all --bounding-set=\"$@\"",
                    limit,
                    bounding,
                ])
                .args([env!("CARGO_BIN_EXE_towpath"), "run"])
                .arg(directory.path().join("t.toml"))
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let mut engine = Engine::of(directory, child);
            let mut ended = false;
            until(|| {
                ended = engine.child.try_wait().unwrap().is_some();
                ended || engine.control().ctl("show ports").status.success()
            });
            let up = !ended && state(&engine) == "up";
            let (_, said) = engine.stop();
            assert_eq!(up, starts, "{said}");
            let remedy =
                ["RLIMIT_MEMLOCK (8192 KiB", "LimitMEMLOCK=infinity"].iter().all(|word| said.contains(word));
            assert_eq!(remedy, !starts, "{said}");
        });
    }
}

/// CAP_NET_ADMIN, bit 12: the kernel checks it for each verdict.
#[towpath_testenv::needs(netns, nfqueue)]
#[test]
fn an_engine_with_nfqueue_keeps_one_capability() {
    within(|| {
        let config = "rules = \"r.ipfw\"\n[port.nf]\ndriver = \"nfqueue\"\nqueue = 5\n[control]\nsocket = \"ctl.sock\"\n";
        let engine = as_user(config);
        let process = status(engine.child.id());
        assert_eq!((&*process["CapEff"], id(&process, "Uid")), ("0000000000001000", 1));
        ip("link set lo up");
        let filter =
            Command::new("iptables").args("-A OUTPUT -o lo -j NFQUEUE --queue-num 5".split(' ')).status();
        assert!(filter.unwrap().success());
        let one = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let other = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        one.send_to(b"accepted", other.local_addr().unwrap()).unwrap();
        let mut bytes = [0; 16];
        assert_eq!(other.recv(&mut bytes).unwrap(), 8);
        assert_eq!(engine.stop().0, Some(0));
    });
}

/// A port with `fail = "closed"` pins its XDP program. The launcher does that, and takes the place of the program that a killed engine
/// has left.
#[towpath_testenv::needs(netns, xdp, bpffs)]
#[test]
fn the_launcher_pins_the_program_of_a_closed_port() {
    // Pins are of the whole machine. The BPF file system refuses dots.
    let interface = format!("p{}.7", std::process::id());
    let closed = format!("driver = \"af_xdp\"\ninterface = \"{interface}\"\nfail = \"closed\"");
    let config = BRIDGE.replacen("driver = \"af_packet\"", &closed, 1);
    within(|| {
        veth(&interface, "l0");
        veth("lan", "r0");
        let pin = towpath_port::pins::path(&interface);
        let has_program = || {
            let output = Command::new("ip").args(["link", "show", "dev", &interface]).output().unwrap();
            String::from_utf8_lossy(&output.stdout).contains("xdp")
        };
        let mut first = as_user(&config);
        assert_eq!(id(&status(first.child.id()), "Uid"), 1);
        assert_eq!(state(&first), "up");
        assert!(pin.exists() && has_program());
        first.child.kill().unwrap();
        first.child.wait().unwrap();
        assert!(pin.exists() && has_program(), "the interface stays closed");
        let second = as_user(&config);
        let up = state(&second) == "up" && pin.exists() && has_program();
        let (code, said) = second.stop();
        let left = pin.exists() && has_program();
        let _ = std::fs::remove_file(&pin);
        assert_eq!((up, code, left), (true, Some(0), true), "{said}");
        until(|| !has_program());
    });
}
