//! The end of a worker: what happens to the connections that it serves ([`Config::on_worker_end`](super::Config)).
//!
//! What: a worker serves the connections that are bound to it ([`Order::Sticky`]), and in other orders those whose messages it holds
//! and those that it opened (`opened.rs`). With [`OnWorkerEnd::Close`] these connections end after their replies so far and the
//! goodbye, and their unanswered messages are given up.

use bytes::Bytes;

use super::event::Cause;
use super::message::Message;
use super::opened::Opened;
use super::psock::{self, Psock};
use super::tx_queue::Outgoing;
use super::{Mux, OnWorkerEnd, Order, worker};
use crate::Time;

impl Mux {
    /// Binds no more connections to this worker ([`Order::Sticky`]). It keeps those that it has.
    pub fn retire(&mut self, id: worker::Id, now: Time) {
        self.now = self.now.max(now);
        if let Some(worker) = self.workers.get_mut(id) {
            worker.retiring = true;
        }
    }

    /// Returns true if an open connection is bound to this worker ([`Order::Sticky`]). Looks at every connection.
    pub fn is_bound(&self, id: worker::Id) -> bool {
        self.psocks.values().any(|psock| !psock.is_dead() && psock.bound == Some(id))
    }

    /// A worker ends: takes back the messages queued for it. With [`OnWorkerEnd::Close`], ends its connections and gives these messages up;
    /// returns true if those that it holds are to be given up, too.
    pub(super) fn take_queued(&mut self, id: worker::Id) -> bool {
        let OnWorkerEnd::Close { goodbye } = self.config.on_worker_end else {
            self.unpin(id);
            return false;
        };
        // First, because a connection that is cut for its goodbye discards what is queued.
        let queued = self.workers.get_mut(id).map(|worker| worker.pinned.drain()).unwrap_or_default();
        let sticky = self.config.order == Order::Sticky;
        let held: Vec<psock::Id> = match self.workers.get(id) {
            Some(worker) if !sticky => worker.psocks().collect(),
            _ => Vec::new(),
        };
        let of_it = |psock: &Psock| psock.opened == Opened::By(id) || sticky && psock.bound == Some(id);
        let opened = self.psocks.iter().filter(|(_, psock)| of_it(psock)).map(|(id, _)| id);
        for psock in opened.chain(held).collect::<Vec<_>>() {
            self.say_goodbye(psock, goodbye);
        }
        queued.iter().for_each(|message| self.give_up_queued(message));
        true
    }

    fn say_goodbye(&mut self, id: psock::Id, goodbye: &'static [u8]) {
        let Some(psock) = self.psocks.get_mut(id).filter(|psock| psock.accepts()) else { return };
        psock.opened = Opened::No;
        self.counters.totals.worker_ended += 1;
        self.close(id, Cause::WorkerEnded, false);
        self.queue_out(id, Outgoing::new(Bytes::from_static(goodbye), 1));
        self.shut(id);
    }

    /// Gives up a message that waits for a worker.
    fn give_up_queued(&mut self, message: &Message) {
        self.counters.totals.queued -= 1;
        self.counters.totals.undone += 1;
        self.finish(message);
    }
}
