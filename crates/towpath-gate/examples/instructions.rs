//! Counts the instructions of each stage of a packet's path through the gate with callgrind, and compares them
//! with `instructions.tsv`: `cargo run --release -p towpath-gate --example instructions [--write]`.
//!
//! Each stage runs in a separate process under `valgrind --tool=callgrind`, [`TIMES`] times and twice as often;
//! the difference is the cost of the stage. The counts depend on the compiler and are compared only with those of
//! the same version. An increase of more than 5% is a warning, not a failure. `--write` updates the file.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write;
use std::hint::black_box;
use std::io::ErrorKind;
use std::process::{Command, ExitCode};

use towpath_gate::rules::Ruleset;
use towpath_gate::state::{Ends, Flow, Install, Installed, Lookup, Name, RuleId, Segment, Settings, States};
use towpath_gate::{BURST, Dir, Gate, Ports, Step, Walk};
use towpath_wire::{self as wire, LinkType, Time};

/// A stage: its name, and a function that runs it the given number of times. The difference cancels the setup and
/// teardown of the function.
type Counted = (&'static str, fn(u32));

const STEPS: [Counted; 12] = [
    ("parse", parse),
    ("parse, plain", parse_plain),
    ("lookup hit", |times| peek(times, 0)),
    ("lookup miss", |times| peek(times, FLOWS)),
    ("lookup hit, bursts", peek_bursts),
    ("update", update),
    ("full path, bursts", |times| full_path(times, false)),
    ("full path, bursts, IPv6", |times| full_path(times, true)),
    ("full path behind 20 rules, bursts", passes),
    ("insert", |times| insert(times, false)),
    ("insert, IPv6", |times| insert(times, true)),
    ("insert, with a reader of changes", insert_read),
];

/// The stored counts, with the compiler version in the first line.
const KEPT: &str = include_str!("../instructions.tsv");

/// Increase that is reported.
const MORE: f64 = 1.05;

/// Number of runs of a stage, in whole bursts.
const TIMES: u32 = 125 * BURST as u32;

/// Number of flows with states.
const FLOWS: u32 = 1000;

const NOW: Time = Time::from_secs(1_000_000);

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words[..] {
        [] => count_all(false),
        ["--write"] => count_all(true),
        ["step", name, times] => step(name, times),
        _ => Err("usage: instructions [--write]".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("instructions: {error}");
            ExitCode::FAILURE
        }
    }
}

fn count_all(write: bool) -> Result<(), Box<dyn Error>> {
    match Command::new("valgrind").arg("--version").output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            println!("the program valgrind is not installed: nothing is counted");
            return Ok(());
        }
        version => version?,
    };
    let compiler = compiler()?;
    let (kept_by, kept) = read(KEPT);
    if kept_by != compiler {
        println!("what is kept is by another compiler ({kept_by}): nothing is compared");
    }
    let mut text = format!("# {compiler}\n");
    for (name, _) in STEPS {
        let count = (instructions(name, 2 * TIMES)? - instructions(name, TIMES)?) / f64::from(TIMES);
        writeln!(text, "{name}\t{count:.0}")?;
        let before = kept.get(name).copied().filter(|_| kept_by == compiler);
        let beside = before.map_or("-".to_owned(), |before| format!("{before:.0}"));
        println!("{name:36}{count:8.0}{beside:>8}");
        if before.is_some_and(|before| count > before * MORE) {
            println!(
                "warning: {name}: {count:.0} instructions, more than 5% above the stored count {beside}"
            );
        }
    }
    if write {
        std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/instructions.tsv"), text)?;
    }
    Ok(())
}

/// Returns the number of instructions of a process that runs the stage `times` times.
fn instructions(name: &str, times: u32) -> Result<f64, Box<dyn Error>> {
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(std::env::current_exe()?);
    let output = command.args(["step", name, &times.to_string()]).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("the stage {name:?} fails: {}", said.trim()).into());
    }
    let collected = said.lines().find_map(|line| line.split_once("Collected :"));
    let (_, number) = collected.ok_or_else(|| format!("callgrind counted nothing: {}", said.trim()))?;
    Ok(number.trim().parse()?)
}

fn compiler() -> Result<String, Box<dyn Error>> {
    let output = Command::new("rustc").arg("--version").output()?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn read(text: &str) -> (&str, BTreeMap<&str, f64>) {
    let by = text.lines().next().and_then(|line| line.strip_prefix("# ")).unwrap_or_default();
    let rows = text.lines().filter_map(|line| {
        let (name, count) = line.split_once('\t')?;
        Some((name, count.parse().ok()?))
    });
    (by, rows.collect())
}

/// Runs a stage `times` times, for callgrind.
fn step(name: &str, times: &str) -> Result<(), Box<dyn Error>> {
    let (_, work) = STEPS.iter().find(|(step, _)| *step == name).ok_or("unknown stage")?;
    work(times.parse()?);
    Ok(())
}

fn parse(times: u32) {
    let frame = frame(false, 0);
    (0..times).for_each(|_| _ = black_box(wire::parse(LinkType::ETHERNET, black_box(&frame), FRAME as u32)));
}

fn parse_plain(times: u32) {
    let frame = frame(false, 0);
    (0..times).for_each(|_| _ = black_box(plain(black_box(&frame))));
}

fn peek(times: u32, first: u32) {
    let mut states = states(false);
    for n in 0..times {
        let hit = states.peek(&flow(false, first + n % FLOWS), Lookup::Any, NOW);
        assert_eq!(black_box(hit).is_some(), first == 0);
    }
}

fn peek_bursts(times: u32) {
    let mut states = states(false);
    for n in bursts(times) {
        let mut hits = [None; BURST];
        let flows = (n..n + BURST as u32).map(|n| flow(false, n % FLOWS));
        states.peek_burst(flows, Lookup::Any, NOW, black_box(&mut hits));
    }
}

fn update(times: u32) {
    let mut states = states(false);
    let (_, packet) = plain(&frame(false, 0)).expect("the frames are plain");
    for n in 0..times {
        black_box(states.lookup(&flow(false, n % FLOWS), Lookup::Any, &packet, NOW));
    }
}

#[inline(never)]
fn full_path(times: u32, six: bool) {
    let (mut states, frames) = (states(six), frames(six));
    for n in bursts(times) {
        let mut hits = [None; BURST];
        // A separate closure, here and below, so that it is inlined into its only use.
        let packets =
            burst(&frames, n).iter().map(|frame| wire::plain(LinkType::ETHERNET, frame, FRAME as u32));
        states.lookup_burst(packets, Lookup::Any, NOW, &mut hits);
        assert!(black_box(hits).iter().all(Option::is_some));
    }
}

/// Packets that pass by state, under twenty rules that start with check-state.
fn passes(times: u32) {
    let mut text = "add check-state\n".to_owned();
    (1..=18).for_each(|n| text += &format!("add deny tcp from 10.{n}.0.0/16 to any {n}\n"));
    text += "add allow udp from any to any keep-state\n";
    let rules = Ruleset::parse("counted", &text).ruleset.expect("the rules are right");
    let mut gate = Gate::new(rules, Ports::new(), Settings::default(), 1);
    let (mut walker, frames) = (gate.walker().expect("a gate has a walker"), frames(false));
    for frame in &frames {
        let packet = wire::parse(LinkType::ETHERNET, frame, FRAME as u32).expect("the frames are right");
        assert_eq!(walker.walk(&mut Walk::new(Dir::In, None, None), &packet, NOW), Step::Pass);
    }
    for n in bursts(times) {
        let burst = burst(&frames, n);
        walker.prefetch(None, burst.iter().map(|frame| wire::plain(LinkType::ETHERNET, frame, FRAME as u32)));
        assert!((0..BURST).all(|at| black_box(walker.try_pass(at, NOW)).is_some()));
        walker.expire(NOW, 0);
    }
}

fn insert(times: u32, six: bool) {
    let mut states = states(six);
    (FLOWS..FLOWS + times).for_each(|n| install(&mut states, six, n));
}

fn insert_read(times: u32) {
    let mut states = states(false);
    let _reader = states.journal();
    (FLOWS..FLOWS + times).for_each(|n| install(&mut states, false, n));
}

/// Iterates over the start of each burst.
fn bursts(times: u32) -> impl Iterator<Item = u32> {
    (0..times).step_by(BURST)
}

/// Flow `n`: many clients of few servers.
fn flow(six: bool, n: u32) -> Flow {
    let (client, server, src_port) = (n >> 4, n & 255, 1024 + (n & 0xfff) as u16);
    let ends = if six {
        let net = 0x2001_0db8_u128 << 96;
        Ends::V6((net | u128::from(client)).into(), (net | 1 << 80 | u128::from(server)).into(), 0)
    } else {
        Ends::V4((0x0a00_0000 | client).into(), (0xc000_0200 | server).into())
    };
    Flow { ends, proto: 17, src_port, dst_port: 443, zone: 0 }
}

const FRAME: usize = 64;

/// A UDP packet of flow `n`.
fn frame(six: bool, n: u32) -> [u8; FRAME] {
    let (mut frame, Flow { ends, src_port, dst_port, .. }) = ([0; FRAME], flow(six, n));
    let upper = match ends {
        Ends::V4(src, dst) => {
            frame[12..24].copy_from_slice(&[0x08, 0x00, 0x45, 0, 0, 50, 0, 0, 0, 0, 64, 17]);
            frame[26..30].copy_from_slice(&src.octets());
            frame[30..34].copy_from_slice(&dst.octets());
            34
        }
        Ends::V6(src, dst, _) => {
            frame[12..22].copy_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0, 0, 10, 17, 64]);
            frame[22..38].copy_from_slice(&src.octets());
            frame[38..54].copy_from_slice(&dst.octets());
            54
        }
    };
    frame[upper..upper + 2].copy_from_slice(&src_port.to_be_bytes());
    frame[upper + 2..upper + 4].copy_from_slice(&dst_port.to_be_bytes());
    frame[upper + 5] = (FRAME - upper) as u8;
    frame
}

/// The packets of all flows with states.
fn frames(six: bool) -> Vec<[u8; FRAME]> {
    (0..FLOWS).map(|n| frame(six, n)).collect()
}

/// A burst of them, different each time.
fn burst(frames: &[[u8; FRAME]], n: u32) -> &[[u8; FRAME]] {
    let first = n as usize % (frames.len() - BURST);
    &frames[first..first + BURST]
}

#[inline(always)]
fn plain(frame: &[u8; FRAME]) -> Option<(Flow, Segment)> {
    wire::plain(LinkType::ETHERNET, frame, FRAME as u32)
}

/// A table with states of the first flows.
fn states(six: bool) -> States {
    let mut states = States::new(Settings { dyn_udp_lifetime: 1000, ..Settings::default() }, 1);
    (0..FLOWS).for_each(|n| install(&mut states, six, n));
    states
}

fn install(states: &mut States, six: bool, n: u32) {
    let packet = Segment { bytes: 50, ..Segment::default() };
    let made = states.install(&flow(six, n), Name::DEFAULT, &packet, RuleId(1), &Install::default(), NOW);
    assert_eq!(made, Ok(Installed::New));
}
