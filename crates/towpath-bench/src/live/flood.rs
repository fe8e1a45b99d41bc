//! UDP packets of many flows as fast as one CPU sends them, for a time.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::world::NEAR;
use crate::peer::flood::Flood;
use crate::peer::netns;
use crate::raw::say;

/// Sends for `time` in the namespace of `home`, and says in how many seconds it did.
pub(crate) fn side(home: u32, flows: u32, len: usize, time: Duration, cpu: usize) -> Result<()> {
    netns::join(home)?;
    let mut flood = Flood::start(NEAR, flows, len, cpu)?;
    let start = Instant::now();
    while start.elapsed() < time {
        flood.send()?;
    }
    say(&start.elapsed().as_secs_f64().to_string())
}
