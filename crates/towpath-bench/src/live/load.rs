//! What is sent through a world, and what comes out of it.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::flood::Order;
use super::world::{MIDDLE, World};
use crate::packet::DESTINATION;
use crate::peer::Skipped;
use crate::pin::Cpus;
use crate::side::Side;
use crate::stat::median;

/// What is sent.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Load {
    /// UDP of so many bytes (the IP header counted) in so many flows, as fast as it goes: packets per second that arrive.
    Flood { len: usize, flows: u32 },
    /// The same below what goes: how much of what is sent arrives.
    Paced { len: usize, flows: u32 },
    /// A TCP connection that iperf3 fills: bits per second that arrive.
    Tcp,
    /// A UDP packet of 64 bytes there and back, at a low rate: ns, the median.
    RoundTrip,
}

/// A sixth of a measurement's time goes by before it counts: caches and states are filled.
const WARM: u32 = 6;
/// Parts of a measurement.
const SLICES: u32 = 10;
/// How often the first packet is looked for, and how long the generator goes on beyond what is measured.
const LOOK: Duration = Duration::from_millis(5);
const MARGIN: Duration = Duration::from_millis(100);
/// How long the last packets of a paced flood may take.
const LAST: Duration = Duration::from_secs(1);

impl Load {
    /// The largest packet that its interfaces have to take.
    pub(crate) fn mtu(self) -> usize {
        match self {
            Self::Flood { len, .. } | Self::Paced { len, .. } => len.max(1500),
            Self::Tcp | Self::RoundTrip => 1500,
        }
    }

    /// Puts it through `world`, in the middle of which somebody is at work; of a paced one as fast as it goes.
    pub(crate) fn measure(self, world: &mut World, cpus: Cpus, time: Duration) -> Result<f64> {
        match self {
            Self::Flood { len, flows } | Self::Paced { len, flows } => {
                // Every flow has been seen once.
                let warm = (time / WARM).max(Duration::from_micros(3 * u64::from(flows)));
                flood(world, cpus, (len, flows), warm, time)
            }
            Self::Tcp => tcp(world, cpus, time),
            Self::RoundTrip => {
                let words = |role: &str, home: u32, rest: &[String]| {
                    [&[role.to_owned(), home.to_string()][..], rest].concat()
                };
                let cpu = cpus.engine.to_string();
                let mut echo = Side::start(&words("echo", world.far.pid(), std::slice::from_ref(&cpu)), &[])?;
                echo.line()?;
                let time = time.as_millis().to_string();
                let mut ask = Side::start(&words("ask", world.near.pid(), &[time, cpu]), &[])?;
                let nanos = ask.number()?;
                ask.finish()?;
                if nanos.is_nan() {
                    bail!("no packet came back");
                }
                Ok(nanos)
            }
        }
    }
}

/// Sends for `warm` and then for `time`; the median rate of arrivals in [`SLICES`] parts of that: what else the machine does now and then is
/// in few of them.
fn flood(
    world: &mut World,
    cpus: Cpus,
    (len, flows): (usize, u32),
    warm: Duration,
    time: Duration,
) -> Result<f64> {
    let before = world.arrived()?;
    let mut side = sender(world, cpus, Order { flows, len, time: warm + time + MARGIN, rate: 0 })?;
    let start = Instant::now();
    while world.arrived()? == before {
        if start.elapsed() > warm + time {
            bail!("no packet arrived");
        }
        thread::sleep(LOOK);
    }
    thread::sleep(warm);
    let mut rates = Vec::new();
    let mut last = (Instant::now(), world.arrived()?);
    for _ in 0..SLICES {
        thread::sleep(time / SLICES);
        let next = (Instant::now(), world.arrived()?);
        rates.push((next.1 - last.1) as f64 / (next.0 - last.0).as_secs_f64());
        last = next;
    }
    side.number()?;
    side.finish()?;
    Ok(median(&rates))
}

/// Sends `rate` packets a second: how many were sent, and how many of these arrived.
pub(crate) fn paced(
    world: &mut World,
    cpus: Cpus,
    (len, flows): (usize, u32),
    rate: f64,
    time: Duration,
) -> Result<(u64, u64)> {
    let before = world.arrived()?;
    let mut side = sender(world, cpus, Order { flows, len, time, rate: rate as u64 })?;
    let sent = side.number()? as u64;
    side.finish()?;
    let start = Instant::now();
    loop {
        let arrived = world.arrived()? - before;
        if arrived >= sent || start.elapsed() > LAST {
            return Ok((sent, arrived.min(sent)));
        }
        thread::sleep(LOOK);
    }
}

/// The near end's process that sends.
fn sender(world: &World, cpus: Cpus, order: Order) -> Result<Side> {
    let Order { flows, len, time, rate } = order;
    let home = world.near.pid().to_string();
    let rest = [flows.into(), len as u64, time.as_millis() as u64, rate, cpus.engine as u64];
    let words = ["live-flood".to_owned(), home].into_iter().chain(rest.map(|word| word.to_string()));
    Side::start(&words.collect::<Vec<_>>(), &[])
}

/// What is read of iperf3's report.
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

/// The machine's own congestion control may be BBR, which paces by what it has guessed of the way. Only the machine's first namespace may make
/// cubic the default; a privileged socket may choose it.
const CONGESTION: &str = "cubic";

/// Both ends on the generator's CPU: where the scheduler put them made half of the figure, and was another place in each run.
///
/// One CPU receives for the middle, as a device's queue has one receive all of a connection. Without that the sender's process sends from its CPU,
/// and each acknowledgement that comes has more sent from the middle's; two CPUs forward then, and change the order of what they carry.
/// By how often, a stream had half its rate or all of it.
fn tcp(world: &mut World, cpus: Cpus, time: Duration) -> Result<f64> {
    world.middle.receive_on(MIDDLE[0], cpus.engine)?;
    let within = |home: u32, rest: &[&str]| -> Vec<String> {
        let words = ["within", &home.to_string(), "--", "iperf3"].map(str::to_owned);
        words.into_iter().chain(rest.iter().map(ToString::to_string)).collect()
    };
    let cpu = cpus.engine.to_string();
    let mut server = Side::start(&within(world.far.pid(), &["-s", "-1", "--forceflush", "-A", &cpu]), &[])?;
    if let Err(error) = until(&mut server, "Server listening") {
        return Err(Skipped(format!("the program iperf3 is needed ({error})")).into());
    }
    let seconds = time.as_secs().max(1).to_string();
    let mut client = Side::start(
        &within(
            world.near.pid(),
            &["-c", &DESTINATION.to_string(), "-t", &seconds, "-J", "-A", &cpu, "-C", CONGESTION],
        ),
        &[],
    )?;
    let said = client.rest()?;
    let report: Report = serde_json::from_str(&said).with_context(|| format!("iperf3 said {said}"))?;
    let rate = report.end.sum_received.bits_per_second;
    if rate == 0.0 {
        bail!("no byte arrived");
    }
    Ok(rate)
}

fn until(side: &mut Side, part: &str) -> Result<()> {
    while !side.line()?.contains(part) {}
    Ok(())
}
