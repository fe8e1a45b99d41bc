//! UDP packets of many flows as fast as one CPU sends them, for a time.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::world::NEAR;
use crate::mmsg::Batch;
use crate::packet::{self, ETHERNET};
use crate::peer::flood::{busy, packet_socket};
use crate::peer::netns;
use crate::pin;
use crate::raw::say;

const BATCH: usize = 64;

/// Sends for `time` in the namespace of `home`, and says how many packets, and in how many seconds.
pub(crate) fn side(home: u32, flows: u32, len: usize, time: Duration, cpu: usize) -> Result<()> {
    netns::join(home)?;
    let socket = packet_socket(NEAR).context("opening a packet socket")?;
    pin::to(cpu)?;
    let mut batch = Batch::new((0..BATCH).map(|_| packet::frame(len)).collect());
    let (start, mut packets, mut next) = (Instant::now(), 0_u64, 0);
    while start.elapsed() < time {
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
        packets += BATCH as u64;
    }
    say(&packets.to_string())?;
    say(&start.elapsed().as_secs_f64().to_string())
}
