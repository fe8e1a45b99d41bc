//! Random numbers for `prob`.

/// A splitmix64 generator: small, and repeatable from its seed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Random(u64);

impl Random {
    /// Creates the generator of walker number `walker`.
    pub(super) fn new(seed: u64, walker: u64) -> Self {
        Self(seed ^ 0x9e37_79b9_7f4a_7c15 ^ walker.wrapping_mul(0xd6e8_feb8_6659_fd93))
    }

    /// Returns 31 random bits.
    pub(super) fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 33) as u32
    }
}
