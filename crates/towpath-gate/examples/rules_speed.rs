//! How long rules take to load, and what a packet costs: `cargo run --release -p towpath-gate --example rules_speed`.

use std::fmt::Write;
use std::hint::black_box;
use std::time::Instant;

use towpath_gate::gate::{Dir, Gate, Ports, Walk, Written};
use towpath_gate::rules::Ruleset;
use towpath_gate::state::Settings;
use towpath_gate::{Packet, Time, wire};

/// A small generator, the same every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// Rules of address and port, of the kinds that firewalls have.
fn rules(count: usize) -> String {
    let mut random = Random(1);
    let mut text = String::new();
    for _ in 0..count {
        let net = |random: &mut Random| {
            let (a, b, c) = (random.below(100), random.below(256), random.below(256));
            let len = [16, 24, 24, 24, 28, 32, 32][random.below(7) as usize];
            format!("{}.{b}.{c}.{}/{len}", a + 10, random.below(256))
        };
        let port = [80, 443, 22, 25, 53, 1024 + random.below(60000)][random.below(6) as usize];
        let proto = ["tcp", "udp"][random.below(2) as usize];
        let action = ["allow", "deny"][random.below(2) as usize];
        let (src, dst) = match random.below(4) {
            0 => ("any".to_owned(), net(&mut random)),
            1 => (net(&mut random), "any".to_owned()),
            _ => (net(&mut random), net(&mut random)),
        };
        let _ = writeln!(text, "add {action} {proto} from {src} to {dst} {port}");
    }
    text
}

fn packets(count: usize) -> Vec<Vec<u8>> {
    let mut random = Random(2);
    let packet = |random: &mut Random| {
        let mut host = || {
            format!(
                "{}.{}.{}.{}",
                random.below(100) + 10,
                random.below(256),
                random.below(256),
                random.below(256)
            )
        };
        let (src, dst) = (host(), host());
        let port = [80, 443, 22, 25, 53, 1024 + random.below(60000)][random.below(6) as usize];
        let proto = ["tcp", "udp"][random.below(2) as usize];
        let text = format!("{proto} {src}:{} > {dst}:{port}", random.below(60000));
        Written::parse(&text).map(|written| written.frame).unwrap_or_default()
    };
    (0..count).map(|_| packet(&mut random)).collect()
}

fn gate(text: &str) -> Gate {
    let ruleset = Ruleset::parse("speed", text).ruleset.unwrap_or_else(|errors| panic!("{}", errors[0]));
    Gate::new(ruleset, Ports::new(), Settings::default(), 1)
}

/// Nanoseconds per packet, parsed before.
fn cost(gate: &mut Gate, packets: &[Packet<'_>], straight: bool) -> f64 {
    let rounds = if straight { 1 } else { 20 };
    let mut best = f64::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        for _ in 0..rounds {
            for packet in packets {
                let mut walk = Walk::new(Dir::In, None, None);
                let now = Time::from_secs(1);
                let step = if straight {
                    gate.walk_straight(&mut walk, packet, now)
                } else {
                    gate.walk(&mut walk, packet, now)
                };
                black_box(step);
            }
        }
        best = best.min(start.elapsed().as_nanos() as f64 / (rounds * packets.len()) as f64);
    }
    best
}

fn main() {
    let frames = packets(4096);
    let parsed: Vec<Packet<'_>> = frames
        .iter()
        .filter_map(|frame| wire::parse(towpath_gate::packet::Link::Ethernet, frame, frame.len() as u32).ok())
        .collect();
    for count in [100, 1_000, 10_000, 100_000] {
        let text = rules(count);
        let start = Instant::now();
        let ruleset = Ruleset::parse("speed", &text).ruleset.unwrap_or_else(|errors| panic!("{}", errors[0]));
        let read = start.elapsed();
        let mut gate = Gate::new(ruleset, Ports::new(), Settings::default(), 1);
        let load = start.elapsed();
        let indexed = cost(&mut gate, &parsed, false);
        let straight = if count <= 1000 { cost(&mut gate, &parsed, true) } else { f64::NAN };
        println!(
            "{count:7} rules: read {read:9.1?}, ready {load:9.1?}, {indexed:7.1} ns a packet, straight {straight:8.1} ns"
        );
    }
    let twenty = "add check-state\n".to_owned()
        + &(0..17)
            .map(|i| format!("add deny tcp from 192.168.{i}.0/24 to any {}\n", 1000 + i))
            .collect::<String>()
        + "add allow ip from any to any keep-state\nadd deny ip from any to any\n";
    for (name, text) in [
        ("20 rules, state hit", twenty.clone()),
        ("20 rules, no state", twenty.replace("add check-state\n", "").replace(" keep-state", "")),
    ] {
        let mut gate = gate(&text);
        for set in [64, 2048] {
            println!(
                "{name}: {:.1} ns a packet ({set} flows), straight {:.1}",
                cost(&mut gate, &parsed[..set], false),
                cost(&mut gate, &parsed[..set], true)
            );
        }
    }
}
