//! The same traffic through the engine and through the kernel's forwarding, alternating: throughput and cost.
//!
//! The cost is the busy time of all CPUs (proc_stat(5)), because the work of softirqs cannot be attributed. Other load on the machine
//! distorts it for both paths.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout, set_tcp_congestion};
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket, socket_with};
use serde::Serialize;

use super::network::{DATAGRAMS, ECHO, INSPECTED, KERNEL_SERVER, Network, QUEUE, SERVER, STREAM, Way};
use super::process::Process;
use super::{Failure, Stop, doing};

/// UDP payload of a 64-byte frame.
const PAYLOAD: usize = 64 - 14 - 20 - 8;
/// The kernel's default of segments in a GSO packet (GSO_MAX_SEGS, include/linux/netdevice.h).
const SEGMENTS: u32 = 65_535;
/// Flows of datagrams.
const FLOWS: u16 = 64;
/// Timeout of one send or receive, so that threads notice the end.
const BREATH: Duration = Duration::from_millis(200);
/// How long the machine is observed before the comparison, and the share of busy time below which it is quiet.
const OBSERVED: Duration = Duration::from_millis(300);
const QUIET: f64 = 0.1;
/// Timeout of a connection or an answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// The machine before the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Machine {
    pub(crate) cpus: usize,
    /// Share of the CPUs' time that other work took, 0 to 1.
    pub(crate) busy: f64,
}

impl Machine {
    /// Observes the machine for a moment, while the demo itself is idle.
    pub(super) fn look(stop: &Stop) -> Result<Self, Failure> {
        let cpus = thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let (begun, before) = (Instant::now(), busy_seconds());
        stop.pause(OBSERVED)?;
        let busy = (busy_seconds() - before) / begun.elapsed().as_secs_f64() / cpus as f64;
        Ok(Self { cpus, busy: busy.clamp(0.0, 1.0) })
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quiet = if self.busy < QUIET { "quiet" } else { "NOT quiet" };
        write!(f, "{} CPUs, {:.0}% busy before: {quiet}", self.cpus, self.busy * 100.0)
    }
}

/// One kind of traffic on both paths.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Comparison {
    /// The measured quantity, with its unit.
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) lower_is_better: bool,
    /// Description of the kernel's path.
    pub(crate) kernel_is: &'static str,
    pub(crate) kernel: Figure,
    /// The engine's figures, by port driver.
    pub(crate) ours: Vec<Ours>,
    /// The unit of `cpu`: busy time per this; `None` where that is meaningless.
    pub(crate) cpu_unit: Option<&'static str>,
    /// Measured turns of the kernel's path.
    #[serde(skip)]
    turns: usize,
}

/// The engine's figures.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Ours {
    pub(crate) driver: &'static str,
    #[serde(flatten)]
    pub(crate) figure: Figure,
    /// The engine's value divided by the kernel's.
    pub(crate) ratio: f64,
}

/// A rate or a time, and its CPU cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Figure {
    pub(crate) value: f64,
    pub(crate) cpu: f64,
}

/// The engine's driver and the sequence of turns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turns {
    pub(super) driver: &'static str,
    /// Duration of a turn.
    pub(super) length: Duration,
    /// GSO segments of the streams' sender.
    pub(super) congestion: &'static str,
}

/// Order of turns: 0 is the engine, 1 the kernel. A drift affects both equally.
const ORDER: [usize; 4] = [0, 1, 1, 0];

/// The first available one is used; reno always is. A pacing algorithm such as bbr, perhaps the system's default, would measure its
/// own rate estimate instead of the path.
const CONGESTION: [&str; 2] = ["cubic", "reno"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Traffic {
    Stream,
    /// A stream that the host segments itself, as on a real network: no GSO packet crosses the path.
    CutStream,
    Datagrams,
    Inspected,
    RoundTrips,
}

/// Counters of the server's threads. Relaxed: sampled while they run.
#[derive(Debug, Default)]
pub(super) struct Sinks {
    stream_bytes: AtomicU64,
    datagrams: AtomicU64,
    inspected: AtomicU64,
}

/// Measures all kinds of traffic that are possible here and adds them to `rows`. Calls `progress` after each.
pub(super) fn measure(
    network: &Network,
    stop: &Stop,
    sinks: &Arc<Sinks>,
    turns: Turns,
    rows: &mut Vec<Comparison>,
    mut progress: impl FnMut(&[Comparison]),
) -> Result<(), Failure> {
    for traffic in
        [Traffic::Stream, Traffic::CutStream, Traffic::Datagrams, Traffic::Inspected, Traffic::RoundTrips]
    {
        if traffic == Traffic::Inspected && !network.way.queue {
            continue;
        }
        let _consumer = match traffic {
            Traffic::Inspected => Some(consumer(network, stop)?),
            _ => None,
        };
        let mut figures = [Vec::new(), Vec::new()];
        if traffic == Traffic::CutStream {
            network.segments_at_once(1)?;
        }
        for side in ORDER {
            let to = [SERVER, KERNEL_SERVER][side];
            figures[side].push(sample(network, stop, sinks, traffic, to, turns)?);
        }
        if traffic == Traffic::CutStream {
            network.segments_at_once(SEGMENTS)?;
        }
        let empty = traffic.row(network.way);
        let at = rows.iter().position(|row| row.name == empty.name).unwrap_or(rows.len());
        if at == rows.len() {
            rows.push(empty);
        }
        rows[at].add(turns.driver, &figures[0], &figures[1]);
        progress(rows);
    }
    Ok(())
}

impl Comparison {
    /// Adds a measured turn.
    #[cfg(test)]
    pub(super) fn of(
        name: &'static str,
        unit: &'static str,
        kernel_is: &'static str,
        kernel: Figure,
        ours: Vec<Ours>,
    ) -> Self {
        let (lower_is_better, cpu_unit) = (false, Some("us each"));
        Self { name, unit, lower_is_better, kernel_is, kernel, ours, cpu_unit, turns: 1 }
    }

    fn add(&mut self, driver: &'static str, ours: &[Figure], kernel: &[Figure]) {
        let before = vec![self.kernel; self.turns];
        self.kernel = mean(&[&before, kernel].concat());
        self.turns += kernel.len();
        self.ours.push(Ours { driver, figure: mean(ours), ratio: 0.0 });
        for ours in &mut self.ours {
            ours.ratio = ours.figure.value / self.kernel.value;
        }
    }
}

/// The consumer of the kernel's NFQUEUE.
fn consumer(network: &Network, stop: &Stop) -> Result<Process, Failure> {
    let number = QUEUE.to_string();
    let words = ["demo-part", "queue", &number];
    let mut part = Process::start(&network.kernel, network.files.path(), "demo-part queue", &words)?;
    part.wait_until(stop, |part| part.said().contains("ready"))?;
    Ok(part)
}

fn mean(figures: &[Figure]) -> Figure {
    let count = figures.len() as f64;
    let sum = |of: fn(&Figure) -> f64| figures.iter().map(of).sum::<f64>() / count;
    Figure { value: sum(|figure| figure.value), cpu: sum(|figure| figure.cpu) }
}

impl Traffic {
    fn row(self, way: Way) -> Comparison {
        let forwarding = if way.conntrack { "forwarding, conntrack" } else { "forwarding" };
        let (name, kernel_is, unit, cpu_unit) = match self {
            Self::Stream => ("TCP, one stream, Gbit/s", forwarding, "Gbit/s", Some("s/GB")),
            Self::CutStream => ("TCP, segmented by host, Gbit/s", forwarding, "Gbit/s", Some("s/GB")),
            Self::Datagrams => ("UDP, 64 B, k/s", forwarding, "k/s", Some("us each")),
            Self::Inspected => ("inspected, 64 B, k/s", "NFQUEUE", "k/s", Some("us each")),
            Self::RoundTrips => ("TCP round trip, 64 B, us", forwarding, "us", None),
        };
        let lower_is_better = self == Self::RoundTrips;
        let (kernel, ours) = (Figure::default(), Vec::new());
        Comparison { name, unit, lower_is_better, kernel_is, kernel, ours, cpu_unit, turns: 0 }
    }
}

fn sample(
    network: &Network,
    stop: &Stop,
    sinks: &Arc<Sinks>,
    traffic: Traffic,
    to: Ipv4Addr,
    turns: Turns,
) -> Result<Figure, Failure> {
    let Turns { length: turn, congestion, .. } = turns;
    if traffic == Traffic::RoundTrips {
        let thread = network.outside.start(move || round_trips(to, congestion, turn));
        let median = joined(stop, thread)?.map_err(doing("round trips"))?;
        return Ok(Figure { value: median, cpu: 0.0 });
    }
    let over = Arc::new(AtomicBool::new(false));
    let until = Arc::clone(&over);
    let sender = match traffic {
        Traffic::Stream | Traffic::CutStream => network.outside.start(move || pour(to, congestion, &until)),
        Traffic::Datagrams => network.outside.start(move || spray((to, DATAGRAMS), &until)),
        _ => network.outside.start(move || spray((to, INSPECTED), &until)),
    };
    let count = |sinks: &Sinks| match traffic {
        Traffic::Stream | Traffic::CutStream => sinks.stream_bytes.load(Relaxed),
        Traffic::Datagrams => sinks.datagrams.load(Relaxed),
        _ => sinks.inspected.load(Relaxed),
    };
    let idle = count(sinks);
    // Warm-up: TCP's rate, the engine's states; on a busy machine, until data arrives.
    let moves = |than: u64| stop.until(PATIENCE, || Ok(count(sinks) > than || sender.is_finished()));
    let paused = stop.pause(turn / 4).and_then(|()| moves(idle));
    let (begun, before, busy) = (Instant::now(), count(sinks), busy_seconds());
    let paused = paused.and_then(|moved| {
        stop.pause(turn)?;
        if moved { moves(before) } else { Ok(false) }
    });
    let (seconds, amount, busy) =
        (begun.elapsed().as_secs_f64(), (count(sinks) - before) as f64, busy_seconds() - busy);
    over.store(true, Relaxed);
    paused?;
    joined(stop, sender)?.map_err(doing("the sender"))?;
    // Lets packets in flight arrive, so that they count for no turn.
    stop.pause(turn / 8)?;
    Ok(match traffic {
        Traffic::Stream | Traffic::CutStream => {
            Figure { value: amount * 8e-9 / seconds, cpu: busy / (amount / 1e9) }
        }
        _ => Figure { value: amount * 1e-3 / seconds, cpu: busy * 1e6 / amount },
    })
}

fn joined<R>(stop: &Stop, thread: JoinHandle<R>) -> Result<R, Failure> {
    while !thread.is_finished() {
        stop.pause(Duration::from_millis(5))?;
    }
    thread.join().map_err(|_| Failure::Broken("a sender panicked".into()))
}

/// TCP congestion control of the measurement.
pub(super) fn congestion(network: &Network) -> Result<&'static str, Failure> {
    let found = network.outside.run(|| {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
        io::Result::Ok(CONGESTION.into_iter().find(|name| set_tcp_congestion(&socket, name).is_ok()))
    });
    let found = found.map_err(doing("a socket"))?;
    found.ok_or_else(|| Failure::Broken("the kernel has neither of TCP's cubic and reno".into()))
}

/// Connects with this congestion control set before the handshake: a connection that bbr has paced stays paced.
fn dial(to: Ipv4Addr, port: u16, congestion: &str) -> io::Result<TcpStream> {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_tcp_congestion(&socket, congestion)?;
    // The timeout also bounds connect(2) (socket(7)).
    set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
    connect(&socket, &SocketAddrV4::new(to, port))?;
    Ok(socket.into())
}

/// Sends as fast as TCP permits.
fn pour(to: Ipv4Addr, congestion: &str, over: &AtomicBool) -> io::Result<()> {
    let mut stream = dial(to, STREAM, congestion)?;
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

/// Sends datagrams as fast as one thread can.
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
            // A full queue on the path is part of the measurement.
            let _ = socket.send(&[0x5a; PAYLOAD]);
        }
    }
    Ok(())
}

/// Sends requests one after the other for `length`. Returns the median round trip in microseconds.
fn round_trips(to: Ipv4Addr, congestion: &str, length: Duration) -> io::Result<f64> {
    let mut stream = dial(to, ECHO, congestion)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let (end, mut times, mut bytes) = (Instant::now() + length, Vec::new(), [0x5a; 64]);
    loop {
        let begun = Instant::now();
        stream.write_all(&bytes)?;
        stream.read_exact(&mut bytes)?;
        times.push(begun.elapsed());
        if Instant::now() >= end {
            break;
        }
    }
    times.sort_unstable();
    Ok(times[times.len() / 2].as_secs_f64() * 1e6)
}

/// Starts the receivers. Returns their counters.
pub(super) fn sinks(network: &Network) -> Result<Arc<Sinks>, Failure> {
    let sinks = Arc::new(Sinks::default());
    let serving = Arc::clone(&sinks);
    network.inside.run(move || serve(&serving)).map_err(doing("the sinks"))?;
    Ok(sinks)
}

/// Sinks and an echo server on threads that end with the process.
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
                // An ICMP error does not end the server.
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

/// Busy time of all CPUs since boot (proc_stat(5), first line without idle and iowait).
fn busy_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let fields = stat.lines().next().unwrap_or_default().split_whitespace().skip(1);
    let ticks: u64 = fields
        .take(8)
        .enumerate()
        // Field 3 is idle, 4 iowait.
        .filter(|(index, _)| !(3..5).contains(index))
        .filter_map(|(_, field)| field.parse::<u64>().ok())
        .sum();
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use rustix::net::sockopt::tcp_congestion;

    use super::dial;

    #[test]
    fn a_stream_has_the_congestion_control_that_is_wanted() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        // Every user may select reno; the system's default usually is another one.
        let stream = dial(Ipv4Addr::LOCALHOST, port, "reno").unwrap();
        assert_eq!(tcp_congestion(&stream).unwrap(), "reno");
        assert!(dial(Ipv4Addr::LOCALHOST, port, "no such").is_err());
    }
}
