//! The ring's side of the measurements: an engine without a gate, and inspector processes that pass every frame.
//!
//! The loop matches that of a port's thread: publish a burst of packets, ring the doorbell if the inspector sleeps, then read the
//! available verdicts. The clock is read once per burst.

use std::collections::VecDeque;
use std::hint::{black_box, spin_loop};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;
use towpath_ring::{Channel, Config, Consumer, Endpoint, Meta, ReserveError, Verdict};

use crate::clock::{now_ns, spin_for};
use crate::payload::fold;
use crate::pin::{self, Cpus};
use crate::raw::{GAP_NS, ROUND, say};
use crate::side::Side;
use crate::stat::median;

/// Group of the message that ends a measurement.
const END: u32 = 1;
/// Packets between two reads of the clock and of the verdicts.
pub(crate) const BURST: usize = 64;
/// Total size of the in-memory port's packets. They fit in a cache, as after a real port's DMA.
const SOURCE_BYTES: usize = 1 << 20;
/// Maximum number of flows.
const FLOWS: usize = 2000;

/// Parameters of a throughput measurement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    pub(crate) len: usize,
    /// Messages between two checks for a sleeping inspector.
    pub(crate) publish: usize,
    pub(crate) inspectors: usize,
    /// Maximum number of messages that an inspector receives and decides at once.
    pub(crate) batch: usize,
}

impl Load {
    /// One inspector. Its batch is a small part of the ring, so that the engine can fill the rest while the inspector works.
    pub(crate) fn one(len: usize, publish: usize) -> Self {
        let ring = Config::default().rx.bytes();
        Self { len, publish, inspectors: 1, batch: (ring / len / 8).clamp(1, 64) }
    }
}

/// Result of a throughput measurement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Throughput {
    /// Decided messages per second.
    pub(crate) rate: f64,
    /// Doorbells of both sides, per message.
    pub(crate) wakeups: f64,
}

/// Measures throughput to inspectors that read every byte and pass each message.
pub(crate) fn throughput(cpus: Cpus, time: Duration, load: Load) -> Result<Throughput> {
    let mut engine = Engine::start(load.inspectors, "pass", load.batch, cpus)?;
    let sources = sources(load.len);
    // Plain counters stay in registers. An iterator's state is in memory, and loading it would wait for the stores of a publication.
    let (mut flow, mut to) = (0, 0);
    let start = Instant::now();
    while start.elapsed() < time {
        for _ in 0..BURST.div_ceil(load.publish) {
            for _ in 0..load.publish {
                engine.publish(to, &sources[flow])?;
                flow = if flow + 1 == sources.len() { 0 } else { flow + 1 };
                to = if to + 1 == load.inspectors { 0 } else { to + 1 };
            }
            engine.kick();
        }
        engine.poll(now_ns());
    }
    engine.drain()?;
    let elapsed = start.elapsed();
    engine.finish(elapsed)
}

/// Measures the time from publication to verdict, with both sides spinning: median of rounds in ns.
pub(crate) fn round_trip(cpus: Cpus, time: Duration, len: usize) -> Result<f64> {
    let mut engine = Engine::start(1, "spin", 1, cpus)?;
    let channel = &mut engine.channels[0];
    let message = vec![7; len];
    let mut rounds = Vec::with_capacity(1 << 16);
    let start = Instant::now();
    while start.elapsed() < time {
        let began = now_ns();
        for _ in 0..ROUND {
            channel.send(&message, &Meta::default())?;
            channel.kick();
            while poll(channel, began) == 0 {}
        }
        rounds.push((now_ns() - began) as f64 / f64::from(ROUND));
        ensure!(!channel.is_dead(), "the inspector has ended");
    }
    engine.finish(start.elapsed())?;
    Ok(median(&rounds))
}

/// Measures the time from publication to reception by a parked inspector: median in ns.
pub(crate) fn wake(cpus: Cpus, time: Duration) -> Result<f64> {
    let mut engine = Engine::start(1, "wake", 1, cpus)?;
    let start = Instant::now();
    while start.elapsed() < time {
        spin_for(GAP_NS);
        let channel = &mut engine.channels[0];
        channel.send(&[7; 64], &Meta { time: now_ns(), ..Meta::default() })?;
        channel.kick();
        engine.drain()?;
    }
    spin_for(GAP_NS);
    engine.end()?;
    engine.sides[0].number()
}

/// The engine's channels to inspector processes.
struct Engine {
    channels: Vec<Channel>,
    sides: Vec<Side>,
    decided: u64,
    _directory: TempDir,
}

impl Engine {
    fn start(inspectors: usize, how: &str, batch: usize, cpus: Cpus) -> Result<Self> {
        let directory = tempfile::tempdir().context("making a temporary directory")?;
        let path = directory.path().join("ring.sock");
        let mut endpoint = Endpoint::bind(&path, Config { deadline: None, ..Config::default() })?;
        let words = ["inspector", how, &batch.to_string(), &cpus.consumer.to_string()].map(str::to_owned);
        let env = [("TOWPATH_SOCKET", path.display().to_string())];
        let mut channels = Vec::new();
        let mut sides = Vec::new();
        for _ in 0..inspectors {
            sides.push(Side::start(&words, &env)?);
            let start = Instant::now();
            channels.push(loop {
                match endpoint.accept()? {
                    Some(channel) => break channel,
                    None => endpoint.wait(Some(Duration::from_secs(1)))?,
                }
                ensure!(start.elapsed() < Duration::from_secs(5), "the inspector did not attach within 5 s");
            });
        }
        for side in &mut sides {
            side.line()?;
        }
        pin::to(cpus.engine)?;
        Ok(Self { channels, sides, decided: 0, _directory: directory })
    }

    /// Publishes `packet` to inspector `to`. With one inspector, waits while the ring is full; otherwise drops the packet.
    #[inline]
    fn publish(&mut self, to: usize, packet: &[u8]) -> Result<()> {
        let alone = self.channels.len() == 1;
        let channel = &mut self.channels[to];
        loop {
            match channel.send(packet, &Meta::default()) {
                Ok(_) => break,
                Err(ReserveError::RingFull) if alone => {
                    channel.kick();
                    self.decided += poll(channel, now_ns());
                    spin_loop();
                }
                Err(ReserveError::RingFull) => break,
                Err(error) => bail!("the inspector's ring: {error}"),
            }
        }
        Ok(())
    }

    fn kick(&mut self) {
        self.channels.iter_mut().for_each(Channel::kick);
    }

    fn poll(&mut self, now: u64) {
        for channel in &mut self.channels {
            self.decided += poll(channel, now);
        }
    }

    /// Waits until all frames have a verdict.
    fn drain(&mut self) -> Result<()> {
        while self.channels.iter().any(|channel| channel.held() > 0) {
            self.kick();
            self.poll(now_ns());
            ensure!(!self.channels.iter().any(Channel::is_dead), "an inspector has ended");
        }
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        for channel in &mut self.channels {
            channel.send(&[0; 1], &Meta { group: END, ..Meta::default() })?;
            channel.kick();
        }
        Ok(())
    }

    fn finish(mut self, elapsed: Duration) -> Result<Throughput> {
        let stats: Vec<_> = self.channels.iter().map(Channel::stats).collect();
        for stats in &stats {
            ensure!(stats.published == stats.decided, "frames without a verdict: {stats:?}");
        }
        self.end()?;
        let mut wakeups: u64 = stats.iter().map(|stats| stats.wakeups).sum();
        let published: u64 = stats.iter().map(|stats| stats.published).sum();
        for side in &mut self.sides {
            wakeups += side.number()? as u64;
        }
        self.sides.into_iter().try_for_each(Side::finish)?;
        let (rate, wakeups) =
            (self.decided as f64 / elapsed.as_secs_f64(), wakeups as f64 / published as f64);
        Ok(Throughput { rate, wakeups })
    }
}

/// Reads the available verdicts. Returns the number of passed packets, which a port would now send.
fn poll(channel: &mut Channel, now: u64) -> u64 {
    let mut passed = 0;
    channel.poll_verdicts(now, |_, decision| passed += u64::from(decision.verdict == Verdict::Pass));
    passed
}

/// The in-memory port's packets, one per flow.
fn sources(len: usize) -> Vec<Box<[u8]>> {
    let flows = (SOURCE_BYTES / len).clamp(6, FLOWS);
    // A multiple of six, so that each flow stays with one of six inspectors.
    let flows = flows / 6 * 6;
    (0..flows).map(|flow| vec![flow as u8; len].into()).collect()
}

/// Runs the inspector process; `how` selects its loop, `batch` the frames decided at once.
pub(crate) fn inspector(how: &str, batch: usize, cpu: usize) -> Result<()> {
    pin::to(cpu)?;
    let queue = Consumer::attach_env()?;
    say("ready")?;
    match how {
        "spin" => spin(queue),
        "wake" => time_wake_ups(queue),
        _ => pass(queue, batch),
    }
}

/// Frames that an inspector with a delay holds.
const DELAY_WINDOW: usize = 16;
/// Frames that the live inspector receives at once.
const LIVE_BATCH: usize = 64;

/// Runs an inspector of `towpath`: attaches to the socket `queue`, reads and passes every frame until the engine ends.
pub(crate) fn live_inspector(queue: &str, cpu: usize) -> Result<()> {
    pin::to(cpu)?;
    let mut queue = Consumer::attach(queue)?;
    say("ready")?;
    let mut frames = Vec::with_capacity(LIVE_BATCH);
    let mut sum = 0;
    while queue.recv_batch(&mut frames, LIVE_BATCH)? > 0 {
        for frame in frames.drain(..) {
            sum ^= fold(queue.payload(&frame));
            queue.verdict(frame, Verdict::Pass);
        }
    }
    black_box(sum);
    Ok(())
}

/// An inspector that passes each frame after a delay. It holds as many frames meanwhile as its window has.
pub(crate) fn live_delay(queue: &str, cpu: usize, delay: Duration) -> Result<()> {
    pin::to(cpu)?;
    let mut queue = Consumer::attach(queue)?;
    say("ready")?;
    let mut held: VecDeque<(Instant, towpath_ring::Frame)> = VecDeque::with_capacity(DELAY_WINDOW);
    loop {
        let now = Instant::now();
        while let Some((_, frame)) = held.pop_front_if(|(due, _)| *due <= now) {
            queue.verdict(frame, Verdict::Pass);
        }
        queue.flush();
        let until_due = held.front().map(|(due, _)| due.saturating_duration_since(now));
        let frame = match until_due {
            Some(wait) if held.len() == DELAY_WINDOW => {
                thread::sleep(wait);
                continue;
            }
            Some(wait) => queue.recv_timeout(wait)?,
            None => match queue.recv()? {
                None => return Ok(()),
                frame => frame,
            },
        };
        if let Some(frame) = frame {
            queue.hold(&frame);
            held.push_back((Instant::now() + delay, frame));
        }
    }
}

fn spin(mut queue: Consumer) -> Result<()> {
    loop {
        // No pause between polls, as in the raw ping-pong.
        let Some(frame) = queue.try_recv()? else { continue };
        let end = frame.header().group == END;
        black_box(fold(queue.payload(&frame)));
        queue.verdict(frame, Verdict::Pass);
        if end {
            return say(&queue.stats().wakeups.to_string());
        }
    }
}

fn pass(mut queue: Consumer, batch: usize) -> Result<()> {
    let mut frames = Vec::with_capacity(batch);
    let mut sum = 0;
    loop {
        queue.recv_batch(&mut frames, batch)?;
        let Some(last) = frames.last() else { bail!("the engine has ended") };
        let (upto, end) = (last.id(), last.header().group == END);
        for frame in frames.drain(..) {
            sum ^= fold(queue.payload(&frame));
        }
        queue.verdict_upto(upto, Verdict::Pass);
        if end {
            black_box(sum);
            return say(&queue.stats().wakeups.to_string());
        }
    }
}

fn time_wake_ups(mut queue: Consumer) -> Result<()> {
    let mut latencies = Vec::with_capacity(1 << 16);
    while let Some(frame) = queue.recv()? {
        let now = now_ns();
        if frame.header().group == END {
            break;
        }
        latencies.push(now.saturating_sub(frame.header().time) as f64);
        queue.verdict(frame, Verdict::Pass);
    }
    say(&median(&latencies).to_string())
}
