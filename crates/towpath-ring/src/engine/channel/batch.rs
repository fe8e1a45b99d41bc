//! Batches: several short messages of one connection in one frame. The format is in `lane/batch.rs`.

use super::Channel;
use crate::lane::batch::{BATCH_MAX, ENTRY, Part};
use crate::lane::reserve_error::ReserveError;
use crate::shm::abi;
use crate::shm::header::{Kind, Meta};
use crate::shm::seq::Seq;
use crate::shm::sync::Ordering;

impl Channel {
    /// How many short messages the client takes in one frame ([`Channel::send_batch`]), up to [`BATCH_MAX`]; 1 when it takes no
    /// such frames. What the client says: more than it takes is its own loss.
    #[must_use]
    pub fn batch_max(&self) -> usize {
        // Relaxed: a number that orders nothing.
        let most = self.rings.theirs.word(abi::CLIENT_BATCH_MAX).load(Ordering::Relaxed);
        usize::try_from(most).map_or(BATCH_MAX, |most| most.clamp(1, BATCH_MAX))
    }

    /// The frame that the client says it is at, and which message of it, from 0. To be believed as far as the client itself is
    /// concerned: which of those that it has it died at.
    #[must_use]
    pub fn at(&self) -> Option<(Seq, u32)> {
        // Relaxed: asked when the client is gone, or to be shown.
        let at = self.rings.theirs.word(abi::CLIENT_AT).load(Ordering::Relaxed);
        (at >> 63 != 0).then_some((Seq(at as u32), (at >> 32) as u32 & 0xffff))
    }

    /// Publishes copies of several messages in one frame, to a client that takes so many ([`Channel::batch_max`]). Kind and mark of
    /// `meta` are set here.
    ///
    /// # Errors
    /// [`ReserveError`]: there is no room.
    ///
    /// # Panics
    /// When there are more than [`BATCH_MAX`], or the iterator's clone gives others.
    pub fn send_batch<'a>(
        &mut self,
        parts: impl Iterator<Item = Part<'a>> + Clone,
        meta: &Meta,
    ) -> Result<Seq, ReserveError> {
        let pieces = parts.clone().map(|part| part.bytes);
        self.send_batch_of(parts, pieces, meta)
    }

    /// The same where messages lie one behind the other: `pieces` are their bytes, in as few pieces as may be.
    ///
    /// # Errors
    /// [`ReserveError`]: there is no room.
    ///
    /// # Panics
    /// When there are more than [`BATCH_MAX`], or the pieces are not as many bytes as the messages.
    pub fn send_batch_of<'a>(
        &mut self,
        parts: impl Iterator<Item = Part<'a>>,
        pieces: impl Iterator<Item = &'a [u8]>,
        meta: &Meta,
    ) -> Result<Seq, ReserveError> {
        let (mut entries, mut count, mut bytes) = ([[0; ENTRY]; BATCH_MAX], 0, 0);
        for part in parts {
            assert!(count < BATCH_MAX, "more than {BATCH_MAX} messages in a frame");
            (entries[count], count, bytes) = (part.emit(), count + 1, bytes + part.bytes.len());
        }
        let mut slot = self.reserve(count * ENTRY + bytes)?;
        slot.write(entries[..count].as_flattened());
        // More bytes than were asked for are the slot's to refuse.
        let wrote: usize = pieces.map(|piece| (slot.write(piece), piece.len()).1).sum();
        assert_eq!(wrote, bytes, "bytes of the messages");
        Ok(slot.commit(&Meta { kind: Kind::MESSAGES, mark: count as u32, ..*meta }))
    }
}
