//! Signals as readable descriptors.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::event::epoll::{CreateFlags, EventData, EventFlags, add, create};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR2};
use signal_hook::low_level::pipe;

use crate::upgrade::Successor;

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

/// A step of an upgrade whose new process the pool does not start ([`PoolControl`]).
#[derive(Debug)]
pub(super) enum Step {
    /// Connections go to this process.
    HandOver(Successor),
    /// Everything that can be handed over was.
    Complete,
}

/// Receives signals from here on; their default actions are disabled.
#[derive(Debug)]
pub(super) struct Signals {
    end: UnixStream,
    replace: UnixStream,
    upgrade: UnixStream,
    steps: Receiver<Step>,
    moved: Arc<AtomicU8>,
    /// Readable when one of them is readable.
    either: std::os::fd::OwnedFd,
    pending: VecDeque<Signal>,
}

/// Controls a pool in place of signals, for a process that has several.
#[derive(Debug)]
pub struct PoolControl {
    end: UnixStream,
    replace: UnixStream,
    upgrade: UnixStream,
    steps: Sender<Step>,
    moved: Arc<AtomicU8>,
}

/// How far the connections have moved ([`PoolControl::moved`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Moved {
    /// Some are to be handed over.
    Partly,
    /// Everything that can be handed over was.
    Completely,
    /// The new process has closed the channel before that.
    Lost,
}

impl PoolControl {
    /// Hands the connections over to a new process, until [`moved`](Self::moved) says so. The pool then waits for
    /// [`complete`](Self::complete). If the new process ends before that, the pool accepts connections again.
    pub fn hand_over(&self, successor: Successor) {
        self.moved.store(Moved::Partly as u8, Ordering::Relaxed);
        self.step(Step::HandOver(successor));
    }

    /// The new process has replaced this one: the pool serves the connections that stay until they end or the time for a drain has passed,
    /// and ends. A pool that has handed over nothing drains.
    pub fn complete(&self) {
        self.step(Step::Complete);
    }

    fn step(&self, step: Step) {
        // Fails if the pool has gone.
        let _ = self.steps.send(step);
        say(&self.upgrade);
    }

    /// How far the connections have moved.
    pub fn moved(&self) -> Moved {
        let moved = self.moved.load(Ordering::Relaxed);
        [Moved::Partly, Moved::Lost].into_iter().find(|it| *it as u8 == moved).unwrap_or(Moved::Completely)
    }

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
        let (signals, PoolControl { end, replace, upgrade, .. }) = Self::channel()?;
        pipe::register(SIGUSR2, upgrade)?;
        pipe::register(SIGINT, end.try_clone()?)?;
        pipe::register(SIGTERM, end)?;
        pipe::register(SIGHUP, replace)?;
        Ok(signals)
    }

    /// Receives requests from [`PoolControl`] instead of signals.
    pub(super) fn channel() -> io::Result<(Self, PoolControl)> {
        let (end, end_tx) = UnixStream::pair()?;
        let (replace, replace_tx) = UnixStream::pair()?;
        let (upgrade, upgrade_tx) = UnixStream::pair()?;
        for stream in [&end, &replace, &upgrade, &end_tx, &replace_tx, &upgrade_tx] {
            stream.set_nonblocking(true)?;
        }
        let either = create(CreateFlags::CLOEXEC)?;
        add(&either, &end, EventData::new_u64(0), EventFlags::IN)?;
        add(&either, &replace, EventData::new_u64(1), EventFlags::IN)?;
        add(&either, &upgrade, EventData::new_u64(2), EventFlags::IN)?;
        let (sender, steps) = channel();
        let moved = Arc::new(AtomicU8::new(Moved::Completely as u8));
        let orders = PoolControl {
            end: end_tx,
            replace: replace_tx,
            upgrade: upgrade_tx,
            steps: sender,
            moved: Arc::clone(&moved),
        };
        let pending = VecDeque::new();
        Ok((Self { end, replace, upgrade, steps, moved, either, pending }, orders))
    }

    /// Reads pending signals.
    pub(super) fn read(&mut self) {
        let streams = [
            (&mut self.upgrade, Signal::Upgrade),
            (&mut self.replace, Signal::Replace),
            (&mut self.end, Signal::End),
        ];
        for (stream, signal) in streams {
            let mut bytes = [0; 64];
            if let Ok(count) = stream.read(&mut bytes) {
                // Two end requests count as two; two other requests count as one.
                let count = if signal == Signal::End { count } else { count.min(1) };
                self.pending.extend(std::iter::repeat_n(signal, count));
            }
        }
    }

    /// The next step of [`PoolControl`].
    pub(super) fn step(&self) -> Option<Step> {
        self.steps.try_recv().ok()
    }

    /// Tells [`PoolControl::moved`].
    pub(super) fn tell(&self, moved: Moved) {
        self.moved.store(moved as u8, Ordering::Relaxed);
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
