//! Ready sockets: the queue, helpers of the leader, and results of reads.

use std::collections::VecDeque;
use std::sync::Arc;

use rustix::event::epoll::{self, EventFlags};

use super::super::Shared;
use super::super::link::{Link, ReadOutcome};
use super::super::reader::READS;
use super::{State, Work, data, flags};
use crate::Time;
use crate::mux::psock::{self, Interest};
use crate::mux::{Batch, Cause, worker};

/// A ready socket that waits for this number of wake-ups makes the leader wake a helper.
const HELP: u32 = 3;
/// Minimum time between two looks at the sockets while messages are queued, in wake-ups. A look costs a tenth of a wake-up.
const LOOK: u32 = 5;

/// A socket to read now.
#[derive(Debug)]
pub(in crate::io) struct Reading {
    pub(in crate::io) id: psock::Id,
    pub(in crate::io) link: Arc<Link>,
    pub(in crate::io) buffer: Vec<u8>,
    /// The peer closed or reset the connection. This follows the bytes and is not reported again.
    pub(in crate::io) over: bool,
}

/// Ready sockets that no worker reads yet, the longest waiting first.
#[derive(Debug)]
pub(in crate::io) struct ReadySockets {
    queue: VecDeque<(psock::Id, Time)>,
    /// Number of sockets that a worker takes at once.
    pub(in crate::io) burst: usize,
    /// Number of sockets taken since the last epoll_wait(2).
    pub(in crate::io) taken: usize,
    /// When a worker last looked for ready sockets although messages were queued.
    looked: Time,
}

impl Default for ReadySockets {
    fn default() -> Self {
        Self { queue: VecDeque::new(), burst: READS, taken: 0, looked: Time::default() }
    }
}

impl ReadySockets {
    pub(in crate::io) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    #[cfg(test)]
    pub(in crate::io) fn clear(&mut self) {
        self.queue.clear();
    }
}

impl State {
    /// Handles readiness reported by epoll.
    pub(in crate::io) fn handle_ready(&mut self, id: psock::Id, flags: EventFlags, now: Time) {
        let Some(socket) = self.sockets.get_mut(id) else { return };
        socket.flags |= flags;
        if socket.reading {
            socket.again = true;
        } else if !std::mem::replace(&mut socket.queued, true) {
            self.ready.queue.push_back((id, now));
        }
    }

    /// Returns true, once per interval, if messages are queued and no worker waits for sockets.
    pub(in crate::io) fn is_look_due(&mut self, now: Time) -> bool {
        let interval = self.mux.config().wake_cost * LOOK;
        let due = self.pollers.leader.is_none()
            && self.mux.queued() > 0
            && now.since(self.ready.looked) >= interval;
        if due {
            self.ready.looked = now;
        }
        due
    }

    /// Takes up to `most` ready sockets.
    pub(in crate::io) fn take_ready(&mut self, shared: &Shared, most: usize) -> Vec<Reading> {
        let mut all = Vec::new();
        while all.len() < most
            && let Some((id, _)) = self.ready.queue.pop_front()
        {
            let Some(socket) = self.sockets.get_mut(id) else { continue };
            socket.queued = false;
            let flags = std::mem::replace(&mut socket.flags, EventFlags::empty());
            let gone = flags.intersects(EventFlags::HUP | EventFlags::ERR);
            match self.mux.reserve(id) {
                Some(buffer) => {
                    socket.reading = true;
                    let over = gone || flags.contains(EventFlags::RDHUP);
                    all.push(Reading { id, link: Arc::clone(&socket.link), buffer, over });
                }
                None if gone => self.hung_up(shared, id),
                // Not to be read now. A later change of interest makes epoll report it again.
                None => {}
            }
        }
        self.ready.taken += all.len();
        all
    }

    /// The leader finds sockets ready whenever it looks: wakes a helper. Returns true if a worker was woken.
    pub(in crate::io) fn wake_helper(&mut self, work: &mut Work) -> bool {
        if self.has_enough_pollers() || self.pollers.helper.is_some() {
            return false;
        }
        self.pollers.helper = self.pollers.pop_helper();
        if let Some(id) = self.pollers.helper {
            self.wake(id, work);
        }
        self.pollers.helper.is_some()
    }

    /// Returns true if another poller would only compete with the pollers and the working workers.
    pub(in crate::io) fn has_enough_pollers(&self) -> bool {
        self.pollers.has_enough(self.mux.working())
    }

    /// A worker has read sockets. Ensures that another one reads the remaining ready sockets and waits for
    /// more. `runs`: the worker got a local batch.
    pub(in crate::io) fn ensure_reader(&mut self, now: Time, runs: bool, work: &mut Work) {
        let patience = self.mux.config().wake_cost * HELP;
        let late = self.ready.queue.front().is_some_and(|&(_, since)| now.since(since) >= patience);
        if late && self.wake_helper(work) {
            // The helper reads them.
        } else if runs
            && self.pollers.watchdog.is_none()
            && (self.pollers.leader.is_none() || !self.ready.is_empty())
        {
            self.pollers.watchdog = self.wake_any(work);
        }
        if runs && !self.ready.is_empty() && !work.wakes() {
            // No worker is parked. The poller went to sleep before these sockets became ready.
            self.notify(work);
        }
    }

    /// Handles the result of a read. Returns true if the reading worker got a local batch.
    pub(in crate::io) fn read(
        &mut self,
        (reading, outcome): (Reading, Result<ReadOutcome, Cause>),
        by: Option<worker::Id>,
        now: Time,
    ) -> bool {
        let Reading { id, buffer, over, .. } = reading;
        if let Some(socket) = self.sockets.get_mut(id) {
            socket.reading = false;
            let again = std::mem::take(&mut socket.again);
            let more = outcome
                .as_ref()
                .is_ok_and(|&came| came == ReadOutcome::More || over && came == ReadOutcome::WouldBlock);
            if again || more {
                let flags = if over { EventFlags::IN | EventFlags::RDHUP } else { EventFlags::IN };
                self.handle_ready(id, flags, now);
            }
        }
        let batch = match by {
            Some(by) => self.mux.handle_read_by(id, buffer, by, now).map(|batch| (by, batch)),
            None => {
                self.mux.handle_read(id, buffer, now);
                None
            }
        };
        let need = self.mux.need(id);
        if let Some(socket) = self.sockets.get_mut(id) {
            socket.expect(need);
        }
        match outcome {
            Ok(ReadOutcome::WouldBlock | ReadOutcome::More) => {}
            Ok(ReadOutcome::Eof) => self.mux.handle_eof(id, now),
            Err(cause) => self.fail(id, cause, now),
        }
        let runs = batch.is_some();
        batch.into_iter().for_each(|(by, batch)| self.begin_batch(by, batch));
        runs
    }

    /// The worker that read a batch processes it and does not lead any more.
    fn begin_batch(&mut self, by: worker::Id, batch: Batch) {
        let Some(slot) = self.workers.get(by) else { return };
        slot.local_queue.lock().put(batch);
        self.turns += 1;
        if self.pollers.leader == Some(by) {
            self.pollers.leader = None;
        }
    }

    /// Updates the epoll interest of a socket.
    pub(super) fn watch(&mut self, shared: &Shared, id: psock::Id) {
        let interest = self.mux.interest(id);
        let Some(socket) = self.sockets.get_mut(id) else { return };
        let changed = if socket.watched {
            epoll::modify(&shared.epoll, &socket.link, data(id), flags(interest))
        } else if interest == Interest::default() {
            Ok(())
        } else {
            socket.watched = true;
            epoll::add(&shared.epoll, &socket.link, data(id), flags(interest))
        };
        if let Err(errno) = changed {
            self.fail(id, Cause::Reset(errno.raw_os_error()), shared.now());
        }
    }

    /// Handles a hang-up or error of a socket that is not read now.
    fn hung_up(&mut self, shared: &Shared, id: psock::Id) {
        let Some(socket) = self.sockets.get_mut(id) else { return };
        match socket.link.error() {
            None => {
                // Epoll would report it repeatedly. The next change of interest adds it again.
                socket.watched = false;
                let _ = epoll::delete(&shared.epoll, &socket.link);
            }
            Some(errno) => self.fail(id, Cause::Reset(errno), shared.now()),
        }
    }
}
