//! A log that its readers may be too slow for: one writer, any number of readers, nobody waits.
//!
//! The writer overwrites the oldest header, and reuses frames of the payload area without asking. A reader copies, and then
//! looks whether what it has copied was overwritten meanwhile (a sequence lock each for the header and for every frame).
//!
//! ```text
//! writer                                     reader
//! stamp of each frame = n     (relaxed)      published             (acquire)
//! fence                       (release)      number of slot n == n (acquire)
//! payload                                    copy of the header
//! number of the slot = 0      (relaxed)      fence                 (acquire)
//! fence                       (release)      number of slot n == n, else lost
//! header                                     copy of the payload
//! number of the slot = n      (release)      fence                 (acquire)
//! published = n + 1           (release)      stamp of each frame == n, else lost
//! ```
//!
//! Invariant: a header or a payload that is handed out is that of one message, whole. Races: a reader that sees a byte of
//! message m in a frame of n has, by the pair of fences, the writer's stamp m before its own look at the stamp, and it is
//! not n. Numbers are dense, so what was lost is known. References: H. Boehm, "Can seqlocks get along with programming
//! language memory models?", MSPC 2012, section 4.

use crate::shm::abi::{self, HEADER_WORDS};
use crate::shm::geometry::Geometry;
use crate::shm::header::{FLAG_INLINE, FLAG_ONESHOT, Header};
use crate::shm::region::Words;
use crate::shm::seq::Seq;
use crate::shm::sync::{Ordering, fence};

/// Where things lie in a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) area: Geometry,
}

impl Shape {
    /// Headers that are kept: a power of two.
    pub(crate) const fn slots(&self) -> u32 {
        abi::notes(&self.area) as u32
    }

    fn slot(&self, seq: Seq) -> usize {
        abi::LOG_SLOTS + (seq.0 & (self.slots() - 1)) as usize * HEADER_WORDS
    }

    const fn stamps(&self) -> usize {
        abi::LOG_SLOTS + self.slots() as usize * HEADER_WORDS
    }

    const fn words(&self) -> usize {
        self.stamps() + self.area.frame_nr as usize
    }

    /// Bytes of the log's memory.
    pub(crate) const fn bytes(&self) -> usize {
        abi::pages(self.words())
    }

    /// The frames from `at` on that `len` bytes take.
    fn frames(&self, at: u32, len: usize) -> impl Iterator<Item = usize> {
        let (stamps, all) = (self.stamps(), self.area.frame_nr as usize);
        (0..self.area.frames_for(len)).map(move |i| stamps + (at as usize + i) % all)
    }
}

#[derive(Debug)]
pub(crate) struct Writer {
    shape: Shape,
    next: Seq,
}

impl Writer {
    pub(crate) fn new(shape: Shape, own: &Words) -> Self {
        // Relaxed: there is no reader yet.
        own.word(abi::LOG_PUBLISHED).store(Seq::FIRST.0.into(), Ordering::Relaxed);
        Self { shape, next: Seq::FIRST }
    }

    /// The frames from `at` on are about to be filled with the next message.
    pub(crate) fn stamp(&self, own: &Words, at: u32, len: usize) {
        for frame in self.shape.frames(at, len) {
            // Relaxed: ordered by the fence.
            own.word(frame).store(self.next.0.into(), Ordering::Relaxed);
        }
        // Release: pairs with the fence in Reader::is_intact.
        fence(Ordering::Release);
    }

    /// Publishes the next message. Its payload is beside the header, or in the frames from `at` on, which were stamped.
    pub(crate) fn publish(&mut self, own: &Words, header: &Header, at: u32, inline: &[u8]) {
        let seq = self.next;
        let words: &[_; HEADER_WORDS] = own.line(self.shape.slot(seq));
        // Relaxed: ordered by the fence, which pairs with the one in Reader::next.
        words[0].store(abi::NO_MESSAGE, Ordering::Relaxed);
        fence(Ordering::Release);
        abi::store_header(words, header);
        if header.flags & FLAG_INLINE != 0 {
            abi::store_inline(words, inline);
        } else {
            // Relaxed: ordered by the release store below.
            words[abi::INLINE].store(at.into(), Ordering::Relaxed);
        }
        // Release: pairs with the acquire load in Reader::next.
        words[0].store(seq.0.into(), Ordering::Release);
        self.next = seq.next();
        // Release: pairs with the acquire load in Reader::next; who sees it sees a slot that has come so far.
        own.word(abi::LOG_PUBLISHED).store(self.next.0.into(), Ordering::Release);
    }
}

/// What a reader finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    Nothing,
    /// So many messages were overwritten before they could be read.
    Lost(u32),
    /// A message: its header, whole. Its payload is beside it, or in the frames from `at` on.
    Found {
        seq: Seq,
        header: Header,
        at: u32,
        inline: [u8; abi::INLINE_BYTES],
    },
}

#[derive(Debug)]
pub(crate) struct Reader {
    shape: Shape,
    next: Seq,
}

impl Reader {
    /// Begins with what is published from now on.
    pub(crate) fn new(shape: Shape, theirs: &Words) -> Self {
        Self { shape, next: published(theirs) }
    }

    /// Whether something was published that was not looked at.
    pub(crate) fn is_ready(&self, theirs: &Words) -> bool {
        published(theirs) != self.next
    }

    pub(crate) fn next(&mut self, theirs: &Words) -> Look {
        let published = published(theirs);
        let behind = published.since(self.next);
        if behind == 0 {
            return Look::Nothing;
        }
        if behind > self.shape.slots() {
            // With half of the log between us and the writer, so that the next one is not overwritten at once.
            let to = published.back(self.shape.slots() / 2);
            return Look::Lost(to.since(std::mem::replace(&mut self.next, to)));
        }
        let seq = self.next;
        self.next = seq.next();
        let words: &[_; HEADER_WORDS] = theirs.line(self.shape.slot(seq));
        // Acquire: pairs with the release store in Writer::publish.
        if words[0].load(Ordering::Acquire) != u64::from(seq.0) {
            return Look::Lost(1);
        }
        let header = abi::load_header(words);
        let inline = abi::load_inline(words);
        // Relaxed: checked below, like the rest of the slot.
        let at = words[abi::INLINE].load(Ordering::Relaxed);
        // Acquire: pairs with the fence in Writer::publish: if anything above is of a later message, its mark is seen.
        fence(Ordering::Acquire);
        // Relaxed: ordered by the fence.
        if words[0].load(Ordering::Relaxed) != u64::from(seq.0) {
            return Look::Lost(1);
        }
        Look::Found { seq, header, at: at as u32, inline }
    }

    /// Whether message `seq` fits where it says it is. What an engine writes is checked like what anybody writes: a length
    /// that lies could make us read outside of the area.
    pub(crate) fn fits(&self, header: &Header, at: u32) -> bool {
        let len = header.len as usize;
        match header.flags & (FLAG_INLINE | FLAG_ONESHOT) {
            0 => at < self.shape.area.frame_nr && len <= self.shape.area.bytes(),
            FLAG_INLINE => len <= abi::INLINE_BYTES,
            _ => false,
        }
    }

    /// Whether the frames from `at` on, of which a copy was made, were message `seq`'s all the time.
    pub(crate) fn is_intact(&self, theirs: &Words, seq: Seq, at: u32, len: usize) -> bool {
        // Acquire: pairs with the fence in Writer::stamp: if a byte of the copy is of a later message, its stamp is seen.
        fence(Ordering::Acquire);
        // Relaxed: ordered by the fence.
        self.shape.frames(at, len).all(|f| theirs.word(f).load(Ordering::Relaxed) == u64::from(seq.0))
    }
}

fn published(theirs: &Words) -> Seq {
    // Acquire: pairs with the release store in Writer::publish.
    Seq(theirs.word(abi::LOG_PUBLISHED).load(Ordering::Acquire) as u32)
}
