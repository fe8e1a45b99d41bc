//! A UDP packet at a time to the far end and back: how long the ways take when there is nothing else on them.
//!
//! Both ends take the time from the machine's one clock (`CLOCK_MONOTONIC`), so each way is measured by itself. What is told is
//! the sum of the two medians: a round trip without what the far end waits before it answers.

use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::time::{ClockId, clock_gettime};

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
/// The gaps are up to so much longer, each by another part of it, and the far end waits as much before it answers: packets in step with a
/// port's timer of 1 ms would all meet it at the same moment of its period, another one in each run.
const DITHER: Duration = Duration::from_millis(1);
const STEPS: usize = 64;
const PATIENCE: Duration = Duration::from_millis(200);

/// A socket whose packets have no checksum (udp(7), RFC 768): a bare forwarder does not finish what the kernel leaves undone.
fn socket(port: u16) -> Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).context("binding a socket")?;
    set_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_NO_CHECK, 1)?;
    Ok(socket)
}

/// What packet `n` waits for, besides. 39 and 64 have no common divisor: every step comes once in 64 packets, and neighbours are far apart.
fn dither(n: usize) -> Duration {
    DITHER * (n * 39 % STEPS) as u32 / STEPS as u32
}

/// The machine's time, in ns.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// What is in a packet: its number, when it was sent, and how long the way there took, in ns. Zeros follow.
#[derive(Clone, Copy)]
struct Words([u64; 3]);

impl Words {
    fn packet(self) -> [u8; LEN] {
        let mut packet = [0; LEN];
        for (bytes, word) in packet.as_chunks_mut().0.iter_mut().zip(self.0) {
            *bytes = word.to_ne_bytes();
        }
        packet
    }

    fn of(packet: &[u8; LEN]) -> Self {
        let mut words = [0; 3];
        for (word, bytes) in words.iter_mut().zip(packet.as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        Self(words)
    }
}

/// The far end: what comes is answered, a little later.
pub(crate) fn echo(home: u32, cpu: usize) -> Result<()> {
    netns::join(home)?;
    pin::to(cpu)?;
    let socket = socket(PORT)?;
    say("ready")?;
    let mut packet = [0; LEN];
    for n in 0.. {
        let (_, peer) = socket.recv_from(&mut packet)?;
        let Words([number, sent, _]) = Words::of(&packet);
        let there = now().saturating_sub(sent);
        thread::sleep(dither(n));
        socket.send_to(&Words([number, now(), there]).packet(), peer)?;
    }
    Ok(())
}

/// The near end: says what the ways take there and back, in ns.
pub(crate) fn ask(home: u32, time: Duration, cpu: usize) -> Result<()> {
    netns::join(home)?;
    pin::to(cpu)?;
    let socket = socket(0)?;
    socket.connect((DESTINATION, PORT))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let (mut answer, mut there, mut back) = ([0; LEN], Vec::new(), Vec::new());
    let start = Instant::now();
    for n in 0.. {
        if start.elapsed() >= time {
            break;
        }
        thread::sleep(GAP + dither(n));
        socket.send(&Words([n as u64, now(), 0]).packet())?;
        // An answer that came too late is not this one's.
        while socket.recv(&mut answer).is_ok() {
            let Words([number, sent, took]) = Words::of(&answer);
            if number == n as u64 {
                back.push(now().saturating_sub(sent) as f64);
                there.push(took as f64);
                break;
            }
        }
    }
    say(&(median(&there) + median(&back)).to_string())
}

#[cfg(test)]
mod tests {
    use super::{DITHER, STEPS, Words, dither};

    #[test]
    fn words_are_what_they_were() {
        let words = [1, u64::MAX, 0x0102_0304_0506_0708];
        let packet = Words(words).packet();
        assert_eq!(packet[24..], [0; 40]);
        assert_eq!(Words::of(&packet).0, words);
    }

    #[test]
    fn every_step_comes_once() {
        let mut steps: Vec<_> = (STEPS..2 * STEPS).map(dither).collect();
        steps.sort();
        steps.dedup();
        assert_eq!((steps.len(), steps[0].as_nanos()), (STEPS, 0));
        assert!(steps.iter().all(|step| *step < DITHER));
    }
}
