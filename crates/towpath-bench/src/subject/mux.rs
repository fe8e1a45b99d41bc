//! Metrics of the multiplexor: each workload on each server, alternating, in one run.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};

use crate::metric::{Better, Latency, Metric, Quantiles, Report};
use crate::mux::Job;
use crate::mux::client::{self, Measured};
use crate::mux::drain;
use crate::mux::idle;
use crate::mux::server::{Kind, start};
use crate::stat::median;

/// Processing time of a marked message of workload D.
const SLOW: Duration = Duration::from_millis(20);

/// Workloads; the letters are those of the metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Workload {
    AWaits,
    AComputes,
    B,
    C,
    D,
    E,
    Idle,
    Drain,
}

/// A row: a figure of a workload, ours relative to a baseline's.
struct Row {
    name: &'static str,
    workload: Workload,
    ours: Kind,
    peer: Kind,
    unit: &'static str,
    better: Better,
    target: f64,
    figure: fn(&Measured) -> f64,
}

const ROWS: [Row; 19] = {
    use Better::{Higher, Lower};
    const fn row(
        name: &'static str,
        workload: Workload,
        peer: Kind,
        (unit, better, target): (&'static str, Better, f64),
        figure: fn(&Measured) -> f64,
    ) -> Row {
        Row { name, workload, ours: Kind::Towpath, peer, unit, better, target, figure }
    }
    use Kind::{Alone, Central, Oneshot, Pinned, Share};
    use Workload::{AComputes, AWaits, B, C, D, Drain, E, Idle};
    [
        row("A 500 us waits, requests, over pinned", AWaits, Pinned, ("/s", Higher, 1.8), rate),
        row("A 500 us waits, mean latency, over pinned", AWaits, Pinned, ("ns", Lower, 0.56), mean),
        row("A 500 us waits, requests, over oneshot", AWaits, Oneshot, ("/s", Higher, 1.0), rate),
        row("A 500 us waits, requests, over central", AWaits, Central, ("/s", Higher, 1.0), rate),
        row("A 50 us computes, requests, over pinned", AComputes, Pinned, ("/s", Higher, 1.0), rate),
        row("A 50 us computes, mean latency, over pinned", AComputes, Pinned, ("ns", Lower, 1.0), mean),
        row("B 256 B no work, messages, over pinned", B, Pinned, ("/s", Higher, 1.0), rate),
        row("B 256 B no work, messages, over oneshot", B, Oneshot, ("/s", Higher, 1.0), rate),
        row("B 256 B no work, messages, over central", B, Central, ("/s", Higher, 1.0), rate),
        Row {
            ours: Kind::Rings,
            ..row(
                "B 256 B no work, processes on rings over threads",
                B,
                Kind::Towpath,
                ("/s", Higher, 0.7),
                rate,
            )
        },
        row("C 5 kB dropped, messages, over pinned", C, Pinned, ("/s", Higher, 1.0), rate),
        row("D open loop, wait p99, over pinned", D, Pinned, ("ns", Lower, 0.3), p99),
        row("D open loop, wait p50, over pinned", D, Pinned, ("ns", Lower, 1.0), p50),
        row("D open loop, wait p99, over oneshot", D, Oneshot, ("ns", Lower, 1.0), p99),
        row("D open loop, wait p99, over central", D, Central, ("ns", Lower, 1.0), p99),
        row("E light peer beside a flood, p99, over alone", E, Alone, ("ns", Lower, 1.5), p99),
        Row {
            ours: Share,
            ..row(
                "E light peer, flood with in-flight 7 of 8, p99, over alone",
                E,
                Alone,
                ("ns", Lower, 1.5),
                p99,
            )
        },
        row("10,000 idle connections, each, over 2 KiB", Idle, Pinned, ("B", Lower, 1.0), rate),
        row("--drain with a stuck worker, excess, over 100 ms", Drain, Pinned, ("ns", Lower, 1.0), rate),
    ]
};

fn rate(measured: &Measured) -> f64 {
    measured.rate
}

fn mean(measured: &Measured) -> f64 {
    measured.latency.mean()
}

fn p50(measured: &Measured) -> f64 {
    measured.latency.value_at_quantile(0.5) as f64
}

fn p99(measured: &Measured) -> f64 {
    measured.latency.value_at_quantile(0.99) as f64
}

fn measure(workload: Workload, kind: Kind, seed: u64, time: Duration) -> Result<Measured> {
    match workload {
        Workload::AWaits => closed(kind, Job::Wait(Duration::from_micros(500)), seed, time),
        Workload::AComputes => closed(kind, Job::Compute(Duration::from_micros(50)), seed, time),
        Workload::B => client::pipelined(start(kind, 4, Job::Nothing)?.address, 8, 256, 128, time),
        Workload::C => {
            let server = start(kind, 4, Job::Drop)?;
            let count = || server.got.load(Ordering::Relaxed);
            let rate = client::flood(server.address, 8, 5000, time, count)?;
            Ok(Measured { rate, latency: hdrhistogram::Histogram::new(3)? })
        }
        Workload::D => open(kind, 1500.0, time),
        Workload::E => {
            let server = start(kind, 8, Job::Wait(Duration::from_micros(500)))?;
            client::light(server.address, kind != Kind::Alone, time)
        }
        Workload::Idle => {
            let rate = if kind == Kind::Towpath { idle::each()? } else { 2048.0 };
            Ok(Measured { rate, latency: hdrhistogram::Histogram::new(3)? })
        }
        Workload::Drain => {
            let rate = if kind == Kind::Towpath { drain::excess()? } else { 1e8 };
            Ok(Measured { rate, latency: hdrhistogram::Histogram::new(3)? })
        }
    }
}

fn closed(kind: Kind, job: Job, seed: u64, time: Duration) -> Result<Measured> {
    let server = start(kind, 4, job)?;
    client::closed(server.address, 64, 1.1, seed, time)
}

fn open(kind: Kind, rate: f64, time: Duration) -> Result<Measured> {
    let server = start(kind, 8, Job::Marked(SLOW))?;
    client::open(server.address, 8, rate, 20, SLOW, time)
}

/// Measures and prints all rows. Returns true if every metric meets its target.
pub(crate) fn run(json: bool, time: Duration, reps: u32, only: Option<&str>) -> Result<bool> {
    let rows: Vec<&Row> = ROWS.iter().filter(|row| only.is_none_or(|part| row.name.contains(part))).collect();
    if rows.is_empty() {
        let names: Vec<_> = ROWS.iter().map(|row| row.name).collect();
        bail!("no metric's name contains {:?}; available: {}", only.unwrap_or_default(), names.join(", "));
    }
    let (mut report, mut complete) = (Report::new(json), true);
    // Rows of a workload are consecutive.
    for rows in rows.chunk_by(|one, next| one.workload == next.workload) {
        let measured = measure_all(rows, time, reps);
        for row in rows {
            match metric(row, &measured) {
                Ok(metric) => report.push(metric),
                // A failure does not discard the other rows.
                Err(error) => {
                    complete = false;
                    eprintln!("not measured: {}: {error}", row.name);
                }
            }
        }
    }
    Ok(report.finish()? && complete)
}

/// The measurements of each server, or the error.
type All = Vec<(Kind, Result<Vec<Measured>, String>)>;

/// Number of alternations per repetition. Shorter measurements reduce the effect of other load on the ratio.
const TURNS: u32 = 4;

impl Workload {
    /// Returns the number and duration of a server's measurements. High quantiles and queues that fill up need the whole time.
    fn turns(self, reps: u32, time: Duration) -> (u32, Duration) {
        match self {
            Self::AWaits | Self::D | Self::E | Self::Idle | Self::Drain => (reps, time),
            Self::AComputes | Self::B | Self::C => (reps * TURNS, time / TURNS),
        }
    }
}

/// Measures each server of a workload's rows, alternating.
fn measure_all(rows: &[&Row], time: Duration, reps: u32) -> All {
    let mut all: All = Vec::new();
    for kind in rows.iter().flat_map(|row| [row.peer, row.ours]) {
        if all.iter().all(|(other, _)| *other != kind) {
            all.push((kind, Ok(Vec::new())));
        }
    }
    let workload = rows[0].workload;
    let (turns, time) = workload.turns(reps, time);
    for seed in 0..turns.into() {
        for (kind, outcome) in &mut all {
            let Ok(each) = outcome else { continue };
            match measure(workload, *kind, seed, time) {
                Ok(measured) => {
                    if !measured.latency.is_empty() {
                        eprintln!("  {}: {}", kind.name(), quantiles(&measured));
                    }
                    each.push(measured);
                }
                Err(error) => *outcome = Err(format!("{error:#}")),
            }
        }
    }
    all
}

fn metric(row: &Row, all: &All) -> Result<Metric> {
    let of = |kind: Kind| {
        let (_, outcome) = all.iter().find(|(other, _)| *other == kind).context("not measured")?;
        outcome.as_ref().map_err(|error| anyhow!("{}: {error}", kind.name()))
    };
    let (ours, peer) = (of(row.ours)?, of(row.peer)?);
    let figures = |all: &[Measured]| all.iter().map(row.figure).collect::<Vec<_>>();
    let (of_ours, of_peer) = (figures(ours), figures(peer));
    // A ratio per alternation, because the machine's speed changes between them.
    let ratios: Vec<f64> = of_ours.iter().zip(&of_peer).map(|(ours, peer)| ours / peer).collect();
    let (ours_is, peer_is, ratio) = (median(&of_ours), median(&of_peer), median(&ratios));
    let metric = Metric::paired(row.name, ours_is, peer_is, ratio, row.unit, row.better, row.target);
    let latency = latency(ours)?.zip(latency(peer)?).map(|(ours, peer)| Latency { ours, peer });
    Ok(Metric { latency, ..metric })
}

/// The latency over all repetitions, if messages were timed.
fn latency(all: &[Measured]) -> Result<Option<Quantiles>> {
    let mut sum = hdrhistogram::Histogram::<u64>::new(3)?;
    for measured in all {
        sum.add(&measured.latency)?;
    }
    let at = |quantile| sum.value_at_quantile(quantile);
    let quantiles = Quantiles { p50: at(0.5), p90: at(0.9), p99: at(0.99), p999: at(0.999), max: sum.max() };
    Ok((!sum.is_empty()).then_some(quantiles))
}

fn quantiles(measured: &Measured) -> String {
    let at = |quantile| measured.latency.value_at_quantile(quantile) / 1000;
    format!("us: p50 {} p90 {} p99 {} p99.9 {} most {}", at(0.5), at(0.9), at(0.99), at(0.999), at(1.0))
}

/// Plots the 99th percentile of the waiting time of workload D against load, for each server.
pub(crate) fn plot(path: &Path, time: Duration) -> Result<()> {
    const LOADS: [f64; 6] = [250.0, 500.0, 1000.0, 1500.0, 2500.0, 4000.0];
    const COLOURS: [&str; 4] = ["#0b6e4f", "#c1292e", "#235789", "#b7791f"];
    // Range 100 us to 100 ms; a decade has 100 units.
    let y = |nanos: f64| 340.0 - 100.0 * (nanos.max(1e5).log10() - 5.0);
    let x = |load: f64| 70.0 + load / 4000.0 * 480.0;
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 720 400\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"720\" height=\"400\" fill=\"white\"/>\n\
         <text x=\"70\" y=\"22\" font-size=\"14\">99th percentile of waiting, 8 workers, 2% of the messages take 20 ms</text>\n",
    );
    for (decade, label) in [(1e5, "0.1 ms"), (1e6, "1 ms"), (1e7, "10 ms"), (1e8, "100 ms")] {
        let y = y(decade);
        writeln!(
            svg,
            "<path d=\"M70 {y}H550\" stroke=\"#ddd\"/><text x=\"62\" y=\"{}\" text-anchor=\"end\">{label}</text>",
            y + 4.0
        )?;
    }
    for load in LOADS {
        writeln!(svg, "<text x=\"{}\" y=\"360\" text-anchor=\"middle\">{load}</text>", x(load))?;
    }
    writeln!(svg, "<text x=\"310\" y=\"384\" text-anchor=\"middle\">messages per second</text>")?;
    for (kind, colour) in Kind::ALL.into_iter().zip(COLOURS) {
        let mut points = String::new();
        let mut last = 0.0;
        for load in LOADS {
            let wait = p99(&open(kind, load, time)?);
            eprintln!("{} at {load}/s: {:.0} us", kind.name(), wait / 1000.0);
            last = y(wait);
            write!(points, "{:.1},{last:.1} ", x(load))?;
        }
        writeln!(
            svg,
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"
        )?;
        writeln!(svg, "<text x=\"558\" y=\"{:.1}\" fill=\"{colour}\">{}</text>", last + 4.0, kind.name())?;
    }
    svg.push_str("</svg>\n");
    Ok(std::fs::write(path, svg)?)
}
