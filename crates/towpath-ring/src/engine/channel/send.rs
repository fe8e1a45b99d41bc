//! Output to the client: space for messages, their publication, loss records, the doorbell.

use super::Channel;
use crate::engine::reservation::Reservation;
use crate::lane::frames::Room;
use crate::lane::loss_record::Loss;
use crate::lane::reserve_error::ReserveError;
use crate::shm::abi::{self, INLINE_BYTES};
use crate::shm::header::{FLAG_INLINE, FLAG_ONESHOT, Kind, Meta};
use crate::shm::region::Use;
use crate::shm::seq::Seq;
use crate::shm::sync::Ordering;

impl Channel {
    /// Reserves space for a message of `len` bytes, to be filled and committed. Dropping the reservation frees the
    /// space.
    ///
    /// # Errors
    /// [`ReserveError`]: there is no space.
    pub fn reserve(&mut self, len: usize) -> Result<Reservation<'_>, ReserveError> {
        let room = self.room(len)?;
        Ok(Reservation { room, len, written: 0, inline: [0; INLINE_BYTES], channel: self })
    }

    /// Publishes a copy of `bytes`: [`reserve`](Self::reserve), write and commit in one call. A message larger than
    /// the ring, or than every gap between held frames, travels as a one-shot memfd; the client receives it through
    /// the same call.
    ///
    /// # Errors
    /// [`ReserveError`]: there is no space.
    pub fn send(&mut self, bytes: &[u8], meta: &Meta) -> Result<Seq, ReserveError> {
        let room = match self.room(bytes.len()) {
            Ok(room) => room,
            Err(why) => return self.send_without_room(why, bytes, meta),
        };
        if bytes.len() <= INLINE_BYTES {
            return Ok(self.publish(room, bytes.len(), FLAG_INLINE, meta, bytes));
        }
        let offset = self.rings.rx.payload_offset(room.at);
        self.rings.payload.bytes_mut(offset, bytes.len()).copy_from_slice(bytes);
        let seq = self.publish(room, bytes.len(), 0, meta, &[]);
        // The next message probably has the same size. The client has read all published messages.
        let next = self.rings.rx.payload_offset(self.rings.rx.frames.position());
        self.rings.payload.prefetch(next, bytes.len(), Use::Write);
        Ok(seq)
    }

    #[inline]
    pub(crate) fn room(&mut self, len: usize) -> Result<Room, ReserveError> {
        if self.liveness.is_over() {
            return Err(ReserveError::Disconnected);
        }
        if self.gaps.is_pending() {
            self.tell_gaps(self.rings.rx.geometry().frames_for(len));
        }
        let room = self.rings.rx.room(len);
        self.stats.full += u64::from(room.is_err());
        Ok(room?)
    }

    #[cold]
    fn send_without_room(
        &mut self,
        why: ReserveError,
        bytes: &[u8],
        meta: &Meta,
    ) -> Result<Seq, ReserveError> {
        if !matches!(why, ReserveError::TooLarge | ReserveError::NoContiguousSpace) {
            return Err(why);
        }
        let sent = self.send_oneshot(bytes, meta);
        self.stats.oneshots_held += u64::from(why == ReserveError::NoContiguousSpace && sent.is_ok());
        sent
    }

    fn send_oneshot(&mut self, bytes: &[u8], meta: &Meta) -> Result<Seq, ReserveError> {
        let room = self.rings.rx.room(0)?;
        self.oneshots.send(&self.liveness, self.lane, self.rings.rx.frames.next_seq(), bytes)?;
        self.stats.oneshots += 1;
        Ok(self.publish(room, bytes.len(), FLAG_ONESHOT, meta, &[]))
    }

    #[inline]
    pub(crate) fn publish(&mut self, room: Room, len: usize, flags: u16, meta: &Meta, inline: &[u8]) -> Seq {
        let mut header = meta.header(len, flags);
        if meta.kind != Kind::GAP {
            header.lost = self.gaps.take_before();
        }
        let seq = self.rings.rx.publish(&self.rings.own, room, &header, inline);
        self.stats.published += 1;
        self.stats.bytes += len as u64;
        seq
    }

    /// Counts a frame for this client that is not published. The next message's header reports it, and, unless the
    /// client disabled them, a frame of [`Kind::GAP`].
    pub fn lose(&mut self, loss: Loss) {
        self.lose_many(loss, 1);
    }

    /// As [`lose`](Self::lose), for several frames.
    pub fn lose_many(&mut self, loss: Loss, frames: u64) {
        self.gaps.count(loss, u32::try_from(frames).unwrap_or(u32::MAX));
        *self.stats.lost_mut(loss) += frames;
        self.lost += frames;
        // Relaxed: a number for Consumer::overrun that orders nothing.
        self.rings.own.word(abi::ENGINE_LOST).store(self.lost, Ordering::Relaxed);
    }

    /// Publishes loss records while they leave space for `frames` frames.
    #[cold]
    fn tell_gaps(&mut self, frames: usize) {
        let frames = u32::try_from(frames).unwrap_or(u32::MAX).saturating_add(1);
        while self.gaps.is_pending()
            && self.rings.rx.frames.room(frames).is_ok()
            && let Ok(room) = self.rings.rx.room(0)
            && let Some(meta) = self.gaps.next()
        {
            let seq = self.publish(room, 0, FLAG_INLINE, &meta, &[]);
            self.gaps.told(seq);
            self.stats.gaps += 1;
        }
    }

    /// Returns true if a loss has not been reported to the client. [`kick`](Self::kick) reports it when half of the ring is
    /// free.
    #[must_use]
    #[inline]
    pub fn has_losses(&self) -> bool {
        self.gaps.is_pending()
    }

    /// Wakes the client if it sleeps. Call it once after a batch of commits.
    #[inline]
    pub fn kick(&mut self) {
        // Without a following message, a loss is reported when half of the ring is free.
        if self.gaps.is_pending() && !self.liveness.is_over() {
            self.tell_gaps(self.rings.rx.frames.frame_nr() as usize / 2);
        }
        if self.ringer.should_ring(&self.rings.theirs) {
            self.ring();
        }
    }

    /// Wakes the client if it sleeps until there is space for its messages. Call it after they were read, instead of [`kick`](Self::kick),
    /// if nothing was published.
    pub fn kick_for_room(&mut self) {
        if self.ringer.should_ring_unless(&self.rings.theirs, abi::CLIENT_NO_ROOM_WANTED) {
            self.ring();
        }
    }

    #[cold]
    fn ring(&mut self) {
        self.stats.wakeups += 1;
        self.liveness.ring();
    }
}
