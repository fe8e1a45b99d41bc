//! A UDP packet at a time to the far end and back: how long the way takes when there is nothing else on it.

use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::packet::DESTINATION;
use crate::peer::flood::set_option;
use crate::peer::netns;
use crate::pin;
use crate::raw::say;
use crate::stat::median;

const PORT: u16 = 5001;
const LEN: usize = 64;
/// Long enough for what parks to be parked again.
const GAP: Duration = Duration::from_millis(2);
/// The gaps are up to so much longer, each by another part of it: requests in step with a port's timer of 1 ms would all meet it at the
/// same moment of its period, another one in each run.
const DITHER: Duration = Duration::from_millis(1);
const STEPS: usize = 64;
const PATIENCE: Duration = Duration::from_millis(200);

/// A socket whose packets have no checksum (udp(7), RFC 768): a bare forwarder does not finish what the kernel leaves undone.
fn socket(port: u16) -> Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).context("binding a socket")?;
    set_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_NO_CHECK, 1)?;
    Ok(socket)
}

/// The far end: what comes goes back.
pub(crate) fn echo(home: u32, cpu: usize) -> Result<()> {
    netns::join(home)?;
    pin::to(cpu)?;
    let socket = socket(PORT)?;
    say("ready")?;
    let mut packet = [0; LEN];
    loop {
        let (len, peer) = socket.recv_from(&mut packet)?;
        socket.send_to(&packet[..len], peer)?;
    }
}

/// The near end: says the median time of a round trip, in ns.
pub(crate) fn ask(home: u32, time: Duration, cpu: usize) -> Result<()> {
    netns::join(home)?;
    pin::to(cpu)?;
    let socket = socket(0)?;
    socket.connect((DESTINATION, PORT))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let (mut packet, mut answer, mut times) = ([0; LEN], [0; LEN], Vec::new());
    let start = Instant::now();
    while start.elapsed() < time {
        // 39 and 64 have no common divisor: every step comes once in 64 requests, and neighbours are far apart.
        thread::sleep(GAP + DITHER * (times.len() * 39 % STEPS) as u32 / STEPS as u32);
        packet[..8].copy_from_slice(&(times.len() as u64).to_ne_bytes());
        let sent = Instant::now();
        socket.send(&packet)?;
        // An answer that came too late is not this one's.
        while let Ok(len) = socket.recv(&mut answer) {
            if answer[..len] == packet {
                times.push(sent.elapsed().as_nanos() as f64);
                break;
            }
        }
    }
    say(&median(&times).to_string())
}
