//! Towards the engine: replacements, messages, and the wait for room.

use std::io::ErrorKind;
use std::time::Instant;

use super::lane::Lane;
use super::{Consumer, Frame};
use crate::lane::reserve_error::ReserveError;
use crate::shm::header::{Kind, Meta};

/// A replacement that could not be handed over; the frame is still there to be decided.
#[derive(Debug, thiserror::Error)]
#[error("no replacement for frame {}: {why}", frame.seq())]
pub struct NotReplaced {
    /// The frame.
    pub frame: Frame,
    /// Why not.
    pub why: ReserveError,
}

impl Consumer {
    /// Lets the frame go on with another payload; waits while the ring towards the engine is full.
    ///
    /// # Errors
    /// [`NotReplaced`] gives the frame back: the payload is larger than the engine takes
    /// ([`crate::Config::replacement_max`]), or the engine is gone; or the wait was ended ([`set_interruptible`](Self::set_interruptible),
    /// [`set_send_timeout`](Self::set_send_timeout)).
    pub fn replace(&mut self, frame: Frame, payload: &[u8]) -> Result<(), NotReplaced> {
        let (mut frame, until) = (frame, self.send_until());
        loop {
            match self.try_replace(frame, payload) {
                Err(NotReplaced { frame: again, why: ReserveError::RingFull }) => frame = again,
                other => return other,
            }
            if let Err(why) = self.wait_for_room(frame.id.lane, until) {
                return Err(NotReplaced { frame, why });
            }
        }
    }

    /// Until when room is waited for.
    fn send_until(&self) -> Option<Instant> {
        self.send_timeout.and_then(|timeout| Instant::now().checked_add(timeout))
    }

    /// Lets the frame go on with another payload.
    ///
    /// # Errors
    /// [`NotReplaced`] gives the frame back; with [`ReserveError::RingFull`](crate::ReserveError::RingFull) it is worth trying again.
    pub fn try_replace(&mut self, frame: Frame, payload: &[u8]) -> Result<(), NotReplaced> {
        if !self.has(&frame) {
            // Decided before, by verdict_upto: as for any verdict on such a frame, nothing happens. A TX frame that no
            // verdict names would be lost to the ring.
            return Ok(());
        }
        match self.lane_mut(&frame).replace(&frame, payload) {
            Ok(()) => {
                self.unflushed = true;
                Ok(())
            }
            Err(why) => Err(NotReplaced { frame, why }),
        }
    }

    /// Sends a message to the engine; waits while the ring towards it is full. One that is larger than that ring goes in a
    /// memory of its own. Whether engines listen to messages is
    /// theirs to say ([`crate::Config::messages`]).
    ///
    /// # Errors
    /// [`ReserveError`]: the message is larger than the engine takes ([`crate::Config::oneshot_max`]), or the engine is gone; or the wait was ended,
    /// as with [`replace`](Self::replace).
    pub fn send(&mut self, payload: &[u8], meta: &Meta) -> Result<(), ReserveError> {
        self.send_on(0, payload, meta)
    }

    /// The same, to the engine thread that `frame` came from.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn reply(&mut self, frame: &Frame, payload: &[u8], meta: &Meta) -> Result<(), ReserveError> {
        self.send_on(frame.id.lane, payload, meta)
    }

    fn send_on(&mut self, lane: u32, payload: &[u8], meta: &Meta) -> Result<(), ReserveError> {
        let until = self.send_until();
        loop {
            match self.lanes[lane as usize].send(payload, meta) {
                Err(ReserveError::RingFull) => self.wait_for_room(lane, until)?,
                other => {
                    self.unflushed = true;
                    return other.map(drop);
                }
            }
        }
    }

    /// Sends a message to the engine if there is room. It is woken by the next call that receives, or by
    /// [`flush`](Self::flush).
    ///
    /// # Errors
    /// [`ReserveError`]: there is no room now ([`ReserveError::RingFull`]), or never will be.
    pub fn try_send(&mut self, payload: &[u8], meta: &Meta) -> Result<(), ReserveError> {
        self.unflushed = true;
        self.lanes[0].send(payload, meta).map(drop)
    }

    /// Asks for a dump of what `group` names. The answer comes as frames of [`Kind::DUMP`] and one of [`Kind::DONE`], or
    /// one of [`Kind::ERROR`].
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn request(&mut self, group: u32, payload: &[u8]) -> Result<(), ReserveError> {
        self.send(payload, &Meta { kind: Kind::REQUEST, group, ..Meta::default() })?;
        self.flush();
        Ok(())
    }

    /// Whether a message of `len` bytes would find room in the ring towards the engine. In an event loop: after
    /// [`arm`](Self::arm), which makes the engine ring also when it gives room back.
    pub fn has_room(&mut self, len: usize) -> bool {
        self.lanes[0].has_room(len)
    }

    /// Waits until the engine has given a TX frame of the lane back.
    fn wait_for_room(&mut self, lane: u32, until: Option<Instant>) -> Result<(), ReserveError> {
        self.flush();
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(ReserveError::RingFull);
        }
        let mut interrupted = false;
        let armed = self.sleeper.arm(self.lanes.iter().map(Lane::own_page));
        if armed && !self.lanes[lane as usize].is_returned() && !self.is_ended() {
            self.sleeps += 1;
            // A poll that fails otherwise shows in the next call that receives; here it is only a turn of the loop.
            let waited = self.nap(left);
            interrupted = waited.is_err_and(|error| error.kind() == ErrorKind::Interrupted);
        }
        if self.disarm().is_err() || self.is_ended() {
            return Err(ReserveError::Disconnected);
        }
        if interrupted && self.interruptible { Err(ReserveError::Interrupted) } else { Ok(()) }
    }
}
