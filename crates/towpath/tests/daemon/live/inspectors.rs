//! Inspectors that hang and die under traffic.

use std::collections::{BTreeMap, BTreeSet};
use std::net::UdpSocket;
use std::process::{Child, Command};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::Value;
use towpath_port::netns::{Host, within};

use super::machines::*;
use crate::support::until;

const INSPECTED: &str = "\
add 100 allow layer2 mac-type arp
add 200 inspect 1 udp from any to any 9
add 300 allow ip from any to any
";

/// The port of the server.
const PORT: u16 = 9;

/// Flows from the left machine to the right one. Each datagram has a number.
struct Flows {
    clients: Vec<UdpSocket>,
    server: UdpSocket,
    next: u32,
    received: BTreeSet<u32>,
    /// The last number of each flow, by the port of its client.
    last: BTreeMap<u16, u32>,
    /// Datagrams that arrived after a later one of their flow.
    overtaken: u32,
}

impl Flows {
    fn new(left: &Host, right: &Host) -> Self {
        let server = right.run(|| UdpSocket::bind((RIGHT, PORT)).unwrap());
        server.set_nonblocking(true).unwrap();
        let client = || left.run(|| UdpSocket::bind((LEFT, 0)).unwrap());
        let clients: Vec<_> = (0..32).map(|_| client()).collect();
        clients.iter().for_each(|client| client.connect((RIGHT, PORT)).unwrap());
        Self { clients, server, next: 0, received: BTreeSet::new(), last: BTreeMap::new(), overtaken: 0 }
    }

    /// Sends a datagram in each flow.
    fn send(&mut self) {
        for client in &self.clients {
            client.send(&self.next.to_be_bytes()).unwrap();
            self.next += 1;
        }
    }

    fn receive(&mut self) {
        let mut number = [0; 4];
        while let Ok((_, client)) = self.server.recv_from(&mut number) {
            let number = u32::from_be_bytes(number);
            assert!(self.received.insert(number), "a datagram arrived twice");
            let last = self.last.entry(client.port()).or_default();
            self.overtaken += u32::from(number < *last);
            *last = number.max(*last);
        }
    }

    /// Sends a datagram in each flow. All arrive.
    fn arrive(&mut self) {
        let first = self.next;
        self.send();
        until(|| {
            self.receive();
            self.received.range(first..).count() == self.clients.len()
        });
    }

    /// The server sends a datagram in each flow. All arrive.
    fn reply(&self) {
        for client in &self.clients {
            let address = client.local_addr().unwrap();
            self.server.send_to(b"reply", address).unwrap();
            client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            assert_eq!(client.recv(&mut [0; 8]).unwrap(), 5);
        }
    }

    /// Datagrams that have not arrived.
    fn missing(&mut self) -> u64 {
        self.receive();
        u64::from(self.next) - self.received.len() as u64
    }
}

fn queue(engine: &Engine) -> Value {
    engine.json("show queues --json")["queues"][0].clone()
}

/// The attached inspectors: process ids and published frames.
fn rings(engine: &Engine) -> Vec<(i32, u64)> {
    let rings = engine.json("show rings --json");
    let rings = rings["rings"].as_array().unwrap().iter().filter(|ring| ring["gone"].is_null());
    rings.map(|ring| (ring["pid"].as_i64().unwrap() as i32, ring["published"].as_u64().unwrap())).collect()
}

fn signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

fn inspector(socket: &std::path::Path) -> Child {
    inspector_of("1", socket)
}

fn inspector_of(queue: &str, socket: &std::path::Path) -> Child {
    Command::new(env!("CARGO_BIN_EXE_towpath"))
        .args(["inspect", "--queue", queue, "--match", "nothing-like-this", "--verdict", "drop"])
        .env("TOWPATH_SOCKET", socket)
        .spawn()
        .unwrap()
}

/// An inspector that has attached is stopped: its flows go to the other one, until it answers again.
#[towpath_testenv::needs(netns)]
#[test]
fn a_stopped_inspector_costs_only_the_packets_that_it_holds() {
    within(|| {
        let (left, right) = machines();
        let config = format!("{BRIDGE}[queue.1]\nsocket = \"q1.sock\"\ndeadline = 1\nstall = 1\n");
        let files = files(&config, INSPECTED);
        let engine = Engine::start(files.path());
        let mut inspectors = [(); 2].map(|()| inspector(&files.path().join("q1.sock")));
        until(|| queue(&engine)["inspectors"] == 2);
        let mut flows = Flows::new(&left, &right);
        flows.arrive();
        let (stopped, before) = rings(&engine)[0];
        assert!(before > 0, "it has flows");
        signal(stopped, Signal::STOP);
        until(|| {
            flows.send();
            std::thread::sleep(Duration::from_millis(10));
            flows.receive();
            queue(&engine)["stalled"] == 1
        });
        until(|| queue(&engine)["open"] == 0);
        let held = rings(&engine).iter().find(|(pid, _)| *pid == stopped).unwrap().1 - before;
        let lost = flows.missing();
        assert!(lost > 0 && lost <= held, "{lost} lost, {held} held");
        // All flows go to the other one.
        for _ in 0..10 {
            flows.arrive();
        }
        assert_eq!(flows.missing(), lost);
        let after = queue(&engine);
        assert_eq!((&after["stalls"], &after["lost_by"]["no_inspector"]), (&1.into(), &0.into()), "{after}");
        signal(stopped, Signal::CONT);
        until(|| queue(&engine)["stalled"] == 0);
        let answered = rings(&engine)[0].1;
        flows.arrive();
        assert!(rings(&engine)[0].1 > answered, "it has its flows again");
        assert_eq!(flows.missing(), lost);
        for inspector in &mut inspectors {
            inspector.kill().unwrap();
            inspector.wait().unwrap();
        }
        let said = engine.stop();
        assert!(said.contains(&format!("queue 1: process {stopped} (")), "{said}");
        assert!(said.contains("does not answer: it gets no packets until it does"), "{said}");
        assert!(said.contains("answers again"), "{said}");
    });
}

/// Both inspectors that the engine has started are stopped: they are killed and started again.
#[towpath_testenv::needs(netns)]
#[test]
fn started_inspectors_that_are_stopped_are_replaced() {
    within(|| {
        let (left, right) = machines();
        let config = format!(
            "{BRIDGE}[queue.1]\ncommand = \"towpath inspect --queue 1 --match nothing-like-this --verdict drop\"\n\
             workers = 2\ndeadline = 1\nstall = 1\n"
        );
        let files = files(&config, INSPECTED);
        let engine = Engine::start(files.path());
        let mut flows = Flows::new(&left, &right);
        flows.arrive();
        let before = rings(&engine);
        before.iter().for_each(|(pid, _)| signal(*pid, Signal::STOP));
        until(|| {
            flows.send();
            std::thread::sleep(Duration::from_millis(10));
            flows.receive();
            let now = rings(&engine);
            now.len() == 2 && now.iter().all(|(pid, _)| before.iter().all(|(before, _)| before != pid))
        });
        for _ in 0..10 {
            flows.arrive();
        }
        let said = engine.stop();
        for (pid, _) in before {
            assert!(said.contains(&format!("(process {pid}) is killed: it does not answer")), "{said}");
        }
    });
}

/// Inspectors are killed one after the other while one is on standby. No packet is lost: the packets that an inspector held go to
/// the one on standby.
#[towpath_testenv::needs(netns)]
#[test]
fn kills_in_a_row_lose_nothing_with_an_inspector_on_standby() {
    within(|| {
        let (left, right) = machines();
        let config = format!(
            "{BRIDGE}[queue.1]\ncommand = \"towpath inspect --queue 1 --match nothing-like-this --verdict drop\"\n\
             standby = 1\ndeadline = 60\n"
        );
        let files = files(&config, INSPECTED);
        let engine = Engine::start(files.path());
        let mut flows = Flows::new(&left, &right);
        for kill in 0..6 {
            until(|| queue(&engine)["inspectors"] == 2);
            let before = rings(&engine);
            flows.arrive();
            let after = rings(&engine);
            let busy: Vec<i32> = after
                .iter()
                .zip(&before)
                .filter(|(after, before)| after.1 > before.1)
                .map(|(ring, _)| ring.0)
                .collect();
            assert_eq!((after.len(), busy.len()), (2, 1), "kill {kill}: one is idle");
            flows.send();
            signal(busy[0], Signal::KILL);
            flows.arrive();
            // It may have passed these before it died.
            until(|| queue(&engine)["takeovers"] == kill + 1);
        }
        until(|| flows.missing() == 0);
        let queue = queue(&engine);
        assert_eq!((&queue["lost"], &queue["takeovers"]), (&0.into(), &6.into()), "{queue}");
        engine.stop();
    });
}

/// Chains of two and three inspectors. While one of them is stopped, it gets every packet of a flow, and the others hold none: a flow has
/// the full window of its slowest inspector.
#[towpath_testenv::needs(netns)]
#[test]
fn a_flow_has_the_window_of_the_slowest_inspector_of_a_chain() {
    const PACKETS: u32 = 40;
    for length in [2, 3] {
        within(|| {
            let (left, right) = machines();
            let names: Vec<String> = (1..=length).map(|queue: usize| queue.to_string()).collect();
            let queue = |name: &String| format!("[queue.{name}]\nsocket = \"q{name}.sock\"\ndeadline = 60\n");
            let mut rules = "add 100 allow layer2 mac-type arp\n".to_owned();
            for name in &names {
                let action = if *name == length.to_string() { "inspect" } else { "divert" };
                rules += &format!("add 20{name} {action} {name} udp from any to any 9\n");
            }
            rules += "add 400 allow ip from any to any\n";
            let config = BRIDGE.to_owned() + &names.iter().map(queue).collect::<String>();
            let files = files(&config, &rules);
            let engine = Engine::start(files.path());
            let start = |name: &String| inspector_of(name, &files.path().join(format!("q{name}.sock")));
            let mut inspectors: Vec<Child> = names.iter().map(start).collect();
            let each = |of: &str| -> Vec<u64> {
                let queues = engine.json("show queues --json");
                (0..length).map(|queue| queues["queues"][queue][of].as_u64().unwrap()).collect()
            };
            until(|| each("inspectors") == vec![1; length]);
            let server = right.run(|| UdpSocket::bind((RIGHT, PORT)).unwrap());
            server.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let client = left.run(|| UdpSocket::bind((LEFT, 0)).unwrap());
            client.connect((RIGHT, PORT)).unwrap();
            for slow in 0..length {
                let pid = inspectors[slow].id() as i32;
                signal(pid, Signal::STOP);
                (0..PACKETS).for_each(|number| assert_eq!(client.send(&number.to_be_bytes()).unwrap(), 4));
                let mut held = vec![0; length];
                held[slow] = u64::from(PACKETS);
                until(|| each("open") == held);
                signal(pid, Signal::CONT);
                let mut number = [0; 4];
                for expected in 0..PACKETS {
                    server.recv(&mut number).unwrap();
                    assert_eq!(u32::from_be_bytes(number), expected, "{slow} of {length}");
                }
            }
            assert_eq!(each("passed"), vec![length as u64 * u64::from(PACKETS); length]);
            for inspector in &mut inspectors {
                inspector.kill().unwrap();
                inspector.wait().unwrap();
            }
            engine.stop();
        });
    }
}

/// Rules are reloaded and inspectors are killed while two engine threads, each with a lane of its own, share the flows: all datagrams of a
/// flow arrive in their order, and every flow keeps its state.
#[towpath_testenv::needs(netns)]
#[test]
fn states_and_order_hold_with_two_threads_under_reload_and_kill() {
    within(|| {
        // A thread that changes its CPU between two datagrams can reorder them in the kernel.
        let mut cpu = CpuSet::new();
        let cpus = sched_getaffinity(None).unwrap();
        cpu.set((0..CpuSet::MAX_CPU).find(|cpu| cpus.is_set(*cpu)).unwrap());
        sched_setaffinity(None, &cpu).unwrap();
        let (left, right) = machines();
        let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| cpus.is_set(*cpu)).cycle().take(2).collect();
        let config = format!(
            "{BRIDGE}[engine]\nthreads = 2\ncpus = {cpus:?}\n[queue.1]\n\
             command = \"towpath inspect --queue 1 --match nothing-like-this --verdict drop\"\n\
             standby = 1\ndeadline = 60\n"
        );
        // Only the states pass the replies.
        let rules = |round: usize| {
            let other =
                ["count ip from any to any", "deny tcp from any to any", "allow icmp from any to any"];
            format!(
                "add {} {}\nadd 100 allow layer2 mac-type arp\nadd 200 check-state\n\
                 add 300 inspect 1 udp from any to any 9 recv wan keep-state\nadd 1000 {}\n",
                10 + round,
                other[round % 3],
                other[(round + 1) % 3]
            )
        };
        let files = files(&config, &rules(0));
        let engine = Engine::start(files.path());
        let mut flows = Flows::new(&left, &right);
        let flow_count = flows.clients.len() as u64;
        let kills = 6;
        for round in 1..=kills {
            // Both inspectors have a lane of each thread.
            until(|| rings(&engine).len() == 4);
            let before = rings(&engine);
            flows.arrive();
            let after = rings(&engine);
            let published = |rings: &[(i32, u64)], pid| {
                rings.iter().filter(|ring| ring.0 == pid).map(|ring| ring.1).sum::<u64>()
            };
            let is_busy = |pid: i32| published(&after, pid) > published(&before, pid);
            let busy = after.iter().map(|ring| ring.0).find(|pid| is_busy(*pid)).unwrap();
            let used = |lane: &&(i32, u64)| lane.1 > 0;
            let busy_lanes = after.iter().filter(|lane| lane.0 == busy);
            let idle_lanes = after.iter().filter(|lane| lane.0 != busy);
            assert!(
                (busy_lanes.clone().count(), busy_lanes.filter(used).count()) == (2, 2)
                    && idle_lanes.filter(used).count() == 0,
                "round {round}: {before:?}, {after:?}"
            );
            std::fs::write(files.path().join("r.ipfw"), rules(round)).unwrap();
            flows.send();
            engine.signal(Signal::HUP);
            flows.send();
            signal(busy, Signal::KILL);
            flows.send();
            until(|| {
                flows.send();
                std::thread::sleep(Duration::from_millis(5));
                flows.receive();
                let shown = engine.json("show rules --json");
                shown["rules"][0]["number"] == 10 + round && queue(&engine)["takeovers"] == 2 * round
            });
            flows.arrive();
            flows.reply();
        }
        until(|| flows.missing() == 0 || queue(&engine)["lost"] != 0);
        let queue = queue(&engine);
        assert_eq!((flows.missing(), flows.overtaken, &queue["lost"]), (0, 0, &0.into()), "{queue}");
        let stats = engine.json("show stats --json");
        let states = &stats["stats"]["states"];
        assert_eq!(
            (&states["created"], &states["left"]),
            (&flow_count.into(), &flow_count.into()),
            "{stats}"
        );
        let said = engine.stop();
        assert_eq!(said.matches("reloaded: ").count(), kills, "{said}");
    });
}
