//! The kernel's conntrack in a separate network namespace: its cost per packet.
//!
//! A flood over a veth pair ends in a UDP socket without a reader; the generator's CPU also does the kernel's receive processing. The
//! result is the difference of a packet's time with conntrack (an INPUT rule matches the state; packets and bytes are counted, as in
//! Towpath) and without.

use std::io::stdin;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::net::sockopt::set_socket_recv_buffer_size;

use crate::packet::DESTINATION;
use crate::peer::flood::{BATCH, Flood};
use crate::peer::{Skipped, netns};
use crate::raw::say;
use crate::side::Side;

/// Limit of tracked connections over all namespaces.
const MAX: &str = "/proc/sys/net/netfilter/nf_conntrack_max";
/// Margin above the number of flows: the kernel still counts connections that have just ended.
const SPARE: u32 = 65_536;
const LEN: usize = 50;

/// Returns the cost of conntrack per packet of one of `flows` flows in ns: median of `reps` repetitions.
pub(crate) fn added(cpu: usize, flows: u32, time: Duration, reps: u32) -> Result<f64> {
    if !rustix::process::geteuid().is_root() {
        return Err(Skipped("needs root".to_owned()).into());
    }
    let _raised = Raised::for_flows(flows)?;
    let mut added = Vec::new();
    for _ in 0..reps {
        added.push(nanos(cpu, flows, time, true)? - nanos(cpu, flows, time, false)?);
    }
    Ok(crate::stat::median(&added))
}

/// A raised kernel limit; restored on drop.
pub(crate) struct Raised(Option<String>);

impl Raised {
    /// Raises the limit to track `flows` flows.
    pub(crate) fn for_flows(flows: u32) -> Result<Self> {
        let least = flows + SPARE;
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
            eprintln!("cannot restore {MAX} to {}: {error}", before.trim());
        }
    }
}

fn nanos(cpu: usize, flows: u32, time: Duration, tracked: bool) -> Result<f64> {
    let words = |words: &[&str]| -> Vec<String> { words.iter().map(ToString::to_string).collect() };
    let how = if tracked { "tracked" } else { "plain" };
    let mut receiver = Side::start(&words(&["conntrack-receiver", how]), &[])?;
    let (flows, millis) = (flows.to_string(), time.as_millis().to_string());
    let mut flood = Side::start(&words(&["conntrack-flood", &flows, &millis, &cpu.to_string()]), &[])?;
    receiver.line()?;
    flood.line()?;
    netns::connect(flood.pid(), receiver.pid())?;
    receiver.tell("go")?;
    match receiver.line()?.as_str() {
        "ready" => {}
        skipped => return Err(Skipped(skipped.to_owned()).into()),
    }
    flood.tell("go")?;
    let nanos = flood.number()?;
    flood.finish()?;
    Ok(nanos)
}

/// Runs the receiving end until the process is killed.
pub(crate) fn receiver(tracked: bool) -> Result<()> {
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

/// Sends a packet of every flow, then measures and prints the time per packet.
pub(crate) fn flood(flows: u32, time: Duration, cpu: usize) -> Result<()> {
    netns::unshare()?;
    say("ready")?;
    stdin().read_line(&mut String::new())?;
    netns::up(netns::SENDER)?;
    let mut flood = Flood::start(netns::SENDER, flows, LEN, cpu)?;
    (0..flows.div_ceil(BATCH as u32)).try_for_each(|_| flood.send())?;
    let (start, mut packets) = (Instant::now(), 0_u64);
    while start.elapsed() < time {
        flood.send()?;
        packets += BATCH as u64;
    }
    say(&(start.elapsed().as_nanos() as f64 / packets as f64).to_string())
}
