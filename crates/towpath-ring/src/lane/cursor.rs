//! Position of a consumer: the expected sequence number and the frame where it is expected.
//!
//! What: the producer skips held frames, so a number does not determine its frame. The consumer looks at the frame
//! that follows the previous message. If the producer skipped frames, it wrote a note into the word that belongs to
//! the number: "message n is in frame f".
//!
//! Invariant: a note is valid only if the message is in the named frame. Numbers repeat after 2^32 messages, so a note
//! may be that old, and a note that was never written names number 0.

use crate::shm::seq::Seq;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor {
    position: u32,
    expected: Seq,
    frame_nr: u32,
}

impl Cursor {
    pub(crate) fn new(frame_nr: u32, first: Seq) -> Self {
        Self { position: 0, expected: first, frame_nr }
    }

    pub(crate) fn position(&self) -> u32 {
        self.position
    }

    pub(crate) fn expected(&self) -> Seq {
        self.expected
    }

    /// Returns true if a header's first word is that of the expected message.
    pub(crate) fn is_here(&self, first_word: u64) -> bool {
        first_word == u64::from(self.expected.0)
    }

    /// Returns true if the note (`seq | at << 32`) names the expected message.
    pub(crate) fn is_noted(&self, note: u64) -> bool {
        note as u32 == self.expected.0
    }

    /// The frame that the note names, if it is inside the ring.
    pub(crate) fn noted(&self, note: u64) -> Option<u32> {
        let to = (note >> 32) as u32;
        (to < self.frame_nr).then_some(to)
    }

    /// Moves to the frame of the expected message.
    pub(crate) fn jump(&mut self, to: u32) {
        debug_assert!(to < self.frame_nr);
        self.position = to;
    }

    /// Moves back to a received message.
    pub(crate) fn back(&mut self, seq: Seq, position: u32) {
        (self.expected, self.position) = (seq, position);
    }

    /// Moves past a message of `frames` frames, at most all of them.
    pub(crate) fn step(&mut self, frames: u32) -> Seq {
        debug_assert!(frames <= self.frame_nr);
        let seq = self.expected;
        let to = self.position + frames;
        self.position = if to >= self.frame_nr { to - self.frame_nr } else { to };
        self.expected = seq.next();
        seq
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::shm::abi::note;

    #[test]
    fn rows() {
        let mut c = Cursor::new(4, Seq::FIRST);
        assert!(!c.is_here(0) && !c.is_noted(0));
        assert!(c.is_here(1) && !c.is_here(2));
        assert!(c.is_noted(note(Seq(1), 3)) && !c.is_noted(note(Seq(2), 3)));
        assert_eq!((c.noted(note(Seq(1), 4)), c.noted(u64::MAX)), (None, None));
        assert_eq!(c.noted(note(Seq(1), 3)), Some(3));
        c.jump(3);
        assert_eq!((c.step(2), c.position(), c.expected()), (Seq(1), 1, Seq(2)));
        assert_eq!((c.step(4), c.position()), (Seq(2), 1));
        c.back(Seq(2), 1);
        assert_eq!((c.step(1), c.position()), (Seq(2), 2));
    }
}
