//! One direction of a TCP stream.
//!
//! What: bytes from `next` on are missing. Bytes that arrived too early wait in `early`, in pieces that do
//! not overlap and do not touch `next`. Offsets are 64-bit counts from the first byte of the stream and do
//! not wrap. A sequence number maps to the nearest offset to `next`.
//!
//! Invariant: delivered and waiting bytes are never replaced. `early` holds `waiting` bytes, all after
//! `next`.

use std::collections::BTreeMap;

use super::{Chunk, Counters, Ending};

/// Maximum number of waiting pieces. Bounds their overhead.
const MOST_PIECES: usize = 8192;

#[derive(Debug, Default)]
pub(super) struct Direction {
    /// Sequence number of offset 0, if known.
    base: Option<u32>,
    /// `base` is from a SYN or its acknowledgement.
    started: bool,
    /// `base` is from a segment without data, possibly a keep-alive, whose number is one too low.
    bare: bool,
    next: u64,
    early: BTreeMap<u64, Vec<u8>>,
    waiting: usize,
    /// Minimum end of the data, including bytes that the capture cut off.
    known: u64,
    /// End of the data as given by FIN.
    fin: Option<u64>,
    reset: bool,
    over: bool,
}

/// The relevant part of a TCP segment.
pub(super) struct Segment<'a> {
    pub(super) seq: u32,
    pub(super) syn: bool,
    pub(super) fin: bool,
    pub(super) rst: bool,
    /// Captured payload.
    pub(super) payload: &'a [u8],
    /// Length of the payload on the wire.
    pub(super) length: u32,
}

impl Direction {
    /// Number of bytes that arrived too early.
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    pub(super) fn midstream(&self) -> bool {
        !self.started
    }

    /// Sets the sequence number of the first byte, from a handshake. The first handshake counts, unless bytes
    /// were seen before.
    pub(super) fn start(&mut self, seq: u32) {
        if !self.started && self.next == 0 && self.early.is_empty() && self.fin.is_none() {
            self.base = Some(seq);
            self.started = true;
        }
    }

    /// The connection was reset.
    pub(super) fn reset(&mut self) {
        self.reset = true;
    }

    /// Takes a segment. At most `room` bytes may wait.
    pub(super) fn handle_segment(
        &mut self,
        segment: &Segment<'_>,
        room: usize,
        counters: &mut Counters,
        out: &mut impl FnMut(Chunk<'_>),
    ) {
        counters.captured += segment.payload.len() as u64;
        // A SYN takes one sequence number before the data (RFC 9293, 3.4).
        let seq = segment.seq.wrapping_add(u32::from(segment.syn));
        if segment.syn {
            self.start(seq);
        }
        if segment.rst {
            // The payload of a reset is diagnostic text, not data (RFC 9293, 3.5.3), and its sequence number
            // is arbitrary.
            self.reset = true;
            counters.stray += segment.payload.len() as u64;
            return;
        }
        let base = self.base(seq, segment);
        let next_seq = base.wrapping_add(self.next as u32);
        let distance = i64::from(seq.wrapping_sub(next_seq) as i32);
        let signed = self.next as i64 + distance;
        // Bytes before the first one seen have no offset.
        let before = signed.min(0).unsigned_abs();
        let cut = usize::try_from(before).unwrap_or(usize::MAX).min(segment.payload.len());
        counters.stray += cut as u64;
        let mut payload = &segment.payload[cut..];
        let mut start = signed.max(0).unsigned_abs();
        let wire_end = start + u64::from(segment.length).saturating_sub(before);
        if before > u64::from(segment.length) {
            return;
        }
        if segment.fin && self.fin.is_none() && wire_end >= self.next {
            self.fin = Some(wire_end);
        }
        if let Some(beyond) = self.fin.and_then(|fin| (start + payload.len() as u64).checked_sub(fin))
            && beyond > 0
        {
            let kept = payload.len().saturating_sub(beyond as usize);
            counters.stray += (payload.len() - kept) as u64;
            payload = &payload[..kept];
        }
        let known = self.fin.map_or(wire_end, |fin| fin.min(wire_end));
        self.known = self.known.max(known);
        if let Some(old) = self.next.checked_sub(start) {
            let old = usize::try_from(old).unwrap_or(usize::MAX).min(payload.len());
            counters.repeated += old as u64;
            payload = &payload[old..];
            start = self.next;
        }
        if !payload.is_empty() {
            if start == self.next && self.early.is_empty() {
                self.deliver(payload, counters, out);
            } else {
                self.keep(start, payload, counters);
                self.drain(counters, out);
                while self.waiting > room || self.early.len() > MOST_PIECES {
                    counters.overfull += 1;
                    self.skip(counters, out);
                    self.drain(counters, out);
                }
            }
        }
        self.end_at_fin(out);
    }

    /// Sequence number of offset 0. Without a handshake, the first segment gives it. A keep-alive repeats the
    /// last number sent (RFC 9293, 3.8.4), so data right after it is the start.
    fn base(&mut self, seq: u32, segment: &Segment<'_>) -> u32 {
        let data = segment.length > 0;
        match self.base {
            Some(base) if !(data && self.bare && seq == base.wrapping_add(1)) => {
                self.bare &= !data;
                base
            }
            known => {
                self.bare = known.is_none() && !data && !segment.syn && !segment.fin;
                *self.base.insert(seq)
            }
        }
    }

    /// Ends the direction. Missing bytes become gaps.
    pub(super) fn finish(
        &mut self,
        ending: Ending,
        counters: &mut Counters,
        out: &mut impl FnMut(Chunk<'_>),
    ) {
        if self.over {
            let left: usize = std::mem::take(&mut self.early).values().map(Vec::len).sum();
            counters.stray += left as u64;
        }
        while !self.early.is_empty() {
            self.skip(counters, out);
            self.drain(counters, out);
        }
        if self.known > self.next && !self.over {
            self.gap(self.known, counters, out);
        }
        self.end_at_fin(out);
        if !self.over {
            self.over = true;
            out(Chunk::End(if self.reset { Ending::Reset } else { ending }));
        }
    }

    fn deliver(&mut self, bytes: &[u8], counters: &mut Counters, out: &mut impl FnMut(Chunk<'_>)) {
        self.next += bytes.len() as u64;
        counters.delivered += bytes.len() as u64;
        out(Chunk::Data(bytes));
    }

    /// Retains the parts of early bytes that are not waiting already.
    fn keep(&mut self, mut start: u64, mut bytes: &[u8], counters: &mut Counters) {
        while !bytes.is_empty() {
            let end = start + bytes.len() as u64;
            // The last piece that starts at or before `start` may cover it.
            let before = self.early.range(..=start).next_back();
            if let Some((at, piece)) = before.filter(|(at, piece)| *at + piece.len() as u64 > start) {
                let inside = (start - at) as usize;
                let shared = (piece.len() - inside).min(bytes.len());
                count_repeated(&piece[inside..inside + shared], &bytes[..shared], counters);
                (start, bytes) = (start + shared as u64, &bytes[shared..]);
                continue;
            }
            let free_end = self.early.range(start..end).next().map_or(end, |(at, _)| *at);
            let free = (free_end - start) as usize;
            self.early.insert(start, bytes[..free].to_vec());
            self.waiting += free;
            (start, bytes) = (free_end, &bytes[free..]);
        }
    }

    /// Delivers the bytes that waited for `next`.
    fn drain(&mut self, counters: &mut Counters, out: &mut impl FnMut(Chunk<'_>)) {
        while let Some(first) = self.early.first_entry().filter(|first| *first.key() == self.next) {
            let piece = first.remove();
            self.waiting -= piece.len();
            self.deliver(&piece, counters, out);
        }
    }

    /// Reports the hole before the waiting bytes as a gap.
    fn skip(&mut self, counters: &mut Counters, out: &mut impl FnMut(Chunk<'_>)) {
        if let Some(at) = self.early.first_key_value().map(|(at, _)| *at) {
            self.gap(at, counters, out);
        }
    }

    fn gap(&mut self, end: u64, counters: &mut Counters, out: &mut impl FnMut(Chunk<'_>)) {
        let length = end - self.next;
        self.next = end;
        counters.missing += length;
        out(Chunk::Gap(length));
    }

    fn end_at_fin(&mut self, out: &mut impl FnMut(Chunk<'_>)) {
        if !self.over && self.fin == Some(self.next) {
            self.over = true;
            out(Chunk::End(Ending::Fin));
        }
    }
}

fn count_repeated(kept: &[u8], again: &[u8], counters: &mut Counters) {
    counters.repeated += again.len() as u64;
    counters.conflicting += kept.iter().zip(again).filter(|(kept, again)| kept != again).count() as u64;
}
