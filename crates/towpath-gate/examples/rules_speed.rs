//! Measures the time to load rules and the cost per packet: `cargo run --release -p towpath-gate --example
//! rules_speed [tables|rules|states]`.

use std::fmt::Write;
use std::hint::black_box;
use std::net::IpAddr;
use std::time::Instant;

use towpath_gate::rules::Ruleset;
use towpath_gate::rules::table::{Key, Table, Value};
use towpath_gate::state::Settings;
use towpath_gate::{Dir, Gate, PacketSpec, Ports, Walk};
use towpath_wire::{self as wire, Packet, Time};

/// A small generator with a constant seed.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// Rules with addresses and ports, as in typical firewalls.
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
        PacketSpec::parse(&text).map(|written| written.frame).unwrap_or_default()
    };
    (0..count).map(|_| packet(&mut random)).collect()
}

fn gate(text: &str) -> Gate {
    let ruleset = Ruleset::parse("speed", text).ruleset.unwrap_or_else(|errors| panic!("{}", errors[0]));
    Gate::new(ruleset, Ports::new(), Settings::default(), 1)
}

/// Returns the nanoseconds per packet, without parsing; with `linear`, of a walk without the index.
fn cost(gate: &mut Gate, packets: &[Packet<'_>], linear: bool) -> f64 {
    let rounds = if linear { 1 } else { 20 };
    let mut best = f64::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        for _ in 0..rounds {
            for packet in packets {
                let mut walk = Walk::new(Dir::In, None, None);
                let now = Time::from_secs(1);
                let step = if linear {
                    gate.walk_linear(&mut walk, packet, now)
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

/// Tables of this many prefixes: time to fill, memory, and nanoseconds per lookup of addresses that are mostly in
/// the table.
fn tables(count: u64) {
    for six in [false, true] {
        let before = resident();
        let mut random = Random(3);
        let mut table = Table::default();
        let mut known = Vec::new();
        let start = Instant::now();
        while (table.len() as u64) < count {
            let bits = u128::from(random.below(1 << 31)) << 33 | u128::from(random.below(1 << 31));
            let (key, ip) = if six {
                let len = [32, 40, 44, 48, 48, 48, 56, 64][random.below(8) as usize];
                // 2000::/3, the allocated part of IPv6.
                let ip = 1u128 << 125 | bits << 61;
                (Key::Net6(ip & !(u128::MAX >> len), len), IpAddr::V6(ip.into()))
            } else {
                let len = [16, 20, 22, 24, 24, 24, 28, 32][random.below(8) as usize];
                let ip = (bits >> 32) as u32;
                let mask = u32::MAX.checked_shl(32 - u32::from(len)).unwrap_or(0);
                (Key::Net4(ip & mask, len), IpAddr::V4(ip.into()))
            };
            if table.add(&key, Value::legacy(random.below(100) as u32)).is_ok() && known.len() < 1 << 20 {
                known.push(ip);
            }
        }
        let filled = start.elapsed();
        let mut random = Random(4);
        let asked: Vec<IpAddr> =
            (0..1 << 20).map(|_| known[random.below(known.len() as u64) as usize]).collect();
        let lookups = |table: &Table| {
            let mut best = f64::MAX;
            for _ in 0..3 {
                let start = Instant::now();
                for ip in &asked {
                    black_box(table.lookup_ip(*ip));
                }
                best = best.min(start.elapsed().as_nanos() as f64 / asked.len() as f64);
            }
            best
        };
        let plain = lookups(&table);
        let start = Instant::now();
        table.settle();
        let settled = start.elapsed();
        let memory = resident().saturating_sub(before) >> 20;
        let fast = lookups(&table);
        // Changes one entry while a copy of the table exists, as in a running engine.
        let key = Key::Net4(0xdfff_ff01, 32);
        let mut changes: Vec<u128> = (0..1000)
            .map(|_| {
                let copy = table.clone();
                let start = Instant::now();
                let mut next = copy.clone();
                next.replace(&key, Value::default()).unwrap_or_default();
                let taken = start.elapsed().as_nanos();
                black_box(next);
                taken
            })
            .collect();
        changes.sort_unstable();
        let family = if six { "IPv6" } else { "IPv4" };
        println!(
            "{count} {family} prefixes: filled {filled:.1?}, settled {settled:.1?}, {memory} MiB, {fast:.1} ns per lookup, \
             {plain:.1} before it was settled, {} ns per change while a copy exists",
            changes[500]
        );
    }
}

/// Returns the resident memory of the process in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    status.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0) * 4096
}

fn main() {
    let only = std::env::args().nth(1);
    let asked = |what: &str| only.as_deref().is_none_or(|only| only == what);
    if asked("tables") {
        [100, 10_000, 1_000_000, 5_000_000].into_iter().for_each(tables);
    }
    let frames = packets(4096);
    let parsed: Vec<Packet<'_>> = frames
        .iter()
        .filter_map(|frame| wire::parse(towpath_wire::LinkType::ETHERNET, frame, frame.len() as u32).ok())
        .collect();
    let counts: &[usize] = if asked("rules") { &[100, 1_000, 10_000, 100_000] } else { &[] };
    for &count in counts {
        let text = rules(count);
        let start = Instant::now();
        let ruleset = Ruleset::parse("speed", &text).ruleset.unwrap_or_else(|errors| panic!("{}", errors[0]));
        let read = start.elapsed();
        let mut gate = Gate::new(ruleset, Ports::new(), Settings::default(), 1);
        let load = start.elapsed();
        let indexed = cost(&mut gate, &parsed, false);
        let linear = if count <= 1000 { cost(&mut gate, &parsed, true) } else { f64::NAN };
        println!(
            "{count:7} rules: read {read:9.1?}, ready {load:9.1?}, {indexed:7.1} ns per packet, {linear:8.1} ns without the index"
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
        if !asked("states") {
            continue;
        }
        let mut gate = gate(&text);
        for set in [64, 2048] {
            println!(
                "{name}: {:.1} ns per packet ({set} flows), {:.1} without the index",
                cost(&mut gate, &parsed[..set], false),
                cost(&mut gate, &parsed[..set], true)
            );
        }
    }
}
