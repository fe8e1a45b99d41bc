//! The consumer of a ring: reads headers in the producer's memory, writes release entries in its own memory.

use super::cursor::Cursor;
use crate::lane::verdict::Word;
use crate::shm::abi::{self, ENTRY_WORDS, HEADER_WORDS, RingPlace};
use crate::shm::geometry::Geometry;
use crate::shm::header::{FLAG_INLINE, FLAG_ONESHOT, Header};
use crate::shm::region::{Use, Words};
use crate::shm::seq::Seq;
use crate::shm::sync::{AtomicU64, Ordering};

/// A message: a private copy of its header, checked against the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) seq: Seq,
    /// First frame.
    pub(crate) at: u32,
    pub(crate) header: Header,
}

/// Invalid content from the producer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BadHeader {
    /// A note that points outside of the ring.
    Note,
    /// A length beyond the area, or beyond the inline bytes.
    Length(u32),
}

#[derive(Debug)]
pub(crate) struct Consumer {
    cursor: Cursor,
    geometry: Geometry,
    /// First word of the headers, in the producer's memory.
    headers: usize,
    /// First note, in the producer's memory.
    notes: usize,
    /// First word of the release entries, in the consumer's memory.
    entries: usize,
}

impl Consumer {
    /// `first` is the sequence number of the first message.
    pub(crate) fn new(place: RingPlace, first: Seq) -> Self {
        let RingPlace { geometry, headers, notes, entries } = place;
        Self { cursor: Cursor::new(geometry.frame_nr, first), geometry, headers, notes, entries }
    }

    /// Sequence number of the next message.
    pub(crate) fn expected(&self) -> Seq {
        self.cursor.expected()
    }

    /// Returns true if the next message is published.
    pub(crate) fn is_ready(&self, theirs: &Words) -> bool {
        self.is_here(theirs) || self.elsewhere(theirs).is_ok_and(|at| at.is_some())
    }

    // Always inline, with all callees: the header is copied once, from the ring to its destination. Each further copy would wait until
    // the words of the previous one have left the store buffer.
    /// Receives the next message, if it is published.
    #[inline(always)]
    pub(crate) fn next(&mut self, theirs: &Words) -> Result<Option<Found>, BadHeader> {
        if !self.look(theirs)? {
            return Ok(None);
        }
        let found = self.found(theirs);
        let frames = self.frames(&found.header)?;
        self.cursor.step(frames);
        Ok(Some(found))
    }

    /// Returns the next message without receiving it.
    pub(crate) fn peek(&mut self, theirs: &Words) -> Result<Option<Found>, BadHeader> {
        if !self.look(theirs)? {
            return Ok(None);
        }
        let found = self.found(theirs);
        self.frames(&found.header)?;
        Ok(Some(found))
    }

    /// Returns true if the next message is published; then the cursor is at it.
    #[inline(always)]
    fn look(&mut self, theirs: &Words) -> Result<bool, BadHeader> {
        if self.is_here(theirs) { Ok(true) } else { self.look_elsewhere(theirs) }
    }

    /// As `look`, for a message that is not in the expected frame, because the producer skipped a held one. Kept out of line, so
    /// that it does not slow the usual path.
    #[inline(never)]
    fn look_elsewhere(&mut self, theirs: &Words) -> Result<bool, BadHeader> {
        if let Some(at) = self.elsewhere(theirs)? {
            self.cursor.jump(at);
            return Ok(true);
        }
        // Prefetches the line of the inline bytes, so that the header and the payload of a small message arrive in parallel.
        theirs.prefetch(self.inline_index(self.cursor.position()), Use::Read);
        Ok(false)
    }

    /// Where the note says that the next message is, if it is there.
    fn elsewhere(&self, theirs: &Words) -> Result<Option<u32>, BadHeader> {
        let note = self.note(theirs);
        if !self.cursor.is_noted(note) {
            return Ok(None);
        }
        let at = self.cursor.noted(note).ok_or(BadHeader::Note)?;
        // The message is published before its note. The noted frame may hold another message, and this is not an error: the note
        // is stale (numbers repeat after 2^32 messages) or was never written (it then names number 0).
        Ok(self.is_at(theirs, at).then_some(at))
    }

    /// The message that is there, its length not checked.
    #[inline(always)]
    fn found(&self, theirs: &Words) -> Found {
        let header = abi::load_header(self.header_words(theirs));
        Found { seq: self.cursor.expected(), at: self.cursor.position(), header }
    }

    /// Takes the message that [`peek`](Self::peek) found.
    #[inline(always)]
    pub(crate) fn step(&mut self, found: &Found) -> Result<(), BadHeader> {
        let frames = self.frames(&found.header)?;
        self.cursor.step(frames);
        Ok(())
    }

    /// Moves back to message `seq` in frame `at`, which was received last. The next receive returns it again.
    #[cold]
    pub(crate) fn back(&mut self, seq: Seq, at: u32) {
        self.cursor.back(seq, at);
    }

    /// Number of frames that the message takes. An unchecked length could cause a read outside the area.
    #[inline(always)]
    fn frames(&self, header: &Header) -> Result<u32, BadHeader> {
        let len = header.len as usize;
        if header.flags & FLAG_ONESHOT != 0 {
            return Ok(1);
        }
        if header.flags & FLAG_INLINE != 0 {
            return if len <= abi::INLINE_BYTES { Ok(1) } else { Err(BadHeader::Length(header.len)) };
        }
        if len > self.geometry.bytes() {
            return Err(BadHeader::Length(header.len));
        }
        Ok(self.geometry.frames_for(len) as u32)
    }

    /// Offset of the payload of the message at `at`.
    pub(crate) fn payload_offset(&self, at: u32) -> usize {
        at as usize * self.geometry.frame_size as usize
    }

    /// Copies the inline bytes of the message at `at`.
    pub(crate) fn inline(&self, theirs: &Words, at: u32) -> [u8; abi::INLINE_BYTES] {
        abi::load_inline(theirs.line(self.headers + at as usize * HEADER_WORDS))
    }

    /// First word of the inline bytes of the message at `at`.
    pub(crate) fn inline_index(&self, at: u32) -> usize {
        self.headers + at as usize * HEADER_WORDS + abi::INLINE
    }

    /// Returns the header at `at` with its sequence number, for messages that a verdict names.
    pub(crate) fn named(&self, theirs: &Words, at: u32) -> Result<Found, BadHeader> {
        let words: &[_; HEADER_WORDS] = theirs.line(self.headers + at as usize * HEADER_WORDS);
        // Acquire: pairs with the release store in Producer::publish.
        let seq = Seq(words[0].load(Ordering::Acquire) as u32);
        let header = abi::load_header(words);
        self.frames(&header)?;
        Ok(Found { seq, at, header })
    }

    /// Writes the release entry of the message at `at`.
    #[inline]
    pub(crate) fn release(&self, own: &Words, at: u32, word: Word, mark: u32, mask: u32) {
        let entry: &[_; ENTRY_WORDS] = own.line(self.entries + at as usize * ENTRY_WORDS);
        // Relaxed: ordered by the release store below.
        entry[0].store(u64::from(mark) | u64::from(mask) << 32, Ordering::Relaxed);
        // Release: pairs with the acquire load in Producer::entry. All reads of the frame happened before its memory
        // is free, and the mark and the TX frame that the word names are visible with it.
        entry[1].store(word.emit(), Ordering::Release);
    }

    #[inline(always)]
    fn is_here(&self, theirs: &Words) -> bool {
        self.is_at(theirs, self.cursor.position())
    }

    /// Returns true if the next message is in frame `at`.
    #[inline(always)]
    fn is_at(&self, theirs: &Words, at: u32) -> bool {
        let words: &[_; HEADER_WORDS] = theirs.line(self.headers + at as usize * HEADER_WORDS);
        // Acquire: pairs with the release store in Producer::publish.
        self.cursor.is_here(words[0].load(Ordering::Acquire))
    }

    fn note(&self, theirs: &Words) -> u64 {
        let index = self.cursor.expected().0 as usize & (abi::notes(&self.geometry) - 1);
        // Acquire: pairs with the release store of the note in Producer::publish.
        theirs.word(self.notes + index).load(Ordering::Acquire)
    }

    #[inline(always)]
    fn header_words<'a>(&self, theirs: &'a Words) -> &'a [AtomicU64; HEADER_WORDS] {
        theirs.line(self.headers + self.cursor.position() as usize * HEADER_WORDS)
    }
}
