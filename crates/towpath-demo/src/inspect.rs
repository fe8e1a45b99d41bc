//! Log lines on their way to a server: an inspector process drops those that contain a secret.

use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::network::{CLIENT, LOGS, Network, SERVER};
use super::process::PATTERN;
use super::{Failure, Stop, doing};

/// One line in this many has a secret.
const SECRETS: u64 = 10;
/// Lines in one burst.
const BURST: u64 = 20;
/// Pause between two bursts.
const REST: Duration = Duration::from_millis(2);
/// Lines in flight: fewer than the smallest socket buffer holds, even on a busy machine.
const WINDOW: u64 = 100;
/// Time in which the last lines must arrive.
const PATIENCE: Duration = Duration::from_secs(20);

/// Lines sent and received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Lines {
    pub(crate) sent: u64,
    /// Lines sent with a secret.
    pub(crate) secret: u64,
    pub(crate) arrived: u64,
    /// Lines received with a secret.
    pub(crate) leaked: u64,
    /// Packets that the queue decided by default.
    pub(crate) lost: u64,
    /// Time from the kill of the inspector until the next line arrived, in milliseconds.
    pub(crate) outage_ms: f64,
}

/// Sends lines for `length`, and calls `kill` halfway. `lost` returns the number of packets that the queue decided by default.
pub(super) fn send(
    network: &Network,
    stop: &Stop,
    length: Duration,
    kill: impl FnOnce(),
    lost: impl Fn() -> u64,
) -> Result<Lines, Failure> {
    let over = Arc::new(AtomicBool::new(false));
    // Relaxed: a progress counter; exact values are read after joining the thread.
    let count = Arc::new(AtomicU64::new(0));
    let (until, counter) = (Arc::clone(&over), Arc::clone(&count));
    let server = network
        .inside
        .run(|| {
            let socket = UdpSocket::bind((SERVER, LOGS))?;
            socket.set_read_timeout(Some(Duration::from_millis(50)))?;
            std::io::Result::Ok(socket)
        })
        .map_err(doing("the log server"))?;
    let receiver = thread::spawn(move || {
        let (mut leaked, mut line) = (0, [0; 256]);
        while !until.load(Relaxed) {
            let Ok(len) = server.recv(&mut line) else { continue };
            let text = String::from_utf8_lossy(&line[..len]);
            leaked += u64::from(text.contains(PATTERN));
            counter.fetch_add(1, Relaxed);
        }
        leaked
    });
    let arrived = Arc::clone(&count);
    let resumed = Arc::new(AtomicBool::new(false));
    let enough = Arc::clone(&resumed);
    // Lines that were lost with the inspector are no longer in flight.
    let gone = Arc::new(AtomicU64::new(0));
    let credit = Arc::clone(&gone);
    let begun = Instant::now();
    let sender = network.outside.start(move || write(length, [&arrived, &credit], &enough));
    stop.until(PATIENCE, || Ok(begun.elapsed() >= length / 2 && count.load(Relaxed) > 0))?;
    kill();
    let (killed, before) = (Instant::now(), count.load(Relaxed));
    stop.until(PATIENCE, || {
        gone.store(lost(), Relaxed);
        Ok(count.load(Relaxed) > before + WINDOW)
    })?;
    let outage = killed.elapsed();
    resumed.store(true, Relaxed);
    let sent = loop {
        if sender.is_finished() {
            break sender.join();
        }
        stop.pause(Duration::from_millis(20))?;
    };
    let mut lines = sent
        .map_err(|_| Failure::Broken("the sender of lines panicked".into()))?
        .map_err(doing("the lines of the log"))?;
    let clean = lines.sent - lines.secret;
    stop.until(PATIENCE, || Ok(count.load(Relaxed) + lost() >= clean))?;
    over.store(true, Relaxed);
    lines.lost = lost();
    lines.leaked = receiver.join().map_err(|_| Failure::Broken("the log server panicked".into()))?;
    lines.arrived = count.load(Relaxed);
    lines.outage_ms = outage.as_secs_f64() * 1e3;
    Ok(lines)
}

/// Sends lines for `length`, and until `enough` is set. `done` counts the lines that are no longer in flight.
fn write(length: Duration, done: [&AtomicU64; 2], enough: &AtomicBool) -> std::io::Result<Lines> {
    let socket = UdpSocket::bind((CLIENT, 0))?;
    socket.connect((SERVER, LOGS))?;
    let end = Instant::now() + length;
    let mut lines = Lines::default();
    while Instant::now() < end || !enough.load(Relaxed) && Instant::now() < end + PATIENCE {
        if lines.sent - lines.secret > done.iter().map(|done| done.load(Relaxed)).sum::<u64>() + WINDOW {
            thread::sleep(REST);
            continue;
        }
        for _ in 0..BURST {
            let number = lines.sent;
            let secret = number % SECRETS == SECRETS - 1;
            let rest = if secret { "password=hunter2" } else { "logged in" };
            socket.send(format!("{number} user=u{} {rest}", number % 97).as_bytes())?;
            lines.sent += 1;
            lines.secret += u64::from(secret);
        }
        thread::sleep(REST);
    }
    Ok(lines)
}
