//! Time that `towpath mux` takes to end beyond `--drain`, while a worker is stuck in a message.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::{message, rings};

const DRAIN: Duration = Duration::from_millis(500);
/// Time for the worker to begin the message that it never answers.
const BEGIN: Duration = Duration::from_millis(200);

/// Returns the excess in nanoseconds. The report has the stuck message as begun.
pub(crate) fn excess() -> Result<f64> {
    let (front, address) = rings::start_with(1, "mux-stuck-worker", DRAIN)?;
    let mut client = TcpStream::connect(address)?;
    let first = message(64, 0, false);
    client.write_all(&first)?;
    client.read_exact(&mut vec![0; first.len()])?;
    client.write_all(&message(64, 1, true))?;
    thread::sleep(BEGIN);
    client.write_all(&message(64, 2, false))?;
    thread::sleep(BEGIN);
    let start = Instant::now();
    let report = front.finish()?;
    let excess = start.elapsed().saturating_sub(DRAIN);
    ensure!(
        report.contains("3 messages: 1 done, 0 given up, ") && report.contains(", 1 begun, "),
        "{report}"
    );
    Ok(excess.as_nanos() as f64)
}

/// Runs a worker process that never answers a marked message.
pub(crate) fn side() -> Result<()> {
    let mut worker = towpath_ring::Worker::attach_env()?;
    Ok(worker.serve(|message, answer| {
        if message.bytes()[super::MARK] == 1 {
            thread::sleep(Duration::MAX);
        }
        answer.extend_from_slice(message.bytes());
    })?)
}
