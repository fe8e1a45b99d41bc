//! DNP3 link frames (IEEE 1815, 9.2): a header of ten bytes, then blocks of 16 bytes, each followed by a
//! checksum.

use super::Step;
use super::cause::Cause;

const START: [u8; 2] = [0x05, 0x64];
const HEADER: usize = 10;
/// Bytes of the header that the length field includes: control, destination, source.
const COUNTED_HEADER: usize = 5;
const BLOCK: usize = 16;
const CHECKSUM: usize = 2;

pub(super) fn step(bytes: &[u8]) -> Step {
    if !bytes.iter().zip(&START).all(|(byte, start)| byte == start) {
        return Step::Error(Cause::malformed("a DNP3 frame that does not start with 05 64"));
    }
    let Some(length) = bytes.get(2).map(|length| usize::from(*length)) else { return Step::Need(3) };
    let Some(data) = length.checked_sub(COUNTED_HEADER) else {
        return Step::Error(Cause::BadLength { length: length as i64, least: COUNTED_HEADER as u64 });
    };
    Step::from(HEADER + data + CHECKSUM * data.div_ceil(BLOCK))
}
