//! CQL frames (native_protocol_v3.spec to v5.spec, section 2): version, flags, stream, opcode, length, body.
//!
//! Version 5 starts like version 4. After the client's STARTUP and the server's answer it continues in
//! segments with checksums (native_protocol_v5.spec, section 2.3.1). There the connection leaves the mux
//! ([`Step::GiveBack`]). The first byte of a segment can look like a version, so the opcode decides. The beta
//! of version 5 has no segments.

use std::borrow::Cow;

use super::body::{End, Rule, Strip};
use super::cause::Cause;
use super::field::{Chain, Encoding, Field};
use super::{State, Step};

/// native_transport_max_frame_size (256 MiB) and the header.
const LONGEST: usize = 257 << 20;
/// Opcodes.
const STARTUP: u8 = 0x01;
const READY: u8 = 0x02;
const AUTHENTICATE: u8 = 0x03;
/// Flag USE_BETA.
const BETA: u8 = 0x10;
/// Bit of the first byte that marks a response.
const ANSWER: u8 = 0x80;

/// Value of `cb[0]` after the opcode that starts segments.
const SEGMENTS: u32 = 1;

/// Header formats of versions 1 and 2 (stream id of one byte) and 3 to 5 (two bytes).
static SHORT: Rule = frames(4, 8);
static LONG: Rule = frames(5, 9);

const fn frames(offset: usize, header: i64) -> Rule {
    Rule {
        end: End::Length(Field {
            offset,
            encoding: Encoding::Fixed { width: 4, big: true },
            mask: u64::MAX,
            shift: 0,
            scale: 1,
            adjust: header,
            relative: false,
            max_value: u64::MAX,
            chain: Chain::Single,
        }),
        min: 1,
        max: LONGEST,
        strip: Strip::Bytes(0),
        trim: 0,
        tail: Vec::new(),
        mark: 0,
        key: None,
        blanks: Cow::Borrowed(b" "),
    }
}

pub(super) fn step(bytes: &[u8], state: &mut State) -> Step {
    if state.cb[0] == SEGMENTS {
        return Step::GiveBack;
    }
    match bytes.first().map(|version| version & !ANSWER) {
        Some(1 | 2) => SHORT.step(bytes, state),
        Some(3 | 4) => LONG.step(bytes, state),
        Some(5) => {
            let step = LONG.step(bytes, state);
            if let (Step::Message(_), [version, flags, _, _, opcode, ..]) = (&step, bytes)
                && flags & BETA == 0
                && matches!((version & ANSWER, *opcode), (0, STARTUP) | (ANSWER, READY | AUTHENTICATE))
            {
                state.cb[0] = SEGMENTS;
            }
            step
        }
        _ => Step::Error(Cause::malformed("not a version of CQL's protocol (1 to 5)")),
    }
}
