//! Mappings of shared memory. Only this file accesses it.
//!
//! Two views exist, and neither creates a reference to memory that another process may write: [`Words`] gives
//! atomics, [`Payload`] copies. The one exception is [`Payload::lent`], the payload of a frame that the engine has
//! lent to this process: the memory is sealed against every writer but the engine, and the engine does not write
//! lent frames (docs/book/src/reference/threat-model.md, "Stable payloads").
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::{
    asm,
    x86_64::{_MM_HINT_T0, _mm_prefetch},
};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::slice;
#[cfg(not(loom))]
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

#[cfg(not(loom))]
use crate::reaper::Teardown;
use crate::shm::sync::AtomicU64;

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;
/// Longest part of a payload that is prefetched; the hardware prefetcher covers the rest.
const PREFETCH: usize = 2048;
/// Largest page size that a mapping is aligned to.
const MAX_PAGE: usize = 2 << 20;
/// f_type of hugetlbfs in fstatfs(2) (linux/magic.h).
const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;

/// Writers of a mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Only this process writes it.
    Own,
    /// Only the engine writes it; it is sealed. Lent frames may be borrowed.
    Lent,
    /// Another process may write it at any time: load and copy, never borrow.
    Foreign,
}

/// Purpose of a prefetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    /// Takes the line from all other processors.
    Write,
}

/// Prefetches the cache line at `line`. A hint; no operation on architectures other than x86-64.
#[inline]
fn prefetch(line: *const u8, what_for: Use) {
    #[cfg(target_arch = "x86_64")]
    match what_for {
        // SAFETY: a prefetch returns no value and does not fault, for any address.
        Use::Read => unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) },
        // The intrinsic for writing prefetches for reading unless the program is built for newer processors.
        // Processors without the instruction execute it as a no-op (Intel SDM, PREFETCHW).
        // SAFETY: as above; it changes no register, flag or byte of memory.
        Use::Write => unsafe {
            asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
        },
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (line, what_for);
}

/// Returns true if the memory is in huge pages (hugetlbfs). st_blksize does not tell: it is as large for ordinary
/// memory with transparent huge pages, which can be mapped at any length and address.
pub(crate) fn in_huge_pages(fd: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(rustix::fs::fstatfs(fd)?.f_type as u32 == HUGETLBFS_MAGIC)
}

/// An address range, reserved until it is dropped.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// Larger than the mapping if that must start at a huge page boundary. None only during the drop.
    reserved: Option<Reserved>,
    access: Access,
    /// Unmaps the range together with other memory; `None`: the dropping thread unmaps it.
    #[cfg(not(loom))]
    teardown: Option<Arc<Teardown>>,
}

/// A reserved address range.
#[derive(Debug)]
struct Reserved(NonNull<u8>, usize);

// SAFETY: an address range is not bound to a thread.
unsafe impl Send for Reserved {}
// SAFETY: a shared reference gives no access to the memory.
unsafe impl Sync for Reserved {}
// SAFETY: the mapping is memory, not bound to a thread; all accesses use the views below.
unsafe impl Send for Mapping {}
// SAFETY: through a shared reference, the views only load, store atomically, or read memory without writers.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd`, `times` times in a row, so that a message across the end is contiguous.
    fn new(fd: BorrowedFd<'_>, len: usize, times: usize, access: Access) -> io::Result<Self> {
        let total = len.checked_mul(times).filter(|t| *t > 0).ok_or(io::ErrorKind::InvalidInput)?;
        // Huge pages are mapped at multiples of their size.
        let page = usize::try_from(rustix::fs::fstat(fd)?.st_blksize).unwrap_or(0);
        let align = page.clamp(4096, MAX_PAGE).next_power_of_two();
        // The kernel maps whole huge pages for any length (mmap(2)): beyond the reservation, over other mappings.
        if page > 4096 && in_huge_pages(fd)? && (page > MAX_PAGE || !len.is_multiple_of(page)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let room = if align > 4096 { total.checked_add(align) } else { Some(total) };
        let room = room.ok_or(io::ErrorKind::InvalidInput)?;
        let reserve = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: without an address hint, mmap replaces no existing mapping.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), room, ProtFlags::empty(), reserve) }?;
        let reserved = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let ahead = reserved.as_ptr().align_offset(align).min(room - total);
        let start = NonNull::new(reserved.as_ptr().wrapping_add(ahead)).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Self {
            start,
            len: total,
            reserved: Some(Reserved(reserved, room)),
            access,
            #[cfg(not(loom))]
            teardown: None,
        };
        let prot = match access {
            Access::Lent | Access::Foreign => ProtFlags::READ,
            Access::Own => ProtFlags::READ | ProtFlags::WRITE,
        };
        for i in 0..times {
            // `mapping` owns [start, start + total), so `at` is inside one allocation.
            let at = start.as_ptr().wrapping_add(i * len).cast();
            // SAFETY: the replaced range is part of the reservation above, which no other code knows yet.
            unsafe { mmap(at, len, prot, MapFlags::SHARED | MapFlags::FIXED, fd, 0) }?;
        }
        Ok(mapping)
    }

    /// Returns the address of `len` bytes at `offset`.
    ///
    /// # Panics
    /// The range is not inside the mapping.
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset <= self.len && len <= self.len - offset,
            "{offset}+{len} is outside of the mapping of {} bytes",
            self.len
        );
        self.start.as_ptr().wrapping_add(offset)
    }

    /// Prefetches the cache lines of `len` bytes at `offset`, as far as they are inside.
    #[inline]
    fn prefetch(&self, offset: usize, len: usize, what_for: Use) {
        let end = self.len.min(offset.saturating_add(len));
        for at in (offset..end).step_by(LINE_BYTES) {
            prefetch(self.start.as_ptr().wrapping_add(at), what_for);
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        #[cfg(not(loom))]
        if let (Some(reserved), Some(teardown)) = (self.reserved.take(), &self.teardown) {
            teardown.add(reserved);
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: `Mapping::new` reserved the range. Every view borrows from the owner of the mapping, which gives the
        // range away only in its own drop.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), self.1) };
    }
}

/// Memory as an array of atomic words: headers, entries, records, positions.
#[derive(Debug)]
pub(crate) struct Words {
    #[cfg(not(loom))]
    mapping: Mapping,
    #[cfg(loom)]
    heap: Box<[AtomicU64]>,
}

#[cfg(not(loom))]
impl Words {
    /// Maps `bytes` (a multiple of the page) of `fd`. The caller has verified the size of `fd`.
    pub(crate) fn map(fd: BorrowedFd<'_>, bytes: usize, access: Access) -> io::Result<Self> {
        Ok(Self { mapping: Mapping::new(fd, bytes, 1, access)? })
    }

    /// Unmaps with the other parts of `teardown`.
    pub(crate) fn reap(&mut self, teardown: &Arc<Teardown>) {
        self.mapping.teardown = Some(teardown.clone());
    }

    /// Returns the word at `index`. A read-only mapping permits loads only.
    ///
    /// # Panics
    /// The word is outside of the memory.
    pub(crate) fn word(&self, index: usize) -> &AtomicU64 {
        let at = self.mapping.at(index * 8, 8).cast::<AtomicU64>();
        // SAFETY: in bounds by `at`; aligned, because mappings are page-aligned and the offset is a multiple of 8;
        // lives as long as `self`. All accesses are atomic, whatever another process writes.
        unsafe { &*at }
    }

    /// Returns `N` words at `index`.
    ///
    /// # Panics
    /// The range is not inside the memory.
    pub(crate) fn line<const N: usize>(&self, index: usize) -> &[AtomicU64; N] {
        let at = self.mapping.at(index * 8, N * 8).cast::<[AtomicU64; N]>();
        // SAFETY: as in `word`; an array of atomics has the layout of its elements.
        unsafe { &*at }
    }
}

#[cfg(not(loom))]
impl Words {
    /// Prefetches the cache line at `index`. No operation outside of the memory.
    #[inline]
    pub(crate) fn prefetch(&self, index: usize, what_for: Use) {
        self.mapping.prefetch(index * 8, 8, what_for);
    }
}

#[cfg(not(loom))]
impl Words {
    /// Borrows the first `len` bytes at `index`, of a frame that is lent to this process.
    ///
    /// # Panics
    /// The range is outside of the memory, or the memory is not the engine's.
    pub(crate) fn lent(&self, index: usize, len: usize) -> &[u8] {
        assert!(self.mapping.access == Access::Lent);
        let at = self.mapping.at(index * 8, len);
        // SAFETY: as in `Payload::lent`.
        unsafe { slice::from_raw_parts(at, len) }
    }
}

#[cfg(loom)]
impl Words {
    pub(crate) fn map(_: BorrowedFd<'_>, bytes: usize, _: Access) -> io::Result<Self> {
        Ok(Self::heap(bytes / 8))
    }

    /// Words of a model: loom's atomics instead of shared memory.
    pub(crate) fn heap(words: usize) -> Self {
        Self { heap: (0..words).map(|_| AtomicU64::new(0)).collect() }
    }

    pub(crate) fn prefetch(&self, _: usize, _: Use) {}

    pub(crate) fn word(&self, index: usize) -> &AtomicU64 {
        &self.heap[index]
    }

    pub(crate) fn line<const N: usize>(&self, index: usize) -> &[AtomicU64; N] {
        self.heap[index..index + N].try_into().expect("N words")
    }
}

/// A payload area, mapped twice in a row.
#[derive(Debug)]
pub(crate) struct Payload {
    mapping: Mapping,
    size: usize,
}

impl Payload {
    /// Maps `bytes` (a multiple of the page) of `fd` twice in a row.
    ///
    /// With [`Access::Lent`], the caller has verified that `fd` is sealed against every writer but the engine;
    /// [`Payload::lent`] relies on it.
    pub(crate) fn map(fd: BorrowedFd<'_>, bytes: usize, access: Access) -> io::Result<Self> {
        Ok(Self { mapping: Mapping::new(fd, bytes, 2, access)?, size: bytes })
    }

    /// Maps a one-shot message, once. With [`Access::Lent`], the caller has verified that it is sealed against all
    /// writers.
    pub(crate) fn map_once(fd: BorrowedFd<'_>, bytes: usize, access: Access) -> io::Result<Self> {
        Ok(Self { mapping: Mapping::new(fd, bytes, 1, access)?, size: bytes })
    }

    /// Unmaps with the other parts of `teardown`.
    #[cfg(not(loom))]
    pub(crate) fn reap(&mut self, teardown: &Arc<Teardown>) {
        self.mapping.teardown = Some(teardown.clone());
    }

    /// Prefetches the first bytes of a message of `len` bytes at `offset`.
    #[inline]
    pub(crate) fn prefetch(&self, offset: usize, len: usize, what_for: Use) {
        self.mapping.prefetch(offset, len.min(PREFETCH), what_for);
    }

    /// Borrows memory of this process for writing.
    ///
    /// # Panics
    /// The range is outside or longer than the area, or the memory is not this process's.
    pub(crate) fn bytes_mut(&mut self, offset: usize, len: usize) -> &mut [u8] {
        assert!(self.mapping.access == Access::Own && len <= self.size);
        let at = self.mapping.at(offset, len);
        // SAFETY: in bounds by `at`; only this process writes the memory. The exclusive borrow of `self` excludes
        // other views, and a range not longer than the area does not overlap its own mirror image.
        unsafe { slice::from_raw_parts_mut(at, len) }
    }

    /// Borrows the payload of a frame that is lent to this process.
    ///
    /// # Panics
    /// The range is outside of the area, or the memory is not the engine's.
    pub(crate) fn lent(&self, offset: usize, len: usize) -> &[u8] {
        assert!(self.mapping.access == Access::Lent);
        let at = self.mapping.at(offset, len);
        // SAFETY: in bounds by `at`; the memory is sealed so that only the engine can write it, and the engine,
        // which is trusted in this one point, does not write a lent frame (see the module documentation).
        unsafe { slice::from_raw_parts(at, len) }
    }

    /// Appends a copy of `len` bytes that another process may change meanwhile. The caller uses only the copy.
    ///
    /// # Panics
    /// The range is outside of the area.
    pub(crate) fn copy_out(&self, offset: usize, len: usize, into: &mut Vec<u8>) {
        let from = self.mapping.at(offset, len);
        into.reserve(len);
        let (start, to) = (into.len(), into.spare_capacity_mut().as_mut_ptr().cast());
        // SAFETY: `at` has checked `len` bytes at `from`, and `into` has room for as many after what it holds; it is in this process's
        // own memory, so they do not overlap.
        unsafe { copy(from, to, len) };
        // SAFETY: those bytes are written now.
        unsafe { into.set_len(start + len) };
    }
}

/// Copies `len` bytes that another process may be changing. To the compiler this is not an access to them: it neither assumes that they
/// stay as they are, nor reads them again.
///
/// # Safety
/// `from` can be read and `to` written for `len` bytes, and they do not overlap.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's; the direction flag is clear at the beginning of every asm block (the Rust Reference, "Inline assembly").
    unsafe {
        asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags),
        );
    }
}

/// Copies `len` bytes that another process may be changing, with volatile reads: eight bytes at a time if `from` is aligned.
///
/// # Safety
/// `from` can be read and `to` written for `len` bytes, and they do not overlap.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    let words = if from.addr().is_multiple_of(8) { len / 8 } else { 0 };
    for at in 0..words {
        // SAFETY: the caller's, and `from` is aligned; volatile because the memory may change at any time, and any bytes are a valid u64.
        let word = unsafe { from.cast::<u64>().wrapping_add(at).read_volatile() };
        // SAFETY: the caller's.
        unsafe { to.cast::<u64>().wrapping_add(at).write_unaligned(word) };
    }
    for at in words * 8..len {
        // SAFETY: as above, for a byte.
        let byte = unsafe { from.wrapping_add(at).read_volatile() };
        // SAFETY: the caller's.
        unsafe { to.wrapping_add(at).write(byte) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::shm::sys;

    #[test]
    fn the_mirror_is_the_same_memory() {
        let fd = sys::memfd("mirror", 8192).unwrap();
        let mut area = Payload::map(fd.as_fd(), 8192, Access::Own).unwrap();
        area.bytes_mut(8190, 4).copy_from_slice(b"abcd");
        assert_eq!(area.bytes_mut(0, 2), b"cd");
        let mut out = Vec::new();
        area.copy_out(8189, 6, &mut out);
        assert_eq!(out, b"\0abcd\0");
        area.copy_out(8184, 13, &mut out);
        assert_eq!(out, b"\0abcd\0\0\0\0\0\0\0abcd\0\0\0", "appended after the existing bytes");
        let before = out.clone();
        area.copy_out(16384, 0, &mut out);
        assert_eq!(out, before);
        let reader = Payload::map(fd.as_fd(), 8192, Access::Lent).unwrap();
        assert_eq!(reader.lent(8190, 4), b"abcd");
    }

    #[towpath_testenv::needs(hugetlb)]
    #[test]
    fn part_of_a_huge_page_is_not_mapped() {
        let fd = sys::tests::hugetlb(4 << 20);
        assert!(in_huge_pages(fd.as_fd()).unwrap());
        assert!(!in_huge_pages(sys::memfd("ordinary", 4096).unwrap().as_fd()).unwrap());
        // Refused before the kernel is asked for huge pages, so the test needs no free ones.
        for len in [4096, (2 << 20) - 4096, (2 << 20) + 4096] {
            for access in [Access::Lent, Access::Own] {
                let refused = Words::map(fd.as_fd(), len, access).unwrap_err();
                assert_eq!(refused.kind(), io::ErrorKind::InvalidInput, "{len} bytes: {refused}");
                let refused = Payload::map(fd.as_fd(), len, access).unwrap_err();
                assert_eq!(refused.kind(), io::ErrorKind::InvalidInput, "{len} bytes: {refused}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "outside")]
    fn outside_is_a_panic_not_a_read() {
        let fd = sys::memfd("bounds", 4096).unwrap();
        let words = Words::map(fd.as_fd(), 4096, Access::Foreign).unwrap();
        words.word(512);
    }
}
