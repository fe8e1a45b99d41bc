//! The ones' complement sum of 16-bit words (RFC 1071), its update (RFC 1624), and the checksum of an IPv4 header.

/// The ones' complement sum of `bytes` as big-endian words, added to `initial`. An odd last byte is padded with zero.
pub fn sum(bytes: &[u8], initial: u16) -> u16 {
    // Summing multiples of 16 bits in native byte order gives the same sum with its bytes swapped (RFC 1071, 2.B). Eight
    // independent accumulators let the compiler use vectors; 32-bit words in 64-bit accumulators cannot overflow below 128 GiB.
    let mut accumulators = [0_u64; 8];
    let mut chunks = bytes.chunks_exact(32);
    for chunk in &mut chunks {
        for (accumulator, word) in accumulators.iter_mut().zip(chunk.chunks_exact(4)) {
            *accumulator += u64::from(u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
        }
    }
    let mut total: u64 = accumulators.iter().map(|part| (part & 0xffff_ffff) + (part >> 32)).sum();
    let mut pairs = chunks.remainder().chunks_exact(2);
    for pair in &mut pairs {
        total += u64::from(u16::from_ne_bytes([pair[0], pair[1]]));
    }
    if let [last] = pairs.remainder() {
        total += u64::from(u16::from_ne_bytes([*last, 0]));
    }
    fold(u64::from(u16::from_be(fold(total))) + u64::from(initial))
}

/// The checksum after `old` bytes that it covers became `new`: equation 3 of RFC 1624, `HC' = ~(~HC + ~m + m')`.
///
/// Both begin at an even offset of the summed bytes and have the same length.
///
/// # Panics
///
/// Panics if the lengths differ.
pub fn update(checksum: u16, old: &[u8], new: &[u8]) -> u16 {
    assert_eq!(old.len(), new.len(), "old and new bytes must have the same length");
    !fold(u64::from(!checksum) + u64::from(!sum(old, 0)) + u64::from(sum(new, 0)))
}

/// Computes and stores the checksum of the IPv4 header at `network`. A header that is not entirely in the frame is unchanged.
pub fn fill_ip4(frame: &mut [u8], network: usize) {
    let len = frame.get(network).map_or(0, |first| usize::from(first & 0x0f) * 4);
    let Some(header) = frame.get_mut(network..network + len).filter(|header| header.len() >= 20) else {
        return;
    };
    header[10..12].fill(0);
    let checksum = !sum(header, 0);
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
}

fn fold(mut total: u64) -> u16 {
    while total >> 16 != 0 {
        total = (total & 0xffff) + (total >> 16);
    }
    total as u16
}
