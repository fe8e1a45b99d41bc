//! Batches: several short messages of one connection in one frame. The format is in `lane/batch.rs`.

use super::Channel;
use crate::lane::batch::{BATCH_MAX, ENTRY, Part, Position};
use crate::lane::reserve_error::ReserveError;
use crate::shm::abi;
use crate::shm::header::{Kind, Meta};
use crate::shm::seq::Seq;
use crate::shm::sync::Ordering;

impl Channel {
    /// Returns true if the client asked for connection events ([`Kind::OPENED`](crate::Kind::OPENED)) when it attached.
    #[must_use]
    pub const fn wants_events(&self) -> bool {
        self.policy.events
    }

    /// Returns true if the client takes messages in parts ([`Kind::MESSAGE_PART`](crate::Kind::MESSAGE_PART)).
    #[must_use]
    pub const fn takes_parts(&self) -> bool {
        self.policy.parts
    }

    /// Largest number of messages that the client accepts in one frame ([`Channel::send_batch`]), up to
    /// [`BATCH_MAX`]; 1 if it accepts no batches. The client reports it; a wrong value harms only the client.
    #[must_use]
    pub fn batch_max(&self) -> usize {
        // Relaxed: a number that orders nothing.
        let most = self.rings.theirs.word(abi::CLIENT_BATCH_MAX).load(Ordering::Relaxed);
        usize::try_from(most).map_or(BATCH_MAX, |most| most.clamp(1, BATCH_MAX))
    }

    /// The message that the client reports to be processing. After the death of the client, it is the message at which the client died.
    #[must_use]
    pub fn position(&self) -> Option<Position> {
        // Relaxed: read after the client's death, or for display.
        Position::of(self.rings.theirs.word(abi::CLIENT_AT).load(Ordering::Relaxed))
    }

    /// Publishes copies of several messages in one frame. The number of messages is at most [`Channel::batch_max`].
    /// Kind and mark of `meta` are set here.
    ///
    /// # Errors
    /// [`ReserveError`]: the ring has no space.
    ///
    /// # Panics
    /// There are more than [`BATCH_MAX`] messages, or the clone of the iterator yields different messages.
    pub fn send_batch<'a>(
        &mut self,
        parts: impl Iterator<Item = Part<'a>> + Clone,
        meta: &Meta,
    ) -> Result<Seq, ReserveError> {
        let pieces = parts.clone().map(|part| part.bytes);
        self.send_batch_of(parts, pieces, meta)
    }

    /// Like [`send_batch`](Self::send_batch), with the bytes of all messages in `pieces`: adjacent messages may be
    /// one piece.
    ///
    /// # Errors
    /// [`ReserveError`]: the ring has no space.
    ///
    /// # Panics
    /// There are more than [`BATCH_MAX`] messages, or the pieces have another total length than the messages.
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
        // The reservation panics if there are more bytes than reserved.
        let wrote: usize = pieces.map(|piece| (slot.write(piece), piece.len()).1).sum();
        assert_eq!(wrote, bytes, "bytes of the messages");
        Ok(slot.commit(&Meta { kind: Kind::MESSAGES, mark: count as u32, ..*meta }))
    }
}
