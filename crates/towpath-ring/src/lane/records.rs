//! The ring of cumulative verdicts ("everything up to n"), in the order in which they were given.
//!
//! Invariant: a producer that sees a record sees every single verdict and hold that was given before it. Those take
//! precedence.

use crate::lane::verdict::Word;
use crate::shm::abi::{ENTRY_WORDS, RecordsPlace};
use crate::shm::region::Words;
use crate::shm::sync::Ordering;

/// The consumer's end.
#[derive(Debug)]
pub(crate) struct Writer {
    place: RecordsPlace,
    written: u32,
    /// Records taken by the producer when the word was last read.
    taken: u32,
}

impl Writer {
    pub(crate) fn new(place: RecordsPlace) -> Self {
        Self { place, written: 0, taken: 0 }
    }

    /// Returns true if the ring has no space for a record.
    pub(crate) fn is_full(&mut self, theirs: &Words) -> bool {
        if self.written.wrapping_sub(self.taken) >= self.place.records {
            // Acquire: pairs with the release store in Reader::acknowledge; the slots taken may be written again.
            self.taken = theirs.word(self.place.taken).load(Ordering::Acquire) as u32;
        }
        self.written.wrapping_sub(self.taken) >= self.place.records
    }

    /// Writes a record. The ring has space.
    pub(crate) fn write(&mut self, own: &Words, word: Word, mark: u32, mask: u32) {
        let record: &[_; ENTRY_WORDS] = own.line(self.place.record(self.written));
        // Relaxed: ordered by the release store below.
        record[0].store(u64::from(mark) | u64::from(mask) << 32, Ordering::Relaxed);
        record[1].store(word.emit(), Ordering::Relaxed);
        self.written = self.written.wrapping_add(1);
        // Release: pairs with the acquire load in Reader::look: it publishes the record and every single verdict
        // given before it.
        own.word(self.place.written).store(self.written.into(), Ordering::Release);
    }
}

/// The consumer claims more records than the ring holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overrun;

/// The producer's end.
#[derive(Debug)]
pub(crate) struct Reader {
    place: RecordsPlace,
    taken: u32,
    /// Number of records acknowledged to the consumer.
    told: u32,
}

impl Reader {
    pub(crate) fn new(place: RecordsPlace) -> Self {
        Self { place, taken: 0, told: 0 }
    }

    /// Returns true if [`look`](Self::look) would find a record.
    pub(crate) fn is_ready(&self, theirs: &Words) -> bool {
        // Relaxed: look() loads the word again before it is used.
        theirs.word(self.place.written).load(Ordering::Relaxed) as u32 != self.taken
    }

    /// Number of unread records. Call [`peek`](Self::peek) and [`step`](Self::step) for each.
    pub(crate) fn look(&mut self, theirs: &Words) -> Result<u32, Overrun> {
        // Acquire: pairs with the release store in Writer::write.
        let written = theirs.word(self.place.written).load(Ordering::Acquire) as u32;
        let count = written.wrapping_sub(self.taken);
        // A number too far ahead could otherwise keep the engine here for 2^32 rounds.
        if count > self.place.records {
            self.taken = written;
            return Err(Overrun);
        }
        Ok(count)
    }

    /// Returns the mark word and the verdict word of the next record, unchecked.
    pub(crate) fn peek(&self, theirs: &Words) -> (u64, u64) {
        let at: &[_; ENTRY_WORDS] = theirs.line(self.place.record(self.taken));
        // Relaxed: ordered by the acquire load in look. A client that overwrites an unread record corrupts only its
        // own verdict.
        (at[0].load(Ordering::Relaxed), at[1].load(Ordering::Relaxed))
    }

    /// Moves past the record that peek returned.
    pub(crate) fn step(&mut self) {
        self.taken = self.taken.wrapping_add(1);
    }

    /// Publishes the number of records taken. Seldom, because the client reads this line with each verdict. The
    /// client never waits for it: while the ring seems full, it writes single verdicts.
    pub(crate) fn acknowledge(&mut self, own: &Words) {
        if self.taken.wrapping_sub(self.told) >= self.place.records.div_ceil(4) {
            self.told = self.taken;
            // Release: pairs with the acquire load in Writer::is_full: the slots may be written again.
            own.word(self.place.taken).store(self.taken.into(), Ordering::Release);
        }
    }
}
