#![allow(unsafe_code)]
//! A Unix SOCK_SEQPACKET pair with sendmmsg and recvmmsg (unix(7), sendmmsg(2), recvmmsg(2)).

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::net::sockopt::{set_socket_send_buffer_size, set_socket_send_buffer_size_force};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::mmsg::Batch;
use crate::pin::{self, Cpus};
use crate::raw::say;
use crate::side::{Side, inherit};

/// Size of the socket buffers in bytes.
const BUFFER: usize = 4 << 20;

/// Returns the messages per second of `len` bytes, `batch` per system call, counted by the receiver.
pub(crate) fn rate(cpus: Cpus, time: Duration, len: usize, batch: usize) -> Result<f64> {
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (ours, theirs) = pair.context("making a seqpacket pair")?;
    // Without privileges, the kernel limits the size to net.core.wmem_max.
    if set_socket_send_buffer_size_force(&ours, BUFFER).is_err() {
        set_socket_send_buffer_size(&ours, BUFFER)?;
    }
    let words = [
        "seqpacket".to_owned(),
        inherit(&theirs)?,
        len.to_string(),
        batch.to_string(),
        cpus.consumer.to_string(),
    ];
    let mut side = Side::start(&words, &[])?;
    drop(theirs);
    side.line()?;
    pin::to(cpus.engine)?;
    let mut messages = Batch::new((0..batch).map(|_| vec![b'x'; len].into()).collect());
    let start = Instant::now();
    while start.elapsed() < time {
        for _ in 0..16 {
            messages.send(&ours, 0).context("sendmmsg")?;
        }
    }
    drop(ours);
    let rate = side.number()?;
    side.finish()?;
    Ok(rate)
}

pub(crate) fn rate_side(socket: RawFd, len: usize, batch: usize, cpu: usize) -> Result<()> {
    // SAFETY: the parent process left this descriptor open under this number, and no other code in this process uses it.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    pin::to(cpu)?;
    let mut messages = Batch::new((0..batch).map(|_| vec![0; len].into()).collect());
    say("ready")?;
    let mut count = 0;
    let mut start = Instant::now();
    while let Some(received) = messages.receive(&socket, batch).context("recvmmsg")? {
        if count == 0 {
            start = Instant::now();
        }
        count += received;
    }
    say(&(count as f64 / start.elapsed().as_secs_f64()).to_string())
}
