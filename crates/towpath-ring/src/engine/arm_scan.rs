//! The search for unread release entries before the engine sleeps.
//!
//! What: after the client was asked for a doorbell, every outstanding frame is looked at once, a bounded number at a
//! time. A word that the client writes after the request rings the doorbell, so a frame that was looked at is not
//! looked at again, and neither is a frame that was published after the request.
//!
//! Invariant: between two steps, polls release frames and skip frames that were in sequence. A frame
//! that is not yet looked at leaves the part that is not yet searched only if a poll has read its entry:
//! - the frames in sequence are searched upwards, by sequence number;
//! - the skipped frames are searched downwards. [`Frames::skipped`] fills a gap with its last frame: one that was
//!   looked at, or one that stays in the lower part.

use crate::lane::frames::Frames;
use crate::shm::seq::Seq;

/// Frames that one step looks at.
pub(crate) const STEP: u32 = 128;

/// A search for unread entries.
#[derive(Debug)]
pub(crate) struct Scan {
    /// Frames in sequence are searched below this number.
    next: Seq,
    /// The number after the last published one at the request.
    end: Seq,
    /// The skipped frames from this index on are searched.
    skipped: usize,
}

impl Scan {
    pub(crate) fn new(frames: &Frames) -> Self {
        Self { next: frames.oldest(), end: frames.next_seq(), skipped: frames.skipped().len() }
    }

    /// Looks at the next frames. Returns none if `has_entry` is true for one, else whether the search has finished.
    pub(crate) fn step(&mut self, frames: &Frames, has_entry: impl Fn(u32) -> bool) -> Option<bool> {
        if self.next.is_before(frames.oldest()) {
            self.next = if frames.oldest().is_before(self.end) { frames.oldest() } else { self.end };
        }
        self.skipped = self.skipped.min(frames.skipped().len());
        for _ in 0..STEP {
            let at = if self.next != self.end {
                let at = frames.find(self.next);
                self.next = self.next.next();
                at
            } else if let Some(index) = self.skipped.checked_sub(1) {
                self.skipped = index;
                frames.skipped().get(index).copied()
            } else {
                return Some(true);
            };
            if at.is_some_and(&has_entry) {
                return None;
            }
        }
        Some(self.next == self.end && self.skipped == 0)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn frames(published: u32) -> Frames {
        let mut frames = Frames::new(1024, Seq::FIRST);
        for _ in 0..published {
            frames.publish(frames.room(1).unwrap(), 1);
        }
        frames
    }

    #[test]
    fn a_step_is_bounded_and_the_next_one_continues() {
        let frames = frames(1000);
        let mut scan = Scan::new(&frames);
        let looked = Cell::new(0);
        let mut steps = 0;
        while scan.step(&frames, |_| {
            looked.set(looked.get() + 1);
            false
        }) == Some(false)
        {
            steps += 1;
            assert_eq!(looked.get(), steps * STEP);
        }
        assert_eq!((looked.get(), steps), (1000, 7));
        // Nothing is looked at twice.
        assert_eq!(scan.step(&frames, |_| panic!("again")), Some(true));
    }

    #[test]
    fn every_unread_frame_is_found_whatever_a_poll_does_meanwhile() {
        for unread in 0..300 {
            for held in [0, 150, 299] {
                let mut frames = frames(300);
                for seq in 1..=held {
                    let at = frames.find(Seq(seq)).unwrap();
                    frames.hold(at);
                }
                let mut scan = Scan::new(&frames);
                let mut at = 0;
                let found = loop {
                    match scan.step(&frames, |at| at == unread) {
                        None => break true,
                        Some(true) => break false,
                        Some(false) => {}
                    }
                    // A poll releases and holds others.
                    for _ in 0..7 {
                        if at != unread {
                            frames.release(at);
                        }
                        at += 1;
                    }
                    if let Some(last) = frames.find(Seq(300)).filter(|last| *last != unread) {
                        frames.hold(last);
                    }
                };
                assert!(found, "frame {unread}, {held} held");
            }
        }
    }

    #[test]
    fn frames_that_are_published_later_are_not_looked_at() {
        let mut frames = frames(3);
        let mut scan = Scan::new(&frames);
        for at in 0..3 {
            frames.release(at);
        }
        frames.publish(frames.room(1).unwrap(), 1);
        assert_eq!(scan.step(&frames, |_| true), Some(true));
    }
}
