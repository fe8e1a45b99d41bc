//! MySQL packets (MySQL Internals, "Protocol Basics"): three bytes of length, a sequence number, the payload.
//!
//! A payload of 0xffffff bytes goes on in the next packet; the chain is one message. A connection that turns to TLS is
//! given back where its first record starts: after the client's SSLRequest in one direction, after the greeting in the other.
//!
//! One that turns to the compressed protocol is given back there too, since its packets are no messages. That happens
//! behind the handshake: with the first command of a client that asked for it, and with the answer to the first command.
//! A server's direction does not say whether the client asked; so the packet itself is looked at (MySQL Internals,
//! "Compressed Packet"): it holds whole packets behind a 7-byte header, or what zlib or zstd made of them.

use super::body::{End, Rule, Strip};
use super::cause::Cause;
use super::field::{Chain, Encoding, Field};
use super::{State, Step};

/// The longest payload of one packet: more follows.
const FULL: u64 = 0x00ff_ffff;
/// max_allowed_packet can be set up to 1 GiB.
const LONGEST: usize = (1 << 30) + 4 * 65;
/// CLIENT_SSL of the capability flags.
const CLIENT_SSL: u8 = 0x08;
const SSL_REQUEST_PAYLOAD: usize = 32;
/// The protocol version that a server's greeting starts with.
const PROTOCOL_10: u8 = 10;

/// CLIENT_COMPRESS, in the first byte of the capability flags, and CLIENT_ZSTD_COMPRESSION_ALGORITHM, in the fourth.
const CLIENT_COMPRESS: u8 = 0x20;
const CLIENT_ZSTD: u8 = 0x04;
/// CLIENT_PROTOCOL_41 in the second byte: there are four of them.
const CLIENT_PROTOCOL_41: u8 = 0x02;
/// The first byte of a server's OK.
const OK: u8 = 0;
/// The shortest plain packet that begins with three zeroes is an OK.
const SHORTEST_OK: usize = 7;
/// A compressed packet has at least a packet's header and a byte in it.
const SHORTEST_COMPRESSED: usize = 5;

/// `cb[0]`: the next message may be a TLS record.
const TLS_MAY_FOLLOW: u32 = 1;
/// A client's handshake, with compression asked for; a server's handshake.
const ASKED: u32 = 2;
const SHAKING: u32 = 3;
/// A server said OK: the answer to the first command follows.
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
        // As a packet this would be the second of its side and 66 kB or more: there is no such one.
        if matches!(bytes, [0x16, 3, 1..=4, ..]) {
            return Step::GiveBack;
        }
        state.cb[0] = SHAKING;
    }
    // Where a chain goes on there is no packet to look at.
    if state.scanned == 0 {
        match (state.cb[0], *sequence) {
            // Numbers begin anew with a command.
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

/// The capability flags of a login, its first four bytes.
fn asks_to_compress(payload: &[u8]) -> bool {
    let &[a, b, _, d, ..] = payload else { return false };
    a & CLIENT_COMPRESS != 0 || b & CLIENT_PROTOCOL_41 != 0 && d & CLIENT_ZSTD != 0
}

/// The first packet behind the handshake, which is plain or not; those behind it are the same.
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

/// The payload's length; the header is there.
fn length(bytes: &[u8]) -> usize {
    bytes.iter().take(3).rev().fold(0, |length, byte| length << 8 | usize::from(*byte))
}

/// Whether a packet of the compressed protocol stands here, whose first packet within has this number.
fn compressed(bytes: &[u8], number: u8) -> Result<bool, Step> {
    let length = length(bytes);
    if length < SHORTEST_COMPRESSED {
        return Ok(false);
    }
    // As long as the shortest plain packet of that length.
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
