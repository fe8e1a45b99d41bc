//! General concurrent maps with the same keys as the state table: lookups of existing keys.

use std::hash::{BuildHasher, RandomState};
use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use towpath_gate::state::{Ends, Flow};

use crate::flows::{Family, Random, flow};
use crate::pin;
use crate::raw::say;
use crate::side::Side;

/// Names of the maps.
pub(crate) const MAPS: [&str; 3] = ["papaya", "scc", "dashmap"];

/// A key of 16 bytes, as packed by the state table. With a value of 48 bytes it has the size of a state.
type Key = [u64; 2];
type Value = [u64; 6];

/// A hash as fast as the state table's, so that the maps are compared: two folded multiplications with a secret.
#[derive(Clone)]
struct Fold([u64; 2]);

struct Folding {
    secret: [u64; 2],
    hash: u64,
}

impl BuildHasher for Fold {
    type Hasher = Folding;

    fn build_hasher(&self) -> Folding {
        Folding { secret: self.0, hash: 0 }
    }
}

impl std::hash::Hasher for Folding {
    fn finish(&self) -> u64 {
        self.hash
    }

    fn write(&mut self, bytes: &[u8]) {
        for word in bytes.chunks_exact(8) {
            self.write_u64(u64::from_le_bytes(word.try_into().unwrap_or_default()));
        }
    }

    fn write_u64(&mut self, word: u64) {
        let wide = u128::from(self.hash ^ word ^ self.secret[0]) * u128::from(self.secret[1] | 1);
        self.hash = (wide >> 64) as u64 ^ wide as u64;
    }

    fn write_usize(&mut self, _: usize) {}
}

/// Returns the lookups per second, measured in a separate process with huge or normal pages.
pub(crate) fn rate(map: &str, flows: u32, huge: bool, cpu: usize, time: Duration) -> Result<f64> {
    let words = ["map", map, &flows.to_string(), &time.as_millis().to_string(), &cpu.to_string()];
    // This setting makes glibc's allocator request huge pages (GNU C Library manual, Memory Allocation Tunables).
    let tunables = format!("glibc.malloc.hugetlb={}", u8::from(huge));
    let mut side = Side::start(&words.map(str::to_owned), &[("GLIBC_TUNABLES", tunables)])?;
    let rate = side.number()?;
    side.finish()?;
    Ok(rate)
}

pub(crate) fn side(map: &str, flows: u32, time: Duration, cpu: usize) -> Result<()> {
    pin::to(cpu)?;
    let random = RandomState::new();
    let hasher = Fold([random.hash_one(1), random.hash_one(2)]);
    let rate = match map {
        "papaya" => {
            let map = papaya::HashMap::builder().capacity(flows as usize).hasher(hasher).build();
            let pin = map.pin();
            (0..flows).for_each(|n| _ = pin.insert(key(n), [u64::from(n); 6]));
            measure(flows, time, |key| pin.get(key).copied())
        }
        "scc" => {
            let map = scc::HashIndex::with_capacity_and_hasher(flows as usize, hasher);
            (0..flows).for_each(|n| _ = map.insert_sync(key(n), [u64::from(n); 6]));
            measure(flows, time, |key| map.peek_with(key, |_, value| *value))
        }
        "dashmap" => {
            let map = dashmap::DashMap::with_capacity_and_hasher(flows as usize, hasher);
            (0..flows).for_each(|n| _ = map.insert(key(n), [u64::from(n); 6]));
            measure(flows, time, |key| map.get(key).map(|value| *value))
        }
        _ => bail!("there is no map {map}"),
    };
    say(&rate.to_string())
}

fn key(n: u32) -> Key {
    let Flow { ends, src_port, dst_port, .. } = flow(Family::V4, n);
    let Ends::V4(src, dst) = ends else { return [0; 2] };
    [
        u64::from(u32::from(src)) << 32 | u64::from(u32::from(dst)),
        u64::from(src_port) << 16 | u64::from(dst_port),
    ]
}

fn measure(flows: u32, time: Duration, get: impl Fn(&Key) -> Option<Value>) -> f64 {
    let mut random = Random(1);
    let start = Instant::now();
    let mut lookups = 0_u64;
    while start.elapsed() < time {
        for _ in 0..4096 {
            // Reads one word of the value, as a state lookup reads its rule.
            black_box(get(&key(random.below(flows))).map(|value| value[0]));
        }
        lookups += 4096;
    }
    lookups as f64 / start.elapsed().as_secs_f64()
}
