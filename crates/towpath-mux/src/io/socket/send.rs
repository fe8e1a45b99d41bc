//! Sending: gather parts, batch messages, send.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::super::state::{State, Work};
use super::{Error, Flags, Socket, To, park};
use crate::Time;
use crate::mux::{SendError, worker};

/// Maximum number of messages batched by [`Flags::BATCH`].
const BATCH: usize = 64;

impl Socket {
    /// Sends a message or a part of one, and returns the number of its bytes. Empty messages are not sent.
    ///
    /// Waits for write space: on every connection for [`To::Any`], on that connection for [`To::Psock`]. A
    /// reply does not wait: a peer that does not accept replies is not read, up to
    /// [`crate::mux::Config::send_most`].
    ///
    /// # Errors
    ///
    /// After [`Error::WouldBlock`] and [`Error::AddressMismatch`] the part was not taken. After other errors
    /// the message is dropped with its earlier parts. An error of a batched message ([`Flags::BATCH`]) is
    /// returned by the call that sends the batch, which then takes nothing itself.
    pub fn send(&mut self, to: To, bytes: &[u8], flags: Flags) -> Result<usize, Error> {
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        let to = self.address(to)?;
        let length = self.gather.length_with(to, bytes)?;
        if !self.gather.ends(flags) {
            self.gather.add(to, bytes);
            return Ok(bytes.len());
        }
        if flags.contains(Flags::BATCH) && length > 0 && self.batch.len() < BATCH {
            self.batch.push_back((to, self.gather.finish(bytes)));
            return Ok(bytes.len());
        }
        let shared = Arc::clone(&self.shared);
        let until = self.send_timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let mut work = Work::default();
            let mut state = shared.lock();
            state.remove_waiter();
            let (now, before) = (shared.now(), self.batch.len());
            let sent = self.deliver(&mut state, to, bytes, now);
            if matches!(sent, Err(Error::WouldBlock)) && self.batch.len() == before {
                // Nothing changed for other threads.
                state.pump_quietly(&shared, &mut work);
            } else {
                state.pump(&shared, &mut work);
            }
            let waits = matches!(sent, Err(Error::WouldBlock)) && !flags.contains(Flags::DONTWAIT);
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let waits = waits && left != Some(Duration::ZERO);
            if waits {
                state.waiters.push(std::thread::current());
            }
            drop(state);
            shared.perform(work);
            if !waits {
                return sent.map(|()| bytes.len());
            }
            park(left);
        }
    }

    /// Sends several messages (sendmmsg(2)), each with its destination. Returns the number of messages taken.
    ///
    /// # Errors
    ///
    /// As [`Socket::send`], if the first message was not taken.
    pub fn send_many(&mut self, messages: &[(To, &[u8])], flags: Flags) -> Result<usize, Error> {
        for (at, &(to, bytes)) in messages.iter().enumerate() {
            let last = at + 1 == messages.len();
            let batch = if last { Flags::empty() } else { Flags::BATCH };
            match self.send(to, bytes, flags | batch) {
                Ok(_) => {}
                Err(error) if at == 0 => return Err(error),
                Err(Error::WouldBlock) => return Ok(at),
                Err(error) => {
                    self.error = Some(error);
                    return Ok(at);
                }
            }
        }
        Ok(messages.len())
    }

    /// Resolves a destination.
    fn address(&self, to: To) -> Result<To, Error> {
        match to {
            To::Any if !self.shared.lock().mux.config().connected => Err(Error::NoAddress),
            To::Requester => match self.gather.to() {
                Some(first @ To::Message(_)) => Ok(first),
                _ => self.held.last().copied().map(To::Message).ok_or(Error::NoAddress),
            },
            to => Ok(to),
        }
    }

    /// Sends the batch, then the message that these bytes end.
    fn deliver(&mut self, state: &mut State, to: To, part: &[u8], now: Time) -> Result<(), Error> {
        self.flush(state, now)?;
        match room(state, to) {
            Ok(()) => {}
            Err(SendError::Full) => return Err(Error::WouldBlock),
            Err(error) => {
                self.gather.clear();
                return Err(error.into());
            }
        }
        let whole = self.gather.finish(part);
        if let To::Message(ticket) = to {
            self.answered = Some(ticket);
        }
        if whole.is_empty() { Ok(()) } else { transmit(state, self.id, to, whole, now) }
    }

    /// Sends the batch as far as there is write space. A message that fails does not stop the others. Returns
    /// the first error.
    pub(super) fn flush(&mut self, state: &mut State, now: Time) -> Result<(), Error> {
        let (mut blocked, mut wrong) = (false, None);
        for _ in 0..self.batch.len() {
            let Some((to, bytes)) = self.batch.pop_front() else { break };
            let sent = match room(state, to) {
                Ok(()) => transmit(state, self.id, to, bytes, now),
                Err(SendError::Full) => {
                    blocked = true;
                    self.batch.push_back((to, bytes));
                    Ok(())
                }
                Err(error) => Err(error.into()),
            };
            if let Err(error) = sent {
                wrong.get_or_insert(error);
            }
        }
        match wrong {
            Some(error) => Err(error),
            None if blocked => Err(Error::WouldBlock),
            None => Ok(()),
        }
    }
}

/// Returns `Ok` if there is write space.
pub(super) fn room(state: &mut State, to: To) -> Result<(), SendError> {
    match to {
        To::Any => state.mux.check_write_space(None),
        To::Psock(psock) => state.mux.check_write_space(Some(psock)),
        To::Requester | To::Message(_) => Ok(()),
    }
}

fn transmit(state: &mut State, id: worker::Id, to: To, bytes: Bytes, now: Time) -> Result<(), Error> {
    match to {
        To::Any => state.mux.send(bytes, now).map(drop)?,
        To::Psock(psock) => state.mux.forward(psock, bytes, now)?,
        To::Message(ticket) => state.mux.reply(id, ticket, bytes, now)?,
        To::Requester => return Err(Error::NoAddress),
    }
    Ok(())
}
