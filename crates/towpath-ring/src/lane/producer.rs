//! The producer of a ring: writes headers in its own memory, reads release entries in the consumer's memory.

use super::frames::{Frames, NoRoom, Room};
use crate::lane::verdict::Word;
use crate::shm::abi::{self, ENTRY_WORDS, HEADER_WORDS, RingPlace};
use crate::shm::geometry::Geometry;
use crate::shm::header::{FLAG_INLINE, FLAG_ONESHOT, Header};
use crate::shm::region::{Use, Words};
use crate::shm::seq::Seq;
use crate::shm::sync::Ordering;

/// Content of the release entry of an outstanding message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// The word was read before.
    Unchanged,
    /// A new word with the sequence number of another message. A broken or hostile consumer wrote it.
    WrongSeq,
    /// A word for this message with an undefined verdict.
    Invalid,
    /// A valid verdict for this message.
    Word(Word),
}

#[derive(Debug)]
pub(crate) struct Producer {
    pub(crate) frames: Frames,
    geometry: Geometry,
    /// First word of the headers, in the producer's memory.
    headers: usize,
    /// First note, in the producer's memory.
    notes: usize,
    /// First word of the release entries, in the consumer's memory.
    entries: usize,
    /// The last word read from each entry, so that each word is processed once.
    seen: Box<[u64]>,
}

impl Producer {
    /// `first` is the sequence number of the first message.
    pub(crate) fn new(place: RingPlace, first: Seq) -> Self {
        let RingPlace { geometry, headers, notes, entries } = place;
        Self {
            frames: Frames::new(geometry.frame_nr, first),
            geometry,
            headers,
            notes,
            entries,
            seen: vec![0; geometry.frame_nr as usize].into(),
        }
    }

    /// Marks every header as empty: new memory is zero, which is a valid sequence number after 2^32 messages.
    pub(crate) fn clear(&self, own: &Words) {
        for at in 0..self.geometry.frame_nr as usize {
            // Relaxed: the peer receives this memory in a message sent afterwards.
            own.word(self.headers + at * HEADER_WORDS).store(abi::NO_MESSAGE, Ordering::Relaxed);
        }
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Finds space for `len` bytes.
    #[inline]
    pub(crate) fn room(&self, len: usize) -> Result<Room, NoRoom> {
        u32::try_from(self.geometry.frames_for(len))
            .map_err(|_| NoRoom::TooLarge)
            .and_then(|frames| self.frames.room(frames))
    }

    /// Offset of the payload of the message at `at`.
    pub(crate) fn payload_offset(&self, at: u32) -> usize {
        at as usize * self.geometry.frame_size as usize
    }

    // Always inline: a header that was built in memory could not be read in words before all of it has left the store buffer.
    /// Publishes a message. Its payload is in place, or is `inline`.
    #[inline(always)]
    pub(crate) fn publish(&mut self, own: &Words, room: Room, header: &Header, inline: &[u8]) -> Seq {
        let elsewhere = header.flags & (FLAG_INLINE | FLAG_ONESHOT) != 0;
        let frames = if elsewhere { 1 } else { self.geometry.frames_for(header.len as usize) as u32 };
        let seq = self.frames.publish(room, frames);
        let words: &[_; HEADER_WORDS] = own.line(self.headers + room.at as usize * HEADER_WORDS);
        // The line with the number is written last, and at once: a consumer that waits for the number takes the line
        // as soon as it is written.
        abi::store_inline(words, inline);
        abi::store_header(words, header);
        // Release: pairs with the acquire load in Consumer::next. A consumer that sees the number sees the header
        // and the payload; otherwise it looks again.
        words[0].store(seq.0.into(), Ordering::Release);
        // The consumer has copies of these lines from the previous round. The prefetch takes them ahead of time;
        // otherwise each store above would wait for its line.
        let soon = self.headers + self.frames.ahead(frames) as usize * HEADER_WORDS;
        own.prefetch(soon, Use::Write);
        own.prefetch(soon + abi::INLINE, Use::Write);
        if room.from != room.at {
            let index = seq.0 as usize & (abi::notes(&self.geometry) - 1);
            // Release: pairs with the acquire load of the note in Consumer::next; a consumer that sees the note sees
            // the message. The word is free: the number that used it before is no longer in sequence, so the consumer has
            // passed it.
            own.word(self.notes + index).store(abi::note(seq, room.at), Ordering::Release);
        }
        seq
    }

    /// Reads the release entry of the outstanding message at `at`.
    #[inline]
    pub(crate) fn entry(&mut self, theirs: &Words, at: u32) -> Entry {
        // Acquire: pairs with the release store in Consumer::release. The mark beside the verdict, and the TX frame
        // that it may name, were written before it.
        let raw = theirs.word(self.entries + at as usize * ENTRY_WORDS + 1).load(Ordering::Acquire);
        if raw == self.seen[at as usize] {
            return Entry::Unchanged;
        }
        self.seen[at as usize] = raw;
        if Word::seq_of(raw) != self.frames.seq_at(at) {
            return Entry::WrongSeq;
        }
        Word::parse(raw).map_or(Entry::Invalid, Entry::Word)
    }

    /// Returns true if the release entry of the message at `at` has an unread word.
    #[inline]
    pub(crate) fn has_entry(&self, theirs: &Words, at: u32) -> bool {
        // Relaxed: entry() loads the word again before it is used.
        theirs.word(self.entries + at as usize * ENTRY_WORDS + 1).load(Ordering::Relaxed)
            != self.seen[at as usize]
    }

    /// Returns true if the last word read from the entry of the message at `at` is a hold.
    #[inline]
    pub(crate) fn says_hold(&self, at: u32) -> bool {
        let raw = self.seen[at as usize];
        Word::seq_of(raw) == self.frames.seq_at(at) && Word::parse(raw).is_ok_and(Word::is_hold)
    }

    /// The mark and mask beside the verdict of the message at `at`.
    pub(crate) fn mark(&self, theirs: &Words, at: u32) -> (u32, u32) {
        // Relaxed: entry() has acquired everything that was written before the verdict.
        let raw = theirs.word(self.entries + at as usize * ENTRY_WORDS).load(Ordering::Relaxed);
        (raw as u32, (raw >> 32) as u32)
    }
}
