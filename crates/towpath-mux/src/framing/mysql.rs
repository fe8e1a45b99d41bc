//! MySQL packets (MySQL Internals, "Protocol Basics"): three bytes of length, a sequence number, the payload.
//!
//! A payload of 0xffffff bytes goes on in the next packet; the chain is one message. A connection that turns to TLS is
//! given back where its first record starts: after the client's SSLRequest in one direction, after the greeting in the other.
//!
//! Not supported: the compressed protocol, which only the other direction's answer switches on.

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

/// `cb[0]`: the next message may be a TLS record.
const TLS_MAY_FOLLOW: u32 = 1;

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
        let length = usize::from(*low) | usize::from(*middle) << 8 | usize::from(*high) << 16;
        // The capability flags of an SSLRequest are its first four bytes.
        if bytes.len() < 4 + length.min(4) {
            return Step::Need(4 + length.min(4));
        }
        let ssl_request = *sequence == 1 && length == SSL_REQUEST_PAYLOAD && payload[1] & CLIENT_SSL != 0;
        let greeting = *sequence == 0 && payload.first() == Some(&PROTOCOL_10);
        state.cb[0] = if ssl_request || greeting { TLS_MAY_FOLLOW } else { 0 };
    } else if state.cb[0] == TLS_MAY_FOLLOW {
        // As a packet this would be the second of its side and 66 kB or more: there is no such one.
        if matches!(bytes, [0x16, 3, 1..=4, ..]) {
            return Step::GiveBack;
        }
        state.cb[0] = 0;
    }
    if *low == 0 && *middle == 0 && *high == 0 && state.messages == 0 {
        return Step::Error(Cause::malformed("a connection that starts with an empty packet"));
    }
    PACKETS.step(bytes, state)
}
