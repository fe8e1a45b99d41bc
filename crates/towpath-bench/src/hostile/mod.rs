//! Hostile and honest peers of a running engine: each mode attacks it in one way.
//!
//! What: for each mode, an engine forwards packets between two ports ([`ports`]). One flow is inspected by an honest inspector, one
//! flow is not inspected, and the attackers' queue gets a third. An honest client asks an honest worker through a mux. A process attacks
//! for some seconds, as another user where this program runs as root.
//!
//! Invariant: the honest parties lose nothing. Every packet arrives once and in order, every message is answered, and packets =
//! passed + dropped + rejected + waiting. `ctl` answers, descriptors and memory of the engine return to their bounds, and the
//! engine stops within its time.

mod attack;
mod canary;
mod engine;
mod honest;
mod pass_on;
mod ports;
mod raw_ring;
mod worker;

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use serde::Serialize;

use crate::side::Side;
use crate::stat::median;
use canary::Canary;
use engine::Engine;
use honest::Honest;

pub(crate) use attack::{Attack, side};
pub(crate) use pass_on::side as pass_on_side;
pub(crate) use ports::{Driver, within};
pub(crate) use worker::side as worker_side;

/// Attack a running engine and check that honest peers lose nothing
///
/// Each mode starts an engine with an honest inspector, an honest client and worker of a mux, and traffic without inspection, and
/// attacks it in one way. The attackers run as user 65534 where this program runs as root. Prints a row per mode: counts, 99th percentiles,
/// their ratios to the mode `busy` (a process that is equally busy and not attached), growth of the engine's memory and descriptors, and
/// the promises that did not hold. Expects the `towpath` binary in the directory of this program. Exits with 0 if every promise held,
/// else with 1; ratios do not affect the exit code.
#[derive(Debug, Parser)]
pub(crate) struct Hostile {
    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// Duration of each attack
    #[arg(long, value_name = "N", default_value = "2", value_parser = crate::long_seconds)]
    seconds: Duration,

    /// Run only these modes, separated by commas
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    modes: Vec<String>,

    /// Repetitions of each mode, each before a run of an equally busy process: the ratios are medians. 0: one run, without ratios
    #[arg(long, value_name = "N", default_value = "1")]
    pairs: u32,

    /// Driver of the engine's ports
    #[arg(long, value_name = "DRIVER", default_value = "pcap")]
    port: Driver,

    /// Engine threads; `pcap` ports have one
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=2))]
    threads: u32,

    /// Lanes of each ring that the attackers attack, at most one for each thread; all by default
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=2))]
    lanes: Option<u32>,
}

/// A way to attack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mode {
    pub(crate) name: &'static str,
    /// The attacker is a user that may attach to its own queue only, where this program runs as root.
    pub(crate) other_user: bool,
    /// Why the mode needs root. Without root it does not run.
    pub(crate) root: Option<&'static str>,
}

/// The engine and the attackers of all modes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Setup {
    /// The driver of the engine's ports.
    pub(crate) driver: Driver,
    /// Engine threads. A ring has a lane for each.
    pub(crate) threads: u32,
    /// Lanes of each ring that the attackers attack, from the first.
    pub(crate) lanes: u32,
}

const fn mode(name: &'static str, other_user: bool) -> Mode {
    Mode { name, other_user, root: None }
}

/// A mode that tests a quota. The quota bounds neither root nor the engine's user, so the attacker is another user.
const fn quota(name: &'static str) -> Mode {
    Mode { name, other_user: true, root: Some("the quota does not bound the engine's user") }
}

/// The mode that does not attack: a process that is busy for a share of the time.
const BUSY: &str = "busy";

/// All modes, in the order in which they run.
pub(crate) const MODES: &[Mode] = &[
    mode(BUSY, true),
    mode("attach", true),
    mode("refusals", true),
    mode("slots", true),
    mode("doorbells", true),
    mode("words", true),
    mode("descriptors", true),
    mode("linger", true),
    mode("slow", true),
    mode("hold-replace", true),
    mode("queues", true),
    mode("may-queue", true),
    mode("punch", true),
    mode("handles", true),
    mode("watchers", true),
    quota(PASS_ON),
    quota(REOPEN),
    mode("log-stops", true),
    mode("control", false),
    mode("control-idle", false),
    mode("control-unread", false),
    mode("trickle", false),
    mode("worker", false),
    mode("worker-late", false),
    mode("worker-linger", false),
    mode("worker-parts", false),
    mode("worker-unread", false),
    mode("worker-empty", false),
];

/// The modes whose attacker collects memory of rings.
const PASS_ON: &str = "pass-on";
const REOPEN: &str = "reopen";

/// Time for descriptors and memory to return to their bounds, and for the last packets to arrive.
const SETTLE: Duration = Duration::from_secs(20);
/// Descriptors above those before the attack: helper threads and a connection of `ctl`.
const DESCRIPTORS: usize = 16;
/// Memory above that before the attack: allocator, histograms, and the rings of one user (`memory` of the attackers' queue).
const MEMORY: u64 = (64 + 64) << 20;
/// Runs of a mode on links at most, if the machine stalled in each and a promise did not hold.
const RUNS: usize = 4;
/// Largest permitted p99, relative to the p99 with the equally busy process.
const TARGET: f64 = 2.0;

/// Result of a mode.
#[derive(Debug, Serialize)]
struct Row {
    mode: &'static str,
    port: Driver,
    threads: u32,
    lanes: u32,
    /// Operations of the attacker.
    attacks: u64,
    /// CPU time of the attacker's processes and of the hostile worker's, per second.
    cpu: f64,
    /// Packets of the inspected flow.
    inspected: u64,
    /// Packets of the uninspected flow.
    uninspected: u64,
    /// Messages of the honest client.
    messages: u64,
    /// Time from the capture to the inspector.
    packet_p99_us: f64,
    /// Time from the client's request to its answer.
    message_p99_us: f64,
    /// `packet_p99_us` divided by its value with the equally busy process. Absent in the rows of these processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    packet_ratio: Option<f64>,
    /// `message_p99_us`, likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    message_ratio: Option<f64>,
    /// Longest stall of a CPU, as a process that is not attached saw it.
    stall_us: u64,
    /// Growth of the engine's memory during the mode.
    memory_kib: i64,
    /// Growth of the number of descriptors. Unknown without root.
    #[serde(skip_serializing_if = "Option::is_none")]
    descriptors: Option<i64>,
    /// Memory of rings that the attacker has collected, in the modes in which it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    collected_kib: Option<u64>,
    /// Promises that did not hold; empty if all held.
    failures: Vec<String>,
}

/// Runs the modes and prints a row for each. Returns true if all promises held.
pub(crate) fn run(args: &Hostile) -> Result<bool> {
    let Hostile { json, seconds: time, modes: only, .. } = args;
    for name in only {
        if !MODES.iter().any(|mode| mode.name == name) {
            let names: Vec<&str> = MODES.iter().map(|mode| mode.name).collect();
            bail!("unknown mode {name:?}; the modes are {}", names.join(", "));
        }
    }
    let setup = Setup { driver: args.port, threads: args.threads, lanes: args.lanes.unwrap_or(args.threads) };
    ensure!(
        setup.driver != Driver::Pcap || setup.threads == 1,
        "`pcap` ports have one thread; use --threads 1, or --port af_packet or af_xdp"
    );
    ensure!(
        setup.lanes <= setup.threads,
        "a ring has a lane for each thread; use --lanes {} or more threads",
        setup.threads
    );
    let chosen = |mode: &&Mode| only.is_empty() || only.iter().any(|name| name == mode.name);
    let mut rows: Vec<Row> = Vec::new();
    for mode in MODES.iter().filter(chosen) {
        if let Some(why) = mode.root.filter(|_| !rustix::process::geteuid().is_root()) {
            eprintln!("{}: not run without root: {why}", mode.name);
            continue;
        }
        let row = match args.pairs {
            pairs if pairs > 0 && mode.name != BUSY => paired(*mode, setup, *time, pairs)?,
            _ => attacked_until_valid(*mode, setup, *time, 1.0)?,
        };
        let text = row.text();
        if *json {
            eprintln!("{text}")
        } else {
            println!("{text}")
        }
        rows.push(row);
    }
    if *json {
        println!("{}", serde_json::to_string_pretty(&rows)?);
    }
    Ok(rows.iter().all(|row| row.failures.is_empty()))
}

/// Runs a mode several times, each time before the equally busy process. Returns the last row, with the medians of the ratios and the
/// failures of all runs.
fn paired(mode: Mode, setup: Setup, time: Duration, pairs: u32) -> Result<Row> {
    let (mut packets, mut messages, mut failures, mut last) = (Vec::new(), Vec::new(), Vec::new(), None);
    for _ in 0..pairs {
        let mut row = attacked_until_valid(mode, setup, time, 0.0)?;
        let busy = attacked_until_valid(self::mode(BUSY, true), setup, time, row.cpu)?;
        packets.push(row.packet_p99_us / busy.packet_p99_us);
        messages.push(row.message_p99_us / busy.message_p99_us);
        failures.append(&mut row.failures);
        failures.extend(busy.failures.iter().map(|failure| format!("{}: {failure}", busy.mode)));
        last = Some(row);
    }
    let (packet_ratio, message_ratio) = (Some(median(&packets)), Some(median(&messages)));
    Ok(Row { packet_ratio, message_ratio, failures, ..last.context("at least one pair")? })
}

/// Runs one mode, again if a CPU stalled and a link lost packets meanwhile.
fn attacked_until_valid(mode: Mode, setup: Setup, time: Duration, share: f64) -> Result<Row> {
    let run = || attacked(mode, setup, time, share).with_context(|| format!("mode {}", mode.name));
    let mut row = run()?;
    for _ in 1..RUNS {
        // Captures lose nothing: the sender waits.
        if row.failures.is_empty() || setup.driver == Driver::Pcap || !row.stalled() {
            break;
        }
        eprintln!("{}: again, because a CPU stalled for {} us: {}", mode.name, row.stall_us, row.text());
        row = run()?;
    }
    Ok(row)
}

impl Row {
    /// Returns true if a CPU stalled for so long that a link may lose packets without an attack.
    fn stalled(&self) -> bool {
        Duration::from_micros(self.stall_us) > canary::LONG
    }

    fn text(&self) -> String {
        let ratio = |ratio: Option<f64>| match ratio {
            Some(ratio) => format!("{ratio:.2}{}", if ratio > TARGET { " (above 2)" } else { "" }),
            None => "-".to_owned(),
        };
        format!(
            "{:<13} {:>9} attacks, CPU {:.2}; {} + {} packets, {} messages; p99 {:.0} us ({}), messages {:.0} us ({}); stall {} us; {:+} KiB, {} descriptors{}: {}",
            self.mode,
            self.attacks,
            self.cpu,
            self.inspected,
            self.uninspected,
            self.messages,
            self.packet_p99_us,
            ratio(self.packet_ratio),
            self.message_p99_us,
            ratio(self.message_ratio),
            self.stall_us,
            self.memory_kib,
            self.descriptors.map_or("?".to_owned(), |count| format!("{count:+}")),
            self.collected_kib.map_or(String::new(), |kib| format!(", {kib} KiB of rings collected")),
            if self.failures.is_empty() { "held".to_owned() } else { self.failures.join("; ") },
        )
    }
}

/// Runs one mode. `share`: the part of the time in which the mode `busy` is busy.
fn attacked(mode: Mode, setup: Setup, time: Duration, share: f64) -> Result<Row> {
    let mut failures = Vec::new();
    let mut engine = Engine::start(setup, mode.name)?;
    let canary = Canary::start();
    let honest = Honest::start(&mut engine)?;
    // States, caches and workers.
    thread::sleep(Duration::from_millis(300));
    let before = (engine.memory()?, engine.descriptors());
    if mode.name == "log-stops" {
        engine.stop_reading();
    }
    let Attacked { attacks, collected, cpu } = attack(mode, setup, time, share, &engine)?;
    if collected > engine::MEMORY << 20 {
        failures.push(format!("the attacker has {} KiB of rings, above its quota", collected >> 10));
    }
    if let Err(error) = engine.conserves() {
        failures.push(format!("ctl: {error:#}"));
    }
    let after = settled(&engine, before)?;
    if after.0 > before.0 + MEMORY {
        failures.push(format!("memory grew by {} KiB", (after.0 - before.0) >> 10));
    }
    if let (Some(before), Some(after)) = (before.1, after.1)
        && after > before + DESCRIPTORS
    {
        failures.push(format!("{before} descriptors became {after}"));
    }
    engine.read_again();
    let counts = honest.finish(SETTLE, &mut failures);
    let stall = canary.finish();
    if let Err(error) = engine.await_packets(counts.sent()) {
        failures.push(format!("ctl: {error:#}"));
    }
    match engine.stop() {
        Ok(report) => {
            if let Err(error) = honest::check_report(&report, &counts) {
                failures.push(format!("report: {error:#}"));
            }
            if setup.driver == Driver::Pcap
                && let Err(error) = honest::check_capture(&engine.output(), &counts)
            {
                failures.push(format!("capture: {error:#}"));
            }
        }
        Err(error) => failures.push(format!("{error:#}")),
    }
    Ok(Row {
        mode: mode.name,
        port: setup.driver,
        threads: setup.threads,
        lanes: setup.lanes,
        attacks,
        cpu,
        inspected: counts.inspected,
        uninspected: counts.uninspected,
        messages: counts.messages,
        packet_p99_us: counts.packet_p99 as f64 / 1e3,
        message_p99_us: counts.message_p99 as f64 / 1e3,
        packet_ratio: None,
        message_ratio: None,
        stall_us: stall.as_micros() as u64,
        memory_kib: (after.0 as i64 - before.0 as i64) >> 10,
        descriptors: before.1.zip(after.1).map(|(before, after)| after as i64 - before as i64),
        collected_kib: (collected > 0).then_some(collected >> 10),
        failures,
    })
}

/// The result of an attacker.
struct Attacked {
    /// Operations.
    attacks: u64,
    /// Bytes of rings that it has collected.
    collected: u64,
    /// CPU time per second, with that of the hostile worker.
    cpu: f64,
}

/// Attacks for `time` from the first operation.
fn attack(mode: Mode, setup: Setup, time: Duration, share: f64, engine: &Engine) -> Result<Attacked> {
    let before = engine.program_ticks();
    let words = [
        "hostile-attack",
        mode.name,
        &engine.directory().to_string_lossy(),
        &engine.hostile_mux,
        &time.as_millis().to_string(),
        if mode.other_user && rustix::process::geteuid().is_root() { "other-user" } else { "same-user" },
        &setup.lanes.to_string(),
        &engine.netns().unwrap_or(0).to_string(),
        &share.to_string(),
    ]
    .map(str::to_owned);
    let mut side = Side::start(&words, &[])?;
    let (attacks, collected) = (side.number()? as u64, side.number()? as u64);
    let programs = engine.program_ticks().saturating_sub(before);
    let ticks = side.number()? + programs as f64;
    let seconds = side.number()? / 1e3;
    let cpu = ticks * attack::TICK.as_secs_f64() / seconds;
    side.finish()?;
    ensure!(attacks > 0, "the attacker did nothing");
    ensure!(collected > 0 || ![PASS_ON, REOPEN].contains(&mode.name), "the attacker got no memory");
    Ok(Attacked { attacks, collected, cpu })
}

/// Waits until memory and descriptors are within their bounds, at most [`SETTLE`].
fn settled(engine: &Engine, before: (u64, Option<usize>)) -> Result<(u64, Option<usize>)> {
    let end = Instant::now() + SETTLE;
    loop {
        let now = (engine.memory()?, engine.descriptors());
        let few = before.1.zip(now.1).is_none_or(|(before, now)| now <= before + DESCRIPTORS);
        if few && now.0 <= before.0 + MEMORY || Instant::now() > end {
            return Ok(now);
        }
        thread::sleep(Duration::from_millis(50));
    }
}

#[cfg(test)]
mod tests {
    use super::{BUSY, MODES};

    #[test]
    fn modes_have_different_names_and_begin_with_the_baseline() {
        let mut names: Vec<&str> = MODES.iter().map(|mode| mode.name).collect();
        assert_eq!(names[0], BUSY);
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), MODES.len());
    }
}
