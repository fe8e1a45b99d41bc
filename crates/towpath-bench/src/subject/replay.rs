//! `towpath replay` with a million packets, using the release binary.
//!
//! The limit takes the place of the peer's figure: one second for the rules alone, two seconds with an inspector process.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use towpath_port::{Frame, LinkType, pcap};

use crate::metric::{Better, Metric, Report};
use crate::packet;
use crate::stat::median;

const PACKETS: u64 = 1_000_000;
const FLOWS: u64 = 2000;
/// Length of the IP packet in an Ethernet frame of 64 bytes.
const LEN: usize = 64 - packet::ETHERNET;
const REPS: usize = 5;

/// The fields read from the report of `towpath replay --json`.
#[derive(Debug, Deserialize)]
struct Counts {
    packets: u64,
    passed: u64,
    states: States,
    queues: Vec<Queue>,
    seconds: f64,
}

#[derive(Debug, Deserialize)]
struct States {
    created: u64,
}

#[derive(Debug, Deserialize)]
struct Queue {
    passed: u64,
}

/// Measures and prints both metrics. Returns true if they meet their targets.
pub(crate) fn run(json: bool) -> Result<bool> {
    let towpath = binary()?;
    let directory = tempfile::tempdir().context("making a temporary directory")?;
    let path = |name: &str| directory.path().join(name);
    let capture = path("flows.pcap");
    write_capture(&capture).context("writing the capture")?;
    let (gate, queue) = (path("gate.ipfw"), path("queue.ipfw"));
    fs::write(&gate, rules("allow")).context("writing the rules")?;
    fs::write(&queue, rules("inspect 1")).context("writing the rules")?;

    let (mut alone, mut inspected) = (Vec::new(), Vec::new());
    for _ in 0..REPS {
        alone.push(replay(&towpath, &capture, &gate, None)?);
        inspected.push(replay(
            &towpath,
            &capture,
            &queue,
            Some("1=towpath inspect --queue 1 --match needle --verdict drop"),
        )?);
    }
    let metrics = [
        metric("replay of 1M x 64 B, 20 rules, keep-state", &alone, 1.0),
        metric("replay of 1M x 64 B, and an inspector", &inspected, 2.0),
    ];
    let mut report = Report::new(json);
    for metric in metrics {
        eprintln!("{}: {:.0} packets/s", metric.name, PACKETS as f64 / metric.ours);
        report.push(metric);
    }
    Ok(report.finish()?)
}

fn metric(name: &str, seconds: &[f64], limit: f64) -> Metric {
    Metric::new(name, median(seconds), limit, "s", Better::Lower, 1.0)
}

/// Path of `towpath`, built to the directory of this program.
pub(crate) fn binary() -> Result<PathBuf> {
    let own = std::env::current_exe().context("finding this program")?;
    let path = own.with_file_name("towpath");
    if !path.is_file() {
        bail!("{} not found: build it with `cargo build --release -p towpath`", path.display());
    }
    Ok(path)
}

/// Runs the replay once, checks its report and returns its seconds.
fn replay(towpath: &Path, capture: &Path, rules: &Path, queue: Option<&str>) -> Result<f64> {
    let mut command = Command::new(towpath);
    command.args(["replay", "--json", "--rules"]).arg(rules).arg(capture);
    if let Some(queue) = queue {
        command.args(["--queue", queue]);
    }
    let output = command.stderr(Stdio::inherit()).output().context("starting towpath replay")?;
    ensure!(output.status.success(), "towpath replay failed ({})", output.status);
    let report: Counts = serde_json::from_slice(&output.stdout).context("reading towpath's report")?;
    ensure!(
        report.packets == PACKETS && report.passed == PACKETS && report.states.created == FLOWS,
        "of {PACKETS} packets of {FLOWS} flows all should have passed, with a state for each flow: {report:?}"
    );
    let inspected: u64 = report.queues.iter().map(|queue| queue.passed).sum();
    ensure!(
        inspected == if queue.is_some() { PACKETS } else { 0 },
        "the inspector did not decide all of {PACKETS} packets: {report:?}"
    );
    Ok(report.seconds)
}

/// Writes UDP packets of 64 bytes, a microsecond apart, with their flows in random order.
fn write_capture(path: &Path) -> Result<()> {
    let mut writer = pcap::Writer::create(path)?;
    let mut frame = packet::frame(LEN);
    let mut random = 1_u64;
    for n in 0..PACKETS {
        // The first packets cover every flow once, so that there are as many states as flows.
        let flow = if n < FLOWS { n } else { random >> 33 } % FLOWS;
        // Knuth's MMIX generator (The Art of Computer Programming, volume 2, 3.3.4).
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        packet::set_flow(&mut frame, flow as u32);
        let time_ns = 1_700_000_000_000_000_000 + n * 1000;
        let (bytes, wire_len) = (&*frame, frame.len() as u32);
        writer.write(
            Frame {
                bytes,
                wire_len,
                time_ns,
                link: LinkType::ETHERNET,
                interface: 0,
                meta: Default::default(),
            },
            None,
        )?;
    }
    Ok(writer.finish()?)
}

/// Nineteen rules that do not match, each for another reason, and a twentieth with keep-state.
fn rules(action: &str) -> String {
    let mut rules = String::from(
        "add deny tcp from any to any 22,23,445
add deny tcp from any to any 135-139
add deny ip from 192.168.0.0/16 to any
add deny ip from any to 192.168.0.0/16
add deny udp from any to any 1900
add deny udp from any to any 5353,5355
add count icmp from any to any icmptypes 8
add deny tcp from any to any setup
add deny tcp from any to any established
add deny ip from any to any frag
add deny ip from any to 127.0.0.0/8
add deny ip from 127.0.0.0/8 to any
add deny ip from any to 224.0.0.0/4 out
add deny udp from 10.128.0.0/9 to any 53
add deny udp from any 53 to any in
add deny { tcp or udp } from any to any 111
add deny ip6 from any to any
add deny udp from 172.16.0.0/12 to 10.0.0.0/8
add deny udp from not 10.0.0.0/8 to any
",
    );
    writeln!(rules, "add {action} udp from any to any 53 in keep-state")
        .expect("writing to a String cannot fail");
    rules
}

#[cfg(test)]
mod tests {
    use super::rules;

    #[test]
    fn rules_are_twenty() {
        assert_eq!(rules("allow").lines().filter(|line| line.starts_with("add ")).count(), 20);
    }
}
