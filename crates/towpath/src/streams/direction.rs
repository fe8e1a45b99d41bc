//! One direction of a TCP stream.
//!
//! What: the bytes from `next` on are still to come; those that came too early wait in `early`, in pieces that do not overlap
//! and do not touch `next`. Offsets count from the stream's first byte in 64 bits, so nothing wraps; a sequence number
//! becomes the offset nearest to `next` that it can mean.
//!
//! Invariant: what was handed out or waits is never replaced. `early` holds `waiting` bytes, all behind `next`.

use std::collections::BTreeMap;

use super::{Chunk, Counters, Ending};

/// Pieces that wait, of whatever length: bounds what a piece costs beside its bytes.
const MOST_PIECES: usize = 8192;

#[derive(Debug, Default)]
pub(super) struct Direction {
    /// The sequence number of offset 0, once known.
    base: Option<u32>,
    /// Whether `base` comes from a SYN or its acknowledgement.
    started: bool,
    /// Whether `base` is the number of a segment without data: perhaps of a keep-alive, which is one too low.
    bare: bool,
    next: u64,
    early: BTreeMap<u64, Vec<u8>>,
    waiting: usize,
    /// Where the data is known to go to at least: behind bytes that were cut off, too.
    known: u64,
    /// Where the sender ended it.
    fin: Option<u64>,
    reset: bool,
    over: bool,
}

/// What of a TCP segment matters here.
pub(super) struct Segment<'a> {
    pub(super) seq: u32,
    pub(super) syn: bool,
    pub(super) fin: bool,
    pub(super) rst: bool,
    /// The payload as captured.
    pub(super) payload: &'a [u8],
    /// The payload's length on the wire.
    pub(super) length: u32,
}

impl Direction {
    /// Bytes that came too early.
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    pub(super) fn midstream(&self) -> bool {
        !self.started
    }

    /// Takes the sequence number of the first byte from a handshake, the first to say it, unless bytes were seen already.
    pub(super) fn start(&mut self, seq: u32) {
        if !self.started && self.next == 0 && self.early.is_empty() && self.fin.is_none() {
            self.base = Some(seq);
            self.started = true;
        }
    }

    /// Takes note that the connection was reset.
    pub(super) fn reset(&mut self) {
        self.reset = true;
    }

    /// Takes one segment, of which at most `room` bytes may wait.
    pub(super) fn handle_segment(
        &mut self,
        segment: &Segment<'_>,
        room: usize,
        counters: &mut Counters,
        out: &mut impl FnMut(Chunk<'_>),
    ) {
        counters.captured += segment.payload.len() as u64;
        // A SYN takes a sequence number of its own, before the data (RFC 9293, 3.4).
        let seq = segment.seq.wrapping_add(u32::from(segment.syn));
        if segment.syn {
            self.start(seq);
        }
        if segment.rst {
            // What a reset carries is a text for people, not data (RFC 9293, 3.5.3), and its number may be anything.
            self.reset = true;
            counters.stray += segment.payload.len() as u64;
            return;
        }
        let base = self.base(seq, segment);
        let next_seq = base.wrapping_add(self.next as u32);
        let distance = i64::from(seq.wrapping_sub(next_seq) as i32);
        let signed = self.next as i64 + distance;
        // Bytes from before the first one seen have no offset.
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

    /// The sequence number of offset 0. Where no handshake says it, the first segment does; a keep-alive repeats the last
    /// number that was sent (RFC 9293, 3.8.4), so data right behind it is where the stream starts.
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

    /// Ends the direction, whatever is missing.
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

    /// Keeps those parts of early bytes that do not wait already.
    fn keep(&mut self, mut start: u64, mut bytes: &[u8], counters: &mut Counters) {
        while !bytes.is_empty() {
            let end = start + bytes.len() as u64;
            // The piece that begins last at or before `start` may cover it.
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

    /// Delivers what waited for `next`.
    fn drain(&mut self, counters: &mut Counters, out: &mut impl FnMut(Chunk<'_>)) {
        while let Some(first) = self.early.first_entry().filter(|first| *first.key() == self.next) {
            let piece = first.remove();
            self.waiting -= piece.len();
            self.deliver(&piece, counters, out);
        }
    }

    /// Gives up the hole before what waits.
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
