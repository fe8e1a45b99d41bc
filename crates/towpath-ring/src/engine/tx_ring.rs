//! The TX lane, seen from the engine: frames that the client fills.
//!
//! A header is copied once, the copy is checked, and only the copy is used; the payload is copied to our own memory, if its
//! length is one that was asked for. How much one poll copies is bounded ([`Budget`]): messages may overlap in the area, so its
//! size is no bound.
//!
//! One exception (DESIGN.md, rule 1): a payload that is only passed on may stay where it is, as a [`TxFrame`]. Nobody here looks at
//! it, its place and length are those of the checked copy of the header, and the client is told that the frame is held, so that
//! the others go on. It is given back in any order.

use crate::engine::control_rx::ControlRx;
use crate::lane::consumer::{BadHeader, Consumer, Found};
use crate::lane::verdict::{Verdict, Word};
use crate::shm::abi::{self, Layout};
use crate::shm::header::{FLAG_INLINE, FLAG_ONESHOT, Header, Kind};
use crate::shm::region::{Payload, Use, Words};
use crate::shm::seq::Seq;

/// A copy of a message that is larger is not kept for the next one.
const SCRATCH: usize = 1 << 20;

/// How much of replacements one poll copies. What is beyond that stays unread until the next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    /// Longest replacement.
    each: u32,
    /// Bytes that are left; the last replacement may go beyond them.
    left: usize,
}

impl Budget {
    /// More than a client that keeps to the default sizes has under way at a time.
    const BYTES: usize = 4 << 20;
    /// What the system calls for a message in a memory of its own count as, in bytes.
    const ONESHOT: usize = 64 << 10;

    /// For replacements of at most `each` bytes.
    pub(crate) fn new(each: u32) -> Self {
        Self { each, left: Self::BYTES }
    }

    /// For the next poll.
    pub(crate) fn renew(&mut self) {
        self.left = Self::BYTES;
    }

    pub(crate) fn is_spent(&self) -> bool {
        self.left == 0
    }
}

/// What there is of a client's messages.
#[derive(Debug)]
pub(crate) enum Next {
    Nothing,
    /// A message: its payload copied, or where it is.
    Message(Found, Taken),
    /// One was announced whose payload is not where its header says.
    Missing,
}

/// A message of the client that stays in the client's memory until it is given back
/// ([`Channel::give_back`](crate::Channel::give_back)).
#[derive(Debug)]
#[must_use = "the client gets its frame back only when it is given back"]
pub struct TxFrame {
    at: u32,
    seq: Seq,
    /// Its bytes, in the area.
    offset: usize,
    len: usize,
}

impl TxFrame {
    /// Where its bytes are in the memory that [`Channel::tx_area`](crate::Channel::tx_area) names. The client may change them at any
    /// time.
    #[must_use]
    pub fn span(&self) -> std::ops::Range<usize> {
        self.offset..self.offset + self.len
    }
}

/// What a message of the client is given as.
#[derive(Debug)]
pub enum TxPayload<'a> {
    /// A copy of its bytes.
    Copied(&'a [u8]),
    /// Where they are.
    Held(TxFrame),
}

/// Who takes the client's messages ([`Channel::poll_frames`](crate::Channel::poll_frames)).
pub trait TxSink {
    /// Whether the message that this header describes is to stay in the client's memory.
    fn hold(&mut self, header: &Header) -> bool;

    /// A message.
    fn take(&mut self, header: &Header, payload: TxPayload<'_>);
}

/// What [`TxRing::next`] found.
#[derive(Debug)]
pub(crate) enum Taken {
    Copied(Vec<u8>),
    Held(TxFrame),
}

#[derive(Debug)]
pub(crate) struct TxRing {
    lane: Consumer,
    payload: Payload,
    frame_nr: u32,
    area: usize,
    /// Where payloads are copied to; kept, so that it is allocated once.
    scratch: Vec<u8>,
    /// Messages that came in a memory of their own.
    pub(crate) oneshots: u64,
    /// Messages that were not copied and are not given back.
    pub(crate) held: u32,
}

impl TxRing {
    /// The TX ring of a lane, whose first message has the number `first`.
    pub(crate) fn new(layout: &Layout, payload: Payload, first: Seq) -> Self {
        Self {
            lane: Consumer::new(layout.tx_place(), first),
            payload,
            frame_nr: layout.tx.frame_nr,
            area: layout.tx.bytes(),
            scratch: Vec::new(),
            oneshots: 0,
            held: 0,
        }
    }

    /// The next message: its payload copied, unless `hold` wants it to stay where it is. Replacements are passed over: their
    /// verdicts name them.
    pub(crate) fn next(
        &mut self,
        own: &Words,
        theirs: &Words,
        control: &mut ControlRx,
        hold: impl FnMut(&Header) -> bool,
    ) -> Result<Next, BadHeader> {
        let Some(found) = self.peek(theirs)? else { return Ok(Next::Nothing) };
        self.lane.step(&found)?;
        self.prefetch_behind(theirs, &found);
        if let Some(frame) = self.hold(own, &found, hold) {
            return Ok(Next::Message(found, Taken::Held(frame)));
        }
        Ok(match self.take(own, theirs, control, &found, u32::MAX) {
            Some(bytes) => Next::Message(found, Taken::Copied(bytes)),
            // No search for one that is there: each costs system calls, and there may be a whole ring of them.
            None => Next::Missing,
        })
    }

    /// Asks for what the client writes next, which may be there: it comes while this message is copied.
    fn prefetch_behind(&self, theirs: &Words, found: &Found) {
        let frames = (found.header.len as usize).div_ceil(self.lane.payload_offset(1)).max(1);
        let at = (found.at as usize + frames) % self.frame_nr as usize;
        theirs.prefetch(self.lane.inline_index(at as u32) - abi::INLINE, Use::Read);
        self.payload.prefetch(self.lane.payload_offset(at as u32), found.header.len as usize, Use::Read);
    }

    /// Leaves the message where it is, when it is in the area, in one piece, and wanted so.
    fn hold(
        &mut self,
        own: &Words,
        found: &Found,
        mut wanted: impl FnMut(&Header) -> bool,
    ) -> Option<TxFrame> {
        let (offset, len) = (self.lane.payload_offset(found.at), found.header.len as usize);
        let elsewhere = found.header.flags & (FLAG_INLINE | FLAG_ONESHOT) != 0;
        // Whoever maps the area has it once, and not twice in a row.
        if elsewhere || len == 0 || offset + len > self.area || !wanted(&found.header) {
            return None;
        }
        self.lane.release(own, found.at, Word::new(found.seq, Verdict::Hold), 0, 0);
        self.held += 1;
        Some(TxFrame { at: found.at, seq: found.seq, offset, len })
    }

    /// Gives a held message back to the client.
    pub(crate) fn give_back(&mut self, own: &Words, frame: &TxFrame) {
        self.held = self.held.saturating_sub(1);
        self.lane.release(own, frame.at, Word::new(frame.seq, Verdict::Pass), 0, 0);
    }

    /// Whether there is a message, or nonsense in the place of one.
    pub(crate) fn is_ready(&mut self, theirs: &Words) -> bool {
        !matches!(self.peek(theirs), Ok(None))
    }

    fn peek(&mut self, theirs: &Words) -> Result<Option<Found>, BadHeader> {
        // At most once round: a client that only ever writes replacements could otherwise keep us here.
        for _ in 0..self.frame_nr {
            match self.lane.peek(theirs)? {
                Some(found) if found.header.kind == Kind::REPLACEMENT => {
                    self.lane.step(&found)?;
                }
                other => return Ok(other),
            }
        }
        Ok(None)
    }

    /// A copy of the payload in TX frame `frame`, if that is a replacement for RX frame `of` and not too long; the TX frame is
    /// given back. Hand the copy to [`put_back`](Self::put_back) afterwards. One that is not there spends all of the budget.
    pub(crate) fn take_replacement(
        &mut self,
        own: &Words,
        theirs: &Words,
        control: &mut ControlRx,
        frame: u16,
        of: Seq,
        budget: &mut Budget,
    ) -> Option<Vec<u8>> {
        let left = std::mem::take(&mut budget.left);
        let at = u32::from(frame);
        if at >= self.frame_nr {
            return None;
        }
        let found = self.lane.named(theirs, at).ok()?;
        // A frame meant for another packet could otherwise be sent in this one's place.
        if found.header.kind != Kind::REPLACEMENT || found.header.port != of.0 {
            return None;
        }
        let bytes = self.take(own, theirs, control, &found, budget.each)?;
        let calls = if found.header.flags & FLAG_ONESHOT != 0 { Budget::ONESHOT } else { 0 };
        budget.left = left.saturating_sub(bytes.len() + calls);
        Some(bytes)
    }

    pub(crate) fn put_back(&mut self, mut bytes: Vec<u8>) {
        bytes.clear();
        bytes.shrink_to(SCRATCH);
        self.scratch = bytes;
    }

    /// A copy of the payload; the frame is given back. None when the payload is not where the header says, or longer than
    /// `most`: then there is no message, and nothing else is wrong.
    fn take(
        &mut self,
        own: &Words,
        theirs: &Words,
        control: &mut ControlRx,
        found: &Found,
        most: u32,
    ) -> Option<Vec<u8>> {
        let bytes = self.copy(theirs, control, found, most);
        let verdict = if bytes.is_some() { Verdict::Pass } else { Verdict::Drop };
        self.lane.release(own, found.at, Word::new(found.seq, verdict), 0, 0);
        bytes
    }

    fn copy(&mut self, theirs: &Words, control: &mut ControlRx, found: &Found, most: u32) -> Option<Vec<u8>> {
        let oneshot = found.header.flags & FLAG_ONESHOT != 0;
        // Looked at before anything is copied: every frame of the ring could otherwise name the whole area.
        if found.header.len > most {
            if oneshot {
                control.forget(found.seq);
            }
            return None;
        }
        let mut bytes = std::mem::take(&mut self.scratch);
        bytes.clear();
        let len = found.header.len as usize;
        if oneshot {
            if !control.oneshot(found.seq, found.header.len, &mut bytes) {
                self.put_back(bytes);
                return None;
            }
            self.oneshots += 1;
        } else if found.header.flags & FLAG_INLINE != 0 {
            let inline: [u8; abi::INLINE_BYTES] = self.lane.inline(theirs, found.at);
            bytes.extend_from_slice(&inline[..len]);
        } else {
            self.payload.copy_out(self.lane.payload_offset(found.at), len, &mut bytes);
        }
        Some(bytes)
    }
}
