//! Load generators for a message server: clients in one thread on one epoll, or one writer per connection.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use hdrhistogram::Histogram;
use rustix::event::epoll::{self, EventData, EventFlags};

use super::{NUMBER, SMALLEST, message, whole};

/// Size of a connection's read buffer in bytes.
const ROOM: usize = 64 << 10;

/// Result of a load.
pub(crate) struct Measured {
    /// Messages per second.
    pub(crate) rate: f64,
    /// Latency of each message, in nanoseconds.
    pub(crate) latency: Histogram<u64>,
}

struct Connection {
    socket: TcpStream,
    /// Received bytes of an incomplete message.
    rest: Vec<u8>,
    held: usize,
    out: Vec<u8>,
}

struct Client {
    epoll: std::os::fd::OwnedFd,
    connections: Vec<Connection>,
}

/// Closed loop: as many clients as connections, each with one outstanding request on a connection drawn by Zipf with this exponent. A
/// popular connection carries several requests. `seed` selects which connections are popular.
pub(crate) fn closed(
    address: SocketAddr,
    connections: usize,
    zipf: f64,
    seed: u64,
    time: Duration,
) -> Result<Measured> {
    let mut client = Client::new(address, connections)?;
    let mut random = Random(0x1234_5678 + seed);
    let mut cumulative: Vec<(f64, usize)> = Vec::new();
    let mut order: Vec<usize> = (0..connections).collect();
    for at in (1..connections).rev() {
        order.swap(at, (random.next() % (at as u64 + 1)) as usize);
    }
    for (rank, connection) in order.into_iter().enumerate() {
        let before = cumulative.last().map_or(0.0, |last| last.0);
        cumulative.push((before + ((rank + 1) as f64).powf(-zipf), connection));
    }
    let all = cumulative[connections - 1].0;
    let mut starts: Vec<Instant> = Vec::new();
    let mut latency = histogram();
    let (mut done, mut idle) = (0u64, connections);
    // The first fifth is warm-up.
    let (begin, mut measured_from) = (Instant::now(), None);
    loop {
        let now = Instant::now();
        if now - begin > time {
            let since: Instant = measured_from.unwrap_or(begin);
            return Ok(Measured { rate: done as f64 / (now - since).as_secs_f64(), latency });
        }
        if measured_from.is_none() && now - begin > time / 5 {
            (measured_from, done) = (Some(now), 0);
            latency.reset();
        }
        for _ in 0..std::mem::take(&mut idle) {
            let at = random.unit() * all;
            let found = cumulative.partition_point(|(upto, _)| *upto <= at).min(connections - 1);
            let connection = &mut client.connections[cumulative[found].1];
            connection.out.extend(message(64, starts.len() as u64, false));
            connection.flush()?;
            starts.push(Instant::now());
        }
        client.poll(Duration::from_millis(50), |_, number| {
            idle += 1;
            done += 1;
            latency.saturating_record(starts[number as usize].elapsed().as_nanos() as u64);
        })?;
    }
}

/// Keeps `outstanding` messages of `length` bytes in flight on each connection.
pub(crate) fn pipelined(
    address: SocketAddr,
    connections: usize,
    length: usize,
    outstanding: usize,
    time: Duration,
) -> Result<Measured> {
    let mut client = Client::new(address, connections)?;
    let one = message(length, 0, false);
    for connection in &mut client.connections {
        connection.out = one.repeat(outstanding);
        connection.flush()?;
    }
    let begin = Instant::now();
    let (mut done, mut measured_from) = (0u64, None);
    loop {
        let now = Instant::now();
        if now - begin > time {
            let since: Instant = measured_from.unwrap_or(begin);
            return Ok(Measured { rate: done as f64 / (now - since).as_secs_f64(), latency: histogram() });
        }
        if measured_from.is_none() && now - begin > time / 5 {
            (measured_from, done) = (Some(now), 0);
        }
        client.poll(Duration::from_millis(50), |connection, _| {
            connection.out.extend_from_slice(&one);
            done += 1;
        })?;
    }
}

/// Open loop: sends `rate` messages per second on random connections, independently of replies. Of a thousand messages, `marked` are marked
/// and take `takes`. The latency excludes `takes` and starts when the message was due.
pub(crate) fn open(
    address: SocketAddr,
    connections: usize,
    rate: f64,
    marked: u64,
    takes: Duration,
    time: Duration,
) -> Result<Measured> {
    let mut client = Client::new(address, connections)?;
    let mut random = Random(0x9876_5432);
    let mut sent: Vec<(Instant, bool)> = Vec::new();
    let mut latency = histogram();
    let begin = Instant::now();
    let mut due = begin;
    let mut done = 0u64;
    while Instant::now() - begin < time + Duration::from_millis(500) {
        let now = Instant::now();
        while due <= now && due - begin < time {
            let mark = random.next() % 1000 < marked;
            let at = (random.next() % connections as u64) as usize;
            let connection = &mut client.connections[at];
            connection.out.extend(message(SMALLEST, sent.len() as u64, mark));
            connection.flush()?;
            sent.push((due, mark));
            // Poisson process: exponential gaps.
            due += Duration::from_secs_f64(-(1.0 - random.unit()).ln() / rate);
        }
        let wait = due.saturating_duration_since(Instant::now()).min(Duration::from_millis(50));
        client.poll(wait, |_, number| {
            let (due, mark) = sent[number as usize];
            let wait = due.elapsed().saturating_sub(if mark { takes } else { Duration::ZERO });
            latency.saturating_record(wait.as_nanos() as u64);
            done += 1;
        })?;
        if done == sent.len() as u64 && due - begin >= time {
            break;
        }
    }
    Ok(Measured { rate: done as f64 / time.as_secs_f64(), latency })
}

/// Messages that a flooding peer keeps outstanding.
const FLOOD: usize = 5000;

/// A light peer: one request at a time, at random times, one per millisecond on average. `flood`: another connection keeps [`FLOOD`]
/// messages outstanding. The latency is that of the light peer.
pub(crate) fn light(address: SocketAddr, flood: bool, time: Duration) -> Result<Measured> {
    let mut socket = TcpStream::connect(address)?;
    socket.set_nodelay(true)?;
    std::thread::scope(|scope| {
        let flood = flood.then(|| scope.spawn(move || pipelined(address, 1, 64, FLOOD, time)));
        let (mut random, mut latency) = (Random(0x2468_1357), histogram());
        let (request, mut reply) = (message(64, 0, false), [0; 64]);
        let (begin, mut done) = (Instant::now(), 0u64);
        while begin.elapsed() < time {
            std::thread::sleep(Duration::from_secs_f64(-(1.0 - random.unit()).ln() / 1000.0));
            let sent = Instant::now();
            socket.write_all(&request)?;
            socket.read_exact(&mut reply)?;
            // The first fifth is warm-up.
            if begin.elapsed() > time / 5 {
                latency.saturating_record(sent.elapsed().as_nanos() as u64);
                done += 1;
            }
        }
        if let Some(flood) = flood {
            flood.join().map_err(|_| anyhow!("the flood panicked"))??;
        }
        Ok(Measured { rate: done as f64 / (time * 4 / 5).as_secs_f64(), latency })
    })
}

/// Writes messages on each connection at full speed. Measures the growth of `count` per second.
pub(crate) fn flood(
    address: SocketAddr,
    connections: usize,
    length: usize,
    time: Duration,
    count: impl Fn() -> u64,
) -> Result<f64> {
    let stop = AtomicBool::new(false);
    let block = message(length, 0, false).repeat(13);
    std::thread::scope(|scope| {
        for _ in 0..connections {
            let mut socket = TcpStream::connect(address)?;
            let (stop, block) = (&stop, &block);
            // Relaxed: a flag that is polled.
            scope.spawn(move || while !stop.load(Ordering::Relaxed) && socket.write_all(block).is_ok() {});
        }
        std::thread::sleep(time / 5);
        let (from, begin) = (count(), Instant::now());
        std::thread::sleep(time - time / 5);
        let rate = (count() - from) as f64 / begin.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        Ok(rate)
    })
}

impl Client {
    fn new(address: SocketAddr, count: usize) -> Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut connections = Vec::new();
        for at in 0..count {
            let socket = TcpStream::connect(address)?;
            socket.set_nonblocking(true)?;
            socket.set_nodelay(true)?;
            epoll::add(&epoll, &socket, EventData::new_u64(at as u64), EventFlags::IN)?;
            connections.push(Connection { socket, rest: vec![0; ROOM], held: 0, out: Vec::new() });
        }
        Ok(Self { epoll, connections })
    }

    /// Reads available data and calls `answered` with the number of each reply.
    fn poll(&mut self, wait: Duration, mut answered: impl FnMut(&mut Connection, u64)) -> Result<()> {
        let mut room = [std::mem::MaybeUninit::<epoll::Event>::uninit(); 32];
        let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
        let (events, _) = match epoll::wait(&self.epoll, &mut room, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => return Ok(()),
            events => events?,
        };
        for event in events.iter() {
            let connection = &mut self.connections[event.data.u64() as usize];
            connection.read()?;
            let rest = std::mem::take(&mut connection.rest);
            let mut at = 0;
            while let Some(length) = whole(&rest[at..connection.held]) {
                let number = rest[at..at + length][NUMBER].try_into().map(u64::from_be_bytes)?;
                answered(connection, number);
                at += length;
            }
            connection.rest = rest;
            connection.rest.copy_within(at..connection.held, 0);
            connection.held -= at;
            connection.flush()?;
        }
        for connection in self.connections.iter_mut().filter(|connection| !connection.out.is_empty()) {
            connection.flush()?;
        }
        Ok(())
    }
}

impl Connection {
    fn read(&mut self) -> Result<()> {
        match self.socket.read(&mut self.rest[self.held..]) {
            Ok(0) => bail!("the server closed a connection"),
            Ok(came) => self.held += came,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        while !self.out.is_empty() {
            match self.socket.write(&self.out) {
                Ok(wrote) => drop(self.out.drain(..wrote)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// xorshift64* (Vigna 2016); the seed gives every server the same load.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    }

    fn unit(&mut self) -> f64 {
        self.next() as f64 / (1u64 << 53) as f64
    }
}

fn histogram() -> Histogram<u64> {
    Histogram::new_with_max(60_000_000_000, 3).expect("three digits up to a minute are possible")
}
