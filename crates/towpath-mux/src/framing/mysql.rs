//! MySQL packets (MySQL Internals, "Protocol Basics"): three bytes of length, a sequence number, the payload.
//!
//! A payload of 0xffffff bytes continues in the next packet; the chain is one message. A connection that
//! switches to TLS leaves the mux ([`Step::GiveBack`]) at its first record: after the client's SSLRequest in one direction, after
//! the greeting in the other.
//!
//! A connection that switches to the compressed protocol leaves the mux after the handshake: at the first
//! command of a client that requested compression, and at the response to it. The server's direction does not
//! show the request, so the packet itself is examined (MySQL Internals, "Compressed Packet"): after a 7-byte
//! header it has whole packets, or their zlib or zstd form.

use std::borrow::Cow;

use super::body::{End, Rule, Strip};
use super::cause::Cause;
use super::field::{Chain, Encoding, Field};
use super::{State, Step};

/// Maximum payload of a packet: another one follows.
const FULL: u64 = 0x00ff_ffff;
/// max_allowed_packet is at most 1 GiB.
const LONGEST: usize = (1 << 30) + 4 * 65;
/// Capability flag CLIENT_SSL.
const CLIENT_SSL: u8 = 0x08;
const SSL_REQUEST_PAYLOAD: usize = 32;
/// Protocol version at the start of a server's greeting.
const PROTOCOL_10: u8 = 10;

/// CLIENT_COMPRESS in the first byte of the capability flags, CLIENT_ZSTD_COMPRESSION_ALGORITHM in the
/// fourth.
const CLIENT_COMPRESS: u8 = 0x20;
const CLIENT_ZSTD: u8 = 0x04;
/// CLIENT_PROTOCOL_41 in the second byte: the flags have four bytes.
const CLIENT_PROTOCOL_41: u8 = 0x02;
/// First byte of a server's OK packet.
const OK: u8 = 0;
/// An OK packet is the shortest plain packet that starts with three zero bytes.
const SHORTEST_OK: usize = 7;
/// Minimum length of a compressed packet: a packet header and one byte.
const SHORTEST_COMPRESSED: usize = 5;

/// `cb[0]`: the next message may be a TLS record.
const TLS_MAY_FOLLOW: u32 = 1;
/// `cb[0]`: handshake of a client that requested compression; handshake of a server.
const ASKED: u32 = 2;
const SHAKING: u32 = 3;
/// `cb[0]`: the server sent OK, the response to the first command follows.
const AGREED: u32 = 4;

static PACKETS: Rule = Rule {
    end: End::Length(Field {
        offset: 0,
        encoding: Encoding::Fixed { width: 3, big: false },
        mask: u64::MAX,
        shift: 0,
        scale: 1,
        adjust: 4,
        relative: false,
        max_value: u64::MAX,
        chain: Chain::While(FULL),
    }),
    min: 4,
    max: LONGEST,
    strip: Strip::Bytes(0),
    trim: 0,
    tail: Vec::new(),
    mark: 0,
    key: None,
    blanks: Cow::Borrowed(b" "),
};

pub(super) fn step(bytes: &[u8], state: &mut State) -> Step {
    let [low, middle, high, sequence, payload @ ..] = bytes else { return Step::Need(4) };
    if state.messages == 0 {
        let length = length(bytes);
        // The capability flags of an SSLRequest are its first four bytes.
        if bytes.len() < 4 + length.min(4) {
            return Step::Need(4 + length.min(4));
        }
        let ssl_request = *sequence == 1 && length == SSL_REQUEST_PAYLOAD && payload[1] & CLIENT_SSL != 0;
        let greeting = *sequence == 0 && payload.first() == Some(&PROTOCOL_10);
        let asked = *sequence == 1 && length >= 4 && asks_to_compress(payload);
        state.cb[0] = if ssl_request || greeting {
            TLS_MAY_FOLLOW
        } else if asked {
            ASKED
        } else {
            0
        };
    } else if state.cb[0] == TLS_MAY_FOLLOW {
        // As a packet it would be the second one of its side with 66 kB or more, which does not exist.
        if matches!(bytes, [0x16, 3, 1..=4, ..]) {
            return Step::GiveBack;
        }
        state.cb[0] = SHAKING;
    }
    // A continued chain has no header to examine.
    if state.scanned == 0 {
        match (state.cb[0], *sequence) {
            // Sequence numbers restart with each command.
            (ASKED, 0) => return begun(bytes, 0, state),
            (AGREED, _) => return begun(bytes, 1, state),
            (SHAKING, 2..) if length(bytes) > 0 => match payload.first() {
                Some(&OK) => state.cb[0] = AGREED,
                Some(_) => {}
                None => return Step::Need(5),
            },
            _ => {}
        }
    }
    if *low == 0 && *middle == 0 && *high == 0 && state.messages == 0 {
        return Step::Error(Cause::malformed("a connection that starts with an empty packet"));
    }
    PACKETS.step(bytes, state)
}

/// Capability flags of a login: its first four bytes.
fn asks_to_compress(payload: &[u8]) -> bool {
    let &[a, b, _, d, ..] = payload else { return false };
    a & CLIENT_COMPRESS != 0 || b & CLIENT_PROTOCOL_41 != 0 && d & CLIENT_ZSTD != 0
}

/// The first packet after the handshake tells whether this and all later packets are plain.
fn begun(bytes: &[u8], number: u8, state: &mut State) -> Step {
    match compressed(bytes, number) {
        Ok(true) => Step::GiveBack,
        Ok(false) => {
            state.cb[0] = 0;
            PACKETS.step(bytes, state)
        }
        Err(need) => need,
    }
}

/// Length of the payload. The header has arrived.
fn length(bytes: &[u8]) -> usize {
    bytes.iter().take(3).rev().fold(0, |length, byte| length << 8 | usize::from(*byte))
}

/// Returns true if a packet of the compressed protocol starts here whose first inner packet has this sequence
/// number.
fn compressed(bytes: &[u8], number: u8) -> Result<bool, Step> {
    let length = length(bytes);
    if length < SHORTEST_COMPRESSED {
        return Ok(false);
    }
    // At least the shortest plain packet.
    let &[_, _, _, _, a, b, c, first, second, ..] = bytes else { return Err(Step::Need(9)) };
    if [a, b, c] != [0; 3] {
        let zlib = first == 0x78 && u16::from_be_bytes([first, second]).is_multiple_of(31);
        return Ok(zlib || [first, second] == [0x28, 0xb5]);
    }
    if length < SHORTEST_OK {
        return Ok(true);
    }
    let &[_, _, _, _, _, _, _, _, _, third, sequence, ..] = bytes else { return Err(Step::Need(11)) };
    let within = usize::from(first) | usize::from(second) << 8 | usize::from(third) << 16;
    Ok(sequence == number && within > 0 && within + 4 <= length)
}
