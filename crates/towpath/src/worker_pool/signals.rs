//! Signals as readable descriptors.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use rustix::event::epoll::{CreateFlags, EventData, EventFlags, add, create};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR2};
use signal_hook::low_level::pipe;

/// The request that a signal makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Signal {
    /// SIGTERM, SIGINT.
    End,
    /// SIGHUP.
    Replace,
    /// SIGUSR2.
    Upgrade,
}

/// Receives signals from here on; their default actions are disabled.
#[derive(Debug)]
pub(super) struct Signals {
    end: UnixStream,
    replace: UnixStream,
    /// Only with signals.
    upgrade: Option<UnixStream>,
    /// Readable when one of them is readable.
    either: std::os::fd::OwnedFd,
    pending: VecDeque<Signal>,
}

/// Controls a pool in place of signals, for a process that has several.
#[derive(Debug)]
pub struct PoolControl {
    end: UnixStream,
    replace: UnixStream,
}

impl PoolControl {
    /// Drains the pool. A second call ends it at once.
    pub fn end(&self) {
        say(&self.end);
    }

    /// Replaces the workers one by one.
    pub fn replace(&self) {
        say(&self.replace);
    }
}

fn say(mut to: &UnixStream) {
    // Fails if the buffer is full, or if the pool has gone.
    let _ = to.write(&[0]);
}

impl Signals {
    pub(super) fn new() -> io::Result<Self> {
        let (mut signals, PoolControl { end, replace }) = Self::channel()?;
        let (upgrade, told) = UnixStream::pair()?;
        upgrade.set_nonblocking(true)?;
        add(&signals.either, &upgrade, EventData::new_u64(2), EventFlags::IN)?;
        signals.upgrade = Some(upgrade);
        pipe::register(SIGUSR2, told)?;
        pipe::register(SIGINT, end.try_clone()?)?;
        pipe::register(SIGTERM, end)?;
        pipe::register(SIGHUP, replace)?;
        Ok(signals)
    }

    /// Receives requests from [`PoolControl`] instead of signals.
    pub(super) fn channel() -> io::Result<(Self, PoolControl)> {
        let (end, end_tx) = UnixStream::pair()?;
        let (replace, replace_tx) = UnixStream::pair()?;
        for stream in [&end, &replace, &end_tx, &replace_tx] {
            stream.set_nonblocking(true)?;
        }
        let either = create(CreateFlags::CLOEXEC)?;
        add(&either, &end, EventData::new_u64(0), EventFlags::IN)?;
        add(&either, &replace, EventData::new_u64(1), EventFlags::IN)?;
        let orders = PoolControl { end: end_tx, replace: replace_tx };
        Ok((Self { end, replace, upgrade: None, either, pending: VecDeque::new() }, orders))
    }

    /// Reads pending signals.
    pub(super) fn read(&mut self) {
        let upgrade = self.upgrade.as_mut().map(|upgrade| (upgrade, Signal::Upgrade));
        let streams = [(&mut self.replace, Signal::Replace), (&mut self.end, Signal::End)];
        for (stream, signal) in upgrade.into_iter().chain(streams) {
            let mut bytes = [0; 64];
            if let Ok(count) = stream.read(&mut bytes) {
                // Two end requests count as two; two other requests count as one.
                let count = if signal == Signal::End { count } else { count.min(1) };
                self.pending.extend(std::iter::repeat_n(signal, count));
            }
        }
    }

    /// Returns true if an end request is pending.
    pub(super) fn is_told_to_end(&self) -> bool {
        self.pending.contains(&Signal::End)
    }

    pub(super) fn next(&mut self) -> Option<Signal> {
        self.pending.pop_front()
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.either.as_fd()
    }
}
