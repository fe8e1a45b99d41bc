//! The TX ring at the client: fills frames for the engine.

use std::os::fd::{AsFd, OwnedFd};

use crate::handshake::messages::Notice;
use crate::lane::frames::NoRoom;
use crate::lane::producer::{Entry, Producer};
use crate::lane::reserve_error::ReserveError;
use crate::shm::abi::{INLINE_BYTES, Layout};
use crate::shm::header::{FLAG_INLINE, FLAG_ONESHOT, Meta};
use crate::shm::region::{Payload, Words};
use crate::shm::seq::Seq;
use crate::shm::sys::{self, Sent};

/// One-shot messages in flight; the engine's default limit of descriptors is higher.
const ONESHOTS: usize = 8;

/// Parts of an attached ring that sending uses.
pub(crate) struct Way<'a> {
    pub(crate) own: &'a Words,
    pub(crate) theirs: &'a Words,
    pub(crate) payload: &'a mut Payload,
    pub(crate) socket: &'a OwnedFd,
    pub(crate) oneshot_max: u64,
}

#[derive(Debug)]
pub(crate) struct TxRing {
    tx: Producer,
    /// One-shot messages in flight.
    under_way: Vec<Seq>,
    /// One-shot messages sent.
    pub(crate) oneshots: u64,
}

impl TxRing {
    /// A ring in new memory; `first` is the sequence number of the first message.
    pub(crate) fn new(layout: &Layout, own: &Words, first: Seq) -> Self {
        let tx = Producer::new(layout.tx_place(), first);
        tx.clear(own);
        Self { tx, under_way: Vec::new(), oneshots: 0 }
    }

    /// Publishes a message; returns its first frame. A message larger than the ring, or than every gap in it,
    /// travels as a one-shot memfd.
    pub(crate) fn send(&mut self, way: Way<'_>, payload: &[u8], meta: &Meta) -> Result<u16, ReserveError> {
        let room = match self.tx.room(payload.len()).or_else(|_| {
            self.reclaim(way.theirs);
            self.tx.room(payload.len())
        }) {
            Ok(room) => room,
            Err(NoRoom::TooLarge | NoRoom::NoContiguousSpace) => {
                return self.send_oneshot(way, payload, meta);
            }
            Err(NoRoom::RingFull) => return Err(ReserveError::RingFull),
        };
        let inline = payload.len() <= INLINE_BYTES;
        let header = meta.header(payload.len(), if inline { FLAG_INLINE } else { 0 });
        if !inline {
            let offset = self.tx.payload_offset(room.at);
            way.payload.bytes_mut(offset, payload.len()).copy_from_slice(payload);
        }
        self.tx.publish(way.own, room, &header, if inline { payload } else { &[] });
        Ok(room.at as u16)
    }

    /// Sequence number of the next message.
    #[cfg(test)]
    pub(crate) fn next_seq(&self) -> Seq {
        self.tx.frames.next_seq()
    }

    /// Returns true if the ring has space for a message of `len` bytes.
    pub(crate) fn has_room(&mut self, theirs: &Words, len: usize) -> bool {
        self.reclaim(theirs);
        self.tx.room(len).is_ok()
    }

    fn send_oneshot(&mut self, way: Way<'_>, payload: &[u8], meta: &Meta) -> Result<u16, ReserveError> {
        let len = payload.len() as u64;
        if len > way.oneshot_max.min(u32::MAX.into()) {
            return Err(ReserveError::TooLarge);
        }
        let frames = &self.tx.frames;
        self.under_way.retain(|seq| frames.find(*seq).is_some());
        if self.under_way.len() >= ONESHOTS {
            return Err(ReserveError::RingFull);
        }
        let room = self.tx.room(0)?;
        let seq = self.tx.frames.next_seq();
        let refused = |e| {
            log::warn!("cannot create a memfd for a message of {len} bytes: {e}");
            ReserveError::TooLarge
        };
        let fd = sys::frozen(payload).map_err(refused)?;
        // Sent before the publication: when the engine sees the header, it has the descriptor.
        match sys::send(way.socket, &Notice::OneShot { seq, len }.emit(), &[fd.as_fd()]) {
            Ok(Sent::Yes) => {}
            Ok(Sent::Full) => return Err(ReserveError::RingFull),
            Ok(Sent::Gone) => return Err(ReserveError::Disconnected),
            Err(e) => return Err(refused(e)),
        }
        self.under_way.push(seq);
        self.oneshots += 1;
        self.tx.publish(way.own, room, &meta.header(payload.len(), FLAG_ONESHOT), &[]);
        Ok(room.at as u16)
    }

    /// Takes back the frames that the engine has released.
    fn reclaim(&mut self, theirs: &Words) {
        let (mut seq, end) = (self.tx.frames.oldest(), self.tx.frames.next_seq());
        while seq != end {
            if let Some(at) = self.tx.frames.find(seq) {
                match self.tx.entry(theirs, at) {
                    // The engine forwards it in place: later frames are released before it.
                    Entry::Word(word) if word.is_hold() => self.tx.frames.hold(at),
                    Entry::Word(_) => self.tx.frames.release(at),
                    _ => {}
                }
            }
            seq = seq.next();
        }
        let mut held = 0;
        while let Some(&at) = self.tx.frames.skipped().get(held) {
            match self.tx.entry(theirs, at) {
                Entry::Word(word) if !word.is_hold() => self.tx.frames.release(at),
                _ => held += 1,
            }
        }
    }

    /// Returns true if the engine has released a frame that was not reclaimed yet.
    pub(crate) fn is_returned(&self, theirs: &Words) -> bool {
        let (mut seq, end) = (self.tx.frames.oldest(), self.tx.frames.next_seq());
        while seq != end {
            if self.tx.frames.find(seq).is_some_and(|at| self.tx.has_entry(theirs, at)) {
                return true;
            }
            seq = seq.next();
        }
        self.tx.frames.skipped().iter().any(|at| self.tx.has_entry(theirs, *at))
    }
}
