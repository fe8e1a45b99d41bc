//! Timers of connections: assembly, idle, send and drain deadlines.
//!
//! What: each connection has one current entry, never later than its earliest deadline. A deadline that moves
//! back leaves the entry in place: the entry expires, finds nothing due, and is set again.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::event::Cause;
use super::psock;
use super::{Mux, worker};
use crate::Time;

/// Stale entries that are kept besides one entry per connection.
const STALE: usize = 1024;

/// Timer entries, the earliest first. An entry is stale when its connection has gone or has an earlier entry.
#[derive(Debug, Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<(Time, psock::Id)>>,
}

impl Timers {
    pub(super) fn push(&mut self, time: Time, id: psock::Id) {
        self.heap.push(Reverse((time, id)));
    }

    /// Time of the earliest entry.
    pub(super) fn next(&self) -> Option<Time> {
        self.heap.peek().map(|Reverse((time, _))| *time)
    }

    /// Removes and returns the earliest entry that is due.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<(Time, psock::Id)> {
        self.next().filter(|time| *time <= now)?;
        self.heap.pop().map(|Reverse(entry)| entry)
    }

    /// Drops stale entries (those for which `is_current` is false) when they outnumber the `psocks` connections.
    pub(super) fn compact(&mut self, psocks: usize, is_current: impl Fn(Time, psock::Id) -> bool) {
        if self.heap.len() > 2 * psocks + STALE {
            self.heap.retain(|Reverse((time, id))| is_current(*time, *id));
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.heap.len()
    }
}

impl Mux {
    /// When to call [`Mux::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Time> {
        let timer = self.timers.next();
        let leaving = self.workers.values().filter_map(|worker| worker.deadline).min();
        [timer, leaving, self.schedule_timeout()].into_iter().flatten().min()
    }

    /// Handles all timers that are due.
    pub fn handle_timeout(&mut self, now: Time) {
        self.now = self.now.max(now);
        while let Some((time, id)) = self.timers.pop_due(self.now) {
            let Some(psock) = self.psocks.get_mut(id) else { continue };
            if psock.armed != Some(time) {
                continue;
            }
            psock.armed = None;
            self.expire(id);
        }
        let due = |worker: &worker::Worker| worker.deadline.is_some_and(|deadline| deadline <= self.now);
        let late: Vec<_> = self.workers.iter().filter(|(_, worker)| due(worker)).map(|(id, _)| id).collect();
        for worker in late {
            self.expire_worker(worker);
        }
        self.expire_wakeups();
        self.recall();
    }

    /// Sets the connection's timer if its entry is later than its earliest deadline.
    pub(super) fn arm(&mut self, id: psock::Id) {
        let Some(deadline) = self.deadline(id).map(|(time, _)| time) else { return };
        let Some(psock) = self.psocks.get_mut(id) else { return };
        if psock.armed.is_none_or(|armed| deadline < armed) {
            psock.armed = Some(deadline);
            self.timers.push(deadline, id);
        }
        let Self { timers, psocks, .. } = self;
        timers
            .compact(psocks.len(), |time, id| psocks.get(id).is_some_and(|psock| psock.armed == Some(time)));
    }

    fn expire(&mut self, id: psock::Id) {
        let due = |time: Option<Time>| time.is_some_and(|time| time <= self.now);
        if due(self.psocks.get(id).and_then(|psock| psock.tx.unacked.ask())) {
            self.ask_unacked(id);
        }
        match self.deadline(id) {
            Some((time, cause)) if time <= self.now => match cause {
                Some(cause) => self.abort(id, cause),
                None => self.assemble(id),
            },
            _ => self.arm(id),
        }
    }

    /// The connection's earliest deadline and the cause with which it ends then; no cause if the assembler
    /// decides.
    fn deadline(&self, id: psock::Id) -> Option<(Time, Option<Cause>)> {
        let psock = self.psocks.get(id).filter(|psock| !psock.is_dead())?;
        let config = &self.config;
        let quiet =
            psock.is_open() && psock.outstanding == 0 && psock.tx.bytes == 0 && !psock.tx.is_pending();
        let idle = config.idle.filter(|_| quiet).map(|time| psock.active + time);
        let send = config.send_time.filter(|_| psock.tx.is_pending());
        let send = send.map(|time| psock.tx.progress + time);
        let reading = psock.is_open() && psock.reported.read && psock.reading.is_none();
        let assembly = if reading { psock.assembler.poll_timeout() } else { None };
        [
            idle.map(|time| (time, Some(Cause::Idle))),
            send.map(|time| (time, Some(Cause::SendTimeout))),
            psock.deadline.map(|time| (time, Some(Cause::DrainTimeout))),
            assembly.map(|time| (time, None)),
            psock.tx.unacked.ask().map(|time| (time, None)),
        ]
        .into_iter()
        .flatten()
        .min_by_key(|(time, _)| *time)
    }
}
