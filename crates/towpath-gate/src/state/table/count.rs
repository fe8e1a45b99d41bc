//! Counts of packets and bytes in one word.

/// Bytes in the low bits, packets above. A packet has less than 2^17 bytes: 2^19 threads at once could not carry a
/// count from the high mark to overflow.
pub(super) const BYTE_BITS: u32 = 37;
const COUNT_HIGH: u64 = 1 << (BYTE_BITS - 1) | 1 << 63;

/// The increment of a count by one packet.
#[inline]
pub(crate) fn one_packet(bytes: u32) -> u64 {
    1 << BYTE_BITS | u64::from(bytes)
}

/// The count of several packets.
pub(crate) fn count_of(packets: u64, bytes: u64) -> u64 {
    packets << BYTE_BITS | bytes
}

/// The count of several packets, if a word has room for it and as much again.
pub(crate) fn small_count([packets, bytes]: [u64; 2]) -> Option<u64> {
    let small = packets >> (63 - BYTE_BITS) == 0 && bytes >> (BYTE_BITS - 1) == 0;
    small.then(|| count_of(packets, bytes))
}

/// Returns true if the counts must be moved soon.
#[inline]
pub(crate) fn is_count_high(count: u64) -> bool {
    count & COUNT_HIGH != 0
}

/// Packets and bytes of a count.
pub(crate) fn unpack_count(count: u64) -> [u64; 2] {
    [count >> BYTE_BITS, count & ((1 << BYTE_BITS) - 1)]
}
