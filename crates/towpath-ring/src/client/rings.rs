//! The memory of a lane, as a client has it: which frames are ours, and what was said about them.

use std::collections::VecDeque;

use crate::Seq;
use crate::abi;
use crate::attach::Memory;
use crate::error::RecvError;
use crate::header::{FLAG_INLINE, FLAG_ONESHOT};
use crate::lane::consumer::{Consumer, Found, Nonsense};
use crate::lane::records;
use crate::outbox::Outbox;
use crate::region::{Payload, Use};
use crate::sync::Ordering;
use crate::verdict::{Answer, Verdict, Word};

/// The rings of a lane: one generation of them.
#[derive(Debug)]
pub(crate) struct Rings {
    pub(crate) generation: u16,
    pub(crate) memory: Memory,
    pub(crate) rx: Consumer,
    pub(crate) outbox: Outbox,
    /// By first frame.
    mine: Box<[Mine]>,
    /// Received and undecided, oldest first; some were decided or held since.
    undecided: VecDeque<(Seq, u32)>,
    /// Frames that are in a memory of their own, by first frame.
    oneshots: Vec<(u32, Payload)>,
    /// Everything up to here was decided by records.
    upto: Seq,
    records: records::Writer,
    /// Frames that are ours.
    ours: u32,
    /// Whether the engine was told that the ring towards it is full.
    pub(crate) told_full: bool,
}

/// What we know about a frame that is ours.
#[derive(Clone, Copy, Debug)]
struct Mine {
    seq: Seq,
    len: u32,
    place: Place,
    /// Records do not cover it.
    held: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    NotMine,
    Ring,
    Inline,
    /// In a memory of its own.
    OneShot,
}

impl Rings {
    /// Rings of which the first messages have these numbers.
    pub(crate) fn new(generation: u16, memory: Memory, rx: Seq, tx: Seq) -> Self {
        let layout = memory.layout;
        let none = Mine { seq: Seq(0), len: 0, place: Place::NotMine, held: false };
        Self {
            generation,
            rx: Consumer::new(layout.rx_place(), rx),
            outbox: Outbox::new(&layout, tx),
            mine: vec![none; layout.rx.frame_nr as usize].into(),
            undecided: VecDeque::new(),
            oneshots: Vec::new(),
            upto: rx.back(1),
            records: records::Writer::new(layout.records_place()),
            ours: 0,
            told_full: false,
            memory,
        }
    }

    /// Gives the next message to `give`, if it is there; `oneshot` finds the memory of one that has its own.
    #[inline(always)]
    pub(crate) fn next(
        &mut self,
        oneshot: impl FnOnce(Seq, u32) -> Result<Payload, RecvError>,
        give: impl FnOnce(Found),
    ) -> Result<bool, RecvError> {
        let found = match self.rx.next(&self.memory.theirs) {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(false),
            Err(what) => return Err(nonsense(what)),
        };
        let Found { seq, at, header } = found;
        let Some(mine) = self.mine.get_mut(at as usize).filter(|mine| mine.place == Place::NotMine) else {
            return Err(came_again(at));
        };
        let place = if header.flags & FLAG_ONESHOT != 0 {
            self.oneshots.push((at, oneshot(seq, header.len)?));
            Place::OneShot
        } else if header.flags & FLAG_INLINE != 0 {
            Place::Inline
        } else {
            // Asked for now, read when the caller has taken its batch.
            self.memory.rx_payload.prefetch(self.rx.payload_offset(at), header.len as usize, Use::Read);
            Place::Ring
        };
        *mine = Mine { seq, len: header.len, place, held: false };
        self.ours += 1;
        self.remember(seq, at);
        // Numbers are compared modulo 2^32: what is far behind must not come to look as if it were ahead.
        if self.upto.is_before(seq.back(1 << 30)) {
            self.upto = seq.back(1 << 30);
        }
        give(found);
        Ok(true)
    }

    /// Has the message wait for a record, in the order of the numbers.
    #[inline]
    fn remember(&mut self, seq: Seq, at: u32) {
        while let Some((seq, at)) = self.undecided.front().copied()
            && !self.is_undecided(seq, at)
        {
            self.undecided.pop_front();
        }
        self.undecided.push_back((seq, at));
    }

    /// Whether the next message is in the lane's next generation of rings.
    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        self.rx.is_over(&self.memory.theirs, abi::MOVED)
    }

    /// The rings that follow: their numbers go on. What we send from now on is there, and the engine is told so.
    pub(crate) fn followed_by(&mut self, generation: u16, memory: Memory) -> Self {
        let next = self.outbox.next_seq();
        // Release: pairs with the acquire load in Consumer::is_over, in the engine. Who sees it finds every message before
        // `next` in the ring that is left.
        self.memory.own.word(abi::MOVED).store(abi::moved(next), Ordering::Release);
        Self::new(generation, memory, self.rx.expected(), next)
    }

    /// Whether a frame in them is ours.
    pub(crate) fn in_use(&self) -> bool {
        self.ours > 0
    }

    /// The payload of message `seq` at `at`, when it is ours.
    #[inline]
    pub(crate) fn payload(&self, seq: Seq, at: u32) -> Option<&[u8]> {
        let mine = self.mine.get(at as usize).filter(|mine| mine.seq == seq)?;
        let len = mine.len as usize;
        match mine.place {
            Place::Inline => Some(self.memory.theirs.lent(self.rx.inline_index(at), len)),
            Place::Ring => Some(self.memory.rx_payload.lent(self.rx.payload_offset(at), len)),
            Place::OneShot => {
                let own = self.oneshots.iter().find(|(first, _)| *first == at);
                own.map(|(_, memory)| memory.lent(0, len))
            }
            Place::NotMine => None,
        }
    }

    /// Whether message `seq` at `at` is ours.
    #[inline]
    pub(crate) fn has(&self, seq: Seq, at: u32) -> bool {
        let mine = self.mine.get(at as usize);
        mine.is_some_and(|m| m.seq == seq && m.place != Place::NotMine)
    }

    /// Decides about the message at `at`, which is ours, and gives it back.
    #[inline]
    pub(crate) fn answer(&mut self, seq: Seq, at: u32, answer: Answer) {
        self.write_entry(seq, at, answer);
        self.give_back(at);
    }

    /// Keeps the message at `at`, which is ours.
    pub(crate) fn hold(&mut self, seq: Seq, at: u32) {
        self.write_entry(seq, at, Verdict::Hold.into());
        self.mine[at as usize].held = true;
    }

    /// Decides about everything received up to `upto` that is undecided; whether there may be something.
    pub(crate) fn answer_upto(&mut self, upto: Seq, answer: Answer) -> bool {
        let received = self.rx.expected().back(1);
        let upto = if received.is_before(upto) { received } else { upto };
        if !self.upto.is_before(upto) {
            return false;
        }
        let full = self.records.is_full(&self.memory.theirs);
        while let Some((seq, at)) = self.undecided.front().copied()
            && !upto.is_before(seq)
        {
            self.undecided.pop_front();
            if !self.is_undecided(seq, at) {
                continue;
            }
            if full {
                self.write_entry(seq, at, answer);
            }
            self.give_back(at);
        }
        if !full {
            self.upto = upto;
            let word = Word { seq: upto, verdict: answer.verdict, flags: answer.flags };
            self.records.write(&self.memory.own, word, answer.mark, answer.mask);
        }
        true
    }

    #[inline]
    fn give_back(&mut self, at: u32) {
        let mine = &mut self.mine[at as usize];
        if mine.place == Place::OneShot {
            self.oneshots.retain(|(frame, _)| *frame != at);
        }
        mine.place = Place::NotMine;
        self.ours -= 1;
    }

    #[inline]
    fn write_entry(&self, seq: Seq, at: u32, answer: Answer) {
        let word = Word { seq, verdict: answer.verdict, flags: answer.flags };
        self.rx.release(&self.memory.own, at, word, answer.mark, answer.mask);
    }

    #[inline]
    fn is_undecided(&self, seq: Seq, at: u32) -> bool {
        let mine = &self.mine[at as usize];
        mine.seq == seq && mine.place != Place::NotMine && !mine.held
    }
}

#[cold]
fn nonsense(what: Nonsense) -> RecvError {
    RecvError::Damaged(format!("{what:?}"))
}

#[cold]
fn came_again(at: u32) -> RecvError {
    RecvError::Damaged(format!("frame {at} came again while it was ours"))
}
