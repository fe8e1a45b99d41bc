//! Space for one message in the ring towards a client.

use crate::engine::channel::Channel;
use crate::lane::frames::Room;
use crate::shm::abi::INLINE_BYTES;
use crate::shm::header::{FLAG_INLINE, Meta};
use crate::shm::seq::Seq;

/// Space for one message: fill it, then commit it.
#[derive(Debug)]
pub struct Reservation<'a> {
    pub(crate) channel: &'a mut Channel,
    pub(crate) room: Room,
    pub(crate) len: usize,
    pub(crate) written: usize,
    pub(crate) inline: [u8; INLINE_BYTES],
}

impl Reservation<'_> {
    /// Returns all reserved bytes. [`commit_len`](Self::commit_len) says how many are part of the message. Bytes
    /// that are not written contain earlier messages of this channel, or zeros.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.written = self.len;
        self.room_mut()
    }

    /// Appends bytes.
    ///
    /// # Panics
    /// More bytes than were reserved.
    pub fn write(&mut self, bytes: &[u8]) {
        let written = self.written;
        assert!(bytes.len() <= self.len - written, "more bytes than the {} that were reserved", self.len);
        self.room_mut()[written..written + bytes.len()].copy_from_slice(bytes);
        self.written += bytes.len();
    }

    /// Publishes the written bytes. The next [`Channel::kick`] or [`Channel::wait`] wakes the client.
    pub fn commit(self, meta: &Meta) -> Seq {
        let len = self.written;
        self.commit_len(len, meta)
    }

    /// Publishes the first `len` bytes.
    ///
    /// # Panics
    /// `len` is larger than the number of written bytes.
    pub fn commit_len(self, len: usize, meta: &Meta) -> Seq {
        assert!(len <= self.written, "{len} bytes were not written");
        let inline = self.len <= INLINE_BYTES;
        let (flags, bytes) = if inline { (FLAG_INLINE, &self.inline[..len]) } else { (0, &[][..]) };
        self.channel.publish(self.room, len, flags, meta, bytes)
    }

    fn room_mut(&mut self) -> &mut [u8] {
        if self.len <= INLINE_BYTES {
            return &mut self.inline[..self.len];
        }
        let rings = &mut self.channel.rings;
        rings.payload.bytes_mut(rings.rx.payload_offset(self.room.at), self.len)
    }
}
