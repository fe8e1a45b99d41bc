//! UDP packets of many flows, for a time: as fast as one CPU sends them, or at a rate.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::world::NEAR;
use crate::peer::flood::{BATCH, Flood};
use crate::peer::netns;
use crate::raw::say;

/// What is sent, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Order {
    pub(crate) flows: u32,
    pub(crate) len: usize,
    pub(crate) time: Duration,
    /// Packets per second; 0 is as fast as it goes.
    pub(crate) rate: u64,
}

/// Sends in the namespace of `home`, and says how many packets that were.
pub(crate) fn side(home: u32, order: Order, cpu: usize) -> Result<()> {
    let Order { flows, len, time, rate } = order;
    netns::join(home)?;
    let mut flood = Flood::start(NEAR, flows, len, cpu)?;
    let start = Instant::now();
    let mut sent: u64 = 0;
    while start.elapsed() < time {
        let due = Duration::from_nanos((sent * 1_000_000_000).checked_div(rate).unwrap_or(0));
        while start.elapsed() < due {
            std::hint::spin_loop();
        }
        flood.send()?;
        sent += BATCH as u64;
    }
    say(&sent.to_string())
}
