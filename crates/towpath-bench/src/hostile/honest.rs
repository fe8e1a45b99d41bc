//! The honest parties: traffic, an inspector, and a client of a mux. They count everything that they send and get.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use serde_json::Value;
use towpath_ring::{Consumer, Verdict};

use super::engine::{ATTACKED, Engine, INSPECTED, UNINSPECTED};
use super::ports::{self, Sender};
use crate::packet::{self, ETHERNET};

/// Time between two packets.
const PACE: Duration = Duration::from_millis(1);
/// Time between two messages.
const MESSAGES: Duration = Duration::from_millis(2);
/// Time limit of an answer.
const ANSWER: Duration = Duration::from_secs(20);
/// Time without an arrival after which those that have not arrived are lost.
const SILENCE: Duration = Duration::from_secs(5);
/// Offsets in a frame: destination port; after the UDP header, number and time.
const PORT: usize = ETHERNET + 22;
const NUMBER: usize = ETHERNET + 28;
const TIME: usize = NUMBER + 8;
/// Bytes of an IP packet.
const LEN: usize = 64;
/// Bytes of a message's body.
const BODY: usize = 32;

/// The honest parties, each a thread.
pub(super) struct Honest {
    /// Ends the client.
    stop_client: Arc<AtomicBool>,
    /// Ends the two honest flows, after the client.
    stop: Arc<AtomicBool>,
    sent: Arc<Sent>,
    /// Packets that the inspector received in order.
    received: Arc<AtomicU64>,
    /// Packets that the receiver received in order.
    arrived: Arc<AtomicU64>,
    /// Ends the attackers' flow and the inspector.
    done: Arc<AtomicBool>,
    /// Ends the receiver.
    end: Arc<AtomicBool>,
    traffic: JoinHandle<Result<BTreeMap<u16, u64>>>,
    inspector: JoinHandle<Result<Histogram<u64>>>,
    client: JoinHandle<Result<Histogram<u64>>>,
    /// `None` with captures: [`check_capture`] checks the output file instead.
    receiver: Option<JoinHandle<Result<Flows>>>,
}

/// Packets of the honest flows that were sent so far.
#[derive(Debug, Default)]
struct Sent {
    inspected: AtomicU64,
    uninspected: AtomicU64,
    /// No more follow.
    over: AtomicBool,
}

impl Sent {
    /// Returns true if no more follow, and all have arrived: at the inspector, and at the receiver if there is one.
    fn have_arrived(&self, inspector: u64, receiver: Option<u64>) -> bool {
        // Acquire: the counts are the last ones.
        let over = self.over.load(Ordering::Acquire);
        let [inspected, uninspected] =
            [&self.inspected, &self.uninspected].map(|count| count.load(Ordering::Relaxed));
        over && inspector == inspected && receiver.is_none_or(|count| count == inspected + uninspected)
    }
}

/// Counts and times of the packets and messages of the honest parties.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) inspected: u64,
    pub(super) uninspected: u64,
    /// Packets of the attackers' queue, which may be lost.
    pub(super) attacked: u64,
    pub(super) messages: u64,
    /// 99th percentile of the times from the capture to the inspector, in nanoseconds.
    pub(super) packet_p99: u64,
    /// 99th percentile of the times from a message to its answer, in nanoseconds.
    pub(super) message_p99: u64,
}

impl Counts {
    /// Packets sent to the engine.
    pub(super) fn sent(&self) -> u64 {
        self.inspected + self.uninspected + self.attacked
    }
}

impl Honest {
    pub(super) fn start(engine: &mut Engine) -> Result<Self> {
        let flag = || Arc::new(AtomicBool::new(false));
        let (stop_client, begin, stop, done, end) = (flag(), flag(), flag(), flag(), flag());
        let sent = Arc::new(Sent::default());
        let received = Arc::new(AtomicU64::new(0));
        let arrived = Arc::new(AtomicU64::new(0));
        let epoch = Instant::now();
        let queue = Consumer::attach_as(engine.directory().join("honest.sock"), "honest")?;
        let inspector = {
            let (done, received) = (done.clone(), received.clone());
            thread::spawn(move || inspect(queue, epoch, &done, &received))
        };
        let client = {
            let (stop, address) = (stop_client.clone(), engine.honest_mux.clone());
            let connect = || TcpStream::connect(address).context("connecting to the mux");
            let stream = match engine.netns() {
                None => connect(),
                Some(pid) => ports::within(pid, connect),
            }?;
            thread::spawn(move || ask(stream, &stop))
        };
        let receiver = engine.receiver()?.map(|socket| {
            let (end, arrived) = (end.clone(), arrived.clone());
            thread::spawn(move || receive(&socket, &end, &arrived))
        });
        let sender = engine.sender()?;
        let traffic = {
            let (begin, stop, done, sent) = (begin.clone(), stop.clone(), done.clone(), sent.clone());
            thread::spawn(move || send(sender, epoch, [&begin, &stop, &done], &sent))
        };
        engine.await_inspector()?;
        begin.store(true, Ordering::Relaxed);
        Ok(Self {
            stop_client,
            stop,
            sent,
            received,
            arrived,
            done,
            end,
            traffic,
            inspector,
            client,
            receiver,
        })
    }

    /// Stops the traffic and waits, at most `patience`, until all packets have arrived.
    pub(super) fn finish(self, patience: Duration, failures: &mut Vec<String>) -> Counts {
        let mut counts = Counts::default();
        let mut keep = |what: &str, failed: Result<()>| {
            if let Err(error) = failed {
                failures.push(format!("{what}: {error:#}"));
            }
        };
        self.stop_client.store(true, Ordering::Relaxed);
        keep(
            "client",
            joined(self.client).map(|times| {
                counts.messages = times.len();
                counts.message_p99 = times.value_at_quantile(0.99);
            }),
        );
        // Packets of the attackers' queue follow until `done`.
        self.stop.store(true, Ordering::Relaxed);
        let end = Instant::now() + patience;
        let count = || [&self.received, &self.arrived].map(|count| count.load(Ordering::Relaxed));
        let has_receiver = self.receiver.is_some();
        let mut last = count();
        let mut quiet = Instant::now();
        while !self.sent.have_arrived(last[0], has_receiver.then_some(last[1]))
            && Instant::now() < end
            && quiet.elapsed() < SILENCE
        {
            thread::sleep(Duration::from_millis(20));
            let now = count();
            if now != last {
                (last, quiet) = (now, Instant::now());
            }
        }
        self.done.store(true, Ordering::Relaxed);
        self.end.store(true, Ordering::Relaxed);
        keep(
            "traffic",
            joined(self.traffic).map(|sent| {
                let of = |port| sent.get(&port).copied().unwrap_or(0);
                (counts.inspected, counts.uninspected, counts.attacked) =
                    (of(INSPECTED), of(UNINSPECTED), of(ATTACKED));
            }),
        );
        let sent = counts.inspected;
        keep(
            "inspector",
            joined(self.inspector).and_then(|times| {
                counts.packet_p99 = times.value_at_quantile(0.99);
                ensure!(times.len() == sent, "it received {} packets of {sent}", times.len());
                Ok(())
            }),
        );
        if let Some(receiver) = self.receiver {
            keep("receiver", joined(receiver).and_then(|flows| flows.check(&counts)));
        }
        counts
    }
}

fn joined<T>(thread: JoinHandle<Result<T>>) -> Result<T> {
    thread.join().unwrap_or_else(|_| bail!("its thread panicked"))
}

/// Sends packets of the three flows in turn. Returns the number of each.
///
/// The honest flows run from `begin` to `stop`, the attackers' from the start to `done`.
fn send(
    mut sender: Sender,
    epoch: Instant,
    [begin, stop, done]: [&AtomicBool; 3],
    counts: &Sent,
) -> Result<BTreeMap<u16, u64>> {
    let mut sent = BTreeMap::new();
    let mut frame = packet::frame(LEN);
    for turn in 0_u64.. {
        if done.load(Ordering::Relaxed) {
            break;
        }
        let over = stop.load(Ordering::Relaxed);
        if over {
            // Release: after the counts.
            counts.over.store(true, Ordering::Release);
        }
        let honest = begin.load(Ordering::Relaxed) && !over;
        let port = if honest { [INSPECTED, UNINSPECTED, ATTACKED][(turn % 3) as usize] } else { ATTACKED };
        let number = sent.entry(port).or_insert(0);
        // Many flows in the attackers' queue, one in each of the others: order is per flow.
        packet::set_flow(&mut frame, if port == ATTACKED { turn as u32 % 500 } else { u32::from(port) });
        frame[PORT..PORT + 2].copy_from_slice(&port.to_be_bytes());
        frame[NUMBER..TIME].copy_from_slice(&u64::to_le_bytes(*number));
        let time = epoch.elapsed();
        frame[TIME..TIME + 8].copy_from_slice(&(time.as_nanos() as u64).to_le_bytes());
        while !sender.send(&frame, time)? {
            ensure!(
                epoch.elapsed() < time + ANSWER,
                "the engine reads no packets for {} s",
                ANSWER.as_secs()
            );
            thread::sleep(PACE);
        }
        *number += 1;
        match port {
            INSPECTED => counts.inspected.store(*number, Ordering::Relaxed),
            UNINSPECTED => counts.uninspected.store(*number, Ordering::Relaxed),
            _ => {}
        }
        thread::sleep(PACE);
    }
    Ok(sent)
}

/// Receives the inspected flow and passes it. Returns the times from the capture to the inspector.
fn inspect(
    mut queue: Consumer,
    epoch: Instant,
    done: &AtomicBool,
    received: &AtomicU64,
) -> Result<Histogram<u64>> {
    let mut times = Histogram::new(3)?;
    loop {
        let Some(frame) = queue.recv_timeout(Duration::from_millis(20))? else {
            if done.load(Ordering::Relaxed) {
                return Ok(times);
            }
            ensure!(!queue.is_ended(), "the engine detached the honest inspector");
            continue;
        };
        let bytes = queue.payload(&frame);
        let (number, sent) = (word(bytes, NUMBER)?, word(bytes, TIME)?);
        let expected = times.len();
        ensure!(number == expected, "packet {number} instead of {expected}");
        times.record((epoch.elapsed().as_nanos() as u64).saturating_sub(sent))?;
        queue.verdict(frame, Verdict::Pass);
        received.store(number + 1, Ordering::Relaxed);
    }
}

fn word(bytes: &[u8], at: usize) -> Result<u64> {
    let word = bytes.get(at..).and_then(<[u8]>::first_chunk).context("a short packet")?;
    Ok(u64::from_le_bytes(*word))
}

/// The two honest flows at the receiver.
#[derive(Debug, Default)]
struct Flows {
    /// The number of the next packet, by UDP port.
    next: BTreeMap<u16, u64>,
}

impl Flows {
    /// Takes a frame. Returns true if it belongs to an honest flow.
    fn take(&mut self, frame: &[u8]) -> Result<bool> {
        let port = frame.get(PORT..PORT + 2).context("a short packet")?;
        let port = u16::from_be_bytes([port[0], port[1]]);
        if port != INSPECTED && port != UNINSPECTED {
            return Ok(false);
        }
        let (number, expected) = (word(frame, NUMBER)?, self.next.entry(port).or_insert(0));
        ensure!(number == *expected, "packet {number} of UDP port {port} instead of {expected}");
        *expected += 1;
        Ok(true)
    }

    /// Checks that both flows are complete.
    fn check(&self, counts: &Counts) -> Result<()> {
        for (port, sent) in [(INSPECTED, counts.inspected), (UNINSPECTED, counts.uninspected)] {
            let arrived = self.next.get(&port).copied().unwrap_or(0);
            ensure!(arrived == sent, "{arrived} packets of {sent} to UDP port {port}");
        }
        Ok(())
    }
}

/// Receives the packets that the engine has sent. `arrived` counts those of the honest flows.
fn receive(socket: &OwnedFd, end: &AtomicBool, arrived: &AtomicU64) -> Result<Flows> {
    let mut flows = Flows::default();
    // Longer packets are those of the attackers and are truncated.
    let mut bytes = [0; 2048];
    loop {
        let Some(frame) = ports::receive(socket, &mut bytes)? else {
            if end.load(Ordering::Relaxed) {
                return Ok(flows);
            }
            thread::sleep(PACE);
            continue;
        };
        // A replacement of the attackers may be anything.
        if frame.len() == ETHERNET + LEN && flows.take(frame)? {
            arrived.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Sends messages, one at a time, and checks the answers. Returns their times.
fn ask(mut stream: TcpStream, stop: &AtomicBool) -> Result<Histogram<u64>> {
    let mut times = Histogram::new(3)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(ANSWER))?;
    while !stop.load(Ordering::Relaxed) {
        let mut message = [0; 4 + BODY];
        message[..4].copy_from_slice(&(BODY as u32).to_be_bytes());
        message[4..12].copy_from_slice(&times.len().to_le_bytes());
        let began = Instant::now();
        stream.write_all(&message)?;
        let mut answer = [0; 4 + BODY];
        stream.read_exact(&mut answer).with_context(|| format!("the answer to message {}", times.len()))?;
        ensure!(answer == message, "message {} got another answer", times.len());
        times.record(began.elapsed().as_nanos() as u64)?;
        thread::sleep(MESSAGES);
    }
    Ok(times)
}

/// Checks the engine's report: the engine received all packets, and each has one outcome.
pub(super) fn check_report(report: &Value, counts: &Counts) -> Result<()> {
    let count = |name: &str| report[name].as_u64().with_context(|| format!("no {name}"));
    let sent = counts.sent();
    ensure!(count("packets")? == sent, "{} packets of {sent}", count("packets")?);
    let outcomes = count("passed")? + count("dropped")? + count("rejected")?;
    ensure!(outcomes == sent, "{outcomes} outcomes of {sent} packets");
    Ok(())
}

/// Checks the capture that the engine has written: the two honest flows, complete and in order.
pub(super) fn check_capture(path: &Path, counts: &Counts) -> Result<()> {
    let bytes = std::fs::read(path)?;
    let mut rest = bytes.get(24..).context("no capture")?;
    let mut flows = Flows::default();
    while let Some((head, more)) = rest.split_at_checked(16) {
        let len = u32::from_le_bytes([head[8], head[9], head[10], head[11]]) as usize;
        let (frame, more) = more.split_at_checked(len).context("a cut packet")?;
        rest = more;
        flows.take(frame)?;
    }
    flows.check(counts)
}
