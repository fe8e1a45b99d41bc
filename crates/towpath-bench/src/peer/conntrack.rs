//! The kernel's conntrack in a network namespace of its own: what it adds to a packet's way.
//!
//! A flood over a veth pair, whose CPU also does the kernel's receiving, ends in a UDP socket that nobody reads. The
//! difference of a packet's time with conntrack (a rule of INPUT asks for the state; packets and bytes are counted, as ours
//! are) and without it is conntrack's.

use std::io::stdin;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::net::sockopt::set_socket_recv_buffer_size;

use crate::mmsg::Batch;
use crate::packet::{self, DESTINATION, ETHERNET};
use crate::peer::flood::{busy, packet_socket};
use crate::peer::{Skipped, netns};
use crate::pin;
use crate::raw::say;
use crate::side::Side;

const BATCH: usize = 64;
/// How many connections the kernel follows, in all namespaces together.
const MAX: &str = "/proc/sys/net/netfilter/nf_conntrack_max";
/// More than the flows: what ended a moment ago is still counted.
const SPARE: u32 = 65_536;
const LEN: usize = 50;

/// What conntrack adds to a packet of one of `flows` flows, in ns: the median of so many turns.
pub(crate) fn added(cpu: usize, flows: u32, time: Duration, reps: u32) -> Result<f64> {
    if !rustix::process::geteuid().is_root() {
        return Err(Skipped("needs root".to_owned()).into());
    }
    let _raised = Raised::to(flows + SPARE)?;
    let mut added = Vec::new();
    for _ in 0..reps {
        added.push(nanos(cpu, flows, time, true)? - nanos(cpu, flows, time, false)?);
    }
    Ok(crate::stat::median(&added))
}

/// The kernel's limit, higher than it was; dropped, it is what it was.
struct Raised(Option<String>);

impl Raised {
    fn to(least: u32) -> Result<Self> {
        let Ok(before) = std::fs::read_to_string(MAX) else { return Ok(Self(None)) };
        if before.trim().parse::<u32>().is_ok_and(|max| max >= least) {
            return Ok(Self(None));
        }
        match std::fs::write(MAX, least.to_string()) {
            Ok(()) => Ok(Self(Some(before))),
            Err(error) => {
                Err(Skipped(format!("{MAX} is less than {least}, and cannot be changed: {error}")).into())
            }
        }
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        if let Some(before) = &self.0
            && let Err(error) = std::fs::write(MAX, before)
        {
            eprintln!("{MAX} was {}, and could not be set back: {error}", before.trim());
        }
    }
}

fn nanos(cpu: usize, flows: u32, time: Duration, tracked: bool) -> Result<f64> {
    let words = |words: &[&str]| -> Vec<String> { words.iter().map(ToString::to_string).collect() };
    let how = if tracked { "tracked" } else { "plain" };
    let mut home = Side::start(&words(&["conntrack-home", how]), &[])?;
    let (flows, millis) = (flows.to_string(), time.as_millis().to_string());
    let mut flood = Side::start(&words(&["conntrack-flood", &flows, &millis, &cpu.to_string()]), &[])?;
    home.line()?;
    flood.line()?;
    netns::connect(flood.pid(), home.pid())?;
    home.tell("go")?;
    match home.line()?.as_str() {
        "ready" => {}
        skipped => return Err(Skipped(skipped.to_owned()).into()),
    }
    flood.tell("go")?;
    let nanos = flood.number()?;
    flood.finish()?;
    Ok(nanos)
}

/// The receiving end; it stays until it is killed.
pub(crate) fn home(tracked: bool) -> Result<()> {
    netns::unshare()?;
    say("unshared")?;
    stdin().read_line(&mut String::new())?;
    if let Err(error) = netns::up_with_conntrack(tracked) {
        return say(&format!("{error:#}").replace("skipped: ", ""));
    }
    let socket = UdpSocket::bind((DESTINATION, 53)).context("binding a socket")?;
    set_socket_recv_buffer_size(&socket, 1)?;
    say("ready")?;
    stdin().read_line(&mut String::new())?;
    Ok(())
}

/// Sends a packet of every flow, and then says what one takes.
pub(crate) fn flood(flows: u32, time: Duration, cpu: usize) -> Result<()> {
    netns::unshare()?;
    say("ready")?;
    stdin().read_line(&mut String::new())?;
    netns::up(netns::SENDER)?;
    let socket = packet_socket(netns::SENDER).context("opening a packet socket")?;
    pin::to(cpu)?;
    let mut batch = Batch::new((0..BATCH).map(|_| packet::frame(LEN)).collect());
    let mut next = 0;
    let mut send = || {
        for n in 0..BATCH {
            let frame = batch.buffer(n);
            packet::set_flow(frame, next as u16);
            // A port for each 65,536 addresses.
            frame[ETHERNET + 20..ETHERNET + 22].copy_from_slice(&(1024 + (next >> 16) as u16).to_be_bytes());
            next = (next + 1) % flows;
        }
        let mut sent = 0;
        while sent < BATCH {
            match batch.send(&socket, sent) {
                Ok(count) => sent += count,
                Err(error) if busy(&error) => {}
                Err(error) => return Err(error).context("sending packets"),
            }
        }
        Ok(())
    };
    (0..flows.div_ceil(BATCH as u32)).try_for_each(|_| send())?;
    let (start, mut packets) = (Instant::now(), 0_u64);
    while start.elapsed() < time {
        send()?;
        packets += BATCH as u64;
    }
    say(&(start.elapsed().as_nanos() as f64 / packets as f64).to_string())
}
