//! The muxes of an engine thread: each runs between two packet bursts.
//!
//! Purpose: a turn of a mux is bounded ([`WorkerPool::step`]), and so is a burst. While both have work, packets
//! and muxes get the same time. While the muxes are idle they are polled every [`LOOK`], so that packets do not pay for the
//! muxes' system calls.
//!
//! Invariant: muxes are stepped whenever no packet arrived. A mux that was idle is stepped again and armed before its thread
//! sleeps, so that new work wakes the thread.

use std::os::fd::BorrowedFd;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustix::fd::AsFd;

use crate::eventfd::EventFd;
use crate::worker_pool::{self, Step, WorkerPool};

/// Interval between two polls of idle muxes while packets arrive.
const LOOK: Duration = Duration::from_micros(50);

/// A mux served by an engine thread.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) front: WorkerPool,
    /// Receives the mux when it has ended, and whether it was drained.
    pub(super) end: Sender<Gone>,
    /// Signalled when the mux has ended.
    pub(super) done: EventFd,
}

/// A mux that has ended or failed.
pub(super) type Gone = (WorkerPool, Result<bool, worker_pool::Error>);

/// The muxes of one engine thread; see the module documentation.
#[derive(Debug)]
pub(super) struct Muxes {
    served: Vec<Served>,
    share: Share,
}

/// Division of time between packets and muxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Share {
    due: Instant,
}

impl Muxes {
    pub(super) fn new() -> Self {
        Self { served: Vec::new(), share: Share { due: Instant::now() } }
    }

    /// Adds a mux.
    pub(super) fn serve(&mut self, served: Served) {
        self.served.push(served);
    }

    /// Returns true if no mux is left.
    pub(super) fn is_empty(&self) -> bool {
        self.served.is_empty()
    }

    /// Steps each mux whose turn it is. `packets`: packets arrived since the last call. Returns whether any mux had work.
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
            // The receiver may be gone.
            let _ = end.send((front, gone));
            done.signal();
        }
        self.share.record(begun, Instant::now(), busy);
        busy
    }

    /// Arms every source of work, so that new work makes a descriptor readable. Returns the time until the next [`turn`](Self::turn)
    /// is due, or `None` if a mux has work.
    pub(super) fn arm(&mut self) -> Option<Duration> {
        self.served.iter_mut().try_fold(Duration::MAX, |least, served| Some(least.min(served.front.arm()?)))
    }

    /// The descriptors that wake the thread.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.served.iter().map(|served| served.front.as_fd())
    }
}

impl Share {
    fn is_due(&self, now: Instant) -> bool {
        now >= self.due
    }

    /// Records a turn of the muxes from `begun` to `now`.
    fn record(&mut self, begun: Instant, now: Instant, busy: bool) {
        self.due = now + if busy { now.saturating_duration_since(begun) } else { LOOK };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a second of a saturated thread: bursts take `burst`, turns of muxes `turn`. Returns the time each side got.
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
    fn packets_and_messages_share_the_thread() {
        let us = Duration::from_micros;
        for (burst, turn) in [(1, 1000), (100, 1000), (200, 200), (999, 1000), (1000, 100), (1000, 1)] {
            let (packets, messages) = shares(us(burst), us(turn), true);
            // Packets get at least half, however long a mux's turn is.
            assert!(packets + us(burst) >= messages, "{burst} {turn}: {packets:?} {messages:?}");
            // Muxes get a turn after each burst, or half of the time less what one burst takes beyond its share.
            let bursts = packets.as_micros() as u64 / burst;
            let fair = us(bursts * turn)
                .min(packets.saturating_sub(us(burst) * (messages.as_micros() as u32 / turn as u32)));
            assert!(messages + us(turn) >= fair, "{burst} {turn}: {packets:?} {messages:?}");
        }
        // Idle muxes cost packets little.
        let (packets, messages) = shares(us(1), us(2), false);
        assert!(messages * 20 < packets, "{packets:?} {messages:?}");
    }
}
