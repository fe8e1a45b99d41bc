//! The calls of the core that only [`crate::io::Socket`] uses (feature `io`).

use super::event::{Event, SendError};
use super::message::Ticket;
use super::{Mux, psock, worker};
use crate::Time;

impl Mux {
    /// Returns `Ok` if a message may be sent to this connection, or in connected mode (`None`) to any. After
    /// [`SendError::Full`], [`Event::WriteSpace`] reports space on any connection.
    ///
    /// # Errors
    ///
    /// As [`Mux::forward`] and [`Mux::send`]; [`SendError::Full`] also for a full connection.
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

    /// Returns true if this worker would get a message now.
    pub(crate) fn has_ready(&self, id: worker::Id) -> bool {
        !self.ready.is_empty() || self.workers.get(id).is_some_and(|worker| !worker.pinned.is_empty())
    }

    /// The connection with the fewest bytes to send, full or not. For the last messages of a closing sender.
    pub(crate) fn least_loaded(&self) -> Option<psock::Id> {
        self.balance.least().map(|(_, id)| id)
    }

    /// Abandons a message that the worker holds. It is returned by [`Event::Undone`].
    pub(crate) fn give_up(&mut self, id: worker::Id, ticket: Ticket, now: Time) {
        self.now = self.now.max(now);
        let Some(held) = self.workers.get_mut(id).and_then(|worker| worker.take(ticket)) else { return };
        self.counters.totals.in_hand -= 1;
        self.counters.totals.undone += 1;
        self.release(ticket.psock, 1);
        self.finish(&held.message);
        self.events.push_back(Event::Undone(held.message));
        self.check_left(id);
    }
}
