//! What a handle with a queue of its own asks of the core, beside what every worker does (feature `io`).

use super::event::{Event, SendError};
use super::message::Ticket;
use super::{Mux, psock, worker};
use crate::Time;

impl Mux {
    /// Whether a message may be sent now to this connection, or in connected mode to any. When it may not be because too much
    /// waits, [`Event::WriteSpace`] says that one of any has room again.
    ///
    /// # Errors
    ///
    /// As [`Mux::forward`] and [`Mux::send`]; and [`SendError::Full`] for a connection whose peer does not take what is sent to it.
    pub(crate) fn check_write_space(&mut self, psock: Option<psock::Id>) -> Result<(), SendError> {
        if let Some(id) = psock {
            let psock = self.psocks.get(id).filter(|psock| psock.is_open()).ok_or(SendError::Gone)?;
            return if psock.tx.full { Err(SendError::Full) } else { Ok(()) };
        }
        let (waits, _) = self.balance.least().ok_or(SendError::NotConnected)?;
        if waits >= self.config.send_bytes.high {
            self.balance.want_write_space();
            return Err(SendError::Full);
        }
        Ok(())
    }

    /// Whether a message waits that this worker would get if it asked.
    pub(crate) fn has_ready(&self, id: worker::Id) -> bool {
        !self.ready.is_empty() || self.workers.get(id).is_some_and(|worker| !worker.pinned.is_empty())
    }

    /// The connection with the least to send, however much that is: for what is the last of its sender.
    pub(crate) fn least_loaded(&self) -> Option<psock::Id> {
        self.balance.least().map(|(_, id)| id)
    }

    /// Nobody will do this message, which the worker holds: it comes back as [`Event::Undone`].
    pub(crate) fn give_up(&mut self, id: worker::Id, ticket: Ticket, now: Time) {
        self.now = self.now.max(now);
        let Some(held) = self.workers.get_mut(id).and_then(|worker| worker.take(ticket)) else { return };
        self.counters.totals.in_hand -= 1;
        self.counters.totals.undone += 1;
        self.unhold(ticket);
        self.finish(&held.message);
        self.events.push_back(Event::Undone(held.message));
        self.check_left(id);
    }
}
