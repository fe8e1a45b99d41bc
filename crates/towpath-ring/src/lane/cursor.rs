//! Where a consumer is: which number it expects, and in which frame.
//!
//! The producer goes round frames that are held, so number and frame are not tied to each other. The consumer looks
//! where the message would be if nothing was gone round; when the producer did go round something it left a note, in
//! a word that belongs to the number: "number n is at frame f".
//!
//! A note alone says little: numbers begin again after 2^32, so one may be left from so long ago, and one that was never written
//! is about number 0. It counts when the message is there.

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

    /// Whether the first word of a header is that of the expected message.
    pub(crate) fn is_here(&self, first_word: u64) -> bool {
        first_word == u64::from(self.expected.0)
    }

    /// Whether the note (`seq | at << 32`) is about the expected message.
    pub(crate) fn is_noted(&self, note: u64) -> bool {
        note as u32 == self.expected.0
    }

    /// The frame that the note points to; none when that is outside of the ring.
    pub(crate) fn noted(&self, note: u64) -> Option<u32> {
        let to = (note >> 32) as u32;
        (to < self.frame_nr).then_some(to)
    }

    /// Goes to where the expected message is.
    pub(crate) fn jump(&mut self, to: u32) {
        debug_assert!(to < self.frame_nr);
        self.position = to;
    }

    /// Goes back to a message that was stepped over.
    pub(crate) fn back(&mut self, seq: Seq, position: u32) {
        (self.expected, self.position) = (seq, position);
    }

    /// Steps over a message of `frames` frames, at most all of them.
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
