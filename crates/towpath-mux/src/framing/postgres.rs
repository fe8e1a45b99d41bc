//! PostgreSQL messages (PostgreSQL documentation, "Message Formats"): type, length including itself, body.
//!
//! The first messages of a client have no type; their first byte is the 0 of a length below 16 MiB. A server
//! answers an encryption request with a single byte. A connection that becomes encrypted there leaves
//! the mux ([`Step::GiveBack`]).

use super::cause::Cause;
use super::{State, Step};

/// MAX_STARTUP_PACKET_LENGTH of libpq/pqcomm.h.
const LONGEST_STARTUP: u64 = 10_000;
/// PQ_LARGE_MESSAGE_LIMIT of libpq/libpq.h: MaxAllocSize - 1.
const LONGEST: u64 = 0x3fff_fffe;
/// NEGOTIATE_GSS_CODE and the cancel and SSL request codes (libpq/pqcomm.h).
const GSS_REQUEST: u32 = 80_877_104;
const CANCEL_REQUEST: u32 = 80_877_102;

/// First byte of a TLS handshake record (RFC 8446, 5.1).
const TLS_HANDSHAKE: u8 = 0x16;
const FRONTEND_TYPES: &[u8] = b"BCDEFHPQSXcdfp";
const BACKEND_TYPES: &[u8] = b"123ACDEGHIKNRSTVWZcdnstv";

/// `cb[0]` of a client: the last message requested GSS encryption.
const GSS_ASKED: u32 = 1;
/// `cb[0]` of a server: a typed message was seen; encryption was accepted.
const TYPED: u32 = 1;
const ENCRYPTED: u32 = 2;

/// Client to server.
pub(super) fn frontend(bytes: &[u8], state: &mut State) -> Step {
    match bytes.first() {
        // A TLS handshake record; no message type has this value.
        Some(&TLS_HANDSHAKE) => Step::GiveBack,
        Some(0) => startup(bytes, state),
        Some(kind) if FRONTEND_TYPES.contains(kind) => typed(bytes),
        _ => Step::Error(Cause::malformed("not a message type of a PostgreSQL client")),
    }
}

/// Server to client.
pub(super) fn backend(bytes: &[u8], state: &mut State) -> Step {
    let Some(kind) = bytes.first() else { return Step::Need(1) };
    match state.cb[0] {
        ENCRYPTED => return Step::GiveBack,
        TYPED => {}
        _ if state.midstream => {
            // One more byte distinguishes the answer from a message, whose length starts with 0 or a small
            // number.
            if let (b'S' | b'N' | b'G', None) = (kind, bytes.get(1)) {
                return Step::Need(2);
            }
            state.cb[0] = TYPED;
        }
        // A client may start with TLS, and the server answers in TLS (PostgreSQL 17, "Direct SSL").
        _ if *kind == TLS_HANDSHAKE => return Step::GiveBack,
        _ => match kind {
            b'N' => return Step::from(1),
            b'S' | b'G' => {
                state.cb[0] = ENCRYPTED;
                return Step::from(1);
            }
            _ => state.cb[0] = TYPED,
        },
    }
    if BACKEND_TYPES.contains(kind) {
        typed(bytes)
    } else {
        Step::Error(Cause::malformed("not a message type of a PostgreSQL server"))
    }
}

/// StartupMessage, CancelRequest, SSLRequest, GSSENCRequest: length including itself, code.
fn startup(bytes: &[u8], state: &mut State) -> Step {
    let [a, b, c, d, e, f, g, h, ..] = *bytes else { return Step::Need(8) };
    let (length, code) = (u64::from(u32::from_be_bytes([a, b, c, d])), u32::from_be_bytes([e, f, g, h]));
    let known = matches!(code >> 16, 2 | 3) || (CANCEL_REQUEST..=GSS_REQUEST).contains(&code);
    // A GSS token instead of a startup message: the server accepted encryption. Unknown codes are left to the
    // server.
    if !known && state.cb[0] == GSS_ASKED {
        return Step::GiveBack;
    }
    state.cb[0] = if code == GSS_REQUEST { GSS_ASKED } else { 0 };
    bounded(length, 0, 8, LONGEST_STARTUP)
}

fn typed(bytes: &[u8]) -> Step {
    let [_, a, b, c, d, ..] = *bytes else { return Step::Need(5) };
    bounded(u64::from(u32::from_be_bytes([a, b, c, d])), 1, 4, LONGEST)
}

/// A message of `length` bytes after `before` bytes.
fn bounded(length: u64, before: u64, least: u64, max: u64) -> Step {
    if length < least {
        return Step::Error(Cause::BadLength { length: (length + before) as i64, least: least + before });
    }
    if length > max {
        return Step::Error(Cause::TooBig { length: Some(length + before), max: max + before });
    }
    Step::from((length + before) as usize)
}
