//! Messages and replacements from the client to the engine.

use std::io::ErrorKind;
use std::time::Instant;

use super::lane::Lane;
use super::{Consumer, Frame};
use crate::lane::reserve_error::ReserveError;
use crate::shm::header::{Kind, Layers, Meta};

/// A replacement that was not sent. The frame is still undecided.
#[derive(Debug, thiserror::Error)]
#[error("no replacement for frame {}: {why}", frame.seq())]
pub struct NotReplaced {
    /// The frame.
    pub frame: Frame,
    /// The reason.
    pub why: ReserveError,
}

/// The way of an injected packet ([`Consumer::inject`]). The values are those of [`Header::group`](crate::Header::group).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inject {
    /// As if the packet had come in by the port and the inspector had passed it.
    Forward = 0,
    /// Out by the port.
    Back = 1,
}

/// A packet that was not injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InjectError {
    /// The engine does not permit it.
    #[error(
        "this queue does not permit it; set `may-inject = true` in its section of the engine's configuration"
    )]
    NotPermitted,
    /// The packet was not sent to the engine.
    #[error(transparent)]
    NotSent(#[from] ReserveError),
}

impl Consumer {
    /// Sends a packet of this client by the engine's port number `port`. It begins with the port's link header, whose type (`LINKTYPE_*`)
    /// is `link`. `lane` is that of a frame of the same flow, or 0. Waits while the ring is full. The engine sends the packet after the
    /// next call that receives, or after [`flush`](Self::flush).
    ///
    /// # Errors
    /// [`InjectError`]. A packet that the engine cannot send is dropped and counted by the engine.
    pub fn inject(
        &mut self,
        (lane, port): (u32, u32),
        way: Inject,
        link: u16,
        packet: &[u8],
        time: u64,
    ) -> Result<(), InjectError> {
        let known = self.lanes.get(lane as usize).is_some_and(|lane| lane.messages);
        if !known {
            return Err(InjectError::NotPermitted);
        }
        let layers = Layers { link, ..Layers::default() };
        let meta = Meta { kind: Kind::PACKET, port, group: way as u32, layers, time, ..Meta::default() };
        Ok(self.send_on(lane, packet, &meta)?)
    }

    /// Forwards the frame with another payload; waits while the ring towards the engine is full.
    ///
    /// # Errors
    /// [`NotReplaced`] returns the frame: the payload is larger than the engine permits
    /// ([`crate::Config::replacement_max`]), the engine is disconnected, or the wait ended
    /// ([`set_interruptible`](Self::set_interruptible), [`set_send_timeout`](Self::set_send_timeout)).
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

    /// End of a wait for space.
    fn send_until(&self) -> Option<Instant> {
        self.send_timeout.and_then(|timeout| Instant::now().checked_add(timeout))
    }

    /// Forwards the frame with another payload.
    ///
    /// # Errors
    /// [`NotReplaced`] returns the frame. After [`ReserveError::RingFull`](crate::ReserveError::RingFull), a retry
    /// may succeed.
    pub fn try_replace(&mut self, frame: Frame, payload: &[u8]) -> Result<(), NotReplaced> {
        self.try_replace_marked(frame, payload, 0, 0)
    }

    /// Like [`try_replace`](Self::try_replace), and sets the bits of the packet's mark that are set in `mask` to those of `mark`.
    ///
    /// # Errors
    /// As [`try_replace`](Self::try_replace).
    pub fn try_replace_marked(
        &mut self,
        frame: Frame,
        payload: &[u8],
        mark: u32,
        mask: u32,
    ) -> Result<(), NotReplaced> {
        if !self.has(&frame) {
            // The frame was decided by verdict_upto: like any verdict for such a frame, this has no effect. A TX
            // frame without a verdict that names it would never be released.
            return Ok(());
        }
        match self.lane_mut(&frame).replace(&frame, payload, (mark, mask)) {
            Ok(()) => {
                self.unflushed = true;
                Ok(())
            }
            Err(why) => Err(NotReplaced { frame, why }),
        }
    }

    /// Sends a message to the engine; waits while the ring is full. A message larger than the ring travels as a
    /// one-shot memfd. The engine receives messages if [`crate::Config::messages`] is set.
    ///
    /// # Errors
    /// [`ReserveError`]: the message is larger than the engine permits ([`crate::Config::oneshot_max`]), the engine
    /// is disconnected, or the wait ended, as with [`replace`](Self::replace).
    pub fn send(&mut self, payload: &[u8], meta: &Meta) -> Result<(), ReserveError> {
        self.send_on(0, payload, meta)
    }

    /// Sends a message to the engine thread that `frame` came from.
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

    /// Sends a message to the engine if the ring has space. A sleeping engine is woken by the next call that
    /// receives, or by [`flush`](Self::flush).
    ///
    /// # Errors
    /// [`ReserveError`]: no space now ([`ReserveError::RingFull`]), or ever.
    pub fn try_send(&mut self, payload: &[u8], meta: &Meta) -> Result<(), ReserveError> {
        self.unflushed = true;
        self.lanes[0].send(payload, meta).map(drop)
    }

    /// Requests a dump of `group`. The answer is frames of [`Kind::DUMP`] and one of [`Kind::DONE`], or one of
    /// [`Kind::ERROR`].
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn request(&mut self, group: u32, payload: &[u8]) -> Result<(), ReserveError> {
        self.send(payload, &Meta { kind: Kind::REQUEST, group, ..Meta::default() })?;
        self.flush();
        Ok(())
    }

    /// Returns true if the ring towards the engine has space for a message of `len` bytes. In an event loop, call it
    /// after [`arm`](Self::arm): the engine then also rings when it releases frames.
    pub fn has_room(&mut self, len: usize) -> bool {
        let lane = &mut self.lanes[0];
        // After a fence that follows the announcement, the engine rings. Without one, the caller must not sleep.
        lane.has_room(len) || !self.sleeper.fence() || lane.has_room(len)
    }

    /// Waits until the engine has released a TX frame of the lane.
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
            // Another poll(2) error appears in the next receiving call; here it costs one iteration.
            let waited = self.nap(left);
            interrupted = waited.is_err_and(|error| error.kind() == ErrorKind::Interrupted);
        }
        if self.disarm().is_err() || self.is_ended() {
            return Err(ReserveError::Disconnected);
        }
        if interrupted && self.interruptible { Err(ReserveError::Interrupted) } else { Ok(()) }
    }
}
