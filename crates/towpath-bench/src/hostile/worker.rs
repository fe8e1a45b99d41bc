//! The hostile worker of a mux.

use std::os::fd::AsFd;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use towpath_ring::{Connection, Kind, Meta, Worker};

use super::attack::Random;
use super::raw_ring::{self, DOORBELL, ONESHOT, RawRing, notice};

/// Connections that pass a socket before the worker attaches.
const EARLY: usize = 16;
/// Time that a worker lives after it has passed descriptors: the engine reads them.
const READ: Duration = Duration::from_millis(100);

/// Runs the worker in the way of the mode `how`.
pub(crate) fn side(how: &str) -> Result<()> {
    match how {
        "worker-late" => late(),
        "worker-linger" => linger(),
        "worker-parts" => parts(None),
        "worker-unread" => parts(Some(b"x")),
        "worker-empty" => parts(Some(b"")),
        _ => too_often(),
    }
}

/// Answers messages more than once, and sends to connections from which it received no message.
fn too_often() -> Result<()> {
    let mut worker = Worker::attach_env()?;
    let mut random = Random(u64::from(std::process::id()));
    let mut answers = 0;
    while let Some(message) = worker.recv()? {
        let bytes = worker.bytes(&message).to_vec();
        for _ in 0..=random.below(4) {
            worker.reply(&message, &bytes)?;
        }
        for _ in 0..random.below(3) {
            let connection =
                Connection { index: random.next() as u32 % 16, generation: random.next() as u32 % 4 };
            worker.forward(connection, &bytes)?;
        }
        worker.done(message);
        answers += 1;
        if answers > 100 && random.below(100) == 0 {
            bail!("the hostile worker dies");
        }
    }
    Ok(())
}

/// Answers messages after their release: at once, and when later messages have taken their place.
fn late() -> Result<()> {
    let mut worker = Worker::attach_env()?;
    let mut random = Random(u64::from(std::process::id()));
    let mut released = Vec::new();
    while let Some(message) = worker.recv()? {
        let bytes = worker.bytes(&message).to_vec();
        // Some answers in time, so that the engine starts the worker again soon.
        if random.below(2) == 0 {
            worker.reply(&message, &bytes)?;
        }
        released.push(message.seq());
        worker.done(message);
        if random.below(8) == 0 {
            let of = released[random.below(released.len())];
            let kind = if random.below(2) == 0 { Kind::REPLY } else { Kind::REPLY_PART };
            worker.queue().send(&bytes, &Meta { kind, port: of.0, ..Meta::default() })?;
            worker.queue().flush();
        }
    }
    Ok(())
}

/// Answers in parts of one byte, sometimes of none, and some answers never end. With a part, answers with this part and without an end.
fn parts(only: Option<&[u8]>) -> Result<()> {
    let mut worker = Worker::attach_env()?;
    let mut random = Random(u64::from(std::process::id()));
    while let Some(message) = worker.recv()? {
        let bytes = worker.bytes(&message).to_vec();
        let endless = only.is_some() || random.below(100) == 0;
        for part in bytes.chunks(1).cycle().take(if endless { usize::MAX } else { 4096 }) {
            let empty = random.below(8) == 0;
            worker.reply_part(&message, only.unwrap_or(if empty { &[] } else { part }))?;
        }
        worker.reply(&message, &[])?;
        worker.done(message);
    }
    Ok(())
}

/// Passes sockets whose close blocks to the engine, before and after it attaches.
fn linger() -> Result<()> {
    let path = std::env::var_os("TOWPATH_SOCKET").context("no TOWPATH_SOCKET")?;
    let path = Path::new(&path);
    for _ in 0..EARLY {
        let (socket, _peer) = raw_ring::lingering()?;
        if let Ok(early) = raw_ring::connect(path) {
            raw_ring::send(&early, b"no hello", &[socket.as_fd()]);
        }
    }
    let ring = RawRing::attach(path, 1)?;
    let mut peers = Vec::new();
    while ring.is_open() {
        let (socket, peer) = raw_ring::lingering()?;
        peers.push(peer);
        for message in [notice(ONESHOT, 1, 100), notice(DOORBELL, 0, 0)] {
            raw_ring::send(&ring.socket, &message, &[socket.as_fd()]);
        }
        drop(socket);
        thread::sleep(READ);
    }
    bail!("the engine has detached the hostile worker")
}
