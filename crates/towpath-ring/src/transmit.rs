//! The TX lane, seen from the engine: frames that the client fills.
//!
//! A header is copied once, the copy is checked, and only the copy is used; the payload is copied to our own memory.

use crate::Seq;
use crate::abi::{self, Layout};
use crate::header::{FLAG_INLINE, FLAG_ONESHOT, Kind};
use crate::lane::consumer::{Consumer, Found, Nonsense};
use crate::region::{Payload, Words};
use crate::verdict::{Flags, Verdict, Word};

#[derive(Debug)]
pub(crate) struct Transmit {
    lane: Consumer,
    payload: Payload,
    frame_nr: u32,
    /// Where payloads are copied to; kept, so that it is allocated once.
    scratch: Vec<u8>,
}

impl Transmit {
    pub(crate) fn new(layout: &Layout, payload: Payload) -> Self {
        Self {
            lane: Consumer::new(layout.tx, layout.tx_headers(), layout.tx_notes(), layout.tx_entries()),
            payload,
            frame_nr: layout.tx.frame_nr,
            scratch: Vec::new(),
        }
    }

    /// The next message, its payload copied, if there is one. Replacements are passed over: their verdicts name them.
    pub(crate) fn next(&mut self, own: &Words, theirs: &Words) -> Result<Option<(Found, Vec<u8>)>, Nonsense> {
        let Some(found) = self.peek(theirs)? else { return Ok(None) };
        self.lane.step(&found)?;
        if found.header.flags & FLAG_ONESHOT != 0 {
            return Err(Nonsense::Length(found.header.len));
        }
        let bytes = self.copy(theirs, &found);
        let word = Word { seq: found.seq, verdict: Verdict::Pass, flags: Flags::default() };
        self.lane.release(own, found.at, word, 0, 0);
        Ok(Some((found, bytes)))
    }

    /// Whether there is a message, or nonsense in the place of one.
    pub(crate) fn is_ready(&mut self, theirs: &Words) -> bool {
        !matches!(self.peek(theirs), Ok(None))
    }

    fn peek(&mut self, theirs: &Words) -> Result<Option<Found>, Nonsense> {
        // At most once round: a client that only ever writes replacements could otherwise keep us here.
        for _ in 0..self.frame_nr {
            match self.lane.peek(theirs)? {
                Some(found) if found.header.kind == Kind::REPLACEMENT => self.lane.step(&found)?,
                other => return Ok(other),
            }
        }
        Ok(None)
    }

    /// A copy of the payload in TX frame `frame`, if that is a replacement for RX frame `of`; the TX frame is given back.
    /// Hand the copy to [`put_back`](Self::put_back) afterwards.
    pub(crate) fn take_replacement(
        &mut self,
        own: &Words,
        theirs: &Words,
        frame: u16,
        of: Seq,
    ) -> Option<Vec<u8>> {
        let at = u32::from(frame);
        if at >= self.frame_nr {
            return None;
        }
        let found = self.lane.named(theirs, at).ok()?;
        // A frame meant for another packet could otherwise be sent in this one's place.
        if found.header.kind != Kind::REPLACEMENT
            || found.header.port != of.0
            || found.header.flags & FLAG_ONESHOT != 0
        {
            return None;
        }
        let bytes = self.copy(theirs, &found);
        let word = Word { seq: found.seq, verdict: Verdict::Pass, flags: Flags::default() };
        self.lane.release(own, at, word, 0, 0);
        Some(bytes)
    }

    pub(crate) fn put_back(&mut self, bytes: Vec<u8>) {
        self.scratch = bytes;
    }

    fn copy(&mut self, theirs: &Words, found: &Found) -> Vec<u8> {
        let mut bytes = std::mem::take(&mut self.scratch);
        bytes.clear();
        let len = found.header.len as usize;
        if found.header.flags & FLAG_INLINE != 0 {
            let inline: [u8; abi::INLINE_BYTES] = self.lane.inline(theirs, found.at);
            bytes.extend_from_slice(&inline[..len]);
        } else {
            self.payload.copy_out(self.lane.payload_offset(found.at), len, &mut bytes);
        }
        bytes
    }
}
