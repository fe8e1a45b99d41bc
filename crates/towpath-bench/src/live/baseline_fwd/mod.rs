//! Baseline forwarders: they only copy packets between two interfaces. They measure the limit of a port driver.

pub(crate) mod af_packet;
pub(crate) mod af_xdp;
mod area;
pub(crate) mod tun;

use std::hint::spin_loop;
use std::os::fd::BorrowedFd;

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, poll};

use crate::peer::netns;
use crate::pin;
use crate::raw::say;

/// A forwarder that handles both directions in one thread.
trait Forward {
    /// Forwards at most one batch in each direction. Returns true if it forwarded packets.
    fn turn(&mut self) -> Result<bool>;
    /// Descriptors to poll.
    fn sources(&self) -> [BorrowedFd<'_>; 2];
}

/// Forwards until the process is killed.
pub(crate) fn side(
    driver: &str,
    netns_pid: u32,
    devices: [&str; 2],
    offload: bool,
    park: bool,
    cpu: usize,
) -> Result<()> {
    netns::join(netns_pid)?;
    pin::to(cpu)?;
    let mut forwarder: Box<dyn Forward> = match driver {
        "af_packet" => Box::new(af_packet::Bridge::open(devices, offload)?),
        "af_xdp" => Box::new(af_xdp::Bridge::open(devices)?),
        "tun" => Box::new(tun::Pair::open(devices, offload)?),
        _ => bail!("no baseline forwarder for {driver}"),
    };
    say("ready")?;
    loop {
        if forwarder.turn()? {
            continue;
        }
        if park {
            let mut sources =
                forwarder.sources().map(|source| PollFd::from_borrowed_fd(source, PollFlags::IN));
            poll(&mut sources, None).context("waiting for packets")?;
        } else {
            spin_loop();
        }
    }
}
