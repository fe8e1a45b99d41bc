//! Traffic sent through a topology, and its measurement.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::flood::Order;
use super::topology::{DUT, Topology};
use crate::packet::DESTINATION;
use crate::peer::Skipped;
use crate::pin::Cpus;
use crate::side::Side;
use crate::stat::median;

/// The traffic.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Load {
    /// UDP packets of `len` bytes (including the IP header) in `flows` flows at full speed; measures received packets per second.
    Flood { len: usize, flows: u32 },
    /// As `Flood`, at rates below full speed ([`paced`]); measures the share of packets received.
    Paced { len: usize, flows: u32 },
    /// One TCP connection, filled by iperf3; measures received bits per second.
    Tcp,
    /// One UDP packet of 64 bytes at a time, at a low rate; measures the median round trip in ns.
    RoundTrip,
}

/// The first sixth of a measurement is discarded: caches and states fill up.
const WARM: u32 = 6;
/// Number of slices of a measurement.
const SLICES: u32 = 10;
/// Interval at which the count of received packets is polled.
const LOOK: Duration = Duration::from_millis(5);
/// Time that the generator runs beyond the measurement.
const MARGIN: Duration = Duration::from_millis(100);
/// Maximum time for the last packets of a paced flood to arrive.
const LAST: Duration = Duration::from_secs(1);

impl Load {
    /// The MTU that the interfaces need.
    pub(crate) fn mtu(self) -> usize {
        match self {
            Self::Flood { len, .. } | Self::Paced { len, .. } => len.max(1500),
            Self::Tcp | Self::RoundTrip => 1500,
        }
    }

    /// Runs this traffic through `topology`, whose device under test has been started. `Paced` runs at full speed here: its caller
    /// derives the rates of [`paced`] from the result.
    pub(crate) fn measure(self, topology: &mut Topology, cpus: Cpus, time: Duration) -> Result<f64> {
        match self {
            Self::Flood { len, flows } | Self::Paced { len, flows } => {
                // Warm-up sends every flow at least once.
                let warm = (time / WARM).max(Duration::from_micros(3 * u64::from(flows)));
                flood(topology, cpus, (len, flows), warm, time)
            }
            Self::Tcp => tcp(topology, cpus, time),
            Self::RoundTrip => {
                let words = |role: &str, netns_pid: u32, rest: &[String]| {
                    [&[role.to_owned(), netns_pid.to_string()][..], rest].concat()
                };
                let cpu = cpus.engine.to_string();
                let mut echo =
                    Side::start(&words("echo", topology.far.pid(), std::slice::from_ref(&cpu)), &[])?;
                echo.line()?;
                let time = time.as_millis().to_string();
                let mut ask = Side::start(&words("ask", topology.near.pid(), &[time, cpu]), &[])?;
                let nanos = ask.number()?;
                ask.finish()?;
                if nanos.is_nan() {
                    bail!("no reply received");
                }
                Ok(nanos)
            }
        }
    }
}

/// Floods for `warm` and then `time`. Returns the median arrival rate of [`SLICES`] slices: short disturbances affect few slices.
fn flood(
    topology: &mut Topology,
    cpus: Cpus,
    (len, flows): (usize, u32),
    warm: Duration,
    time: Duration,
) -> Result<f64> {
    let before = topology.arrived()?;
    let mut side = sender(topology, cpus, Order { flows, len, time: warm + time + MARGIN, rate: 0 })?;
    let start = Instant::now();
    while topology.arrived()? == before {
        if start.elapsed() > warm + time {
            bail!("no packet arrived");
        }
        thread::sleep(LOOK);
    }
    thread::sleep(warm);
    let mut rates = Vec::new();
    let mut last = (Instant::now(), topology.arrived()?);
    for _ in 0..SLICES {
        thread::sleep(time / SLICES);
        let next = (Instant::now(), topology.arrived()?);
        rates.push((next.1 - last.1) as f64 / (next.0 - last.0).as_secs_f64());
        last = next;
    }
    side.number()?;
    side.finish()?;
    Ok(median(&rates))
}

/// Sends `rate` packets per second. Returns the number sent and the number that arrived.
pub(crate) fn paced(
    topology: &mut Topology,
    cpus: Cpus,
    (len, flows): (usize, u32),
    rate: f64,
    time: Duration,
) -> Result<(u64, u64)> {
    let before = topology.arrived()?;
    let mut side = sender(topology, cpus, Order { flows, len, time, rate: rate as u64 })?;
    let sent = side.number()? as u64;
    side.finish()?;
    let start = Instant::now();
    loop {
        let arrived = topology.arrived()? - before;
        if arrived >= sent || start.elapsed() > LAST {
            return Ok((sent, arrived.min(sent)));
        }
        thread::sleep(LOOK);
    }
}

/// CPU time of both CPUs in ns for each packet that is sent, at `rate` packets per second. Includes the sender's.
pub(crate) fn cpu_time(
    topology: &mut Topology,
    cpus: Cpus,
    (len, flows): (usize, u32),
    rate: u64,
    time: Duration,
) -> Result<f64> {
    // Every flow is sent several times, and is decided. The engine takes 14 s to write a million entries.
    let warm = (time / WARM).max(Duration::from_nanos(10_000_000_000 / rate * u64::from(flows)));
    sender(topology, cpus, Order { flows, len, time: warm, rate })?.number()?;
    let (from, before) = (Instant::now(), idle(cpus)?);
    let mut side = sender(topology, cpus, Order { flows, len, time, rate })?;
    let sent = side.number()?;
    let idle = idle(cpus)? - before;
    let busy = (2 * from.elapsed()).saturating_sub(idle);
    side.finish()?;
    Ok(busy.as_nanos() as f64 / sent)
}

/// The time for which the two CPUs have been idle (proc_stat(5)). It is measured where a CPU stops its tick; the times of the other columns
/// are sampled by the tick, which misses work that timers start.
fn idle(cpus: Cpus) -> Result<Duration> {
    let table = std::fs::read_to_string("/proc/stat").context("reading /proc/stat")?;
    let of = |cpu: usize| {
        let name = format!("cpu{cpu} ");
        let line = table.lines().find_map(|line| line.strip_prefix(&name))?;
        let ticks: Vec<u64> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
        // user, nice, system, idle, iowait; in hundredths of a second.
        let [_, _, _, idle, waiting] = ticks.get(..5)? else { return None };
        Some(idle + waiting)
    };
    let ticks = of(cpus.engine).zip(of(cpus.consumer)).context("no such CPU in /proc/stat")?;
    Ok(Duration::from_millis(10) * (ticks.0 + ticks.1) as u32)
}

/// Starts the sending process of the near end.
pub(crate) fn sender(topology: &Topology, cpus: Cpus, order: Order) -> Result<Side> {
    let Order { flows, len, time, rate } = order;
    let netns_pid = topology.near.pid().to_string();
    let rest = [flows.into(), len as u64, time.as_millis() as u64, rate, cpus.engine as u64];
    let words = ["live-flood".to_owned(), netns_pid].into_iter().chain(rest.map(|word| word.to_string()));
    Side::start(&words.collect::<Vec<_>>(), &[])
}

/// The fields read from iperf3's report.
#[derive(Deserialize)]
struct Report {
    end: End,
}

#[derive(Deserialize)]
struct End {
    sum_received: Sum,
}

#[derive(Deserialize)]
struct Sum {
    bits_per_second: f64,
}

/// Congestion control of both ends. The machine's default may be BBR, which paces by estimates of the path. Only the initial namespace
/// may change the default; a privileged socket may select it.
const CONGESTION: &str = "cubic";

/// Runs iperf3. Both of its ends run on the generator's CPU: scheduler placement would otherwise change the result by up to half.
///
/// RPS directs receive processing of the device under test to one CPU, like one receive queue of a device. Otherwise the sender's CPU and
/// the CPU of acknowledgements both forward and reorder packets, and the rate varies between half and full.
fn tcp(topology: &mut Topology, cpus: Cpus, time: Duration) -> Result<f64> {
    topology.dut.receive_on(DUT[0], cpus.engine)?;
    let within = |netns_pid: u32, rest: &[&str]| -> Vec<String> {
        let words = ["within", &netns_pid.to_string(), "--", "iperf3"].map(str::to_owned);
        words.into_iter().chain(rest.iter().map(ToString::to_string)).collect()
    };
    let cpu = cpus.engine.to_string();
    let mut server =
        Side::start(&within(topology.far.pid(), &["-s", "-1", "--forceflush", "-A", &cpu]), &[])?;
    if let Err(error) = until(&mut server, "Server listening") {
        return Err(Skipped(format!("the program iperf3 is needed ({error})")).into());
    }
    let seconds = time.as_secs().max(1).to_string();
    let mut client = Side::start(
        &within(
            topology.near.pid(),
            &["-c", &DESTINATION.to_string(), "-t", &seconds, "-J", "-A", &cpu, "-C", CONGESTION],
        ),
        &[],
    )?;
    let said = client.rest()?;
    let report: Report = serde_json::from_str(&said).with_context(|| format!("iperf3 failed: {said}"))?;
    let rate = report.end.sum_received.bits_per_second;
    if rate == 0.0 {
        bail!("no data arrived");
    }
    Ok(rate)
}

fn until(side: &mut Side, part: &str) -> Result<()> {
    while !side.line()?.contains(part) {}
    Ok(())
}
