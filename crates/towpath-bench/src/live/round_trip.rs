//! Round trip of single UDP packets to the far end, without other traffic.
//!
//! Both ends use the same clock (`CLOCK_MONOTONIC`), so each direction is timed separately. The result is the sum of the two medians,
//! which excludes the delay of the far end before it replies.

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
/// Gap between packets, long enough for a parking thread to park again.
const GAP: Duration = Duration::from_millis(2);
/// Maximum additional delay before each packet and before each reply. It varies, because packets synchronous to a port's 1 ms timer
/// would all meet the same phase of the timer, a different one in each run.
const DITHER: Duration = Duration::from_millis(1);
const STEPS: usize = 64;
const PATIENCE: Duration = Duration::from_millis(200);

/// A socket that sends without checksums (udp(7), RFC 768): a baseline forwarder does not complete checksums left to offload.
fn socket(port: u16) -> Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).context("binding a socket")?;
    set_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_NO_CHECK, 1)?;
    Ok(socket)
}

/// The additional delay of packet `n`. 39 and 64 are coprime: each step occurs once in 64 packets, and consecutive steps differ widely.
fn dither(n: usize) -> Duration {
    DITHER * (n * 39 % STEPS) as u32 / STEPS as u32
}

/// The current time in ns.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Packet contents: number, send time and duration of the forward direction in ns. Zeros follow.
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

/// Runs the far end: replies to each packet after a delay.
pub(crate) fn echo(netns_pid: u32, cpu: usize) -> Result<()> {
    netns::join(netns_pid)?;
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

/// Runs the near end: prints the durations of both directions in ns.
pub(crate) fn ask(netns_pid: u32, time: Duration, cpu: usize) -> Result<()> {
    netns::join(netns_pid)?;
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
        // Discard late replies to earlier packets.
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
    fn words_round_trip() {
        let words = [1, u64::MAX, 0x0102_0304_0506_0708];
        let packet = Words(words).packet();
        assert_eq!(packet[24..], [0; 40]);
        assert_eq!(Words::of(&packet).0, words);
    }

    #[test]
    fn dither_covers_every_step_once() {
        let mut steps: Vec<_> = (STEPS..2 * STEPS).map(dither).collect();
        steps.sort();
        steps.dedup();
        assert_eq!((steps.len(), steps[0].as_nanos()), (STEPS, 0));
        assert!(steps.iter().all(|step| *step < DITHER));
    }
}
