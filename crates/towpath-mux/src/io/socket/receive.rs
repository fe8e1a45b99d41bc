//! Receiving. Messages are done at the next receive.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::super::state::{State, Work};
use super::unread::{self, Read};
use super::{Error, Flags, Received, Socket, park};
use crate::Time;
use crate::mux::{Message, Order};

impl Socket {
    /// Waits for the next message and reads it, or continues a partly read one. Completes messages read
    /// before.
    ///
    /// # Errors
    ///
    /// [`Error::WouldBlock`] with [`Flags::DONTWAIT`] or after [`Socket::set_recv_timeout`];
    /// [`Error::Disabled`]; [`Error::Drained`] when no more messages will come.
    pub fn recv(&mut self, buffer: &mut [u8], flags: Flags) -> Result<Received, Error> {
        let (message, at) = self.take(1, flags)?;
        let read = unread::read(self.kind, &message.bytes()[at..], buffer, flags.contains(Flags::PEEK));
        Ok(self.put(message, at, read))
    }

    /// As [`Socket::recv`], but shares the message's remaining bytes instead of copying them.
    ///
    /// # Errors
    ///
    /// As [`Socket::recv`].
    pub fn recv_bytes(&mut self, flags: Flags) -> Result<(Received, Bytes), Error> {
        let (message, at) = self.take(1, flags)?;
        let bytes = message.bytes().slice(at..);
        let read = unread::fit(self.kind, bytes.len(), bytes.len(), flags.contains(Flags::PEEK));
        Ok((self.put(message, at, read), bytes))
    }

    /// Reads up to one message per buffer (recvmmsg(2) with MSG_WAITFORONE). Waits for the first one. Returns
    /// fewer, often one, if messages take long, to leave the others to other sockets. Messages are done at
    /// the next call.
    ///
    /// # Errors
    ///
    /// As [`Socket::recv`], for the first message.
    pub fn recv_many(&mut self, buffers: &mut [&mut [u8]], flags: Flags) -> Result<Vec<Received>, Error> {
        let most = buffers.len();
        let mut all = Vec::with_capacity(most);
        for buffer in buffers {
            let (message, at) = if all.is_empty() {
                self.take(most, flags)?
            } else {
                match self.current.take().or_else(|| self.next.pop_front().map(|message| (message, 0))) {
                    Some(next) => next,
                    None => break,
                }
            };
            let read = unread::read(self.kind, &message.bytes()[at..], buffer, flags.contains(Flags::PEEK));
            all.push(self.put(message, at, read));
            if flags.contains(Flags::PEEK) {
                break;
            }
        }
        if !self.next.is_empty() {
            // A packet filled several buffers. Other sockets may have the messages after it.
            let now = self.shared.now();
            let back: Vec<_> = self.next.drain(..).map(|message| message.ticket()).collect();
            self.shared.change(|mux| mux.handle_hand_back(self.id, &back, now));
        }
        Ok(all)
    }

    /// Completes the messages that this socket has read.
    pub fn done(&mut self) {
        let shared = Arc::clone(&self.shared);
        let now = shared.now();
        shared.with(|state, _| self.finish(state, now));
    }

    /// Returns the next message and the number of its bytes that were read. The caller puts it back.
    fn take(&mut self, most: usize, flags: Flags) -> Result<(Message, usize), Error> {
        if let Some(current) = self.current.take() {
            return Ok(current);
        }
        if !self.receives {
            return Err(Error::Disabled);
        }
        let shared = Arc::clone(&self.shared);
        let until = self.recv_timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let mut work = Work::default();
            let mut state = shared.lock();
            let now = shared.now();
            self.finish(&mut state, now);
            self.attend(&mut state, true, now);
            state.mux.poll_up_to(self.id, most, now, &mut self.room);
            self.next.extend(self.room.drain(..));
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let wrong = match self.next.is_empty() {
                false => None,
                true if state.closed => Some(Error::Drained),
                true if flags.contains(Flags::DONTWAIT) || left == Some(Duration::ZERO) => {
                    Some(Error::WouldBlock)
                }
                true => None,
            };
            if wrong.is_some() {
                self.attend(&mut state, false, now);
            } else if let Some(slot) = state.workers.get_mut(self.id).filter(|_| self.next.is_empty()) {
                (slot.thread, slot.armed) = (Some(std::thread::current()), false);
            }
            state.pump(&shared, &mut work);
            drop(state);
            shared.perform(work);
            if let Some(message) = self.next.pop_front() {
                return Ok((message, 0));
            }
            if let Some(error) = wrong {
                return Err(error);
            }
            park(left);
        }
    }

    /// Enables or disables the worker in the core. With [`Order::Sticky`] it stays enabled, because disabling
    /// would move its connections.
    pub(super) fn attend(&mut self, state: &mut State, attends: bool, now: Time) {
        if self.attends != attends && (attends || state.mux.config().order != Order::Sticky) {
            self.attends = attends;
            state.mux.disable(self.id, !attends, now);
        }
    }

    /// Consumes the bytes that were read.
    fn put(&mut self, message: Message, at: usize, read: Read) -> Received {
        let received = Received {
            bytes: read.copied,
            length: message.bytes().len() - at,
            flags: read.flags,
            ticket: message.ticket(),
            mark: message.mark(),
            hash: message.hash(),
            stripped: message.stripped(),
        };
        if at == 0 && read.taken > 0 {
            self.held.push(message.ticket());
        }
        let at = at + read.taken;
        if at < message.bytes().len() {
            self.current = Some((message, at));
        }
        received
    }

    /// Completes messages that were read to their end, after sending their replies.
    pub(super) fn finish(&mut self, state: &mut State, now: Time) {
        if let Err(error) = self.flush(state, now)
            && !matches!(error, Error::WouldBlock)
        {
            self.error = Some(error);
        }
        let current = self.current.as_ref().map(|(message, _)| message.ticket());
        for ticket in self.held.extract_if(.., |ticket| Some(*ticket) != current) {
            state.mux.done(self.id, ticket, now);
        }
    }

    /// Hands back messages that are not begun; with `all` also a partly read one, unless it was answered.
    pub(super) fn hand_back(&mut self, state: &mut State, now: Time, all: bool) {
        let current = self.current.take_if(|(_, at)| all || *at == 0).map(|(message, _)| message);
        let current = current.filter(|message| {
            let (ticket, answered) = (message.ticket(), self.answered == Some(message.ticket()));
            // Peeked and answered: it is completed with the next ones.
            if answered && !self.held.contains(&ticket) {
                self.held.push(ticket);
            }
            !answered
        });
        let back = current.into_iter().chain(self.next.drain(..));
        let back: Vec<_> = back.map(|message| message.ticket()).collect();
        self.held.retain(|ticket| !back.contains(ticket));
        state.mux.handle_hand_back(self.id, &back, now);
    }
}
