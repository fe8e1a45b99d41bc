//! The TX ring at the engine: reads frames that the client fills.
//!
//! What: a header is copied once; the copy is checked, and only the copy is used. The payload is copied to private
//! memory after its length was checked. [`Budget`] limits how much one poll copies: messages may overlap in the
//! area, so the size of the area does not bound the copied bytes.
//!
//! Exception to the copy: a payload that is only forwarded may stay in place, as a [`TxFrame`]. The engine
//! does not read it. Its position and length are those of the checked copy of the header. The client sees the frame
//! as held, so that later frames proceed. Held frames are released in any order.

use crate::engine::control_rx::ControlRx;
use crate::lane::consumer::{BadHeader, Consumer, Found};
use crate::lane::verdict::{Verdict, Word};
use crate::shm::abi::{self, Layout};
use crate::shm::header::{FLAG_INLINE, FLAG_ONESHOT, Header, Kind};
use crate::shm::region::{Payload, Use, Words};
use crate::shm::seq::Seq;

/// Longer copies are not kept for reuse.
const SCRATCH: usize = 1 << 20;

/// Charge for the system calls of a one-shot message, in bytes.
pub(crate) const ONESHOT: usize = 64 << 10;

/// Bytes of replacements that one poll copies. The rest stays unread until the next poll.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    /// Longest replacement.
    each: u32,
    /// Remaining bytes; the last replacement may exceed them.
    left: usize,
}

impl Budget {
    /// More than a client with default sizes has in flight.
    const BYTES: usize = 4 << 20;

    /// For replacements of at most `each` bytes.
    pub(crate) fn new(each: u32) -> Self {
        Self { each, left: Self::BYTES }
    }

    /// Resets the budget for the next poll.
    pub(crate) fn renew(&mut self) {
        self.left = Self::BYTES;
    }

    pub(crate) fn is_spent(&self) -> bool {
        self.left == 0
    }
}

/// Replacements that one call skips. Otherwise each call could read a whole ring from a client that writes only
/// replacements.
pub(crate) const STEP: u32 = 128;

/// The charge for the system calls that a message with this header costs, in bytes.
pub(crate) fn calls(header: &Header) -> usize {
    if header.flags & FLAG_ONESHOT != 0 { ONESHOT } else { 0 }
}

/// Result of [`TxRing::peek`].
#[derive(Debug)]
enum Peeked {
    Nothing,
    Message(Found),
    /// [`STEP`] replacements; a message may follow them.
    Replacements,
}

/// Result of [`TxRing::next`].
#[derive(Debug)]
pub(crate) enum Next {
    /// There is no message, or it follows more replacements than one call skips: see [`TxRing::is_ready`].
    Nothing,
    /// A message with its payload, copied or in place.
    Message(Found, Taken),
    /// A message whose payload is not where its header says.
    Missing,
}

/// A message of the client that stays in the client's memory until
/// [`Channel::give_back`](crate::Channel::give_back).
#[derive(Debug)]
#[must_use = "the client gets its frame back only when it is given back"]
pub struct TxFrame {
    at: u32,
    seq: Seq,
    /// Offset of the payload in the area.
    offset: usize,
    len: usize,
}

impl TxFrame {
    /// Range of the payload in the memory of [`Channel::tx_area`](crate::Channel::tx_area). The client may change
    /// the bytes at any time.
    #[must_use]
    pub fn span(&self) -> std::ops::Range<usize> {
        self.offset..self.offset + self.len
    }
}

/// Payload of a client's message.
#[derive(Debug)]
pub enum TxPayload<'a> {
    /// A copy.
    Copied(&'a [u8]),
    /// The payload in the client's memory.
    Held(TxFrame),
}

/// Receiver of a client's messages ([`Channel::poll_frames`](crate::Channel::poll_frames)).
pub trait TxSink {
    /// Returns true if the payload of this message shall stay in the client's memory.
    fn hold(&mut self, header: &Header) -> bool;

    /// Receives a message.
    fn take(&mut self, header: &Header, payload: TxPayload<'_>);
}

/// Payload found by [`TxRing::next`].
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
    /// Buffer for copies, reused.
    scratch: Vec<u8>,
    /// One-shot messages received.
    pub(crate) oneshots: u64,
    /// Held messages not given back.
    pub(crate) held: u32,
}

impl TxRing {
    /// The TX ring of a lane; `first` is the sequence number of the first message.
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

    /// Receives the next message and copies its payload, unless `hold` returns true for it. Skips replacements:
    /// their verdicts name them.
    pub(crate) fn next(
        &mut self,
        own: &Words,
        theirs: &Words,
        control: &mut ControlRx,
        hold: impl FnMut(&Header) -> bool,
    ) -> Result<Next, BadHeader> {
        let Peeked::Message(found) = self.peek(theirs)? else { return Ok(Next::Nothing) };
        self.lane.step(&found)?;
        self.prefetch_behind(theirs, &found);
        if let Some(frame) = self.hold(own, &found, hold) {
            return Ok(Next::Message(found, Taken::Held(frame)));
        }
        Ok(match self.take(own, theirs, control, &found, u32::MAX) {
            Some(bytes) => Next::Message(found, Taken::Copied(bytes)),
            // The poll ends here: each missing message costs system calls, and the ring may be full of them.
            None => Next::Missing,
        })
    }

    /// Prefetches the next message, which may be published, while this one is copied.
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
        // The area is mapped once by the process that forwards the payload, not twice in a row.
        if elsewhere || len == 0 || offset + len > self.area || !wanted(&found.header) {
            return None;
        }
        self.lane.release(own, found.at, Word::new(found.seq, Verdict::Hold), 0, 0);
        self.held += 1;
        Some(TxFrame { at: found.at, seq: found.seq, offset, len })
    }

    /// Releases a held message to the client.
    pub(crate) fn give_back(&mut self, own: &Words, frame: &TxFrame) {
        self.held = self.held.saturating_sub(1);
        self.lane.release(own, frame.at, Word::new(frame.seq, Verdict::Pass), 0, 0);
    }

    /// Returns true if there is a message, an invalid header in its place, or more replacements than one call steps over.
    pub(crate) fn is_ready(&mut self, theirs: &Words) -> bool {
        !matches!(self.peek(theirs), Ok(Peeked::Nothing))
    }

    fn peek(&mut self, theirs: &Words) -> Result<Peeked, BadHeader> {
        for _ in 0..STEP {
            match self.lane.peek(theirs)? {
                Some(found) if found.header.kind == Kind::REPLACEMENT => self.lane.step(&found)?,
                Some(found) => return Ok(Peeked::Message(found)),
                None => return Ok(Peeked::Nothing),
            }
        }
        Ok(Peeked::Replacements)
    }

    /// Copies the payload of TX frame `frame` if it is a replacement for RX frame `of` and not too long, and
    /// releases the TX frame. Pass the copy to [`put_back`](Self::put_back) afterwards. A missing replacement uses
    /// up the budget.
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
        // A client could otherwise send one packet's replacement in place of another packet.
        if found.header.kind != Kind::REPLACEMENT || found.header.port != of.0 {
            return None;
        }
        let bytes = self.take(own, theirs, control, &found, budget.each)?;
        budget.left = left.saturating_sub(bytes.len() + calls(&found.header));
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
        // Checked before the copy: every frame of the ring could otherwise name the whole area.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, mock};

    #[test]
    fn a_call_steps_over_a_bounded_number_of_replacements() {
        let config = Config { tx: mock::small(1024), ..mock::config() };
        let (mut lanes, clients) = mock::channel(&config);
        let channel = &mut lanes[0];
        let write = |at: u32, kind| {
            let header = mock::Header { seq: at + 1, len: 1, kind, flags: FLAG_INLINE, of: 0 };
            mock::transmit(&clients[0], at, header);
        };
        assert!(!channel.has_message());
        (0..5 * STEP).for_each(|at| write(at, Kind::REPLACEMENT));
        write(5 * STEP, Kind::MESSAGE);
        // Each call is one look: an engine that is to sleep does not search the whole ring at once.
        for _ in 0..2 {
            assert!(!channel.arm(), "there may be a message");
            assert_eq!(channel.poll_messages(|_, _| panic!("it is behind the replacements")), 0);
        }
        assert!(channel.has_message());
        assert_eq!(channel.poll_messages(|header, _| assert_eq!(header.kind, Kind::MESSAGE)), 1);
        assert!(!channel.has_message());
    }
}
