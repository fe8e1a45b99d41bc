//! The ring of cumulative records: "everything up to n", in the order in which it was said.
//!
//! Whoever sees a record sees every single verdict and every hold that was given before it: so those win.

use crate::lane::verdict::Word;
use crate::shm::abi::{ENTRY_WORDS, RecordsPlace};
use crate::shm::region::Words;
use crate::shm::sync::Ordering;

/// The consumer's end.
#[derive(Debug)]
pub(crate) struct Writer {
    place: RecordsPlace,
    written: u32,
    /// How many the producer had taken when that was last of interest.
    taken: u32,
}

impl Writer {
    pub(crate) fn new(place: RecordsPlace) -> Self {
        Self { place, written: 0, taken: 0 }
    }

    /// Whether there is no room for a record.
    pub(crate) fn is_full(&mut self, theirs: &Words) -> bool {
        if self.written.wrapping_sub(self.taken) >= self.place.records {
            // Acquire: pairs with the release store in Reader::acknowledge; the slots taken may be written again.
            self.taken = theirs.word(self.place.taken).load(Ordering::Acquire) as u32;
        }
        self.written.wrapping_sub(self.taken) >= self.place.records
    }

    /// Writes a record; there is room.
    pub(crate) fn write(&mut self, own: &Words, word: Word, mark: u32, mask: u32) {
        let record: &[_; ENTRY_WORDS] = own.line(self.place.record(self.written));
        // Relaxed: ordered by the release store below.
        record[0].store(u64::from(mark) | u64::from(mask) << 32, Ordering::Relaxed);
        record[1].store(word.emit(), Ordering::Relaxed);
        self.written = self.written.wrapping_add(1);
        // Release: pairs with the acquire load in Reader::look: the record is there, and so is every single verdict that
        // was given before it.
        own.word(self.place.written).store(self.written.into(), Ordering::Release);
    }
}

/// More records are claimed than there can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overrun;

/// The producer's end.
#[derive(Debug)]
pub(crate) struct Reader {
    place: RecordsPlace,
    taken: u32,
    /// How many of them the consumer was told of.
    told: u32,
}

impl Reader {
    pub(crate) fn new(place: RecordsPlace) -> Self {
        Self { place, taken: 0, told: 0 }
    }

    /// Whether [`look`](Self::look) would find something.
    pub(crate) fn is_ready(&self, theirs: &Words) -> bool {
        // Relaxed: a look loads it again before anything is believed.
        theirs.word(self.place.written).load(Ordering::Relaxed) as u32 != self.taken
    }

    /// How many records there are, each for one [`peek`](Self::peek) and [`step`](Self::step).
    pub(crate) fn look(&mut self, theirs: &Words) -> Result<u32, Overrun> {
        // Acquire: pairs with the release store in Writer::write.
        let written = theirs.word(self.place.written).load(Ordering::Acquire) as u32;
        let count = written.wrapping_sub(self.taken);
        // A number that is too far ahead could otherwise keep us here for 2^32 rounds.
        if count > self.place.records {
            self.taken = written;
            return Err(Overrun);
        }
        Ok(count)
    }

    /// The next record that a look has found: its mark's word and its verdict's word, not checked.
    pub(crate) fn peek(&self, theirs: &Words) -> (u64, u64) {
        let at: &[_; ENTRY_WORDS] = theirs.line(self.place.record(self.taken));
        // Relaxed: ordered by the acquire load in look; a client that writes on is torn at its own cost.
        (at[0].load(Ordering::Relaxed), at[1].load(Ordering::Relaxed))
    }

    /// Takes the record that a peek has shown.
    pub(crate) fn step(&mut self) {
        self.taken = self.taken.wrapping_add(1);
    }

    /// Says how many were taken. Seldom, because a client reads this line with each verdict. It never waits for it: when
    /// the records look full, it writes single verdicts.
    pub(crate) fn acknowledge(&mut self, own: &Words) {
        if self.taken.wrapping_sub(self.told) >= self.place.records.div_ceil(4) {
            self.told = self.taken;
            // Release: pairs with the acquire load in Writer::is_full: the slots may be written again.
            own.word(self.place.taken).store(self.taken.into(), Ordering::Release);
        }
    }
}
