#![allow(unsafe_code)]
//! Cache-line memory: zeroed, aligned, optionally in huge pages, with prefetch.
//!
//! The memory consists of atomic words: a thread that reads a line while another writes it reads old or new words.
//! Zeroed memory costs nothing until it is touched: on Linux it is mapped, not taken from the allocator, which writes zeroes to what it has
//! had before. The system allocates pages on the first write.

use crate::state::concurrent::sync::{AtomicU64, Ordering};

/// Words per line.
pub(crate) const WORDS: usize = 8;

/// A cache line of words.
#[repr(C, align(64))]
pub(crate) struct Line([AtomicU64; WORDS]);

impl Line {
    #[inline]
    pub(crate) fn word(&self, at: usize) -> &AtomicU64 {
        &self.0[at]
    }

    /// Prefetches the line.
    #[inline(always)]
    pub(crate) fn prefetch(&self) {
        #[cfg(all(target_arch = "x86_64", not(loom)))]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch never faults and has no effect on memory, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(self).cast()) };
        }
    }
}

/// The pages that hold the states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pages {
    /// Pages of the system's default size (4 KiB). The first touch of a page takes about a microsecond.
    #[default]
    Base,
    /// Huge pages (2 MiB) where available. Lookups among millions of states are a third faster, but the first touch
    /// of a page takes up to several milliseconds. With huge pages, call
    /// [`States::prepare`](crate::state::States::prepare) periodically outside the packet path.
    Huge,
}

/// The size of a huge page on x86-64 and most AArch64 systems.
#[cfg(not(loom))]
const HUGE: usize = 2 << 20;

/// Lines between two touches when memory is prefaulted: the smallest page size.
pub(super) const PAGE_LINES: usize = 4096 / 64;

/// An array of zeroed lines.
#[cfg(not(loom))]
pub(crate) struct Lines {
    first: std::ptr::NonNull<Line>,
    len: usize,
    /// Owns the memory.
    _mapping: Mapping,
}

#[cfg(not(loom))]
impl Lines {
    /// Allocates `len` zeroed lines.
    pub(crate) fn zeroed(len: usize, pages: Pages) -> Self {
        let bytes = len.max(1) * size_of::<Line>();
        let huge = pages == Pages::Huge && bytes >= HUGE;
        // Lines that are released together are in pages of their own, as the mapping is. A huge page needs room to align here.
        let mapping = Mapping::new(if huge { bytes + HUGE } else { bytes });
        let offset = if huge { mapping.first.align_offset(HUGE) } else { 0 };
        // SAFETY: the offset is less than a huge page, by which the mapping is longer than the lines.
        let first = unsafe { mapping.first.byte_add(offset) }.cast::<Line>();
        #[cfg(all(target_os = "linux", not(miri)))]
        if huge {
            // SAFETY: the range is inside the mapping just made, and the advice changes no contents. If the kernel
            // rejects it, the pages are small.
            let _ = unsafe {
                rustix::mm::madvise(first.as_ptr().cast(), bytes, rustix::mm::Advice::LinuxHugepage)
            };
        }
        Self { first, len, _mapping: mapping }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The line at position `at`.
    ///
    /// # Panics
    /// When there is no such line.
    #[inline]
    pub(crate) fn line(&self, at: usize) -> &Line {
        assert!(at < self.len, "no such line");
        // SAFETY: the line is inside the mapping, as asserted above.
        let line = unsafe { self.first.add(at) };
        // SAFETY: the mapping is aligned for lines, lives as long as self, and began as zeroes, which are valid
        // atomic words. All other references to it are shared.
        unsafe { line.as_ref() }
    }
}

// SAFETY: Lines owns its mapping, whose contents are atomic.
#[cfg(not(loom))]
unsafe impl Send for Lines {}

// SAFETY: shared references give access to atomic words only.
#[cfg(not(loom))]
unsafe impl Sync for Lines {}

/// Zeroed memory of its own pages.
#[cfg(not(loom))]
struct Mapping {
    first: std::ptr::NonNull<u8>,
    bytes: usize,
}

#[cfg(not(loom))]
impl Mapping {
    fn layout(bytes: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(bytes, PAGE_LINES * size_of::<Line>())
            .expect("no table is that large")
    }
}

#[cfg(all(target_os = "linux", not(loom), not(miri)))]
impl Mapping {
    fn new(bytes: usize) -> Self {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses, is not part of anything.
        let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) };
        match mapped.ok().and_then(|first| std::ptr::NonNull::new(first.cast())) {
            Some(first) => Self { first, bytes },
            None => std::alloc::handle_alloc_error(Self::layout(bytes)),
        }
    }
}

#[cfg(all(target_os = "linux", not(loom), not(miri)))]
impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is self's, and no reference outlives it.
        let _ = unsafe { rustix::mm::munmap(self.first.as_ptr().cast(), self.bytes) };
    }
}

/// Miri has no mmap(2) by system call.
#[cfg(all(any(not(target_os = "linux"), miri), not(loom)))]
impl Mapping {
    fn new(bytes: usize) -> Self {
        // SAFETY: the layout's size is not zero.
        let first = unsafe { std::alloc::alloc_zeroed(Self::layout(bytes)) };
        match std::ptr::NonNull::new(first) {
            Some(first) => Self { first, bytes },
            None => std::alloc::handle_alloc_error(Self::layout(bytes)),
        }
    }
}

#[cfg(all(any(not(target_os = "linux"), miri), not(loom)))]
impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it came from the allocator with this layout, and no reference outlives self.
        unsafe { std::alloc::dealloc(self.first.as_ptr(), Self::layout(self.bytes)) };
    }
}

/// The same for loom, whose atomics are not plain words.
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
    /// The line at position `at`, or `None`.
    #[inline(always)]
    pub(crate) fn get(&self, at: usize) -> Option<&Line> {
        if at < self.len() { Some(self.line(at)) } else { None }
    }

    /// Gives the pages that only have `lines` back to the system: the lines are zeroes from then on, or as they were. No other
    /// thread may write to them during the call.
    pub(crate) fn release(&self, lines: std::ops::Range<usize>) {
        #[cfg(all(target_os = "linux", not(loom), not(miri)))]
        {
            let page = PAGE_LINES.max(rustix::param::page_size() / size_of::<Line>());
            let lines = lines.start.div_ceil(page) * page..lines.end / page * page;
            if lines.end <= self.len() && !lines.is_empty() {
                // SAFETY: the line is inside the mapping.
                let first = unsafe { self.first.add(lines.start) };
                let bytes = lines.len() * size_of::<Line>();
                // SAFETY: the range is inside the mapping, which is anonymous memory and consists of atomic words: they may become
                // zeroes at any time. It begins and ends with a page of the system: the kernel would zero the rest of one, too.
                let _ = unsafe {
                    rustix::mm::madvise(first.as_ptr().cast(), bytes, rustix::mm::Advice::LinuxDontNeed)
                };
            }
        }
        #[cfg(not(all(target_os = "linux", not(loom), not(miri))))]
        let _ = lines;
    }

    /// Writes to every page of `lines` without changing it, so that the system allocates the pages now.
    pub(crate) fn prefault(&self, lines: std::ops::Range<usize>) {
        for at in lines.step_by(PAGE_LINES) {
            if at < self.len() {
                // Relaxed: nothing is published. It is one read-modify-write because the line may be in use. The
                // compiler must not see that it changes nothing: it would make it a load, for which the system maps a
                // shared page of zeroes, and the page would be allocated at the first write, by a packet.
                self.line(at).word(0).fetch_or(std::hint::black_box(0), Ordering::Relaxed);
            }
        }
    }
}

/// Compares the twelve 16-bit fields of three words with `tag`. Returns a bit for each that is equal.
#[inline(always)]
pub(crate) fn equal_tags(words: [u64; 3], tag: u16) -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: SSE2 is part of x86-64.
        unsafe { equal_tags_sse2(words, tag) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    equal_tags_portable(words, tag)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse2")]
#[inline]
fn equal_tags_sse2(words: [u64; 3], tag: u16) -> u32 {
    use std::arch::x86_64::{
        _mm_cmpeq_epi16, _mm_movemask_epi8, _mm_packs_epi16, _mm_set_epi64x, _mm_set1_epi16,
    };
    let [a, b, c] = words.map(u64::cast_signed);
    let tag = _mm_set1_epi16(tag.cast_signed());
    let low = _mm_cmpeq_epi16(_mm_set_epi64x(b, a), tag);
    let high = _mm_cmpeq_epi16(_mm_set_epi64x(0, c), tag);
    _mm_movemask_epi8(_mm_packs_epi16(low, high)).cast_unsigned() & 0xfff
}

#[cfg(any(all(test, not(loom)), not(target_arch = "x86_64")))]
fn equal_tags_portable(words: [u64; 3], tag: u16) -> u32 {
    let same = |at: usize| (words[at / 4] >> (at % 4 * 16)) as u16 == tag;
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
    fn lines_are_zeroed_aligned_and_distinct() {
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
            lines.prefault(0..len + 9);
        }
    }

    #[test]
    fn released_lines_are_zeroes_and_others_stay() {
        for pages in [Pages::Base, Pages::Huge] {
            let lines = Lines::zeroed(40_000, pages);
            let set = |value: u64| {
                (0..lines.len()).for_each(|at| lines.line(at).word(3).store(value, Ordering::Relaxed))
            };
            let ones =
                || (0..lines.len()).filter(|at| lines.line(*at).word(3).load(Ordering::Relaxed) == 1).count();
            for (range, whole) in
                [(0..64, 1), (1..64, 0), (0..40_000, 625), (100..10_000, 154), (39_990..50_000, 0)]
            {
                set(1);
                lines.release(range.clone());
                let released = lines.len() - ones();
                let wanted = if cfg!(miri) { 0 } else { whole * PAGE_LINES };
                assert_eq!(released, wanted, "{range:?}");
                let outside = (0..lines.len()).filter(|at| !range.contains(at));
                assert!(
                    outside.into_iter().all(|at| lines.line(at).word(3).load(Ordering::Relaxed) == 1),
                    "{range:?}"
                );
            }
        }
    }

    #[test]
    fn tag_comparisons_agree() {
        for word in [0, 0x0001_0000_8000_7fff, 0x8001_8000_ffff_0001, u64::MAX] {
            for tag in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                for words in [[word, 0, 1], [7, word, word], [0x8000, !word, word << 16]] {
                    assert_eq!(equal_tags(words, tag), equal_tags_portable(words, tag), "{words:x?} {tag:x}");
                }
            }
        }
        assert_eq!(equal_tags([5 << 32, 5, 5 << 48], 5), 0b1000_0001_0100);
    }

    #[test]
    #[should_panic(expected = "no such line")]
    fn no_line_beyond_the_end() {
        Lines::zeroed(4, Pages::Base).line(4);
    }
}
