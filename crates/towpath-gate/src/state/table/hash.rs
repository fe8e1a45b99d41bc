//! The keyed hash of a flow's key.
//!
//! What: a strongly universal hash over 64-bit words, `h(x) = (b + Σ aᵢ·xᵢ mod 2^128) >> 64` with secret random
//! 128-bit `aᵢ`, followed by a fixed bijection that spreads its linear structure over all bits. More than four words
//! are compressed to two first: the sum of the products of each pair, `Σ (x₂ᵢ+k₂ᵢ)·(x₂ᵢ₊₁+k₂ᵢ₊₁) mod 2^128` with
//! secret random 64-bit `kᵢ`, which takes half the multiplications.
//!
//! Invariant: for two different keys chosen without knowledge of the secret, the 64-bit results collide with
//! probability 2^-64 (long keys: 2^-63, because the sums of products may collide, too), and share any of n buckets
//! with probability about 1/n. So a peer cannot compute offline addresses and ports that crowd one bucket. Neither
//! the secret nor a hash leaves the process.
//!
//! References: Dietzfelbinger 1996, "Universal hashing and k-wise independent random variables via integer arithmetic
//! without primes"; Black, Halevi, Krawczyk, Krovetz, Rogaway 1999, "UMAC" (NH); Thorup 2015, "High Speed Hashing for
//! Integers and Strings", section 3.2. The final mix is one round of MurmurHash3's fmix64.

use std::fmt;

/// The longest key, in words.
const WORDS: usize = 8;

/// Keys of up to this many words are hashed without compression.
const FEW: usize = 4;

/// The secret.
#[derive(Clone)]
pub(crate) struct Secret {
    a: [u128; FEW],
    /// For the compression of longer keys.
    pairs: [u64; WORDS],
    b: u128,
}

impl Secret {
    /// Derives the secret from `seed`, which should be unpredictable to network peers.
    pub(crate) fn new(seed: u64) -> Self {
        let mut seed = seed;
        let mut wide = || u128::from(splitmix(&mut seed)) << 64 | u128::from(splitmix(&mut seed));
        let a = std::array::from_fn(|_| wide());
        let halves: [u128; WORDS / 2] = std::array::from_fn(|_| wide());
        let pairs = std::array::from_fn(|at| (halves[at / 2] >> (at % 2 * 64)) as u64);
        Self { a, pairs, b: wide() }
    }

    /// The hash of a key of `N` words.
    #[inline]
    pub(crate) fn hash<const N: usize>(&self, words: &[u64; N]) -> u64 {
        const { assert!(N <= WORDS) };
        if N <= FEW {
            return self.finish(words);
        }
        let sum = self.compress(words);
        self.finish(&[(sum >> 64) as u64, sum as u64])
    }

    /// Compresses a long key to two words.
    #[inline]
    fn compress<const N: usize>(&self, words: &[u64; N]) -> u128 {
        let mut sum = 0_u128;
        for (pair, secret) in words.chunks(2).zip(self.pairs.chunks_exact(2)) {
            let other = pair.get(1).copied().unwrap_or(0);
            let [x, y] = [pair[0].wrapping_add(secret[0]), other.wrapping_add(secret[1])];
            sum = sum.wrapping_add(u128::from(x) * u128::from(y));
        }
        sum
    }

    #[inline]
    fn finish<const N: usize>(&self, words: &[u64; N]) -> u64 {
        let mut sum = self.b;
        for (a, &word) in self.a.iter().zip(words) {
            sum = sum.wrapping_add(a.wrapping_mul(u128::from(word)));
        }
        mix((sum >> 64) as u64)
    }
}

/// A bijection after which every bit depends on at least half of all bits.
#[inline(always)]
fn mix(h: u64) -> u64 {
    let h = (h ^ h >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    h ^ h >> 33
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// One step of SplitMix64 (Steele, Lea, Flood 2014), which expands the seed.
fn splitmix(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *seed;
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of keys in the fullest of 4096 buckets, by low and by high bits of the hash.
    fn fullest(keys: impl Iterator<Item = [u64; 2]>, secret: &Secret) -> (usize, usize) {
        let (mut low, mut high) = (vec![0; 4096], vec![0; 4096]);
        for key in keys {
            let hash = secret.hash(&key);
            low[(hash & 4095) as usize] += 1;
            high[(hash >> 52) as usize] += 1;
        }
        (low.into_iter().max().unwrap(), high.into_iter().max().unwrap())
    }

    #[test]
    fn regular_keys_are_distributed() {
        for seed in 0..8 {
            let secret = Secret::new(seed);
            // 4096 keys into 4096 buckets: a random function's fullest bucket holds 6 or 7; 12 has a probability
            // below 1e-5.
            for shift in [0, 16, 32, 48] {
                let (low, high) = fullest((0..4096).map(|i| [i << shift, 7]), &secret);
                assert!(low < 12 && high < 12, "seed {seed} shift {shift}: {low} {high}");
            }
        }
    }

    #[test]
    fn hashes_depend_on_the_seed() {
        assert_ne!(Secret::new(1).hash(&[1, 2]), Secret::new(2).hash(&[1, 2]));
    }
}
