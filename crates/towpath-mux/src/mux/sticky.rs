//! [`Order::Sticky`]: binds each connection to a worker.
//!
//! What: a connection is bound to a worker at its first message, or its opened event (`opened.rs`): to the enabled one with the fewest
//! connections. So a worker that joins gets all new connections until it has as many as the others. A connection moves when its worker
//! leaves, dies or is disabled. With [`Config::rebalance`](super::Config::rebalance) it also moves at its next message if its worker has
//! too many connections.
//!
//! Invariants:
//! - Messages of a connection are with one worker at a time: it moves only while no worker holds any of them.
//! - A message after one in parts (`stream.rs`) waits until the worker has the last part.
//! - `connections` of a worker is the number of connections bound to it.

use super::message::Message;
use super::worker::{self, Activity};
use super::{Event, Mux, Order, psock};

impl Mux {
    /// Moves the messages queued at a connection to its worker. Chooses a worker if it has none, or is to move, and no worker
    /// holds messages of the connection.
    pub(super) fn pin(&mut self, id: psock::Id) {
        let Some(psock) = self.psocks.get(id) else { return };
        let bound =
            psock.bound.filter(|&worker| self.workers.get(worker).is_some_and(|worker| worker.enabled));
        // Nothing of it is with its worker, neither queued nor held.
        let moves = psock.outstanding == psock.pending.len();
        let worker = match bound {
            Some(worker) if !(moves && self.is_overloaded(worker)) => worker,
            _ if psock.in_hand > 0 => return,
            _ => match self.workers.fewest_connections() {
                Some(worker) => worker,
                None => return,
            },
        };
        self.open_for(id, worker);
        self.bind(id, Some(worker));
        let (Some(psock), Some(other)) = (self.psocks.get_mut(id), self.workers.get_mut(worker)) else {
            return;
        };
        let next = psock.first_waiting_stream();
        let count = psock
            .pending
            .iter()
            .take_while(|message| message.is_opened() || message.ticket.number <= next)
            .count();
        if count == 0 {
            return;
        }
        let full = psock.in_hand >= self.in_flight.limit(id, self.now);
        psock.pending.drain(..count).for_each(|message| other.pinned.push_back(message, full));
        if other.activity == Activity::Idle {
            self.events.push_back(Event::Wake(worker));
            self.set_activity(worker, Activity::Woken);
        }
    }

    /// Assigns connections that waited for a worker.
    pub(super) fn pin_all(&mut self) {
        if self.config.order != Order::Sticky {
            return;
        }
        let waiting = self.psocks.iter().filter(|(_, psock)| !psock.pending.is_empty());
        for id in waiting.map(|(id, _)| id).collect::<Vec<_>>() {
            self.pin(id);
        }
    }

    /// Takes back the messages queued for this worker.
    pub(super) fn unpin(&mut self, id: worker::Id) {
        let Some(worker) = self.workers.get_mut(id) else { return };
        let back = worker.pinned.drain();
        worker.stats.handed_back += back.len() as u64;
        self.counters.totals.handed_back += back.len() as u64;
        self.rebind(back);
    }

    /// Messages were taken back from a worker that gets no more: binds their connections again.
    pub(super) fn rebind(&mut self, back: Vec<Message>) {
        let psocks: Vec<_> = back.iter().map(|message| message.ticket.psock).collect();
        for message in back.into_iter().rev() {
            let id = message.ticket.psock;
            self.bind(id, None);
            let Some(psock) = self.psocks.get_mut(id) else { continue };
            // Later messages may have been put back before, in the middle of a hand-back.
            let at = psock.pending.iter().take_while(|other| other.place() < message.place()).count();
            psock.pending.insert(at, message);
        }
        for psock in psocks {
            self.pin(psock);
        }
    }

    /// Binds a connection to this worker, or to none.
    pub(super) fn bind(&mut self, id: psock::Id, worker: Option<worker::Id>) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        let before = std::mem::replace(&mut psock.bound, worker);
        if before == worker {
            return;
        }
        if let Some(before) = before.and_then(|before| self.workers.get_mut(before)) {
            before.connections -= 1;
        }
        if let Some(worker) = worker.and_then(|worker| self.workers.get_mut(worker)) {
            worker.connections += 1;
        }
    }

    /// Returns true if this worker has so many connections more than another one that they may move.
    fn is_overloaded(&self, id: worker::Id) -> bool {
        let Some(limit) = self.config.rebalance else { return false };
        let connections = |id| self.workers.get(id).map_or(0, |worker| worker.connections);
        let fewest = self.workers.fewest_connections().map_or(usize::MAX, connections);
        connections(id) > fewest.saturating_add(limit.max(1))
    }
}
