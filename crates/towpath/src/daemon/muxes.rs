//! The muxes of a thread that has packets: each has a turn between two bursts.
//!
//! What: a turn of a mux is bounded ([`WorkerPool::step`]), and so is a burst. While both have something to do, packets have as
//! long as the muxes had: half of the time is for either. While the muxes have nothing to do, packets go by without a
//! look at them for [`LOOK`], so a packet does not pay for a system call of theirs.
//!
//! Invariant: muxes are stepped whenever no packet came; a mux that was not busy is stepped again before its thread sleeps, and is
//! armed then: whatever brings it work wakes the thread.

use std::os::fd::BorrowedFd;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustix::fd::AsFd;

use crate::eventfd::EventFd;
use crate::worker_pool::{self, Step, WorkerPool};

/// How long packets go by without a look at muxes that have nothing to do.
const LOOK: Duration = Duration::from_micros(50);

/// A mux on an engine's thread.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) front: WorkerPool,
    /// Who waits for its end has it then, and whether it was drained.
    pub(super) end: Sender<Gone>,
    /// Rung then.
    pub(super) done: EventFd,
}

/// A mux that is over, or has failed.
pub(super) type Gone = (WorkerPool, Result<bool, worker_pool::Error>);

/// See the module's text.
#[derive(Debug)]
pub(super) struct Muxes {
    served: Vec<Served>,
    share: Share,
}

/// Whose turn it is while packets come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Share {
    due: Instant,
}

impl Muxes {
    pub(super) fn new() -> Self {
        Self { served: Vec::new(), share: Share { due: Instant::now() } }
    }

    /// One more.
    pub(super) fn serve(&mut self, served: Served) {
        self.served.push(served);
    }

    /// Whether there are none (any more).
    pub(super) fn is_empty(&self) -> bool {
        self.served.is_empty()
    }

    /// A turn of each, if it is theirs; `packets` have come since they were asked last. Whether there was something to do.
    pub(super) fn turn(&mut self, packets: bool) -> bool {
        if self.served.is_empty() {
            return false;
        }
        let begun = Instant::now();
        if packets && !self.share.is_due(begun) {
            return false;
        }
        let mut busy = false;
        let mut at = 0;
        while let Some(served) = self.served.get_mut(at) {
            let gone = match served.front.step() {
                Ok(Step::Over { drained }) => Ok(drained),
                Ok(step) => {
                    busy |= step == Step::Busy;
                    at += 1;
                    continue;
                }
                Err(error) => Err(error),
            };
            let Served { front, end, done } = self.served.remove(at);
            // Who has gone does not want to know.
            let _ = end.send((front, gone));
            done.signal();
        }
        self.share.record(begun, Instant::now(), busy);
        busy
    }

    /// Has everything that brings work make a descriptor readable; for how long they can be left alone otherwise. Nothing
    /// when one of them has something to do.
    pub(super) fn arm(&mut self) -> Option<Duration> {
        self.served.iter_mut().try_fold(Duration::MAX, |least, served| Some(least.min(served.front.arm()?)))
    }

    /// What wakes who sleeps.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.served.iter().map(|served| served.front.as_fd())
    }
}

impl Share {
    fn is_due(&self, now: Instant) -> bool {
        now >= self.due
    }

    /// The muxes had a turn.
    fn record(&mut self, begun: Instant, now: Instant, busy: bool) {
        self.due = now + if busy { now.saturating_duration_since(begun) } else { LOOK };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread on which bursts take `burst` and turns of muxes `turn`, both without end: what either has of a second.
    fn shares(burst: Duration, turn: Duration, busy: bool) -> (Duration, Duration) {
        let start = Instant::now();
        let (mut now, mut share) = (start, Share { due: start });
        let (mut packets, mut messages) = (Duration::ZERO, Duration::ZERO);
        while now - start < Duration::from_secs(1) {
            now += burst;
            packets += burst;
            if share.is_due(now) {
                let begun = now;
                now += turn;
                messages += turn;
                share.record(begun, now, busy);
            }
        }
        (packets, messages)
    }

    #[test]
    fn neither_packets_nor_messages_starve() {
        let us = Duration::from_micros;
        for (burst, turn) in [(1, 1000), (100, 1000), (200, 200), (999, 1000), (1000, 100), (1000, 1)] {
            let (packets, messages) = shares(us(burst), us(turn), true);
            // Packets have half of it at least, however long a turn of the muxes is.
            assert!(packets + us(burst) >= messages, "{burst} {turn}: {packets:?} {messages:?}");
            // The muxes have a turn after each burst, or half of the time but for what a burst takes beyond its share.
            let bursts = packets.as_micros() as u64 / burst;
            let fair = us(bursts * turn)
                .min(packets.saturating_sub(us(burst) * (messages.as_micros() as u32 / turn as u32)));
            assert!(messages + us(turn) >= fair, "{burst} {turn}: {packets:?} {messages:?}");
        }
        // Muxes that have nothing to do cost packets little.
        let (packets, messages) = shares(us(1), us(2), false);
        assert!(messages * 20 < packets, "{packets:?} {messages:?}");
    }
}
