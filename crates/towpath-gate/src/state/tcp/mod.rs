//! The part of a state that follows a TCP connection, and the lifetime that a segment gives it.
//!
//! A pure step: (what was seen, direction, segment) to (what is seen now, lifetime). It checks the sequence numbers of
//! resets only; [`window`] checks all segments, for states with [strict tracking](crate::state::Tracking::Strict).
//!
//! The word that holds what was seen is ipfw's, bit for bit (`ipfw -v` prints it): the forward side's FIN, SYN and
//! RST in bits 0 to 2, the reverse side's in bits 8 to 10, and a mark for the side whose acknowledgement was accepted
//! last. A mark above them, which ipfw does not have, stands for SYNs that were not seen ([`Tcp::assume_established`]).
//!
//! Reference: ipfw's dynamic states, `dyn_update_tcp_state`. Deviations:
//!
//! - The acknowledgement number counts only if the segment has ACK set ("If the ACK control bit is set, this field
//!   contains ...", RFC 9293 section 3.1). ipfw always reads the field, so that a repeated SYN after the SYN-ACK passes
//!   for an acknowledgement.
//! - A SYN in the forward direction on an ended connection begins another connection, as in Linux
//!   (`nf_conntrack_tcp_packet`). In ipfw the state keeps its one second.
//! - A reset of an established connection must lie in its receiver's window: with ACK in the scaled one, otherwise in the
//!   unscaled one (RFC 5961 section 3). In ipfw any reset ends the connection (`dyn_rst_check = 0`).

pub(crate) mod window;
pub(crate) mod window_table;

use crate::state::{Direction, Segment};

/// TCP flags, RFC 9293 section 3.1: no more data from the sender.
pub(crate) const FIN: u8 = 0x01;
/// Synchronize sequence numbers.
pub(crate) const SYN: u8 = 0x02;
/// Reset the connection.
pub(crate) const RST: u8 = 0x04;
/// The acknowledgement number is valid.
pub(crate) const ACK: u8 = 0x10;

/// The forward side's acknowledgement was accepted last.
pub(crate) const ACK_FWD: u32 = 0x1_0000;
/// The reverse side's acknowledgement was accepted last.
pub(crate) const ACK_REV: u32 = 0x2_0000;
/// The connection is treated as established, without a SYN that was seen. Not one of ipfw's marks.
pub(crate) const PICKED_UP: u32 = 0x4_0000;

/// The lifetime that a segment gives, by ipfw's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// `dyn_syn_lifetime`.
    Syn,
    /// `dyn_ack_lifetime`, if the acknowledgement is acceptable and it is this side's turn.
    Ack,
    /// `dyn_fin_lifetime`.
    Fin,
    /// `dyn_rst_lifetime`.
    Rst,
}

/// A row of the table: it matches when the flags seen so far, of those in `of`, are exactly `seen`.
struct Row {
    of: [u8; 2],
    seen: [u8; 2],
    life: Life,
}

const ALL: [u8; 2] = [FIN | SYN | RST; 2];

/// The first matching row applies; flags as \[forward, reverse\].
const ROWS: [Row; 8] = [
    // A reset from either side, at any time, ends the connection.
    Row { of: [RST, 0], seen: [RST, 0], life: Life::Rst },
    Row { of: [0, RST], seen: [0, RST], life: Life::Rst },
    // Opening: the first SYN, or its repetition, waits for an answer.
    Row { of: ALL, seen: [SYN, 0], life: Life::Syn },
    // Established, or about to be: the acknowledgements of both sides keep it alive.
    Row { of: ALL, seen: [SYN, SYN], life: Life::Ack },
    // Half closed: one side is done, the other may send for as long as it likes.
    Row { of: ALL, seen: [SYN | FIN, SYN], life: Life::Ack },
    Row { of: ALL, seen: [SYN, SYN | FIN], life: Life::Ack },
    // Closed by both sides: time for the last ACK.
    Row { of: ALL, seen: [SYN | FIN, SYN | FIN], life: Life::Fin },
    // Everything else did not begin here: picked up in the middle, SYN from the reverse side only, SYN and FIN at
    // once without an answer.
    Row { of: [0, 0], seen: [0, 0], life: Life::Rst },
];

/// [`ROWS`] by index: forward flags in bits 0 to 2, reverse flags in bits 3 to 5.
static LIFE: [Life; 64] = {
    let mut life = [Life::Rst; 64];
    let mut i = 0;
    while i < life.len() {
        let flags = [i as u8 & 7, i as u8 >> 3];
        let mut row = 0;
        while flags[0] & ROWS[row].of[0] != ROWS[row].seen[0]
            || flags[1] & ROWS[row].of[1] != ROWS[row].seen[1]
        {
            row += 1;
        }
        life[i] = ROWS[row].life;
        i += 1;
    }
    life
};

/// Returns true if a segment with these flags can open a connection: a SYN without flags that contradict it.
pub(crate) fn begins(flags: u8) -> bool {
    flags & (SYN | ACK | RST | FIN) == SYN
}

/// The flags and acknowledgements seen on one connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tcp {
    /// ipfw's word and [`PICKED_UP`]: flags seen forward, flags seen reverse << 8, marks.
    pub(crate) seen: u32,
    /// The last acceptable acknowledgement number of the forward and the reverse side; 0 is unset, as in ipfw.
    pub(crate) ack: [u32; 2],
}

impl Tcp {
    /// Applies a segment. Returns the lifetime to refresh with, or `None` when the state keeps its expiry.
    #[inline]
    pub(crate) fn segment(&mut self, direction: Direction, flags: u8, ack: u32) -> Option<Life> {
        self.seen |= u32::from(flags & (FIN | SYN | RST)) << (8 * direction as u32);
        let life = self.life();
        if life == Life::Ack && !self.acknowledge(direction, flags, ack) {
            return None;
        }
        Some(life)
    }

    #[inline(always)]
    fn life(&self) -> Life {
        LIFE[(self.seen & 7 | self.seen >> 5 & 0x38) as usize]
    }

    /// Returns true if both sides have sent a SYN, and the connection has not ended.
    pub(crate) fn is_established(&self) -> bool {
        self.life() == Life::Ack
    }

    /// Returns true if the segment begins another connection in the state of one that has ended. Only the side that
    /// began the first one can do so: the rule has accepted a connection in this direction.
    pub(crate) fn reopens(&self, direction: Direction, flags: u8) -> bool {
        direction == Direction::Forward && begins(flags) && self.ended()
    }

    /// Returns true if a reset ends the connection: its receiver may accept it.
    ///
    /// A reset answers a segment, with the sequence number that its receiver has acknowledged last, or follows data in flight
    /// (RFC 9293 section 3.5.2, RFC 5961 section 3.2). With ACK, it lies in the receiver's window and acknowledges what the
    /// receiver has sent. The gate knows the acknowledgement numbers. The windows are the largest that the sides can offer with
    /// their `scales`: up to 1/4 of all numbers, so that a window alone would stop few forged resets. Without ACK, the
    /// window is therefore taken as unscaled.
    pub(crate) fn accepts_reset(&self, direction: Direction, segment: &Segment, scales: [u8; 2]) -> bool {
        let (sender, receiver) = (direction as usize, 1 - direction as usize);
        let (own, expected) = (self.ack[sender], self.ack[receiver]);
        if !self.is_established() || expected == 0 {
            return true;
        }
        let window = |side: usize| u32::from(u16::MAX) << scales[side];
        let ahead = segment.tcp_seq.wrapping_sub(expected);
        let distance = segment.tcp_ack.wrapping_sub(own).cast_signed().unsigned_abs();
        if segment.tcp_flags & ACK == 0 {
            return ahead <= u32::from(u16::MAX);
        }
        ahead == 0 || ahead <= window(receiver) && (own == 0 || distance <= window(sender))
    }

    /// Treats the connection as established, although its SYNs were not seen.
    pub(crate) fn assume_established(&mut self) {
        self.seen |= u32::from(SYN) | u32::from(SYN) << 8 | PICKED_UP;
    }

    /// Returns true if the connection is treated as established since its first packet ([`Tcp::assume_established`]).
    pub(crate) fn is_picked_up(&self) -> bool {
        self.seen & PICKED_UP != 0
    }

    /// ipfw's word.
    pub(crate) fn word(&self) -> u32 {
        self.seen & !PICKED_UP
    }

    /// Returns true if a side has reset the connection.
    pub(crate) fn was_reset(&self) -> bool {
        self.seen & (u32::from(RST) | u32::from(RST) << 8) != 0
    }

    /// The connection with its directions exchanged.
    pub(crate) fn reversed(self) -> Self {
        const FLAGS: u32 = (FIN | SYN | RST) as u32;
        let flags = (self.seen & FLAGS) << 8 | self.seen >> 8 & FLAGS;
        let marks = (self.seen & ACK_FWD) << 1 | (self.seen & ACK_REV) >> 1 | self.seen & PICKED_UP;
        Self { seen: flags | marks, ack: [self.ack[1], self.ack[0]] }
    }

    /// Returns true if both sides have closed the connection, or one has reset it.
    pub(crate) fn ended(&self) -> bool {
        let fin = u32::from(FIN) | u32::from(FIN) << 8;
        self.seen & fin == fin || self.was_reset()
    }

    /// Returns true if this acknowledgement refreshes the state: it is acceptable, and the last acceptable one came
    /// from the other side. Traffic in one direction alone never prolongs a state.
    fn acknowledge(&mut self, direction: Direction, flags: u8, ack: u32) -> bool {
        if flags & ACK == 0 {
            return false;
        }
        let side = direction as usize;
        let (own, other) = (ACK_FWD << side, ACK_REV >> side);
        let last = self.ack[side];
        // Not older than the last one, modulo 2^32 (RFC 9293 section 3.4).
        if last != 0 && (ack.wrapping_sub(last) as i32) < 0 {
            return false;
        }
        self.ack[side] = ack;
        let turn = self.seen & other != 0;
        self.seen = self.seen & !other | own;
        turn
    }
}
