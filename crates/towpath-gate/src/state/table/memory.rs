#![allow(unsafe_code)]
//! Memory by the cache line: zeroed, aligned, perhaps in huge pages, and fetched ahead of its use.
//!
//! Nothing in it is more than an atomic word, so that whoever reads a line that another thread writes reads old words
//! or new ones and nothing else. Zeroed memory costs nothing until it is touched: the allocator takes it fresh from
//! the system, which gives pages as they are written.

use crate::state::concurrent::sync::{AtomicU64, Ordering};

/// Words of a line.
pub(crate) const WORDS: usize = 8;

/// A cache line of words.
#[repr(C, align(64))]
pub(crate) struct Line([AtomicU64; WORDS]);

impl Line {
    #[inline]
    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        &self.0[at]
    }

    /// Has the line on its way to the cache.
    #[inline(always)]
    pub(crate) fn prefetch(&self) {
        #[cfg(all(target_arch = "x86_64", not(loom)))]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch reads nothing and faults never, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(self).cast()) };
        }
    }
}

/// Which pages the memory is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pages {
    /// Those of the system (4 KiB): the first touch of one takes about a microsecond.
    #[default]
    Base,
    /// Huge ones (2 MiB) where there are any: lookups among millions of states are a third faster, but the first touch
    /// of one takes up to some milliseconds. For those who call [`States::prepare`](crate::state::States::prepare) outside
    /// the packets' path.
    Huge,
}

/// Bytes of a huge page of x86-64 and, most often, of AArch64.
#[cfg(not(loom))]
const HUGE: usize = 2 << 20;

/// How far apart the touches of fresh memory are: the smallest page.
const PAGE_LINES: usize = 4096 / 64;

/// Zeroed lines.
#[cfg(not(loom))]
pub(crate) struct Lines {
    first: std::ptr::NonNull<Line>,
    len: usize,
    raw: std::ptr::NonNull<u8>,
    layout: std::alloc::Layout,
}

#[cfg(not(loom))]
impl Lines {
    /// `len` lines of zeroes.
    pub(crate) fn zeroed(len: usize, pages: Pages) -> Self {
        use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
        let bytes = len.max(1) * size_of::<Line>();
        let huge = pages == Pages::Huge && bytes >= HUGE;
        // The allocator aligns to little and zeroes for nothing, or aligns to much and writes the zeroes: so room for
        // the alignment is asked for, and made here.
        let align = if huge { HUGE } else { align_of::<Line>() };
        let layout = Layout::from_size_align(bytes + align, 16).expect("no table is that large");
        // SAFETY: the layout's size is not zero.
        let raw = unsafe { alloc_zeroed(layout) };
        let Some(raw) = std::ptr::NonNull::new(raw) else { handle_alloc_error(layout) };
        let offset = raw.align_offset(align);
        // SAFETY: the offset is less than `align`, by which the allocation is longer than the lines.
        let first = unsafe { raw.byte_add(offset) }.cast::<Line>();
        #[cfg(target_os = "linux")]
        if huge {
            // SAFETY: the range is inside the allocation that was just made, and the advice changes no contents.
            // That it is not taken is no fault: the pages are small then.
            let _ = unsafe {
                rustix::mm::madvise(first.as_ptr().cast(), bytes, rustix::mm::Advice::LinuxHugepage)
            };
        }
        Self { first, len, raw, layout }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// # Panics
    /// When there is no such line.
    #[inline]
    pub(crate) fn line(&self, at: usize) -> &Line {
        assert!(at < self.len, "no such line");
        // SAFETY: the line is inside the allocation, as just asserted.
        let line = unsafe { self.first.add(at) };
        // SAFETY: the allocation is aligned for lines, lives as long as self, and began as zeroes, which are atomic
        // words; everybody else has shared references to it only.
        unsafe { line.as_ref() }
    }
}

#[cfg(not(loom))]
impl Drop for Lines {
    fn drop(&mut self) {
        // SAFETY: `raw` came from the allocator with this layout, and no reference outlives self.
        unsafe { std::alloc::dealloc(self.raw.as_ptr(), self.layout) };
    }
}

// SAFETY: a Lines owns its allocation, and what is in it is atomic.
#[cfg(not(loom))]
unsafe impl Send for Lines {}

// SAFETY: shared references give out atomic words and nothing else.
#[cfg(not(loom))]
unsafe impl Sync for Lines {}

/// The same for the model checker, whose atomics are no plain words.
#[cfg(loom)]
pub(crate) struct Lines(Box<[Line]>);

#[cfg(loom)]
impl Lines {
    pub(crate) fn zeroed(len: usize, _: Pages) -> Self {
        Self((0..len).map(|_| Line(std::array::from_fn(|_| AtomicU64::new(0)))).collect())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn line(&self, at: usize) -> &Line {
        &self.0[at]
    }
}

impl Lines {
    /// The line at this place, if there is one.
    #[inline(always)]
    pub(crate) fn get(&self, at: usize) -> Option<&Line> {
        if at < self.len() { Some(self.line(at)) } else { None }
    }

    /// Writes to every page of `lines` without a change, so that the system gives them now and not later.
    pub(crate) fn touch(&self, lines: std::ops::Range<usize>) {
        for at in lines.step_by(PAGE_LINES) {
            if at < self.len() {
                // Relaxed: nothing is published; but it has to be one operation, as the line may be in use, and one that the
                // compiler does not see to change nothing: it would make a load of it, for which the system gives a page of
                // zeroes that all share, and the page itself at the first write, in a packet's time.
                self.line(at).word(0).fetch_or(std::hint::black_box(0), Ordering::Relaxed);
            }
        }
    }
}

/// Which of the twelve lanes of 16 bits in three words are `lane`: a bit each.
#[inline(always)]
pub(crate) fn same_lanes(words: [u64; 3], lane: u16) -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: SSE2 is part of x86-64.
        unsafe { same_lanes_sse2(words, lane) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    same_lanes_anywhere(words, lane)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse2")]
#[inline]
fn same_lanes_sse2(words: [u64; 3], lane: u16) -> u32 {
    use std::arch::x86_64::{
        _mm_cmpeq_epi16, _mm_movemask_epi8, _mm_packs_epi16, _mm_set_epi64x, _mm_set1_epi16,
    };
    let [a, b, c] = words.map(u64::cast_signed);
    let lane = _mm_set1_epi16(lane.cast_signed());
    let low = _mm_cmpeq_epi16(_mm_set_epi64x(b, a), lane);
    let high = _mm_cmpeq_epi16(_mm_set_epi64x(0, c), lane);
    _mm_movemask_epi8(_mm_packs_epi16(low, high)).cast_unsigned() & 0xfff
}

#[cfg(any(all(test, not(loom)), not(target_arch = "x86_64")))]
fn same_lanes_anywhere(words: [u64; 3], lane: u16) -> u32 {
    let same = |at: usize| (words[at / 4] >> (at % 4 * 16)) as u16 == lane;
    (0..12).map(|at| u32::from(same(at)) << at).sum()
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} lines", self.len())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn lines_are_zero_aligned_and_apart() {
        for (len, pages) in [(1, Pages::Base), (100, Pages::Base), (40_000, Pages::Huge)] {
            let lines = Lines::zeroed(len, pages);
            for at in [0, len / 2, len - 1] {
                assert_eq!(std::ptr::from_ref(lines.line(at)).addr() % 64, 0);
                for word in 0..WORDS {
                    assert_eq!(lines.line(at).word(word).swap(7, Ordering::Relaxed), 0, "{at} {word}");
                }
                lines.line(at).word(0).store(0, Ordering::Relaxed);
                (1..WORDS).for_each(|word| lines.line(at).word(word).store(0, Ordering::Relaxed));
                lines.line(at).prefetch();
            }
            lines.touch(0..len + 9);
        }
    }

    #[test]
    fn lanes_are_compared_alike_everywhere() {
        for word in [0, 0x0001_0000_8000_7fff, 0x8001_8000_ffff_0001, u64::MAX] {
            for lane in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                for words in [[word, 0, 1], [7, word, word], [0x8000, !word, word << 16]] {
                    assert_eq!(
                        same_lanes(words, lane),
                        same_lanes_anywhere(words, lane),
                        "{words:x?} {lane:x}"
                    );
                }
            }
        }
        assert_eq!(same_lanes([5 << 32, 5, 5 << 48], 5), 0b1000_0001_0100);
    }

    #[test]
    #[should_panic(expected = "no such line")]
    fn no_line_beyond_the_end() {
        Lines::zeroed(4, Pages::Base).line(4);
    }
}
