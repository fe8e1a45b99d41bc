//! Dispatch: which worker gets the waiting messages.
//!
//! A message goes to an idle worker, in rotation. If all messages are short, waking a worker costs more
//! than processing them. Then the awake workers get them, and the number of workers woken for short messages
//! is at most the number of CPUs minus one (at least 1).
//!
//! Workers on other machines get what the local ones do not take: the nearest first, by the measured round trip. While all messages are
//! short, they get none, unless no local worker is attached.
//!
//! Invariants:
//! - A worker that holds messages and has made no progress on them gets no more: it may be at a long message,
//!   and its messages cannot be recalled. After [`STUCK`] it counts as asleep.
//! - If messages remain queued in the [`Mux`] while a worker is idle, dispatch runs again when the next busy
//!   worker has made no progress for [`STUCK`] ([`Dispatcher::again`]).

use std::ops::Range;
use std::time::{Duration, Instant};

use towpath_mux::Time;
use towpath_mux::mux::{Mux, Order};

use super::worker_slot::WorkerSlot;

/// From this number of queued messages on, `all` gives each worker a batch of short messages
/// ([`Mux::short_batch`]).
const MANY: usize = 16;
/// Nanoseconds without progress after which a worker counts as stuck. Longer than the usual delay by other
/// tasks on its CPU.
const STUCK: u64 = 5_000_000;
/// The same for a worker on another machine.
const STUCK_REMOTE: u64 = 100_000_000;
/// Interval at which the round trips are compared.
const COMPARE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Dispatcher {
    /// Maximum number of awake workers for short messages.
    spread: usize,
    /// The slot that is served first.
    turn: usize,
    /// Maximum time until the remaining messages are dispatched again.
    again: Option<Duration>,
    /// Slots of workers on other machines that are attached, nearest first, and when they were compared.
    remote: Vec<usize>,
    compared: Option<Instant>,
}

impl Dispatcher {
    pub(super) fn new() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self { spread: spread(processors), turn: 0, again: None, remote: Vec::new(), compared: None }
    }

    /// Orders the workers on other machines by their round trips.
    pub(super) fn look(&mut self, slots: &[WorkerSlot], now: Instant) {
        let first = slots.partition_point(|slot| !slot.is_remote());
        let current = is_current(&self.remote, first..slots.len(), |at| slots[at].is_attached());
        let due = self.compared.is_none_or(|compared| now.duration_since(compared) >= COMPARE);
        if current && (self.remote.is_empty() || !due) {
            return;
        }
        self.compared = Some(now);
        let mut trips: Vec<_> =
            (first..slots.len()).filter_map(|at| Some((slots[at].round_trip()?, at))).collect();
        trips.sort_unstable();
        self.remote = trips.into_iter().map(|(_, at)| at).collect();
    }

    /// When to dispatch again without an event.
    pub(super) const fn again(&self) -> Option<Duration> {
        self.again
    }

    /// No message is left.
    pub(super) const fn rest(&mut self) {
        self.again = None;
    }

    /// Gives messages to workers. Returns true if a worker got any. `now`: clock of the pool; `time`: clock
    /// of the core.
    pub(super) fn dispatch(&mut self, slots: &mut [WorkerSlot], mux: &mut Mux, time: Time, now: u64) -> bool {
        let first = slots.partition_point(|slot| !slot.is_remote());
        let (local, _) = slots.split_at_mut(first);
        self.turn = (self.turn + 1) % local.len().max(1);
        // A message for one worker only (sticky order) cannot go to another.
        let quick = mux.quick_batch().filter(|_| mux.config().order != Order::Sticky);
        let mut busy = match quick {
            Some(turn) => self.dispatch_short(local, mux, time, now, turn),
            None => self.all(local, mux, time, now),
        };
        let takes = |slot: &WorkerSlot| slot.is_idle() || slot.is_going_on(now, STUCK);
        if !self.remote.is_empty() && (quick.is_none() || !local.iter().any(takes)) {
            busy |= self.dispatch_remote(slots, mux, time, now);
        }
        let waits = mux.available() > 0 && slots.iter().any(WorkerSlot::is_idle);
        let stuck = slots.iter().filter_map(|slot| slot.until_stuck(now, STUCK)).filter(|left| *left > 0);
        self.again = stuck.min().filter(|_| waits).map(Duration::from_nanos);
        busy
    }

    /// To workers on other machines: to the idle ones first, the nearest of them before the others.
    fn dispatch_remote(&self, slots: &mut [WorkerSlot], mux: &mut Mux, time: Time, now: u64) -> bool {
        let mut busy = false;
        let idle = self.remote.iter().filter(|at| slots[**at].is_idle()).count();
        let share = mux.available().div_ceil(idle.max(1)).max(1);
        for at in &self.remote {
            if slots[*at].is_idle() {
                busy |= slots[*at].fill(mux, time, share);
            }
        }
        for at in &self.remote {
            if slots[*at].is_going_on(now, STUCK_REMOTE) {
                busy |= slots[*at].fill(mux, time, usize::MAX);
            }
        }
        busy
    }

    /// Short messages: to the awake workers, and to as few others as necessary.
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
        // Prefer the same worker, whose data is in its CPU's cache.
        for slot in slots.iter_mut().filter(|slot| slot.is_idle()) {
            if mux.available() == 0 || awake >= self.spread {
                break;
            }
            awake += 1;
            busy |= slot.fill(mux, time, turn);
        }
        // The remaining messages go to the awake workers that have made progress.
        let share = mux.available().div_ceil(awake.max(1));
        for slot in slots.iter_mut().filter(|slot| slot.is_going_on(now, STUCK) && slot.moves()) {
            busy |= share > 0 && slot.fill(mux, time, slot.working() + share);
        }
        busy
    }

    /// Long messages, or long and short ones: to the idle workers first, so that no message waits while a
    /// worker is idle. The messages are shared equally, because they cannot be taken back from a process.
    fn all(&self, slots: &mut [WorkerSlot], mux: &mut Mux, time: Time, now: u64) -> bool {
        let mut busy = false;
        if let Some(turn) = mux.short_batch().filter(|_| mux.available() >= MANY) {
            // Many short messages: give a worker as many as are worth a wake-up before waking the next one.
            for slot in slots.iter_mut().filter(|slot| slot.is_idle() || slot.is_going_on(now, STUCK)) {
                busy |= slot.fill(mux, time, turn);
            }
        }
        let idle = slots.iter().filter(|slot| slot.is_idle()).count();
        let share = mux.available().div_ceil(idle.max(1)).max(1);
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

/// Returns true if `remote` has exactly the slots of `all` that are attached.
fn is_current(remote: &[usize], all: Range<usize>, is_attached: impl Fn(usize) -> bool) -> bool {
    remote.iter().all(|at| is_attached(*at)) && all.filter(|at| is_attached(*at)).count() == remote.len()
}

/// One CPU is reserved for the pool's thread; workers and clients on this machine share the others.
const fn spread(processors: usize) -> usize {
    match processors {
        0..=2 => 1,
        more => more - 1,
    }
}

#[cfg(test)]
mod tests {
    use towpath_mux::io::Server;

    use super::super::authority::Rights;
    use super::super::completions::Completions;
    use super::super::connections::Connections;
    use super::super::worker_slot::tests::{ask, attach, learn};
    use super::*;

    #[test]
    fn another_remote_worker_is_found_though_their_number_is_the_same() {
        // Rows: known slots, attached slots, whether they are the same.
        let rows: [(&[usize], &[usize], bool); 7] = [
            (&[], &[], true),
            (&[], &[3], false),
            (&[3], &[], false),
            (&[3], &[3], true),
            (&[3], &[4], false),
            (&[4, 3], &[3, 4], true),
            (&[4, 3], &[3, 5], false),
        ];
        for (known, attached, expected) in rows {
            assert_eq!(
                is_current(known, 2..6, |at| attached.contains(&at)),
                expected,
                "{known:?} {attached:?}"
            );
        }
    }

    #[test]
    fn short_messages_use_one_worker_until_it_is_stuck() {
        let server = Server::new(
            "line".parse().unwrap(),
            towpath_mux::mux::Config::new(towpath_mux::mux::Order::None),
        )
        .unwrap();
        let mut driver = server.driver().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let mut slots = [0, 1].map(|number| WorkerSlot::new(number, directory.path(), Rights::default()));
        driver.change(learn);
        let workers = slots.each_mut().map(|slot| {
            let path = directory.path().join(format!("worker-{}-0.sock", slot.number()));
            attach(slot, path, &mut driver, Instant::now())
        });
        let (mut dispatcher, mut completions) =
            (Dispatcher { spread: 1, ..Dispatcher::new() }, Completions::default());
        // Rows: time in nanoseconds, number of messages that arrive, messages that the workers then hold.
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
            slots
                .iter_mut()
                .for_each(|slot| slot.hand_over(&mut completions, &Connections::default(), at, 0));
            assert_eq!(slots.each_ref().map(WorkerSlot::working), expected, "at {at}");
        }
        drop(workers);
    }
}
