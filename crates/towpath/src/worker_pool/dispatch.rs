//! Who gets which of the messages that wait.
//!
//! What: a message goes to a worker that has nothing, the one that waits longest first. Where all messages are short, waking a worker
//! costs more than they do: then those that are awake get them, and no more are awake than there are processors beside the front's.
//!
//! Invariants:
//! - a worker that has messages and has said nothing about them gets nothing more until it does: it may be at a long one, and what it
//!   has cannot be taken back. After [`STUCK`] it counts as asleep;
//! - what is left with the core while somebody is idle is dealt anew when a worker has come to that ([`Dispatcher::again`]).

use std::time::Duration;

use towpath_mux::Time;
use towpath_mux::mux::{Mux, Order};

use super::worker_slot::WorkerSlot;

/// Messages that wait, from which on short ones are given by the turn.
const MANY: usize = 16;
/// A worker that has messages and has not said anything for so long is at a long one, or does nothing at all. Longer than a
/// processor's other tasks keep it waiting usually. In nanoseconds.
const STUCK: u64 = 5_000_000;

#[derive(Debug)]
pub(super) struct Dispatcher {
    /// Workers that short messages are given to at a time.
    spread: usize,
    /// Which slot asks first.
    turn: usize,
    /// How long those that were left may wait.
    again: Option<Duration>,
}

impl Dispatcher {
    pub(super) fn new() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self { spread: spread(processors), turn: 0, again: None }
    }

    /// When to dispatcher again though nothing happens.
    pub(super) const fn again(&self) -> Option<Duration> {
        self.again
    }

    /// Nothing is left.
    pub(super) const fn rest(&mut self) {
        self.again = None;
    }

    /// Gives workers what they are to do next; whether any of them got something. `now` is the front's clock, `time` the core's.
    pub(super) fn dispatch(&mut self, slots: &mut [WorkerSlot], mux: &mut Mux, time: Time, now: u64) -> bool {
        self.turn = (self.turn + 1) % slots.len();
        // What waits for one worker only is for that one.
        let quick = mux.quick_batch().filter(|_| mux.config().order != Order::Sticky);
        let busy = match quick {
            Some(turn) => self.dispatch_short(slots, mux, time, now, turn),
            None => self.all(slots, mux, time, now),
        };
        let waits = mux.queued() > 0 && slots.iter().any(WorkerSlot::is_idle);
        let stuck = slots.iter().filter_map(|slot| slot.until_stuck(now, STUCK)).filter(|left| *left > 0);
        self.again = stuck.min().filter(|_| waits).map(Duration::from_nanos);
        busy
    }

    /// To those that are awake, and to as dispatch_short others as will do.
    fn dispatch_short(
        &self,
        slots: &mut [WorkerSlot],
        mux: &mut Mux,
        time: Time,
        now: u64,
        turn: usize,
    ) -> bool {
        let (mut busy, mut awake) = (false, 0);
        for slot in slots.iter_mut().filter(|slot| slot.is_going_on(now, STUCK)) {
            awake += 1;
            busy |= slot.moves() && slot.fill(mux, time, turn);
        }
        // The same one first each time: what it uses is in its processor's cache.
        for slot in slots.iter_mut().filter(|slot| slot.is_idle()) {
            if mux.queued() == 0 || awake >= self.spread {
                break;
            }
            awake += 1;
            busy |= slot.fill(mux, time, turn);
        }
        // What is more than a turn for each goes to those that are awake all the same, once they have shown that they are.
        let share = mux.queued().div_ceil(awake.max(1));
        for slot in slots.iter_mut().filter(|slot| slot.is_going_on(now, STUCK) && slot.moves()) {
            busy |= share > 0 && slot.fill(mux, time, slot.working() + share);
        }
        busy
    }

    /// Those that have nothing first: a message does not wait behind another while somebody is idle. What a process has it
    /// keeps, so all of them share what there is.
    fn all(&self, slots: &mut [WorkerSlot], mux: &mut Mux, time: Time, now: u64) -> bool {
        let mut busy = false;
        if let Some(turn) = mux.short_batch().filter(|_| mux.queued() >= MANY) {
            // Many short ones: each worker has as many as are worth a wake-up before the next one is woken.
            for slot in slots.iter_mut().filter(|slot| slot.is_idle() || slot.is_going_on(now, STUCK)) {
                busy |= slot.fill(mux, time, turn);
            }
        }
        let idle = slots.iter().filter(|slot| slot.is_idle()).count();
        let share = mux.queued().div_ceil(idle.max(1)).max(1);
        let (left, right) = slots.split_at_mut(self.turn);
        for slot in right.iter_mut().chain(&mut *left).filter(|slot| slot.is_idle()) {
            busy |= slot.fill(mux, time, share);
        }
        for slot in right.iter_mut().chain(left).filter(|slot| slot.is_going_on(now, STUCK)) {
            busy |= slot.fill(mux, time, usize::MAX);
        }
        busy
    }
}

/// One processor is the front's. Its peers, where they are on this machine, have to make do with what is left.
const fn spread(processors: usize) -> usize {
    match processors {
        0..=2 => 1,
        more => more - 1,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use towpath_mux::io::Server;

    use super::super::completions::Completions;
    use super::super::worker_slot::tests::{ask, attach, learn};
    use super::*;

    #[test]
    fn short_messages_wake_one_worker_and_another_when_that_is_stuck() {
        let server = Server::new("line".parse().unwrap(), towpath_mux::mux::Config::default()).unwrap();
        let mut driver = server.driver().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let mut slots = [0, 1].map(|number| WorkerSlot::new(number, directory.path(), false));
        driver.change(learn);
        let workers = slots.each_mut().map(|slot| {
            let path = directory.path().join(format!("worker-{}-0.sock", slot.number()));
            attach(slot, path, &mut driver, Instant::now())
        });
        let (mut dispatcher, mut completions) =
            (Dispatcher { spread: 1, turn: 0, again: None }, Completions::default());
        // At so many nanoseconds come so many messages; what the workers have then.
        let rows = [
            (0, 3, [3, 0]),
            (1000, 40, [3, 0]),
            (STUCK - 1, 1, [3, 0]),
            (STUCK, 2, [3, 43]),
            (STUCK + 1, 1, [3, 43]),
        ];
        for (at, lines, expected) in rows {
            driver.change(|mux, now| {
                ask(mux, lines, now);
                dispatcher.dispatch(&mut slots, mux, now, at);
            });
            slots.iter_mut().for_each(|slot| slot.hand_over(&mut completions, at, 0));
            assert_eq!(slots.each_ref().map(WorkerSlot::working), expected, "at {at}");
        }
        drop(workers);
    }
}
