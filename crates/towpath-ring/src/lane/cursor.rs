//! Where a consumer is: which number it expects, and in which frame.
//!
//! The producer goes round frames that are held, so number and frame are not tied to each other. The consumer looks
//! where the message would be if nothing was gone round; when the producer did go round something it left a note, in
//! a word that belongs to the number: "number n is at frame f".

use crate::Seq;

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

    /// Follows the note; false when it points outside of the ring.
    pub(crate) fn jump(&mut self, note: u64) -> bool {
        let to = (note >> 32) as u32;
        let inside = to < self.frame_nr;
        if inside {
            self.position = to;
        }
        inside
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
    use crate::abi::note;

    #[test]
    fn rows() {
        let mut c = Cursor::new(4, Seq::FIRST);
        assert!(!c.is_here(0) && !c.is_noted(0));
        assert!(c.is_here(1) && !c.is_here(2));
        assert!(c.is_noted(note(Seq(1), 3)) && !c.is_noted(note(Seq(2), 3)));
        assert!(!c.jump(note(Seq(1), 4)));
        assert!(!c.jump(u64::MAX));
        assert!(c.jump(note(Seq(1), 3)));
        assert_eq!((c.step(2), c.position(), c.expected()), (Seq(1), 1, Seq(2)));
        assert_eq!((c.step(4), c.position()), (Seq(2), 1));
    }
}
