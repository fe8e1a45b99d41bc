//! Offloaded flows of an engine that is killed.

use std::collections::HashSet;
use std::time::Duration;

use rustix::process::{PidfdFlags, Signal, kill_process, pidfd_open};
use towpath_port::netns::within;

use super::machines::*;
use super::offload::{Flow, entries, offload, offload_machines};
use super::upgrade::{self, Running, TIME};
use crate::support::until;

const RULES: &str = "add 50 allow layer2 mac-type arp\nadd 100 check-state\nadd 200 allow udp from any to any 5001 recv wan keep-state\n";

fn kill(mut engine: Engine) {
    engine.signal(Signal::KILL);
    engine.child.wait().unwrap();
}

/// A flow whose datagrams are numbered: each arrives at most once.
struct Numbered {
    flow: Flow,
    next: u64,
    /// By direction.
    arrived: [HashSet<u64>; 2],
}

impl Numbered {
    fn new(flow: Flow) -> Self {
        Self { flow, next: 0, arrived: Default::default() }
    }

    /// Returns true if a datagram in each direction arrives within `patience`. Earlier ones may be late.
    fn passes(&mut self, patience: Duration) -> bool {
        let [left, right] = [&self.flow.left, &self.flow.right];
        for ((from, to), arrived) in [(left, right), (right, left)].into_iter().zip(&mut self.arrived) {
            self.next += 1;
            to.set_read_timeout(Some(patience)).unwrap();
            from.send(&self.next.to_be_bytes()).unwrap();
            while !arrived.contains(&self.next) {
                let mut got = [0; 8];
                if to.recv(&mut got).is_err() {
                    return false;
                }
                assert!(arrived.insert(u64::from_be_bytes(got)), "a datagram arrived twice");
            }
        }
        true
    }

    /// Many datagrams arrive, one after another. The kernel notices the engine's end after its heartbeat is old, and after the launcher has
    /// closed its copies of the sockets: until then, some are lost.
    fn goes_on(&mut self) {
        for _ in 0..100 {
            until(|| self.passes(SHORT));
        }
    }
}

/// Without an engine, what does not arrive at once does not arrive.
const SHORT: Duration = Duration::from_millis(200);
/// With an engine, a datagram arrives, also if the machine is busy.
const PATIENT: Duration = Duration::from_secs(20);

/// With `fail = "open"`, the kernel forwards the flow until its lifetime ends, and no other one. The next engine takes over; no packet has
/// two paths.
#[towpath_testenv::needs(netns, tcx, bpffs)]
#[test]
fn offloaded_flows_outlive_a_killed_engine() {
    flows_outlive(BRIDGE);
}

pub(super) fn flows_outlive(bridge: &str) {
    within(|| {
        let (left, right) = offload_machines(bridge);
        let config = format!("{bridge}[settings]\ndyn_udp_lifetime = 300\n[offload]\nrules = \"all\"\n");
        let files = files(&config, RULES);
        let engine = Engine::start(files.path());
        let [mut flow, mut other] = [5001, 5002].map(|port| Numbered::new(Flow::new(&left, &right, port)));
        flow.goes_on();
        entries(&engine, 2);
        flow.goes_on();
        assert!(offload(&engine, "forwarded_packets") >= 200);
        kill(engine);
        flow.goes_on();
        assert!(!other.passes(SHORT));
        // An engine begins while the kernel forwards.
        let engine = Engine::start(files.path());
        flow.goes_on();
        entries(&engine, 2);
        engine.stop();
        assert!(!flow.passes(SHORT), "an engine that stops ends its entries");
        let pin = towpath_port::pins::path_of_flows("wan");
        assert!(!pin.exists(), "an engine that stops leaves no file");
        // An engine without offload removes the program.
        kill(Engine::start(files.path()));
        assert!(pin.exists());
        std::fs::write(files.path().join("t.toml"), bridge).unwrap();
        Engine::start(files.path()).stop();
        assert!(!pin.exists());
    });
}

/// After an upgrade with `fail = "open"`, the flows of the new engine go on if it is killed at an `af_xdp` port, whose link it has taken over.
/// At an `af_packet` port they end with it: its program is not pinned. In both cases, no packet is lost or has two paths at the upgrade.
#[towpath_testenv::needs(netns, tcx, bpffs)]
#[test]
fn flows_end_with_a_killed_engine_after_an_upgrade() {
    upgraded(BRIDGE, false);
}

pub(super) fn upgraded(bridge: &str, outlives: bool) {
    within(|| {
        let (left, right) = offload_machines(bridge);
        let files = files("", RULES);
        let directory = files.path();
        let program =
            upgrade::script(directory, "next", &format!("exec {} \"$@\"", env!("CARGO_BIN_EXE_towpath")));
        let config = format!(
            "{bridge}[settings]\ndyn_udp_lifetime = 300\n[offload]\nrules = \"all\"\n\
             [engine]\nupgrade = [\"{program}\"]\n{TIME}\n"
        );
        std::fs::write(directory.join("t.toml"), config).unwrap();
        let mut engine = Running::start(directory);
        let mut flow = Numbered::new(Flow::new(&left, &right, 5001));
        until(|| flow.passes(SHORT) && offload(&engine.first, "entries") == 2);
        engine.upgrade();
        // The state came with the upgrade, and has entries of the new engine.
        until(|| flow.passes(PATIENT) && offload(&engine.first, "entries") == 2);
        let before = offload(&engine.first, "forwarded_packets");
        (0..50).for_each(|_| assert!(flow.passes(PATIENT)));
        assert!(offload(&engine.first, "forwarded_packets") >= before + 100);
        let process = pidfd_open(engine.id(), PidfdFlags::empty()).unwrap();
        kill_process(engine.id(), Signal::KILL).unwrap();
        upgrade::ended(&process);
        if outlives {
            flow.goes_on();
        } else {
            until(|| !flow.passes(SHORT));
            (0..5).for_each(|_| assert!(!flow.passes(SHORT)));
        }
        // The next engine has the packets again.
        let engine = Engine::start(directory);
        flow.goes_on();
        until(|| flow.passes(SHORT) && offload(&engine, "entries") == 2);
        engine.stop();
    });
}

/// The kernel forwards no packet after the lifetime of a flow.
#[towpath_testenv::needs(netns, tcx, bpffs)]
#[test]
fn the_lifetime_of_a_flow_ends_without_an_engine() {
    lifetime_ends(BRIDGE);
}

pub(super) fn lifetime_ends(bridge: &str) {
    within(|| {
        let (left, right) = offload_machines(bridge);
        let config = format!("{bridge}[settings]\ndyn_udp_lifetime = 1\n[offload]\nrules = \"all\"\n");
        let files = files(&config, RULES);
        let engine = Engine::start(files.path());
        let mut flow = Numbered::new(Flow::new(&left, &right, 5001));
        until(|| flow.passes(SHORT) && offload(&engine, "entries") == 2);
        kill(engine);
        until(|| {
            std::thread::sleep(Duration::from_millis(1100));
            !flow.passes(SHORT)
        });
    });
}

/// With `fail = "closed"`, the flow ends with the engine.
#[towpath_testenv::needs(netns, tcx)]
#[test]
fn closed_flows_end_with_a_killed_engine() {
    closed_flows_end(BRIDGE);
}

pub(super) fn closed_flows_end(bridge: &str) {
    within(|| {
        let (left, right) = offload_machines(bridge);
        let files = files(&format!("{bridge}[offload]\nrules = \"all\"\nfail = \"closed\"\n"), RULES);
        let engine = Engine::start(files.path());
        let mut flow = Numbered::new(Flow::new(&left, &right, 5001));
        flow.goes_on();
        entries(&engine, 2);
        kill(engine);
        until(|| !flow.passes(SHORT));
        for _ in 0..5 {
            assert!(!flow.passes(SHORT));
        }
        assert!(!towpath_port::pins::path_of_flows("wan").exists());
    });
}
