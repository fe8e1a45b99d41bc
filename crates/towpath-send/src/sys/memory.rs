//! Memory to send from: private memory in parts with one owner each, and shared memory mapped for reading.

use std::ffi::c_void;
use std::io;
use std::marker::PhantomData;
use std::mem::{ManuallyDrop, forget};
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::slice;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::Part;
use super::free::{self, Free, Place, Taken};

/// Size of a huge page; also the alignment of transparent ones (x86-64, and arm64 with pages of 4 KiB).
const HUGE: usize = 2 << 20;
const PAGE: usize = 4096;

/// The kind of pages that back memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Ordinary pages.
    Ordinary,
    /// Reserved huge pages (MAP_HUGETLB).
    Huge,
    /// Ordinary memory with MADV_HUGEPAGE; the kernel may back it with huge pages.
    Transparent,
}

/// Mapped memory, unmapped with its last reference. Pages that the kernel still sends from stay allocated.
#[derive(Debug)]
struct Mapping {
    base: NonNull<c_void>,
    len: usize,
    /// Memory owned by other code of the process; not unmapped.
    foreign: bool,
}

// SAFETY: a mapping is plain memory without thread affinity; `Slot` and `Region` define the access rules.
unsafe impl Send for Mapping {}
// SAFETY: as above; `Mapping` itself gives no access.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(base: *mut c_void, len: usize) -> io::Result<Self> {
        let base = NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len, foreign: false })
    }

    fn anonymous(len: usize, flags: MapFlags) -> io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel selects.
        let base = unsafe {
            mmap_anonymous(null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | flags)
        }?;
        Self::new(base, len)
    }

    fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: the range is the whole mapping, and MADV_HUGEPAGE does not change its contents.
        Ok(unsafe { madvise(self.base.as_ptr(), self.len, advice) }?)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.foreign {
            return;
        }
        // SAFETY: mapped by this crate; all users of a part hold an `Arc`, so none is left.
        let done = unsafe { munmap(self.base.as_ptr(), self.len) };
        debug_assert!(done.is_ok(), "{done:?}");
    }
}

/// Private memory in parts of equal length, with the list of free parts. The owner of this value takes parts; a part that is dropped, on
/// any thread, is free again.
#[derive(Debug)]
pub(crate) struct Slots {
    area: Arc<Area>,
    taken: Taken,
}

#[derive(Debug)]
struct Area {
    mapping: Mapping,
    /// Offset of the first part, and the length of each.
    start: usize,
    len: usize,
    free: Free,
}

/// A part of private memory with exclusive access.
#[derive(Debug)]
pub(crate) struct Slot {
    /// Each part holds a reference to its area, which `take` and `give` move: an atomic increment would cost more than the rest of
    /// `take`.
    area: ManuallyDrop<Arc<Area>>,
    index: u32,
}

impl Slots {
    /// Allocates `count` parts of `len` bytes, rounded up to whole pages; with `huge` in huge pages if available.
    pub(crate) fn allocate(count: usize, len: usize, huge: bool) -> io::Result<(Self, Pages)> {
        // No sum may overflow: parts are cut by these numbers, not by the mapping.
        let invalid = io::ErrorKind::InvalidInput;
        let len = len.max(1).checked_next_multiple_of(PAGE).ok_or(invalid)?;
        let total = count.checked_mul(len).filter(|total| *total > 0).ok_or(invalid)?;
        let count = u32::try_from(count).ok().filter(|count| *count < free::MOST).ok_or(invalid)?;
        u32::try_from(len).map_err(|_| invalid)?;
        let (mapping, pages) = if huge {
            let whole = total.checked_next_multiple_of(HUGE).ok_or(invalid)?;
            match Mapping::anonymous(whole, MapFlags::HUGETLB | MapFlags::POPULATE) {
                Ok(mapping) => (mapping, Pages::Huge),
                Err(_) => {
                    let aligned = whole.checked_add(HUGE).ok_or(invalid)?;
                    let mapping = Mapping::anonymous(aligned, MapFlags::empty())?;
                    let pages = mapping.advise(Advice::LinuxHugepage).map(|()| Pages::Transparent);
                    (mapping, pages.unwrap_or(Pages::Ordinary))
                }
            }
        } else {
            let mapping = Mapping::anonymous(total, MapFlags::empty())?;
            // Fails only on a kernel without huge pages, which does not need it.
            let _ = mapping.advise(Advice::LinuxNoHugepage);
            (mapping, Pages::Ordinary)
        };
        let start = match pages {
            Pages::Transparent => mapping.base.as_ptr().align_offset(HUGE),
            _ => 0,
        };
        let (free, taken) = Free::all(count);
        let area = Arc::new(Area { mapping, start, len, free });
        // One reference for each part: see `Slot`.
        (0..count).for_each(|_| forget(area.clone()));
        Ok((Self { area, taken }, pages))
    }

    /// Length of each part in bytes.
    pub(crate) fn len(&self) -> usize {
        self.area.len
    }

    /// Takes a free part. Returns `None` if all are taken.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<Slot> {
        let index = self.area.free.take(&mut self.taken)?;
        // SAFETY: `allocate` forgot one reference for each part, and `Free` gives this part with its reference to this caller alone.
        let area = unsafe { Arc::from_raw(Arc::as_ptr(&self.area)) };
        Some(Slot { area: ManuallyDrop::new(area), index })
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        for _ in 0..self.area.free.close(&mut self.taken) {
            // SAFETY: the reference of a free part, which can no longer be taken; `self.area` is a separate reference.
            unsafe { Arc::decrement_strong_count(Arc::as_ptr(&self.area)) }
        }
    }
}

impl Slot {
    /// Length in bytes.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.area.len
    }

    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `allocate` cuts the mapping into parts that do not overlap, `Free` gives each index to one `Slot` at a time, and this one
        // is borrowed, so nothing writes. Fresh anonymous memory is zeroed.
        unsafe { slice::from_raw_parts(self.start(), self.area.len) }
    }

    #[inline]
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and this one is borrowed mutably, so there are no other accesses.
        unsafe { slice::from_raw_parts_mut(self.start(), self.area.len) }
    }

    #[inline]
    fn start(&self) -> *mut u8 {
        let offset = self.area.start + self.index as usize * self.area.len;
        self.area.mapping.base.as_ptr().cast::<u8>().wrapping_add(offset)
    }
}

impl Drop for Slot {
    #[inline]
    fn drop(&mut self) {
        let given = self.area.free.place(self.index).is_some_and(Place::give);
        if !given {
            // SAFETY: the part's own reference, which `give` did not pass on; it is not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.area) }
        }
    }
}

/// Shared memory, mapped for reading or borrowed. Its contents are opaque and may change at any time.
#[derive(Clone, Debug)]
pub struct Region(Arc<Mapping>);

impl Region {
    /// Maps the first `len` bytes of `fd` (a memfd, a file of tmpfs) for reading.
    ///
    /// # Errors
    /// Errors of mmap(2) and fstat(2); InvalidInput if `fd` is shorter than `len`. Seal a descriptor whose size may shrink
    /// (F_SEAL_SHRINK): sending from truncated memory fails with EFAULT, and reading it raises SIGBUS.
    pub fn map(fd: &OwnedFd, len: usize) -> io::Result<Self> {
        let size = u64::try_from(rustix::fs::fstat(fd.as_fd())?.st_size).unwrap_or(0);
        if len == 0 || size < len as u64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("a region of {len} bytes, of a descriptor that has {size}"),
            ));
        }
        // SAFETY: a new mapping, at an address of the kernel's choice, for reading.
        let base = unsafe { mmap(null_mut(), len, ProtFlags::READ, MapFlags::SHARED, fd, 0) }?;
        Ok(Self(Arc::new(Mapping::new(base, len)?)))
    }

    /// Borrowed memory of this process. It is neither mapped nor unmapped by the region.
    ///
    /// # Safety
    /// The bytes must be readable until the region and all buffers made of it are dropped. The owner may write them meanwhile, because
    /// no Rust reference to them is created.
    pub unsafe fn foreign(bytes: NonNull<[u8]>) -> Self {
        Self(Arc::new(Mapping { base: bytes.cast(), len: bytes.len(), foreign: true }))
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Returns true if the length is 0; a mapped region is never empty.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// A part to send; `None` if it is not within the region.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Option<Part<'_>> {
        offset.checked_add(len).filter(|end| *end <= self.0.len)?;
        let iov_base = self.0.base.as_ptr().wrapping_byte_add(offset);
        Some(Part(libc::iovec { iov_base, iov_len: len }, PhantomData))
    }

    /// Copies bytes at `at` as they are at that moment. Leaves `into` unchanged if they are not within the region.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) {
        let Some(part) = self.part(offset, into.len()) else { return };
        let base = part.0.iov_base.cast::<u8>();
        let whole = if base.cast::<u64>().is_aligned() { into.len() / 8 * 8 } else { 0 };
        let (words, rest) = into.split_at_mut(whole);
        for (at, word) in words.chunks_exact_mut(8).enumerate() {
            let from = base.cast::<u64>().wrapping_add(at);
            // SAFETY: as below, and aligned, because the first one is.
            let value = unsafe { from.read_volatile() };
            word.copy_from_slice(&value.to_ne_bytes());
        }
        for (at, byte) in rest.iter_mut().enumerate() {
            let from = base.wrapping_add(whole + at);
            // SAFETY: `part` checked the bounds, and the mapping is readable. Volatile: another process may write it.
            *byte = unsafe { from.read_volatile() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn borrowed_regions_are_read_in_place_and_not_unmapped() {
        let mut kept: Vec<u8> = (0..100).collect();
        // SAFETY: `kept` is not modified until the region is dropped.
        let region = unsafe { Region::foreign(NonNull::from(&mut kept[1..])) };
        let mut copy = [0; 20];
        region.copy_out(70, &mut copy);
        assert_eq!(copy[..], (71..91).collect::<Vec<u8>>());
        assert!(region.part(0, 99).is_some() && region.part(0, 100).is_none());
        drop(region);
        assert_eq!(kept[99], 99);
        // SAFETY: the length is 0.
        let none = unsafe { Region::foreign(NonNull::from(&mut [])) };
        assert!(none.is_empty() && none.part(0, 0).is_some());
    }

    #[test]
    fn the_last_slot_unmaps_the_area() {
        // Number of parts that are taken when `Slots` is dropped; one of the three was given back before.
        for out in 0..=3 {
            let (mut slots, _) = Slots::allocate(3, 1, false).unwrap();
            let area = Arc::downgrade(&slots.area);
            drop(slots.take());
            let mut taken: Vec<_> = std::iter::from_fn(|| slots.take()).take(out).collect();
            assert_eq!((taken.len(), area.strong_count()), (out, 4));
            drop(slots);
            assert_eq!(area.strong_count(), out);
            while let Some(slot) = taken.pop() {
                assert!(slot.bytes().iter().all(|byte| *byte == 0));
                drop(slot);
                assert_eq!(area.strong_count(), taken.len());
            }
        }
    }

    #[test]
    fn parts_are_given_while_the_area_is_dropped() {
        for _ in 0..200 {
            let (mut slots, _) = Slots::allocate(64, 1, false).unwrap();
            let area = Arc::downgrade(&slots.area);
            let taken: Vec<_> = std::iter::from_fn(|| slots.take()).collect();
            let giver = std::thread::spawn(move || drop(taken));
            drop(slots);
            giver.join().unwrap();
            assert_eq!(area.strong_count(), 0);
        }
    }
}
