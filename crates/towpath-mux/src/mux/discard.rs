//! Messages of connections that ended at once: the peer reset the connection, or it was cut. Nothing can be sent to the
//! peer, so the messages that no worker has begun are discarded and counted by reason. So is the opened event. Workers get the messages
//! of a connection that was closed, also by a worker.
//!
//! With [`Order::Key`], a message that waits for another one with its hash is discarded when its turn comes.

use super::message::Message;
use super::ready::Entry;
use super::{Mux, Order, psock};

impl Mux {
    /// Returns true if this connection ended at once.
    pub(super) fn is_cut(&self, id: psock::Id) -> bool {
        self.psocks.get(id).is_none_or(|psock| psock.cut)
    }

    /// Discards the waiting messages of a connection.
    pub(super) fn discard_waiting(&mut self, id: psock::Id) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        let pending = std::mem::take(&mut psock.pending);
        let pinned = psock.bound.and_then(|worker| self.workers.get_mut(worker));
        let pinned = pinned.map(|worker| worker.pinned.take(id)).unwrap_or_default();
        pending.iter().for_each(|message| self.discard(message));
        for entry in pinned.into_iter().chain(self.ready.take(id)) {
            match entry {
                Entry::Message(message) => {
                    self.discard(&message);
                    self.ready_next_of_key(message.hash);
                }
                Entry::Batch(batch) => self.count_discarded(id, batch.len(), batch.weight().1, false),
            }
        }
    }

    /// A worker holds this message no longer, and its connection has ended.
    pub(super) fn discard_returned(&mut self, message: &Message) {
        self.discard(message);
        self.ready_next_of_key(message.hash);
        self.settle(message.ticket.psock);
    }

    /// [`Order::Key`]: a message with this hash is done or discarded. The next one becomes ready.
    pub(super) fn ready_next_of_key(&mut self, hash: u32) {
        if self.config.order != Order::Key {
            return;
        }
        while let Some(next) = self.keys.next(hash) {
            let id = next.ticket.psock;
            if !self.is_cut(id) {
                return self.make_ready(next);
            }
            self.discard(&next);
            self.settle(id);
        }
    }

    fn discard(&mut self, message: &Message) {
        if message.more {
            self.drop_stream(message.ticket);
        }
        self.count_discarded(message.ticket.psock, 1, message.charge, message.is_opened());
    }

    fn count_discarded(&mut self, id: psock::Id, count: usize, charge: usize, opened: bool) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        psock.outstanding -= count;
        psock.memory -= charge;
        let totals = &mut self.counters.totals;
        totals.queued -= count as u64;
        let discarded = match (opened, psock.reset) {
            (true, _) => &mut totals.discarded_opened,
            (false, true) => &mut totals.discarded_reset,
            (false, false) => &mut totals.discarded_ended,
        };
        *discarded += count as u64;
        self.memory.remove_message(charge);
        self.recount(charge, 0);
    }
}
