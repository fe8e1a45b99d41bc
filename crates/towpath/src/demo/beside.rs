//! The same traffic through the engine and through the kernel's own forwarding, in turns: what arrives, and what it costs.
//!
//! What it costs is the time that all processors together were busy (proc_stat(5)), since nobody can say whose work a softirq did. So
//! other work on the machine spoils it, for both sides.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::network::{DATAGRAMS, ECHO, INSPECTED, KERNEL_SERVER, Network, QUEUE, SERVER, STREAM, Way};
use super::part::Part;
use super::{Failure, Stop, doing};

/// A frame of 64 bytes: what Ethernet, IPv4 and UDP leave of it.
const PAYLOAD: usize = 64 - 14 - 20 - 8;
/// Flows of datagrams.
const FLOWS: u16 = 64;
/// Ours is 0, the kernel's 1: a drift meets both.
const TURNS: [usize; 4] = [0, 1, 1, 0];
/// What an attempt to send or receive waits at most, so that threads hear that it is over.
const BREATH: Duration = Duration::from_millis(200);

/// One kind of traffic, both ways.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Beside {
    /// What is measured.
    pub(crate) name: &'static str,
    /// What the kernel's way was.
    pub(crate) kernel_is: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) ours: f64,
    pub(crate) kernel: f64,
    /// `ours / kernel`.
    pub(crate) ratio: f64,
    pub(crate) lower_is_better: bool,
    /// Time that the machine's processors were busy, for one of these; none where that makes no sense.
    pub(crate) cpu_unit: Option<&'static str>,
    pub(crate) ours_cpu: f64,
    pub(crate) kernel_cpu: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Traffic {
    Stream,
    Datagrams,
    Inspected,
    RoundTrips,
}

/// What the server's threads have counted. Relaxed: they are sampled while they run.
#[derive(Debug, Default)]
struct Sinks {
    stream_bytes: AtomicU64,
    datagrams: AtomicU64,
    inspected: AtomicU64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    value: f64,
    /// Of the machine, for one unit.
    cpu: f64,
}

/// Measures everything that can be measured here; `progress` hears of each row.
pub(super) fn measure(
    network: &Network,
    stop: &Stop,
    turn: Duration,
    mut progress: impl FnMut(&Beside),
) -> Result<Vec<Beside>, Failure> {
    let sinks = Arc::new(Sinks::default());
    let serving = Arc::clone(&sinks);
    network.inside.run(move || serve(&serving)).map_err(doing("the sinks"))?;
    let mut rows = Vec::new();
    if !network.way.forwards {
        return Ok(rows);
    }
    for traffic in [Traffic::Stream, Traffic::Datagrams, Traffic::Inspected, Traffic::RoundTrips] {
        if traffic == Traffic::Inspected && !network.way.queue {
            continue;
        }
        let _consumer = match traffic {
            Traffic::Inspected => Some(consumer(network, stop)?),
            _ => None,
        };
        let mut samples = [Vec::new(), Vec::new()];
        for side in TURNS {
            let to = [SERVER, KERNEL_SERVER][side];
            samples[side].push(sample(network, stop, &sinks, traffic, to, turn)?);
        }
        let row = traffic.row(network.way, mean(&samples[0]), mean(&samples[1]));
        progress(&row);
        rows.push(row);
    }
    Ok(rows)
}

/// Whoever has the kernel's queue.
fn consumer(network: &Network, stop: &Stop) -> Result<Part, Failure> {
    let number = QUEUE.to_string();
    let words = ["demo-part", "queue", &number];
    let mut part = Part::start(&network.kernel, network.files.path(), "demo-part queue", &words)?;
    part.wait_until(stop, |part| part.said().contains("ready"))?;
    Ok(part)
}

fn mean(samples: &[Sample]) -> Sample {
    let count = samples.len() as f64;
    let sum = |of: fn(&Sample) -> f64| samples.iter().map(of).sum::<f64>() / count;
    Sample { value: sum(|sample| sample.value), cpu: sum(|sample| sample.cpu) }
}

impl Traffic {
    fn row(self, way: Way, ours: Sample, kernel: Sample) -> Beside {
        let forwarding = if way.conntrack { "forwarding, conntrack" } else { "forwarding" };
        let (name, kernel_is, unit, cpu_unit) = match self {
            Self::Stream => ("TCP, one stream", forwarding, "Gbit/s", Some("s/GB")),
            Self::Datagrams => ("UDP, frames of 64 B", forwarding, "k/s", Some("us each")),
            Self::Inspected => ("the same, each read by a process", "NFQUEUE", "k/s", Some("us each")),
            Self::RoundTrips => ("TCP round trip of 64 B, median", forwarding, "us", None),
        };
        Beside {
            name,
            kernel_is,
            unit,
            ours: ours.value,
            kernel: kernel.value,
            ratio: ours.value / kernel.value,
            lower_is_better: self == Self::RoundTrips,
            cpu_unit,
            ours_cpu: ours.cpu,
            kernel_cpu: kernel.cpu,
        }
    }
}

fn sample(
    network: &Network,
    stop: &Stop,
    sinks: &Arc<Sinks>,
    traffic: Traffic,
    to: Ipv4Addr,
    turn: Duration,
) -> Result<Sample, Failure> {
    if traffic == Traffic::RoundTrips {
        let thread = network.outside.start(move || round_trips(to, turn));
        let median = joined(stop, thread)?.map_err(doing("round trips"))?;
        return Ok(Sample { value: median, cpu: 0.0 });
    }
    let over = Arc::new(AtomicBool::new(false));
    let until = Arc::clone(&over);
    let sender = match traffic {
        Traffic::Stream => network.outside.start(move || pour(to, &until)),
        Traffic::Datagrams => network.outside.start(move || spray((to, DATAGRAMS), &until)),
        _ => network.outside.start(move || spray((to, INSPECTED), &until)),
    };
    let count = |sinks: &Sinks| match traffic {
        Traffic::Stream => sinks.stream_bytes.load(Relaxed),
        Traffic::Datagrams => sinks.datagrams.load(Relaxed),
        _ => sinks.inspected.load(Relaxed),
    };
    // What TCP needs to find its speed, and the engine to make its states.
    let paused = stop.pause(turn / 4);
    let (begun, before, busy) = (Instant::now(), count(sinks), busy_seconds());
    let paused = paused.and_then(|()| stop.pause(turn));
    let (seconds, amount, busy) =
        (begun.elapsed().as_secs_f64(), (count(sinks) - before) as f64, busy_seconds() - busy);
    over.store(true, Relaxed);
    paused?;
    joined(stop, sender)?.map_err(doing("the sender"))?;
    // What is still on its way belongs to nobody's turn.
    stop.pause(turn / 8)?;
    Ok(match traffic {
        Traffic::Stream => Sample { value: amount * 8e-9 / seconds, cpu: busy / (amount / 1e9) },
        _ => Sample { value: amount * 1e-3 / seconds, cpu: busy * 1e6 / amount },
    })
}

fn joined<R>(stop: &Stop, thread: JoinHandle<R>) -> Result<R, Failure> {
    while !thread.is_finished() {
        stop.pause(Duration::from_millis(5))?;
    }
    thread.join().map_err(|_| Failure::Broken("a sender panicked".into()))
}

/// As fast as TCP takes it.
fn pour(to: Ipv4Addr, over: &AtomicBool) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from((to, STREAM)), Duration::from_secs(3))?;
    stream.set_write_timeout(Some(BREATH))?;
    let bytes = vec![0x5a; 256 << 10];
    while !over.load(Relaxed) {
        match stream.write(&bytes) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// As fast as one thread can.
fn spray(to: (Ipv4Addr, u16), over: &AtomicBool) -> io::Result<()> {
    let sockets: Vec<UdpSocket> = (0..FLOWS)
        .map(|_| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.connect(to)?;
            Ok(socket)
        })
        .collect::<io::Result<_>>()?;
    while !over.load(Relaxed) {
        for socket in &sockets {
            // A full queue on the way is part of what is measured.
            let _ = socket.send(&[0x5a; PAYLOAD]);
        }
    }
    Ok(())
}

/// One after the other for so long; the median in microseconds.
fn round_trips(to: Ipv4Addr, length: Duration) -> io::Result<f64> {
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from((to, ECHO)), Duration::from_secs(3))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(3)))?;
    let (end, mut times, mut bytes) = (Instant::now() + length, Vec::new(), [0x5a; 64]);
    while Instant::now() < end {
        let begun = Instant::now();
        stream.write_all(&bytes)?;
        stream.read_exact(&mut bytes)?;
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    Ok(times.get(times.len() / 2).map_or(f64::NAN, |median| median.as_secs_f64() * 1e6))
}

/// Sinks and an echo, on threads that end with the process.
fn serve(sinks: &Arc<Sinks>) -> io::Result<()> {
    let stream = TcpListener::bind((Ipv4Addr::UNSPECIFIED, STREAM))?;
    let echo = TcpListener::bind((Ipv4Addr::UNSPECIFIED, ECHO))?;
    let sink = Arc::clone(sinks);
    thread::spawn(move || {
        for mut stream in stream.incoming().flatten() {
            let sink = Arc::clone(&sink);
            thread::spawn(move || {
                let mut bytes = vec![0; 256 << 10];
                while let Ok(len @ 1..) = stream.read(&mut bytes) {
                    sink.stream_bytes.fetch_add(len as u64, Relaxed);
                }
            });
        }
    });
    thread::spawn(move || {
        for mut stream in echo.incoming().flatten() {
            let _ = stream.set_nodelay(true);
            thread::spawn(move || {
                let mut bytes = [0; 64];
                while stream.read_exact(&mut bytes).is_ok() && stream.write_all(&bytes).is_ok() {}
            });
        }
    });
    for (port, count) in [(DATAGRAMS, Counted::Plain), (INSPECTED, Counted::Inspected)] {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?;
        let sink = Arc::clone(sinks);
        thread::spawn(move || {
            let mut bytes = [0; 2048];
            loop {
                // An ICMP error is no reason to stop.
                if socket.recv(&mut bytes).is_ok() {
                    sink.count(count).fetch_add(1, Relaxed);
                }
            }
        });
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Counted {
    Plain,
    Inspected,
}

impl Sinks {
    fn count(&self, which: Counted) -> &AtomicU64 {
        match which {
            Counted::Plain => &self.datagrams,
            Counted::Inspected => &self.inspected,
        }
    }
}

/// How long all processors together were busy since the system began (proc_stat(5), the first line without idle and iowait).
fn busy_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let fields = stat.lines().next().unwrap_or_default().split_whitespace().skip(1);
    let ticks: u64 = fields
        .take(8)
        .enumerate()
        // 3 idle, 4 iowait.
        .filter(|(index, _)| !(3..5).contains(index))
        .filter_map(|(_, field)| field.parse::<u64>().ok())
        .sum();
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}
