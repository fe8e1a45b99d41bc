//! Numbered packets on the three paths, and their count at each place.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt};

use super::engine::{BRIDGES, Bridge, DENIED, Engine, FIRST_QUEUE, PATIENCE, PLAIN, SECOND_QUEUE, STATEFUL};
use crate::hostile::within;
use crate::packet::{self, ETHERNET};
use crate::peer::flood::{bind, packet_drops, unbound_socket};

/// Packets of a burst, and the time between two bursts.
const BURST: u64 = 20;
const PAUSE: Duration = Duration::from_millis(10);
/// The shortest and the longest IP packet.
const LENGTHS: (usize, usize) = (64, 1400);
/// Flows with states.
const FLOWS: u32 = 500;
/// Offsets in a frame: destination port; after the UDP header, mark and number.
const PORT: usize = ETHERNET + 22;
const MARK: usize = ETHERNET + 28;
const NUMBER: usize = MARK + 8;
const MARKED: [u8; 8] = *b"soaking!";
/// Receive buffer: seconds of packets.
const RECEIVE_BUFFER: usize = 32 << 20;
/// Time without a packet after which all have arrived.
const QUIET: Duration = Duration::from_secs(1);
/// ETH_P_IP of include/uapi/linux/if_ether.h.
const IPV4: u16 = 0x0800;
/// UDP ports in the order of their packets.
const PORTS: [u16; 8] = [FIRST_QUEUE, PLAIN, SECOND_QUEUE, STATEFUL, PLAIN, DENIED, STATEFUL, PLAIN];

/// The traffic of all paths.
pub(super) struct Traffic {
    stop: Arc<AtomicBool>,
    end: Arc<AtomicBool>,
    flows: Vec<Flow>,
}

struct Flow {
    path: Bridge,
    /// Process whose network namespace has the ends.
    place: u32,
    sent: JoinHandle<Result<u64>>,
    arrived: Arc<AtomicU64>,
    receiver: JoinHandle<Result<Arrived>>,
    drops_before: u64,
}

/// Packets at the ends of a path.
#[derive(Debug, Default)]
pub(super) struct Ends {
    pub(super) driver: &'static str,
    pub(super) ports: [&'static str; 2],
    pub(super) sent: u64,
    pub(super) arrived: u64,
    /// Packets that the receiver's socket or an interface outside of the engine has dropped.
    pub(super) outside: u64,
    /// Packets that are not of the sender.
    pub(super) foreign: u64,
}

#[derive(Debug, Default)]
struct Arrived {
    packets: u64,
    foreign: u64,
    dropped: u64,
}

impl Traffic {
    pub(super) fn start(engine: &Engine) -> Result<Self> {
        let (stop, end) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let mut flows = Vec::new();
        for path in BRIDGES {
            let place = engine.place(&path);
            let socket = within(place, || open(path.ends[1], IPV4))?;
            sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER)?;
            let arrived = Arc::new(AtomicU64::new(0));
            let (over, count) = (Arc::clone(&end), Arc::clone(&arrived));
            let receiver = thread::spawn(move || receive(&socket, &over, &count));
            let socket = within(place, || open(path.ends[0], 0))?;
            let over = Arc::clone(&stop);
            let drops_before = interface_drops(place, &path)?;
            let sent = thread::spawn(move || send_packets(&socket, &over));
            flows.push(Flow { path, place, sent, arrived, receiver, drops_before });
        }
        Ok(Self { stop, end, flows })
    }

    /// Waits until packets have arrived on every path from now on.
    pub(super) fn goes_on(&self) -> Result<()> {
        for flow in &self.flows {
            let before = flow.arrived.load(Ordering::Relaxed);
            let begun = Instant::now();
            while flow.arrived.load(Ordering::Relaxed) < before + 10 {
                ensure!(begun.elapsed() < PATIENCE, "no packet arrives on {} any more", flow.path.driver);
                ensure!(
                    !flow.sent.is_finished() && !flow.receiver.is_finished(),
                    "a thread of {} has ended",
                    flow.path.driver
                );
                thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    /// Stops, and waits until all packets have arrived.
    pub(super) fn finish(mut self) -> Result<Vec<Ends>> {
        self.stop.store(true, Ordering::Relaxed);
        let count = || self.flows.iter().map(|flow| flow.arrived.load(Ordering::Relaxed)).sum::<u64>();
        let (mut last, mut quiet) = (count(), Instant::now());
        while quiet.elapsed() < QUIET {
            thread::sleep(PAUSE);
            let now = count();
            if now != last {
                (last, quiet) = (now, Instant::now());
            }
        }
        self.end.store(true, Ordering::Relaxed);
        let mut ends = Vec::new();
        for Flow { path, place, sent, receiver, drops_before, .. } in std::mem::take(&mut self.flows) {
            let Arrived { packets, foreign, dropped } = joined(receiver)?;
            let outside = dropped + interface_drops(place, &path)? - drops_before;
            let sent = joined(sent)?;
            ends.push(Ends {
                driver: path.driver,
                ports: path.ports,
                sent,
                arrived: packets,
                outside,
                foreign,
            });
        }
        Ok(ends)
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.end.store(true, Ordering::Relaxed);
    }
}

pub(super) fn joined<T>(thread: JoinHandle<Result<T>>) -> Result<T> {
    thread.join().unwrap_or_else(|_| bail!("a thread panicked"))
}

fn open(interface: &str, protocol: u16) -> Result<OwnedFd> {
    let socket = unbound_socket()?;
    bind(&socket, interface, protocol)?;
    Ok(socket)
}

/// Packets that the interfaces of a path's ends have dropped; those of a TAP device are the port's (`rx_full`).
fn interface_drops(place: u32, path: &Bridge) -> Result<u64> {
    if path.driver == "tap" {
        return Ok(0);
    }
    let text = fs::read_to_string(format!("/proc/{place}/net/dev")).context("reading the interfaces")?;
    // The receive columns come first: bytes, packets, errs, drop, fifo, frame, compressed, multicast; then bytes, packets, errs, drop.
    let of = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.trim_start().strip_prefix(name)?.strip_prefix(':'))?;
        let columns: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        Some(columns.get(3)? + columns.get(11)?)
    };
    path.ends.iter().map(|end| of(end).with_context(|| format!("no interface {end}"))).sum()
}

fn send_packets(socket: &OwnedFd, stop: &AtomicBool) -> Result<u64> {
    let mut frames: BTreeMap<usize, Box<[u8]>> = BTreeMap::new();
    let mut number = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..BURST {
            let port = PORTS[(number % PORTS.len() as u64) as usize];
            let span = (LENGTHS.1 - LENGTHS.0) as u64;
            let len = LENGTHS.0 + (number * 97 % span) as usize;
            let frame = frames.entry(len).or_insert_with(|| packet::frame(len));
            let flow =
                if port == STATEFUL { (number % u64::from(FLOWS)) as u32 } else { 1000 + u32::from(port) };
            packet::set_flow(frame, flow);
            frame[PORT..PORT + 2].copy_from_slice(&port.to_be_bytes());
            frame[MARK..NUMBER].copy_from_slice(&MARKED);
            frame[NUMBER..NUMBER + 8].copy_from_slice(&number.to_le_bytes());
            let begun = Instant::now();
            loop {
                match send(socket, frame, SendFlags::DONTWAIT) {
                    Ok(_) => break,
                    Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOBUFS) => {
                        ensure!(begun.elapsed() < PATIENCE, "a packet cannot be sent");
                        thread::sleep(PAUSE);
                    }
                    Err(error) => return Err(error).context("sending a packet"),
                }
            }
            number += 1;
        }
        thread::sleep(PAUSE);
    }
    Ok(number)
}

/// Counts the packets, and checks that those of each UDP port without states, which are one flow, come once and in order.
fn receive(socket: &OwnedFd, end: &AtomicBool, arrived: &AtomicU64) -> Result<Arrived> {
    let mut bytes = [0; 2048];
    let mut next: BTreeMap<u16, u64> = BTreeMap::new();
    let mut all = Arrived::default();
    loop {
        let length = match recv(socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((length, _)) => length,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) if end.load(Ordering::Relaxed) => {
                all.dropped = packet_drops(socket)?;
                return Ok(all);
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {
                thread::sleep(PAUSE);
                continue;
            }
            Err(error) => return Err(error).context("receiving packets"),
        };
        let frame = &bytes[..length];
        if frame.get(MARK..NUMBER) != Some(&MARKED[..]) {
            all.foreign += 1;
            continue;
        }
        let port = u16::from_be_bytes([frame[PORT], frame[PORT + 1]]);
        let number = frame.get(NUMBER..).and_then(<[u8]>::first_chunk).context("a short packet")?;
        let number = u64::from_le_bytes(*number);
        if port != STATEFUL {
            let next = next.entry(port).or_insert(0);
            ensure!(number >= *next, "packet {number} of UDP port {port} came after {}", *next - 1);
            *next = number + 1;
        }
        all.packets += 1;
        arrived.store(all.packets, Ordering::Relaxed);
    }
}
