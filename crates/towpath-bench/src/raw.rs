#![allow(unsafe_code)]
//! Raw hardware limits: a cache line between two processes, memcpy on one core, and an eventfd wake-up.

use std::hint::{black_box, spin_loop};
use std::io::{Write, stdout};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::event::{EventfdFlags, eventfd};

use crate::clock::{now_ns, spin_for};
use crate::mapping::Mapping;
use crate::pin::{self, Cpus};
use crate::side::{Side, inherit};
use crate::stat::median;

/// Bit that marks a reply; alone, it ends the ping-pong.
const ANSWER: u64 = 1 << 63;

/// Round trips timed together, because one is shorter than the clock's resolution.
pub(crate) const ROUND: u32 = 100;

/// Round trip of one cache line between two processes: median of rounds in ns.
pub(crate) fn ping_pong(cpus: Cpus, time: Duration) -> Result<f64> {
    let page = Mapping::create()?;
    let words = ["ping-pong".to_owned(), page.path(), cpus.consumer.to_string()];
    let mut side = Side::start(&words, &[])?;
    side.line()?;
    pin::to(cpus.engine)?;
    let line = page.word(0);
    let start = Instant::now();
    let mut rounds = Vec::with_capacity(1 << 16);
    let mut trips = 0;
    while start.elapsed() < time {
        let began = now_ns();
        for _ in 0..ROUND {
            trips += 1;
            // Release and Acquire pair with the peer's accesses; the line carries only the number.
            line.store(trips, Release);
            while line.load(Acquire) != trips | ANSWER {}
        }
        rounds.push((now_ns() - began) as f64 / ROUND as f64);
    }
    line.store(ANSWER, Release);
    side.finish()?;
    Ok(median(&rounds))
}

pub(crate) fn ping_pong_side(page: &str, cpu: usize) -> Result<()> {
    pin::to(cpu)?;
    let page = Mapping::open(page)?;
    say("ready")?;
    let line = page.word(0);
    loop {
        // Acquire and Release pair with the peer's accesses of the same word.
        match line.load(Acquire) {
            ANSWER => return Ok(()),
            question if question != 0 && question & ANSWER == 0 => line.store(question | ANSWER, Release),
            _ => {}
        }
    }
}

/// Returns the memcpy rate of one core in bytes per second: `len` bytes from cached sources to an area of `area` bytes.
pub(crate) fn memcpy(cpus: Cpus, time: Duration, len: usize, area: usize) -> Result<f64> {
    pin::to(cpus.engine)?;
    let sources: Vec<Vec<u8>> = (0..16).map(|n| vec![n; len]).collect();
    let mut area = vec![1_u8; area];
    let mut copied = 0_usize;
    let start = Instant::now();
    while start.elapsed() < time {
        for (target, source) in area.chunks_exact_mut(len).zip(sources.iter().cycle()) {
            target.copy_from_slice(source);
            black_box(&mut *target);
            copied += len;
        }
    }
    Ok(copied as f64 / start.elapsed().as_secs_f64())
}

/// Time between wake-ups, long enough for the other side to park again.
pub(crate) const GAP_NS: u64 = 400_000;
/// Timeout for the other side to wake up.
const PATIENCE: Duration = Duration::from_secs(5);

/// Wake-up of a process that sleeps in read(2) of an eventfd on the other CPU: median in ns.
///
/// The waker waits until the sleeper has read the eventfd: missed counts would be added up in one read.
pub(crate) fn eventfd_wake(cpus: Cpus, time: Duration) -> Result<f64> {
    let bell = eventfd(0, EventfdFlags::CLOEXEC)?;
    let page = Mapping::create()?;
    let words = ["eventfd-wake".to_owned(), page.path(), inherit(&bell)?, cpus.consumer.to_string()];
    let mut side = Side::start(&words, &[])?;
    side.line()?;
    pin::to(cpus.engine)?;
    let (sent, seen) = (page.word(0), page.word(1));
    let ring = |now| {
        // Release: pairs with the sleeper's acquire load, which reads the time of the wake-up.
        sent.store(now, Release);
        rustix::io::write(&bell, &1_u64.to_ne_bytes())
    };
    let start = Instant::now();
    while start.elapsed() < time {
        spin_for(GAP_NS);
        let now = now_ns();
        ring(now)?;
        // Acquire: pairs with the sleeper's release store after it has read the eventfd.
        while seen.load(Acquire) != now {
            ensure!(start.elapsed() < time + PATIENCE, "the sleeper did not wake up");
            spin_loop();
        }
    }
    ring(0)?;
    let latency = side.number()?;
    side.finish()?;
    Ok(latency)
}

pub(crate) fn eventfd_wake_side(page: &str, bell: RawFd, cpu: usize) -> Result<()> {
    // SAFETY: the parent process left this descriptor open under this number, and no other code in this process uses it.
    let bell = unsafe { OwnedFd::from_raw_fd(bell) };
    pin::to(cpu)?;
    let page = Mapping::open(page)?;
    let (sent, seen) = (page.word(0), page.word(1));
    say("ready")?;
    let mut latencies = Vec::with_capacity(1 << 16);
    let mut value = [0_u8; 8];
    loop {
        rustix::io::read(&bell, &mut value)?;
        let now = now_ns();
        // Acquire and Release pair with the waker's store and load.
        match sent.load(Acquire) {
            0 => break,
            at => {
                latencies.push(now.saturating_sub(at) as f64);
                seen.store(at, Release);
            }
        }
    }
    say(&median(&latencies).to_string())
}

/// Prints a line to the parent process.
pub(crate) fn say(line: &str) -> Result<()> {
    let mut out = stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
