//! Generator of UDP packets of many flows, at full speed of one CPU or at a fixed rate.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::topology::NEAR;
use crate::peer::flood::{BATCH, Flood};
use crate::peer::netns;
use crate::raw::say;

/// Parameters of a flood.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Order {
    pub(crate) flows: u32,
    pub(crate) len: usize,
    pub(crate) time: Duration,
    /// Packets per second; 0 means unlimited.
    pub(crate) rate: u64,
}

/// Sends in the namespace of process `netns_pid` and prints the number of packets sent.
pub(crate) fn side(netns_pid: u32, order: Order, cpu: usize) -> Result<()> {
    let Order { flows, len, time, rate } = order;
    netns::join(netns_pid)?;
    let mut flood = Flood::start(NEAR, flows, len, cpu)?;
    let start = Instant::now();
    let mut sent: u64 = 0;
    while start.elapsed() < time {
        let due = Duration::from_nanos((sent * 1_000_000_000).checked_div(rate).unwrap_or(0));
        // The CPU is idle meanwhile: the time that it is not is measured.
        thread::sleep(due.saturating_sub(start.elapsed()));
        flood.send()?;
        sent += BATCH as u64;
    }
    say(&sent.to_string())
}
