#![allow(unsafe_code)]
//! Memory limit: reads of random cache lines, with as many in flight as a burst has.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::flows::Random;

const LINE: usize = 64;
/// Reads in flight.
const FLIGHT: usize = 16;

/// Returns the reads per second of random cache lines in `bytes` bytes of huge pages.
pub(crate) fn random_reads(bytes: usize, time: Duration) -> Result<f64> {
    let bytes = bytes.next_multiple_of(2 << 20);
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address chosen by the kernel overlaps no other.
    let base = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) };
    let base = base.context("mapping memory")?;
    // SAFETY: the range is the mapping created above; the advice does not change its contents.
    unsafe { madvise(base, bytes, Advice::LinuxHugepage) }.context("asking for huge pages")?;
    let first = base.cast::<u64>();
    // SAFETY: the mapping has this length, is page-aligned, zeroed and not shared, and is unmapped after the last use.
    let words = unsafe { std::slice::from_raw_parts_mut(first, bytes / 8) };
    words.iter_mut().step_by(512).for_each(|word| *word = 1);
    let rate = measure(words, time);
    // SAFETY: the mapping is unchanged, and `words` is not used any more.
    unsafe { munmap(base, bytes) }.context("unmapping memory")?;
    Ok(rate)
}

fn measure(words: &[u64], time: Duration) -> f64 {
    let (lines, mut random) = ((words.len() * 8 / LINE) as u32, Random(7));
    let (start, mut reads, mut sum) = (Instant::now(), 0_u64, 0_u64);
    while start.elapsed() < time {
        for _ in 0..256 {
            let at: [usize; FLIGHT] = std::array::from_fn(|_| random.below(lines) as usize * (LINE / 8));
            at.iter().for_each(|&at| prefetch(&words[at]));
            sum = at.iter().fold(sum, |sum, &at| sum.wrapping_add(words[at]));
        }
        reads += 256 * FLIGHT as u64;
    }
    black_box(sum);
    reads as f64 / start.elapsed().as_secs_f64()
}

#[inline]
fn prefetch(word: &u64) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch has no effect on memory and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(word).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    black_box(word);
}

/// Resident memory of this process in bytes.
pub(crate) fn resident() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/statm").context("reading /proc/self/statm")?;
    let pages = status.split_whitespace().nth(1).context("/proc/self/statm is short")?;
    Ok(pages.parse::<u64>()? * 4096)
}
