//! Forwarders that do nothing but carry packets from one interface to the other and back: what a driver of ports gives.

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

/// What carries: both directions in one thread.
trait Forward {
    /// Carries what is there, at most a batch each way; whether anything was.
    fn turn(&mut self) -> Result<bool>;
    /// Where to wait for more.
    fn sources(&self) -> [BorrowedFd<'_>; 2];
}

/// Carries until it is killed.
pub(crate) fn side(
    driver: &str,
    home: u32,
    devices: [&str; 2],
    offload: bool,
    park: bool,
    cpu: usize,
) -> Result<()> {
    netns::join(home)?;
    pin::to(cpu)?;
    let mut bare: Box<dyn Forward> = match driver {
        "af_packet" => Box::new(af_packet::Bridge::open(devices, offload)?),
        "af_xdp" => Box::new(af_xdp::Bridge::open(devices)?),
        "tun" => Box::new(tun::Pair::open(devices, offload)?),
        _ => bail!("no bare forwarder for {driver}"),
    };
    say("ready")?;
    loop {
        if bare.turn()? {
            continue;
        }
        if park {
            let mut sources = bare.sources().map(|source| PollFd::from_borrowed_fd(source, PollFlags::IN));
            poll(&mut sources, None).context("waiting for packets")?;
        } else {
            spin_loop();
        }
    }
}
