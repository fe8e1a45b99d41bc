//! TCP windows: whether a segment fits into its connection. For [`Tracking::Strict`](crate::state::Tracking::Strict).
//!
//! What: both directions together show what each side has sent, what the other has acknowledged, and how much it
//! accepts. A segment fits if it lies in its receiver's window and acknowledges what the receiver has sent. The
//! gate is in the middle of the path: one side may know data that has not passed the gate yet. The bounds are the widest
//! that are legitimate for either side.
//!
//! A reset or a SYN in the middle of a connection changes the state only if its sequence number is exact. Otherwise it is
//! passed to the receiver, which answers with a challenge ACK if the number is in the window (RFC 5961, sections 3 and 4).
//!
//! These segments are passed, too, and change nothing, as in Linux (`nf_conntrack_proto_tcp.c`):
//!
//! - While only a SYN is known, an ACK of the other side, and a reset of the SYN's sender. The other side may have a
//!   connection that the sender has forgotten (RFC 9293 section 3.5.1, half-open connections): the sender resets it
//!   and repeats its SYN.
//! - Data that the receiver has acknowledged before, and an old acknowledgement. The acknowledgement may have been lost,
//!   and only the receiver can repeat it.
//!
//! The first fragment of a datagram has the header of its segment, and not its length. The segment may end anywhere in its
//! receiver's window.
//!
//! A connection that continues at another gate is [resumed](Window::resumed): its numbers are unknown until they are seen. Until a segment
//! of each side fits the latest one of the other side, segments are passed and learned from. Then they are checked, with one difference:
//! data may have passed another gate, so an acknowledgement may be for all that its sender has accepted. Without the SYNs of a connection,
//! its windows have the largest scale.
//!
//! Not supported: selective acknowledgements and timestamps are not checked; urgent data is treated as data.
//!
//! References: van Rooij 2000, "Real Stateful TCP Packet Filtering in IP Filter", section 4; RFC 9293, 3.4 and
//! 3.10.7; RFC 7323, 2; RFC 5961, 3 to 5.

use crate::state::tcp::{ACK, FIN, RST, SYN, begins};
use crate::state::{Direction, Segment};

/// Minimum tolerance for an old acknowledgement: a full window without scaling.
const ACK_WINDOW: u32 = 66_000;

/// More bytes than a datagram has.
const MAX_SEGMENT: u32 = 1 << 16;

/// "the TCP SHOULD log the error but MUST use 14 instead of the specified value", RFC 7323 section 2.3; and the largest window.
const MAX_SCALE: u8 = 14;
const MAX_WINDOW: u32 = 1 << 30;

/// The observed numbers of one side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Peer {
    /// Its initial sequence number.
    isn: u32,
    /// The sequence number after the last byte that it has sent.
    end: u32,
    /// The sequence number after the last byte that the other side accepts.
    max_end: u32,
    /// The largest window that it has offered, in bytes.
    max_window: u32,
    /// The last acknowledgement number that it has sent.
    acked: u32,
    /// The shift of its windows.
    scale: u8,
    /// Its SYN had the window scale option.
    scales: bool,
    /// Its SYN was seen.
    known: bool,
    /// It has acknowledged the other side's SYN. In a resumed connection: a segment of each side has fitted.
    agreed: bool,
    /// The connection continues here, and passed another gate before.
    resumed: bool,
}

/// How a segment relates to the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// It is part of it.
    Fits,
    /// Its receiver answers it: the connection does not change.
    Ignored,
    /// It is not part of it.
    Invalid,
}

/// The windows of one connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Window([Peer; 2]);

/// The words of a packed window.
pub(crate) const WORDS: usize = 6;

impl Window {
    /// The packed window: the numbers of both sides, then a word for each side that marks the known ones.
    pub(crate) fn words(&self) -> [u64; WORDS] {
        let two = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let known = |side: &Peer| {
            let flags = [side.scales, side.known, side.agreed, side.resumed];
            let bits = flags.iter().zip(8..).map(|(&flag, bit)| u32::from(flag) << bit).sum::<u32>();
            two(side.acked, bits | u32::from(side.scale))
        };
        let [a, b] = &self.0;
        [
            two(a.isn, a.end),
            two(a.max_end, a.max_window),
            two(b.isn, b.end),
            two(b.max_end, b.max_window),
            known(a),
            known(b),
        ]
    }

    /// Unpacks a window.
    pub(crate) fn from_words(words: [u64; WORDS]) -> Self {
        let high = |at: usize| (words[at] >> 32) as u32;
        let low = |at: usize| words[at] as u32;
        let side = |numbers: usize, known: usize| Peer {
            isn: high(numbers),
            end: low(numbers),
            max_end: high(numbers + 1),
            max_window: low(numbers + 1),
            acked: high(known),
            scale: (low(known) as u8).min(MAX_SCALE),
            scales: low(known) >> 8 & 1 != 0,
            known: low(known) >> 9 & 1 != 0,
            agreed: low(known) >> 10 & 1 != 0,
            resumed: low(known) >> 11 & 1 != 0,
        };
        Self([side(0, 4), side(2, 5)])
    }

    /// The window of a connection that continues here, with the scales that `known` windows of it have. The numbers stay, but count as
    /// unknown, so that a concurrent packet never sees numbers of another connection as known.
    pub(crate) fn resumed(self, known: impl IntoIterator<Item = Self>) -> Self {
        // Without its SYN, the largest one.
        let mut scales = [(MAX_SCALE, true); 2];
        for Self(sides) in known {
            for ((scale, scales), side) in scales.iter_mut().zip(sides) {
                if side.known || side.resumed {
                    (*scale, *scales) = (side.scale.min(*scale), side.scales && *scales);
                }
            }
        }
        let [a, b] = self.0;
        Self([(a, scales[0]), (b, scales[1])].map(|(side, (scale, scales))| Peer {
            scale,
            scales,
            known: false,
            agreed: false,
            resumed: true,
            ..side
        }))
    }

    /// The window as the other side sees it.
    pub(crate) fn reversed(self) -> Self {
        let [a, b] = self.0;
        Self([b, a])
    }

    /// Returns true if the connection continues here, and segments of both sides have not fitted yet.
    pub(crate) fn is_learning(&self) -> bool {
        self.0.iter().any(|side| side.resumed) && !self.is_agreed()
    }

    /// Returns true if a segment of each side has fitted one of the other, so that segments are checked.
    pub(crate) fn is_agreed(&self) -> bool {
        self.0.iter().all(|side| side.known && side.agreed)
    }

    /// Applies a segment, if it fits.
    pub(crate) fn segment(&mut self, direction: Direction, segment: &Segment) -> Fit {
        let sender = direction as usize;
        let (from, to) = (self.0[sender], self.0[1 - sender]);
        let flags = segment.tcp_flags;
        match (from.known, to.known) {
            _ if flags & RST != 0 => from.reset(&to, segment),
            _ if self.is_learning() => self.learn(sender, segment),
            // Until it is acknowledged, the answer may change: a stateless listener makes a new initial sequence
            // number for every repetition of the SYN.
            (true, true) if flags & (SYN | ACK) == SYN | ACK && !to.agreed => self.answer(sender, segment),
            (true, true) if flags & SYN != 0 => Fit::Ignored,
            (true, true) => self.established(sender, segment),
            // Before the answer there is only the SYN, its repetition, or another attempt.
            (_, false) => self.open(sender, segment),
            // Of an older connection: the sender of the SYN resets it.
            (false, true) if flags & (SYN | FIN | ACK) == ACK => Fit::Ignored,
            (false, true) => self.answer(sender, segment),
        }
    }

    /// Returns true if the side that sends in `direction` may have sent a segment at `seq` that is still in flight.
    pub(crate) fn sent(&self, direction: Direction, seq: u32) -> bool {
        let (from, to) = (self.0[direction as usize], self.0[1 - direction as usize]);
        let oldest = from.end.wrapping_sub(to.max_window.max(ACK_WINDOW));
        self.is_learning() || from.known && before(seq, from.end) && !before(seq, oldest)
    }

    /// Learns from a segment of a resumed connection. If it does not fit what is known of the other side, that is forgotten: it may
    /// have been forged.
    fn learn(&mut self, sender: usize, segment: &Segment) -> Fit {
        let (from, to) = (self.0[sender], self.0[1 - sender]);
        let (syn, ack) = (segment.tcp_flags & SYN != 0, segment.tcp_flags & ACK != 0);
        if !syn && !ack {
            return Fit::Invalid;
        }
        let mut side = match syn {
            true => Peer { resumed: true, ..Peer::of_syn(segment) },
            false => {
                let window = from.window_of(&to, segment);
                let (isn, end) = (segment.tcp_seq.wrapping_sub(1), end(segment));
                let max_window = window.max(1);
                Peer { isn, end, max_end: end, max_window, known: true, agreed: false, ..from }
            }
        };
        if !ack {
            // The first SYN of a connection, or its repetition.
            self.0[sender] = side;
            return Fit::Fits;
        }
        side.acked = segment.tcp_ack;
        if from.known && near(side.end, from.end, MAX_WINDOW) {
            // Another segment of the same side.
            side.end = later(side.end, from.end);
            side.acked = later(side.acked, from.acked);
            side.max_window = side.max_window.max(from.max_window);
        }
        // A side that has sent a SYN only has acknowledged nothing.
        let begun = to.acked == 0 && !to.agreed && to.isn.wrapping_add(1) == to.end;
        let fits = to.known
            && (begun || near(segment.tcp_seq, to.acked, to.max_window.max(ACK_WINDOW)))
            && near(segment.tcp_ack, to.end, side.max_window.max(ACK_WINDOW));
        let other = &mut self.0[1 - sender];
        if fits {
            side.agreed = true;
            other.agreed = true;
            let accepted = if begun { side.end } else { to.acked };
            side.max_end = later(side.end, accepted.wrapping_add(to.max_window));
            other.end = later(other.end, segment.tcp_ack);
            other.max_end = later(other.end, segment.tcp_ack.wrapping_add(side.max_window));
        } else {
            (other.known, other.agreed) = (false, false);
        }
        self.0[sender] = side;
        Fit::Fits
    }

    fn open(&mut self, sender: usize, segment: &Segment) -> Fit {
        if !begins(segment.tcp_flags) {
            return Fit::Invalid;
        }
        self.0[sender] = Peer::of_syn(segment);
        Fit::Fits
    }

    fn answer(&mut self, sender: usize, segment: &Segment) -> Fit {
        let peer = self.0[1 - sender];
        let acknowledges = segment.tcp_flags & ACK == 0 || peer.syn_acknowledged_by(segment.tcp_ack);
        if segment.tcp_flags & SYN == 0 || !acknowledges {
            return Fit::Invalid;
        }
        let mut side = Peer::of_syn(segment);
        side.max_end = side.end.wrapping_add(peer.max_window);
        let peer = &mut self.0[1 - sender];
        let una = if segment.tcp_flags & ACK == 0 { peer.end } else { segment.tcp_ack };
        (side.acked, side.agreed) = (una, segment.tcp_flags & ACK != 0);
        peer.max_end = una.wrapping_add(u32::from(segment.tcp_window).max(1));
        self.0[sender] = side;
        Fit::Fits
    }

    fn established(&mut self, sender: usize, segment: &Segment) -> Fit {
        let (from, to) = (self.0[sender], self.0[1 - sender]);
        // "If the ACK bit is off, drop the segment and return", RFC 9293 section 3.10.7.4.
        if segment.tcp_flags & ACK == 0 {
            return Fit::Invalid;
        }
        let (seq, mut end, ack) = (segment.tcp_seq, end(segment), segment.tcp_ack);
        if segment.tcp_fragment {
            end = later(end, earlier(from.max_end, seq.wrapping_add(MAX_SEGMENT)));
        }
        // Beyond what the receiver accepts, or an acknowledgement of what was not sent.
        let sent = if to.resumed { to.max_end } else { to.end };
        if before(from.max_end, seq) || before(sent, ack) {
            return Fit::Invalid;
        }
        // Older than the largest window, or an acknowledgement of long ago (RFC 5961, 5.2).
        let old = before(end, from.end.wrapping_sub(to.max_window.max(1)))
            || before(ack, to.end.wrapping_sub(from.max_window.max(ACK_WINDOW)));
        if old {
            return Fit::Ignored;
        }
        let window = from.window_of(&to, segment);
        let from = &mut self.0[sender];
        from.max_window = from.max_window.max(window);
        from.end = later(from.end, end);
        (from.acked, from.agreed) = (later(from.acked, ack), true);
        let to = &mut self.0[1 - sender];
        to.max_end = later(to.max_end, ack.wrapping_add(window.max(1)));
        if to.resumed {
            to.end = later(to.end, ack);
        }
        Fit::Fits
    }
}

impl Peer {
    fn of_syn(segment: &Segment) -> Self {
        let end = end(segment);
        Self {
            isn: segment.tcp_seq,
            end,
            max_end: end,
            max_window: u32::from(segment.tcp_window).max(1),
            acked: 0,
            agreed: false,
            scale: segment.tcp_wscale.unwrap_or(0).min(MAX_SCALE),
            scales: segment.tcp_wscale.is_some(),
            known: true,
            resumed: false,
        }
    }

    /// The window that this side offers to `to` with a segment.
    fn window_of(&self, to: &Self, segment: &Segment) -> u32 {
        // "Both sides MUST send Window Scale options in their <SYN> segments to enable window scaling in either
        // direction", RFC 7323 section 2.2.
        let scale = if self.scales && to.scales { self.scale } else { 0 };
        u32::from(segment.tcp_window) << scale
    }

    /// Returns true if this acknowledgement number answers this side's SYN: all of it, or less data than came with it
    /// (RFC 7413, 4.2.2).
    fn syn_acknowledged_by(&self, ack: u32) -> bool {
        !before(self.end, ack) && before(self.isn, ack)
    }

    /// Checks a reset from this side to `to`.
    fn reset(&self, to: &Peer, segment: &Segment) -> Fit {
        if (self.resumed || to.resumed) && !(self.agreed && to.agreed) {
            // It cannot be checked, so its receiver checks it.
            return Fit::Ignored;
        }
        if !self.known {
            // The answer to a SYN without a listener: it must acknowledge that SYN (RFC 9293, 3.10.7.3).
            let refused = to.known && segment.tcp_flags & ACK != 0 && to.syn_acknowledged_by(segment.tcp_ack);
            return if refused { Fit::Fits } else { Fit::Invalid };
        }
        let seq = segment.tcp_seq;
        // The receiver expects what it acknowledged, or what has passed here and not yet reached it.
        let oldest = if to.known { to.acked } else { self.isn };
        if seq == self.end || seq == oldest {
            Fit::Fits
        } else if !to.known || !before(seq, oldest) && !before(self.max_end, seq) {
            // Before the answer it may be for an older connection of the other side.
            Fit::Ignored
        } else {
            Fit::Invalid
        }
    }
}

/// The sequence number after a segment.
fn end(segment: &Segment) -> u32 {
    let phantom = u32::from(segment.tcp_flags & SYN != 0) + u32::from(segment.tcp_flags & FIN != 0);
    segment.tcp_seq.wrapping_add(segment.tcp_len).wrapping_add(phantom)
}

/// Returns true if `a` is before `b`, modulo 2^32 (RFC 9293, 3.4).
fn before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

/// Returns true if the difference is at most `distance`.
fn near(a: u32, b: u32, distance: u32) -> bool {
    (a.wrapping_sub(b) as i32).unsigned_abs() <= distance
}

fn later(a: u32, b: u32) -> u32 {
    if before(a, b) { b } else { a }
}

fn earlier(a: u32, b: u32) -> u32 {
    if before(a, b) { a } else { b }
}

#[cfg(test)]
mod tests;
